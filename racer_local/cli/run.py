"""`racer-local run`: answers to a file of requests, safe against any interruption."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from racer_local import models
from racer_local.cli.messages import progress, report, tell
from racer_local.cli.options import add_model, check_output, context_from_args, from_args, model_from_args
from racer_local.cli.parsing import INTERRUPTED, SOME_FAILED, add_command
from racer_local.cli.process import interruptible
from racer_local.config import DEFAULT_MAX_TOKENS, ContextConfig, DraftConfig, ModelConfig, SamplingConfig
from racer_local.errors import ConfigError

if TYPE_CHECKING:
    from racer_local.offline.journal import Journal
    from racer_local.offline.lines import Line
    from racer_local.offline.work import Done, Record
    from racer_local.session import Session

STREAM = Path("-")
DESCRIPTION = """\
Answer the requests of a JSONL file, one a line: {"prompt": "..."} or {"messages": [...]} with further fields as in
OpenAI's chat completions (max_tokens, temperature, seed, stop, tools, response_format, ...), or OpenAI's batch shape.
Lines that begin alike are answered one after the other, so that what they share, a system prompt say, is read once;
the output is in the order of the input."""
NOTES = """\
output: a line for each of the input with id, text, finish_reason, usage, stats and error; for OpenAI's batch shape
  also custom_id and response. A line that can't be answered is a record with an error, and does not end the run.

interruptions: answers are written to OUT.jsonl.part as they come, and are on the disk when the next one begins. After a
  kill, a power cut or Ctrl-C the same command with --resume goes on; lines that were changed since are answered
  again. OUT.jsonl is there when all is done; where some lines are errors the journal stays beside it, and --resume
  answers those that were mended. With --exact its texts are those of a run that was not interrupted;
  without it a near tie may fall the other way."""
EXAMPLES = (
    ("racer-local run questions.jsonl -o answers.jsonl -m my-model.gguf", "all lines, with a bar and the time left"),
    ("racer-local run questions.jsonl -o answers.jsonl -m my-model.gguf --resume", "on from where it stopped"),
    ("racer-local run - -o - -m smollm2-135m --quiet < questions.jsonl", "from stdin to stdout"),
)


def add_parser(commands: Any) -> None:
    what = "answer a file of requests, resumable"
    parser = add_command(commands, "run", help=what, description=DESCRIPTION, examples=EXAMPLES, notes=NOTES)
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="the requests; - is stdin")
    what = "the answers; - is stdout, in the order of the input, which can't be resumed"
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.jsonl", help=what)
    what = "tokens of an answer that does not say it; default: %(default)s"
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=what)
    parser.add_argument("--system", metavar="TEXT", help="a system message for lines that have none")
    parser.add_argument("--raw", action="store_true", help="prompts are texts to go on with, without a chat template")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there of an earlier run")
    what = "stop when more than N lines could not be answered; default: never"
    parser.add_argument("--max-errors", type=int, metavar="N", help=what)
    add_model(parser, ContextConfig, DraftConfig, SamplingConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # All that can be wrong without the model is found before it is loaded.
    if args.max_tokens < 1 or (args.max_errors is not None and args.max_errors < 0):
        raise ConfigError("--max-tokens must be at least 1, and --max-errors at least 0")
    if args.resume and args.overwrite:
        raise ConfigError("--resume goes on and --overwrite begins anew; leave out one of them")
    if args.output == STREAM and (args.resume or args.overwrite):
        raise ConfigError("what goes to stdout can't be resumed or replaced; name a file with -o")
    if args.output != STREAM:
        check_output(args.output, replaced=True)
        _spare_requests(args)
    path = models.find(args.model)
    context, config = context_from_args(args, path), model_from_args(args)
    draft, sampling = from_args(DraftConfig, args), from_args(SamplingConfig, args)
    if draft.corpora:
        from racer_local.corpus.shelf import check_indexes

        check_indexes(draft.corpora)
    lines = _lines(args)
    broken = sum(line.error is not None for line in lines)
    if args.max_errors is not None and broken > args.max_errors:
        first = next(line for line in lines if line.error)
        raise ConfigError(
            f"{broken} of {len(lines)} lines can't be answered (--max-errors {args.max_errors}); the first is line "
            f"{first.number}: {first.error}"
        )
    if args.resume and (code := _whole(args.output, lines)) is not None:
        return code
    settings = {
        "model": [path.name, path.stat().st_size],
        "options": [dict(config.options), dict(context.options)],
        "context": {name: getattr(context, name) for name in ("n_ctx", "flash_attn", "kv_type")},
        "draft": {name: getattr(draft, name) for name in ("draft", "exact")},
        "sampling": {**vars(sampling), "logit_bias": dict(sampling.logit_bias)},
        "defaults": [args.max_tokens, args.system, args.raw],
    }
    with interruptible() as cancelled, _sink(args.output, settings, args, lines) as sink:
        from racer_local.offline.work import Done

        left = [line for line in lines if line.asked and not sink.has(line)]
        failed = sum(line.asked is not None and sink.has(line) and sink.failed(line) for line in lines)
        done, started = Done(errors=broken + failed), perf_counter()
        if len(left) < len(lines) - broken:
            tell(f"{len(lines) - broken - len(left)} of {len(lines)} lines were answered before")
        if left and not _too_many(args, done):
            with _opened(path, config, context, draft) as session:
                _check_template(session, left)
                _answer(args, session, left, len(lines), sink, sampling, cancelled, done)
        if not (cancelled() or _too_many(args, done)):
            sink.finish()
    _summarize(len(lines), len(left) + broken, done, perf_counter() - started)
    if _too_many(args, done):
        tell(f"stopped: {done.errors} lines could not be answered (--max-errors {args.max_errors})")
    elif cancelled():
        tell("interrupted" + ("" if args.output == STREAM else "; the same command with --resume goes on"))
        return INTERRUPTED
    return SOME_FAILED if done.errors else 0


def _spare_requests(args: argparse.Namespace) -> None:
    """Raises ConfigError where the requests lie in a file that will be written."""
    from racer_local.offline.journal import Journal

    for path in Journal.files(args.output):
        if path.exists() and args.input.exists() and path.samefile(args.input):
            raise ConfigError(f"the answers would take the place of the requests in {args.input}; name another file")


def _whole(output: Path, lines: Sequence[Line]) -> int | None:
    """The exit code where all lines were answered by a run that has ended; None where there is no such output."""
    from racer_local.offline.journal import Journal

    real, part, _ = Journal.files(output)
    if not real.is_file() or part.exists():
        return None
    with open(real, "rb") as file:
        if sum(1 for _ in file) != len(lines):
            return None
    tell(f"all {len(lines)} lines were answered before")
    return 0


def _too_many(args: argparse.Namespace, done: Done) -> bool:
    return args.max_errors is not None and done.errors > args.max_errors


@contextmanager
def _opened(path: Path, config: ModelConfig, context: ContextConfig, draft: DraftConfig) -> Iterator[Session]:
    from racer_local.llama import Model
    from racer_local.session import Session

    with Model(path, config) as model, Session(model, context, draft, notify=tell) as session:
        for note in session.notes:
            tell(f"note: {note}")
        yield session


def _check_template(session: Session, lines: Sequence[Line]) -> None:
    """Raises ConfigError where there are chats and the model knows none."""
    from racer_local.wire.answers import ChatAnswers

    if not session.model.chat_template and any(line.kind is ChatAnswers for line in lines):
        raise ConfigError(
            f"{session.model.path.name} carries no chat template; give prompts to go on with (--raw), or another model"
        )


def _answer(
    args: argparse.Namespace,
    session: Session,
    lines: Sequence[Line],
    of: int,
    sink: Sink,
    sampling: SamplingConfig,
    cancelled: Callable[[], bool],
    done: Done,
) -> None:
    """All lines, or until `cancelled` or one error too many."""
    from racer_local.offline.work import answer_all, by_prefix

    with progress(total=of, initial=of - len(lines), unit="line") as bar:
        for line, record in answer_all(session, by_prefix(session, lines, cancelled), sampling, cancelled, done):
            sink.add(line, record)
            bar.set_postfix_str(f"{done.stats.tokens_per_second:.0f} tokens/s", refresh=False)
            bar.update()
            if _too_many(args, done):
                return


def _summarize(of: int, left: int, done: Done, seconds: float) -> None:
    """What was done, and what it would have taken plainly."""
    stats, plain = done.stats, done.plain_seconds
    text = f"{done.answered} of {left} lines answered in {seconds:.1f} s, {done.errors} errors"
    if stats.emitted:
        text += (
            f"; {stats.emitted} tokens at {stats.tokens_per_second:.1f} tokens/s, "
            f"MAT {stats.mean_accepted_tokens:.2f}; "
            f"prompts of {stats.prompt_tokens} tokens, {done.read_tokens} of them read in {stats.prefill_seconds:.1f} s"
        )
    if plain:
        took = stats.prefill_seconds + stats.decode_seconds
        text += f"; {took:.1f} s in all, with each prompt read whole and decoded plainly about {plain:.1f} s"
    report(
        text,
        lines=of,
        answered=done.answered,
        errors=done.errors,
        seconds=round(seconds, 3),
        plain_seconds=plain and round(plain, 3),
        prompt_tokens=stats.prompt_tokens,
        read_tokens=done.read_tokens,
        emitted=stats.emitted,
        stats=stats.as_dict(),
    )


def _lines(args: argparse.Namespace) -> list[Line]:
    from racer_local.offline.lines import Defaults, read_lines

    defaults = Defaults(args.max_tokens, args.system, args.raw)
    if args.input == STREAM:
        lines = list(read_lines(sys.stdin.buffer, defaults))
    else:
        try:
            with open(args.input, "rb") as file:
                lines = list(read_lines(file, defaults))
        except OSError as error:
            raise ConfigError(f"{args.input} can't be read ({error.strerror}); name a JSONL file, or -") from error
    if not lines:
        raise ConfigError(f"{'stdin' if args.input == STREAM else args.input} holds no requests; give one a line")
    return lines


class Sink(Protocol):
    """Where records go."""

    def has(self, line: Line) -> bool:
        """Whether the line was answered by an earlier run."""

    def failed(self, line: Line) -> bool:
        """Whether that was with an error."""

    def add(self, line: Line, record: Record) -> None: ...

    def finish(self) -> None:
        """All lines are answered."""


@contextmanager
def _sink(output: Path, settings: Mapping[str, Any], args: argparse.Namespace, lines: Sequence[Line]) -> Iterator[Sink]:
    from racer_local.offline.journal import Journal
    from racer_local.offline.work import error_record

    broken = {line.number: error_record(line, line.error) for line in lines if line.error}
    if output == STREAM:
        yield _Stdout([line.number for line in lines], broken)
        return
    with Journal(output, settings, resume=args.resume, overwrite=args.overwrite) as journal:
        yield _File(journal, [line.number for line in lines], broken)


class _File:
    """A journal, and the output that it becomes."""

    def __init__(self, journal: Journal, numbers: Sequence[int], broken: Mapping[int, Record]) -> None:
        self._journal, self._numbers, self._broken = journal, numbers, broken

    def has(self, line: Line) -> bool:
        return self._journal.answered.get(line.number, ("", 0))[0] == line.digest

    def failed(self, line: Line) -> bool:
        return line.number in self._journal.failed

    def add(self, line: Line, record: Record) -> None:
        self._journal.add(line.number, line.digest, record)

    def finish(self) -> None:
        self._journal.finish(self._numbers, self._broken)


class _Stdout:
    """Each record as soon as those before it are there."""

    def __init__(self, numbers: Sequence[int], broken: Mapping[int, Record]) -> None:
        self._numbers, self._ready = deque(numbers), dict(broken)

    def has(self, line: Line) -> bool:
        return False

    def failed(self, line: Line) -> bool:
        return False

    def add(self, line: Line, record: Record) -> None:
        self._ready[line.number] = record
        self.finish()

    def finish(self) -> None:
        from racer_local.offline.journal import encoded

        while self._numbers and self._numbers[0] in self._ready:
            sys.stdout.buffer.write(encoded(self._ready.pop(self._numbers.popleft())))
        sys.stdout.buffer.flush()

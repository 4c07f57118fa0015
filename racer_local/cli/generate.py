"""`racer-local generate`: answer one prompt; with --compare, plainly and drafted."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from racer_local import models
from racer_local.cli.messages import report, tell
from racer_local.cli.options import add_model, context_from_args, from_args, model_from_args
from racer_local.cli.parsing import INTERRUPTED, add_command
from racer_local.cli.process import interruptible, show_any_character
from racer_local.config import DEFAULT_MAX_TOKENS, ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError

if TYPE_CHECKING:
    from racer_local.llama import Model
    from racer_local.session import Answer, Difference, Session
    from racer_local.stats import GenerationStats

DESCRIPTION = """\
Answer one prompt on stdout as it grows, and say in a line on stderr how fast it came: tokens a second, forwards, MAT
(tokens a forward), what was drafted and accepted. The model checks what is drafted, so the text stays its own."""
EXAMPLES = (
    ('racer-local generate -m smollm2-135m -p "Write a haiku about rivers."', "a model by its name in the registry"),
    ("racer-local generate -m my-model.gguf -p - --compare < prompt.txt", "a prompt from stdin, plainly and drafted"),
    ("racer-local generate -m my-model.gguf -p Hi --temperature 0.8 --seed 7 --json", "sampled, as JSON"),
)
WARM_UP_TOKENS = 8


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "generate", help="answer one prompt, streaming", description=DESCRIPTION, examples=EXAMPLES
    )
    parser.add_argument("-p", "--prompt", required=True, help="the prompt; - reads it from stdin")
    parser.add_argument("--system", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="no chat template: the prompt as it is, control tokens too")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    what = "a text that ends the answer and is not part of it; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=what)
    parser.add_argument("--compare", action="store_true", help="answer plainly and drafted, and compare")
    parser.add_argument("--json", action="store_true", help="no stream; one JSON object as the last line of stdout")
    add_model(parser, ContextConfig, DraftConfig, SamplingConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # All that can be wrong without the model is found before it is loaded.
    text = _read_prompt(args)
    sampling, draft = from_args(SamplingConfig, args), from_args(DraftConfig, args)
    path = models.find(args.model)
    context, config = context_from_args(args, path), model_from_args(args)
    if args.compare and not (sampling.greedy or sampling.seeded):
        raise ConfigError("--compare with a temperature needs a --seed, or the two answers differ by chance")
    if args.compare and draft.remember:
        raise ConfigError("--compare answers for a measurement, which is not remembered; leave out --remember")
    if draft.corpora:
        from racer_local.corpus.shelf import check_indexes

        check_indexes(draft.corpora)
    show_any_character()
    with interruptible() as cancelled:
        from racer_local.llama import Model  # an interrupt while it is imported might get lost

        with Model(path, config) as model:
            work = _Work(args, model, context, draft, sampling, _prompt_tokens(model, text, args), cancelled)
            (_compare if args.compare else _answer)(work)
        return INTERRUPTED if cancelled() else 0


@dataclass(frozen=True)
class _Work:
    """What there is to answer, and how."""

    args: argparse.Namespace
    model: Model
    context: ContextConfig
    draft: DraftConfig
    sampling: SamplingConfig
    prompt: list[int]
    cancelled: Callable[[], bool]

    def open(self, draft: DraftConfig) -> Session:
        from racer_local.session import Session

        return Session(self.model, self.context, draft, notify=tell)

    def answer(self, session: Session, max_tokens: int, *, show: bool, record: bool = False) -> Answer:
        on_text = _stream if show and not self.args.json else _ignore
        answer = session.answer(
            self.prompt,
            sampling=self.sampling,
            max_tokens=max_tokens,
            stop=self.args.stop,
            on_text=on_text,
            cancelled=self.cancelled,
            record=record,
        )
        if on_text is _stream:
            print(flush=True)
        return answer


def _answer(work: _Work) -> None:
    with work.open(work.draft) as session:
        for note in session.notes:
            tell(f"note: {note}")
        answer = work.answer(session, work.args.max_tokens, show=True)
    report(describe(answer.stats), **answer.stats.as_dict())
    if work.args.json:
        print(json.dumps(as_json(answer), ensure_ascii=False))


def _compare(work: _Work) -> None:
    from racer_local.session import first_difference

    answers: list[Answer] = []
    for draft in (replace(work.draft, draft="none"), work.draft):
        with work.open(draft) as session:
            work.answer(session, min(WARM_UP_TOKENS, work.args.max_tokens), show=False, record=True)
            session.forget()
            answers.append(work.answer(session, work.args.max_tokens, show=not answers, record=True))
        report(describe(answers[-1].stats), **answers[-1].stats.as_dict())
        if work.cancelled():
            report("interrupted: there are no two whole answers to compare")
            return
    plain, drafted = answers
    difference = first_difference(plain, drafted)
    report(_verdict(work.model, plain, drafted, difference))
    if work.args.json:
        print(json.dumps(_compare_json(plain, drafted, difference), ensure_ascii=False))


def describe(stats: GenerationStats) -> str:
    """One line of statistics."""
    sources = ", ".join(f"{name} {count}" for name, count in stats.accepted_by_source.items() if count)
    drafts = f"accepted {stats.accepted} of {stats.drafted} drafted"
    return (
        f"[{stats.draft}] {stats.emitted} tokens in {stats.decode_seconds:.2f} s: "
        f"{stats.tokens_per_second:.1f} tokens/s, {stats.steps} forwards, MAT {stats.mean_accepted_tokens:.2f}"
        + (f", {drafts}" + (f" ({sources})" if sources else "") if stats.drafted else "")
        + f", prompt {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s"
    )


def as_json(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.stats.finish_reason,
        "prompt_tokens": answer.stats.prompt_tokens,
        "completion_tokens": answer.stats.emitted,
        "stats": answer.stats.as_dict(),
    }


def _compare_json(plain: Answer, drafted: Answer, difference: Difference | None) -> dict[str, Any]:
    from racer_local.stats import speed_up

    return as_json(drafted) | {
        "plain": as_json(plain),
        "speed_up": round(speed_up(plain.stats, drafted.stats), 4),
        "same_token_ids": difference is None,
        "first_difference": difference
        and {
            "index": difference.index,
            "token_ids": difference.tokens,
            "logits": difference.logits,
            "gap": difference.gap,
        },
    }


def _verdict(model: Model, plain: Answer, drafted: Answer, difference: Difference | None) -> str:
    from racer_local.stats import speed_up

    speed = f"{speed_up(plain.stats, drafted.stats):.2f}x the speed of plain decoding"
    if difference is None:
        return f"{speed}, the same {len(plain.token_ids)} token ids"
    ours, theirs = (model.piece(t, special=True).decode("utf-8", "replace") for t in difference.tokens)
    a, b = ("below the best 16" if logit is None else f"{logit:.3f}" for logit in difference.logits)
    return (
        f"{speed}; the token ids differ from token {difference.index + 1} on: "
        f"plain {ours!r}, drafted {theirs!r}; plain decoding's logits of the two are {a} and {b}"
    )


def _read_prompt(args: argparse.Namespace) -> str:
    if args.max_tokens < 0:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be 0 or more")
    if args.raw and args.system:
        raise ConfigError("--system needs the chat template; leave out --raw, or put it into the prompt")
    prompt: str = args.prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8") if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is no UTF-8 text ({error}); convert it first, for example with iconv") from error
    if not text.strip():
        raise ConfigError("the prompt is empty; give some text with -p, or on stdin with -p -")
    return text


def _prompt_tokens(model: Model, text: str, args: argparse.Namespace) -> list[int]:
    from racer_local.llama import render_chat

    if args.raw:
        return model.tokenize(text, add_special=True, parse_special=True)
    system = [{"role": "system", "content": args.system}] if args.system else []
    return render_chat(model, [*system, {"role": "user", "content": text}])


def _stream(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """Text that is not streamed."""

"""The suite: every question through every drafter and peer in turn, each answer's raw counts kept as it comes.

A run can end at any moment and go on later: what is read back (`results`) is what was written here, a line a question.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from racer_local import __version__
from racer_local.bench.data import MAX_TOKENS, TEMPERATURES, Question
from racer_local.bench.humaneval import passes
from racer_local.bench.peers import BINDING, LOOKUP, SERVER, BindingPeer, ServerPeer, spec_types
from racer_local.bench.results import FORMAT, PLAIN, Counts, Key, Record, Results, parse
from racer_local.bench.ways import EXACT, WARM_UP_PROMPT, WARM_UP_TOKENS, as_prompt, parse_draft
from racer_local.config import ContextConfig, DraftConfig, ModelConfig, SamplingConfig
from racer_local.corpus.shelf import check_indexes
from racer_local.cost import SIZES
from racer_local.errors import ConfigError, ContextFullError, RacerError
from racer_local.llama import Model
from racer_local.machine import demand_memory
from racer_local.session import Answer, Session
from racer_local.tools import Message
from racer_local.tuning.budget import Budget

DRAFTS = ("none", "lookup", "logits", "retrieval", "paper@8", "paper@64", "racer", "racer+corpus")
DECIDES = ("machine", "model", "versions", "settings", "ways", "passes")
"""Of the header: what must be the same for a run to go on."""
RARELY = 4
"""A way that is to be asked rarely is asked at one question of so many."""


class Way(Protocol):
    """A way to have prompts answered: a Session, or a peer."""

    def answer(self, prompt: Sequence[int], *, sampling: SamplingConfig, max_tokens: int) -> Answer: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def served(kind: str) -> str:
    """The server's name as a way."""
    return SERVER if kind == PLAIN else f"{SERVER}+{kind}"


@dataclass(frozen=True)
class Plan:
    """What is to be asked, and how."""

    drafts: tuple[str, ...] = DRAFTS
    temperatures: tuple[float, ...] = TEMPERATURES
    repeats: int = 1
    max_tokens: int = MAX_TOKENS
    exact: bool = False
    rarely: tuple[str, ...] = ()
    """Ways that need no precision, and would take most of the time."""
    corpora: tuple[str, ...] = ()
    peers: bool = True
    server: Path | None = None
    spec_types: tuple[str, ...] = ()
    """Of the server's; none named: all."""

    @property
    def passes(self) -> list[tuple[float, int]]:
        """(temperature, repeat): each goes over all questions, from a cold start."""
        return [(temperature, repeat) for repeat in range(self.repeats) for temperature in self.temperatures]

    @cached_property
    def kinds(self) -> list[str]:
        """The server's ways to draft. Raises ConfigError for one that it has not, or what is no such server."""
        known = spec_types(self.server) if self.server else []
        if unknown := [name for name in self.spec_types if name not in known]:
            raise ConfigError(
                f"--spec-types names {', '.join(unknown)}; what there is: {', '.join(known) or 'nothing'}"
            )
        return [name for name in known if name in self.spec_types or not self.spec_types]

    @property
    def sessions(self) -> list[str]:
        """The names of our own ways, plain decoding first; exact ones are judged by it and compared with exact ones."""
        plain = [PLAIN, PLAIN + EXACT] if any(name.endswith(EXACT) for name in self.drafts) else [PLAIN]
        return [*dict.fromkeys((*plain, *self.drafts))]

    @property
    def names(self) -> list[str]:
        """Of all ways."""
        peers = [BINDING, LOOKUP] if self.peers else []
        return [*self.sessions, *peers, *map(served, self.kinds)]

    def draft(self, name: str) -> DraftConfig:
        """What a way's name means. Raises ConfigError for one that is none."""
        draft = parse_draft(name, self.corpora)
        return replace(draft, exact=True) if self.exact else draft

    def in_force(self, model: Model, context: ContextConfig) -> ContextConfig:
        """What contexts are opened with, as a Session does: exact settings choose what was left open."""
        return context.for_exact() if self.exact and not model.offloads else context

    def check(self) -> None:
        """Raises ConfigError, CorpusError before anything takes long."""
        for name in self.sessions:
            self.draft(name)
        for temperature in self.temperatures:
            SamplingConfig(temperature=temperature)
        check_indexes(self.corpora)
        others = [name for name in self.names if name != PLAIN]
        if unknown := sorted({*self.rarely} - {*others}):
            raise ConfigError(f"--rarely names {', '.join(unknown)}; what can be is {', '.join(others) or 'nothing'}")


class Journal:
    """A suite's results as they grow; with a path each is on the disk before the next question is asked."""

    def __init__(self, path: Path | None, header: dict[str, Any], *, overwrite: bool = False) -> None:
        """Goes on with what is there. Raises ConfigError where that was begun with another plan."""
        self.results, whole = Results(json.loads(json.dumps(header)), []), 0
        if path and path.exists() and path.stat().st_size and not overwrite:
            found, whole = parse(path)
            if other := [name for name in DECIDES if found.header[name] != self.results.header[name]]:
                raise ConfigError(f"{path} was begun with another {', '.join(other)}; use --overwrite, or another file")
            self.results = found
        self._file = open(path, "r+b" if whole else "wb") if path else None  # noqa: SIM115
        if self._file:
            self._file.truncate(whole)
            self._file.seek(whole)
        if not whole:
            self._write(json.dumps(header, ensure_ascii=False) + "\n")

    def add(self, record: Record) -> None:
        self._write(record.line())
        self.results.records.append(record)

    def _write(self, line: str) -> None:
        if self._file:
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


@contextmanager
def opened(plan: Plan, model: Model, config: ModelConfig, context: ContextConfig) -> Iterator[dict[str, Any]]:
    """{name: Way} of the plan's drafters and peers, plain decoding first, each warmed up and then made to forget."""
    with ExitStack() as stack:
        configs = {name: plan.draft(name) for name in plan.sessions}
        ways: dict[str, Any] = {
            name: stack.enter_context(Session(model, context, draft)) for name, draft in configs.items()
        }
        n_ctx = ways[PLAIN].target.n_ctx
        theirs = plan.in_force(model, context)
        if not model.offloads:
            copies = 2 * plan.peers + len(plan.kinds)
            size = copies * model.memory_bytes(n_ctx, theirs.kv_type)
            demand_memory(
                size, f"a copy of the model for each of {copies} peers", "leave some out (--no-peers, --spec-types)"
            )
        if plan.peers:
            for name in (BINDING, LOOKUP):
                ways[name] = BindingPeer(model, config, theirs, n_ctx, lookup=name == LOOKUP)
                stack.callback(ways[name].close)
        if plan.server:
            for kind in plan.kinds:
                name = served(kind)
                ways[name] = ServerPeer(plan.server, model, config, theirs, n_ctx, kind)
                stack.callback(ways[name].close)
        warm_up = as_prompt(model, [{"role": "user", "content": WARM_UP_PROMPT}])
        for way in ways.values():
            way.answer(warm_up, sampling=SamplingConfig(), max_tokens=WARM_UP_TOKENS)
        yield ways


def header(plan: Plan, model: Model, context: ContextConfig, ways: dict[str, Any], questions: int) -> dict[str, Any]:
    """What the figures were measured on and with, and T(n) / T(1) as it is at the start."""
    opened_with = plan.in_force(model, context)
    curves = [way.cost for way in ways.values() if isinstance(way, Session) and way.cost]
    return {
        "racer_local_suite": FORMAT,
        "machine": {name: model.facts[name] for name in ("cpu", "build")},
        "model": {"name": model.path.name, "sha256": sha256(model.path)},
        "versions": {
            "racer_local": __version__,
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("llama-cpp-python", "numpy", "numba")},
        },
        "settings": {
            "threads": context.n_threads,
            "n_ctx": ways[PLAIN].target.n_ctx,
            "flash_attn": opened_with.flashes(model.offloads),
            "kv_type": opened_with.kv_type,
            "max_tokens": plan.max_tokens,
            "exact": plan.exact,
            "rarely": plan.rarely,
            "corpora": [Path(path).name for path in plan.corpora],
            "questions": questions,
        },
        "ways": list(ways),
        "passes": plan.passes,
        "cost": {str(n): round(float(curves[0].relative[n]), 4) for n in SIZES if n <= 64} if curves else None,
        "command": " ".join(["racer-local", *sys.argv[1:]]),
    }


def run(
    plan: Plan,
    model: Model,
    ways: dict[str, Any],
    questions: Sequence[Question],
    done: set[Key],
    budget: Budget | None,
    keep: Callable[[Record], None],
) -> None:
    """Ask what is not `done`, pass by pass; `keep` gets each question's record.

    What is left of the budget is shared out evenly among the passes that are left.
    """
    columns = len({question.category for question in questions})
    for number, (temperature, repeat) in enumerate(plan.passes):
        left = [
            (at, question)
            for at, question in enumerate(questions)
            if (temperature, repeat, question.category, question.id) not in done
        ]
        part = budget.part(1 / (len(plan.passes) - number)) if budget else None
        for way in ways.values() if left else ():
            way.forget()
        for at, question in left:
            if part and part.left <= 0:
                break
            # Questions come a category after the other: so all are met in turn.
            rare = (at // columns + at % columns) % RARELY == 0
            order = [name for name in ways if rare or name not in plan.rarely]
            order = order[at % len(order) :] + order[: at % len(order)]
            with _stopping_between([budget, part] if budget and part else []):
                turns = [*_ask(plan, model, {name: ways[name] for name in order}, question, temperature, at)]
                keep(Record(temperature, repeat, question.category, question.id, turns))


def _ask(
    plan: Plan, model: Model, ways: dict[str, Any], question: Question, temperature: float, seed: int
) -> Iterator[dict[str, Counts]]:
    """The counts of each way, turn by turn; later turns go on from plain decoding's answer, so that all get the same
    prompts. A turn that does not fit into the context ends it."""
    messages: list[Message] = []
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        prompt, answers, counts = as_prompt(model, messages), dict[str, Answer](), dict[str, Counts]()
        for name, way in ways.items():
            try:
                answers[name] = way.answer(prompt, sampling=sampling, max_tokens=plan.max_tokens)
            except ContextFullError:
                return
            except (RacerError, ValueError, RuntimeError, OSError) as error:
                if name == PLAIN:
                    raise
                counts[name] = Counts(error=f"{type(error).__name__}: {error}")
        for name, answer in answers.items():
            plain = answers[PLAIN + EXACT if name.endswith(EXACT) else PLAIN]
            counts[name] = Counts.of(answer, plain, in_prefill=not isinstance(ways[name], Session))
            if question.check:
                counts[name].passed = passes(question.check, _text(model, answer))
        yield counts
        messages.append({"role": "assistant", "content": _text(model, answers[PLAIN])})


def _text(model: Model, answer: Answer) -> str:
    return b"".join(map(model.piece, answer.token_ids)).decode("utf-8", "replace")


@contextmanager
def _stopping_between(budgets: Sequence[Budget]) -> Iterator[None]:
    """Ctrl-Z stops behind the body, so that no answer's time has the pause in it; nor have the budgets."""
    if not hasattr(signal, "SIGTSTP"):
        yield
        return
    asked: list[int] = []
    try:
        before = signal.signal(signal.SIGTSTP, lambda number, frame: asked.append(number))
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
        if asked:
            with ExitStack() as paused:
                for budget in budgets:
                    paused.enter_context(budget.paused())
                os.kill(os.getpid(), signal.SIGSTOP)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

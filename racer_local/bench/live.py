"""The same prompts through each drafter and plain decoding, prompt by prompt: a drifting machine hits all alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from racer_local.bench.data import Question
from racer_local.config import ContextConfig, DraftConfig
from racer_local.cost import SIZES
from racer_local.errors import ConfigError, ContextFullError
from racer_local.llama import Model
from racer_local.session import Session
from racer_local.stats import GenerationStats, speed_up
from racer_local.tools import Message

PLAIN = "none"
EXACT, CORPUS = "+exact", "+corpus"
TOTAL = "total"
WARM_UP_PROMPT, WARM_UP_TOKENS = "Count from one to ten, twice.", 32


def parse_draft(spec: str, corpora: Sequence[str] = ()) -> DraftConfig:
    """A drafter by name; NAME@N within N nodes, NAME+corpus with indexes, NAME+exact as plain decoding to the bit."""
    name, *more = spec.strip().split("+")
    name, at, nodes = name.partition("@")
    if at and not (nodes.isascii() and nodes.isdecimal()):
        raise ConfigError(f"{spec!r} must be a drafter, or a drafter and its nodes like paper@16")
    if unknown := {f"+{what}" for what in more} - {EXACT, CORPUS}:
        raise ConfigError(f"{spec!r} ends in {', '.join(sorted(unknown))}; what can be is {CORPUS} and {EXACT}")
    if CORPUS[1:] in more and not corpora:
        raise ConfigError(f"{spec!r} needs an index; name it with --corpus")
    return DraftConfig(
        draft=name,
        max_nodes=int(nodes) if at else None,
        exact=EXACT[1:] in more,
        corpora=tuple(corpora) if CORPUS[1:] in more else (),
    )


def as_prompt(model: Model, messages: list[Message]) -> list[Message] | list[int]:
    """The chat; for a model without a chat template the tokens of its texts, one behind the other."""
    if model.chat_template:
        return messages
    return model.tokenize("\n\n".join(message["content"] for message in messages), add_special=True)


def in_context(model: Model, questions: Sequence[Question], sizes: Sequence[int]) -> list[Question]:
    """The first turns behind text of other questions, so that each is about as many tokens long as `sizes` say.

    A category for each size. Questions that are longer by themselves are left out there.
    """
    texts = [question.turns[0] for question in questions]
    found = []
    for size in sizes:
        for i, text in enumerate(texts):
            room = size - len(model.tokenize(text))
            before = model.tokenize("\n\n".join(texts[i + 1 :] + texts[:i]))[: max(0, room)]
            if room >= 0 and len(before) == room:
                notes = b"".join(map(model.piece, before)).decode("utf-8", "ignore")
                found.append(Question(f"{size} tokens", [f"{notes}\n\n{text}"]))
    return found


@dataclass
class Measured:
    """What the drafters took, by category and drafter; a category "total" has the sums."""

    drafts: list[str]
    stats: dict[str, dict[str, GenerationStats]] = field(default_factory=dict)
    differences: dict[str, dict[str, int]] = field(default_factory=dict)
    """Answers whose token ids are not those of plain decoding with the same settings."""
    answers: int = 0
    skipped: int = 0
    """Prompts that did not fit into the context."""
    cost: dict[int, float] = field(default_factory=dict)
    """T(n) / T(1) as it was at the start."""

    def add(self, category: str, stats: dict[str, GenerationStats], differs: dict[str, bool]) -> None:
        """One prompt, answered by all."""
        self.answers += 1
        for name in (category, TOTAL):
            sums = self.stats.setdefault(name, {draft: GenerationStats(draft) for draft in self.drafts})
            counts = self.differences.setdefault(name, dict.fromkeys(self.drafts, 0))
            for draft in self.drafts:
                sums[draft].add(stats[draft])
                counts[draft] += differs[draft]

    def as_dict(self, category: str) -> dict[str, Any]:
        """{drafter: figures} of a category."""
        plain = self.stats[category][PLAIN]
        return {
            draft: {
                "speedup": round(speed_up(plain, sums), 4),
                "speedup_with_prompt": round(_whole(plain) / _whole(sums), 4) if sums.emitted else 0.0,
                "tokens": sums.emitted,
                "tokens_per_second": round(sums.tokens_per_second, 3),
                "mat": round(sums.mean_accepted_tokens, 4),
                "acceptance_rate": round(sums.acceptance_rate, 4),
                "mean_nodes": round(1 + sums.drafted / max(1, sums.steps), 3),
                "accepted_by_source": sums.accepted_by_source,
                "time": {name: round(share, 4) for name, share in sums.time_shares.items()},
                "different_answers": self.differences[category][draft],
            }
            for draft, sums in self.stats[category].items()
        }


def _whole(stats: GenerationStats) -> float:
    """Seconds a token, prompt included."""
    return (stats.prefill_seconds + stats.decode_seconds) / max(1, stats.emitted)


def measure(
    model: Model,
    questions: Sequence[Question],
    drafts: Sequence[str],
    context: ContextConfig,
    max_tokens: int,
    corpora: Sequence[str] = (),
) -> Iterator[Measured]:
    """What was measured so far: first nothing, then after every prompt (each turn of a question is one).

    All is compared with plain decoding's speed in the fast settings. Greedy. Every drafter has a context of its own
    and keeps what it learned. Who is first changes with every prompt. Later turns go on from plain decoding's
    answer, so that all get the same prompts.
    """
    specs = [spec.strip() for spec in drafts]
    plain_ones = [PLAIN, PLAIN + EXACT] if any(spec.endswith(EXACT) for spec in specs) else [PLAIN]
    configs = {spec: parse_draft(spec, corpora) for spec in (*plain_ones, *specs)}
    measured = Measured(list(configs))
    with ExitStack() as stack:
        sessions = {spec: stack.enter_context(Session(model, context, draft)) for spec, draft in configs.items()}
        for session in reversed(sessions.values()):  # so that the fast settings' curve is the one that is kept
            if session.cost:
                sizes = (n for n in SIZES if n <= session.target.max_nodes)
                measured.cost |= {n: round(float(session.cost.relative[n]), 3) for n in sizes}
        for session in sessions.values():
            session.answer(as_prompt(model, [{"role": "user", "content": WARM_UP_PROMPT}]), max_tokens=WARM_UP_TOKENS)
            session.forget()
        yield measured
        for question in questions:
            messages: list[Message] = []
            for turn in question.turns:
                messages.append({"role": "user", "content": turn})
                shift = measured.answers % len(sessions)
                order = [*sessions][shift:] + [*sessions][:shift]
                try:
                    prompt = as_prompt(model, messages)
                    answers = {spec: sessions[spec].answer(prompt, max_tokens=max_tokens) for spec in order}
                except ContextFullError:
                    measured.skipped += 1
                    break
                plain = answers[PLAIN]
                plain_ids = {spec.endswith(EXACT): answers[spec].token_ids for spec in plain_ones}
                measured.add(
                    question.category,
                    {spec: answer.stats for spec, answer in answers.items()},
                    {spec: answer.token_ids != plain_ids[configs[spec].exact] for spec, answer in answers.items()},
                )
                messages.append({"role": "assistant", "content": plain.text})
                yield measured


def report(measured: Measured, model: Model, context: ContextConfig, max_tokens: int) -> dict[str, Any]:
    """All figures and what they were measured on, for JSON."""
    return {
        "machine": {name: model.facts[name] for name in ("cpu", "build")},
        "model": {"name": model.path.name, "sha256": sha256(model.path)},
        "settings": {
            "threads": context.n_threads,
            **{name: getattr(context, name) for name in ("n_ctx", "flash_attn", "kv_type")},
            "max_tokens": max_tokens,
        },
        "cost": {str(n): cost for n, cost in measured.cost.items()} or None,
        "answers": measured.answers,
        "skipped": measured.skipped,
        "categories": {name: measured.as_dict(name) for name in measured.stats if name != TOTAL},
        TOTAL: measured.as_dict(TOTAL) if TOTAL in measured.stats else {},
    }


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

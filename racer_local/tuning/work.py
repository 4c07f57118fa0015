"""The text that all candidates write: recorded once, so that a near tie that falls the other way changes no speed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from racer_local.config import ContextConfig
from racer_local.draft.none import NoDrafter
from racer_local.engine import generate
from racer_local.errors import ConfigError
from racer_local.llama import LlamaTarget, Model, render_chat
from racer_local.stats import GenerationStats
from racer_local.tools import Message
from racer_local.tree import Tokens
from racer_local.tuning.budget import Budget
from racer_local.tuning.texts import EDIT, PROSE

ANSWER, SHORTEST = 48, 16
"""Tokens of each answer, and below which another number of threads is tried for recording."""
PLAIN = 32
"""Of the first answer: tokens that are also decoded plainly."""
LEAST_CTX = 128


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    """The chat up to here."""
    answer: list[int]


@dataclass(frozen=True)
class Work:
    """A chat of two turns: a text to be written once more with little changed, then free prose."""

    turns: list[Turn]

    @property
    def prompt_tokens(self) -> int:
        return len(self.turns[0].prompt)

    @property
    def drafted_tokens(self) -> int:
        return sum(len(turn.answer) for turn in self.turns)

    @property
    def plain_tokens(self) -> int:
        return min(PLAIN, len(self.turns[0].answer))


def record(model: Model, context: ContextConfig, threads: Collection[int], budget: Budget) -> Work:
    """The model's own answers, greedy and past their end.

    They are shorter where the budget says so. Where other programs keep the cores busy all of them are very slow
    together, so the numbers of `threads` are tried by turns until one writes enough.

    Raises ConfigError where the context, or the budget, leaves no room for anything.
    """
    found: list[Work] = []
    for i, number in enumerate(threads):
        found.append(_record(model, context, number, budget.part(1 / (len(threads) - i))))
        if len(found[-1].turns) == 2 and min(len(turn.answer) for turn in found[-1].turns) >= SHORTEST:
            break
    best = max(found, key=lambda work: work.drafted_tokens)
    if not best.drafted_tokens:
        raise ConfigError(f"{model.path.name} wrote nothing in {budget.seconds:.0f} s; give it a longer --time-budget")
    return best


def _record(model: Model, context: ContextConfig, threads: int, budget: Budget) -> Work:
    messages: list[Message] = []
    turns: list[Turn] = []
    with LlamaTarget(model, replace(context, threads=threads)) as target:
        if target.n_ctx < LEAST_CTX:
            raise ConfigError(f"a context of {target.n_ctx} tokens is too small to measure in; give --ctx {LEAST_CTX}")
        most = min(ANSWER, target.n_ctx // 8)
        for text, share in ((EDIT, 0.75), (PROSE, 1.0)):
            messages.append({"role": "user", "content": text})
            prompt = _tokens(model, messages)[: target.n_ctx - 2 * most]
            part = budget.part(share)
            answer = _write(target, prompt, most, model.end_tokens, lambda part=part: part.left <= 0)  # type: ignore[misc]
            if answer:
                turns.append(Turn(prompt, answer))
            said = b"".join(map(model.piece, answer)).decode("utf-8", "replace")
            messages.append({"role": "assistant", "content": said})
    return Work(turns)


def _write(
    target: LlamaTarget, prompt: Tokens, most: int, ends: Collection[int], cancelled: Callable[[], bool]
) -> list[int]:
    stream = generate(
        target,
        NoDrafter(),
        _Endless(ends),
        prompt,
        max_tokens=most,
        end_tokens=(),
        max_nodes=1,
        stats=GenerationStats(),
        cancelled=cancelled,
    )
    return [emitted.token for emitted in stream]


def _tokens(model: Model, messages: list[Message]) -> list[int]:
    if model.chat_template:
        return list(render_chat(model, messages))
    return model.tokenize("\n\n".join(message["content"] for message in messages), add_special=True)


class _Endless:
    """The likeliest token that is no end."""

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = np.array(sorted(ends), np.int64)

    def begin(self, prompt: Tokens) -> None: ...

    def draw(self, logits: NDArray[np.float32]) -> int:
        row = np.array(logits)
        row[self._ends] = -np.inf
        return int(row.argmax())

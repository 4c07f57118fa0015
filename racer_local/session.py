"""A model opened for answers: model, context, drafter and sampler, wired once for every front end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from racer_local.config import ContextConfig, DraftConfig, ModelConfig, SamplingConfig
from racer_local.draft import TopK, make_drafter
from racer_local.engine import generate
from racer_local.llama import LlamaTarget, Model, make_sampler
from racer_local.stats import GenerationStats
from racer_local.target import Sampler, never
from racer_local.text import Detokenizer
from racer_local.tree import Tokens

NEAR = 16
"""Likeliest tokens kept of each row for `compare`."""


class Drawn(NamedTuple):
    """A drawn token, and the NEAR likeliest ids of the row it was drawn from with their logits."""

    token: int
    near: dict[int, float]


class Recorder:
    """A sampler that notes what another one draws."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.drawn: list[Drawn] = []

    def begin(self, prompt: Tokens) -> None:
        self._sampler.begin(prompt)

    def draw(self, logits: NDArray[np.float32]) -> int:
        top = TopK.of(np.atleast_2d(logits), NEAR)
        near = dict(zip(top.ids[0].tolist(), top.logits[0].tolist(), strict=True))
        self.drawn.append(Drawn(self._sampler.draw(logits), near))
        return self.drawn[-1].token


@dataclass
class Answer:
    """A finished answer. The end token is not part of it."""

    stats: GenerationStats
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    """Every draw, the end token's included, if asked for."""


class Session:
    """One context and one drafter on a loaded model, which stays the caller's. Closing twice is harmless.

    Without a given n_ctx the context is the default one, or the model's own where that is smaller.
    """

    def __init__(
        self,
        model: Model,
        context: ContextConfig | None = None,
        draft: DraftConfig | None = None,
    ) -> None:
        self.model = model
        self.draft = draft or DraftConfig()
        context = context or replace(ContextConfig(), n_ctx=min(ContextConfig().n_ctx, model.n_ctx_train))
        self.drafter = make_drafter(self.draft, model.n_vocab, model.end_tokens)
        self.target = LlamaTarget(model, context, max_nodes=self.draft.nodes)

    @property
    def plain_because(self) -> str | None:
        """Why nothing is drafted although a drafter was asked for."""
        if self.draft.nodes > 1 and not self.model.can_branch:
            return "this model's memory keeps rejected tokens (recurrent or hybrid), so it decodes plainly"
        return None

    def answer(
        self,
        prompt: Tokens,
        sampling: SamplingConfig,
        max_tokens: int,
        *,
        on_text: Callable[[str], object] = lambda text: None,
        cancelled: Callable[[], bool] = never,
        record: bool = False,
    ) -> Answer:
        """Answer `prompt`; `on_text` gets the text as it grows. `record` keeps every draw."""
        answer = Answer(GenerationStats(draft=self.draft.draft))
        sampler = make_sampler(sampling, self.model.n_vocab)
        if record:
            sampler = recorder = Recorder(sampler)
            answer.drawn = recorder.drawn
        detokenizer = Detokenizer(self.model.piece)

        def show(text: str) -> None:
            answer.text += text
            if text:
                on_text(text)

        for emitted in generate(
            self.target,
            self.drafter,
            sampler,
            prompt,
            max_tokens=max_tokens,
            end_tokens=self.model.end_tokens,
            stats=answer.stats,
            cancelled=cancelled,
        ):
            answer.token_ids.append(emitted.token)
            show(detokenizer.push(emitted.token))
        show(detokenizer.flush())
        return answer

    def forget(self) -> None:
        """Empty the cache and start with a drafter that has seen nothing."""
        self.target.clear()
        self.drafter = make_drafter(self.draft, self.model.n_vocab, self.model.end_tokens)

    def close(self) -> None:
        self.target.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Difference:
    """Where two recorded answers part, and how close the two tokens were in the first one's row."""

    index: int
    tokens: tuple[int, int]
    logits: tuple[float | None, float | None]
    """None where the token is not among the row's NEAR likeliest."""

    @property
    def gap(self) -> float | None:
        ours, theirs = self.logits
        return None if ours is None or theirs is None else abs(ours - theirs)


def first_difference(plain: Answer, drafted: Answer) -> Difference | None:
    """The first draw that differs between two recorded answers to the same prompt."""
    for index, (ours, theirs) in enumerate(zip(plain.drawn, drafted.drawn, strict=False)):
        if ours.token != theirs.token:
            logits = ours.near.get(ours.token), ours.near.get(theirs.token)
            return Difference(index, (ours.token, theirs.token), logits)
    return None


def open_model(path: str | Path, config: ModelConfig | None = None) -> Model:
    """Load a model, once a probe in a child process has shown that this build of the binding works here."""
    from racer_local.llama.probe import ensure_build_works

    ensure_build_works()
    return Model(path, config)

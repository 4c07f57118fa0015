"""A model opened for answers: model, context, drafter and sampler, wired once for every front end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DEFAULT_MAX_TOKENS, ContextConfig, DraftConfig, SamplingConfig
from racer_local.cost import VerifyCost
from racer_local.draft import TopK
from racer_local.engine import Emitted
from racer_local.llama import LlamaTarget, Model, make_sampler, render_chat
from racer_local.pieces import Likely, Piece, Progress, Token, pieces
from racer_local.racing import Racer, in_the_way
from racer_local.stats import GenerationStats
from racer_local.target import Sampler, never
from racer_local.text import StopMatcher
from racer_local.tools import Message
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
    """One context and one drafter on a loaded model, which stays the caller's.

    Calls from several threads queue. Closing waits for a running answer; closing twice is harmless.
    """

    def __init__(
        self,
        model: Model,
        context: ContextConfig | None = None,
        draft: DraftConfig | None = None,
        notify: Callable[[str], object] = lambda message: None,
    ) -> None:
        self.model = model
        self.draft = draft or DraftConfig()
        context = context or ContextConfig()
        chosen = [] if model.offloads else in_the_way(context)
        if self.draft.exact and not model.offloads:
            context = context.for_exact()
        self._kv_type = context.kv_type
        self.target = LlamaTarget(model, context, max_nodes=self.draft.nodes)
        self._racer = Racer(self.target, self.draft, model.end_tokens, chosen, notify=notify)
        self.notes: list[str] = []
        """What the user should know, a line each."""
        if self._racer.disabled_reason:
            self.notes.append(self._racer.disabled_reason)
        if self.target.n_ctx > model.n_ctx_train:
            self.notes.append(
                f"the model was trained on {model.n_ctx_train} tokens; beyond them its text may get worse "
                f"(the context holds {self.target.n_ctx})"
            )
        if busy := model.watch.warning(context.n_threads):
            self.notes.append(busy)

    @property
    def cost(self) -> VerifyCost | None:
        """T(n), where the drafter decides by it."""
        return self._racer.cost

    @property
    def memory_bytes(self) -> int:
        """About what model, context and drafter take."""
        return self.model.memory_bytes(self.target.n_ctx, self._kv_type) + self._racer.memory_bytes

    def answer(
        self,
        prompt: str | Tokens | Sequence[Message],
        *,
        sampling: SamplingConfig | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        on_text: Callable[[str], object] = lambda text: None,
        cancelled: Callable[[], bool] = never,
        record: bool = False,
    ) -> Answer:
        """Answer a user's text, a chat's messages, or prompt tokens as they are.

        `on_text` gets the text as it grows; `record` keeps every draw. `stop`: texts that end it, not part of it.
        """
        answer = Answer(GenerationStats())

        def recording(sampler: Sampler) -> Sampler:
            recorder = Recorder(sampler)
            answer.drawn = recorder.drawn
            return recorder

        stream = self.stream(
            prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            stats=answer.stats,
            cancelled=cancelled,
            through=recording if record else None,
        )
        with closing(stream):
            for piece in stream:
                answer.token_ids += [token.id for token in piece.tokens]
                answer.text += piece.text
                if piece.text:
                    on_text(piece.text)
        return answer

    def stream(
        self,
        prompt: str | Tokens | Sequence[Message],
        *,
        sampling: SamplingConfig | None = None,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        likely: int | None = None,
        draft: DraftConfig | None = None,
        owner: str = "",
        stats: GenerationStats | None = None,
        cancelled: Callable[[], bool] = never,
        through: Callable[[Sampler], Sampler] | None = None,
    ) -> Generator[Piece, None, None]:
        """The answer as it grows, piece by piece; closing it early frees the session at once.

        max_tokens: None fills the context. likely: each token's log probability and so many of the likeliest ones.
        draft: what `for_answer` allowed. owner: whose text it is; what is learned from it drafts for nobody else.
        through: puts something before the sampler.
        """
        stats = GenerationStats() if stats is None else stats
        sampling = sampling or SamplingConfig()
        sampler = make_sampler(sampling, self.model.n_vocab, self.model)
        progress = Progress(StopMatcher([text.encode("utf-8") for text in stop]))
        tokens = self._tokens(prompt)
        with self.target.lock:
            emitted = self._racer.generate(
                tokens,
                through(sampler) if through else sampler,
                max_tokens=self.target.n_ctx if max_tokens is None else max_tokens,
                end_tokens=self.model.end_tokens,
                stats=stats,
                draft=draft,
                owner=owner,
                cancelled=cancelled,
            )
            with closing(emitted):
                yield from pieces(progress, self._as_tokens(emitted, likely))
            if progress.stops.found:
                stats.finish_reason = "stop"

    def _as_tokens(self, emitted: Iterable[Emitted], likely: int | None) -> Iterator[Token]:
        for token, row, source in emitted:
            told = None if likely is None else Likely.of(row, token, likely)
            yield Token(token, self.model.piece(token), told, source)

    def for_answer(self, racer: bool | Mapping[str, Any] | DraftConfig | None) -> DraftConfig:
        """What one answer drafts, from a `racer` argument. See `Racer.for_answer`."""
        return self._racer.for_answer(racer)

    def _tokens(self, prompt: str | Tokens | Sequence[Message]) -> Tokens:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) and isinstance(prompt[0], dict):
            return render_chat(self.model, cast("Sequence[Message]", prompt))
        return cast("Tokens", prompt)

    def forget(self) -> None:
        """Empty the cache and start with a drafter that has seen nothing."""
        with self.target.lock:
            self._racer.forget()

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

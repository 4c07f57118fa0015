"""A target and the drafters that race on it: what every front end shares, wired once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from racer_local import exact, kernels
from racer_local.config import DRAFTERS, ContextConfig, DraftConfig
from racer_local.corpus.shelf import Shelf
from racer_local.cost import VerifyCost, probe, recall, remember
from racer_local.draft import Drafter, ReadsCorpora, make_drafter
from racer_local.engine import Emitted, generate
from racer_local.errors import ConfigError, ExactnessError
from racer_local.llama import LlamaTarget
from racer_local.machine import CpuWatch
from racer_local.stats import GenerationStats
from racer_local.target import Exactness, Sampler, never
from racer_local.tree import DraftTree, Tokens

OWNERS = 8
"""Most owners whose learning is kept; beyond it that of the one who asked longest ago is dropped."""
PER_ANSWER = ("draft", "max_nodes", "exact", "corpora", "remember")
"""Settings of a DraftConfig that a single answer may change."""
BUSY = 0.5
"""Share of the remembered time of a plain forward below which the machine was busy when that was measured."""
PLAIN_FORWARDS = 3
"""Whose median shows it."""
KEEPS_REJECTED = "this model's memory keeps rejected tokens (recurrent or hybrid), so it decodes plainly"
OTHER_SETTINGS = (
    "with these settings no row of a batch equals a single one, so exact answers are decoded plainly; "
    "opened as exact (--exact) it may draft for them"
)
NEVER_EQUAL = "with this model and build no row of a batch equals a single one, so exact answers are decoded plainly"


class Racer:
    """What is drafted for an answer, by which drafter, under which restriction; and why, if nothing is.

    Whoever calls holds the target's lock.
    """

    def __init__(
        self,
        target: LlamaTarget,
        draft: DraftConfig,
        end_tokens: Collection[int],
        chosen: Sequence[str] = (),
        own: Drafter | None = None,
        notify: Callable[[str], object] = lambda message: None,
    ) -> None:
        """`chosen`: what of the caller's own settings keeps a batch from equalling single tokens, as they wrote it.
        `own`: a drafter of the caller's, in place of the one that `draft` names. `notify` hears of what takes long.

        Raises ExactnessError where that keeps an exact draft from being one.
        """
        self.target, self.draft, self.chosen = target, draft, chosen
        self.disabled_reason = KEEPS_REJECTED if target.max_nodes == 1 < draft.nodes else None
        self._end_tokens = end_tokens
        self._cost: VerifyCost | None = None
        self._exactness: Exactness | None = None
        self._drafters: dict[str, dict[str, Drafter]] = {}
        """By owner, the one who asked last at the end, and kind."""
        self._owner = ""
        """Whose text the cache holds."""
        self._own, self._notify = own, notify
        self._shelf = Shelf(lambda: target.vocabulary, end_tokens, notify)
        self._check_corpora(draft)
        self._drafter(draft)
        self._restrict(draft)

    @property
    def cost(self) -> VerifyCost | None:
        """T(n), where a drafter asked for it."""
        return self._cost

    @property
    def memory_bytes(self) -> int:
        """Of the rows of logits that a tree needs, and of what drafters learn."""
        kept = [drafter for drafters in self._drafters.values() for drafter in drafters.values()]
        learned = [drafter.memory_bytes(self.draft) for drafter in kept if hasattr(drafter, "memory_bytes")]
        return int(4 * self.target.n_vocab * self.target.max_nodes + sum(learned))

    @property
    def _why_plain(self) -> str:
        """Why exact answers are decoded plainly."""
        return NEVER_EQUAL if self.target.always_in_order else OTHER_SETTINGS

    @property
    def drafter(self) -> Drafter:
        """The one that answers by default."""
        return self._drafter(self.draft)

    def for_answer(
        self, value: bool | Mapping[str, Any] | DraftConfig | None, corpora: Sequence[str] | None = None
    ) -> DraftConfig:
        """What a `racer` argument of one answer asks for, and `corpora` in place of those it was opened with.

        Raises ConfigError where that does not fit to what was opened, CorpusError for an index that can't be used.
        """
        if value is None or value is True:
            draft = self.draft
        elif value is False:
            draft = replace(self.draft, draft="none")
        elif isinstance(value, DraftConfig):
            draft = replace(self.draft, **{name: getattr(value, name) for name in PER_ANSWER})
            if draft != value:
                raise ConfigError(f"one answer can change only {', '.join(PER_ANSWER)}; the rest is set when it opens")
        else:
            if isinstance(value, Mapping) and value.get("draft", "racer") != "racer":
                value = {"corpora": (), **value}  # those that it was opened with are not for this drafter
            draft = self.draft.with_keys(value, PER_ANSWER)
        if corpora is not None:
            draft = draft.with_keys({"corpora": corpora})
        if draft.nodes > 1 == self.draft.nodes:
            raise ConfigError("drafts were switched off when this was opened; open it with racer=True")
        if draft.nodes > 1 and (draft.max_nodes or 0) > self.draft.nodes:
            raise ConfigError(
                f"max_nodes is {draft.max_nodes} and this was opened for {self.draft.nodes}; open it with more"
            )
        self._check_corpora(draft)
        return draft

    def _check_corpora(self, draft: DraftConfig) -> None:
        if draft.corpora and self._own:
            raise ConfigError("a draft_model of your own reads no indexes; leave out corpora, or draft_model")
        self._shelf.corpora(draft.corpora, draft.remember)

    def generate(
        self,
        prompt: Tokens,
        sampler: Sampler,
        *,
        max_tokens: int,
        end_tokens: Collection[int],
        stats: GenerationStats,
        draft: DraftConfig | None = None,
        owner: str = "",
        cancelled: Callable[[], bool] = never,
    ) -> Generator[Emitted, None, None]:
        """See `engine.generate`; notes in `stats` what holds for this answer.

        What is learned from one owner's texts drafts for that owner alone, and so does a cached prompt.
        """
        draft = draft or self.draft
        if owner != self._owner:
            self.target.clear()
            self._owner = owner
        drafter = self._drafter(draft, owner)
        found = self._restrict(draft)
        stats.exact, stats.row_limit = draft.exact, found.rows if found else None
        if draft.nodes > 1:
            stats.disabled_reason = self.disabled_reason or (self._why_plain if found and found.rows == 1 else None)
        stats.draft = "none" if stats.disabled_reason else draft.draft
        if isinstance(drafter, ReadsCorpora):
            drafter.use(self._shelf.corpora(draft.corpora, draft.remember))
        stream = generate(
            self.target,
            drafter,
            sampler,
            prompt,
            max_tokens=max_tokens,
            end_tokens=end_tokens,
            max_nodes=draft.nodes,
            learns_from_prompt=not draft.exact,  # it would read the prompt in other batches
            stats=stats,
            cancelled=cancelled,
        )
        return stream if draft.remember is None else self._remembering(stream, draft.remember)

    def _remembering(self, stream: Generator[Emitted, None, None], path: str) -> Generator[Emitted, None, None]:
        """The same stream, whose tokens are in the index at `path` when it has ended."""
        tokens: list[int] = []
        try:
            with closing(stream):
                for emitted in stream:
                    tokens.append(emitted.token)
                    yield emitted
        finally:
            self._shelf.remember(path, [tokens])

    def forget(self) -> None:
        """Empty the cache and start with drafters that have seen nothing."""
        self.target.clear()
        self._drafters.clear()

    def _drafter(self, draft: DraftConfig, owner: str = "") -> Drafter:
        kind = "none" if draft.nodes == 1 or self.disabled_reason else draft.draft
        if self._own and kind == self.draft.draft:
            return self._own
        drafters = self._drafters[owner] = self._drafters.pop(owner, {})
        if len(self._drafters) > OWNERS:
            del self._drafters[next(iter(self._drafters))]
        if kind not in drafters:
            most = self.draft.nodes
            fewer = most if most < DRAFTERS[kind] else None
            config = replace(self.draft, draft=kind, max_nodes=fewer, corpora=())  # indexes are lent for each answer
            if kind == self.draft.draft:
                config = self.draft
            if config.needs_cost and self._cost is None:
                self.target.restrict(None)
                self._cost = verify_cost(self.target)
            if kernels.NEW and config.nodes > 1:
                self._notify("compiling the drafter, once on this machine (some 20 seconds)")
                kernels.NEW = False
            drafters[kind] = make_drafter(config, self.target.n_vocab, self._end_tokens, self._cost)
        return drafters[kind]

    def _restrict(self, draft: DraftConfig) -> Exactness | None:
        found = self._exact_up_to(draft) if draft.exact else None
        self.target.restrict(found)
        return found

    def _exact_up_to(self, draft: DraftConfig) -> Exactness:
        if draft.nodes == 1 or self.disabled_reason:
            return Exactness(1, False)
        if self.chosen:
            raise ExactnessError(
                f"exact answers can't be had with {' and '.join(self.chosen)}: a batch gives other rows than single "
                f"tokens there; open it as exact and leave that out, and it is chosen so that they agree"
            )
        if self._exactness is None:
            self._exactness = exactness(self.target, self._notify)
        return self._exactness


def in_the_way(context: ContextConfig) -> list[str]:
    """Settings that the user chose and with which a batch does not equal single tokens on a CPU.

    Nothing to be measured: in a short text they may agree. Without flash attention, attention is a matrix product
    whose sums depend on the number of rows; with it, an f16 or f32 cache is split among the threads for a single token.
    """
    chosen = ["flash_attn off (--flash-attn)"] if context.flash_attn == "off" else []
    return chosen + ([f"kv_type {context.kv_type} (--kv-type)"] if context.kv_type in ("f16", "f32") else [])


def verify_cost(target: LlamaTarget, *, again: bool = False) -> VerifyCost:
    """T(n) of an opened target, as remembered from an earlier time on this machine, else measured now.

    What was remembered while other programs kept the machine busy, which a plain forward now shows, is measured again;
    and what is measured while they are seen to be in the way of these threads serves this process alone: it is bent as
    well as slow. `again`: measured in any case. The target's cache is empty afterwards.
    """
    facts = target.facts
    most = min(target.max_nodes, target.n_ctx)
    tokens = np.arange(most, dtype=np.int32) % target.n_vocab

    def evaluate(n: int) -> None:
        target.evaluate(DraftTree.chain(tokens[:n]))
        target.commit([])

    target.clear()
    remembered = None if again else recall(facts)
    if remembered is not None and (remembered.fixed or not _was_busy(remembered, evaluate)):
        return remembered
    watch = CpuWatch()
    measured = probe(evaluate, most)
    if watch.warning(facts["threads"]) is None:
        remember(facts, measured)
    return measured


def _was_busy(remembered: VerifyCost, evaluate: Callable[[int], object]) -> bool:
    """Whether a plain forward takes far less time now than when the curve was measured."""
    evaluate(1)  # the first forward of a process pays for much else
    taken = []
    for _ in range(PLAIN_FORWARDS):
        started = perf_counter()
        evaluate(1)
        taken.append(perf_counter() - started)
    return median(taken) < BUSY * remembered.seconds[0]


def exactness(
    target: LlamaTarget, notify: Callable[[str], object] = lambda message: None, *, again: bool = False
) -> Exactness:
    """How far batches equal single tokens, as remembered or measured now; then the cache is empty afterwards."""
    found = None if again else exact.recall(target.facts)
    if found is None:
        notify("measuring up to how many rows a batch equals single tokens, once for this model and these settings")
        target.restrict(None)
        target.restrict(Exactness(target.max_nodes, True))  # cells in order
        found = exact.measure(target)
        exact.remember(target.facts, found)
    return found

"""RACER with drafts that know what they cost: one tree from all evidence, as large as it pays."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from racer_local.acceptance import LEARNING_RATE, PULL, load_prior
from racer_local.config import PROMPT_ROWS, DraftConfig
from racer_local.corpus.corpora import Corpora
from racer_local.cost import VerifyCost
from racer_local.draft import TopK
from racer_local.draft.sources import Text
from racer_local.kernels import evidence, growth, history, keyed_cues, layout, suffixes
from racer_local.kernels.acceptance import Net
from racer_local.kernels.history import History
from racer_local.kernels.keyed_cues import Cues
from racer_local.kernels.suffixes import NO_INDEX
from racer_local.tree import DraftTree, Limit, NodeIds, Source, Tokens

SOURCES = np.array([Source.CONTEXT, Source.LOGITS, Source.CORPUS], np.int32)
CAUTION_OF_DEBT = 5.0
"""Caution added for each plain forward that drafts have lost in this conversation: a text that keeps them from
paying costs little. Measured: 0 lets translation fall to 0.97x on one curve, 10 costs the rest 0.5%."""
DEBT_KEPT = 0.9
"""Share of a debt that the next conversation starts with."""
CHEAP = 6.0
"""Where PROMPT_ROWS tokens cost fewer plain forwards than this, the last rows of a prompt are worth having: 2% on a
GPU's curve. On a CPU they bring nothing, and the logits of a prompt are a fifth of the time to read it."""
MOST_CREDIT = 5.0
"""Plain forwards saved that are remembered: a long run of luck is no licence to lose it all again."""
REST_AFTER, REST = 8, 4
"""After so many looks in a row that found nothing worth drafting only every REST-th step looks, where that is dear."""
DEAR_LOOK, LOOK_PACE, LONGEST_LOOK = 0.01, 0.05, 1e-3
"""The share of a plain forward above which a look is dear; the newest one's weight in their average time, and the most
seconds that it counts: the first one pays for much else. A forward leaves all caches cold, so several steps are learned
from in about the time of one, too."""


def _new_memory(config: DraftConfig) -> tuple[History, Cues]:
    cues = keyed_cues.new_cues(config.history_tokens // 2, config.breadth)
    return history.new_history(config.history_tokens), cues


class RacerDrafter:
    """Grows the tree that promises the most tokens per second (`kernels.growth`), often none at all.

    What it learns (text, cues, how far to trust them) serves later prompts too, within a fixed amount of memory.
    """

    def __init__(
        self, config: DraftConfig, banned: NDArray[np.bool_], cost: VerifyCost, prior: Net | None = None
    ) -> None:
        self.breadth = config.breadth
        self.cost = cost
        self.prompt_rows: int | None = PROMPT_ROWS if cost.relative[PROMPT_ROWS] < CHEAP else 0
        self.history, self.cues = _new_memory(config)
        self.recent = evidence.new_recent()
        self.net = prior or load_prior()
        self._banned = banned
        self._fade, self._caution = np.float32(config.fade), config.caution
        self._balance = 0.0
        """Plain forwards that drafts have saved in this conversation; below 0: lost."""
        self._corpora: Corpora | None = None
        scratch = evidence.new_evidence(config.breadth)
        if self.prompt_rows:  # where verifying is cheap, short matches are worth looking for in every index
            scratch.found.searches[1] = suffixes.ALWAYS
        self._learned = self.history, self.cues, self.recent, scratch, self.net
        self.memory = (*self._learned, NO_INDEX)
        self._tree = layout.new_scratch(config.nodes)
        self._pool = growth.new_pool(config.nodes)
        self._ordered = np.zeros((4, config.nodes), np.int32)
        self._text = Text()
        self._drafted = DraftTree.chain([0])
        self._drafted_at = 0.0
        self._put_off: list[TopK] = []
        """The rows of plain steps that are not learned from yet."""
        self._vain, self._look_seconds = 0, 0.0
        """Looks in a row that found nothing, and what one takes on average."""

    @staticmethod
    def memory_bytes(config: DraftConfig) -> int:
        """What a drafter's learning takes, from the start to the end."""
        return sum(array.nbytes for part in _new_memory(config) for array in part)

    def clear(self) -> None:
        """Forget all that was learned."""
        history.clear(self.history)
        keyed_cues.clear(self.cues)
        evidence.begin(self.recent, 0)
        self.net.out[:] = self.net.prior
        self._text.cut(0)
        self._balance = 0.0
        self._put_off.clear()
        self._vain = 0

    def use(self, corpora: Corpora | None) -> None:
        """Draft from these indexes too, from the next prompt on."""
        self._corpora = corpora

    def begin(self, prompt: Tokens) -> None:
        self._catch_up()
        self._vain = 0
        index = NO_INDEX
        if self._corpora is not None:
            self._corpora.refresh()
            index = self._corpora.index
        suffixes.wake(index)
        self.memory = (*self._learned, index)
        tokens = np.asarray(prompt, np.int32)
        shared = self._text.shared_prefix(tokens)
        goes_on = 0 < shared == self._text.length
        start = int(self.recent.start[0]) if goes_on else int(self.history.length[0]) + 1
        evidence.begin(self.recent, start)
        if not goes_on:
            self._balance = DEBT_KEPT * min(0.0, self._balance)
            # Matches must not run from the old text into the new one, but they may run into a shared beginning.
            shared = max(0, shared - history.LONGEST)
            history.append(self.history, np.array([history.BREAK], np.int32))
            self._text.cut(shared)
        history.append(self.history, tokens[shared:])
        self._text.extend(tokens[self._text.length :])
        self._chunk = tokens[:0]

    @property
    def _in_vain(self) -> bool:
        """Whether looking has not paid for long, and takes time that could be told."""
        return self._vain >= REST_AFTER and self._look_seconds > DEAR_LOOK * self.cost.plain_seconds

    def draft(self, root: int, limit: Limit) -> DraftTree:
        rests = self._in_vain and 0 < len(self._put_off) < REST
        self._drafted = DraftTree.lone(root) if rests else self._look(root, limit)
        self._drafted_at = perf_counter()
        return self._drafted

    def _look(self, root: int, limit: Limit) -> DraftTree:
        self._catch_up()
        started = perf_counter()
        caution = np.float32(self._caution + CAUTION_OF_DEBT * max(0.0, -self._balance))
        terms = SOURCES, self.cost.relative, self._fade, caution
        limits = limit.nodes, limit.leaves, limit.depth
        text = self._text.tokens
        n = growth.draft(self.memory, text, self._banned, terms, self._tree, self._pool, limits, self._ordered)
        self._vain = 0 if n > 1 else self._vain + 1
        self._look_seconds += LOOK_PACE * (min(perf_counter() - started, LONGEST_LOOK) - self._look_seconds)
        return DraftTree(*self._ordered[:, :n].copy()) if n > 1 else DraftTree.lone(root)

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        if tree is self._drafted:
            self.cost.correct(len(tree), perf_counter() - self._drafted_at)
            self._top_k = top_k
        else:
            growth.read(self.memory, self._chunk, tree.tokens, top_k.ids, top_k.logits, self._text.tokens[-1])
            self._chunk = tree.tokens[-history.CONTEXT :]

    def accept(self, path: NodeIds, bonus: int) -> None:
        tree, n = self._drafted, self._text.length
        self._text.extend([*tree.tokens[path[1:]].tolist(), bonus])
        if len(tree) == 1 and self._in_vain:
            self._put_off.append(self._top_k)
            return
        self._catch_up(but=1)
        if len(tree) > 1:
            self._balance = min(MOST_CREDIT, self._balance + len(path) - float(self.cost.relative[len(tree)]))
        self._absorb(n, tree, np.array(path), self._top_k)

    def _catch_up(self, but: int = 0) -> None:
        """Learn from the plain steps that were put off: a chain that became text, with `but` tokens behind it."""
        if self._put_off:
            k, end = len(self._put_off), self._text.length - but
            rows = TopK(*(np.concatenate([getattr(r, name) for r in self._put_off]) for name in ("ids", "logits")))
            self._put_off.clear()
            chain = DraftTree.chain(self._text.tokens[end - k - 1 : end - 1])
            self._absorb(end - k, chain, np.arange(k), rows, end)

    def _absorb(self, n: int, tree: DraftTree, path: NDArray[np.int64], rows: TopK, end: int | None = None) -> None:
        text, learning = self._text.tokens[:end], (LEARNING_RATE, PULL)
        growth.absorb(
            self.memory, self._pool, text, n, tree.tokens, tree.parents, path, rows.ids, rows.logits, *learning
        )

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

    def use(self, corpora: Corpora | None) -> None:
        """Draft from these indexes too, from the next prompt on."""
        self._corpora = corpora

    def begin(self, prompt: Tokens) -> None:
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

    def draft(self, root: int, limit: Limit) -> DraftTree:
        caution = np.float32(self._caution + CAUTION_OF_DEBT * max(0.0, -self._balance))
        terms = SOURCES, self.cost.relative, self._fade, caution
        limits = limit.nodes, limit.leaves, limit.depth
        text = self._text.tokens
        n = growth.draft(self.memory, text, self._banned, terms, self._tree, self._pool, limits, self._ordered)
        self._drafted = DraftTree(*self._ordered[:, :n].copy()) if n > 1 else DraftTree.lone(root)
        self._drafted_at = perf_counter()
        return self._drafted

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        if tree is self._drafted:
            self.cost.correct(len(tree), perf_counter() - self._drafted_at)
            self._top_k = top_k
        else:
            growth.read(self.memory, self._chunk, tree.tokens, top_k.ids, top_k.logits, self._text.tokens[-1])
            self._chunk = tree.tokens[-history.CONTEXT :]

    def accept(self, path: NodeIds, bonus: int) -> None:
        tree, n, rows = self._drafted, self._text.length, self._top_k
        if len(tree) > 1:
            self._balance = min(MOST_CREDIT, self._balance + len(path) - float(self.cost.relative[len(tree)]))
        nodes = np.array(path)
        self._text.extend([*tree.tokens[nodes[1:]].tolist(), bonus])
        learning = LEARNING_RATE, PULL
        text = self._text.tokens
        growth.absorb(
            self.memory, self._pool, text, n, tree.tokens, tree.parents, nodes, rows.ids, rows.logits, *learning
        )

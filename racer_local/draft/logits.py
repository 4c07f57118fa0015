"""The logits tree: flexible extrapolation from the target's own recent logits (paper, section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft import TopK
from racer_local.draft.base import TreeDrafter
from racer_local.kernels import cues
from racer_local.kernels.layout import Scratch
from racer_local.tree import DraftTree, NodeIds, Source


class CueTable:
    """For each vocabulary id the k best next tokens of its most recent forward ("copy-logit").

    Memory: vocabulary x k x 4 bytes. A token never evaluated has no row, and nothing is drafted after it.
    Within one forward the nodes count in tree order, and those that became text count as the most recent.
    """

    def __init__(self, banned: NDArray[np.bool_], breadth: int, nodes: int) -> None:
        self.banned = banned
        self.rows = np.full((len(banned), breadth), -1, np.int32)
        self._queue, self._breadths = np.zeros((2, nodes), np.int32)
        self._last: tuple[DraftTree, TopK] | None = None

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        cues.update(self.rows, tree.tokens, top_k.ids)
        self._last = tree, top_k

    def accept(self, path: NodeIds) -> None:
        if self._last is not None:
            tree, top_k = self._last
            cues.update(self.rows, tree.tokens[path], top_k.ids[path])

    def grow(self, tree: Scratch) -> None:
        cues.expand(self.rows, self.banned, tree, int(Source.LOGITS), self._queue, self._breadths)


class LogitsDrafter(TreeDrafter):
    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        super().__init__(config, banned)
        self.breadth = config.breadth
        self.cues = CueTable(banned, config.breadth, config.nodes)

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        self.cues.observe(tree, top_k)

    def accept(self, path: NodeIds, bonus: int) -> None:
        super().accept(path, bonus)
        self.cues.accept(path)

    def _grow(self) -> None:
        self.cues.grow(self.tree)

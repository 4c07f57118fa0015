"""The logits tree: flexible extrapolation from the target's own recent logits (paper, section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft import TopK
from racer_local.draft.sources import DraftSource
from racer_local.kernels import cues
from racer_local.kernels.layout import Scratch
from racer_local.tree import DraftTree, Int32s, NodeIds, Source


class CueTable(DraftSource):
    """For each vocabulary id the k best next tokens of its most recent forward ("copy-logit").

    Memory: vocabulary x k x 4 bytes. A token never evaluated has no row, and nothing is drafted after it.
    Within one forward the nodes count in tree order, and those that became text count as the most recent.
    """

    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        self.banned, self.breadth = banned, config.breadth
        self.rows = np.full((len(banned), config.breadth), -1, np.int32)
        self._queue, self._breadths = np.zeros((2, config.nodes), np.int32)

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        cues.update(self.rows, tree.tokens, top_k.ids)
        self._tree, self._top_k = tree, top_k

    def accept(self, path: NodeIds, tokens: Int32s) -> None:
        cues.update(self.rows, self._tree.tokens[path], self._top_k.ids[path])

    def grow(self, tree: Scratch) -> None:
        cues.expand(self.rows, self.banned, tree, int(Source.LOGITS), self._queue, self._breadths)

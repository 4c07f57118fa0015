"""RACER as published: retrieval first, the logits tree fills what is left of one budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft.logits import LogitsDrafter
from racer_local.draft.retrieval import NgramTrie
from racer_local.tree import Int32s


class PaperDrafter(LogitsDrafter):
    """The two trees are merged under the root: a node that both propose is one node and costs the budget once."""

    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        super().__init__(config, banned)
        self.ngrams = NgramTrie(config, banned)

    def _begin(self, prompt: Int32s) -> None:
        self.ngrams.begin(prompt)

    def _extend(self, tokens: Int32s) -> None:
        self.ngrams.extend(tokens)

    def _grow(self) -> None:
        self.ngrams.grow(self.tree)
        self.cues.grow(self.tree)

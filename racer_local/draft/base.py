"""What the drafters share: a scratch tree that their sources fill, and the text so far."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.draft import TopK
from racer_local.kernels import layout
from racer_local.tree import DraftTree, Int32s, Limit, NodeIds, Tokens


class TreeDrafter:
    """A drafter whose sources grow one tree in turn: the first comes first, the next fills what is left.

    Subclasses grow `self.tree` in `_grow` and learn in `_begin`, `observe` and `_extend`.
    """

    breadth = 0

    def __init__(self, config: DraftConfig, banned: NDArray[np.bool_]) -> None:
        self.config = config
        self.banned = banned
        self.tree = layout.new_scratch(config.nodes)
        self._ordered = np.zeros((4, config.nodes), np.int32)
        self._drafted = DraftTree.chain([0])

    def draft(self, root: int, limit: Limit) -> DraftTree:
        layout.start(self.tree, root, limit.nodes, limit.leaves, limit.depth)
        self._grow()
        n = layout.depth_first(self.tree, self._ordered)
        self._drafted = DraftTree(*self._ordered[:, :n].copy())
        return self._drafted

    def begin(self, prompt: Tokens) -> None:
        self._begin(np.asarray(prompt, np.int32))

    def accept(self, path: NodeIds, bonus: int) -> None:
        self._extend(np.append(self._drafted.tokens[path[1:]], np.int32(bonus)))

    def observe(self, tree: DraftTree, top_k: TopK) -> None: ...

    @abstractmethod
    def _grow(self) -> None:
        """Add nodes to `self.tree`, which holds the root and the limits."""

    def _begin(self, prompt: Int32s) -> None:
        """A new text, which is `prompt` so far."""

    def _extend(self, tokens: Int32s) -> None:
        """The text goes on with `tokens`."""


class Text:
    """A growing token array."""

    def __init__(self) -> None:
        self._tokens = np.zeros(1024, np.int32)
        self.length = 0

    @property
    def tokens(self) -> Int32s:
        """[length] a view, valid until the text grows."""
        return self._tokens[: self.length]

    def extend(self, tokens: Int32s) -> None:
        needed = self.length + len(tokens)
        if needed > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.zeros(2 * needed - self.length, np.int32)])
        self._tokens[self.length : needed] = tokens
        self.length = needed

    def shared_prefix(self, tokens: Int32s) -> int:
        """How many tokens this text and `tokens` have in common at their start."""
        n = min(self.length, len(tokens))
        different = np.flatnonzero(self._tokens[:n] != tokens[:n])
        return int(different[0]) if len(different) else n

    def cut(self, length: int) -> None:
        self.length = length

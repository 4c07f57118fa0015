"""A drafter whose sources grow one tree in turn: the first comes first, the next fills what is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from racer_local.draft import TopK
from racer_local.kernels import layout
from racer_local.kernels.layout import Scratch
from racer_local.tree import DraftTree, Int32s, Limit, NodeIds, Tokens


class DraftSource:
    """Something that continuations can be drawn from. What a source has no use for it leaves out."""

    breadth = 0
    """See `Drafter.breadth`."""

    def begin(self, prompt: Int32s) -> None:
        """A new text, which is `prompt` so far."""

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        """What the target thinks after every evaluated node."""

    def accept(self, path: NodeIds, tokens: Int32s) -> None:
        """These nodes of the tree observed last were kept, and the text goes on with `tokens`."""

    def grow(self, tree: Scratch) -> None:
        """Add nodes to a tree under construction, within its limits. A node that is there already is used."""
        raise NotImplementedError


class SourcesDrafter:
    """The trees of all sources merged under one root and one budget."""

    prompt_rows: int | None = None

    def __init__(self, sources: Sequence[DraftSource], nodes: int) -> None:
        self.sources = sources
        self.breadth = max(source.breadth for source in sources)
        self._scratch = layout.new_scratch(nodes)
        self._ordered = np.zeros((4, nodes), np.int32)
        self._drafted = DraftTree.chain([0])

    def begin(self, prompt: Tokens) -> None:
        tokens = np.asarray(prompt, np.int32)
        for source in self.sources:
            source.begin(tokens)

    def draft(self, root: int, limit: Limit) -> DraftTree:
        layout.start(self._scratch, root, limit.nodes, limit.leaves, limit.depth)
        for source in self.sources:
            source.grow(self._scratch)
        n = layout.depth_first(self._scratch, self._ordered)
        self._drafted = DraftTree(*self._ordered[:, :n].copy())
        return self._drafted

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        for source in self.sources:
            source.observe(tree, top_k)

    def accept(self, path: NodeIds, bonus: int) -> None:
        tokens = np.append(self._drafted.tokens[path[1:]], np.int32(bonus))
        for source in self.sources:
            source.accept(path, tokens)


class Text:
    """A growing token array."""

    def __init__(self) -> None:
        self._tokens = np.zeros(1024, np.int32)
        self.length = 0

    @property
    def tokens(self) -> Int32s:
        """[length] a view, valid until the text grows."""
        return self._tokens[: self.length]

    def extend(self, tokens: Tokens) -> None:
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

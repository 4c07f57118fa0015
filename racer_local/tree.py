"""The draft tree: what a drafter proposes and a target verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Tokens = Sequence[int] | Int32s
NodeIds = list[int]


class Source(IntEnum):
    """Where a drafted node comes from. A node that two sources propose belongs to the one that came first."""

    ROOT = -1
    CONTEXT = 0
    LOGITS = 1
    CORPUS = 2


@dataclass(frozen=True)
class Limit:
    """How large a draft tree may be."""

    nodes: int
    """Root counted."""
    leaves: int
    """Branches of the target's memory."""
    depth: int
    """Deepest node; the root has depth 0."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A token tree as flat arrays, in depth-first order: a parent before its children, every subtree in one run.

    So the leaves below a node are a range, and the cells of a path lie in ascending order in the cache.

    Worked example, root 7 with the two branches 7-1-2 and 7-3:

    >>> tree = DraftTree.of(tokens=[7, 1, 2, 3], parents=[-1, 0, 1, 0])
    >>> tree.depths.tolist(), [span.tolist() for span in tree.leaf_spans()]
    ([0, 1, 2, 1], [[0, 0, 0, 1], [2, 1, 1, 2]])
    """

    tokens: Int32s
    """[n] vocabulary ids; tokens[0] is the root: the last emitted token, not yet in the cache."""
    parents: Int32s
    """[n] node numbers; -1 for the root."""
    depths: Int32s
    """[n] distance from the root."""
    sources: Int32s
    """[n] values of `Source`."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("tokens", "parents", "depths", "sources"):
            array: Any = getattr(self, name)
            if not (isinstance(array, np.ndarray) and array.dtype == np.int32 and array.shape == (n,)):
                raise ValueError(f"DraftTree.{name} must be an int32 array of shape ({n},)")
        _check_depth_first(self.parents.tolist(), self.depths.tolist())

    @classmethod
    def of(cls, tokens: Tokens, parents: Tokens, sources: Tokens | None = None) -> DraftTree:
        """A tree from lists in depth-first order; depths are derived."""
        depths = [0] * len(parents)
        for node, parent in enumerate(parents):
            depths[node] = depths[parent] + 1 if parent >= 0 else 0
        if sources is None:
            sources = [Source.ROOT] + [Source.CONTEXT] * (len(tokens) - 1)
        return cls(*(np.asarray(a, np.int32) for a in (tokens, parents, depths, sources)))

    @classmethod
    def chain(cls, tokens: Tokens) -> DraftTree:
        """A single path; of one token: nothing drafted."""
        n = len(tokens)
        sources = np.full(n, Source.CONTEXT, np.int32)
        sources[:1] = Source.ROOT
        places = np.arange(-1, n, dtype=np.int32)
        return cls(np.asarray(tokens, np.int32), places[:-1], places[1:], sources)

    @classmethod
    def lone(cls, root: int) -> DraftTree:
        """Nothing drafted; a chain of one token, made often."""
        return cls(np.array([root], np.int32), *_LONE)

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int:
        """The child of `node` that carries `token`, or -1."""
        return self._children.get((node, token), -1)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        edges = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {edge: node for node, edge in enumerate(edges)}

    def leaf_spans(self) -> tuple[Int32s, Int32s]:
        """([n] first, [n] end): the leaves below each node are numbers first .. end-1, counted from the left."""
        n, parents = len(self), self.parents.tolist()
        first, end, leaves = [0] * n, [0] * n, 0
        for node in range(n):
            first[node] = leaves
            if node + 1 == n or parents[node + 1] != node:
                leaves += 1
                end[node] = leaves
        for node in range(n - 1, 0, -1):
            end[parents[node]] = max(end[parents[node]], end[node])
        return np.array(first, np.int32), np.array(end, np.int32)


_LONE = tuple(np.array([value], np.int32) for value in (-1, 0, Source.ROOT))


def _check_depth_first(parents: list[int], depths: list[int]) -> None:
    if not parents or parents[0] != -1 or depths[0] != 0:
        raise ValueError("DraftTree: node 0 must be the root (parent -1, depth 0)")
    path = [0]
    for node in range(1, len(parents)):
        depth = depths[node]
        if not 1 <= depth <= len(path) or path[depth - 1] != parents[node]:
            raise ValueError(f"DraftTree: node {node} breaks the depth-first order or has a wrong depth")
        path[depth:] = [node]

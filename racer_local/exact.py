"""Up to how many rows does a batch give what single tokens give, to the bit? Asked of the target itself.

llama.cpp computes a batch with other kernels than a single token, and which ones depends on the number of rows, the
types of weights and cache, the build and the processor. So nothing is assumed: a text is read token by token and then
in trees, and the rows are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from racer_local import remembered
from racer_local.config import MAX_NODES
from racer_local.target import Exactness, Rows, Target
from racer_local.tree import DraftTree, Int32s

SIZES = (*range(2, 10), 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 254, MAX_NODES)
"""Kernels work in blocks of 4, 8, 16 or 32 rows: just before and behind a block."""
TEXT = 520
"""Tokens before the compared ones: beyond 512 cells, attention over a single token may be split among the threads."""
WALK, WALKED = 64, (2, 4, 8, 16, 32, 64)
"""So many tokens are read in trees of these sizes: kernels that differ do so in most rows, but not in all."""
BUDGET = 20.0
"""Seconds after which no larger tree is tried. What was tried until then holds."""
KIND, FORMAT = "exactness", 1


def measure(target: Target, clock: Callable[[], float] = perf_counter) -> Exactness:
    """Compare rows of trees of growing size with those of single tokens. The cache is empty afterwards."""
    return _Comparison(target).run(clock)


class _Comparison:
    """A text, and tokens behind it that are read one by one and in trees."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.most = min(target.max_nodes, target.n_ctx // 2)
        read = max(self.most, min(WALK, target.n_ctx // 2))
        ids = (np.arange(TEXT + read + 1) * 7919 + 17) % target.n_vocab
        self.text = ids[: min(TEXT, target.n_ctx - read - 2)].astype(np.int32)
        self.tokens = ids[TEXT:].astype(np.int32)
        self.singles: list[Rows] = []

    def run(self, clock: Callable[[], float]) -> Exactness:
        started, sizes, branches = clock(), [1], self.target.max_leaves > 1
        try:
            self._read_singles()
            for n in [size for size in SIZES if size <= self.most]:
                if not self._tree_agrees(*_chain(self.tokens, n)):
                    branches = False
                    break
                branches = branches and (n < 3 or self._tree_agrees(*_comb(self.tokens, n)))
                sizes.append(n)
                if clock() - started > BUDGET:
                    break
            while sizes[-1] > 1 and not all(
                self._walk_agrees(_chain, n) for n in {*WALKED, sizes[-1]} if n <= sizes[-1]
            ):
                sizes.pop()
                branches = False
            rows = sizes[-1]
            branches = branches and rows > 2 and self._walk_agrees(_comb, rows) and self._prompt_agrees()
            return Exactness(rows, branches)
        finally:
            self.target.commit([])
            self.target.prefill(self.text[:0])

    def _read_singles(self) -> None:
        """The rows of the tokens, one by one."""
        self.target.prefill(self.text)
        for token in self.tokens:
            self.singles.append(self.target.evaluate(DraftTree.lone(int(token)))[0].copy())
            self.target.commit([0])

    def _tree_agrees(self, tree: DraftTree, path: list[int]) -> bool:
        """Whether the path's rows are those of single tokens, and the next one behind half of it too."""
        self.target.prefill(self.text)
        keep = (len(path) + 1) // 2
        return self._rows_agree(tree, path, 0, keep) and self._next_agrees(keep)

    def _walk_agrees(self, shape: Callable[[Int32s, int], tuple[DraftTree, list[int]]], n: int) -> bool:
        """Whether all rows are the same where the tokens are read in trees of that shape with n nodes each."""
        self.target.prefill(self.text)
        at = 0
        while at < len(self.tokens) - n:
            tree, path = shape(self.tokens[at:], n)
            if not self._rows_agree(tree, path, at, len(path)):
                return False
            at += len(path)
        return self._next_agrees(at)

    def _rows_agree(self, tree: DraftTree, path: list[int], at: int, keep: int) -> bool:
        rows = self.target.evaluate(tree)
        same = all(_equal(rows[node], self.singles[at + depth]) for depth, node in enumerate(path))
        self.target.commit(path[:keep])
        return same

    def _prompt_agrees(self) -> bool:
        """Whether a long batch leaves the cache as single tokens do."""
        self.target.prefill(self.text[: len(self.text) // 2])
        self.target.prefill(np.concatenate([self.text, self.tokens[:-1]]))
        return self._next_agrees(len(self.tokens) - 1)

    def _next_agrees(self, n: int) -> bool:
        rows = self.target.evaluate(DraftTree.lone(int(self.tokens[n])))
        same = _equal(rows[0], self.singles[n])
        self.target.commit([0])
        return same


def _chain(tokens: Int32s, n: int) -> tuple[DraftTree, list[int]]:
    return DraftTree.chain(tokens[:n]), list(range(n))


def _comb(tokens: Int32s, n: int) -> tuple[DraftTree, list[int]]:
    """A tree of n nodes, the path of tokens in it with a leaf (of the path's next but one token) beside each step.

    >>> tree, path = _comb(np.array([5, 6, 7, 8], np.int32), 5)
    >>> tree.tokens.tolist(), tree.parents.tolist(), path
    ([5, 7, 6, 8, 7], [-1, 0, 0, 2, 2], [0, 2, 4])
    """
    nodes, parents, path = [int(tokens[0])], [-1], [0]
    while len(nodes) < n:
        depth = len(path)
        if len(nodes) + 2 <= n:
            nodes.append(int(tokens[depth + 1]))
            parents.append(path[-1])
        nodes.append(int(tokens[depth]))
        parents.append(path[-1])
        path.append(len(nodes) - 1)
    return DraftTree.of(nodes, parents), path


def _equal(a: Rows, b: Rows) -> bool:
    """To the bit, where a NaN equals itself."""
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))


def recall(facts: Mapping[str, Any], folder: Path | None = None) -> Exactness | None:
    """What was found for these facts (model, build, threads, ...) on this machine, or None."""
    data = remembered.recall(KIND, FORMAT, facts, folder) or {}
    rows, branches = data.get("rows"), data.get("branches")
    if type(rows) is int and 1 <= rows <= MAX_NODES and isinstance(branches, bool):
        return Exactness(rows, branches)
    return None


def remember(facts: Mapping[str, Any], found: Exactness, folder: Path | None = None) -> None:
    """Keep what was found for these facts."""
    remembered.remember(KIND, FORMAT, facts, {"rows": found.rows, "branches": found.branches}, folder)

"""The k largest logits of each row."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK = 128
"""Logits of a block: most of them hold none of the best, which one vector loop shows."""


@njit(cache=True)
def _any_above(block, bound):  # type: ignore[no-untyped-def]
    # A sum of comparisons over a slice is what LLVM turns into vector code; a running maximum is not.
    above = np.int32(0)
    for i in range(block.shape[0]):
        above += np.int32(block[i] > bound)
    return above > 0


@njit(cache=True)
def _insert(ids, values, k, token, value):  # type: ignore[no-untyped-def]
    """Sort one candidate into the k best; an equal value stays behind the earlier id."""
    j = k - 1
    while j > 0 and values[j - 1] < value:
        values[j] = values[j - 1]
        ids[j] = ids[j - 1]
        j -= 1
    values[j] = value
    ids[j] = token


@njit(cache=True)
def top_k(logits, ids, values):  # type: ignore[no-untyped-def]
    """Fill ids [n, k] and values [n, k] with the k largest of each row of logits [n, vocabulary], falling.

    At a tie the lower id comes first. A place that no number fills (fewer than k tokens above -inf; nan
    counts as -inf) has id -1.

    Worked example, k = 2: the row 0.5 2.0 2.0 1.0 gives ids 1 2.
    """
    n, vocabulary = logits.shape
    k = ids.shape[1]
    for r in range(n):
        row = logits[r]
        for j in range(k):
            ids[r, j] = -1
            values[r, j] = -np.inf
        for start in range(0, vocabulary, BLOCK):
            end = min(start + BLOCK, vocabulary)
            if _any_above(row[start:end], values[r, k - 1]):
                for i in range(start, end):
                    if row[i] > values[r, k - 1]:
                        _insert(ids[r], values[r], k, i, row[i])


def warm_up() -> None:
    ids: NDArray[np.int32] = np.zeros((1, 2), np.int32)
    top_k(np.zeros((1, 4), np.float32), ids, np.zeros((1, 2), np.float32))

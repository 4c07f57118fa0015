"""The order of a text's positions by what stands at and before them: a suffix array of the reversed text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from racer_local.kernels.history import BREAK
from racer_local.tree import Int32s

CHUNK = 1 << 18
MOST_TOKENS = (1 << 31) // 3 - 1
"""Of one segment: its bytes, up to three a token, are counted in 32 bits."""


def sort_positions(tokens: Int32s) -> Int32s:
    """[n] the positions of tokens [n], sorted by tokens[p], tokens[p - 1], ...; BREAK comes first, no token before it.

    libdivsufsort sorts bytes, so each token becomes its rank among those that occur, in two bytes or three. Peak
    memory: 10 bytes a token, or 15 where more than 65,535 different ones occur; and the tokens.

    Worked example: 5 7 5 BREAK gives 3 0 2 1: BREAK, then 5 at the start, then 5 behind 7, then 7.
    """
    from pydivsufsort import divsufsort

    packed = _as_bytes(tokens)
    width = packed.shape[1]
    suffixes = divsufsort(packed.reshape(-1))
    n, done = len(tokens), 0
    for start in range(0, len(suffixes), CHUNK):
        part = suffixes[start : start + CHUNK]
        part = part[part % width == 0]
        suffixes[done : done + len(part)] = n - 1 - part // width
        done += len(part)
    return np.asarray(suffixes[:n], np.int32)


def _as_bytes(tokens: Int32s) -> NDArray[np.uint8]:
    """[n, width] the ranks of the reversed tokens, highest byte first."""
    occurs = np.zeros(int(tokens.max()) + 2, np.bool_)
    for start in range(0, len(tokens), CHUNK):
        occurs[tokens[start : start + CHUNK] - BREAK] = True
    ranks = (np.cumsum(occurs) - 1).astype(np.uint32)
    width = 2 if ranks[-1] < 1 << 16 else 3
    packed = np.empty((len(tokens), width), np.uint8)
    for start in range(0, len(tokens), CHUNK):
        part = ranks[tokens[::-1][start : start + CHUNK] - BREAK].astype(">u4")
        packed[start : start + CHUNK] = part.view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    return packed

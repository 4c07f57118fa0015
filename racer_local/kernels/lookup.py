"""Prompt lookup: where did the end of the text occur before?"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def find_continuation(text, n, longest):  # type: ignore[no-untyped-def]
    """Position behind the latest earlier occurrence of the longest suffix of text[:n]; -1 if there is none.

    Suffixes of `longest` down to one token are tried.

    Worked example: in 5 6 7 8 5 6 the suffix 5 6 occurred before, and position 2 follows it.
    """
    for length in range(min(longest, n - 1), 0, -1):
        for end in range(n - 1, length - 1, -1):
            j = 1
            while j <= length and text[end - j] == text[n - j]:
                j += 1
            if j > length:
                return end
    return -1


def warm_up() -> None:
    find_continuation(np.zeros(4, np.int32), 4, 3)

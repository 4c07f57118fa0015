"""What an index would draft behind a text, for people: continuations of several tokens, how often, in which files."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from racer_local.corpus.store import Store
from racer_local.kernels import suffixes
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.kernels.suffixes import LONGEST, as_index, new_found
from racer_local.tree import Int32s

AHEAD = 12
"""Tokens of a continuation, if its document goes on that long."""


class Continuation(NamedTuple):
    """What followed the end of a text."""

    tokens: list[int]
    matched: int
    """Tokens at the end of the text that stand before it, at least."""
    times: int
    """How often, of the occurrences that a draft looks at."""
    files: list[str]


def search(store: Store, text: Int32s) -> list[Continuation]:
    """The continuations of a text's last tokens, the longest matches first, then the commonest.

    Of each length of match up to 16 as many occurrences as a draft looks at, spread evenly over all.
    """
    context = np.full(CONTEXT, BREAK, np.int32)
    context[CONTEXT - len(text[-LONGEST:]) :] = text[-LONGEST:]
    found, index = new_found(), as_index(store.places, store.resident("directory"), store.resident("starts"))
    names = [[file.name for file in store.files(number)] for number in range(store.n_segments)]
    counts: Counter[tuple[int, ...]] = Counter()
    longest: dict[tuple[int, ...], int] = {}
    files: dict[tuple[int, ...], dict[str, None]] = {}
    for i in range(suffixes.find(index, context, 1, 0, found)):
        number, file = divmod(int(found.files[i]), 1 << 32)
        ahead = store.segment(number).tokens[found.positions[i] :][:AHEAD]
        tokens = tuple(ahead[: np.argmax(np.append(ahead, BREAK) == BREAK)].tolist())
        counts[tokens] += 1
        longest[tokens] = max(longest.get(tokens, 0), int(found.lengths[i]))
        files.setdefault(tokens, {})[names[number][file]] = None
    order = sorted(counts, key=lambda tokens: (-longest[tokens], -counts[tokens]))
    return [Continuation([*tokens], longest[tokens], counts[tokens], [*files[tokens]]) for tokens in order]

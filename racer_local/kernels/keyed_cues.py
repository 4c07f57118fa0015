"""Cues keyed by what came before: the model's likeliest next tokens when a token pattern was last evaluated.

The paper keys a cue by one token. A key of the last two or three is sharper, one that skips the last token still
answers where a name or a number differs. All keys share one hash table; a new row replaces what is in its slot,
so memory is bounded and the recent stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from racer_local.kernels import history as _history

_mix = _history.mix

NONE = -1
KEYS = ((0, 1), (0, 2), (0, 3), (1, 2))
"""(skipped, taken): the tokens of a key, counted from the end of the context."""
FLOOR = -5.8
"""Log probability of what is not among a row's likeliest."""


class Cues(NamedTuple):
    keys: NDArray[np.uint32]
    """[slots] a power of two; 0 is empty."""
    tokens: NDArray[np.int32]
    """[slots, k] likeliest first, -1 where there are fewer."""
    log_probs: NDArray[np.float32]
    """[slots, k] among the k."""
    stamps: NDArray[np.int64]
    """[slots] the history's length when the row was written."""


def new_cues(slots: int, k: int) -> Cues:
    if slots & (slots - 1):
        raise ValueError(f"the number of slots must be a power of two, not {slots}")
    return Cues(
        np.zeros(slots, np.uint32),
        np.zeros((slots, k), np.int32),
        np.zeros((slots, k), np.float32),
        np.zeros(slots, np.int64),
    )


def clear(cues: Cues) -> None:
    """Forget everything."""
    cues.keys[:] = 0


@njit(cache=True)
def _hash(context, end, kind):  # type: ignore[no-untyped-def]
    """The hash of a key of the context before `end`; 0 where a token is missing."""
    skipped, taken = KEYS[kind]
    if end < skipped + taken:
        return np.uint64(0)
    key = _mix(np.uint64(0), kind)  # mixed, or pairs of one kind would be pairs of another
    for i in range(end - skipped - taken, end - skipped):
        if context[i] < 0:
            return np.uint64(0)
        key = _mix(key, context[i])
    return key | np.uint64(1)


@njit(cache=True)
def log_softmax(logits, out):  # type: ignore[no-untyped-def]
    """Log probabilities [k] among the k logits [k] of a row, likeliest first; at least FLOOR.

    A row of which nothing is known has FLOOR everywhere.
    """
    if not np.isfinite(logits[0]):
        out[:] = FLOOR
        return
    total = np.float32(0)
    for j in range(logits.shape[0]):
        total += np.exp(logits[j] - logits[0])
    for j in range(logits.shape[0]):
        out[j] = max(logits[j] - logits[0] - np.log(total), np.float32(FLOOR))


@njit(cache=True)
def put(cues, context, tokens, log_probs, stamp):  # type: ignore[no-untyped-def]
    """The model's likeliest tokens [k] after a context [c], under each of its keys."""
    for kind in range(len(KEYS)):
        key = _hash(context, context.shape[0], kind)
        if key != 0:
            slot = np.int64((key >> np.uint64(32)) & np.uint64(cues.keys.shape[0] - 1))
            cues.keys[slot], cues.stamps[slot] = np.uint32(key & np.uint64(0xFFFFFFFF)), stamp
            for j in range(tokens.shape[0]):
                cues.tokens[slot, j], cues.log_probs[slot, j] = tokens[j], log_probs[j]


@njit(cache=True)
def find(cues, context, end, slots):  # type: ignore[no-untyped-def]
    """Fill slots [keys] with where the cues of the context before `end` are, NONE where there is none."""
    for kind in range(len(KEYS)):
        key = _hash(context, end, kind)
        slot = np.int64((key >> np.uint64(32)) & np.uint64(cues.keys.shape[0] - 1))
        slots[kind] = slot if key != 0 and cues.keys[slot] == np.uint32(key & np.uint64(0xFFFFFFFF)) else NONE


def warm_up() -> None:
    cues = new_cues(16, 2)
    context, row = np.array([1, 2, 3], np.int32), np.zeros(2, np.float32)
    log_softmax(np.zeros(2, np.float32), row)
    put(cues, context, np.array([4, 5], np.int32), row, np.int64(1))
    find(cues, context, 3, np.zeros(len(KEYS), np.int64))

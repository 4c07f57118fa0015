"""Text seen before, and where the end of a context occurred in it: hash chains over a window of tokens.

Every position links to the previous one that ends the same n-gram, for the n of ORDERS. So the most recent
occurrences of a context's suffixes are found by walking a few links, whatever the length of the history, and the
exact length of each match is read off the text itself. Nothing is allocated, and the oldest text makes room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

NONE = -1
BREAK = -1
"""In the place of a token: no match crosses it."""
ORDERS = (1, 2, 3, 6)
"""Suffix lengths that are looked up."""
LONGEST = 20
"""Tokens up to which a match is measured."""
CONTEXT = 32
"""Tokens of a context array: a power of two, at least LONGEST."""
PER_ORDER = 8
"""Occurrences taken of each suffix length, most recent first."""
WALK = 16
"""Links followed for them: a hash bucket may hold other n-grams, and some end a longer match, counted already."""
MOST = PER_ORDER * len(ORDERS)


class History(NamedTuple):
    """A position counts the tokens appended before it; its place in the window is its remainder."""

    tokens: Int32s
    """[window] a power of two."""
    previous: Int32s
    """[orders, window] the previous position that ends the same n-gram, or NONE. Room for 2^31 tokens."""
    latest: Int32s
    """[orders, buckets] the last position of each n-gram's hash."""
    length: NDArray[np.int64]
    """[1] tokens appended so far."""
    buckets: Int32s
    """[orders] scratch."""


class Matches(NamedTuple):
    """Occurrences of a context: what followed, where, and how long the match is."""

    tokens: Int32s
    positions: NDArray[np.int64]
    lengths: Int32s


def new_history(window: int) -> History:
    if window & (window - 1):
        raise ValueError(f"the window must be a power of two, not {window}")
    history = History(
        np.zeros(window, np.int32),
        np.zeros((len(ORDERS), window), np.int32),
        np.zeros((len(ORDERS), window), np.int32),
        np.zeros(1, np.int64),
        np.zeros(len(ORDERS), np.int32),
    )
    clear(history)
    return history


def new_matches() -> Matches:
    return Matches(np.zeros(MOST, np.int32), np.zeros(MOST, np.int64), np.zeros(MOST, np.int32))


def clear(history: History) -> None:
    """Forget everything."""
    history.latest[:] = NONE
    history.length[0] = 0


@njit(cache=True)
def mix(key, token):  # type: ignore[no-untyped-def]
    """One more token into a 64-bit hash."""
    key = (key ^ np.uint64(token + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    return key ^ (key >> np.uint64(29))


@njit(cache=True)
def _find_buckets(tokens, end, buckets, n_buckets):  # type: ignore[no-untyped-def]
    """The bucket of each suffix of ORDERS that ends before position `end`; NONE from the first BREAK on.

    tokens: a power of two of them, addressed by the remainder of their position.
    """
    mask, key, order = tokens.shape[0] - 1, np.uint64(0), 0
    for o in range(len(ORDERS)):
        buckets[o] = NONE
    for o in range(len(ORDERS)):
        while order < ORDERS[o]:
            order += 1
            token = tokens[(end - order) & mask] if order <= end else BREAK
            if token < 0:
                return
            key = mix(key, token)
        buckets[o] = (key >> np.uint64(20)) & np.uint64(n_buckets - 1)


@njit(cache=True)
def append(history, tokens):  # type: ignore[no-untyped-def]
    """The text goes on with tokens [m]; a BREAK may be among them."""
    mask, n_buckets = history.tokens.shape[0] - 1, history.latest.shape[1]
    for i in range(tokens.shape[0]):
        at = history.length[0]
        history.tokens[at & mask] = tokens[i]
        history.length[0] = at + 1
        _find_buckets(history.tokens, at + 1, history.buckets, n_buckets)
        for o in range(len(ORDERS)):
            bucket = history.buckets[o]
            if bucket == NONE:
                break
            history.previous[o, at & mask] = history.latest[o, bucket]
            history.latest[o, bucket] = at


@njit(cache=True)
def is_kept(history, position):  # type: ignore[no-untyped-def]
    """Whether a position is one, and still in the window."""
    return position >= 0 and history.length[0] - position <= history.tokens.shape[0]


@njit(cache=True)
def _match_length(history, position, context):  # type: ignore[no-untyped-def]
    """How many tokens the text up to and with `position` shares with the end of the context, up to LONGEST."""
    mask, tokens = history.tokens.shape[0] - 1, history.tokens
    oldest = max(0, history.length[0] - tokens.shape[0])
    most, length = min(LONGEST, position - oldest + 1), 0
    while length < most:
        token = tokens[(position - length) & mask]
        if token < 0 or token != context[CONTEXT - 1 - length]:
            break
        length += 1
    return length


@njit(cache=True)
def find(history, context, matches):  # type: ignore[no-untyped-def]
    """Fill `matches` with occurrences of the context's suffixes, the longest suffixes first; returns how many.

    context [CONTEXT]: the end of a text, BREAK where there is none. Each suffix length of ORDERS gives its PER_ORDER
    most recent occurrences that match longer suffixes not at all. Those at the very end of the text, which nothing
    follows yet, are left out.

    Worked example: in 5 6 7 5 6 8 the context 1 5 6 occurred twice, both with a match of two tokens: first 8 (at
    position 5), then 7 (at 2).
    """
    found = 0
    mask = history.tokens.shape[0] - 1
    longer = LONGEST + 1
    _find_buckets(context, CONTEXT, history.buckets, history.latest.shape[1])
    for o in range(len(ORDERS) - 1, -1, -1):
        order, bucket = ORDERS[o], history.buckets[o]
        if bucket == NONE:
            continue
        position, taken, walked = history.latest[o, bucket], 0, 0
        while walked < WALK and taken < PER_ORDER and is_kept(history, position):
            walked += 1
            follower = history.tokens[(position + 1) & mask] if position + 1 < history.length[0] else BREAK
            if follower >= 0:
                length = _match_length(history, position, context)
                if order <= length < longer:
                    matches.tokens[found], matches.positions[found] = follower, position + 1
                    matches.lengths[found] = length
                    found += 1
                    taken += 1
            position = history.previous[o, position & mask]
        longer = order
    return found


@njit(cache=True)
def age(history, token):  # type: ignore[no-untyped-def]
    """How many tokens ago `token` occurred last, or 0 where it is not remembered (or its bucket is another's).

    Worked example: after 5 6 7, the age of 7 is 1, that of 5 is 3, that of 8 is 0.
    """
    bucket = np.int64((mix(np.uint64(0), token) >> np.uint64(20)) & np.uint64(history.latest.shape[1] - 1))
    position = history.latest[0, bucket]
    if is_kept(history, position) and history.tokens[position & (history.tokens.shape[0] - 1)] == token:
        return history.length[0] - position
    return 0


def warm_up() -> None:
    history, matches = new_history(64), new_matches()
    append(history, np.array([1, 2, 1, 2], np.int32))
    find(history, np.full(CONTEXT, 1, np.int32), matches)
    age(history, np.int32(1))

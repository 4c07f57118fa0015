"""The user's indexed text: where the end of a context occurs in it, found by binary search.

A segment is a text and the order of its positions, sorted by what stands at and before each: tokens[p], tokens[p - 1],
and so on. (That is the suffix array of the reversed text.) So what shares the last l tokens of a context is one run of
that order, and the runs of longer suffixes lie inside those of shorter ones: one search finds all of them.

The two arrays are as large as the user likes, and stay in their file: the kernel reads it with pread, some 20 tokens
or 128 positions at a time, out of the system's cache. (A map of the file would be as fast, but a touch of it can make
a megabyte resident.) A directory with the context and the follower of every STRIDE-th position of the
order is in memory: the search starts in it, and runs longer than some strides are sampled from it, so that few reads
are needed. A file that is damaged or cut short can lead to wrong guesses, never outside an array.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from racer_local.kernels.history import BREAK, CONTEXT

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

LONGEST = 16
"""Tokens up to which a match is measured."""
ORDERS = (1, 2, 3, 4, 6, 9, 14)
"""Suffix lengths that are looked up, beside that of the longest match."""
PER_ORDER = 8
"""Occurrences taken of each: all, or as many spread evenly over them."""
RELATED = 2
"""Suffixes shorter than the longest match by more than this factor are not looked at: they would say less."""
STRIDE = 128
"""Positions of the order to an entry of the directory."""
DEPTH = 8
"""Tokens of context that an entry holds."""
ROW = DEPTH + 2
"""Numbers of an entry: the context, last token first; what followed; the position."""
EXACT = 8
"""A run of more entries than this is measured in entries: its size is at most one STRIDE an end too small."""

GOOD = 4
"""A match of so many tokens is worth a search, if it is longer than those of the text and no other segment has more."""
PATIENCE = 32
"""Searches without a good match after which a segment is searched only every PAUSE-th time."""
ALWAYS = np.iinfo(np.int64).max
PAUSE = 8
WORTH = 8
"""Searches without a good match that a good one makes up for."""
MOST_SEGMENTS = 16
"""Of one file."""
MOST = 96
"""Matches of one search; what is found in further segments is left out."""

FILE, AT_TOKENS, N_TOKENS, AT_ORDER, FIRST_ENTRY, FIRST_START, N_FILES, SPOT, BEST, IDLE = range(10)
"""Columns of `Index.segments`."""


class Index(NamedTuple):
    """All segments that are searched."""

    segments: Int64s
    """[segments, 10] a file descriptor, where the tokens begin in the file (bytes), how many there are, where the order
    begins; where the segment's own begin in the two arrays below, and its number of files; and scratch: where the
    context belongs in the order, its longest match there, and searches without a good match, up to PATIENCE."""
    directory: Int32s
    """[entries, ROW]"""
    starts: Int32s
    """Where each file of a segment begins in it, and where the last one ends."""


class Segment(NamedTuple):
    """A segment's arrays, for whoever has mapped the file."""

    tokens: Int32s
    """[n] vocabulary ids; BREAK behind each document."""
    order: Int32s
    """[n] positions, sorted by what stands at and before them."""
    directory: Int32s
    """[entries x ROW]"""
    starts: Int32s
    """[files + 1] where each file begins."""


class Found(NamedTuple):
    """What a search found, and its scratch."""

    tokens: Int32s
    """[MOST] what followed an occurrence."""
    lengths: Int32s
    """[MOST] tokens that the occurrence shares with the context, at least."""
    files: Int64s
    """[MOST] a number for each file of each segment."""
    positions: Int64s
    """[MOST] where the follower stands in its segment."""
    sizes: Int64s
    """[LONGEST + 1] occurrences by that length, the ones not taken counted too."""
    window: Int32s
    """[LONGEST + 1] the text before, at and behind a position."""
    block: Int32s
    """[STRIDE] a part of an order."""
    held: Int64s
    """[2] segment and number of that part."""
    searches: Int64s
    """[2] so many there were; and how many without a good match a segment may have had to be searched every time."""


NO_INDEX = Index(np.zeros((0, 10), np.int64), np.zeros((0, ROW), np.int32), np.zeros(0, np.int32))

if hasattr(os, "pread"):
    _pread = types.ExternalFunction(
        "pread", types.int64(types.int32, types.CPointer(types.int32), types.uint64, types.int64)
    )
else:

    @njit(cache=True)
    def _pread(file, buffer, size, at):  # type: ignore[no-untyped-def]
        return 0


def new_found() -> Found:
    return Found(
        np.zeros(MOST, np.int32),
        np.zeros(MOST, np.int32),
        np.zeros(MOST, np.int64),
        np.zeros(MOST, np.int64),
        np.zeros(LONGEST + 1, np.int64),
        np.zeros(LONGEST + 1, np.int32),
        np.zeros(STRIDE, np.int32),
        np.full(2, -1, np.int64),
        np.array([0, PATIENCE]),
    )


def as_index(segments: list[tuple[int, int, int, int]], directories: list[Int32s], starts: list[Int32s]) -> Index:
    """Of segments with (file descriptor, byte of the tokens, tokens, byte of the order)."""
    rows, entries, files = [], 0, 0
    for segment, directory, own in zip(segments, directories, starts, strict=True):
        rows.append([*segment, entries, files, len(own) - 1, 0, 0, 0])
        entries, files = entries + len(directory) // ROW, files + len(own)
    if not rows:
        return NO_INDEX
    joined = np.concatenate(directories).reshape(-1, ROW)
    return Index(np.array(rows, np.int64), joined, np.concatenate(starts))


@njit(cache=True)
def write_directory(tokens, order, directory):  # type: ignore[no-untyped-def]
    """Fill directory [entries x ROW] of a segment."""
    n = tokens.shape[0]
    for rank in range(0, n, STRIDE):
        row, p = rank // STRIDE * ROW, order[rank]
        before = False
        for i in range(DEPTH):
            token = tokens[p - i] if i <= p and not before else BREAK
            before = token == BREAK
            directory[row + i] = token
        directory[row + DEPTH] = tokens[p + 1] if p + 1 < n else BREAK
        directory[row + DEPTH + 1] = p


@njit(cache=True)
def _read_text(index, number, position, found):  # type: ignore[no-untyped-def]
    """Put into found.window what stands around a position, itself in the place LONGEST - 1, BREAK beyond the ends."""
    at, window = index.segments[number], found.window
    first = position - (LONGEST - 1)
    begin, end = max(0, first), min(at[N_TOKENS], position + 2)
    window[:] = BREAK
    if begin < end:
        # A read that comes short, the file having been cut, leaves BREAK.
        _pread(at[FILE], window[begin - first :].ctypes, 4 * (end - begin), at[AT_TOKENS] + 4 * begin)


@njit(cache=True)
def _position(index, number, rank, found):  # type: ignore[no-untyped-def]
    """The position of a rank; -1 where the file has none."""
    at, block = index.segments[number], rank // STRIDE
    if found.held[0] != number or found.held[1] != block:
        found.held[0], found.held[1] = number, block
        found.block[:] = -1
        count = min(STRIDE, at[N_TOKENS] - block * STRIDE)
        _pread(at[FILE], found.block.ctypes, 4 * count, at[AT_ORDER] + 4 * STRIDE * block)
    position = found.block[rank - block * STRIDE]
    return position if position < at[N_TOKENS] else -1


@njit(cache=True)
def _shared(index, number, position, context, first, most, found):  # type: ignore[no-untyped-def]
    """How many tokens, up to `most`, the text up to and with a position shares with the context's end, `first` of them
    being known; and -1, 0 or 1: does it come before, with or behind the context in the order?"""
    if position < 0:
        return 0, -1
    _read_text(index, number, position, found)
    for i in range(first, most):
        token, wanted = found.window[LONGEST - 1 - i], context[CONTEXT - 1 - i]
        if token != wanted:
            return i, -1 if token < wanted else 1
    return most, 0


@njit(cache=True)
def _shared_by_rank(index, number, rank, context, most, found):  # type: ignore[no-untyped-def]
    return _shared(index, number, _position(index, number, rank, found), context, 0, most, found)


@njit(cache=True)
def _shared_by_entry(index, number, entry, context, most, found):  # type: ignore[no-untyped-def]
    row = index.segments[number, FIRST_ENTRY] + entry
    for i in range(min(DEPTH, most)):
        token, wanted = index.directory[row, i], context[CONTEXT - 1 - i]
        if token != wanted:
            return i, -1 if token < wanted else 1
    if most <= DEPTH:
        return most, 0
    return _shared(index, number, index.directory[row, DEPTH + 1], context, DEPTH, most, found)


@njit(cache=True)
def locate(index, number, context, most, found):  # type: ignore[no-untyped-def]
    """Where the last `most` tokens of a context belong in a segment's order, and how many of them occurred together.

    The longest match is next to that place, and both its neighbours are met on the way to it.
    """
    n, longest = index.segments[number, N_TOKENS], 0
    low, high = 0, (n + STRIDE - 1) // STRIDE
    while low < high:
        middle = (low + high) // 2
        shared, side = _shared_by_entry(index, number, middle, context, most, found)
        longest = max(longest, shared)
        if side < 0:
            low = middle + 1
        else:
            high = middle
    high = min(low * STRIDE, n)
    low = max(0, (low - 1) * STRIDE + 1)
    while low < high:
        middle = (low + high) // 2
        shared, side = _shared_by_rank(index, number, middle, context, most, found)
        longest = max(longest, shared)
        if side < 0:
            low = middle + 1
        else:
            high = middle
    return low, longest


@njit(cache=True)
def _run(index, number, context, length, first, step, low, high, by_entry, found):  # type: ignore[no-untyped-def]
    """How many of the ranks first, first + step, ... in a row share `length` tokens with the context: at least `low`,
    at most `high`. Looks near the beginning first."""
    width = 1
    while low < high:
        probe = min(low + width, high) - 1 if width else (low + high) // 2
        rank = first + step * probe
        if by_entry:
            shared, _ = _shared_by_entry(index, number, rank // STRIDE, context, length, found)
        else:
            shared, _ = _shared_by_rank(index, number, rank, context, length, found)
        if shared >= length:
            low, width = probe + 1, 2 * width
        else:
            high, width = probe, 0
    return low


@njit(cache=True)
def _reach(index, number, context, length, at, way, found):  # type: ignore[no-untyped-def]
    """How many ranks share `length` tokens with the context: at, at + 1, ... (way 1), or at - 1, ... (way -1)."""
    first = at if way > 0 else at - 1
    limit = index.segments[number, N_TOKENS] - at if way > 0 else at
    entry = (first + STRIDE - 1) // STRIDE * STRIDE if way > 0 else first // STRIDE * STRIDE
    gap = way * (entry - first)
    entries = max(0, (limit - gap + STRIDE - 1) // STRIDE)
    entries = _run(index, number, context, length, entry, way * STRIDE, 0, entries, True, found)
    least = gap + (entries - 1) * STRIDE + 1 if entries else 0
    if entries > EXACT:
        return least
    most = min(limit, gap + entries * STRIDE)
    return _run(index, number, context, length, first, way, least, most, False, found)


@njit(cache=True)
def _file_of(index, number, position):  # type: ignore[no-untyped-def]
    first, files = index.segments[number, FIRST_START], index.segments[number, N_FILES]
    low, high = 0, files
    while high - low > 1:
        middle = (low + high) // 2
        if index.starts[first + middle] <= position:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True)
def _take(index, number, rank, by_entry, found, n, length):  # type: ignore[no-untyped-def]
    """Note the occurrence of this rank as match n, unless nothing follows it; returns the number of matches."""
    if by_entry:
        row = index.segments[number, FIRST_ENTRY] + rank // STRIDE
        token, position = index.directory[row, DEPTH], index.directory[row, DEPTH + 1]
    else:
        position = _position(index, number, rank, found)
        _read_text(index, number, position, found)
        token = found.window[LONGEST]
    if token < 0 or position < 0 or n == MOST:
        return n
    found.tokens[n], found.lengths[n], found.positions[n] = token, length, position + 1
    found.files[n] = (number << 32) + _file_of(index, number, position)
    return n + 1


@njit(cache=True)
def _sample(index, number, outer, inner, found, n, length):  # type: ignore[no-untyped-def]
    """Take PER_ORDER of the ranks in `outer` (low, high) that are not in `inner`, spread evenly, or all."""
    left, size = inner[0] - outer[0], inner[0] - outer[0] + outer[1] - inner[1]
    take = min(size, PER_ORDER)
    for i in range(take):
        at = (2 * i + 1) * size // (2 * take)
        low = outer[0] if at < left else inner[1]
        rank = outer[0] + at if at < left else inner[1] + at - left
        entry = rank - rank % STRIDE
        by_entry = size > 2 * PER_ORDER * STRIDE and entry >= low
        n = _take(index, number, entry if by_entry else rank, by_entry, found, n, length)
    found.sizes[length] += size
    return n


@njit(cache=True)
def find_in(index, number, context, least, spot, longest, found, n):  # type: ignore[no-untyped-def]
    """Take matches of one segment, the longest first, down to `least` tokens; returns the number of matches.

    spot, longest: as `locate` found them.
    """
    low = high = spot
    for o in range(len(ORDERS), -1, -1):
        length = longest if o == len(ORDERS) else ORDERS[o]
        if (o < len(ORDERS) and length >= longest) or length < least:
            continue
        left = _reach(index, number, context, length, low, -1, found)
        right = _reach(index, number, context, length, high, 1, found)
        n = _sample(index, number, (low - left, high + right), (low, high), found, n, length)
        low, high = low - left, high + right
    return n


@njit(cache=True)
def _look(index, number, context, most, found):  # type: ignore[no-untyped-def]
    """Locate the context in a segment, unless that is idle and not due; returns its longest match there, or -1."""
    at = index.segments[number]
    at[BEST] = -1
    if at[IDLE] < found.searches[1] or (found.searches[0] + number) % PAUSE == 0:
        at[SPOT], at[BEST] = locate(index, number, context, most, found)
    return at[BEST]


@njit(cache=True)
def _judge(index, number, best, text):  # type: ignore[no-untyped-def]
    """Was the search of this segment worth it? Then no other one knows more of the context, nor does the text."""
    at = index.segments[number]
    if at[BEST] >= GOOD and at[BEST] == best and best > text:
        at[IDLE] = max(0, at[IDLE] - WORTH)
    elif at[BEST] >= 0:
        at[IDLE] = min(PATIENCE, at[IDLE] + 1)


@njit(cache=True)
def find(index, context, least, text, found):  # type: ignore[no-untyped-def]
    """Fill `found` with occurrences of the context's suffixes of at least `least` tokens in all segments; how many.

    context [CONTEXT]: the end of a text, BREAK where there is none. Of the longest suffix that occurs in a segment and
    each length of ORDERS below it the segment gives PER_ORDER occurrences that match longer suffixes not at all, as far
    as they are half as long as the longest in any segment.

    text: the longest match in the text itself. A segment that had nothing to say beyond that and the other segments for
    PATIENCE searches is searched only now and then, until it has: what is of no use for a text shall not cost it.

    Worked example: a file 5 6 7 and one 1 5 6 8. The context 1 5 6 occurred once in full: 8 follows it, with a match
    of 3. The suffix 5 6 occurred once more: 7 follows it, with a match of 2.
    """
    segments = index.segments.shape[0]
    found.sizes[:] = 0
    found.held[:] = -1  # the index may be another one than last time
    if segments == 0:
        return 0
    most, n, best = 0, 0, 0
    while most < LONGEST and context[CONTEXT - 1 - most] >= 0:
        most += 1
    if most < least:
        return 0
    found.searches[0] += 1
    for number in range(segments):
        best = max(best, _look(index, number, context, most, found))
    least = max(least, (best + RELATED - 1) // RELATED)
    for number in range(segments):
        _judge(index, number, best, text)
        spot, longest = index.segments[number, SPOT], index.segments[number, BEST]
        if longest >= least:
            n = find_in(index, number, context, least, spot, longest, found, n)
    return n


@njit(cache=True)
def wake(index):  # type: ignore[no-untyped-def]
    """Search all segments again: another text begins."""
    index.segments[:, IDLE] = 0


def warm_up() -> None:
    tokens, order = np.array([1, 2, 1, BREAK], np.int32), np.array([3, 0, 2, 1], np.int32)
    write_directory(tokens, order, np.zeros(ROW, np.int32))
    find(NO_INDEX, np.full(CONTEXT, 1, np.int32), 1, 0, new_found())
    wake(NO_INDEX)

"""What speaks for each token that may come next: matches of the context in the text so far and in the user's indexes,
cues, and how reliable all of them were lately.

The evidence of a context is a list of candidates and numbers about them; `kernels.acceptance` turns those into
probabilities. Nothing here is a guess yet.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from racer_local.kernels import history as _history
from racer_local.kernels import keyed_cues as _cues
from racer_local.kernels import suffixes as _suffixes
from racer_local.kernels.history import CONTEXT, Matches
from racer_local.kernels.keyed_cues import FLOOR, KEYS
from racer_local.kernels.suffixes import Found

_find_matches, _age = _history.find, _history.age
_find_cues = _cues.find
_find_in_corpora = _suffixes.find

Floats = NDArray[np.float32]
Int32s = NDArray[np.int32]

CANDIDATES = 64
"""Most candidates of one context."""
CLASSES = (1, 2, 3, 4, 6, 9, 14)
"""A match of length l counts in every class up to l."""
CORPUS_LEAST = 2
"""A match of fewer tokens in the user's indexes says less than any cue."""
UNSKIPPED = 3
"""The first keys, which take the last one, two and three tokens."""
MEMORY = 0.08
"""Weight of the newest token in the running averages."""
FAR = 1_000_000
"""The age of what was never seen."""

LOG1P = np.log1p(np.arange(1 << 12)).astype(np.float32)
"""Logarithms of what is mostly a small number."""

HITS = len(CLASSES)
"""In `Recent.averages`: how often the newest continuation of each class was right; then the next two."""
COVERED, CONFIDENCE = HITS, HITS + 1
"""How often the token was among the candidates at all; the model's own highest probability."""
CORPUS_HITS = HITS + 2
"""How often the commonest continuation of each class in the indexes was right; from here on one for each class."""
AVERAGES = CORPUS_HITS + len(CLASSES)

NODE_FEATURES = (
    *(f"matches of {n}+" for n in CLASSES),
    *(f"cue {key}" for key in KEYS),
    *(f"cue {key} age" for key in KEYS),
    *("longest", "depth", "candidates", "last row's best", "last row's root", "answer"),
    *(f"hits of {n}+" for n in CLASSES),
    *("covered", "confidence"),
    *(f"corpus occurrences of {n}+" for n in CLASSES),
    *(f"corpus hits of {n}+" for n in CLASSES),
    *("corpus longest", "corpus longest to text"),
)
"""What only an index tells comes last, and is 0 without one."""
HITS_AT = NODE_FEATURES.index(f"hits of {CLASSES[0]}+")
CORPUS_NODE_AT = NODE_FEATURES.index(f"corpus occurrences of {CLASSES[0]}+")
TOKEN_FEATURES = (
    *(f"{what} of {n}+" for n in CLASSES for what in ("count", "newest", "only")),
    *(f"{what} {key}" for key in KEYS for what in ("cue", "not in cue")),
    *("parent cue", "in parent cue", "length", "length to longest", "is longest", "age", "this text"),
    *("token age", "token new", "token in this text", "cues agree", "sharpest cue agrees"),
    *(f"corpus {what} of {n}+" for n in CLASSES for what in ("share", "commonest")),
    *("corpus length", "corpus is longest", "corpus files", "corpus only", "corpus length to text"),
)
CORPUS_TOKEN_AT = TOKEN_FEATURES.index(f"corpus share of {CLASSES[0]}+")


class Recent(NamedTuple):
    """What this conversation was like so far."""

    averages: NDArray[np.float64]
    """[AVERAGES] running averages, from 0 to 1."""
    seen: NDArray[np.int64]
    """[AVERAGES] how many values each has had."""
    start: NDArray[np.int64]
    """[2] the history's length at the start of the conversation; tokens of the answer so far."""
    last: Floats
    """[2] probability of the likeliest token of the row that the root was drawn from, and of the root in it."""


class Evidence(NamedTuple):
    """Scratch of one context."""

    context: Int32s
    """[CONTEXT] its last tokens, BREAK before its start."""
    matches: Matches
    slots: NDArray[np.int64]
    """[2, keys] the cues of the context, and of the context without its last token."""
    tokens: Int32s
    """[C] candidates."""
    counts: Int32s
    """[C, classes] matches that the candidate continues."""
    totals: Int32s
    """[classes] matches."""
    newest: NDArray[np.int64]
    """[2, classes] position and candidate of the most recent match."""
    longest: Int32s
    """[C] the longest match that the candidate continues; 0: none."""
    positions: NDArray[np.int64]
    """[C] where the candidate continues a match last."""
    cues: Floats
    """[C, keys + 1] log probability in each cue and in the parent's; 0: not in it."""
    node: Floats
    """[node features]"""
    features: Floats
    """[C, token features]"""
    row: Floats
    """[k] log probabilities of a row."""
    found: Found
    """Occurrences of the context in the indexes."""
    corpus_counts: Int32s
    """[C, classes] occurrences that the candidate continues, of those taken."""
    corpus_totals: NDArray[np.int64]
    """[2, classes] occurrences taken, and all."""
    commonest: Int32s
    """[classes] the candidate that continues most of them; -1: none."""
    corpus_longest: Int32s
    """[C] the longest occurrence that the candidate continues; 0: none."""
    corpus_files: Int32s
    """[C] files that hold one."""


def new_recent() -> Recent:
    recent = Recent(np.zeros(AVERAGES), np.zeros(AVERAGES, np.int64), np.zeros(2, np.int64), np.zeros(2, np.float32))
    begin(recent, 0)
    return recent


def new_evidence(k: int) -> Evidence:
    classes, keys, c = len(CLASSES), len(KEYS), CANDIDATES
    return Evidence(
        context=np.full(CONTEXT, _history.BREAK, np.int32),
        matches=_history.new_matches(),
        slots=np.zeros((2, keys), np.int64),
        tokens=np.zeros(c, np.int32),
        counts=np.zeros((c, classes), np.int32),
        totals=np.zeros(classes, np.int32),
        newest=np.zeros((2, classes), np.int64),
        longest=np.zeros(c, np.int32),
        positions=np.zeros(c, np.int64),
        cues=np.zeros((c, keys + 1), np.float32),
        node=np.zeros(len(NODE_FEATURES), np.float32),
        features=np.zeros((c, len(TOKEN_FEATURES)), np.float32),
        row=np.zeros(k, np.float32),
        found=_suffixes.new_found(),
        corpus_counts=np.zeros((c, classes), np.int32),
        corpus_totals=np.zeros((2, classes), np.int64),
        commonest=np.zeros(classes, np.int32),
        corpus_longest=np.zeros(c, np.int32),
        corpus_files=np.zeros(c, np.int32),
    )


def begin(recent: Recent, start: int) -> None:
    """A new conversation, whose text starts at position `start` of the history."""
    recent.averages[:] = 0.5
    recent.seen[:] = 0
    recent.start[:] = start, 0
    recent.last[:] = 0


@njit(cache=True)
def _log1p(n):  # type: ignore[no-untyped-def]
    return LOG1P[n] if n < LOG1P.shape[0] else np.float32(np.log(n + 1.0))


@njit(cache=True)
def _candidate(evidence, size, token):  # type: ignore[no-untyped-def]
    """The number of a candidate, a new one where it is not there yet; -1 where there is no room."""
    for c in range(size):
        if evidence.tokens[c] == token:
            return c
    if size == CANDIDATES:
        return -1
    evidence.tokens[size] = token
    evidence.longest[size] = evidence.positions[size] = 0
    evidence.counts[size] = 0
    evidence.cues[size] = 0
    evidence.corpus_counts[size] = 0
    evidence.corpus_longest[size] = evidence.corpus_files[size] = 0
    return size


@njit(cache=True)
def _add_matches(evidence, found):  # type: ignore[no-untyped-def]
    matches, size = evidence.matches, 0
    evidence.totals[:] = 0
    evidence.newest[:] = -1
    for i in range(found):
        c = _candidate(evidence, size, matches.tokens[i])
        if c < 0:
            continue
        size = max(size, c + 1)
        evidence.longest[c] = max(evidence.longest[c], matches.lengths[i])
        evidence.positions[c] = max(evidence.positions[c], matches.positions[i])
        for j in range(len(CLASSES)):
            if matches.lengths[i] < CLASSES[j]:
                break
            evidence.totals[j] += 1
            evidence.counts[c, j] += 1
            if matches.positions[i] > evidence.newest[0, j]:
                evidence.newest[0, j], evidence.newest[1, j] = matches.positions[i], c
    return size


@njit(cache=True)
def _add_occurrences(evidence, taken, size):  # type: ignore[no-untyped-def]
    found, counts, totals = evidence.found, evidence.corpus_counts, evidence.corpus_totals
    totals[:] = 0
    evidence.commonest[:] = -1
    for i in range(taken):
        c = _candidate(evidence, size, found.tokens[i])
        if c < 0:
            continue
        size = max(size, c + 1)
        evidence.corpus_longest[c] = max(evidence.corpus_longest[c], found.lengths[i])
        for j in range(len(CLASSES)):
            if found.lengths[i] < CLASSES[j]:
                break
            totals[0, j] += 1
            counts[c, j] += 1
            best = evidence.commonest[j]
            if best < 0 or counts[c, j] > counts[best, j]:
                evidence.commonest[j] = c
        new = 1
        for k in range(i):
            if found.tokens[k] == found.tokens[i] and found.files[k] == found.files[i]:
                new = 0
        evidence.corpus_files[c] += new
    for j in range(len(CLASSES)):
        for length in range(CLASSES[j], found.sizes.shape[0]):
            totals[1, j] += found.sizes[length]
    return size


@njit(cache=True)
def _add_cue(evidence, cues, slot, column, size):  # type: ignore[no-untyped-def]
    if slot >= 0:
        for j in range(cues.tokens.shape[1]):
            token = cues.tokens[slot, j]
            c = _candidate(evidence, size, token) if token >= 0 else -1
            if c < 0:
                continue
            size = max(size, c + 1)
            evidence.cues[c, column] = min(cues.log_probs[slot, j], np.float32(-1e-4))
    return size


@njit(cache=True)
def _sharpest(slots):  # type: ignore[no-untyped-def]
    """The slot of the longest unskipped key that has a cue, or -1."""
    for kind in range(UNSKIPPED - 1, -1, -1):
        if slots[kind] >= 0:
            return slots[kind]
    return -1


@njit(cache=True)
def gather(history, cues, recent, evidence, index, depth):  # type: ignore[no-untyped-def]
    """Fill in the evidence for what follows evidence.context, `depth` drafted tokens behind the text.

    Candidates are what followed the context's suffixes before, in the text or in the user's indexes, the likeliest
    tokens of its cues, and those of its parent's sharpest cue (what might have come one token earlier often comes
    now). Returns how many there are.
    """
    context, slots = evidence.context, evidence.slots
    size = _add_matches(evidence, _find_matches(history, context, evidence.matches))
    longest = 0
    for c in range(size):
        longest = max(longest, evidence.longest[c])
    taken = _find_in_corpora(index, context, CORPUS_LEAST, longest, evidence.found)
    size = _add_occurrences(evidence, taken, size)
    _find_cues(cues, context, CONTEXT, slots[0])
    _find_cues(cues, context, CONTEXT - 1, slots[1])
    for kind in range(len(KEYS)):
        size = _add_cue(evidence, cues, slots[0, kind], kind, size)
    size = _add_cue(evidence, cues, _sharpest(slots[1]), len(KEYS), size)
    _describe_node(history, cues, recent, evidence, depth, size, longest)
    _describe_tokens(history, cues, recent, evidence, size, longest)
    _describe_corpus(recent, evidence, size, longest)
    return size


@njit(cache=True)
def _describe_node(history, cues, recent, evidence, depth, size, longest):  # type: ignore[no-untyped-def]
    out, f = evidence.node, 0
    now = history.length[0]
    for j in range(len(CLASSES)):
        total = evidence.totals[j]
        out[f] = _log1p(total) if total > 0 else -1.0
        out[HITS_AT + j] = recent.averages[j] if total > 0 else 0.5
        f += 1
    for kind in range(len(KEYS)):
        slot = evidence.slots[0, kind]
        out[f] = 1.0 if slot >= 0 else 0.0
        out[f + len(KEYS)] = _log1p(now - cues.stamps[slot] if slot >= 0 else FAR)
        f += 1
    f += len(KEYS)
    out[f], out[f + 1], out[f + 2] = _log1p(longest), _log1p(depth), _log1p(size)
    out[f + 3], out[f + 4], out[f + 5] = recent.last[0], recent.last[1], _log1p(recent.start[1])
    f += 6 + len(CLASSES)
    out[f], out[f + 1] = recent.averages[COVERED], recent.averages[CONFIDENCE]


@njit(cache=True)
def _describe_tokens(history, cues, recent, evidence, size, longest):  # type: ignore[no-untyped-def]
    now, start = history.length[0], recent.start[0]
    features, counts, totals = evidence.features, evidence.counts, evidence.totals
    for c in range(size):
        token, f = evidence.tokens[c], 0
        for j in range(len(CLASSES)):
            count = counts[c, j]
            features[c, f] = LOG1P[count]
            features[c, f + 1] = 1.0 if evidence.newest[1, j] == c else 0.0
            features[c, f + 2] = 1.0 if count > 0 and count == totals[j] else 0.0
            f += 3
        agree, sharpest = 0.0, 0.0
        for kind in range(len(KEYS)):
            slot, log_prob = evidence.slots[0, kind], evidence.cues[c, kind]
            features[c, f] = 0.0 if slot < 0 else log_prob if log_prob < 0 else FLOOR
            features[c, f + 1] = 1.0 if slot >= 0 and log_prob == 0 else 0.0
            f += 2
            if slot >= 0 and kind < UNSKIPPED:
                sharpest = 1.0 if cues.tokens[slot, 0] == token else 0.0
                agree += sharpest
        log_prob = evidence.cues[c, len(KEYS)]
        features[c, f] = log_prob if log_prob < 0 else FLOOR
        features[c, f + 1] = 1.0 if log_prob < 0 else 0.0
        length, position = evidence.longest[c], evidence.positions[c]
        features[c, f + 2] = LOG1P[length]
        features[c, f + 3] = LOG1P[length] - LOG1P[longest]
        features[c, f + 4] = 1.0 if length == longest else 0.0
        features[c, f + 5] = _log1p(now - position if length > 0 else FAR)
        features[c, f + 6] = 1.0 if length > 0 and position >= start else 0.0
        age = _age(history, token)
        features[c, f + 7] = _log1p(age if age > 0 else FAR)
        features[c, f + 8] = 1.0 if age == 0 else 0.0
        features[c, f + 9] = 1.0 if 0 < age <= now - start else 0.0
        features[c, f + 10], features[c, f + 11] = agree, sharpest


@njit(cache=True)
def _describe_corpus(recent, evidence, size, longest):  # type: ignore[no-untyped-def]
    node, f, found = evidence.node, CORPUS_NODE_AT, 0
    totals = evidence.corpus_totals
    for c in range(size):
        found = max(found, evidence.corpus_longest[c])
    for j in range(len(CLASSES)):
        node[f + j] = _log1p(totals[1, j])
        node[f + len(CLASSES) + j] = recent.averages[CORPUS_HITS + j] - 0.5 if totals[0, j] > 0 else 0.0
    f += 2 * len(CLASSES)
    node[f], node[f + 1] = LOG1P[found], LOG1P[found] - LOG1P[longest] if found > 0 else 0.0
    for c in range(size):
        features, f = evidence.features[c], CORPUS_TOKEN_AT
        length = evidence.corpus_longest[c]
        if length == 0:
            features[f:] = 0
            continue
        for j in range(len(CLASSES)):
            count = evidence.corpus_counts[c, j]
            features[f] = count / totals[0, j] if count > 0 else 0.0
            features[f + 1] = 1.0 if evidence.commonest[j] == c else 0.0
            f += 2
        features[f] = LOG1P[length]
        features[f + 1] = 1.0 if length == found else 0.0
        features[f + 2] = LOG1P[evidence.corpus_files[c]]
        features[f + 3] = 1.0 if evidence.longest[c] == 0 else 0.0
        features[f + 4] = LOG1P[length] - LOG1P[longest]


@njit(cache=True)
def _average(recent, i, value):  # type: ignore[no-untyped-def]
    """Take a value in. The first ones weigh more: the half that an average starts from is worth two of them."""
    recent.averages[i] += max(MEMORY, 1.0 / (recent.seen[i] + 3)) * (value - recent.averages[i])
    recent.seen[i] += 1


@njit(cache=True)
def judge(recent, evidence, size, token, likeliest):  # type: ignore[no-untyped-def]
    """Note how the evidence fared: `token` came, and the model gave its favourite the probability `likeliest`."""
    covered = 0.0
    for c in range(size):
        if evidence.tokens[c] == token:
            covered = 1.0
    for j in range(len(CLASSES)):
        newest = evidence.newest[1, j]
        if newest >= 0:
            _average(recent, j, 1.0 if evidence.tokens[newest] == token else 0.0)
        commonest = evidence.commonest[j]
        if commonest >= 0:
            _average(recent, CORPUS_HITS + j, 1.0 if evidence.tokens[commonest] == token else 0.0)
    _average(recent, COVERED, covered)
    _average(recent, CONFIDENCE, likeliest)
    recent.start[1] += 1


def warm_up() -> None:
    history, cues = _history.new_history(64), _cues.new_cues(16, 2)
    recent, evidence = new_recent(), new_evidence(2)
    size = gather(history, cues, recent, evidence, _suffixes.NO_INDEX, 0)
    judge(recent, evidence, size, np.int32(1), np.float32(0.5))

"""Grow the tree that is worth its cost: best node first, until no further one can raise tokens per second."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from racer_local.kernels import acceptance as _acceptance
from racer_local.kernels import evidence as _evidence
from racer_local.kernels import history as _history
from racer_local.kernels import keyed_cues as _cues
from racer_local.kernels import layout
from racer_local.kernels.evidence import CANDIDATES
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.kernels.suffixes import NO_INDEX

_add, _gather, _judge = layout.add, _evidence.gather, _evidence.judge
_estimate, _learn = _acceptance.estimate, _acceptance.learn
_append, _put, _log_softmax = _history.append, _cues.put, _cues.log_softmax
_start, _depth_first = layout.start, layout.depth_first

Int32s = NDArray[np.int32]

LEAST = 0.002
"""A node less likely than this is not even a candidate."""
UNMATCHED = 2
"""A match of fewer tokens is no anchor: what speaks for such a node are the cues."""


CHILDREN = -1
"""In the place of a token: the children of a node of the tree, not looked at yet. None is likelier than the node."""


class Pool(NamedTuple):
    """Candidate nodes of one tree, as a heap: the likeliest first."""

    heap: Int32s
    p: NDArray[np.float32]
    """Probability of the whole path."""
    tokens: Int32s
    parents: Int32s
    sources: Int32s
    size: Int32s
    """[2] in the heap, in the pool."""
    judged: Int32s
    """[2] contexts whose evidence was gathered, and how many candidates the last of them had."""


def new_pool(nodes: int) -> Pool:
    room = nodes * (CANDIDATES + 1) + 1
    heap, tokens, parents, sources = np.zeros((4, room), np.int32)
    return Pool(
        heap, np.zeros(room, np.float32), tokens, parents, sources, np.zeros(2, np.int32), np.zeros(2, np.int32)
    )


@njit(cache=True)
def _push(pool, p, token, parent, source):  # type: ignore[no-untyped-def]
    candidate = pool.size[1]
    pool.size[1] += 1
    pool.p[candidate], pool.tokens[candidate] = p, token
    pool.parents[candidate], pool.sources[candidate] = parent, source
    place = pool.size[0]
    pool.size[0] += 1
    while place > 0 and pool.p[pool.heap[(place - 1) // 2]] < p:
        pool.heap[place] = pool.heap[(place - 1) // 2]
        place = (place - 1) // 2
    pool.heap[place] = candidate


@njit(cache=True)
def _pop(pool):  # type: ignore[no-untyped-def]
    best = pool.heap[0]
    pool.size[0] -= 1
    n = pool.size[0]
    last, place = pool.heap[n], 0
    while 2 * place + 1 < n:
        below = 2 * place + 1
        if below + 1 < n and pool.p[pool.heap[below + 1]] > pool.p[pool.heap[below]]:
            below += 1
        if pool.p[pool.heap[below]] <= pool.p[last]:
            break
        pool.heap[place] = pool.heap[below]
        place = below
    pool.heap[place] = last
    return best


@njit(cache=True)
def set_context(context, text, tokens, parents, node):  # type: ignore[no-untyped-def]
    """context [CONTEXT]: the tokens up to a node of a tree; node 0, the root, is the text's last token."""
    place = CONTEXT - 1
    while node > 0 and place >= 0:
        context[place] = tokens[node]
        node = parents[node]
        place -= 1
    at = text.shape[0] - 1
    while place >= 0:
        context[place] = text[at] if at >= 0 else BREAK
        place -= 1
        at -= 1


@njit(cache=True)
def _can_still_pay(p, gained, nodes, best, cost, most):  # type: ignore[no-untyped-def]
    """Whether any larger tree, were all its further nodes as likely as the next one, would beat the best."""
    for n in range(nodes + 1, most + 1):  # noqa: SIM110
        if gained + (n - nodes) * p > best * cost[n]:
            return True
    return False


@njit(cache=True)
def grow(memory, text, banned, sources, cost, fade, caution, tree, pool):  # type: ignore[no-untyped-def]
    """Grow `tree` (started, a lone root) to the size that promises the most tokens per unit of time.

    memory: (history, cues, recent, evidence, net, index). cost [nodes + 1]: T(n) / T(1). sources: the values that mark
    a node that continues a match in the text, one that only cues propose, and one that continues a longer match in the
    user's indexes. Returns the promise.

    A tree of n nodes promises (1 + sum of its nodes' probabilities) tokens in cost[n] plain forwards. A node's
    probability is the product along its path. The best of many estimates is likely one that errs upward, so each is
    lowered by the factor `fade`; and the time at stake, cost[n] - 1, counts `caution` times more with the
    probability that all of it is lost.

    Worked example, fade 1 and caution 0: two candidates of 0.5 and 0.4 below the root. With cost 1, 1.4, 1.5 the
    promises are 1, 1.07 and 1.27: both are drafted. With 1, 1.6, 2 they are 1, 0.94 and 0.95: none is. With
    caution 1 the first case still promises 1.9 / (1.5 + 0.1 x 0.5) = 1.23.
    """
    most = min(tree.limit[0], cost.shape[0] - 1)
    gained, lost = 1.0, 1.0
    best, best_size = 1.0, 1
    pool.size[:] = pool.judged[:] = 0
    _push(pool, np.float32(1), CHILDREN, 0, sources[0])
    while pool.size[0] > 0 and _can_still_pay(pool.p[pool.heap[0]], gained, tree.size[0], best, cost, most):
        candidate = _pop(pool)
        p, parent = pool.p[candidate], pool.parents[candidate]
        if pool.tokens[candidate] == CHILDREN:
            _push_children(memory, text, banned, sources, fade, tree, pool, parent, p)
            continue
        node = _add(tree, parent, pool.tokens[candidate], pool.sources[candidate])
        if node < 0:
            continue
        _push(pool, p, CHILDREN, node, sources[0])
        gained += p
        if parent == 0:
            lost -= p
        time = cost[tree.size[0]]
        promise = gained / (time + caution * lost * (time - 1.0))
        if promise > best:
            best, best_size = promise, tree.size[0]
    tree.size[0] = best_size
    return best


@njit(cache=True)
def _push_children(memory, text, banned, sources, fade, tree, pool, node, reached):  # type: ignore[no-untyped-def]
    """What may follow a node, which itself is reached with this probability."""
    history, cues, recent, evidence, net, index = memory
    if tree.depths[node] >= tree.limit[2]:
        return
    set_context(evidence.context, text, tree.tokens, tree.parents, node)
    size = _gather(history, cues, recent, evidence, index, tree.depths[node])
    _estimate(net, evidence, size)
    pool.judged[0] += 1
    pool.judged[1] = size
    for c in range(size):
        p, token = reached * net.p[c] * fade, evidence.tokens[c]
        if p >= LEAST and token < banned.shape[0] and not banned[token]:  # a damaged index may say anything
            _push(pool, p, token, node, _source(evidence, c, sources))


@njit(cache=True)
def _source(evidence, c, sources):  # type: ignore[no-untyped-def]
    length, in_corpus = evidence.longest[c], evidence.corpus_longest[c]
    if in_corpus > length and in_corpus >= UNMATCHED:
        return sources[2]
    return sources[0] if length >= UNMATCHED else sources[1]


@njit(cache=True)
def draft(memory, text, banned, terms, tree, pool, limit, out):  # type: ignore[no-untyped-def]
    """Grow a tree behind the text and write it to out [4, capacity] in depth-first order; returns its nodes.

    terms: (sources, cost, fade, caution) of `grow`; limit: (nodes, leaves, depth).
    """
    _start(tree, text[text.shape[0] - 1], limit[0], limit[1], limit[2])
    grow(memory, text, banned, terms[0], terms[1], terms[2], terms[3], tree, pool)
    return _depth_first(tree, out)


@njit(cache=True)
def absorb(memory, pool, text, n, tokens, parents, path, ids, logits, rate, pull):  # type: ignore[no-untyped-def]
    """The text went on from text[:n] to text, along the nodes `path` [m] of a verified tree (tokens, parents) whose
    root is text[n - 1]. ids, logits [nodes, k]: what the model thought after each node.

    Each new token first shows how good the evidence for it was, then becomes part of the history. After that every
    row is noted, those of the path last: they are the most recent. Where growing looked at the root alone, `pool` says
    that its evidence is still at hand.
    """
    history, cues, recent, evidence, net, index = memory
    for i in range(path.shape[0]):
        at = n + i
        if i == 0 and pool.judged[0] == 1:
            size = pool.judged[1]
        else:
            set_context(evidence.context, text[:at], text, text, 0)
            size = _gather(history, cues, recent, evidence, index, 0)
            _estimate(net, evidence, size)
        _learn(net, evidence, size, text[at], rate, pull)
        _log_softmax(logits[path[i]], evidence.row)
        _judge(recent, evidence, size, text[at], np.exp(evidence.row[0]))
        _append(history, text[at : at + 1])
    if path.shape[0] < tokens.shape[0]:
        for node in range(tokens.shape[0]):
            put_row(memory, text[:n], tokens, parents, node, ids, logits)
    for node in path:
        put_row(memory, text[:n], tokens, parents, node, ids, logits)
    note_last(memory, ids[path[-1]], logits[path[-1]], text[text.shape[0] - 1])
    pool.judged[0] = 0


@njit(cache=True)
def put_row(memory, text, tokens, parents, node, ids, logits):  # type: ignore[no-untyped-def]
    """What the model thought after a node of a tree whose root is the text's last token. A row without ids is none."""
    history, cues, _, evidence, _, _ = memory
    if ids[node, 0] >= 0:
        set_context(evidence.context, text, tokens, parents, node)
        _log_softmax(logits[node], evidence.row)
        _put(cues, evidence.context, ids[node], evidence.row, history.length[0])


@njit(cache=True)
def note_last(memory, ids, logits, drawn):  # type: ignore[no-untyped-def]
    """The row [k] that the next root was drawn from."""
    _, _, recent, evidence, _, _ = memory
    _log_softmax(logits, evidence.row)
    recent.last[0], recent.last[1] = np.exp(evidence.row[0]), 0.0
    for j in range(ids.shape[0]):
        if ids[j] == drawn:
            recent.last[1] = np.exp(evidence.row[j])


@njit(cache=True)
def read(memory, text, tokens, ids, logits, drawn):  # type: ignore[no-untyped-def]
    """Note the rows ids, logits [m, k] of prompt tokens [m] that stand behind `text`; `drawn` follows them."""
    start = text.shape[0]
    whole = np.concatenate((text, tokens))
    for i in range(tokens.shape[0]):
        put_row(memory, whole[: start + i + 1], tokens, tokens, 0, ids[i : i + 1], logits[i : i + 1])
    note_last(memory, ids[-1], logits[-1], drawn)


def warm_up() -> None:
    shapes = (len(_evidence.NODE_FEATURES), 2), (len(_evidence.TOKEN_FEATURES), 2), (2,), (3,)
    net = _acceptance.new_net(*(np.zeros(shape, np.float32) for shape in shapes))
    learned = _history.new_history(64), _cues.new_cues(16, 2), _evidence.new_recent(), _evidence.new_evidence(2), net
    memory = (*learned, NO_INDEX)
    tree, text = layout.new_scratch(4), np.array([1, 2, 1, 2], np.int32)
    terms = np.array([0, 1, 2], np.int32), np.ones(5), np.float32(1), np.float32(0)
    pool, out = new_pool(4), np.zeros((4, 4), np.int32)
    draft(memory, text, np.zeros(4, np.bool_), terms, tree, pool, (4, 4, 4), out)
    ids, logits = np.zeros((2, 2), np.int32), np.zeros((2, 2), np.float32)
    absorb(memory, pool, text, 2, text[:2], text[:2], np.arange(2), ids, logits, np.float32(0), np.float32(0))
    read(memory, text[:1], text[:2], ids, logits, np.int32(1))

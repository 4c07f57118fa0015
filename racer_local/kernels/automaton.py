"""The n-grams of the text in a bounded trie with fail links: an Aho-Corasick automaton that grows and forgets.

Every appended token extends each of the last n suffixes, so with an n-gram all its suffixes are in the trie
too ("suffix-closed"). Three things follow:

- The fail link of the node for the last d tokens is the node for the last d-1, which is at hand when the node
  is made. It never has to be searched for or moved.
- Only a node without children and without fail links into it may go. Then no link ever dangles, and the trie
  stays prefix-closed and suffix-closed under any eviction.
- A node's suffix is touched whenever the node is, and its parent at most one token before. So among the nodes
  of the n oldest tokens one may go: the search for it is short, and with room for n (n + 3) nodes it never
  meets one that the automaton's state needs.

Eviction takes the least recently touched node that may go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from racer_local.kernels import layout

_add = layout.add

Int32s = NDArray[np.int32]

ROOT, NONE = 0, -1
MADE, FREE, OLDEST, NEWEST, CLOCK, LIVE = range(6)
"""Places in `meta`."""


class Trie(NamedTuple):
    """Flat arrays; a node is a number below the capacity, the root is 0."""

    parent: Int32s
    token: Int32s
    fail: Int32s
    refs: Int32s
    """Children plus fail links into the node."""
    counts: Int32s
    """How often the n-gram occurred."""
    stamp: NDArray[np.int64]
    """The clock (tokens appended) when it occurred last."""
    first_child: Int32s
    next_sibling: Int32s
    """Also links the free nodes."""
    prev_sibling: Int32s
    older: Int32s
    newer: Int32s
    slots: Int32s
    """Hash table (parent, token) -> node, linear probing; its size is a power of two."""
    active: Int32s
    """[n + 1] the node for the last d tokens; -1 where the trie has none."""
    meta: NDArray[np.int64]


class Heap(NamedTuple):
    """Candidates of a proposal, best first; room for every node of the trie, so none is ever dropped."""

    order: Int32s
    counts: Int32s
    stamp: NDArray[np.int64]
    token: Int32s
    parent: Int32s
    """Draft node that the candidate would hang from."""
    depth: Int32s
    size: Int32s
    """[2] heap size, candidates stored."""


def new_trie(capacity: int, ngram: int) -> Trie:
    def ints(n: int = capacity) -> Int32s:
        return np.zeros(n, np.int32)

    trie = Trie(
        parent=ints(),
        token=ints(),
        fail=ints(),
        refs=ints(),
        counts=ints(),
        stamp=np.zeros(capacity, np.int64),
        first_child=ints(),
        next_sibling=ints(),
        prev_sibling=ints(),
        older=ints(),
        newer=ints(),
        slots=ints(1 << (4 * capacity - 1).bit_length()),
        active=ints(ngram + 1),
        meta=np.zeros(6, np.int64),
    )
    clear(trie)
    return trie


def new_heap(capacity: int) -> Heap:
    order, counts, token, parent, depth = (np.zeros(capacity, np.int32) for _ in range(5))
    stamp = np.zeros(capacity, np.int64)
    return Heap(order, counts, stamp, token, parent, depth, np.zeros(2, np.int32))


@njit(cache=True)
def clear(trie):  # type: ignore[no-untyped-def]
    """Forget everything; the root stays."""
    trie.slots[:] = NONE
    trie.active[:] = NONE
    trie.active[0] = ROOT
    trie.first_child[ROOT] = trie.fail[ROOT] = trie.parent[ROOT] = NONE
    trie.refs[ROOT] = trie.counts[ROOT] = 0
    trie.meta[MADE] = trie.meta[LIVE] = 1
    trie.meta[FREE] = trie.meta[OLDEST] = trie.meta[NEWEST] = NONE
    trie.meta[CLOCK] = 0


@njit(cache=True)
def _home(trie, parent, token):  # type: ignore[no-untyped-def]
    key = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    key = (key ^ (key >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((key >> np.uint64(32)) & np.uint64(trie.slots.shape[0] - 1))


@njit(cache=True)
def _slot(trie, parent, token):  # type: ignore[no-untyped-def]
    """The slot that holds this child, or the empty one where it belongs."""
    mask = trie.slots.shape[0] - 1
    slot = _home(trie, parent, token)
    while True:
        node = trie.slots[slot]
        if node == NONE or (trie.parent[node] == parent and trie.token[node] == token):
            return slot
        slot = (slot + 1) & mask


@njit(cache=True)
def find(trie, parent, token):  # type: ignore[no-untyped-def]
    """The child of a node, or -1."""
    return trie.slots[_slot(trie, parent, token)]


@njit(cache=True)
def _empty_slot(trie, slot):  # type: ignore[no-untyped-def]
    """Take an entry out and move back those that probed past it."""
    mask = trie.slots.shape[0] - 1
    hole = slot
    while True:
        slot = (slot + 1) & mask
        node = trie.slots[slot]
        if node == NONE:
            break
        home = _home(trie, trie.parent[node], trie.token[node])
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            trie.slots[hole] = node
            hole = slot
    trie.slots[hole] = NONE


@njit(cache=True)
def _unlink_age(trie, node):  # type: ignore[no-untyped-def]
    older, newer = trie.older[node], trie.newer[node]
    if older == NONE:
        trie.meta[OLDEST] = newer
    else:
        trie.newer[older] = newer
    if newer == NONE:
        trie.meta[NEWEST] = older
    else:
        trie.older[newer] = older


@njit(cache=True)
def _link_newest(trie, node):  # type: ignore[no-untyped-def]
    newest = np.int32(trie.meta[NEWEST])
    trie.older[node], trie.newer[node] = newest, NONE
    if newest == NONE:
        trie.meta[OLDEST] = node
    else:
        trie.newer[newest] = node
    trie.meta[NEWEST] = node


@njit(cache=True)
def _evict(trie):  # type: ignore[no-untyped-def]
    """Free the least recently touched node that nothing refers to."""
    node = np.int32(trie.meta[OLDEST])
    while trie.refs[node] > 0:
        node = trie.newer[node]
    parent = trie.parent[node]
    _empty_slot(trie, _slot(trie, parent, trie.token[node]))
    before, after = trie.prev_sibling[node], trie.next_sibling[node]
    if before == NONE:
        trie.first_child[parent] = after
    else:
        trie.next_sibling[before] = after
    if after != NONE:
        trie.prev_sibling[after] = before
    trie.refs[parent] -= 1
    trie.refs[trie.fail[node]] -= 1
    _unlink_age(trie, node)
    trie.next_sibling[node] = trie.meta[FREE]
    trie.meta[FREE] = node
    trie.meta[LIVE] -= 1


@njit(cache=True)
def _new_node(trie):  # type: ignore[no-untyped-def]
    if trie.meta[FREE] == NONE and trie.meta[MADE] == trie.parent.shape[0]:
        _evict(trie)
    node = np.int32(trie.meta[FREE])
    if node != NONE:
        trie.meta[FREE] = trie.next_sibling[node]
    else:
        node = np.int32(trie.meta[MADE])
        trie.meta[MADE] += 1
    trie.meta[LIVE] += 1
    return node


@njit(cache=True)
def _make_child(trie, parent, token, fail):  # type: ignore[no-untyped-def]
    node = _new_node(trie)
    trie.parent[node], trie.token[node], trie.fail[node] = parent, token, fail
    trie.refs[node] = trie.counts[node] = 0
    trie.first_child[node] = trie.prev_sibling[node] = NONE
    after = trie.first_child[parent]
    trie.next_sibling[node] = after
    if after != NONE:
        trie.prev_sibling[after] = node
    trie.first_child[parent] = node
    trie.refs[parent] += 1
    trie.refs[fail] += 1
    trie.slots[_slot(trie, parent, token)] = node
    trie.stamp[node] = trie.meta[CLOCK]
    _link_newest(trie, node)
    return node


@njit(cache=True)
def _touch(trie, node):  # type: ignore[no-untyped-def]
    trie.stamp[node] = trie.meta[CLOCK]
    _unlink_age(trie, node)
    _link_newest(trie, node)


@njit(cache=True)
def append(trie, tokens):  # type: ignore[no-untyped-def]
    """Count the n-grams that each token [m] of the text ends, and move the automaton's state behind it.

    Worked example, n = 3: after 5 6 5 the n-grams 5 (twice), 6, 5 6, 6 5 and 5 6 5 are counted, and the active
    nodes are those of 5, 6 5 and 5 6 5.
    """
    for i in range(tokens.shape[0]):
        token = tokens[i]
        trie.meta[CLOCK] += 1
        before = np.int32(ROOT)
        for depth in range(1, trie.active.shape[0]):
            parent, before = before, trie.active[depth]
            if parent == NONE:
                break
            node = find(trie, parent, token)
            if node == NONE:
                node = _make_child(trie, parent, token, trie.active[depth - 1])
            else:
                _touch(trie, node)  # at once: making the next one may evict
            trie.counts[node] += 1
            trie.active[depth] = node


@njit(cache=True)
def seek(trie, tokens):  # type: ignore[no-untyped-def]
    """Move the automaton's state behind a text that ends in `tokens` [m], counting nothing."""
    trie.active[1:] = NONE
    m = tokens.shape[0]
    for depth in range(1, min(m, trie.active.shape[0] - 1) + 1):
        node = np.int32(ROOT)
        for i in range(m - depth, m):
            node = find(trie, node, tokens[i])
            if node == NONE:
                break
        if node == NONE:
            break
        trie.active[depth] = node
        _touch(trie, node)


@njit(cache=True)
def _before(heap, a, b):  # type: ignore[no-untyped-def]
    """The order of candidates: more frequent, then shallower, then more recent, then the lower token id."""
    if heap.counts[a] != heap.counts[b]:
        return heap.counts[a] > heap.counts[b]
    if heap.depth[a] != heap.depth[b]:
        return heap.depth[a] < heap.depth[b]
    if heap.stamp[a] != heap.stamp[b]:
        return heap.stamp[a] > heap.stamp[b]
    return heap.token[a] < heap.token[b]


@njit(cache=True)
def _push(heap, candidate):  # type: ignore[no-untyped-def]
    place = heap.size[0]
    heap.size[0] += 1
    while place > 0:
        above = (place - 1) // 2
        if not _before(heap, candidate, heap.order[above]):
            break
        heap.order[place] = heap.order[above]
        place = above
    heap.order[place] = candidate


@njit(cache=True)
def _pop(heap):  # type: ignore[no-untyped-def]
    best = heap.order[0]
    heap.size[0] -= 1
    n = heap.size[0]
    last = heap.order[n]
    place = 0
    while 2 * place + 1 < n:
        below = 2 * place + 1
        if below + 1 < n and _before(heap, heap.order[below + 1], heap.order[below]):
            below += 1
        if not _before(heap, heap.order[below], last):
            break
        heap.order[place] = heap.order[below]
        place = below
    heap.order[place] = last
    return best


@njit(cache=True)
def _push_children(trie, banned, heap, draft_node, depth, places):  # type: ignore[no-untyped-def]
    """Candidates below a draft node that stands at `places` [borders] in the trie, -1 behind the last one.

    The children of the shortest border's place include those of all others (suffix-closed).
    """
    child = trie.first_child[places[0]]
    while child != NONE:
        token = trie.token[child]
        if not banned[token]:
            count = trie.counts[child]
            for b in range(1, places.shape[0]):
                if places[b] == NONE:
                    break
                other = find(trie, places[b], token)
                if other == NONE:
                    break
                count += trie.counts[other]
            candidate = heap.size[1]
            heap.size[1] += 1
            heap.counts[candidate], heap.stamp[candidate] = count, trie.stamp[child]
            heap.token[candidate], heap.parent[candidate] = token, draft_node
            heap.depth[candidate] = depth
            _push(heap, candidate)
        child = trie.next_sibling[child]


@njit(cache=True)
def propose(trie, banned, tree, source, heap, places):  # type: ignore[no-untyped-def]
    """Grow the retrieval tree below the borders, most frequent node first, until a limit of `tree` is reached.

    A border is a suffix of the text, of two tokens or more (the root of the draft tree is the last of them),
    that the trie continues: the automaton's state and its fail chain. A continuation's frequency is the sum of
    its counts below all borders, so what followed a longer match weighs more. Banned tokens are no nodes.

    places [nodes of the tree, n]: scratch. Ties: see `_before`.
    """
    heap.size[:] = 0
    places[0, :] = NONE
    borders = 0
    for depth in range(2, trie.active.shape[0]):
        node = trie.active[depth]
        if node == NONE or trie.first_child[node] == NONE:
            break
        places[0, borders] = node
        borders += 1
    if borders == 0:
        return
    _push_children(trie, banned, heap, 0, 1, places[0])
    while heap.size[0] > 0 and not layout.is_full(tree):
        best = _pop(heap)
        parent, token = heap.parent[best], heap.token[best]
        node = _add(tree, parent, token, source)
        if node == NONE:
            continue
        places[node, :] = NONE
        for b in range(borders):
            if places[parent, b] == NONE:
                break
            places[node, b] = find(trie, places[parent, b], token)
        _push_children(trie, banned, heap, node, heap.depth[best] + 1, places[node])


def warm_up() -> None:
    trie, tree = new_trie(64, 4), layout.new_scratch(8)
    append(trie, np.array([1, 2, 3, 1, 2], np.int32))
    seek(trie, np.array([1, 2], np.int32))
    layout.start(tree, 2, 8, 8, 8)
    propose(trie, np.zeros(4, np.bool_), tree, 0, new_heap(64), np.zeros((8, 4), np.int32))

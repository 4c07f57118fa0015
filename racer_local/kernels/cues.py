"""Copy-logit rows ("cues"): the k likeliest next tokens of a token's most recent forward, and the logits tree."""

from __future__ import annotations

import numpy as np
from numba import njit

from racer_local.kernels import layout

_add, _find_child, _is_full = layout.add, layout.find_child, layout.is_full


@njit(cache=True)
def update(rows, tokens, ids):  # type: ignore[no-untyped-def]
    """Set the row of each token [n] to its k best next tokens ids [n, k]; a later one replaces an earlier.

    A row that was not recorded (its first id is -1) changes nothing.
    """
    for i in range(tokens.shape[0]):
        if ids[i, 0] < 0:
            continue
        for j in range(rows.shape[1]):
            rows[tokens[i], j] = ids[i, j]


@njit(cache=True)
def expand(rows, banned, tree, source, queue, breadths):  # type: ignore[no-untyped-def]
    """Grow the logits tree from the root, breadth first, until a limit of `tree` is reached (paper, section 3).

    The root has breadth k; its i-th child (from 0) max(1, k >> i); the i-th child of a deeper node of breadth
    b max(1, b >> (i + 1)). A node that `tree` holds already is used, and costs nothing. A token without a row
    has no children, and a banned one (the end tokens) is no node; neither moves the others up.

    rows [vocabulary, k], -1 where nothing is known; queue and breadths: room for as many nodes as `tree` has.

    Worked example, k = 4, children of t are 4t+1 .. 4t+4, root 0, 21 nodes: the leaf paths are 0-4-17,
    0-1-5-21, 0-1-5-22, 0-1-6-25, 0-1-7-29, 0-1-8-33, 0-2-9-37, 0-2-10-41, 0-3-13-53.
    """
    k = rows.shape[1]
    queue[0], breadths[0] = 0, k
    head, tail = 0, 1
    while head < tail and not _is_full(tree):
        node, breadth = queue[head], breadths[head]
        head += 1
        for i in range(min(breadth, k)):
            token = rows[tree.tokens[node], i]
            if token < 0:
                break
            if banned[token]:
                continue
            child = _find_child(tree, node, token)
            if child < 0:
                child = _add(tree, node, token, source)
            if child >= 0 and tail < queue.shape[0]:
                queue[tail] = child
                breadths[tail] = max(1, breadth >> (i if node == 0 else i + 1))
                tail += 1


def warm_up() -> None:
    rows = np.full((4, 2), -1, np.int32)
    update(rows, np.zeros(1, np.int32), np.ones((1, 2), np.int32))
    tree = layout.new_scratch(4)
    layout.start(tree, 0, 4, 4, 4)
    expand(rows, np.zeros(4, np.bool_), tree, 1, np.zeros(4, np.int32), np.zeros(4, np.int32))

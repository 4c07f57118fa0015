"""A tree under construction, and its depth-first order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class Scratch(NamedTuple):
    """Room for one draft tree, in the order in which its nodes are added. Reused by every step."""

    tokens: Int32s
    parents: Int32s
    depths: Int32s
    sources: Int32s
    children: Int32s
    """Number of children so far."""
    size: Int32s
    """[2] nodes and leaves so far."""
    limit: Int32s
    """[3] most nodes, most leaves, deepest node."""
    first: Int32s
    """Scratch of `depth_first`, as the next two."""
    following: Int32s
    moved: Int32s


def new_scratch(capacity: int) -> Scratch:
    tokens, parents, depths, sources, children, first, following, moved = np.zeros((8, capacity), np.int32)
    size, limit = np.zeros(2, np.int32), np.zeros(3, np.int32)
    return Scratch(tokens, parents, depths, sources, children, size, limit, first, following, moved)


@njit(cache=True)
def start(tree, root, nodes, leaves, depth):  # type: ignore[no-untyped-def]
    """Empty the scratch but for the root, and set the limits."""
    tree.tokens[0], tree.parents[0], tree.depths[0] = root, -1, 0
    tree.sources[0], tree.children[0] = -1, 0
    tree.size[0] = tree.size[1] = 1
    tree.limit[0] = min(nodes, tree.tokens.shape[0])
    tree.limit[1], tree.limit[2] = leaves, depth


@njit(cache=True)
def is_full(tree):  # type: ignore[no-untyped-def]
    return tree.size[0] >= tree.limit[0]


@njit(cache=True)
def find_child(tree, parent, token):  # type: ignore[no-untyped-def]
    if tree.children[parent] > 0:
        for node in range(parent + 1, tree.size[0]):
            if tree.parents[node] == parent and tree.tokens[node] == token:
                return node
    return -1


@njit(cache=True)
def add(tree, parent, token, source):  # type: ignore[no-untyped-def]
    """Add a node that is not there yet; its number, or -1 where a limit is reached.

    Only a second child adds a leaf: the first takes its parent's place.
    """
    leaves = tree.size[1] + (1 if tree.children[parent] > 0 else 0)
    depth = tree.depths[parent] + 1
    if is_full(tree) or leaves > tree.limit[1] or depth > tree.limit[2]:
        return -1
    node = tree.size[0]
    tree.tokens[node], tree.parents[node], tree.depths[node] = token, parent, depth
    tree.sources[node], tree.children[node] = source, 0
    tree.children[parent] += 1
    tree.size[0], tree.size[1] = node + 1, leaves
    return node


@njit(cache=True)
def depth_first(tree, out):  # type: ignore[no-untyped-def]
    """Write the tree to out [4, capacity] (tokens, parents, depths, sources) in depth-first order.

    Children keep the order in which they were added. Returns the number of nodes.

    Worked example: nodes added as 0, 0-1, 0-2, 0-1-3 come out as 0, 1, 3, 2.
    """
    n = tree.size[0]
    first, following, moved = tree.first, tree.following, tree.moved
    first[:n] = following[:n] = -1
    for node in range(n - 1, 0, -1):
        parent = tree.parents[node]
        following[node] = first[parent]
        first[parent] = node
    node = np.int32(0)
    for place in range(n):
        moved[node] = place
        parent = tree.parents[node]
        out[0, place] = tree.tokens[node]
        out[1, place] = -1 if parent < 0 else moved[parent]
        out[2, place] = tree.depths[node]
        out[3, place] = tree.sources[node]
        if first[node] >= 0:
            node = first[node]
            continue
        while node > 0 and following[node] < 0:
            node = tree.parents[node]
        node = following[node]
    return n


def warm_up() -> None:
    tree = new_scratch(4)
    start(tree, 0, 4, 4, 4)
    add(tree, 0, 1, 0)
    find_child(tree, 0, 1)
    depth_first(tree, np.zeros((4, 4), np.int32))

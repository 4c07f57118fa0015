from __future__ import annotations

import doctest

import numpy as np
import pytest
from scripted import random_tree

import racer_local.text
import racer_local.tree
import racer_local.verify
from racer_local.tree import DraftTree
from racer_local.verify import verify


@pytest.mark.parametrize("module", [racer_local.tree, racer_local.verify, racer_local.text])
def test_the_worked_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([], []),
        ([1], [0]),
        ([1, 2], [-1, 1]),
        ([1, 2], [-1, -1]),
        ([1, 2, 3, 4], [-1, 0, 0, 1]),  # breadth first
        ([1, 2, 3], [-1, 2, 0]),
    ],
)
def test_a_tree_that_is_not_in_depth_first_order_is_refused(tokens, parents):
    depths = [0] * len(tokens)
    for i, p in enumerate(parents):
        depths[i] = depths[p] + 1 if p >= 0 else 0
    arrays = [np.array(a, np.int32) for a in (tokens, parents, depths, [0] * len(tokens))]
    with pytest.raises(ValueError, match="DraftTree"):
        DraftTree(*arrays)


def test_arrays_of_another_type_or_length_are_refused():
    good = np.zeros(1, np.int32)
    root = np.array([-1], np.int32)
    with pytest.raises(ValueError, match="tokens must be an int32 array"):
        DraftTree(np.zeros(1, np.int64), root, good, good)
    with pytest.raises(ValueError, match=r"sources must be an int32 array of shape \(1,\)"):
        DraftTree(good, root, good, np.zeros(2, np.int32))


def test_leaf_spans_count_the_leaves_below_each_node():
    rng = np.random.default_rng(0)
    for _ in range(300):
        tree = random_tree(rng, 9, 1, 40, 20, 6)
        first, end = tree.leaf_spans()
        leaves = [i for i in range(len(tree)) if not (tree.parents == i).any()]
        for node in range(len(tree)):
            below = []
            for number, leaf in enumerate(leaves):
                at = leaf
                while at >= 0 and at != node:
                    at = tree.parents[at]
                if at == node:
                    below.append(number)
            assert below == list(range(first[node], end[node]))


def test_verify_draws_once_for_each_visited_node_and_nowhere_else():
    tree = DraftTree.of([7, 1, 2, 3, 4], [-1, 0, 1, 0, 3])
    visited = []

    def draw(node):
        visited.append(node)
        return {0: 3, 3: 4, 4: 9}[node]

    assert verify(tree, draw) == ([0, 3, 4], 9)
    assert visited == [0, 3, 4]


def test_the_same_token_below_another_parent_is_not_accepted():
    tree = DraftTree.of([7, 1, 2, 3], [-1, 0, 1, 0])
    assert verify(tree, {0: 3, 3: 2}.__getitem__) == ([0, 3], 2)

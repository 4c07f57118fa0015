"""Each kernel against a plain-Python twin, and its worked example."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scripted import path_tokens

from racer_local.kernels import automaton, cues, layout, lookup, topk
from racer_local.tree import DraftTree

FAR = 10**6


def new_tree(root, nodes=64, leaves=FAR, depth=FAR, capacity=None):
    tree = layout.new_scratch(capacity or nodes)
    layout.start(tree, root, nodes, leaves, depth)
    return tree


def finished(tree):
    out = np.zeros((4, len(tree.tokens)), np.int32)
    n = layout.depth_first(tree, out)
    return DraftTree(*out[:, :n].copy())


def paths(tree):
    """Every node as the tokens from the root to it."""
    return [tuple(path_tokens(tree, node)) for node in range(len(tree))]


def leaf_paths(tree):
    return {p for n, p in enumerate(paths(tree)) if not (tree.parents == n).any()}


# --- top_k ---


def top_k(rows, k):
    rows = np.ascontiguousarray(rows, np.float32)
    ids, values = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), np.float32)
    topk.top_k(rows, ids, values)
    return ids, values


def test_top_k_worked_example():
    assert top_k([[0.5, 2.0, 2.0, 1.0]], 2)[0].tolist() == [[1, 2]]


@pytest.mark.parametrize("n_vocab", [1, 7, 63, 64, 65, 1000])
@pytest.mark.parametrize("k", [1, 8])
def test_top_k_equals_a_stable_sort_with_ties_to_the_lower_id(n_vocab, k):
    rng = np.random.default_rng(n_vocab)
    rows = rng.integers(-3, 3, size=(50, n_vocab)).astype(np.float32)
    rows[::2] = rng.normal(size=(25, n_vocab))
    expected = np.full((50, k), -1)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    expected[:, : best.shape[1]] = best
    ids, values = top_k(rows, k)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values[:, : best.shape[1]], np.take_along_axis(rows, best, 1))


def test_top_k_skips_nan_and_minus_infinity():
    assert top_k([[np.nan, -np.inf, 1.0, np.nan]], 3)[0].tolist() == [[2, -1, -1]]


# --- layout ---


def test_depth_first_worked_example():
    tree = new_tree(10)
    for parent, token in ((0, 11), (0, 12), (1, 13)):
        layout.add(tree, parent, token, 0)
    assert finished(tree).tokens.tolist() == [10, 11, 13, 12]


def test_depth_first_keeps_every_path_and_the_order_of_children():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tree = new_tree(99)
        added = {(99,)}
        for _ in range(60):
            parent, token = int(rng.integers(tree.size[0])), int(rng.integers(5))
            if layout.find_child(tree, parent, token) < 0:
                node = layout.add(tree, parent, token, int(rng.integers(3)))
                path = []
                while node >= 0:
                    path.insert(0, int(tree.tokens[node]))
                    node = tree.parents[node]
                added.add(tuple(path))
        done = finished(tree)  # the constructor checks the depth-first order
        assert set(paths(done)) == added
        siblings = [tree.tokens[n] for n in range(1, tree.size[0]) if tree.parents[n] == 0]
        assert [t for t, p in zip(done.tokens, done.parents, strict=True) if p == 0] == siblings


def test_add_keeps_to_each_limit():
    tree = new_tree(0, nodes=4, leaves=2, depth=2)
    assert layout.add(tree, 0, 1, 0) == 1  # takes the root's place as the only leaf
    assert layout.add(tree, 0, 2, 0) == 2  # a second leaf
    assert layout.add(tree, 0, 3, 0) == -1  # would be a third
    assert layout.add(tree, 1, 4, 0) == 3
    assert layout.add(tree, 3, 5, 0) == -1  # full
    assert tree.size.tolist() == [4, 2]
    deep = new_tree(0, depth=1)
    assert layout.add(deep, 0, 1, 0) == 1
    assert layout.add(deep, 1, 1, 0) == -1


# --- cues ---


def expand(rows, tree, banned=()):
    mask = np.zeros(len(rows), np.bool_)
    mask[list(banned)] = True
    n = len(tree.tokens)
    cues.expand(rows, mask, tree, 1, np.zeros(n, np.int32), np.zeros(n, np.int32))
    return finished(tree)


def fourfold_rows(n_vocab=400):
    rows = np.full((n_vocab, 4), -1, np.int32)
    for token in range((n_vocab - 5) // 4):
        rows[token] = range(4 * token + 1, 4 * token + 5)
    return rows


def test_logits_tree_worked_example():
    tree = expand(fourfold_rows(), new_tree(0, nodes=21))
    text = """0-4-17 0-1-5-21 0-1-5-22 0-1-6-25 0-1-7-29 0-1-8-33 0-2-9-37 0-2-10-41 0-3-13-53"""
    assert leaf_paths(tree) == {tuple(map(int, path.split("-"))) for path in text.split()}
    assert len(tree) == 21


def expand_twin(rows, root, nodes, banned):
    """The paper's breadth-first rule on lists."""
    k = rows.shape[1]
    tree, queue = [(root,)], [((root,), k)]
    while queue and len(tree) < nodes:
        path, breadth = queue.pop(0)
        for i, token in enumerate(rows[path[-1]][: min(k, breadth)].tolist()):
            if token < 0:
                break
            if token in banned or len(tree) == nodes:
                continue
            child = (*path, token)
            tree.append(child)
            queue.append((child, max(1, breadth >> (i if len(path) == 1 else i + 1))))
    return set(tree)


@pytest.mark.parametrize("seed", range(20))
def test_logits_tree_equals_its_plain_python_twin(seed):
    rng = np.random.default_rng(seed)
    n_vocab, k = 40, int(rng.integers(1, 9))
    rows = np.array([rng.permutation(n_vocab)[:k] for _ in range(n_vocab)], np.int32)
    rows[rng.random(rows.shape) < 0.05] = -1
    banned = set(rng.integers(n_vocab, size=4).tolist())
    for nodes in (1, 2, 9, 64):
        tree = expand(rows, new_tree(0, nodes=nodes), banned)
        assert set(paths(tree)) == expand_twin(rows, 0, nodes, banned)


def test_a_token_without_a_row_is_a_leaf_and_token_zero_is_not_drafted_for_it():
    rows = np.full((10, 4), -1, np.int32)
    rows[5] = [7, 8, -1, -1]
    tree = expand(rows, new_tree(5))
    assert leaf_paths(tree) == {(5, 7), (5, 8)}


def test_a_node_that_is_there_already_costs_the_budget_once():
    tree = new_tree(0, nodes=10)
    layout.add(tree, 0, 2, 0)
    layout.add(tree, 1, 9, 0)
    done = expand(fourfold_rows(), tree)
    assert len(done) == 10
    assert len(set(paths(done))) == 10
    both = paths(done).index((0, 2, 9))
    assert done.sources[both] == 0, "it belongs to the source that came first"


def test_the_last_write_to_a_row_wins():
    rows = np.full((4, 2), -1, np.int32)
    cues.update(rows, np.array([1, 1], np.int32), np.array([[2, 3], [3, 0]], np.int32))
    assert rows.tolist() == [[-1, -1], [3, 0], [-1, -1], [-1, -1]]


# --- lookup ---


def test_lookup_worked_example():
    assert lookup.find_continuation(np.array([5, 6, 7, 8, 5, 6], np.int32), 6, 3) == 2


def test_lookup_equals_its_plain_python_twin():
    rng = np.random.default_rng(0)
    for _ in range(500):
        text = rng.integers(3, size=int(rng.integers(0, 30))).astype(np.int32)
        longest = -1
        for length in range(min(3, len(text) - 1), 0, -1):
            ends = [e for e in range(length, len(text)) if (text[e - length : e] == text[-length:]).all()]
            if ends:
                longest = max(ends)
                break
        assert lookup.find_continuation(text, len(text), 3) == longest


# --- automaton ---


def trie_counts(trie):
    """{n-gram: count} of the live nodes, read through the child lists."""
    counts, stack = {}, [(0, ())]
    while stack:
        node, gram = stack.pop()
        child = trie.first_child[node]
        while child != -1:
            longer = (*gram, int(trie.token[child]))
            counts[longer] = int(trie.counts[child])
            assert automaton.find(trie, node, trie.token[child]) == child
            stack.append((int(child), longer))
            child = trie.next_sibling[child]
    return counts


def gram_counts(text, n):
    return Counter(tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, min(i + n, len(text)) + 1))


def node_of(trie, gram):
    node = 0
    for token in gram:
        node = automaton.find(trie, node, token)
    return node


def check_invariants(trie, text):
    """Closed under prefixes and suffixes, fail links exact, the state right, references and age list whole."""
    grams = trie_counts(trie)
    refs = Counter()
    for gram in grams:
        node = node_of(trie, gram)
        assert gram[:-1] == () or gram[:-1] in grams
        assert gram[1:] == () or gram[1:] in grams
        assert trie.fail[node] == node_of(trie, gram[1:])
        refs[int(trie.parent[node])] += 1
        refs[int(trie.fail[node])] += 1
    for gram in grams:
        node = node_of(trie, gram)
        assert trie.refs[node] == refs[node]
    for depth in range(1, len(trie.active)):
        suffix = tuple(text[len(text) - depth :]) if depth <= len(text) else None
        expected = node_of(trie, suffix) if suffix in grams else -1
        assert trie.active[depth] == expected
    ages, node = [], trie.meta[automaton.OLDEST]
    while node != -1:
        ages.append(int(node))
        node = trie.newer[node]
    assert sorted(ages) == sorted(node_of(trie, gram) for gram in grams)
    assert trie.meta[automaton.LIVE] == len(grams) + 1
    return grams


def test_append_worked_example():
    trie = automaton.new_trie(64, 3)
    automaton.append(trie, np.array([5, 6, 5], np.int32))
    assert trie_counts(trie) == {(5,): 2, (6,): 1, (5, 6): 1, (6, 5): 1, (5, 6, 5): 1}
    assert [int(n) for n in trie.active] == [0, node_of(trie, (5,)), node_of(trie, (6, 5)), node_of(trie, (5, 6, 5))]


@pytest.mark.parametrize("seed", range(8))
def test_without_eviction_the_trie_counts_all_ngrams(seed):
    rng = np.random.default_rng(seed)
    n, text = int(rng.integers(2, 8)), rng.integers(int(rng.integers(2, 9)), size=300).tolist()
    trie = automaton.new_trie(4000, n)
    for start in range(0, 300, 7):
        automaton.append(trie, np.array(text[start : start + 7], np.int32))
    assert check_invariants(trie, text) == gram_counts(text, n)


@pytest.mark.parametrize("seed", range(8))
def test_fail_links_stay_right_while_nodes_are_added_and_evicted(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    trie = automaton.new_trie(n * (n + 3) + int(rng.integers(0, 40)), n)
    text = []
    for step in range(600):
        text.append(int(rng.integers(4)) if rng.random() < 0.8 else int(rng.integers(50)))
        automaton.append(trie, np.array(text[-1:], np.int32))
        if step % 20 == 0:
            for gram, count in check_invariants(trie, text).items():
                assert count <= gram_counts(text, n)[gram]
    assert trie.meta[automaton.LIVE] == len(trie.parent), "the trie is full, so nodes were evicted"


def test_the_least_recently_used_ngram_goes_first():
    trie = automaton.new_trie(40, 2)
    automaton.append(trie, np.array([1, 2, 1, 2], np.int32))
    automaton.append(trie, np.array([7, 8], np.int32))
    for token in range(20, 90):
        automaton.append(trie, np.array([1, 2, token], np.int32))
    grams = trie_counts(trie)
    assert (1, 2) in grams
    assert (7, 8) not in grams
    assert (89,) in grams
    assert (20,) not in grams


def test_a_full_trie_does_not_grow_over_a_hundred_thousand_tokens():
    trie = automaton.new_trie(10_000, 10)
    before = {name: array.ctypes.data for name, array in trie._asdict().items()}
    rng = np.random.default_rng(0)
    text = (rng.zipf(1.3, 100_000) % 50_000).astype(np.int32)
    for start in range(0, len(text), 1000):
        automaton.append(trie, text[start : start + 1000])
        assert trie.meta[automaton.LIVE] <= 10_000
    assert trie.meta[automaton.LIVE] == 10_000
    assert trie.meta[automaton.MADE] == 10_000
    assert {name: array.ctypes.data for name, array in trie._asdict().items()} == before
    check_invariants(trie, text.tolist())


def test_seek_moves_the_state_and_counts_nothing():
    trie = automaton.new_trie(500, 4)
    automaton.append(trie, np.array([1, 2, 3, 1, 2, 4], np.int32))
    before = trie_counts(trie)
    automaton.seek(trie, np.array([9, 9, 3, 1, 2], np.int32))
    assert trie_counts(trie) == before
    assert [int(n) for n in trie.active] == [0, *(node_of(trie, g) for g in ((2,), (1, 2), (3, 1, 2))), -1]
    automaton.append(trie, np.array([4], np.int32))
    assert trie_counts(trie)[(1, 2, 4)] == 2


def propose(trie, root, n, nodes=64, leaves=FAR, banned=(), capacity=4000):
    mask = np.zeros(200, np.bool_)
    mask[list(banned)] = True
    tree = new_tree(root, nodes, leaves)
    automaton.propose(trie, mask, tree, 0, automaton.new_heap(capacity), np.zeros((nodes, n), np.int32))
    return finished(tree)


def propose_twin(text, n, nodes, banned=()):
    """The retrieval tree from n-gram counts: {path below the root} by frequency, depth, recency, token."""
    counts = gram_counts(text, n)
    latest = {}
    for i in range(len(text)):
        for j in range(i + 1, min(i + n, len(text)) + 1):
            latest[tuple(text[i:j])] = j
    frequency = Counter()
    for length in range(2, n):
        border = tuple(text[len(text) - length :]) if length <= len(text) else None
        for gram, count in counts.items():
            if border and len(gram) > length and gram[:length] == border:
                frequency[gram[length:]] += count
    frequency = {p: c for p, c in frequency.items() if not set(p) & set(banned)}
    border = tuple(text[-2:])
    chosen = {()}
    while len(chosen) < nodes:
        reachable = [p for p in frequency if p not in chosen and p[:-1] in chosen]
        if not reachable:
            break
        chosen.add(min(reachable, key=lambda p: (-frequency[p], len(p), -latest[border + p], p[-1])))
    return {(text[-1], *p) for p in chosen}


def test_borders_are_suffixes_of_two_tokens_or_more():
    trie = automaton.new_trie(500, 5)
    automaton.append(trie, np.array([1, 2, 3, 9, 2, 4, 8, 2], np.int32))
    assert len(propose(trie, 2, 5)) == 1, "only the root itself occurred before: no border"
    automaton.append(trie, np.array([3, 7, 1, 2], np.int32))
    assert leaf_paths(propose(trie, 2, 5)) == {(2, 3, 9, 2)}, "1 2 is the border, its 5-grams end after 3 9 2"


def test_a_continuation_of_a_longer_border_weighs_more():
    trie = automaton.new_trie(500, 6)
    text = [5, 1, 2, 3, 3, 0, 6, 1, 2, 4, 4, 0, 5, 1, 2]
    automaton.append(trie, np.array(text, np.int32))
    tree = propose(trie, 2, 6, nodes=2)
    assert paths(tree) == [(2,), (2, 3)], "5 1 2 was followed by 3, which beats the later 6 1 2 4"


@pytest.mark.parametrize("seed", range(30))
def test_retrieval_tree_equals_its_plain_python_twin(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 7))
    text = rng.integers(int(rng.integers(2, 6)), size=int(rng.integers(2, 60))).tolist()
    trie = automaton.new_trie(4000, n)
    automaton.append(trie, np.array(text, np.int32))
    banned = {int(rng.integers(6))} if seed % 3 == 0 else set()
    for nodes in (1, 2, 5, 20):
        assert set(paths(propose(trie, text[-1], n, nodes, banned=banned))) == propose_twin(text, n, nodes, banned)


def test_the_retrieval_tree_keeps_to_the_leaves_that_the_target_can_hold():
    trie = automaton.new_trie(4000, 5)
    rng = np.random.default_rng(3)
    text = rng.integers(4, size=400).astype(np.int32)
    automaton.append(trie, text)
    tree = propose(trie, int(text[-1]), 5, nodes=40, leaves=3)
    assert tree.leaf_spans()[1][0] == 3

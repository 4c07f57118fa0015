"""How far batches equal single tokens: found on targets that are off by a last bit, and on a real context."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedTarget, random_tree

from racer_local import exact, racing
from racer_local.config import MAX_NODES, ContextConfig
from racer_local.errors import DecodeError
from racer_local.exact import BUDGET, SIZES, _comb, measure, recall, remember
from racer_local.llama import LlamaTarget
from racer_local.target import Exactness, never
from racer_local.tree import DraftTree


class OffTarget(ScriptedTarget):
    """What is computed otherwise than a single token's is off by a last bit, and so is every row that sees it.

    `off(tree, node, place)` says which rows of a tree are computed otherwise, place being the position in the text;
    `late(tree, path)` whether keeping that path changes a cell. Of a prompt all cells beyond `chunk` are changed.
    """

    def __init__(self, off=lambda tree, node, place: False, late=lambda tree, path: False, chunk=10**6, **more):
        leaves = max(1, more.get("max_nodes", 64) - 1)
        super().__init__(**{"n_ctx": 1024, "max_leaves": leaves, "logits": quick_logits, **more})
        self.off, self.late, self.chunk = off, late, chunk
        self.marks = []

    def prefill(self, tokens, on_rows=None, cancelled=never, last=None):
        shared = super().prefill(tokens, on_rows, cancelled, last)
        read = len(self.cache) - shared
        self.marks = self.marks[:shared] + [0] * min(read, self.chunk) + [1] * (read - self.chunk)
        return shared

    def evaluate(self, tree):
        rows = super().evaluate(tree)
        self.own = [int(self.off(tree, node, len(self.cache) + depth)) for node, depth in enumerate(tree.depths)]
        before = sum(self.marks)
        for node, row in enumerate(rows):
            ulps, at = before, node
            while at >= 0:
                ulps, at = ulps + self.own[at], tree.parents[at]
            row.view(np.int32)[:] += ulps
        return rows

    def commit(self, path):
        if path:
            self.marks += [self.own[node] for node in path]
            self.marks[-1] += int(self.late(self.pending, path))
        super().commit(path)


def quick_logits(prefix, n_vocab):
    """[n_vocab] logits that depend on the last tokens of the prefix and on its length."""
    seed = 7 + sum((i + 2) * int(token) for i, token in enumerate(prefix[-8:])) + 1000 * len(prefix)
    return (np.arange(1, n_vocab + 1) * seed % 8191 / 1000 + 0.001).astype(np.float32)


def leaves(tree):
    return int(tree.leaf_spans()[1][0])


def behind_a_branch(tree, path):
    return any(node - before > 1 for before, node in itertools.pairwise(path))


def before_a_rest(tree, path):
    return leaves(tree) == 1 and 1 < len(path) < len(tree)


def few(place):
    """One row in 30."""
    return place * 7919 % 30 == 1


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (OffTarget(), Exactness(64, True)),
        (OffTarget(max_nodes=255, max_leaves=254), Exactness(255, True)),
        (OffTarget(max_leaves=1), Exactness(64, False)),
        (OffTarget(max_nodes=1), Exactness(1, False)),
        (OffTarget(max_nodes=2), Exactness(2, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 1), Exactness(1, False)),
        *(
            (OffTarget(lambda tree, node, place, k=k: len(tree) > k), Exactness(k, False))
            for k in (2, 3, 4, 8, 15, 16, 33)
        ),
        (OffTarget(lambda tree, node, place: len(tree) > 5 and node == 5), Exactness(5, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 8 and node == len(tree) - 1), Exactness(8, False)),
        (OffTarget(lambda tree, node, place: leaves(tree) > 1), Exactness(64, False)),
        (OffTarget(lambda tree, node, place: leaves(tree) > 10), Exactness(64, False)),
        (OffTarget(late=behind_a_branch), Exactness(64, False)),
        (OffTarget(late=lambda tree, path: len(path) > 12), Exactness(12, False)),
        (OffTarget(late=before_a_rest), Exactness(2, False)),
        (OffTarget(lambda tree, node, place: leaves(tree) > 1 and len(tree) == 5), Exactness(64, False)),
        (OffTarget(chunk=300), Exactness(64, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 1 and few(place)), Exactness(1, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 16 and few(place)), Exactness(16, False)),
        (OffTarget(lambda tree, node, place: leaves(tree) > 1 and few(place)), Exactness(64, False)),
    ],
    ids=[
        *("exact", "255 nodes", "one leaf", "one node", "two nodes", "none"),
        *(f"up to {k}" for k in (2, 3, 4, 8, 15, 16, 33)),
        *("the sixth row", "the last row", "trees", "wide trees", "behind a branch", "long paths kept"),
        *("before a rejected rest", "trees of five"),
        *("long prompts", "few rows", "few rows beyond 16", "few rows of trees"),
    ],
)
def test_what_is_found_is_how_far_the_target_is_exact(target, found):
    assert measure(target) == found
    assert target.cache == []
    assert target.pending is None


@pytest.mark.parametrize("size", SIZES)
def test_a_change_behind_any_tried_size_is_found(size):
    target = OffTarget(lambda tree, node, place: len(tree) >= size, max_nodes=MAX_NODES)
    smaller = max((n for n in SIZES if n < size), default=1)
    assert measure(target) == Exactness(smaller, False)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (OffTarget(lambda tree, node, place: len(tree) > 8 and place == 560), Exactness(8, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 16 and place == 560, max_nodes=32), Exactness(16, False)),
        (OffTarget(lambda tree, node, place: len(tree) > 1 and place == 583), Exactness(1, False)),
        (OffTarget(lambda tree, node, place: leaves(tree) > 1 and place == 545, max_nodes=32), Exactness(32, False)),
        (
            OffTarget(late=lambda tree, path: behind_a_branch(tree, path) and len(path) > 9, max_nodes=32),
            Exactness(32, False),
        ),
        (OffTarget(late=lambda tree, path: behind_a_branch(tree, path) and len(path) > 17), Exactness(64, False)),
    ],
    ids=["beyond 8 nodes", "beyond 16 nodes", "the last token", "in trees", "kept paths of 32", "kept paths of 64"],
)
def test_what_a_first_tree_of_each_size_does_not_show_is_found_by_reading_on(target, found):
    assert measure(target) == found


@pytest.mark.parametrize("n_ctx", [8, 9, 16, 17, 64, 100, 256, 586, 600])
@pytest.mark.parametrize("max_nodes", [2, 3, 8, 64, MAX_NODES])
def test_a_small_context_is_enough_for_trees_of_half_of_it(n_ctx, max_nodes):
    most = min(max_nodes, n_ctx // 2)
    largest = max(n for n in SIZES if n <= most)
    assert measure(OffTarget(n_ctx=n_ctx, max_nodes=max_nodes)) == Exactness(largest, largest > 2)
    if largest > 3:
        other = OffTarget(lambda tree, node, place: len(tree) > 3, n_ctx=n_ctx, max_nodes=max_nodes)
        assert measure(other) == Exactness(3, False)


@pytest.mark.parametrize("at", [0, 3, 64, 65, 66, 100, 140])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_cache_is_empty_afterwards_also_when_the_target_fails_midway(at, when):
    class Failing(OffTarget):
        def evaluate(self, tree):
            if self.forwards == at and when == "before":
                self.forwards += 1
                raise DecodeError("no more")
            rows = super().evaluate(tree)
            if self.forwards == at + 1 and when == "after":
                raise DecodeError("no more")
            return rows

    target = Failing()
    with pytest.raises(DecodeError, match="no more"):
        measure(target)
    assert target.cache == []
    assert target.pending is None


@pytest.mark.parametrize(("seconds", "rows"), [(BUDGET / 4, 6), (BUDGET / 2, 4), (BUDGET * 2, 2), (0.0, 64)])
def test_when_time_is_up_no_larger_tree_is_tried_and_what_was_found_holds(seconds, rows):
    clock = itertools.count(0.0, seconds) if seconds else itertools.repeat(0.0)
    sizes = []

    class Watched(OffTarget):
        def evaluate(self, tree):
            sizes.append(len(tree))
            return super().evaluate(tree)

    assert measure(Watched(), clock.__next__) == Exactness(rows, rows > 2)
    assert max(sizes) == rows


def test_a_row_that_is_not_a_number_equals_itself():
    def logits(prefix, n_vocab):
        return np.full(n_vocab, np.nan, np.float32)

    assert measure(OffTarget(logits=logits)).rows == 64


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, MAX_NODES), seed=st.integers(0, 2**32 - 1))
def test_a_comb_has_its_path_in_order_and_a_leaf_beside_each_step(n, seed):
    """And it is valid: `DraftTree` refuses what is not depth-first."""
    tokens = np.random.default_rng(seed).integers(0, 1000, n + 2).astype(np.int32)
    tree, path = _comb(tokens, n)
    assert len(tree) == n
    assert tree.tokens[path].tolist() == tokens[: len(path)].tolist()
    assert path[0] == 0
    assert tree.parents[path].tolist() == [-1, *path[:-1]]
    assert tree.depths[path].tolist() == list(range(len(path)))
    aside = sorted(set(range(n)) - set(path))
    assert [tree.depths[node] for node in aside] == list(range(1, len(aside) + 1))
    assert tree.tokens[aside].tolist() == tokens[2 : len(aside) + 2].tolist()
    assert all(node + 1 in path for node in aside), "each leaf lies before the step that it is beside"
    assert len(path) - 1 - len(aside) == (n + 1) % 2
    assert leaves(tree) == len(aside) + 1


def test_the_worked_examples_of_a_comb():
    tree, path = _comb(np.array([5, 6, 7, 8], np.int32), 5)
    assert (tree.tokens.tolist(), tree.parents.tolist(), path) == ([5, 7, 6, 8, 7], [-1, 0, 0, 2, 2], [0, 2, 4])
    tree, path = _comb(np.array([5, 6, 7, 8], np.int32), 4)
    assert (tree.tokens.tolist(), tree.parents.tolist(), path) == ([5, 7, 6, 7], [-1, 0, 0, 2], [0, 2, 3])


# --- what was found is remembered ---

FACTS = {"model": "tiny", "threads": 2, "options": {"split": (1.0, 2.0)}}


def keep(folder, rows=16, branches=True):
    remember(FACTS, Exactness(rows, branches), folder)
    [path] = folder.iterdir()
    return path


@pytest.mark.parametrize("found", [(1, False), (16, True), (MAX_NODES, False)], ids=repr)
def test_what_is_remembered_is_recalled_for_the_same_facts_only(tmp_path, found):
    assert recall(FACTS, tmp_path) is None
    keep(tmp_path, *found)
    assert recall(FACTS, tmp_path) == Exactness(*found)
    assert recall(FACTS | {"threads": 3}, tmp_path) is None


def test_it_lies_in_the_cache_home_apart_from_the_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))
    remember(FACTS, Exactness(8, True))
    assert recall(FACTS) == Exactness(8, True)
    assert [path.name for path in tmp_path.iterdir()] == ["exactness"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"null", b"[]", b"1", b"{}", b'{"format": 1}'], ids=repr)
def test_a_damaged_file_is_as_good_as_none_and_mended(tmp_path, content):
    keep(tmp_path).write_bytes(content)
    assert recall(FACTS, tmp_path) is None
    keep(tmp_path, 4, False)
    assert recall(FACTS, tmp_path) == Exactness(4, False)


@pytest.mark.parametrize(
    "other",
    [
        *({"format": value} for value in (0, 2, "1", None)),
        *({"facts": value} for value in (None, {}, FACTS | {"threads": 3})),
        *({"rows": value} for value in (0, -1, MAX_NODES + 1, True, 2.0, "8", None, [8])),
        *({"branches": value} for value in (0, 1, "true", None)),
    ],
    ids=repr,
)
def test_a_file_that_says_something_else_is_as_good_as_none(tmp_path, other):
    path = keep(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | other))
    assert recall(FACTS, tmp_path) is None
    for name in other:
        path.write_text(json.dumps({key: value for key, value in data.items() if key != name}))
        assert recall(FACTS, tmp_path) is None


# --- on a real context ---


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home in which nothing is remembered."""
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))
    return tmp_path


def test_a_target_is_measured_once_and_again_where_the_file_is_damaged(tiny, home, monkeypatch):
    found = iter([Exactness(9, True), Exactness(5, False)])
    monkeypatch.setattr(exact, "measure", lambda target: next(found))
    with LlamaTarget(tiny, ContextConfig(n_ctx=64, threads=1), 8) as target:
        assert racing.exactness(target) == racing.exactness(target) == Exactness(9, True)
        [path] = (home / "exactness").iterdir()
        path.write_text("{")
        assert racing.exactness(target) == racing.exactness(target) == Exactness(5, False)


def test_while_a_target_is_measured_its_cells_stay_in_order(tiny, home, monkeypatch):
    """As they will in exact answers: the cell of a rejected branch before a kept one is not taken by a later token."""
    seen = []

    def look(target):
        target.evaluate(DraftTree.of([40, 41, 42], [-1, 0, 0]))
        target.commit([0, 2])
        seen.append(target._holes_from)
        return Exactness(1, False)

    monkeypatch.setattr(exact, "measure", look)
    with LlamaTarget(tiny, ContextConfig(n_ctx=64, threads=1), 8) as target:
        racing.exactness(target)
    assert seen == [1]


@pytest.mark.parametrize("n_ctx", [16, 64, 1024])
def test_measuring_a_real_target_leaves_it_empty_and_ready(tiny, home, n_ctx):
    with LlamaTarget(tiny, ContextConfig(n_ctx=n_ctx, threads=1).for_exact(), 16) as target:
        target.prefill([5, 6, 7])
        found = racing.exactness(target)
        assert 1 < found.rows <= n_ctx // 2
        assert target.held == []
        target.restrict(found)
        assert target.max_nodes == found.rows
        target.evaluate(DraftTree.chain([5, 6]))


@pytest.mark.parametrize(
    "context",
    [
        ContextConfig(threads=1).for_exact(),
        ContextConfig(threads=1, kv_type="f16").for_exact(),
        ContextConfig(threads=1),
    ],
    ids=["on-bf16", "on-f16", "off-f16"],
)
def test_within_what_was_found_random_trees_give_single_tokens_rows_to_the_bit(tiny, home, context):
    """The claim, verified by other means: another text, random trees, and a plain target beside it."""
    rng = np.random.default_rng(11)
    with LlamaTarget(tiny, context, 32) as target, LlamaTarget(tiny, context) as plain:
        found = racing.exactness(target)
        assert found.rows > 1 or context != context.for_exact()
        target.restrict(found)
        text = rng.integers(3, tiny.n_vocab, 700).tolist()
        plain.restrict(Exactness(1, False))
        for held in (target, plain):
            held.prefill(text)
        differ = 0
        for _ in range(20 if found.rows > 1 else 0):
            tree = random_tree(rng, tiny.n_vocab, int(rng.integers(300)), target.max_nodes, target.max_leaves, 12)
            rows = target.evaluate(tree).copy()
            node = len(tree) - 1 if rng.random() < 0.7 else int(rng.integers(len(tree)))
            path = [node]
            while path[0]:
                path.insert(0, int(tree.parents[path[0]]))
            target.commit(path)
            for at in path:
                row = plain.evaluate(DraftTree.lone(int(tree.tokens[at])))[0]
                differ += not np.array_equal(row.view(np.int32), rows[at].view(np.int32))
                plain.commit([0])
        assert differ == 0
        assert target.held == plain.held

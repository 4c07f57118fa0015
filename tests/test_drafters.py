from __future__ import annotations

import numpy as np
import pytest

from racer_local.config import DRAFTERS, DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import TopK, make_drafter
from racer_local.draft.sources import Text
from racer_local.errors import ConfigError
from racer_local.tree import DraftTree, Limit

FREE = VerifyCost.parse("1:1")
"""With this curve every node pays."""
WIDE = Limit(nodes=256, leaves=255, depth=100)


def top(*rows, k=8):
    """A TopK whose rows are padded with -1."""
    ids = np.full((len(rows), k), -1, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return TopK(ids, np.zeros(ids.shape, np.float32))


def paths(tree):
    found = set()
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = tree.parents[at]
        found.add(tuple(path))
    return found


def test_retrieval_comes_first_and_the_logits_tree_fills_what_is_left():
    drafter = make_drafter(DraftConfig(draft="paper", max_nodes=6), 50)
    drafter.begin([1, 2, 3, 4, 9, 1, 2])
    drafter.observe(DraftTree.chain([2, 3]), top([7, 3, 8], [5]))
    tree = drafter.draft(2, WIDE)
    assert paths(tree) == {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 9), (2, 3, 4, 9, 1), (2, 3, 4, 9, 1, 2)}
    assert set(tree.sources[1:].tolist()) == {0}
    wide = make_drafter(DraftConfig(draft="paper", max_nodes=10), 50)
    wide.begin([1, 2, 3, 4, 9, 1, 2])
    wide.observe(DraftTree.chain([2, 3]), top([7, 3, 8], [5]))
    tree = wide.draft(2, WIDE)
    assert {(2, 7), (2, 8), (2, 3, 5)} < paths(tree)
    sources = dict(zip(map(int, tree.tokens), map(int, tree.sources), strict=True))
    assert [sources[t] for t in (3, 4, 7, 8, 5)] == [0, 0, 1, 1, 1], "3 is both's, and belongs to retrieval"


@pytest.mark.parametrize("draft", [d for d in DRAFTERS if d != "none"])
def test_end_tokens_are_never_drafted(draft):
    drafter = make_drafter(DraftConfig(draft=draft), 50, {3}, FREE)
    drafter.begin([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2])
    if drafter.breadth:
        drafter.observe(DraftTree.chain([1, 2, 4]), top([2, 3], [3, 4], [5, 3]))
    assert 3 not in drafter.draft(2, WIDE).tokens.tolist()


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("limit", [Limit(1, 1, 0), Limit(64, 1, 9), Limit(5, 64, 2), Limit(64, 64, 0)])
def test_a_draft_keeps_to_its_limit(draft, limit):
    rng = np.random.default_rng(0)
    drafter = make_drafter(DraftConfig(draft=draft), 6, (), FREE)
    text = rng.integers(6, size=500).astype(np.int32)
    drafter.begin(text)
    if drafter.breadth:
        drafter.observe(DraftTree.chain(range(6)), top(*[rng.permutation(6) for _ in range(6)]))
    tree = drafter.draft(int(text[-1]), limit)
    assert len(tree) <= min(limit.nodes, DraftConfig(draft=draft).nodes)
    assert tree.leaf_spans()[1][0] <= limit.leaves
    assert tree.depths.max() <= limit.depth
    assert tree.tokens[0] == text[-1]


@pytest.mark.parametrize("draft", [d for d in DRAFTERS if d != "none"])
def test_a_drafter_that_has_seen_nothing_drafts_nothing(draft):
    drafter = make_drafter(DraftConfig(draft=draft), 50, (), FREE)
    drafter.begin([4])
    assert drafter.draft(4, WIDE).tokens.tolist() == [4]


def test_what_was_learned_serves_the_next_prompt():
    drafter = make_drafter(DraftConfig(draft="retrieval"), 50)
    drafter.begin([1, 2, 3, 4, 5, 6])
    drafter.begin([20, 2, 3])
    assert (3, 4, 5) in paths(drafter.draft(3, WIDE))


def test_a_chat_that_goes_on_is_counted_once():
    again = make_drafter(DraftConfig(draft="retrieval"), 50)
    again.begin([1, 2, 3])
    again.begin([1, 2, 3, 4])
    again.begin([1, 2, 9])  # an edited message
    once = make_drafter(DraftConfig(draft="retrieval"), 50)
    once.begin([1, 2, 3, 4])
    grams = [drafter.sources[0].trie for drafter in (again, once)]
    one = [trie.counts[trie.first_child[0]] for trie in grams]
    assert max(grams[0].counts[: grams[0].meta[0]]) == 1
    assert one == [1, 1]


def test_accepted_nodes_count_as_the_most_recent():
    drafter = make_drafter(DraftConfig(draft="logits", breadth=2), 50)
    drafter.begin([1])
    tree = DraftTree.of([1, 5, 7, 5], [-1, 0, 0, 2])  # token 5 on two branches
    drafter.observe(tree, top([5, 7], [10, 11], [5, 6], [20, 21], k=2))
    drafter._drafted = tree
    drafter.accept([0, 1], 9)
    assert paths(drafter.draft(5, Limit(3, 9, 1))) == {(5,), (5, 10), (5, 11)}


def test_a_rejected_nodes_logits_are_learned_too():
    drafter = make_drafter(DraftConfig(draft="logits", breadth=2), 50)
    drafter.begin([1])
    drafter.observe(DraftTree.of([1, 5], [-1, 0]), top([6], [30, 31], k=2))
    drafter.accept([0], 6)
    assert paths(drafter.draft(5, Limit(9, 9, 1))) == {(5,), (5, 30), (5, 31)}


def test_a_growing_text_keeps_its_tokens():
    text, expected = Text(), []
    for n in range(60):
        text.extend(np.arange(n, dtype=np.int32))
        expected += range(n)
        assert text.tokens.tolist() == expected
    assert text.shared_prefix(np.array([*expected[:100], -5], np.int32)) == 100


def test_an_unknown_drafter_lists_the_known():
    with pytest.raises(ConfigError, match="draft is 'eagle'; it must be one of none, lookup, logits"):
        DraftConfig(draft="eagle")


@pytest.mark.parametrize("value", [0, 256, 1000])
def test_max_nodes_says_its_range(value):
    with pytest.raises(ConfigError, match=f"max_nodes is {value}; it must be from 1 to 255"):
        DraftConfig(draft="paper", max_nodes=value)

"""The cost-aware drafter as a whole: what it promises its users."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import ScriptedTarget, scripted_logits

from racer_local.config import DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import TopK, make_drafter
from racer_local.draft import racer as racer_module
from racer_local.draft.racer import RacerDrafter
from racer_local.engine import generate
from racer_local.errors import ConfigError
from racer_local.stats import GenerationStats
from racer_local.tree import DraftTree, Limit, Source

WIDE = Limit(64, 63, 100)
VOCAB = 300


class Greedy:
    def begin(self, prompt): ...

    def draw(self, logits):
        return int(np.argmax(logits))


def racer(cost="unified", n_vocab=VOCAB, **settings):
    return make_drafter(DraftConfig(history_tokens=1 << 14, **settings), n_vocab, (), VerifyCost.parse(cost))


def read(drafter, tokens):
    """A prompt, and what a sure model thinks of it: the token that came, then others."""
    drafter.begin(tokens)
    if len(tokens) > 1:
        drafter.observe(DraftTree.chain(tokens[:-1]), sure_of(tokens[1:]))


def sure_of(tokens):
    ids = (np.asarray(tokens)[:, None] + np.arange(8) * 7) % VOCAB
    logits = np.tile(np.array([6, 2, 1, 0, 0, 0, 0, 0], np.float32), (len(tokens), 1))
    return TopK(ids.astype(np.int32), logits)


def answer(drafter, prompt, expected):
    """Replay an expected answer; (emitted, steps, drafted nodes)."""
    read(drafter, prompt)
    at, steps, drafted, root = 0, 0, 0, prompt[-1]
    while at < len(expected):
        tree = drafter.draft(root, Limit(64, 63, len(expected) - at - 1))
        path = [0]
        while len(path) <= len(expected) - at and (child := tree.child(path[-1], expected[at + len(path) - 1])) > 0:
            path.append(child)
        emitted = expected[at : at + len(path)]
        top = sure_of([0] * len(tree))
        top.ids[:, 0] = -1
        top.ids[path] = sure_of(emitted).ids
        drafter.observe(tree, top)
        drafter.accept(path, emitted[-1])
        at, root, steps, drafted = at + len(path), emitted[-1], steps + 1, drafted + len(tree) - 1
    return at, steps, drafted


def random_words(seed, n=200):
    return np.random.default_rng(seed).integers(VOCAB, size=n).tolist()


CODE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26] * 3


@pytest.mark.parametrize("cost", ["cpu", "cpu-amx", "unified", "gpu", "1:1 255:255"])
def test_random_words_are_not_drafted_at_a_loss(cost):
    curve = VerifyCost.parse(cost)
    drafter = racer(cost)
    seconds = tokens = 0.0
    for seed in range(5):
        emitted, steps, drafted = answer(drafter, random_words(seed, 50), random_words(100 + seed, 100))
        tokens += emitted
        seconds += steps + drafted * (curve.relative[2] - 1)  # no chain costs more than single nodes would
    assert tokens / seconds > 0.98


def test_where_a_node_costs_a_forward_nothing_is_drafted():
    drafter = racer("1:1 255:255")
    assert answer(drafter, CODE, CODE)[2] == 0


@pytest.mark.parametrize("cost", ["cpu", "gpu"])
def test_a_text_that_repeats_is_drafted_in_long_steps(cost):
    emitted, steps, _ = answer(racer(cost), CODE, CODE[:40])
    assert emitted / steps > 4


def test_dearer_verifying_makes_smaller_trees():
    sizes = []
    for cost in ("1:1", "1:1 64:2", "1:1 64:8", "1:1 2:1.7 64:30"):
        drafter = racer(cost)
        read(drafter, [*random_words(1, 400), *random_words(1, 400)[:30]])
        sizes.append(len(drafter.draft(random_words(1, 400)[29], WIDE)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_what_was_learned_serves_the_next_prompt_and_clear_forgets_it():
    story = random_words(3, 60)
    drafter = racer()
    read(drafter, story)
    first = answer(drafter, [299, *story[:5]], story[5:])
    assert first[0] / first[1] > 3
    drafter.clear()
    read(drafter, [299, *story[:5]])
    assert len(drafter.draft(story[4], WIDE)) == 1
    np.testing.assert_array_equal(drafter.net.out, drafter.net.prior)


def test_one_bad_stretch_does_not_wipe_what_was_learned():
    """Long code, a short unrelated request, ten requests of random words, then the code again."""
    drafter, code = racer("cpu"), random_words(7, 300)
    answer(drafter, code[:100], code[100:])
    emitted, steps, _ = answer(drafter, code[:100], code[100:])
    before = emitted / steps
    answer(drafter, [5, 6, 7], [8, 9, 10])
    for seed in range(10):
        answer(drafter, random_words(seed + 50, 100), random_words(seed + 80, 100))
    emitted, steps, _ = answer(drafter, code[:100], code[100:])
    assert before > 3
    assert emitted / steps >= before


@pytest.fixture
def dear_looks(monkeypatch):
    """A machine on which every look takes a good part of a forward."""
    monkeypatch.setattr(racer_module, "DEAR_LOOK", -1.0)


def looks_in(drafter, prompt, expected):
    """At which steps of an answer the drafter looked."""
    looked, look = [], drafter._look
    steps = 0

    def noted(root, limit):
        looked.append(steps)
        return look(root, limit)

    drafter._look = noted
    read(drafter, prompt)
    root = prompt[-1]
    for token in expected:
        tree = drafter.draft(root, Limit(1, 1, 1))  # a lone root is all that there is room for
        drafter.observe(tree, sure_of([token]))
        drafter.accept([0], token)
        root, steps = token, steps + 1
    return looked


def test_where_looks_are_dear_and_in_vain_only_every_fourth_step_looks(dear_looks):
    drafter = racer("cpu")
    assert looks_in(drafter, [1, 2], random_words(1, 40)) == [*range(8), *range(11, 40, 4)]
    assert looks_in(drafter, [3], random_words(2, 10)) == [*range(8)], "a new prompt is looked at from its start"


def test_where_looks_are_cheap_every_step_looks():
    assert looks_in(racer("cpu"), [1, 2], random_words(1, 40)) == [*range(40)]


def test_a_drafter_that_rests_learns_the_same_text_and_cues(monkeypatch):
    learned = []
    for share in (-1.0, 1e9):
        monkeypatch.setattr(racer_module, "DEAR_LOOK", share)
        drafter = racer("cpu")
        for seed in range(3):
            looks_in(drafter, [1, 2, seed], random_words(seed, 45 + seed))
        drafter.begin([7])
        cues = drafter.cues
        learned.append([*drafter.history, cues.tokens, cues.log_probs, drafter.recent.seen, cues.stamps])
    *same, (resting, looking) = zip(*learned, strict=True)
    for one, other in same:
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(resting, looking, atol=racer_module.REST - 1)


def test_a_text_that_repeats_wakes_a_drafter_that_rests(dear_looks):
    drafter, words = racer("cpu"), random_words(9, 60)
    emitted, steps, drafted = answer(drafter, words[:1], [*words[1:], *words])
    assert drafted > 30
    assert emitted - steps > 30


def test_learned_state_stays_within_the_memory_that_is_announced():
    drafter = racer()
    arrays = [array for part in drafter.memory[:2] for array in part]
    for seed in range(6):
        read(drafter, random_words(seed, 10_000))
    now = [array for part in drafter.memory[:2] for array in part]
    assert all(a is b for a, b in zip(arrays, now, strict=True))
    announced = RacerDrafter.memory_bytes(DraftConfig(history_tokens=1 << 14))
    assert sum(array.nbytes for array in now) == announced < 90 << 14


def test_a_chat_that_goes_on_is_remembered_once():
    drafter = racer()
    drafter.begin([1, 2, 3])
    before = int(drafter.history.length[0])
    drafter.begin([1, 2, 3, 4, 5])
    assert int(drafter.history.length[0]) == before + 2
    drafter.begin([1, 2, 3, 9])  # an edited message: only its neighbourhood is read again
    assert drafter._text.tokens.tolist() == [1, 2, 3, 9]
    long = random_words(4, 500)
    drafter.begin(long)
    before = int(drafter.history.length[0])
    drafter.begin([*long[:400], 7, 7, 7])
    assert int(drafter.history.length[0]) < before + 30


def test_a_rejected_nodes_row_is_learned_and_an_accepted_one_is_the_most_recent():
    drafter = racer("1:1")
    read(drafter, [1, 2, 3])
    tree = DraftTree.of([3, 5, 7, 5], [-1, 0, 0, 2])  # token 5 on two branches
    drafter._drafted = tree
    ids = np.array([[5, 7], [40, 41], [5, 6], [50, 51]], np.int32)
    drafter.observe(tree, TopK(ids, np.tile(np.array([5, 1], np.float32), (4, 1))))
    drafter.accept([0, 1], 40)
    from racer_local.kernels import keyed_cues

    slots = np.zeros(len(keyed_cues.KEYS), np.int64)
    keyed_cues.find(drafter.cues, np.array([5], np.int32), 1, slots)
    assert drafter.cues.tokens[slots[0], :2].tolist() == [40, 41], "after 5: the accepted node's row"
    keyed_cues.find(drafter.cues, np.array([3, 7, 5], np.int32), 3, slots)
    assert drafter.cues.tokens[slots[2], :2].tolist() == [50, 51], "after 3 7 5: the rejected node's"


def test_a_node_tells_whether_it_continues_a_match_or_comes_from_cues():
    drafter = racer("1:1")
    read(drafter, [1, 2, 3, 4, 5, 6, 1, 2])
    tree = drafter.draft(2, WIDE)
    sources = {int(t): int(s) for t, s, d in zip(tree.tokens, tree.sources, tree.depths, strict=True) if d == 1}
    assert sources[3] == Source.CONTEXT
    assert Source.LOGITS in sources.values()


def test_a_step_corrects_the_cost_curve_and_a_prompt_does_not(monkeypatch):
    drafter = racer()
    seen = []
    monkeypatch.setattr(drafter.cost, "correct", lambda n, seconds: seen.append((n, seconds)))
    read(drafter, CODE)
    assert seen == []
    tree = drafter.draft(CODE[-1], WIDE)
    drafter.observe(tree, sure_of([1] * len(tree)))
    assert [n for n, _ in seen] == [len(tree)]
    assert 0 < seen[0][1] < 10


@pytest.mark.parametrize("cost", ["1:1", "gpu", "cpu"])
def test_the_text_is_the_targets_own(cost):
    """Chains of hashed logits, with periods so that drafts are accepted and rejected."""

    def logits(prefix, n):
        return scripted_logits(prefix[-2:], n)

    def run(drafter, stats=None):
        target = ScriptedTarget(n_vocab=8, logits=logits)
        out = generate(target, drafter, Greedy(), [1, 2, 3], max_tokens=150, end_tokens=(), stats=stats)
        return [emitted.token for emitted in out]

    plain = run(make_drafter(DraftConfig(draft="none"), 8))
    stats = GenerationStats()
    assert run(racer(cost, n_vocab=8), stats) == plain
    assert stats.accepted > 10


def test_without_a_cost_curve_there_is_no_racer():
    with pytest.raises(ConfigError, match="the racer drafter needs a cost curve"):
        make_drafter(DraftConfig(draft="racer"), 8)


@pytest.mark.parametrize(("tokens", "message"), [(1000, "must be from 1024"), (5000, "must be a power of two")])
def test_a_history_that_cannot_be_says_why(tokens, message):
    with pytest.raises(ConfigError, match=message):
        DraftConfig(history_tokens=tokens)


def test_a_prompts_logits_are_asked_for_only_where_they_are_cheap():
    assert [racer(cost).prompt_rows for cost in ("cpu", "cpu-amx", "unified", "gpu")] == [0, 0, 64, 64]
    seen = []
    for cost in ("cpu", "gpu"):
        drafter = racer(cost, n_vocab=8)
        target = ScriptedTarget(n_vocab=8)
        watched = drafter.observe
        drafter.observe = lambda tree, top_k, watched=watched: (seen.append((cost, len(tree))), watched(tree, top_k))  # noqa: B023
        list(generate(target, drafter, Greedy(), [1, 2, 3, 4, 5, 6, 7, 1, 2], max_tokens=1, end_tokens=()))
    assert [n for cost, n in seen if cost == "gpu"] == [5, 3, 1], "two chunks of the prompt, then the root"
    assert [n for cost, n in seen if cost == "cpu"] == [1]

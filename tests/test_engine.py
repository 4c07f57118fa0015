from __future__ import annotations

import numpy as np
import pytest
from scripted import RandomDrafter, ScriptedTarget

from racer_local.config import DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import make_drafter
from racer_local.engine import generate
from racer_local.errors import ConfigError, ContextFullError
from racer_local.stats import GenerationStats, speed_up
from racer_local.tree import DraftTree

PROMPT = [3, 1, 0, 1, 2, 3, 2, 0]


class Greedy:
    def begin(self, prompt): ...

    def draw(self, logits):
        return int(logits.argmax())


class Seeded:
    """Draws from the softmax, one number a draw."""

    def __init__(self, seed):
        self.seed = seed

    def begin(self, prompt):
        self.rng = np.random.default_rng(self.seed)
        self.draws = 0

    def draw(self, logits):
        self.draws += 1
        p = np.exp(logits.astype(np.float64) - logits.max())
        return int(np.searchsorted(np.cumsum(p / p.sum()), self.rng.random()))


def run(target, drafter, sampler, prompt=PROMPT, max_tokens=40, end_tokens=(), **more):
    more["end_tokens"] = end_tokens
    return [e.token for e in generate(target, drafter, sampler, prompt, max_tokens=max_tokens, **more)]


def none():
    return make_drafter(DraftConfig(draft="none"), 16)


@pytest.mark.parametrize("make_sampler", [Greedy, lambda: Seeded(5)], ids=["greedy", "seeded"])
def test_random_trees_never_change_the_text(make_sampler):
    plain = run(ScriptedTarget(n_vocab=6), none(), make_sampler(), max_tokens=60)
    trees = 0
    for seed in range(60):
        stats = GenerationStats()
        drafter = RandomDrafter(seed, 6, breadth=3)
        text = run(ScriptedTarget(n_vocab=6), drafter, make_sampler(), max_tokens=60, stats=stats)
        assert text == plain
        trees += stats.steps
    assert trees > 1500
    assert stats.accepted > 0


@pytest.mark.parametrize("draft", ["lookup", "logits", "retrieval", "paper", "racer"])
def test_no_drafter_changes_the_text(draft):
    target = ScriptedTarget(n_vocab=5, logits=lambda prefix, n: np.eye(n, dtype=np.float32)[sum(prefix[-2:]) % n])
    stats = GenerationStats()
    drafter = make_drafter(DraftConfig(draft=draft), 5, (), VerifyCost.parse("unified"))
    text = run(target, drafter, Greedy(), [1, 2, 3, 4], 100, stats=stats)
    plain = run(ScriptedTarget(n_vocab=5, logits=target.logits), none(), Greedy(), [1, 2, 3, 4], 100)
    assert text == plain
    assert stats.mean_accepted_tokens > 1.5, "a periodic text must be drafted well"
    assert sum(stats.accepted_by_source.values()) == stats.accepted
    assert stats.emitted == stats.accepted + stats.steps


def test_a_seed_costs_one_draw_for_each_emitted_token_with_drafts_on_and_off():
    for drafter in (none(), RandomDrafter(1, 6)):
        sampler = Seeded(0)
        text = run(ScriptedTarget(n_vocab=6), drafter, sampler)
        assert sampler.draws == len(text)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 5, 8, 64])
def test_max_tokens_is_exact_when_every_draft_is_accepted(max_tokens):
    ones = ScriptedTarget(n_vocab=4, logits=lambda prefix, n: np.eye(n, dtype=np.float32)[1])
    stats = GenerationStats()
    drafter = make_drafter(DraftConfig(draft="paper", max_nodes=8), 4)
    text = run(ones, drafter, Greedy(), [1, 1, 1, 1], max_tokens, stats=stats)
    assert text == [1] * max_tokens
    assert stats.emitted == max_tokens
    assert stats.finish_reason == "length"
    if max_tokens:
        assert ones.cache == [1] * (4 + max_tokens - 1)


@pytest.mark.parametrize("room", [1, 2, 7])
def test_the_answer_fills_the_context_to_the_last_token(room):
    target = ScriptedTarget(n_vocab=6, n_ctx=len(PROMPT) + room)
    assert len(run(target, RandomDrafter(0, 6), Greedy(), max_tokens=1000)) == room


def test_an_end_token_ends_the_answer_and_is_not_emitted():
    plain = run(ScriptedTarget(), none(), Greedy(), max_tokens=60)
    end = plain[20]
    first = plain.index(end)
    for seed in range(20):
        stats, target = GenerationStats(), ScriptedTarget()
        text = run(target, RandomDrafter(seed, 16, {end}), Greedy(), max_tokens=60, end_tokens={end}, stats=stats)
        assert text == plain[:first]
        assert stats.finish_reason == "stop"
        assert target.cache == PROMPT + text, "the cache equals the emitted text"


@pytest.mark.parametrize("taken", [1, 2, 7, 30])
def test_closing_early_leaves_the_cache_equal_to_what_was_emitted(taken):
    for seed in range(10):
        target, drafter = ScriptedTarget(n_vocab=4), RandomDrafter(seed, 4)
        answer = generate(target, drafter, Greedy(), PROMPT, max_tokens=60, end_tokens=())
        text = [next(answer).token for _ in range(taken)]
        answer.close()
        assert target.cache == PROMPT + text[:-1]
        assert target.pending is None
        assert drafter.text == PROMPT + text
        assert run(target, drafter, Greedy(), PROMPT + text, 10) == run(
            ScriptedTarget(n_vocab=4), none(), Greedy(), PROMPT + text, 10
        )


def test_max_tokens_holds_for_a_drafter_that_ignores_the_depth():
    class Deep(RandomDrafter):
        def draft(self, root, limit):
            self.tree = DraftTree.chain([root, 1, 1, 1, 1, 1])
            return self.tree

    ones = ScriptedTarget(n_vocab=4, logits=lambda prefix, n: np.eye(n, dtype=np.float32)[1])
    assert run(ones, Deep(0, 4), Greedy(), [1, 1], 2) == [1, 1]
    assert ones.cache == [1, 1, 1]


def test_an_error_in_a_forward_leaves_the_target_ready():
    target = ScriptedTarget()
    whole = target.evaluate

    def broken(tree):
        whole(tree)
        raise KeyboardInterrupt

    target.evaluate = broken
    with pytest.raises(KeyboardInterrupt):
        run(target, RandomDrafter(0, 16), Greedy())
    target.evaluate = whole
    assert run(target, none(), Greedy(), max_tokens=5) == run(ScriptedTarget(), none(), Greedy(), max_tokens=5)


def test_an_error_while_drawing_drops_the_whole_tree():
    class Broken(Greedy):
        def draw(self, logits):
            raise RuntimeError("no draw")

    target = ScriptedTarget()
    with pytest.raises(RuntimeError, match="no draw"):
        run(target, RandomDrafter(0, 16), Broken())
    assert target.cache == PROMPT[:-1]
    assert target.pending is None


def test_cancelling_stops_before_the_next_forward():
    target, stats = ScriptedTarget(), GenerationStats()
    answer = []
    for emitted in generate(
        target, none(), Greedy(), PROMPT, max_tokens=60, end_tokens=(), stats=stats, cancelled=lambda: len(answer) >= 3
    ):
        answer.append(emitted.token)
    assert len(answer) == target.forwards == 3
    assert stats.finish_reason == "cancelled"


def test_cancelling_in_a_long_prompt_emits_nothing():
    target, stats = ScriptedTarget(), GenerationStats()
    assert run(target, none(), Greedy(), cancelled=lambda: len(target.cache) >= 5, stats=stats) == []
    assert target.forwards == 0
    assert stats.finish_reason == "cancelled"


@pytest.mark.parametrize("prompt", [[1.5, 2], [True, False], [[1, 2]], ["a"], [None, 1]])
def test_a_prompt_that_is_no_sequence_of_integers_is_refused(prompt):
    with pytest.raises(ConfigError, match="flat sequence of token ids"):
        run(ScriptedTarget(), none(), Greedy(), prompt)


@pytest.mark.parametrize("wrong", [-1, 16, 5_000_000_000])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_token_that_is_not_in_the_vocabulary_is_named(wrong, place):
    prompt = [*PROMPT[:place], wrong, *PROMPT[place + 1 :]]
    with pytest.raises(ConfigError, match=f"token {wrong} of the prompt is not in the vocabulary"):
        run(ScriptedTarget(), make_drafter(DraftConfig(draft="paper"), 16), Greedy(), prompt)


def test_once_cancelled_it_stays_cancelled():
    answers = iter([True, *[False] * 50])
    target, stats = ScriptedTarget(), GenerationStats()
    assert run(target, none(), Greedy(), cancelled=lambda: next(answers), stats=stats) == []
    assert stats.finish_reason == "cancelled"


def test_an_empty_or_too_long_prompt_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="prompt is empty"):
        run(ScriptedTarget(), none(), Greedy(), [])
    with pytest.raises(ContextFullError, match=r"8 tokens and the context holds 8.*--ctx"):
        run(ScriptedTarget(n_ctx=8), none(), Greedy())


def test_the_drafter_sees_every_evaluated_token_of_prompt_and_trees():
    target, drafter = ScriptedTarget(n_vocab=6), RandomDrafter(3, 6, breadth=2)
    evaluated = []
    plain_evaluate = target.evaluate

    def evaluate(tree):
        evaluated.extend(tree.tokens.tolist())
        return plain_evaluate(tree)

    target.evaluate = evaluate
    run(target, drafter, Greedy())
    assert drafter.seen == PROMPT[:-1] + evaluated


def test_each_token_comes_with_the_row_it_was_drawn_from():
    target = ScriptedTarget(n_vocab=6)
    text = list(PROMPT)
    for emitted in generate(target, RandomDrafter(3, 6), Greedy(), PROMPT, max_tokens=30, end_tokens=()):
        np.testing.assert_array_equal(emitted.logits, target.logits(text, 6))
        text.append(emitted.token)


def test_a_follow_up_prompt_reuses_what_the_target_holds():
    target, stats = ScriptedTarget(), GenerationStats()
    text = run(target, none(), Greedy())
    run(target, none(), Greedy(), [*PROMPT, *text, 7], stats=stats)
    assert stats.cached_tokens == len(PROMPT) + len(text) - 1


def test_speed_up_is_a_ratio_of_seconds_over_the_same_tokens():
    plain = GenerationStats(emitted=100, decode_seconds=2.0)
    ours = GenerationStats(emitted=50, decode_seconds=0.5)
    assert speed_up(plain, ours) == pytest.approx(2.0)

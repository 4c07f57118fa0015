"""The native sampler chain: its draws, its seed, and that trees do not bend its distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats as statistics
from scripted import scripted_logits

from racer_local.config import SamplingConfig
from racer_local.errors import ConfigError, DecodeError
from racer_local.llama import make_sampler
from racer_local.llama.sampler import ChainSampler, GreedySampler, fresh_seed
from racer_local.tree import DraftTree
from racer_local.verify import verify

OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The softmax itself."""
A, B, C, D, E, F = range(1, 7)


def softmax(logits, temperature=1.0):
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return p / p.sum()


def test_trees_with_several_candidates_keep_the_distribution():
    """Tree {a-b, a-c, a-d, e-f}; 20,000 one-step draws of the emitted tokens against the softmax."""
    tree = DraftTree.of([0, A, B, C, D, E, F], [-1, 0, 1, 1, 1, 0, 5])
    rows = np.array([scripted_logits([7, node], 8) for node in range(len(tree))]) * 0.5
    sampler = make_sampler(SamplingConfig(seed=11, **OPEN), 8)
    sampler.begin([])
    first, after_a, after_e = Counter(), Counter(), Counter()
    for _ in range(20_000):
        path, bonus = verify(tree, lambda node: sampler.draw(rows[node]))
        emitted = [*tree.tokens[path[1:]].tolist(), bonus]
        first[emitted[0]] += 1
        if len(emitted) > 1:
            (after_a if emitted[0] == A else after_e)[emitted[1]] += 1
    for counts, row in ((first, rows[0]), (after_a, rows[1]), (after_e, rows[5])):
        n = counts.total()
        observed = [counts[token] for token in range(8)]
        assert n > 500
        assert statistics.chisquare(observed, n * softmax(row)).pvalue > 1e-3


@pytest.mark.parametrize(
    "setting", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.5}], ids=lambda s: next(iter(s))
)
def test_each_stage_of_the_chain_cuts_the_distribution_as_it_says(setting):
    row = np.array([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, 0.5, 0.2], np.float32)
    p = softmax(row)
    order = np.argsort(-p)
    keep = {
        "top_k": set(order[:3].tolist()),
        "top_p": set(order[: int(np.searchsorted(np.cumsum(p[order]), 0.6)) + 1].tolist()),
        "min_p": {i for i in range(8) if p[i] >= 0.3 * p.max()},
        "temperature": set(range(8)),
    }[next(iter(setting))]
    expected = softmax(row, setting.get("temperature", 1.0)) * [i in keep for i in range(8)]
    sampler = make_sampler(SamplingConfig(seed=3, **{**OPEN, **setting}), 8)
    sampler.begin([])
    counts = Counter(sampler.draw(row) for _ in range(5000))
    assert set(counts) <= keep
    kept = sorted(keep)
    expected = expected[kept] / expected.sum() * 5000
    assert statistics.chisquare([counts[i] for i in kept], expected).pvalue > 1e-3


def draws(config, n=50):
    sampler = make_sampler(config, 16)
    sampler.begin([])
    return [sampler.draw(scripted_logits([i], 16)) for i in range(n)]


def test_a_seed_repeats_and_no_seed_does_not():
    assert draws(SamplingConfig(seed=5, **OPEN)) == draws(SamplingConfig(seed=5, **OPEN))
    assert draws(SamplingConfig(seed=5, **OPEN)) != draws(SamplingConfig(seed=6, **OPEN))
    for unset in (None, -1):
        config = SamplingConfig(seed=unset, **OPEN)
        assert draws(config) != draws(config)


def test_beginning_again_starts_the_seed_over():
    sampler = make_sampler(SamplingConfig(seed=5, **OPEN), 16)
    row = scripted_logits([0], 16)
    sampler.begin([])
    once = [sampler.draw(row) for _ in range(20)]
    sampler.begin([])
    assert [sampler.draw(row) for _ in range(20)] == once


def test_a_fresh_seed_is_one_that_llama_cpp_takes_as_given():
    seeds = {fresh_seed(None) for _ in range(100)}
    assert len(seeds) > 90
    assert max(seeds) < 0xFFFFFFFF
    assert fresh_seed(7) == 7


def test_greedy_takes_the_lowest_id_at_a_tie():
    assert make_sampler(SamplingConfig(), 4).draw(np.array([0, 3, 3, 1], np.float32)) == 1
    assert isinstance(make_sampler(SamplingConfig(), 4), GreedySampler)


def test_penalties_count_the_prompt_and_the_emitted_tokens_even_when_greedy():
    row = np.array([1.0, 1.2, 1.1, 0.9], np.float32)
    sampler = make_sampler(SamplingConfig(presence_penalty=0.5), 4)
    sampler.begin([1])
    assert [sampler.draw(row) for _ in range(4)] == [2, 0, 3, 1]
    sampler.begin([])
    assert sampler.draw(row) == 1


@pytest.mark.parametrize("config", [SamplingConfig(), SamplingConfig(seed=1, temperature=1.0)])
def test_logits_that_are_not_numbers_are_an_error_and_no_token(config):
    with pytest.raises(DecodeError, match="not numbers"):
        make_sampler(config, 4).draw(np.array([1, np.nan, 0, 2], np.float32))


def test_closing_a_chain_twice_is_harmless():
    sampler = ChainSampler(SamplingConfig(seed=1, temperature=1.0), 4)
    sampler.close()
    sampler.close()
    with pytest.raises(RuntimeError, match="this sampler is closed"):
        sampler.draw(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be from 0 to 100"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"seed": -2}, "seed is -2"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_range(setting, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**setting)

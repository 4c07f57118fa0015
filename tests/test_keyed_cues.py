"""kernels.keyed_cues: rows under keys of the last tokens, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from memories import random_row, random_text, tokens

from racer_local.kernels import keyed_cues
from racer_local.kernels.history import BREAK
from racer_local.kernels.keyed_cues import FLOOR, KEYS, NONE

K = 3


def put(cues, context, ids=(7, 8, 9), log_probs=(-0.5, -1, -2), stamp=1):
    keyed_cues.put(cues, tokens(context), tokens(ids), np.array(log_probs, np.float32), np.int64(stamp))


def find(cues, context, end=None):
    slots = np.zeros(len(KEYS), np.int64)
    keyed_cues.find(cues, tokens(context), len(context) if end is None else end, slots)
    return slots.tolist()


def row(cues, slot):
    return cues.tokens[slot].tolist(), cues.log_probs[slot].tolist(), int(cues.stamps[slot])


def keys_of(context, end):
    """What each key is made of; None where a token is missing."""
    for skipped, taken in KEYS:
        first = end - skipped - taken
        key = tuple(context[max(first, 0) : end - skipped])
        yield None if first < 0 or BREAK in key else (skipped, key)


def random_words(rng, length):
    return random_text(rng, length, 4)


def put_at_random(rng, cues, times=300):
    """The text that the contexts come from, and {key: row put last}."""
    text, rows = random_words(rng, 200), {}
    for stamp in range(times):
        end = int(rng.integers(1, len(text) + 1))
        ids, log_probs = random_row(rng, K, 50)
        put(cues, text[:end], ids, log_probs, stamp)
        for key in keys_of(text, end):
            if key:
                rows[key] = ids.tolist(), log_probs.tolist(), stamp
    return text, rows


@pytest.mark.parametrize("seed", range(10))
def test_a_cue_is_what_was_put_last_under_its_key(seed):
    rng = np.random.default_rng(seed)
    cues = keyed_cues.new_cues(1 << 18, K)
    text, rows = put_at_random(rng, cues)
    text += random_words(rng, 100)
    for end in range(len(text) + 1):
        found = [row(cues, slot) if slot != NONE else None for slot in find(cues, text, end)]
        assert found == [rows.get(key) for key in keys_of(text, end)]


@pytest.mark.parametrize("seed", range(10))
def test_in_a_tiny_table_a_row_is_found_under_no_key_but_its_own(seed):
    cues = keyed_cues.new_cues(16, K)
    text, rows = put_at_random(np.random.default_rng(seed), cues)
    found = {}
    for end in range(1, len(text) + 1):
        for key, slot in zip(keys_of(text, end), find(cues, text, end), strict=True):
            assert (key in found) <= (slot == found.get(key)), "a key has one slot"
            if slot != NONE:
                assert row(cues, slot) == rows[key]
                found[key] = slot
    assert 8 <= len(found) <= 16
    assert len(set(found.values())) == len(found), "a slot has one key"


def test_a_replaced_row_is_not_found_under_the_old_key():
    cues = keyed_cues.new_cues(1, K)
    put(cues, [1])
    put(cues, [2], ids=(4, 5, 6))
    assert find(cues, [1]) == [NONE] * 4
    assert find(cues, [2]) == [0, NONE, NONE, NONE]
    assert row(cues, 0)[0] == [4, 5, 6]


def test_the_key_that_skips_the_last_token_answers_where_it_differs():
    cues = keyed_cues.new_cues(1024, K)
    put(cues, [1, 2, 3])
    assert [slot != NONE for slot in find(cues, [1, 2, 9])] == [False, False, False, True]
    assert [slot != NONE for slot in find(cues, [9, 2, 3])] == [True, True, False, False]
    assert find(cues, [1, 9, 3])[3] == NONE


def test_a_key_with_a_break_or_a_missing_token_gives_no_cue():
    cues = keyed_cues.new_cues(1024, K)
    for context in ([BREAK, 3], [3]):
        put(cues, context)
        assert [slot != NONE for slot in find(cues, context)] == [True, False, False, False]
    put(cues, [1, 2, BREAK])
    assert [slot != NONE for slot in find(cues, [1, 2, BREAK])] == [False, False, False, True]
    assert find(cues, [BREAK] * 4) == find(cues, []) == [NONE] * 4
    assert np.count_nonzero(cues.keys) == 2


def test_only_what_is_before_the_end_counts():
    cues = keyed_cues.new_cues(1024, K)
    put(cues, [1, 2, 3])
    assert find(cues, [1, 2, 3, 9, 9], end=3) == find(cues, [1, 2, 3])
    assert find(cues, [1, 2, 3, 9, 9]) == [NONE] * 4


def test_a_key_never_answers_for_another_kind():
    cues = keyed_cues.new_cues(1 << 18, K)
    put(cues, [1, 7])
    assert find(cues, [3, 7, 9]) == [NONE] * 4


@pytest.mark.parametrize("k", [1, 2, 8])
def test_log_softmax_equals_numpy_with_a_floor(k):
    rng = np.random.default_rng(k)
    logits = -np.sort(-rng.normal(0, 4, (200, k)).astype(np.float32), axis=1)
    logits[:50, k // 2 + 1 :] = -np.inf
    logits[50:60] = -np.inf
    logits[60] = 20_000
    known = np.isfinite(logits[:, 0])
    expected = np.full(logits.shape, FLOOR)
    weights = np.exp(logits[known].astype(np.float64) - logits[known, :1])
    with np.errstate(divide="ignore"):
        expected[known] = np.maximum(np.log(weights / weights.sum(axis=1, keepdims=True)), FLOOR)
    out = np.full_like(logits, np.nan)
    for row, target in zip(logits, out, strict=True):
        keyed_cues.log_softmax(row, target)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_cleared_cues_are_forgotten():
    cues = keyed_cues.new_cues(16, K)
    text, _ = put_at_random(np.random.default_rng(0), cues)
    keyed_cues.clear(cues)
    assert all(find(cues, text, end) == [NONE] * 4 for end in range(len(text)))


def test_a_number_of_slots_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two, not 12"):
        keyed_cues.new_cues(12, K)

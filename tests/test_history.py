"""kernels.history: what followed the end of a context before, against a plain list of the text."""

from __future__ import annotations

import numpy as np
import pytest
from memories import context_after, random_text, tokens

from racer_local.kernels import history
from racer_local.kernels.history import BREAK, LONGEST, MOST, ORDERS, PER_ORDER, WALK


def remembered(text, window=1024):
    it = history.new_history(window)
    history.append(it, tokens(text))
    return it


def find(it, context):
    """(follower, its position, length of the match) of each match."""
    matches = history.new_matches()
    n = history.find(it, context_after(context), matches)
    return list(zip(*(column[:n].tolist() for column in matches), strict=True))


def find_twin(text, context, window=1024, per_order=PER_ORDER):
    start = max(0, len(text) - window)

    def shared(end):
        length = 0
        while length < min(LONGEST, len(context), end + 1 - start):
            token = text[end - length]
            if token == BREAK or token != context[-1 - length]:
                break
            length += 1
        return length

    ends = [end for end in range(len(text) - 2, start - 1, -1) if text[end + 1] != BREAK]
    found = []
    for order, longer in zip(reversed(ORDERS), (LONGEST + 1, *reversed(ORDERS)), strict=False):
        found += [(text[e + 1], e + 1, shared(e)) for e in ends if order <= shared(e) < longer][:per_order]
    return found


def random_context(rng, text):
    """The end of the text, one from amid it, or neither; at times with another token or a BREAK in it."""
    context = text[: int(rng.integers(1, len(text) + 1))] if rng.random() < 0.5 else list(text)
    if rng.random() < 0.5:
        context[-int(rng.integers(1, min(12, len(context)) + 1))] = int(rng.integers(-1, 3))
    return context


def test_find_worked_example():
    assert find(remembered([5, 6, 7, 5, 6, 8]), [1, 5, 6]) == [(8, 5, 2), (7, 2, 2)]


def test_age_worked_example():
    it = remembered([5, 6, 7])
    assert [history.age(it, np.int32(token)) for token in (7, 5, 8)] == [1, 3, 0]


@pytest.mark.parametrize("seed", range(200))
def test_find_equals_its_plain_python_twin(seed):
    """In texts of up to WALK tokens, where no walk is cut short, however the hashes collide."""
    rng = np.random.default_rng(seed)
    text = random_text(rng, int(rng.integers(1, WALK + 1)), int(rng.integers(1, 5)))
    it = remembered(text)
    for _ in range(5):
        context = random_context(rng, text)
        assert find(it, context) == find_twin(text, context)


@pytest.mark.parametrize("window", [n for n in (1, 2, 4, 8, 16, 32) if n <= WALK])
def test_only_the_window_is_remembered(window):
    rng = np.random.default_rng(window)
    for _ in range(100):
        text = random_text(rng, int(rng.integers(1, 200)), int(rng.integers(1, 5)))
        it, context = remembered(text, window), random_context(rng, text)
        found, older = find(it, context), max(0, len(text) - window)
        assert found == [(token, at + older, length) for token, at, length in find_twin(text[older:], context)]
        assert found == find_twin(text, context, window)


def test_find_equals_its_twin_in_a_long_text_of_many_words():
    """Where the context's last token is rare enough for a walk to its end."""
    rng = np.random.default_rng(0)
    text = random_text(rng, 3000, 2000)
    it, compared = remembered(text, 4096), 0
    for _ in range(300):
        context = random_context(rng, text)
        if text.count(context[-1]) <= WALK // 2:
            found = find(it, context)
            assert found == find_twin(text, context, 4096)
            compared += len(found)
    assert compared > 100


def test_where_walks_are_cut_short_find_gives_some_of_the_matches_in_their_order():
    """In long texts of few words WALK links may not reach PER_ORDER occurrences; the twin finds them all."""
    rng = np.random.default_rng(0)
    for n_vocab in (1, 2, 3) * 20:
        text = random_text(rng, 600, n_vocab, 0.01)
        context = random_context(rng, text)
        found, every = find(remembered(text), context), iter(find_twin(text, context, per_order=len(text)))
        assert all(match in every for match in found)
        assert len(found) <= MOST


def test_each_order_takes_its_share_of_the_newest_matches():
    shorter, longer = ORDERS[-2:]
    context, n = list(range(100, 100 + longer)), 2 * PER_ORDER
    text = [*context, 7] * n + [50, *context[-shorter:], 9] * n
    found = find(remembered(text), context)
    assert [(token, length) for token, _, length in found] == [(7, longer)] * PER_ORDER + [(9, shorter)] * PER_ORDER
    assert found[0][1] == n * (longer + 1) - 1
    assert found[PER_ORDER][1] == len(text) - 1


def test_no_match_crosses_a_break():
    assert find(remembered([4, 5, BREAK, 6, 7]), [4, 5, BREAK, 6]) == [(7, 4, 1)]
    assert find(remembered([4, 5, BREAK, 6, 7]), [4, 5, 6]) == [(7, 4, 1)]
    assert find(remembered([4, 5, 6, 7]), [4, BREAK, 6]) == [(7, 3, 1)]


def test_what_nothing_follows_is_no_match():
    assert find(remembered([5, 6]), [5, 6]) == []
    assert find(remembered([5, 6, BREAK, 5, 6]), [5, 6]) == []
    assert find(remembered([]), [5, 6]) == []


def test_a_match_is_measured_up_to_the_longest():
    text = list(range(100, 130))
    assert find(remembered([*text, 7]), text) == [(7, 30, LONGEST)]
    assert find(remembered([*text, 7]), text[-11:]) == [(7, 30, 11)]


def test_text_in_pieces_is_the_same_text():
    rng = np.random.default_rng(0)
    text = random_text(rng, 500, 4)
    pieces = history.new_history(256)
    for start in range(0, 500, 7):
        history.append(pieces, tokens(text[start : start + 7]))
    whole = remembered(text, 256)
    for piece, array in zip(pieces[:4], whole[:4], strict=True):
        np.testing.assert_array_equal(piece, array)


def test_the_age_of_a_token_is_how_long_ago_it_occurred_last():
    rng = np.random.default_rng(0)
    text = random_text(rng, 3000, 10) + random_text(rng, 1000, 5)
    it = remembered(text)
    for token in range(12):
        age = text[::-1].index(token) + 1 if token in text[-1024:] else 0
        assert history.age(it, np.int32(token)) == age
    assert history.age(it, np.int32(BREAK)) == 0


@pytest.mark.parametrize("window", [1, 4, 16])
def test_in_a_small_window_an_age_is_right_or_unknown(window):
    """Few buckets: a token may have lost its own to another one. The last token never has."""
    rng = np.random.default_rng(window)
    for _ in range(50):
        text = random_text(rng, 40, 8)
        it = remembered(text, window)
        for token in range(8):
            exact = text[::-1].index(token) + 1 if token in text[-window:] else 0
            assert history.age(it, np.int32(token)) in (0, exact)
        if text[-1] != BREAK:
            assert history.age(it, np.int32(text[-1])) == 1


def test_a_history_does_not_grow_over_a_hundred_thousand_tokens():
    it, matches = history.new_history(1 << 12), history.new_matches()
    before = [array.ctypes.data for array in (*it, *matches)]
    text = tokens(np.random.default_rng(0).zipf(1.3, 100_000) % 50_000)
    for start in range(0, len(text), 1000):
        history.append(it, text[start : start + 1000])
        assert history.find(it, text[start : start + history.CONTEXT].copy(), matches) <= MOST
    assert it.length[0] == 100_000
    assert [array.ctypes.data for array in (*it, *matches)] == before


def test_a_cleared_history_knows_nothing_and_starts_anew():
    it = remembered([5, 6, 7, 5, 6, 8])
    history.clear(it)
    assert find(it, [5, 6]) == []
    assert history.age(it, np.int32(8)) == 0
    history.append(it, tokens([5, 6, 9]))
    assert find(it, [5, 6]) == [(9, 2, 2)]


def test_a_window_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two, not 48"):
        history.new_history(48)

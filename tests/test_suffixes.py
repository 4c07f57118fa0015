"""kernels.suffixes: where the end of a context occurs in an index, against a plain list of its text."""

from __future__ import annotations

import os

import numpy as np
import pytest
from indexes import index_of, part, random_texts, store_of
from memories import VOCABULARY, context_after, corpora_of, random_text, tokens
from numba import njit
from numba.core.runtime import _nrt_python, rtsys

from racer_local.corpus.sorting import sort_positions
from racer_local.corpus.store import File, Part, Store, write_store
from racer_local.kernels import evidence, suffixes
from racer_local.kernels.history import BREAK
from racer_local.kernels.suffixes import (
    BEST,
    EXACT,
    LONGEST,
    MOST,
    NO_INDEX,
    ORDERS,
    PATIENCE,
    PAUSE,
    PER_ORDER,
    ROW,
    STRIDE,
    Index,
)


def find(index, context, least=1, found=None):
    """(follower, length, segment, file, position) of each match, and the sizes of the runs."""
    found = found or suffixes.new_found()
    suffixes.wake(index)
    n = suffixes.find(index, context_after(context), least, 0, found)
    rows = zip(*(column[:n].tolist() for column in found[:4]), strict=True)
    return [(token, length, *divmod(file, 1 << 32), at) for token, length, file, at in rows], found.sizes.tolist()


def shared(text, position, context):
    length = 0
    while length < min(LONGEST, len(context), position + 1):
        token = text[position - length]
        if token == BREAK or token != context[-1 - length]:
            break
        length += 1
    return length


def runs_of(text, context, least):
    """Length -> the positions that match so much, or more but less than the next length looked up; in their order."""
    order = sorted(range(len(text)), key=lambda p: text[p::-1]) if len(text) < 1000 else sort_positions(tokens(text))
    lengths = [shared(text, position, context) for position in order]
    wanted, runs = sorted({*ORDERS, max(lengths)}), {}
    for position, length in zip(order, lengths, strict=True):
        if classes := [o for o in wanted if least <= o <= length]:
            runs.setdefault(max(classes), []).append(position)
    return runs


def at_least(segments, context, least):
    """No match is shorter than half of the longest."""
    longest = max(shared(text, position, context) for text in segments for position in range(len(text)))
    return max(least, (longest + 1) // 2)


def find_twin(parts, context, least):
    segments = [part.tokens.tolist() for part in parts]
    least = at_least(segments, context, least)
    matches, sizes = [], [0] * (LONGEST + 1)
    for number, text in enumerate(segments):
        for length, run in sorted(runs_of(text, context, least).items(), reverse=True):
            take = min(len(run), PER_ORDER)
            for position in (run[(2 * i + 1) * len(run) // (2 * take)] for i in range(take)):
                if position + 1 < len(text) and text[position + 1] != BREAK:
                    file = int(np.searchsorted(parts[number].starts, position, "right")) - 1
                    matches.append((text[position + 1], length, number, file, position + 1))
            sizes[length] += len(run)
    return matches[:MOST], sizes


def random_context(rng, text):
    """From amid a text; often with another token or a BREAK in it."""
    end = int(rng.integers(1, len(text) + 1))
    context = text[max(0, end - 25) : end]
    if rng.random() < 0.5:
        context[-int(rng.integers(1, min(12, len(context)) + 1))] = int(rng.integers(-1, 4))
    return context


def test_find_worked_example(tmp_path):
    store = store_of(tmp_path / "i", {"a": [5, 6, 7], "b": [1, 5, 6, 8]})
    found, sizes = find(index_of(store), [1, 5, 6])
    assert found == [(8, 3, 0, 1, 7), (7, 2, 0, 0, 2)]
    assert sizes[:4] == [0, 0, 1, 1]


def test_sort_positions_worked_example():
    assert sort_positions(tokens([5, 7, 5, BREAK])).tolist() == [3, 0, 2, 1]


def test_every_class_of_evidence_is_looked_up():
    """Else a match would count as shorter than it is."""
    assert set(evidence.CLASSES) <= set(ORDERS)
    assert max(ORDERS) < LONGEST


@pytest.mark.parametrize("seed", range(60))
def test_find_equals_its_plain_python_twin(tmp_path, seed):
    """Followers, lengths, files, positions, their order and the runs' sizes, where no run is long."""
    rng = np.random.default_rng(seed)
    n_vocab = int(rng.integers(1, 6))
    texts = [random_texts(rng, map(str, range(rng.integers(1, 5))), 150, n_vocab) for _ in range(rng.integers(1, 5))]
    parts = [part(each) for each in texts]
    store = store_of(tmp_path / "i", *texts)
    index, found = index_of(store), suffixes.new_found()
    for _ in range(6):
        context = random_context(rng, parts[rng.integers(len(parts))].tokens.tolist())
        least = int(rng.integers(1, 4))
        assert find(index, context, least, found) == find_twin(parts, context, least)


@pytest.mark.parametrize(("seed", "n", "n_vocab"), [(0, 6000, 1), (1, 20_000, 3), (2, 15_000, 6), (3, 20_000, 2)])
def test_long_runs_are_measured_in_strides_and_sampled_evenly(tmp_path, seed, n, n_vocab):
    rng = np.random.default_rng(seed)
    text = random_text(rng, n, n_vocab, 0)
    store, sampled = store_of(tmp_path / "i", {"a": text[: n // 3], "b": text[n // 3 :]}), 0
    text, starts, index = store.segment(0).tokens.tolist(), store.segment(0).starts, index_of(store)
    for _ in range(12):
        context = random_context(rng, text)[-int(rng.choice([1, 2, 3, 5, 25])) :]
        least = at_least([text], context, 1)
        runs = runs_of(text, context, least)
        found, sizes = find(index, context)
        for length in runs:
            true, told = sum(len(run) for each, run in runs.items() if each >= length), sum(sizes[length:])
            assert told <= true <= told + 2 * (STRIDE - 1)
            assert told == true or true > EXACT * STRIDE
        order = sort_positions(tokens(text)).tolist()
        rank = {position: i for i, position in enumerate(order)}
        taken = {length: [] for length in runs}
        for token, length, _, file, at in found:
            assert token == text[at] != BREAK
            assert shared(text, at - 1, context) >= length >= least
            assert starts[file] <= at - 1 < starts[file + 1]
            taken[length].append(rank[at - 1])
        assert [length for _, length, *_ in found] == sorted((length for _, length, *_ in found), reverse=True)
        for length, run in runs.items():
            assert len(taken[length]) <= PER_ORDER
            if len(run) > 2 * PER_ORDER * STRIDE and len(taken[length]) == PER_ORDER:
                ranks = [rank[position] for position in run]
                places = np.searchsorted(ranks, sorted(taken[length]))
                wanted = (2 * np.arange(PER_ORDER) + 1) * len(run) // (2 * PER_ORDER)
                assert np.abs(places - wanted).max() <= 4 * STRIDE
                sampled += 1
    assert sampled > 0


def test_no_match_crosses_a_break_or_the_end_of_a_file(tmp_path):
    store = store_of(tmp_path / "i", {"a": [4, 5, BREAK, 6, 7], "b": [5, 6, 9]})
    index = index_of(store)
    assert find(index, [4, 5, 6])[0] == [(9, 2, 0, 1, 8), (7, 1, 0, 0, 4)]
    assert find(index, [4, 5, BREAK, 6])[0] == [(7, 1, 0, 0, 4), (9, 1, 0, 1, 8)]
    assert find(index, [4, 5, BREAK])[0] == []
    assert find(index, [6, 7, BREAK, 5])[0] == [(6, 1, 0, 1, 7)]
    assert find(index, [])[0] == []


def test_what_nothing_follows_is_counted_and_not_taken(tmp_path):
    store = store_of(tmp_path / "i", {"a": [5, 6], "b": [5, 6]})
    found, sizes = find(index_of(store), [5, 6])
    assert (found, sizes[2]) == ([], 2)


def test_nothing_is_shorter_than_least_or_than_half_of_the_longest_in_any_segment(tmp_path):
    text = list(range(100, 120))
    store = store_of(tmp_path / "i", {"a": [*text, 7]}, {"b": [*text[-8:], 8]}, {"c": [*text[-7:], 9]})
    assert find(index_of(store), text)[0] == [(7, LONGEST, 0, 0, 20), (8, 8, 1, 0, 8)]
    assert find(index_of(store), text, 9)[0] == [(7, LONGEST, 0, 0, 20)]
    assert find(index_of(store), text[-3:], 4)[0] == []


def test_an_index_without_segments_and_one_of_a_token_have_nothing_to_say(tmp_path):
    assert find(NO_INDEX, [1, 2]) == ([], [0] * (LONGEST + 1))
    write_store(tmp_path / "i", VOCABULARY, [], [Part(tokens([5]), [File("a", 4, 0, 1)])])
    store = Store(tmp_path / "i")
    assert find(index_of(store), [5])[0] == []
    assert find(index_of(store), [6, 5])[0] == []


def test_a_match_may_reach_to_the_first_token_of_the_first_file(tmp_path):
    store = store_of(tmp_path / "i", {"a": [1, 2, 3, 4]})
    for end in (1, 2, 3):
        assert find(index_of(store), [9, *range(1, end + 1)])[0] == [(end + 1, end, 0, 0, end)]


def test_scratch_of_one_index_says_nothing_of_the_next(tmp_path):
    """A drafter keeps its scratch when its indexes are opened anew."""
    rng, found = np.random.default_rng(0), suffixes.new_found()
    texts = [random_texts(rng, "ab", 60, 3) for _ in range(20)]
    stores = [store_of(tmp_path / str(i), each) for i, each in enumerate(texts)]
    for _ in range(5):
        for store, each in zip(stores, texts, strict=True):
            context = random_context(rng, [*each["a"]])
            assert find(index_of(store), context, 1, found) == find_twin([part(each)], context, 1)


def sane(index, found, n_segments=1):
    for token, length, segment, file, at in found:
        assert 0 <= token < 1 << 31
        assert 1 <= length <= LONGEST
        assert 0 <= segment < n_segments
        assert 0 <= file < index.segments[segment, suffixes.N_FILES]
        assert 1 <= at <= 1 << 31


@pytest.mark.parametrize("damage", ["cut", "zeros", "ones", "noise"])
def test_a_file_that_is_damaged_once_it_is_open_can_but_lead_to_wrong_guesses(tmp_path, damage):
    rng, path = np.random.default_rng(0), tmp_path / "i"
    for cut in np.linspace(0, 1, 12):
        store = store_of(path, {"a": random_text(rng, 5000, 3), "b": random_text(rng, 5000, 50)})
        index, text = index_of(store), store._read(store.places[0][1], store.length(0)).tolist()
        at = int(cut * store.size)
        if damage == "cut":
            os.truncate(path, at)
        else:
            what = {"zeros": bytes(store.size), "ones": b"\xff" * store.size, "noise": rng.bytes(store.size)}[damage]
            with path.open("r+b") as file:
                file.seek(at)
                file.write(what[at:])
        for _ in range(60):
            sane(index, find(index, random_context(rng, text))[0])


def test_a_directory_of_noise_and_a_closed_file_lead_nowhere_else(tmp_path):
    rng = np.random.default_rng(0)
    store = store_of(tmp_path / "i", {"a": random_text(rng, 5000, 3), "b": random_text(rng, 5000, 50)})
    whole, text = index_of(store), store.segment(0).tokens.tolist()
    closed = whole.segments.copy()
    closed[:, suffixes.FILE] = -1
    for _ in range(100):
        noise = rng.integers(-(1 << 31), 1 << 31, whole.directory.shape).astype(np.int32)
        mixed = np.where(rng.random(noise.shape) < 0.05, noise, whole.directory)
        for directory in (noise, mixed):
            index = Index(whole.segments, directory, np.sort(noise[0, :3]))
            found, _ = find(index, random_context(rng, text))
            assert all(0 <= file < 2 and token >= 0 for token, _, _, file, _ in found)
        sane(whole, find(Index(closed, whole.directory, whole.starts), random_context(rng, text))[0])


def test_a_directory_holds_what_stands_at_every_stride(tmp_path):
    rng = np.random.default_rng(0)
    text = tokens(random_text(rng, 1000, 3))
    order, directory = sort_positions(text), np.zeros(-(-1000 // STRIDE) * ROW, np.int32)
    suffixes.write_directory(text, order, directory)
    for row, position in zip(directory.reshape(-1, ROW).tolist(), order[::STRIDE].tolist(), strict=True):
        document = text[: position + 1].tolist()[::-1]
        document = document[: document.index(BREAK)] if BREAK in document else document
        assert row[: suffixes.DEPTH] == (document + [BREAK] * suffixes.DEPTH)[: suffixes.DEPTH]
        assert row[suffixes.DEPTH :] == [[*text.tolist(), BREAK][position + 1], position]


find_kernel = suffixes.find


@njit
def look_up(index, contexts, found, times):
    n = 0
    for i in range(times):
        n += find_kernel(index, contexts[i % contexts.shape[0]], 1, 0, found)
    return n


def test_find_allocates_nothing(tmp_path):
    rng = np.random.default_rng(0)
    store = store_of(tmp_path / "i", {"a": random_text(rng, 5000, 3)}, {"b": random_text(rng, 5000, 50)})
    index, text, found = index_of(store), store.segment(1).tokens.tolist(), suffixes.new_found()
    contexts = np.stack([context_after(random_context(rng, text)) for _ in range(100)])
    look_up(index, contexts, found, 1)
    _nrt_python.memsys_enable_stats()
    allocated = []
    for times in (1, 1000):
        before = rtsys.get_allocation_stats().mi_alloc
        assert look_up(index, contexts, found, times) >= 0
        allocated.append(rtsys.get_allocation_stats().mi_alloc - before)
    assert allocated[0] == allocated[1] > 0  # an array that comes from Python is noted once a call


# --- segments that have nothing to say ---


def searched(index, found, context, times, text=0):
    """How often each segment was searched in so many searches of a context."""
    counts = np.zeros(len(index.segments), int)
    for _ in range(times):
        suffixes.find(index, context_after(context), 1, text, found)
        counts += index.segments[:, BEST] >= 0
    return counts.tolist()


@pytest.fixture
def three(tmp_path):
    """One segment knows the context 1 2 3 4 5, one only its end, one nothing of it."""
    return corpora_of(tmp_path, [[1, 2, 3, 4, 5, 6]], [[9, 4, 5, 6]], [[7, 7, 7]])


def test_a_segment_that_says_nothing_that_another_does_not_say_is_searched_now_and_then(three):
    found = suffixes.new_found()
    suffixes.wake(three.index)
    assert searched(three.index, found, [1, 2, 3, 4, 5], PATIENCE) == [PATIENCE] * 3
    assert searched(three.index, found, [1, 2, 3, 4, 5], 10 * PAUSE) == [10 * PAUSE, 10, 10]
    suffixes.wake(three.index)
    assert searched(three.index, found, [1, 2, 3, 4, 5], 5) == [5] * 3


def test_what_the_text_itself_knows_as_well_is_no_reason_to_search_a_segment(three):
    found = suffixes.new_found()
    suffixes.wake(three.index)
    searched(three.index, found, [1, 2, 3, 4, 5], PATIENCE, text=5)
    assert searched(three.index, found, [1, 2, 3, 4, 5], 10 * PAUSE, text=5) == [10] * 3
    assert searched(three.index, found, [1, 2, 3, 4, 5], 10 * PAUSE, text=4)[0] > 9 * PAUSE, "it has more to say again"


def test_where_verifying_is_cheap_every_segment_is_always_searched(three):
    found = suffixes.new_found()
    found.searches[1] = suffixes.ALWAYS
    suffixes.wake(three.index)
    assert searched(three.index, found, [1, 2, 3, 4, 5], 10 * PATIENCE) == [10 * PATIENCE] * 3

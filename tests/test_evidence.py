"""kernels.evidence: candidates and what speaks for them, against lists and dicts with the features' names."""

from __future__ import annotations

from collections import Counter
from math import log1p

import numpy as np
import pytest
from memories import (
    context_after,
    corpora_of,
    new_memory,
    random_memory,
    random_net,
    random_row,
    random_text,
    tokens,
)

from racer_local.kernels import evidence, history, keyed_cues, suffixes
from racer_local.kernels.evidence import (
    CANDIDATES,
    CLASSES,
    CONFIDENCE,
    CORPUS_HITS,
    CORPUS_LEAST,
    CORPUS_NODE_AT,
    CORPUS_TOKEN_AT,
    COVERED,
    FAR,
    MEMORY,
    NODE_FEATURES,
    TOKEN_FEATURES,
    UNSKIPPED,
)
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.kernels.keyed_cues import FLOOR, KEYS
from racer_local.kernels.suffixes import NO_INDEX


def gather(memory, context, depth=0):
    past, cues, recent, found, _, index = memory
    found.context[:] = context
    suffixes.wake(index)  # so that what was gathered before makes no difference
    return evidence.gather(past, cues, recent, found, index, depth)


def matches_of(memory, context):
    """(follower, its position, length)."""
    matches = history.new_matches()
    n = history.find(memory[0], context, matches)
    return list(zip(*(column[:n].tolist() for column in matches), strict=True))


def occurrences_of(memory, context):
    """(follower, length, file) of each occurrence taken from the indexes, and how many there are by length."""
    found = suffixes.new_found()
    suffixes.wake(memory[5])
    n = suffixes.find(memory[5], context, CORPUS_LEAST, 0, found)
    columns = (found.tokens, found.lengths, found.files)
    return list(zip(*(column[:n].tolist() for column in columns), strict=True)), found.sizes.tolist()


def commonest(those):
    """The follower of most of these; of several, the one that first had as many."""
    counts = Counter()
    best = None
    for token, *_ in those:
        counts[token] += 1
        if best is None or counts[token] > counts[best]:
            best = token
    return best


def cues_of(memory, context, end):
    """For each key {token: log probability} and the row's stamp, or None."""
    cues, slots = memory[1], np.zeros(len(KEYS), np.int64)
    keyed_cues.find(cues, context, end, slots)
    for slot in slots:
        known = cues.tokens[slot] >= 0
        row = zip(cues.tokens[slot, known].tolist(), cues.log_probs[slot, known].tolist(), strict=True)
        yield ({token: min(log_prob, -1e-4) for token, log_prob in row}, int(cues.stamps[slot])) if slot >= 0 else None


def sharpest(found):
    """The row of the longest unskipped key; an empty one where there is none."""
    return next((cue[0] for cue in found[UNSKIPPED - 1 :: -1] if cue), {})


def gather_twin(memory, text, context, depth):
    """The node's features, and the features of each candidate in their order."""
    recent, matches = memory[2], matches_of(memory, context)
    cues = list(cues_of(memory, context, CONTEXT))
    parent = sharpest(list(cues_of(memory, context, CONTEXT - 1)))
    occurrences, sizes = occurrences_of(memory, context)
    candidates = dict.fromkeys([match[0] for match in matches] + [token for token, *_ in occurrences])
    for row in [*(cue[0] for cue in cues if cue), parent]:
        candidates |= dict.fromkeys(row)
    now, start = len(text), int(recent.start[0])
    of_class = {n: [match for match in matches if match[2] >= n] for n in CLASSES}
    longest = max((length for _, _, length in matches), default=0)
    node = {
        "longest": log1p(longest),
        "depth": log1p(depth),
        "candidates": log1p(len(candidates)),
        "last row's best": recent.last[0],
        "last row's root": recent.last[1],
        "answer": log1p(recent.start[1]),
        "covered": recent.averages[COVERED],
        "confidence": recent.averages[CONFIDENCE],
    }
    for i, (n, those) in enumerate(of_class.items()):
        node[f"matches of {n}+"] = log1p(len(those)) if those else -1
        node[f"hits of {n}+"] = recent.averages[i] if those else 0.5
    for key, cue in zip(KEYS, cues, strict=True):
        node[f"cue {key}"] = float(cue is not None)
        node[f"cue {key} age"] = log1p(now - cue[1]) if cue else log1p(FAR)

    in_corpus = {n: [each for each in occurrences if each[1] >= n] for n in CLASSES}
    corpus_longest = max((length for _, length, _ in occurrences), default=0)
    node["corpus longest"] = log1p(corpus_longest)
    node["corpus longest to text"] = log1p(corpus_longest) - log1p(longest) if occurrences else 0
    for i, (n, those) in enumerate(in_corpus.items()):
        node[f"corpus occurrences of {n}+"] = log1p(sum(sizes[n:]))
        node[f"corpus hits of {n}+"] = recent.averages[CORPUS_HITS + i] - 0.5 if those else 0

    def describe_in_corpus(token, length):
        mine = [each for each in occurrences if each[0] == token]
        own = max((each[1] for each in mine), default=0)
        features = {
            "corpus length": log1p(own),
            "corpus is longest": bool(mine) and own == corpus_longest,
            "corpus files": log1p(len({each[2] for each in mine})),
            "corpus only": bool(mine) and length == 0,
            "corpus length to text": log1p(own) - log1p(longest) if mine else 0,
        }
        for n, those in in_corpus.items():
            count = sum(each[0] == token for each in those)
            features[f"corpus share of {n}+"] = count / len(those) if count else 0
            features[f"corpus commonest of {n}+"] = bool(mine) and commonest(those) == token
        return features

    def describe(token):
        mine = [match for match in matches if match[0] == token]
        length, position = max((m[2] for m in mine), default=0), max((m[1] for m in mine), default=0)
        age = history.age(memory[0], np.int32(token))
        features = {
            "parent cue": parent.get(token, FLOOR),
            "in parent cue": token in parent,
            "length": log1p(length),
            "length to longest": log1p(length) - log1p(longest),
            "is longest": length == longest,
            "age": log1p(now - position) if mine else log1p(FAR),
            "this text": bool(mine) and position >= start,
            "token age": log1p(age or FAR),
            "token new": age == 0,
            "token in this text": 0 < age <= now - start,
            "cues agree": sum(next(iter(cue[0])) == token for cue in cues[:UNSKIPPED] if cue),
            "sharpest cue agrees": next(iter(sharpest(cues)), None) == token,
            **describe_in_corpus(token, length),
        }
        for n, those in of_class.items():
            count = sum(match[0] == token for match in those)
            features[f"count of {n}+"] = log1p(count)
            features[f"newest of {n}+"] = bool(those) and max(those, key=lambda match: match[1])[0] == token
            features[f"only of {n}+"] = 0 < count == len(those)
        for key, cue in zip(KEYS, cues, strict=True):
            features[f"cue {key}"] = cue[0].get(token, FLOOR) if cue else 0
            features[f"not in cue {key}"] = cue is not None and token not in cue[0]
        return {name: float(value) for name, value in features.items()}

    return node, {token: describe(token) for token in candidates}


def some_context(rng, text):
    """Behind the text, within it, or behind drafted tokens."""
    end = len(text) if rng.random() < 0.5 else int(rng.integers(len(text) + 1))
    return context_after(text[:end] + rng.integers(30, size=int(rng.integers(3))).tolist())


def random_corpora(rng, folder, length=300, n_vocab=30):
    """One or two indexes of some texts."""
    texts = [random_text(rng, length, n_vocab, breaks=0.02) for _ in range(6)]
    return corpora_of(folder, texts[:3], texts[3:]) if rng.random() < 0.5 else corpora_of(folder, texts)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_evidence_equals_its_plain_python_twin(seed, indexed, tmp_path):
    rng = np.random.default_rng(seed)
    corpora = random_corpora(rng, tmp_path) if indexed else None
    memory, text = random_memory(rng, k=int(rng.integers(1, 7)), index=corpora.index if corpora else NO_INDEX)
    found = memory[3]
    for depth in range(30):
        context = some_context(rng, text)
        size = gather(memory, context, depth)
        node, candidates = gather_twin(memory, text, context, depth)
        assert found.tokens[:size].tolist() == list(candidates)
        assert dict(zip(NODE_FEATURES, found.node.tolist(), strict=True)) == pytest.approx(node, abs=1e-5)
        for features, expected in zip(found.features, candidates.values(), strict=False):
            assert dict(zip(TOKEN_FEATURES, features.tolist(), strict=True)) == pytest.approx(expected, abs=1e-5)


def test_candidates_follow_matches_or_are_in_a_cue_or_in_the_parents_sharpest():
    memory = new_memory(random_net(np.random.default_rng(0)), k=2)
    history.append(memory[0], tokens([16, 24, 32, 16, 24]))
    for context, row in (([16, 24], [4, 32]), ([96, 16], [5, 6]), ([16], [7, 8])):
        keyed_cues.put(memory[1], tokens(context), tokens(row), np.array([-0.5, -1], np.float32), np.int64(0))
    found = memory[3]
    assert found.tokens[: gather(memory, context_after([16, 24]))].tolist() == [32, 4, 7, 8]
    assert found.tokens[: gather(memory, context_after([96, 16, 24]))].tolist() == [32, 4, 5, 6]
    assert found.tokens[: gather(memory, context_after([96, 16]))].tolist() == [24, 7, 8, 5, 6]


def test_a_conversation_has_its_first_token_and_nothing_before_it():
    memory = new_memory(random_net(np.random.default_rng(0)))
    history.append(memory[0], tokens([4, 5, 4, 6, 4]))
    evidence.begin(memory[2], 3)
    size, found = gather(memory, context_after([4])), memory[3]
    assert found.tokens[:size].tolist() == [6, 5]
    for name in ("this text", "token in this text"):
        assert found.features[:size, TOKEN_FEATURES.index(name)].tolist() == [1, 0]


def test_there_are_never_more_candidates_than_there_is_room_for():
    rng = np.random.default_rng(0)
    memory, text = random_memory(rng, n_vocab=400, k=CANDIDATES)
    sizes = []
    for _ in range(100):
        size = gather(memory, some_context(rng, text))
        assert len(set(memory[3].tokens[:size])) == size
        assert np.isfinite(memory[3].features[:size]).all()
        sizes.append(size)
    assert max(sizes) == CANDIDATES


@pytest.mark.parametrize("cued", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 300])
def test_every_feature_is_a_finite_number_with_an_empty_history(cued, depth):
    rng = np.random.default_rng(depth)
    memory, found = new_memory(random_net(rng)), None
    if cued:
        keyed_cues.put(memory[1], tokens([1, 2, 3]), *random_row(rng, 4, 30), np.int64(0))
    for context in ([], [BREAK], [1, 2, 3], [1, 2, 3, 4]):
        size, found = gather(memory, context_after(context), depth), memory[3]
        assert np.isfinite(found.node).all()
        assert np.isfinite(found.features[:size]).all()
        assert (size > 0) == (cued and 3 in context)


def test_evidence_does_not_depend_on_what_was_gathered_before():
    rng = np.random.default_rng(0)
    memory, text = random_memory(rng)
    fresh, _ = random_memory(np.random.default_rng(0))
    for _ in range(20):
        gather(memory, some_context(rng, text))
    size = gather(memory, context_after(text), 3)
    assert gather(fresh, context_after(text), 3) == size
    np.testing.assert_array_equal(memory[3].node, fresh[3].node)
    np.testing.assert_array_equal(memory[3].features[:size], fresh[3].features[:size])


def test_a_candidate_is_known_to_be_in_a_cue_where_there_is_no_room_for_the_tokens_before_it():
    memory, log_probs = new_memory(random_net(np.random.default_rng(0)), k=CANDIDATES), np.full(CANDIDATES, -1)
    ids = np.arange(CANDIDATES)
    keyed_cues.put(memory[1], tokens([16, 24]), tokens(ids[::-1] + 1), log_probs.astype(np.float32), np.int64(0))
    keyed_cues.put(memory[1], tokens([24]), tokens(ids), log_probs.astype(np.float32), np.int64(0))
    gather(memory, context_after([16, 24]))
    in_second_cue = memory[3].features[:, TOKEN_FEATURES.index("not in cue (0, 2)")] == 0
    assert in_second_cue.tolist() == (memory[3].tokens != 0).tolist()


# --- judge ---


def judge(memory, context, token, likeliest):
    size = gather(memory, context)
    evidence.judge(memory[2], memory[3], size, np.int32(token), np.float32(likeliest))


def average_twin(values):
    average = 0.5
    for n, value in enumerate(values):
        weight = max(MEMORY, 1 / (n + 3))
        average = (1 - weight) * average + weight * value
    return average


def test_an_average_starts_as_that_of_two_halves():
    memory = new_memory(random_net(np.random.default_rng(0)))
    for n, likeliest in enumerate((0.25, 1, 0.75), 1):
        judge(memory, context_after([1]), 2, likeliest)
        values = [0.5, 0.5, 0.25, 1, 0.75][: n + 2]
        assert memory[2].averages[CONFIDENCE] == pytest.approx(np.mean(values))
        assert memory[2].averages[COVERED] == pytest.approx(1 / (n + 2))


def test_a_continuation_in_two_files_outweighs_one_that_is_twice_in_one(tmp_path):
    corpora = corpora_of(tmp_path, [[1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 8, 1, 2, 3, 8]])
    memory = new_memory(random_net(np.random.default_rng(0)), index=corpora.index)
    size, found = gather(memory, context_after([1, 2, 3])), memory[3]
    told = {
        int(token): [features[TOKEN_FEATURES.index(name)] for name in ("corpus share of 3+", "corpus files")]
        for token, features in zip(found.tokens[:size], found.features, strict=False)
    }
    assert told == {7: pytest.approx([0.5, log1p(2)]), 8: pytest.approx([0.5, log1p(1)])}


def test_without_an_index_all_that_only_an_index_tells_is_nothing():
    rng = np.random.default_rng(0)
    memory, text = random_memory(rng)
    memory[3].node[:] = memory[3].features[:] = 1
    size, found = gather(memory, context_after(text)), memory[3]
    assert not found.node[CORPUS_NODE_AT:].any()
    assert not found.features[:size, CORPUS_TOKEN_AT:].any()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_averages_equal_their_twin(seed, indexed, tmp_path):
    rng = np.random.default_rng(seed)
    corpora = random_corpora(rng, tmp_path, n_vocab=5) if indexed else None
    memory, text = random_memory(rng, n_vocab=5, index=corpora.index if corpora else NO_INDEX)
    recent = memory[2]
    evidence.begin(recent, 100)
    values = [[] for _ in recent.averages]
    for at in range(200):
        context, token, likeliest = context_after(text[:at]), int(rng.integers(5)), float(rng.random())
        judge(memory, context, token, likeliest)
        for i, n in enumerate(CLASSES):
            matches = [match for match in matches_of(memory, context) if match[2] >= n]
            if matches:
                values[i].append(max(matches, key=lambda match: match[1])[0] == token)
            if those := [each for each in occurrences_of(memory, context)[0] if each[1] >= n]:
                values[CORPUS_HITS + i].append(commonest(those) == token)
        values[COVERED].append(token in gather_twin(memory, text, context, 0)[1])
        values[CONFIDENCE].append(likeliest)
    assert np.allclose(recent.averages, [average_twin(column) for column in values])
    assert recent.start.tolist() == [100, 200]
    assert 0 < len(values[2]) < 200


def test_a_new_conversation_starts_with_no_opinion():
    recent = evidence.new_recent()
    for array in recent:
        array[:] = 1
    evidence.begin(recent, 7)
    assert set(recent.averages) == {0.5}
    assert not recent.seen.any()
    assert recent.start.tolist() == [7, 0]
    assert recent.last.tolist() == [0, 0]

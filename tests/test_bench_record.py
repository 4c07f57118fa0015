"""Recording answers, and fitting the prior to them."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import numpy as np
import pytest
from benches import (
    COUNTING,
    EXACT,
    EXACT_FLAGS,
    make_trace,
    random_trace,
    refused,
    run,
    write_lines,
)
from memories import VOCABULARY, part_of

from racer_local.acceptance import load_prior
from racer_local.bench import fit
from racer_local.bench import record as recording
from racer_local.bench.data import Question
from racer_local.bench.fit import Examples
from racer_local.bench.record import WIDTH, record, to_trace
from racer_local.bench.trace import load_trace
from racer_local.config import DraftConfig
from racer_local.corpus.index import create
from racer_local.kernels.evidence import CORPUS_NODE_AT, CORPUS_TOKEN_AT, NODE_FEATURES, TOKEN_FEATURES
from racer_local.llama import render_chat
from racer_local.session import Session


def plain(model, prompt, max_tokens):
    with Session(model, EXACT, DraftConfig(draft="none")) as one:
        return one.answer(prompt, max_tokens=max_tokens).token_ids


def recorded(model, *questions, max_tokens=12):
    return [one for answered in record(model, questions, EXACT, max_tokens) for one in answered]


def check_rows(trace):
    """Rows of all tokens but the last of each conversation; of answers the likeliest is what came next."""
    for conversation, start, end in trace.answers():
        first, last = trace.offsets[conversation], trace.offsets[conversation + 1]
        ids, tokens = trace.topk_ids[first:last], trace.tokens[first:last]
        assert (ids[:-1] >= 0).all()
        assert (ids[start - 1 : end - 1, 0] == tokens[start:end]).all()
        assert all(len(set(row)) == WIDTH for row in ids[:-1].tolist())
    probs = trace.topk_probs.astype(np.float64)
    assert (np.diff(probs, axis=1) <= 0).all()
    assert (probs[trace.topk_ids[:, 0] >= 0, 0] > 0).all()
    assert probs.sum(axis=1).max() <= 1 + WIDTH * 2**-11


def test_what_is_recorded_is_the_answer_of_plain_decoding(tiny):
    questions = Question("a", ["hello hello"]), Question("b", ["one two"]), Question("a", ["x y z " * 20])
    trace = to_trace(recorded(tiny, *questions))
    assert trace.category.tolist() == ["a", "b", "a"]
    for question, (conversation, start, end) in zip(questions, trace.answers(), strict=True):
        prompt = render_chat(tiny, [{"role": "user", "content": question.turns[0]}])
        first = trace.offsets[conversation]
        assert trace.tokens[first : first + end].tolist() == [*prompt, *plain(tiny, prompt, 12)]
        assert start == len(prompt)
    check_rows(trace)


def test_the_last_token_has_a_row_only_where_the_answer_ended_by_itself(tiny):
    words = "hello", "the", "sun", "cat", "one", "dog", "a", "moon", "abc", "b"
    conversations = recorded(tiny, *(Question("a", [word]) for word in words), max_tokens=40)
    trace, cut = to_trace(conversations), [end - start == 40 for one in conversations for start, end in one.answers]
    assert set(cut) == {True, False}
    assert (trace.topk_ids[trace.offsets[1:] - 1, 0] < 0).tolist() == cut


def test_a_template_that_changes_what_was_said_begins_a_new_conversation(tiny):
    conversations = recorded(tiny, Question("a", ["one two", "three"]))
    assert [len(one.answers) for one in conversations] == [1, 1]
    trace = to_trace(conversations)
    assert trace.category.tolist() == ["a", "a"]
    check_rows(trace)


def test_a_template_that_keeps_what_was_said_makes_one_conversation(tiny, monkeypatch):
    first = render_chat(tiny, [{"role": "user", "content": "one two"}])
    second = [*first, *plain(tiny, first, 12), 300, 301, 302]
    monkeypatch.setattr(recording, "render_chat", lambda _, said: {1: first, 3: second}[len(said)])
    trace = to_trace(recorded(tiny, Question("a", ["one two", "three"])))
    assert trace.gen.tolist() == [
        [0, len(first), len(first) + 12],
        [0, len(second), len(second) + len(plain(tiny, second, 12))],
    ]
    assert trace.tokens.tolist() == [*second, *plain(tiny, second, 12)]
    check_rows(trace)


def test_bench_record_writes_what_bench_replay_and_bench_fit_read(capsys, tiny_path, tmp_path):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello hello"}, {"prompt": "one two"}, {"prompt": "x y"})
    trace, prior = tmp_path / "trace.npz", tmp_path / "prior.npz"
    args = ["--data", data, "--limit", "2", "--max-tokens", "20", "-o", trace]
    code, out, _ = run(capsys, "bench", "record", "-m", tiny_path, *EXACT_FLAGS, *args)
    assert code == 0
    loaded = load_trace(trace)
    assert json.loads(out) == {"conversations": 2, "skipped": 0, "tokens": len(loaded.tokens), "answers": 2}
    assert loaded.category.tolist() == ["q", "q"]
    code, out, _ = run(capsys, "bench", "replay", trace, "--cost", "gpu", "--draft", "logits", "--json")
    assert code == 0
    assert json.loads(out)["categories"].keys() == {"q"}
    code, out, _ = run(capsys, "bench", "fit", trace, "-o", prior, "--test", trace)
    assert code == 0
    assert json.loads(out).keys() == {"contexts", "nats_a_context", "nats_a_context_test"}
    assert json.loads(out)["contexts"] > 20
    assert load_prior(prior).bias.shape == (fit.HIDDEN,)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "missing.jsonl"], "missing.jsonl can't be read"),
        (["--data", "missing.jsonl", "--limit", "0"], "--limit and --max-tokens must be at least 1"),
        (["--data", "missing.jsonl", "--max-tokens", "0"], "--limit and --max-tokens must be at least 1"),
        ([], "the following arguments are required: --data"),
    ],
)
def test_a_recording_that_cannot_be_made_says_why(capsys, tiny_path, tmp_path, args, message):
    output = tmp_path / "trace.npz"
    assert message in refused(capsys, "bench", "record", "-m", tiny_path, "-o", output, *args)
    assert not output.exists()


def test_an_interrupted_recording_keeps_what_is_recorded(capsys, tiny_path, tmp_path, monkeypatch):
    def interrupted(*args):
        yield from islice(record(*args), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "record", interrupted)
    data = write_lines(tmp_path / "q.jsonl", *({"prompt": f"hello {i}"} for i in range(4)))
    args = ["--data", data, "--max-tokens", "5", "-o", tmp_path / "trace.npz"]
    code, out, err = run(capsys, "bench", "record", "-m", tiny_path, *EXACT_FLAGS, *args)
    assert code == 130
    assert json.loads(out)["answers"] == 2
    assert "interrupted: keeping what is recorded\n" in err
    assert len(load_trace(tmp_path / "trace.npz").gen) == 2


def test_a_prompt_that_is_too_long_is_skipped_and_the_rest_is_kept(capsys, tiny_path, tmp_path):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"}, {"prompt": "hello " * 400}, {"prompt": "one"})
    args = ["-m", tiny_path, *EXACT_FLAGS, "--data", data, "--max-tokens", "5"]
    code, out, _ = run(capsys, "bench", "record", *args, "-o", tmp_path / "named")
    assert code == 0
    assert (json.loads(out)["answers"], json.loads(out)["skipped"]) == (2, 1)
    assert len(load_trace(tmp_path / "named").gen) == 2, "the file is the one that was named"


@pytest.mark.parametrize("command", ["record", "fit"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(capsys, tiny_path, trace_path, tmp_path, command):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"})
    output = tmp_path / "no folder" / "out"
    args = {
        "record": ["-m", tiny_path, "--data", data, "-o", output],
        "fit": [trace_path, "-o", output],
    }
    assert "can't be written; name a file in a folder that exists" in refused(capsys, "bench", command, *args[command])


def synthetic(contexts=600, seed=0):
    """Contexts of 1 to 4 candidates; the one whose token feature 3 is 1 comes, where node feature 2 is 1 too."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, contexts)
    node = rng.normal(size=(contexts, len(NODE_FEATURES))).astype(np.float32)
    node[:, 2] = rng.integers(0, 2, contexts)
    token = rng.normal(size=(sizes.sum(), len(TOKEN_FEATURES))).astype(np.float32)
    token[:, 3] = 0
    right = np.cumsum(sizes) - sizes + rng.integers(0, 4, contexts) % sizes
    token[right, 3] = 1
    came = np.zeros(len(token), np.float32)
    came[right] = node[:, 2]
    return Examples(node, token, sizes, came)


def small():
    """Three contexts of 2, 1 and 3 candidates; the second of the first came, none of the second."""
    node = np.zeros((3, len(NODE_FEATURES)), np.float32)
    token = np.zeros((6, len(TOKEN_FEATURES)), np.float32)
    node[:, 0], token[:, 0] = [10, 20, 30], [1, 2, 3, 4, 5, 6]
    return Examples(node, token, np.array([2, 1, 3]), np.array([0, 1, 0, 1, 0, 0], np.float32))


def test_contexts_are_taken_with_their_candidates():
    taken = small().take(np.array([2, 0]))
    assert taken.node[:, 0].tolist() == [30, 10]
    assert taken.token[:, 0].tolist() == [4, 5, 6, 1, 2]
    assert taken.sizes.tolist() == [3, 2]
    assert taken.came.tolist() == [1, 0, 0, 0, 1]


def test_parts_that_are_joined_are_the_whole():
    whole = synthetic(50)
    joined = Examples.join([whole.take(np.arange(20)), whole.take(np.arange(20, 50))])
    for name in ("node", "token", "sizes", "came"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name))


def test_a_network_that_knows_nothing_takes_all_to_be_alike():
    expected = -(np.log(1 / 3) + np.log(1 / 2) + np.log(1 / 4)) / 3
    assert fit.surprise(fit.empty_net(), small()) == pytest.approx(expected)


def test_a_fit_makes_the_examples_less_surprising_than_the_network_it_starts_from():
    examples, unseen = synthetic(), synthetic(seed=1)
    before = fit.fit(examples, hidden=8, epochs=0)
    after = fit.fit(examples, hidden=8, epochs=200)
    assert fit.surprise(after, examples) < 0.5 * fit.surprise(before, examples)
    assert fit.surprise(after, unseen) < 0.6 * fit.surprise(fit.empty_net(), unseen)


def test_the_same_seed_gives_the_same_fit():
    nets = [fit.fit(synthetic(100), hidden=4, epochs=3, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(nets[0].node_weights, nets[1].node_weights)
    assert not np.array_equal(nets[0].node_weights, nets[2].node_weights)


def test_the_gradient_is_the_slope_of_the_loss():
    examples, rng = synthetic(12), np.random.default_rng(3)
    examples = Examples(*(a.astype(np.float64) for a in (examples.node, examples.token)), examples.sizes, examples.came)
    shapes = {"node_weights": (len(NODE_FEATURES), 3), "token_weights": (len(TOKEN_FEATURES), 3)}
    shapes |= {"bias": (3,), "prior": (4,)}
    weights = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}

    def loss():
        p, none, _ = fit._forward(weights, examples)
        starts = np.cumsum(examples.sizes) - examples.sizes
        hit = np.add.reduceat(p * examples.came, starts)
        return -np.log(np.where(np.add.reduceat(examples.came, starts) > 0, hit, none)).mean()

    gradient = fit._gradient(weights, examples)
    for name, weight in weights.items():
        for place in rng.permutation(weight.size)[:20]:
            at, step = np.unravel_index(place, weight.shape), 1e-6
            weight[at] += step
            above = loss()
            weight[at] -= 2 * step
            slope = (above - loss()) / (2 * step)
            weight[at] += step
            assert gradient[name][at] == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("keep", [True, False])
def test_at_most_one_candidate_of_a_collected_context_came(keep):
    trace = random_trace()
    examples = fit.collect(trace, keep=keep)
    starts = np.cumsum(examples.sizes) - examples.sizes
    came = np.add.reduceat(examples.came, starts)
    assert set(came.tolist()) == {0.0, 1.0}
    assert examples.node.shape == (len(examples.sizes), len(NODE_FEATURES))
    assert (
        examples.token.shape
        == (len(examples.came), len(TOKEN_FEATURES))
        == (examples.sizes.sum(), examples.token.shape[1])
    )
    assert np.isfinite(examples.node).all()
    assert np.isfinite(examples.token).all()
    answer_tokens = sum(end - start for _, start, end in trace.answers())
    assert answer_tokens / 2 < len(examples.sizes) <= len(fit.DEPTHS) * answer_tokens


def test_a_memory_that_is_kept_covers_more_of_a_repeated_answer():
    twice = make_trace(("a", [40, 41], COUNTING), ("a", [40, 41], COUNTING))
    empty, kept = (fit.collect(twice, keep=keep).came.sum() for keep in (False, True))
    assert kept > empty


# --- with indexes ---


@pytest.fixture
def background(tmp_path):
    texts = [np.random.default_rng(i).integers(1, 30, 200).tolist() for i in range(3)]
    create(tmp_path / "background.index", VOCABULARY, part_of(*texts))
    return tmp_path / "background.index"


def test_a_fit_of_indexes_leaves_the_estimates_without_one_as_they_were(tmp_path, background):
    trace, start = random_trace(), fit.fit(fit.collect(random_trace(), keep=True), hidden=8, epochs=3)
    examples = fit.collect_with_indexes([(trace, background)], tmp_path)
    assert examples.token[:, CORPUS_TOKEN_AT:].any()
    net = fit.fit_corpora(examples, start, epochs=20)
    assert fit.surprise(net, examples) < fit.surprise(start, examples)
    without = fit.collect(trace, keep=False)
    assert fit.surprise(net, without) == fit.surprise(start, without)
    for name in fit.WEIGHTS:
        ours, theirs = getattr(net, name), getattr(start, name)
        rows = {"node_weights": CORPUS_NODE_AT, "token_weights": CORPUS_TOKEN_AT}.get(name, len(ours))
        assert np.array_equal(ours[:rows], theirs[:rows])


def test_of_what_never_varied_a_fit_learns_nothing():
    net = fit.fit(fit.collect(random_trace(), keep=True), hidden=8, epochs=3)
    assert not net.node_weights[CORPUS_NODE_AT:].any()
    assert not net.token_weights[CORPUS_TOKEN_AT:].any()
    assert net.token_weights[:CORPUS_TOKEN_AT].any()


def test_some_conversations_have_an_earlier_version_of_their_answers_beside_them(tmp_path, background):
    trace = random_trace()
    indexes = fit.indexes_beside(trace, tmp_path, background)
    assert len(indexes) == len(trace.category)
    kinds = {(len(corpora.index.segments)) for corpora in indexes}
    assert kinds == {1, 2}, "with the background and without it"


def test_bench_fit_takes_an_index_for_each_trace(capsys, tmp_path, trace_path, background):
    prior = tmp_path / "prior.npz"
    code, out, err = run(capsys, "bench", "fit", trace_path, "--corpus", background, "-o", prior)
    assert code == 0, err
    assert json.loads(out)["contexts"] > 20
    assert load_prior(prior).bias.shape == load_prior().bias.shape
    message = "1 traces need as many indexes"
    assert message in refused(capsys, "bench", "fit", trace_path, "--corpus", background, background, "-o", prior)


def test_bench_replay_drafts_from_an_index(capsys, tmp_path, trace_path):
    trace = load_trace(trace_path)
    answers = [trace.tokens[a:b].tolist() for a, b in pairwise(trace.offsets.tolist())]
    create(tmp_path / "i", VOCABULARY, part_of(*answers))
    mats = []
    for more in ([], ["--corpus", tmp_path / "i"]):
        code, out, _ = run(capsys, "bench", "replay", trace_path, "--cost", "gpu", "--json", *more)
        assert code == 0
        mats.append(json.loads(out)["total"]["mat"])
    assert mats[1] > 1.5 * mats[0]

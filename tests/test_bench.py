"""The benches: questions, recorded traces, their replay, the fit of the prior, live runs and the profile."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import cli, session
from racer_local.acceptance import load_prior
from racer_local.bench import fit, live
from racer_local.bench import record as recording
from racer_local.bench.data import Question, read_prompts, read_questions
from racer_local.bench.fit import Examples
from racer_local.bench.record import WIDTH, record, to_trace
from racer_local.bench.replay import ReplayCounts, replay, summary
from racer_local.bench.trace import Trace, load_trace
from racer_local.config import DRAFTERS, ContextConfig, DraftConfig
from racer_local.cost import SIZES, VerifyCost
from racer_local.draft import make_drafter
from racer_local.errors import ConfigError
from racer_local.kernels.evidence import NODE_FEATURES, TOKEN_FEATURES
from racer_local.llama import LlamaTarget, render_chat
from racer_local.session import Session, verify_cost

EXACT = ContextConfig(n_ctx=256, threads=1, flash_attn="on", kv_type="bf16")
EXACT_FLAGS = ["--threads", "1", "--ctx", "256", "--flash-attn", "on", "--kv-type", "bf16"]
FLAT = "1:1 64:1"


@pytest.fixture(autouse=True)
def _trusted_build(monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")


def run(capsys, *args):
    """(exit code, stdout, stderr) of a command in this process."""
    try:
        code = cli.main([str(arg) for arg in args])
    except SystemExit as error:
        code = error.code
    out = capsys.readouterr()
    return code, out.out, out.err


def refused(capsys, *args):
    """The one line of a command that can't be run."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


# --- questions ---


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_category_is_the_files_name_unless_its_lines_name_several(tmp_path):
    qa = write_lines(tmp_path / "qa.jsonl", {"prompt": "a", "category": "math"}, {"turns": ["b"], "category": "math"})
    spec = write_lines(
        tmp_path / "spec.jsonl",
        {"turns": ["c", "d"], "category": "math"},
        {"turns": ["e"], "category": "writing"},
        {"turns": ["f"], "category": "summarization"},
        {"turns": ["g"]},
    )
    assert read_questions([qa, spec]) == [
        Question("qa", ["a"]),
        Question("qa", ["b"]),
        Question("mt_bench", ["c", "d"]),
        Question("mt_bench", ["e"]),
        Question("summarization", ["f"]),
        Question("spec", ["g"]),
    ]


def test_a_limit_takes_as_many_of_each_category_spread_evenly(tmp_path):
    a = write_lines(tmp_path / "a.jsonl", *({"prompt": f"a{i}"} for i in range(10)))
    b = write_lines(tmp_path / "b.jsonl", *({"prompt": f"b{i}"} for i in range(2)))
    said = [question.turns[0] for question in read_questions([a, b], 5)]
    assert said == ["a0", "a2", "a4", "a6", "a8", "b0", "b1"]
    assert len(read_questions([a, b], 3)) == 5
    assert len(read_questions([a, b], 100)) == 12
    assert read_prompts(a, 2) == ["a0", "a5"]


def test_blank_lines_are_no_questions(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('\n{"prompt": "a"}\n  \n{"prompt": "é"}')
    assert [question.turns for question in read_questions([path])] == [["a"], ["é"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no questions"),
        (b"\n \n", "holds no questions"),
        (b"no json\n", "must hold a JSON object a line"),
        (b'{"prompt": "a"}\n{"prompt": ', "must hold a JSON object a line"),
        (b'["a"]', "must hold a JSON object a line"),
        (b'{"text": "a"}', "must hold a JSON object a line"),
        (b'{"turns": []}', "must hold a JSON object a line"),
        (b'{"turns": [1]}', "must hold a JSON object a line"),
        (b'{"turns": null}', "must hold a JSON object a line"),
        (b'{"prompt": null}', "must hold a JSON object a line"),
        (b'{"prompt": "caf\xe9"}', "must hold a JSON object a line"),
    ],
)
def test_a_file_without_questions_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "q.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_questions([path])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.jsonl can't be read: No such file"):
        read_questions([tmp_path / "missing.jsonl"])
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        read_questions([tmp_path])


# --- traces ---


def make_trace(*answers, k=WIDTH):
    """A trace of (category, prompt, answer), one conversation each; each row's likeliest token is the next one."""
    texts = [np.array([*prompt, *answer], np.int32) for _, prompt, answer in answers]
    tokens = np.concatenate(texts)
    ids, probs = np.full((len(tokens), k), -1, np.int32), np.zeros((len(tokens), k), np.float16)
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    ids[:-1, 0], probs[:-1, 0] = tokens[1:], 0.75
    ids[:-1, 1], probs[:-1, 1] = 0, 0.125
    for end in offsets[1:]:  # the last token of each was not evaluated
        ids[end - 1], probs[end - 1] = -1, 0
    spans = [(i, len(prompt), len(prompt) + len(answer)) for i, (_, prompt, answer) in enumerate(answers)]
    categories = np.array([category for category, _, _ in answers])
    return Trace(tokens, offsets, ids, probs, np.array(spans, np.int32), categories)


COUNTING = [1, 2, 3, 4, 5, 6, 7, 8]
REPEATS = ("repeats", COUNTING, COUNTING)
DIFFERS = ("differs", [1, 2, 3, 1], [9, 9])


def test_a_saved_trace_is_loaded_as_it_was(tmp_path):
    trace = make_trace(REPEATS, DIFFERS)
    trace.save(tmp_path / "trace.npz")
    loaded = load_trace(tmp_path / "trace.npz")
    for name in ("tokens", "offsets", "topk_ids", "topk_probs", "gen", "category"):
        assert np.array_equal(getattr(loaded, name), getattr(trace, name))
        assert getattr(loaded, name).dtype == getattr(trace, name).dtype
    assert [tuple(answer) for answer in loaded.answers()] == [(0, 8, 16), (1, 4, 6)]
    assert loaded.n_vocab == 10


def test_the_vocabulary_holds_the_likeliest_tokens_too():
    trace = make_trace(REPEATS)
    trace.topk_ids[3, 7] = 40
    assert trace.n_vocab == 41


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", np.zeros(0, np.int32), r"must be \[0, k\]"),
        ("tokens", np.array(3), "no recorded trace"),
        ("tokens", np.array([-1] + [0] * 21, np.int32), "a token id is below 0"),
        ("topk_ids", np.zeros((22, 3), np.int32), r"topk_ids \(22, 3\) and topk_probs \(22, 8\) must be \[22, k\]"),
        ("topk_ids", np.zeros((21, 8), np.int32), r"must be \[22, k\]"),
        ("offsets", np.array([0, 16]), "offsets must rise from 0"),
        ("offsets", np.array([1, 16, 22]), "offsets must rise from 0"),
        ("offsets", np.array([0, 16, 23]), "offsets must rise from 0"),
        ("offsets", np.array([0, 22, 22]), "offsets must rise from 0"),
        ("offsets", np.zeros(0, np.int64), "offsets must rise from 0"),
        ("category", np.array(["a"]), "offsets must rise from 0"),
        ("gen", np.zeros((0, 3), np.int32), r"gen must be \[G, 3\]"),
        ("gen", np.array([0, 8, 16]), "gen has the type int64 and 1 dimensions"),
        ("gen", np.array([[0, 8, 12], [0, 11, 16]]), "two answers in gen overlap"),
        ("tokens", np.zeros((22, 1), np.int32), "tokens has the type int32 and 2 dimensions"),
        ("tokens", np.zeros(22), "tokens has the type float64"),
        ("topk_ids", np.full((22, 8), 1 << 30, np.int32), "topk_ids must be from -1 to 4194303"),
        ("topk_probs", np.full((22, 8), np.nan, np.float16), "topk_probs must be from 0 to 1"),
        ("topk_probs", np.full((22, 8), 2, np.float16), "topk_probs must be from 0 to 1"),
        ("gen", np.array([[1, 4, 6], [0, 8, 16]]), "in the order of the conversations"),
        ("gen", np.array([[0, 8, 16], [2, 4, 6]]), "a conversation that is not there"),
        ("gen", np.array([[-1, 8, 16], [1, 4, 6]]), "a conversation that is not there"),
        ("gen", np.array([[0, 8, 17]]), "outside its conversation"),
        ("gen", np.array([[0, 9, 8]]), "outside its conversation"),
        ("gen", np.array([[0, 0, 8]]), "has no prompt"),
        ("category", np.array([{}, []], object), "no recorded trace"),
    ],
)
def test_a_damaged_trace_is_refused_in_one_line_that_says_what_is_wrong(tmp_path, field, value, message):
    arrays = dict(vars(make_trace(REPEATS, DIFFERS)))
    np.savez_compressed(tmp_path / "whole.npz", **arrays)
    load_trace(tmp_path / "whole.npz")
    np.savez_compressed(tmp_path / "trace.npz", **{**arrays, field: value})
    with pytest.raises(ConfigError, match=message) as error:
        load_trace(tmp_path / "trace.npz")
    assert "trace.npz is no recorded trace" in str(error.value)
    assert str(error.value).endswith("make one with: racer-local bench record")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["tokens", "offsets", "topk_ids", "topk_probs", "gen", "category"])
def test_a_trace_that_lacks_an_array_is_refused(tmp_path, field):
    arrays = dict(vars(make_trace(REPEATS)))
    del arrays[field]
    np.savez_compressed(tmp_path / "trace.npz", **arrays)
    with pytest.raises(ConfigError, match=f"no recorded trace .*{field}"):
        load_trace(tmp_path / "trace.npz")


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    make_trace(REPEATS).save(tmp_path / "whole.npz")
    whole, path = (tmp_path / "whole.npz").read_bytes(), tmp_path / "trace.npz"
    for content in (b"", b"text", b"PK\x03\x04", *(whole[:n] for n in range(10, len(whole), len(whole) // 9))):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="no recorded trace") as error:
            load_trace(path)
        assert "\n" not in str(error.value)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ConfigError, match="no recorded trace"):
        load_trace(tmp_path / "array.npy")
    with pytest.raises(ConfigError, match=r"missing\.npz can't be read: No such file"):
        load_trace(tmp_path / "missing.npz")


# --- what others stumbled over ---


def test_questions_are_spread_evenly_whatever_the_limit(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", *({"prompt": str(i)} for i in range(19)))
    chosen = [question.turns[0] for question in read_questions([path], 10)]
    assert chosen == [str(i * 19 // 10) for i in range(10)]


def test_a_line_ends_at_a_newline_only(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_questions([path])[0].turns == ["a\u2028b\u0085c"]


@pytest.mark.parametrize("turns", ["hello", {"a": 1}, [1], [], None])
def test_turns_must_be_a_list_of_texts(tmp_path, turns):
    with pytest.raises(ConfigError, match="must hold a JSON object a line"):
        read_questions([write_lines(tmp_path / "q.jsonl", {"turns": turns})])


@pytest.mark.parametrize("draft", ["logits", "paper", "racer"])
def test_a_trace_with_fewer_likeliest_tokens_can_be_replayed(draft):
    trace = make_trace(REPEATS, DIFFERS)
    narrow = replace(trace, topk_ids=trace.topk_ids[:, :3], topk_probs=trace.topk_probs[:, :3])
    cost = VerifyCost.parse(FLAT)
    drafter = make_drafter(DraftConfig(draft=draft), narrow.n_vocab, (), cost)
    assert sum(counts.tokens for _, counts in replay(narrow, drafter, cost, 64)) == 10


def test_nodes_of_a_draft_are_plain_digits():
    with pytest.raises(ConfigError, match="must be a drafter, or a drafter and its nodes"):
        live.parse_draft("paper@\u00b2")


# --- replay ---


def replayed(trace, draft, points, most_nodes=None):
    """{category: counts} of a replay."""
    config, cost = DraftConfig(draft=draft, max_nodes=most_nodes), VerifyCost.parse(points)
    return dict(replay(trace, make_drafter(config, trace.n_vocab, (), cost), cost, config.nodes))


def test_plain_decoding_takes_a_forward_a_token():
    counts = replayed(make_trace(REPEATS, DIFFERS), "none", "cpu")
    assert counts == {"repeats": ReplayCounts(8, 8, 8, 8.0), "differs": ReplayCounts(2, 2, 2, 2.0)}
    assert counts["repeats"].as_dict() == {"mat": 1.0, "speedup": 1.0, "mean_nodes": 1.0}


def test_lookup_drafts_what_it_would_have_drafted():
    """In 1..8 the root 8 is new: 1 forward for a 1. Then 2..7 are copied: 7 nodes, all right, and 8 comes free.

    In 1 2 3 1 the root 1 was seen: the draft 2 is wrong; behind 9 only one token is left, so none is drafted.
    """
    counts = replayed(make_trace(REPEATS, DIFFERS), "lookup", "1:1 2:1.5 7:2")
    assert counts == {"repeats": ReplayCounts(8, 2, 1 + 7, 1 + 2.0), "differs": ReplayCounts(2, 2, 2 + 1, 1.5 + 1)}
    assert summary(counts.items()) == {
        "categories": {
            "repeats": {"mat": 4.0, "speedup": 2.6667, "mean_nodes": 4.0},
            "differs": {"mat": 1.0, "speedup": 0.8, "mean_nodes": 1.5},
        },
        "total": {"mat": 2.5, "speedup": 1.8182, "mean_nodes": 2.75},
    }


def test_a_replayed_drafter_has_seen_the_rows_of_the_prompt():
    """Behind the root 8 there is no row yet; then the prompt's rows lead from 1 to 7."""
    counts = replayed(make_trace(REPEATS), "logits", FLAT)["repeats"]
    assert (counts.tokens, counts.steps) == (8, 2)


def test_a_replayed_draft_keeps_to_its_nodes():
    counts = replayed(make_trace(REPEATS), "lookup", FLAT, most_nodes=4)["repeats"]
    assert (counts.tokens, counts.steps, counts.nodes) == (8, 3, 1 + 4 + 3)


def test_a_summary_of_nothing_is_zero():
    assert summary([]) == {"categories": {}, "total": {"mat": 0.0, "speedup": 0.0, "mean_nodes": 0.0}}


def random_trace():
    """Texts that repeat themselves in part, two of a category."""
    rng = np.random.default_rng(0)
    answers = []
    for i in range(4):
        phrases = [rng.integers(1, 30, 6).tolist() for _ in range(3)]
        text = [token for n in rng.integers(3, size=14) for token in [*phrases[n], int(rng.integers(1, 30))]]
        answers.append((("a", "b")[i % 2], text[:30], text[30:]))
    return make_trace(*answers)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_every_answer_is_replayed_to_its_end_and_never_beyond(draft):
    trace, cost = random_trace(), VerifyCost.parse("cpu")
    drafter = make_drafter(DraftConfig(draft=draft), trace.n_vocab, (), cost)
    lengths = [end - start for _, start, end in trace.answers()]
    counts = list(replay(trace, drafter, cost, 64))
    assert [name for name, _ in counts] == ["a", "b", "a", "b"]
    assert [answer.tokens for _, answer in counts] == lengths
    assert all(answer.steps <= answer.nodes for _, answer in counts)
    total = summary(counts)["total"]
    assert total["mat"] == round(sum(lengths) / sum(answer.steps for _, answer in counts), 4)
    assert total["mat"] > 1.2 or draft == "none"


@pytest.mark.parametrize("draft", DRAFTERS)
def test_where_nodes_are_free_the_speed_up_is_the_mat(draft):
    trace, cost = random_trace(), VerifyCost.parse(FLAT)
    result = summary(replay(trace, make_drafter(DraftConfig(draft=draft), trace.n_vocab, (), cost), cost, 64))
    for figures in (*result["categories"].values(), result["total"]):
        assert figures["speedup"] == figures["mat"]
        assert figures["mean_nodes"] >= figures["mat"]


def test_where_nodes_are_as_dear_as_forwards_racer_drafts_next_to_nothing():
    trace = random_trace()
    cheap, dear = (sum(c.nodes for c in replayed(trace, "racer", points).values()) for points in (FLAT, "1:1 2:2 4:4"))
    tokens = sum(c.tokens for c in replayed(trace, "racer", "1:1 2:2 4:4").values())
    assert dear <= 1.1 * tokens
    assert cheap > 2 * dear


@pytest.fixture
def trace_path(tmp_path):
    random_trace().save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def test_bench_replay_json_is_one_object_of_the_promised_shape(capsys, trace_path):
    code, out, _ = run(capsys, "bench", "replay", trace_path, "--cost", "cpu", "--draft", "racer", "--json")
    assert code == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == ["categories", "total"]
    assert list(result["categories"]) == ["a", "b"]
    for figures in (*result["categories"].values(), result["total"]):
        assert list(figures) == ["mat", "speedup", "mean_nodes"]
        assert all(isinstance(value, float) for value in figures.values())


def test_bench_replay_ends_its_table_with_the_json(capsys, trace_path):
    args = ["bench", "replay", trace_path, "--cost", "1:1, 8:2", "--draft", "lookup", "--max-nodes", "4"]
    code, out, _ = run(capsys, *args)
    *table, last = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in table] == ["a", "b", "total"]
    assert run(capsys, *args, "--json")[1].splitlines() == [last]
    assert json.loads(last)["total"]["mean_nodes"] <= 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cost", "tpu"], "the cost curve 'tpu' must be one of cpu, cpu-amx, unified, gpu, or points like"),
        (["--cost", "1:1 4:2 2:3"], "rising n from 1 on"),
        (["--cost", "1:-1"], "must be a positive number"),
        (["--cost", "cpu", "--draft", "eagle"], "invalid choice: 'eagle'"),
        (["--cost", "cpu", "--max-nodes", "1000"], "max_nodes is 1000; it must be from 1 to 255"),
        (["--cost", "cpu", "--history", "3000"], "must be a power of two, for example 4096"),
        ([], "the following arguments are required: --cost"),
    ],
)
def test_a_bad_setting_of_replay_is_one_line(capsys, trace_path, args, message):
    assert message in refused(capsys, "bench", "replay", trace_path, *args)


def test_a_bad_trace_of_replay_is_one_line(capsys, tmp_path):
    (tmp_path / "text.npz").write_text("text")
    assert "missing.npz can't be read" in refused(capsys, "bench", "replay", tmp_path / "missing.npz", "--cost", "cpu")
    assert "is no recorded trace" in refused(capsys, "bench", "replay", tmp_path / "text.npz", "--cost", "cpu")


# --- record ---


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
    code, out, _ = run(capsys, "bench", "live", *args, "--draft", "lookup")
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert (result["answers"], result["skipped"]) == (2, 1)


@pytest.mark.parametrize("command", ["record", "live", "fit"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(capsys, tiny_path, trace_path, tmp_path, command):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"})
    output = tmp_path / "no folder" / "out"
    args = {
        "record": ["-m", tiny_path, "--data", data, "-o", output],
        "live": ["-m", tiny_path, "--data", data, "--json", output],
        "fit": [trace_path, "-o", output],
    }
    assert "can't be written; name a file in a folder that exists" in refused(capsys, "bench", command, *args[command])


# --- fit ---


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


# --- live ---


QUESTIONS = [Question("a", ["hello", "again"]), Question("b", ["one two"])]


def measured_states(model, drafts, questions=QUESTIONS, max_tokens=6):
    """(answers, tokens of plain decoding) after each step, and the last state."""
    states = []
    for measured in live.measure(model, questions, drafts, EXACT, max_tokens):
        total = measured.stats.get(live.TOTAL)
        states.append((measured.answers, total["none"].emitted if total else 0))
    return states, measured


def test_a_live_run_counts_up_prompt_by_prompt(tiny):
    states, measured = measured_states(tiny, ["lookup"])
    assert [answers for answers, _ in states] == [0, 1, 2, 3]
    assert states[0][1] == 0
    assert all(after[1] > before[1] for before, after in pairwise(states))
    assert set(measured.stats) == {"a", "b", "total"}
    for draft in ("none", "lookup"):
        emitted = {name: measured.stats[name][draft].emitted for name in measured.stats}
        assert emitted["a"] + emitted["b"] == emitted["total"]


def test_a_live_report_judges_all_drafters_by_plain_decoding(tiny):
    _, measured = measured_states(tiny, ["lookup", "paper@16", "racer"])
    report = live.report(measured, tiny, EXACT, 6)
    assert json.loads(json.dumps(report)) == report
    assert list(report) == ["machine", "model", "settings", "cost", "answers", "skipped", "categories", "total"]
    assert list(report["categories"]) == ["a", "b"]
    assert report["answers"] == 3
    assert report["settings"]["max_tokens"] == 6
    assert report["model"] == {"name": "tiny.gguf", "sha256": live.sha256(tiny.path)}
    assert list(report["cost"]) == [str(n) for n in SIZES if n <= 64]
    assert report["cost"]["1"] == 1.0
    for figures in (*report["categories"].values(), report["total"]):
        assert list(figures) == ["none", "lookup", "paper@16", "racer"]
        plain = figures["none"]
        assert (plain["speedup"], plain["speedup_with_prompt"], plain["mat"], plain["mean_nodes"]) == (1, 1, 1, 1)
        for one in figures.values():
            assert one["tokens"] == plain["tokens"]
            assert one["different_answers"] == 0
            assert sum(one["time"].values()) == pytest.approx(1, abs=1e-3)
        assert 1 < figures["paper@16"]["mean_nodes"] <= 16


@pytest.fixture
def answers(monkeypatch):
    """(drafter, messages) of each answer that sessions give, in order; `answers.fail_at` interrupts one."""

    class Answers(list):
        fail_at = None

    seen, answer = Answers(), Session.answer

    def noted(self, prompt, **options):
        if len(seen) == seen.fail_at:
            raise KeyboardInterrupt
        seen.append((self.draft.draft, json.dumps(prompt)))
        return answer(self, prompt, **options)

    monkeypatch.setattr(Session, "answer", noted)
    return seen


def test_every_drafter_answers_the_same_prompts_and_each_is_first_in_turn(tiny, answers):
    measured_states(tiny, ["lookup", "logits"])
    prompts = [answers[i : i + 3] for i in range(0, len(answers), 3)]
    assert len(prompts) == 1 + 3, "a warm-up and three turns"
    for asked in prompts:
        assert {draft for draft, _ in asked} == {"none", "lookup", "logits"}
        assert len({said for _, said in asked}) == 1
    assert [asked[0][0] for asked in prompts[1:]] == ["none", "lookup", "logits"]
    again = json.loads(prompts[2][0][1])
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert [message["content"] for message in again[::2]] == ["hello", "again"]


@pytest.fixture
def liar(monkeypatch):
    """Lookup gets every second turn wrong; the prompts that were answered."""
    answer, prompts = Session.answer, []

    def lying(self, prompt, **options):
        given = answer(self, prompt, **options)
        prompts.append(json.dumps(prompt))
        if self.draft.draft == "lookup":
            given.text = "a lie"
            given.token_ids[-1] += "again" in prompts[-1]
        return given

    monkeypatch.setattr(Session, "answer", lying)
    return prompts


def test_drafters_that_answer_otherwise_are_counted(tiny, liar):
    _, measured = measured_states(tiny, ["lookup"])
    assert measured.differences == {
        "a": {"none": 0, "lookup": 1},
        "b": {"none": 0, "lookup": 0},
        "total": {"none": 0, "lookup": 1},
    }


def test_later_turns_go_on_from_what_plain_decoding_said(tiny, liar):
    measured_states(tiny, ["lookup"], QUESTIONS[::-1])  # lookup is first with "hello"
    assert sum("assistant" in prompt for prompt in liar) == 2
    assert not any("a lie" in prompt for prompt in liar)


def test_the_warm_up_is_forgotten(tiny, monkeypatch):
    answer, held = Session.answer, []

    def noted(self, prompt, **options):
        held.append(len(self.target.held))
        return answer(self, prompt, **options)

    monkeypatch.setattr(Session, "answer", noted)
    measured_states(tiny, ["lookup"])
    assert held[2:4] == [0, 0]
    assert min(held[4:6]) > 0


def test_a_drafter_may_name_its_nodes():
    assert live.parse_draft("paper@16") == DraftConfig(draft="paper", max_nodes=16)
    assert live.parse_draft(" racer ") == DraftConfig(draft="racer")
    assert live.parse_draft("paper@16").nodes == 16


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("paper@", "'paper@' must be a drafter, or a drafter and its nodes like paper@16"),
        ("paper@x", "'paper@x' must be a drafter"),
        ("paper@-1", "'paper@-1' must be a drafter"),
        ("paper@0", "max_nodes is 0; it must be from 1 to 255"),
        ("paper@256", "max_nodes is 256; it must be from 1 to 255"),
        ("eagle", "draft is 'eagle'; it must be one of none, lookup"),
        ("", "draft is ''; it must be one of none, lookup"),
        ("lookup,,racer", "draft is ''"),
        ("@16", "draft is ''"),
    ],
)
def test_a_drafter_that_is_none_is_refused_before_anything_is_measured(capsys, tiny_path, tmp_path, spec, message):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"})
    assert message in refused(capsys, "bench", "live", "-m", tiny_path, "--data", data, "--draft", spec)


def test_bench_live_prints_a_table_and_json_and_writes_the_same_file(capsys, tiny_path, tmp_path):
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"}, {"prompt": "one"}, {"prompt": "two"})
    args = [
        "--data",
        data,
        "--draft",
        "lookup,paper@8",
        "--limit",
        "2",
        "--max-tokens",
        "5",
        "--json",
        tmp_path / "out",
    ]
    code, out, _ = run(capsys, "bench", "live", "-m", tiny_path, *EXACT_FLAGS, *args)
    assert code == 0
    first, *table, last = out.splitlines()
    assert first == "tiny.gguf, 1 threads, 2 prompts"
    assert Counter(line.split()[0] for line in table) == {"q": 1, "total": 1, "none": 2, "lookup": 2, "paper@8": 2}
    result = json.loads(last)
    assert result == json.loads((tmp_path / "out").read_text())
    assert result["answers"] == 2
    assert result["cost"] is None, "no drafter here decides by it"
    assert result["total"]["none"]["speedup"] == 1.0


@pytest.mark.parametrize(("fail_at", "whole"), [(0, 0), (2, 0), (5, 1), (6, 2)])
def test_an_interrupted_live_run_keeps_what_is_measured(capsys, tiny_path, tmp_path, answers, fail_at, whole):
    answers.fail_at = fail_at  # two warm-ups, then two answers a prompt
    data = write_lines(tmp_path / "q.jsonl", *({"prompt": f"hello {i}"} for i in range(5)))
    args = ["--data", data, "--draft", "lookup", "--max-tokens", "5", "--json", tmp_path / "out"]
    code, out, _ = run(capsys, "bench", "live", "-m", tiny_path, *EXACT_FLAGS, *args)
    assert code == 130
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out").read_text())
    assert result["answers"] == whole
    assert list(result["categories"]) == ["q"] * (whole > 0)
    assert result["total"].keys() == ({"none", "lookup"} if whole else set())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "missing.jsonl"], "missing.jsonl can't be read"),
        (["--data", "missing.jsonl", "--limit", "0"], "--limit and --max-tokens must be at least 1"),
        ([], "the following arguments are required: --data"),
    ],
)
def test_a_live_run_that_cannot_be_made_says_why(capsys, tiny_path, args, message):
    assert message in refused(capsys, "bench", "live", "-m", tiny_path, *args)


# --- profile, and the cost that sessions remember ---


def test_profile_prints_the_curve(capsys, tiny_path):
    code, out, _ = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS)
    first, head, *bars, memory = out.splitlines()
    assert code == 0
    assert memory == "what the drafter learns takes 19.4 MB, never more (--history)"
    assert first.startswith("tiny.gguf, 1 threads: T(1) is ")
    assert head.split() == ["nodes", "T(n)/T(1)"]
    assert [int(line.split()[0]) for line in bars] == [n for n in SIZES if n <= 64]
    assert all("#" in line for line in bars)
    assert float(bars[0].split()[1]) == 1


def test_profile_json_has_facts_points_and_ratios_and_is_remembered(capsys, tiny_path, tiny):
    code, out, _ = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS, "--json")
    assert code == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == ["facts", "memory_bytes", "sizes", "seconds", "relative"]
    assert result["facts"]["threads"] == 1
    assert result["sizes"][0] == 1
    assert len(result["sizes"]) == len(result["seconds"])
    assert list(result["relative"]) == [str(n) for n in range(1, 65)]
    assert result["relative"]["1"] == 1
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        assert target.facts == result["facts"]
        assert verify_cost(target).seconds == result["seconds"]


def test_a_model_that_cannot_verify_trees_has_no_profile(capsys, tmp_path):
    path = write_tiny_gguf(tmp_path / "mamba.gguf", arch="mamba")
    assert "mamba.gguf can't verify trees" in refused(capsys, "profile", "-m", path, *EXACT_FLAGS)


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """The probes of a fresh home: each evaluates 1 and 2 nodes, and finds another curve."""
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))
    found = []

    def fake(evaluate, most):
        evaluate(1)
        evaluate(most)
        found.append(VerifyCost([1, most], [1.0, 2.0 + len(found)]))
        return found[-1]

    monkeypatch.setattr(session, "probe", fake)
    return found


def test_the_cost_is_measured_once_and_then_recalled(tiny, probes):
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        assert verify_cost(target) is probes[0]
        assert target.held == []
        assert verify_cost(target).seconds == [1.0, 2.0]
        assert len(probes) == 1
        assert verify_cost(target, again=True).seconds == [1.0, 3.0]
        assert verify_cost(target).seconds == [1.0, 3.0]
    with Session(tiny, EXACT, DraftConfig(draft="racer")) as one:
        assert one.cost.seconds == [1.0, 3.0]
    assert len(probes) == 2


def test_profile_measures_again(capsys, tiny_path, probes):
    for number in (1, 2):
        out = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS, "--json")[1]
        assert json.loads(out)["seconds"] == [1.0, 1.0 + number]
    assert len(probes) == 2


def test_profile_marks_what_it_had_no_time_for(capsys, tiny_path, probes):
    _, out, _ = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS)
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("(extrapolated)")]
    assert marked == [str(n) for n in SIZES if 1 < n < 64]


def test_other_settings_are_measured_on_their_own(tiny, probes):
    for context, nodes in ((EXACT, 64), (EXACT, 32), (ContextConfig(n_ctx=512, threads=1), 64)):
        with LlamaTarget(tiny, context, max_nodes=nodes) as target:
            verify_cost(target)
    assert len(probes) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'{"format": 1}'], ids=repr)
def test_a_damaged_file_is_measured_again_and_mended(tiny, probes, tmp_path, damage):
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        verify_cost(target)
        [path] = (tmp_path / "costs").iterdir()
        path.write_bytes(damage)
        assert verify_cost(target).seconds == [1.0, 3.0]
        assert verify_cost(target).seconds == [1.0, 3.0]
    assert len(probes) == 2


def test_where_nothing_can_be_remembered_it_is_measured_each_time(tiny, probes, tmp_path):
    (tmp_path / "costs").write_text("in the way")
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        assert verify_cost(target).seconds == [1.0, 2.0]
        assert verify_cost(target).seconds == [1.0, 3.0]


def test_only_racer_needs_to_know_the_cost(tiny, probes):
    for draft in ("none", "lookup", "paper"):
        with Session(tiny, EXACT, DraftConfig(draft=draft)) as one:
            assert one.cost is None
    with Session(tiny, EXACT, DraftConfig(draft="racer", max_nodes=1)) as one:
        assert one.cost is None
    assert probes == []

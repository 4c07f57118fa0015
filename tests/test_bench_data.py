"""Questions from files, and recorded traces: what is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from benches import (
    DIFFERS,
    REPEATS,
    make_trace,
    write_lines,
)

from racer_local.bench.data import Question, read_prompts, read_questions
from racer_local.bench.trace import load_trace
from racer_local.errors import ConfigError


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

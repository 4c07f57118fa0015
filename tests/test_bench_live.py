"""The same prompts through each drafter."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from benches import (
    EXACT,
    EXACT_FLAGS,
    refused,
    run,
    write_lines,
)
from memories import part_of

from racer_local.bench import live
from racer_local.bench.data import Question
from racer_local.config import DraftConfig
from racer_local.corpus.index import create
from racer_local.cost import SIZES
from racer_local.errors import ConfigError
from racer_local.session import Session

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


def test_a_drafter_may_read_the_indexes_and_be_exact():
    assert live.parse_draft("racer+corpus", ["a", "b"]) == DraftConfig(corpora=("a", "b"))
    assert live.parse_draft("racer", ["a"]) == DraftConfig()
    both = live.parse_draft("racer@4+corpus+exact", ["a"])
    assert both == DraftConfig(max_nodes=4, corpora=("a",), exact=True)


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
        ("racer+corpus", "'racer+corpus' needs an index; name it with --corpus"),
        ("racer+corpora", "'racer+corpora' ends in +corpora; what can be is +corpus and +exact"),
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


def test_nodes_of_a_draft_are_plain_digits():
    with pytest.raises(ConfigError, match="must be a drafter, or a drafter and its nodes"):
        live.parse_draft("paper@\u00b2")


def test_bench_live_compares_a_drafter_with_indexes_to_the_same_without(capsys, tiny_path, tiny, tmp_path):
    create(tmp_path / "i", tiny.id, part_of(list(range(40, 90))))
    data = write_lines(tmp_path / "q.jsonl", {"prompt": "hello"})
    args = ["--data", data, "--draft", "racer,racer+corpus", "--corpus", tmp_path / "i", "--max-tokens", "5"]
    code, out, err = run(capsys, "bench", "live", "-m", tiny_path, *EXACT_FLAGS, *args)
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["total"].keys() == {"none", "racer", "racer+corpus"}
    message = "none.index can't be read"
    assert message in refused(capsys, "bench", "live", "-m", tiny_path, "--data", data, "--corpus", "none.index")


def test_bench_corpus_tells_what_an_index_costs(capsys, tmp_path):
    code, out, err = run(capsys, "bench", "corpus", "--tokens", "1000", "20000", "--folder", tmp_path)
    assert code == 0, err
    *lines, last = out.splitlines()
    first, second = json.loads(last)["by_tokens"]
    assert (len(lines), first["tokens"], second["tokens"]) == (2, 1000, 20000)
    assert 8 < second["disk_bytes_a_token"] < first["disk_bytes_a_token"]
    assert second["lookup_us"]["median"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "at least 1000" in refused(capsys, "bench", "corpus", "--tokens", "10")

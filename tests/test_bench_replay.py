"""Recorded answers through drafters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benches import (
    DIFFERS,
    FLAT,
    REPEATS,
    make_trace,
    random_trace,
    refused,
    run,
)

from racer_local.bench.replay import ReplayCounts, replay, summary
from racer_local.config import DRAFTERS, DraftConfig
from racer_local.cost import VerifyCost
from racer_local.draft import make_drafter


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


@pytest.mark.parametrize("draft", ["logits", "paper", "racer"])
def test_a_trace_with_fewer_likeliest_tokens_can_be_replayed(draft):
    trace = make_trace(REPEATS, DIFFERS)
    narrow = replace(trace, topk_ids=trace.topk_ids[:, :3], topk_probs=trace.topk_probs[:, :3])
    cost = VerifyCost.parse(FLAT)
    drafter = make_drafter(DraftConfig(draft=draft), narrow.n_vocab, (), cost)
    assert sum(counts.tokens for _, counts in replay(narrow, drafter, cost, 64)) == 10


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

"""racer-local profile, and the cost that sessions remember."""

from __future__ import annotations

import json

import pytest
from benches import (
    EXACT,
    EXACT_FLAGS,
    refused,
    run,
)
from tiny_gguf import write_tiny_gguf

from racer_local import racing
from racer_local.config import ContextConfig, DraftConfig
from racer_local.cost import SIZES, VerifyCost
from racer_local.llama import LlamaTarget
from racer_local.machine import CpuWatch
from racer_local.racing import verify_cost
from racer_local.session import Session


def test_profile_prints_the_curve(capsys, tiny_path):
    code, out, _ = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS)
    first, head, *bars, logits, memory = out.splitlines()
    assert code == 0
    assert logits == "the logits of 64 nodes take 81.9 kB (--max-nodes)"
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


UNIT = 2**-20
"""Seconds of a plain forward that no machine beats."""


def test_a_curve_that_was_measured_on_a_busy_machine_is_measured_again(tiny, probes, monkeypatch):
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        first = verify_cost(target)
        racing.remember(target.facts, VerifyCost([1, 64], [1000.0, 1001.0]))  # a thousand seconds a forward
        again = verify_cost(target)
        assert again is probes[1]
        assert target.held == []
        assert verify_cost(target).seconds == again.seconds != first.seconds
        assert len(probes) == 2


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """The probes of a fresh home: each evaluates 1 and 2 nodes, and finds another curve."""
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path))
    found = []

    def fake(evaluate, most):
        evaluate(1)
        evaluate(most)
        found.append(VerifyCost([1, most], [UNIT, (2.0 + len(found)) * UNIT]))
        return found[-1]

    monkeypatch.setattr(racing, "probe", fake)
    return found


def test_the_cost_is_measured_once_and_then_recalled(tiny, probes):
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        assert verify_cost(target) is probes[0]
        assert target.held == []
        assert verify_cost(target).seconds == [UNIT, 2 * UNIT]
        assert len(probes) == 1
        assert verify_cost(target, again=True).seconds == [UNIT, 3 * UNIT]
        assert verify_cost(target).seconds == [UNIT, 3 * UNIT]
    with Session(tiny, EXACT, DraftConfig(draft="racer")) as one:
        assert one.cost.seconds == [UNIT, 3 * UNIT]
    assert len(probes) == 2


def test_profile_measures_again(capsys, tiny_path, probes):
    for number in (1, 2):
        out = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS, "--json")[1]
        assert json.loads(out)["seconds"] == [UNIT, (1.0 + number) * UNIT]
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
        assert verify_cost(target).seconds == [UNIT, 3 * UNIT]
        assert verify_cost(target).seconds == [UNIT, 3 * UNIT]
    assert len(probes) == 2


def test_where_nothing_can_be_remembered_it_is_measured_each_time(tiny, probes, tmp_path):
    (tmp_path / "costs").write_text("in the way")
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        assert verify_cost(target).seconds == [UNIT, 2 * UNIT]
        assert verify_cost(target).seconds == [UNIT, 3 * UNIT]


def test_what_other_programs_bend_is_used_but_not_remembered(capsys, tiny, tiny_path, probes, monkeypatch):
    with LlamaTarget(tiny, EXACT, max_nodes=64) as target:
        quiet = verify_cost(target).seconds
        monkeypatch.setattr(CpuWatch, "warning", lambda self, threads: "they are busy")
        assert verify_cost(target, again=True).seconds != quiet
        assert verify_cost(target).seconds == quiet
    _, _, err = run(capsys, "profile", "-m", tiny_path, *EXACT_FLAGS)
    assert "not remembered: other programs kept the cores busy" in err


def test_only_racer_needs_to_know_the_cost(tiny, probes):
    for draft in ("none", "lookup", "paper"):
        with Session(tiny, EXACT, DraftConfig(draft=draft)) as one:
            assert one.cost is None
    with Session(tiny, EXACT, DraftConfig(draft="racer", max_nodes=1)) as one:
        assert one.cost is None
    assert probes == []

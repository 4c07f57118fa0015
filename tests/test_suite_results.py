"""What is read of a suite: ratios, spreads, ceilings, changes, gates, and the page."""

from __future__ import annotations

import base64
import json
import math
import re
from functools import cache

import numpy as np
import pytest
from benches import refused, run

from racer_local.bench import results
from racer_local.bench.results import Counts, Record, Results, compare, gate, oracle_times, ratio_of, read
from racer_local.errors import ConfigError

HEADER = {
    "racer_local_suite": results.FORMAT,
    "machine": {"cpu": "<a CPU>", "build": "AVX"},
    "model": {"name": "tiny.gguf", "sha256": "0" * 64},
    "versions": {"racer_local": "1"},
    "settings": {"threads": 2, "max_tokens": 8},
    "ways": ["none", "paper@64", "racer", "llama-server"],
    "passes": [[0.0, 0]],
    "cost": {"1": 1.0, "2": 1.5, "4": 2.0, "64": 32.0},
    "command": "racer-local bench suite",
}


def counts(seconds, tokens=8, **more):
    more = {"nodes": {"1": 2, "3": 2}, "lengths": {"0": 2, "2": 2}, "by_source": {"context": 4}, **more}
    return Counts(tokens, seconds + 1, tokens, seconds, 0.1, 0.5, 4, 4, 4, **more)


def suite_of(racer=2.0, noise=0.0, seed=0, n=12, temperatures=(0.0,), **more):
    """Two categories; racer takes 1 / `racer` of plain's time in the first one, plain's in the second."""
    rng = np.random.default_rng(seed)
    records = []
    for temperature in temperatures:
        for i in range(n):
            factor = math.exp(noise * rng.normal())
            for category, speed in (("code", racer), ("prose", 1.0)):
                turn = {
                    "none": counts(8.0, passed=more.get("passed")),
                    "racer": counts(8.0 / speed * factor, **more),
                    "paper@64": counts(16.0),
                }
                if i % 2:
                    turn["llama-server"] = counts(7.9) if i % 4 == 1 else Counts(error="ModelError: it <broke>")
                records.append(Record(temperature, 0, category, str(i), [turn]))
    return Results(HEADER, records)


def write(path, suite):
    path.write_text(json.dumps(suite.header) + "\n" + "".join(record.line() for record in suite.records))
    return path


def test_a_ratio_is_of_totals():
    """2 s for 10 tokens against 1 s for 10, and 4 s for 20 against 3 s for 20: (6 / 30) / (4 / 30)."""
    found = ratio_of([(2, 10, 1, 10), (4, 20, 3, 20), None])
    assert found.ratio == pytest.approx(1.5)
    assert found.low == pytest.approx(4 / 3)
    assert found.high == pytest.approx(2)
    assert math.isnan(ratio_of([]).ratio)
    assert math.isnan(ratio_of([(1, 0, 1, 0)]).ratio)


def test_an_oracle_takes_the_cheapest_split():
    assert oracle_times([0, 1, 1.5, 1.8, 3], 4).tolist() == pytest.approx([0, 1, 1.5, 1.8, 2.8])


def test_the_oracles_times_are_those_of_trying_everything():
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = [0.0, *np.cumsum(rng.random(5)).tolist()]

        @cache
        def least(n, costs=tuple(costs)):
            return min((costs[k] + least(n - k) for k in range(1, min(n, 5) + 1)), default=0.0)

        assert oracle_times(costs, 12).tolist() == pytest.approx([least(n) for n in range(13)])


def test_sums_and_speed_ups_are_by_category_and_in_total():
    view = suite_of().at(0.0)
    assert view.categories == ["code", "prose", "total"]
    assert view.speed_up("code", "racer").ratio == pytest.approx(2)
    assert view.speed_up("prose", "racer").ratio == pytest.approx(1)
    assert view.speed_up("total", "racer").ratio == pytest.approx(16 / 12)
    assert view.speed_up("code", "racer", prompt=True).ratio == pytest.approx(9 / 5)
    assert view.speed_up("total", "paper@64").ratio == pytest.approx(0.5)
    sums = view.sums("total", "racer")
    assert (sums.tokens, sums.steps, sums.nodes) == (24 * 8, 24 * 4, {"1": 48, "3": 48})
    assert (results.mat(sums), results.mean_nodes(sums)) == (2, 2)
    assert view.by_repeat("code", "racer") == [pytest.approx(2)]
    assert view.figures("total", "racer")["speedup"] == 1.3333


def test_a_way_is_judged_over_what_it_answered():
    """The server answered every fourth question; the rest must not count against it, nor plain's time for it."""
    view = suite_of().at(0.0)
    assert view.speed_up("total", "llama-server").ratio == pytest.approx(8 / 7.9)
    assert view.different("total", "llama-server") == (0, 6)
    assert view.errors("llama-server") == ["ModelError: it <broke>"] * 6


def test_a_ceiling_follows_from_the_curve_and_the_lengths():
    """Eight tokens with T(4) = 2 at best: two steps of four, so 8 / 4."""
    assert suite_of().at(0.0).ceiling("code") == pytest.approx(2)
    assert results.gained(1.5, 2) == pytest.approx(0.5)
    assert math.isnan(results.gained(1, 1))
    without = Results({**HEADER, "cost": None}, suite_of().records)
    assert math.isnan(without.at(0.0).ceiling("code"))


def test_a_turn_that_failed_takes_its_question_out_and_first_differences_are_counted():
    turn, broken = {"none": counts(1), "racer": counts(1, differs=3)}, {"none": counts(1), "racer": Counts(error="x")}
    record = Record(0.0, 0, "a", "0", [turn, broken])
    assert record.sums("racer") is None
    assert record.sums("none").tokens == 16
    assert record.sums("lookup") is None
    view = Results(HEADER, [Record(0.0, 0, "a", "0", [turn, turn])]).at(0.0)
    assert view.different("a", "racer") == (2, 2)
    assert view.parting("racer") == [3, 3]


def test_a_record_comes_back_as_it_was_written(tmp_path):
    suite = suite_of(differs=2, passed=False)
    suite.records[0].turns[0]["racer"].error = "a line\u2028and\x85another"  # no ends of lines in JSON
    found = read(write(tmp_path / "a.jsonl", suite))
    assert found == suite


def test_a_line_that_was_cut_off_is_left_out_and_another_file_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", suite_of())
    raw = path.read_bytes()
    path.write_bytes(raw[:-5])
    found, whole = results.parse(path)
    assert len(found.records) == 23
    assert raw[:whole].endswith(b"\n")
    for text in ("", "x\n", "{}\n", '{"racer_local_suite": 99}\n', json.dumps(HEADER) + "\n{}\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no file of: racer-local bench suite"):
            read(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read(tmp_path / "none.jsonl")


def test_a_change_that_is_none_is_called_noise_and_a_real_one_is_not():
    """Twenty pairs of files that differ by chance alone, and twenty with 10% between them."""
    wrong = found = 0
    for seed in range(20):
        same = [suite_of(1.5, 0.05, s, n=16) for s in (seed, 100 + seed)]
        faster = suite_of(1.65, 0.05, 200 + seed, n=16)
        code = [c for c in compare(*same) if (c.category, c.way) == ("code", "racer")]
        wrong += code[0].real
        change = next(c for c in compare(same[0], faster) if (c.category, c.way) == ("code", "racer"))
        found += change.real and change.change.ratio > 1
    assert wrong <= 5
    assert found >= 18


def test_only_questions_of_both_files_are_compared():
    before, after = suite_of(n=12), suite_of(3.0, n=6)
    change = next(c for c in compare(before, after) if (c.category, c.way) == ("code", "racer"))
    assert (change.before, change.after, change.questions) == (pytest.approx(2), pytest.approx(3), 6)
    assert change.change.ratio == pytest.approx(1.5)
    assert compare(before, Results(HEADER, [])) == []


def test_a_gate_names_what_falls_short(tmp_path, capsys):
    suite = suite_of(1.2)
    assert gate(suite, "racer") == []
    assert [line.split(":")[0] for line in gate(suite, "racer", 1.5)] == ["total at temperature 0"]
    assert len(gate(suite, "paper@64")) == 3
    with pytest.raises(ConfigError, match="lookup was not measured"):
        gate(suite, "lookup")
    path = write(tmp_path / "a.jsonl", suite)
    assert run(capsys, "bench", "gate", path)[0] == 0
    code, out, _ = run(capsys, "bench", "gate", path, "--min-speedup", "1.5", "--min-category", "1.05")
    assert code == 1
    assert "prose at temperature 0: racer 1.00x (1.00 to 1.00), below 1.05x" in out
    assert json.loads(out.splitlines()[-1]) == {"passed": False, "short": 2}


def test_a_gate_is_not_passed_by_what_was_not_measured():
    assert len(gate(Results(HEADER, suite_of().records[:0]), "racer")) == 1


def test_compare_says_what_changed_and_where_the_files_are_not_alike(tmp_path, capsys):
    before = write(tmp_path / "a.jsonl", suite_of(1.2))
    after = suite_of(1.5)
    after.header = {**HEADER, "settings": {**HEADER["settings"], "threads": 4}}
    code, out, err = run(capsys, "bench", "compare", before, write(tmp_path / "b.jsonl", after))
    assert code == 0
    assert re.search(r"code +racer +1.20x -> +1.50x  1.25x .*FASTER", out)
    assert re.search(r"prose +racer .*noise", out)
    assert err == "racer-local: the two were measured with another settings: threads 2 and 4\n"
    assert json.loads(out.splitlines()[-1]) == {"compared": 9, "faster": 2, "slower": 0}
    empty = write(tmp_path / "c.jsonl", Results(HEADER, []))
    assert "nothing to compare" in refused(capsys, "bench", "compare", before, empty)


def test_a_report_is_one_page_that_needs_nothing_else(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first = write(tmp_path / "a.jsonl", suite_of(temperatures=(0.0, 0.8), differs=2, passed=True))
    second = write(tmp_path / "b.jsonl", suite_of(0.5))
    page, folder = tmp_path / "page.html", tmp_path / "png"
    code, out, _ = run(capsys, "bench", "report", first, second, "-o", page, "--png", folder)
    assert code == 0
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", text)
    assert "<script" not in text
    images = [base64.b64decode(found) for found in re.findall(r"base64,([A-Za-z0-9+/=]+)", text)]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert "&lt;a CPU&gt;" in text
    assert "ModelError: it &lt;broke&gt;" in text
    assert "2.00x<small>2.00 to 2.00</small>" in text
    assert "racer is behind plain decoding in code at temperature 0 (0.50x" in text
    assert "racer: 24 of 24" in text
    pictures = sorted(path.name for path in folder.iterdir())
    assert "speed-ups.png" in pictures
    assert set(json.loads(out.splitlines()[-1])["written"]) == {str(page), *(str(folder / name) for name in pictures)}
    assert len(images) == 1 + (2 + 5) + (1 + 5)


def test_a_report_of_nothing_or_to_nowhere_is_refused(tmp_path, capsys, monkeypatch):
    empty = write(tmp_path / "a.jsonl", Results(HEADER, []))
    assert "name a page with -o" in refused(capsys, "bench", "report", empty)
    assert "nothing was measured yet" in refused(capsys, "bench", "report", empty, "-o", tmp_path / "page.html")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "pip install 'racer-local[report]'" in refused(
        capsys, "bench", "report", empty, "-o", tmp_path / "page.html"
    )

"""T(n): the curve through measured points, its corrections, the probe that measures it, and the file that keeps it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import racer_local.cost as cost_module
from racer_local.config import COST_CURVES, MAX_NODES
from racer_local.cost import BUDGET, ROUNDS, SIZES, SMALL_MODEL_BUDGET, VerifyCost, probe, recall, remember
from racer_local.errors import ConfigError

POINTS = [1, 2, 4, 8, 16, 32, 64]
SECONDS = [1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 9.0]
FACTS = {"model": "tiny", "threads": 2, "options": {"split": [1.0, 2.0]}}


# --- the curve ---


def test_between_points_and_beyond_the_last_two_the_curve_is_linear():
    cost = VerifyCost([1, 2, 4], [1.0, 1.5, 2.0])
    assert cost.relative[[1, 2, 3, 4, 6, 100]].tolist() == pytest.approx([1, 1.5, 1.75, 2, 2.5, 26])
    assert len(cost.relative) == MAX_NODES + 1


def test_relative_is_in_units_of_t_1():
    assert VerifyCost([1, 2, 4], [0.2, 0.3, 0.4]).relative[[1, 3, 6]].tolist() == pytest.approx([1, 1.75, 2.5])


def test_a_single_point_is_a_flat_curve():
    assert np.all(VerifyCost([1], [0.5]).relative[1:] == 1)


def test_a_larger_tree_never_costs_less():
    rng = np.random.default_rng(0)
    assert VerifyCost([1, 2, 4, 8], [1.0, 2.0, 1.5, 1.0]).relative[[4, 8, 64]].tolist() == pytest.approx([2, 2, 2])
    for _ in range(20):
        cost = VerifyCost(SIZES, rng.uniform(0.5, 2, len(SIZES)))
        for _ in range(50):
            cost.correct(int(rng.integers(1, MAX_NODES + 1)), rng.uniform(0.01, 10))
        assert cost.relative[1] == 1
        assert (np.diff(cost.relative[1:]) >= 0).all()


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "rising n from 1 on, not []"),
        ([2, 4], [1.0, 2.0], "rising n from 1 on, not [2, 4]"),
        ([1, 4, 4], [1.0, 2.0, 2.0], "rising n from 1 on, not [1, 4, 4]"),
        ([1, 4, 2], [1.0, 2.0, 2.0], "rising n from 1 on, not [1, 4, 2]"),
        ([1, 2], [1.0], "rising n from 1 on, not [1, 2]"),
        ([1, 2], [1.0, float("nan")], "must be a positive number, not [1.0, nan]"),
        ([1, 2], [1.0, float("inf")], "must be a positive number, not [1.0, inf]"),
        ([1, 2], [0.0, 1.0], "must be a positive number, not [0.0, 1.0]"),
        ([1, 2], [1.0, -1.0], "must be a positive number, not [1.0, -1.0]"),
    ],
)
def test_points_that_make_no_curve_are_refused_in_one_line(sizes, seconds, message):
    with pytest.raises(ConfigError) as error:
        VerifyCost(sizes, seconds)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("points", ["1:1 2:1.5 8:3", "1:1,2:1.5,8:3", " 1:1, 2:1.5,  8:3 "])
def test_points_are_separated_by_spaces_or_commas(points):
    cost = VerifyCost.parse(points)
    assert (cost.sizes, cost.seconds, cost.fixed) == ([1, 2, 8], [1.0, 1.5, 3.0], True)


@pytest.mark.parametrize("name", COST_CURVES)
def test_a_curve_by_name_is_the_one_of_its_points(name):
    cost = VerifyCost.parse(name)
    assert cost.relative.tolist() == VerifyCost.parse(COST_CURVES[name]).relative.tolist()
    for n, t in zip(cost.sizes, cost.seconds, strict=True):
        assert cost.relative[n] == pytest.approx(t)


@pytest.mark.parametrize("points", ["tpu", "1", "1:1:1", "1:1 2:", "one:1", "1.5:2", "1:1;2:2"])
def test_what_is_no_curve_says_what_is_one(points):
    with pytest.raises(ConfigError) as error:
        VerifyCost.parse(points)
    assert str(error.value) == (
        f"the cost curve {points!r} must be one of cpu, cpu-amx, unified, gpu, or points like '1:1 2:1.5 8:3'"
    )


@pytest.mark.parametrize("points", ["", "2:1", "1:1 4:2 2:3", "1:0", "1:-1", "1:nan"])
def test_points_of_no_use_are_refused(points):
    with pytest.raises(ConfigError, match="cost curve"):
        VerifyCost.parse(points)


# --- corrections ---


def measured():
    return VerifyCost(POINTS, SECONDS)


def t(n):
    return float(np.interp(n, POINTS, SECONDS))


def steps(cost, sizes, seconds):
    """The machine takes seconds(n) for a tree of n nodes; one step for each of `sizes`."""
    for n in sizes:
        cost.correct(n, seconds(n))


def change(cost, n):
    """Of relative[n], since it was measured."""
    return cost.relative[n] / measured().relative[n]


def test_a_steps_surprise_is_mostly_the_machines_and_partly_that_of_sizes_near_its_own():
    """A first step with a tree of 8 took e^0.3 times what was expected. Variances: the machine 0.5^2 + 0.04^2, the
    size 0.2^2, noise 0.2^2; so the size gets 0.04 / 0.3316 of it, sizes an octave away 1/e of that."""
    cost = measured()
    cost.correct(8, np.exp(0.3) * t(8))
    own = 0.3 * 0.2**2 / (0.5**2 + 0.04**2 + 0.2**2 + 0.2**2)
    expected = np.exp(own * np.exp(-np.abs(np.log2(np.array(POINTS) / 8))))
    assert [change(cost, n) for n in POINTS] == pytest.approx([1, *expected[1:]])


@pytest.mark.parametrize("sizes", [[1, 8], [1, 1, 8], [1, 2, 4, 8, 16]])
@pytest.mark.parametrize("factor", [3, 1 / 3])
def test_what_slows_all_sizes_alike_changes_no_ratio_for_long(sizes, factor):
    cost = measured()
    for step in range(60):
        n = sizes[step % len(sizes)]
        cost.correct(n, factor * t(n))
        assert all(abs(np.log(change(cost, n))) < np.log(1.2) for n in POINTS)
    assert [change(cost, n) for n in POINTS] == pytest.approx([1] * len(POINTS), rel=0.05)


def test_plain_steps_alone_never_make_drafts_dearer():
    cost = measured()
    steps(cost, [1] * 100, lambda n: 5 * t(n))
    assert [change(cost, n) for n in POINTS] == pytest.approx([1] * len(POINTS))


def test_what_slows_large_trees_is_followed_and_small_ones_move_little():
    cost = measured()
    steps(cost, [1, 8] * 30, lambda n: (2 if n == 8 else 1) * t(n))
    assert change(cost, 8) == pytest.approx(2, rel=0.15)
    assert change(cost, 2) == pytest.approx(1, abs=0.1)
    assert change(cost, 64) == pytest.approx(1, abs=0.1)


def test_trees_that_get_cheaper_are_followed_too():
    cost = measured()
    steps(cost, [1, 16] * 60, lambda n: (0.6 if n == 16 else 1) * t(n))
    assert change(cost, 16) < 0.8
    assert change(cost, 2) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("seconds", [100 * SECONDS[3], SECONDS[3] / 100])
def test_one_hiccup_is_no_trend(seconds):
    cost = measured()
    cost.correct(8, seconds)
    assert change(cost, 8) == pytest.approx(1, abs=0.1)
    assert change(cost, 8) != 1


def test_with_plain_steps_a_correction_fades_so_that_large_trees_are_tried_again():
    cost = measured()
    steps(cost, [1, 16] * 50, lambda n: (3 if n == 16 else 1) * t(n))
    before, fading = change(cost, 16), []
    assert before > 2
    for _ in range(6):
        steps(cost, [1] * 100, t)
        fading.append(change(cost, 16))
    assert fading == sorted(fading, reverse=True)
    assert fading[0] < before
    assert 1 <= fading[-1] < 1.1


def test_noise_leaves_the_curve_where_it_is_on_average():
    cost, rng, seen = measured(), np.random.default_rng(0), []
    for n in rng.choice([1, 2, 4, 8, 16], 1000).tolist():
        cost.correct(n, t(n) * rng.uniform(0.8, 1.2))
        seen.append([change(cost, n) for n in POINTS])
    assert np.mean(seen, axis=0) == pytest.approx(1, abs=0.04)
    assert np.abs(np.log(seen)).max() < 0.15


def test_a_fixed_curve_is_not_corrected():
    cost = VerifyCost.parse("cpu")
    before = cost.relative.copy()
    steps(cost, [1, 8, 64] * 20, lambda n: 10.0)
    assert cost.relative.tolist() == before.tolist()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_that_took_no_time_says_nothing(seconds):
    cost = measured()
    cost.correct(8, seconds)
    assert cost.relative.tolist() == measured().relative.tolist()


# --- the probe ---


class Machine:
    """A clock that only forwards move."""

    def __init__(self, seconds):
        self.seconds, self.started, self.now, self.asked = seconds, 100.0, 100.0, []

    def evaluate(self, n):
        self.asked.append(n)
        self.now += self.seconds(n)

    def probe(self, most):
        return probe(self.evaluate, most, clock=lambda: self.now)

    @property
    def took(self):
        return self.now - self.started


@pytest.mark.parametrize("most", [2, 11, 50, 64, MAX_NODES])
def test_a_fast_model_is_measured_at_every_size_several_times(most):
    machine = Machine(lambda n: 1e-4 * (1 + 0.1 * n))
    cost = machine.probe(most)
    assert cost.sizes == [n for n in SIZES if n <= most]
    assert cost.seconds == pytest.approx([1e-4 * (1 + 0.1 * n) for n in cost.sizes])
    assert {machine.asked.count(n) for n in cost.sizes[1:]} == {ROUNDS}
    assert machine.took <= SMALL_MODEL_BUDGET


@pytest.mark.parametrize("first", [0.005, 0.019])
def test_a_small_model_keeps_to_the_small_budget(first):
    machine = Machine(lambda n: first * n)
    cost = machine.probe(MAX_NODES)
    assert machine.took <= SMALL_MODEL_BUDGET + first
    assert 4 < cost.sizes[-1] < MAX_NODES


@pytest.mark.parametrize("first", [0.021, 0.1, 0.3, 0.6])
def test_a_slow_model_keeps_to_the_budget_and_its_dear_sizes_are_extrapolated(first):
    machine = Machine(lambda n: first * n)
    cost = machine.probe(64)
    assert SMALL_MODEL_BUDGET < machine.took <= BUDGET + first
    assert cost.sizes[-1] < 64
    assert cost.relative[[1, 8, 64]].tolist() == pytest.approx([1, 8, 64])


def test_a_model_too_slow_for_two_sizes_is_measured_once_and_taken_to_be_linear():
    machine = Machine(lambda n: 3.0 if n == 1 else 1000.0)
    cost = machine.probe(64)
    assert machine.asked == [1, 1]
    assert cost.relative[[1, 2, 16]].tolist() == pytest.approx([1, 2, 16])


def test_the_first_forward_of_a_process_is_not_counted():
    machine = Machine(lambda n: 0.15 if len(machine.asked) == 1 else 0.01 * n)
    assert machine.probe(4).seconds == pytest.approx([0.01, 0.02, 0.03, 0.04])


def test_the_fastest_of_several_counts_so_that_noise_goes_away():
    rng = np.random.default_rng(1)
    machine = Machine(lambda n: 1e-3 * (1 + n / 8) * (1 if rng.random() > 0.3 else rng.uniform(2, 10)))
    cost = machine.probe(64)
    assert cost.seconds == pytest.approx([1e-3 * (1 + n / 8) for n in cost.sizes])
    assert cost.sizes[-1] == 64


# --- the file ---


def keep(folder, facts=FACTS):
    """Remembers a curve; returns the file's path."""
    remember(facts, VerifyCost([1, 2, 64], [0.1, 0.15, 0.9]), folder)
    [path] = folder.iterdir()
    return path


def test_a_remembered_curve_is_recalled(tmp_path):
    keep(tmp_path)
    cost = recall(FACTS, tmp_path)
    assert (cost.sizes, cost.seconds, cost.fixed) == ([1, 2, 64], [0.1, 0.15, 0.9], False)
    assert recall(json.loads(json.dumps(FACTS)), tmp_path).sizes == [1, 2, 64]
    assert recall(dict(reversed(FACTS.items())), tmp_path).sizes == [1, 2, 64]


def test_corrections_are_this_run_s_and_not_remembered(tmp_path):
    cost = measured()
    steps(cost, [1, 8] * 30, lambda n: (2 if n == 8 else 1) * t(n))
    remember(FACTS, cost, tmp_path)
    assert recall(FACTS, tmp_path).relative.tolist() == measured().relative.tolist()


def test_the_last_curve_of_the_same_facts_counts(tmp_path):
    path = keep(tmp_path)
    remember(FACTS, VerifyCost([1, 2], [1.0, 2.0]), tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert recall(FACTS, tmp_path).seconds == [1.0, 2.0]


def test_other_facts_are_another_file(tmp_path):
    keep(tmp_path)
    for other in (FACTS | {"threads": 3}, FACTS | {"build": "x"}, {}):
        assert recall(other, tmp_path) is None
        remember(other, VerifyCost([1], [1.0]), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert recall(FACTS, tmp_path).sizes == [1, 2, 64]


def test_the_files_are_in_the_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))
    assert recall(FACTS) is None
    remember(FACTS, measured())
    assert recall(FACTS).sizes == POINTS
    assert [path.suffix for path in (tmp_path / "home" / "costs").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"\xff\xfe", b"null", b"[]", b"1", b"{}", b'{"format": 1}', b'{"format": 1'], ids=repr
)
def test_a_file_that_is_no_curve_is_as_good_as_none(tmp_path, content):
    keep(tmp_path).write_bytes(content)
    assert recall(FACTS, tmp_path) is None


def test_a_file_cut_short_is_as_good_as_none(tmp_path):
    path = keep(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert recall(FACTS, tmp_path) is None


@pytest.mark.parametrize(
    "other",
    [
        {"format": 0},
        {"format": "1"},
        {"facts": FACTS | {"threads": 3}},
        {"facts": None},
        {"sizes": [1, 64, 2]},
        {"sizes": [2, 3, 64]},
        {"sizes": [1, 2]},
        {"sizes": []},
        {"sizes": 3},
        {"sizes": ["1", "2", "3"]},
        {"sizes": None},
        {"seconds": [0.1, float("nan"), 0.9]},
        {"seconds": [0.1, 0.15, float("inf")]},
        {"seconds": [0.0, 0.15, 0.9]},
        {"seconds": [0.1, 0.15, "0.9"]},
        {"seconds": [0.1, 0.15, None]},
        {"seconds": {}},
    ],
    ids=repr,
)
def test_a_file_that_says_something_else_is_as_good_as_none(tmp_path, other):
    path = keep(tmp_path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data))
    assert recall(FACTS, tmp_path) is not None
    path.write_text(json.dumps(data | other))
    assert recall(FACTS, tmp_path) is None


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    remember(FACTS, measured(), blocked)
    remember(FACTS, measured(), blocked / "below")
    assert recall(FACTS, blocked) is None
    assert blocked.read_text() == "in the way"


@pytest.mark.parametrize("points", ["1:1 99999999999999999999999:2", "1:1 2:1e400", "1:1 2", "1:1 x:2"])
def test_points_that_are_no_numbers_of_a_curve_are_one_line(points):
    with pytest.raises(ConfigError) as error:
        VerifyCost.parse(points)
    assert "\n" not in str(error.value)


def test_no_part_of_a_file_is_left_where_it_could_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_module.remembered.json, "dump", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    remember({"model": "a"}, VerifyCost([1, 2], [1.0, 1.5]), tmp_path)
    assert list(tmp_path.iterdir()) == []

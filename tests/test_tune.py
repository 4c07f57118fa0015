"""racer-local tune: the search on machines made up, the measurement on tiny models, and what is remembered."""

from __future__ import annotations

import json
import random
import subprocess

import pytest
from benches import refused, run
from tiny_gguf import write_tiny_gguf

from racer_local import tuned
from racer_local.config import ContextConfig, default_threads
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import Model
from racer_local.llama.quantize import BITS, quantize, size_of, type_of
from racer_local.tuning import quants, trial
from racer_local.tuning.budget import Budget
from racer_local.tuning.quants import agreement
from racer_local.tuning.search import (
    CUT,
    MOST_ROUNDS,
    ROUNDS,
    Candidate,
    Comparison,
    Found,
    Space,
    search,
    space_for,
)
from racer_local.tuning.table import as_flags, changed, conclusion
from racer_local.tuning.work import record

FAST = ["--threads", "1", "--ctx", "256"]
TOKENS, OPENING, LONGEST = 100, 1.0, 10.0
"""Of a sample of a made-up machine; the seconds that opening a candidate takes there, and a sample at most."""
DEFAULT = Candidate(4)
SPACE = Space(DEFAULT, threads=[1, 2, 3], flash_attn=["on"], kv_types=["bf16", "q8_0"])


@pytest.fixture(autouse=True)
def _own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))


class Machine:
    """Answers at speed(candidate) tokens/s, give or take noise, times drift(seconds since the start)."""

    def __init__(self, speed, noise=0.0, drift=lambda seconds: 1.0, seed=0):
        self.now = 0.0
        self._speed, self._noise, self._drift = speed, noise, drift
        self._random, self._open = random.Random(seed), []
        self.asked = []

    def clock(self):
        return self.now

    def measure(self, candidate, least):
        self.asked.append(candidate)
        if candidate not in self._open[-2:]:
            self.now += OPENING
        self._open = [each for each in self._open if each != candidate] + [candidate]
        speed = self._speed(candidate) * self._drift(self.now) * self._random.lognormvariate(0, self._noise)
        self.now += min(LONGEST, TOKENS / max(speed, least))
        return speed

    def search(self, space=SPACE, seconds=1000.0):
        found = Found.start(space.default)
        search(space, self.measure, Budget(seconds, self.clock), found)
        return found


def flash_and_q8(candidate):
    """Threads as they are, flash attention a sixth faster, q8_0 another tenth."""
    speed = 25.0 * candidate.threads
    return speed * (7 / 6 if candidate.flash_attn == "on" else 1) * (1.1 if candidate.kv_type == "q8_0" else 1)


def even(candidate):
    return 100.0


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_is_found_on_a_noisy_machine_that_slows_down(seed):
    found = Machine(flash_and_q8, noise=0.02, drift=lambda t: 1 / (1 + t / 200), seed=seed).search()
    assert found.best == Candidate(4, "on", "q8_0")
    assert found.final.faster
    assert found.final.gain == pytest.approx(7 / 6 * 1.1, rel=0.06)


def test_where_all_are_even_the_default_stays_but_for_a_few_of_100_times():
    for noise in (0.0, 0.01, 0.05):
        bests = [Machine(even, noise, seed=seed).search().best for seed in range(100)]
        assert sum(best != DEFAULT for best in bests) <= 5


@pytest.mark.parametrize("drift", [lambda t: 1 + t / 60, lambda t: 1 / (1 + t / 60)], ids=["faster", "slower"])
def test_a_drifting_machine_makes_nobody_win(drift):
    assert Machine(even, drift=drift).search().best == DEFAULT


def test_one_hiccup_decides_nothing():
    clean = Comparison(DEFAULT, Candidate(3), [(10.0, 10.1), (10.0, 9.9), (10.0, 10.0), (2.0, 10.0)])
    assert not clean.faster
    assert not Comparison(DEFAULT, Candidate(3), [(10.0, 1.0)]).decided


def test_the_worked_example_of_a_comparison():
    comparison = Comparison(DEFAULT, Candidate(3), [(10, 12), (20, 24.2), (10, 11.9)])
    assert comparison.gain == pytest.approx(1.2)
    assert comparison.noise == pytest.approx(0.025, abs=0.001)
    assert comparison.faster
    assert not Comparison(DEFAULT, Candidate(3), comparison.pairs[:2]).faster


def on_four_free_cores(candidate):
    """Four of eight cores are busy: from five threads on each forward waits for them."""
    return 10.0 * candidate.threads if candidate.threads <= 4 else 2.0


def test_threads_on_cores_that_are_busy_are_found():
    space = Space(Candidate(8), threads=[1, 2, 4, 6, 7])
    assert Machine(on_four_free_cores).search(space).best == Candidate(4)
    machine = Machine(on_four_free_cores)
    space.guess = 4
    found = machine.search(space, seconds=200)
    assert (found.best, found.late) == (Candidate(4), [])
    assert machine.asked[1] == Candidate(4)
    assert Candidate(7) in found.pointless


def test_a_cliff_costs_little_time():
    machine = Machine(lambda candidate: 100.0 if candidate.threads <= 8 else 0.1)
    assert machine.search(Space(Candidate(8), threads=[16])).best == Candidate(8)
    assert machine.now < 3 * OPENING + 2 * (1 + 1 / CUT) * TOKENS / 100.0


def test_still_fewer_threads_are_not_tried_where_fewer_lost_clearly():
    found = Machine(flash_and_q8).search()
    assert [candidate.threads for candidate in found.pointless] == [1, 2]


@pytest.mark.parametrize("seconds", [15, 25, 60, 160])
def test_the_time_budget_is_kept_and_what_was_left_out_is_said(seconds):
    machine = Machine(flash_and_q8, noise=0.02)
    found = machine.search(seconds=seconds)
    slowest = 2 * (OPENING + TOKENS / 50)
    assert machine.now <= seconds + slowest
    tried = 1 + len(found.comparisons) + len(found.late) + len(found.pointless)
    assert tried == 1 + 3 + 1 + 2
    assert (seconds < 50) == bool(found.late)
    if found.best != DEFAULT:
        assert len(found.final.pairs) >= ROUNDS


def test_no_comparison_has_more_pairs_than_it_may():
    found = Machine(even, noise=0.3, seed=3).search()
    assert max(len(comparison.pairs) for comparison in found.comparisons) <= MOST_ROUNDS


def test_what_cannot_be_opened_is_noted_and_the_others_are_tried():
    machine = Machine(flash_and_q8)

    def measure(candidate, least):
        if candidate.kv_type == "q8_0":
            raise ModelError("no such cache")
        return machine.measure(candidate, least)

    found = Found.start(DEFAULT)
    search(SPACE, measure, Budget(1000, machine.clock), found)
    assert found.best == Candidate(4, "on")
    assert found.comparisons[-1].failed == "no such cache"


def test_a_choice_that_the_last_comparison_does_not_confirm_is_dropped():
    machine = Machine(flash_and_q8)
    found = Found.start(DEFAULT)

    def measure(candidate, least):
        speed = machine.measure(candidate, least)
        return 100.0 if len(found.comparisons) == 4 and found.comparisons[-1].decided else speed

    search(SPACE, measure, Budget(1000, machine.clock), found)
    assert found.final.challenger == Candidate(4, "on", "q8_0")
    assert (found.best, found.final.gain) == (DEFAULT, 1.0)
    text = conclusion(found, offloads=False)
    assert text.startswith("the default stays: 4 threads, flash attention off, f16; once more against it, ")


def test_speed_in_the_defaults_goes_by_way_of_those_compared():
    found = Machine(flash_and_q8).search()
    assert found.relative[Candidate(4, "on", "q8_0")] == pytest.approx(7 / 6 * 1.1)
    assert found.relative[Candidate(3)] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("settings", "usable", "expected"),
    [
        ({}, 8, ([1, 2, 4, 6, 7], None, ["on"], ["bf16", "q8_0"])),
        ({}, 16, ([1, 2, 4, 6, 7, 16], None, ["on"], ["bf16", "q8_0"])),
        ({"threads": 2}, 16, ((), None, ["on"], ["bf16", "q8_0"])),
        ({"flash_attn": "off", "threads": 2}, 2, ((), None, (), ["bf16"])),
        ({"kv_type": "q8_0", "threads": 2}, 2, ((), None, (), ())),
    ],
)
def test_what_is_left_open_is_tried(monkeypatch, settings, usable, expected):
    monkeypatch.setattr("racer_local.config.default_threads", lambda: 8)
    space = space_for(ContextConfig(**settings), usable)
    assert (space.threads, space.guess, space.flash_attn, space.kv_types) == expected


def test_as_many_threads_as_other_programs_leave_cores_are_tried_first(monkeypatch):
    monkeypatch.setattr("racer_local.config.default_threads", lambda: 8)
    space = space_for(ContextConfig(), 8, busy=3.2)
    assert (space.threads, space.guess) == ([1, 2, 4, 5, 6, 7], 5)
    assert space_for(ContextConfig(), 8, busy=0.3).guess is None
    assert space_for(ContextConfig(), 8, offloads=True).flash_attn == ["off"]


# --- on tiny models ---


def test_a_real_run_measures_every_candidate_and_the_default_keeps_its_place_or_loses_it(capsys, tiny_path):
    code, out, _ = run(capsys, "tune", "-m", tiny_path, *FAST, "--flash-attn", "off", "--time-budget", "8", "--json")
    assert (code, out.count("\n")) == (0, 1)
    result = json.loads(out)
    assert result["default"] == {"threads": 1, "flash_attn": "off", "kv_type": "f16"}
    first, second = result["candidates"]
    assert second["kv_type"] == "bf16"
    for candidate in (first, second):
        assert list(candidate["cost"]) == ["2", "4", "8", "16"]
        assert min(candidate[f"{what}_tokens_per_second"] for what in ("drafted", "plain", "prompt")) > 0
        assert candidate["mean_accepted_tokens"] >= 1
        assert candidate["samples"] >= ROUNDS
    assert first["memory_bytes"] == second["memory_bytes"]
    assert (result["applied"], result["interrupted"], result["copies"]) == (None, False, [])


def test_all_candidates_write_the_recorded_tokens(tiny):
    context = ContextConfig(n_ctx=256, threads=1)
    work = record(tiny, context, [1], Budget(10))
    assert [len(turn.answer) for turn in work.turns] == [32, 32]
    with trial.Trials(tiny, context, work, longest=10) as trials:
        for candidate in (Candidate(1), Candidate(1, "on", "f32"), Candidate(1, "on"), Candidate(1)):
            assert trials.measure(candidate, 0.0) > 0
            assert len(trials._open) <= trial.OPEN
            assert trials.figures[candidate].drafted.emitted == 64 * trials.figures[candidate].samples
        assert trials.figures[Candidate(1)].samples == 2
        kv = {each.kv_type: figures.memory_bytes for each, figures in trials.figures.items()}
        assert kv["f32"] > kv[None]
    assert trials._open == {}


def test_a_sample_that_is_too_slow_is_cut_short(tiny):
    context = ContextConfig(n_ctx=256, threads=1)
    work = record(tiny, context, [1], Budget(10))
    with trial.Trials(tiny, context, work, longest=10) as trials:
        trials.measure(Candidate(1), 1e9)
        figures = trials.figures[Candidate(1)]
        assert figures.drafted.emitted < work.drafted_tokens
        assert figures.plain.emitted == 0


def test_a_model_that_can_draft_nothing_is_measured_plainly(capsys, tmp_path):
    path = write_tiny_gguf(tmp_path / "mamba.gguf", arch="mamba")
    flags = ["--threads", "1", "--ctx", "256", "--flash-attn", "off", "--kv-type", "f16", "--time-budget", "4"]
    code, out, _ = run(capsys, "tune", "-m", path, *flags)
    head, row, *_ = out.splitlines()
    assert code == 0
    assert dict(zip(head.split()[4:], row.split()[4:], strict=False))["T(2)"] == "-"
    assert "the default stays: 1 thread, flash attention off, f16" in out


@pytest.fixture
def scripted(monkeypatch):
    """Samples of a made-up machine on which flash attention is twice as fast; an interrupt at sample `at`, if any."""
    state = {"at": None, "asked": 0, "gain": 2.0}

    def measure(trials, candidate, least):
        state["asked"] += 1
        if state["asked"] == state["at"]:
            raise KeyboardInterrupt
        figures = trials.figures.setdefault(candidate, trial.Figures())
        figures.samples += 1
        return 100.0 * (state["gain"] if candidate.flash_attn == "on" else 1) * (0.5 if candidate.kv_type else 1)

    monkeypatch.setattr(trial.Trials, "measure", measure)
    return state


def test_what_is_applied_is_used_and_can_be_forgotten(capsys, tiny_path, scripted):
    code, out, _ = run(capsys, "tune", "-m", tiny_path, *FAST, "--apply")
    assert code == 0
    assert f"remembered for tiny.gguf: --flash-attn on (undo: racer-local tune -m {tiny_path} --reset)" in out
    assert tuned.recall(tiny_path) == {"flash_attn": "on"}
    opened = []
    with pytest.MonkeyPatch.context() as patch:
        _note_contexts(patch, opened)
        assert run(capsys, "generate", "-m", tiny_path, *FAST, "-p", "hi", "--max-tokens", "3", "--json")[0] == 0
        assert (
            run(capsys, "tune", "-m", tiny_path, "--reset")[1] == "tiny.gguf: forgotten; the defaults are used again\n"
        )
        assert run(capsys, "generate", "-m", tiny_path, *FAST, "-p", "hi", "--max-tokens", "3", "--json")[0] == 0
    assert [context.flash_attn for context in opened] == ["on", "auto"]
    assert run(capsys, "tune", "-m", tiny_path, "--reset")[1] == "tiny.gguf: nothing was remembered\n"


def _note_contexts(patch, opened):
    from racer_local import session

    whole = session.LlamaTarget.__init__

    def init(self, model, config=None, max_nodes=1, handle=None):
        opened.append(config)
        whole(self, model, config, max_nodes, handle)

    patch.setattr(session.LlamaTarget, "__init__", init)


def test_without_apply_it_is_said_what_to_type(capsys, tiny_path, scripted):
    out = run(capsys, "tune", "-m", tiny_path, *FAST)[1]
    assert out.splitlines()[-2].startswith("best: 1 thread, flash attention on, f16; 2.00x (within 0.00) the speed of")
    assert out.splitlines()[-1] == (f"to use it: racer-local tune -m {tiny_path} --apply, or give --flash-attn on")
    assert tuned.recall(tiny_path) == {}


def test_where_the_default_is_best_nothing_is_remembered_and_what_was_is_forgotten(capsys, tiny_path, scripted):
    scripted["gain"] = 1.0
    tuned.remember(tiny_path, {"flash_attn": "on"})
    code, out, err = run(capsys, "tune", "-m", tiny_path, *FAST, "--apply")
    assert (code, out.splitlines()[-1]) == (0, "nothing to remember")
    assert "what was remembered before is forgotten" in err
    assert tuned.recall(tiny_path) == {}


def test_an_interrupt_prints_the_table_so_far_and_applies_nothing(capsys, tiny_path, scripted):
    scripted["at"] = 9
    code, out, _ = run(capsys, "tune", "-m", tiny_path, *FAST, "--apply")
    assert code == 130
    assert [line.split()[:3] for line in out.splitlines()[1:3]] == [["1", "off", "f16"], ["1", "on", "f16"]]
    assert out.splitlines()[-1] == "interrupted; nothing was applied"
    assert tuned.recall(tiny_path) == {}
    scripted.update(at=9, asked=0)
    code, out, _ = run(capsys, "tune", "-m", tiny_path, *FAST, "--json")
    assert (code, json.loads(out.splitlines()[-1])["interrupted"]) == (130, True)


def test_flags_are_those_of_the_settings_that_differ():
    found = Found(Candidate(2), Candidate(1, "on", "q8_0"))
    assert as_flags(changed(found)) == "--threads 1 --flash-attn on --kv-type q8_0"
    assert changed(Found(Candidate(2), Candidate(2))) == {}


# --- copies ---


@pytest.fixture(scope="module")
def whole_path(tmp_path_factory):
    """A tiny model in F16."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "whole.gguf", n_layer=2, quant="F16")


def test_a_copy_is_made_in_each_quant_whatever_the_rows_are_wide(tmp_path, whole_path):
    for quant in BITS:
        path = tmp_path / f"{quant}.gguf"
        quantize(whole_path, path, quant, threads=1)
        with Model(path) as model:
            assert type_of(model) == quant
    assert sorted(each.name for each in tmp_path.iterdir()) == ["Q4_0.gguf", "Q4_K_M.gguf", "Q8_0.gguf"]


def test_what_is_quantized_already_can_be_made_smaller(tmp_path, tiny, tiny_path):
    quantize(tiny_path, tmp_path / "copy.gguf", "Q4_0", threads=1)
    assert (tmp_path / "copy.gguf").stat().st_size < tiny_path.stat().st_size
    assert size_of(tiny, "Q4_0") < size_of(tiny, "Q8_0")


def test_a_copy_that_cannot_be_made_is_an_error_with_the_reason_and_leaves_nothing(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"damaged.gguf can't be made Q4_0: .*gguf"):
        quantize(damaged, tmp_path / "copy.gguf", "Q4_0", threads=1)
    assert [each.name for each in tmp_path.iterdir()] == ["damaged.gguf"]
    with pytest.raises(ConfigError, match="'Q9' is no quant that can be made here; known: Q4_0, Q4_K_M, Q8_0"):
        quantize(damaged, tmp_path / "copy.gguf", "Q9")


def test_a_model_agrees_with_itself_and_less_with_a_coarse_copy(tmp_path, whole_path):
    quantize(whole_path, tmp_path / "copy.gguf", "Q4_0", threads=1)
    with Model(whole_path) as model, Model(tmp_path / "copy.gguf") as copy:
        text = model.tokenize("the quick brown fox jumps over the lazy dog " * 4, add_special=True)
        context = ContextConfig(threads=1)
        own = agreement(model, model, context, text)
        assert (own.positions, own.share, own.divergence) == (len(text), 1.0, 0.0)
        other = agreement(model, copy, context, text)
        assert 0 < other.share < 1
        assert other.divergence > 1e-4


def test_copies_are_measured_and_dropped_or_kept_where_asked(capsys, tmp_path, whole_path):
    flags = [*FAST, "--flash-attn", "off", "--kv-type", "f16", "--time-budget", "8", "--json"]
    code, out, _ = run(capsys, "tune", "-m", whole_path, *flags, "--quants", "q4_0,Q8_0")
    assert code == 0
    small, large = json.loads(out)["copies"]
    assert (small["quant"], large["quant"], small["path"]) == ("Q4_0", "Q8_0", None)
    assert small["bytes"] < large["bytes"] < whole_path.stat().st_size
    assert small["same_next_token"] < large["same_next_token"] <= 1
    assert small["divergence"] > large["divergence"] > 0
    assert small["drafted_tokens_per_second"] > 0
    assert small["comparison"]["gain"] > 0
    assert [each.name for each in whole_path.parent.iterdir()] == ["whole.gguf"]
    text = tmp_path / "text.txt"
    text.write_text("some words of my own")
    flags += ["--quants", "Q4_0", "--quants-dir", tmp_path, "--text", text]
    result = json.loads(run(capsys, "tune", "-m", whole_path, *flags)[1])
    [kept] = result["copies"]
    assert kept["path"] == str(tmp_path / "whole-to-Q4_0.gguf")
    assert (tmp_path / "whole-to-Q4_0.gguf").stat().st_size == kept["bytes"]
    assert kept["positions"] < small["positions"]


def test_an_interrupt_leaves_no_copies_behind(capsys, monkeypatch, whole_path, scripted):
    def interrupted(child, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    code, out, _ = run(capsys, "tune", "-m", whole_path, *FAST, "--quants")
    assert (code, out.splitlines()[-1]) == (130, "interrupted; nothing was applied")
    assert [each.name for each in whole_path.parent.iterdir()] == ["whole.gguf"]


def test_it_is_said_what_a_copy_of_a_quantized_file_loses(capsys, tiny_path, scripted, monkeypatch):
    monkeypatch.setattr(quants.Workshop, "measure", lambda shop, copy, budget: None)
    err = run(capsys, "tune", "-m", tiny_path, *FAST, "--quants", "Q4_0,Q8_0")[2]
    assert "tiny.gguf is Q8_0 already" in err
    assert "loses more than one that is made of the F16 file" in err


def test_copies_that_would_not_fit_on_the_disk_are_not_begun(capsys, tiny_path, scripted, monkeypatch):
    monkeypatch.setattr(quants.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    code, _, err = run(capsys, "tune", "-m", tiny_path, *FAST, "--quants", "Q4_0")
    assert code == 2
    assert "has 0.00 GB free; name another folder with --quants-dir, or fewer --quants" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time-budget", "0"], "--time-budget is 0; it must be from 1 to 1000000 seconds"),
        (["--quants", "Q5_1"], "'Q5_1' is no quant that can be made here; known: Q4_0, Q4_K_M, Q8_0"),
        (["--quants", "--quants-dir", "/nowhere"], "--quants-dir /nowhere is no folder that can be written"),
        (["--quants-dir", "."], "--quants-dir is for copies; add --quants"),
        (["--text", "x.txt"], "--text is for copies; add --quants"),
        (["--quants", "--text", "/nowhere.txt"], "--text /nowhere.txt can't be read as UTF-8 text"),
        (["--reset", "--apply"], "--reset only forgets"),
        (["--threads", "0"], "threads is 0"),
        (["--kv-type", "q8_0", "--flash-attn", "off"], "kv_type q8_0 needs flash attention"),
        (["--ctx", "64"], "a context of 64 tokens is too small to measure in; give --ctx 128"),
    ],
)
def test_bad_input_is_one_line(capsys, tiny_path, flags, message):
    assert message in refused(capsys, "tune", "-m", tiny_path, *flags)


def test_the_default_is_measured_with_all_cores(capsys, tiny_path, scripted):
    result = json.loads(run(capsys, "tune", "-m", tiny_path, "--ctx", "256", "--json")[1])
    assert result["default"]["threads"] == default_threads()

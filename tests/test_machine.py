"""What is free on this machine, and what is said before a model is loaded into what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from racer_local import cli, machine, tuned
from racer_local.config import ContextConfig, DraftConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import Model
from racer_local.llama.vocabulary import Vocabulary, weight_bytes
from racer_local.session import Session


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))


def cgroup(folder, monkeypatch, limit, used, cached):
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file {cached}\ninactive_file 0\n")
    monkeypatch.setattr(machine, "CGROUP", folder)


def test_a_containers_limit_counts_and_its_file_cache_is_free(monkeypatch, tmp_path):
    cgroup(tmp_path / "cgroup", monkeypatch, 1000, 700, 200)
    assert (machine.total_memory(), machine.free_memory()) == (1000, 500)


def test_a_container_without_a_limit_has_what_the_machine_has(monkeypatch, tmp_path):
    before = machine.total_memory()
    cgroup(tmp_path / "cgroup", monkeypatch, "max", 700, 200)
    assert machine.total_memory() == before
    assert machine.free_memory() > 1_000_000


def short_of_memory(monkeypatch, free):
    monkeypatch.setattr(machine, "free_memory", lambda: free)


def test_a_model_that_can_not_fit_is_a_message(monkeypatch, tiny_path):
    short_of_memory(monkeypatch, weight_bytes(tiny_path) - 1)
    with pytest.raises(ModelError, match=r"tiny.gguf by itself takes about .* take a smaller quant or model"):
        Model(tiny_path)
    monkeypatch.setenv(machine.SKIP, "1")
    Model(tiny_path).close()


def test_a_context_that_can_not_fit_names_the_settings_to_change(monkeypatch, tiny):
    context = ContextConfig(n_ctx=100_000, threads=1)
    short_of_memory(monkeypatch, tiny.kv_bytes(100_000) - 1)
    with pytest.raises(ModelError, match=r"with a context of \d+ tokens takes about .* a smaller --ctx"):
        Session(tiny, context, DraftConfig(draft="none"))
    Session(tiny, ContextConfig(n_ctx=256, threads=1), DraftConfig(draft="none")).close()


def test_the_cache_is_as_large_as_its_type_says(tiny):
    heads, width = int(tiny.metadata("{arch}.attention.head_count_kv")), int(tiny.metadata("{arch}.embedding_length"))
    head = width // int(tiny.metadata("{arch}.attention.head_count"))
    layers = int(tiny.metadata("{arch}.block_count"))
    numbers = 1000 * layers * heads * 2 * head
    assert tiny.kv_bytes(1000) == tiny.kv_bytes(1000, "bf16") == 2 * numbers
    assert tiny.kv_bytes(1000, "f32") == 4 * numbers
    assert tiny.kv_bytes(1000, "q8_0") == numbers * 34 // 32


@pytest.mark.parametrize("arch", ["mamba", "lfm2", "jamba"])
def test_a_memory_whose_size_nobody_tells_is_not_held_against_a_model(tmp_path, arch):
    with Model(write_tiny_gguf(tmp_path / "m.gguf", arch=arch, n_layer=4)) as model:
        assert model.kv_bytes(1_000_000) == 0


def test_a_model_that_does_not_tell_its_heads_is_no_crash(monkeypatch, tiny_path, tiny):
    known = tiny.kv_bytes(1000)
    real = Vocabulary.metadata
    monkeypatch.setattr(Vocabulary, "metadata", lambda self, key: None if key.endswith("_kv") else real(self, key))
    assert tiny.kv_bytes(1000) == known
    with Vocabulary(tiny_path) as alone:
        assert alone.kv_bytes(1000) == 0


def test_all_parts_of_a_split_model_are_counted(tmp_path):
    for part, size in ((1, 10), (2, 20), (3, 30)):
        (tmp_path / f"m-{part:05}-of-00003.gguf").write_bytes(bytes(size))
    assert weight_bytes(tmp_path / "m-00001-of-00003.gguf") == 60
    (tmp_path / "whole.gguf").write_bytes(bytes(5))
    assert weight_bytes(tmp_path / "whole.gguf") == 5


def watch(monkeypatch, *, seconds, busy, own, cpus=4):
    """A watch that was made some seconds ago, since when all programs and this one were so long at work."""
    now = [0.0, 0.0, 0.0]
    for i, name in enumerate(("perf_counter", "_busy_seconds", "_own_seconds")):
        monkeypatch.setattr(machine, name, lambda i=i: now[i])
    monkeypatch.setattr(machine, "allowed_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(machine, "usable_cpus", lambda: cpus)
    made = machine.CpuWatch()
    now[:] = [seconds, busy, own]
    return made


def test_threads_beyond_the_free_cores_are_warned_of(monkeypatch):
    made = watch(monkeypatch, seconds=2.0, busy=7.0, own=2.0)  # others: 5 seconds in 2, so 2.5 of 4 cores
    assert made.others() == 2.5
    assert made.warning(4) == ("4 threads, and other programs keep 2.5 of 4 cores busy; --threads 2 may be far faster")
    assert made.warning(2) is None
    assert made.warning(1) is None


def test_nothing_is_said_after_too_short_a_time_or_on_a_quiet_machine(monkeypatch):
    assert watch(monkeypatch, seconds=0.05, busy=7.0, own=0.0).warning(4) is None
    assert watch(monkeypatch, seconds=2.0, busy=2.5, own=2.0).warning(4) is None


def doctor(capsys, *args):
    code = cli.main(["doctor", *map(str, args)])
    return code, capsys.readouterr().out


def test_doctor_says_whether_a_model_fits_before_it_is_loaded(capsys, monkeypatch, tiny_path):
    code, out = doctor(capsys, "-m", tiny_path, "--threads", "1")
    assert code == 0
    assert "ok: tiny.gguf with " in out
    short_of_memory(monkeypatch, 50_000_000)
    code, out = doctor(capsys, "-m", tiny_path, "--ctx", "10000000", "--threads", "1")
    assert code == 1
    lines = out.splitlines()
    found = next(i for i, line in enumerate(lines) if line.startswith("broken: tiny.gguf with 10000000 tokens takes"))
    room = int(lines[found + 1].split("--ctx ")[1].split(",")[0])
    code, out = doctor(capsys, "-m", tiny_path, "--ctx", str(room), "--threads", "1")
    assert code == 0, "what it tells to do mends it"


def test_doctor_names_a_model_that_is_not_there(capsys, tmp_path):
    code, out = doctor(capsys, "-m", tmp_path / "missing.gguf")
    assert code == 1
    assert "broken: no such file" in out


def test_doctor_as_json_has_the_findings_and_what_a_report_needs(capsys, tiny_path, monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_API_KEYS", "a-secret-of-mine")
    code, out = doctor(capsys, "--json", "-m", tiny_path, "--threads", "1")
    told = json.loads(out)
    assert (code, told["ok"]) == (0, True)
    assert {"system", "cpu", "cpus", "memory_free", "versions", "llama_cpp", "folder", "model"} <= told.keys()
    assert all({"level", "what", "mend"} == finding.keys() for finding in told["findings"])
    assert "a-secret-of-mine" not in out
    assert str(Path.home()) + "/" not in out.replace(str(tiny_path), "")


def test_doctor_warns_of_more_threads_than_cpus(capsys):
    code, out = doctor(capsys, "--threads", "512")
    assert code == 0
    assert "warning: 512 threads on " in out
    assert "use --threads " in out


def test_what_was_found_best_is_used_shown_and_forgotten(capsys, tiny_path):
    assert tuned.recall(tiny_path) == {}
    tuned.remember(tiny_path, {"threads": 1, "flash_attn": "on"})
    assert tuned.recall(tiny_path) == {"threads": 1, "flash_attn": "on"}
    _, out = doctor(capsys)
    assert "ok: tiny.gguf runs with what was found best for it: threads 1, flash_attn on" in out
    args = cli.build_parser().parse_args(["generate", "-m", str(tiny_path), "-p", "a"])
    from racer_local.cli.options import context_from_args

    assert context_from_args(args, tiny_path) == ContextConfig(threads=1, flash_attn="on")
    args = cli.build_parser().parse_args(["generate", "-m", str(tiny_path), "-p", "a", "--kv-type", "f32"])
    assert context_from_args(args, tiny_path) == ContextConfig(threads=1, kv_type="f32"), "the two go together"
    args = cli.build_parser().parse_args(["generate", "-m", str(tiny_path), "-p", "a", "--threads", "3"])
    assert context_from_args(args, tiny_path) == ContextConfig(threads=3, flash_attn="on")
    assert tuned.forget(tiny_path)
    assert not tuned.forget(tiny_path)
    assert tuned.recall(tiny_path) == {}


def test_what_was_found_for_another_state_of_a_file_says_nothing(capsys, tmp_path, tiny_path):
    path = tmp_path / "copy.gguf"
    path.write_bytes(tiny_path.read_bytes())
    tuned.remember(path, {"threads": 1})
    path.write_bytes(tiny_path.read_bytes() + b"more")
    assert tuned.recall(path) == {}
    _, out = doctor(capsys)
    assert "warning: what was found best for copy.gguf was for another state" in out
    assert tuned.forget(path)


@pytest.mark.parametrize("settings", [{"threads": 0}, {"kv_type": "q8_0", "flash_attn": "off"}, {"threads": "two"}])
def test_settings_that_no_context_can_have_are_not_remembered(tiny_path, settings):
    with pytest.raises((ConfigError, TypeError)):
        tuned.remember(tiny_path, settings)
    assert tuned.recall(tiny_path) == {}

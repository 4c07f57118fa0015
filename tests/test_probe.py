"""The probe of the build: what it remembers, what it says, and the model that it decodes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
from tiny_gguf import write_probe, write_tiny_gguf

from racer_local.errors import BindingError
from racer_local.llama import probe as module
from racer_local.llama.probe import ProbeResult, ensure_build_works, probe

needs_binding = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="no llama-cpp-python")

PASS = ProbeResult(True, "works")
FAIL = ProbeResult(False, "it crashes", "SIGILL", -4, "run: pip")


class Probes:
    """Stands in for the child: answers with `result` and counts."""

    def __init__(self) -> None:
        self.result, self.count = PASS, 0

    def __call__(self) -> ProbeResult:
        self.count += 1
        return self.result


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub of the binding that is found first, and an empty cache folder. Returns its library."""
    library = tmp_path / "site" / "llama_cpp" / "lib" / "libllama.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"build 1")
    (library.parent.parent / "__init__.py").write_text('__version__ = "0.3.36"\n')
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RACER_LOCAL_SKIP_PROBE", raising=False)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    return library


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    stub = Probes()
    monkeypatch.setattr(module, "probe", stub)
    return stub


def test_a_build_that_passed_is_not_probed_again(build: Path, probes: Probes) -> None:
    ensure_build_works()
    ensure_build_works()
    assert probes.count == 1
    assert "llama_cpp" not in sys.modules


def test_a_remembered_pass_costs_under_5_ms(build: Path, probes: Probes) -> None:
    ensure_build_works()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        ensure_build_works()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_a_failure_is_told_in_one_line_and_not_remembered(build: Path, probes: Probes) -> None:
    probes.result = FAIL
    for _ in range(2):
        with pytest.raises(BindingError, match=r"^it crashes; run: pip$"):
            ensure_build_works()
    probes.result = PASS
    ensure_build_works()
    assert probes.count == 3


def test_another_build_is_probed_and_the_first_stays_known(build: Path, probes: Probes) -> None:
    ensure_build_works()
    stat = build.stat()
    build.write_bytes(b"build 2, longer")
    ensure_build_works()
    assert probes.count == 2
    build.write_bytes(b"build 1")
    os.utime(build, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ensure_build_works()
    assert probes.count == 2


def test_another_cpu_is_probed(build: Path, probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_build_works()
    monkeypatch.setattr("racer_local.binding.cpu_flags", lambda: frozenset({"amx_tile"}))
    ensure_build_works()
    assert probes.count == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"passed": 3}', '{"passed": [[1]]}', "\x00"])
def test_a_damaged_memory_is_ignored_and_written_anew(build: Path, probes: Probes, content: str) -> None:
    memory = module._memory()
    memory.parent.mkdir()
    memory.write_text(content)
    ensure_build_works()
    ensure_build_works()
    assert probes.count == 1
    assert len(json.loads(memory.read_text())["passed"]) == 1


def test_a_cache_folder_that_cannot_be_made_is_no_error(build: Path, probes: Probes, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file is in the way")
    ensure_build_works()
    ensure_build_works()
    assert probes.count == 2


def test_the_probe_can_be_skipped(build: Path, probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")
    probes.result = FAIL
    ensure_build_works()
    assert probes.count == 0


def test_the_committed_model_is_what_the_script_writes(tmp_path: Path) -> None:
    assert write_probe(tmp_path / "probe.gguf").read_bytes() == module.MODEL.read_bytes()
    assert module.MODEL.stat().st_size < 150_000


def test_the_committed_model_holds_both_kinds_of_weights() -> None:
    from gguf import GGUFReader

    kinds = {tensor.tensor_type.name for tensor in GGUFReader(module.MODEL).tensors}
    assert kinds == {"Q4_0", "Q8_0", "F32"}


@needs_binding
def test_the_installed_build_passes_in_a_child() -> None:
    result = probe()
    assert result.ok, result.message
    assert "CPU" in result.info["system_info"]


@needs_binding
def test_a_model_without_weights_is_an_error_and_no_crash(tmp_path: Path) -> None:
    result = probe(model=write_tiny_gguf(tmp_path / "vocabulary.gguf", vocab_only=True))
    assert not result.ok
    assert result.signal is None
    assert result.exit_code == 1
    assert "\n" not in result.message
    assert "vocabulary.gguf" in result.message


def test_a_python_that_does_not_exist_is_told(tmp_path: Path) -> None:
    result = probe(str(tmp_path / "no-python"))
    assert not result.ok
    assert "can't be started" in result.message

"""The build of llama-cpp-python: its flags and its crashes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from racer_local import binding
from racer_local.binding import Compiler, cmake_args
from racer_local.cli import doctor
from racer_local.errors import BindingError
from racer_local.llama.probe import probe

AMX = frozenset({"avx2", "avx512f", "amx_tile", "amx_int8"})
GCC12 = Compiler("g++", "gcc", (12, 2, 0))
MENDED = '-DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse"'


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CMAKE_ARGS", "CXX", "CC", "CXXFLAGS", "LLAMA_CPP_LIB_PATH", "RACER_LOCAL_SKIP_PROBE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("kind", "version", "flags", "expected"),
    [
        ("gcc", (11, 4, 0), AMX, MENDED),
        ("gcc", (12, 2, 0), AMX, MENDED),
        ("gcc", (12, 3, 0), AMX, MENDED),
        ("gcc", (12, 4, 0), AMX, ""),
        ("gcc", (13, 1, 0), AMX, MENDED),
        ("gcc", (13, 2, 0), AMX, MENDED),
        ("gcc", (13, 3, 0), AMX, ""),
        ("gcc", (14, 1, 0), AMX, ""),
        ("gcc", (12, 2, 0), AMX - {"amx_tile"}, ""),
        ("gcc", (12, 2, 0), frozenset(), ""),
        ("clang", (11, 0, 0), AMX, ""),
        ("unknown", (), AMX, ""),
    ],
)
def test_only_an_old_gcc_on_a_cpu_with_amx_needs_flags(
    kind: str, version: tuple[int, ...], flags: frozenset[str], expected: str
) -> None:
    assert cmake_args(flags, Compiler("c++", kind, version)) == expected


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("-DGGML_CUDA=on", ["-DGGML_CUDA=on", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"]),
        ('-DCMAKE_CXX_FLAGS="-O2 -g"', ["-DCMAKE_CXX_FLAGS=-O2 -g -fno-tree-dse -fno-dse"]),
        ("-DCMAKE_CXX_FLAGS:STRING=-g -DA=1", ["-DA=1", "-DCMAKE_CXX_FLAGS=-g -fno-tree-dse -fno-dse"]),
        ("-D CMAKE_CXX_FLAGS=-fno-dse", ["-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse"]),
        ('-DA="80;90" -G "b c"', ["-DA=80;90", "-G", "b c", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"]),
        (MENDED, ["-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"]),
    ],
)
def test_the_users_own_arguments_are_kept_and_extended(user: str, expected: list[str]) -> None:
    assert shlex.split(cmake_args(AMX, GCC12, user)) == expected


def test_the_users_arguments_stay_as_they_are_where_nothing_is_needed() -> None:
    user = "-DGGML_CUDA=on   -DCMAKE_CXX_FLAGS='-g'"
    assert cmake_args(frozenset(), GCC12, user) == user


def test_the_cxxflags_of_the_environment_are_not_lost() -> None:
    assert cmake_args(AMX, GCC12, "", "-g") == '-DCMAKE_CXX_FLAGS="-g -fno-tree-dse -fno-dse"'


def test_an_open_quote_in_cmake_args_is_told() -> None:
    with pytest.raises(BindingError, match="close its quotes"):
        cmake_args(AMX, GCC12, '-DA="b')


def _fake_compiler(folder: Path, name: str, macros: Mapping[str, int]) -> str:
    path = folder / name
    lines = "\n".join(f"#define {macro} {value}" for macro, value in macros.items())
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_cxx_chooses_the_compiler_and_clang_is_not_taken_for_gcc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc = _fake_compiler(tmp_path, "g", {"__GNUC__": 12, "__GNUC_MINOR__": 2, "__GNUC_PATCHLEVEL__": 0})
    clang = _fake_compiler(tmp_path, "c", {"__GNUC__": 4, "__clang_major__": 19, "__clang_minor__": 1})
    monkeypatch.setenv("CXX", f"{gcc} -pthread")
    assert binding.compiler() == Compiler(gcc, "gcc", (12, 2, 0))
    monkeypatch.setenv("CMAKE_ARGS", f"-DCMAKE_CXX_COMPILER={clang}")
    assert binding.compiler()[1:] == ("clang", (19, 1))


def test_a_compiler_that_is_not_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert binding.compiler() == Compiler("", "unknown", ())


def _stub_binding(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def _dies(name: str) -> str:
    return f"import os, signal\nos.kill(os.getpid(), signal.{name})\n"


def test_an_illegal_instruction_is_named_and_the_flags_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stub_binding(tmp_path, monkeypatch, _dies("SIGILL"))
    monkeypatch.setattr(binding, "cpu_flags", lambda: AMX)
    monkeypatch.setattr(binding, "compiler", lambda: GCC12)
    result = probe()
    assert (result.ok, result.signal) == (False, "SIGILL")
    assert "illegal instruction" in result.message
    assert result.mend is not None
    words = shlex.split(result.mend)
    assert f"CMAKE_ARGS={MENDED}" in words
    assert {"--no-cache-dir", "--force-reinstall", "--no-binary", sys.executable} <= set(words)


@pytest.mark.parametrize(
    ("name", "words"), [("SIGSEGV", "segmentation fault"), ("SIGBUS", "bus error"), ("SIGABRT", "aborted")]
)
def test_other_crashes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    _stub_binding(tmp_path, monkeypatch, _dies(name))
    result = probe()
    assert (result.ok, result.signal, result.build_is_bad) == (False, name, True)
    assert words in result.message


def test_a_probe_that_was_killed_says_nothing_against_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stub_binding(tmp_path, monkeypatch, _dies("SIGKILL"))
    result = probe()
    assert (result.ok, result.signal, result.build_is_bad) == (False, "SIGKILL", False)


def test_a_build_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stub_binding(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")
    result = probe(timeout_s=0.5)
    assert not result.ok
    assert "within 0.5 s" in result.message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ModuleNotFoundError('x', name='llama_cpp')", "llama-cpp-python is not installed"),
        ("raise OSError('libcuda.so.1:\\nno such file')", "can't be imported: libcuda.so.1: no such file"),
        ("import os\nos._exit(3)", "ended with code 3"),
    ],
)
def test_a_binding_that_cannot_be_imported_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    _stub_binding(tmp_path, monkeypatch, source)
    result = probe()
    assert not result.ok
    assert message in result.message
    assert "\n" not in result.message
    assert "-m pip install" in (result.mend or "")


def test_doctor_reports_a_crash_and_the_facts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stub_binding(tmp_path, monkeypatch, _dies("SIGILL"))
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor"])
    assert args.run(args) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("broken: ")
    assert "SIGILL" in lines[0]
    assert lines[1].startswith("run: ")
    assert any(line.startswith("versions") for line in lines)

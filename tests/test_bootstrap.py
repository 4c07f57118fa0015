"""The virtual environment that holds the binding: made, mended, and rebuilt when the build crashes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from racer_local import binding, bootstrap
from racer_local.binding import Compiler
from racer_local.errors import BindingError
from racer_local.llama.probe import ProbeResult

AMX = frozenset({"avx2", "avx512f", "amx_tile", "amx_int8"})
GCC12 = Compiler("g++", "gcc", (12, 2, 0))
MENDED = '-DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse"'

CRASH = ProbeResult(False, "crashes: illegal instruction (SIGILL)", "SIGILL", -4, "run: pip")
PASS = ProbeResult(True, "works")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CMAKE_ARGS", "CXX", "CC", "CXXFLAGS", "LLAMA_CPP_LIB_PATH"):
        monkeypatch.delenv(name, raising=False)


class Machine:
    """Runs nothing: it keeps what would be run and makes the files that the commands would make."""

    def __init__(self, venv: Path) -> None:
        self.venv, self.commands, self.environments = venv, list[str](), list[Mapping[str, str]]()
        self.probes = [PASS]
        self.failing = ""
        self.pip_works = True

    @property
    def package(self) -> Path:
        return self.venv / "lib/python3.11/site-packages/llama_cpp"

    def run(self, command: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        words = " ".join(command[1:])
        if words in ("-m pip --version", "-m ensurepip"):
            return 0 if (self.venv / "bin/python").exists() and self.pip_works else 1
        self.commands.append(words)
        self.environments.append(env or {})
        if log:
            log.write_text("a line of the build\nthe reason")
        if self.failing and self.failing in words:
            return 1
        if words.startswith("-m venv"):
            (self.venv / "bin").mkdir(parents=True, exist_ok=True)
            (self.venv / "bin/python").touch()
            self.pip_works = True
        if "llama-cpp-python" in words:
            self.install(words)
        return 0

    def install(self, content: str) -> None:
        (self.package / "lib").mkdir(parents=True, exist_ok=True)
        (self.package / "lib/libllama.so").write_text(content)
        info = self.package.parent / "llama_cpp_python-0.3.36.dist-info"
        info.mkdir(exist_ok=True)
        (info / "RECORD").touch()

    def probe(self, python: str) -> ProbeResult:
        assert python == str(self.venv / "bin/python")
        return self.probes.pop(0)

    def setup(self) -> list[str]:
        """The commands of one more `setup`."""
        self.commands.clear()
        self.environments.clear()
        bootstrap.setup(self.venv.parent, self.venv, "test")
        return self.commands


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "pyproject.toml").write_text('dependencies = ["llama-cpp-python>=0.3.36", "numpy"]')
    machine = Machine(tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "_run", machine.run)
    monkeypatch.setattr(bootstrap, "probe", machine.probe)
    monkeypatch.setattr(binding, "cpu_flags", lambda: AMX)
    for module in (binding, bootstrap):
        monkeypatch.setattr(module, "compiler", lambda: GCC12)
    return machine


def test_setup_makes_the_environment_and_builds_with_the_flags_of_this_cpu(machine: Machine) -> None:
    venv, upgrade, build, package, kernels = machine.setup()
    assert venv.startswith("-m venv --clear ")
    assert upgrade == "-m pip install --upgrade pip"
    assert build == "-m pip install -v llama-cpp-python>=0.3.36"
    assert machine.environments[2]["CMAKE_ARGS"] == MENDED
    assert machine.environments[2]["CXX"] == "g++"
    assert package == f"-m pip install -e {machine.venv.parent}[test]"
    assert "warm_up()" in kernels


def test_a_second_setup_runs_nothing(machine: Machine) -> None:
    machine.setup()
    assert machine.setup() == []


@pytest.mark.parametrize("change", ["pyproject", "build", "extras"])
def test_a_change_of_the_project_or_the_build_is_brought_up_to_date(machine: Machine, change: str) -> None:
    machine.setup()
    machine.probes = [PASS]
    if change == "pyproject":
        (machine.venv.parent / "pyproject.toml").write_text('["llama-cpp-python>=0.4"]')
        assert machine.setup()[0] == "-m pip install -v llama-cpp-python>=0.4"
    elif change == "build":
        machine.install("another build")
        assert len(machine.setup()) == 3
    else:
        machine.commands.clear()
        bootstrap.setup(machine.venv.parent, machine.venv, "")
        assert machine.commands[-2] == f"-m pip install -e {machine.venv.parent}"


def test_a_crashing_wheel_is_dropped_from_the_cache_and_built_anew(machine: Machine) -> None:
    machine.probes = [CRASH, PASS]
    remove, build = machine.setup()[-2:]
    assert remove == "-m pip cache remove llama_cpp_python"
    assert "--force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python" in build
    assert machine.environments[-1]["CMAKE_ARGS"] == MENDED
    assert machine.setup() == []


def test_a_build_that_crashes_even_when_new_is_an_error_and_not_ready(machine: Machine) -> None:
    machine.probes = [CRASH, CRASH]
    with pytest.raises(BindingError, match=r"even newly built.*GGML_NATIVE=OFF"):
        machine.setup()
    assert not (machine.venv / ".racer-ready").exists()


def test_a_probe_that_was_only_slow_does_not_cost_a_build(machine: Machine) -> None:
    machine.probes = [ProbeResult(False, "too slow", mend="try again")]
    with pytest.raises(BindingError, match=r"^too slow; try again$"):
        machine.setup()
    assert not any("cache remove" in command for command in machine.commands)


def test_a_failed_build_shows_the_last_lines_of_its_log(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.failing = "llama-cpp-python"
    with pytest.raises(BindingError, match="the lines above"):
        machine.setup()
    assert "the reason" in capsys.readouterr().err


def test_a_working_binding_is_not_built_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.setup()
    (machine.venv / ".racer-ready").unlink()
    machine.probes = [PASS]
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    # pip itself finds the requirement satisfied.
    assert machine.setup()[0] == "-m pip install -v llama-cpp-python>=0.3.36"


def test_the_users_cmake_args_are_not_answered_with_a_cached_wheel(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert "--no-cache-dir --no-binary llama-cpp-python" in machine.setup()[2]
    assert machine.environments[2]["CMAKE_ARGS"] == f"-DGGML_CUDA=on {MENDED}"


def test_an_environment_without_a_working_pip_is_made_anew(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "pyvenv.cfg").touch()
    assert "-m venv --clear" in machine.setup()[0]


def test_a_binding_whose_copy_was_interrupted_is_removed_and_installed_again(machine: Machine) -> None:
    machine.setup()
    (machine.venv / ".racer-ready").unlink()
    (machine.package.parent / "llama_cpp_python-0.3.36.dist-info" / "RECORD").unlink()
    (machine.package / "half").touch()
    machine.probes = [PASS]
    machine.setup()
    assert not (machine.package / "half").exists()
    assert (machine.package / "lib/libllama.so").exists()


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "precious").touch()
    with pytest.raises(BindingError, match="no virtual environment"):
        machine.setup()
    assert (machine.venv / "precious").exists()


def test_a_python_without_ensurepip_names_the_package_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BindingError, match="apt install python3-venv"):
        machine.setup()


def test_a_machine_without_a_compiler_is_told_what_to_install(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "compiler", lambda: Compiler("", "unknown", ()))
    with pytest.raises(BindingError, match="apt install build-essential"):
        machine.setup()


def test_an_old_python_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(BindingError, match="too old"):
        machine.setup()
    assert machine.commands == []


def test_a_long_command_says_now_and_then_that_it_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "HEARTBEAT_S", 0.2)
    script = "import time; print('[1/9] compiling', flush=True); time.sleep(0.7)"
    assert bootstrap._run([sys.executable, "-c", script], tmp_path / "log") == 0
    assert "0:00 [1/9]" in capsys.readouterr().out
    assert bootstrap._run(["no-such-command"]) == 127

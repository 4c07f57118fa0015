"""Makes the checkout's virtual environment, with a llama-cpp-python that runs on this CPU.

Standard library only, since it runs before anything is installed: python3 -m racer_local.bootstrap
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from racer_local.binding import AFRESH, NAME, UNCACHED, build_fingerprint, compiler, digest, needed_args, tool
from racer_local.errors import BindingError
from racer_local.llama.probe import probe

HEARTBEAT_S = 30.0
LOG_TAIL = 30


def _run(command: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None) -> int:
    """The exit code. What it prints goes to `log`, and a line now and then says that it is alive."""
    start = time.monotonic()
    with open(log or os.devnull, "ab") as out:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
        except OSError:
            return 127
        while True:
            try:
                return child.wait(HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                minutes, seconds = divmod(int(time.monotonic() - start), 60)
                _say(f"  {minutes}:{seconds:02} {_progress(log) if log else ''}".rstrip())


def _say(line: str) -> None:
    print(line, flush=True)


def _progress(log: Path) -> str:
    """The build's last "[37/193]"."""
    steps: list[str] = re.findall(r"^\s*(\[\d+/\d+\])", _tail(log, 500), re.M)
    return steps[-1] if steps else ""


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-lines:])


class _Venv:
    """A virtual environment and the steps that bring it up to date; each can go on after an interruption."""

    def __init__(self, root: Path, folder: Path, extras: str) -> None:
        self.root, self.folder, self.extras = root, folder.absolute(), extras
        self.python = self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        self.stamp, self.log = self.folder / ".racer-ready", self.folder / "setup.log"
        self.pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")

    def _installed(self, pattern: str) -> list[Path]:
        places = ("lib/python*/site-packages", "Lib/site-packages")
        return [path for place in places for path in self.folder.glob(f"{place}/{pattern}")]

    def state(self) -> str:
        builds = [build_fingerprint(package) for package in self._installed("llama_cpp")]
        return digest(self.pyproject, self.extras, str(self.folder), builds)

    def is_ready(self) -> bool:
        return self.python.exists() and self.stamp.exists() and self.stamp.read_text() == self.state()

    def _pip(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        if _run([str(self.python), "-m", "pip", *arguments], self.log, env) != 0:
            print(_tail(self.log, LOG_TAIL), file=sys.stderr)
            raise BindingError(f"pip {arguments[0]} failed; mend what the lines above say (all: {self.log})")

    def make(self) -> None:
        pip = [str(self.python), "-m", "pip", "--version"]
        ensure = [str(self.python), "-m", "ensurepip"]
        if _run(pip) == 0 or (_run(ensure) == 0 and _run(pip) == 0):
            return
        # --clear empties the folder, so it must be a virtual environment or empty.
        if self.folder.exists() and any(self.folder.iterdir()) and not (self.folder / "pyvenv.cfg").exists():
            raise BindingError(f"{self.folder} is no virtual environment; remove it, or pass another --venv")
        if importlib.util.find_spec("ensurepip") is None:
            raise BindingError("this Python can't make a virtual environment; run: apt install python3-venv")
        _say(f"making {self.folder}")
        if _run([sys.executable, "-m", "venv", "--clear", str(self.folder)]) != 0:
            raise BindingError(f"{sys.executable} -m venv --clear {self.folder} failed; run it to see why")
        _run([str(self.python), "-m", "pip", "install", "--upgrade", "pip"], self.log)

    def _remove_binding(self) -> None:
        for path in self._installed("llama_cpp") + self._installed("llama_cpp_python-*.dist-info"):
            shutil.rmtree(path)

    def install_binding(self) -> None:
        found = self._installed("llama_cpp_python-*.dist-info")
        # pip writes RECORD last: without it the copy was interrupted, and pip can neither use nor remove it.
        if not all((path / "RECORD").exists() for path in found):
            self._remove_binding()
            found = []
        if not found:
            _say(f"installing {NAME}; compiling it takes about ten minutes (log: {self.log})")
        # A cached wheel knows nothing of the user's CMAKE_ARGS.
        self._build(*(UNCACHED if os.environ.get("CMAKE_ARGS") and not found else ()))

    def _build(self, *options: str) -> None:
        tools = {"CC": tool("CC", "cc", "gcc", "clang"), "CXX": compiler().command}
        if not tools["CXX"] and not self._installed("llama_cpp"):
            raise BindingError("no C++ compiler found; run: apt install build-essential")
        env = {**os.environ, "CMAKE_ARGS": needed_args()}
        env.update({name: tool for name, tool in tools.items() if tool})
        requirement = re.search(rf'"({NAME}[^"]*)"', self.pyproject)
        self._pip("install", "-v", *options, requirement[1] if requirement else NAME, env=env)

    def install_package(self) -> None:
        _say("installing racer_local and what it needs")
        self._pip("install", "-e", f"{self.root}[{self.extras}]" if self.extras else str(self.root))

    def compile_kernels(self) -> None:
        """So that no first answer waits for it; what is compiled is kept on disk."""
        _say("compiling the drafting kernels")
        code = "from racer_local.kernels import warm_up; warm_up()"
        if _run([str(self.python), "-c", code], self.log) != 0:
            raise BindingError(f"the drafting kernels can't be compiled; the end of {self.log} says why")

    def prove(self) -> None:
        result = probe(str(self.python))
        if result.build_is_bad:
            _say(f"{result.message}; building it anew takes about ten minutes (log: {self.log})")
            _run([str(self.python), "-m", "pip", "cache", "remove", "llama_cpp_python"])
            self._remove_binding()
            self._build(*AFRESH)
            result = probe(str(self.python))
        if result.build_is_bad:
            portable = "CMAKE_ARGS=-DGGML_NATIVE=OFF make distclean setup"
            raise BindingError(f"{result.message}, even newly built; for a portable build run: {portable}")
        if not result.ok:
            raise BindingError(f"{result.message}; {result.mend}")


def setup(root: Path, folder: Path, extras: str = "") -> None:
    # A checkout can be set up by any Python that is at hand.
    if sys.version_info < (3, 10):  # noqa: UP036
        raise BindingError(f"Python {platform.python_version()} is too old: make setup PYTHON=python3.10")
    if not (root / "pyproject.toml").exists():
        raise BindingError("setup needs the checkout; an installed package is set up by pip")
    venv = _Venv(root, folder, extras)
    if venv.is_ready():
        return
    for step in (venv.make, venv.install_binding, venv.install_package, venv.compile_kernels, venv.prove):
        step()
    venv.stamp.write_text(venv.state())
    _say(f"{venv.folder} is ready")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="racer_local.bootstrap", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--extras", default="", help="optional dependencies of pyproject.toml, by comma")
    args = parser.parse_args(argv)
    try:
        setup(Path(__file__).resolve().parent.parent, args.venv, args.extras)
    except BindingError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

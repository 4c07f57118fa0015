"""How llama-cpp-python must be built to run on this CPU. Standard library only."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from racer_local.errors import BindingError

NAME = "llama-cpp-python"

# gcc's _tile_loadconfig declares 8 of the 64 bytes that it reads (mended in 12.4, 13.3 and 14), so either of
# its two dead-store passes drops the other 56 and the first AMX instruction dies. These flags keep AMX.
AMX_FLAGS = ("-fno-tree-dse", "-fno-dse")

# pip's wheel cache doesn't know with which flags a wheel was built: a crashing one must not come back.
UNCACHED = ("--no-cache-dir", "--no-binary", NAME)
AFRESH = ("--force-reinstall", "--no-deps", *UNCACHED)


_CLANG = ("__clang_major__", "__clang_minor__", "__clang_patchlevel__")
_GCC = ("__GNUC__", "__GNUC_MINOR__", "__GNUC_PATCHLEVEL__")


class Compiler(NamedTuple):
    command: str  # empty where none was found
    kind: str  # gcc, clang or unknown
    version: tuple[int, ...]


def _first_cpu() -> dict[str, str]:
    """The first block of /proc/cpuinfo; all of them take milliseconds on a large server."""
    facts: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in takewhile(str.strip, lines):
            key, _, value = line.partition(":")
            facts[key.strip().lower()] = value.strip()
    return facts


def _sysctl(*names: str) -> str:
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["sysctl", *names], capture_output=True, text=True).stdout


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets in the system's spelling, lower case; empty where they can't be told."""
    cpu = _first_cpu()
    flags = f"{cpu.get('flags', '')} {cpu.get('features', '')}".split()
    flags += re.findall(r"^hw\.optional\.(?:arm\.)?(\S+): 1$", _sysctl("hw.optional"), re.M)
    return frozenset(flag.lower() for flag in flags)


def cpu_model() -> str:
    cpu = _first_cpu()
    arm = " ".join(cpu[key] for key in ("cpu implementer", "cpu part", "cpu revision") if key in cpu)
    mac = _sysctl("-n", "machdep.cpu.brand_string").strip()
    return cpu.get("model name") or mac or arm or platform.processor() or platform.machine()


def _found(command: str | None) -> str:
    """The command without its flags where it can be run, else nothing."""
    command = re.split(r"\s+-", command or "")[0]
    return command if command and shutil.which(shlex.split(command)[0]) else ""


def tool(variable: str, *usual: str) -> str:
    """The build's compiler: $CC or $CXX, else the one that Python was built with, else a usual one."""
    if chosen := os.environ.get(variable):
        return _found(chosen)
    return next(filter(None, map(_found, (sysconfig.get_config_var(variable), *usual))), "")


def compiler() -> Compiler:
    chosen = _defines(os.environ.get("CMAKE_ARGS", "")).get("CMAKE_CXX_COMPILER")
    command = _found(chosen) if chosen else tool("CXX", "c++", "g++", "clang++")
    if not command:
        return Compiler("", "unknown", ())
    macros = [*shlex.split(command), "-dM", "-E", "-x", "c++", "-"]
    shown = subprocess.run(macros, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    known = {name: int(value) for name, value in re.findall(r"^#define (__\w+__) (\d+)$", shown, re.M)}
    clang = [known[name] for name in _CLANG if name in known]
    gcc = [known[name] for name in _GCC if name in known]
    kind = "clang" if clang else "gcc" if gcc else "unknown"  # clang says that it is gcc 4 as well
    return Compiler(command, kind, tuple(clang or gcc))


def _drops_tile_stores(compiler: Compiler) -> bool:
    return compiler.kind == "gcc" and (compiler.version < (12, 4) or (13,) <= compiler.version < (13, 3))


def _split(cmake_args: str) -> list[str]:
    try:
        return shlex.split(re.sub(r"(^|\s)-D\s+", r"\1-D", cmake_args))
    except ValueError as error:
        raise BindingError(f"CMAKE_ARGS can't be read ({error}); close its quotes: {cmake_args}") from None


def _defines(cmake_args: str) -> dict[str, str]:
    return dict(re.findall(r"^-D(\w+)(?::\w+)?=(.*)$", "\n".join(_split(cmake_args)), re.M))


def _quote(argument: str) -> str:
    name, equals, value = argument.partition("=")
    if not equals or shlex.quote(value) == value:
        return shlex.quote(argument)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def cmake_args(cpu_flags: frozenset[str], compiler: Compiler, user: str = "", cxxflags: str = "") -> str:
    """The CMAKE_ARGS of a build for this CPU: the user's own, and what the compiler needs besides.

    cxxflags: the user's $CXXFLAGS, which CMake drops once it is given CMAKE_CXX_FLAGS.
    """
    if "amx_tile" not in cpu_flags or not _drops_tile_stores(compiler):
        return user
    flags = _defines(user).get("CMAKE_CXX_FLAGS", cxxflags).split()
    flags += [flag for flag in AMX_FLAGS if flag not in flags]
    others = [word for word in _split(user) if not re.match(r"-DCMAKE_CXX_FLAGS(:\w+)?=", word)]
    return " ".join(map(_quote, [*others, f"-DCMAKE_CXX_FLAGS={' '.join(flags)}"]))


def needed_args() -> str:
    environ = os.environ
    return cmake_args(cpu_flags(), compiler(), environ.get("CMAKE_ARGS", ""), environ.get("CXXFLAGS", ""))


def pip_command(python: str, *options: str) -> str:
    """What to type to install the binding; with AFRESH, to build it anew."""
    command = shlex.join([python, "-m", "pip", "install", *options, NAME])
    args = needed_args()
    return f"CMAKE_ARGS={shlex.quote(args)} {command}" if args else command


def build_fingerprint(package: Path) -> str:
    """Changes with the binding's version and libraries, and with the CPU. Imports nothing of it."""
    source = ""
    with suppress(OSError):
        source = (package / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"', source, re.M)
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or package / "lib")
    files = sorted(file for end in ("so", "dylib", "dll") for file in folder.glob(f"*.{end}*"))
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return digest(version and version[1], cpu_model(), sorted(cpu_flags()), stats)


def digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()

"""`racer-local doctor`: whether the build runs on this CPU, what mends it if not, and what a report needs."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from racer_local import __version__, binding
from racer_local.config import cache_home, default_threads, usable_cpus
from racer_local.llama.probe import ProbeResult, probe
from racer_local.models import readable_size

FEATURES = ("avx", "amx", "f16c", "fma", "bmi2", "neon", "asimd", "i8mm", "sve", "bf16")
PACKAGES = ("llama-cpp-python", "numpy", "numba")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    what = "check that llama.cpp runs on this CPU, and say what mends it"
    parser = commands.add_parser("doctor", help=what, description=what)
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    result = probe()
    facts = _facts(result)
    if args.json:
        verdict = {"ok": result.ok, "message": result.message, "signal": result.signal, "mend": result.mend}
        print(json.dumps({**verdict, **facts}, indent=2))
    else:
        print(f"{'ok' if result.ok else 'broken'}: {result.message}")
        if result.mend:
            print(result.mend)
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<15} {_text(value)}")
    return 0 if result.ok else 1


def _facts(result: ProbeResult) -> dict[str, Any]:
    compiler, home = binding.compiler(), cache_home()
    names = {flag.removeprefix("feat_") for flag in binding.cpu_flags()}
    return {
        "cpu": binding.cpu_model(),
        "cpu_features": sorted(name for name in names if name.startswith(FEATURES)),
        "cpus": usable_cpus(),
        "threads": default_threads(),
        "compiler": " ".join((compiler.command, compiler.kind, ".".join(map(str, compiler.version)))).strip(),
        "cmake_args": binding.needed_args(),
        "llama_cpp": result.info.get("system_info"),
        "gpu_backend": result.info.get("gpu_offload"),
        "versions": _versions(),
        "folder": str(home),
        "folder_used": readable_size(_used(home)),
        "folder_free": readable_size(_free(home)),
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(version)}" for name, version in value.items())
    if isinstance(value, list):
        return " ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value) or "none"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"racer_local": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _free(folder: Path) -> int:
    """Room on the disk where the folder lies, or will lie once it is made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free

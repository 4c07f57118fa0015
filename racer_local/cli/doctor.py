"""`racer-local doctor`: is all in order to run a model here, what mends it if not, and what a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from racer_local import __version__, binding, machine, models, tuned
from racer_local.cli.options import add_model, context_from_args, model_from_args
from racer_local.cli.parsing import add_command
from racer_local.config import ContextConfig, DraftConfig, ModelConfig, cache_home, default_threads, usable_cpus
from racer_local.errors import RacerError
from racer_local.llama.probe import ProbeResult, probe
from racer_local.models import readable_size

DESCRIPTION = """\
Check that llama.cpp runs on this CPU, how many cores and how much memory are free, and with -m whether a model fits
into them before it is loaded. Each finding says what mends it; the whole text can be pasted into a bug report."""
EXAMPLES = (
    ("racer-local doctor", "this machine and this installation"),
    ("racer-local doctor -m my-model.gguf --ctx 32768", "also: does this model fit with this context?"),
    ("racer-local doctor --json", "for machines"),
)
FEATURES = ("avx", "amx", "f16c", "fma", "bmi2", "neon", "asimd", "i8mm", "sve", "bf16")
PACKAGES = ("llama-cpp-python", "numpy", "numba", "prompt_toolkit", "rich", "fastapi", "uvicorn")
LISTEN_S = 0.5
"""How long other programs are watched."""
LITTLE = 1_000_000_000
"""Bytes of memory or disk below which something is said."""


@dataclass(frozen=True)
class Finding:
    level: str
    """ok; warning: slower or less than it could be; broken: it will not work."""
    what: str
    mend: str | None = None
    """What to do about it, mostly a command."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    what = "check this machine, this installation and a model, and say what mends what is wrong"
    parser = add_command(commands, "doctor", help=what, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="for machines")
    add_model(parser, ContextConfig, required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    watch = machine.CpuWatch()
    path, trouble = None, None
    if args.model:
        try:
            path = models.find(args.model)
        except RacerError as error:
            trouble = Finding("broken", str(error))
    context, model = context_from_args(args, path), model_from_args(args)
    time.sleep(LISTEN_S)
    busy, slow = watch.others(), watch.warning(context.n_threads)
    result = probe()
    facts = _facts(result, busy)
    findings = [_of_probe(result), *([trouble] if trouble else [])]
    if path and result.ok:
        found, facts["model"] = _of_model(path, context, model)
        findings.append(found)
    findings += [*([Finding("warning", slow)] if slow else []), *_of_machine(context), *_of_tuned()]
    ok = all(finding.level != "broken" for finding in findings)
    if args.json:
        first = {"ok": ok, "message": result.message, "signal": result.signal, "mend": result.mend}
        print(json.dumps({**first, "findings": [asdict(finding) for finding in findings], **facts}, indent=2))
    else:
        for finding in findings:
            print(f"{finding.level}: {finding.what}")
            if finding.mend:
                print(finding.mend)
        print()
        for name, value in facts.items():
            print(f"{name.replace('_', ' '):<15} {_text(value)}")
    return 0 if ok else 1


def _of_probe(result: ProbeResult) -> Finding:
    return Finding("ok" if result.ok else "broken", result.message, result.mend)


def _of_model(path: Path, context: ContextConfig, config: ModelConfig) -> tuple[Finding, dict[str, Any]]:
    """Whether the model and its context fit into memory, and what is known of it."""
    from racer_local.llama.model import Model
    from racer_local.llama.vocabulary import Vocabulary, check_file, weight_bytes

    try:
        check_file(path)
        with Vocabulary(path) as vocabulary:
            trained = vocabulary.trained_on
            n_ctx = context.n_ctx or min(ContextConfig.DEFAULT_CTX, trained or ContextConfig.DEFAULT_CTX)
            weights, kv = weight_bytes(path), vocabulary.kv_bytes(n_ctx, context.kv_type)
            rows = 4 * vocabulary.n_vocab * DraftConfig().nodes
            facts = {
                "file": _short(path),
                "architecture": vocabulary.metadata("general.architecture"),
                "trained_on": trained,
                "n_vocab": vocabulary.n_vocab,
                "n_ctx": n_ctx,
                "weights": readable_size(weights),
                "context": readable_size(kv),
                "logits": readable_size(rows),
            }
    except RacerError as error:
        return Finding("broken", str(error)), {"file": _short(path)}
    needed, free = weights + kv + rows, machine.free_memory()
    what = f"{path.name} with {n_ctx} tokens takes about {readable_size(needed)}; {readable_size(free)} are free"
    if needed <= free or Model.would_offload(config):
        return Finding("ok", what), facts
    room = int((free - weights - rows) / max(1.0, kv / n_ctx))
    mend = f"use --ctx {room // 256 * 256}" if room >= 512 else "take a smaller quant or model"
    return Finding("broken", what, f"{mend}, or close other programs"), facts


def _of_machine(context: ContextConfig) -> Iterator[Finding]:
    if context.n_threads > usable_cpus():
        what = f"{context.n_threads} threads on {usable_cpus()} usable CPUs wait for each other"
        yield Finding("warning", what, f"use --threads {default_threads()}")
    if machine.free_memory() < LITTLE:
        what = f"{readable_size(machine.free_memory())} of memory are free"
        yield Finding("warning", what, "close other programs before a large model is loaded")
    if (free := _free(cache_home())) < LITTLE:
        what = f"{readable_size(free)} are free on the disk of {_short(cache_home())}"
        yield Finding("warning", what, "make room, or set RACER_LOCAL_HOME to a folder on another disk")
    if not os.access(_there(cache_home()), os.W_OK):
        what = f"{_short(cache_home())} can't be written, so every start measures anew"
        yield Finding("warning", what, "set RACER_LOCAL_HOME to a folder that is yours")
    if not util.find_spec("fastapi"):
        yield Finding("ok", "the server is not installed", "if you want it: pip install 'racer-local[server]'")


def _of_tuned() -> Iterator[Finding]:
    for each in tuned.everything():
        if each.in_force:
            settings = ", ".join(f"{name} {value}" for name, value in each.settings.items())
            what = f"{Path(each.model).name} runs with what was found best for it: {settings}"
            yield Finding("ok", what, f"undo: racer-local tune -m {_short(Path(each.model))} --reset")
        elif Path(each.model).is_file():
            what = f"what was found best for {Path(each.model).name} was for another state of it, this CPU or the build"
            yield Finding("warning", what, f"run: racer-local tune -m {_short(Path(each.model))} --apply")


def _facts(result: ProbeResult, busy: float | None) -> dict[str, Any]:
    compiler, home = binding.compiler(), cache_home()
    names = {flag.removeprefix("feat_") for flag in binding.cpu_flags()}
    return {
        "system": platform.platform(),
        "cpu": binding.cpu_model(),
        "cpu_features": sorted(name for name in names if name.startswith(FEATURES)),
        "cpus": usable_cpus(),
        "cpus_busy": None if busy is None else round(busy, 1),
        "threads": default_threads(),
        "memory": readable_size(machine.total_memory()),
        "memory_free": readable_size(machine.free_memory()),
        "compiler": " ".join((compiler.command, compiler.kind, ".".join(map(str, compiler.version)))).strip(),
        "cmake_args": binding.needed_args(),
        "llama_cpp": result.info.get("system_info"),
        "gpu_backend": result.info.get("gpu_offload"),
        "versions": _versions(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _tells(name)},
        "folder": _short(home),
        "folder_used": readable_size(_used(home)),
        "folder_free": readable_size(_free(home)),
        "models": [entry.name for entry in models.load_registry().values() if entry.fetched],
    }


def _tells(name: str) -> bool:
    """Whether an environment variable has a say in what happens, and may be told."""
    return name.startswith(("RACER_LOCAL_", "OMP_", "GGML_", "LLAMA_", "CUDA_VISIBLE")) and "KEY" not in name


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(version)}" for name, version in value.items()) or "none"
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


def _short(path: Path) -> str:
    """For a text that is shown to others: the user's folder as ~."""
    text, home = str(path), str(Path.home())
    return f"~{text[len(home) :]}" if text.startswith(home + os.sep) else text


def _used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _free(folder: Path) -> int:
    """Room on the disk where the folder lies, or will lie once it is made."""
    return shutil.disk_usage(_there(folder)).free


def _there(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder

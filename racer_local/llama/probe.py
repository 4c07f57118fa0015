"""Does this build of llama.cpp run on this CPU? Asked in a child process, since the answer may be a crash.

`python -m racer_local.llama.probe [MODEL]` is the child: it decodes a little and prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from racer_local import __version__, binding
from racer_local.config import cache_home, default_threads
from racer_local.errors import BindingError

MODEL = Path(__file__).with_name("probe.gguf")
PROMPT = 40  # AMX and the 16-row kernels start at 16 or 32 rows
REMEMBERED = 16

# The child's folder must not shadow a module, and this package may not be installed for that Python.
_ROOT = str(Path(__file__).resolve().parent.parent.parent)
_CHILD = f"""
import sys
sys.path = [*filter(None, sys.path), {_ROOT!r}]
from racer_local.llama.probe import main
main()
"""


@dataclass(frozen=True)
class ProbeResult:
    ok: bool
    message: str
    """One line."""
    signal: str | None = None
    """Name of the signal that ended the child."""
    exit_code: int | None = None
    mend: str | None = None
    """What to do about it, mostly a command."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the child told: versions, system_info, gpu_offload."""

    @property
    def build_is_bad(self) -> bool:
        """It crashed by itself; nobody ended it."""
        return self.signal not in (None, "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")


# --- the parent ---


def probe(python: str = sys.executable, timeout_s: float = 60, model: Path = MODEL) -> ProbeResult:
    command = [python, "-c", _CHILD, str(model)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # else an abort starts a debugger
    try:
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=env)
    except subprocess.TimeoutExpired:
        message = f"llama-cpp-python did not decode 41 tokens within {timeout_s:g} s"
        return ProbeResult(False, message, mend="end other busy programs and try again")
    except OSError as error:
        message = f"the probe of llama-cpp-python can't be started ({error.strerror}: {python})"
        return ProbeResult(False, message, mend="set RACER_LOCAL_SKIP_PROBE=1 to go without it")
    if name := _signal_name(child.returncode):
        return _crash(name, child.returncode, python)
    return _told(child, python)


def _signal_name(exit_code: int) -> str | None:
    windows = {0xC000001D: "SIGILL", 0xC0000005: "SIGSEGV", 0x80000003: "SIGABRT"}
    if exit_code >= 0:
        return windows.get(exit_code)
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _crash(name: str, exit_code: int, python: str) -> ProbeResult:
    words = {"SIGILL": "illegal instruction", "SIGSEGV": "segmentation fault", "SIGBUS": "bus error"}
    words |= {"SIGABRT": "aborted", "SIGFPE": "arithmetic error"}
    result = ProbeResult(False, f"the probe of llama-cpp-python was ended by {name}", name, exit_code)
    if not result.build_is_bad:
        return replace(result, mend="free some memory, if that was short, and try again")
    message = f"this build of llama-cpp-python crashes on this CPU: {words.get(name, 'ended')} ({name})"
    return replace(result, message=message, mend=_rebuild(python))


def _told(child: subprocess.CompletedProcess[bytes], python: str) -> ProbeResult:
    try:
        info = json.loads(child.stdout.decode(errors="replace").splitlines()[-1])
        ok = bool(info.pop("ok"))
    except (IndexError, KeyError, ValueError, AttributeError):
        last = (child.stderr.decode(errors="replace").strip().splitlines() or ["nothing printed"])[-1]
        message = f"the probe of llama-cpp-python ended with code {child.returncode}: {last}"
        return ProbeResult(False, message, exit_code=child.returncode, mend=_rebuild(python))
    if ok:
        return ProbeResult(True, f"llama-cpp-python {info['llama_cpp_python']} works", exit_code=0, info=info)
    missing = info.get("missing")
    mend = f"run: {binding.pip_command(python)}" if missing else _rebuild(python)
    return ProbeResult(False, info["message"], exit_code=child.returncode, mend=mend, info=info)


def _rebuild(python: str) -> str:
    return f"run: {binding.pip_command(python, *binding.AFRESH)}"


def ensure_build_works() -> None:
    """Raises BindingError where the build crashes. A build that passed once is not probed again."""
    if os.environ.get("RACER_LOCAL_SKIP_PROBE", "") not in ("", "0"):
        return
    spec = importlib.util.find_spec("llama_cpp")
    places = (spec and spec.submodule_search_locations) or [""]
    build = f"{__version__} {binding.build_fingerprint(Path(places[0]))}"
    if places[0] and build in _passed():
        return
    result = probe()
    if not result.ok:
        raise BindingError(f"{result.message}; {result.mend}")
    _remember(build)


def _memory() -> Path:
    return cache_home() / "probe.json"


def _passed() -> list[str]:
    try:
        builds = json.loads(_memory().read_text(encoding="utf-8"))["passed"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [build for build in builds if isinstance(build, str)] if isinstance(builds, list) else []


def _remember(build: str) -> None:
    """A cache folder that can't be written costs a probe at each start, no more."""
    text = json.dumps({"passed": [*_passed(), build][-REMEMBERED:]})
    scratch = _memory().with_suffix(f".{os.getpid()}")
    try:
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(_memory())
    except OSError:
        pass


# --- the child ---


def main() -> None:
    report = _report(sys.argv[1] if len(sys.argv) > 1 else str(MODEL))
    print(json.dumps(report), flush=True)
    # Not through the libraries' destructors: they may log into a callback that is gone by then.
    os._exit(0 if report["ok"] else 1)


def _report(model: str) -> dict[str, Any]:
    try:
        import llama_cpp
    except ModuleNotFoundError as error:
        whose = "" if error.name == "llama_cpp" else f" ({error.name}, which it needs)"
        return {"ok": False, "missing": True, "message": f"llama-cpp-python is not installed{whose}"}
    except Exception as error:
        return {"ok": False, "message": f"llama-cpp-python can't be imported: {' '.join(str(error).split())}"}
    log: list[str] = []
    quiet = llama_cpp.llama_log_callback(lambda level, text, _: log.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    if trouble := next(filter(None, (_decode(model, attention) for attention in (0, 1))), None):
        told = " ".join("".join(log[-3:]).split())
        return {"ok": False, "message": f"llama.cpp can't run {model}: {trouble} ({told})"}
    return {
        "ok": True,
        "llama_cpp_python": llama_cpp.__version__,
        "python": platform.python_version(),
        "system_info": llama_cpp.llama_print_system_info().decode().strip(),
        "gpu_offload": bool(llama_cpp.llama_supports_gpu_offload()),
    }


def _decode(path: str, flash_attention: int) -> str | None:
    """Decodes a prompt and one token more. What went wrong, or None."""
    import llama_cpp

    loading = llama_cpp.llama_model_default_params()
    loading.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), loading)
    if not model:
        return "it can't be loaded"
    opening = llama_cpp.llama_context_default_params()
    opening.n_ctx = opening.n_batch = opening.n_ubatch = 256
    opening.n_threads = opening.n_threads_batch = min(2, default_threads())
    opening.flash_attn_type = flash_attention
    opening.offload_kqv = opening.op_offload = False
    context = llama_cpp.llama_init_from_model(model, opening)
    if not context:
        return "no context can be opened"
    codes = [_forward(context, count) for count in (PROMPT, 1)]
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    total = sum(llama_cpp.llama_get_logits_ith(context, -1)[:n_vocab])
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    if any(codes):
        return f"llama_decode returned {codes}"
    return None if abs(total) < float("inf") else "its logits are not finite numbers"


def _forward(context: Any, count: int) -> int:
    import llama_cpp

    tokens = (llama_cpp.llama_token * count)(*range(3, 3 + count))
    return int(llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)))


if __name__ == "__main__":
    main()

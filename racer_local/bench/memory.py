"""Peak memory of an answer, plain and drafted, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from racer_local.errors import ConfigError

PROMPT = "Tell me about rivers. " * 400
LOAD_KERNELS = "from racer_local.kernels import warm_up; warm_up('topk', 'growth', 'drift')"


def peak_mebibytes(arguments: Sequence[str]) -> float:
    """Peak resident memory of a Python process, in MiB (ru_maxrss of the child)."""
    child = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise ConfigError(f"the measured process ended with code {child.returncode}; mend what it says above")
    return usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def measure(model: str, drafts: Sequence[str], n_ctx: int, max_tokens: int) -> dict[str, Any]:
    """Peaks of plain decoding and of each drafter, what each has above plain, and numba's share of that, in MiB."""
    generate = ["-m", "racer_local", "generate", "-m", model, "-p", PROMPT, "--ctx", str(n_ctx)]
    generate += ["--max-tokens", str(max_tokens), "--draft"]
    peaks = {draft: peak_mebibytes([*generate, draft]) for draft in ("none", *drafts)}
    numba = peak_mebibytes(["-c", LOAD_KERNELS]) - peak_mebibytes(["-c", "import numpy"])
    return {
        "n_ctx": n_ctx,
        "peak_mib": {draft: round(peak, 1) for draft, peak in peaks.items()},
        "above_plain_mib": {draft: round(peaks[draft] - peaks["none"], 1) for draft in drafts},
        "of_it_numba_mib": round(numba, 1),
    }

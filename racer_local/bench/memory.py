"""Peak memory of an answer, plain and drafted, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

PROMPT = "Tell me about rivers. " * 8


def peak_mebibytes(model: str, draft: str, n_ctx: int, max_tokens: int) -> float:
    """Peak resident memory of `racer-local generate`, in MiB (ru_maxrss of the child)."""
    command = [sys.executable, "-m", "racer_local", "generate", "-m", model, "-p", PROMPT, "--draft", draft]
    command += ["--ctx", str(n_ctx), "--max-tokens", str(max_tokens)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {child.returncode}")
    return usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def measure(model: str, drafts: list[str], n_ctx: int, max_tokens: int) -> dict[str, Any]:
    """Peaks of plain decoding and of each drafter, and the difference, in MiB."""
    plain = peak_mebibytes(model, "none", n_ctx, max_tokens)
    peaks = {draft: peak_mebibytes(model, draft, n_ctx, max_tokens) for draft in drafts}
    return {
        "n_ctx": n_ctx,
        "peak_mib": {"none": round(plain, 1)} | {draft: round(peak, 1) for draft, peak in peaks.items()},
        "above_plain_mib": {draft: round(peak - plain, 1) for draft, peak in peaks.items()},
    }

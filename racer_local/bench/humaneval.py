"""HumanEval: is a program that a model wrote right? Its tests run in a child that can do little else.

The child has limits of time, memory and file size, an empty environment and folder, no network (a namespace without
one where the system lends it, and no sockets in any case), and may start no program. That keeps in check what a model
writes by accident; it is no prison for what is written to break out.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from racer_local.bench.data import Check

SECONDS = 10
MEMORY_BYTES = 1 << 30
CHILD = Path(__file__).with_name("sandbox.py")


def passes(check: Check, answer: str, seconds: float = SECONDS) -> bool:
    """Whether the program in a chat's answer passes the tests."""
    passed = secrets.token_hex(16)
    source = f"{program(check, answer)}\n\n{check.test}\n\ncheck({check.entry_point})\n"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", str(CHILD), str(MEMORY_BYTES), str(int(seconds) + 1), passed]
        try:
            child = subprocess.run(
                command,
                input=source.encode("utf-8", "replace"),
                capture_output=True,
                cwd=folder,
                env={},
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return False
    return child.stdout.endswith(passed.encode())


def program(check: Check, answer: str) -> str:
    """The program in an answer: the first block of code that defines the function, behind the prompt's own imports.

    A block without it is taken for the function's body, text without any block for the whole program.
    """
    blocks: list[str] = re.findall(r"```[^\n]*\n(.*?)(?:```|\Z)", answer, re.S) or [answer]
    defines = re.compile(rf"^def {re.escape(check.entry_point)}\b", re.M)
    head = check.prompt[: check.prompt.rfind(f"def {check.entry_point}")]
    for block in blocks:
        if defines.search(block):
            return head + block
    return check.prompt + blocks[0]

"""Programs that a model wrote, tested in a child: what passes, and what a child may not do."""

from __future__ import annotations

import socket
import sys
from time import perf_counter

import pytest

from racer_local.bench.data import Check
from racer_local.bench.humaneval import passes, program

CHECK = Check(
    'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """ Their sum.\n    """\n',
    "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "total",
)
RIGHT = "def total(numbers: List[int]) -> int:\n    return sum(numbers)\n"


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        f"Here it is:\n```python\n{RIGHT}```\nIt adds them.",
        f"```\n{RIGHT}",
        f"```python\nprint('an example')\n```\nthen\n```python\n{RIGHT}```",
        "```python\n    return sum(numbers)\n```",
        "    return sum(numbers)\n",
        f"```python\nimport math\n\n{RIGHT}\nprint(total([1]))\n```",
    ],
)
def test_a_right_program_passes_however_it_is_wrapped(answer):
    assert passes(CHECK, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I can't.",
        RIGHT.replace("sum(numbers)", "0"),
        RIGHT.replace("sum(numbers)", "sum(numbers"),
        f"{RIGHT}\nraise SystemExit(0)",
        f"import os\n{RIGHT}\nos._exit(0)",
        f"import sys\n{RIGHT}\nsys.exit()",
    ],
)
def test_a_wrong_one_and_one_that_only_ends_well_do_not(answer):
    assert not passes(CHECK, answer)


def test_a_program_that_does_not_end_is_ended():
    started = perf_counter()
    assert not passes(CHECK, "def total(numbers):\n    while True: pass", seconds=0.5)
    assert not passes(CHECK, "import time\ndef total(numbers):\n    time.sleep(60)", seconds=0.5)
    assert perf_counter() - started < 5


def does(statement):
    """Whether a program that does so passes."""
    return passes(CHECK, f"{statement}\n{RIGHT}")


def test_a_program_gets_neither_memory_nor_files_nor_processes_nor_the_network(tmp_path):
    assert does("bytearray(1 << 20)")
    if sys.platform == "linux":
        assert not does("bytearray(2 << 30)")
    target = tmp_path / "written"
    assert not does(f"open({str(target)!r}, 'w').write('x')")
    assert not does(f"import pathlib\npathlib.Path({str(target)!r}).touch()")
    assert not target.exists()
    kept = tmp_path / "kept"
    kept.write_text("x")
    assert not does(f"import os\nos.remove({str(kept)!r})")
    assert not does(f"import shutil\nshutil.rmtree({str(tmp_path)!r})")
    assert kept.exists()
    assert not does("import subprocess\nsubprocess.run(['true'])")
    assert not does("import os\nos.system('true')")
    assert not does("import os\nos.fork()")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        assert not does(f"import socket\nsocket.create_connection({address!r})")


def test_a_program_sees_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert does("import os\nassert 'HF_TOKEN' not in os.environ")


def test_the_program_is_the_block_that_defines_the_function_behind_the_prompts_imports():
    assert program(CHECK, f"```python\nx = 1\n```\n```python\n{RIGHT}```") == "from typing import List\n\n\n" + RIGHT
    assert program(CHECK, "    return 0") == CHECK.prompt + "    return 0"

"""A large vocabulary and a long context: memory grows with the nodes of a tree, not with the context."""

from __future__ import annotations

import subprocess
import sys

import pytest

from racer_local.errors import DownloadError
from racer_local.models import fetch

OPEN_AND_ANSWER = """
import sys
from {module} import Llama
llm = Llama(sys.argv[1], n_ctx=32768, n_threads=2, n_threads_batch=2, verbose={verbose})
assert llm.n_ctx() == 32768
print(llm("The river runs through the valley and", max_tokens=8, temperature=0)["usage"]["completion_tokens"])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) // 1024)
"""
VOCABULARY, NODES = 262_144, 64
ROWS = VOCABULARY * NODES * 4 / (1 << 20)


@pytest.fixture(scope="module")
def gemma_path():
    try:
        return fetch("gemma3-270m")
    except DownloadError as error:
        pytest.skip(f"Gemma 3 270M can't be fetched here: {error}")


def opened(path, module, verbose=False):
    """(tokens of an answer, peak resident MiB) of a process of its own, and what it prints on stderr."""
    code = OPEN_AND_ANSWER.format(module=module, verbose=verbose)
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    return *map(int, child.stdout.split()[-2:]), child.stderr


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_context_times_vocabulary(gemma_path):
    """All rows of this context would be 32 GiB; those of a tree are there twice, in llama.cpp's compute buffer too."""
    tokens, parent, _ = opened(gemma_path, "llama_cpp")
    ours_tokens, ours, said = opened(gemma_path, "racer_local", verbose=True)
    assert (tokens, ours_tokens) == (8, 8)
    assert ours - parent < 2 * ROWS + 260  # what is learned, numba and compiled kernels
    assert "racer_local: drafting takes" in said

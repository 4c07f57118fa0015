"""What an index costs: sorting, memory while building, disk, opening, and a lookup; by the number of its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from racer_local.corpus.corpora import Corpora
from racer_local.corpus.index import create
from racer_local.corpus.sorting import sort_positions
from racer_local.corpus.store import File, Part
from racer_local.errors import ConfigError
from racer_local.kernels import suffixes
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.text import VocabularyId
from racer_local.tree import Int32s

VOCABULARY = VocabularyId("bench", 50_000, "bench.gguf")
PHRASE = 12
FILE_TOKENS = 4000
LOOKUPS = 20_000
CHUNK = 1 << 20


def synthetic_text(rng: np.random.Generator, n: int, n_vocab: int = VOCABULARY.n_vocab) -> Int32s:
    """[n] tokens of phrases, the common ones said often, every tenth token another one; a BREAK behind each file."""
    phrases = (rng.zipf(1.2, (max(1, n // (4 * PHRASE)), PHRASE)) % n_vocab).astype(np.int32)
    text = np.empty(n, np.int32)
    for start in range(0, n, CHUNK):
        count = min(CHUNK, n - start)
        chosen = rng.zipf(1.1, -(-count // PHRASE)) % len(phrases)
        part = phrases[chosen].reshape(-1)[:count].copy()
        noise = rng.random(count) < 0.1
        part[noise] = rng.zipf(1.2, int(noise.sum())) % n_vocab
        text[start : start + count] = part
    text[FILE_TOKENS - 1 :: FILE_TOKENS] = text[-1] = BREAK
    return text


def measure(n: int, folder: Path | None = None) -> dict[str, Any]:
    """Build and use an index of n tokens, each in a process of its own. `folder`: where it lies for that time."""
    with TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "bench.index"
        built = _in_a_process("build", path, n)
        result = {"tokens": n, **built, "disk_bytes_a_token": round(path.stat().st_size / n, 3)}
        return {**result, **_in_a_process("use", path, n)}


def _in_a_process(what: str, path: Path, n: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "racer_local.bench.corpus", what, str(path), str(n)]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if child.returncode:
        raise ConfigError(f"the measured process ended with code {child.returncode}; mend what it says above")
    return dict(json.loads(child.stdout))


def build(path: Path, n: int) -> dict[str, Any]:
    """Sorting alone in tokens a second, and the growth of peak memory while an index is written."""
    suffixes.warm_up()
    spool = path.with_suffix(".spool")
    text = synthetic_text(np.random.default_rng(0), n)
    text.tofile(spool)
    del text
    text = np.memmap(spool, np.int32, "r")
    sort_positions(text[:1000])
    before = _reset_peak()
    started = perf_counter()
    sort_positions(text)
    seconds = perf_counter() - started
    sizes = np.diff(np.flatnonzero(text == BREAK), prepend=-1)
    part = Part(text, [File(f"file {i}", 4 * int(size), 0, int(size)) for i, size in enumerate(sizes)])
    started = perf_counter()
    create(path, VOCABULARY, part)
    whole = perf_counter() - started
    return {
        "sorted_tokens_a_second": round(n / seconds),
        "written_tokens_a_second": round(n / whole),
        "building_bytes_a_token": round((_peak() - before) / n, 2),
    }


def use(path: Path, n: int) -> dict[str, Any]:
    """Opening; lookups of contexts from the text, half of them with another token in them; memory for all that."""
    suffixes.warm_up()
    path.read_bytes()  # warm: in the system's cache, not in this process
    rng, found = np.random.default_rng(1), suffixes.new_found()
    text = np.memmap(path.with_suffix(".spool"), np.int32, "r")
    contexts = np.stack([text[at : at + CONTEXT] for at in rng.integers(max(1, n - CONTEXT), size=LOOKUPS)])
    other = rng.random(LOOKUPS) < 0.5
    contexts[other, CONTEXT - 1 - rng.integers(8, size=int(other.sum()))] = rng.integers(100, size=int(other.sum()))
    del text
    before = _reset_peak()
    started = perf_counter()
    corpora = Corpora([path], VOCABULARY)
    opening = perf_counter() - started
    times, matches = np.empty(LOOKUPS), 0
    for i, context in enumerate(contexts):
        suffixes.wake(corpora.index)
        started = perf_counter()
        matches += suffixes.find(corpora.index, context, 2, 0, found)
        times[i] = 1e6 * (perf_counter() - started)
    return {
        "opened_ms": round(1e3 * opening, 2),
        "lookup_us": {"median": round(float(np.median(times)), 1), "p99": round(float(np.quantile(times, 0.99)), 1)},
        "matches_a_lookup": round(matches / LOOKUPS, 1),
        "memory_growth_mb": round((_peak() - before) / 1e6, 1),
    }


def _reset_peak() -> int:
    """Make the peak of resident memory what it is now, where the system can; returns it in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1 << 10)


if __name__ == "__main__":
    what, path, n = sys.argv[1:]
    print(json.dumps({"build": build, "use": use}[what](Path(path), int(n))))

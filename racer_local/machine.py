"""What this machine has left: memory, and cores that no other program keeps busy."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

import psutil

from racer_local.config import allowed_cpus, usable_cpus
from racer_local.errors import ModelError

SKIP = "RACER_LOCAL_SKIP_MEMORY_CHECK"
CGROUP = Path("/sys/fs/cgroup")
SHORTEST_S = 0.1
"""CPU times have a grain of 10 ms; below this nothing is said of other programs."""
SPARE = 0.5
"""Of a core: that busy others may be without being in the way."""


def total_memory() -> int:
    """Bytes that this process could have at all: the machine's, or what its cgroup allows."""
    limit = _number(CGROUP / "memory.max")
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes to be had without swapping; what the system would give back of its file cache counts as free."""
    free, limit, used = int(psutil.virtual_memory().available), *map(_number, _paths())
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _file_cache()))


def demand_memory(needed: int, what: str, mend: str) -> None:
    """Raises ModelError where more is needed than is free, so that nobody is killed for it.

    `what` is needed for, `mend`: what to change. $RACER_LOCAL_SKIP_MEMORY_CHECK=1 tries it all the same.
    """
    if needed <= free_memory() or os.environ.get(SKIP, "") not in ("", "0"):
        return
    raise ModelError(
        f"{what} takes about {in_gigabytes(needed)} and {in_gigabytes(free_memory())} of memory are free; {mend}, or "
        f"close other programs ({SKIP}=1 tries it all the same)"
    )


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def held_of_files() -> int:
    """Bytes of this process's memory that the system could give back and read again: mapped weights; 0 if unknown."""
    return int(getattr(psutil.Process().memory_info(), "shared", 0))


class CpuWatch:
    """How busy other programs keep the CPUs that this process may use, from when it is made until it is asked."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = perf_counter(), _busy_seconds(), _own_seconds()

    def others(self) -> float | None:
        """Cores that others kept busy on average; None where the time was too short to tell."""
        seconds = perf_counter() - self._started
        if seconds < SHORTEST_S:
            return None
        busy = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, busy / seconds)

    def warning(self, threads: int) -> str | None:
        """What to say of so many threads, if others are in their way: each forward waits for the slowest of them."""
        others = self.others()
        if others is None or threads == 1:
            return None
        free = min(len(allowed_cpus()) - others, usable_cpus())
        if threads <= free + SPARE:
            return None
        return (
            f"{threads} threads, and other programs keep {others:.1f} of {len(allowed_cpus())} cores busy; "
            f"--threads {max(1, int(free + SPARE))} may be far faster"
        )


def _busy_seconds() -> float:
    each = psutil.cpu_times(percpu=True)
    mine = [each[cpu] for cpu in allowed_cpus() if cpu < len(each)]
    return sum(sum(getattr(cpu, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq")) for cpu in mine)


def _own_seconds() -> float:
    own = os.times()
    return own.user + own.system


def _paths() -> tuple[Path, Path]:
    return CGROUP / "memory.max", CGROUP / "memory.current"


def _file_cache() -> int:
    """Of the cgroup: file pages that can be given back."""
    try:
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # "max", or no cgroup

"""Numba functions on flat arrays. Nothing of ours is imported here, and nothing is allocated in a step."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path


def _drop_stale_code() -> bool:
    """Whether there was any, or none at all: then the kernels will be compiled at first use.

    Numba keeps compiled code beside the sources and renews it when its own file changes. But a kernel has the
    constants and kernels of other files compiled in, so a change in one of them makes all of it stale.
    """
    folder = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    stamp, now = folder / "__pycache__" / "kernels.stamp", hashlib.sha256(sources).hexdigest()
    with suppress(OSError):  # an installed package changes as a whole, so it may be read-only
        if stamp.exists() and stamp.read_text() == now:
            return False
        for compiled in [*stamp.parent.glob("*.nbi"), *stamp.parent.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(now)
        return True
    return False


NEW = _drop_stale_code()
"""Whether the kernels have to be compiled, which takes some seconds, once per machine."""


ALL = ("topk", "layout", "cues", "lookup", "automaton", "growth", "drift")
"""Modules whose kernels call those of the others."""


@cache
def warm_up(*names: str) -> None:
    """Compile these modules' kernels (all, by default) with the types they are used with, so that no answer waits.

    Compiled code is kept on disk (numba's cache), so this is slow once per machine, not per process.
    """
    for name in names or ALL:
        import_module(f"{__name__}.{name}").warm_up()

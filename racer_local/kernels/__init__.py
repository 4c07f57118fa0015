"""Numba functions on flat arrays. Nothing of ours is imported here, and nothing is allocated in a step."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path


def _drop_stale_code() -> None:
    """Numba keeps compiled code beside the sources and renews it when its own file changes. But a kernel has the
    constants and kernels of other files compiled in, so a change in one of them makes all of it stale.
    """
    folder = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    stamp, now = folder / "__pycache__" / "kernels.stamp", hashlib.sha256(sources).hexdigest()
    with suppress(OSError):  # an installed package changes as a whole, so it may be read-only
        if stamp.exists() and stamp.read_text() == now:
            return
        for compiled in [*stamp.parent.glob("*.nbi"), *stamp.parent.glob("*.nbc")]:
            compiled.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(now)


_drop_stale_code()


@cache
def warm_up() -> None:
    """Compile every kernel with the types it is used with, so that no answer waits for it.

    Compiled code is kept on disk (numba's cache), so this is slow once per machine, not per process.
    """
    from racer_local.kernels import (
        acceptance,
        automaton,
        cues,
        drift,
        evidence,
        growth,
        history,
        keyed_cues,
        layout,
        lookup,
        topk,
    )

    for module in (topk, layout, cues, lookup, automaton, drift, history, keyed_cues, evidence, acceptance, growth):
        module.warm_up()

"""Numba functions on flat arrays. Nothing of ours is imported here, and nothing is allocated in a step."""

from __future__ import annotations

from functools import cache


@cache
def warm_up() -> None:
    """Compile every kernel with the types it is used with, so that no answer waits for it.

    Compiled code is kept on disk (numba's cache), so this is slow once per machine, not per process.
    """
    from racer_local.kernels import (
        acceptance,
        automaton,
        cues,
        evidence,
        growth,
        history,
        keyed_cues,
        layout,
        lookup,
        topk,
    )

    for module in (topk, layout, cues, lookup, automaton, history, keyed_cues, evidence, acceptance, growth):
        module.warm_up()

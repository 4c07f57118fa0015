"""The only place that imports llama_cpp: models, contexts, tree batches, sequence memory, samplers, vocabulary."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Model": "model",
    "LlamaTarget": "target",
    "make_sampler": "sampler",
    "render_chat": "chat",
}

__all__ = ["LlamaTarget", "Model", "make_sampler", "render_chat"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the probe can run as a module here without loading what it probes.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


if TYPE_CHECKING:
    from racer_local.llama.chat import render_chat
    from racer_local.llama.model import Model
    from racer_local.llama.sampler import make_sampler
    from racer_local.llama.target import LlamaTarget

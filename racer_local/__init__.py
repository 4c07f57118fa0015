"""racer_local: any GGUF model answers faster on the machine it is on, with the same text.

Importing the package loads neither llama_cpp nor numba: the names below are imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Llama": "llm",
    "DraftTree": "tree",
    "Limit": "tree",
    "Drafter": "draft",
    "Target": "target",
    "make_drafter": "draft",
    "generate": "engine",
    "GenerationStats": "stats",
    "ContextConfig": "config",
    "DraftConfig": "config",
    "ModelConfig": "config",
    "SamplingConfig": "config",
    "Model": "llama",
    "LlamaTarget": "llama",
    "make_sampler": "llama",
    "render_chat": "llama",
    "Answer": "session",
    "Session": "session",
    "TopK": "draft",
    "Sampler": "target",
    "BindingError": "errors",
    "ConfigError": "errors",
    "ContextFullError": "errors",
    "ExactnessError": "errors",
    "DecodeError": "errors",
    "DownloadError": "errors",
    "ModelError": "errors",
    "RacerError": "errors",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from racer_local.config import ContextConfig, DraftConfig, ModelConfig, SamplingConfig
    from racer_local.draft import Drafter, TopK, make_drafter
    from racer_local.engine import generate
    from racer_local.errors import (
        BindingError,
        ConfigError,
        ContextFullError,
        DecodeError,
        DownloadError,
        ExactnessError,
        ModelError,
        RacerError,
    )
    from racer_local.llama import LlamaTarget, Model, make_sampler, render_chat
    from racer_local.llm import Llama
    from racer_local.session import Answer, Session
    from racer_local.stats import GenerationStats
    from racer_local.target import Sampler, Target
    from racer_local.tree import DraftTree, Limit

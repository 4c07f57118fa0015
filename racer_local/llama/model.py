"""A GGUF model."""

from __future__ import annotations

import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from racer_local.binding import cpu_model
from racer_local.config import ModelConfig, Options
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import library
from racer_local.llama.vocabulary import Vocabulary, check_file, weight_bytes
from racer_local.machine import CpuWatch, demand_memory

ENUMS = {"load_mode": range(-1, 5), "lazy_mode": range(3), "split_mode": range(4)}
"""Values of llama_load_mode, llama_lazy_mode and llama_split_mode."""


class Closable(Protocol):
    def close(self) -> None: ...


class Model(Vocabulary):
    """A loaded model. Closing it closes its contexts first; closing twice is harmless.

    Raises ModelError where the file is missing, no GGUF, damaged, holds no weights or can't generate text,
    BindingError where the build crashes.
    """

    def __init__(self, path: str | Path, config: ModelConfig | None = None) -> None:
        config = config or ModelConfig()
        self.path = Path(path)
        self._gpu_layers, self._options = config.gpu_layers, dict(config.options)
        self._contexts: weakref.WeakSet[Closable] = weakref.WeakSet()
        check_file(self.path)
        self._lib = library.init()
        params = self._lib.llama_model_default_params()
        self.offloads = self.would_offload(config)
        params.n_gpu_layers = config.gpu_layers if self.offloads else 0
        _check_options(config)
        library.set_fields(params, config.options, "the model")
        self.watch = CpuWatch()
        """Of other programs, from before it was loaded."""
        if not self.offloads:
            size = weight_bytes(self.path)
            demand_memory(size, f"{self.path.name} by itself", "take a smaller quant or model")
        self._load(params)
        self._read_facts()

    @staticmethod
    def would_offload(config: ModelConfig) -> bool:
        """Whether layers would be kept on a GPU."""
        return bool(library.init().llama_supports_gpu_offload()) and config.gpu_layers != 0

    @classmethod
    def lent(cls, handle: Any, path: str | Path, *, offloads: bool, options: Options) -> Model:
        """A llama_model that somebody else loaded, with these options, and will free: after closing this object.

        Raises ModelError where it can't generate text; it is then still whole.
        """
        model = cls.__new__(cls)
        model.path, model._lib, model._handle, model.offloads = Path(path), library.init(), handle, offloads
        model._gpu_layers, model._options = -1 if offloads else 0, dict(options)
        model._contexts, model.watch = weakref.WeakSet(), CpuWatch()
        model._free = weakref.finalize(model, _leave, handle)
        model._read_facts()
        return model

    def _read_facts(self) -> None:
        if not self._lib.llama_model_has_decoder(self._handle) or self._lib.llama_model_has_encoder(self._handle):
            self.close()
            raise ModelError(f"{self.path.name} is no decoder-only model; it can't generate text here")
        self.n_ctx_train: int = self._lib.llama_model_n_ctx_train(self._handle)
        self.can_branch = not (
            self._lib.llama_model_is_recurrent(self._handle) or self._lib.llama_model_is_hybrid(self._handle)
        )
        """Whether rejected nodes can be taken out of the memory: a recurrent state keeps them."""
        self.window: int = self._lib.llama_model_n_swa(self._handle)
        """Tokens that the layers with a sliding window see; 0 where there are none."""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What tells this model on this build and machine from others, for measurements that are remembered."""
        stat = self.path.stat()
        return {
            "model": self.path.name,
            "bytes": stat.st_size,
            "modified": stat.st_mtime_ns,
            "options": {"gpu_layers": self._gpu_layers, **self._options},
            "build": f"{self._lib.__version__} {self._lib.llama_print_system_info().decode().strip()}",
            "cpu": cpu_model(),
        }

    def memory_bytes(self, n_ctx: int, kv_type: str | None = None) -> int:
        """About what the weights and a context of n_ctx tokens take, with keys and values of this type."""
        return int(self._lib.llama_model_size(self.handle)) + self.kv_bytes(n_ctx, kv_type)

    def _kv_heads(self) -> int:
        return int(self._lib.llama_model_n_head_kv(self.handle))

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template that the file carries."""
        raw = self._lib.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def closes_first(self, context: Closable) -> None:
        """Note a context that must be freed before the model."""
        self._contexts.add(context)

    def close(self) -> None:
        for context in list(self._contexts):
            context.close()
        super().close()


def _leave(_handle: Any) -> None:
    """The finalizer of what somebody else frees."""


def _check_options(config: ModelConfig) -> None:
    """What llama.cpp would end the process for."""
    for name in ("n_gpu_layers", "no_alloc", "vocab_only"):
        if name in config.options:
            raise ConfigError(f"the model option {name} can't be set here; the number of GPU layers is gpu_layers")
    for name, known in ENUMS.items():
        if config.options.get(name, 0) not in known:
            raise ConfigError(f"the model option {name} is {config.options[name]}; known: {known[0]} to {known[-1]}")

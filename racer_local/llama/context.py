"""A llama.cpp context: its memory of sequences, its forwards and its logits rows."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from racer_local.config import ContextConfig
from racer_local.errors import ConfigError, DecodeError, ModelError
from racer_local.llama import library
from racer_local.llama.batch import Batch
from racer_local.llama.model import Model
from racer_local.llama.vocabulary import weight_bytes
from racer_local.machine import demand_memory, held_of_files
from racer_local.target import Rows, never

OWN_FIELDS = {
    *("n_ctx", "n_batch", "n_seq_max", "n_outputs_max", "n_outputs_max_per_seq", "n_rs_seq", "n_threads"),
    "n_threads_batch",
    *("kv_unified", "swa_full", "embeddings", "ctx_type", "pooling_type", "attention_type"),
    *("flash_attn_type", "type_k", "type_v"),
}
"""Context fields that follow from `ContextConfig` and the tree size."""

GGML_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""enum ggml_type; the binding lacks a name for bf16."""

NO_SLOT = 1
"""What llama_decode returns where the memory has no room for the batch."""
ABORTED = 2
"""What it returns where the abort callback said so."""
END = -1
"""As a position: up to the last one."""


class Aborted(DecodeError):
    """A forward that its caller did not want any more."""


@dataclass(frozen=True)
class Shape:
    """What a context must have room for."""

    cells: int
    """Tokens in the memory."""
    sequences: int
    nodes: int
    """Of the largest tree."""
    rows: int
    """Of logits."""
    snapshots: int
    """Of a recurrent state: how many tokens can be taken back."""

    def apply(self, params: Any) -> None:
        """Set the fields of llama_context_params that follow from it; n_batch and n_ubatch are there already."""
        params.kv_unified = True  # else a token can't be on several sequences
        params.n_ctx, params.n_seq_max, params.n_rs_seq = self.cells, self.sequences, self.snapshots
        params.n_batch = max(params.n_batch, self.nodes)
        params.n_ubatch = max(min(params.n_batch, params.n_ubatch), self.nodes)  # a tree must not be split
        params.n_outputs_max = self.rows


class Context:
    """A llama_context of a shape. Freed when closed, when its model is closed, or with the last reference to it.

    `handle` is one that somebody else opened in that shape, and will free after closing this object.
    """

    def __init__(self, model: Model, config: ContextConfig, shape: Shape, handle: Any = None) -> None:
        self.model = model
        self.batch = Batch(max(config.n_batch, shape.nodes))
        self._max_rows = shape.rows
        self._rows_at: int | None = None
        self._lib = library.init()
        self._free: weakref.finalize[..., Any]
        if handle is None:
            params = self._params(config)
            shape.apply(params)
            self._handle = self._open(params, config)
            self._free = weakref.finalize(self, _free, self._lib, self._handle, model)
        else:
            self._handle = handle
            self._free = weakref.finalize(self, _leave, model)
        self.lock = threading.RLock()
        """Held by whoever uses the context; closing waits for it."""
        model.closes_first(self)
        if not self._memory:
            self.close()
            raise ModelError(f"{model.path.name} has no memory of a text (an embedding model?); it can't generate")

    def _params(self, config: ContextConfig) -> Any:
        params = self._lib.llama_context_default_params()
        params.swa_full = True  # else a sliding window forgets what a rollback needs
        params.n_batch = config.n_batch
        params.n_threads = params.n_threads_batch = config.n_threads
        params.flash_attn_type = _flash_attn(self._lib, config, self.model.offloads)
        params.type_k = params.type_v = GGML_TYPES[config.kv_type or "f16"]
        if own := OWN_FIELDS & config.options.keys():
            raise ConfigError(f"the context option {min(own)} follows from other settings; use those")
        library.set_fields(params, config.options, "the context")
        return params

    def _open(self, params: Any, config: ContextConfig) -> Any:
        if not self.model.offloads:
            rows = 4 * self.model.n_vocab * self._max_rows
            kept = min(held_of_files(), weight_bytes(self.model.path))  # to read them again for each token is no use
            demand_memory(
                self.model.kv_bytes(params.n_ctx, config.kv_type) + rows + kept,
                f"{self.model.path.name} with a context of {params.n_ctx} tokens",
                "take a smaller --ctx, a smaller quant, or --kv-type q8_0",
            )
        library.forget_errors()
        handle = self._lib.llama_init_from_model(self.model.handle, params)
        if not handle:
            raise ModelError(
                f"no context of {params.n_ctx} tokens could be opened: {library.cause()}; try a smaller n_ctx "
                f"(--ctx), another kv_type (--kv-type) or flash_attn (--flash-attn)"
            )
        return handle

    @property
    def closed(self) -> bool:
        return not self._free.alive

    @property
    def handle(self) -> Any:
        """The llama_context pointer."""
        if self.closed:
            raise ModelError("this context is closed")
        return self._handle

    @property
    def _memory(self) -> Any:
        return self._lib.llama_get_memory(self.handle)

    @contextmanager
    def aborting(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Lets forwards in the body stop midway once `cancelled` says so (llama_set_abort_callback).

        It is asked after each operation of the graph; where layers are offloaded some backends do not ask.
        """
        if cancelled is never:
            yield
            return
        kind = self._lib.ggml_abort_callback
        callback = kind(lambda _data: cancelled())
        self._lib.llama_set_abort_callback(self.handle, callback, None)
        try:
            yield
        finally:
            self._lib.llama_set_abort_callback(self.handle, kind(), None)

    def decode(self, what: str) -> bool:
        """One forward of the batch (llama_decode); False where the memory has no room for it.

        Raises Aborted where `aborting` ended it, DecodeError, naming `what`, on any other failure.
        """
        library.forget_errors()
        code = self._lib.llama_decode(self.handle, self.batch.struct)
        if code == ABORTED:
            raise Aborted(f"{what}: aborted")
        if code not in (0, NO_SLOT):
            raise DecodeError(f"llama_decode returned {code} for {what}: {library.cause()}")
        return bool(code == 0)

    def rows(self, n: int) -> Rows:
        """[n, vocabulary] the logits of the last forward; a view, valid until the next one."""
        logits = self._lib.llama_get_logits(self.handle)
        address = ctypes.cast(logits, ctypes.c_void_p).value
        if address != self._rows_at:  # making a view costs more than the rest of a step
            self._rows_at = address
            self._rows = np.ctypeslib.as_array(logits, (self._max_rows, self.model.n_vocab))
        return self._rows[:n]

    def wait(self) -> None:
        """Until the device has done what was asked of it (llama_synchronize)."""
        self._lib.llama_synchronize(self.handle)

    def remove(self, sequence: int, start: int, end: int = END) -> bool:
        """Take the positions start .. end-1 out of a sequence; False where the memory can't."""
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, end))

    def share(self, source: int, to: int, start: int, end: int = END) -> None:
        """Let sequence `to` see what `source` has at the positions start .. end-1."""
        self._lib.llama_memory_seq_cp(self._memory, source, to, start, end)

    def forgets_before(self, sequence: int) -> int:
        """The first position that a sequence still has in every layer (llama_memory_seq_pos_min); -1: none."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, sequence))

    @property
    def snapshots(self) -> int:
        """How many tokens of a recurrent state can be taken back; 0 where the architecture has no such thing."""
        return int(self._lib.llama_n_rs_seq(self.handle))

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        with self.lock:
            self._free()


def _free(lib: Any, handle: Any, _model: Model) -> None:
    """The finalizer holds the model, which must outlive its contexts."""
    lib.llama_free(handle)


def _leave(_model: Model) -> None:
    """The finalizer of what somebody else frees."""


def _flash_attn(lib: Any, config: ContextConfig, offloads: bool) -> int:
    if config.flash_attn == "on" or config.kv_type == "q8_0":
        return int(lib.LLAMA_FLASH_ATTN_TYPE_ENABLED)
    if config.flash_attn == "auto" and offloads:
        return int(lib.LLAMA_FLASH_ATTN_TYPE_AUTO)
    return int(lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)

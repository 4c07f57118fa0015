"""A GGUF model and its vocabulary."""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from racer_local.binding import cpu_model
from racer_local.config import ModelConfig, Options
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import library

GGUF_MAGIC = b"GGUF"


ENUMS = {"load_mode": range(-1, 5), "lazy_mode": range(3), "split_mode": range(4)}
"""Values of llama_load_mode, llama_lazy_mode and llama_split_mode."""


class Closable(Protocol):
    def close(self) -> None: ...


class Model:
    """A loaded model. Closing it closes its contexts first; closing twice is harmless.

    Raises ModelError where the file is missing, no GGUF, damaged, holds no weights or can't generate text,
    BindingError where the build crashes.
    """

    def __init__(self, path: str | Path, config: ModelConfig | None = None) -> None:
        config = config or ModelConfig()
        self.path = Path(path)
        self._gpu_layers, self._options = config.gpu_layers, dict(config.options)
        self._contexts: weakref.WeakSet[Closable] = weakref.WeakSet()
        _check_file(self.path)
        self._lib = library.init()
        params = self._lib.llama_model_default_params()
        self.offloads = bool(self._lib.llama_supports_gpu_offload()) and config.gpu_layers != 0
        params.n_gpu_layers = config.gpu_layers if self.offloads else 0
        _check_options(config)
        library.set_fields(params, config.options, "the model")
        library.forget_errors()
        self._handle = self._lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._handle:
            raise ModelError(_why_not(self.path, library.cause()))
        self._free = weakref.finalize(self, self._lib.llama_model_free, self._handle)
        self._read_facts()

    @classmethod
    def lent(cls, handle: Any, path: str | Path, *, offloads: bool, options: Options) -> Model:
        """A llama_model that somebody else loaded, with these options, and will free: after closing this object.

        Raises ModelError where it can't generate text; it is then still whole.
        """
        model = cls.__new__(cls)
        model.path, model._lib, model._handle, model.offloads = Path(path), library.init(), handle, offloads
        model._gpu_layers, model._options = -1 if offloads else 0, dict(options)
        model._contexts = weakref.WeakSet()
        model._free = weakref.finalize(model, _leave, handle)
        model._read_facts()
        return model

    def _read_facts(self) -> None:
        if not self._lib.llama_model_has_decoder(self._handle) or self._lib.llama_model_has_encoder(self._handle):
            self.close()
            raise ModelError(f"{self.path.name} is no decoder-only model; it can't generate text here")
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = self._lib.llama_model_n_ctx_train(self._handle)
        self.can_branch = not (
            self._lib.llama_model_is_recurrent(self._handle) or self._lib.llama_model_is_hybrid(self._handle)
        )
        """Whether rejected nodes can be taken out of the memory: a recurrent state keeps them."""
        self.window: int = self._lib.llama_model_n_swa(self._handle)
        """Tokens that the layers with a sliding window see; 0 where there are none."""

    @property
    def handle(self) -> Any:
        """The llama_model pointer."""
        if not self._free.alive:
            raise ModelError(f"the model {self.path.name} is closed")
        return self._handle

    @property
    def vocab(self) -> Any:
        """The llama_vocab pointer."""
        return self._lib.llama_model_get_vocab(self.handle)

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

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every end-of-generation token (llama_vocab_is_eog)."""
        is_end, vocab = self._lib.llama_vocab_is_eog, self.vocab
        return frozenset(token for token in range(self.n_vocab) if is_end(vocab, token))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. Only with `parse_special` does a control token's spelling become that token."""
        raw = text.encode("utf-8", "surrogatepass")
        tokens: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(len(raw) + 8, np.int32)
        buffer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        n = self._lib.llama_tokenize(self.vocab, raw, len(raw), buffer, len(tokens), add_special, parse_special)
        if n < 0:
            raise ModelError(f"the text could not be tokenized by {self.path.name} (llama_tokenize: {n})")
        return [int(token) for token in tokens[:n]]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; control tokens are empty unless `special`."""
        self._check_id(token)
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_special(self, token: int) -> bool:
        """Whether a text's spelling becomes this token only with `parse_special` (control tokens, <unk>)."""
        self._check_id(token)
        special = self._lib.LLAMA_TOKEN_ATTR_CONTROL | self._lib.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(self._lib.llama_vocab_get_attr(self.vocab, token) & special)

    @property
    def bos(self) -> str:
        return self._special_text(self._lib.llama_vocab_bos(self.vocab))

    @property
    def eos(self) -> str:
        return self._special_text(self._lib.llama_vocab_eos(self.vocab))

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template that the file carries."""
        raw = self._lib.llama_model_chat_template(self.handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise ConfigError(f"token {token} is not in the vocabulary of {self.path.name} (0 to {self.n_vocab - 1})")

    def _special_text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def closes_first(self, context: Closable) -> None:
        """Note a context that must be freed before the model."""
        self._contexts.add(context)

    def close(self) -> None:
        for context in list(self._contexts):
            context.close()
        self._free()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"no model file at {path}; check the path, or see: racer-local models list")
    try:
        with path.open("rb") as file:
            magic, tensors = file.read(8)[:4], file.read(8)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is no GGUF file (it starts with {magic!r}); convert the model or pick another")
    if tensors == bytes(8):
        raise ModelError(f"{path} holds a vocabulary and no weights; use the whole model file")


def _why_not(path: Path, reason: str) -> str:
    if any(words in reason for words in ("within the file bounds", "failed to read", "remaining file size")):
        return f"{path} is truncated or damaged ({reason}); fetch it again"
    return f"{path} can't be loaded ({reason}); fetch it again, or update llama-cpp-python if the model is newer"

"""The vocabulary of a GGUF model: text to tokens and back, control and end tokens."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from racer_local.errors import ConfigError, ModelError
from racer_local.llama import library
from racer_local.text import VocabularyId
from racer_local.tree import Int32s

if TYPE_CHECKING:
    from typing_extensions import Self

GGUF_MAGIC = b"GGUF"
KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Bytes of a cached number by kv_type."""
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Vocabulary:
    """A GGUF file opened for its vocabulary alone, in a moment and with little memory. Closing twice is harmless.

    Raises ModelError where the file is missing, no GGUF or damaged, BindingError where the build crashes.
    """

    path: Path
    _lib: Any
    _handle: Any
    _free: weakref.finalize[Any, Any]

    def __init__(self, path: str | Path) -> None:
        self.path, self._lib = Path(path), library.init()
        check_file(self.path, weights=False)
        params = self._lib.llama_model_default_params()
        params.vocab_only = True
        self._load(params)

    def _load(self, params: Any) -> None:
        library.forget_errors()
        self._handle = self._lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._handle:
            raise ModelError(why_not(self.path, library.cause()))
        self._free = weakref.finalize(self, self._lib.llama_model_free, self._handle)

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
    def n_vocab(self) -> int:
        """Token ids are below it."""
        return int(self._lib.llama_vocab_n_tokens(self.vocab))

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Every end-of-generation token (llama_vocab_is_eog)."""
        is_end, vocab = self._lib.llama_vocab_is_eog, self.vocab
        return frozenset(token for token in range(self.n_vocab) if is_end(vocab, token))

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. Only with `parse_special` does a control token's spelling become that token."""
        return list(map(int, self._tokens_of(text, add_special, parse_special)))

    def plain_tokens(self, text: str, *, inside: bool = False) -> Int32s:
        """Token ids of a text that is no prompt: -1 in the place of every control or end token, however it came there.

        inside: the text goes on in the middle of another one, behind a line's end. Can be called from several threads
        at once (llama_tokenize is thread-safe, and the interpreter is free meanwhile).
        """
        tokens = self._tokens_of("\n" + text if inside else text, False, False)
        if inside:
            ahead = self._newline
            same = np.array_equal(tokens[: len(ahead)], ahead)
            tokens = tokens[len(ahead) :] if same else self._tokens_of(text, False, False)
        return np.where(self._is_control[tokens], np.int32(-1), tokens)

    @cached_property
    def _newline(self) -> Int32s:
        return self._tokens_of("\n", False, False)

    @cached_property
    def _is_control(self) -> NDArray[np.bool_]:
        flags = np.array([self.is_special(token) for token in range(self.n_vocab)], np.bool_)
        flags[list(self.end_tokens)] = True
        return flags

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.piece(token, special=True)) for token in range(self.n_vocab))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for two models if the same id is the same text in both: other quants and sizes of a family, mostly."""
        text_of, vocab, digest = self._lib.llama_vocab_get_text, self.vocab, hashlib.sha256()
        for token in range(self.n_vocab):
            digest.update(text_of(vocab, token) + b"\0")
        return digest.hexdigest()

    @property
    def id(self) -> VocabularyId:
        """What an index is for."""
        return VocabularyId(self.fingerprint, self.n_vocab, str(self.path.absolute()))

    def _tokens_of(self, text: str, add_special: bool, parse_special: bool) -> Int32s:
        raw = text.encode("utf-8", "surrogatepass")
        tokens = np.zeros(len(raw) + 8, np.int32)
        buffer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        n = self._lib.llama_tokenize(self.vocab, raw, len(raw), buffer, len(tokens), add_special, parse_special)
        if n < 0:
            raise ModelError(f"the text could not be tokenized by {self.path.name} (llama_tokenize: {n})")
        return tokens[:n]

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

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata (llama_model_meta_val_str); `{arch}` in the key is the architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.metadata("general.architecture") or "")
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else None

    @property
    def infill(self) -> tuple[int, int, int] | None:
        """The tokens before a prefix, a suffix and the middle to be filled in, of a model that has learned it."""
        lib, vocab = self._lib, self.vocab
        tokens = tuple(f(vocab) for f in (lib.llama_vocab_fim_pre, lib.llama_vocab_fim_suf, lib.llama_vocab_fim_mid))
        return None if min(tokens) < 0 else tokens

    @property
    def pooling(self) -> int:
        """How the file says to pool a text's embeddings into one (llama_pooling_type); 0: it is no model for that."""
        kind = self.metadata("{arch}.pooling_type")
        return int(kind) if kind else 0

    @property
    def trained_on(self) -> int:
        """Tokens of the context that the model was trained with; 0 where the file does not say."""
        return self._count("{arch}.context_length")

    def kv_bytes(self, n_ctx: int, kv_type: str | None = None) -> int:
        """About what the keys and values of n_ctx tokens take in this type (by default f16)."""
        lib, handle = self._lib, self.handle
        kv_heads = self._count("{arch}.attention.head_count_kv") or self._kv_heads()
        if lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle) or not kv_heads:
            return 0  # a state, whose size does not depend on n_ctx, or nobody says how many layers have keys
        layers, heads = self._count("{arch}.block_count"), self._count("{arch}.attention.head_count")
        width = self._count("{arch}.embedding_length") // max(1, heads)
        lengths = [self._count(f"{{arch}}.attention.{name}_length") or width for name in ("key", "value")]
        if rank := self._count("{arch}.attention.kv_lora_rank"):  # keys and values in one, for all heads (MLA)
            numbers = rank + self._count("{arch}.rope.dimension_count")
        else:
            numbers = kv_heads * sum(lengths)
        return int(n_ctx * layers * numbers * KV_BYTES[kv_type or "f16"])

    def _kv_heads(self) -> int:
        """Where the metadata has no one number; 0: a vocabulary alone does not tell, and llama.cpp aborts if asked."""
        return 0

    def _count(self, key: str) -> int:
        """A number of the metadata; 0 where there is none, or one for each layer, which llama.cpp does not tell."""
        found = self.metadata(key) or ""
        return int(found) if found.isdecimal() else 0

    @property
    def bos(self) -> str:
        return self._special_text(self._lib.llama_vocab_bos(self.vocab))

    @property
    def eos(self) -> str:
        return self._special_text(self._lib.llama_vocab_eos(self.vocab))

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise ConfigError(f"token {token} is not in the vocabulary of {self.path.name} (0 to {self.n_vocab - 1})")

    def _special_text(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def close(self) -> None:
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_file(path: Path, *, weights: bool = True) -> None:
    """Raises ModelError for what can't be a GGUF file, with weights unless they are not needed."""
    if not path.is_file():
        raise ModelError(f"no model file at {path}; check the path, or see: racer-local models list")
    try:
        with path.open("rb") as file:
            magic, tensors = file.read(8)[:4], file.read(8)
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is no GGUF file (it starts with {magic!r}); convert the model or pick another")
    if weights and tensors == bytes(8):
        raise ModelError(f"{path} holds a vocabulary and no weights; use the whole model file")


def weight_bytes(path: Path) -> int:
    """Size of a model's file, or of all files that it is split into (NAME-00001-of-00003.gguf)."""
    split = SPLIT.search(path.name)
    stem = path.name[: split.start()] if split else ""
    parts = (
        [path.with_name(f"{stem}-{i:05}-of-{split[2]}.gguf") for i in range(1, int(split[2]) + 1)] if split else [path]
    )
    return sum(part.stat().st_size for part in parts if part.is_file())


def why_not(path: Path, reason: str) -> str:
    """What to say of a file that llama.cpp could not load."""
    if any(words in reason for words in ("within the file bounds", "failed to read", "remaining file size")):
        return f"{path} is truncated or damaged ({reason}); fetch it again"
    return f"{path} can't be loaded ({reason}); fetch it again, or update llama-cpp-python if the model is newer"

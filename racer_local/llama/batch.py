"""llama_batch over numpy arrays: filled by slices, not by a Python loop a token."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from racer_local.config import MAX_SEQUENCES
from racer_local.llama import library
from racer_local.tree import DraftTree, Int32s, Tokens


class Batch:
    """Room for `capacity` tokens. llama.cpp reads the arrays during llama_decode and keeps nothing of them.

    A node's sequences are a range (leaves are numbered from the left), so every node points into one shared
    array 0, 1, 2, ...
    """

    def __init__(self, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._n_sequences = np.ones(capacity, np.int32)
        self._sequence_ids = np.arange(MAX_SEQUENCES, dtype=np.int32)
        self._sequences = np.zeros(capacity, np.uintp)
        self._outputs = np.zeros(capacity, np.int8)
        self.struct = library.init().llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._n_sequences, ctypes.c_int32),
            seq_id=ctypes.cast(self._sequences.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill_text(self, tokens: Tokens, position: int, outputs: bool) -> None:
        """Tokens [m] of sequence 0 from `position` on."""
        m = len(tokens)
        self._tokens[:m] = tokens
        self._positions[:m] = np.arange(position, position + m)
        self._n_sequences[:m] = 1
        self._sequences[:m] = self._sequence_ids.ctypes.data
        self._outputs[:m] = outputs
        self.struct.n_tokens = m

    def fill_tree(self, tree: DraftTree, position: int, first: Int32s, end: Int32s) -> None:
        """The nodes of a tree whose root is at `position`; node i is on the sequences first[i] .. end[i]-1."""
        n = len(tree)
        self._tokens[:n] = tree.tokens
        self._positions[:n] = tree.depths + position
        self._n_sequences[:n] = end - first
        self._sequences[:n] = self._sequence_ids.ctypes.data + first.astype(np.uintp) * 4
        self._outputs[:n] = True
        self.struct.n_tokens = n


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))

"""A model that never stops by itself, for chats that are to be stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf


def write_endless_gguf(path: Path) -> Path:
    """A tiny model whose end token is never the likeliest."""
    ends = tiny_gguf._ends

    def without_end(*args, **kwargs):
        for name, values in ends(*args, **kwargs):
            if name == "output.weight":
                values[tiny_gguf.EOS] = 0.0
            yield name, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "_ends", without_end)
        return tiny_gguf.write_tiny_gguf(path, n_layer=2)

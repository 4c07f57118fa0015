"""A model for embeddings: texts to vectors, by the binding's Llama."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from racer_local.config import ContextConfig, ModelConfig
from racer_local.errors import ContextFullError, ModelError
from racer_local.llama import library
from racer_local.llama.vocabulary import Vocabulary, why_not

MOST_TOKENS = 2048
"""Of one text, where the context is not given: a pooled text is one forward."""


class Embedder:
    """An embedding model, loaded. Closing twice is harmless."""

    def __init__(self, path: Path, model: ModelConfig | None = None, context: ContextConfig | None = None) -> None:
        context = context or ContextConfig()
        with Vocabulary(path) as facts:
            pooling, trained = facts.pooling, int(facts.metadata("{arch}.context_length") or MOST_TOKENS)
        library.forget_errors()
        most = self.n_ctx = min(context.n_ctx or MOST_TOKENS, trained)
        try:
            self._llama = library.init().Llama(
                str(path),
                embedding=True,
                pooling_type=pooling,
                n_ctx=most,
                n_batch=most,
                n_ubatch=most,
                n_threads=context.n_threads,
                n_threads_batch=context.n_threads,
                n_gpu_layers=(model or ModelConfig()).gpu_layers,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise ModelError(why_not(path, library.cause())) from error
        self.memory_bytes = path.stat().st_size

    def embed(self, text: str) -> tuple[NDArray[np.float32], int]:
        """[dimensions] a text's vector, of length 1, and its number of tokens.

        Raises ContextFullError where the text is too long.
        """
        tokens = self._llama.tokenize(text.encode("utf-8", "surrogatepass"))
        if len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"the text has {len(tokens)} tokens and the model takes {self.n_ctx}; embed it in parts"
            )
        vector = self._llama.embed(text, normalize=True, truncate=False)
        return np.asarray(vector, np.float32), len(tokens)

    def close(self) -> None:
        self._llama.close()

"""llama.cpp's sampler chain over a row of logits."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local.config import SamplingConfig
from racer_local.errors import DecodeError
from racer_local.llama import library
from racer_local.target import Sampler
from racer_local.tree import Tokens

NOT_A_NUMBER = "the model's logits are not numbers; try another kv_type (--kv-type) or a model file of another quant"


def make_sampler(config: SamplingConfig, n_vocab: int) -> Sampler:
    """The sampler that `config` asks for."""
    if config.greedy and not config.penalizes:
        return GreedySampler()
    return ChainSampler(config, n_vocab)


def fresh_seed(seed: int | None) -> int:
    """`seed`, or where it is None or -1 one that nobody chose. 32 bits; llama.cpp keeps the largest for itself."""
    return secrets.randbelow(0xFFFFFFFF) if seed is None or seed < 0 else seed


class GreedySampler:
    """The likeliest token; the lowest id at a tie."""

    def begin(self, prompt: Tokens) -> None: ...

    def draw(self, logits: NDArray[np.float32]) -> int:
        token = int(logits.argmax())
        if np.isnan(logits[token]):
            raise DecodeError(NOT_A_NUMBER)
        return token


class Candidates:
    """A row of logits as a sampler chain takes it (llama_token_data_array)."""

    def __init__(self, n_vocab: int) -> None:
        self._lib = library.init()
        self._rows = np.zeros(n_vocab, np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
        self._blank = self._rows.copy()
        self._blank["id"] = np.arange(n_vocab)
        self._array = self._lib.llama_token_data_array()

    def draw(self, chain: Any, logits: NDArray[np.float32]) -> int:
        """What the chain draws from a row, [vocabulary]; noted in the chain (llama_sampler_apply, _accept).

        Raises DecodeError where a logit is not a number.
        """
        rows, array = self._rows, self._array
        rows[:] = self._blank  # chains sort
        rows["logit"] = logits
        array.data = ctypes.cast(rows.ctypes.data, type(array.data))
        array.size, array.selected, array.sorted = len(rows), -1, False
        self._lib.llama_sampler_apply(chain, ctypes.byref(array))
        if array.selected < 0 or np.isnan(logits).any():
            raise DecodeError(NOT_A_NUMBER)
        token = int(array.data[array.selected].id)
        self._lib.llama_sampler_accept(chain, token)
        return token


class ChainSampler:
    """A llama_sampler_chain: penalties, top-k, top-p, min-p, temperature, draw (llama_sampler_init_*).

    Each draw takes one number from the seeded generator, so a seed gives the same draws whatever is drafted.
    Freed when closed or with the last reference to it.
    """

    def __init__(self, config: SamplingConfig, n_vocab: int) -> None:
        self.config = config
        self.seed = fresh_seed(config.seed)
        self._lib = library.init()
        self._candidates, self._n_vocab = Candidates(n_vocab), n_vocab
        self._handle = self._build()
        self._free = weakref.finalize(self, self._lib.llama_sampler_free, self._handle)

    @property
    def _chain(self) -> Any:
        if not self._free.alive:
            raise RuntimeError("this sampler is closed")
        return self._handle

    def _build(self) -> Any:
        lib, config = self._lib, self.config
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        stages = []
        if config.penalizes:
            stages.append(
                lib.llama_sampler_init_penalties(
                    self._n_vocab,
                    config.penalty_last_n,
                    config.repeat_penalty,
                    config.frequency_penalty,
                    config.presence_penalty,
                )
            )
        if config.greedy:
            stages.append(lib.llama_sampler_init_greedy())
        else:
            stages += [
                lib.llama_sampler_init_top_k(config.top_k),
                lib.llama_sampler_init_top_p(config.top_p, 1),
                lib.llama_sampler_init_min_p(config.min_p, 1),
                lib.llama_sampler_init_temp(config.temperature),
                lib.llama_sampler_init_dist(self.seed),
            ]
        for stage in stages:
            lib.llama_sampler_chain_add(chain, stage)
        return chain

    def begin(self, prompt: Tokens) -> None:
        """Start over: the seed's first draw comes next, and the penalties look back on the prompt."""
        self._lib.llama_sampler_reset(self._chain)
        if self.config.penalizes:
            for token in prompt:
                self._lib.llama_sampler_accept(self._chain, int(token))

    def draw(self, logits: NDArray[np.float32]) -> int:
        return self._candidates.draw(self._chain, logits)

    def close(self) -> None:
        self._free()

"""llama.cpp's sampler chain over a row of logits."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local.config import SamplingConfig
from racer_local.errors import ConfigError, DecodeError
from racer_local.llama import library
from racer_local.llama.vocabulary import Vocabulary
from racer_local.target import Sampler
from racer_local.tree import Tokens

NOT_A_NUMBER = "the model's logits are not numbers; try another kv_type (--kv-type) or a model file of another quant"


def make_sampler(config: SamplingConfig, n_vocab: int, vocabulary: Vocabulary | None = None) -> Sampler:
    """The sampler that `config` asks for. A grammar needs the vocabulary whose tokens it is about.

    Raises ConfigError for a grammar that can't be used.
    """
    return GreedySampler() if config.likeliest else ChainSampler(config, n_vocab, vocabulary)


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

    def draw(self, chain: Any, logits: NDArray[np.float32], grammar: Any = None) -> int:
        """What the chain draws from a row, [vocabulary]; noted in the chain (llama_sampler_apply, _accept).

        A grammar is asked about the one token that is drawn without it, since asking it about all is dear: where it
        refuses that one, the draw is made again among those that it allows. Where nothing is cut off (top-k, top-p,
        min-p) the distribution is that of what it allows.

        Raises DecodeError where a logit is not a number, ConfigError where the grammar allows nothing.
        """
        if np.isnan(logits).any():
            raise DecodeError(NOT_A_NUMBER)
        token = self._select(logits, chain)
        if grammar is not None:
            if not self._allows(grammar, token):
                token = self._select(logits, grammar, chain)
                if not self._allows(grammar, token):  # to accept it would end the process
                    raise ConfigError("the grammar allows no token of this model here; give it another alternative")
            self._lib.llama_sampler_accept(grammar, token)
        self._lib.llama_sampler_accept(chain, token)
        return token

    def _select(self, logits: NDArray[np.float32], *stages: Any) -> int:
        self._rows[:] = self._blank  # chains sort
        self._rows["logit"] = logits
        self._apply(len(self._rows), *stages)
        if self._array.selected < 0:
            raise DecodeError(NOT_A_NUMBER)
        return int(self._array.data[self._array.selected].id)

    def _allows(self, grammar: Any, token: int) -> bool:
        self._rows[0] = token, 1.0, 0.0
        self._apply(1, grammar)
        return bool(self._rows["logit"][0] > -np.inf)

    def _apply(self, size: int, *stages: Any) -> None:
        array = self._array
        array.data = ctypes.cast(self._rows.ctypes.data, type(array.data))
        array.size, array.selected, array.sorted = size, -1, False
        for stage in stages:
            self._lib.llama_sampler_apply(stage, ctypes.byref(array))


class ChainSampler:
    """A llama_sampler_chain: bias, penalties, top-k, top-p, min-p, temperature, draw (llama_sampler_init_*).

    Each draw takes one number from the seeded generator, two where a grammar refuses the first, so a seed gives the
    same draws whatever is drafted. Freed when closed or with the last reference to it.
    """

    def __init__(self, config: SamplingConfig, n_vocab: int, vocabulary: Vocabulary | None = None) -> None:
        self.config = config
        self.seed = fresh_seed(config.seed)
        self._lib = library.init()
        self._candidates, self._n_vocab = Candidates(n_vocab), n_vocab
        if beyond := [token for token in config.logit_bias if not 0 <= token < n_vocab]:
            raise ConfigError(f"logit_bias: token {beyond[0]} is not in the vocabulary (0 to {n_vocab - 1})")
        self._grammar = None
        if config.grammar is not None:
            if vocabulary is None:
                raise ConfigError("a grammar needs the vocabulary of the model; give it to make_sampler")
            self._grammar = _open_grammar(self._lib, vocabulary, config.grammar)
        self._handle = self._build()
        self._free = weakref.finalize(self, _free, self._lib, self._handle, self._grammar)
        self._vocabulary = vocabulary  # must outlive the grammar

    @property
    def _chain(self) -> Any:
        if not self._free.alive:
            raise RuntimeError("this sampler is closed")
        return self._handle

    def _build(self) -> Any:
        lib, config = self._lib, self.config
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        stages = []
        if config.logit_bias:
            biases = (lib.llama_logit_bias * len(config.logit_bias))(*config.logit_bias.items())
            stages.append(lib.llama_sampler_init_logit_bias(self._n_vocab, len(biases), biases))
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
        if self._grammar is not None:
            self._lib.llama_sampler_reset(self._grammar)
        if self.config.penalizes:
            for token in prompt:
                self._lib.llama_sampler_accept(self._chain, int(token))

    def draw(self, logits: NDArray[np.float32]) -> int:
        return self._candidates.draw(self._chain, logits, self._grammar)

    def close(self) -> None:
        self._free()


def _open_grammar(lib: Any, vocabulary: Vocabulary, grammar: str) -> Any:
    """A sampler that allows what a grammar does (llama_sampler_init_grammar). Raises ConfigError."""
    library.forget_errors()
    # An empty one would allow everything.
    handle = grammar.strip() and lib.llama_sampler_init_grammar(vocabulary.vocab, grammar.encode("utf-8"), b"root")
    if not handle:
        raise ConfigError(f"the grammar can't be used: {library.cause()}; make it simpler, or correct it")
    return handle


def _free(lib: Any, *samplers: Any) -> None:
    for sampler in samplers:
        if sampler is not None:
            lib.llama_sampler_free(sampler)

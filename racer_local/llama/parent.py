"""llama_cpp.Llama, the parent of the drop-in class, and what must be done to it from inside."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from racer_local.config import ContextConfig, ModelConfig, default_threads
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import library
from racer_local.llama.context import GGML_TYPES
from racer_local.llama.model import Model
from racer_local.llama.sampler import Candidates, GreedySampler
from racer_local.llama.target import LlamaTarget, shape_for
from racer_local.tree import Tokens

Parent: Any = library.init().Llama
State: Any = library.init().LlamaState
UNSEEDED: int = library.init().LLAMA_DEFAULT_SEED
"""A seed for which llama.cpp draws one itself."""
TypedProcessors = Sequence[Callable[[NDArray[np.intc], NDArray[np.float32]], NDArray[np.float32]]]
SHARED_FIELDS = (
    *("n_ubatch", "n_threads_batch", "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
    *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "type_k", "type_v", "offload_kqv"),
    *("op_offload", "swa_full"),
)
"""Further context parameters that a forward's time or result depends on."""


def prepare(arguments: dict[str, Any], *, exact: bool) -> None:
    """Check what would end the process in C, and fill in what the caller left open.

    Raises ConfigError, saying which argument to change.
    """
    for name, least in (("n_batch", 1), ("n_ubatch", 1), ("n_ctx", 0)):
        value = arguments.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number from {least} on")
    for name in ("n_threads", "n_threads_batch"):
        value = arguments.get(name) or 1
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 512:
            raise ConfigError(f"{name} is {value!r}; it must be from 1 to 512 (this machine: {default_threads()})")
    # The parent takes half the logical CPUs for a token and all for a batch; a thread too many is a cliff.
    arguments["n_threads"] = arguments.get("n_threads") or default_threads()
    arguments["n_threads_batch"] = arguments.get("n_threads_batch") or max(arguments["n_threads"], default_threads())
    on_gpu = arguments.get("n_gpu_layers", 0) != 0 and library.init().llama_supports_gpu_offload()
    if exact and not on_gpu:
        arguments.setdefault("flash_attn", True)
        for name in ("type_k", "type_v"):
            if arguments.get(name) is None:
                arguments[name] = GGML_TYPES["bf16"]


def open_parent(path: Path, model: ModelConfig, context: ContextConfig, n_ctx: int, lookup: int | None = None) -> Any:
    """The parent itself, as a program without us would open it; `lookup`: with prompt lookup of so many tokens.

    It then keeps the logits of every position, and reads a prompt in one batch only.
    """
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    offloads = Model.would_offload(model)
    return Parent(
        str(path),
        n_ctx=n_ctx,
        n_batch=context.n_batch if lookup is None else n_ctx,
        n_threads=context.n_threads,
        n_threads_batch=context.n_threads,
        n_gpu_layers=model.gpu_layers if offloads else 0,
        flash_attn=context.flashes(offloads),
        type_k=GGML_TYPES[context.kv_type or "f16"],
        type_v=GGML_TYPES[context.kv_type or "f16"],
        draft_model=None if lookup is None else LlamaPromptLookupDecoding(num_pred_tokens=lookup),
        verbose=False,
    )


def in_the_way(llama: Any) -> list[str]:
    """Settings in force with which a batch does not equal single tokens on a CPU, see `racing.in_the_way`."""
    params = llama.context_params
    if offloads(llama):
        return []
    chosen = [] if params.flash_attn_type == library.init().LLAMA_FLASH_ATTN_TYPE_ENABLED else ["flash_attn=False"]
    split = {GGML_TYPES[name]: name for name in ("f16", "f32")}
    types = {field: getattr(params, field) for field in ("type_k", "type_v")}
    return chosen + [f"{field}={number} ({split[number]})" for field, number in types.items() if number in split]


def offloads(llama: Any) -> bool:
    """Whether layers are on a GPU."""
    return bool(library.init().llama_supports_gpu_offload()) and llama.model_params.n_gpu_layers != 0


def native_tokenizer(llama: Any) -> bool:
    """Whether tokens are the model's own, each with its bytes."""
    return type(llama.tokenizer_) is library.init().LlamaTokenizer


def can_generate(llama: Any) -> bool:
    """Whether this is a text model with a context for it."""
    return not llama.model_params.vocab_only and not llama.context_params.embeddings


def lend_model(llama: Any) -> Model:
    """A Llama's model, which stays its own.

    Raises ModelError where the model is none that generates text (an encoder).
    """
    options = {"gpu_layers": llama.model_params.n_gpu_layers, "lora": str(llama.lora_path)}
    return Model.lent(llama._model.model, llama.model_path, offloads=offloads(llama), options=options)


def open_branching(llama: Any, model: Model, max_nodes: int) -> LlamaTarget:
    """Give a Llama, just made, a context in which a tree can be verified, in place of its own.

    The parameters are those of its own, with the room and the sequences that a tree needs on top. Both what is
    returned and what replaces its own stays the Llama's, which closes it with itself.
    """
    from llama_cpp import _internals as internals

    lib, own = library.init(), llama.context_params
    n_ctx = llama.n_ctx()
    config = ContextConfig(
        n_ctx=n_ctx,
        n_batch=llama.n_batch,
        threads=own.n_threads,
        flash_attn="on" if own.flash_attn_type == lib.LLAMA_FLASH_ATTN_TYPE_ENABLED else "off",
        options={name: getattr(own, name) for name in SHARED_FIELDS},
    )
    shape = shape_for(model, config, n_ctx, max_nodes)
    params = type(own).from_buffer_copy(own)
    shape.apply(params)
    if llama._logits_all:
        params.n_outputs_max = max(params.n_outputs_max, llama.n_batch)
    llama._ctx.close()
    library.show_log(False)  # it has been said for the parent's context, and of fewer tokens
    try:
        context = internals.LlamaContext(model=llama._model, params=params, verbose=llama.verbose)
    finally:
        library.show_log(True)
    llama._ctx = llama._stack.enter_context(contextlib.closing(context))
    _apply_lora(llama)
    target = LlamaTarget(model, config, max_nodes, handle=llama._ctx.ctx)
    llama._stack.callback(model.close)
    return target


def _apply_lora(llama: Any) -> None:
    if llama._lora_adapter is None:
        return
    lib = library.init()
    adapters = (lib.llama_adapter_lora_p_ctypes * 1)(llama._lora_adapter)
    if lib.llama_set_adapters_lora(llama._ctx.ctx, adapters, 1, (ctypes.c_float * 1)(llama.lora_scale)):
        raise ModelError(f"the LoRA adapter {llama.lora_path} could not be set; check that it is for this model")


class CallSampler:
    """The sampler chain that the parent makes for a call, behind the caller's logits processors.

    It keeps the Llama's `input_ids` and `n_tokens`, so that what looks at them sees accepted tokens, in order.
    """

    def __init__(
        self, llama: Any, processors: TypedProcessors, settings: dict[str, Any], candidates: Candidates
    ) -> None:
        self._llama, self._processors, self._candidates = llama, processors, candidates
        self._chain = llama._sampler = llama._init_sampler(**settings)
        plain = all(settings[name] == value for name, value in PLAIN.items())
        self._greedy = GreedySampler() if plain and settings["grammar"] is None else None

    def begin(self, prompt: Tokens) -> None:
        self._seen = len(prompt)
        self._llama.input_ids[: self._seen] = prompt

    def draw(self, logits: NDArray[np.float32]) -> int:
        if self._processors:
            self._llama.n_tokens = self._seen
            logits = logits.copy()
            for processor in self._processors:
                logits[:] = processor(self._llama.input_ids[: self._seen], logits)
        token = self._greedy.draw(logits) if self._greedy else self._candidates.draw(self._chain.sampler, logits)
        self._llama.input_ids[self._seen] = token
        self._seen += 1
        return token


PLAIN = {"temp": 0.0, "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Settings of a call whose draw is the likeliest token, whatever else is set."""


def prompt_tokens(llama: Any, prompt: str | Sequence[int], suffix: str | None) -> list[int]:
    """Prompt tokens as the parent makes them (Llama._create_completion), with its marks for an infill, which are 0."""
    model, listed = llama._model, not isinstance(prompt, str)
    start, end = llama.token_bos(), model.token_sep()
    start = model.token_cls() if model.token_cls() != -1 else start
    tokens: list[int] = _tokenize(llama, prompt, suffix is None) if isinstance(prompt, str) else list(prompt)
    adds = suffix is not None or not listed
    head = [start] if adds and model.add_bos_token() and start != -1 else []
    tail = [end if end != -1 else llama.token_eos()] if adds and (model.add_eos_token() or end != -1) else []
    if suffix is not None:
        spaced = suffix and llama.metadata.get("tokenizer.ggml.add_space_prefix", "true") == "true"
        behind = _tokenize(llama, "☺" + suffix)[2:] if spaced else _tokenize(llama, suffix)
        before, behind = [0, *tokens], [0, *behind]
        tokens = [*(behind + before if llama.spm_infill else before + behind), 0]
    tokens = [*head, *tokens, *tail]
    if tokens[:2] == [llama.token_bos()] * 2:
        bos = model.token_get_text(llama.token_bos())
        warnings.warn(
            f'Detected duplicate leading "{bos}" in prompt, this will likely reduce response quality, '
            "consider removing it...",
            RuntimeWarning,
            stacklevel=2,
        )
    if not tokens and llama.token_bos() != -1:
        tokens = [llama.token_bos()]
    return tokens


def _tokenize(llama: Any, text: str, special: bool = False) -> list[int]:
    return list(llama.tokenize(text.encode("utf-8"), add_bos=False, special=special)) if text else []

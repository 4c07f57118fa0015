"""Tiny GGUF models with random weights: they load and decode in milliseconds and say nothing of sense.

`python tests/tiny_gguf.py racer_local/llama/probe.gguf` writes the file that the build probe decodes.
The same arguments give the same bytes on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

EMBEDDING, HEADS, KV_HEADS, FFN = 64, 4, 2, 128
HEAD = EMBEDDING // HEADS
INNER, STATE, CONV, DT_RANK = 2 * EMBEDDING, 16, 4, 32  # mamba's widths
HYBRIDS = "lfm2", "jamba"
UNK, BOS, EOS, FIRST_BYTE, FIRST_PIECE = 0, 1, 2, 3, 259
CONTEXT = 4096

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

Weights = Callable[..., NDArray[np.float32]]
Tensor = tuple[str, NDArray[np.float32]]


def write_tiny_gguf(
    path: str | Path,
    *,
    seed: int = 0,
    n_layer: int = 1,
    n_vocab: int = 320,
    quant: str = "Q8_0",
    arch: str = "llama",
    vocab_only: bool = False,
    window: int = 32,
    pooling: int = 0,
) -> Path:
    """Writes the model and returns its path.

    quant: type of the matrices ("Q8_0", "Q4_0", "F16", "F32", ...), or "mixed" for Q4_0 and Q8_0 by turns.
    arch: "llama", "mamba" (recurrent), "gemma3" (five of six layers see `window` tokens), "lfm2" and "jamba" (hybrid:
    layers with a state and layers with attention by turns; lfm2's state can be taken back), or any other name, which
    gets llama's tensors.
    vocab_only: metadata and vocabulary without a tensor.
    pooling: llama_pooling_type of a model for embeddings; 1 is the mean.
    """
    writer = gguf.GGUFWriter(path, arch)
    _add_hyperparameters(writer, arch, n_layer, n_vocab)
    if arch == "gemma3":
        writer.add_sliding_window(window)
    if pooling:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    _add_vocabulary(writer, n_vocab)
    if not vocab_only:
        tensors = {"mamba": _mamba, "gemma3": _gemma3, "lfm2": _lfm2, "jamba": _jamba}.get(arch, _llama)
        _add_tensors(writer, tensors(_weights(seed), n_layer, n_vocab), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_hyperparameters(writer: gguf.GGUFWriter, arch: str, n_layer: int, n_vocab: int) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(0 if arch == "mamba" else FFN)
    writer.add_head_count(0 if arch == "mamba" else HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch in ("mamba", "jamba"):
        writer.add_ssm_conv_kernel(CONV)
        writer.add_ssm_inner_size(INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(DT_RANK)
    if arch == "lfm2":
        writer.add_shortconv_l_cache(CONV)
    if arch != "mamba":
        heads = [KV_HEADS if _attends(layer) else 0 for layer in range(n_layer)]
        writer.add_head_count_kv(heads if arch in HYBRIDS else KV_HEADS)
        writer.add_rope_dimension_count(HEAD)
    writer.add_quantization_version(2)


def _attends(layer: int) -> bool:
    """Whether a layer of a hybrid has attention."""
    return layer % 2 == 1


def _pieces() -> Iterator[str]:
    """A space, letters, letters after a space, the rest of plain English, then pairs of letters."""
    yield from f"▁{ascii_lowercase}"
    yield from (f"▁{letter}" for letter in ascii_lowercase)
    yield from f".,!?'{digits}{ascii_uppercase}"
    yield from (a + b for a in ascii_lowercase for b in ascii_lowercase)


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    pieces = list(islice(_pieces(), max(0, n_vocab - FIRST_PIECE)))
    if FIRST_PIECE + len(pieces) != n_vocab:
        raise ValueError(f"n_vocab is {n_vocab}; it must be from {FIRST_PIECE} to 1029")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_scores([0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(pieces))])
    special = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types([*special, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(TEMPLATE)


def _weights(seed: int) -> Weights:
    """A source of uniform weights. Raw draws of a bit generator stay the same over numpy's versions."""
    bits = np.random.PCG64(seed)

    def draw(*shape: int, scale: float | None = None) -> NDArray[np.float32]:
        unit = (bits.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
        width = (3.0 / shape[-1]) ** 0.5 if scale is None else scale
        values: NDArray[np.float32] = (unit * width).astype(np.float32).reshape(shape)
        return values

    return draw


def _llama(draw: Weights, n_layer: int, n_vocab: int) -> Iterator[Tensor]:
    yield from _ends(draw, n_vocab)
    for name in (f"blk.{layer}." for layer in range(n_layer)):
        yield from _attention(draw, name)
        yield from _feed_forward(draw, name)


def _gemma3(draw: Weights, n_layer: int, n_vocab: int) -> Iterator[Tensor]:
    yield from _llama(draw, n_layer, n_vocab)
    for name in (f"blk.{layer}." for layer in range(n_layer)):
        yield name + "attn_q_norm.weight", np.ones(HEAD, np.float32)
        yield name + "attn_k_norm.weight", np.ones(HEAD, np.float32)
        yield name + "post_attention_norm.weight", np.ones(EMBEDDING, np.float32)
        yield name + "post_ffw_norm.weight", np.ones(EMBEDDING, np.float32)


def _mamba(draw: Weights, n_layer: int, n_vocab: int) -> Iterator[Tensor]:
    yield from _ends(draw, n_vocab)
    for name in (f"blk.{layer}." for layer in range(n_layer)):
        yield from _state_space(draw, name)


def _jamba(draw: Weights, n_layer: int, n_vocab: int) -> Iterator[Tensor]:
    yield from _ends(draw, n_vocab)
    for layer in range(n_layer):
        name = f"blk.{layer}."
        if _attends(layer):
            yield from _attention(draw, name)
        else:
            yield from _state_space(draw, name)
            yield name + "ssm_dt_norm.weight", np.ones(DT_RANK, np.float32)
            yield name + "ssm_b_norm.weight", np.ones(STATE, np.float32)
            yield name + "ssm_c_norm.weight", np.ones(STATE, np.float32)
        yield from _feed_forward(draw, name)


def _lfm2(draw: Weights, n_layer: int, n_vocab: int) -> Iterator[Tensor]:
    for name, values in _ends(draw, n_vocab, loudness=4.0):  # its text repeats itself, with variations
        yield ("token_embd_norm.weight" if name == "output_norm.weight" else name), values
    for layer in range(n_layer):
        name = f"blk.{layer}."
        if _attends(layer):
            yield from _attention(draw, name)
            yield name + "attn_q_norm.weight", np.ones(HEAD, np.float32)
            yield name + "attn_k_norm.weight", np.ones(HEAD, np.float32)
        else:
            yield name + "attn_norm.weight", np.ones(EMBEDDING, np.float32)
            yield name + "shortconv.conv.weight", draw(EMBEDDING, CONV)
            yield name + "shortconv.in_proj.weight", draw(3 * EMBEDDING, EMBEDDING)
            yield name + "shortconv.out_proj.weight", draw(EMBEDDING, EMBEDDING)
        yield from _feed_forward(draw, name)


def _attention(draw: Weights, name: str) -> Iterator[Tensor]:
    yield name + "attn_norm.weight", np.ones(EMBEDDING, np.float32)
    yield name + "attn_q.weight", draw(EMBEDDING, EMBEDDING)
    yield name + "attn_k.weight", draw(KV_HEADS * HEAD, EMBEDDING)
    yield name + "attn_v.weight", draw(KV_HEADS * HEAD, EMBEDDING)
    yield name + "attn_output.weight", draw(EMBEDDING, EMBEDDING)


def _feed_forward(draw: Weights, name: str) -> Iterator[Tensor]:
    yield name + "ffn_norm.weight", np.ones(EMBEDDING, np.float32)
    yield name + "ffn_gate.weight", draw(FFN, EMBEDDING)
    yield name + "ffn_up.weight", draw(FFN, EMBEDDING)
    yield name + "ffn_down.weight", draw(EMBEDDING, FFN)


def _state_space(draw: Weights, name: str) -> Iterator[Tensor]:
    decay = -np.broadcast_to(np.arange(1, STATE + 1, dtype=np.float32), (INNER, STATE))
    yield name + "attn_norm.weight", np.ones(EMBEDDING, np.float32)
    yield name + "ssm_in.weight", draw(2 * INNER, EMBEDDING)
    yield name + "ssm_conv1d.weight", draw(INNER, CONV)
    yield name + "ssm_conv1d.bias", np.zeros(INNER, np.float32)
    yield name + "ssm_x.weight", draw(DT_RANK + 2 * STATE, INNER)
    yield name + "ssm_dt.weight", draw(INNER, DT_RANK)
    yield name + "ssm_dt.bias", np.zeros(INNER, np.float32)
    yield name + "ssm_a", np.ascontiguousarray(decay)
    yield name + "ssm_d", np.ones(INNER, np.float32)
    yield name + "ssm_out.weight", draw(EMBEDDING, INNER)


def _ends(draw: Weights, n_vocab: int, loudness: float = 1.0) -> Iterator[Tensor]:
    """`loudness`: the size of an embedding beside what a layer adds to it."""
    yield "token_embd.weight", draw(n_vocab, EMBEDDING, scale=loudness)
    yield "output_norm.weight", np.ones(EMBEDDING, np.float32)
    yield "output.weight", draw(n_vocab, EMBEDDING)


def _add_tensors(writer: gguf.GGUFWriter, tensors: Iterator[Tensor], quant: str) -> None:
    turns = chain.from_iterable(iter(lambda: ("Q4_0", "Q8_0") if quant == "mixed" else (quant,), ()))
    for name, values in tensors:
        # Norms, biases and mamba's small tensors stay F32, as in every published file.
        matrix = values.ndim == 2 and values.shape[-1] % 32 == 0
        kind = GGMLQuantizationType[next(turns) if matrix else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def write_probe(path: str | Path) -> Path:
    """The model of `racer_local.llama.probe`: both types whose CPU kernels differ most between builds."""
    return write_tiny_gguf(path, quant="mixed")


if __name__ == "__main__":
    print(write_probe(sys.argv[1]))

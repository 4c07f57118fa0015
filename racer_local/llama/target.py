"""The Target over llama.cpp: one context whose cache can branch and roll back.

Sequence 0 is the text. A tree of L leaves uses the sequences 0 .. L-1, one a leaf; each shares the text's cells
and is brought up to date only when a tree needs it. One more sequence, the spare, keeps rejected cells that
lie between accepted ones: attention adds cells up in the order in which they lie, so a later token in such a
hole would change the sums of the text behind it. Holes are given back when space is short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from racer_local.config import MAX_NODES, PROMPT_ROWS, ContextConfig, default_threads
from racer_local.errors import ConfigError, ContextFullError, DecodeError, ModelError
from racer_local.llama import library
from racer_local.llama.batch import Batch
from racer_local.llama.model import Model
from racer_local.target import OnRows, Rows, never
from racer_local.tree import DraftTree, NodeIds, Tokens

OWN_FIELDS = frozenset(
    {"n_ctx", "n_batch", "n_seq_max", "kv_unified", "n_outputs_max", "n_outputs_max_per_seq", "embeddings"}
)
"""Context fields that follow from `ContextConfig` and the tree size."""

GGML_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""enum ggml_type; the binding lacks a name for bf16."""

NO_SLOT = 1
END = -1
"""As a position: up to the last one."""


class LlamaTarget:
    """A llama.cpp context as a Target. Closing twice is harmless; closing the model closes it too.

    `max_nodes` is the largest tree that will be evaluated; 1 is plain decoding. Logits memory is max_nodes (and
    for prompts PROMPT_ROWS) x vocabulary x 4 bytes.
    """

    def __init__(self, model: Model, config: ContextConfig | None = None, max_nodes: int = 1) -> None:
        config = config or ContextConfig()
        if not 1 <= max_nodes <= MAX_NODES:
            raise ConfigError(f"max_nodes is {max_nodes}; it must be from 1 to {MAX_NODES} (the root counts)")
        self.model = model
        self.n_ctx = config.n_ctx
        self.n_batch = config.n_batch
        self.max_nodes = max_nodes if model.can_branch else 1
        self.max_leaves = max(1, self.max_nodes - 1)
        self.held: list[int] = []
        """The tokens in the cache."""
        self._spare = self.max_leaves
        self._prompt_rows = PROMPT_ROWS if self.max_nodes > 1 else 1
        self._max_rows = max(self._prompt_rows, self.max_nodes, self.max_leaves + 1)
        self._logits_at: int | None = None
        self._handle: Any = None
        self._lib = library.init()
        self._handle = self._open(config)
        model.closes_first(self)
        self._batch = Batch(self._lib, max(config.n_batch, self.max_nodes))
        self._tree = DraftTree.chain([0])
        self._first, self._end = self._tree.leaf_spans()
        self._synced = [0] * self.max_leaves
        """Up to which position each sequence holds the text."""

    def _open(self, config: ContextConfig) -> Any:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = config.n_ctx + self.max_nodes  # room for a tree at the last position
        params.n_batch = max(config.n_batch, self.max_nodes)
        params.n_ubatch = max(min(config.n_batch, params.n_ubatch), self.max_nodes)
        params.n_seq_max = self.max_leaves + 1
        params.kv_unified = True
        params.n_outputs_max = self._max_rows
        params.n_threads = params.n_threads_batch = config.threads or default_threads()
        params.flash_attn_type = _flash_attn(lib, config, self.model.offloads)
        params.type_k = params.type_v = GGML_TYPES[config.kv_type]
        params.swa_full = True
        if own := OWN_FIELDS & config.options.keys():
            raise ConfigError(f"the context option {min(own)} follows from other settings; use those")
        library.set_fields(params, config.options, "the context")
        handle = lib.llama_init_from_model(self.model.handle, params)
        if not handle:
            raise ModelError(
                f"no context of {config.n_ctx} tokens could be opened: {library.last_error()}; try a smaller "
                f"n_ctx (--ctx), another kv_type (--kv-type) or flash_attn (--flash-attn)"
            )
        return handle

    def prefill(self, tokens: Tokens, on_rows: OnRows | None = None, cancelled: Callable[[], bool] = never) -> int:
        """See `Target.prefill`. Raises ContextFullError where the tokens do not fit."""
        if len(tokens) >= self.n_ctx:
            raise ContextFullError(f"{len(tokens)} tokens do not fit into a context of {self.n_ctx}")
        wanted = [int(token) for token in tokens]
        self._cut(_shared_prefix(self.held, wanted))
        already = len(self.held)
        size = self.n_batch if on_rows is None else min(self.n_batch, self._prompt_rows)
        for start in range(already, len(wanted), size):
            if cancelled():
                break
            chunk = wanted[start : start + size]
            self._batch.fill_text(chunk, start, outputs=on_rows is not None)
            self._decode(f"{len(chunk)} prompt tokens")
            self.held.extend(chunk)
            self._synced[0] = len(self.held)
            if on_rows is not None:
                on_rows(chunk, self._rows(len(chunk)))
        return already

    def evaluate(self, tree: DraftTree) -> Rows:
        """See `Target.evaluate`. Whatever goes wrong, the cache is as before.

        Raises ConfigError for a tree beyond max_nodes or max_leaves, ContextFullError for one beyond n_ctx.
        """
        self._tree, (self._first, self._end) = tree, tree.leaf_spans()
        past, leaves = len(self.held), int(self._end[0])
        if len(tree) > self.max_nodes or leaves > self.max_leaves:
            raise ConfigError(
                f"a tree of {len(tree)} nodes and {leaves} leaves; "
                f"this target was opened for {self.max_nodes} nodes and {self.max_leaves} leaves"
            )
        if past + int(tree.depths.max()) >= self.n_ctx:
            raise ContextFullError(
                f"the context of {self.n_ctx} tokens is full: {past} are held and the tree is "
                f"{int(tree.depths.max()) + 1} deep; open it with a larger n_ctx (--ctx)"
            )
        self._share_text(leaves)
        self._batch.fill_tree(tree, past, self._first, self._end)
        self._decode(f"a tree of {len(tree)} nodes and {leaves} leaves")
        return self._rows(len(tree))

    def commit(self, path: NodeIds) -> None:
        """See `Target.commit`. Rejected cells before the last kept one become holes, those behind it are free."""
        if not path:
            self._cut(len(self.held))
            return
        past, keeper = len(self.held), int(self._first[path[-1]])
        shared = self._depth_shared_with(path)
        for leaf in range(keeper):
            self._copy(leaf, self._spare, past + shared[leaf], END)
        for leaf, depth in enumerate(shared):
            self._remove(leaf, past + depth, END)
            self._synced[leaf] = past + depth
        if keeper > 0:
            self._copy(keeper, 0, past + shared[0], END)
        self.held.extend(self._tree.tokens[path].tolist())
        self._synced[0] = len(self.held)

    def clear(self) -> None:
        """Forget the text."""
        self._cut(0)

    def _depth_shared_with(self, path: NodeIds) -> list[int]:
        """For each leaf, how many nodes of the path lie above (or at) it."""
        low, high = 0, int(self._end[0])
        shared = [len(path)] * high
        for depth, node in enumerate(path):
            first, end = int(self._first[node]), int(self._end[node])
            for leaf in (*range(low, first), *range(end, high)):
                shared[leaf] = depth
            low, high = first, end
        return shared

    def _share_text(self, leaves: int) -> None:
        """Let the sequences of a tree's leaves see the whole text."""
        past = len(self.held)
        for leaf in range(1, leaves):
            if self._synced[leaf] < past:
                self._copy(0, leaf, self._synced[leaf], past)
                self._synced[leaf] = past

    def _decode(self, what: str) -> None:
        """llama_decode of the batch; rolled back unless it succeeds."""
        past = len(self.held)
        done = False
        try:
            code = self._lib.llama_decode(self._context, self._batch.struct)
            if code == NO_SLOT:
                self._remove(self._spare, 0, END)
                code = self._lib.llama_decode(self._context, self._batch.struct)
            if code == NO_SLOT:
                raise ContextFullError(
                    f"no room for {what} behind {past} tokens in a context of {self.n_ctx}; "
                    f"open it with a larger n_ctx (--ctx)"
                )
            if code != 0:
                raise DecodeError(f"llama_decode returned {code} for {what}: {library.last_error()}")
            done = True
        finally:
            if not done:
                self._cut(past)

    def _rows(self, n: int) -> Rows:
        logits = self._lib.llama_get_logits(self._context)
        address = ctypes.cast(logits, ctypes.c_void_p).value
        if address != self._logits_at:  # making a view costs more than the rest of a step
            shape = (self._max_rows, self.model.n_vocab)
            self._logits_at, self._logits = address, np.ctypeslib.as_array(logits, shape)
        return self._logits[:n]

    def _cut(self, length: int) -> None:
        """Keep the first `length` tokens of the text, in every sequence, and drop what an evaluation left.

        Holes stay: a freed one would lie before cells that are kept.
        """
        cut = [self._remove(sequence, length, END) for sequence in range(self.max_leaves)]
        if length == 0 or not all(cut):
            # Partial removal is refused where the memory holds a recurrent state.
            self._lib.llama_memory_clear(self._memory, False)
            length = 0
        del self.held[length:]
        self._synced = [min(synced, length) for synced in self._synced]

    def _remove(self, sequence: int, start: int, end: int) -> bool:
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, end))

    def _copy(self, source: int, to: int, start: int, end: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, source, to, start, end)

    @property
    def _memory(self) -> Any:
        return self._lib.llama_get_memory(self._context)

    @property
    def _context(self) -> Any:
        if self._handle is None:
            raise ModelError("this target is closed")
        return self._handle

    def close(self) -> None:
        if self._handle is not None:
            self._lib.llama_free(self._handle)
            self._handle = None

    def __enter__(self) -> LlamaTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flash_attn(lib: Any, config: ContextConfig, offloads: bool) -> int:
    if config.flash_attn == "on" or config.kv_type == "q8_0":
        return int(lib.LLAMA_FLASH_ATTN_TYPE_ENABLED)
    if config.flash_attn == "auto" and offloads:
        return int(lib.LLAMA_FLASH_ATTN_TYPE_AUTO)
    return int(lib.LLAMA_FLASH_ATTN_TYPE_DISABLED)


def _shared_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])

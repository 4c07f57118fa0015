"""The Target over llama.cpp: a context whose cache can branch and roll back.

Sequence 0 is the text. A tree of L leaves uses the sequences 0 .. L-1, one a leaf; each shares the text's cells
and is brought up to date only when a tree needs it.

Where a row of a batch equals a single one to the bit, the order of the cells matters too: attention adds them up
as they lie, so a later token in the cell of a rejected one would change the sums of the text behind it. There
the rejected cells that lie before kept ones become holes: two spare sequences hold them (two, since llama.cpp
takes a cell of one sequence back once it leaves a sliding window). When space is short the holes are closed by
evaluating the text again from the first one on.

A recurrent or hybrid memory can't branch. Where it keeps snapshots of its state (n_rs_seq) the last tokens of a
forward can be taken back, so there drafts are chains; elsewhere there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

from racer_local.config import MAX_NODES, PROMPT_ROWS, RECURRENT_NODES, ContextConfig
from racer_local.errors import ConfigError, ContextFullError, DecodeError
from racer_local.llama.context import Aborted, Context, Shape
from racer_local.llama.model import Model
from racer_local.target import Exactness, OnRows, Rows, never
from racer_local.text import VocabularyId
from racer_local.tree import DraftTree, NodeIds, Tokens


class LlamaTarget:
    """A llama.cpp context as a Target. Closing twice is harmless; closing the model closes it too.

    `max_nodes` is the largest tree that will be evaluated; 1 is plain decoding. Logits memory is max_nodes (and
    for prompts PROMPT_ROWS) x vocabulary x 4 bytes.
    """

    def __init__(
        self, model: Model, config: ContextConfig | None = None, max_nodes: int = 1, handle: Any = None
    ) -> None:
        """`handle` is a llama_context that somebody else opened in the `shape_for` these, see `Context`."""
        config = config or ContextConfig()
        if not 1 <= max_nodes <= MAX_NODES:
            raise ConfigError(f"max_nodes is {max_nodes}; it must be from 1 to {MAX_NODES} (the root counts)")
        self.n_ctx = config.n_ctx or min(ContextConfig.DEFAULT_CTX, model.n_ctx_train)
        self.n_vocab = model.n_vocab
        self._model = model
        shape = shape_for(model, config, self.n_ctx, max_nodes)
        self._context = Context(model, config, shape, handle)
        self._can_branch, self._window = model.can_branch, model.window
        if self._context.snapshots or not model.can_branch:
            self._can_branch = False
            max_nodes = min(max_nodes, 1 + self._context.snapshots)
        self.max_nodes = max_nodes
        self.max_leaves = max(1, max_nodes - 1) if self._can_branch and not _forgets(model, config) else 1
        self.held: list[int] = []
        """The tokens in the cache."""
        self.facts = {
            **model.facts,
            "n_ctx": self.n_ctx,
            "threads": config.n_threads,
            "max_nodes": self.max_nodes,
            **{name: getattr(config, name) for name in ("n_batch", "flash_attn", "kv_type")},
            "context_options": dict(config.options),
        }
        """What a forward's time depends on; JSON."""
        self._n_batch = config.n_batch
        self._prompt_rows = min(PROMPT_ROWS, shape.rows)
        self._spares = (self.max_leaves, self.max_leaves + 1) if self.max_leaves > 1 else ()
        self._most = self.max_nodes, self.max_leaves
        self._exact: Exactness | None = None
        self.always_in_order = config.batch_equals_single
        """Whether, by the settings, a row of a batch can equal a single one, so that the cells' order matters."""
        self._holes_from: int | None = None
        """No cell of the text below this position lies behind a hole; None: there are no holes."""
        self._pending: DraftTree | None = None
        self._first, self._end = DraftTree.chain([0]).leaf_spans()
        self._synced = [0] * self.max_leaves
        """Up to which position each sequence holds the text."""

    def restrict(self, exact: Exactness | None) -> None:
        """From now on only trees that leave every row as it is, and cells in order; None: no restriction.

        Where there was none before, or is none any more, the text is forgotten: it was evaluated by other rules.
        """
        if (exact is None) != (self._exact is None):
            self.clear()
        self._exact = exact
        self.max_nodes, self.max_leaves = self._most
        if exact is not None:
            self.max_nodes = min(self.max_nodes, exact.rows)
            self.max_leaves = max(1, min(self.max_leaves, self.max_nodes - 1)) if exact.branches else 1

    @property
    def vocabulary(self) -> VocabularyId:
        """Which vocabulary its tokens are of."""
        return self._model.id

    def prefill(
        self,
        tokens: Tokens,
        on_rows: OnRows | None = None,
        cancelled: Callable[[], bool] = never,
        last: int | None = None,
    ) -> int:
        """See `Target.prefill`. Raises ContextFullError where the tokens do not fit."""
        self._must_not_be_pending()
        if len(tokens) >= self.n_ctx:
            raise ContextFullError(f"{len(tokens)} tokens do not fit into a context of {self.n_ctx}")
        wanted = [int(token) for token in tokens]
        self._cut(_shared_prefix(self.held, wanted))
        already = len(self.held)
        silent = already if last is None or on_rows is None else max(already, len(wanted) - last)
        self._append(wanted[already:silent], None, cancelled)
        self._append(wanted[silent:], on_rows, cancelled)
        return already

    def evaluate(self, tree: DraftTree) -> Rows:
        """See `Target.evaluate`. Whatever goes wrong, the cache is as before.

        Raises ConfigError for a tree beyond max_nodes or max_leaves, ContextFullError for one beyond n_ctx.
        """
        self._must_not_be_pending()
        first, end = tree.leaf_spans()
        past, leaves, depth = len(self.held), int(end[0]), int(tree.depths.max())
        if len(tree) > self.max_nodes or leaves > self.max_leaves:
            raise ConfigError(
                f"a tree of {len(tree)} nodes and {leaves} leaves; "
                f"this target was opened for {self.max_nodes} nodes and {self.max_leaves} leaves"
            )
        if past + depth >= self.n_ctx:
            raise ContextFullError(
                f"the context of {self.n_ctx} tokens is full: {past} are held and the tree is {depth + 1} deep; "
                f"open it with a larger n_ctx (--ctx)"
            )

        def fill() -> None:
            self._share_text(leaves)
            self._context.batch.fill_tree(tree, past, first, end)

        self._decode(fill, f"a tree of {len(tree)} nodes and {leaves} leaves")
        self._pending, self._first, self._end = tree, first, end
        return self._context.rows(len(tree))

    def commit(self, path: NodeIds) -> None:
        """See `Target.commit`."""
        tree, self._pending = self._pending, None
        if (tree is None and not path) or self._context.closed:
            return
        if tree is None:
            raise RuntimeError("commit without an evaluated tree: it was kept or dropped already")
        if not path:
            self._cut(len(self.held) if self._can_branch else 0)  # no snapshot reaches back behind a whole batch
            return
        past, keeper = len(self.held), int(self._first[path[-1]])
        shared = self._depth_shared_with(path)
        if keeper > 0 and (self.always_in_order or self._exact):
            self._leave_holes(keeper, shared)
        for leaf, depth in enumerate(shared):
            if not self._context.remove(leaf, past + depth):
                self._cut(0)
                raise DecodeError(f"the memory can't go back to {past + depth} tokens after a tree of {len(tree)}")
            self._synced[leaf] = past + depth
        if keeper > 0:
            self._context.share(keeper, 0, past + shared[0])
        self.held.extend(tree.tokens[path].tolist())
        self._synced[0] = len(self.held)

    @property
    def lock(self) -> RLock:
        """To be held from a prefill to the last commit of an answer: a context serves one caller at a time."""
        return self._context.lock

    def clear(self) -> None:
        """Forget the text."""
        self._pending = None
        self._cut(0)

    def take_over(self, tokens: list[int]) -> None:
        """Somebody else changed the cache: its sequence 0 now holds `tokens`."""
        self._must_not_be_pending()
        if self.held == tokens:
            return
        same = _shared_prefix(self.held, tokens)
        if same < len(self.held) and self._has_lost(same):
            self._cut(0)
            return
        self._release(same)
        self.held[:] = tokens
        self._synced[0] = len(self.held)

    def only_text(self) -> None:
        """Leave nothing in the cache but the text in sequence 0; what lies out of order by that is evaluated again."""
        if self._holes_from is not None:
            self._close_holes()
        self._release(0)

    def close(self) -> None:
        self._context.close()

    def __enter__(self) -> LlamaTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, tokens: list[int], on_rows: OnRows | None, cancelled: Callable[[], bool]) -> None:
        """Evaluate tokens behind the text, in chunks."""
        size = self._n_batch if on_rows is None else min(self._n_batch, self._prompt_rows)
        for start in range(0, len(tokens), size):
            if cancelled():
                break
            chunk, past = tokens[start : start + size], len(self.held)

            def fill(chunk: list[int] = chunk, past: int = past) -> None:
                self._context.batch.fill_text(chunk, past, outputs=on_rows is not None)

            try:
                with self._context.aborting(cancelled):
                    self._decode(fill, f"{len(chunk)} prompt tokens")
            except Aborted:
                break
            self.held.extend(chunk)
            self._synced[0] = len(self.held)
            if on_rows is not None:
                on_rows(chunk, self._context.rows(len(chunk)))
        self._context.wait()

    def _decode(self, fill: Callable[[], None], what: str) -> None:
        """One forward of the batch that `fill` makes; rolled back unless it succeeds."""
        past, done = len(self.held), False
        try:
            fill()
            done = self._context.decode(what)
            if not done and self._holes_from is not None:
                self._close_holes()
                fill()
                done = self._context.decode(what)
            if not done:
                raise ContextFullError(
                    f"no room for {what} behind {past} tokens in a context of {self.n_ctx}; "
                    f"open it with a larger n_ctx (--ctx)"
                )
        finally:
            if not done:
                self._cut(past if self._can_branch else 0)

    def _must_not_be_pending(self) -> None:
        if self._pending is not None:
            raise RuntimeError("an answer is still open on this target; close its iterator first")

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
                self._context.share(0, leaf, self._synced[leaf], past)
                self._synced[leaf] = past

    def _leave_holes(self, keeper: int, shared: list[int]) -> None:
        """Keep out of use what the leaves before the kept path do not share with it."""
        past = len(self.held)
        if self._holes_from is None:
            self._holes_from = past + 1
        for leaf in range(keeper):
            for spare in self._spares:
                self._context.share(leaf, spare, past + shared[leaf])

    def _close_holes(self) -> None:
        """Free the holes and evaluate the text again from the first one on."""
        start = self._holes_from or 0
        tail = self.held[start:]
        self._cut(start)
        self._append(tail, None, never)

    def _cut(self, length: int) -> None:
        """Keep the first `length` tokens of the text, in every sequence, and drop what an evaluation left.

        Holes before kept cells stay: a freed one would take a later token. What is noted shrinks before the cache
        does, so that an interrupt in between leaves too much in the cache, which the next cut mends.
        """
        shorter = length < len(self.held)
        del self.held[length:]
        self._synced = [min(synced, length) for synced in self._synced]
        if length == 0 or (shorter and self._has_lost(length)) or not self._context.remove(0, length):
            self.held.clear()
            self._synced = [0] * len(self._synced)
            self._context.clear()
            self._holes_from = None
        else:
            self._release(length)

    def _has_lost(self, length: int) -> bool:
        """Whether the memory can't go back to the first `length` tokens of the text."""
        if not self._can_branch:
            return True  # the state has moved on, and a snapshot reaches back within the last forward only
        return self._window > 0 and self._context.forgets_before(0) > max(0, length - self._window)

    def _release(self, length: int) -> None:
        """Let only sequence 0 hold what lies behind the first `length` tokens."""
        for leaf in range(1, len(self._synced)):
            self._context.remove(leaf, length)
            self._synced[leaf] = min(self._synced[leaf], length)
        if self._holes_from is not None and length <= self._holes_from:
            for spare in self._spares:
                self._context.remove(spare, 0)
            self._holes_from = None


def _forgets(model: Model, config: ContextConfig) -> bool:
    """Whether what leaves a sliding window is forgotten. Cells of several sequences are not, so only chains fit."""
    return model.window > 0 and not config.options.get("swa_full", True)


def shape_for(model: Model, config: ContextConfig, n_ctx: int, max_nodes: int) -> Shape:
    """What a context needs for n_ctx tokens and, where the model's memory can branch, trees of max_nodes."""
    leaves = max(1, max_nodes - 1) if model.can_branch and not _forgets(model, config) else 1
    sequences = leaves + 2 if leaves > 1 else 1  # two spare ones for holes
    return Shape(
        cells=n_ctx + max_nodes,  # room for a tree at the last position
        sequences=sequences,
        nodes=max_nodes,
        rows=max(PROMPT_ROWS if max_nodes > 1 else 1, max_nodes, sequences),
        snapshots=min(max_nodes, RECURRENT_NODES) - 1,
    )


def _shared_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])

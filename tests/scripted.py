"""A target without a model: its logits are a hash of the prefix. And a drafter that guesses at random."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np

from racer_local.draft import TopK
from racer_local.target import never
from racer_local.tree import DraftTree


def scripted_logits(prefix, n_vocab):
    """[n_vocab] logits that depend on every token of the prefix and on nothing else."""
    digest = hashlib.blake2b(np.asarray(prefix, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=n_vocab).astype(np.float32) * 2


class ScriptedTarget:
    """Keeps to the Target protocol and insists that its caller does."""

    def __init__(self, n_vocab=16, n_ctx=256, max_nodes=64, max_leaves=64, logits=scripted_logits):
        self.n_vocab, self.n_ctx, self.max_nodes, self.max_leaves = n_vocab, n_ctx, max_nodes, max_leaves
        self.logits = logits
        self.cache = []
        self.pending = None
        self.forwards = 0

    def prefill(self, tokens, on_rows=None, cancelled=never, last=None):
        assert self.pending is None, "prefill while a tree is neither kept nor dropped"
        tokens = [int(t) for t in tokens]
        shared = 0
        while shared < min(len(tokens), len(self.cache)) and tokens[shared] == self.cache[shared]:
            shared += 1
        self.cache = tokens[:shared]
        for start in range(shared, len(tokens), 5):
            if cancelled():
                break
            chunk = tokens[start : start + 5]
            self.cache += chunk
            seen = 0 if last is None else max(0, len(tokens) - last - start)
            if on_rows is not None and seen < len(chunk):
                rows = [self.logits(self.cache[: start + i + 1], self.n_vocab) for i in range(seen, len(chunk))]
                on_rows(chunk[seen:], np.array(rows))
        return shared

    def evaluate(self, tree):
        assert self.pending is None, "evaluate while a tree is neither kept nor dropped"
        assert len(tree) <= self.max_nodes
        assert tree.leaf_spans()[1][0] <= self.max_leaves
        assert len(self.cache) + tree.depths.max() < self.n_ctx
        self.pending = tree
        self.forwards += 1
        return np.array([self.logits(self.cache + path_tokens(tree, i), self.n_vocab) for i in range(len(tree))])

    def commit(self, path):
        if self.pending is None and not path:
            return
        assert self.pending is not None, "commit without a tree"
        for parent, node in itertools.pairwise(path):
            assert self.pending.parents[node] == parent
        self.cache += self.pending.tokens[path].tolist()
        self.pending = None


def path_tokens(tree, node):
    tokens = []
    while node >= 0:
        tokens.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens


def random_tree(rng, n_vocab, root, nodes, leaves, depth, banned=()):
    """A tree within the limits; siblings have different tokens."""
    children = [[]]
    tokens, depths = [root], [0]
    for _ in range(int(rng.integers(0, 4 * nodes))):
        parent, token = int(rng.integers(len(tokens))), int(rng.integers(n_vocab))
        n_leaves = sum(not c for c in children)
        if (
            len(tokens) < nodes
            and depths[parent] < depth
            and token not in banned
            and all(tokens[c] != token for c in children[parent])
            and n_leaves + bool(children[parent]) <= leaves
        ):
            children[parent].append(len(tokens))
            children.append([])
            tokens.append(token)
            depths.append(depths[parent] + 1)
    order, parents, stack = [], [], [(0, -1)]
    while stack:
        node, parent = stack.pop()
        place = len(order)
        order.append(tokens[node])
        parents.append(parent)
        stack += [(child, place) for child in reversed(children[node])]
    return DraftTree.of(order, parents)


class RandomDrafter:
    """Random trees; `oracle`, if given, puts the target's own next token in now and then."""

    prompt_rows = None

    def __init__(self, seed, n_vocab, banned=(), breadth=0):
        self.rng = np.random.default_rng(seed)
        self.n_vocab, self.banned, self.breadth = n_vocab, banned, breadth
        self.text, self.seen, self.limits = [], [], []

    def begin(self, prompt):
        self.text = [int(t) for t in prompt]

    def draft(self, root, limit):
        assert root == self.text[-1]
        self.limits.append(limit)
        self.tree = random_tree(self.rng, self.n_vocab, root, limit.nodes, limit.leaves, limit.depth, self.banned)
        return self.tree

    def observe(self, tree, top_k):
        assert isinstance(top_k, TopK)
        assert top_k.ids.shape == (len(tree), self.breadth)
        self.seen += tree.tokens.tolist()

    def accept(self, path, bonus):
        self.text += [*self.tree.tokens[path[1:]].tolist(), bonus]

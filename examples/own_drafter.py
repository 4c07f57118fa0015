"""A drafter of your own: it guesses that the last eight tokens come again. python examples/own_drafter.py MODEL.gguf

A drafter sees token ids only. Whatever it drafts, the text stays the model's.
"""

import sys

from racer_local import ContextConfig, DraftTree, GenerationStats, LlamaTarget, Model, SamplingConfig, make_sampler
from racer_local.engine import generate


class RepeatsEightBack:
    """Drafts the chain of tokens that stood eight places back."""

    breadth = 0  # it learns nothing from logits
    prompt_rows = 0

    def begin(self, prompt):
        self.text = [int(token) for token in prompt]

    def draft(self, root, limit):
        guess = self.text[-8:][: min(limit.nodes - 1, limit.depth)]
        self.tree = DraftTree.chain([root, *guess])
        return self.tree

    def observe(self, tree, top_k): ...

    def accept(self, path, bonus):
        self.text += [*self.tree.tokens[path[1:]].tolist(), bonus]


if len(sys.argv) != 2:
    sys.exit(__doc__)
with Model(sys.argv[1]) as model, LlamaTarget(model, ContextConfig(n_ctx=512), max_nodes=9) as target:
    prompt = model.tokenize("one two three four one two three four one two", add_special=True)
    stats = GenerationStats(draft="own")
    sampler = make_sampler(SamplingConfig(), model.n_vocab)
    for emitted in generate(
        target, RepeatsEightBack(), sampler, prompt, max_tokens=60, end_tokens=model.end_tokens, stats=stats
    ):
        print(model.piece(emitted.token).decode(errors="replace"), end="", flush=True)
print("\n", stats.as_dict())

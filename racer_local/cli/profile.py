"""`racer-local profile`: what verifying a tree of n nodes costs with this model on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from racer_local import models
from racer_local.cli.messages import tell
from racer_local.cli.options import add_model, context_from_args, from_args, model_from_args
from racer_local.cli.parsing import add_command
from racer_local.config import ContextConfig, DraftConfig
from racer_local.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from racer_local.cost import VerifyCost

DESCRIPTION = """\
Measure T(n), what verifying a tree of n nodes costs with this model, these settings and this machine, in forwards of
one token, and remember it. Each model is measured by itself when it is first opened; this measures it again."""
EXAMPLES = (
    ("racer-local profile -m smollm2-135m", "a bar for each size"),
    ("racer-local profile -m my-model.gguf --exact", "also: up to how many nodes a tree changes no bit"),
)
WIDTH = 50


def add_parser(commands: Any) -> None:
    what = "measure what verifying n nodes costs, and remember it for the drafts"
    parser = add_command(commands, "profile", help=what, description=DESCRIPTION, examples=EXAMPLES)
    add_model(parser, ContextConfig, DraftConfig, without=("corpora", "remember"))
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = models.find(args.model)
    context, config = context_from_args(args, path), model_from_args(args)
    draft = from_args(DraftConfig, args)
    if not draft.needs_cost:
        raise ConfigError("only the racer drafter decides by costs; leave out --draft, and --max-nodes 1")

    from racer_local.cost import recall
    from racer_local.draft.racer import RacerDrafter
    from racer_local.llama import LlamaTarget, Model
    from racer_local.racing import exactness, verify_cost

    if draft.exact:
        context = context.for_exact()
    with Model(path, config) as model, LlamaTarget(model, context, max_nodes=draft.nodes) as target:
        if target.max_nodes == 1:
            raise ModelError(f"{path.name} can't verify trees (recurrent or hybrid memory); it decodes plainly")
        cost = verify_cost(target, again=True)
        if (kept := recall(target.facts)) is None or kept.seconds != cost.seconds:
            tell("not remembered: other programs kept the cores busy meanwhile, or the folder can't be written")
        found = exactness(target, again=True) if draft.exact else None
        memory = RacerDrafter.memory_bytes(draft)
        if args.json:
            exact = {"exact": asdict(found)} if found else {}
            print(json.dumps({"facts": target.facts, "memory_bytes": memory, **as_json(cost, draft.nodes), **exact}))
        else:
            print(f"{path.name}, {context.n_threads} threads: T(1) is {1e3 * cost.seconds[0]:.2f} ms")
            print(plot(cost, draft.nodes))
            if found:
                shapes = "trees" if found.branches else "chains"
                print(f"{shapes} of up to {found.rows} nodes give the rows of single tokens, to the bit")
            rows = 4 * target.n_vocab * draft.nodes
            print(f"the logits of {draft.nodes} nodes take {models.readable_size(rows)} (--max-nodes)")
            print(f"what the drafter learns takes {models.readable_size(memory)}, never more (--history)")
    return 0


def as_json(cost: VerifyCost, most: int) -> dict[str, Any]:
    return {
        "sizes": cost.sizes,
        "seconds": cost.seconds,
        "relative": {str(n): round(float(cost.relative[n]), 4) for n in range(1, most + 1)},
    }


def plot(cost: VerifyCost, most: int) -> str:
    """A bar a size: T(n) / T(1). Sizes that the probe had no time for are extrapolated."""
    from racer_local.cost import SIZES

    sizes = [n for n in SIZES if n <= most]
    longest = float(cost.relative[sizes[-1]])
    lines = [" nodes  T(n)/T(1)"]
    for n in sizes:
        relative = float(cost.relative[n])
        mark = "" if n in cost.sizes else "  (extrapolated)"
        lines.append(f"{n:6} {relative:10.2f}  {'#' * max(1, round(WIDTH * relative / longest))}{mark}")
    return "\n".join(lines)

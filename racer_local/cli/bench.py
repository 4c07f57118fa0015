"""`racer-local bench`: measurements; the last line of stdout is JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from racer_local.cli.options import add_model, context_from_args, from_args, model_from_args
from racer_local.config import MAX_NODES, ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError
from racer_local.models import find


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measurements", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    draft = benches.add_parser("draft", help="what drafting costs a step, without a model")
    for flag, default in (("nodes", 64), ("vocab", 50_000), ("context", 8192), ("steps", 500)):
        draft.add_argument(f"--{flag}", type=int, default=default, metavar="N", help="default: %(default)s")
    draft.set_defaults(run=run_draft)

    memory = benches.add_parser("memory", help="peak memory of an answer, plain and drafted")
    memory.add_argument("-m", "--model", required=True, help="a GGUF file or a registry name")
    memory.add_argument("--draft", default="paper", help="drafters, separated by commas; default: %(default)s")
    memory.add_argument("--ctx", type=int, default=8192, metavar="N", help="default: %(default)s")
    memory.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    memory.set_defaults(run=run_memory)

    ids = benches.add_parser("ids", help="do drafts leave the token ids as they are?")
    ids.add_argument("--data", type=Path, required=True, help='JSONL with {"turns": [...]} or {"prompt": ...} a line')
    ids.add_argument("--limit", type=int, default=20, metavar="N", help="prompts; default: %(default)s")
    ids.add_argument("--drafts", default="racer,paper", help="separated by commas; default: %(default)s")
    ids.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add_model(ids, ContextConfig, SamplingConfig)
    ids.set_defaults(run=run_ids)


def run_draft(args: argparse.Namespace) -> int:
    if not 2 <= args.nodes <= MAX_NODES or min(args.vocab, args.context, args.steps) < 100:
        raise ConfigError(f"--nodes must be from 2 to {MAX_NODES}, --vocab, --context and --steps at least 100")
    from racer_local.bench.draft import measure

    result = measure(args.nodes, args.vocab, args.context, args.steps)
    for phase, ms in result["milliseconds"].items():
        print(f"{phase:8} {ms['median']:8.3f} ms (99%: {ms['p99']:.3f} ms)")
    print(json.dumps(result))
    return 0


def run_ids(args: argparse.Namespace) -> int:
    from racer_local.bench.ids import measure, read_prompts
    from racer_local.llama import Model

    if min(args.limit, args.max_tokens) < 1:
        raise ConfigError("--limit and --max-tokens must be at least 1")
    prompts = read_prompts(args.data, args.limit)
    drafts = [DraftConfig(draft=draft).draft for draft in args.drafts.split(",")]
    context, sampling = context_from_args(args), from_args(SamplingConfig, args)
    result: dict[str, Any] = {}
    with Model(find(args.model), model_from_args(args)) as model:
        for number, result in enumerate(measure(model, prompts, drafts, context, sampling, args.max_tokens), 1):
            equal = ", ".join(f"{draft} {sums['equal']}" for draft, sums in result.items())
            print(f"{number} prompts, equal ids: {equal}", flush=True)
    print(json.dumps(result))
    return 0


def run_memory(args: argparse.Namespace) -> int:
    from racer_local.bench.memory import measure

    result = measure(str(find(args.model)), args.draft.split(","), args.ctx, args.max_tokens)
    for name, peak in result["peak_mib"].items():
        print(f"{name:10} {peak:8.1f} MiB ({result['above_plain_mib'].get(name, 0.0):+.1f})")
    print(f"numba and its compiled kernels are {result['of_it_numba_mib']:.1f} MiB of each difference")
    print(json.dumps(result))
    return 0

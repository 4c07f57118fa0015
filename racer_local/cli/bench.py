"""`racer-local bench`: measurements; the last line of stdout is JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from racer_local.config import MAX_NODES
from racer_local.errors import ConfigError


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


def run_draft(args: argparse.Namespace) -> int:
    if not 2 <= args.nodes <= MAX_NODES or min(args.vocab, args.context, args.steps) < 100:
        raise ConfigError(f"--nodes must be from 2 to {MAX_NODES}, --vocab, --context and --steps at least 100")
    from racer_local.bench.draft import measure

    result = measure(args.nodes, args.vocab, args.context, args.steps)
    for phase, ms in result["milliseconds"].items():
        print(f"{phase:8} {ms['median']:8.3f} ms (99%: {ms['p99']:.3f} ms)")
    print(json.dumps(result))
    return 0


def run_memory(args: argparse.Namespace) -> int:
    from racer_local.bench.memory import measure
    from racer_local.models import find

    result = measure(str(find(args.model)), args.draft.split(","), args.ctx, args.max_tokens)
    for name, peak in result["peak_mib"].items():
        print(f"{name:10} {peak:8.1f} MiB ({result['above_plain_mib'].get(name, 0.0):+.1f})")
    print(f"numba and its compiled kernels are {result['of_it_numba_mib']:.1f} MiB of each difference")
    print(json.dumps(result))
    return 0

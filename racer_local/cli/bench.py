"""`racer-local bench`: measurements; the last line of stdout is JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from racer_local.bench.data import Question, read_questions
from racer_local.binding import cpu_model
from racer_local.cli import suite
from racer_local.cli.messages import progress, tell
from racer_local.cli.options import (
    add_model,
    add_settings,
    check_output,
    context_from_args,
    from_args,
    model_from_args,
)
from racer_local.cli.parsing import Parser, add_command
from racer_local.config import COST_CURVES, DRAFTERS, MAX_NODES, ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError
from racer_local.models import find

EXAMPLES = {
    "draft": (
        "racer-local bench draft --vocab 150000 --history 0 200000",
        "does a step grow slower with learning?",
    ),
    "corpus": ("racer-local bench corpus --tokens 1000000", "an index of a million tokens"),
    "memory": ("racer-local bench memory -m smollm2-135m --draft paper,racer", "two drafters against plain decoding"),
    "server": ("racer-local bench server -m my-model.gguf --data questions.jsonl --limit 24", "HTTP against a call"),
    "record": ("racer-local bench record -m my-model.gguf --data questions.jsonl -o trace.npz", "answers to replay"),
    "replay": ("racer-local bench replay trace.npz --cost gpu", "what a drafter would gain on another machine"),
    "fit": ("racer-local bench fit trace.npz -o prior.npz --test other.npz", "for another kind of text"),
    "ids": ("racer-local bench ids -m my-model.gguf --data questions.jsonl --exact", "all ids must be equal"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measurements", description=__doc__)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    def bench(name: str, help: str) -> Parser:
        return add_command(benches, name, help=help, examples=[EXAMPLES[name]])

    draft = bench("draft", "what drafting costs a step, without a model")
    for flag, default in (("nodes", 64), ("vocab", 50_000), ("context", 8192), ("steps", 500)):
        draft.add_argument(f"--{flag}", type=int, default=default, metavar="N", help="default: %(default)s")
    draft.add_argument("--draft", default="racer", choices=tuple(DRAFTERS), help="default: %(default)s")
    what = "tokens of learned history; several show whether the time grows with it; default: 0"
    draft.add_argument("--history", type=int, nargs="+", default=[0], metavar="N", help=what)
    draft.set_defaults(run=run_draft)

    corpus = add_command(
        benches,
        "corpus",
        help="what an index costs: sorting, memory, disk, opening, a lookup",
        examples=[EXAMPLES["corpus"]],
    )
    what = "tokens of each index; default: %(default)s"
    corpus.add_argument("--tokens", type=int, nargs="+", default=[10**6, 10**7, 5 * 10**7], metavar="N", help=what)
    corpus.add_argument("--folder", type=Path, help="where the indexes lie meanwhile; default: the system's")
    corpus.set_defaults(run=run_corpus)

    memory = bench("memory", "peak memory of an answer, plain and drafted")
    memory.add_argument("-m", "--model", required=True, help="a GGUF file or a registry name")
    memory.add_argument("--draft", default="paper", help="drafters, separated by commas; default: %(default)s")
    memory.add_argument("--ctx", type=int, default=8192, metavar="N", help="default: %(default)s")
    memory.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    memory.set_defaults(run=run_memory)

    server = add_command(
        benches,
        "server",
        help="what the server costs over a session of the same process",
        examples=[EXAMPLES["server"]],
    )
    _add_data(server, "prompts of each category; default: all")
    server.add_argument("--draft", default="none,racer", help="drafters, with commas; default: %(default)s")
    add_model(server, ContextConfig)
    server.set_defaults(run=run_server)

    record = bench("record", "record a model's greedy answers for bench replay")
    _add_data(record, "questions of each category; default: all")
    record.add_argument("-o", "--output", type=Path, required=True, metavar="TRACE.npz", help="the file to write")
    add_model(record, ContextConfig)
    record.set_defaults(run=run_record)

    replay = bench("replay", "recorded answers through a drafter, under a cost curve")
    replay.add_argument("trace", type=Path, metavar="TRACE.npz", help="made by bench record")
    replay.add_argument("--cost", required=True, help=f"{', '.join(COST_CURVES)}, or points like '1:1 2:1.5 8:3'")
    replay.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    add_settings(replay, DraftConfig, without=("exact", "remember"))
    replay.set_defaults(run=run_replay)

    fit = bench("fit", "fit the prior of the acceptance estimates to recorded answers")
    fit.add_argument("trace", type=Path, nargs="+", metavar="TRACE.npz", help="made by bench record")
    fit.add_argument("-o", "--output", type=Path, required=True, metavar="PRIOR.npz", help="the file to write")
    fit.add_argument(
        "--corpus",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="for each trace a large index of its model's vocabulary: fit only what indexes add to the shipped prior",
    )
    fit.add_argument("--test", type=Path, metavar="TRACE.npz", help="a trace to judge the fit by, not fitted to")
    fit.set_defaults(run=run_fit)

    ids = bench("ids", "do drafts leave the token ids as they are?")
    ids.add_argument("--data", type=Path, required=True, help='JSONL with {"turns": [...]} or {"prompt": ...} a line')
    ids.add_argument("--limit", type=int, default=20, metavar="N", help="prompts; default: %(default)s")
    ids.add_argument("--drafts", default="racer,paper", help="separated by commas; default: %(default)s")
    _add_corpus(ids)
    ids.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    ids.add_argument("--exact", action="store_true", help="in exact settings, where all ids must be equal")
    add_model(ids, ContextConfig, SamplingConfig)
    ids.set_defaults(run=run_ids)

    suite.add_parsers(benches)


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    what = "an index for the drafters NAME+corpus (racer-local index build); may be repeated"
    parser.add_argument("--corpus", action="append", default=[], metavar="FILE", help=what)


def _add_data(parser: argparse.ArgumentParser, limit: str) -> None:
    what = 'JSONL with {"turns": [...]} or {"prompt": ...} a line'
    parser.add_argument("--data", type=Path, required=True, nargs="+", action="extend", metavar="FILE", help=what)
    parser.add_argument("--limit", type=int, metavar="N", help=limit)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of each answer; default: %(default)s")


def _questions(args: argparse.Namespace) -> list[Question]:
    if args.max_tokens < 1 or (args.limit is not None and args.limit < 1):
        raise ConfigError("--limit and --max-tokens must be at least 1")
    return read_questions(args.data, args.limit)


def run_server(args: argparse.Namespace) -> int:
    from racer_local.bench.server import Overhead, measure

    path = find(args.model)
    questions, context, model = _questions(args), context_from_args(args, path), model_from_args(args)
    drafts = [draft.strip() for draft in args.draft.split(",")]
    for draft in drafts:
        DraftConfig(draft=draft)
    found, interrupted = Overhead(), False
    try:
        with progress(total=len(questions) * len(drafts), unit="answer") as bar:
            for found in measure(path, model, context, questions, drafts, args.max_tokens):
                bar.update(found.answers - bar.n)
    except KeyboardInterrupt:
        interrupted = True
    figures = found.as_dict() if found.answers else {}
    print(f"{path.name}, {context.n_threads} threads, {found.answers} answers of up to {args.max_tokens} tokens")
    for draft, f in figures.items():
        print(
            f"  {draft:10} direct {f['direct_tokens_per_second']:8.1f} tokens/s  "
            f"served {f['served_tokens_per_second']:8.1f}  overhead {100 * f['overhead']:5.1f}%, "
            f"with the prompt {100 * f['overhead_with_prompt']:5.1f}%"
        )
    machine = {"model": path.name, "cpu": cpu_model(), "threads": context.n_threads, "max_tokens": args.max_tokens}
    print(json.dumps({**machine, "answers": found.answers, "different": found.different, "drafts": figures}))
    return 130 if interrupted else 0


def run_record(args: argparse.Namespace) -> int:
    from racer_local.bench.record import Conversation, record, to_trace
    from racer_local.llama import Model

    questions, conversations = _questions(args), list[Conversation]()
    interrupted, skipped = False, 0
    check_output(args.output)
    path = find(args.model)
    with Model(path, model_from_args(args)) as model:
        answers = record(model, questions, context_from_args(args, path), args.max_tokens)
        try:
            for answered in progress(answers, total=len(questions), unit="question"):
                conversations += answered
                skipped += not answered
        except KeyboardInterrupt:
            interrupted = True
            tell("interrupted: keeping what is recorded")
    result = {"conversations": len(conversations), "skipped": skipped}
    if conversations:
        trace = to_trace(conversations)
        trace.save(args.output)
        result |= {"tokens": len(trace.tokens), "answers": len(trace.gen)}
    print(json.dumps(result))
    return 130 if interrupted else 0


def run_replay(args: argparse.Namespace) -> int:
    from racer_local.bench.replay import replay, summary
    from racer_local.bench.trace import load_trace
    from racer_local.corpus.corpora import Corpora
    from racer_local.cost import VerifyCost
    from racer_local.draft import ReadsCorpora, make_drafter

    draft, cost, trace = from_args(DraftConfig, args), VerifyCost.parse(args.cost), load_trace(args.trace)
    drafter = make_drafter(draft, trace.n_vocab, (), cost)
    if isinstance(drafter, ReadsCorpora):
        drafter.use(Corpora(draft.corpora, None))
    answers = replay(trace, drafter, cost, draft.nodes)
    result = summary(progress(answers, total=len(trace.gen), unit="answer"))
    if not args.json:
        for name, f in [*result["categories"].items(), ("total", result["total"])]:
            print(f"{name:16} {f['speedup']:6.2f}x  MAT {f['mat']:6.2f}  nodes {f['mean_nodes']:6.1f}")
    print(json.dumps(result))
    return 0


def run_fit(args: argparse.Namespace) -> int:
    from racer_local.acceptance import load_prior
    from racer_local.bench import fit
    from racer_local.bench.trace import load_trace

    check_output(args.output)
    traces = [load_trace(path) for path in args.trace]
    test = load_trace(args.test) if args.test else None
    if args.corpus:
        if len(args.corpus) != len(traces):
            raise ConfigError(f"{len(traces)} traces need as many indexes after --corpus, one each, in the same order")
        with TemporaryDirectory() as folder:
            examples = fit.collect_with_indexes(progress([*zip(traces, args.corpus, strict=True)]), Path(folder))
        net = fit.fit_corpora(examples, load_prior())
    else:
        parts = [fit.collect(trace, keep=keep) for trace in progress(traces) for keep in (True, False)]
        examples = fit.Examples.join(parts)
        net = fit.fit(examples)
    fit.save(net, args.output)
    result = {"contexts": len(examples.sizes), "nats_a_context": round(fit.surprise(net, examples), 4)}
    if test:
        result["nats_a_context_test"] = round(fit.surprise(net, fit.collect(test, keep=True)), 4)
    print(json.dumps(result))
    return 0


def run_draft(args: argparse.Namespace) -> int:
    if not 2 <= args.nodes <= MAX_NODES or min(args.vocab, args.context, args.steps) < 100:
        raise ConfigError(f"--nodes must be from 2 to {MAX_NODES}, --vocab, --context and --steps at least 100")
    from racer_local.bench.draft import measure

    results = [
        measure(args.draft, args.nodes, args.vocab, args.context, history, args.steps) for history in args.history
    ]
    for result in results:
        phases = (f"{phase} {ms['median']:.3f} ({ms['p99']:.3f})" for phase, ms in result["milliseconds"].items())
        print(f"{result['history']:9} tokens: " + ", ".join(phases) + " ms, median (99%)")
    by_history = {result["history"]: result["milliseconds"] for result in results}
    print(json.dumps({**results[-1], "by_history": by_history}))
    return 0


def run_corpus(args: argparse.Namespace) -> int:
    from racer_local.bench.corpus import measure

    if min(args.tokens) < 1000:
        raise ConfigError("--tokens must be at least 1000")
    if args.folder and not args.folder.is_dir():
        raise ConfigError(f"{args.folder} is no folder; name one for --folder, or leave it out")
    results = []
    for n in args.tokens:
        results.append(f := measure(n, args.folder))
        print(
            f"{n:10} tokens: sorted {f['sorted_tokens_a_second'] / 1e6:.2f} million/s, "
            f"{f['building_bytes_a_token']:.1f} bytes a token while building, {f['disk_bytes_a_token']:.2f} on disk, "
            f"opened in {f['opened_ms']:.1f} ms, a lookup {f['lookup_us']['median']:.0f} us "
            f"(99%: {f['lookup_us']['p99']:.0f}), memory +{f['memory_growth_mb']:.0f} MB",
            flush=True,
        )
    print(json.dumps({"cpu": cpu_model(), "by_tokens": results}))
    return 0


def run_ids(args: argparse.Namespace) -> int:
    from racer_local.bench.data import read_prompts
    from racer_local.bench.ids import measure
    from racer_local.bench.ways import parse_draft
    from racer_local.llama import Model

    if min(args.limit, args.max_tokens) < 1:
        raise ConfigError("--limit and --max-tokens must be at least 1")
    prompts = read_prompts(args.data, args.limit)
    drafts = args.drafts.split(",")
    for spec in drafts:
        parse_draft(spec, args.corpus)
    path = find(args.model)
    context, sampling = context_from_args(args, path), from_args(SamplingConfig, args)
    result: dict[str, Any] = {}
    with Model(path, model_from_args(args)) as model:
        found = measure(
            model, prompts, drafts, context, sampling, args.max_tokens, exact=args.exact, corpora=args.corpus
        )
        for number, result in enumerate(found, 1):
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

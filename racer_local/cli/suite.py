"""`racer-local bench suite` and what reads its file: report, compare, gate; and where its questions come from."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racer_local.bench.data import (
    FILES,
    LIMIT,
    MAX_TOKENS,
    MIN_CATEGORY,
    MIN_SPEEDUP,
    TEMPERATURES,
    Question,
    in_turns,
    read_folder,
    read_questions,
)
from racer_local.cli.messages import progress, tell
from racer_local.cli.options import add_model, check_output, context_from_args, model_from_args
from racer_local.cli.parsing import INTERRUPTED, add_command
from racer_local.cli.process import ended_by_sigterm
from racer_local.config import ContextConfig
from racer_local.errors import ConfigError
from racer_local.models import find

if TYPE_CHECKING:  # it loads numpy, which most commands start without
    from racer_local.bench.results import Results

EXAMPLES = {
    "suite": [
        (
            "racer-local bench suite -m my-model.gguf --data-dir data -o mine.jsonl",
            "the paper's benchmarks, greedy and at 0.8; the same command goes on after an interruption",
        ),
        (
            "racer-local bench suite -m my-model.gguf --data-dir data -o mine.jsonl --llama-server ./llama-server "
            "--temperature 0 --time-budget 3600",
            "against llama.cpp's server too, greedy, within an hour",
        ),
        (
            "racer-local bench suite -m my-model.gguf --data questions.jsonl --draft racer,racer+exact --no-peers",
            "your own prompts; what does it cost to be exact?",
        ),
    ],
    "data": [("racer-local bench data data", "Spec-Bench, HumanEval and MGSM-ZH into the folder data")],
    "report": [("racer-local bench report mine.jsonl -o mine.html --png figures", "one page, and its plots as files")],
    "compare": [("racer-local bench compare before.jsonl after.jsonl", "did a change help?")],
    "gate": [("racer-local bench gate mine.jsonl --min-speedup 1.05", "for CI")],
}


def add_parsers(benches: Any) -> None:
    suite = add_command(
        benches,
        "suite",
        help="the paper's benchmarks through every drafter and peer",
        examples=EXAMPLES["suite"],
        notes="Ctrl-C keeps every question that was answered. Ctrl-Z stops behind the question that is being answered, "
        "so that no time is wrong. What drafters had learned is not learned again after an interruption."
        "\n\nHumanEval's programs are run against their tests; most models need --max-tokens 400 to finish one.",
    )
    suite.add_argument("--data-dir", type=Path, metavar="DIR", help=f"with {', '.join(FILES)}")
    what = 'or files of your own: JSONL with {"turns": [...]} or {"prompt": ...} a line'
    suite.add_argument("--data", type=Path, nargs="+", action="extend", metavar="FILE", help=what)
    what = "lengthen each prompt to N tokens, with text of the others; several lengths are categories"
    suite.add_argument("--context-tokens", type=int, nargs="+", metavar="N", help=what)
    what = "keep a line of JSON a question here, for the other commands, and go on with what is there"
    suite.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    suite.add_argument("--overwrite", action="store_true", help="begin anew where the file is there")
    what = "questions of each category, spread over it; default: %(default)s"
    suite.add_argument("--limit", type=int, default=LIMIT, metavar="N", help=what)
    suite.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="of each answer; default: %(default)s"
    )
    what = f"0 is greedy; several, each from a cold start; default: {' '.join(f'{t:g}' for t in TEMPERATURES)}"
    suite.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES, metavar="T", help=what)
    what = "times to ask all of it, each from a cold start; default: %(default)s"
    suite.add_argument("--repeats", type=int, default=1, metavar="N", help=what)
    what = "end in time, with as many questions of each category; default: no limit"
    suite.add_argument("--time-budget", type=float, metavar="SECONDS", help=what)
    what = "NAME, NAME@NODES, NAME+corpus, NAME+exact, with commas; default: all"
    suite.add_argument("--draft", default="", metavar="NAMES", help=what)
    what = "an index for NAME+corpus (racer-local index build); may be repeated"
    suite.add_argument("--corpus", action="append", default=[], metavar="FILE", help=what)
    suite.add_argument("--no-peers", action="store_true", help="leave llama-cpp-python's own Llama out")
    what = "llama.cpp's llama-server, as a peer with each of its --spec-types that needs no second model"
    suite.add_argument("--llama-server", type=Path, metavar="PATH", help=what)
    suite.add_argument("--exact", action="store_true", help="all in exact settings: answers must be equal")
    what = "of the server's ways to draft only these, with commas (none: it decodes plainly)"
    suite.add_argument("--spec-types", default="", metavar="NAMES", help=what)
    what = "drafters and peers that are asked at every fourth question only, with commas: slow ones need no precision"
    suite.add_argument("--rarely", default="", metavar="NAMES", help=what)
    add_model(suite, ContextConfig)
    suite.set_defaults(run=run_suite)

    data = add_command(
        benches, "data", help="fetch the suite's questions", examples=EXAMPLES["data"],
        notes="Spec-Bench (Apache-2.0), HumanEval (MIT) and MGSM's Chinese part (CC-BY-SA-4.0), from their own homes. "
        "What is there is kept.",
    )  # fmt: skip
    data.add_argument("folder", type=Path, metavar="DIR", help="where they go")
    data.set_defaults(run=run_data)

    report = add_command(
        benches, "report", help="suites as one page of HTML, and their plots", examples=EXAMPLES["report"]
    )
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help="made by bench suite; several side by side")
    report.add_argument(
        "-o", "--output", type=Path, metavar="PAGE.html", help="the page; nothing else is needed to read it"
    )
    report.add_argument("--png", type=Path, metavar="DIR", help="a folder for the plots")
    report.set_defaults(run=run_report)

    gate = add_command(benches, "gate", help="fail where a suite's speed-ups fall short", examples=EXAMPLES["gate"])
    gate.add_argument("file", type=Path, metavar="FILE", help="made by bench suite")
    gate.add_argument("--draft", default="racer", metavar="NAME", help="whose; default: %(default)s")
    for flag, default, what in (
        ("--min-speedup", MIN_SPEEDUP, "in total"),
        ("--min-category", MIN_CATEGORY, "in each category"),
    ):
        gate.add_argument(flag, type=float, default=default, metavar="X", help=f"{what}; default: %(default)s")
    gate.set_defaults(run=run_gate)

    compare = add_command(
        benches,
        "compare",
        help="what changed between two suites, and is it more than noise?",
        examples=EXAMPLES["compare"],
    )
    for name in ("before", "after"):
        compare.add_argument(name, type=Path, metavar=name.upper(), help="made by bench suite")
    compare.set_defaults(run=run_compare)


def run_suite(args: argparse.Namespace) -> int:
    from racer_local.bench import results, suite, ways
    from racer_local.llama import Model
    from racer_local.tuning.budget import Budget

    plan = suite.Plan(
        drafts=_names(args.draft) or tuple(d for d in suite.DRAFTS if args.corpus or ways.CORPUS not in d),
        temperatures=tuple(dict.fromkeys(args.temperature)),
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        exact=args.exact,
        rarely=_names(args.rarely),
        corpora=tuple(args.corpus),
        peers=not args.no_peers,
        server=args.llama_server,
        spec_types=_names(args.spec_types),
    )
    if min(args.limit, args.max_tokens, args.repeats, *(args.context_tokens or ())) < 1:
        raise ConfigError("--limit, --max-tokens, --repeats and --context-tokens must be at least 1")
    if args.time_budget is not None and not 1 <= args.time_budget <= 1e7:
        raise ConfigError(f"--time-budget is {args.time_budget:g}; it must be from 1 to 10000000 seconds")
    plan.check()
    path, config = find(args.model), model_from_args(args)
    context, questions = context_from_args(args, path), _questions(args)
    check_output(args.output)
    with ended_by_sigterm(), Model(path, config) as model:
        if args.context_tokens:
            questions = ways.in_context(model, questions, args.context_tokens)
        questions = in_turns(questions)
        with suite.opened(plan, model, config, context) as asked:
            head = suite.header(plan, model, context, asked, len(questions))
            budget = Budget(args.time_budget) if args.time_budget else None
            interrupted, total = False, len(questions) * len(plan.passes)
            with suite.Journal(args.output, head, overwrite=args.overwrite) as journal:
                found = journal.results
                with progress(total=total, initial=len(found.records), unit="question") as bar:

                    def keep(record: results.Record) -> None:
                        journal.add(record)
                        bar.update()

                    done = {record.key for record in found.records}
                    try:
                        suite.run(plan, model, asked, questions, done, budget, keep)
                    except KeyboardInterrupt:
                        interrupted = True
    if not interrupted and len(found.records) < total:
        more = "the same command goes on" if args.output else "with -o FILE the same command would go on"
        tell(f"the time is used up after {len(found.records)} of {total} questions; {more}")
    print(table(found))
    print(json.dumps(summary(found)), flush=True)
    return INTERRUPTED if interrupted else 0


def _questions(args: argparse.Namespace) -> list[Question]:
    if (args.data_dir is None) == (args.data is None):
        raise ConfigError("name the questions: either --data-dir DIR (racer-local bench data gets them) or --data FILE")
    return read_folder(args.data_dir, args.limit) if args.data_dir else read_questions(args.data, args.limit)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run_data(args: argparse.Namespace) -> int:
    from racer_local.bench import sources
    from racer_local.cli.models import ProgressBar

    got = {}
    for name in FILES:
        bar = ProgressBar(sys.stderr)
        try:
            got[name] = sources.fetch(name, args.folder, bar.advance)
        except OSError as error:
            raise ConfigError(f"{args.folder} can't be written ({error.strerror}); name another folder") from error
        finally:
            bar.close()
        tell(f"{name}: {f'{got[name]} questions' if got[name] else 'was there already'}")
    print(json.dumps(got))
    return 0


def run_report(args: argparse.Namespace) -> int:
    from racer_local.bench import report, results

    if not (args.output or args.png):
        raise ConfigError("nothing to write; name a page with -o, a folder for plots with --png, or both")
    check_output(args.output)
    written = report.write([results.read(path) for path in args.files], args.output, args.png)
    print(json.dumps({"written": [str(path) for path in written]}))
    return 0


def run_gate(args: argparse.Namespace) -> int:
    from racer_local.bench import results

    found = results.read(args.file)
    short = results.gate(found, args.draft, args.min_speedup, args.min_category)
    for line in short:
        print(line)
    print(json.dumps({"passed": not short, "short": len(short)}))
    return 1 if short else 0


def run_compare(args: argparse.Namespace) -> int:
    from racer_local.bench import results

    before, after = results.read(args.before), results.read(args.after)
    changes = results.compare(before, after)
    if not changes:
        raise ConfigError("the two files have no way and question in common, so there is nothing to compare")
    for what in ("machine", "model", "versions", "settings"):
        old, new = before.header[what], after.header[what]
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if names:
            others = ", ".join(f"{name} {old.get(name)} and {new.get(name)}" for name in names)
            tell(f"the two were measured with another {what}: {others}")
    for change in changes:
        sign = "noise" if not change.real else "FASTER" if change.change.ratio > 1 else "SLOWER"
        print(
            f"{change.temperature:<4g} {change.category:16} {change.way:28} "
            f"{change.before:5.2f}x -> {change.after:5.2f}x  {change.change}  {sign}"
        )
    real = [change for change in changes if change.real]
    print(
        json.dumps(
            {
                "compared": len(changes),
                "faster": sum(c.change.ratio > 1 for c in real),
                "slower": sum(c.change.ratio < 1 for c in real),
            }
        )
    )
    return 0


def table(found: Results) -> str:
    """Speed-ups by category and way, as text."""
    from racer_local.bench import results

    lines = []
    for temperature in found.temperatures:
        view = found.at(temperature)
        lines.append(f"{found.header['model']['name']}, temperature {temperature:g}, {len(view.records)} questions")
        for category in view.categories:
            ceiling = view.ceiling(category)
            lines.append(f"  {category} (at most {ceiling:.2f}x)")
            for way in found.ways:
                spread, sums = view.speed_up(category, way), view.sums(category, way)
                different, answers = view.different(category, way)
                if not answers:
                    continue
                lines.append(
                    f"    {way:28} {spread!s:24} MAT {results.mat(sums):5.2f}  nodes {results.mean_nodes(sums):5.1f}  "
                    f"with prompt {view.speed_up(category, way, prompt=True).ratio:5.2f}x  "
                    f"{different} of {answers} answers differ"
                )
        for way in found.ways:
            passed, tested = view.passed(way)
            if tested:
                lines.append(f"    pass@1 {way:28} {passed} of {tested}")
            for error in dict.fromkeys(view.errors(way)):
                lines.append(f"    {way}: {error}")
    return "\n".join(lines)


def summary(found: Results) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        **{name: found.header[name] for name in ("machine", "model", "settings", "cost")},
        "temperatures": {
            f"{temperature:g}": {
                category: {way: view.figures(category, way) for way in found.ways} for category in view.categories
            }
            for temperature in found.temperatures
            for view in [found.at(temperature)]
        },
    }

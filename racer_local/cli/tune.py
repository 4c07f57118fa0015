"""`racer-local tune`: the settings with which a model answers fastest on this machine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racer_local import models, tuned
from racer_local.cli.messages import progress, tell
from racer_local.cli.options import add_model, context_from_args, model_from_args
from racer_local.cli.parsing import INTERRUPTED, add_command
from racer_local.config import ContextConfig, default_threads, usable_cpus
from racer_local.errors import ConfigError

if TYPE_CHECKING:
    from racer_local.llama import Model
    from racer_local.tuning.budget import Budget
    from racer_local.tuning.quants import Copy
    from racer_local.tuning.search import Comparison, Found
    from racer_local.tuning.trial import Trials
    from racer_local.tuning.work import Work

DESCRIPTION = """\
Find the settings with which this model answers fastest on this machine: threads, flash attention, and the type of the
cached keys and values. Each is measured against the best so far, by turns, since a machine drifts; it wins only by
more than the noise. What you set yourself is kept. Measure with the programs running that run beside it later."""
NOTES = """\
measured: the model writes a function once more with a variable renamed, then free prose, behind some 300 tokens;
drafted tokens/s decide. All candidates write the same tokens, so that only time differs.

copies (--quants): they are made from the file as it is and deleted when they were measured, unless --quants-dir keeps
them. "Same next token" is the share of positions of a text at which the copy's likeliest token is the model's; KL is
the mean divergence of the two distributions, in nats. No copy is used unasked."""
EXAMPLES = (
    ("racer-local tune -m my-model.gguf", "a table, and what to type to use the best"),
    ("racer-local tune -m my-model.gguf --apply", "also: from now on every command uses it for this file"),
    ("racer-local tune -m my-model.gguf --reset", "forget it"),
    ("racer-local tune -m my-model.gguf --quants Q4_0,Q8_0 --quants-dir copies", "how fast and how near are copies?"),
)
BUDGET = 150.0
"""Seconds."""
SEARCH = 0.6
"""Share of it for the settings, where there are copies to be measured too."""
ALL_QUANTS = "Q4_0,Q4_K_M,Q8_0"
RECORDING, SAMPLE = 0.2, 0.1
"""Shares of the time that recording the answers, and one sample, may take at most."""


def add_parser(commands: Any) -> None:
    what = "find the settings with which a model answers fastest here"
    parser = add_command(commands, "tune", help=what, description=DESCRIPTION, examples=EXAMPLES, notes=NOTES)
    what = "how long to measure; default: %(default)g. Making copies comes on top"
    parser.add_argument("--time-budget", type=float, default=BUDGET, metavar="SECONDS", help=what)
    what = "remember the best settings for this file; every command uses them where you leave them open"
    parser.add_argument("--apply", action="store_true", help=what)
    parser.add_argument("--reset", action="store_true", help="forget the remembered settings of this file")
    what = f"also measure copies of the model in other quants; without LIST: {ALL_QUANTS}"
    parser.add_argument("--quants", nargs="?", const=ALL_QUANTS, metavar="LIST", help=what)
    parser.add_argument("--quants-dir", type=Path, metavar="DIR", help="keep the copies in this folder")
    what = "the text that copies are compared on; default: one of our own"
    parser.add_argument("--text", type=Path, metavar="FILE", help=what)
    parser.add_argument("--json", action="store_true", help="for machines")
    add_model(parser, ContextConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # All that can be wrong without the model is found before it is loaded.
    path = models.find(args.model)
    if args.reset:
        return _reset(args, path)
    if not 1 <= args.time_budget <= 1e6:
        raise ConfigError(f"--time-budget is {args.time_budget:g}; it must be from 1 to 1000000 seconds")
    quants, text = _quants(args), _text(args)
    context, config = context_from_args(args), model_from_args(args)

    from racer_local.llama import Model
    from racer_local.tuning.budget import Budget
    from racer_local.tuning.search import Found, space_for
    from racer_local.tuning.trial import Trials
    from racer_local.tuning.work import record

    result, budget = _Result(), Budget(args.time_budget)
    with Model(path, config) as model:
        if busy := model.watch.warning(context.n_threads):
            tell(f"note: {busy}")
        _compile(budget)
        space = space_for(context, usable_cpus(), model.watch.others(), offloads=model.offloads)
        found = result.found = Found.start(space.default)
        longest = SAMPLE * args.time_budget
        try:
            with _bar(budget, model.offloads) as on_pair:
                threads = dict.fromkeys([space.default.threads, *([space.guess or 1] if space.threads else [])])
                work = record(model, context, [*threads], budget.part(RECORDING))
                with Trials(model, context, work, longest) as trials:
                    result.take(trials, work)
                    _search(space, trials, budget.part(SEARCH) if quants else budget, found, on_pair)
                    if quants:
                        _copies(args, quants, text, config, context, model, trials, work, budget, result, on_pair)
        except KeyboardInterrupt:
            result.interrupted = True
        result.describe(model)
    if args.apply and not result.interrupted:
        result.applied = _apply(path, found)
    _print(args, result)
    return INTERRUPTED if result.interrupted else 0


class _Result:
    """What is known, also of a run that was interrupted."""

    found: Found
    work: Work | None = None
    trials: Trials | None = None

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.late_copies: list[str] = []
        self.interrupted = self.offloads = False
        self.applied: dict[str, Any] | None = None
        """What was remembered; None where it was not asked for, or not done."""
        self.facts: dict[str, Any] = {}
        self.size = 0

    def take(self, trials: Trials, work: Work) -> None:
        self.trials, self.work = trials, work

    def describe(self, model: Model) -> None:
        self.offloads, self.facts, self.size = model.offloads, model.facts, model.path.stat().st_size


def _reset(args: argparse.Namespace, path: Path) -> int:
    if args.apply or args.quants:
        raise ConfigError("--reset only forgets; leave out --apply and --quants, or --reset")
    forgotten = tuned.forget(path)
    if args.json:
        print(json.dumps({"reset": forgotten}))
    else:
        print(f"{path.name}: {'forgotten; the defaults are used again' if forgotten else 'nothing was remembered'}")
    return 0


def _quants(args: argparse.Namespace) -> list[str]:
    if args.quants is None:
        if args.quants_dir or args.text:
            raise ConfigError(f"{'--quants-dir' if args.quants_dir else '--text'} is for copies; add --quants")
        return []
    from racer_local.llama.quantize import check_quant

    quants = list(dict.fromkeys(quant.strip().upper() for quant in args.quants.split(",")))
    for quant in quants:
        check_quant(quant)
    if args.quants_dir and not (args.quants_dir.is_dir() and os.access(args.quants_dir, os.W_OK)):
        raise ConfigError(f"--quants-dir {args.quants_dir} is no folder that can be written; name one that exists")
    return quants


def _text(args: argparse.Namespace) -> str:
    from racer_local.tuning.texts import COMPARED

    if args.text is None:
        return COMPARED
    try:
        text = str(args.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text} can't be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise ConfigError(f"--text {args.text} is empty; copies are compared on its text")
    return text


def _compile(budget: Budget) -> None:
    """Before anything is measured."""
    from racer_local import kernels

    with budget.paused():
        if kernels.NEW:
            tell("compiling the drafter, once on this machine (some 20 seconds)")
            kernels.NEW = False
        kernels.warm_up("topk", "growth", "drift")


def _search(space: Any, trials: Trials, budget: Budget, found: Found, on_pair: Callable[[Comparison], object]) -> None:
    from racer_local.tuning.search import search

    search(space, trials.measure, budget, found, on_pair)
    if found.default not in trials.figures:  # there was nothing to try
        trials.measure(found.default, 0.0)


def _copies(
    args: argparse.Namespace,
    quants: list[str],
    text: str,
    config: Any,
    context: ContextConfig,
    model: Model,
    trials: Trials,
    work: Work,
    budget: Budget,
    result: _Result,
    on_pair: Callable[[Comparison], object],
) -> None:
    from racer_local.tuning.quants import MOST_TOKENS, Copy, Workshop, folder_for, to_make

    tokens = model.tokenize(text, add_special=True)
    if len(tokens) > MOST_TOKENS:
        tell(f"note: copies are compared on the first {MOST_TOKENS} of {len(tokens)} tokens of the text")
    left = to_make(model, quants, lambda note: tell(f"note: {note}"))
    with folder_for(model, left, args.quants_dir) as folder:
        shop = Workshop(
            model,
            config,
            context,
            result.found.best,
            trials,
            work,
            tokens[:MOST_TOKENS],
            folder,
            keep=args.quants_dir is not None,
            longest=SAMPLE * args.time_budget,
            on_pair=on_pair,
        )
        while left:
            if budget.left <= 0:
                result.late_copies = left
                return
            result.copies.append(Copy(left[0]))
            shop.measure(result.copies[-1], budget.part(1 / len(left)))
            del left[0]


@contextmanager
def _bar(budget: Budget, offloads: bool) -> Iterator[Callable[[Comparison], object]]:
    """Seconds of the budget; the function shows what is compared."""
    from racer_local.tuning.table import in_words

    with progress(total=round(budget.seconds), bar_format="{l_bar}{bar}| {n:.0f}/{total} s {postfix}") as bar:

        def show(comparison: Comparison) -> None:
            bar.n = min(bar.total, budget.seconds - budget.left)
            challenger = comparison.challenger
            what = f"{challenger.quant}, " if challenger.quant else ""
            bar.set_postfix_str(
                f"{what}{in_words(challenger, offloads=offloads)}: {comparison.gain:.2f}x", refresh=False
            )
            bar.refresh()

        yield show


def _apply(path: Path, found: Found) -> dict[str, Any]:
    from racer_local.tuning.table import changed

    settings = changed(found)
    if settings:
        tuned.remember(path, settings)
    elif found.comparisons and tuned.forget(path):
        tell("the defaults are the best now; what was remembered before is forgotten")
    return settings


def _print(args: argparse.Namespace, result: _Result) -> None:
    from racer_local.tuning.table import UNITS, as_flags, changed, conclusion, copies_table, table, untried

    if args.json:
        print(json.dumps(_as_json(args, result)))
        return
    found, figures = result.found, result.trials.figures if result.trials else {}
    if figures.get(found.default):
        print("\n".join(table(found, figures, offloads=result.offloads)))
        print(UNITS)
        if result.copies:
            print()
            print("\n".join(copies_table(result.copies, figures[found.best], result.size)))
        print()
    for line in untried(found, offloads=result.offloads):
        print(line)
    if result.late_copies:
        print(f"not tried for want of time (--time-budget): {', '.join(result.late_copies)}")
    if result.interrupted:
        print("interrupted; nothing was applied")
        return
    print(conclusion(found, offloads=result.offloads))
    flags = as_flags(changed(found))
    if args.apply:
        undo = f"undo: racer-local tune -m {args.model} --reset"
        print(f"remembered for {result.facts['model']}: {flags} ({undo})" if flags else "nothing to remember")
    elif flags:
        print(f"to use it: racer-local tune -m {args.model} --apply, or give {flags}")


def _as_json(args: argparse.Namespace, result: _Result) -> dict[str, Any]:
    from racer_local.tuning.table import as_json, copy_as_json

    work, figures = result.work, result.trials.figures if result.trials else {}
    return {
        "machine": {
            **{name: result.facts[name] for name in ("cpu", "build")},
            "cores": default_threads(),
            "cpus": usable_cpus(),
        },
        "model": result.facts["model"],
        "time_budget": args.time_budget,
        "prompt_tokens": work and work.prompt_tokens,
        "drafted_tokens": work and work.drafted_tokens,
        **as_json(result.found, figures, offloads=result.offloads),
        "copies": [copy_as_json(copy) for copy in result.copies],
        "copies_not_tried": result.late_copies,
        "applied": result.applied,
        "interrupted": result.interrupted,
    }

"""`racer-local index`: the user's own files, notes and chats as a source of drafts. They never enter a prompt."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racer_local import models
from racer_local.cli.messages import progress, tell
from racer_local.cli.options import check_output
from racer_local.cli.parsing import Parser, add_command
from racer_local.config import parse_size
from racer_local.errors import ConfigError, CorpusError
from racer_local.models import readable_size

if TYPE_CHECKING:
    from racer_local.corpus.files import Found
    from racer_local.corpus.store import Part, Store
    from racer_local.llama.vocabulary import Vocabulary

EXAMPLES = {
    "build": ("racer-local index build ~/code ~/notes -m my-model.gguf -o my.index", "for every model of its family"),
    "add": ("racer-local index add my.index ~/code", "takes in what is new or has changed"),
    "remove": ("racer-local index remove my.index ~/code/old", "a folder with all that is in it"),
    "clear": ("racer-local index clear own.index", "an index that --remember filled is empty again"),
    "info": ("racer-local index info my.index --files", "its size, and the files in it"),
    "search": ('racer-local index search my.index "def main(" --explain', "continuations, and the files they are from"),
}
MOST_BYTES = "1G"
"""Of one file, by default."""
SHOWN = 8
"""Continuations of a search, by default."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("index", help="index your files, so that drafts come from them", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help: str) -> Parser:
        return add_command(actions, name, help=help, examples=[EXAMPLES[name]])

    build = action("build", "index files and folders, as .gitignore says")
    build.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="files and folders")
    build.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the index")
    build.add_argument("-m", "--model", required=True, help="a GGUF file or a name: whose vocabulary to use")
    build.set_defaults(run=run_build)

    add = action("add", "add files, or take in what has changed in them")
    add.add_argument("index", type=Path, metavar="FILE", help="the index")
    add.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="files and folders")
    add.add_argument("-m", "--model", help="default: the model that the index was built with")
    add.set_defaults(run=run_add)

    for parser in (build, add):
        parser.add_argument("--chat", action="store_true", help="read .jsonl files as chat logs (OpenAI's messages)")
        parser.add_argument("--max-tokens", type=int, metavar="N", help="stop at N tokens; default: no limit")
        what = "leave out larger files; default: %(default)s"
        parser.add_argument("--max-file-size", default=MOST_BYTES, metavar="SIZE", help=what)

    remove = action("remove", "take files out")
    remove.add_argument("index", type=Path, metavar="FILE", help="the index")
    remove.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with all that is in them")
    remove.set_defaults(run=run_remove)

    clear = action("clear", "forget everything in it")
    clear.add_argument("index", type=Path, metavar="FILE", help="the index")
    clear.set_defaults(run=run_clear)

    info = action("info", "what is in it, and how large it is")
    info.add_argument("index", type=Path, metavar="FILE", help="the index")
    info.add_argument("--files", action="store_true", help="list the files")
    info.add_argument("--check", action="store_true", help="read all of it and compare the checksums")
    info.set_defaults(run=run_info)

    search = action("search", "the continuations that a draft would see behind a text")
    search.add_argument("index", type=Path, metavar="FILE", help="the index")
    search.add_argument("text", help="the text so far")
    search.add_argument("-m", "--model", help="default: the model that the index was built with")
    search.add_argument("--explain", action="store_true", help="say which files each continuation is from")
    search.add_argument("--limit", type=int, default=SHOWN, metavar="N", help="continuations; default: %(default)s")
    search.set_defaults(run=run_search)

    for parser in (info, search):
        parser.add_argument("--json", action="store_true", help="for machines")


def run_build(args: argparse.Namespace) -> int:
    from racer_local.corpus.index import create
    from racer_local.llama.vocabulary import Vocabulary

    check_output(args.output, replaced=True)
    files, skipped = _files(args)
    with Vocabulary(models.find(args.model)) as vocabulary:
        part = _collect(args, files, vocabulary, args.output.parent, skipped)
        if not part.files:
            raise CorpusError(f"no text was found{_reasons(skipped)}; name files or folders with text in them")
        with _busy("sorting"):
            create(args.output, vocabulary.id, part)
    _print_summary("indexed", part, skipped, args.output)
    return 0


def run_add(args: argparse.Namespace) -> int:
    from racer_local.corpus.index import add
    from racer_local.corpus.store import Store

    store = Store(args.index)
    check_output(args.index, replaced=True)
    files, skipped = _files(args)
    known = {(file.name, file.size, file.modified) for file in store.all_files}
    new = [found for found in files if (str(found.path), found.size, found.modified) not in known]
    skipped["unchanged"] += len(files) - len(new)
    with _vocabulary_of(store, args.model) as vocabulary:
        part = _collect(args, new, vocabulary, args.index.parent, skipped)
        if part.files:
            with _busy("sorting"):
                add(args.index, vocabulary.id, part)
    _print_summary("added", part, skipped, args.index)
    return 0


def run_remove(args: argparse.Namespace) -> int:
    from racer_local.corpus.index import remove

    gone = remove(args.index, [name for path in args.paths for name in (path, os.path.realpath(path))])
    if not gone:
        raise CorpusError(f"none of these is in it; its files: racer-local index info {args.index} --files")
    print(f"removed {len(gone)} files, {sum(file.tokens for file in gone)} tokens")
    return 0


def run_clear(args: argparse.Namespace) -> int:
    from racer_local.corpus.index import clear

    print(f"forgot {clear(args.index)} tokens")
    return 0


def run_info(args: argparse.Namespace) -> int:
    from racer_local.corpus.store import Store

    store = Store(args.index)
    if args.check:
        store.check()
    files = store.all_files
    memory = sum(array.nbytes for name in ("directory", "starts") for array in store.resident(name))
    facts = {
        "tokens": store.n_tokens,
        "files": len(files),
        "bytes": store.size,
        "segments": [store.length(number) for number in range(store.n_segments)],
        "memory_bytes": memory,
        "model": store.vocabulary.model,
        "n_vocab": store.vocabulary.n_vocab,
        "vocabulary": store.vocabulary.fingerprint,
    }
    if args.json:
        listed = [file._asdict() for file in files] if args.files else len(files)
        print(json.dumps({**facts, "files": listed}))
        return 0
    print(
        f"{store.n_tokens} tokens of {len(files)} files in {store.n_segments} segments, {readable_size(store.size)} "
        f"on disk, {readable_size(memory)} in memory; for the vocabulary of {Path(store.vocabulary.model).name}"
    )
    if args.files:
        for file in files:
            day = datetime.fromtimestamp(file.modified / 1e9).strftime("%Y-%m-%d %H:%M")
            print(f"{file.tokens:10} tokens  {day}  {_printable(file.name)}")
    return 0


def run_search(args: argparse.Namespace) -> int:
    from racer_local.corpus.search import search
    from racer_local.corpus.store import Store

    if args.limit < 1:
        raise ConfigError("--limit must be at least 1")
    store = Store(args.index)
    with _vocabulary_of(store, args.model) as vocabulary:
        context = vocabulary.plain_tokens(args.text)
        found = search(store, context)[: args.limit]
        texts = [b"".join(map(vocabulary.piece, each.tokens)).decode("utf-8", "replace") for each in found]
    if args.json:
        print(json.dumps([{"text": text, **each._asdict()} for text, each in zip(texts, found, strict=True)]))
        return 0
    if not found:
        print("nothing in it ends like this text, so it drafts nothing here")
    for text, each in zip(texts, found, strict=True):
        print(f"{each.matched:3} tokens match, {each.times} times in {len(each.files)} files: {text!r}")
        for name in each.files if args.explain else []:
            print(f"      {_printable(name)}")
    return 0


def _files(args: argparse.Namespace) -> tuple[list[Found], Counter[str]]:
    from racer_local.corpus.files import walk

    if args.max_tokens is not None and args.max_tokens < 2:
        raise ConfigError("--max-tokens must be at least 2")
    skipped: Counter[str] = Counter()
    return list(walk(args.paths, max_bytes=parse_size(args.max_file_size, "--max-file-size"), skipped=skipped)), skipped


def _collect(
    args: argparse.Namespace, files: list[Found], vocabulary: Vocabulary, folder: Path, skipped: Counter[str]
) -> Part:
    from racer_local.corpus.build import collect, estimate

    size = estimate(files, vocabulary, chat=args.chat, max_tokens=args.max_tokens)
    tell(
        f"{size.files} files, {readable_size(size.bytes)}: about {size.tokens} tokens, {readable_size(size.disk)} on "
        f"disk, {readable_size(size.memory)} of memory while it is built, {readable_size(size.resident)} in use"
    )
    with progress(total=size.bytes, unit="B", unit_scale=True) as bar:
        return collect(
            files,
            vocabulary,
            folder,
            chat=args.chat,
            max_tokens=args.max_tokens,
            skipped=skipped,
            report=bar.update,
        )


@contextmanager
def _vocabulary_of(store: Store, model: str | None) -> Iterator[Vocabulary]:
    """The vocabulary that an index needs, from the model that is named or the one that it was built with."""
    from racer_local.llama.vocabulary import Vocabulary

    if model is None and not Path(store.vocabulary.model).is_file():
        raise ConfigError(f"{store.vocabulary.model}, with which {store.path} was built, is gone; name a model with -m")
    with Vocabulary(models.find(model) if model else store.vocabulary.model) as vocabulary:
        store.demand(vocabulary.id)
        yield vocabulary


@contextmanager
def _busy(what: str) -> Iterator[None]:
    if sys.stderr.isatty():
        tell(f"{what} ...")
    yield


def _print_summary(done: str, part: Part, skipped: Counter[str], path: Path) -> None:
    print(
        f"{done} {len(part.files)} files, {len(part.tokens)} tokens{_reasons(skipped)}: {path}, "
        f"{readable_size(path.stat().st_size)}"
    )


def _reasons(skipped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common() if count)
    return f"; skipped {reasons}" if reasons else ""


def _printable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()

"""Where the suite's questions come from, and how each benchmark's own file becomes ours."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from racer_local.errors import DownloadError
from racer_local.models.download import Remote, Report, SourceError, download

INSTRUCTION = "Implement the following code.\n"
"""What a chat is told before a prompt of HumanEval."""


class Source(NamedTuple):
    """One benchmark: its file's address, how to read it, and how many questions it must hold."""

    url: str
    read: Callable[[bytes], Iterator[dict[str, Any]]]
    questions: int


def _spec_bench(raw: bytes) -> Iterator[dict[str, Any]]:
    for line in raw.decode("utf-8").removesuffix("\n").split("\n"):
        question = json.loads(line)
        yield {name: question[name] for name in ("question_id", "category", "turns")}


def _human_eval(raw: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(gzip.decompress(raw).decode("utf-8").removesuffix("\n").split("\n")):
        task = json.loads(line)
        tested = {name: task[name] for name in ("prompt", "test", "entry_point")}
        yield {"question_id": number, "category": "coding", "turns": [INSTRUCTION + task["prompt"]], **tested}


def _mgsm(raw: bytes) -> Iterator[dict[str, Any]]:
    rows = csv.reader(StringIO(raw.decode("utf-8-sig")), delimiter="\t", quoting=csv.QUOTE_NONE)
    for number, (question, answer) in enumerate(rows, 1):
        yield {"question_id": number, "category": "reasoning", "turns": [question], "reference": answer}


SOURCES = {
    "spec_bench.jsonl": Source(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl", _spec_bench, 480
    ),
    "human_eval.jsonl": Source(
        "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz", _human_eval, 164
    ),
    "mgsm_zh.jsonl": Source(
        "https://raw.githubusercontent.com/google-research/url-nlp/main/mgsm/mgsm_zh.tsv", _mgsm, 250
    ),
}
"""By the name of our file. Licences: Apache-2.0, MIT, CC-BY-SA-4.0."""


def fetch(name: str, folder: Path, report: Report = lambda done, total: None) -> int:
    """Get a benchmark into the folder unless it is there; the number of its questions, 0 where it was there.

    Raises DownloadError, saying what can be done instead, and OSError where the folder can't be written.
    """
    path, source = folder / name, SOURCES[name]
    if path.exists():
        return 0
    part, made = folder / f"{name}.part", folder / f"{name}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        download(Remote(source.url, None, None, None), part, report)
        lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in source.read(part.read_bytes())]
        if len(lines) != source.questions:
            raise ValueError(f"{len(lines)} questions, not {source.questions}")
    except SourceError as error:
        raise DownloadError(
            f"{source.url}: {error}; check the network or HTTPS_PROXY, or put the file at {path}"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{source.url} is not the {name} it was ({error}); put the file at {path}") from error
    made.write_text("".join(lines), encoding="utf-8")
    made.replace(path)
    part.unlink()
    return len(lines)

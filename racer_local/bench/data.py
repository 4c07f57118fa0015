"""Questions of a benchmark, from JSONL files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from racer_local.errors import ConfigError

FILES = ("spec_bench.jsonl", "human_eval.jsonl", "mgsm_zh.jsonl")
LIMIT, MAX_TOKENS, TEMPERATURES = 10, 160, (0.0, 0.8)
"""What the suite asks where it is not told: questions of each category, tokens of an answer, greedy and drawn."""
MIN_SPEEDUP, MIN_CATEGORY = 1.0, 0.98
"""What the gate demands in total and of each category, where it is not told."""
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""Spec-Bench counts MT-Bench's eight categories as one."""


@dataclass(frozen=True)
class Check:
    """HumanEval's: a prompt that a completion goes on from, the tests, and the function they call."""

    prompt: str
    test: str
    entry_point: str


@dataclass(frozen=True)
class Question:
    """What a user says, turn by turn."""

    category: str
    turns: list[str]
    id: str = field(default="", compare=False)
    """Its "question_id", or FILE:LINE."""
    check: Check | None = field(default=None, compare=False)
    """How a program that answers it is tested, where it asks for one."""


def read_questions(paths: Sequence[Path], limit: int | None = None) -> list[Question]:
    """The questions of all files in order; of each category at most `limit`, spread evenly over it.

    A line is {"turns": [...]} or {"prompt": ...}. Its category is the file's name, or, in a file of several
    categories, the line's "category".
    """
    questions = [question for path in paths for question in _read_file(path)]
    if not questions:
        raise ConfigError(f"{', '.join(map(str, paths)) or '--data'} holds no questions")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for same in by_category.values() for question in _spread(same, limit)]


def read_folder(folder: Path, limit: int | None = None) -> list[Question]:
    """The benchmarks' questions that lie in a folder. Raises ConfigError where there are none."""
    there = [path for name in FILES if (path := folder / name).is_file()]
    if not there:
        raise ConfigError(f"{folder} has none of {', '.join(FILES)}; get them with: racer-local bench data {folder}")
    return read_questions(there, limit)


def in_turns(questions: Sequence[Question]) -> list[Question]:
    """One question of each category, then the next of each: who stops anywhere has asked about as many of each."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for turn in zip_longest(*by_category.values()) for question in turn if question]


def read_prompts(path: Path, limit: int) -> list[str]:
    """The first turns of up to `limit` questions, spread evenly over a file."""
    return [question.turns[0] for question in _spread(_read_file(path), limit)]


def _read_file(path: Path) -> list[Question]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
        several = len({line.get("category") for line in lines}) > 1
        return [
            Question(
                _category(line, path) if several else path.stem,
                _turns(line),
                str(line.get("question_id", f"{path.name}:{number}")),
                Check(line["prompt"], line["test"], line["entry_point"]) if "test" in line else None,
            )
            for number, line in enumerate(lines, 1)
        ]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} must hold a JSON object a line, with "turns" or "prompt" in it ({error!r})'
        ) from error


def _category(line: dict[str, Any], path: Path) -> str:
    category = line.get("category")
    return path.stem if category is None else "mt_bench" if category in MT_BENCH else str(category)


def _turns(line: dict[str, Any]) -> list[str]:
    turns = line["turns"] if "turns" in line else [line["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("turns must be a list of texts")
    return turns


def _spread(questions: list[Question], limit: int | None) -> list[Question]:
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]

"""Flags built from the settings in `racer_local.config`: name, help, choices and default stand there, once."""

from __future__ import annotations

import argparse
import os
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from racer_local.config import ContextConfig, ModelConfig, Options
from racer_local.errors import ConfigError
from racer_local.tuned import recall

T = TypeVar("T")


def add_settings(parser: argparse.ArgumentParser, *configs: type, without: tuple[str, ...] = ()) -> None:
    """One flag for each setting of the config classes that has a help text, but those named in `without`."""
    for config in configs:
        group = parser.add_argument_group(config.__name__.removesuffix("Config").lower())
        hints = get_type_hints(config)
        for setting in fields(config):
            if "help" in setting.metadata and setting.name not in without:
                group.add_argument(_flag(setting), dest=setting.name, **_details(setting, hints[setting.name]))


def from_args(config: type[T], args: argparse.Namespace, **more: Any) -> T:
    """The config that the given flags make; what was not given keeps its default."""
    given = {
        setting.name: value
        for setting in fields(config)  # type: ignore[arg-type]
        if (value := getattr(args, setting.name, None)) is not None
    }
    return config(**{**given, **more})


def add_model(
    parser: argparse.ArgumentParser,
    *configs: type,
    without: tuple[str, ...] = (),
    several: bool = False,
    required: bool = True,
) -> None:
    """The flags of a command that opens a model: how to load it, and the settings of these config classes but some."""
    what = "a GGUF file, or a name from: racer-local models list"
    if several:
        more = "; NAME=FILE gives it a name; may be repeated, the others are loaded when they are asked for"
        parser.add_argument("-m", "--model", required=True, action="append", help=what + more)
    else:
        parser.add_argument("-m", "--model", required=required, help=what)
    add_settings(parser, ModelConfig, *configs, without=without)
    for owner in ("model", "context"):
        parser.add_argument(
            f"--{owner}-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"a further field of llama_{owner}_params; may be repeated",
        )


def check_output(path: Path | None, *, replaced: bool = False) -> None:
    """Before the work, not after it. `replaced`: a new file takes its place, so that the folder must be writable.

    Raises ConfigError where it can't be written.
    """
    if path and (path.is_dir() or not os.access(path.parent if replaced or not path.exists() else path, os.W_OK)):
        raise ConfigError(f"{path} can't be written; name a file in a folder that exists and is yours")


def model_from_args(args: argparse.Namespace) -> ModelConfig:
    return from_args(ModelConfig, args, options=parse_options(args.model_option, "--model-option"))


def context_from_args(args: argparse.Namespace, path: Path | None = None) -> ContextConfig:
    """With what `tune --apply` remembered of the model file at `path` for what was left open.

    Flash attention and the type of keys and values were found together, so one that is given drops both.
    """
    options = parse_options(args.context_option, "--context-option")
    given = from_args(ContextConfig, args, options=options)
    found = recall(path) if path else {}
    if args.flash_attn or args.kv_type:
        found = {name: value for name, value in found.items() if name not in ("flash_attn", "kv_type")}
    return replace(given, **{name: value for name, value in found.items() if getattr(args, name) is None})


def parse_options(pairs: list[str], flag: str) -> Options:
    """NAME=VALUE pairs; values are numbers, true or false, or several numbers with commas between."""
    options: dict[str, int | float | bool | tuple[float, ...]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"{flag} {pair!r} must be NAME=VALUE")
        options[name] = _value(text, f"{flag} {name}")
    return options


def _value(text: str, what: str) -> int | float | bool | tuple[float, ...]:
    if "," in text:
        return tuple(float(_value(part, what)) for part in text.split(","))  # type: ignore[arg-type]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ConfigError(f"{what} is {text!r}; it must be a number, true or false")


def _flag(setting: Field[Any]) -> str:
    return "--" + (setting.metadata["flag"] or setting.name).replace("_", "-")


def _details(setting: Field[Any], kind: Any) -> dict[str, Any]:
    shown = "" if setting.default in (None, MISSING) else f" (default: {setting.default})"
    kinds = {int: int, float: float, str: str, int | None: int, str | None: str}
    if kind is bool:
        return {"action": "store_true", "default": None, "help": setting.metadata["help"].replace("%", "%%")}
    if kind not in kinds:  # several of them
        return {"action": "append", "help": setting.metadata["help"], "metavar": setting.metadata["metavar"]}
    return {
        "type": kinds[kind],
        "choices": setting.metadata["choices"],
        "help": (setting.metadata["help"] + shown).replace("%", "%%"),
        "metavar": None if setting.metadata["choices"] else setting.metadata["metavar"],
    }

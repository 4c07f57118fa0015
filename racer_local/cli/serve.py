"""`racer-local serve`: a local server of OpenAI's HTTP, and a page to chat on."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from racer_local import models
from racer_local.cli.options import add_model, add_settings, context_from_args, from_args, model_from_args
from racer_local.cli.parsing import add_command
from racer_local.config import ContextConfig, DraftConfig, SamplingConfig, ServerConfig
from racer_local.errors import ConfigError

KEYS = "RACER_LOCAL_API_KEYS"
DESCRIPTION = """\
Serve chat and text completions, embeddings and a page to chat on to any client of OpenAI's, until SIGTERM or Ctrl-C.
It listens to this machine alone unless told otherwise. What a request leaves open is as given here."""
EXAMPLES = (
    ("racer-local serve -m smollm2-135m", "the page at http://127.0.0.1:8080, OpenAI's HTTP at /v1"),
    ("racer-local serve -m small=a.gguf -m large=b.gguf --max-ram 8G", "two models, loaded as they are asked for"),
    ("racer-local serve -m my-model.gguf --host 0.0.0.0 --api-key KEY-OF-8-OR-MORE", "for the whole network"),
)


def add_parser(commands: Any) -> None:
    what = "serve OpenAI's HTTP and a page to chat on"
    parser = add_command(commands, "serve", help=what, description=DESCRIPTION, examples=EXAMPLES)
    add_model(parser, ContextConfig, DraftConfig, SamplingConfig, several=True)
    add_settings(parser, ServerConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # All that can be wrong without the model is found before anything is listened to.
    from_environment = [key for key in os.environ.get(KEYS, "").split(",") if key]
    config = from_args(ServerConfig, args, api_keys=(*(args.api_keys or ()), *from_environment))
    draft, sampling = from_args(DraftConfig, args), from_args(SamplingConfig, args)
    model, context = model_from_args(args), partial(context_from_args, args)
    paths = _named(args.model)
    for path in paths.values():
        context(path)
    if draft.remember and len(config.api_keys) > 1:
        raise ConfigError("--remember would let one key's answers draft for another; leave it out, or use one key")
    if draft.corpora:
        from racer_local.corpus.shelf import check_indexes

        check_indexes(draft.corpora)
    try:
        from racer_local.server.run import serve
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with: pip install 'racer-local[server]'"
        ) from error
    return serve(paths, config, model, context, draft, sampling)


def _named(given: list[str]) -> dict[str, Path]:
    """Models by the name that clients use: NAME=FILE, a name that is known, or a file's own name."""
    paths: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or os.path.exists(text):
            path, name = text, Path(text).stem if text.lower().endswith(".gguf") else text
        if not name or name in paths:
            raise ConfigError(f"--model {text}: each model needs a name of its own; give it as NAME={path}")
        paths[name] = models.find(path)
    return paths

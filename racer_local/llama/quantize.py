"""Copies of a model in another quant (llama_model_quantize), made in a child process, which an interrupt can end.

`python -m racer_local.llama.quantize SOURCE TARGET QUANT THREADS` is the child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from racer_local.config import default_threads
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import library
from racer_local.llama.vocabulary import Vocabulary

BITS = {"Q4_0": 4.5, "Q4_K_M": 4.9, "Q8_0": 8.5}
"""The quants that can be made, and about the bits of a weight in them."""
SPARE = 1.6
"""Bits a weight by which a copy may be larger: embeddings are kept better, and odd rows fall back to other types."""
WHOLE = ("F32", "F16", "BF16")
"""Types that nothing was lost in yet."""
_CHILD = f"""
import sys
sys.path = [*filter(None, sys.path), {str(Path(__file__).resolve().parents[2])!r}]
from racer_local.llama.quantize import main
main()
"""


def type_of(model: Vocabulary) -> str:
    """What a file says that most of its weights are, such as Q4_K_M or F16 (llama_model_ftype)."""
    name = str(model._lib.llama_ftype_name(model._lib.llama_model_ftype(model.handle)).decode())
    for told, short in (("(guessed) ", ""), ("all ", ""), (" - Small", "_S"), (" - Medium", "_M"), (" - Large", "_L")):
        name = name.replace(told, short)
    return name


def size_of(model: Vocabulary, quant: str) -> int:
    """Bytes that a copy takes at most, about."""
    weights = int(model._lib.llama_model_n_params(model.handle))
    return int(weights * (BITS[quant] + SPARE) / 8)


def check_quant(quant: str) -> None:
    """Raises ConfigError for one that is not made here."""
    if quant not in BITS:
        raise ConfigError(f"{quant!r} is no quant that can be made here; known: {', '.join(BITS)}")


def quantize(source: Path, target: Path, quant: str, threads: int | None = None) -> None:
    """Write a copy of `source` in this quant to `target`, which is there when it is whole. Minutes for a large model.

    A file that is quantized already may be the source: it loses more than one that is not.

    Raises ModelError, with llama.cpp's reason, where it can't be made.
    """
    check_quant(quant)
    part = target.with_name(f"{target.name}.part")
    arguments = [str(source), str(part), quant, str(threads or default_threads())]
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # else an abort starts a debugger
        start_new_session=True,  # Ctrl-C is for the parent, which ends it
    )
    try:
        _, told = child.communicate()
        if child.returncode:
            lines = told.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"it ended with code {child.returncode}"
            raise ModelError(f"{source.name} can't be made {quant}: {reason}")
        part.replace(target)
    finally:
        child.kill()
        child.wait()
        part.unlink(missing_ok=True)


def main() -> None:
    source, target, quant, threads = sys.argv[1:]
    lib = library.init()
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{quant}")
    params.nthread, params.allow_requantize = int(threads), True
    library.forget_errors()
    failed = lib.llama_model_quantize(os.fsencode(source), os.fsencode(target), params)
    if failed:
        print(library.cause(), file=sys.stderr, flush=True)
    os._exit(1 if failed else 0)  # not through the libraries' destructors, which may log


if __name__ == "__main__":
    main()

"""llama_cpp, imported once and after its probe, with its log caught: llama.cpp says why a load failed only there."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from typing import Any

from racer_local.config import Options
from racer_local.errors import BindingError, ConfigError
from racer_local.llama.probe import ensure_build_works

ERROR_LEVEL = 4
CONTINUED_LEVEL = 5

_shown: list[Any] = []
"""Where the log goes too, if anywhere."""
_errors: deque[str] = deque(maxlen=20)
_keep: list[object] = []
"""llama.cpp calls the log callback for as long as the process lives, so it must stay referenced."""


@cache
def init() -> Any:
    """The binding, its backend started and its log caught; a log callback set before is replaced.

    A build is imported once a probe in a child process has shown that it runs on this CPU.

    Raises BindingError where it crashes or can't be imported.
    """
    ensure_build_works()
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise BindingError(f"llama-cpp-python can't be loaded ({error}); install it with: make setup") from error
    _keep.append(llama_cpp.llama_log_callback(_on_log))
    llama_cpp.llama_log_set(_keep[0], ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _on_log(level: int, text: bytes | None, _user_data: object) -> None:
    if level == ERROR_LEVEL and text:
        _errors.append(text.decode("utf-8", "replace"))
    elif level == CONTINUED_LEVEL and text and _errors:
        _errors[-1] += text.decode("utf-8", "replace")
    for show in _shown:
        show(level, text, _user_data)


def show_log(shown: bool) -> None:
    """Whether llama.cpp's log is printed from now on, as the binding does it, which its `verbose` governs."""
    from llama_cpp._logger import llama_log_callback

    _shown[:] = [llama_log_callback] if shown else []


def forget_errors() -> None:
    """Before a call whose failure is to be explained."""
    _errors.clear()


def cause() -> str:
    """The first error that llama.cpp logged since then, in one line."""
    lines = (" ".join(text.split()) for text in _errors)
    return next(filter(None, lines), "llama.cpp gave no reason")


def set_fields(params: Any, options: Options, what: str) -> None:
    """Set further fields of a llama.cpp parameter struct by their own name."""
    known = {name: kind for name, kind in params._fields_ if kind in (*_PLAIN_TYPES, _FLOATS)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{what} has no option {name!r}; known: {', '.join(sorted(known))}")
        try:
            setattr(params, name, _float_array(value) if known[name] is _FLOATS else value)
        except (TypeError, IndexError) as error:
            raise ConfigError(f"{what} option {name}={value!r} is not of its type ({error})") from error


_PLAIN_TYPES = (ctypes.c_bool, ctypes.c_int, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float)
_FLOATS = ctypes.POINTER(ctypes.c_float)


def _float_array(values: Any) -> Any:
    """One number a device (tensor_split), the rest 0."""
    values = values if isinstance(values, tuple | list) else (values,)
    return (ctypes.c_float * init().llama_max_devices())(*values)

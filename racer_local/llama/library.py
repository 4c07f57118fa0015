"""llama_cpp, imported once, with its log caught: llama.cpp says why a load failed only there."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from racer_local.config import Options
from racer_local.errors import BindingError, ConfigError

try:
    import llama_cpp as lib
except (ImportError, OSError, RuntimeError) as error:
    raise BindingError(
        f"llama-cpp-python can't be loaded ({error}); install it with: make setup (or pip install llama-cpp-python)"
    ) from error

ERROR_LEVEL = 4
CONTINUED_LEVEL = 5

_errors: deque[str] = deque(maxlen=20)
_level = 0


@lib.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _on_log(level: int, text: bytes | None, _user_data: ctypes.c_void_p) -> None:
    global _level
    _level = _level if level == CONTINUED_LEVEL else level
    if _level == ERROR_LEVEL and text:
        _errors.append(text.decode("utf-8", "replace").strip())


def init() -> Any:
    """The binding, its backend started and its log caught. Cheap when called again.

    The callback object is a module global: llama.cpp calls it for as long as the process lives.
    """
    lib.llama_log_set(_on_log, ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib


def last_error() -> str:
    """What llama.cpp logged as the cause of the last failure, in one line; forgotten once read."""
    lines = [line for line in _errors if line]
    _errors.clear()
    return lines[0] if lines else "llama.cpp gave no reason"


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
    return (ctypes.c_float * lib.llama_max_devices())(*values)

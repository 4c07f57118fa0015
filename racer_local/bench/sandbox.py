"""Run as a script by `humaneval`: read a program from stdin, give up what it does not need, run it.

Arguments: bytes of memory, seconds of CPU, and the word to print on stdout once it ended without an exception.
"""

import os
import sys

REFUSED = (
    *("socket.", "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.kill", "ctypes."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.ch", "shutil."),
)
"""Beginnings of audit events (PEP 578)."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def give_up(memory: int, seconds: int) -> None:
    """Memory, time, large files, more processes, and the network, as far as this system can take them away."""
    try:
        import resource

        for name, most in (("AS", memory), ("CPU", seconds), ("FSIZE", 1 << 20), ("CORE", 0), ("NPROC", 0)):
            try:
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
            except (AttributeError, ValueError, OSError):
                continue  # not known here, or more than this process may have
    except ImportError:
        pass  # Windows
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)  # refused in some containers


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook; once set nobody can take it away."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
    if writes or event.startswith(REFUSED):
        raise PermissionError(f"{event} is not for a tested program")


def main() -> None:
    memory, seconds, passed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    source, out = sys.stdin.read(), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    del sys.argv[1:]
    give_up(memory, seconds)
    sys.addaudithook(refuse)
    exec(compile(source, "answer", "exec"), {"__name__": "answer"})
    os.write(out, passed.encode())


if __name__ == "__main__":
    main()

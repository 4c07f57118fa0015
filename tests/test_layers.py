"""The house: who may import whom, and what importing the package costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "racer_local"

LAYERS = {
    "errors": 0,
    "config": 0,
    "tree": 0,
    "stats": 0,
    "kernels": 1,
    "text": 1,
    "pieces": 1,
    "tools": 1,
    "verify": 1,
    "cost": 1,
    "remembered": 1,
    "tuned": 1,
    "machine": 1,
    "acceptance": 1,
    "binding": 1,
    "models": 1,
    "corpus": 2,
    "draft": 2,
    "target": 2,
    "llama": 3,
    "engine": 3,
    "exact": 3,
    "racing": 4,
    "session": 4,
    "llm": 5,
    "chat": 5,
    "bootstrap": 4,
    "wire": 5,
    "server": 5,
    "offline": 5,
    "bench": 6,
    "tuning": 6,
    "cli": 7,
    "__main__": 8,
}
"""A module imports from its own layer or lower ones. `llama` knows neither `draft` nor the engine, nor they it."""


def room(module):
    return module.split(".")[1] if "." in module else None


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("racer_local"):
            if node.module == "racer_local":
                yield from (f"racer_local.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("racer_local."))


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_upward(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in imports(path):
        other = room(module)
        assert LAYERS[other] <= LAYERS[own], f"{own} imports {module}"
        assert {own, other} not in ({"draft", "llama"}, {"engine", "llama"})
        if own == "kernels":
            assert other == "kernels"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_llama_imports_the_binding(path):
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        node.module.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    if "llama_cpp" in names:
        assert path.parent.name == "llama"


@pytest.mark.parametrize(
    "module", ["racer_local", "racer_local.bootstrap", "racer_local.cli.doctor", "racer_local.cli.generate"]
)
def test_importing_the_package_loads_nothing_heavy(module):
    code = f"import {module}, sys; print([m for m in ('llama_cpp', 'numba', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_plain_decoding_loads_no_numba():
    code = (
        "import sys, racer_local.engine as e, racer_local.draft as d; from racer_local.config import DraftConfig;"
        "d.make_drafter(DraftConfig(draft='none'), 8); print('numba' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_every_public_name_can_be_imported():
    import racer_local

    for name in racer_local.__all__:
        assert getattr(racer_local, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Llamma'"):
        _ = racer_local.Llamma

from __future__ import annotations

import pytest
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    """A random-weight GGUF of two layers."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layer=2)


@pytest.fixture(scope="session")
def tiny(tiny_path):
    from racer_local.llama import Model

    with Model(tiny_path) as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_path():
    """SmolLM2-135M-Instruct Q4_1, fetched once into the models folder."""
    from racer_local.models import fetch

    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    from racer_local.llama import Model

    with Model(smollm2_path) as model:
        yield model

from __future__ import annotations

import pytest
from tiny_gguf import write_tiny_gguf

from racer_local.config import cache_home


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory):
    """Measurements of these tests stay out of the user's folder; models are shared with it."""
    real, home = cache_home(), tmp_path_factory.mktemp("home")
    (real / "models").mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to(real / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACER_LOCAL_HOME", str(home))
        yield


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


@pytest.fixture
def trace_path(tmp_path):
    """A recorded trace of random conversations."""
    from benches import random_trace

    random_trace().save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"

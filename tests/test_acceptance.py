"""kernels.acceptance and the shipped prior: probabilities against numpy, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest
from memories import random_net

from racer_local.acceptance import load_prior
from racer_local.errors import ConfigError
from racer_local.kernels import acceptance
from racer_local.kernels.evidence import CANDIDATES, NODE_FEATURES, TOKEN_FEATURES, new_evidence

NAMES = ("node_weights", "token_weights", "bias", "prior")


def random_evidence(rng):
    """Tokens are 0, 2, 4, ...; a third of the features are zero."""
    evidence = new_evidence(4)
    evidence.tokens[:] = 2 * np.arange(CANDIDATES)
    evidence.node[:] = rng.normal(size=len(NODE_FEATURES))
    evidence.features[:] = rng.normal(size=evidence.features.shape) * (rng.random(evidence.features.shape) < 0.67)
    return evidence


def estimate(net, evidence, size):
    acceptance.estimate(net, evidence, size)
    return net.p[:size].copy()


def learn(net, evidence, size, token, rate, pull=0.0):
    acceptance.learn(net, evidence, size, np.int32(token), np.float32(rate), np.float32(pull))


def hidden_twin(net, evidence, size):
    node, token = evidence.node.astype(float), evidence.features[:size].astype(float)
    return np.maximum(node @ net.node_weights + token @ net.token_weights + net.bias, 0)


def estimate_twin(out, hidden):
    """The probabilities of the candidates and, last, of none of them."""
    weights = np.exp(np.append(hidden @ out[:-1] + out[-1], 0))
    return weights / weights.sum()


@pytest.mark.parametrize("size", [0, 1, 2, CANDIDATES])
def test_estimate_equals_numpy_and_leaves_a_rest_for_none_of_them(size):
    rng = np.random.default_rng(size)
    for _ in range(30):
        net, evidence = random_net(rng, hidden=int(rng.integers(1, 9))), random_evidence(rng)
        p = estimate(net, evidence, size)
        expected = estimate_twin(net.out.astype(float), hidden_twin(net, evidence, size))
        np.testing.assert_allclose(p, expected[:-1], rtol=1e-4)
        assert (p >= 0).all()
        assert p.sum(dtype=float) < 1


def test_scores_beyond_the_range_of_exp_are_probabilities_still():
    rng = np.random.default_rng(0)
    net, evidence = random_net(rng), random_evidence(rng)
    for score, expected in ((1e4, 0.5), (-1e4, 0)):
        net.out[:] = [0] * 8 + [score]
        assert estimate(net, evidence, 2) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("token", [0, 4, 8, 9])
def test_learning_is_a_gradient_step_of_the_log_loss_in_the_last_layer(token):
    """Tokens 8 and 9 are none of the four candidates."""
    rng = np.random.default_rng(token)
    net, evidence, size, rate = random_net(rng), random_evidence(rng), 4, 0.1
    estimate(net, evidence, size)
    before, hidden = net.out.astype(float), hidden_twin(net, evidence, size)
    place = token // 2 if token in evidence.tokens[:size] else -1
    nudges = np.eye(len(before)) * 1e-5
    up, down = (-np.log([estimate_twin(before + sign * n, hidden)[place] for n in nudges]) for sign in (1, -1))
    learn(net, evidence, size, token, rate)
    np.testing.assert_allclose((before - net.out) / rate, (up - down) / 2e-5, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("token", [0, 6, 9])
def test_what_comes_again_and_again_is_expected_more_and_more(token):
    rng = np.random.default_rng(token)
    net, evidence, size = random_net(rng), random_evidence(rng), 4
    hopes = []
    for _ in range(100):
        p = estimate(net, evidence, size)
        hopes.append(p[token // 2] if token < 8 else 1 - p.sum(dtype=float))
        learn(net, evidence, size, token, 0.01)
    assert (np.diff(hopes) > 0).all()
    assert hopes[-1] > hopes[0] + 0.05


def test_only_the_last_layer_learns_and_the_prior_is_kept():
    rng = np.random.default_rng(0)
    net, evidence = random_net(rng), random_evidence(rng)
    before = {name: getattr(net, name).copy() for name in NAMES}
    estimate(net, evidence, 3)
    learn(net, evidence, 3, 0, 0.1, 0.1)
    assert (net.out != net.prior).all()
    for name, array in before.items():
        np.testing.assert_array_equal(getattr(net, name), array)


def test_pull_leads_back_to_the_prior_by_its_share():
    rng = np.random.default_rng(0)
    net, evidence = random_net(rng), random_evidence(rng)
    net.out[:] += 1
    for n in range(1, 50):
        estimate(net, evidence, 3)
        learn(net, evidence, 3, 0, 0, 0.1)
        np.testing.assert_allclose(net.out - net.prior, 0.9**n, rtol=1e-3, atol=1e-5)


# --- load_prior ---


def arrays(hidden=3):
    shapes = (len(NODE_FEATURES), hidden), (len(TOKEN_FEATURES), hidden), (hidden,), (hidden + 1,)
    return {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))}


def test_a_saved_prior_is_loaded_as_it_was_and_starts_from_itself(tmp_path):
    np.savez_compressed(tmp_path / "prior.npz", **arrays())
    net = load_prior(tmp_path / "prior.npz")
    for name, array in arrays().items():
        np.testing.assert_array_equal(getattr(net, name), array)
    np.testing.assert_array_equal(net.out, net.prior)
    net.out[:] = 7
    assert (net.prior == 3).all()


def test_the_shipped_prior_gives_probabilities():
    rng = np.random.default_rng(0)
    net, evidence = load_prior(), random_evidence(rng)
    assert all(np.isfinite(getattr(net, name)).all() for name in NAMES)
    p = estimate(net, evidence, CANDIDATES)
    assert (p >= 0).all()
    assert 0 < p.sum(dtype=float) <= 1 + 1e-6


def refuses(path):
    with pytest.raises(ConfigError) as error:
        load_prior(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert "racer-local bench fit" in str(error.value)


def test_a_prior_that_is_missing_or_a_folder_is_refused(tmp_path):
    refuses(tmp_path / "missing.npz")
    refuses(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_prior_without_one_of_its_arrays_is_refused(tmp_path, name):
    path = tmp_path / "prior.npz"
    np.savez(path, **{other: array for other, array in arrays().items() if other != name})
    refuses(path)


@pytest.mark.parametrize("name", ["node_weights", "token_weights", "bias"])
def test_a_prior_of_other_features_is_refused(tmp_path, name):
    path = tmp_path / "prior.npz"
    np.savez(path, **(arrays() | {name: arrays()[name][1:]}))
    refuses(path)


def test_a_file_that_is_no_prior_is_refused(tmp_path):
    path = tmp_path / "prior.npz"
    path.write_bytes(b"GGUF is something else\n" * 100)
    refuses(path)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_prior_that_is_cut_off_is_refused(tmp_path, share):
    path = tmp_path / "prior.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refuses(path)


def test_a_prior_with_other_bytes_in_it_is_refused(tmp_path):
    path = tmp_path / "prior.npz"
    np.savez(path, **arrays())
    path.write_bytes(path.read_bytes().replace(np.float32(1).tobytes(), np.float32(2).tobytes()))
    refuses(path)


def test_a_single_array_is_refused(tmp_path):
    np.save(tmp_path / "array.npy", arrays()["bias"])
    refuses(tmp_path / "array.npy")


@pytest.mark.parametrize("shape", [3, 5, (4, 1)])
def test_a_prior_whose_last_layer_does_not_fit_is_refused(tmp_path, shape):
    np.savez(tmp_path / "prior.npz", **(arrays() | {"prior": np.zeros(shape, np.float32)}))
    refuses(tmp_path / "prior.npz")

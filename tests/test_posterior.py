"""The log density against a naive loop over rows and draws, in float64, for every case."""

from __future__ import annotations

import copy
import threading
import warnings
from functools import lru_cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from versions import TORCH

import subbayes
from subbayes import Draws, InputError, InputTypeError, Network, Posterior, subspace
from subbayes.data.data import Data
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
)
from subbayes.networks.tracing.memory import ActivationLimits
from subbayes.priors import Normal, normal_prior
from subbayes.subspace import CoordinateSubspace, DenseSubspace, FullSubspace, RandomSubspace
from subbayes.utils.trees import take

MLP = cases.Case("mlp", "gaussian")
EACH = cases.one_per_network()
OTHERS = [name for name in cases.LIKELIHOODS if name != "gaussian"]
OPTIONS = {"prior": Normal(0.8, mean=0.1), "temperature": 2.0}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "vectorising over weights failed")
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


@lru_cache
def traced(case: cases.Case) -> tuple[cases.Built, Posterior]:
    """A case and its posterior, shared by tests: using it changes nothing, which is a test too."""
    built = case.build()
    return built, built.posterior(**OPTIONS)


def points(posterior: Posterior, s: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(s, posterior.rank))


def naive_terms(built: cases.Built, posterior: Posterior, z: np.ndarray) -> np.ndarray:
    """log p(y_n | f(x_n; w)) of every draw and row, one module and one row at a time: (S, N)."""
    shift, basis = posterior.subspace.shift.double(), posterior.subspace.basis().double()
    terms = []
    for row in torch.from_numpy(z):
        weights = (shift + row @ basis).to(built.network.dtype)
        module = built.network.module_with(weights)
        with torch.no_grad():
            f = [
                built.call(module, take(built.inputs, slice(n, n + 1))).numpy()
                for n in range(posterior.data.n)
            ]
        y = tuple(t.numpy() for t in built.y) if isinstance(built.y, tuple) else built.y.numpy()
        terms.append(cases.reference_log_prob(built.likelihood, np.concatenate(f), y))
    return np.stack(terms)


def allclose(a: Any, b: Any, case: cases.Case, factor: float = 1.0) -> None:
    np.testing.assert_allclose(a, b, rtol=case.tolerance * factor, atol=case.tolerance * factor)


# --- values --------------------------------------------------------------------------------------


@cases.parametrize()
def test_equals_a_naive_loop(case):
    built = case.build()
    posterior = built.posterior(mode="eager", **OPTIONS)
    z = points(posterior)
    terms = naive_terms(built, posterior, z)
    prior = stats.norm(0.1, 0.8).logpdf(z).sum(1)
    allclose(posterior.log_likelihood(z), terms.sum(1), case, 10)
    allclose(posterior.value(z), terms.sum(1) / 2 + prior, case, 10)
    allclose(posterior.pointwise(z), terms, case, 10)


@pytest.mark.few(8)
@cases.parametrize(*EACH, *(cases.Case("mlp", name) for name in OTHERS))
def test_traced_equals_eager(case):
    built, posterior = traced(case)
    eager = built.posterior(mode="eager", **OPTIONS)
    z = points(posterior)
    for a, b in zip(posterior.value_and_grad(z), eager.value_and_grad(z), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    if case.network in ("mlp", "cnn", "transformer", "tuple"):
        np.testing.assert_allclose(posterior.value(z), eager.value(z), rtol=1e-12)
        np.testing.assert_allclose(posterior.pointwise(z), eager.pointwise(z), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@cases.parametrize(MLP, cases.Case("cnn", "categorical", dtype=torch.float32))
def test_compiled_equals_eager(case):
    built = case.build()
    compiled, eager = built.posterior(mode="compile"), built.posterior(mode="eager")
    z = points(eager)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compiling the log density failed")
        allclose(compiled.value(z), eager.value(z), case, 10)
    for a, b in zip(compiled.value_and_grad(z), eager.value_and_grad(z), strict=True):
        allclose(a, b, case, 100)


@pytest.mark.few(6)
@cases.parametrize(*EACH)
def test_the_same_z_gives_the_same_bits(case):
    _, posterior = traced(case)
    z = points(posterior)
    value, grad = posterior.value_and_grad(z)
    posterior.value_and_grad(points(posterior, seed=1))
    again = posterior.value_and_grad(z)
    assert np.array_equal(value, again[0])
    assert np.array_equal(grad, again[1])


def test_posteriors_built_alike_give_the_same_bits():
    values = [MLP.build().posterior().value_and_grad(np.full((2, 4), 0.3)) for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*values, strict=True))


@cases.parametrize(*EACH)
def test_the_batch_size_does_not_matter(case):
    built = case.build()
    posterior = built.posterior(mode="eager")
    z = points(posterior)
    value, terms = posterior.log_likelihood(z), posterior.pointwise(z)
    other = built.posterior(batch_size=3, mode="eager")
    np.testing.assert_allclose(other.log_likelihood(z), value, rtol=1e-12)
    np.testing.assert_allclose(other.pointwise(z), terms, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [3, 1000])
def test_chains_that_exceed_the_cache_are_evaluated_in_parts(batch_size, monkeypatch):
    built = MLP.build()
    z = 0.3 * np.random.default_rng(0).standard_normal((70, built.posterior().rank))
    expected = built.posterior(mode="eager").value_and_grad(z)
    monkeypatch.setattr("subbayes.networks.tracing.memory.REUSED_BYTES", 1)
    posterior = built.posterior(batch_size=batch_size, mode="eager")
    for found, plain in zip(posterior.value_and_grad(z), expected, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-10, atol=1e-12)
    assert posterior._chains_at_once(len(z)) == 14  # five parts of at most 16


class CountsWeights(nn.Module):
    """A product whose factor is the number of positive weights, which `make_fx` does not see."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -0.5, 0.2]]))

    def forward(self, x):
        return x @ self.weight.T * len(torch.nonzero(self.weight > 0))


def test_one_chain_of_a_module_that_depends_on_its_weights_is_not_traced():
    """`vmap` fails for it, which keeps it from being traced; a single chain is no exception."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    network = Network(CountsWeights())
    space = FullSubspace(network.weights)
    found, expected = (
        Posterior(network, Gaussian(0.5), (x, x[:, 0]), space, mode=mode)
        for mode in ("trace", "eager")
    )
    for z in np.random.default_rng(1).normal(size=(5, 1, 3)):
        np.testing.assert_allclose(found.value(z), expected.value(z), rtol=1e-6)


@pytest.mark.parametrize("name", ["gru", "in-place", "branching"])
def test_the_value_of_one_chain_does_not_depend_on_earlier_calls(name):
    built = cases.Case(name, "gaussian").build()
    first, second = built.posterior(), built.posterior()
    z = points(first)
    alone = first.value(z[:1])
    together = second.value(z)
    np.testing.assert_array_equal(second.value(z[:1]), alone)
    np.testing.assert_array_equal(first.value(z), together)


def test_the_default_memory_limit_is_that_of_the_device_and_a_given_one_stays(monkeypatch):
    memory = SimpleNamespace(total_memory=80 * 2**30 - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    limits = ActivationLimits()
    assert (limits.of(cpu), limits.of(cuda), limits.block) == (2**30, 2**34, 2**30)
    assert ActivationLimits(least=2**35).of(cuda) == 2**35
    assert ActivationLimits(12345).of(cuda) == ActivationLimits(12345).block == 12345
    with pytest.raises(InputError, match="memory_limit: expected at least 1 MiB for one row"):
        ActivationLimits(12345).check(2**20, cpu)
    memory.total_memory = 2**31  # a small device
    assert limits.of(cuda) == 2**30
    posterior = MLP.build().posterior(memory_limit=12345)
    assert posterior.to("cpu").memory_limit == posterior.memory_limit == 12345


def test_streamed_rows_are_read_once_for_all_chains(monkeypatch):
    monkeypatch.setattr("subbayes.networks.tracing.memory.REUSED_BYTES", 1)
    built = MLP.build()
    memory = built.posterior(mode="eager")
    z = 0.3 * np.random.default_rng(0).standard_normal((70, memory.rank))
    passes = []

    class Loader(DataLoader):
        def __iter__(self):
            passes.append(len(self))
            return super().__iter__()

    rows = Data.of(Loader(cases.Rows(built.inputs, built.y), batch_size=3), memory_limit=0)
    space = memory.subspace
    posterior = Posterior(built.network, built.likelihood, rows, space, mode="eager", batch_size=3)
    passes.clear()
    np.testing.assert_allclose(posterior.value(z), memory.value(z), rtol=1e-10)
    assert len(passes) == 1


@given(st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=12)
def test_any_number_of_rows_in_batches_of_any_size(n, size):
    built = MLP.build(n)
    z = points(built.posterior())
    found = built.posterior(mode="eager", batch_size=size).log_likelihood(z)
    np.testing.assert_allclose(found, naive_terms(built, built.posterior(), z).sum(1), rtol=1e-12)


@pytest.mark.parametrize("name", ["gaussian", "per-observation"])
def test_a_loader_equals_memory(name):
    built = cases.Case("mlp", name).build()
    memory = built.posterior()
    z = points(memory)
    for size, shuffle in ((2, False), (3, True), (50, False)):
        rows = cases.streamed(cases.Rows(built.inputs, built.y), batch_size=size, shuffle=shuffle)
        streamed = Posterior(built.network, built.likelihood, rows, memory.subspace, mode="eager")
        np.testing.assert_allclose(streamed.value(z), memory.value(z), rtol=1e-12)
        for a, b in zip(streamed.value_and_grad(z), memory.value_and_grad(z), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)


def test_chains_are_independent():
    _, posterior = traced(cases.Case("transformer", "categorical"))
    z = points(posterior)
    alone = np.concatenate([posterior.value(row[None]) for row in z])
    np.testing.assert_allclose(posterior.value(z), alone, rtol=1e-12)
    assert np.array_equal(posterior.value(z[::-1]), posterior.value(z)[::-1])


def test_more_draws_than_one_chunk():
    posterior = MLP.build().posterior()
    z = points(posterior, 130)
    np.testing.assert_allclose(
        posterior.pointwise(z).sum(1), posterior.log_likelihood(z), rtol=1e-12
    )
    outputs = posterior.predict(z, MLP.build().inputs).outputs
    assert outputs.shape == (130, cases.N, 1)
    torch.testing.assert_close(
        outputs[100:101], posterior.predict(z[100:101], MLP.build().inputs).outputs
    )


def test_sums_in_float64_keep_what_float32_loses():
    x = torch.ones(200_000, 1)
    network = Network(nn.Linear(1, 1, bias=False))
    posterior = Posterior(
        network, Gaussian(noise=1.0), (x, torch.zeros(len(x))), FullSubspace(torch.zeros(1))
    )
    value = posterior.log_likelihood(np.array([[1.0]]))[0]
    term = float(Gaussian(noise=1.0).log_prob(torch.ones(1, 1), torch.zeros(1)).double())
    assert abs(value - 200_000 * term) < 1e-6
    assert abs(value - 200_000 * stats.norm.logpdf(1)) < 1e-6 * 200_000


@cases.parametrize(MLP, cases.Case("mlp", "categorical"))
@pytest.mark.parametrize(
    "make",
    [
        lambda w: FullSubspace(w),
        lambda w: CoordinateSubspace(w, torch.tensor([5, 0, 7])),
        lambda w: DenseSubspace(w, torch.eye(len(w), dtype=w.dtype)[:4] * 2),
        lambda w: RandomSubspace(w, 3, seed=1),
    ],
    ids=["full", "coordinate", "dense", "random"],
)
def test_every_subspace(case, make):
    built = case.build()
    posterior = Posterior(
        built.network, built.likelihood, built.data, make(built.network.weights), mode="eager"
    )
    z = points(posterior)
    np.testing.assert_allclose(
        posterior.log_likelihood(z), naive_terms(built, posterior, z).sum(1), rtol=1e-11
    )
    value, grad = posterior.value_and_grad(z)
    np.testing.assert_allclose(grad, finite_differences(posterior, z), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_directions_too_many_to_keep(monkeypatch, mode):
    built = MLP.build()
    kept = built.posterior(mode=mode)
    monkeypatch.setattr(subspace, "_CACHE_BYTES", 0)
    posterior = built.posterior(mode=mode)
    assert posterior.subspace._cached is None
    z = points(kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(posterior.value(z), kept.value(z), rtol=1e-12)
        np.testing.assert_allclose(
            posterior.value_and_grad(z)[1], kept.value_and_grad(z)[1], rtol=1e-9
        )
        np.testing.assert_allclose(
            posterior.log_prob(torch.from_numpy(z)), kept.value(z), rtol=1e-12
        )
    assert posterior.fingerprint() == kept.fingerprint()


# --- gradients -----------------------------------------------------------------------------------


def finite_differences(posterior: Posterior, z: np.ndarray, h: float = 1e-5) -> np.ndarray:
    steps = h * np.eye(posterior.rank)
    return np.stack([(posterior.value(z + e) - posterior.value(z - e)) / (2 * h) for e in steps], 1)


@cases.parametrize(*EACH, *(cases.Case("mlp", name) for name in OTHERS))
def test_gradients_equal_finite_differences(case):
    built, posterior = traced(case)
    z = points(posterior)
    value, grad = posterior.value_and_grad(z)
    eager = built.posterior(mode="eager", **OPTIONS)
    np.testing.assert_allclose(value, eager.value(z), rtol=1e-12)
    np.testing.assert_allclose(grad, finite_differences(eager, z), rtol=2e-6, atol=2e-6)


@cases.parametrize(*EACH, cases.Case("transformer", "categorical", dtype=torch.float32))
def test_tensors_in_tensors_out_and_differentiable(case):
    _, posterior = traced(case)
    z = points(posterior)
    tensor = torch.from_numpy(z).requires_grad_()
    value = posterior.log_prob(tensor)
    assert value.dtype == torch.float64
    (grad,) = torch.autograd.grad(value.sum(), tensor)
    expected = posterior.value_and_grad(z)
    allclose(value.detach(), expected[0], case, 10)
    allclose(grad, expected[1], case, 100)


def test_log_prob_keeps_leading_dimensions():
    posterior = MLP.build().posterior()
    z = torch.from_numpy(points(posterior, 6))
    expected = posterior.log_prob(z)
    torch.testing.assert_close(posterior.log_prob(z.reshape(2, 3, -1)), expected.reshape(2, 3))
    assert posterior.log_prob(z[0]).shape == ()


def test_gradients_within_no_grad():
    posterior = MLP.build().posterior()
    z = points(posterior)
    expected = posterior.value_and_grad(z)
    with torch.no_grad():
        fresh = MLP.build().posterior()
        for p in (posterior, fresh):
            for a, b in zip(p.value_and_grad(z), expected, strict=True):
                np.testing.assert_array_equal(a, b)


# --- temperature, prior --------------------------------------------------------------------------


@given(st.floats(1e-2, 1e3))
@settings(max_examples=10)
def test_temperature_divides_the_likelihood_alone(temperature):
    _, posterior = traced(MLP)
    z = points(posterior)
    tempered = posterior.with_temperature(temperature)
    likelihood, prior = posterior.log_likelihood(z), stats.norm(0.1, 0.8).logpdf(z).sum(1)
    np.testing.assert_allclose(tempered.value(z), likelihood / temperature + prior, rtol=1e-12)
    np.testing.assert_allclose(tempered.log_likelihood(z), likelihood, rtol=0)
    np.testing.assert_allclose(
        tempered.log_prob(torch.from_numpy(z)), tempered.value(z), rtol=1e-12
    )


def test_all_subsets_of_rows_together_are_the_data():
    """The mean over every subset of a size is exactly the density of all rows."""
    posterior = MLP.build(6).posterior(mode="eager").with_temperature(3.0)
    z = points(posterior)
    full = posterior.value_and_grad(z)
    parts = [posterior.value_and_grad(z, np.array(rows)) for rows in combinations(range(6), 2)]
    for k, whole in enumerate(full):
        np.testing.assert_allclose(np.mean([part[k] for part in parts], 0), whole, rtol=1e-10)
    everything = posterior.value_and_grad(z, np.array([5, 3, 1, 0, 2, 4]))
    for a, b in zip(everything, full, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
def test_read_only_coordinates():
    posterior = MLP.build(6).posterior(mode="eager")
    z = points(posterior)
    expected = posterior.value(z)
    z.flags.writeable = False
    np.testing.assert_array_equal(posterior.value(z), expected)


def test_invalid_rows_raise():
    posterior = MLP.build(6).posterior(mode="eager")
    z = points(posterior)
    for rows, got in ((np.array([0, 6]), r"0\.\.6"), (np.zeros(0, dtype=int), "none")):
        with pytest.raises(InputError, match=rf"rows: expected positions in 0\.\.5, got {got}"):
            posterior.value_and_grad(z, rows)
    mask = np.array([True, False, True, False, False, False])
    with pytest.raises(InputError, match=r"rows: expected positions in 0\.\.5, got False\.\.True"):
        posterior.value_and_grad(z, mask)
    streamed = cases.Case("mlp", "gaussian", "loader").build().posterior(mode="eager")
    with pytest.raises(InputError, match="data: expected tensors in memory, got a loader"):
        streamed.value_and_grad(z, np.array([0]))


def test_any_gaussian_prior():
    sigma = np.array([[2.0, 0.3], [0.3, 0.5]])
    built = MLP.build()
    posterior = Posterior(
        built.network,
        built.likelihood,
        built.data,
        RandomSubspace(built.network.weights, 2),
        Normal(covariance=sigma, mean=[1.0, -1.0]),
    )
    z = points(posterior)
    expected = stats.multivariate_normal([1, -1], sigma).logpdf(z)
    np.testing.assert_allclose(
        posterior.value(z) - posterior.log_likelihood(z), expected, rtol=1e-9
    )


# --- values that are not numbers -----------------------------------------------------------------


class Root(nn.Module):
    """Not a number for negative weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.sqrt()


def test_nan_density_becomes_minus_infinity():
    network = Network(Root())
    x = torch.ones(4, 1, dtype=torch.float64)
    posterior = Posterior(network, Gaussian(noise=1.0), (x, x[:, 0]), FullSubspace(torch.ones(1)))
    z = np.array([[0.5], [-3.0]])
    for value in (posterior.value(z), posterior.log_likelihood(z), posterior.value_and_grad(z)[0]):
        assert np.isfinite(value[0])
        assert value[1] == -np.inf
    assert posterior.value(np.array([[np.nan]])) == -np.inf
    assert posterior.value(np.array([[np.inf]])) == -np.inf


# --- memory --------------------------------------------------------------------------------------


class Largest(nn.Module):
    """Records the most rows it was called with."""

    rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 50)
        self.head = nn.Linear(50, 1)

    def forward(self, x: Tensor) -> Tensor:
        Largest.rows = max(Largest.rows, len(x))
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("streamed", [False, True])
def test_memory_is_bounded_in_memory_and_streamed(streamed):
    x, y = torch.ones(64, 3, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    data = cases.streamed(TensorDataset(x, y), batch_size=64) if streamed else (x, y)
    network = Network(Largest().double())
    make = lambda **options: Posterior(  # noqa: E731
        network,
        Gaussian(noise=1.0),
        data,
        RandomSubspace(network.weights, 2),
        mode="eager",
        **options,
    )
    z = np.zeros((4, 2))
    expected = make().value(z)
    row = 8 * (50 + 50 + 1)  # bytes of activations, at least
    posterior = make(memory_limit=row * 4 * 10)
    Largest.rows = 0
    np.testing.assert_allclose(posterior.value(z), expected, rtol=1e-12)
    posterior.value_and_grad(z)
    posterior.log_prob(torch.from_numpy(z))
    assert 1 <= Largest.rows <= 10
    Largest.rows = 0
    posterior.predict(z, x)  # one draw after the other
    assert 1 <= Largest.rows <= 4 * 10


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 3])
def test_chains_take_turns_where_one_row_of_all_does_not_fit(rows):
    whole = MLP.build().posterior()
    row = whole._row_bytes
    parts = MLP.build().posterior(memory_limit=3 * row * rows)  # one chain for a gradient
    z = points(parts, 5)
    np.testing.assert_allclose(parts.value(z), whole.value(z))
    for found, wanted in zip(parts.value_and_grad(z), whole.value_and_grad(z), strict=True):
        np.testing.assert_allclose(found, wanted)
    np.testing.assert_allclose(parts.pointwise(z), whole.pointwise(z))
    tensors = torch.from_numpy(z)
    torch.testing.assert_close(parts.log_prob(tensors), whole.log_prob(tensors))


def test_too_little_memory_raises():
    posterior = MLP.build().posterior(memory_limit=10)
    with pytest.raises(
        InputError,
        match=r"memory_limit: expected at least \d\.\d*e-05 MiB for one row "
        r"of one chain, got 9\.54e-06 MiB\. Raise the limit",
    ):
        posterior.value(np.zeros((32, posterior.rank)))


# --- fallbacks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, a in cases.NETWORKS.items() if not a.vmaps])
def test_unvectorisable_modules_use_a_loop_with_one_warning(name):
    case = cases.Case(name, "gaussian")
    built = case.build()
    posterior = built.posterior()
    z = points(posterior)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (3, 2):
            posterior.value(z[:size])
    assert len(caught) == 1
    assert "vectorising over weights failed" in str(caught[0].message)
    allclose(posterior.log_likelihood(z), naive_terms(built, posterior, z).sum(1), case, 10)
    predictive = posterior.predict(z, built.inputs)
    assert predictive.outputs.shape == (3, cases.N, 1)


class Untraceable(nn.Module):
    """Depends on a value that a graph cannot hold: the sign of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if x.sum() > 0 else -x)


def test_untraceable_modules_are_evaluated_eagerly_with_one_warning():
    network = Network(Untraceable().double())
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) - 4
    posterior = Posterior(
        network, Gaussian(noise=1.0), (x, x[:, 0]), FullSubspace(network.weights), batch_size=1
    )
    z = points(posterior)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = posterior.value(z)
        assert np.array_equal(posterior.value(z), value)
    assert [str(w.message).partition(" (")[0] for w in caught] == ["tracing the log density failed"]
    built = cases.Built(network.module_with(), network, x, x[:, 0], posterior.likelihood, None)
    np.testing.assert_allclose(
        posterior.log_likelihood(z), naive_terms(built, posterior, z).sum(1), rtol=1e-12
    )


def test_errors_of_the_module_raise_without_a_warning():
    x = torch.ones(4, 3)
    network = Network(cases.mlp(1))
    posterior = Posterior(
        network, Gaussian(noise=1.0), (x, x[:, 0]), RandomSubspace(network.weights, 2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="inputs: expected what the module takes"):
            posterior.predict(np.zeros((2, 2)), torch.ones(4, 5))


# --- global state --------------------------------------------------------------------------------


def switches() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "sdp": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        "anomaly": torch.is_anomaly_enabled(),
        "device": torch.get_default_device(),
        "validation": torch.distributions.Distribution._validate_args,
    }


@pytest.mark.few(15)
@cases.parametrize(*EACH)
def test_no_global_state_changes(case):
    built = case.build()
    before = switches()
    posterior = built.posterior(mode="trace" if case.network in ("cnn", "tuple") else "eager")
    z = points(posterior, 2)
    posterior.value(z)
    posterior.value_and_grad(z)
    posterior.pointwise(z)
    posterior.log_prob(torch.from_numpy(z))
    posterior.predict(z, built.inputs)
    posterior.fingerprint()
    with pytest.raises(InputError):
        posterior.predict(z, torch.zeros(2, 99))
    assert switches() == before


def test_module_and_data_are_unchanged():
    built = cases.Case("cnn", "categorical").build()
    module = copy.deepcopy(built.module)
    inputs, y = built.inputs.clone(), built.y.clone()
    posterior = built.posterior()
    z = points(posterior, 2)
    first = posterior.value(z)
    posterior.value_and_grad(z)
    posterior.predict(z, built.inputs, refresh_batchnorm=True)
    assert torch.equal(built.inputs, inputs)
    assert torch.equal(built.y, y)
    for (name, a), b in zip(
        built.module.state_dict().items(), module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert np.array_equal(posterior.value(z), first)
    with torch.no_grad():
        built.module.head.weight.zero_()
    assert np.array_equal(posterior.value(z), first)


@pytest.mark.parametrize("mode", ["eager", "trace"])
def test_threads_at_once(mode):
    case = cases.Case("attention", "bernoulli")
    posterior = case.build().posterior(mode="eager")
    z = points(posterior, 40)
    expected = np.concatenate([posterior.value(row[None]) for row in z])
    found = np.zeros(40)
    posterior = case.build().posterior(mode=mode)

    def work(part: range) -> None:
        for i in part:
            found[i] = posterior.value(z[i : i + 1])[0]

    threads = [threading.Thread(target=work, args=(range(i, 40, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_models_are_copied_and_described_while_other_threads_predict(tmp_path):
    net = subbayes.MLP(2, (4,), 1, "tanh", seed=0)
    x = torch.linspace(-1, 1, 80).reshape(40, 2)
    sampling = subbayes.Sampling(draws=10, chains=2, warmup=5, progress=False)
    model = subbayes.fit(
        net, (x, x[:, 0]), subspace="random", inference="elliptical-slice", sampling=sampling,
        training=subbayes.Training(epochs=0, swa_epochs=0),
    )  # fmt: skip
    expected, done = model.predict(x).mean, threading.Event()

    def serve() -> None:
        while not done.is_set():
            model.predict(x)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for i in range(30):
            model.save(tmp_path / "model", overwrite=i > 0)
            model.describe()
            other = copy.deepcopy(model)
    finally:
        done.set()
        thread.join()
    np.testing.assert_array_equal(other.predict(x).mean, expected)
    np.testing.assert_array_equal(subbayes.load(tmp_path / "model").predict(x).mean, expected)


# --- prediction ----------------------------------------------------------------------------------


@cases.parametrize(*EACH)
def test_outputs_of_predictions_equal_the_modules(case):
    built, posterior = traced(case)
    z = points(posterior, 2)
    predictive = posterior.predict(z, built.inputs)
    for row, outputs in zip(z, predictive.outputs, strict=True):
        weights = posterior.subspace.weights(torch.from_numpy(row))
        expected = built.call(built.network.module_with(weights))
        torch.testing.assert_close(outputs, expected.double(), rtol=1e-9, atol=1e-9)


def test_predictions_from_draws_or_from_evenly_spaced_ones():
    posterior = MLP.build().posterior()
    inputs = MLP.build().inputs
    z = points(posterior, 12)
    draws = Draws(z.reshape(3, 4, -1))
    assert torch.equal(
        posterior.predict(draws, inputs).outputs, posterior.predict(z, inputs).outputs
    )
    some = z[[2, 6, 10]]  # the middle of four each
    for given_draws in (draws, z):
        torch.testing.assert_close(
            posterior.predict(given_draws, inputs, n_draws=3).outputs,
            posterior.predict(some, inputs).outputs,
        )


@pytest.mark.parametrize("shuffle", [False, True])
def test_predictions_of_a_loader_come_in_the_order_of_its_dataset(shuffle):
    built = MLP.build()
    posterior = built.posterior()
    z, x = points(posterior), built.inputs
    expected = posterior.predict(z, x).outputs
    for data in (TensorDataset(x), TensorDataset(x, built.y), list(x)):
        loader = DataLoader(data, batch_size=2, shuffle=shuffle, drop_last=True)
        torch.testing.assert_close(posterior.predict(z, loader).outputs, expected)


def test_predictions_of_dicts_and_tuples_from_a_loader():
    for name in ("dict", "tuple"):
        built = cases.Case(name, "bernoulli").build()
        posterior = built.posterior()
        z = points(posterior)
        loader = DataLoader(cases.Rows(built.inputs, built.y), 3)
        torch.testing.assert_close(
            posterior.predict(z, loader).outputs, posterior.predict(z, built.inputs).outputs
        )


def test_known_noise_of_new_rows():
    built = cases.Case("mlp", "per-observation").build()
    posterior = built.posterior()
    z, scale = points(posterior), np.linspace(0.5, 2, cases.N)
    predictive = posterior.predict(z, built.inputs, noise=scale)
    np.testing.assert_allclose(predictive.aleatoric, scale**2)
    f = predictive.outputs[..., 0].numpy()
    y = built.y[0].numpy()
    np.testing.assert_allclose(
        predictive.log_prob(y), np.log(stats.norm(f, scale).pdf(y).mean(0)), rtol=1e-9
    )
    np.testing.assert_allclose(posterior.predict(z, built.inputs, noise=2.0).aleatoric, 4.0)
    np.testing.assert_allclose(
        posterior.predict(z, built.inputs).log_prob((y, scale)), predictive.log_prob(y), rtol=1e-9
    )
    with pytest.raises(InputError, match=r"noise scale.*posterior.predict\(..., noise=...\)"):
        posterior.predict(z, built.inputs).variance
    for bad, what in (
        (scale[:3], "noise: expected one scale for each of 7 inputs, got 3"),
        (-scale, "noise: expected numbers above 0, got -2"),
        (np.full(7, np.nan), "noise: expected numbers above 0, got nan"),
    ):
        with pytest.raises(InputError, match=what):
            posterior.predict(z, built.inputs, noise=bad)


def test_known_noise_for_another_likelihood_raises():
    built = MLP.build()
    posterior = built.posterior()
    for likelihood in (
        Gaussian(0.3),
        HeteroscedasticGaussian(0.1),
        Poisson(),
        Standardized(HeteroscedasticGaussian(0.1), (0.0,), (1.0,)),
        Standardized(Gaussian(0.3), (0.0,), (1.0,)),
    ):
        posterior.likelihood = likelihood
        with pytest.raises(
            InputError,
            match="noise: expected nothing, since the likelihood has no noise per observation",
        ):
            posterior.predict(points(posterior), built.inputs, noise=np.ones(cases.N))


def test_refreshed_batchnorm_in_predictions():
    built = cases.Case("cnn", "gaussian").build()
    posterior = built.posterior()
    z = points(posterior, 2)
    outputs = posterior.predict(z, built.inputs, refresh_batchnorm=True).outputs
    for row, found in zip(z, outputs, strict=True):
        weights = posterior.subspace.weights(torch.from_numpy(row))
        network = built.network.refresh_batchnorm(weights, iter([(built.inputs, built.y)]))
        torch.testing.assert_close(found, network(weights, built.inputs), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(outputs, posterior.predict(z, built.inputs).outputs)
    plain = MLP.build()
    z = points(plain.posterior(), 2)
    torch.testing.assert_close(
        plain.posterior().predict(z, plain.inputs, refresh_batchnorm=True).outputs,
        plain.posterior().predict(z, plain.inputs).outputs,
    )


def test_a_progress_bar_only_on_request(capsys):
    posterior = MLP.build().posterior()
    posterior.predict(points(posterior), MLP.build().inputs)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (torch.zeros(0, 3, dtype=torch.float64), "inputs: expected at least one row, got an empty"),
        (torch.full((2, 3), float("nan"), dtype=torch.float64), "inputs: expected finite numbers"),
        (torch.zeros(2, 3, dtype=torch.int64), "inputs: expected what the module takes"),
        (torch.zeros(2, 4, dtype=torch.float64), "inputs: expected what the module takes"),
        (torch.tensor(1.0), "inputs: expected tensors with one row per observation, got a scalar"),
        (np.array([["a", "b", "c"]]), "inputs: expected numbers"),
        (
            (torch.zeros(2, 3), torch.zeros(3, 3)),
            r"inputs\[0\] and inputs\[1\]: expected the same number of rows",
        ),
        ({}, "inputs: expected at least one tensor"),
    ],
)
def test_invalid_inputs_raise(inputs, what):
    posterior = MLP.build().posterior()
    with pytest.raises(InputError, match=what) as e:
        posterior.predict(points(posterior), inputs)
    assert "\n" not in str(e.value)
    with pytest.raises(InputTypeError, match="inputs: expected a tensor or an array, got object"):
        posterior.predict(points(posterior), object())


# --- identity ------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_what_defines_the_density():
    base = MLP.build().posterior()
    same = {
        "built again": MLP.build().posterior(),
        "batch_size": MLP.build().posterior(batch_size=2),
        "mode": MLP.build().posterior(mode="eager"),
        "memory_limit": MLP.build().posterior(memory_limit=2**20),
        "loader": cases.Case("mlp", "gaussian", "loader").build().posterior(),
        "shuffled": cases.Case("mlp", "gaussian", "shuffled").build().posterior(),
        "temperature and back": base.with_temperature(2.0).with_temperature(1.0),
        "other centre of the network": Posterior(
            base.network.with_weights(base.network.weights + 1),
            base.likelihood,
            base.data,
            base.subspace,
        ),
    }
    after_use = MLP.build().posterior()
    after_use.value_and_grad(points(after_use))
    same["used"] = after_use
    for name, posterior in same.items():
        assert posterior.fingerprint() == base.fingerprint(), name


def test_the_fingerprint_tells_densities_apart():
    built = MLP.build()
    w = built.network.weights
    x, y = built.data

    def make(
        network: Any = built.network,
        likelihood: Any = built.likelihood,
        data: Any = (x, y),
        space: Any = None,
        **options: Any,
    ) -> str:
        space = RandomSubspace(w, 4) if space is None else space
        return Posterior(network, likelihood, data, space, **options).fingerprint()

    changed_x, changed_y = x.clone(), y.clone()
    changed_x[3, 1] += 1e-9
    changed_y[2] += 1e-9
    mask = {"0.weight": torch.arange(12).reshape(4, 3) < 4}
    other_mask = {"0.weight": torch.arange(12).reshape(4, 3) >= 8}
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    cnn = cases.Case("cnn", "gaussian").build()
    refreshed = cnn.network.with_buffers({"norm.running_mean": torch.ones(2).double()})
    cnn_space = RandomSubspace(cnn.network.weights, 4)
    prints = {
        "base": make(),
        "input": make(data=(changed_x, y)),
        "target": make(data=(x, changed_y)),
        "order": make(data=(x.flip(0), y.flip(0))),
        "fewer rows": make(data=(x[:6], y[:6])),
        "shift": make(space=RandomSubspace(w + 1e-9, 4)),
        "seed": make(space=RandomSubspace(w, 4, seed=1)),
        "rank": make(space=RandomSubspace(w, 5)),
        "coordinates": make(space=CoordinateSubspace(w, torch.arange(4))),
        "other coordinates": make(space=CoordinateSubspace(w, torch.arange(1, 5))),
        "noise": make(likelihood=Gaussian(0.71)),
        "kind of noise": make(likelihood=Standardized(Gaussian(0.7), (0.0,), (1.0,))),
        "prior": make(prior=Normal(1.1)),
        "prior mean": make(prior=Normal(mean=0.1)),
        "prior covariance": make(prior=Normal(covariance=np.eye(4))),
        "temperature": make(temperature=1.5),
        "activation": make(network=Network(relu)),
        "mask": make(network=Network(built.module, mask), space=FullSubspace(w[:4])),
        "other mask": make(network=Network(built.module, other_mask), space=FullSubspace(w[:4])),
        "network": make(cnn.network, data=cnn.data, space=cnn_space),
        "buffers": make(refreshed, data=cnn.data, space=cnn_space),
    }
    assert len(set(prints.values())) == len(prints)


def test_the_fingerprint_survives_saving_the_prior():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 4))
    prior = Normal(covariance=a @ a.T + np.eye(4), mean=rng.normal(size=4))
    posterior = MLP.build().posterior(prior=prior)
    again = MLP.build().posterior(prior=Normal.from_config(prior.to_config()))
    assert again.fingerprint() == posterior.fingerprint()


def test_repr():
    text = repr(MLP.build().posterior(temperature=2.0))
    assert text == (
        "Posterior(n=7, RandomSubspace(rank=4, size=21), Normal(scale=1.0), temperature=2)"
    )


# --- bad input -----------------------------------------------------------------------------------


def build(**changes: Any) -> Posterior:
    built = MLP.build()
    parts = {
        "network": built.network,
        "likelihood": built.likelihood,
        "data": built.data,
        "subspace": RandomSubspace(built.network.weights, 2),
    } | changes
    return Posterior(
        parts.pop("network"),
        parts.pop("likelihood"),
        parts.pop("data"),
        parts.pop("subspace"),
        **parts,
    )


X, Y = MLP.build().data


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"subspace": FullSubspace(torch.zeros(5))},
            "subspace: expected 21 weights, as the network has, got 5",
        ),
        ({"prior": Normal(np.ones(3))}, "prior scale: expected 1 or 2 numbers.*got 3"),
        ({"prior": Normal(mean=np.ones(3))}, "prior mean: expected 1 or 2 numbers.*got 3"),
        (
            {"prior": Normal(covariance=np.eye(3))},
            r"prior covariance: expected .*rank 2, got \(3, 3\)",
        ),
        ({"likelihood": Gaussian()}, "likelihood: expected all parameters learned or given"),
        (
            {"likelihood": HeteroscedasticGaussian(0.1)},
            "module: expected 2 outputs for Hetero.*got 1",
        ),
        (
            {"likelihood": Categorical(), "data": (X, torch.zeros(7).long())},
            "module: expected at least 2 outputs for categorical.*, got 1. .* use Bernoulli",
        ),
        ({"data": (X, torch.zeros(7, 2))}, "module: expected 2 outputs for Gaussian.*got 1"),
        ({"likelihood": Gaussian(noise=(0.1, 0.2))}, "noise: expected 1 .*got 2"),
        (
            {"likelihood": Gaussian(noise="per-observation")},
            r"y: expected a pair \(y, noise scale\)",
        ),
        ({"likelihood": Bernoulli(), "data": (X, Y)}, "y: expected 0 and 1 for"),
        ({"likelihood": Poisson(), "data": (X, Y)}, "y: expected counts"),
        ({"data": (X, Y[:3])}, "data inputs and data targets: expected the same number of rows"),
        (
            {"data": (X.float(), Y)},
            r"inputs: expected what the module takes.*\.to\(torch.float64\)",
        ),
        ({"data": (X[:, :2], Y)}, "inputs: expected what the module takes"),
        ({"temperature": 0.0}, "temperature: expected a finite number above 0, got 0.0"),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
    ],
)
def test_incompatible_parts_raise(changes, what):
    with pytest.raises(InputError, match=what) as e:
        build(**changes)
    assert "\n" not in str(e.value)


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise():
    with pytest.raises(InputError, match="mode: expected one of 'trace', 'compile', 'eager', got"):
        build(mode="fast")
    posterior = build()
    for z in (np.zeros(2), np.zeros((3, 1)), np.zeros((1, 2, 2)), np.zeros((0, 2))):
        for call in (
            posterior.value,
            posterior.value_and_grad,
            posterior.log_likelihood,
            posterior.pointwise,
            lambda z: posterior.predict(z, X),
        ):
            with pytest.raises(InputError, match=r"z: expected shape \(chains, 2\), got \("):
                call(z)
    with pytest.raises(InputError, match=r"z: expected shape \(..., 2\), got \(3, 4\)"):
        posterior.log_prob(torch.zeros(3, 4))


@pytest.mark.usefixtures("unchecked")
def test_lists_whole_numbers_and_float32_are_coordinates_too():
    posterior = build()
    expected = posterior.value(np.array([[1.0, 2.0]]))
    for z in ([[1, 2]], np.array([[1, 2]]), np.array([[1, 2]], dtype=np.float32)):
        np.testing.assert_array_equal(posterior.value(z), expected)
        np.testing.assert_array_equal(posterior.value_and_grad(z)[0], expected)


def test_data_in_place_are_not_copied():
    data = Data.of((X, Y))
    assert build(data=data).data.inputs.data_ptr() == data.inputs.data_ptr() == X.data_ptr()


@pytest.mark.skipif(TORCH < (2, 13), reason="Tensor.tolist fails under older torch.func transforms")
@pytest.mark.usefixtures("unchecked")
def test_module_that_reads_rows_through_python_is_evaluated_eagerly():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def forward(self, x):
            return self.net(x) * torch.tensor([[1.0 + (v > 0)] for v in x[:, 0].tolist()])

    x = torch.randn(90, 2, generator=torch.Generator().manual_seed(1))
    net = Network(Peeking())
    space = DenseSubspace(net.weights, torch.eye(net.size)[:2])
    z = np.random.default_rng(0).normal(size=(3, 2))
    found = {}
    for mode in ("eager", "trace"):
        p = Posterior(
            net, Gaussian(noise=0.5), (x, x[:, 0]), space, Normal(1.0), mode=mode, batch_size=30
        )
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found[mode] = p.value(z), p.value_and_grad(z)[1], p.value(z + 1)
        assert any("its result differs on other data" in str(w.message) for w in heard) == (
            mode == "trace"
        )
    for eager, traced in zip(*found.values(), strict=True):
        np.testing.assert_allclose(traced, eager, rtol=1e-5)


def test_names_and_numbers_in_place_of_subspaces_and_priors():
    x, y = torch.randn(20, 2), torch.randn(20)
    network = Network(torch.nn.Linear(2, 1))
    space = FullSubspace(network.weights)
    z = np.linspace(-1, 1, 6).reshape(2, 3)
    arguments = network, Gaussian(0.3), (x, y)
    np.testing.assert_array_equal(
        Posterior(*arguments, space, 1.5).value(z),
        Posterior(*arguments, space, Normal(1.5)).value(z),
    )
    with pytest.raises(InputError, match="^prior: expected a finite number above 0, got 0"):
        Posterior(*arguments, space, 0)
    with pytest.raises(InputTypeError, match="^subspace: expected a Subspace, .* got str"):
        subspace.check_subspace("random")
    for wrong in ("evidence", True, [1.0]):
        with pytest.raises(InputTypeError, match="^prior: expected a Normal, or a number above 0"):
            normal_prior(wrong)

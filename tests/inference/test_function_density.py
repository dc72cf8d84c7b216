"""Densities from a function: closed forms by every engine, both libraries alike, and refusals."""

from __future__ import annotations

import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from densities import Toy
from oracles import check_moments

from subbayes.inference import (
    HMC,
    MAMS,
    MCLMC,
    NUTS,
    SMC,
    EllipticalSlice,
    Laplace,
    MeanFieldVI,
    ParallelTempering,
    SliceSampling,
    from_log_prob,
)
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs, and bad types

MEAN = np.array([0.5, -1.0, 2.0])
COVARIANCE = np.array([[1.0, 0.7, -0.2], [0.7, 0.8, 0.1], [-0.2, 0.1, 0.3]])
PRECISION = np.linalg.inv(COVARIANCE)
CONSTANT = 3.7
LOG_NORMALISER = CONSTANT + 0.5 * np.linalg.slogdet(2 * np.pi * COVARIANCE)[1]
BASE = Normal(scale=2.0, mean=[0.0, -1.0, 1.0])


def into_buffers(library):
    """Log density and gradient that write to arrays of their own, and return parts of these."""
    arrays = np.zeros(100), np.zeros((100, 3))
    value, gradient = map(torch.from_numpy, arrays) if library == "torch" else arrays

    def log_prob(z):
        d = np.asarray(z) - MEAN
        found = CONSTANT - 0.5 * np.einsum("...i,ij,...j->...", d, PRECISION, d)
        into = value[0:1].reshape(()) if z.ndim == 1 else value[: len(z)]
        into[...] = torch.as_tensor(found) if library == "torch" else found
        return into

    def grad(z):
        found = -(np.asarray(z) - MEAN) @ PRECISION
        into = gradient[0] if z.ndim == 1 else gradient[: len(z)]
        into[...] = torch.as_tensor(found) if library == "torch" else found
        return into

    return log_prob, grad


@pytest.mark.parametrize(
    ("library", "vectorized"), [("numpy", False), ("numpy", True), ("torch", True)]
)
def test_a_function_may_return_the_same_array_in_every_call(library, vectorized):
    """Results are copied: else all chains, or earlier values, were those of the last call."""
    z = np.random.default_rng(0).normal(size=(4, 3))
    log_prob, grad = into_buffers(library)
    options = {"grad": grad, "library": library, "vectorized": vectorized}
    density = from_log_prob(log_prob, 3, **options)
    values, gradients = density.value_and_grad(z)
    density.value_and_grad(z + 1)
    np.testing.assert_allclose(values, [with_numpy(point) for point in z], rtol=1e-12)
    np.testing.assert_allclose(gradients, [slope(point) for point in z], rtol=1e-12)


def with_torch(z):
    d = z - torch.from_numpy(MEAN)
    return CONSTANT - 0.5 * d @ torch.from_numpy(PRECISION) @ d


def with_numpy(z):
    return CONSTANT - 0.5 * (z - MEAN) @ PRECISION @ (z - MEAN)


def slope(z):
    return -PRECISION @ (z - MEAN)


def slope_with_torch(z):
    return -torch.from_numpy(PRECISION) @ (z - torch.from_numpy(MEAN))


def all_with_torch(z):
    d = z - torch.from_numpy(MEAN)
    return CONSTANT - 0.5 * torch.einsum("si,ij,sj->s", d, torch.from_numpy(PRECISION), d)


def all_with_numpy(z):
    return CONSTANT - 0.5 * np.einsum("si,ij,sj->s", z - MEAN, PRECISION, z - MEAN)


FORMS = {
    "torch": (with_torch, {}),
    "torch, gradient": (with_torch, {"grad": slope_with_torch}),
    "torch, vectorised": (all_with_torch, {"vectorized": True}),
    "numpy": (with_numpy, {"library": "numpy", "grad": slope}),
    "numpy, vectorised": (
        all_with_numpy,
        {"library": "numpy", "vectorized": True, "grad": lambda z: -(z - MEAN) @ PRECISION},
    ),
}


# --- closed forms -------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "engine",
    [
        EllipticalSlice(),
        NUTS(),
        HMC(),
        MCLMC(target=1e-5),
        MAMS(),
        SliceSampling(),
        ParallelTempering(),
        SMC(),
    ],
    ids=lambda engine: engine.name,
)
def test_engines_sample_a_correlated_gaussian(engine):
    if isinstance(engine, (NUTS, HMC, MCLMC, MAMS)):
        density = from_log_prob(with_torch, 3, base=BASE)
    else:  # many evaluations
        density = from_log_prob(all_with_numpy, 3, library="numpy", vectorized=True, base=BASE)
    draws = engine.sample(density, draws=400, chains=6, seed=1, progress=False)
    check_moments(draws, MEAN, COVARIANCE)
    if isinstance(engine, (SMC, ParallelTempering)):
        assert abs(draws.log_evidence - LOG_NORMALISER) < 4.5 * draws.log_evidence_error
        assert draws.log_evidence_error < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("engine", [NUTS(), SliceSampling()], ids=lambda engine: engine.name)
def test_a_flat_base_measure(engine):
    draws = engine.sample(
        from_log_prob(all_with_torch, 3, vectorized=True),
        draws=500,
        chains=4,
        seed=2,
        initial="shift",
        progress=False,
    )
    check_moments(draws, MEAN, COVARIANCE)
    z = draws.flat()
    np.testing.assert_allclose(draws.stats["log_likelihood"].reshape(-1), all_with_numpy(z))


def test_approximations_of_a_gaussian_are_exact():
    for base, starts in ((BASE, 4), (None, 1)):
        density = from_log_prob(with_torch, 3, base=base)
        found = Laplace(starts=starts).sample(density, draws=50, chains=2, progress=False)
        np.testing.assert_allclose(found.moments.mean, MEAN, atol=1e-5)
        np.testing.assert_allclose(found.moments.covariance, COVARIANCE, atol=1e-5)
        assert found.log_evidence == pytest.approx(LOG_NORMALISER, abs=1e-5)
    approximation = MeanFieldVI(steps=300).fit(density, progress=False)
    assert approximation.rank == 3


def test_the_reference_of_elliptical_slice_sampling_replaces_a_base():
    reference = Normal(mean=MEAN, covariance=2 * COVARIANCE)
    draws = EllipticalSlice(reference=reference).sample(
        from_log_prob(all_with_torch, 3, vectorized=True),
        draws=800,
        chains=4,
        seed=3,
        progress=False,
    )
    check_moments(draws, MEAN, COVARIANCE)


# --- the functions ------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "options"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("base", [None, BASE], ids=["flat", "base"])
def test_every_form_is_the_same_density(function, options, base):
    z = np.random.default_rng(0).normal(size=(5, 3))
    density = from_log_prob(function, 3, base=base, **options)
    exact = np.array([with_numpy(point) for point in z])
    value, gradient = density.value_and_grad(z)
    np.testing.assert_allclose(value, exact, rtol=1e-12)
    np.testing.assert_allclose(density.value(z), exact, rtol=1e-12)
    np.testing.assert_allclose(gradient, [slope(point) for point in z], rtol=1e-11)
    shift = 0 if base is None else base.log_prob(z)
    np.testing.assert_allclose(density.log_likelihood(z) + shift, exact, rtol=1e-12)
    again = pickle.loads(pickle.dumps(density)) if "vectorized" not in options else density
    assert (again.value(z) == density.value(z)).all()


def test_log_prob_of_tensors_is_differentiable():
    density = from_log_prob(with_torch, 3)
    z = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    value = density.log_prob(z.requires_grad_())
    assert value.shape == (2, 4)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    np.testing.assert_allclose(gradient[1, 2], slope(z[1, 2].detach().numpy()))
    assert density.log_prob(z[0, 0]).shape == ()


def test_functions_without_a_batching_rule_run_in_a_loop():
    def branching(z):
        return with_torch(z) if z[0].item() < 0 else 2 * with_torch(z)

    density = from_log_prob(branching, 3)
    z = np.array([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    with pytest.warns(UserWarning, match=r"vectorising log_prob over points failed \(.+\)"):
        value, gradient = density.value_and_grad(z)
    np.testing.assert_allclose(value, [with_numpy(z[0]), 2 * with_numpy(z[1])])
    np.testing.assert_allclose(gradient, [slope(z[0]), 2 * slope(z[1])])
    density.value(z)  # and does not warn again


def test_nan_is_zero_density_and_functions_may_write_to_points():
    density = from_log_prob(lambda z: torch.log(z[0]), 1)
    np.testing.assert_array_equal(density.value(np.array([[1.0], [-1.0]])), [0.0, -np.inf])

    def writes(z):
        z *= 2
        return -float((z**2).sum())

    z = np.ones((2, 3))
    density = from_log_prob(writes, 3, library="numpy", grad=lambda z: -8 * z)
    value, gradient = density.value_and_grad(z)
    assert (value == -12).all()
    assert (gradient == -8).all()
    assert (z == 1).all()


def test_single_precision_and_python_numbers():
    density = from_log_prob(lambda z: -z.float().square().sum(), 2)
    value, gradient = density.value_and_grad(np.ones((1, 2)))
    assert value.dtype == gradient.dtype == np.float64
    assert from_log_prob(lambda z: 1, 2, library="numpy").value(np.ones((3, 2))).tolist() == [1] * 3


# --- checkpoints --------------------------------------------------------------------------------


def test_checkpoints_belong_to_a_name(tmp_path):
    def sample(name, draws, folder="run"):
        density = from_log_prob(with_torch, 3, base=BASE, name=name)
        return NUTS().sample(
            density, draws=draws, chains=2, warmup=20, checkpoint=tmp_path / folder, progress=False
        )

    sample("gaussian", 20)
    resumed = sample("gaussian", 40)
    np.testing.assert_array_equal(resumed.z, sample("gaussian", 40, "other").z)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same posterior"):
        sample("another", 40)
    with pytest.raises(InputError, match="name: expected a name of the density.*Pass name="):
        sample(None, 40)


def test_fingerprints_differ_by_name_base_and_size():
    densities = [
        from_log_prob(with_torch, dim, base=base, name=name)
        for name, dim, base in [
            ("a", 3, None), ("b", 3, None), ("a", 2, None), ("a", 3, Normal()),
            ("a", 3, Normal(2.0)),
        ]
    ]  # fmt: skip
    assert len({density.fingerprint() for density in densities}) == 5
    same = from_log_prob(with_numpy, 3, library="numpy", name="a")
    assert same.fingerprint() == densities[0].fingerprint()


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((with_torch, 0, {}), InputError, "dim: expected a whole number of at least 1, got 0."),
        ((with_torch, 3, {"library": "jax"}), InputError,
         "library: expected one of 'torch', 'numpy', got 'jax'."),
        ((with_torch, 3, {"base": Normal(scale=[1.0, 2.0])}), InputError,
         "base scale: expected 1 or 3 numbers"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    function, dim, options = arguments
    with pytest.raises(error, match=re.escape(message)):
        from_log_prob(function, dim, **options)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (lambda z: z, {}, InputError,
         "log_prob: expected results of shape (2,) at 2 points, got (2, 3)."),
        (lambda z: torch.tensor(1.0), {}, InputError,
         "log_prob: expected a result that torch can differentiate"),
        (with_torch, {"grad": False}, InputError,
         "grad: expected a function, since this engine needs gradients, got False."),
        (with_torch, {"grad": lambda z: z.sum()}, InputError,
         "grad: expected results of shape (2, 3) at 2 points, got (2,)."),
        (with_numpy, {"library": "numpy"}, InputError,
         "grad: expected a function, since this engine needs gradients, got None. Pass grad="),
        (with_numpy, {"library": "numpy", "grad": lambda z: 1.0}, InputError,
         "grad: expected results of shape (2, 3) at 2 points, got (2,)."),
    ],
)  # fmt: skip
def test_bad_results(function, options, error, message):
    density = from_log_prob(function, 3, base=BASE, **options)
    with pytest.raises(error, match=re.escape(message)):
        NUTS().sample(density, draws=4, chains=2, initial="shift", progress=False)


@pytest.mark.parametrize(
    ("engine", "initial"),
    [
        (NUTS(), "prior"),
        (SMC(), "prior"),
        (EllipticalSlice(), "shift"),
        (ParallelTempering(), "shift"),
        (Laplace(), "prior"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_flat_measure_is_refused_where_a_gaussian_is_needed(engine, initial):
    density = from_log_prob(with_torch, 3)
    with pytest.raises(InputError, match=r"base: expected a Normal .*got None\. Pass base=Normal"):
        engine.sample(density, draws=4, chains=2, initial=initial, progress=False)


def test_tensors_of_other_shapes_and_libraries():
    with pytest.raises(InputError, match=r"z: expected shape \(S, 3\), got \(3,\)"):
        from_log_prob(with_torch, 3).value(np.zeros(3))
    with pytest.raises(InputError, match="library: expected 'torch' for a differentiable log_prob"):
        from_log_prob(with_numpy, 3, library="numpy").log_prob(torch.zeros(3))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_gradient_that_differs_from_differences_is_warned_of(library, scale):
    """Gradients of a wrong sign, a wrong scale or without a coordinate."""

    def density(factors):
        factors = np.array(factors)
        grad = (
            (lambda z: -z / scale**2 * torch.from_numpy(factors))
            if library == "torch"
            else (lambda z: -z / scale**2 * factors)
        )
        return from_log_prob(
            lambda z: -0.5 * (z**2).sum() / scale**2, 3, library=library, grad=grad
        )

    z = scale * np.random.default_rng(1).normal(size=(2, 3))
    for wrong in ([-1.0] * 3, [2.0] * 3, [1.0, 1.0, 0.0]):
        target = density(wrong)
        with pytest.warns(UserWarning, match="grad: its derivative along a line is"):
            target.value_and_grad(z)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            target.value_and_grad(z)  # once
            density([1.0] * 3).value_and_grad(z)


class Pole(Toy):
    """A standard normal whose log density has another value than a number in a strip."""

    impossible = np.inf

    def likelihood(self, z):
        """Of the strip 0.3 < z_0 < 0.6."""
        strip = (z[:, 0] > 0.3) & (z[:, 0] < 0.6)
        return np.where(strip, self.impossible, 0.0), np.zeros_like(z)

    def fingerprint(self):
        return "pole"


@pytest.mark.few(4)
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(
    "engine",
    [
        EllipticalSlice(),
        SliceSampling(),
        ParallelTempering(rungs=3),
        SMC(),
        HMC(),
        NUTS(),
        MAMS(),
        MCLMC(),
    ],
    ids=lambda engine: engine.name,
)
def test_infinite_densities_are_never_drawn(engine, value):
    """Like the same density with zero in the place of infinity, bit for bit."""
    found = []
    for impossible in (value, -np.inf):
        density = Pole(2)
        density.impossible = impossible
        options = {} if engine.name == "smc" else {"initial": np.full((2, 2), -0.5), "warmup": 20}
        found.append(engine.sample(density, draws=100, chains=2, progress=False, **options).z)
    np.testing.assert_array_equal(*found)
    assert not ((found[0][..., 0] > 0.3) & (found[0][..., 0] < 0.6)).any()
    assert (found[0][..., 0].std(1) > 0.1).all()


def test_infinite_values_of_functions_are_minus_infinity():
    values = np.array([1.0, np.inf, np.nan, -np.inf])
    density = from_log_prob(lambda z: values, 1, library="numpy", vectorized=True)
    np.testing.assert_array_equal(density.value(np.zeros((4, 1))), [1, -np.inf, -np.inf, -np.inf])


def test_start_points_of_infinite_density_are_refused():
    density = Pole(2)
    with pytest.raises(InputError, match="initial: .* got an infinite one or NaN at 1 of 2"):
        EllipticalSlice().sample(
            density, draws=5, chains=2, initial=np.array([[0.4, 0], [0, 0]]), progress=False
        )

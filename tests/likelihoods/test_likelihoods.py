"""Likelihoods against SciPy, automatic differentiation and Monte Carlo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import jacrev

import subbayes
from subbayes import InputError, subspaces
from subbayes.curvature.jacobian import curvature_root
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
    from_config,
)
from subbayes.likelihoods.families import BetaFamily, GammaFamily

each = pytest.mark.parametrize("name", cases.LIKELIHOODS)
ORDERED = [n for n in cases.LIKELIHOODS if n not in ("categorical", "bernoulli")]
WITH_MOMENTS = [n for n in cases.LIKELIHOODS if n != "per-observation"]


def outputs_of(noise: cases.Noise, *leading: int, n: int = cases.N, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, n, noise.n_outputs, generator=generator, dtype=torch.float64)


def built(name: str, n: int = cases.N) -> tuple[cases.Noise, Likelihood, Any]:
    noise = cases.LIKELIHOODS[name]
    return noise, noise.likelihood, noise.targets(np.random.default_rng(1), n)


def arrays(y: Any) -> Any:
    return tuple(t.numpy() for t in y) if isinstance(y, tuple) else y.numpy()


def at(y: Any, i: int) -> Any:
    return tuple(t[i : i + 1] for t in y) if isinstance(y, tuple) else y[i : i + 1]


# --- densities -----------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_log_density_equals_scipys(name, leading):
    noise, likelihood, y = built(name)
    f = outputs_of(noise, *leading)
    found = likelihood.log_prob(f, y)
    assert found.shape == (*leading, cases.N)
    np.testing.assert_allclose(
        found, cases.reference_log_prob(likelihood, f, arrays(y)), rtol=1e-11
    )


@each
@pytest.mark.parametrize("leading", [(), (4,), (2, 3)])
def test_score_equals_automatic_differentiation(name, leading):
    noise, likelihood, y = built(name)
    f = outputs_of(noise, *leading).requires_grad_()
    (expected,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), f)
    found = likelihood.score(f.detach(), y)
    assert found.shape == f.shape
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@each
def test_one_row_and_float32_and_columns(name):
    noise, likelihood, y = built(name)
    f = outputs_of(noise)
    full = likelihood.log_prob(f, y)
    for i in range(cases.N):
        torch.testing.assert_close(likelihood.log_prob(f[i : i + 1], at(y, i)), full[i : i + 1])
    single = likelihood.log_prob(f.float(), cases.cast(y, torch.float32))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), full, rtol=1e-4, atol=1e-4)
    if name != "categorical" and isinstance(y, Tensor) and y.ndim == 1:
        torch.testing.assert_close(likelihood.log_prob(f, y[:, None]), full)
        likelihood.check_targets(y[:, None])


@pytest.mark.parametrize("name", ["standardized", "standardized-heteroscedastic"])
def test_targets_far_from_zero_keep_their_precision(name):
    noise, likelihood, _ = built(name)
    wide = Standardized(likelihood.likelihood, (1e8,), (2.0,))
    y = 1e8 + torch.arange(cases.N, dtype=torch.float64)
    f = outputs_of(noise)
    reference = cases.reference_log_prob(wide, f, y.numpy())
    np.testing.assert_allclose(wide.log_prob(f, y), reference, rtol=1e-7)
    np.testing.assert_allclose(wide.log_prob(f.float(), y), reference, rtol=1e-4)


@pytest.mark.parametrize("name", ORDERED)
def test_distribution_functions_equal_scipys(name):
    noise, likelihood, y = built(name)
    if name == "per-observation":
        likelihood, y, scale = likelihood.with_noise(y[1]), *y
        reference = stats.norm(outputs_of(noise, 3), scale[:, None])
    else:
        reference = cases.reference(likelihood, outputs_of(noise, 3).numpy())
    f, column = outputs_of(noise, 3), y.reshape(cases.N, -1)
    found = likelihood.cdf(f, y)
    assert found.shape == (3, *column.shape)
    np.testing.assert_allclose(found, reference.cdf(column), rtol=1e-9, atol=1e-14)


def test_distribution_function_of_counts_between_and_below_them():
    f = torch.tensor([[0.3]], dtype=torch.float64)
    poisson = stats.poisson(np.exp(0.3))
    for y in (-2.0, -0.1, 0.0, 0.9, 1.0, 3.7, 40.0):
        found = Poisson().cdf(f, torch.tensor([y], dtype=torch.float64))
        np.testing.assert_allclose(found, poisson.cdf(y), rtol=1e-10, atol=0)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_labels_have_no_distribution_function(likelihood):
    with pytest.raises(InputError, match="likelihood: expected one with a distribution function"):
        likelihood.cdf(torch.zeros(2, 2), torch.zeros(2))


# --- moments and draws ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_moments_equal_scipys(name):
    noise, likelihood, _ = built(name)
    f = outputs_of(noise, 3)
    if name == "categorical":
        p = np.exp(f.numpy()) / np.exp(f.numpy()).sum(-1, keepdims=True)
        mean, variance = p, p * (1 - p)
    else:
        reference = cases.reference(likelihood, f.numpy())
        mean, variance = reference.mean(), reference.var()
    np.testing.assert_allclose(likelihood.mean(f), mean, rtol=1e-11)
    np.testing.assert_allclose(likelihood.variance(f), variance, rtol=1e-11)
    assert likelihood.mean(f[0]).shape == mean.shape[1:]
    parts = likelihood.components(f)
    if parts is not None:
        np.testing.assert_allclose(parts[0], mean, rtol=1e-11)
        np.testing.assert_allclose(parts[1], np.sqrt(variance), rtol=1e-11)
    assert (parts is None) == (likelihood.kind != "regression")


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_moments_of_draws(name):
    noise, likelihood, _ = built(name)
    n = 20_000
    f = outputs_of(noise, n=3)
    many = f.expand(n, *f.shape)
    y = likelihood.sample(many, torch.Generator().manual_seed(0))
    assert torch.equal(y, likelihood.sample(many, torch.Generator().manual_seed(0)))
    if name == "categorical":
        assert y.shape == (n, 3)
        y = torch.nn.functional.one_hot(y, noise.n_outputs)
    elif name == "bernoulli":
        assert y.shape == (n, 3)
        y = y[..., None]
    y = y.double()
    mean, variance = likelihood.mean(f), likelihood.variance(f)
    assert y.shape[1:] == mean.shape
    assert (abs(y.mean(0) - mean) < 4.5 * (variance / n).sqrt()).all()
    fourth = ((y - mean) ** 4).mean(0)
    error = ((fourth - variance**2).clamp_min(0) / n).sqrt()
    assert (abs(y.var(0) - variance) < 4.5 * error + 1e-12).all()


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "standardized"])
def test_draws_follow_the_distribution(name):
    noise, likelihood, _ = built(name)
    f = outputs_of(noise, n=1)
    y = likelihood.sample(f.expand(5000, 1, -1), torch.Generator().manual_seed(1))
    reference = cases.reference(likelihood, f.numpy())
    assert stats.kstest(y.flatten(), lambda v: reference.cdf(v).ravel()).pvalue > 1e-3


# --- curvature -----------------------------------------------------------------------------------


def expected_hessian(likelihood: Likelihood, f: Tensor, n: int = 60_000) -> tuple[Tensor, Tensor]:
    """Monte Carlo mean and standard error of -d2 log p / df2 over y ~ p(y | f), f (1, C)."""
    if isinstance(likelihood, Categorical):  # few values of y: the sum itself
        p = f.softmax(-1)[0]
        values = torch.stack([hessian(likelihood, f, torch.tensor([k])) for k in range(len(p))])
        return (p[:, None, None] * values).sum(0), torch.zeros_like(values[0])
    y = likelihood.sample(f.expand(n, 1, -1), torch.Generator().manual_seed(0)).reshape(n, 1, -1)
    if likelihood.n_outputs(y[0]) != f.shape[-1]:
        y = y.reshape(n, 1, -1)
    values = torch.func.vmap(lambda t: hessian(likelihood, f, t))(y)
    return values.mean(0), values.std(0) / n**0.5


def hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """-d2 log p(y | f) / df2 for one row, by automatic differentiation."""
    return jacrev(jacrev(lambda g: -likelihood.log_prob(g[None], y)[0]))(f[0])


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_curvature_is_the_expected_hessian(name):
    noise, likelihood, _ = built(name)
    f = outputs_of(noise, n=2, seed=3)
    found = likelihood.curvature(f)
    assert found.shape == (2, noise.n_outputs, noise.n_outputs)
    for i in range(2):
        mean, error = expected_hessian(likelihood, f[i : i + 1])
        assert (abs(found[i] - mean) <= 4.5 * error + 1e-9).all()


CANONICAL = [
    "gaussian",
    "gaussian-2",
    "categorical",
    "bernoulli",
    "poisson",
    "poisson-2",
    "standardized",
]


@pytest.mark.parametrize("name", CANONICAL)
def test_curvature_of_canonical_links_is_the_hessian_at_any_target(name):
    noise, likelihood, y = built(name)
    f = outputs_of(noise)
    exact = torch.stack([hessian(likelihood, f[i : i + 1], at(y, i)) for i in range(cases.N)])
    torch.testing.assert_close(likelihood.curvature(f), exact)
    torch.testing.assert_close(Likelihood.curvature(likelihood, f), exact)


@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_curvature_is_symmetric_and_positive_semi_definite(name):
    noise, likelihood, _ = built(name)
    f = 3 * outputs_of(noise, 2, 3)
    found = likelihood.curvature(f)
    assert found.shape == (2, 3, cases.N, noise.n_outputs, noise.n_outputs)
    torch.testing.assert_close(found, found.mT)
    assert (torch.linalg.eigvalsh(found) > -1e-12 * abs(found).amax()).all()
    torch.testing.assert_close(found[1, 2, 4], likelihood.curvature(f[1, 2, 4:5])[0])


def test_curvature_next_to_certainty_keeps_its_digits():
    outputs = torch.tensor([[30.0, 3.0, 0.0], [60.0, 0.0, -1.0], [900.0, 0.0, 0.0]]).double()
    found = Categorical(3).curvature(outputs)
    p = outputs.softmax(-1)
    torch.testing.assert_close(found[0, 0, 0], p[0, 0] * (p[0, 1] + p[0, 2]), rtol=1e-14, atol=0)
    root = curvature_root(Categorical(3), outputs, None)
    gap = (root @ root.mT - found).norm(dim=(1, 2))
    assert bool((gap <= 1e-10 * found.norm(dim=(1, 2))).all())


def test_roots_do_not_depend_on_the_rows_beside():
    """Not by the root of the rounding of the eigenvalue 0."""
    outputs = 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double()
    likelihood = Categorical(4)
    root = curvature_root(likelihood, outputs, None)
    each = torch.cat([curvature_root(likelihood, row[None], None) for row in outputs])
    torch.testing.assert_close(each, root, rtol=0, atol=1e-14)
    torch.testing.assert_close(root @ root.mT, likelihood.curvature(outputs), rtol=0, atol=1e-14)
    assert torch.equal(root[..., 0], torch.zeros_like(root[..., 0]))  # constants change nothing


def test_roots_of_softmax_curvatures_are_accurate_for_small_probabilities():
    outputs = torch.tensor([[0.0, -60.0, 3.0, -800.0], [-900.0, 0.0, 40.0, 1.0]]).double()
    root = curvature_root(Categorical(4), outputs, None)
    p = outputs.softmax(1)
    expected = torch.diag_embed(p * torch.stack([p[:, [j for j in range(4) if j != k]].sum(1)
                                                 for k in range(4)], 1))  # fmt: skip
    expected -= (p[:, :, None] * p[:, None]) * (1 - torch.eye(4))
    torch.testing.assert_close(root @ root.mT, expected, rtol=1e-10, atol=0)
    assert torch.equal(root, root.triu())


def test_the_score_of_labels_is_the_derivative_of_the_log_density():
    outputs = 3 * torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(30) % 4
    expected = torch.func.grad(lambda f: Categorical(4).log_prob(f, y).sum())(outputs)
    torch.testing.assert_close(Categorical(4).score(outputs, y), expected)


def test_curvature_with_known_noise():
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    likelihood = Gaussian(noise="per-observation").with_noise(scale)
    found = likelihood.curvature(torch.zeros(2, 1, dtype=torch.float64))
    torch.testing.assert_close(found.flatten(), scale**-2)


# --- a likelihood of one's own -------------------------------------------------------------------


@dataclass(frozen=True)
class Geometric(Likelihood):
    """The small class a user writes: failures before a success of probability sigmoid(f)."""

    kind: ClassVar[Any] = "count"

    def log_prob(self, outputs: Tensor, y: Any) -> Tensor:
        f = outputs[..., 0]
        return torch.nn.functional.logsigmoid(f) + y * torch.nn.functional.logsigmoid(-f)

    def mean(self, outputs: Tensor) -> Tensor:
        return torch.exp(-outputs)

    def variance(self, outputs: Tensor) -> Tensor:
        return torch.exp(-outputs) / outputs.sigmoid()

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def n_outputs(self, y: Any) -> int:
        return 1

    def check_targets(self, y: Any) -> None:
        pass


def test_defaults_of_a_user_defined_likelihood():
    likelihood = Geometric()
    f = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    at_zero = torch.stack([hessian(likelihood, row[None], torch.zeros(1).double()) for row in f])
    torch.testing.assert_close(likelihood.curvature(f), at_zero)
    assert likelihood.is_complete
    assert likelihood.init_parameters(torch.zeros(3)).numel() == 0
    assert likelihood.fit_parameters(f, torch.zeros(5)) is likelihood
    assert likelihood.to_config() == {"name": "Geometric"}
    with pytest.raises(
        InputError,
        match="likelihood: expected .*got 'Geometric'. Pass a likelihood object of your own",
    ):
        from_config(likelihood.to_config())


# --- units of y ----------------------------------------------------------------------------------


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e3))
def test_standardised_is_a_change_of_variables(shift, scale):
    inner = HeteroscedasticGaussian(0.3)
    outer = Standardized(inner, (shift,), (scale,))
    f = outputs_of(cases.LIKELIHOODS["heteroscedastic"], 2)
    y0 = torch.linspace(-2, 2, cases.N, dtype=torch.float64)
    y = shift + scale * y0
    torch.testing.assert_close(
        outer.log_prob(f, y), inner.log_prob(f, y0) - np.log(scale), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(outer.cdf(f, y), inner.cdf(f, y0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outer.curvature(f), inner.curvature(f))
    draws = [one.sample(f, torch.Generator().manual_seed(0)) for one in (outer, inner)]
    torch.testing.assert_close(draws[0], shift + scale * draws[1])


def test_standardised_by_the_moments_of_the_targets():
    y = torch.tensor([[1e8, 1.0], [1e8 + 2, 5.0], [1e8 + 4, 3.0]], dtype=torch.float64)
    likelihood = Standardized.of(Gaussian(noise=0.1), y)
    np.testing.assert_allclose(likelihood.shift, y.mean(0))
    np.testing.assert_allclose(likelihood.scale, y.std(0, correction=0))
    inner = likelihood.standardize(y)
    np.testing.assert_allclose(inner.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(inner.std(0, correction=0), 1)
    with pytest.raises(InputError, match="y: expected targets that vary, got a constant column"):
        Standardized.of(Gaussian(), torch.ones(5))


@pytest.mark.usefixtures("unchecked")
def test_standardised_takes_numbers():
    expected = Standardized(Gaussian(0.5), (3.0,), (2.0,))
    for shift, scale in ((3, 2), ([3.0], (2,)), (torch.tensor(3.0), np.array([2.0]))):
        assert Standardized(Gaussian(0.5), shift, scale) == expected


def test_bounded_targets_are_divided_by_a_scale_alone():
    y, f = torch.tensor([1.0, 2.0, 3.0, 8.0]).double(), torch.zeros(4, 2).double()
    message = "shift: expected 0 for targets that are bounded"
    for family, values in ((GammaFamily(), y), (BetaFamily(), y / 10)):
        with pytest.raises(InputError, match=message):
            Standardized.of(family, values)
    scaled = Standardized(GammaFamily(), (0.0,), (2.0,))
    scaled.check_targets(y)
    expected = stats.gamma.logpdf(y.numpy(), 1, scale=2.0)  # shape 1 and mean 1, times 2
    np.testing.assert_allclose(scaled.log_prob(f, y), expected, 1e-12)
    with pytest.raises(InputError, match="y: expected numbers above 0"):
        scaled.check_targets(-y)
    shares = Standardized(BetaFamily(), (0.0,), (0.5,))
    with pytest.raises(InputError, match="y: expected numbers strictly between 0 and 1"):
        shares.check_targets(y / 10)  # 0.8 is above the largest, 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_known_noise_in_units_of_y(dtype):
    likelihood = Standardized(Gaussian(noise="per-observation"), (10.0,), (0.4,))
    y, scale = torch.tensor([9, 12]).to(dtype), torch.tensor([1, 2]).to(dtype)
    f = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    expected = stats.norm(10 + 0.4 * f[:, 0], scale).logpdf(y)
    np.testing.assert_allclose(likelihood.log_prob(f, (y, scale)), expected, rtol=1e-12)
    given_noise = likelihood.with_noise(scale)
    np.testing.assert_allclose(given_noise.log_prob(f, y), expected, rtol=1e-12)
    np.testing.assert_allclose(given_noise.variance(f)[:, 0], scale**2, rtol=1e-12)


# --- learned parameters --------------------------------------------------------------------------


def test_estimated_noise_is_the_root_mean_square_residual():
    rng = np.random.default_rng(0)
    f, y = torch.from_numpy(rng.normal(size=(50, 2))), torch.from_numpy(rng.normal(size=(50, 2)))
    noise = Gaussian().fit_parameters(f, y).noise
    np.testing.assert_allclose(noise, (y - f).square().mean(0).sqrt(), rtol=1e-8)
    single = Gaussian().fit_parameters(f[:, :1].float(), y[:, 0].float())
    np.testing.assert_allclose(single.noise, (y - f)[:, 0].square().mean().sqrt(), rtol=1e-5)
    assert single.is_complete
    units = Standardized(Gaussian(), (3.0,), (2.0,)).fit_parameters(f[:, :1], 3 + 2 * y[:, 0])
    np.testing.assert_allclose(units.likelihood.noise, single.noise, rtol=1e-5)


def test_estimated_global_variance_maximises_the_likelihood():
    rng = np.random.default_rng(0)
    f = torch.from_numpy(np.column_stack([np.zeros(200), np.full(200, -3.0)]))
    y = torch.from_numpy(rng.normal(size=200) * 1.5)
    (found,) = HeteroscedasticGaussian().fit_parameters(f, y).global_variance
    # constant raw variance: the optimum makes the whole variance the mean square
    np.testing.assert_allclose(found, float(y.square().mean()) - np.log1p(np.exp(-3)), rtol=1e-5)


def test_known_parameters_are_not_estimated_again():
    f, y = torch.zeros(3, 1), torch.ones(3)
    for likelihood in (Gaussian(0.3), HeteroscedasticGaussian(0.1), Poisson(), Categorical()):
        assert likelihood.init_parameters(y).numel() == 0
        assert likelihood.with_parameters(torch.zeros(0)) == likelihood
        assert likelihood.fit_parameters(f, y) == likelihood
        assert likelihood.detach() == likelihood


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_start_values_are_the_moments_of_the_targets(offset):
    y = offset + torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    noise = Gaussian().with_parameters(Gaussian().init_parameters(y)).noise
    torch.testing.assert_close(noise.double()[0], y.std(correction=0), rtol=1e-5, atol=0)
    learned = HeteroscedasticGaussian()
    variance = learned.with_parameters(learned.init_parameters(y)).global_variance
    torch.testing.assert_close(variance.double()[0], y.var(correction=0), rtol=1e-5, atol=0)


def test_learned_parameters_get_gradients():
    raw = torch.full((1,), 0.3, dtype=torch.float64, requires_grad=True)
    f, y = torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for likelihood, outputs in (
        (Gaussian(), f[:, :1]),
        (HeteroscedasticGaussian(), f),
        (Standardized(Gaussian(), (0.0,), (2.0,)), f[:, :1]),
    ):
        value = likelihood.with_parameters(raw).log_prob(outputs, y).sum()
        (grad,) = torch.autograd.grad(value, raw)
        assert grad.abs() > 0
        frozen = likelihood.with_parameters(raw).detach()
        assert frozen.is_complete
        torch.testing.assert_close(frozen.log_prob(outputs, y).sum(), value.detach())
        json.dumps(frozen.to_config())


def test_unlearned_parameters_raise():
    f, y = torch.zeros(3, 1), torch.zeros(3)
    for likelihood, outputs in (
        (Gaussian(), f),
        (HeteroscedasticGaussian(), f.expand(3, 2)),
        (Standardized(Gaussian(), (0.0,), (1.0,)), f),
    ):
        assert not likelihood.is_complete
        with pytest.raises(
            InputError,
            match=r"likelihood: expected all parameters learned or given, got .*'learned'.*. "
            r"Use .* train\(...\) returns, or likelihood.fit_parameters",
        ):
            likelihood.log_prob(outputs, y)


def test_learning_noise_from_a_perfect_fit_raises():
    f = torch.arange(4.0)[:, None]
    with pytest.raises(InputError, match="outputs: expected residuals to learn the noise from"):
        Gaussian().fit_parameters(f, f[:, 0])


# --- configs -------------------------------------------------------------------------------------


LEARNED = [
    Gaussian(),
    HeteroscedasticGaussian(),
    Gaussian(noise=2.0),
    Gaussian(noise=(0.1, 3.0)),
    Categorical(n_classes=4),
    Standardized(Gaussian(), (1.0,), (2.0,)),
    *(n.likelihood for n in cases.LIKELIHOODS.values()),
]


@pytest.mark.parametrize("likelihood", LEARNED, ids=repr)
def test_config_round_trip_through_json(likelihood):
    config = json.loads(json.dumps(likelihood.to_config()))
    assert from_config(config) == likelihood
    assert "\n" not in repr(likelihood)


def test_config_of_an_unknown_likelihood():
    with pytest.raises(InputError, match="likelihood: expected .*got 'Tweedie'"):
        from_config({"name": "Tweedie"})


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Gaussian(noise=0.0), "noise: expected finite numbers above 0, got 0"),
        (lambda: Gaussian(noise=float("nan")), "noise: expected finite numbers above 0, got nan"),
        (lambda: Gaussian(noise=(1.0, 0.0)), "noise: expected finite numbers above 0"),
        (
            lambda: Gaussian(noise=torch.tensor(-1.0)),
            "noise: expected finite numbers above 0, .*-1",
        ),
        (lambda: Gaussian(torch.tensor([1.0, torch.nan])), "noise: expected finite .*got nan"),
        (
            lambda: HeteroscedasticGaussian(torch.tensor([1.0, -2.0])),
            "global_variance: expected finite numbers of at least 0, got -2",
        ),
        (
            lambda: Gaussian(noise="learn"),
            "noise: expected numbers or 'learned' or 'per-observation', got learn",
        ),
        (lambda: HeteroscedasticGaussian(-0.1), "global_variance: expected finite numbers"),
        (lambda: HeteroscedasticGaussian("auto"), "global_variance: expected numbers or 'learned'"),
        (
            lambda: Categorical(n_classes=1),
            "n_classes: expected a whole number of at least 2, got 1",
        ),
        (
            lambda: Standardized(Gaussian(1.0), (0.0,), (0.0,)),
            "scale: expected a finite number above",
        ),
        (lambda: Standardized(Gaussian(1.0), (float("nan"),), (1.0,)), "shift: expected finite"),
        (
            lambda: Standardized(Gaussian(1.0), (0.0, 1.0), (1.0,)),
            "shift and scale: expected one number each per target, got 2 and 1",
        ),
        (lambda: Standardized(Poisson(), (0.0,), (1.0,)), "likelihood: expected a regression"),
    ],
)
def test_invalid_likelihoods_raise(make, what):
    with pytest.raises(InputError, match=what) as e:
        make()
    assert "\n" not in str(e.value)


Y = torch.zeros(4)


@pytest.mark.parametrize(
    ("likelihood", "y", "what"),
    [
        (
            Gaussian(1.0),
            torch.zeros(2, 2, 2),
            r"y: expected shape \(N,\) or \(N, targets\) without missing ones, got shape",
        ),
        (Gaussian(1.0), (Y, Y), r"y: expected shape .*, got a tuple"),
        (Gaussian("per-observation"), Y, r"y: expected a pair \(y, noise scale\).*got one tensor"),
        (Gaussian("per-observation"), (Y, Y, Y), r"y: expected a pair .*got 3 tensors"),
        (Gaussian("per-observation"), (Y, Y), "noise scale: expected numbers above 0, got 0"),
        (Gaussian("per-observation"), (Y, Y - 1), "noise scale: expected numbers above 0, got -1"),
        (HeteroscedasticGaussian(1.0), (Y, Y), "y: expected shape"),
        (Categorical(), Y + 0.5, "y: expected classes 0..K-1 for .*, got 0.5"),
        (
            Categorical(),
            Y - 1,
            "y: expected classes 0..K-1 for .*, got -1 at row 0. Encode the labels",
        ),
        (
            Categorical(),
            torch.zeros(4, 1),
            r"y: expected responses of shape \(N,\), got \(4, 1\). Pass y\[:, 0\]",
        ),
        (Categorical(), torch.zeros(4, 3), r"y: .*y.argmax\(1\) of one column for each class"),
        (Categorical(), (Y, Y - 1), "weights: expected one finite number of at least 0"),
        (
            Categorical(3),
            torch.tensor([0, 1, 3]),
            "y: expected classes 0..2 for .*, got 3 at row 2",
        ),
        (
            Bernoulli(),
            torch.tensor([0, 1, 2]),
            "y: expected 0 and 1 for .*, got 2 at row 2. Encode",
        ),
        (Bernoulli(), torch.tensor([0.0, float("nan")]), "y: expected 0 and 1 for .*, got nan"),
        (Bernoulli(), torch.zeros(4, 2), r"y: expected responses of shape \(N,\), got \(4, 2\)"),
        (Bernoulli(), (Y, Y - 1), "weights: expected one finite number of at least 0"),
        (
            Poisson(),
            Y - 1,
            r"y: expected counts \(whole numbers of at least 0\) for family 'poisson', got -1",
        ),
        (Poisson(), Y + 0.5, "y: expected counts.*got 0.5 at row 0. Choose another family"),
        (
            Poisson(),
            torch.tensor([3 + 3e-9], dtype=torch.float64),
            "y: expected counts.*got 3.000000003",
        ),
        (Bernoulli(), torch.tensor([0.0, 0.25]), "got 0.25 .* for proportions give .*'beta'"),
        (Poisson(), Y * float("nan"), "y: expected counts.*got nan"),
        (Poisson(), (Y, Y - 1), "weights: expected one finite number of at least 0"),
        (
            Poisson(),
            torch.zeros(1, 1, 1),
            r"y: expected responses of shape .* or \(N, targets\), got \(1, 1, 1\)",
        ),
        (
            Standardized(Gaussian(1.0), (0.0,), (1.0,)),
            torch.zeros(4, 2),
            "y: expected 1 target, as standardised, got 2",
        ),
        (Standardized(Gaussian(1.0), (0.0,), (1.0,)), (Y, Y), "y: expected shape"),
    ],
)
def test_targets_outside_the_support_raise(likelihood, y, what):
    with pytest.raises(InputError, match=what) as e:
        likelihood.check_targets(y)
    assert "\n" not in str(e.value)


@each
def test_targets_of_the_cases_are_accepted(name):
    noise, likelihood, y = built(name)
    likelihood.check_targets(y)
    likelihood.check_outputs(noise.n_outputs, y)
    assert likelihood.n_outputs(y) == noise.n_outputs
    if name != "categorical":
        c = noise.n_outputs
        with pytest.raises(InputError, match=f"module: expected {c} outputs? for .*, got {c + 1}"):
            likelihood.check_outputs(c + 1, y)


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([False, True]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0, 1], dtype=torch.uint8),
    ],
)
def test_labels_of_any_dtype(y):
    f = torch.tensor([[0.2], [1.0]])
    for likelihood, outputs in ((Bernoulli(), f), (Categorical(), f @ torch.ones(1, 2))):
        likelihood.check_targets(y)
        likelihood.check_outputs(outputs.shape[1], y)
        torch.testing.assert_close(
            likelihood.log_prob(outputs, y), likelihood.log_prob(outputs, y.long())
        )


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "what"),
    [
        (
            Categorical(),
            1,
            torch.tensor([0, 1]),
            "at least 2 outputs for categorical.*, got 1. .* use Bernoulli",
        ),
        (
            Categorical(),
            2,
            torch.tensor([0, 2]),
            "y: expected labels in 0..1, the module's 2 outputs, "
            "got 2. Encode labels as 0..K-1 or widen",
        ),
        (Categorical(3), 2, torch.tensor([0, 1]), "module: expected 3 outputs for categorical"),
        (Gaussian(1.0), 2, Y, "module: expected 1 output for Gaussian.*got 2"),
        (HeteroscedasticGaussian(1.0), 1, Y, "module: expected 2 outputs for Heteroscedastic"),
        (HeteroscedasticGaussian(1.0), 3, torch.zeros(4, 2), "module: expected 4 outputs"),
        (Bernoulli(), 2, Y, "module: expected 1 output for bernoulli"),
        (Poisson(), 1, torch.zeros(4, 2), "module: expected 2 outputs for poisson"),
        (HeteroscedasticGaussian((1.0, 2.0)), 2, Y, "global_variance: expected 1 number, or 1"),
        (Gaussian((1.0, 2.0)), 1, Y, "noise: expected 1 number, or 1 per target of 1 network"),
        (Gaussian((1.0, 2.0)), 3, torch.zeros(4, 3), "noise: expected 1 number, or 1 per target"),
    ],
)
def test_incompatible_outputs_raise(likelihood, outputs, y, what):
    with pytest.raises(InputError, match=what):
        likelihood.check_outputs(outputs, y)


LABELS = torch.tensor([0, 2, 1, 0])


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "said"),
    [
        (Gaussian(), 3, LABELS, True),
        (Gaussian(), 3, LABELS.float(), True),
        (Gaussian(), 2, LABELS > 0, True),
        (HeteroscedasticGaussian(), 3, LABELS, True),
        (Standardized(Gaussian(), (0.0,), (1.0,)), 3, LABELS, True),
        (Gaussian(), 3, LABELS + 0.5, True),
        (Poisson(), 3, LABELS, False),
    ],
)
def test_labels_for_a_regression_likelihood_raise(likelihood, outputs, y, said):
    with pytest.raises(InputError, match="module: expected") as e:
        likelihood.check_outputs(outputs, y)
    assert ('for class labels pass likelihood="categorical"' in str(e.value)) == said


def test_fit_suggests_the_likelihood_for_labels():
    x = torch.randn(30, 2)
    with pytest.raises(
        InputError,
        match="expected 1 output for Gaussian.*, got 3. Give the last "
        'layer 1 output; for class labels pass likelihood="categorical"',
    ):
        subbayes.fit(
            torch.nn.Linear(2, 3),
            (x, torch.arange(30) % 3),
            subspace=subspaces.PCA(rank=1),
            sampling=Sampling(progress=False),
        )


def test_categorical_accepts_more_outputs_than_labels():
    Categorical().check_outputs(10, torch.tensor([0, 1]))


@pytest.mark.usefixtures("unchecked")
def test_integers_and_numpy_numbers_are_accepted():
    f, y = torch.zeros(1, 1), torch.zeros(1)
    assert Gaussian(noise=2).log_prob(f, y) == Gaussian(noise=2.0).log_prob(f, y)
    assert Gaussian(noise=np.float64(2)).to_config() == {"name": "Gaussian", "noise": 2.0}
    assert HeteroscedasticGaussian(0).variance(torch.zeros(1, 2)) == pytest.approx(np.log(2))
    assert Standardized(Gaussian(1), (0,), (2,)).variance(f) == 4


# --- many rows of few classes, which are computed side by side ----------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "classes"), [(64, 2), (67, 3), (200, 15), (130, 16)])
def test_many_rows_of_few_classes_equal_single_rows(n, classes, dtype):
    generator = torch.Generator().manual_seed(0)
    f = 5 * torch.randn(3, n, classes, generator=generator, dtype=dtype)
    y = torch.randint(0, classes, (n,), generator=generator)
    likelihood = Categorical(classes)
    rows = [(f[:, i : i + 1], y[i : i + 1]) for i in range(n)]
    close = {torch.float32: dict(rtol=1e-5, atol=1e-6), torch.float64: dict(rtol=1e-12, atol=1e-14)}
    for found, expected in (
        (likelihood.log_prob(f, y), [likelihood.log_prob(*row) for row in rows]),
        (likelihood.mean(f), [likelihood.mean(row) for row, _ in rows]),
        (likelihood.variance(f), [likelihood.variance(row) for row, _ in rows]),
        (likelihood.curvature(f), [likelihood.curvature(row) for row, _ in rows]),
    ):
        torch.testing.assert_close(found, torch.cat(expected, 1), **close[dtype])
    gradient = jacrev(lambda f: likelihood.log_prob(f, y).sum())(f)
    one_hot = torch.nn.functional.one_hot(y, classes).to(dtype)
    torch.testing.assert_close(gradient, one_hot - likelihood.mean(f), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_probabilities_do_not_depend_on_other_rows(dtype):
    generator = torch.Generator().manual_seed(0)
    f = 3 * torch.randn(5, 203, 3, generator=generator, dtype=dtype)
    y = torch.randint(0, 3, (203,), generator=generator)
    likelihood = Categorical(3)
    whole = likelihood.log_prob(f, y)
    for chain in range(5):  # however many chains there are
        assert torch.equal(likelihood.log_prob(f[chain], y), whole[chain])
    batched = torch.vmap(lambda f: likelihood.log_prob(f, y), chunk_size=2)(f)
    assert torch.equal(batched, whole)
    p = likelihood.mean(f)
    for start, stop in ((0, 100), (100, 203), (7, 139)):  # and however rows are cut
        assert torch.equal(likelihood.mean(f[:, start:stop]), p[:, start:stop])

"""Tempering of the networks: marginalisation methods against each other, draws against theory."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats
from torch import nn

from subbayes import MLP, InputError, Training
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods.families import Bernoulli, NormalFamily, OrdinalFamily, Poisson
from subbayes.regression import NormalPrior, Regression
from subbayes.regression.design.default_priors import default_priors
from subbayes.regression.design.design import Design
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.weight_quality import WeightQuality
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.integrals.collapsed_marginalisation import CollapsedDensity
from subbayes.semistructured.integrals.effect_density import ConditionalModes, EffectDensity
from subbayes.semistructured.integrals.marginalisation import ImportanceSampling, marginalisation_of
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.subspace import build_space

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations


def frame_of(n=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"x": rng.normal(1, 2, n), "v": rng.normal(size=n), "u": rng.uniform(-2, 2, n)}
    )
    eta = 0.4 + 0.2 * frame.x
    return frame.assign(
        y=eta + 0.6 * rng.normal(size=n),
        c=rng.poisson(np.exp(eta)),
        b=rng.integers(0, 2, n),
        o=rng.integers(0, 3, n),
    )


def observed(family, right, y, frame):
    names = ("mu",) if isinstance(family, OrdinalFamily) else family.parameters
    design = Design(
        {p: right if p == "mu" else "1" for p in names},
        frame,
        ("mu",) if isinstance(family, OrdinalFamily) else (),
    )
    matrix, offset = map(torch.from_numpy, design.matrix(frame))
    values = frame[y].to_numpy(dtype=np.float64).copy()
    effects = StructuredPredictor(design, family, default_priors(design, family, values))
    return EffectDensity(effects, family, matrix, offset, torch.from_numpy(values))


def contributions(frame, width, count=4):
    waves = 0.4 * np.sin(np.arange(count)[:, None] + frame.u.to_numpy())
    deep = torch.zeros(count, len(frame), width, dtype=torch.float64)
    deep[..., 0] = torch.from_numpy(waves)
    return deep


def brute_force(rows, deep, size, reach=8.0, nodes=161):
    """The integral over the prior's coordinates on a grid, for one or two of them."""
    axis = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(*[axis] * size, indexing="ij"), -1).reshape(-1, size)
    joint = rows.log_joint(grid, deep.expand(len(grid), *deep.shape))
    step = float(axis[1] - axis[0])
    return float(joint.logsumexp(0)) + size * (np.log(step) - 0.5 * np.log(2 * np.pi))


def all_coordinates(rows, points=256):
    """Importance sampling of all coordinates, whether some have a closed form or not."""
    return ImportanceSampling(ConditionalModes(rows), rows.offset, points)


def by_quadrature(rows, deep, nodes=21):
    """Adaptive Gauss-Hermite on a product grid around the mode."""
    modes = ConditionalModes(rows)
    mode, factor = modes.find(deep)
    x, w = (torch.from_numpy(one) for one in np.polynomial.hermite_e.hermegauss(nodes))
    eps = torch.cartesian_prod(*[x] * modes.size).reshape(-1, modes.size)
    log_w = torch.cartesian_prod(*[w.log()] * modes.size).reshape(-1, modes.size).sum(1)
    zeta = mode[:, None] + torch.einsum("spq,mq->smp", factor, eps)
    log_size = factor.diagonal(dim1=1, dim2=2).log().sum(1)
    joint = modes.log_joint(zeta, deep) + 0.5 * eps.square().sum(1) + log_w
    constant = 0.5 * modes.size * np.log(2 * np.pi)
    return (joint.logsumexp(1) + log_size - constant).numpy()


@pytest.mark.parametrize(("family", "y"), [(Poisson(), "c"), (Bernoulli(), "b")])
def test_quadrature_and_importance_sampling_match_a_grid(family, y):
    """The grid does not use modes; the importance estimate differs by a constant."""
    frame = frame_of()
    rows = observed(family, "1", y, frame)
    deep = contributions(frame, 1)
    quadrature = by_quadrature(rows, deep)
    grid = [brute_force(rows, d, 1, nodes=40_001) for d in deep]
    np.testing.assert_allclose(quadrature, grid, atol=1e-7)
    rows = observed(family, "x", y, frame)
    quadrature = by_quadrature(rows, deep)
    method = all_coordinates(rows)
    apart = method.log_marginal(deep) - quadrature
    assert np.abs(apart).max() < 0.02
    assert np.ptp(apart) < 1e-3  # a constant does not matter to a sampler
    assert WeightQuality.of(method._log_weights(deep)).sizes.min() > 0.8 * 256


def test_the_closed_form_matches_a_grid():
    frame = frame_of()
    rows = observed(NormalFamily(), "x + v", "y", frame)
    deep = contributions(frame, 2)
    exact = marginalisation_of(rows)
    assert exact.modes.size == 1
    assert exact.facts() == {"closed_form": True}
    importance = all_coordinates(rows, 4096).log_marginal(deep)
    np.testing.assert_allclose(exact.log_marginal(deep), importance, atol=0.02)
    small = observed(NormalFamily(), "x", "y", frame)
    np.testing.assert_allclose(
        marginalisation_of(small).log_marginal(deep), by_quadrature(small, deep), atol=1e-8
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", [None, "w"])
def test_scales_are_integrated_out_beside_coefficients_in_closed_form(weights):
    """The response given sigma and the deviation of groups by dense matrices, these on a grid."""
    frame = frame_of(40)
    rng = np.random.default_rng(3)
    frame["g"], frame["w"] = rng.integers(0, 6, 40).astype(str), rng.integers(1, 3, 40)
    model = Regression("y ~ x + (1 | g)", weights=weights)
    model = model.specification.prepare(frame, None)
    inputs, structured = model.inputs, model.structured
    design, offset = inputs["design"].double(), inputs["offset"].double()
    rows = EffectDensity(structured, model.family, design, offset, model.data.y)
    method = marginalisation_of(rows)
    modes = method.modes
    assert isinstance(modes, CollapsedDensity)
    assert [structured.names[j] for j in modes.collapsed.rest] == [
        "sigma.Intercept",
        "sd(Intercept | g)",
    ]
    deep = contributions(frame, 2)
    found = method.log_marginal(deep)
    assert WeightQuality.of(method._log_weights(deep)).sizes.min() > 100
    for i in range(len(deep)):  # whatever the others
        np.testing.assert_allclose(method.log_marginal(deep[i : i + 1])[0], found[i], rtol=1e-9)
    y = model.data.y if weights is None else model.data.y[0]
    counts = np.ones(40) if weights is None else frame.w.to_numpy()
    of_sigma = structured.placement[:, 1].numpy() > 0
    axis = np.linspace(-4, 4, 65)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    zeta = torch.zeros(2, len(grid), structured.size, dtype=torch.float64)
    zeta[..., modes.collapsed.rest] = torch.from_numpy(grid)
    zeta[1, :, modes.collapsed.linear] = 1.0
    level, one = structured.coefficients(zeta).numpy()
    x = design.numpy() * ~of_sigma
    logs = np.empty((len(grid), len(deep)))
    for k, (base, slope) in enumerate(zip(level, one - level, strict=True)):
        sigma = np.exp((design.numpy() * of_sigma) @ base)[0]
        scaled = (x * slope)[:, ~of_sigma]
        own = sigma**2 / counts  # an integer weight is as many rows
        covariance = np.diag(own) + scaled @ scaled.T
        r = y.numpy() - x @ base - deep[..., 0].numpy()
        quadratic = (r * np.linalg.solve(covariance, r.T).T).sum(1)
        repeated = (counts - 1).sum() * np.log(2 * np.pi * sigma**2) + np.log(counts).sum()
        log_det = np.linalg.slogdet(2 * np.pi * covariance)[1] + repeated
        logs[k] = -0.5 * (quadratic + log_det + grid[k] @ grid[k]) - np.log(2 * np.pi)
    expected = special.logsumexp(logs, 0) + 2 * np.log(axis[1] - axis[0])
    assert np.abs(found - expected).max() < 0.02
    assert np.ptp(found - expected) < 0.02  # a constant does not matter to a sampler
    assert np.ptp(expected) > 1
    # moments of sigma's coordinate and the deviation's, and of the coefficients given them
    drawn = np.concatenate(
        [method.sample(deep[:1].expand(64, -1, -1), np.random.default_rng(k)) for k in range(16)]
    )
    mass = np.exp(logs[:, 0] - logs[:, 0].max())
    mass /= mass.sum()
    mean, cov = mass @ grid, np.cov(grid.T, aweights=mass, ddof=0)
    h, sd = drawn[:, modes.collapsed.rest], np.sqrt(np.diag(cov))
    assert np.all(np.abs(h.mean(0) - mean) < 4.5 * sd / np.sqrt(len(h)))
    assert np.all(np.abs(np.cov(h.T) - cov) < 6 * np.outer(sd, sd) * np.sqrt(2 / len(h)))
    assert method.facts()["integrated_out"] == "coefficients"


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 40])
def test_the_closed_form_matches_dense_matrices(n):
    """Fewer rows than columns too: coefficients by dense matrices, sigma on a grid."""
    frame = frame_of(n)
    rows = observed(NormalFamily(), "x + v + u + c", "y", frame)
    deep = contributions(frame, 2)
    method = marginalisation_of(rows)
    own, (place,) = method.modes.collapsed.linear, method.modes.collapsed.rest
    grid = np.linspace(-7, 7, 2001)
    zeta = torch.zeros(len(grid), rows.structured.size, dtype=torch.float64)
    zeta[:, place] = torch.from_numpy(grid)
    beta = rows.structured.coefficients(zeta).numpy()
    x, mean, sigma = rows.design[:, own].numpy(), beta[0, own], np.exp(beta[:, place])
    size = rows.structured.coefficients(torch.ones(rows.structured.size).double())[own] - mean
    size = size.numpy()
    grid, sigma = grid[sigma > 1e-3], sigma[sigma > 1e-3]  # nearly no mass is below
    logs, means, covariances = [], [], []
    r = rows.y.numpy() - x @ mean - deep[0, :, 0].numpy()
    scaled = x * size
    for s in sigma:
        whole = s**2 * np.eye(n) + scaled @ scaled.T
        logs.append(stats.multivariate_normal(np.zeros(n), whole, allow_singular=True).logpdf(r))
        precision = np.eye(len(own)) + scaled.T @ scaled / s**2
        covariances.append(np.linalg.inv(precision))
        means.append(covariances[-1] @ scaled.T @ r / s**2)
    logs = np.array(logs) + stats.norm.logpdf(grid)
    means = np.array(means)
    total = np.logaddexp.reduce(logs) + np.log(grid[1] - grid[0])
    assert method.log_marginal(deep)[0] == pytest.approx(total, abs=5e-3)
    w = np.exp(logs - logs.max())
    w /= w.sum()
    center = w @ means
    cov = np.einsum("s,sij->ij", w, np.array(covariances)) + np.cov(means.T, aweights=w, bias=True)
    drawn = method.sample(deep[:1].expand(20_000, -1, -1), np.random.default_rng(0))[:, own]
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(drawn.mean(0) - center) < 5 * sd / np.sqrt(20_000))
    np.testing.assert_allclose(
        np.cov(drawn.T) / np.outer(sd, sd), cov / np.outer(sd, sd), atol=0.06
    )


@pytest.mark.slow
def test_conditional_samples_have_the_conditional_moments():
    """Normal, exact: against the textbook, sigma on a grid; importance: against the closed form."""
    frame = frame_of()
    rows = observed(NormalFamily(), "x", "y", frame)
    one = contributions(frame, 2, 1).expand(5_000, -1, -1)
    drawn = marginalisation_of(rows).sample(one, np.random.default_rng(0))
    axis = torch.linspace(-4, 4, 33, dtype=torch.float64)
    box = all_coordinates(rows, 512)
    mode, factor = box.modes.find(one[:1])
    grid = torch.cartesian_prod(axis, axis, axis)
    points = mode + 1.6 * grid @ factor[0].T
    weight = rows.log_joint(points, one[:1].expand(len(points), -1, -1)).softmax(0)
    mean = weight @ points
    covariance = (points - mean).T @ (weight[:, None] * (points - mean))
    sd = covariance.diagonal().sqrt().numpy()
    assert np.all(np.abs(drawn.mean(0) - mean.numpy()) < 5 * sd / np.sqrt(len(drawn)))
    np.testing.assert_allclose(
        np.cov(drawn.T) / np.outer(sd, sd), covariance.numpy() / np.outer(sd, sd), atol=0.05
    )
    several = np.concatenate([box.sample(one[:250], np.random.default_rng(s)) for s in range(8)])
    assert np.all(np.abs(several.mean(0) - mean.numpy()) < 5 * sd / np.sqrt(2000))
    np.testing.assert_allclose(
        np.cov(several.T) / np.outer(sd, sd), covariance.numpy() / np.outer(sd, sd), atol=0.15
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "right", "y"),
    [
        (OrdinalFamily(n_classes=3), "x + s(u, df=5)", "o"),
        (Poisson(), "x + s(u)", "c"),
        (NormalFamily(), "x + s(v, df=6)", "y"),
    ],
)
def test_newton_derivatives_match_automatic_differentiation(family, right, y):
    """The chain rule against automatic differentiation of the log joint density."""
    frame = frame_of()
    rows = observed(family, right, y, frame)
    width = 1 if not isinstance(family, NormalFamily) else 2
    deep = contributions(frame, width, 3)
    modes = all_coordinates(rows).modes
    zeta, factor = modes.find(deep)
    joint = torch.func.vmap(torch.func.grad(rows.log_joint))(zeta, deep)
    assert float(joint.abs().max()) < 1e-6
    hessian = torch.func.vmap(torch.func.hessian(rows.log_joint))(zeta, deep)
    for f, at, expected in zip(deep, zeta, hessian, strict=True):
        curved = modes.density.shifted(f).curvature(at).plus_identity().dense()
        torch.testing.assert_close(curved, -expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(factor @ factor.mT, torch.linalg.inv(-hessian), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_tempering_widens_the_networks_but_not_the_effects():
    """The networks' draws against their tempered density on a grid; the effects do not move.

    The network is orthogonal to the columns, so that effects and network are independent given
    sigma: the effects' posterior must not widen with T.
    """
    frame = frame_of(100)
    frame["y"] += 0.8 * np.sin(3 * frame.u)
    network = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    found = {}
    for temperature in (1.0, 50.0):
        model = SemiStructuredRegression(
            "y ~ x + u + net(u)", networks={"net": network}, priors={"x": NormalPrior(0, 1)}
        ).fit(
            frame,
            temperature=temperature,
            inference="elliptical-slice",
            sampling=Sampling(draws=400, chains=8, progress=False),
            training=Training(
                epochs=200,
                batch_size=None,
                weight_decay=1e-4,
                clip_norm=None,
                validation=0.2,
                patience=100,
            ),
            subspace=SemiStructuredSubspace(2),
        )
        found[temperature] = model
    cold, hot = found[1.0], found[50.0]
    assert hot.draws.temperature == 50.0
    density = hot.state.joint.tempered_networks(50.0)
    axis = 4.5 * density.prior.scale[0] * np.linspace(-1, 1, 61)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    log = density.log_likelihood(grid) / 50 + density.prior.log_prob(grid)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = np.sqrt(weight @ (grid - mean) ** 2)
    networks = hot.draws.z[..., :2]
    n = hot.draws.ess_bulk()[:2].min()
    assert np.all(np.abs(networks.mean((0, 1)) - mean) < 5 * sd / np.sqrt(n))
    assert np.all(np.abs(networks.std((0, 1)) / sd - 1) < 5 * np.sqrt(1 / n))
    assert np.all(networks.std((0, 1)) > cold.draws.z[..., :2].std((1,)).mean(0))
    effects = [m.summary().loc["x"] for m in (cold, hot)]
    assert abs(effects[0]["mean"] - effects[1]["mean"]) < 0.5 * effects[0]["sd"]
    assert 0.8 < effects[1]["sd"] / effects[0]["sd"] < 1.5
    with pytest.raises(InputError, match="1 for leave-one-out"):
        hot.loo()


@pytest.mark.slow
def test_tempered_marginal_of_a_linear_network_matches_its_closed_form():
    """y = theta + phi w(u) + noise: p(D | phi) and its tempered posterior in closed form."""
    from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
    from subbayes.priors import Normal
    from subbayes.semistructured.integrals.tempered_networks import TemperedNetworks

    frame = frame_of(50)
    rows = observed(NormalFamily(), "x", "y", frame)
    wave = torch.from_numpy(np.sin(2 * frame.u.to_numpy()))

    def deep(z):
        out = torch.zeros(len(z), 50, 2, dtype=torch.float64)
        out[..., 0] = z[:, :1] * wave
        return out

    for temperature in (1.0, 4.0):
        density = TemperedNetworks(
            deep, marginalisation_of(rows), Normal(1.5), 1, temperature, "test"
        )
        draws = EllipticalSlice().sample(density, draws=400, chains=8, progress=False)
        grid = np.linspace(-6, 6, 2001)[:, None]
        log = density.log_likelihood(grid) / temperature + stats.norm(0, 1.5).logpdf(grid[:, 0])
        weight = np.exp(log - log.max())
        weight /= weight.sum()
        mean = weight @ grid[:, 0]
        sd = np.sqrt(weight @ (grid[:, 0] - mean) ** 2)
        n = draws.ess_bulk()[0]
        assert abs(draws.mean()[0] - mean) < 5 * sd / np.sqrt(n)
        assert abs(draws.covariance()[0, 0] / sd**2 - 1) < 5 * np.sqrt(2 / n)


def test_networks_of_sigma_are_not_left_out_of_the_marginal_likelihood():
    """The closed form has one sigma: beside a network of sigma a grid is the oracle."""
    frame = frame_of(30)
    rows = observed(NormalFamily(), "1", "y", frame)
    deep = contributions(frame, 2).flip(-1)  # of sigma
    found = marginalisation_of(rows, 4096, places=[1])
    assert type(found).__name__ == "ImportanceSampling"
    grid = [brute_force(rows, d, 2, nodes=241) for d in deep]
    np.testing.assert_allclose(found.log_marginal(deep), grid, atol=0.02)
    assert np.ptp(grid) > 1  # which the closed form does not see


def test_a_network_of_sigma_is_tempered_by_importance_sampling():
    frame = frame_of(40)
    model = SemiStructuredRegression(
        {"mu": "y ~ x", "sigma": "~ s(u)"}, networks={"s": MLP(1, (3,), 1)}
    ).specification.prepare(frame, {})
    training = Training(epochs=5, validation=None, patience=None)
    space = build_space(SemiStructuredSubspace(2), model, training, 0, False)
    joint = JointPosterior(model, space, seed=0)
    density = joint.tempered_networks(2.0)
    assert type(density.marginalisation).__name__ == "ImportanceSampling"
    z = 2 * np.random.default_rng(0).normal(size=(3, 2))
    assert np.ptp(density.log_likelihood(z)) > 1e-3

"""A normal response beside networks: densities without coefficients against dense algebra."""

import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import multivariate_normal, t

from experiments.ssr_spaces import NaiveSubspace
from subbayes import MLP, Training
from subbayes.inference import Sampling
from subbayes.inference.samplers.chains import Sampler
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.samplers.smc import SMC
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.integrals.collapsed_networks import CollapsedNetworks
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.subspace import build_space
from subbayes.utils.checks import InputError
from tests.fits import with_network

TRAINING = Training(epochs=60, batch_size=None, validation=None, patience=None)
RANDOM = "y ~ x + (1 + x | g)"
ENGINES = ("mclmc", "elliptical-slice", "smc", "nuts", "hmc", "mams", "slice", "parallel-tempering")


def table(n=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=n),
            "v": rng.normal(size=n),
            "u": rng.normal(size=n),
            "g": rng.choice([*"abcdef"], n),
            "w": rng.uniform(0.5, 2, n),
            "o": rng.normal(size=n),
        }
    )
    level = {g: 0.8 * rng.normal() for g in "abcdef"}
    frame["y"] = frame.x + np.sin(frame.v) + frame.g.map(level) + 0.5 * rng.normal(size=n)
    return frame


def joint_of(formula=RANDOM, family="normal", columns=("v", "u"), rank=3, shift=0.0, **options):
    networks = {"net": MLP(len(columns), (4,), 1, "tanh", seed=0)}
    formula = with_network(formula, f"net({', '.join(columns)})")
    model = SemiStructuredRegression(formula, networks=networks, family=family, **options)
    frame = table().assign(y=lambda frame: frame.y + shift * frame.x)
    prepared = model.specification.prepare(frame, None)
    space = build_space(SemiStructuredSubspace(rank), prepared, TRAINING, 0, False)
    return JointPosterior(prepared, space, 0)


@pytest.fixture(scope="module")
def joint():
    return replace(joint_of(), mode="eager")


@pytest.fixture(scope="module")
def small():
    return joint_of("y ~ x + (1 | g)", columns=("v",), rank=2)


@pytest.fixture(scope="module")
def eager(small):
    return replace(small, mode="eager")


def dense(joint, point):
    """The response's mean and covariance given networks and h, of all rows, by brute force."""
    model, rank, collapsed = joint.model, joint.space.rank, joint.collapsed
    structured = model.structured
    linear = collapsed.collapsed.linear
    zeta = torch.zeros(structured.size, dtype=torch.float64)
    zeta[collapsed.collapsed.rest] = torch.from_numpy(point[rank:])
    design, offset = (model.inputs[name].double() for name in ("design", "offset"))
    weights = joint.space.subspace.inner.weights(torch.tensor(point[None, :rank]).to(model.dtype))
    f = joint.contributions(weights)[0]

    def predictors(at):
        return structured(at, design, offset) + f

    base = predictors(zeta)
    columns = []
    for j in linear:  # coefficients are affine in these coordinates
        ahead = zeta.clone()
        ahead[j] = 1.0
        columns.append(predictors(ahead)[:, 0] - base[:, 0])
    own = torch.stack(columns, 1).numpy()
    mean, variance = base[:, 0].numpy(), (2 * base[:, 1]).exp().numpy()
    y = model.data.y
    if not isinstance(y, torch.Tensor):
        variance = variance / y[1].double().numpy()
        y = y[0]
    return y.double().numpy(), mean, own, variance


FORMULAS = {
    "columns": ("y ~ x + C(g)", {}),
    "groups": (RANDOM, {}),
    "uncorrelated": ("y ~ x + (1 + x || g)", {}),
    "smooth": ("y ~ s(x, k=5) + (1 | g)", {}),
    "offset": ("y ~ x + (1 | g)", {"offset": "o"}),
    "own prior": ("y ~ x + (1 | g)", {"priors": {"x": t(3)}}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", FORMULAS)
def test_the_density_is_that_of_a_normal_response_with_the_coefficients_in_its_covariance(case):
    formula, options = FORMULAS[case]
    joint = joint_of(formula, **options)
    collapsed, rng = joint.collapsed, np.random.default_rng(0)
    assert isinstance(collapsed, CollapsedNetworks)
    points = 0.5 * rng.standard_normal((5, collapsed.rank))
    found = collapsed.log_likelihood(points)
    for point, value in zip(points, found, strict=True):
        y, mean, own, variance = dense(joint, point)
        expected = multivariate_normal(mean, np.diag(variance) + own @ own.T).logpdf(y)
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_weights_count_rows():
    joint = replace(joint_of(weights="w"), mode="eager")
    rng = np.random.default_rng(0)
    collapsed = joint.collapsed
    points = 0.5 * rng.standard_normal((3, collapsed.rank))
    y, mean, own, variance = dense(joint, points[0])
    # a weighted density is that of variances s^2 / w, times the factor that weights do not have
    w = joint.model.data.y[1].double().numpy()
    log_sigma = 0.5 * np.log(variance * w)
    factor = (0.5 * (1 - w) * np.log(2 * np.pi) + (1 - w) * log_sigma - 0.5 * np.log(w)).sum()
    expected = multivariate_normal(mean, np.diag(variance) + own @ own.T).logpdf(y) + factor
    assert collapsed.log_likelihood(points)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("formula", [RANDOM, "y ~ s(x, k=5) + (1 | g)"])
def test_the_gradient_is_that_of_the_density(formula):
    joint = joint_of(formula)
    network = joint.model.deep
    collapsed, rng = joint.collapsed, np.random.default_rng(1)
    z = 0.5 * rng.standard_normal((4, collapsed.rank))
    value, gradient = collapsed.value_and_grad(z)
    assert network is not None
    np.testing.assert_allclose(
        value, collapsed.log_likelihood(z) + collapsed.prior.log_prob(z), rtol=1e-9
    )
    step, size = 1e-2, 1 + np.abs(gradient).max()
    for j in range(collapsed.rank):
        move = np.zeros(collapsed.rank)
        move[j] = step
        near, far = (
            collapsed.value_and_grad(z + s * move)[0] - collapsed.value_and_grad(z - s * move)[0]
            for s in (1, 2)
        )
        slope = (8 * near - far) / (
            12 * step
        )  # of fourth order; the network is of single precision
        np.testing.assert_allclose(gradient[:, j], slope, atol=2e-3 * size)


def test_coefficients_have_their_conditional_means_and_covariances(joint):
    collapsed, rank = joint.collapsed, joint.space.rank
    rng = np.random.default_rng(2)
    point = 0.5 * rng.standard_normal(collapsed.rank)
    y, mean, own, variance = dense(joint, point)
    precision = np.eye(own.shape[1]) + (own.T / variance) @ own
    expected = np.linalg.solve(precision, (own.T / variance) @ (y - mean))
    inner, h = collapsed.collapsed, torch.from_numpy(point[None, rank:])
    given = collapsed.rows.shifted(collapsed.contributions(torch.from_numpy(point[None, :rank])))
    given = replace(given, cross=given.cross.detach(), residual=given.residual.detach())
    count = own.shape[1]
    eps = torch.cat([torch.zeros(1, count), torch.eye(count)]).double()
    many = replace(
        given, cross=given.cross.expand(len(eps), -1), residual=given.residual.expand(len(eps))
    )
    found, log_det = inner.coordinates(h.expand(len(eps), -1), eps, many)
    found = found[:, inner.linear].numpy()
    np.testing.assert_allclose(found[0], expected, atol=1e-6)
    root = found[1:] - found[0]
    np.testing.assert_allclose(root.T @ root, np.linalg.inv(precision), atol=1e-8)
    assert float(log_det[0]) == pytest.approx(-0.5 * np.linalg.slogdet(precision)[1], rel=1e-9)


def test_densities_of_all_coordinates_are_products(joint):
    collapsed, rank = joint.collapsed, joint.space.rank
    rng = np.random.default_rng(4)
    z = 0.5 * rng.standard_normal((6, collapsed.rank))
    networks, h = torch.from_numpy(z[:, :rank]), torch.from_numpy(z[:, rank:])
    eps = torch.from_numpy(rng.standard_normal((6, len(collapsed.collapsed.linear))))
    with torch.no_grad():
        given = collapsed.rows.shifted(collapsed.contributions(networks))
        zeta, log_det = collapsed.collapsed.coordinates(h, eps, given)
    conditional = -0.5 * (eps.square() + np.log(2 * np.pi)).sum(1) - log_det
    found = joint.density.value(np.concatenate([networks.numpy(), zeta.numpy()], 1))
    expected = collapsed.value_and_grad(z)[0] + conditional.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_the_draws_are_those_of_all_coordinates(small):
    joint, sampling = small, Sampling(draws=2000, chains=4, seed=3, progress=False)
    found = joint.sample(NUTS(), sampling)
    assert found.meta["integrated_out"] == "coefficients"
    other = NUTS().run(joint.density, replace(sampling, initial=joint.start_points(4)))
    a, b = found.flat(), other.flat()
    sd = b.std(0)
    assert np.abs((a.mean(0) - b.mean(0)) / sd).max() < 0.2
    difference = np.cov((a / sd).T) - np.cov((b / sd).T)
    assert np.abs(difference).max() < 0.25
    np.testing.assert_allclose(
        found.stats["log_likelihood"], joint.density.log_likelihood(a).reshape(4, -1), rtol=1e-4
    )
    np.testing.assert_allclose(
        found.stats["log_density"], joint.density.value(a).reshape(4, -1), rtol=1e-4
    )


@pytest.mark.slow
def test_the_evidence_is_that_of_all_coordinates(small):
    joint, sampling = small, Sampling(draws=400, chains=4, seed=0, progress=False)
    found, other = joint.sample(SMC(), sampling), SMC().run(joint.density, sampling)
    error = np.hypot(found.log_evidence_error, other.log_evidence_error)
    assert abs(found.log_evidence - other.log_evidence) < 4 * error + 0.05


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ENGINES)
def test_every_sampler_runs_and_its_draws_can_be_saved(name, tmp_path):
    frame = table()
    deep = {"net": MLP(1, (3,), 1, "tanh", seed=0)}
    sampling = Sampling(draws=40, chains=2, warmup=5, seed=0, progress=False, mode="eager")
    if name in ("smc", "parallel-tempering"):
        sampling = replace(sampling, warmup=None)
    model = SemiStructuredRegression("y ~ x + (1 | g) + net(v)", networks=deep).fit(
        frame,
        subspace=SemiStructuredSubspace(2),
        inference=name,
        training=TRAINING,
        sampling=sampling,
    )
    assert model.draws.meta["integrated_out"] == "coefficients"
    assert np.isfinite(model.draws.z).all()
    model.save(tmp_path / "model")
    loaded = SemiStructuredRegression.load(tmp_path / "model", {"net": MLP(1, (3,), 1, "tanh")})
    np.testing.assert_array_equal(loaded.draws.z, model.draws.z)
    expected, found = model.predict(frame), loaded.predict(frame)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)


def test_runs_resume_and_are_extended(eager, tmp_path):
    sampling = Sampling(draws=4, chains=2, warmup=2, seed=1, progress=False)
    whole = eager.sample(NUTS(), sampling)
    path = tmp_path / "run.npz"
    eager.sample(NUTS(), replace(sampling, draws=2, checkpoint=path))
    found = eager.sample(NUTS(), replace(sampling, checkpoint=path))
    np.testing.assert_array_equal(found.z, whole.z)
    np.testing.assert_array_equal(eager.sample(NUTS(), sampling).z, whole.z)


def test_draws_of_a_chain_do_not_depend_on_the_number_of_chains(eager):
    start = eager.start_points(2)
    sampling = Sampling(draws=10, chains=2, warmup=5, seed=1, progress=False, initial=start)
    two = eager.sample(EllipticalSlice(), sampling)
    more = replace(sampling, chains=4, initial=np.concatenate([start, start]))
    four = eager.sample(EllipticalSlice(), more)
    np.testing.assert_allclose(four.z[:2], two.z, rtol=1e-6, atol=1e-6)


def test_start_points_are_those_of_all_coordinates(eager):
    initial = eager.start_points(2)
    seen = []

    class Watched(NUTS):
        def run(self, posterior, sampling):
            seen.append(sampling.initial)
            return super().run(posterior, sampling)

    sampling = Sampling(draws=1, chains=2, warmup=1, seed=1, progress=False, initial=initial)
    eager.sample(Watched(), sampling)
    np.testing.assert_array_equal(seen[0], initial[:, eager.collapsed.kept])


def test_it_can_be_pickled(joint):
    z = np.zeros((2, joint.collapsed.rank))
    again = pickle.loads(pickle.dumps(replace(joint)))
    np.testing.assert_array_equal(
        again.collapsed.log_likelihood(z), joint.collapsed.log_likelihood(z)
    )
    assert again.collapsed.fingerprint() == joint.collapsed.fingerprint()


def test_points_of_no_density_have_none(joint):
    z = np.zeros((2, joint.collapsed.rank))
    z[1] = np.nan
    value = joint.collapsed.log_likelihood(z)
    assert np.isfinite(value[0])
    assert value[1] == -np.inf


def test_no_digits_are_lost_where_the_data_are_far_from_the_prior():
    joint = joint_of("y ~ x + (1 | g)", priors={"x": 1e7}, shift=1e6)
    collapsed = joint.collapsed
    h, networks = torch.zeros(3, collapsed.rank - 3).double(), torch.zeros(3, 3).double()
    h[:, -1] = torch.tensor([-8.0, -4.0, 0.0])  # of sigma
    with torch.no_grad():
        given = collapsed.rows.shifted(collapsed.contributions(networks))
        inner = collapsed.collapsed
        found = inner.log_marginal(h, given)
        zeta, log_det = inner.coordinates(h, h.new_zeros(3, len(inner.linear)), given)
        mean = zeta[:, inner.linear]
        at_the_mean = given.value(inner.map.coefficients(zeta)) - 0.5 * mean.square().sum(1)
    expected = at_the_mean + log_det
    assert 1e-2 < float((given.residual[0] / 60).sqrt() / 1e6) < 10
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-7)


@pytest.mark.parametrize("shape", [(2, 3), (2, 40)])
def test_start_points_of_another_shape_are_refused(joint, shape):
    sampling = Sampling(draws=4, chains=2, initial=np.zeros(shape), progress=False)
    with pytest.raises(InputError, match=r"initial: expected shape \(chains, \d+\), got"):
        joint.sample(NUTS(), sampling)


def test_start_points_may_be_lists_and_are_ignored_by_samplers_without_any(eager):
    start = eager.start_points(2)
    sampling = Sampling(draws=2, chains=2, warmup=2, initial=start.tolist(), progress=False)
    found = eager.sample(NUTS(), sampling)
    same = eager.sample(NUTS(), replace(sampling, initial=start))
    np.testing.assert_array_equal(found.z, same.z)
    ignored = replace(sampling, warmup=None, initial=np.zeros((2, 3)), draws=20)
    draws = eager.sample(SMC(max_moves=1, gradients=False), ignored)
    assert draws.z.shape == (2, 20, start.shape[1])


@pytest.mark.slow
def test_many_points_are_evaluated_in_parts(joint):
    collapsed = joint.collapsed
    z = 0.5 * np.random.default_rng(0).standard_normal((150, collapsed.rank))
    value, gradient = collapsed.value_and_grad(z)
    np.testing.assert_allclose(collapsed.value(z), value, rtol=1e-6)
    few = collapsed.value_and_grad(z[140:144])
    np.testing.assert_allclose(value[140:144], few[0], rtol=1e-5)
    np.testing.assert_allclose(gradient[140:144], few[1], rtol=1e-3, atol=1e-3)


# --- where all coordinates are sampled ----------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("formula", "options"),
    [
        ("y ~ x", {"family": "student-t"}),
        ({"mu": "y ~ x", "sigma": "~ x"}, {}),
        ("y ~ s(x, k=25) + s(u, k=25)", {}),
    ],
)
def test_other_responses_keep_their_coefficients(formula, options):
    assert joint_of(formula, **options).collapsed is None


def test_networks_of_sigma_keep_the_coefficients():
    networks = {"net": MLP(1, (3,), 1, "tanh", seed=0)}
    model = SemiStructuredRegression({"mu": "y ~ x", "sigma": "~ net(v)"}, networks=networks)
    prepared = model.specification.prepare(table(), None)
    space = build_space(SemiStructuredSubspace(2), prepared, TRAINING, 0, False)
    assert JointPosterior(prepared, space, 0).collapsed is None


def test_projected_effects_keep_their_coefficients():
    deep = {"net": MLP(1, (3,), 1, "tanh", seed=0)}
    prepared = SemiStructuredRegression("y ~ x + net(v)", networks=deep).specification.prepare(
        table(), None
    )
    space = build_space(NaiveSubspace(), prepared, TRAINING, 0, False)
    assert JointPosterior(prepared, space, 0).collapsed is None


def test_engines_that_need_a_posterior_get_it(eager):
    sampling = Sampling(draws=8, chains=2, warmup=4, seed=0, progress=False, mode="eager")
    seen = []

    def own(posterior, sampling):
        seen.append(posterior)
        return EllipticalSlice().run(posterior, sampling)

    from subbayes.inference.engine import engine_of

    eager.sample(engine_of(own), sampling)
    assert seen == [eager.density]
    assert not Sampler.any_density  # a sampler of a user's own may need a posterior
    assert MCLMC.any_density
    assert not engine_of("laplace").any_density
    assert not engine_of("vi").any_density

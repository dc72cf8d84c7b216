"""Closed forms of class probabilities, and the likelihoods that have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import subbayes
from experiments.subspace_errors import compare_subspaces
from subbayes import InputError, Predictive
from subbayes.diagnostics.metrics import score
from subbayes.inference import linearised_laplace
from subbayes.inference.laplace.linearised import _warn_if_underconfident
from subbayes.likelihoods import Bernoulli, Categorical, CategoricalTokens, Gaussian, Poisson
from subbayes.likelihoods.families import OrdinalFamily
from subbayes.likelihoods.weighted import Weighted
from subbayes.predictions.gaussian import (
    METHODS,
    ClassPredictive,
    default_method,
    has_logits,
    predictive_of,
)

ROW = torch.tensor([[0.5, -1.0, 1.0]], dtype=torch.float64)
OTHERS = {
    "probit": (Bernoulli(links=("probit",)), ROW[:, 1:2]),
    "cloglog": (Bernoulli(links=("cloglog",)), ROW[:, 1:2]),
    "cauchit": (Bernoulli(links=("cauchit",)), ROW[:, 1:2]),
    "ordinal": (OrdinalFamily(n_classes=3), ROW),
    "weighted": (Weighted(OrdinalFamily(n_classes=3)), ROW),
}


@dataclass(frozen=True)
class SoftmaxOfHalf(Categorical):
    """Its outputs are twice the logits."""

    def mean(self, outputs):
        return super().mean(outputs / 2)


def linear_ordinal(n: int = 400) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator).double()
    latent = x[:, 0] + 0.5 * torch.randn(n, generator=generator)
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 3).double()
    with torch.no_grad():
        module.bias.copy_(torch.tensor([0.0, 0.5, 2.5]))
    return module, x, (latent > 0).long() + (latent > 1).long()


@pytest.mark.parametrize(
    ("likelihood", "outputs", "expected"),
    [
        (Categorical(3), 3, True),
        (Categorical(labels=("a", "b", "c")), 3, True),
        (Bernoulli(), 1, True),
        (Weighted(Categorical(3)), 3, True),
        (Weighted(Bernoulli()), 1, True),
        (SoftmaxOfHalf(3), 3, False),
        (OrdinalFamily(n_classes=2), 2, False),
        (CategoricalTokens(3), 6, False),
        (Poisson(), 1, False),
        *((likelihood, rows.shape[1], False) for likelihood, rows in OTHERS.values()),
    ],
)
def test_closed_forms_are_of_softmax_and_sigmoid(likelihood, outputs, expected):
    assert has_logits(likelihood, outputs) is expected
    method = default_method(likelihood, torch.zeros(1, outputs).double())
    assert method == ("extended-probit" if expected else "monte-carlo")


@pytest.mark.parametrize("name", OTHERS)
def test_without_variance_probabilities_are_those_of_the_likelihood(name):
    likelihood, mean = OTHERS[name]
    covariance = 1e-12 * torch.eye(mean.shape[1], dtype=torch.float64)[None]
    method = default_method(likelihood, mean)
    found = predictive_of(mean, covariance, likelihood, method, 50, 0)
    np.testing.assert_allclose(found.probabilities, likelihood.classes(mean), atol=1e-5)


def test_a_probit_link_is_averaged_as_the_integral():
    """The mean of Phi(f) is Phi(m / sqrt(1 + v))."""
    mean = torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64)
    variance, draws = torch.tensor([0.5, 2.0, 1.0]).double()[:, None, None], 20_000
    likelihood = Bernoulli(links=("probit",))
    method = default_method(likelihood, mean)
    found = predictive_of(mean, variance, likelihood, method, draws, 0).probabilities[:, 1]
    exact = torch.special.ndtr(mean[:, 0] / (1 + variance[:, 0, 0]).sqrt()).numpy()
    assert np.abs(found - exact).max() < 4 * 0.5 / draws**0.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OTHERS)
def test_closed_forms_of_other_likelihoods_are_refused(name, method):
    likelihood, mean = OTHERS[name]
    covariance = torch.eye(mean.shape[1], dtype=torch.float64)[None]
    with pytest.raises(InputError, match=f"method: expected .*'monte-carlo' for .*{method}"):
        predictive_of(mean, covariance, likelihood, method, 10, 0)


def test_moments_of_two_classes_are_those_of_class_one():
    mean = torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 1.0]).double()[:, None, None]
    found = ClassPredictive(mean, variance, Bernoulli())
    p = found.probabilities[:, 1]
    np.testing.assert_allclose(found.mean, p)
    epistemic = Predictive(found.outputs, Bernoulli()).epistemic
    np.testing.assert_allclose(found.epistemic, epistemic)
    np.testing.assert_allclose(found.aleatoric, p * (1 - p) - epistemic)
    np.testing.assert_allclose(found.variance, p * (1 - p))


def test_ordered_classes_of_a_linear_network_are_those_of_its_weights():
    """Draws of the weights pass through the network, whose linearisation is exact."""
    module, x, y = linear_ordinal()
    family, draws = OrdinalFamily(n_classes=3), 4000
    posterior = linearised_laplace(subbayes.Network(module), family, (x, y))
    found, expected = (
        posterior.predict(x[:20], method=method, n_draws=draws, seed=seed).probabilities
        for seed, method in enumerate(("auto", "network"))
    )
    assert np.abs(found - expected).max() < 4 * 0.5 * (2 / draws) ** 0.5


def test_subspaces_for_ordered_classes_are_scored_by_draws():
    module, x, y = linear_ordinal(40)
    family = OrdinalFamily(n_classes=3)
    posterior = linearised_laplace(subbayes.Network(module), family, (x, y))
    space = subbayes.subspace.RandomSubspace(posterior.network.weights, 2)
    (found,) = compare_subspaces(posterior, {"random": space}, x[:9], targets=y[:9])
    draws = posterior.predict(x[:9], method="monte-carlo", n_draws=200)
    assert found.full_nll == pytest.approx(-draws.log_prob(y[:9]).mean(), rel=0.02)


def test_underconfident_probabilities_of_another_link_are_those_of_the_link():
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).double()
    module, family = torch.nn.Linear(20, 1).double(), Bernoulli(links=("probit",))
    with torch.no_grad():
        module.weight.fill_(3.0)
        module.bias.zero_()
    y = (x.sum(1) > 0).long()
    network = subbayes.Network(module)
    posterior = linearised_laplace(network, family, (x, y), prior_precision=1e-3)
    with pytest.warns(UserWarning, match="underconfident") as caught:
        _warn_if_underconfident(posterior)
    (text,) = (str(w.message) for w in caught)
    assert "laplace-bridge" not in text
    X = posterior.precision.jacobian(x)
    mean, variance = X.outputs()[:, 0], posterior.precision.blocks(X)[:, 0, 0]
    sign = 2 * y - 1
    for part in (variance, torch.zeros_like(variance)):
        exact = float(torch.special.ndtr(sign * mean / (1 + part).sqrt()).mean())
        number = float(text.split("mean probability of " if part is variance else ", and ")[1][:4])
        assert number == pytest.approx(exact, abs=0.005 + 4 * 0.5 / (30 * 200) ** 0.5)


def test_quantiles_of_a_weighted_likelihood_are_those_without_weights():
    outputs = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0)).double()
    family = subbayes.likelihoods.families.GammaFamily()
    found = Predictive(outputs, Weighted(family)).quantile(0.2)
    np.testing.assert_allclose(found, Predictive(outputs, family).quantile(0.2), rtol=1e-12)


@pytest.mark.parametrize("method", ["gaussian", "extended-probit", "laplace-bridge"])
def test_joined_parts_score_as_all_rows(method):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(9, 3, generator=generator).double()
    half = torch.randn(9, 3, 3, generator=generator).double()
    covariance = half @ half.mT
    y = torch.arange(9) % 3
    likelihood = Categorical()
    if method == "gaussian":
        likelihood, y = Gaussian(0.5), mean + 0.3
    parts = [
        predictive_of(mean[some], covariance[some], likelihood, method, 50, 0)
        for some in (slice(0, 4), slice(4, 9))
    ]
    whole = predictive_of(mean, covariance, likelihood, method, 50, 0)
    joined = type(parts[0]).joined(parts, likelihood)
    assert type(joined) is type(whole)
    assert score(joined, y) == score(whole, y)


# --- masked classes -------------------------------------------------------------------------------


class Masked(torch.nn.Module):
    """A linear network of four classes, of which the first input forbids one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 4).double()

    def forward(self, x):
        forbidden = torch.arange(4) == (x[:, :1] > 0)
        return self.layer(x).masked_fill(forbidden, -math.inf)


@pytest.mark.parametrize("method", METHODS)
def test_probabilities_of_masked_classes(method):
    """A forbidden class has probability 0, and the others have those of a model without it."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(5, 4, generator=generator).double()
    half = torch.randn(5, 4, 4, generator=generator).double()
    covariance = half @ half.mT
    others = [0, 1, 3]
    expected = predictive_of(
        mean[:, others], covariance[:, others][:, :, others], Categorical(3), method, 1, 0
    )
    mean[:, 2] = -math.inf
    found = predictive_of(mean, covariance, Categorical(4), method, 2000, 0)
    np.testing.assert_allclose(found.probabilities[:, others], expected.probabilities, rtol=1e-12)
    assert (found.probabilities[:, 2] == 0).all()
    assert (found.log_prob(torch.full((5,), 2)) == -math.inf).all()
    assert not (found.sample(100) == 2).any()
    y = expected.labels
    np.testing.assert_allclose(found.log_prob(np.array(others)[y]), expected.log_prob(y))
    np.testing.assert_array_equal(found.labels, np.array(others)[y])


@pytest.mark.parametrize("method", [*METHODS, "monte-carlo"])
def test_a_masked_logit_of_one_output_leaves_the_other_class(method):
    mean = torch.tensor([[-math.inf], [0.0]]).double()
    found = predictive_of(mean, torch.ones(2, 1, 1).double(), Bernoulli(), method, 4000, 0)
    np.testing.assert_allclose(found.probabilities, [[1, 0], [0.5, 0.5]], atol=0.02)
    np.testing.assert_allclose(found.log_prob(torch.tensor([0, 1])), [0, -math.log(2)], atol=0.04)
    assert found.log_prob(torch.tensor([1, 1]))[0] == -math.inf


def test_one_allowed_class_is_certain():
    mean = torch.tensor([[-math.inf, 0.3, -math.inf]]).double()
    for method in METHODS:
        found = predictive_of(mean, torch.eye(3).double()[None], Categorical(3), method, 5, 0)
        assert found.probabilities.tolist() == [[0.0, 1.0, 0.0]]
    with pytest.raises(InputError, match="an allowed class in each row"):
        predictive_of(mean - math.inf, torch.eye(3).double()[None], Categorical(3), "probit", 5, 0)


@pytest.mark.filterwarnings("ignore:auroc")
def test_linearised_laplace_of_a_network_that_masks_classes():
    """In all of its predictions, decisions and scores."""
    torch.manual_seed(0)
    module, x = Masked(), torch.randn(30, 2).double()
    forbidden, y = (x[:, 0] > 0).long(), 2 + torch.arange(30) % 2
    posterior = linearised_laplace(subbayes.Network(module), Categorical(4), (x, y))
    model = subbayes.fit(
        module,
        (x, y),
        likelihood="categorical",
        subspace="full",
        inference="laplace-linearised",
        training=subbayes.Training(epochs=0, swa_epochs=0),
        sampling=subbayes.Sampling(draws=10, chains=2, progress=False),
    )
    predictions = [posterior.predict(x, method=m) for m in ("auto", *METHODS, "monte-carlo")]
    for found in (*predictions, model.predict(x)):
        p = found.probabilities
        np.testing.assert_allclose(p.sum(1), 1)
        assert (p[np.arange(30), forbidden] == 0).all()
        assert not (found.decide(0.3) == forbidden.numpy()).any()
        scores = score(found, y)
        del scores["auroc"]  # which is not defined without rows of other classes
        assert np.isfinite(list(scores.values())).all()
        assert scores["log_likelihood"] == pytest.approx(np.log(p[np.arange(30), y]).mean())


def test_decisions_have_the_least_expected_cost_of_all():
    rng = np.random.default_rng(0)
    outputs = torch.from_numpy(rng.normal(size=(5, 40, 3)))
    found = Predictive(outputs, Categorical(3))
    costs = rng.uniform(size=(3, 4))
    p = found.probabilities
    expected = [[sum(p[i, k] * costs[k, a] for k in range(3)) for a in range(4)] for i in range(40)]
    best = np.argmin(expected, 1)
    np.testing.assert_array_equal(found.decide(costs=costs), best)
    limit = np.median(np.min(expected, 1))
    abstained = np.where(np.min(expected, 1) > limit, -1, best)
    assert 0 < (abstained == -1).sum() < 40
    np.testing.assert_array_equal(found.decide(costs=costs, abstain=limit), abstained)
    # Chow's rule
    np.testing.assert_array_equal(found.decide(abstain=0.5), found.decide(0.5))
    for bad in (np.ones((2, 3)), np.ones(3), np.full((3, 3), np.nan)):
        with pytest.raises(InputError, match="costs"):
            found.decide(costs=bad)

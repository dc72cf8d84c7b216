"""Detection of rows unlike the training data: closed forms, scikit-learn and naive versions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

import subbayes
from subbayes.baselines.map import point_estimate
from subbayes.diagnostics import detection_scores, out_of_distribution, uncertainties
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from subbayes.predictions.gaussian import ClassPredictive, GaussianPredictive
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import InputError


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


# --- scores per row -------------------------------------------------------------------------


def test_scores_of_classes_in_closed_form():
    """Two draws with probabilities p and q of the second class."""
    p, q = torch.tensor([[0.5, 0.9, 0.9], [0.5, 0.9, 0.1]], dtype=torch.float64)
    logits = torch.stack([p.logit(), q.logit()])[..., None]
    found = uncertainties(Predictive(logits, Bernoulli()))

    def entropy(share):
        return -(share * share.log() + (1 - share) * (1 - share).log()).numpy()

    mean = (p + q) / 2
    np.testing.assert_allclose(found["entropy"], entropy(mean))
    expected = entropy(mean) - (entropy(p) + entropy(q)) / 2
    np.testing.assert_allclose(found["mutual_information"], expected, atol=1e-12)
    np.testing.assert_allclose(found["max_probability"], [0.5, 0.1, 0.5])


@pytest.mark.parametrize("k", [1, 4])
def test_scores_of_classes_by_loops(k):
    predictive = Predictive(2 * randn(6, 9, k), Bernoulli() if k == 1 else Categorical())
    found = uncertainties(predictive)
    for n in range(9):
        each = []
        for s in range(6):
            f = predictive.outputs[s, n]
            each.append((torch.stack([0 * f[0], f[0]]) if k == 1 else f).softmax(0))
        mean = sum(each) / 6
        total = -sum(float(v * v.log()) for v in mean)
        inner = -sum(float(v * v.log()) for one in each for v in one) / 6
        assert found["entropy"][n] == pytest.approx(total)
        assert found["mutual_information"][n] == pytest.approx(total - inner, abs=1e-12)
        assert found["max_probability"][n] == pytest.approx(1 - float(mean.max()))


def test_scores_of_numbers_are_variances():
    outputs = randn(7, 5, 1)
    found = uncertainties(Predictive(outputs, Gaussian(0.3)))
    spread = outputs[..., 0].var(0, correction=0)
    np.testing.assert_allclose(found["epistemic"], spread)
    np.testing.assert_allclose(found["variance"], spread + 0.3**2)
    several = randn(7, 5, 3)
    found = uncertainties(Predictive(several, Gaussian((0.1, 0.2, 0.3))))
    np.testing.assert_allclose(found["epistemic"], several.var(0, correction=0).sum(-1))
    assert found["variance"].shape == (5,)
    rates = randn(7, 5, 1)
    counts = uncertainties(Predictive(rates, Poisson()))
    np.testing.assert_allclose(counts["epistemic"], rates.exp()[..., 0].var(0, correction=0))
    noisy = uncertainties(Predictive(randn(7, 5, 2), HeteroscedasticGaussian(0.1)))
    assert (noisy["variance"] > noisy["epistemic"]).all()


def test_scores_of_gaussians_are_those_of_their_variances():
    variances = torch.tensor([1.0, 3.0]).double()
    found = uncertainties(
        GaussianPredictive(torch.zeros(2, 1), variances[:, None, None], Gaussian(2.0))
    )
    np.testing.assert_allclose(found["epistemic"], variances)
    np.testing.assert_allclose(found["variance"], variances + 4)


def test_mutual_information_of_gaussian_logits_is_that_of_their_draws():
    """The probit entropy of the mean is not mixed with the entropies of draws."""
    mean, scales = randn(8, 3), torch.linspace(0.01, 4, 8).double()
    covariance = scales[:, None, None] * torch.eye(3).double()
    closed = ClassPredictive(mean, covariance, Categorical(), n_draws=400, seed=3)
    expected = Predictive(closed.outputs, Categorical()).mutual_information
    np.testing.assert_allclose(uncertainties(closed)["mutual_information"], expected)
    assert (expected > 0).all()


# --- detection ------------------------------------------------------------------------------


@given(
    inside=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    outside=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    recall=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
)
def test_detection_agrees_with_scikit_learn(inside, outside, recall):
    """With many ties."""
    found = detection_scores(np.array(inside, float), np.array(outside, float), recall)
    labels = [0] * len(inside) + [1] * len(outside)
    values = inside + outside
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, values))
    assert found["average_precision"] == pytest.approx(average_precision_score(labels, values))
    false_positives, recalls, _ = roc_curve(labels, values, drop_intermediate=False)
    expected = false_positives[recalls >= recall - 1e-12].min()
    assert found["false_positive_rate"] == pytest.approx(expected)


def test_detection_in_closed_form():
    """Two unit Gaussians d apart: the area is Phi(d / sqrt 2)."""
    n, d = 20_000, 1.5
    rng = np.random.default_rng(0)
    found = detection_scores(rng.standard_normal(n), d + rng.standard_normal(n))

    def normal(x):
        return 0.5 * (1 + math.erf(x / 2**0.5))

    assert found["auroc"] == pytest.approx(normal(d / 2**0.5), abs=0.01)
    # 95 % of the outside are above d - 1.645
    assert found["false_positive_rate"] == pytest.approx(1 - normal(d - 1.6449), abs=0.015)
    perfect = detection_scores(np.arange(5.0), np.arange(5.0, 9.0))
    assert perfect == {"auroc": 1.0, "average_precision": 1.0, "false_positive_rate": 0.0}
    chance = detection_scores(np.zeros(30), np.zeros(10))
    assert chance == {"auroc": 0.5, "average_precision": 0.25, "false_positive_rate": 1.0}


def test_bad_scores_are_refused():
    good = np.arange(3.0)
    for call, message in (
        (lambda: detection_scores(good[:0], good), "inside: expected scores of at least one row"),
        (lambda: detection_scores(good, np.array([0.0, np.nan])), "outside: expected finite"),
        (lambda: detection_scores(good, good, 0.0), "recall: expected a share above 0 and at"),
        (
            lambda: out_of_distribution(
                Predictive(randn(2, 3, 1), Gaussian(1.0)), Predictive(randn(2, 3, 1), Bernoulli())
            ),
            r"outside: expected predictions of the same model, Gaussian\(noise=1.0\), got bernoull",
        ),
    ):
        with pytest.raises(InputError, match="^" + message):
            call()


# --- models ---------------------------------------------------------------------------------


def test_a_posterior_detects_what_a_point_estimate_cannot():
    """Far out a linear regression has variance x' C x; a point estimate has none."""
    x, far = randn(60, 2), 5 + randn(40, 2, seed=1)
    y = x @ torch.tensor([1.0, -1.0]).double() + 0.1 * randn(60, seed=2)
    module = torch.nn.Linear(2, 1).double()
    model = linearised_laplace(subbayes.Network(module), Gaussian(0.1), (x, y))
    inside, outside = (
        uncertainties(model.predict(rows))["epistemic"] for rows in (randn(50, 2, seed=3), far)
    )
    scores = out_of_distribution(model.predict(randn(50, 2, seed=3)), model.predict(far))
    expected = roc_auc_score([0] * 50 + [1] * 40, np.concatenate([inside, outside]))
    assert scores["epistemic"]["auroc"] == pytest.approx(expected)
    assert expected > 0.99
    point = point_estimate(module, "gaussian", (x, y))
    assert point.out_of_distribution(x, far)["epistemic"]["auroc"] == 0.5
    assert point.out_of_distribution(x, far).keys() == scores.keys()

"""Likelihoods of the user: results of their methods that are refused, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, Network, Posterior, Sampling, Training, fit
from subbayes.baselines import deep_ensemble
from subbayes.comparison.comparison import compare_methods
from subbayes.likelihoods import Gaussian, Likelihood, Standardized, Weighted
from subbayes.likelihoods.validation import check_log_prob
from subbayes.sparse import convert, elbo
from subbayes.subspace import FullSubspace
from subbayes.training.trainer import train
from subbayes.utils.seeding import fork_rng

pytestmark = pytest.mark.usefixtures("unchecked")  # results of wrong shapes


class Own(Likelihood):
    """Gaussian noise of scale 1, as a user writes it; a test replaces a method."""

    kind = "regression"

    def log_prob(self, outputs, y):
        return -0.5 * (y - outputs[..., 0]).square()

    def mean(self, outputs):
        return outputs

    def variance(self, outputs):
        return torch.ones_like(outputs)

    def sample(self, outputs, generator):
        return outputs + torch.randn(outputs.shape, generator=generator)

    def n_outputs(self, y):
        return 1

    def check_targets(self, y):
        pass


class Column(Own):
    """One log density in a column, which is broadcast."""

    def log_prob(self, outputs, y):
        return super().log_prob(outputs, y).unsqueeze(-1)


class Total(Own):
    def log_prob(self, outputs, y):
        return super().log_prob(outputs, y).sum()


class Labels(Own):
    """Two classes."""

    kind = "classification"

    def log_prob(self, outputs, y):
        return outputs.log_softmax(-1).take_along_dim(y.expand(outputs.shape[:-1])[..., None], -1)[
            ..., 0
        ]

    def mean(self, outputs):
        return outputs.softmax(-1)

    def sample(self, outputs, generator):
        return torch.zeros(outputs.shape[:-1], dtype=torch.long)

    def n_outputs(self, y):
        return 2


X = torch.linspace(-2, 2, 24).reshape(12, 2)
Y = X[:, 0].sin()
F = torch.linspace(-1, 1, 2)[:, None]
FEW = Training(epochs=1)


def module(outputs=1):
    with fork_rng(0):
        return nn.Linear(2, outputs)


@pytest.mark.parametrize("rows", [1, 12])
def test_likelihoods_that_are_accepted(rows):
    f, y, weights = torch.zeros(rows, 1), Y[:rows], torch.ones(rows)
    for likelihood, targets in (
        (Own(), y),
        (Standardized(Own(), (0.0,), (2.0,)), y),
        (Weighted(Own()), (y, weights)),
    ):
        check_log_prob(likelihood, f, targets)
    check_log_prob(Labels(), torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.long))


@pytest.mark.parametrize(
    "use",
    [
        lambda own: fit(module(), (X, Y), likelihood=own, training=FEW),
        lambda own: Posterior(Network(module()), own, (X, Y), FullSubspace(torch.zeros(3))),
        lambda own: compare_methods(module(), own, (X, Y), (X, Y), training=FEW),
        lambda own: deep_ensemble(module(), own, (X, Y), FEW, members=2),
        lambda own: train(module(), own, (X, Y), FEW),
    ],
    ids=["fit", "Posterior", "compare", "ensemble", "train"],
)
@pytest.mark.parametrize("own", [Column(), Total()], ids=["column", "total"])
def test_log_densities_that_are_broadcast_are_refused_everywhere(use, own):
    said = r"^likelihood: expected log_prob to return one log density per row"
    with pytest.raises(InputError, match=said):
        use(own)


def test_weights_do_not_hide_the_shape():
    with pytest.raises(InputError, match=r"log_prob to return one log density per row"):
        check_log_prob(Weighted(Total()), F, (Y[:2], torch.ones(2)))
    with pytest.raises(InputError, match=r"log_prob to return one log density per row"):
        check_log_prob(Standardized(Column(), (0.0,), (1.0,)), F, Y[:2])


def test_the_evidence_lower_bound_is_that_of_rows():
    sparse = convert(module())
    with pytest.raises(InputError, match="log_prob to return one log density per row"):
        elbo(sparse, Column(), X, Y, n=12)
    assert elbo(sparse, Own(), X, Y, n=12).ndim == 0


def own(name, method, base=Own):
    return type("Own", (base,), {name: method})()


def normal(f, y):
    return Own().log_prob(f, y)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda s, f, y: normal(f - f.mean(), y), "of each row and draw on its own"),
        (lambda s, f, y: normal(f, y - y.mean()), "of each row and draw on its own"),
    ],
)
def test_densities_that_depend_on_other_rows_are_refused(method, said):
    with pytest.raises(InputError, match=f"^likelihood: expected log_prob to.*{said}"):
        check_log_prob(own("log_prob", method), F, Y[:2])


class Learned(Own):
    """A scale that training learns."""

    def __init__(self, scale=None):
        self.scale = scale

    @property
    def is_complete(self):
        return self.scale is not None

    def init_parameters(self, y):
        return torch.zeros(1)

    def with_parameters(self, values):
        return type(self)(values[0].exp())

    def detach(self):
        return type(self)(float(self.scale))

    def log_prob(self, outputs, y):
        return -0.5 * ((y - outputs[..., 0]) / self.scale).square() - torch.log(
            torch.as_tensor(self.scale)
        )


class LearnedColumn(Learned):
    def log_prob(self, outputs, y):
        return super().log_prob(outputs, y).unsqueeze(-1)


def test_parameters_that_training_learns():
    check_log_prob(Learned(), F, Y[:2])
    with pytest.raises(InputError, match="log_prob to return one log density"):
        train(module(), LearnedColumn(), (X, Y), FEW)


@pytest.mark.parametrize("likelihood", [Own(), Labels()])
def test_a_user_s_likelihood_is_fitted_as_before(likelihood):
    y = Y if likelihood.kind == "regression" else (Y > 0).long()
    sampling = Sampling(draws=10, warmup=5, chains=2)
    outputs = 1 if likelihood.kind == "regression" else 2
    model = fit(
        module(outputs),
        (X, y),
        likelihood=likelihood,
        training=FEW,
        sampling=sampling,
        subspace="full",
    )
    assert np.isfinite(model.predict(X).mean).all()


def test_the_posterior_of_a_user_s_likelihood_is_that_of_the_package():
    space, z = FullSubspace(torch.zeros(3)), np.random.default_rng(0).normal(size=(4, 3))
    values = [
        Posterior(Network(module()), likelihood, (X, Y), space).value(z)
        for likelihood in (Own(), Gaussian(1.0))
    ]
    constant = 12 * 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(values[0] - constant, values[1], rtol=1e-5)

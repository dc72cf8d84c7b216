"""Likelihoods of the user within those of the package: saved without code, loaded with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from subbayes import InputError, Sampling, Training, fit, load
from subbayes.artifacts.facts import decode, encode
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.data.data import Data
from subbayes.likelihoods import (
    CommonParameters,
    Gaussian,
    Standardized,
    Weighted,
    from_config,
    saved_likelihood,
)
from subbayes.likelihoods.families import Custom, MixtureFamily, NormalFamily, Poisson
from subbayes.networks.network import Network
from subbayes.regression import Regression
from subbayes.subspaces.random import Random

SHORT = dict(
    subspace=Random(rank=2),
    training=Training(epochs=2, swa_epochs=1),
    sampling=Sampling(draws=10, chains=2, progress=False),
)


def laplace(scale="b", link="log"):
    return Custom(
        log_prob=lambda y, mu, **rest: -(y - mu).abs() / rest[scale] - torch.log(2 * rest[scale]),
        parameters=("mu", scale),
        links=("identity", link),
        variance_of=lambda mu, **rest: 2 * rest[scale] ** 2,
    )


@dataclass(frozen=True)
class Scaled(Gaussian):
    """A likelihood of the user that its name and noise describe."""


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    return x, 5 + 3 * x[:, 0] + torch.randn(40, generator=generator)


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Linear(2, outputs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_networks_of_a_custom_family_are_saved_and_loaded(tmp_path, rows, outputs, weighted):
    family, data = laplace(), Data.of(rows)
    data = data.weighted(torch.ones(40)) if weighted else data
    model = fit(network(outputs), data, likelihood=family, **SHORT)
    path = model.save(tmp_path / "model")
    for given in (family, model.likelihood):
        found = load(path, network(outputs), likelihood=given)
        assert repr(found.likelihood) == repr(model.likelihood)
        assert np.array_equal(found.predict(rows[0]).mean, model.predict(rows[0]).mean)
    with pytest.raises(InputError, match=r"^likelihood: .*got 'custom'.*load\(path, likeli") as no:
        load(path, network(outputs))
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("own", [Scaled(0.5), laplace(), CommonParameters(laplace(), (0.3,))])
def test_standardized_likelihoods_of_the_user_are_saved_and_loaded(tmp_path, rows, own):
    outputs = 2 if isinstance(own, Custom) else 1
    net = Network(network(outputs))
    likelihood = Standardized.of(own, rows[1])
    samples = WeightSamples(net, net.weights[None], likelihood, "one")
    path = samples.save(tmp_path / "model")
    inner = own.likelihood if isinstance(own, CommonParameters) else own
    for given in (inner, likelihood):
        found = load(path, network(outputs), likelihood=given)
        assert repr(found.likelihood) == repr(likelihood)
        assert np.array_equal(found.predict(rows[0]).mean, samples.predict(rows[0]).mean)
    with pytest.raises(InputError, match=r"^likelihood: expected .*load\(path, likelihood"):
        load(path, network(outputs))


def test_members_with_their_own_parameters_are_loaded_around_a_custom_family(tmp_path, rows):
    net = Network(network())
    each = [CommonParameters(laplace(), (value,)) for value in (0.1, 0.4)]
    samples = WeightSamples(net, net.weights.expand(2, -1), stack_likelihoods(each), "two")
    path = samples.save(tmp_path / "model")
    for given in (laplace(), samples.likelihood):
        found = load(path, network(), likelihood=given).predict(rows[0])
        assert np.array_equal(found.variance, samples.predict(rows[0]).variance)


def _saved(likelihood):
    return dict(decode(encode(likelihood.to_config())))


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        (CommonParameters(laplace(), (0.3,)), laplace("c"), "saved .*'b'.* got .*c: log"),
        (CommonParameters(laplace(), (0.3,)), laplace(link="logm1"), "saved .*'log'.*b: logm1"),
        (CommonParameters(laplace(), (0.3,)), Gaussian(1.0), "saved .*'custom'.*Gaussian"),
        (CommonParameters(laplace(), (0.3,)), CommonParameters(laplace(), (0.4,)), r"\(0.3,\)"),
        (CommonParameters(laplace(), (0.3,)), CommonParameters(laplace()), "Pass custom.*holds"),
        (Standardized(Scaled(0.5), (1.0,), (2.0,)), Scaled(0.6), "saved .*0.5.*got Scaled.*0.6"),
        (
            Standardized(Scaled(0.5), (1.0,), (2.0,)),
            Gaussian(0.5),
            "saved .*'Scaled'.*got Gaussian",
        ),
        (
            Standardized(Scaled(0.5), (1.0,), (2.0,)),
            Standardized(Scaled(0.5), (1.0,), (3.0,)),
            r"\(2.0,\)",
        ),
        (Scaled(0.5), Standardized(Scaled(0.5), (1.0,), (3.0,)), "saved Scaled.*got Standardized"),
        (Weighted(Scaled(0.5)), Scaled(0.6), "saved .*0.5.*got Scaled"),
    ],
)
def test_given_likelihoods_are_compared_with_the_file(saved, given, said):
    with pytest.raises(InputError, match=f"^likelihood: expected the .*{said}"):
        saved_likelihood(_saved(saved), given)
    inner = getattr(saved, "likelihood", saved)
    assert repr(saved_likelihood(_saved(saved), inner)) == repr(saved)


@pytest.mark.slow
def test_mixtures_of_custom_families_are_saved_and_loaded(tmp_path):
    mixture = MixtureFamily(first=laplace(), second=NormalFamily())
    assert saved_likelihood(_saved(mixture), mixture) is mixture
    with pytest.raises(InputError, match="^likelihood: expected .*got 'mixture'"):
        from_config(_saved(mixture))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"y": np.r_[rng.normal(0, 1, 20), rng.normal(9, 1, 20)]})
    model = Regression("y ~ 1", family=mixture)
    model.fit(frame, sampling=replace(SHORT["sampling"], warmup=20), inference="nuts")
    path = model.save(tmp_path / "model")
    found = load(path, family=mixture)
    assert np.array_equal(found.predict(frame).mean, model.predict(frame).mean)
    with pytest.raises(InputError, match=r"^family: expected the family mixture\(custom"):
        load(path)
    with pytest.raises(InputError, match="^family: expected the saved mixture"):
        load(path, family=Poisson())

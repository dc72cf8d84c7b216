"""Misspelt keyword arguments are named in one line, with the similar ones."""

import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputTypeError, Training
from subbayes.likelihoods import Categorical
from subbayes.utils.checks import suggest_keywords

DATA = torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, trainning=Training()),
            "trainning: expected an argument of fit, got an unknown one. Did you mean 'training'?",
        ),
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, epochs=3),
            "epochs: expected an argument of fit, got an unknown one. "
            "Pass training=Training(epochs=...).",
        ),
        (
            lambda: Training(lr=0.1),
            "lr: expected an argument of Training, got an unknown one. "
            "Did you mean 'learning_rate'?",
        ),
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, num_chains=2),
            "num_chains: expected an argument of fit, got an unknown one. "
            "Pass sampling=Sampling(chains=...).",
        ),
        (
            lambda: subbayes.SubspaceRegressor(epochs=3),
            "epochs: expected an argument of SubspaceRegressor, got an unknown one. "
            "Pass training=Training(epochs=...).",
        ),
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, training={"epochs": 3, "rate": 1}),
            "training: expected a Training(...), got dict. Pass Training(epochs=3).",
        ),
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, sampling=50),
            "sampling: expected a Sampling(...), got int. Pass Sampling(...), or leave it out for "
            "the defaults.",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unknown_keywords_and_settings_of_another_type(call, message):
    with pytest.raises(InputTypeError) as e:
        call()
    assert str(e.value) == message


def test_known_keywords_and_documentation_are_kept():
    @suggest_keywords()
    def add(a, *, b=1):
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert add.__doc__ == "Add."
    assert Training(epochs=7) == Training(7)


def test_options_of_linearised_laplace_are_suggested():
    network = subbayes.Network(nn.Linear(2, 2))
    data = torch.zeros(4, 2), torch.arange(4) % 2
    for likelihood in ("categorical", Categorical()):
        found = subbayes.inference.linearised_laplace(network, likelihood, data)
        assert found.likelihood == Categorical()
    with pytest.raises(subbayes.InputError, match="Did you mean 'prior_precision'"):
        subbayes.inference.linearised_laplace(network, "categorical", data, prior_precison=1.0)


@pytest.mark.parametrize(
    ("arguments", "keywords", "line"),
    [
        (2, {}, r"fit: expected 2 arguments without names \(model, data\), got 3\."),
        (3, {"subspace": "pca"}, r"fit: expected 2 arguments without names .*, got 4\."),
        (1, {"y": torch.zeros(5)}, "y: expected targets beside the inputs, got an argument"),
        (1, {"labels": 1}, "labels: expected targets beside the inputs, got an argument"),
    ],
)
def test_inputs_and_targets_are_one_argument(arguments, keywords, line):
    with pytest.raises(InputTypeError, match=line) as caught:
        subbayes.fit(nn.Linear(1, 1), *[torch.zeros(5, 1)] * arguments, **keywords)
    assert str(caught.value).endswith("Call fit(model, (x, y)).")

"""Settings of another type, and misspelt options, are named in one line."""

import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputTypeError
from subbayes.likelihoods import Categorical

DATA = torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, training={"epochs": 3, "rate": 1}),
            "training: expected a Training(...), got dict. Pass Training(...), or leave it out for "
            "the defaults.",
        ),
        (
            lambda: subbayes.fit(nn.Linear(2, 1), DATA, sampling=50),
            "sampling: expected a Sampling(...), got int. Pass Sampling(...), or leave it out for "
            "the defaults.",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_of_another_type(call, message):
    with pytest.raises(InputTypeError) as e:
        call()
    assert str(e.value) == message


def test_options_of_linearised_laplace_are_suggested():
    network = subbayes.Network(nn.Linear(2, 2))
    data = torch.zeros(4, 2), torch.arange(4) % 2
    for likelihood in ("categorical", Categorical()):
        found = subbayes.inference.linearised_laplace(network, likelihood, data)
        assert found.likelihood == Categorical()
    with pytest.raises(subbayes.InputError, match="Did you mean 'prior_precision'"):
        subbayes.inference.linearised_laplace(network, "categorical", data, prior_precison=1.0)

"""Models that were fine-tuned with activation checkpointing, or whose inputs require gradients."""

import adapted
import numpy as np
import pytest
import torch

import subbayes
from experiments.blob import MeanFieldSettings, train_mean_field
from subbayes import Network, Training
from subbayes.training.trainer import train

KINDS = ["checkpointing", "reentrant checkpointing", "inputs require gradients"]


def tuned(kind=None):
    """A classifier as it is after fine-tuning, without dropout."""
    model = adapted.adapted("ia3", "SequenceClassification")
    if kind == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif kind is not None:
        model.enable_input_require_grads()
        model.enable_input_require_grads()  # of which `disable_input_require_grads` knows one
    if kind == "reentrant checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model.train()


def data(n=6):
    inputs, _, labels = adapted.rows(n)
    return inputs, labels


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model(kind):
    found = []
    for model in (tuned(kind), tuned()):
        network = Network(model, "adapters")
        space = subbayes.subspace.RandomSubspace(network.weights, 4, seed=0)
        posterior = subbayes.Posterior(network, "categorical", data(), space)
        found.append(posterior.value_and_grad(0.1 * np.ones((2, 4))))
        assert not network.fallbacks
    np.testing.assert_allclose(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_not_changed(kind):
    model = tuned(kind)
    train(model, "categorical", data(), Training(epochs=1), parameters="adapters", progress=False)
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules()) == (
        "checkpointing" in kind
    )
    assert model(**data()[0], output_hidden_states=True).hidden_states[0].requires_grad


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_plain_model(kind):
    """Of weights, and of distributions of weights, whose draws are not in the module itself."""
    once = Training(epochs=2, batch_size=None, optimizer="sgd", learning_rate=1.0)
    plain, other = (
        train(model, "categorical", data(), once, parameters="adapters", progress=False)
        for model in (tuned(), tuned(kind))
    )
    torch.testing.assert_close(other.network.weights, plain.network.weights, rtol=1e-5, atol=1e-7)
    wide = MeanFieldSettings(initial_scale=2.0, kl_weight=1e-6)
    means = [
        train_mean_field(
            model, "categorical", data(), once, random="adapters", settings=wide, progress=False
        ).network.weights
        for model in (tuned(), tuned(kind))
    ]
    torch.testing.assert_close(means[1], means[0], rtol=1e-7, atol=1e-7)

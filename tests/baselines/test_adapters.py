"""The baselines of fine-tuned models on adapters of peft."""

import copy
import warnings

import adapted
import numpy as np
import pytest
import torch
from adapted import peft

import subbayes
from subbayes import Network, Training
from subbayes.baselines import (
    deep_ensemble,
    ensemble_from_results,
    mc_dropout,
    point_estimate,
    swag,
    temperature_scaling,
)
from subbayes.comparison.comparison import compare_methods
from subbayes.likelihoods import CategoricalTokens
from subbayes.networks.initialisation import reinitialise
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.training import train

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = Training(epochs=2, swa_epochs=6, batch_size=7)


@pytest.fixture
def made():
    inputs, _, labels = adapted.rows()
    return adapted.adapted("lora", "SequenceClassification", torch.float32), inputs, labels


def base_pointers(model):
    return {p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}


def test_training_moves_adapters_and_head_alone(made):
    model, inputs, labels = made
    result = train(model, "categorical", (inputs, labels), QUICK, parameters="adapters")
    trained = dict(result.network.module_with().named_parameters())
    for name, before in model.named_parameters():
        moved = not torch.equal(trained[name], before)
        assert moved == before.requires_grad, name
        assert (trained[name].data_ptr() == before.data_ptr()) == (not before.requires_grad)
    estimate = point_estimate(result)
    with torch.no_grad():
        p = result.network.module_with()(**inputs).logits.softmax(-1)
    np.testing.assert_allclose(estimate.predict(inputs).probabilities, p, rtol=1e-5)


def test_fresh_adapters_have_no_effect():
    """As of peft itself: an ensemble does not begin at random functions."""
    model = adapted.adapted()
    inputs, *_ = adapted.rows()
    before = copy.deepcopy(model.state_dict())
    fresh = reinitialise(model, 0)
    with torch.no_grad(), model.disable_adapter():
        base = model(**inputs).logits
    with torch.no_grad():
        found = fresh(**inputs).logits
    torch.testing.assert_close(found, base, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert base_pointers(fresh) == base_pointers(model)


def test_an_ensemble_of_adapters_shares_its_base(made, tmp_path):
    model, inputs, labels = made
    ensemble = deep_ensemble(
        model, "categorical", (inputs, labels), QUICK, members=3, parameters="adapters",
        progress=False,
    )  # fmt: skip
    assert ensemble.weights.std(0).max() > 0
    heads = "base_model.model.score.modules_to_save.default.weight"
    assert all(set(own) - {heads} == {n for n in own if "rotary" in n} for own in ensemble.frozen)
    assert base_pointers(ensemble.network.module_with()) <= base_pointers(model)
    each = []
    for weights, own in zip(ensemble.weights, ensemble.frozen, strict=True):
        member = ensemble.network.with_buffers(own).module_with(weights)
        with torch.no_grad():
            each.append(member(**inputs).logits.softmax(-1))
    found = ensemble.predict(inputs).probabilities
    np.testing.assert_allclose(found, torch.stack(each).double().mean(0), rtol=1e-5)
    model.save_pretrained(tmp_path)
    ensemble.save(tmp_path)
    base = adapted.base_model("SequenceClassification", torch.float32)
    again = subbayes.load(tmp_path, peft.PeftModel.from_pretrained(base, tmp_path))
    np.testing.assert_allclose(again.predict(inputs).probabilities, found, rtol=1e-5)


def test_members_with_other_untrained_heads_or_bases_predict_their_own(made):
    _, inputs, _ = made
    members = [
        adapted.adapted("lora", "SequenceClassification", torch.float32, seed=seed)
        for seed in (1, 2, 3)
    ]
    with torch.no_grad():
        for member in members[1:]:
            member.base_model.model.score.original_module.weight.add_(1)
        members[2].base_model.model.model.norm.weight.mul_(1.5)
        expected = [member(**inputs).logits.softmax(-1).double() for member in members]
    ensemble = ensemble_from_results(
        [Network(member, "adapters") for member in members], "categorical"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ensemble.predict(inputs).probabilities
    np.testing.assert_allclose(found, torch.stack(expected).mean(0), rtol=1e-5)
    assert not any("original_module" in name for own in ensemble.frozen for name in own)


def test_mc_dropout_draws_the_dropout_of_lora(made):
    model, inputs, labels = made
    dropped = mc_dropout(Network(model, "adapters"), "categorical", n_draws=20)
    predictive = dropped.predict(inputs)
    assert len(dropped.masks.axes) == 4  # one a layer of LoRA
    assert predictive.epistemic.max() > 0
    assert base_pointers(dropped.module) == base_pointers(model)


def test_temperature_scaling_and_swag(made):
    model, inputs, labels = made
    estimate = point_estimate(Network(model, "adapters"), "categorical")
    scaled = temperature_scaling(estimate, (inputs, labels))
    logits = model(**inputs).logits.detach().double()
    p = (logits / scaled.temperature).softmax(-1)
    np.testing.assert_allclose(scaled.predict(inputs).probabilities, p, rtol=1e-4)
    fitted = subbayes.training.swa(
        model, "categorical", (inputs, labels), QUICK, parameters="adapters"
    )
    samples = swag(fitted, 5)
    assert samples.predict(inputs).n_draws == 5


def test_a_language_model_has_the_same_baselines():
    model = adapted.adapted("lora", dtype=torch.float32)
    inputs, tokens, _ = adapted.rows()
    network = Network(model, "adapters", TokenOutputs())
    likelihood = CategoricalTokens(adapted.WORDS, shift=True)
    estimate = point_estimate(network, likelihood)
    scores = estimate.evaluate({**inputs, "labels": tokens})
    with torch.no_grad():
        loss = float(model(**inputs, labels=tokens).loss)
    assert scores["log_likelihood_per_token"] == pytest.approx(-loss, rel=1e-4)
    assert mc_dropout(network, likelihood, n_draws=5).evaluate(inputs, tokens)["accuracy"] >= 0


@pytest.mark.slow
def test_methods_are_compared(made):
    model, inputs, labels = made
    table = compare_methods(
        model,
        "categorical",
        (inputs, labels),
        (inputs, labels),
        ["map", "swag", "ensemble", "mc-dropout", "random"],
        parameters="adapters",
        training=QUICK,
        sampling=subbayes.Sampling(draws=5, progress=False),
    )
    assert len(table.models) == 5

"""Posteriors over adapters, end to end, against the same weights in plain layers."""

import copy

import adapted
import numpy as np
import pytest
import torch
from adapted import peft
from jacobians import dense, dense_rows

import subbayes
from subbayes import InputError, Network, Sampling, Training
from subbayes.comparison.comparison import compare_methods
from subbayes.comparison.methods import AllWeightsLaplace
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, CategoricalTokens
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import RandomSubspace
from subbayes.subspaces import PCA, Curve, Optimal, Random, Subnetwork

QUICK = Training(epochs=1, swa_epochs=12, batch_size=7)
SAMPLING = Sampling(draws=6, chains=2, progress=False)
pytestmark = pytest.mark.filterwarnings("ignore")  # few draws


def classifier(kind="lora", dtype=torch.float64):
    model = adapted.adapted(kind, "SequenceClassification", dtype)
    inputs, _, labels = adapted.rows()
    return model, inputs, labels


def merged(network, weights):
    """The base model with the adapters added to its weights by peft: no adapters are left."""
    return copy.deepcopy(network.module_with(weights)).merge_and_unload()


@pytest.mark.parametrize("kind", ["lora", "ia3", "vera", "loha"])
def test_density_equals_that_of_merged_weights(kind):
    model, inputs, labels = classifier(kind)
    network = Network(model, "adapters")
    space = RandomSubspace(network.weights, 4, seed=0)
    posterior = subbayes.Posterior(network, "categorical", (inputs, labels), space)
    z = 0.3 * np.random.default_rng(0).standard_normal((3, 4))
    found = posterior.log_likelihood(z)
    for row, value in zip(z, found, strict=True):
        plain = merged(network, space.weights(torch.tensor(row)))
        assert not any("lora" in name for name, _ in plain.named_parameters())
        with torch.no_grad():
            logits = plain(**inputs).logits
        wanted = -torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        assert value == pytest.approx(float(wanted), rel=1e-9)


def test_density_of_a_language_model_is_the_loss_of_transformers():
    model = adapted.adapted("lora")
    inputs, tokens, _ = adapted.rows()
    network = Network(model, "adapters", TokenOutputs())
    space = RandomSubspace(network.weights, 4, seed=0)
    posterior = subbayes.Posterior(network, "causal-lm", {**inputs, "labels": tokens}, space)
    z = 0.3 * np.random.default_rng(0).standard_normal((3, 4))
    count = int((tokens[:, 1:] != -100).sum())
    for row, value in zip(z, posterior.log_likelihood(z), strict=True):
        plain = merged(network, space.weights(torch.tensor(row)))
        with torch.no_grad():
            loss = plain(**inputs, labels=tokens).loss
        assert value == pytest.approx(-count * float(loss), rel=1e-6)
    one = [posterior.log_likelihood(row[None])[0] for row in z]
    np.testing.assert_allclose(posterior.log_likelihood(z), one)
    step = 1e-2 * np.eye(4)  # Llama computes some steps in float32
    value, gradient = posterior.value_and_grad(z[:1])
    slopes = (posterior.value(z[:1] + step) - posterior.value(z[:1] - step)) / 2e-2
    np.testing.assert_allclose(gradient[0], slopes, rtol=1e-3, atol=1e-3)
    padded = {n: torch.cat([t, torch.zeros_like(t)], 1) for n, t in inputs.items()}
    more = torch.cat([tokens, torch.full_like(tokens, -100)], 1)
    longer = subbayes.Posterior(network, "causal-lm", (padded, more), space)
    np.testing.assert_allclose(longer.log_likelihood(z), posterior.log_likelihood(z))


SUBSPACES = {
    "random": Random(rank=4),
    "pca": PCA(rank=4),
    "curve": Curve(),
    "optimal": Optimal(rank=4),
    "subnetwork": Subnetwork(rank=6),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("task", ["classification", "language"])
@pytest.mark.parametrize("name", SUBSPACES)
def test_fit_in_each_subspace(name, task):
    """Predictions are the average of those of merged models at the draws."""
    inputs, tokens, labels = adapted.rows()
    language = task == "language"
    model = adapted.adapted("lora", "CausalLM" if language else "SequenceClassification")
    fitted = subbayes.fit(
        model,
        {**inputs, "labels": tokens if language else labels},
        likelihood="causal-lm" if language else "categorical",
        parameters="adapters",
        subspace=SUBSPACES[name],
        training=QUICK,
        sampling=SAMPLING,
    )
    assert all("lora" in n for n in fitted.network.names)
    weights = fitted.subspace.weights(torch.from_numpy(fitted.draws.flat().copy()))
    with torch.no_grad():
        each = [merged(fitted.network, w)(**inputs).logits.softmax(-1) for w in weights]
    np.testing.assert_allclose(
        fitted.predict(inputs).probabilities, torch.stack(each).mean(0), atol=1e-7
    )
    scores = fitted.evaluate(inputs, tokens if language else labels)
    assert ("perplexity" in scores) == language
    assert np.ptp(fitted.draws.flat(), 0).min() > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["dual", "primal", "kfac"])
@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_linearised_laplace_equals_the_dense_one(form, kind):
    """Exact forms equal the dense matrices; KFAC, an approximation, reduces the prior variance."""
    model, inputs, labels = classifier(kind)
    network = Network(model, "adapters")
    found = linearised_laplace(
        network, Categorical(), (inputs, labels), covariance=form, prior_precision=2.0
    )
    new = {n: t[:4] for n, t in inputs.items()}
    J = dense(network, new).flatten(0, 1)
    V = dense_rows(network, Categorical(), inputs, labels)
    truth = J @ torch.linalg.solve(V.T @ V + 2.0 * torch.eye(network.size).double(), J.T)
    if form != "kfac":
        torch.testing.assert_close(found.covariance(new), truth, rtol=1e-5, atol=1e-7)
    else:
        prior = J @ J.T / 2.0
        assert float(found.covariance(new).trace()) < float(prior.trace())
    p = found.predict(inputs).probabilities
    np.testing.assert_allclose(p.sum(1), 1)


def test_kfac_of_adapters_equals_that_of_plain_layers():
    """LoRA as two plain linear layers in a module without peft has the same factors."""

    class Plain(torch.nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.base, self.scaling = copy.deepcopy(layer.base_layer), layer.scaling["default"]
            self.lora_A = copy.deepcopy(layer.lora_A["default"])
            self.lora_B = copy.deepcopy(layer.lora_B["default"])

        def forward(self, x):
            return self.base(x) + self.scaling * self.lora_B(self.lora_A(x))

    model, inputs, labels = classifier("lora")
    plain = copy.deepcopy(model)
    for layer in plain.base_model.model.model.layers:
        layer.self_attn.q_proj = Plain(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Plain(layer.self_attn.v_proj)
    found = [
        linearised_laplace(
            Network(m, "*lora_*"), Categorical(), (inputs, labels), covariance="kfac",
            prior_precision=2.0,
        ).covariance(inputs)
        for m in (model, plain)
    ]  # fmt: skip
    torch.testing.assert_close(*found)


def test_linearised_laplace_of_tokens_equals_the_dense_one():
    model = adapted.adapted("lora")
    inputs, tokens, _ = adapted.rows(4)
    network = Network(model, "adapters", TokenOutputs())
    likelihood = CategoricalTokens(n_classes=adapted.WORDS, shift=True)
    found = linearised_laplace(network, likelihood, (inputs, tokens), prior_precision=2.0)
    J = dense(network, inputs)  # (N, C, D)
    Lambda = likelihood.for_targets(tokens).curvature(network(network.weights, inputs).detach())
    H = torch.einsum("ncd,nce,nef->df", J, Lambda, J) + 2.0 * torch.eye(network.size).double()
    flat = J.flatten(0, 1)
    truth = flat @ torch.linalg.solve(H, flat.T)
    torch.testing.assert_close(found.covariance(inputs), truth, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_laplace_lora_in_a_comparison_has_the_prior_of_the_largest_evidence():
    """By KFAC and of tokens; evidence at other precisions is lower."""
    model = adapted.adapted("lora")
    inputs, tokens, _ = adapted.rows(4)
    found = compare_methods(
        model,
        "causal-lm",
        (inputs, tokens),
        (inputs, tokens),
        [AllWeightsLaplace("kfac")],
        parameters="adapters",
        training=Training(epochs=0, swa_epochs=0),
        sampling=SAMPLING,
    )
    tuned = found.models["laplace"]
    network = Network(model, "adapters", TokenOutputs())
    likelihood = CategoricalTokens(n_classes=adapted.WORDS, shift=True)
    evidences = [
        linearised_laplace(
            network, likelihood, (inputs, tokens), covariance="kfac", prior_precision=precision
        ).log_marginal_likelihood()
        for precision in tuned.prior_precision * torch.tensor([0.8, 1.0, 1.25]).double().numpy()
    ]
    assert evidences[1] == pytest.approx(tuned.log_marginal_likelihood())
    assert evidences[1] > max(evidences[0], evidences[2])
    assert "log_likelihood" in found.table


def lengths_of_their_own(n=4):
    """Rows without padding, no two of one length next to each other."""
    inputs, _, labels = adapted.rows(n)
    return [
        {name: t[i, : 3 + i % 2] for name, t in inputs.items()} | {"labels": labels[i]}
        for i in range(n)
    ]


def rows_of_one_length(n=4):
    return [row | {"input_ids": row["input_ids"][:3], "attention_mask": torch.ones(3).long()}
            for row in lengths_of_their_own(n)]  # fmt: skip


def test_ignored_labels_everywhere_are_refused():
    inputs, tokens, _ = adapted.rows()
    data = {**inputs, "labels": torch.full_like(tokens, -100)}
    with pytest.raises(InputError, match="-100 everywhere. Set labels to the token ids"):
        subbayes.fit(adapted.adapted(), data, likelihood="causal-lm", parameters="adapters")


@pytest.mark.slow
def test_another_adapter_of_peft_is_not_needed():
    """peft is optional: nothing of subbayes imports it."""
    import subprocess
    import sys

    code = "import subbayes, sys; subbayes.fit; subbayes.Network; assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert peft.__version__

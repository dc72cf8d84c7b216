"""Kinds of adapters of peft with outputs or gradients of their own."""

import copy

import adapted
import numpy as np
import pytest
import torch
from adapted import LENGTH, WORDS, peft
from torch import nn

import subbayes
from subbayes import InputError, Network, Sampling, Training
from subbayes.curvature.products import Curvature
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import RandomSubspace

pytestmark = pytest.mark.filterwarnings("ignore")  # few draws
FIXED = Training(epochs=0, swa_epochs=0)
OPTIONS = {
    "parameters": "adapters",
    "subspace": "random",
    "training": FIXED,
    "sampling": Sampling(draws=2, chains=1, warmup=1, progress=False),
}


def at(model, network, weights):
    """A copy of the model of peft whose adapters have these weights."""
    model, start = copy.deepcopy(model), 0
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in network.names:
            size = named[name].numel()
            named[name].copy_(weights[start : start + size].view_as(named[name]))
            start += size
    return model


def same(a, b):
    """Check that two results of these models differ by rounding alone.

    torch multiplies by matrices that require gradients in another way than by those that do not,
    so that a network and its module round differently on some processors. A result comes from
    fewer than 10 products in a row, of fewer than 100 terms each.
    """
    rounding = 1000 * torch.finfo(a.dtype).eps
    torch.testing.assert_close(a, b, rtol=rounding, atol=rounding * float(b.detach().abs().max()))


def by_hand(logits, tokens):
    """Log-likelihood of labels, each predicted at the position before."""
    y, kept = tokens[:, 1:], tokens[:, 1:] != -100
    chosen = logits[:, :-1].double().log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])
    return float((chosen[..., 0] * kept).sum())


class Inside(nn.Module):
    """A model whose logits have positions before those of the inputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        logits = self.model(**inputs).logits
        return torch.cat([torch.zeros_like(logits), logits], 1)


def test_logits_of_more_positions_than_labels():
    model = Inside(adapted.adapted())
    inputs, tokens, _ = adapted.rows(4)
    data = {**inputs, "labels": tokens}
    for options in (OPTIONS, OPTIONS | {"training": Training(epochs=1, swa_epochs=0)}):
        with pytest.raises(InputError, match=r"12 positions.*out\.logits\[:, -6:\]"):
            subbayes.fit(model, data, likelihood="causal-lm", **options)
    output = TokenOutputs(lambda out: out[:, -LENGTH:])
    short, own = (
        Network(model, "adapters", output),
        Network(model.model, "adapters", TokenOutputs()),
    )
    with torch.no_grad():
        first, other = (n(n.weights, inputs) for n in (short, own))
    assert first.shape == (4, LENGTH * WORDS)
    same(first, other)


class Layers(nn.Module):
    """An embedding, and layers that run at several lengths of a sequence."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 6)
        self.places, self.conv = nn.Linear(6, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.last = nn.Linear(6, 3)

    def forward(self, ids):
        h = torch.tanh(self.places(self.words(ids)))
        h = torch.tanh(self.conv(h.mT).mT) + self.places(h[:, :2]).mean(1, keepdim=True)
        return self.last(h.mean(1))


def small(kind):
    targets = ["words", "places", "conv"]
    config = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules=targets),
        "loha": lambda: peft.LoHaConfig(r=2, target_modules=targets[1:2]),
        "randlora": lambda: peft.RandLoraConfig(r=2, target_modules=targets[1:2]),
    }[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(Layers().double(), config, autocast_adapter_dtype=False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn_like(parameter)
        ids, labels = torch.randint(0, 12, (7, 5)), torch.arange(7) % 3
    return model.eval(), ids, labels


def differences(network, ids):
    """The Jacobian of the outputs from central finite differences, shape (N C, D)."""
    step, columns = 1e-5, []
    with torch.no_grad():
        for unit in torch.eye(network.size, dtype=torch.float64):
            up, down = (network(network.weights + s * step * unit, ids) for s in (1, -1))
            columns.append(((up - down) / (2 * step)).flatten())
    return torch.stack(columns, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["trace", "eager"])
@pytest.mark.parametrize("kind", ["lora", "loha", "randlora"])
def test_gradients_are_those_of_the_density(kind, mode):
    model, ids, labels = small(kind)
    network = Network(model, "adapters")
    with torch.no_grad():
        same(network(network.weights, ids), model(ids))
    space = RandomSubspace(network.weights, 4, seed=0)
    posterior = subbayes.Posterior(network, "categorical", (ids, labels), space, mode=mode)
    z = 0.3 * np.random.default_rng(0).standard_normal((2, 4))
    value, gradient = posterior.value_and_grad(z)
    np.testing.assert_allclose(value, posterior.value(z), rtol=1e-9)
    step = 1e-5 * np.eye(4)
    for row, slope in zip(z, gradient, strict=True):
        wanted = (posterior.value(row + step) - posterior.value(row - step)) / 2e-5
        np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-5)
    point = torch.tensor(z, requires_grad=True)
    posterior.log_prob(point).sum().backward()
    np.testing.assert_allclose(point.grad, gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("covariance", ["dual", "diagonal"])
@pytest.mark.parametrize("kind", ["lora", "loha", "randlora"])
def test_curvature_is_that_of_finite_differences(kind, covariance):
    model, ids, labels = small(kind)
    network = Network(model, "adapters")
    J = differences(network, ids)
    p = network(network.weights, ids).detach().softmax(-1)
    precision = 2.0 * torch.eye(network.size, dtype=torch.float64)
    for n, own in enumerate(J.split(3)):
        precision += own.T @ (torch.diag(p[n]) - torch.outer(p[n], p[n])) @ own
    if covariance == "diagonal":
        precision = precision.diagonal().diag()
    found = linearised_laplace(
        network, Categorical(), (ids, labels), covariance=covariance, prior_precision=2.0
    ).covariance(ids)
    wanted = J @ torch.linalg.solve(precision, J.T)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_dora_is_refused():
    """Its gradients are not those of the outputs."""
    config = peft.LoraConfig(r=2, target_modules=["places"], use_dora=True)
    with pytest.raises(InputError, match="gradients are those of the outputs, got DoRA"):
        Network(peft.get_peft_model(Layers(), config), "adapters")


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["nuts", "laplace"])
@pytest.mark.parametrize("kind", ["loha", "randlora"])
def test_engines_of_functions_that_transforms_refuse(kind, engine):
    model, ids, labels = small(kind)
    rank = subbayes.subspaces.Random(rank=2)
    options = OPTIONS | {"inference": engine, "subspace": rank}
    fitted = subbayes.fit(model, (ids, labels), likelihood="categorical", **options)
    assert np.isfinite(fitted.draws.flat()).all()


def test_products_with_the_curvature_name_the_layer():
    model, ids, labels = small("randlora")
    with pytest.raises(InputError, match=r"randlora\.Linear.*autograd.*elliptical-slice"):
        Curvature(Network(model, "adapters"), Categorical(), (ids, labels))


def test_a_frozen_head_is_not_shared():
    model = adapted.adapted("lora", "SequenceClassification")
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.requires_grad_(False)
    inputs, _, _ = adapted.rows(3)
    network = Network(model, "adapters")
    before = network(network.weights, inputs)
    head = next(p for n, p in model.named_parameters() if "modules_to_save" in n)
    with torch.no_grad():
        head += 1
    assert torch.equal(network(network.weights, inputs), before)
    owned = {n: t.data_ptr() for n, t in network.frozen.items() if n in network.base_names}
    shared = dict(model.named_parameters())
    assert owned
    assert all(shared[name].data_ptr() == address for name, address in owned.items())


class Unused(nn.Module):
    """A layer with an adapter that its outputs leave out, but not its gradient."""

    def __init__(self):
        super().__init__()
        self.base, self.lora_a = nn.Linear(2, 3), nn.Linear(2, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + 0 * self.lora_a(x)


def test_weights_without_effect_are_refused():
    data = torch.randn(6, 2), torch.arange(6) % 3
    with pytest.raises(InputError, match="the same outputs with other weights of the adapters"):
        subbayes.fit(Unused(), data, likelihood="categorical", **OPTIONS)


def test_the_first_token_after_padding_is_predicted_by_none():
    model = adapted.adapted("lora")
    _, tokens, _ = adapted.rows(7)
    ids, mask = tokens.flip(1).clamp(min=0), (tokens.flip(1) != -100).long()  # padded on the left
    tokens = tokens.flip(1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    network = Network(model, "adapters", TokenOutputs())
    space = RandomSubspace(network.weights, 2, seed=0)
    with pytest.raises(InputError, match=r"first token after padding.*\[:, :-1\] == 0\] = -100"):
        subbayes.Posterior(network, "causal-lm", (inputs, tokens), space)
    fitted = subbayes.baselines.point_estimate(model, "causal-lm", output=lambda out: out.logits)
    for call in ((inputs, tokens), ({**inputs, "labels": tokens},)):
        with pytest.raises(InputError, match="first token after padding"):
            fitted.evaluate(*call)
    subbayes.Posterior(network, "tokens", (inputs, tokens), space)
    labels = tokens.clone()
    labels[:, 1:][mask[:, :-1] == 0] = -100
    found = []
    for size in (1, 2, 7):
        batches = [slice(start, start + size) for start in range(0, 7, size)]
        shorter = []
        for rows in batches:
            most = int(mask[rows].sum(1).max())  # padded to the longest of the batch
            own = {name: t[rows, -most:] for name, t in inputs.items()}
            shorter.append((own, labels[rows, -most:]))
        parts = [
            subbayes.Posterior(network, "causal-lm", part, space).log_likelihood(np.zeros((1, 2)))
            for part in shorter
            if bool((part[1][:, 1:] != -100).any())
        ]
        found.append(float(sum(parts)[0]))
    np.testing.assert_allclose(found, found[0], rtol=1e-5)

"""Cases of `worker.py` with adapters whose weights are sharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from distributed.sharded_cases import UNTRAINED, bits, off, plain, sharded, table
from subbayes import Sampling, distributed
from subbayes.likelihoods import Gaussian
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import RandomSubspace, Subspace
from subbayes.subspaces.sharded_random import ShardedRandomSubspace


def by_layers(module: nn.Module) -> nn.Module:
    """A model of peft whose layers and remainder are sharded."""
    kind = "LlamaDecoderLayer"
    layers = [path for path, part in module.named_modules() if type(part).__name__ == kind]
    return sharded(module, (*layers, ""))


def sharded_adapters() -> dict[str, Any]:
    """`fit` of sharded adapters of peft beside sharded base weights, against whole ones."""
    import adapted

    tokens = torch.randint(1, adapted.WORDS, (9, 6), generator=torch.Generator().manual_seed(0))
    x = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    data = x, torch.arange(9) % 3

    def whole() -> Any:
        return adapted.adapted("lora", "SequenceClassification")

    def divided() -> nn.Module:
        return by_layers(whole())

    settings = Sampling(draws=5, chains=2, warmup=4, seed=1, progress=False)
    options: dict[str, Any] = {"parameters": "adapters"}
    options |= {"likelihood": "categorical", "inference": "elliptical-slice"}
    options |= {"training": UNTRAINED, "sampling": settings}
    module = divided()
    before = bits(module)
    found = subbayes.fit(module, data, **options)  # in its default subspace, "random"
    expected = subbayes.fit(whole(), data, subspace=Random(kind="gaussian"), **options)
    with pytest.raises(subbayes.InputError) as caught:
        found.save("model")
    every: Any = found.subspace
    return {
        "error": str(caught.value),
        "described": found.describe()["network"] == expected.describe()["network"],
        "size": [every.size, every.layout.size, expected.network.size],
        "parts": distributed.current().gather(len(every.shift)),
        "draws": off(found.draws.z, expected.draws.z),
        "predict": off(found.predict(x).outputs, expected.predict(x).outputs),
        "weights": all(map(torch.equal, bits(module), before)),
    }


def sharded_gradients(kind: str, loaded: bool = False) -> dict[str, Any]:
    """Value and gradient of sharded adapters against whole ones, and what they leave behind.

    Args:
        kind: of adapters.
        loaded: whether the adapters do not require gradients and have been called before.
    """
    import adapted

    inputs, tokens, _ = adapted.rows(9)
    models = [adapted.adapted(kind) for _ in range(2)]
    if loaded:
        for model in models:
            model.requires_grad_(False)
    module = by_layers(models[0])
    if loaded:
        module(**inputs)
    networks = [
        ShardedNetwork(module, "adapters", TokenOutputs()),
        subbayes.Network(models[1], "adapters", TokenOutputs()),
    ]
    flags, methods = required(module), own_methods(module)
    before, z = bits(module), np.random.default_rng(0).standard_normal((2, 4))
    found = []
    for network in networks:
        space = directions(network)
        density = subbayes.Posterior(network, "causal-lm", (inputs, tokens), space)
        found.append(density.value_and_grad(z))
    return {
        "dtype": str(networks[1].dtype)[6:],
        "value": off(found[0][0], found[1][0]),
        "gradient": off(found[0][1] + z, found[1][1] + z),  # without that of the prior
        "weights": all(map(torch.equal, bits(module), before)),
        "flags": required(module) == flags,
        "methods": own_methods(module) == methods,
        "slopes": all(p.grad is None for p in module.parameters()),
    }


def directions(network: subbayes.Network) -> Subspace:
    """Four random directions around the weights of a network."""
    if isinstance(network, ShardedNetwork):
        return ShardedRandomSubspace(network, 4, 1)
    return RandomSubspace(network.weights, 4, 1)


def required(module: nn.Module) -> list[bool]:
    """Which parameters require gradients."""
    return [p.requires_grad for p in module.parameters()]


def own_methods(module: nn.Module) -> list[list[str]]:
    """Methods that layers have beside those of their classes."""
    names = ("forward", "get_delta_weight")
    return [[n for n in names if n in vars(part)] for part in module.modules()]


class Detached(nn.Module):
    """A layer whose outputs autograd does not follow to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).detach()


def sharded_without_gradients() -> dict[str, Any]:
    """The error of outputs that autograd does not follow, and what it leaves behind."""
    module = sharded(Detached(), ("layer", ""))
    network = ShardedNetwork(module)
    before = bits(module)
    space = directions(network)
    density = subbayes.Posterior(network, Gaussian(0.3), table(20), space)
    with pytest.raises(subbayes.InputError) as caught:
        density.value_and_grad(np.zeros((1, 4)))
    return {"error": str(caught.value), "weights": all(map(torch.equal, bits(module), before))}


def sharded_sixteen_bits() -> dict[str, float]:
    """Value and gradient of sharded weights in bfloat16 against autograd of whole ones."""
    (x, y), likelihood = table(30, torch.bfloat16), Gaussian(noise=0.3)
    network, module = ShardedNetwork(sharded(plain(torch.bfloat16))), plain(torch.bfloat16).eval()
    density = subbayes.Posterior(network, likelihood, (x, y), directions(network))
    z = np.full((1, 4), 0.7)
    found = density.log_likelihood(z), density.value_and_grad(z)[1] + z
    whole = subbayes.Network(module)
    space = directions(whole)
    values = whole.unflatten(space.weights(torch.from_numpy(z[0])))
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    outputs = torch.func.functional_call(module, leaves, (x,)).float()
    outputs.backward(likelihood.score(outputs.detach(), y))
    slope = torch.cat([leaf.grad.reshape(-1) for leaf in leaves.values()]).double()  # type: ignore[union-attr]
    value = likelihood.log_prob(outputs.detach(), y).double().sum()
    return {
        "value": off(found[0], [value]),
        "gradient": off(found[1], [(space.basis().double() @ slope).numpy()]),
    }

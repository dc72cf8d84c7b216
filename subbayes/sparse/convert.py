"""Conversion of a module to latent binary weights, and its evidence lower bound."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood
from subbayes.networks.module_copy import check_in_one_process
from subbayes.networks.network import arguments
from subbayes.networks.outputs import as_outputs
from subbayes.networks.selection import check_real
from subbayes.networks.tracing.private_torch import copy_forward_hooks, uncompiled
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import (
    LAYERS,
    own_parameters,
    parent_of,
    replace_layer,
    select_layers,
)
from subbayes.sparse.priors import Bernoulli, NormalSlab, SpikeSlab
from subbayes.sparse.variational_families import LayerSettings, Noise
from subbayes.utils.checks import check_count, check_finite, check_seed, fail
from subbayes.utils.trees import leaves, n_rows
from subbayes.utils.types import Inputs, OutputFunction, Targets


def convert(
    module: nn.Module,
    posterior: str = "mean-field",
    *,
    structure: str = "weights",
    prior: SpikeSlab | Mapping[str, SpikeSlab] | None = None,
    estimator: str = "local",
    keep: Collection[str] = (),
    inclusion: float = 0.9,
    sd: float = 0.01,
    rank: int = 10,
    temperature: float = 0.1,
    seed: int = 0,
    layer: type[SparseLayer] = SparseLayer,
) -> nn.Module:
    """A copy of a module whose linear and convolutional layers have latent binary weights.

    These are `nn.Linear`, `nn.Conv1d` and `nn.Conv2d`. Other parameters (embeddings, norms, other
    convolutions, layers of `keep`) get point estimates.

    Args:
        module: the module, which is not changed; its weights are the initial means.
        posterior: "mean-field", "mvn" or "low-rank"; or "all": all weights included, a Gaussian for
            each.
        structure: "weights", or "units": whole neurons and channels are included or excluded.
        prior: of all layers, or by name of the layer; by default that of the paper.
        estimator: "local" or "relaxed", see `layers`.
        keep: names of layers not to convert. Frozen layers (weights without `requires_grad`) and
            those that attention reads directly (`MultiheadAttention`) are not converted either.
        inclusion: initial inclusion probability.
        sd: initial standard deviation of the weights.
        rank: of the posterior "low-rank".
        temperature: of relaxed indicators.
        seed: of the random numbers of the layers.
        layer: class of the layers, for a posterior of your own.

    Returns:
        A module of the same class: in training mode its outputs are draws, in evaluation mode
        those of the posterior mean.

    Raises:
        InputError: nothing to convert, an unknown layer, shared weights, weights that are computed
            from others or sharded among processes, layers of a class with its own `forward`.

    Source: Hubin and Storvik (2024), section 3.

    Example:
        >>> net = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> len(sparse_layers(net))
        2
        >>> net(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """
    check_in_one_process(module)
    module = uncompiled(module)
    check_real(module)
    settings = LayerSettings(posterior, structure, estimator, inclusion, sd, rank, temperature)
    check_seed(seed)
    layers = _convertible_layers(module, keep)
    priors, noise = _layer_priors(prior, posterior, layers), Noise(seed)
    made = copy.deepcopy(module)
    for name, plain in layers.items():
        sparse = layer(plain, settings, priors[name], noise)
        copy_forward_hooks(plain, sparse)
        made = replace_layer(made, name, sparse.train(plain.training))
    for other in sparse_layers(made).values():  # also those of an earlier conversion
        other.noise = noise
    return made


def _layer_priors(
    prior: SpikeSlab | Mapping[str, SpikeSlab] | None, posterior: str, names: Collection[str]
) -> dict[str, SpikeSlab]:
    default = SpikeSlab(NormalSlab(1.0), Bernoulli(0.5)) if posterior == "all" else SpikeSlab()
    given = prior if isinstance(prior, Mapping) else dict.fromkeys(names, prior or default)
    unknown = [name for name in given if name not in names]
    if unknown:
        fail("prior", "priors of layers: " + ", ".join(names), ", ".join(unknown))
    return dict.fromkeys(names, default) | dict(given)


def _convertible_layers(module: nn.Module, keep: Collection[str]) -> dict[str, nn.Module]:
    layers = select_layers(module, keep, _is_frozen_or_read)
    if not layers:
        fail(
            "module",
            "a linear or convolutional layer to convert",
            "none",
            "Frozen layers are not converted: call requires_grad_() on them, or shorten keep="
            if any(isinstance(m, LAYERS) for m in module.modules())
            else "Its layers have been converted already"
            if sparse_layers(module)
            else "",
        )
    _check_forward(layers)
    return layers


def _is_frozen_or_read(module: nn.Module, name: str, layer: nn.Module) -> bool:
    weight = own_parameters(layer).get("weight")
    return isinstance(parent_of(module, name), nn.MultiheadAttention) or (
        weight is not None and not weight.requires_grad
    )


def _check_forward(layers: Mapping[str, nn.Module]) -> None:
    def methods(kind: type) -> list[Any]:
        return [getattr(kind, name, None) for name in ("forward", "_conv_forward")]

    overriding = [
        f"{name} ({type(layer).__name__})"
        for name, layer in layers.items()
        if not any(methods(type(layer)) == methods(kind) for kind in LAYERS)
    ]
    if overriding:
        fail(
            "module",
            "layers that compute what nn.Linear, nn.Conv1d or nn.Conv2d do",
            f"{', '.join(overriding)}, which override forward",
            "Name them in keep=",
        )


def sparse_layers(module: nn.Module) -> dict[str, SparseLayer]:
    """The converted layers of a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, SparseLayer)}


def kl(module: nn.Module) -> Float[Tensor, ""]:
    """Divergence of the posterior of all converted layers from their prior, in nats."""
    layers = sparse_layers(module)
    if not layers:
        fail("module", "a module that convert() has made", "one without sparse layers")
    return torch.stack([layer.kl() for layer in layers.values()]).sum()


def elbo(
    module: nn.Module,
    likelihood: Likelihood,
    inputs: Inputs,
    y: Targets,
    n: int,
    *,
    weight: float = 1.0,
    output: OutputFunction | None = None,
) -> Float[Tensor, ""]:
    r"""An unbiased estimate of the evidence lower bound from a batch, to be maximised.

    $$ \frac{n}{|B|} \sum_{i \in B} \log p(y_i \mid f(x_i; w)) - \mathrm{KL}(q \,\|\, p) $$

    Args:
        module: a converted module, in training mode.
        likelihood: p(y | f).
        inputs: of the batch.
        y: targets of the batch.
        n: number of rows of the whole data.
        weight: of the divergence; `fit` raises it from 0 to 1 in the first epochs.
        output: picks the tensor out of what the module returns.

    Raises:
        InputError: sparse layers in evaluation mode, a layer called twice, NaN, targets outside the
            support of the likelihood, outputs or numbers of rows that do not match.
        InputTypeError: inputs or targets that are not tensors.

    Source: Hubin and Storvik (2024), eqs. 15 and 20.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> net = convert(nn.Linear(3, 1)).train()
        >>> value = elbo(net, Gaussian(noise=1.0), torch.zeros(5, 3), torch.ones(5), n=50)
        >>> value.ndim, bool(value < 0)
        (0, True)
    """
    layers = sparse_layers(module)
    evaluating = [name for name, layer in layers.items() if not layer.training]
    if evaluating:
        fail(
            "module",
            "sparse layers in training mode, which draw weights",
            f"in evaluation mode: {', '.join(map(repr, evaluating))}",
            "Call module.train() first",
        )
    batch: dict[str, Any] = {"inputs": inputs, "y": y}
    args, named = arguments(inputs)
    rows = n_rows(inputs)
    if rows == 0 or rows != n_rows(y) or rows > check_count("n", n):
        fail(
            "inputs",
            f"between 1 and n = {n} rows, as many as targets",
            f"{rows} rows, {n_rows(y)} targets",
        )
    with SparseLayer.used_once(layers, rows):
        outputs = as_outputs(module(*args, **named), inputs, output)
    for name, given in batch.items():
        for values in leaves(given):
            check_finite(name, values)
    likelihood.check_targets(y)
    likelihood.check_outputs(outputs.shape[-1], y)
    terms = likelihood.log_prob(outputs, y)
    if terms.shape != (rows,):
        expected = f"{type(likelihood).__name__}.log_prob to return one log density per row"
        fail("likelihood", expected, f"shape {tuple(terms.shape)}")
    return terms.sum() * (n / rows) - weight * kl(module)

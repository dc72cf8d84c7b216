"""The probability that an input of a layer reaches the output of the network.

A weight matters if it is included *and* its unit is read: the data carry no information on the
weights of other units, whose probabilities are those of the prior.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subbayes.sparse.dependency_graph import edges
from subbayes.sparse.layers import SparseLayer

_MAX_WEIGHTS = 2**22  # weights drawn at a time


@torch.no_grad()
def path_probability(
    module: nn.Module,
    layers: Mapping[str, SparseLayer],
    layer: str,
    draws: int = 1000,
    seed: int = 0,
) -> Float[Tensor, "inputs"]:
    r"""Probability that a path of included weights leads from an input to the output.

    $$ P_k = \mathrm{E}_r\Bigl[1 - \prod_j (1 - \alpha_{jk})^{r_j}\Bigr] $$

    where $r_j$ is 1 if unit j of the layer is read, for draws of the indicators of the layers that
    follow; without such layers the result is exact. Units whose readers are unknown (see `edges`)
    count as read. Correlated indicators of this layer are drawn too.

    Args:
        module: the network, with ordinary layers of the same names.
        layers: the sparse layers, by name.
        layer: name of the layer whose inputs are asked for.
        draws: number of draws of the indicators.
        seed: of the draws.

    Example:
        >>> from subbayes import sparse
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> thin = dict(sparse.convert(net, inclusion=0.5).named_children())
        >>> found = path_probability(net, {"0": thin["0"], "2": thin["2"]}, "0", draws=20000)
        >>> bool((found - (1 - 0.75**2)).abs().max() < 0.02)
        True
    """
    readers = {
        edge.source: edge.reader
        for edge in edges(module, [name for name, _ in module.named_modules()])
    }
    chain = [layer]
    while chain[-1] in readers:
        chain.append(readers[chain[-1]])
    generator = torch.Generator().manual_seed(seed)
    own = layers[layer]
    independent = own.posterior == "mean-field" or own.is_deterministic
    drawn = own.structure != "inputs" and not independent
    if len(chain) == 1 and not drawn:
        draws = 1
    shapes = [_weight(module, name).shape for name in chain]
    step = max(1, _MAX_WEIGHTS // sum(shape.numel() for shape in shapes))
    total, n = torch.zeros((), dtype=torch.double), 0
    while n < draws:
        count = min(step, draws - n)
        read = torch.ones(count, shapes[-1][0])
        for reader, source in zip(chain[:0:-1], chain[-2::-1], strict=True):
            read = _read_units(module, layers, source, reader, read, generator)
        total = total + _input_probability(own, read, generator if drawn else None).sum(0)
        n += count
    return total / draws


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(f"{name}.weight" if name else "weight")


def _read_units(
    module: nn.Module,
    layers: Mapping[str, SparseLayer],
    source: str,
    reader: str,
    read: Float[Tensor, "S u"],
    generator: torch.Generator,
) -> Float[Tensor, "S k"]:
    """Which units of `source` are read, given which units of its reader are."""
    units = len(_weight(module, source))
    if reader not in layers:
        return (read.sum(1, keepdim=True) > 0).to(read).expand(-1, units)
    mask = _draw_masks(layers[reader], len(read), generator)
    by_weight = torch.bmm(read.unsqueeze(1), mask.to(read))[:, 0]
    return (by_weight.reshape(len(read), units, -1).sum(2) > 0).to(read)


def _draw_masks(
    layer: SparseLayer, count: int, generator: torch.Generator
) -> Bool[Tensor, "S u k"]:
    """Which weights of a layer are not zero, in some draws."""
    factors = layer.inclusion_factors("sample", "mean", count, generator).cpu()
    return factors.expand(count, len(layer.mean), layer.mean[0].numel()) != 0


def _input_probability(
    own: SparseLayer, read: Float[Tensor, "S u"], generator: torch.Generator | None
) -> Float[Tensor, "S k"]:
    """For each draw, the probability that an input is read, or with a generator whether it is."""
    count, size = len(read), own.mean.shape[1]
    in_groups = (getattr(own.original[0], "groups", 1), -1)
    read = read.double().unflatten(1, in_groups)
    if generator is not None:
        mask = _draw_masks(own, count, generator).unflatten(2, (size, -1))
        included = mask.any(3).to(read).unflatten(1, in_groups)
        return (torch.einsum("sgu,sguk->sgk", read, included) > 0).double().flatten(1)
    alpha = own.probability().double().cpu()
    if own.structure == "inputs":
        by_input = alpha[0].reshape(size, -1)[:, 0]  # groups share their indicators
        return ((read.sum(2, keepdim=True) > 0) * by_input).flatten(1)
    log_excluded = torch.log1p(-alpha.clamp_max(1 - 1e-12)).reshape(*alpha.shape[:2], -1).sum(2)
    return 1 - torch.einsum(
        "sgu,guk->sgk", read, log_excluded.unflatten(0, in_groups)
    ).exp().flatten(1)

"""The small network that comes out: dead units removed, layers dense or CSR.

A unit is dead if nothing of what follows reads it, or if no weight leads into it: then it is a
constant, which moves into the bias of the layer that reads it. Removing one can kill others, so
this goes on until nothing changes. Which layer reads which is found by tracing the module; where
units branch (skip connections), pass through something unknown or are read along another axis they
are kept, with zeros.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subbayes.networks.network import arguments
from subbayes.sparse.dependency_graph import DataFlow, Edge, edges
from subbayes.sparse.export.small_network import CsrLinear, SmallNetwork, as_example
from subbayes.sparse.export.tiled_layers import layers_for_products, use_tiles
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import LAYERS, replace_layer
from subbayes.utils.checks import check_choice, fail, fail_type
from subbayes.utils.types import Inputs

__all__ = ["export_network", "remove_dead_units"]

LAYOUTS = ("auto", "dense", "csr")


def export_network(
    module: nn.Module, names: Iterable[str] | None = None, example: Any = None, layout: str = "auto"
) -> SmallNetwork:
    """The small network of a module with zeros.

    Args:
        module: the module, which is not changed.
        names: layers whose units may go; None are all linear and convolutional ones.
        example: inputs of the module, in the form `predict` takes them, to measure with; without
            them all layers stay dense, and units of linear layers that a batch norm follows are
            kept (its numbers could be those of the positions of a sequence), unless something is
            flattened before.
        layout: "dense", "csr", or "auto": for each linear layer the faster one on the example.
            Those with hooks stay dense, and those whose weights another module reads itself, as
            `nn.TransformerEncoderLayer` does.

    Raises:
        InputError: an unknown layout or layer, an example that the module does not take, a module
            with sparse layers.

    Example:
        >>> from subbayes import sparse
        >>> net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
        >>> export_network(sparse.prune(net, 0.5, structure="units")).units["0"]
        (10, 5)
    """
    check_choice("layout", layout, LAYOUTS)
    if not isinstance(module, nn.Module):
        fail_type("module", "a torch.nn.Module", module)
    if any(isinstance(own, SparseLayer) for own in module.modules()):
        fail(
            "module",
            "a module with zeros",
            "one that convert() has made",
            "Train it, and call export() of the result",
        )
    chosen = _chosen(module, names)
    inputs = None if example is None else as_example(copy.deepcopy(module).eval(), example)
    before = sum(p.numel() for p in module.parameters())
    small, units = remove_dead_units(module, chosen, inputs)
    small, layouts = _laid_out(small, chosen, inputs, layout)
    after = sum(p.numel() for p in small.parameters())
    after += sum(t.values().numel() if t.layout == torch.sparse_csr else 0 for t in small.buffers())
    return SmallNetwork(small.eval().requires_grad_(False), units, layouts, (before, after))


def _chosen(module: nn.Module, names: Any) -> tuple[str, ...]:
    if names is None:  # those of a subclass may do more
        return tuple(name for name, own in module.named_modules() if type(own) in LAYERS)
    if isinstance(names, Tensor) or not isinstance(names, Iterable):
        fail_type("names", "names of layers", names, "Pass inputs as example=")
    names = (names,) if isinstance(names, str) else tuple(names)
    known = [name for name, own in module.named_modules() if isinstance(own, LAYERS)]
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        fail(
            "names", f"linear or convolutional layers: {', '.join(known)}", ", ".join(unknown)[:200]
        )
    return names


# --- dead units -----------------------------------------------------------------------------------


def remove_dead_units(
    module: nn.Module, names: tuple[str, ...], example: Inputs | None = None
) -> tuple[nn.Module, dict[str, tuple[int, int]]]:
    """A copy without dead units.

    Args:
        module: the module.
        names: layers whose units may go.
        example: inputs of the module, see `export_network`.

    Returns:
        The copy, and the units of each layer before and after.
    """
    small = copy.deepcopy(module).eval()
    layers = {name: small.get_submodule(name) for name in names}
    before = {name: len(layer.weight) for name, layer in layers.items()}  # type: ignore[arg-type]
    found = [edge for edge in edges(small, names, example) if edge.by_unit]
    moved = True
    while moved:
        moved = sum(_prune(small, edge) for edge in found) > 0
    return small, {
        name: (before[name], len(small.get_submodule(name).weight))  # type: ignore
        for name in names
    }


@torch.no_grad()
def _prune(module: nn.Module, edge: Edge) -> bool:
    """Remove the dead units of a edge; whether there were any."""
    source, reader = module.get_submodule(edge.source), module.get_submodule(edge.reader)
    w, r = source.weight, reader.weight
    assert isinstance(w, Tensor)
    assert isinstance(r, Tensor)
    columns = r.unflatten(1, (len(w), -1))
    unread = (columns == 0).transpose(0, 1).flatten(1).all(1)
    bias = source.bias if isinstance(source.bias, Tensor) else w.new_zeros(len(w))
    constant = bias.clone()
    for step in edge.functions:
        constant = step(constant)
    silent = (w == 0).flatten(1).all(1)
    padded = not isinstance(reader, nn.Linear) and getattr(reader, "padding", 0) not in (
        0,
        (0,),
        (0, 0),
    )
    silent &= (constant == 0) if padded else torch.isfinite(constant)
    _fold(reader, columns, torch.where(silent & ~unread, constant, 0.0))
    columns[:, silent] = 0.0  # what they said has been folded
    dead = unread | silent
    if not bool(dead.any()):
        return False
    if bool(dead.all()):
        dead[0] = False  # a layer keeps a unit
        if not bool(dead.any()):
            return False
    _drop(module, edge, ~dead)
    return True


def _fold(reader: nn.Module, columns: Tensor, constant: Float[Tensor, "u"]) -> None:
    if not bool((constant != 0).any()):
        return
    added = torch.einsum("ouk,u->o", columns.flatten(2), constant)
    if isinstance(reader.bias, Tensor):
        reader.bias.add_(added)
    else:
        reader.register_parameter("bias", nn.Parameter(added))


def _drop(module: nn.Module, edge: Edge, kept: Bool[Tensor, "u"]) -> None:
    """Keep some units of a edge alone."""
    source, reader = module.get_submodule(edge.source), module.get_submodule(edge.reader)
    count = int(kept.sum())
    source.weight = nn.Parameter(source.weight[kept].clone())  # type: ignore[index]
    if isinstance(source.bias, Tensor):
        source.bias = nn.Parameter(source.bias[kept].clone())
    r = reader.weight
    assert isinstance(r, Tensor)
    reader.weight = nn.Parameter(r.unflatten(1, (len(kept), -1))[:, kept].flatten(1, 2))
    for owner, name, own in ((source, "out", count), (reader, "in", reader.weight.shape[1])):
        for ending in ("features", "channels"):
            if hasattr(owner, f"{name}_{ending}"):
                setattr(owner, f"{name}_{ending}", own)
    for norm in edge.norms:
        own_norm = module.get_submodule(norm)
        for part in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(own_norm, part)
            if isinstance(value, nn.Parameter):
                setattr(own_norm, part, nn.Parameter(value[kept].clone()))
            elif value is not None:
                setattr(own_norm, part, value[kept].clone())
        own_norm.num_features = count  # type: ignore[assignment]


# --- layouts --------------------------------------------------------------------------------------


def _laid_out(
    module: nn.Module, names: tuple[str, ...], example: Inputs | None, layout: str
) -> tuple[nn.Module, dict[str, str]]:
    """The module with CSR layers where that is asked for or faster; the layouts."""
    chosen = dict.fromkeys(names, "dense")
    if layout == "dense" or (layout == "auto" and example is None):
        return module, chosen
    flow = DataFlow.of(module, names)
    thin = layers_for_products(module, names, flow)
    if not thin:
        return module, chosen
    laid = copy.deepcopy(module) if layout == "auto" else module
    flow.overwrite(laid)
    # tiles are cut from what comes without a name; a single layer is left as it is
    tiled = flow.by_row and not isinstance(example, dict) and "" not in thin
    laid = use_tiles(laid) if tiled else laid
    for name in thin:
        dense = laid.get_submodule(name)
        assert isinstance(dense, nn.Linear)
        sparse = CsrLinear(dense)
        sparse.by_row = tiled
        if layout == "csr" or _is_faster(sparse, dense, _seen(laid, dense, example)):
            laid = replace_layer(laid, name, sparse)
            chosen[name] = "csr"
    if layout == "auto" and not ("csr" in chosen.values() and _is_faster(laid, module, example)):
        return module, dict.fromkeys(names, "dense")
    return laid, chosen


def _seen(module: nn.Module, layer: nn.Module, example: Inputs | None) -> Tensor | None:
    """What a layer reads, if it is called, laid out in memory as the layers before it do now."""
    if example is None:
        return None
    seen: list[Tensor] = []
    forward = layer.forward

    def noting(*args: Any, **named: Any) -> Any:
        seen.append((*args, *named.values())[0].detach())
        return forward(*args, **named)

    layer.forward = noting  # a hook would keep tiles away
    try:
        with torch.no_grad():
            args, kwargs = arguments(example)
            module(*args, **kwargs)
    finally:
        del layer.forward
    return seen[0] if seen else None


def _is_faster(one: nn.Module, other: nn.Module, inputs: Inputs | None) -> bool:
    """Which takes less time for inputs, if these are known."""
    return inputs is not None and _seconds(one, inputs) < _seconds(other, inputs)


def _seconds(module: nn.Module, inputs: Inputs, rounds: int = 7) -> float:
    """Least time of a forward pass."""
    args, kwargs = arguments(inputs)
    with torch.no_grad():
        module(*args, **kwargs)
        found = []
        for _ in range(rounds):
            begun = time.perf_counter()
            module(*args, **kwargs)
            found.append(time.perf_counter() - begun)
    return min(found)

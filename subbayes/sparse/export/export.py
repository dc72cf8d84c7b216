"""Export of a module with zeros as a small network: dead units removed, layers dense or CSR.

A unit is dead if nothing reads it, or if no weight leads into it: then it is a constant, which is
added to the bias of the layer that reads it. Removing a unit can kill others, so this is repeated
until nothing changes. Which layer reads which is found by tracing the module (`dependency_graph`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from subbayes.sparse.dependency_graph import DataFlow, Edge, edges
from subbayes.sparse.export.csr_linear import CsrLinear
from subbayes.sparse.export.example import as_example
from subbayes.sparse.export.small_network import SmallNetwork, set_sizes
from subbayes.sparse.export.tiled_layers import layers_for_products, use_tiles
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import LAYERS, replace_layer
from subbayes.utils.checks import check_choice, fail, fail_type
from subbayes.utils.types import Inputs

LAYOUTS = ("auto", "dense", "csr")
_LEAST_WEIGHTS, _MOST_DENSITY = 2**14, 0.25  # of a layer for which "auto" chooses "csr"


def export_network(
    module: nn.Module, names: Iterable[str] | None = None, example: Any = None, layout: str = "auto"
) -> SmallNetwork:
    """The small network of a module with zeros.

    Args:
        module: the module, which is not changed.
        names: layers whose units may be removed; by default all linear and convolutional ones.
        example: inputs of the module, in the form `predict` takes them. Without them "auto" keeps
            all layers dense, and units of linear layers before a batch norm are
            kept unless something is flattened before (they could be positions of a sequence).
        layout: "dense", "csr", or "auto": "csr" for linear layers on the CPU that keep at most a
            quarter of at least 16,384 weights, where sparse products are faster. Layers with hooks,
            and those whose weights another module reads directly, as `nn.TransformerEncoderLayer`
            does, are always dense.

    Raises:
        InputError: an unknown layout or layer, an example that the module does not take, a module
            with sparse layers.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
        >>> _ = nn.init.zeros_(net[0].weight[:5])
        >>> export_network(net).units["0"]
        (10, 5)
    """
    check_choice("layout", layout, LAYOUTS)
    if any(isinstance(own, SparseLayer) for own in module.modules()):
        fail(
            "module",
            "a module without sparse layers",
            "one that convert() has made",
            "Train it, and call export() of the result",
        )
    selected = _selected_names(module, names)
    inputs = None if example is None else as_example(copy.deepcopy(module).eval(), example)
    before = sum(p.numel() for p in module.parameters())
    small, units = remove_dead_units(module, selected, inputs)
    small, layouts = _choose_layouts(small, selected, inputs, layout)
    after = sum(p.numel() for p in small.parameters())
    after += sum(t.values().numel() if t.layout == torch.sparse_csr else 0 for t in small.buffers())
    return SmallNetwork(small.eval().requires_grad_(False), units, layouts, (before, after))


def _selected_names(module: nn.Module, names: Any) -> tuple[str, ...]:
    if names is None:  # subclasses may do more
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
    """A copy without dead units, and the number of units of each layer before and after.

    Args:
        module: the module.
        names: layers whose units may be removed.
        example: inputs of the module, see `export_network`.
    """
    small = copy.deepcopy(module).eval()
    layers = {name: small.get_submodule(name) for name in names}
    before = {name: len(layer.weight) for name, layer in layers.items()}  # type: ignore[arg-type]
    found = [edge for edge in edges(small, names, example) if edge.norms_per_unit]
    removed = True
    while removed:
        removed = sum(_remove_units(small, edge) for edge in found) > 0
    return small, {
        name: (before[name], len(small.get_submodule(name).weight))  # type: ignore
        for name in names
    }


@torch.no_grad()
def _remove_units(module: nn.Module, edge: Edge) -> bool:
    """Remove the dead units of an edge; returns whether there were any."""
    source: Any = module.get_submodule(edge.source)
    reader: Any = module.get_submodule(edge.reader)
    w = source.weight
    columns = reader.weight.unflatten(1, (len(w), -1))
    unread = (columns == 0).transpose(0, 1).flatten(1).all(1)
    constant = w.new_zeros(len(w)) if source.bias is None else source.bias.clone()
    for function in edge.functions:
        constant = function(constant)
    silent = (w == 0).flatten(1).all(1)
    padding = 0 if isinstance(reader, nn.Linear) else reader.padding
    padded = padding not in (0, (0,), (0, 0))
    silent &= (constant == 0) if padded else torch.isfinite(constant)
    constant = torch.where(silent & ~unread, constant, 0.0)
    if bool((constant != 0).any()):
        added = torch.einsum("ouk,u->o", columns.flatten(2), constant)
        if reader.bias is None:
            reader.register_parameter("bias", nn.Parameter(added))
        else:
            reader.bias.add_(added)
    columns[:, silent] = 0.0  # now in the bias
    dead = unread | silent
    if bool(dead.all()):
        dead[0] = False  # a layer has at least one unit
    if not bool(dead.any()):
        return False
    _select_units(source, reader, [module.get_submodule(name) for name in edge.norms], ~dead)
    return True


def _select_units(source: Any, reader: Any, norms: list[Any], kept: Bool[Tensor, "u"]) -> None:
    columns = reader.weight.unflatten(1, (len(kept), -1))
    reader.weight = nn.Parameter(columns[:, kept].flatten(1, 2))
    for owner in (source, *norms):
        for name in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(owner, name, None)
            if value is not None:
                part = value[kept].clone()
                is_parameter = isinstance(value, nn.Parameter)
                setattr(owner, name, nn.Parameter(part) if is_parameter else part)
    set_sizes(source, source.weight)
    set_sizes(reader, reader.weight)
    for norm in norms:
        norm.num_features = int(kept.sum())


# --- layouts --------------------------------------------------------------------------------------


def _choose_layouts(
    module: nn.Module, names: tuple[str, ...], example: Inputs | None, layout: str
) -> tuple[nn.Module, dict[str, str]]:
    """The module with CSR layers if requested or worth it, and the layout of each layer."""
    layouts = dict.fromkeys(names, "dense")
    if layout == "dense" or (layout == "auto" and example is None):
        return module, layouts
    flow = DataFlow.of(module, names)
    chosen = [
        name
        for name in layers_for_products(module, names, flow)
        if layout == "csr" or _is_worth_csr(module.get_parameter(f"{name}.weight".lstrip(".")))
    ]
    if not chosen:
        return module, layouts
    flow.work_in_place(module)
    # tiles are made of positional inputs, and not for a single layer
    tiled = flow.is_rowwise and not isinstance(example, dict) and "" not in chosen
    module = use_tiles(module) if tiled else module
    for name in chosen:
        dense: Any = module.get_submodule(name)
        made = CsrLinear(dense)
        made.keeps_tiles = tiled
        module = replace_layer(module, name, made)
    return module, layouts | dict.fromkeys(chosen, "csr")


def _is_worth_csr(weight: Tensor) -> bool:
    """Whether products with compressed sparse rows are faster: few of many weights are left."""
    included = int(weight.count_nonzero())
    large = weight.numel() >= _LEAST_WEIGHTS and weight.device.type == "cpu"
    return large and included <= _MOST_DENSITY * weight.numel()

r"""Gradients of every observation's outputs, layer by layer, without a Jacobian.

A network runs once on a batch. Hooks keep what went into each layer with selected weights; a
backward pass through the activations alone gives, for a cotangent u (N, C), the gradients
$g_n = \partial (u_n^\top f_n) / \partial h_n$ of what came out of the layer. With both, all of
$u_n^\top J_n$ is known for every n, as outer products (see `layer_kinds`): whole rows, their Gram
matrices, their sums of squares or single entries can be had from them. C cotangents are C
backward passes over one forward pass. Of a layer that runs several times, the places of all runs
count as its places.

Weights in no known layer, in a layer that does not run, weights that two layers share and layers
that treat rows otherwise than expected are differentiated row by row instead (`Rest`), so that
every module is exact. Which layers can be trusted is found out by comparing
their gradients with those of autograd on a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vjp, vmap

from subbayes.curvature.layer_kinds import Joined, Kind, Right, contract, kind_of, scattered
from subbayes.data.data import leaves, n_rows, take
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.network import Network
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.utils.types import Inputs

__all__ = [
    "CapturedBatch",
    "Layer",
    "LayerGradients",
    "Layers",
    "Rest",
    "RestGradients",
    "Span",
    "capture_batch",
]

Part = tuple[slice, Float[Tensor, "n p"]]
_TRIED = 3


@dataclass(frozen=True)
class Span:
    """Selected weights of one parameter: their place in the flat vector, and in the parameter.

    Attributes:
        place: where they lie in the flat vector of weights.
        shape: of the whole parameter.
        keep: positions in the flattened parameter, where a mask selects only a part.
    """

    place: slice
    shape: torch.Size
    keep: Tensor | None = None

    def selected(self, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n q"]:
        """Columns of the selected weights out of those of the whole parameter."""
        return rows if self.keep is None else rows[:, self.keep]


@dataclass(frozen=True)
class Layer:
    """A layer whose gradients follow from what went in and the gradient of what came out.

    Attributes:
        name: of the submodule.
        module: the submodule of the network's private copy.
        kind: how it reads input and gradient.
        weight: its selected weights, if it has any.
        bias: its selected biases, if it has any.
    """

    name: str
    module: nn.Module = field(repr=False)
    kind: Kind = field(repr=False)
    weight: Span | None
    bias: Span | None

    @property
    def spans(self) -> tuple[Span, ...]:
        """Weight and bias, as far as they are selected."""
        return tuple(span for span in (self.weight, self.bias) if span is not None)

    @property
    def size(self) -> int:
        """Number of selected weights."""
        return sum(span.place.stop - span.place.start for span in self.spans)


@dataclass(frozen=True)
class LayerGradients:
    """Gradients of u_n f_n in a layer's weights, for N rows, in factors.

    Attributes:
        layer: the layer.
        left: gradients g of what came out, shape (N, T, groups, O).
        right: from a slice of rows to what went in, (n, T, groups, I): patches for a
            convolution, normalised inputs for a normalisation, for an embedding the index
            (n, T, 1, 1), -1 for none.
    """

    layer: Layer
    left: Float[Tensor, "N t groups o"]
    right: Right = field(repr=False)

    def parts(self, rows: slice = slice(None)) -> Iterator[Part]:
        """Rows of the Jacobian: pairs (place in the flat vector, gradients (n, size))."""
        left, layer = self.left[rows], self.layer
        if layer.weight is not None:
            right = self.right(rows)
            whole = (
                scattered(left, right, layer.weight.shape[0])
                if layer.kind.name == "embedding"
                else contract(left, right)
            )
            yield layer.weight.place, layer.weight.selected(whole)
        if layer.bias is not None:
            yield layer.bias.place, layer.bias.selected(left.sum(1).flatten(1))


@dataclass(frozen=True)
class Rest:
    """Weights in no layer that can be trusted, differentiated row by row.

    Attributes:
        spans: their selected weights, parameter by parameter.
        size: number of them.
    """

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(span.place.stop - span.place.start for span in self.spans)


@dataclass(frozen=True)
class RestGradients:
    """Gradients of u_n f_n in the remaining weights, for N rows, computed when asked for."""

    layer: Rest
    plan: Layers = field(repr=False)
    inputs: Inputs = field(repr=False)
    cotangents: Float[Tensor, "N C"] = field(repr=False)

    def parts(self, rows: slice = slice(None)) -> Iterator[Part]:
        """Rows of the Jacobian: pairs (place in the flat vector, gradients (n, size))."""
        gradients = self.plan.by_rows(take(self.inputs, rows), self.cotangents[rows])
        sizes = [span.place.stop - span.place.start for span in self.layer.spans]
        for span, part in zip(self.layer.spans, gradients.split(sizes, 1), strict=True):
            yield span.place, part


Gradients = LayerGradients | RestGradients


class Layers:
    """The layers of a network whose gradients can be had in factors, and the rest.

    Args:
        network: the network; gradients are taken at its weights.
        inputs: a few rows in the form the module takes, to try the layers on.

    Attributes:
        layers: those that can be trusted.
        rest: the other weights, or None.
        row_bytes: about what a captured row holds: activations kept for the backward passes.
        gradient_bytes: what the gradients of one cotangent hold for a row.

    Example:
        >>> network = Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> plan = Layers(network, torch.randn(2, 3))
        >>> [layer.name for layer in plan.layers], plan.rest
        (['0', '2'], None)
        >>> batch = plan.capture(torch.randn(5, 3))
        >>> first, last = batch.pull(torch.ones(5, 2))
        >>> first.left.shape, first.right(slice(None)).shape  # gradients out, activations in
        (torch.Size([5, 1, 1, 4]), torch.Size([5, 1, 1, 3]))
        >>> [(place, rows.shape) for place, rows in last.parts()]
        [(slice(16, 24, None), torch.Size([5, 8])), (slice(24, 26, None), torch.Size([5, 2]))]
    """

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self.network = network
        few = torch.arange(_TRIED, device=leaves(inputs)[0].device) % n_rows(inputs)
        self.rest: Rest | None = None
        self.layers = self._candidates()
        self.layers = self._trusted(take(inputs, few))
        self.row_bytes, self.gradient_bytes = _bytes(self, take(inputs, few))
        known = {span.place.start for layer in self.layers for span in layer.spans}
        left = [span for span in self._spans().values() if span.place.start not in known]
        self.rest = Rest(tuple(left)) if left else None
        self._loops = False

    def __repr__(self) -> str:
        rest = f", {self.rest.size} weights row by row" if self.rest else ""
        return f"Layers({len(self.layers)} layers{rest})"

    def capture(self, inputs: Inputs) -> CapturedBatch:
        """Run the network on a batch, keeping what its layers see."""
        return CapturedBatch(self, inputs)

    # --- which layers -------------------------------------------------------------------------

    def _spans(self) -> dict[str, Span]:
        masks, frozen = self.network.masks, self.network.unflatten(self.network.weights)
        return {
            name: Span(
                place,
                frozen[name].shape,
                masks[name].flatten().nonzero().flatten() if name in masks else None,
            )
            for name, place in self.network.spans.items()
        }

    def _candidates(self) -> tuple[Layer, ...]:
        """Layers of a known kind that do not share weights."""
        spans, owners = self._spans(), list(self.network.owners())
        uses = [path for _, _, chosen in owners for path in chosen.values()]
        found = []
        for name, module, chosen in owners:
            kind, mine = (
                kind_of(module),
                {
                    own: path
                    for own, path in chosen.items()
                    if own in ("weight", "bias") and uses.count(path) == 1
                },
            )
            if kind is not None and mine:
                found.append(
                    Layer(
                        name,
                        module,
                        kind,
                        *(spans[mine[own]] if own in mine else None for own in ("weight", "bias")),
                    )
                )
        return tuple(found)

    def _trusted(self, inputs: Inputs) -> tuple[Layer, ...]:
        """Layers whose gradients are those of autograd, row by row."""
        batch = CapturedBatch(self, inputs)
        seen = [layer for layer in self.layers if batch.calls[layer.name] > 0]
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(batch.outputs.shape, generator=generator, dtype=torch.float64)
        u = u.to(batch.outputs)
        truth = torch.stack(
            [
                batch.total(u * (torch.arange(len(u), device=u.device) == n)[:, None])
                for n in range(len(u))
            ]
        )
        return tuple(layer for layer in seen if _agrees(batch, layer, u, truth))

    # --- the rest ---------------------------------------------------------------------------

    def by_rows(
        self, inputs: Inputs, cotangents: Float[Tensor, "n C"], where: Tensor | None = None
    ) -> Float[Tensor, "n p"]:
        """Gradients of u_n f_n in the weights outside the layers, one row at a time in effect.

        Args:
            inputs: rows.
            cotangents: u.
            where: places in the flat vector of some of these weights; by default of all.
        """
        if where is None:
            assert self.rest is not None
            where = torch.cat([torch.arange(s.place.start, s.place.stop) for s in self.rest.spans])
        where, w = where.to(self.network.device), self.network.weights

        def gradient(row: Any, u: Tensor) -> Tensor:
            def output(part: Tensor) -> Tensor:
                one = take(row, None)
                return self.network(w.index_copy(0, where, part), one)[0]

            return vjp(output, w[where])[1](u)[0]

        if not self._loops:
            try:
                with attention_without_fused_kernels():
                    return vmap(gradient)(inputs, cotangents)
            except RuntimeError as error:
                self._loops = True
                warn_of_fallback(
                    "vectorising over rows", error, "differentiating them one at a time"
                )
        return torch.stack(
            [
                self._one_row(take(inputs, slice(n, n + 1)), cotangents[n : n + 1], where)
                for n in range(len(cotangents))
            ]
        )

    def _one_row(self, row: Inputs, u: Float[Tensor, "one C"], where: Tensor) -> Tensor:
        with torch.enable_grad():
            w = self.network.weights.detach().clone().requires_grad_()
            (found,) = torch.autograd.grad(self.network(w, row), w, u)
        return found[where]


def _agrees(batch: CapturedBatch, layer: Layer, u: Tensor, truth: Float[Tensor, "n D"]) -> bool:
    try:
        (gradients,) = batch.pull(u, (layer,))
        parts = list(gradients.parts())
    except (RuntimeError, AssertionError):  # shapes other than those of rows
        return False
    tolerance = 100 * torch.finfo(truth.dtype).eps ** 0.75
    return all(
        rows.shape == truth[:, place].shape
        and bool(((rows - truth[:, place]).norm() <= tolerance * truth.norm()).all())
        for place, rows in parts
    )


def _bytes(plan: Layers, inputs: Inputs) -> tuple[int, int]:
    """Bytes that autograd keeps for one more row, and those of the layers' outputs."""
    counts = []
    for rows in (1, 2):
        sizes: list[int] = []

        def kept(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            batch = plan.capture(take(inputs, slice(rows)))
        counts.append(sum(sizes))
    outputs = batch.outputs
    return max(counts[1] - counts[0], outputs[0].nbytes), (
        batch.output_numbers // len(batch) * outputs.element_size()
    )


class CapturedBatch:
    """A network run on a batch: outputs, and what each layer saw.

    Args:
        plan: the layers.
        inputs: N rows.

    Attributes:
        outputs: shape (N, C), detached.
        calls: how often each layer ran.
        output_numbers: how many numbers the layers returned together.
    """

    def __init__(self, plan: Layers, inputs: Inputs) -> None:
        self.plan, self.inputs = plan, inputs
        self.calls = {layer.name: 0 for layer in plan.layers}
        self.output_numbers = 0
        self._rights: dict[str, list[Right]] = {}
        self._edges: dict[str, list[GradientEdge]] = {}
        network, n = plan.network, n_rows(inputs)
        hooks = {layer.name: self._hook(layer, n) for layer in plan.layers}
        with torch.enable_grad(), network.forward_hooks(hooks):
            self._w = network.weights.detach().clone().requires_grad_()
            self._outputs = network(self._w, inputs)
        self.outputs: Float[Tensor, "N C"] = self._outputs.detach()

    def __len__(self) -> int:
        return len(self.outputs)

    def _hook(self, layer: Layer, n: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[layer.name] += 1
            x = args[0] if args else next(iter(kwargs.values()), None)
            if not (isinstance(output, Tensor) and isinstance(x, Tensor)):
                return
            if x.ndim >= layer.kind.ndim(module) and x.shape[0] % n == 0 and output.requires_grad:
                self._edges.setdefault(layer.name, []).append(get_gradient_edge(output))
                self.output_numbers += output.numel()
                if layer.weight is not None:
                    with torch.no_grad():
                        self._rights.setdefault(layer.name, []).append(
                            layer.kind.right(module, x.detach(), n)
                        )

        return hook

    def pull(
        self, cotangents: Float[Tensor, "N C"], layers: tuple[Layer, ...] | None = None
    ) -> list[Gradients]:
        """Gradients of u_n f_n for every row, layer by layer, from one backward pass.

        Args:
            cotangents: u, one for each row.
            layers: of these layers alone; by default of all of them and of the rest.
        """
        wanted = self.plan.layers if layers is None else layers
        missing = [
            layer.name
            for layer in wanted
            if len(self._edges.get(layer.name, ())) < max(1, self.calls[layer.name])
        ]
        assert not missing or layers is not None, f"layers that treat rows otherwise: {missing}"
        if missing:
            raise RuntimeError("a layer that treats rows otherwise")
        edges = [edge for layer in wanted for edge in self._edges[layer.name]]
        found = iter(
            torch.autograd.grad(
                self._outputs, edges, cotangents, retain_graph=True, allow_unused=True
            )
            if edges
            else ()
        )
        gradients: list[Gradients] = []
        for layer in wanted:
            runs = [next(found) for _ in self._edges[layer.name]]
            if any(g is not None for g in runs):
                gradients.append(self._of_layer(layer, runs))
        if layers is None and self.plan.rest is not None:
            gradients.append(RestGradients(self.plan.rest, self.plan, self.inputs, cotangents))
        return gradients

    def _of_layer(self, layer: Layer, runs: list[Any]) -> LayerGradients:
        """Gradients of what came out of a layer, run by run (or None), beside what went in."""
        used = [k for k, g in enumerate(runs) if g is not None]
        lefts = [layer.kind.left(layer.module, runs[k], len(self)) for k in used]
        rights = (
            [self._rights[layer.name][k] for k in used] if layer.weight is not None else [_none]
        )
        if len(lefts) == 1:
            return LayerGradients(layer, lefts[0], rights[0])
        return LayerGradients(
            layer, torch.cat(lefts, 1), rights[0] if layer.weight is None else Joined(rights)
        )

    def total(self, cotangents: Float[Tensor, "N C"]) -> Float[Tensor, "D"]:
        """The sum over rows of u_n J_n."""
        (found,) = torch.autograd.grad(self._outputs, self._w, cotangents, retain_graph=True)
        return found

    def rows(self, cotangents: Float[Tensor, "N C"]) -> Float[Tensor, "N D"]:
        """All of u_n J_n, dense: N D numbers."""
        dense = self._w.new_zeros(len(self), self._w.numel())
        for gradients in self.pull(cotangents):
            for place, part in gradients.parts():
                dense[:, place] = part
        return dense


def _none(rows: slice) -> Tensor:
    raise AssertionError("a layer whose weight is not selected")


def capture_batch(network: Network, inputs: Inputs) -> CapturedBatch:
    """Run a network once on a batch, keeping what its layers see; see `Layers`.

    For several batches make `Layers` once and call its `capture` on each.
    """
    return Layers(network, inputs).capture(inputs)

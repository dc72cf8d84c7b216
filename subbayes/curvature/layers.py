r"""Gradients of every observation's outputs, layer by layer, without a Jacobian.

Hooks store the input of each layer with selected weights during one forward pass. For a cotangent
u (N, C), a backward pass through the activations alone gives the gradients
$g_n = \partial (u_n^\top f_n) / \partial h_n$ of the layer's outputs h. Both together determine
$u_n^\top J_n$ for every n as outer products (see `layer_kinds`), from which rows, Gram matrices,
sums of squares or single entries are computed. C cotangents cost C backward passes. The places of
a layer that runs several times are those of all runs.

Each layer is verified on a few rows against autograd, and the sum over all rows on the first batch
and wherever a layer has another number of inputs for each row, as of a mixture of experts. Weights
the verified layers (of an unknown layer, a layer that does not run, or shared by two layers) are
differentiated row by row, so that the result is exact for every module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vjp, vmap

from subbayes.curvature.layer_kinds import (
    ConcatenatedRuns,
    Kind,
    RightFactor,
    embedding_gradient,
    kind_of,
    sum_of_outer_products,
)
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.network import Network
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.utils.checks import fail
from subbayes.utils.memory import temporary_size
from subbayes.utils.trees import leaves, n_rows, take
from subbayes.utils.types import Inputs, Outputs, Weights

Part = tuple[slice, Float[Tensor, "R n p"]]
_TEST_ROWS = 3
_DENSE_BYTES = 16 * 2**20  # of patches, on a CPU


@dataclass(frozen=True)
class Span:
    """Selected weights of one parameter.

    Attributes:
        place: their positions in the flat weight vector.
        shape: shape of the whole parameter.
        keep: their positions in the flattened parameter if a mask selects a part of it.
    """

    place: slice
    shape: torch.Size
    keep: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of selected weights."""
        return self.place.stop - self.place.start

    def selected(self, rows: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Columns of the selected weights out of those of the whole parameter."""
        return rows if self.keep is None else rows[..., self.keep]


@dataclass(frozen=True)
class Layer:
    """A layer whose gradients follow from its inputs and the gradients of its outputs.

    Its module is that of the network's private copy; weight and bias are the selected ones.
    """

    name: str
    module: nn.Module = field(repr=False)
    kind: Kind = field(repr=False)
    weight: Span | None
    bias: Span | None

    @property
    def spans(self) -> tuple[Span, ...]:
        """Selected weights and biases."""
        return tuple(span for span in (self.weight, self.bias) if span is not None)

    @property
    def size(self) -> int:
        """Number of selected weights."""
        return sum(span.size for span in self.spans)

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies by a weight matrix all of whose entries are selected."""
        return (
            self.kind.name in ("linear", "conv")
            and self.weight is not None
            and all(span.keep is None for span in self.spans)
        )


@dataclass(frozen=True)
class LayerGradients:
    """Gradients of u_rn f_n in a layer's weights, for R cotangents of N rows, in factors.

    Attributes:
        layer: the layer.
        left: gradients g of the layer's outputs, shape (R, N, T, groups, O).
        right: function from a slice of rows to the layer's inputs, (n, T, groups, I): patches of
            a convolution, normalised inputs of a normalisation, indices of an embedding
            (n, T, 1, 1), with -1 for padding.
    """

    layer: Layer
    left: Float[Tensor, "R N t groups o"]
    right: RightFactor = field(repr=False)

    def parts(self, rows: slice = slice(None)) -> Iterator[Part]:
        """Rows of the Jacobian: pairs (positions in the flat vector, gradients (R, n, size))."""
        left, layer = self.left[:, rows], self.layer
        if layer.weight is not None:
            right = self.right(rows)
            whole = [
                embedding_gradient(one, right, layer.weight.shape[0])
                if layer.kind.name == "embedding"
                else sum_of_outer_products(one, right)
                for one in left
            ]
            yield layer.weight.place, layer.weight.selected(torch.stack(whole))
        if layer.bias is not None:
            yield layer.bias.place, layer.bias.selected(left.sum(2).flatten(2))

    def dense(self, rows: slice, precise: bool = False) -> Float[Tensor, "R n p"]:
        """The gradients as a dense tensor in float64, in the order of the layer's spans.

        They are sums over places in the dtype of the network, or in float64 if `precise`.
        """
        if not self.layer.is_matrix:
            return torch.cat([part.double() for _, part in self.parts(rows)], 2)
        start, stop, _ = rows.indices(self.left.shape[1])
        most = temporary_size(_DENSE_BYTES, self.left.device)
        step = most // (8 * self.right(slice(0, 1)).numel())  # patches may be large
        return torch.cat([self._matrices(some, precise) for some in slices(stop, step, start)], 1)

    def _matrices(self, rows: slice, precise: bool) -> Float[Tensor, "R n p"]:
        left, right = self.left[:, rows], self.right(rows)
        if precise:
            left, right = left.double(), right.double()
        whole = torch.einsum("rntgo,ntgi->rngoi", left, right).flatten(2).double()
        if self.layer.bias is None:
            return whole
        return torch.cat([whole, left.sum(2).flatten(2).double()], 2)


@dataclass(frozen=True)
class OtherWeights:
    """Weights outside the verified layers, differentiated row by row."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(span.size for span in self.spans)

    @property
    def positions(self) -> Int[Tensor, "p"]:
        """Positions in the flat weight vector."""
        return torch.cat([torch.arange(s.place.start, s.place.stop) for s in self.spans])


@dataclass(frozen=True)
class OtherGradients:
    """Gradients of u_rn f_n in the other weights, for R cotangents of N rows."""

    layer: OtherWeights
    rows: Float[Tensor, "R N p"]

    def parts(self, rows: slice = slice(None)) -> Iterator[Part]:
        """Rows of the Jacobian: pairs (positions in the flat vector, gradients (R, n, size))."""
        sizes = [span.size for span in self.layer.spans]
        for span, part in zip(self.layer.spans, self.rows[:, rows].split(sizes, 2), strict=True):
            yield span.place, part

    def dense(self, rows: slice, precise: bool = False) -> Float[Tensor, "R n p"]:
        """The gradients as a dense tensor in float64, in the order of the spans."""
        return self.rows[:, rows].double()


Gradients = LayerGradients | OtherGradients


def slices(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of a range, each of at least 1."""
    step = max(1, step)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


class Layers:
    """The layers of a network whose gradients are known in factors, and the other weights.

    Args:
        network: the network; gradients are taken at its weights.
        inputs: a few rows in the form the module takes, for the verification.

    Attributes:
        layers: the verified layers.
        rest: the other weights, or None.
        row_bytes: memory of the activations of one row, about.
        gradient_bytes: memory of the gradients of one cotangent for one row.
        places: number of places of each layer at the first row.

    Example:
        >>> network = Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> plan = Layers(network, torch.randn(2, 3))
        >>> [layer.name for layer in plan.layers], plan.rest
        (['0', '2'], None)
        >>> batch = plan.capture(torch.randn(5, 3))
        >>> first, last = batch.pull(torch.ones(1, 5, 2))
        >>> first.left.shape, first.right(slice(None)).shape  # output gradients, inputs
        (torch.Size([1, 5, 1, 1, 4]), torch.Size([5, 1, 1, 3]))
        >>> [(place, rows.shape) for place, rows in last.parts()]
        [(slice(16, 24, None), torch.Size([1, 5, 8])), (slice(24, 26, None), torch.Size([1, 5, 2]))]
    """

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self.network = network
        few = torch.arange(_TEST_ROWS, device=leaves(inputs)[0].device) % n_rows(inputs)
        self.rest: OtherWeights | None = None
        self._verified_runs: set[tuple[tuple[int, ...], ...]] = set()
        spans = self._spans()
        self.layers = self._candidates(spans)
        self.layers = self._verified(take(inputs, few))
        self.row_bytes = network.bytes_per_row(inputs)
        batch = CapturedBatch(self, take(inputs, few))
        self.gradient_bytes = batch.output_count // len(batch) * batch.outputs.element_size()
        pulled = batch.pull(torch.ones_like(batch.outputs)[None], self.layers)
        self.places = {gradients.layer.name: gradients.left.shape[2] for gradients in pulled}
        known = {span.place.start for layer in self.layers for span in layer.spans}
        left = [span for span in spans.values() if span.place.start not in known]
        self.rest = OtherWeights(tuple(left)) if left else None
        self._vectorised = True

    def __repr__(self) -> str:
        rest = f", {self.rest.size} weights row by row" if self.rest else ""
        return f"Layers({len(self.layers)} layers{rest})"

    def capture(self, inputs: Inputs) -> CapturedBatch:
        """Run the network on a batch and store the inputs of its layers.

        Raises:
            InputError: a layer whose inputs are not those of all rows in their order.
        """
        batch = CapturedBatch(self, inputs)
        if batch.runs not in self._verified_runs:
            check_sums(batch)
            self._verified_runs.add(batch.runs)
        return batch

    def _spans(self) -> dict[str, Span]:
        masks, values = self.network.masks, self.network.unflatten(self.network.weights)
        return {
            name: Span(
                place,
                values[name].shape,
                masks[name].flatten().nonzero().flatten() if name in masks else None,
            )
            for name, place in self.network.spans.items()
        }

    def _candidates(self, spans: dict[str, Span]) -> tuple[Layer, ...]:
        """Layers of a known kind, with the weights they do not share."""
        owners = list(self.network.owners())
        uses = [path for _, _, chosen in owners for path in chosen.values()]
        found = []
        for name, module, chosen in owners:
            weight, bias = (
                spans[chosen[own]] if own in chosen and uses.count(chosen[own]) == 1 else None
                for own in ("weight", "bias")
            )
            kind = kind_of(module)
            if kind is not None and (weight or bias):
                found.append(Layer(name, module, kind, weight, bias))
        return tuple(found)

    def _verified(self, inputs: Inputs) -> tuple[Layer, ...]:
        """Layers whose gradients equal those of autograd for each row."""
        batch = CapturedBatch(self, inputs)
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(batch.outputs.shape, generator=generator, dtype=torch.float64)
        u = u.to(batch.outputs)
        rows = torch.arange(len(u), device=u.device)
        truth = torch.stack([batch.vjp(u * (rows == n)[:, None]) for n in range(len(u))])
        return tuple(
            layer
            for layer in self.layers
            if batch.repeats[layer.name] and matches_autograd(batch, layer, u, truth)
        )

    def row_gradients(
        self, inputs: Inputs, cotangents: Float[Tensor, "n C"], where: Int[Tensor, "p"]
    ) -> Float[Tensor, "n p"]:
        """Gradients of u_n f_n in the weights at given positions, vectorised if possible."""
        where, w = where.to(self.network.device), self.network.weights

        def gradient(row: Any, u: Tensor) -> Tensor:
            def output(part: Tensor) -> Tensor:
                return self.network(w.index_copy(0, where, part), take(row, None))[0]

            return vjp(output, w[where])[1](u)[0]

        if self._vectorised:
            try:
                with attention_without_fused_kernels(), self.network.states_by_row():
                    return vmap(gradient)(inputs, cotangents)
            except RuntimeError as error:
                self._vectorised = False
                warn_of_fallback(
                    "vectorising over rows", error, "differentiating them one at a time"
                )
        rows = []
        for n in range(len(cotangents)):
            some = slice(n, n + 1)
            with torch.enable_grad():
                at = w.detach().clone().requires_grad_()
                outputs = self.network(at, take(inputs, some))
                rows.append(_pull(outputs, at, cotangents[some])[0][where])
        return torch.stack(rows)


class CapturedBatch:
    """A network run on a batch, with the inputs of each layer.

    Args:
        plan: the layers.
        inputs: N rows.

    Attributes:
        outputs: shape (N, C), detached.
        repeats: for each run of a layer, the leading dimension of its input divided by N; 0 where
            that is no whole number.
        output_count: total number of entries of the layers' outputs.
    """

    def __init__(self, plan: Layers, inputs: Inputs) -> None:
        self.plan, self.inputs = plan, inputs
        self.repeats: dict[str, list[int]] = {layer.name: [] for layer in plan.layers}
        self.output_count = 0
        self._rights: dict[str, list[RightFactor]] = {}
        self._edges: dict[str, list[GradientEdge]] = {}
        network, n = plan.network, n_rows(inputs)
        hooks = {layer.name: partial(self._record, layer, n) for layer in plan.layers}
        with torch.enable_grad(), network.forward_hooks(hooks):
            self._w = network.weights.detach().clone().requires_grad_()
            self._outputs = network(self._w, inputs)
        self.outputs: Outputs = self._outputs.detach()

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The repeats of all layers."""
        return tuple(map(tuple, self.repeats.values()))

    def _record(
        self, layer: Layer, n: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Keep what a layer was called with: a forward hook of its module."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        self.repeats[layer.name].append(0)
        if not (isinstance(output, Tensor) and isinstance(x, Tensor)):
            return
        if x.ndim < layer.kind.ndim or x.shape[0] % n or not output.requires_grad:
            return
        self.repeats[layer.name][-1] = x.shape[0] // n
        if x.shape[0]:
            self._edges.setdefault(layer.name, []).append(get_gradient_edge(output))
            self.output_count += output.numel()
            if layer.weight is not None:
                with torch.no_grad():
                    right = layer.kind.right(module, x.detach(), n)
                self._rights.setdefault(layer.name, []).append(right)

    def pull(
        self, cotangents: Float[Tensor, "R N C"], layers: tuple[Layer, ...] | None = None
    ) -> list[LayerGradients]:
        """Gradients of u_rn f_n for every row, layer by layer, from R backward passes.

        Args:
            cotangents: u, R for each row.
            layers: only these layers; by default all of them.
        """
        wanted = self.plan.layers if layers is None else layers
        edges = []
        for layer in wanted:
            found = self._edges.get(layer.name, [])
            if len(found) < max(1, len(self.repeats[layer.name])):
                raise RuntimeError(f"another first dimension of {layer.name!r} than the rows'")
            edges += found
        if not edges:
            return []
        pulled = [
            _pull(self._outputs, edges, u, retain_graph=True, allow_unused=True) for u in cotangents
        ]
        runs = iter(zip(*pulled, strict=True))  # of each run of a layer, for each cotangent
        of_layers = [(layer, [next(runs) for _ in self._edges[layer.name]]) for layer in wanted]
        return [
            self._of_layer(layer, each)
            for layer, each in of_layers
            if any(run[0] is not None for run in each)
        ]

    def pull_others(self, cotangents: Float[Tensor, "R N C"]) -> list[OtherGradients]:
        """Gradients of u_rn f_n in the other weights, if there are any."""
        if self.plan.rest is None:
            return []
        where = self.plan.rest.positions
        each = [self.plan.row_gradients(self.inputs, u, where) for u in cotangents]
        return [OtherGradients(self.plan.rest, torch.stack(each))]

    def _of_layer(self, layer: Layer, runs: list[tuple[Any, ...]]) -> LayerGradients:
        """Gradients of a layer from the gradients of the outputs of each run (or None)."""
        used = [k for k, run in enumerate(runs) if run[0] is not None]
        lefts = [
            torch.stack([layer.kind.left(layer.module, g, len(self)) for g in runs[k]])
            for k in used
        ]
        rights: list[RightFactor] = [_no_right]
        if layer.weight is not None:
            rights = [self._rights[layer.name][k] for k in used]
        return LayerGradients(
            layer,
            lefts[0] if len(lefts) == 1 else torch.cat(lefts, 2),
            rights[0] if len(rights) == 1 else ConcatenatedRuns(rights),
        )

    def vjp(self, cotangents: Outputs) -> Weights:
        """The sum over rows of u_n J_n."""
        return _pull(self._outputs, self._w, cotangents, retain_graph=True)[0]


def _pull(outputs: Tensor, at: Any, cotangents: Tensor, **options: Any) -> Any:
    """Gradients of the sum of outputs times cotangents.

    Given cotangents, torch imports sympy to compare shapes, which takes 60 MiB and 0.3 s.
    """
    with torch.enable_grad():
        total = (outputs * cotangents).sum()
    return torch.autograd.grad(total, at, **options)


def _no_right(rows: slice) -> Tensor:
    raise AssertionError("the layer's weight is not selected")


_AT_ONCE = 2**22  # entries of a temporary tensor
_FACTOR = 100


def matches_autograd(
    batch: CapturedBatch, layer: Layer, u: Tensor, truth: Float[Tensor, "n D"]
) -> bool:
    """Whether the gradients of a layer are those of autograd for each row.

    Args:
        batch: a few rows.
        layer: the layer.
        u: cotangents.
        truth: u_n J_n.
    """
    try:
        gradients = batch.pull(u[None], (layer,))
        parts = [(place, rows[0]) for one in gradients for place, rows in one.parts()]
    except (RuntimeError, AssertionError):  # the first dimension is not that of the rows
        return False
    tolerance = _FACTOR * torch.finfo(truth.dtype).eps ** 0.75
    return len(parts) == len(layer.spans) and all(
        rows.shape == truth[:, place].shape
        and bool((rows - truth[:, place]).norm() <= tolerance * truth.norm())
        for place, rows in parts
    )


def check_sums(batch: CapturedBatch) -> None:
    """Check the sum over all rows of the gradients of each layer against autograd.

    Args:
        batch: the rows.

    Raises:
        InputError: another sum, of a layer that takes some of the rows, or in another order.
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(batch.outputs.shape, generator=generator, dtype=torch.float64)
    u, layers = u.to(batch.outputs), batch.plan.layers
    for layer in layers:
        if not all(batch.repeats[layer.name] or [0]):
            _fail_rows(f"another first dimension of {layer.name!r} than the rows'")
    total = torch.zeros_like(batch.plan.network.weights, dtype=torch.float64)
    for gradients in batch.pull(u[None]):
        for place, gradient in _summed(gradients):
            total[place] += gradient[0, 0].double()
    truth = batch.vjp(u).double()
    tolerance = _FACTOR * batch.plan.network.rounding**0.75  # of the module, in 16 bits perhaps
    for layer in layers:
        for place in (span.place for span in layer.spans):
            if bool((total[place] - truth[place]).norm() > tolerance * truth.norm()):
                _fail_rows(f"other gradients of {layer.name!r} than those of autograd")


def _summed(gradients: LayerGradients) -> Iterator[tuple[slice, Tensor]]:
    """Sums of the gradients of a layer over blocks of rows, whose places are those of one row."""
    size = gradients.left[0, 0].numel()
    if gradients.layer.weight is not None:
        size += gradients.right(slice(0, 1)).numel()
    for rows in slices(gradients.left.shape[1], _AT_ONCE // size):
        left = gradients.left[:, rows].flatten(1, 2)[:, None]

        def right(_: slice, rows: slice = rows) -> Tensor:
            return gradients.right(rows).flatten(0, 1)[None]

        yield from replace(gradients, left=left, right=right).parts()


def _fail_rows(got: str) -> NoReturn:
    fail(
        "module",
        "layers that take all rows, or places of rows, in their order",
        got,
        "Select other weights with parameters=[...], or sample the posterior instead "
        "(inference='nuts'): layers that take some rows, as in a mixture of experts, have no "
        "curvature layer by layer",
    )

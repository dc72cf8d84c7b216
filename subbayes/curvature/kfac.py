r"""Kronecker factors: the Gauss-Newton matrix layer by layer, each block as a product of two.

For a linear layer or a convolution, with inputs a (a 1 appended for the bias) and gradients g of
its outputs at T places of N rows,

$$ \sum_{n} J_n^\top \Lambda_n J_n \approx \frac1{NT}
   \Bigl[\sum_{n,r,t} g_{nrt} g_{nrt}^\top\Bigr] \otimes
   \Bigl[\sum_{n,t} a_{nt} a_{nt}^\top\Bigr] , $$

as if inputs and gradients were independent (for convolutions, places too: the "expand" setting).
Blocks between layers are 0; other weights (of normalisations, embeddings, partly selected layers,
and outside the verified layers) have a diagonal block. The prior precision is added exactly, in
the eigenbasis of the factors. Any likelihood is supported, as the factors are those of the exact
forms.

Source: Martens and Grosse (2015), "Optimizing neural networks with Kronecker-factored approximate
curvature"; Grosse and Martens (2016) for convolutions; Ritter, Botev and Barber (2018), "A scalable
Laplace approximation for neural networks"; Eschenhagen et al. (2023) for the two settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.gram import Block, block
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layer, LayerGradients, Span
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import Terms, sum_over_rows
from subbayes.curvature.sample_then_optimise import RowNoise
from subbayes.utils.checks import check_count, check_seed
from subbayes.utils.memory import temporary_size
from subbayes.utils.types import Weights, WeightsBatch

_AT_ONCE = 2**22
FACTORS = ("outer", "inner", "values")  # tensors of the factors of a layer


@dataclass(frozen=True)
class Factors:
    """The block of one layer: its eigenvalues, and eigenvectors of the two factors, bias last."""

    layer: Layer
    outer: Float[Tensor, "groups o o"]
    inner: Float[Tensor, "groups i i"]
    values: Float[Tensor, "groups o i"]

    def gather(self, vectors: WeightsBatch) -> Float[Tensor, "s groups o i"]:
        """The entries of a layer in weight vectors, as matrices."""
        assert self.layer.weight is not None
        groups, o, i = self.values.shape
        weight = vectors[:, self.layer.weight.place].reshape(len(vectors), groups, o, -1)
        if self.layer.bias is None:
            return weight
        bias = vectors[:, self.layer.bias.place].reshape(len(vectors), groups, o, 1)
        return torch.cat([weight, bias], -1)

    def scatter(self, matrices: Float[Tensor, "s groups o i"], out: WeightsBatch) -> None:
        """Write matrices to the entries of a layer in weight vectors."""
        assert self.layer.weight is not None
        if self.layer.bias is not None:
            out[:, self.layer.bias.place] = matrices[..., -1].flatten(1).to(out)
            matrices = matrices[..., :-1]
        out[:, self.layer.weight.place] = matrices.flatten(1).to(out)


def factor_shape(layer: Layer) -> tuple[int, int, int]:
    """Groups of a layer with a weight matrix, and its outputs and inputs in each, bias included.

    Example:
        >>> from subbayes.curvature.layers import Layers
        >>> from subbayes.networks.network import Network
        >>> plan = Layers(Network(torch.nn.Linear(3, 2)), torch.randn(2, 3))
        >>> factor_shape(plan.layers[0])
        (1, 2, 4)
    """
    assert layer.weight is not None
    outputs = layer.weight.shape[0]
    groups = getattr(layer.module, "groups", 1) if layer.kind.name == "conv" else 1
    return groups, outputs // groups, layer.weight.size // outputs + (layer.bias is not None)


class Kfac(Precision):
    """The precision with Kronecker-factored blocks.

    Args:
        V, prior_precision: as for `Precision`.
        factors: factors of the layers and diagonal of the other weights (0 elsewhere), if known.
        mc_samples: number of random combinations of the gradients of a row, for many outputs; None
            takes all gradients. The diagonal of the other weights is exact.
        seed: of these.

    Raises:
        InputError: no samples.
    """

    form = "kfac"
    stored = ("diagonal",)

    def __init__(
        self,
        V: Jacobian,
        prior_precision: float,
        factors: tuple[tuple[Factors, ...], Weights] | None = None,
        *,
        mc_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(V, prior_precision)
        if mc_samples is not None:
            check_count("mc_samples", mc_samples)
        self._products: tuple[tuple[Layer, Tensor, Tensor], ...] = ()
        if factors is None:
            self._products, self.diagonal = _compute_products(V, mc_samples, check_seed(seed))
        else:
            self.factors, self.diagonal = factors

    @cached_property
    def factors(self) -> tuple[Factors, ...]:
        """The blocks of the layers, decomposed when they are first needed."""
        return tuple(_eigenbasis(*one) for one in self._products)

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal, and the factors of each layer."""
        factors = {
            f"{name}.{i}": getattr(one, name)
            for i, one in enumerate(self.factors)
            for name in FACTORS
        }
        return super().tensors() | factors

    def _scaled(self, vectors: WeightsBatch, power: float) -> WeightsBatch:
        """A power of the covariance, up to a rotation of the layers for odd halves."""
        found = vectors * (self.diagonal + self.prior_precision).pow(-power).to(vectors)
        for one in self.factors:
            inside = one.outer.mT @ one.gather(vectors).double() @ one.inner
            inside = inside * (one.values + self.prior_precision) ** -power
            one.scatter(one.outer @ inside @ one.inner.mT, found)
        return found

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Solve for each layer in its eigenbasis."""
        return self._scaled(vectors, 1.0)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        """Multiply normal draws by the symmetric root of the covariance."""
        eps = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return self._scaled(eps.to(self.diagonal.device), 0.5).to(self.network.weights)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Gram matrix in the eigenbasis, where the covariance is diagonal."""
        sigma = self.jacobian(inputs).gram(scale=self._spectrum, change=self._rotate)
        return (sigma + sigma.T) / 2

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Sums of squares and products of the rows of each input, in the eigenbasis."""
        return self.jacobian(inputs).gram_of_each(self._spectrum, self._rotate)

    @property
    def _spectrum(self) -> Float[Tensor, "p"]:
        """Variances of the weights outside the factors (any within), then in the eigenbases."""
        values = [self.diagonal, *(one.values.flatten() for one in self.factors)]
        return 1 / (torch.cat(values) + self.prior_precision)

    def _rotate(self, part: Block) -> Block:
        """Rows in the eigenbases, at the positions of the spectrum."""
        rotated, start = {}, self.size
        for one in self.factors:
            shape = one.values.shape
            span = Span(slice(start, start + shape.numel()), shape)
            rotated[one.layer.name] = one, replace(one.layer, weight=span, bias=None)
            start += shape.numel()
        return replace(
            part,
            pieces=tuple(
                _rotate(piece, *rotated[piece.layer.name])
                if isinstance(piece, LayerGradients) and piece.layer.name in rotated
                else piece
                for piece in part.pieces
            ),
        )

    def variances(self) -> Weights:
        """Computed from the squares of the eigenvectors."""
        found = (1 / (self.diagonal + self.prior_precision))[None].clone()
        for one in self.factors:
            inverse = 1 / (one.values + self.prior_precision)
            one.scatter((one.outer.square() @ inverse @ one.inner.square().mT)[None], found)
        return found[0]

    def eigenvalues(self) -> Weights:
        """All D eigenvalues of the approximation."""
        covered = torch.zeros_like(self.diagonal, dtype=torch.bool)
        for one in self.factors:
            for span in one.layer.spans:
                covered[span.place] = True
        return torch.cat([self.diagonal[~covered], *(f.values.flatten() for f in self.factors)])

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Kfac:
        """Reuse the factors."""
        factors = tuple(replace(one, values=factor * one.values) for one in self.factors)
        return Kfac(V, prior_precision, (factors, factor * self.diagonal))


def _compute_products(
    V: Jacobian, mc_samples: int | None, seed: int
) -> tuple[tuple[tuple[Layer, Tensor, Tensor], ...], Weights]:
    """The two factors of each layer, and the diagonal of the other weights (0 elsewhere)."""
    layers = [layer for layer in V.plan.layers if layer.is_matrix]
    *sums, diagonal = sum_over_rows(V, lambda rows: _sums(rows, layers, mc_samples, seed))
    found = tuple(
        (layer, outer / places, inner)
        for layer, outer, inner, places in zip(layers, *(sums[i::3] for i in range(3)), strict=True)
        if bool(places)
    )
    for layer, *_ in found:
        for span in layer.spans:
            diagonal[span.place] = 0
    return found, diagonal


def _sums(V: Jacobian, layers: list[Layer], mc_samples: int | None, seed: int) -> Terms:
    """Both products of each layer and the number of its places, and the diagonal, if needed."""
    device = V.network.device
    sums: dict[str, list[Tensor]] = {}
    for layer in layers:
        groups, o, i = factor_shape(layer)
        shapes = (groups, o, o), (groups, i, i), ()
        sums[layer.name] = [torch.zeros(s, dtype=torch.float64, device=device) for s in shapes]
    others = V.plan.rest is not None
    for part in _blocks(V, mc_samples, seed):
        for piece in part.pieces:
            if not (isinstance(piece, LayerGradients) and piece.layer.is_matrix):
                others = True
                continue
            *totals, number = sums[piece.layer.name]
            for total, term in zip(totals, _products(piece), strict=True):
                total += term
            number += piece.left.shape[1] * piece.left.shape[2]  # places of all rows of the block
    diagonal = torch.zeros(V.size, dtype=torch.float64, device=device)
    if others:
        diagonal = squared_column_norms(V)
    return (*(part for parts in sums.values() for part in parts), diagonal)


def _blocks(V: Jacobian, mc_samples: int | None, seed: int) -> Iterator[Block]:
    """Blocks with the gradients of each row, or random combinations of them."""
    if mc_samples is None or mc_samples >= V.roots:
        yield from (part for _, part in V.blocks())
        return
    noise, each = RowNoise(seed, (0,), V.network.device), V.roots * mc_samples
    row_bytes = 2 * V.plan.row_bytes + mc_samples * V.plan.gradient_bytes
    for place, batch, root in V.captured(max(1, V.memory_limit // row_bytes)):
        start, stop = V.offset + place.start, V.offset + place.stop
        eps = noise(slice(0, 1), slice(start * each, stop * each)) / mc_samples**0.5
        yield block(batch, root @ eps.reshape(len(batch), V.roots, mc_samples).to(root))


def _products(piece: LayerGradients) -> tuple[Float[Tensor, "g o o"], Float[Tensor, "g i i"]]:
    """Sums of outer products of gradients, and of inputs."""
    outer = torch.zeros((), dtype=torch.float64, device=piece.left.device)
    inner = torch.zeros_like(outer)
    n, most = piece.left.shape[1], temporary_size(_AT_ONCE, piece.left.device)
    step = max(1, most // piece.right(slice(0, 1)).numel())
    for start in range(0, n, step):
        rows = slice(start, start + step)
        left = piece.left[:, rows].double().flatten(0, 2).transpose(0, 1)  # groups, r n t, o
        right = _with_bias(piece, rows).flatten(0, 1).transpose(0, 1)
        outer, inner = outer + left.mT @ left, inner + right.mT @ right
    return outer, inner


def _rotate(piece: LayerGradients, one: Factors, layer: Layer) -> LayerGradients:
    """Gradients of a layer in the eigenbases of its factors."""

    def right(rows: slice) -> Tensor:
        return torch.einsum("ntgi,gij->ntgj", _with_bias(piece, rows), one.inner)

    left = torch.einsum("rntgo,gop->rntgp", piece.left.double(), one.outer)
    return LayerGradients(layer, left, right)


def _with_bias(piece: LayerGradients, rows: slice) -> Float[Tensor, "n t groups i"]:
    """The inputs of a layer in float64, with a 1 appended for the bias."""
    right = piece.right(rows).double()
    return right if piece.layer.bias is None else F.pad(right, (0, 1), value=1.0)


def _eigenbasis(
    layer: Layer, outer: Float[Tensor, "g o o"], inner: Float[Tensor, "g i i"]
) -> Factors:
    (e, U), (d, W) = torch.linalg.eigh(outer), torch.linalg.eigh(inner)
    values = e.clamp_min(0).unsqueeze(-1) * d.clamp_min(0).unsqueeze(-2)
    # in the layout of files, by which products have the same bits after loading
    return Factors(layer, U.contiguous(), W.contiguous(), values)

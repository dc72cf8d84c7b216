r"""Products between rows of Jacobians, layer by layer: Gram matrices (empirical tangent kernels).

For two rows with gradients $\sum_t g_t \otimes a_t$ and $\sum_s g'_s \otimes a'_s$ in a layer,

$$ \langle G, G' \rangle = \sum_{t,s} (a_t^\top a'_s)(g_t^\top g'_s) , $$

which for a linear layer with one place is the entrywise product $A A'^\top \circ G G'^\top$ of two
small Gram matrices, whatever the width of the layer. With many places it can be cheaper to form
the gradients block by block; the cheaper of the two is used.

All sums are computed in float64, so that the Gram matrix is positive semi-definite up to rounding
and differences of such matrices lose no precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.layers import CapturedBatch, Gradients, LayerGradients, slices
from subbayes.utils.memory import temporary_size
from subbayes.utils.types import Weights, WeightsBatch

_OUTER, _INNER, _PAIRS = 128 * 2**20, 16 * 2**20, 16 * 2**20  # bytes of temporary tensors on a CPU


@dataclass(frozen=True)
class Block:
    r"""Rows $r_n^\top J_n$ for n inputs with `roots` cotangents r each, layer by layer."""

    n: int
    roots: int
    pieces: tuple[Gradients, ...]

    def dense(self, rows: slice, size: int) -> Float[Tensor, "m D"]:
        """Rows of some inputs over all D weights, input by input: (n R, D)."""
        n = len(range(*rows.indices(self.n)))
        whole = torch.zeros(n, self.roots, size, dtype=torch.float64, device=self.device)
        for piece in self.pieces:
            spans = piece.layer.spans
            parts = piece.dense(rows).split([span.size for span in spans], 2)
            for span, part in zip(spans, parts, strict=True):
                whole[:, :, span.place] = part.transpose(0, 1)
        return whole.flatten(0, 1)

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        first = self.pieces[0]
        return (first.left if isinstance(first, LayerGradients) else first.rows).device


def block(batch: CapturedBatch, root: Float[Tensor, "N C R"]) -> Block:
    """The rows of a batch for cotangents of each input as columns."""
    cotangents = root.permute(2, 0, 1)
    pieces: tuple[Gradients, ...] = *batch.pull(cotangents), *batch.pull_others(cotangents)
    return Block(len(batch), len(cotangents), pieces)


def gram(
    a: Block,
    b: Block,
    scale: Weights | None = None,
    report: Callable[[float], None] = lambda pairs: None,
) -> Float[Tensor, "m l"]:
    """Products of all rows of two blocks, weighted by column, in float64: (N R, M S).

    `report` is called after each layer with its share of the N M pairs of inputs, by its cost.
    """
    total = torch.zeros(a.roots, a.n, b.roots, b.n, dtype=torch.float64, device=a.device)
    pairs: list[tuple[Any, Any]] = list(zip(a.pieces, b.pieces, strict=True))
    costs, roots = [], a.roots * b.roots
    for mine, other in pairs:
        if _factored(mine, other, scale):
            t, outputs = mine.left.shape[2], mine.left.shape[4]
            each = mine.layer.size / outputs + roots * outputs
            costs.append(t * other.left.shape[2] * each)
        else:
            costs.append(roots * mine.layer.size)
    for (mine, other), cost in zip(pairs, costs, strict=True):
        if _factored(mine, other, scale):
            _add_factored(total, mine, other)
        else:
            _add_dense(total, mine, other, scale)
        report(a.n * b.n * cost / sum(costs))
    return total.permute(1, 0, 3, 2).reshape(a.n * a.roots, b.n * b.roots)


def gram_of_each(part: Block, scale: Weights) -> Float[Tensor, "n R R"]:
    """Products of the rows of each input with one another, weighted by column, in float64.

    With one place a layer's entries are products, and their weighted sums cost two small ones.
    """
    total = torch.zeros(part.n, part.roots, part.roots, dtype=torch.float64, device=part.device)
    most = temporary_size(_INNER, part.device)
    for piece in part.pieces:
        if _has_matrix(piece) and piece.left.shape[2] == 1:
            left, right = piece.left[:, :, 0].double(), piece.right(slice(None))[:, 0].double()
            _, n, groups, o = left.shape
            assert piece.layer.weight is not None
            weights = scale[piece.layer.weight.place].reshape(groups, o, -1)
            squares = torch.einsum("ngi,goi->ngo", right.square(), weights)
            if piece.layer.bias is not None:
                squares += scale[piece.layer.bias.place].reshape(groups, o)
            total += torch.einsum("rngo,qngo->nrq", left * squares, left)
            continue
        for places, cut in split_columns(piece, most // (8 * part.roots)):
            weights = _columns(places, scale[None])
            for rows in slices(part.n, most // (8 * part.roots * weights.shape[1])):
                dense = cut.dense(rows)
                total[rows] += torch.einsum("rnp,qnp->nrq", dense * weights, dense)
    return total


def _factored(a: Any, b: Any, scale: Tensor | None) -> bool:
    """Whether Gram matrices of the factors are cheaper than the gradients."""
    if scale is not None or not isinstance(a, LayerGradients):
        return False
    roots, _, t, groups, o = a.left.shape
    s, size = b.left.shape[2], a.layer.size
    masked = any(span.keep is not None for span in a.layer.spans)
    if masked or a.layer.weight is None or groups > 1:
        return False
    if a.layer.kind.name == "embedding":
        return t * s * (o + 3) < size
    i = size // o
    return t * s * (i / (roots * b.left.shape[0]) + o + 3) < size or t == s == 1


def _add_factored(total: Float[Tensor, "R N S M"], a: LayerGradients, b: LayerGradients) -> None:
    t, s = a.left.shape[2], b.left.shape[2]
    pairs = a.left.shape[0] * b.left.shape[0] * t * s * 8
    step = int((temporary_size(_PAIRS, total.device) / pairs) ** 0.5)
    for mine in slices(total.shape[1], step):
        for other in slices(total.shape[3], step, mine.start if a is b else 0):
            _add(total, mine, other, _pairs(a, b, mine, other), a is b)


def _add(
    total: Float[Tensor, "R N S M"],
    mine: slice,
    other: slice,
    part: Float[Tensor, "R n S m"],
    mirrored: bool,
) -> None:
    """Add a block, and its transpose to the mirror image of a symmetric matrix."""
    total[:, mine, :, other] += part
    if mirrored and mine.start != other.start:
        total[:, other, :, mine] += part.permute(2, 3, 0, 1)


def _pairs(
    a: LayerGradients, b: LayerGradients, mine: slice, other: slice
) -> Float[Tensor, "R n S m"]:
    """Sum over places t, s of (a_t a'_s + 1 for a bias)(g_t g'_s)."""
    left, right = a.left[:, mine, :, 0].double(), b.left[:, other, :, 0].double()
    inner = _right_gram(a, b, mine, other)  # n t m s
    if a.layer.bias is not None:
        inner += 1
    r, n, t, o = left.shape
    q, m, s, _ = right.shape
    outer = (left.reshape(-1, o) @ right.reshape(-1, o).T).reshape(r, n, t, q, m, s)
    if t == s == 1:
        return outer.reshape(r, n, q, m).mul_(inner.reshape(1, n, 1, m))
    return torch.einsum("rntqms,ntms->rnqm", outer, inner)


def _right_gram(
    a: LayerGradients, b: LayerGradients, mine: slice, other: slice
) -> Float[Tensor, "n t m s"]:
    x, y = a.right(mine)[:, :, 0], b.right(other)[:, :, 0]
    flat = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if a.layer.kind.name == "embedding":
        product = ((flat[0] == flat[1].T) & (flat[0] >= 0)).double()
    else:
        product = flat[0].double() @ flat[1].double().T
    return product.reshape(*x.shape[:2], *y.shape[:2])


def _add_dense(
    total: Float[Tensor, "R N S M"], a: Gradients, b: Gradients, scale: Weights | None
) -> None:
    """Add the products of dense gradients; each column is formed only once."""
    rows, others = total.shape[0] * total.shape[1], total.shape[2] * total.shape[3]
    outer, inner = (temporary_size(size, total.device) for size in (_OUTER, _INNER))
    most = outer // (8 * rows) if a is b else min(outer // (8 * rows), inner // (8 * others))
    for (places, mine), (_, other) in zip(
        split_columns(a, most), split_columns(b, most), strict=True
    ):
        weights = None if scale is None else _columns(places, scale[None])
        width = 8 * sum(place.stop - place.start for place in places)
        step = outer // (total.shape[0] * width)
        few_step = step if a is b else inner // (total.shape[2] * width)
        for some in slices(total.shape[1], step):
            left = mine.dense(some)
            flat = left.flatten(0, 1) if weights is None else left.flatten(0, 1) * weights
            for few in slices(total.shape[3], few_step, some.start if a is b else 0):
                right = left if a is b and few == some else other.dense(few)
                product = (flat @ right.flatten(0, 1).T).reshape(*left.shape[:2], *right.shape[:2])
                _add(total, some, few, product, a is b)


def _columns(places: Iterable[slice], vectors: Float[Tensor, "k D"]) -> Float[Tensor, "k p"]:
    return torch.cat([vectors[:, place] for place in places], 1)


def concatenate_rows(parts: Iterable[Tensor], least: int) -> Iterator[Tensor]:
    """Concatenate consecutive blocks of rows to blocks of at least `least` rows."""
    waiting: list[Tensor] = []
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) >= least:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def _has_matrix(piece: Gradients) -> TypeGuard[LayerGradients]:
    """Whether gradients are those of a layer with a weight matrix."""
    return isinstance(piece, LayerGradients) and piece.layer.is_matrix


def split_columns(piece: Gradients, most: int) -> Iterator[tuple[list[slice], Gradients]]:
    """Split a piece into pieces of about `most` columns, each with the positions of its columns."""
    places = [span.place for span in piece.layer.spans]
    if not (
        isinstance(piece, LayerGradients) and piece.layer.is_matrix and piece.left.shape[3] == 1
    ):
        yield places, piece
        return
    outs = piece.left.shape[4]
    for some in slices(outs, most * outs // piece.layer.size):
        cut = replace(piece, left=piece.left[..., some])
        widths = [(place.stop - place.start) // outs for place in places]
        yield (
            [
                slice(place.start + some.start * width, place.start + some.stop * width)
                for place, width in zip(places, widths, strict=True)
            ],
            cut,
        )


def push_block(part: Block, basis: Float[Tensor, "k D"]) -> Float[Tensor, "k m"]:
    """Products of all rows with weight vectors, input by input, in float64: (k, N R).

    Each is computed in the more precise dtype of the gradients and the vectors.
    """
    total = torch.zeros(len(basis), part.n, part.roots, dtype=torch.float64, device=part.device)
    most = temporary_size(_INNER, part.device)
    for piece in part.pieces:
        if (
            isinstance(piece, LayerGradients)
            and piece.layer.is_matrix
            and not _formed(piece, len(basis))
        ):
            vectors = _columns((span.place for span in piece.layer.spans), basis)
            each = 8 * max(piece.left[0, 0].numel(), piece.layer.size // piece.left.shape[-1])
            for rows in slices(part.n, most // each):
                left, right = piece.left[:, rows], piece.right(rows)
                for some in slices(len(basis), most // (2 * each * right.shape[0])):
                    total[some, rows] += _along(piece, left, right, vectors[some])
            continue
        for places, cut in split_columns(piece, most // (8 * len(basis))):
            vectors = _columns(places, basis).double()
            for rows in slices(part.n, most // (8 * part.roots * vectors.shape[1])):
                dense = cut.dense(rows, basis.dtype == torch.float64)
                found = vectors @ dense.flatten(0, 1).T
                total[:, rows] += found.unflatten(1, dense.shape[:2]).transpose(1, 2)
    return total.flatten(1)


def pull_block(part: Block, cotangents: Float[Tensor, "s n R"], onto: WeightsBatch) -> None:
    """Add the combinations of all rows with s vectors of coefficients to `onto`, in place."""
    u = cotangents.double().transpose(1, 2)  # s, R, n
    most, precise = temporary_size(_INNER, part.device), onto.dtype == torch.float64
    for piece in part.pieces:
        for places, cut in split_columns(piece, most // (8 * len(u))):
            widths = [place.stop - place.start for place in places]
            for rows in slices(part.n, most // (8 * part.roots * sum(widths))):
                found = u[:, :, rows].flatten(1) @ cut.dense(rows, precise).flatten(0, 1)
                for place, values in zip(places, found.split(widths, 1), strict=True):
                    onto[:, place] += values.to(onto)


def _formed(piece: LayerGradients, k: int) -> bool:
    """Whether forming the gradients costs less than k tangents through the layer."""
    roots, _, t, groups, o = piece.left.shape
    i = piece.layer.size / (groups * o)
    return roots * (t + k) * i < t * k * (i + roots)


def _along(
    piece: LayerGradients,
    left: Float[Tensor, "R n t groups o"],
    right: Float[Tensor, "n t groups i"],
    vectors: Float[Tensor, "k p"],
) -> Float[Tensor, "k n R"]:
    """Sum over places of g (W a + b) for tangents (W, b) of a layer."""
    dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), vectors.dtype)
    left, right, vectors = left.to(dtype), right.to(dtype), vectors.to(dtype)
    groups, o, i = left.shape[3], left.shape[4], right.shape[3]
    matrix = vectors[:, : groups * o * i].reshape(-1, groups, o, i)
    change = torch.einsum("ntgi,kgoi->nktgo", right, matrix)
    if piece.layer.bias is not None:
        change += vectors[:, groups * o * i :].reshape(-1, 1, groups, o)
    return torch.einsum("nkp,rnp->knr", change.flatten(2), left.flatten(2)).double()

r"""The curvature of a likelihood in the outputs of a row, as blocks on its diagonal.

Products with a block, and with a root R of it, $\Lambda = R R^\top$, need no matrix where the
block is that of a softmax with probabilities p and weight a:

$$ \Lambda = a \, (\mathrm{diag}(p) - p p^\top), \qquad
   R = \sqrt a \, \mathrm{diag}(\sqrt p) \, (I - \sqrt p \sqrt p^\top) , $$

since $I - \sqrt p \sqrt p^\top$ is a projection. They take K operations for K classes, so that
vocabularies of language models are no limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.utils.checks import fail

Vectors = Float[Tensor, "s N C"]


class CurvatureRoot(ABC):
    r"""Products with a root R of the curvature of N rows, $\Lambda = R R^\top$."""

    @abstractmethod
    def times(self, u: Vectors) -> Vectors:
        """R u for s vectors, in the dtype of the root."""

    @abstractmethod
    def transposed(self, u: Vectors) -> Vectors:
        """R' u for s vectors, in the dtype of the root."""


class CurvatureBlocks(ABC):
    """B blocks of b adjacent outputs for each of N rows; the curvature is 0 between them."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers in memory for each output."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "*S N B b b"]:
        """The blocks as matrices."""

    @abstractmethod
    def weighted(self, weights: Float[Tensor, "N"]) -> CurvatureBlocks:
        """The blocks with those of each row multiplied by its weight."""

    @abstractmethod
    def times(self, u: Vectors) -> Vectors:
        """Products of the curvature with s vectors for each row, in the dtype of the blocks."""

    @abstractmethod
    def root(self) -> CurvatureRoot:
        """A root of the blocks, which have no dimension before that of the rows.

        Raises:
            InputError: a curvature that is not finite, or not positive semi-definite.
        """


@dataclass(frozen=True)
class DenseBlocks(CurvatureBlocks):
    """Blocks as matrices.

    Example:
        >>> blocks = DenseBlocks(torch.tensor([4.0, 9.0]).reshape(1, 2, 1, 1))
        >>> blocks.root().times(torch.ones(1, 1, 2))
        tensor([[[2., 3.]]])
    """

    matrices: Float[Tensor, "*S N B b b"]

    @property
    def width(self) -> int:
        """Outputs b of a block."""
        return self.matrices.shape[-1]

    @classmethod
    def diagonal(cls, values: Float[Tensor, "*S N C"]) -> DenseBlocks:
        """One block for each output."""
        return cls(values.unsqueeze(-1).unsqueeze(-1))

    @override
    def dense(self) -> Float[Tensor, "*S N B b b"]:
        return self.matrices

    def weighted(self, weights: Float[Tensor, "N"]) -> DenseBlocks:
        """The matrices times the weights of their rows."""
        return DenseBlocks(weights.to(self.matrices)[:, None, None, None] * self.matrices)

    @override
    def times(self, u: Vectors) -> Vectors:
        return _by_block(self.matrices, u)

    def root(self) -> DenseRoot:
        """From eigenvalues, or from square roots where the blocks are diagonal."""
        return DenseRoot(root_of(self.matrices))


@dataclass(frozen=True)
class DenseRoot(CurvatureRoot):
    """Roots of the blocks as matrices."""

    matrices: Float[Tensor, "N B b b"]

    def times(self, u: Vectors) -> Vectors:
        """R u, block by block."""
        return _by_block(self.matrices, u)

    def transposed(self, u: Vectors) -> Vectors:
        """R' u, block by block."""
        return _by_block(self.matrices.mT, u)


@dataclass(frozen=True)
class SoftmaxBlocks(CurvatureBlocks):
    """Blocks of labels whose probabilities are a softmax.

    Attributes:
        probabilities: of K classes for each of B labels of a row.
        weights: of each label; None for 1.

    Example:
        >>> blocks = SoftmaxBlocks(torch.tensor([[[0.25, 0.75]]]))
        >>> blocks.dense()[0, 0]
        tensor([[ 0.1875, -0.1875],
                [-0.1875,  0.1875]])
        >>> blocks.times(torch.tensor([[[1.0, 0.0]]]))
        tensor([[[ 0.1875, -0.1875]]])
    """

    probabilities: Float[Tensor, "*S N B K"]
    weights: Float[Tensor, "N B"] | None = None

    @property
    def width(self) -> int:
        """One number, its probability."""
        return 1

    def dense(self) -> Float[Tensor, "*S N B K K"]:
        r"""$a \, (\mathrm{diag}(p) - p p^\top)$, its diagonal from $p_i \sum_{j \ne i} p_j$."""
        p = self.probabilities
        others = 1 - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
        pairs = p.unsqueeze(-1) * p.unsqueeze(-2) * others  # 1 - p would round to 0
        found = torch.diag_embed(pairs.sum(-1)) - pairs
        return found if self.weights is None else found * self.weights[..., None, None].to(p)

    def weighted(self, weights: Float[Tensor, "N"]) -> SoftmaxBlocks:
        """The blocks with the weights of the rows too."""
        each = weights[:, None].to(self.probabilities)
        if self.weights is not None:
            each = each * self.weights.to(each)
        return SoftmaxBlocks(self.probabilities, each.expand(-1, self.probabilities.shape[-2]))

    def times(self, u: Vectors) -> Vectors:
        """Products without matrices, in float64, where 1 - p loses least."""
        root = self.root()
        return root.times(root.transposed(u)).to(self.probabilities)

    def root(self) -> SoftmaxRoot:
        """In closed form, in float64."""
        p = self.probabilities.double()
        _check_finite(p)
        weights = None if self.weights is None else self.weights.double().sqrt()
        return SoftmaxRoot(p.sqrt(), weights)

    def triangular_root(self) -> Float[Tensor, "N B K K"]:
        r"""The upper triangular root, whose first column is 0 (Tanabe and Sagae 1992).

        So each row needs K - 1 products with the Jacobian, of two classes half as many.

        With $q_j = \sum_{k < j} p_k$ column j has $\sqrt{p_j q_j / q_{j+1}}$ on the diagonal, and
        above it $-p_i / q_j$ times that.
        """
        p = self.probabilities.double()
        _check_finite(p)
        after = p.cumsum(-1)
        before = torch.cat([torch.zeros_like(p[..., :1]), after[..., :-1]], -1)
        shares = (p.unsqueeze(-1) / before.unsqueeze(-2)).nan_to_num(0.0, 0.0, 0.0)
        identity = torch.eye(p.shape[-1]).to(p)
        found = (identity - shares.triu(1)) * (p * before / after).nan_to_num(0.0).sqrt().unsqueeze(
            -2
        )
        return found if self.weights is None else found * self.weights[..., None, None].to(p).sqrt()


@dataclass(frozen=True)
class SoftmaxRoot(CurvatureRoot):
    """The root in closed form, from square roots of the probabilities and the weights."""

    roots: Float[Tensor, "N B K"]
    weights: Float[Tensor, "N B"] | None

    def times(self, u: Vectors) -> Vectors:
        """R u: project, then scale."""
        parts = u.to(self.roots).reshape(len(u), *self.roots.shape)
        return (self._projected(parts) * self._scale()).reshape(u.shape)

    def transposed(self, u: Vectors) -> Vectors:
        """R' u: scale, then project."""
        parts = u.to(self.roots).reshape(len(u), *self.roots.shape) * self._scale()
        return self._projected(parts).reshape(u.shape)

    def _scale(self) -> Tensor:
        return self.roots if self.weights is None else self.roots * self.weights.unsqueeze(-1)

    def _projected(self, parts: Float[Tensor, "s N B K"]) -> Float[Tensor, "s N B K"]:
        along = (parts * self.roots).sum(-1, keepdim=True)
        return torch.addcmul(parts, along, self.roots, value=-1)


def _by_block(matrices: Float[Tensor, "n B b b"], u: Vectors) -> Vectors:
    n, blocks, b, _ = matrices.shape
    parts = u.to(matrices).reshape(len(u), n, blocks, b)
    return torch.einsum("nbij,snbj->snbi", matrices, parts).reshape(u.shape)


def root_of(curvature: Float[Tensor, "*n C C"]) -> Float[Tensor, "*n C C"]:
    r"""Roots R of curvatures of a likelihood, $\Lambda = R R^\top$.

    Raises:
        InputError: a curvature that is not finite, or not positive semi-definite.
    """
    _check_finite(curvature)
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    if torch.equal(curvature, torch.diag_embed(diagonal)) and bool((diagonal >= 0).all()):
        return torch.diag_embed(diagonal.sqrt())
    values, vectors = torch.linalg.eigh(curvature)
    if bool((values[..., 0] < -1e-8 * values[..., -1].clamp_min(1e-300)).any()):
        fail(
            "likelihood",
            "a positive semi-definite curvature",
            f"an eigenvalue of {float(values.min()):.3g}",
            "Give the likelihood its expected curvature (the Fisher information)",
        )
    # The root would magnify the rounding of an eigenvalue 0, which depends on blocks of rows.
    negligible = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    return vectors * values.where(values > negligible, 0).sqrt().unsqueeze(-2)


def _check_finite(values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        expected = "finite curvature at the network's outputs"
        remedy = "Train the network further, or compute in float64"
        fail("likelihood", expected, "NaN or infinite entries", remedy)

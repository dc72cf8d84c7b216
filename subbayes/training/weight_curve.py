r"""Curves of low loss in weight space, and their affine subspaces.

A curve is a weighted mean of its control points, $\phi(t) = \sum_i c_i(t)\, p_i$ with
$\sum_i c_i(t) = 1$, and so lies in their affine span: k + 1 points span a subspace of rank k.
`subbayes.training.curve` trains the points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.subspace import DenseSubspace, check_finite_weights
from subbayes.training.trajectory import gram_matrix, principal_directions
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.types import Weights

CurveKind = Literal["bezier", "polygon"]


Basis = Literal["ends", "principal"]


_FLAT = 1e-5  # relative distance below which a direction counts as dependent on the others


def coefficients(t: Any, count: int, kind: CurveKind = "bezier") -> Float[Tensor, "*S m"]:
    r"""Weights of the m control points at each t, in float64; each row sums to one.

    Bernstein polynomials of degree k = m - 1, by de Casteljau's recursion, which is free of
    cancellation; or the hat functions of a polygonal chain:

    $$ c_i(t) = \binom{k}{i} t^i (1 - t)^{k - i}, \qquad
       c_i(t) = \max(0,\, 1 - \lvert k t - i \rvert) . $$

    Args:
        t: one number or several, in [0, 1].
        count: number of control points m.
        kind: "bezier" or "polygon".

    Raises:
        InputError: t outside [0, 1], an unknown kind.

    Example:
        >>> coefficients(0.5, 3)
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
        >>> coefficients([0.25, 1.0], 3, "polygon")
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    check_choice("kind", kind, ("bezier", "polygon"))
    degree = check_count("count", count) - 1
    at = positions(t).unsqueeze(-1)
    if kind == "polygon":
        places = torch.arange(count, dtype=at.dtype, device=at.device)
        return (1 - (degree * at - places).abs()).clamp_min(0)
    c, zero = torch.ones_like(at), torch.zeros_like(at)
    for _ in range(degree):
        c = torch.cat([(1 - at) * c, zero], -1) + torch.cat([zero, at * c], -1)
    return c


def positions(t: Any) -> Float[Tensor, "*S"]:
    """Positions on the curve as a tensor, checked to be in [0, 1]."""
    at = torch.as_tensor(t, dtype=torch.float64).detach()
    bad = ~((at >= 0) & (at <= 1))
    if bool(bad.any()):
        fail("t", "numbers in [0, 1]", f"{float(at[bad].flatten()[0]):g}")
    return at


@dataclass(frozen=True, eq=False, repr=False)
class WeightCurve:
    r"""A Bézier curve or a polygonal chain in weight space.

    $$ \phi(t) = \sum_{i=0}^{k} c_i(t)\, p_i, \qquad 0 \le t \le 1, \qquad
       \phi(0) = p_0, \quad \phi(1) = p_k . $$

    Args:
        points: control points $p_0 \dots p_k$, shape (k + 1, D); a single point is a constant
            curve.
        kind: "bezier", which passes through its ends only, or "polygon", which passes through
            all of its points, at t = i / k.

    Raises:
        InputError: no points, or points that are not finite.

    Source: Garipov et al. (2018), "Loss surfaces, mode connectivity, and fast ensembling of
    DNNs", equations 3 and 4; Dold et al. (2024), equation 2.

    Example:
        >>> curve = WeightCurve(torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]]))
        >>> curve.point(0.5)
        tensor([1., 1.])
        >>> curve.point([0.0, 1.0])
        tensor([[0., 0.],
                [2., 0.]])
        >>> space = curve.subspace()
        >>> space.shift, space.basis()
        (tensor([1., 0.]), tensor([[-1.,  0.], [ 0.,  1.]]))
    """

    points: Float[Tensor, "m D"]
    kind: CurveKind = "bezier"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("bezier", "polygon"))
        check_finite_weights("points", self.points)
        object.__setattr__(self, "points", self.points.detach())

    @property
    def degree(self) -> int:
        """Degree of a Bézier curve, or number of segments of a chain."""
        return len(self.points) - 1

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.points.shape[1]

    def __repr__(self) -> str:
        return f"WeightCurve({self.kind}, degree={self.degree}, size={self.size})"

    # --- along the curve --------------------------------------------------------------------

    def coefficients(self, t: Any) -> Float[Tensor, "*S m"]:
        """Weights of the control points at t in [0, 1], shape (..., k + 1), in float64."""
        return coefficients(t, len(self.points), self.kind)

    def point(self, t: Any) -> Float[Tensor, "*S D"]:
        """Weights at t in [0, 1]: shape (D,) for a number, (S, D) for S of them.

        Raises:
            InputError: t outside [0, 1].
        """
        return self.coefficients(t).to(self.points) @ self.points

    # --- the subspace -----------------------------------------------------------------------

    def subspace(self, basis: Basis = "ends", unit: bool = True) -> DenseSubspace:
        r"""The affine subspace of rank k that contains the curve.

        "ends" is the basis of Izmailov et al. (2019, section 4.3): the shift is the midpoint of the
        ends, the vectors point from there to the first end and to the inner control points,

        $$ \hat w = \frac{p_0 + p_k}{2}, \qquad
           v_1 = \frac{p_0 - \hat w}{\lVert p_0 - \hat w \rVert}, \qquad
           v_{1+i} = \frac{p_i - \hat w}{\lVert p_i - \hat w \rVert} \quad (0 < i < k) . $$

        For k = 2 the paper writes the second vector as the direction of the midpoint of the curve:
        $\phi(1/2) - \hat w = (p_1 - \hat w) / 2$. The vectors are not orthogonal.

        "principal" is the basis of Dold et al. (2024, equation 5): the shift is the mean of the
        control points, the vectors are their orthonormal principal directions.

        Args:
            basis: "ends" or "principal".
            unit: vectors of norm one, as in both papers. With False they keep their lengths, so
                that a prior N(0, I) is as wide as the curve: the ends lie at z = (1, 0, ...) and
                (-1, 0, ...), and principal directions have the standard deviations of the
                control points.

        Raises:
            InputError: a single control point, equal ends, or control points that span fewer than
                k directions.
        """
        check_choice("basis", basis, ("ends", "principal"))
        if self.degree == 0:
            fail("curve", "at least 2 control points, which span a direction", "1")
        if torch.equal(self.points[0], self.points[-1]):
            fail(
                "curve",
                "two ends that differ",
                "the same weights twice",
                "Train the second solution from another seed",
            )
        if basis == "principal":
            center = self._mean(self.points)
            rows = principal_directions((self.points - center).cpu())[0][:-1] / self.degree**0.5
        else:
            center = self._mean(self.points[[0, -1]])
            rows = self.points[:-1] - center
        gram = gram_matrix(rows)
        spread = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
        if spread[0] <= _FLAT * spread[-1]:
            fail(
                "curve",
                f"control points that span {self.degree} directions",
                "fewer",
                "Train it for longer, or with a larger learning rate",
            )
        if unit:
            rows = rows / gram.diagonal().sqrt().to(rows)[:, None]
        return DenseSubspace(center, rows)

    def _mean(self, points: Float[Tensor, "n D"]) -> Weights:
        return points.double().mean(0).to(self.points)

    def coordinates(self, t: Any, subspace: DenseSubspace | None = None) -> Float[Tensor, "*S k"]:
        """Coordinates z of the curve in a subspace at t, shape (..., k).

        Args:
            t: one number or several, in [0, 1].
            subspace: a subspace of this curve; by default `subspace()`.

        Example:
            >>> WeightCurve(torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 0.0]])).coordinates(0.5)
            tensor([0., 1.], dtype=torch.float64)
        """
        space = self.subspace() if subspace is None else subspace
        return self.coefficients(t).cpu() @ space.project(self.points).double().cpu()

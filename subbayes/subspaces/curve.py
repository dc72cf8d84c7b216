r"""Curves of low loss in weight space, and their affine subspaces.

A curve is a weighted mean of its control points, $\phi(t) = \sum_i c_i(t)\, p_i$ with
$\sum_i c_i(t) = 1$, and so lies in their affine span: k + 1 points span a subspace of rank k.
`subbayes.training.curve` trains the points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import split_targets
from subbayes.networks.initialisation import module_with_fresh_weights
from subbayes.networks.network import Network
from subbayes.predictions.averaging import with_noise
from subbayes.predictions.predictive import Predictive
from subbayes.subspace import DenseSubspace, check_finite_weights
from subbayes.subspaces.base import RankedMethod, SubspaceMethod, check_rank
from subbayes.subspaces.pca import gram_matrix, principal_directions
from subbayes.utils.checks import check_choice, check_count, fail, fail_type
from subbayes.utils.trees import to_device

if TYPE_CHECKING:
    from subbayes.training.configuration import Training
    from subbayes.training.pipeline import Trained

__all__ = [
    "Basis",
    "Curve",
    "CurveKind",
    "CurveLosses",
    "WeightCurve",
    "coefficients",
    "curve_losses",
    "with_factory",
]

CurveKind = Literal["bezier", "polygon"]
Basis = Literal["ends", "principal"]

_NODES = 64  # nodes of the quadrature for each control point
_FLAT = 1e-5  # relative distance below which a direction counts as dependent on the others


@dataclass(frozen=True)
class Curve(RankedMethod):
    """The subspace of a Bézier curve of low loss from the network to a second solution.

    The second solution is trained like the first one, from other initial weights.

    Attributes:
        rank: degree of the curve and rank k of its subspace, at least 2; None takes 2.
        factory: function that returns a module with fresh weights for the second solution; needed
            if a layer has no `reset_parameters`.

    Example:
        >>> Curve(rank=3)
        Curve(rank=3)
    """

    factory: Callable[[], nn.Module] | None = field(default=None, repr=False)
    name: ClassVar[str] = "curve"
    description: ClassVar[str] = (
        "{k} directions that contain a curve of low loss to a second solution, {centre}"
    )
    smallest_rank: ClassVar[int] = 2

    def expected_rank(self, network: Network) -> int:
        """The rank, or its default."""
        return 2 if self.rank is None else self.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that a second solution can be trained."""
        if not training.epochs:
            fail(
                "training",
                "epochs above 0 to train the other end of the curve",
                0,
                "Raise epochs, or choose another subspace",
            )
        module_with_fresh_weights(network, 0, self.factory)
        check_rank(self.rank, network, 2)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> DenseSubspace:
        """Train the second solution and the curve; the basis is as wide as the curve."""
        degree = self.expected_rank(trained.network)
        return trained.train_curve(degree, self.factory).subspace(unit=False)


def with_factory(method: SubspaceMethod, factory: Callable[[], nn.Module] | None) -> SubspaceMethod:
    """The method; a curve without a factory of its own takes the given one.

    Example:
        >>> with_factory(Curve(), lambda: nn.Linear(1, 1)).factory is None
        False
    """
    if isinstance(method, Curve) and method.factory is None:
        return replace(method, factory=factory)
    return method


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
    at = _positions(t).unsqueeze(-1)
    if kind == "polygon":
        places = torch.arange(count, dtype=at.dtype, device=at.device)
        return (1 - (degree * at - places).abs()).clamp_min(0)
    c, zero = torch.ones_like(at), torch.zeros_like(at)
    for _ in range(degree):
        c = torch.cat([(1 - at) * c, zero], -1) + torch.cat([zero, at * c], -1)
    return c


def _positions(t: Any) -> Float[Tensor, "*S"]:
    try:
        at = torch.as_tensor(t, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError):
        fail_type("t", "a number or an array of numbers", t)
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
        if not isinstance(self.points, Tensor):
            fail_type("points", "a tensor of control points (k + 1, D)", self.points)
        if self.points.ndim != 2 or len(self.points) < 1:
            fail(
                "points",
                "at least 1 control point, shape (k + 1, D)",
                f"shape {tuple(self.points.shape)}",
            )
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

    def length(self) -> float:
        r"""Length of the curve, $\int_0^1 \lVert \phi'(t) \rVert \, dt$.

        For a chain the sum of its segments; for a Bézier curve by Gauss-Legendre quadrature from
        the inner products of its segments, since $\phi'(t) = k \sum_i b_i(t) (p_{i+1} - p_i)$ with
        the Bernstein polynomials $b_i$ of degree k - 1.

        Example:
            >>> WeightCurve(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).length()
            5.0
        """
        gram = gram_matrix(self.points.diff(dim=0))
        if self.kind == "polygon" or self.degree <= 1:
            return float(gram.diagonal().sqrt().sum())
        x, weights = np.polynomial.legendre.leggauss(_NODES * self.degree)
        b = coefficients((x + 1) / 2, self.degree)
        speed = self.degree * torch.einsum("si,ij,sj->s", b, gram, b).clamp_min(0).sqrt()
        return float(speed @ torch.from_numpy(weights / 2))

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

    def _mean(self, points: Float[Tensor, "n D"]) -> Float[Tensor, "D"]:
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


# --- the loss along it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveLosses:
    """Loss and error of the networks along a curve.

    Attributes:
        t: positions on the curve, shape (S,).
        loss: mean negative log-likelihood at each, in nats per observation.
        error: error rate, or root mean squared error in units of y.
        error_name: "error rate" or "RMSE".
    """

    t: Float[np.ndarray, "S"]
    loss: Float[np.ndarray, "S"]
    error: Float[np.ndarray, "S"]
    error_name: str

    @property
    def barrier(self) -> float:
        r"""Largest height of the loss above the line between its ends, in nats.

        $\max_t\, L(t) - (1 - t) L(0) - t L(1)$, from the first and last position (Frankle et
        al. 2020, "Linear mode connectivity and the lottery ticket hypothesis").
        """
        share = (self.t - self.t[0]) / max(self.t[-1] - self.t[0], 1e-300)
        return float((self.loss - (1 - share) * self.loss[0] - share * self.loss[-1]).max())


def curve_losses(
    curve: WeightCurve | Tensor,
    network: Network,
    likelihood: Likelihood,
    data: Any,
    ts: int | Sequence[float] | np.ndarray | Tensor = 61,
    *,
    refresh_batchnorm: Any = None,
) -> CurveLosses:
    """Loss and error along a curve.

    Args:
        curve: the curve, or two weight vectors (2, D) for the straight line between them.
        network: the network; its own weights are not used.
        likelihood: p(y | f), with its parameters learned.
        data: rows to score, in any form that `Data.of` takes.
        ts: positions on the curve in [0, 1], or the number of evenly spaced ones.
        refresh_batchnorm: data, usually the training data, to re-estimate BatchNorm statistics at
            each position, at the cost of one more pass. Without it a module with BatchNorm uses
            the statistics of `network` everywhere, which overstates the loss.

    Raises:
        InputError: another number of weights than the network has, or t outside [0, 1].

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> network, x = Network(torch.nn.Linear(1, 1)), torch.randn(20, 1)
        >>> line = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> losses = curve_losses(line, network, Gaussian(1.0), (x, x[:, 0]), [0, 0.5, 1])
        >>> bool(losses.loss[1] < losses.loss[0]), float(losses.error[1])
        (True, 0.0)
    """
    curve = WeightCurve(curve) if isinstance(curve, Tensor) else curve
    if curve.size != network.size:
        fail(
            "curve",
            f"{network.size} weights, as the network has",
            curve.size,
            "Pass the network the curve was trained for",
        )
    if isinstance(ts, (int, np.integer)):
        ts = np.linspace(0, 1, check_count("ts", ts, 2))
    at, rows = _positions(ts).reshape(-1), Data.of(data)
    refresh = None if refresh_batchnorm is None else Data.of(refresh_batchnorm)
    scores = [
        _scores(network, likelihood, curve.point(t).to(network.weights), rows, refresh)
        for t in at.tolist()
    ]
    loss, error = np.array(scores).T
    name = "error rate" if likelihood.kind == "classification" else "RMSE"
    return CurveLosses(at.numpy(), loss, error, name)


def _scores(
    network: Network,
    likelihood: Likelihood,
    weights: Float[Tensor, "D"],
    data: Data,
    refresh: Data | None,
) -> tuple[float, float]:
    """Mean negative log-likelihood and error at one weight vector; rows count equally."""
    if refresh is not None:
        network = network.refresh_batchnorm(weights, refresh)
    labels = likelihood.kind == "classification"
    loss = error = 0.0
    for inputs, y in data.batches(4096):
        parts = split_targets(y, data.has_weights)
        noise = None if parts.noise is None else parts.noise.cpu()
        target = parts.values.cpu()
        with torch.no_grad():
            outputs = network(weights, to_device(inputs, network.device)).cpu()
        predictive = Predictive(outputs[None], with_noise(likelihood, noise, len(target)))
        loss -= float(predictive.log_prob(target).sum())
        error += len(target) * (
            1 - metrics.accuracy(predictive, target)
            if labels
            else metrics.rmse(predictive, target) ** 2
        )
    error /= data.n
    return loss / data.n, error if labels else error**0.5

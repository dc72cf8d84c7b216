r"""Eigenvalues of a symmetric operator from its products: the Lanczos method with restarts.

The method builds an orthonormal basis Q of the Krylov space of a random vector and the small matrix
$T = Q A Q^\top$. Eigenpairs $T s = \theta s$ give Ritz pairs $(\theta, Q^\top s)$ with the residual

$$ \lVert A x - \theta x \rVert = \beta_m \lvert s_m \rvert , $$

where $\beta_m$ is the norm of the component of the m-th product orthogonal to the basis: some
eigenvalue lies within this distance of $\theta$. When the basis is full, the wanted Ritz vectors
and the last direction are kept and the others are dropped: thick restart (Wu and Simon 2000).
Every new vector is orthogonalised twice against the whole basis, to avoid spurious copies of
eigenvalues.

The Krylov space of one vector contains one eigenvector of each eigenvalue, however often it occurs:
the Fisher information of a linear layer with C outputs and Gaussian noise has each of its
eigenvalues C times. So once all wanted pairs have converged, they are kept, and the basis is filled
from another random vector, until the next pair has converged too. If the wanted eigenvalues have
changed, this is repeated.

`scipy.sparse.linalg.eigsh` is not used because its tolerance is relative to each eigenvalue, so
that it does not converge for the smallest eigenvalues of a singular matrix, and because it returns
neither residuals nor unconverged values. It needs about as many products.

Source: Wu and Simon (2000), "Thick-restart Lanczos method for large symmetric eigenvalue
problems"; Ubaru, Chen and Saad (2017), "Fast estimation of tr(f(A)) via stochastic Lanczos
quadrature".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.checks import check_choice, check_count, check_positive, check_seed, fail
from subbayes.utils.progress import progress_bar

Which = Literal["largest", "smallest", "magnitude"]


@runtime_checkable
class Operator(Protocol):
    """A symmetric matrix given by its products with vectors."""

    @property
    def size(self) -> int:
        """Number of rows D."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which products are computed."""

    @property
    def device(self) -> torch.device:
        """Device on which products are computed."""

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with a vector of shape (D,), in its dtype."""


@dataclass(frozen=True, eq=False, repr=False)
class Eigenpairs:
    """Eigenvalues of an operator with their residuals.

    Attributes:
        values: eigenvalues in the requested order, shape (r,).
        residuals: norm of A x - value x for each unit eigenvector x, shape (r,), a bound on the
            error of the value, up to rounding in the products.
        vectors: unit eigenvectors as rows, shape (r, D).
        products: number of matrix-vector products.
        converged: whether every residual met the tolerance, and another random vector showed no
            further eigenvalue among the wanted ones.
    """

    values: Float[np.ndarray, "r"]
    residuals: Float[np.ndarray, "r"]
    vectors: Float[Tensor, "r D"]
    products: int
    converged: bool

    def __repr__(self) -> str:
        how = "converged"
        if not self.converged:
            largest = self.residuals.max()
            how = f"not converged (largest residual {largest:.2g}): raise restarts or basis"
        return (
            f"Eigenpairs({len(self.values)} from {self.values[0]:.4g} to "
            f"{self.values[-1]:.4g}, {self.products} products, {how})"
        )


def eigenvalues(
    operator: Operator,
    count: int = 20,
    *,
    which: Which = "largest",
    basis: int | None = None,
    tolerance: float = 1e-4,
    restarts: int = 30,
    seed: int = 0,
    memory_limit: int = 2**31,
    progress: bool | None = None,
) -> Eigenpairs:
    """The largest (or smallest) eigenvalues of an operator, with residual norms.

    Args:
        operator: a `Curvature`, or anything with size, dtype, device and products.
        count: number of eigenvalues r.
        which: "largest", "smallest" (most negative) or "magnitude".
        basis: number of basis vectors, 8 D bytes each; by default 2 count + 20.
        tolerance: of the residuals, relative to the largest eigenvalue found.
        restarts: largest number of restarts with one random vector; each costs basis - count
            products at most. There is one random vector more than copies of an eigenvalue.
        seed: seed of the first vector.
        memory_limit: bytes for the basis.
        progress: show a bar; None shows it on a terminal.

    Raises:
        InputError: a count above the number of weights, or a basis that is too small or exceeds
            the memory limit.

    Source: Wu and Simon (2000); figure 6 of Izmailov et al. (2019).

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(3, 1).double())
        >>> x = torch.eye(3).double() * torch.tensor([1.0, 2.0, 3.0]).double()
        >>> hessian = subbayes.curvature.Curvature(net, Gaussian(1.0), (x, torch.zeros(3)))
        >>> eigenvalues(hessian, 2, progress=False).values.round(3)
        array([10.359,  5.   ])
    """
    check_choice("which", which, ("largest", "smallest", "magnitude"))
    size = operator.size
    if check_count("count", count) > size:
        fail("count", f"at most {size}, the number of weights", count)
    room = min(size, 2 * count + 20 if basis is None else check_count("basis", basis))
    if room < min(size, count + 2):
        fail("basis", f"at least {count + 2} vectors for {count} eigenvalues", room)
    check_positive("tolerance", tolerance)
    needed = 8 * (room + 1) * size
    if needed > memory_limit:
        fail(
            "memory_limit",
            f"at least {needed / 2**30:.3g} GiB for {room} vectors of {size} weights",
            f"{memory_limit / 2**30:.3g} GiB",
            "Ask for fewer eigenvalues or a smaller basis",
        )
    krylov = _Krylov(operator, room, [check_seed(seed)])
    left, known, done = check_count("restarts", restarts, 0), None, False
    with progress_bar(None, "Lanczos", progress, "rounds") as steps:
        while True:
            krylov.fill()
            values, vectors, residuals = krylov.ritz(which)
            scale = max(float(values.abs().max()), np.finfo(float).tiny)
            steps.update(1)
            wanted = count + (known is not None)
            converged = bool((residuals[:wanted] <= tolerance * scale / 2).all())
            if converged:
                done = room == size or (
                    known is not None and _distance(values[:count], known) <= tolerance * scale
                )
            if done or (left == 0 and not converged):
                break
            if converged:
                known, left = values[:count], restarts
                krylov.shrink(values, vectors, count, krylov.random)
            else:
                left -= 1
                keep = count + max(1, (room - count) // 3)
                krylov.shrink(values, vectors, min(keep, room - 1), krylov.last)
    rows = vectors[:, :count].T.to(krylov.Q) @ krylov.Q[:room]
    exact = krylov.residuals(values[:count], rows)
    return Eigenpairs(
        values[:count].numpy(),
        exact.numpy(),
        rows,
        krylov.products,
        done and bool((exact <= tolerance * scale).all()),
    )


def _distance(values: Tensor, others: Tensor) -> float:
    return float((values - others).abs().max())


class _Krylov:
    """The basis Q (room + 1, D) and T = Q A Q' of its first rows, both in float64."""

    def __init__(self, operator: Operator, room: int, seed: list[int]) -> None:
        self.operator, self.room = operator, room
        self.rng = np.random.default_rng(seed)
        self.Q = torch.zeros(room + 1, operator.size, dtype=torch.float64, device=operator.device)
        self.T = torch.zeros(room, room, dtype=torch.float64)
        self.filled, self.products, self.beta = 0, 0, 0.0
        self.Q[0] = self.random(0)

    def random(self, j: int) -> Tensor:
        """A random unit vector orthogonal to the first j."""
        vector = torch.from_numpy(self.rng.standard_normal(self.operator.size)).to(self.Q)
        vector = self._orthogonal(vector, j)[0]
        return vector / vector.norm()

    def _orthogonal(self, vector: Tensor, j: int) -> tuple[Tensor, Tensor]:
        """The component of a vector orthogonal to the first j, and its products with them."""
        known = torch.zeros(j, dtype=vector.dtype, device=vector.device)
        for _ in range(2):  # twice is enough (Kahan)
            part = self.Q[:j] @ vector
            vector = vector - part @ self.Q[:j]
            known = known + part
        return vector, known

    def fill(self) -> None:
        """Extend the basis until it is full."""
        for j in range(self.filled, self.room):
            product = self.operator(self.Q[j].to(self.operator.dtype)).double()
            self.products += 1
            scale = float(product.norm())
            rest, known = self._orthogonal(product, j + 1)
            self.T[j, : j + 1] = self.T[: j + 1, j] = known.cpu()
            self.beta = float(rest.norm())
            if self.beta > 1e-12 * scale:
                self.Q[j + 1] = rest / self.beta
            elif j + 1 < self.room:  # an invariant subspace: continue with a random vector
                self.beta, self.Q[j + 1] = 0.0, self.random(j + 1)
        self.filled = self.room

    def residuals(self, values: Tensor, rows: Tensor) -> Tensor:
        """Norms of A x - value x for unit vectors x, from their products."""
        found = [
            float((self.operator(x.to(self.operator.dtype)).double() - value * x).norm())
            for value, x in zip(values.to(rows), rows, strict=True)
        ]
        self.products += len(found)
        return torch.tensor(found, dtype=torch.float64)

    def ritz(self, which: Which) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, their vectors in the basis as columns, and residuals; wanted ones first."""
        values, vectors = torch.linalg.eigh(self.T)
        order = torch.argsort(
            {"largest": values, "smallest": -values, "magnitude": values.abs()}[which],
            descending=True,
        )
        residuals = self.beta * vectors[-1, order].abs()
        return values[order], vectors[:, order], residuals

    def last(self, j: int) -> Tensor:
        """The direction in which the Krylov space grows."""
        return self.Q[self.room].clone()

    def shrink(
        self, values: Tensor, vectors: Tensor, keep: int, following: Callable[[int], Tensor]
    ) -> None:
        """Keep the wanted Ritz vectors, and continue from another direction."""
        self.Q[:keep] = vectors[:, :keep].T.to(self.Q) @ self.Q[: self.room]
        self.Q[keep] = following(keep)
        self.T = torch.zeros_like(self.T)
        self.T[:keep, :keep] = torch.diag(values[:keep])
        self.filled = keep


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    r"""The distribution of all eigenvalues as nodes with weights that sum to one.

    Attributes:
        nodes: positions, shape (probes x steps,).
        weights: their probabilities.
        size: number of eigenvalues D.
    """

    nodes: Float[np.ndarray, "n"]
    weights: Float[np.ndarray, "n"]
    size: int

    @property
    def trace(self) -> float:
        """Estimate of the sum of the eigenvalues."""
        return self.size * float(self.weights @ self.nodes)

    def above(self, threshold: float) -> float:
        """Estimate of the number of eigenvalues above a threshold."""
        return self.size * float(self.weights[self.nodes > threshold].sum())


def spectral_density(
    operator: Operator,
    *,
    probes: int = 4,
    steps: int = 60,
    seed: int = 0,
    progress: bool | None = None,
) -> SpectralDensity:
    r"""The distribution of all eigenvalues by stochastic Lanczos quadrature.

    For a random unit vector v, m Lanczos steps give the Gauss quadrature of
    $\sum_i (u_i^\top v)^2 \, \delta_{\lambda_i}$: nodes $\theta_j$ with weights $s_{1j}^2$. It is
    exact for moments up to degree 2m - 1. Its mean over v is the density of the spectrum.

    Args:
        operator: as for `eigenvalues`.
        probes: number of random vectors.
        steps: number of Lanczos steps m for each.
        seed: seed of the vectors.
        progress: show a bar; None shows it on a terminal.

    Source: Ubaru, Chen and Saad (2017), section 3; Ghorbani, Krishnan and Xiao (2019), "An
    investigation into neural net optimization via Hessian eigenvalue density".

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(3, 1).double())
        >>> data = torch.eye(3).double(), torch.zeros(3)
        >>> hessian = subbayes.curvature.Curvature(net, Gaussian(1.0), data)
        >>> density = spectral_density(hessian, probes=2, progress=False)
        >>> round(float(density.weights.sum()), 6), round(float(density.nodes.max()), 6)
        (1.0, 4.0)
    """
    check_count("probes", probes)
    steps = min(check_count("steps", steps), operator.size)
    nodes, weights = [], []
    with progress_bar(probes, "Lanczos quadrature", progress, "probes") as shown:
        for probe in range(probes):
            krylov = _Krylov(operator, steps, [check_seed(seed), probe])
            krylov.fill()
            theta, s = torch.linalg.eigh(krylov.T)
            nodes.append(theta.numpy())
            weights.append((s[0] ** 2).numpy() / probes)
            shown.update(1)
    order = np.argsort(np.concatenate(nodes))
    return SpectralDensity(
        np.concatenate(nodes)[order], np.concatenate(weights)[order], operator.size
    )

r"""The Laplace approximation in z: a Gaussian at the mode with the curvature there.

With $A = -\nabla^2 \log p_T(z^* \mid D)$ at the mode $z^*$,

$$ q(z) = N(z^*, A^{-1}), \qquad
   \log p_T(D) \approx \log p_T(D, z^*) + \tfrac{k}{2} \log 2\pi - \tfrac12 \log \det A . $$

Exact where the log density is quadratic. MacKay (1992), *A practical Bayesian framework for
backpropagation networks*; Tierney & Kadane (1986).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws, Moments
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import GradientDensity, check_gradient, prior_scale
from subbayes.inference.engine import Engine
from subbayes.inference.importance_sampling import approximate_draws
from subbayes.inference.samplers.laplace_start import Points, climb
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar

ValueAndGrad = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_AT_ONCE = 64
_STEP = 0.05  # of a posterior standard deviation
_FIRST = 0.01  # scale of the first directions, in standard deviations of the prior
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10  # of differences
_STABLE = 1.5  # eigenvalues below this and above its inverse: the directions hardly change
_SEARCHES, _CLOSE = 5, 1e-3  # from the mode found so far, and its distance in standard deviations
_STEEP = 10.0  # gradient per standard deviation far from any mode, kinks included


@dataclass(frozen=True)
class Laplace(Engine):
    """The Laplace approximation in z, with independent draws.

    The draws have the stats "log_density" and "log_q" (the normalised density of the
    approximation), the `moments` and `log_evidence` of the approximation and the `pareto_k` of the
    importance ratios: above 0.7 the approximation is poor. Their meta has "gradient", its largest
    entry at the mode in units of standard deviations.

    Attributes:
        starts: number of start points of the optimisation: z = 0, then draws from the prior.

    Raises:
        InputError: no start point of finite density, or a mode at which the curvature is not
            positive definite.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> Laplace().sample(posterior, draws=100, chains=2, progress=False).z.shape
        (2, 100, 2)
    """

    name = "laplace"
    label = "Laplace"
    validity = "approximation"
    independent = True
    starts: int = 4

    def __post_init__(self) -> None:
        check_count("starts", self.starts)

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from the approximation; see `Engine.run`."""
        check_gradient(posterior)
        check_same_run(self.name, posterior, sampling)
        started = time.perf_counter()
        rng = np.random.default_rng(sampling.seed)
        k, starts = posterior.rank, self.starts
        with progress_bar(starts + 1, "Laplace approximation", sampling.progress, "steps") as steps:
            points = [np.zeros(k), *(posterior.prior.sample((k,), rng) for _ in range(starts - 1))]
            modes = []
            for point in points:
                modes.append(find_mode(posterior.value_and_grad, point))
                steps.update(1)
            height, mode = max(modes, key=lambda pair: pair[0])
            if not np.isfinite(height):
                fail(
                    "posterior",
                    "a finite log density at z = 0 or at a draw from the prior",
                    f"minus infinity at all {starts}",
                    "Raise starts, or check the data",
                )
            height, mode, factor = _approximate(posterior, height, mode)
            steps.update(1)
            eps = rng.standard_normal((sampling.chains, sampling.draws, k))
            z = mode + eps @ factor.T
        log_volume = float(np.linalg.slogdet(factor)[1])
        log_q = -0.5 * (eps**2).sum(-1) - 0.5 * k * np.log(2 * np.pi) - log_volume
        gradient = posterior.value_and_grad(mode[None])[1][0]
        draws = approximate_draws(
            posterior,
            z,
            log_q,
            meta={"seed": sampling.seed, "gradient": float(np.abs(factor.T @ gradient).max())},
            engine=self.name,
            log_evidence=height + 0.5 * k * float(np.log(2 * np.pi)) + log_volume,
            moments=Moments.of(mode, factor @ factor.T),
        )
        draws.meta["seconds"] = time.perf_counter() - started
        return draws


def find_mode(
    value_and_grad: ValueAndGrad, start: Float[np.ndarray, "k"], iterations: int = 1000
) -> tuple[float, Float[np.ndarray, "k"]]:
    """Log density and coordinates of the maximum that L-BFGS reaches from a start.

    Minus infinity and the start itself if the density is not finite there.
    """
    from scipy.optimize import minimize

    def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_grad(z[None])
        if not (np.isfinite(value[0]) and np.isfinite(gradient).all()):
            return 1e300, np.zeros_like(z)
        return -float(value[0]), -gradient[0]

    if not np.isfinite(value_and_grad(start[None])[0][0]):
        return -np.inf, start
    optimum = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "ftol": 1e-14, "gtol": 1e-8},
    )
    return -float(optimum.fun), np.asarray(optimum.x, dtype=np.float64)


def _approximate(
    posterior: GradientDensity, height: float, mode: Float[np.ndarray, "k"]
) -> tuple[float, Float[np.ndarray, "k"], Float[np.ndarray, "k k"]]:
    """Log density, mode, and L of the covariance LL', from a point near the mode.

    The first directions have the prior's scale. Where the curvature over such steps is not that of
    the mode, or the point is not near it, Newton steps as long as the approximation is wide find
    both, as at the start of chains.
    """
    scale = prior_scale(posterior)
    with suppress(np.linalg.LinAlgError):
        return _refine(posterior, height, mode, np.diag(scale) * _FIRST)
    points, factors, _ = climb(posterior, Points.at(posterior, mode[None]), scale)
    try:
        return _refine(posterior, float(points.value[0]), points.z[0], factors[0])
    except np.linalg.LinAlgError as error:
        fail(
            "posterior",
            "a mode with positive definite curvature",
            str(error),
            "Use inference='nuts', or for a network 'laplace-linearised', whose Gauss-Newton "
            "curvature is never negative; or raise starts, or use a smooth activation, not relu",
        )


def _refine(
    posterior: GradientDensity,
    height: float,
    mode: Float[np.ndarray, "k"],
    factor: Float[np.ndarray, "k k"],
) -> tuple[float, Float[np.ndarray, "k"], Float[np.ndarray, "k k"]]:
    """Log density, mode and factor, the mode searched in coordinates of unit curvature.

    In those of the prior, a posterior that is much narrower in some directions is badly scaled.

    Raises:
        LinAlgError: curvature that is not positive definite, or a mode that is not near.
    """
    for _ in range(_SEARCHES):
        factor = _factor(posterior, mode, factor)
        found, offset = find_mode(partial(_scaled, posterior, mode, factor), np.zeros_like(mode))
        if found >= height:
            height, mode = found, mode + factor @ offset
        gradient = posterior.value_and_grad(mode[None])[1][0]
        if np.abs(offset).max() < _CLOSE and np.abs(gradient @ factor).max() < _STEEP:
            return height, mode, factor
    raise np.linalg.LinAlgError("none within reach of the starts")


def _scaled(
    posterior: GradientDensity,
    mode: Float[np.ndarray, "k"],
    factor: Float[np.ndarray, "k k"],
    u: Float[np.ndarray, "1 k"],
) -> tuple[np.ndarray, np.ndarray]:
    """Log density and gradient in coordinates of unit curvature."""
    value, gradient = posterior.value_and_grad(mode + u @ factor.T)
    return value, gradient @ factor


def _factor(
    posterior: GradientDensity, mode: Float[np.ndarray, "k"], directions: Float[np.ndarray, "k k"]
) -> Float[np.ndarray, "k k"]:
    """L with covariance LL', from the curvature by central differences along directions.

    The curvature along them makes the next ones independent with unit curvature, so that steps
    become a fixed part of a standard deviation, which reduces the error of the differences.

    Raises:
        LinAlgError: curvature that is not positive definite.
    """
    for number in range(1, _MOST_ROUNDS + 1):
        curvature = _curvature(posterior, mode, directions)
        if not np.isfinite(curvature).all():
            raise np.linalg.LinAlgError("differences that are not finite")
        values = np.linalg.eigvalsh(curvature)
        if values[0] <= 0:
            raise np.linalg.LinAlgError(f"an eigenvalue of {values[0]:.3g}")
        directions = directions @ np.linalg.inv(np.linalg.cholesky(curvature)).T
        stable = values[0] > 1 / _STABLE and values[-1] < _STABLE
        if number >= _LEAST_ROUNDS and stable:
            break
    return directions


def _curvature(
    posterior: GradientDensity, mode: np.ndarray, directions: np.ndarray
) -> Float[np.ndarray, "k k"]:
    """Negative Hessian along directions (columns), by differences of the gradient."""
    offsets = np.concatenate([directions.T, -directions.T]) * _STEP
    gradient = np.concatenate(
        [
            posterior.value_and_grad(mode + offsets[i : i + _AT_ONCE])[1]
            for i in range(0, len(offsets), _AT_ONCE)
        ]
    )
    k = len(mode)
    curvature = -(gradient[:k] - gradient[k:]) @ directions / (2 * _STEP)
    return (curvature + curvature.T) / 2

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
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws, Moments
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.importance_sampling import approximate_draws
from subbayes.inference.samplers.chains import prior_scale
from subbayes.inference.samplers.hamiltonian import GradientDensity, check_gradient
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar

__all__ = ["Laplace", "find_mode"]

ValueAndGrad = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_AT_ONCE = 64
_STEP = 0.05  # of a posterior standard deviation


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
    validity = "approximation"
    starts: int = 4

    def __post_init__(self) -> None:
        check_count("starts", self.starts)

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from the approximation; see `Engine.run`."""
        check_gradient(posterior)
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
            factor = _factor(posterior, mode)
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
    found = minimize(
        negative,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": iterations, "ftol": 1e-14, "gtol": 1e-8},
    )
    return -float(found.fun), np.asarray(found.x, dtype=np.float64)


def _factor(posterior: GradientDensity, mode: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k k"]:
    """L with covariance L L', from the curvature by central differences.

    The first directions have the prior's scale. The curvature along them makes the next ones
    independent with unit curvature, which reduces the error of the differences.
    """
    directions = np.diag(prior_scale(posterior)) * 1e-2
    for _ in range(3):
        curvature = _curvature(posterior, mode, directions)
        try:
            directions = directions @ np.linalg.inv(np.linalg.cholesky(curvature)).T
        except np.linalg.LinAlgError:
            least = float(np.linalg.eigvalsh(curvature)[0])
            fail(
                "posterior",
                "a mode with positive definite curvature",
                f"an eigenvalue of {least:.3g}",
                "Raise starts, use nuts, or use a smooth activation instead of relu",
            )
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

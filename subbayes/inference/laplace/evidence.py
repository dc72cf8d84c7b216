r"""Prior precision and noise of a linearised Laplace approximation, by maximising the evidence.

Laplace's approximation of the log evidence, in nats,

$$ \log p(D) \approx \sum_n \log p(y_n \mid f(x_n; \hat w)) - \tfrac\lambda2 \lVert \hat w \rVert^2
   - \tfrac12 \sum_i \log(1 + e_i / \lambda) , $$

with the eigenvalues e of $V^\top V$. Within a subspace they are those of $(VP)^\top VP$ relative to
$P^\top P$, and $\hat w$ is projected on the span of P (the remainder is not random). Gaussian noise
wider by a factor c divides e by c^2. So one decomposition serves all $\lambda$ and c.

The sampled form has no eigenvalues. Its prior is found by MacKay's updates, with the effective
dimension $\gamma = \sum_i e_i / (e_i + \lambda)$ estimated from its draws.

The weights are fixed while prior and noise change. For the empirical Bayes of MacKay (1992) and
Immer et al. (2021), train again under the result and repeat.

At weights that fit the labels of every row, the softmax is saturated and the eigenvalues are small
whatever the data say beyond the mode: the prior of the largest evidence is then wide, and the
linearised network underconfident. `tune_prior` warns of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.row_sums import Terms, first_rows, sum_over_rows
from subbayes.curvature.sampled import Sampled
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import column, target_values
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.predictions.gaussian import default_method, predictive_of
from subbayes.utils.checks import check_positive, fail_type
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.inference.laplace.linearised import LinearisedPosterior

__all__ = ["Evidence", "random_norm", "tune_prior"]

_COMPARED = 200  # training rows
_DRAWS = 200  # of their outputs, for likelihoods without a closed form
_LEAST_SHARE = 0.8  # of the network's probability of their labels
_RANGE = 20.0  # of the logarithm of the prior precision, on either side of 0
_LEVEL = 1e-3  # nats by which the evidence at an end of the range is no smaller than elsewhere
_MOST_UPDATES, _STATIONARY = 50, 5e-3  # of MacKay's updates, and the change at which they end


@dataclass(frozen=True)
class Evidence:
    """The log evidence as a function of prior precision and noise.

    Attributes:
        log_likelihood: at the maximum a posteriori.
        squares: sum of squared residuals in units of the noise; NaN without a noise scale.
        targets: number of observed numbers, each of which counts as often as the weight of its row.
        norm: squared norm of the random weights.
        eigenvalues: of V'V, shape (r,).
        multiplicities: how often each of them occurs, shape (r,).
    """

    log_likelihood: float
    squares: float
    targets: float
    norm: float
    eigenvalues: Float[np.ndarray, "r"]
    multiplicities: Float[np.ndarray, "r"]

    @classmethod
    def of(cls, posterior: LinearisedPosterior) -> Evidence:
        """Compute it from one pass over the data and the posterior's eigenvalues."""
        psi = posterior.precision
        total, squares, targets = cls.fit_of(posterior)
        values, counts = psi.spectrum()
        norm = random_norm(psi)
        return cls(total, squares, targets, norm, values.cpu().numpy(), counts.cpu().numpy())

    @staticmethod
    def fit_of(posterior: LinearisedPosterior) -> tuple[float, float, float]:
        """Log-likelihood, sum of squared residuals and number of observed numbers, in one pass."""
        V, likelihood = posterior.precision.V, posterior.likelihood

        def of(rows: Jacobian) -> Terms:
            return (_fit_of(rows, likelihood),)

        found = sum_over_rows(V, of) if V.is_divided else of(V)
        total, squares, targets = found[0].tolist()
        return total, squares if targets else float("nan"), targets

    def log_marginal_likelihood(self, prior_precision: float, noise_factor: float = 1.0) -> float:
        """Log evidence at a prior precision and a factor of the likelihood's noise scale."""
        check_positive("prior_precision", prior_precision)
        fit = self.log_likelihood
        if noise_factor != 1:
            fit += 0.5 * self.squares * (1 - noise_factor**-2) - (
                self.targets * np.log(noise_factor)
            )
        occam = self.multiplicities @ np.log1p(
            self.eigenvalues / (noise_factor**2 * prior_precision)
        )
        return float(fit - 0.5 * prior_precision * self.norm - 0.5 * occam)

    def maximum(self, noise: bool = True) -> tuple[float, float]:
        """The prior precision and noise factor of the largest evidence.

        Args:
            noise: vary the noise of a Gaussian likelihood too.
        """
        from scipy.optimize import minimize

        free = noise and self.targets > 0

        def negative(at: np.ndarray) -> float:
            factor = float(np.exp(at[1])) if free else 1.0
            return -self.log_marginal_likelihood(float(np.exp(at[0])), factor)

        box = [(-_RANGE, _RANGE), (-7.0, 7.0)][: 1 + free]
        found = min(
            (
                minimize(negative, [start, 0.0][: 1 + free], method="L-BFGS-B", bounds=box)
                for start in (-6.0, 0.0, 6.0)
            ),
            key=lambda result: float(result.fun),
        )
        for end in box[0]:
            if negative(np.array([end, *found.x[1:]])) <= found.fun + _LEVEL:
                _warn_of_end(end)
        return float(np.exp(found.x[0])), float(np.exp(found.x[1])) if free else 1.0


def _fit_of(rows: Jacobian, likelihood: Likelihood) -> Float[torch.Tensor, "3"]:
    """Log-likelihood, sum of squared residuals and number of observed numbers, of some rows."""
    network, found = rows.network, torch.zeros(3, dtype=torch.float64)
    for _, inputs, y in rows.batches():
        with torch.no_grad():
            f = network(network.weights, inputs).double()
            assert y is not None
            found[0] += likelihood.log_prob(f, y).sum().cpu()
            if likelihood.has_noise_scale:
                mean, std = likelihood.mean(f), likelihood.variance(f).sqrt()
                parts = split_targets(y, has_weights(likelihood, y))
                squares = ((column(parts.values, f) - mean) / std).square().sum(-1)
                counts = torch.from_numpy(parts.counts)
                found[1] += counts @ squares.cpu()
                found[2] += counts.sum() * mean.shape[-1]
    return found


def random_norm(psi: Any) -> float:
    """Squared norm of the weights, or of their projection on the span of a subspace."""
    weights = psi.network.weights.double()
    if not isinstance(psi, SubspacePrecision):
        return float(weights.square().sum())
    z = psi.subspace.project(torch.zeros_like(psi.network.weights)).double()
    return float(psi.subspace.push(z.to(psi.network.weights)).double().square().sum())


def tune_prior(posterior: LinearisedPosterior, *, noise: bool = True) -> LinearisedPosterior:
    """The posterior under the prior precision (and Gaussian noise) of the largest evidence.

    Args:
        posterior: of all weights or within a subspace.
        noise: tune the scale of Gaussian noise too.

    Warns:
        UserWarning: a prior precision at an end of the range from exp(-20) to exp(20); class
            probabilities at the result that are underconfident on training rows, of likelihoods
            with one label for each row.

    Example:
        >>> import subbayes
        >>> from subbayes.inference import linearised_laplace
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1).double())
        >>> x = torch.linspace(-1, 1, 60).double()[:, None]
        >>> posterior = linearised_laplace(net, Gaussian(0.5), (x, 3 * x[:, 0]))
        >>> tuned = tune_prior(posterior, noise=False)
        >>> tuned.log_marginal_likelihood() >= posterior.log_marginal_likelihood()
        True
    """
    if not hasattr(posterior, "with_prior_and_noise"):
        remedy = "Pass what linearised_laplace returns"
        fail_type("posterior", "a LinearisedPosterior", posterior, remedy)
    if isinstance(posterior.precision, Sampled):
        tuned = _update_until_stationary(posterior, noise)
    else:
        prior_precision, factor = Evidence.of(posterior).maximum(noise)
        tuned = posterior.with_prior_and_noise(prior_precision, factor)
    if tuned.likelihood.kind == "classification" and not tuned.likelihood.per_position:
        _warn_if_underconfident(tuned)
    return tuned


def _update_until_stationary(posterior: LinearisedPosterior, noise: bool) -> LinearisedPosterior:
    r"""MacKay's updates, with the effective dimension $\gamma$ from the draws.

    They are $\lambda \leftarrow \gamma / \lVert \hat w \rVert^2$, and for the noise $c^2 \leftarrow
    \text{squares} / (\text{targets} - \gamma)$; their fixed point is a stationary point of the
    evidence. Each posterior is solved from the last.
    """
    _, squares, targets = Evidence.fit_of(posterior)
    norm, factor, found = random_norm(posterior.precision), 1.0, posterior
    for _ in range(_MOST_UPDATES):
        assert isinstance(found.precision, Sampled)
        gamma = found.precision.effective_dimension
        new, step = _within_range(gamma, norm), 1.0
        if noise and targets:
            step = math.sqrt(squares / max(targets - gamma, 1e-3 * targets)) / factor
        change = max(abs(math.log(new / found.prior_precision)), abs(math.log(step)))
        if change < _STATIONARY:
            if abs(math.log(new)) >= _RANGE - _STATIONARY:
                _warn_of_end(math.log(new))
            return found
        found, factor = found.with_prior_and_noise(new, step), factor * step
    warn_user(
        f"prior: the prior precision still changes by {100 * change:.2g} % after {_MOST_UPDATES} "
        "updates; call tune_prior on the result again"
    )
    return found


def _within_range(gamma: float, norm: float) -> float:
    """gamma / norm, within the range of prior precisions; weights of 0 have the largest."""
    if gamma >= norm * math.exp(_RANGE):
        return math.exp(_RANGE)
    return max(gamma / norm, math.exp(-_RANGE))


def _warn_of_end(at: float) -> None:
    warn_user(
        f"prior: the evidence is largest at {math.exp(at):.2g}, an end of the range of prior "
        "precisions: the weights are near 0, or the data determine none of them; choose the prior "
        "precision by hand"
    )


def _warn_if_underconfident(posterior: LinearisedPosterior) -> None:
    """Compare the probabilities of training labels by the posterior and by the network."""
    psi = posterior.precision
    inputs, y = first_rows(psi.V, _COMPARED)
    assert y is not None
    X = psi.jacobian(inputs).silent()
    covariance = psi.blocks(X).cpu()
    mean, labels = X.outputs().double().cpu(), target_values(y).reshape(-1, 1).long().cpu().numpy()
    likelihood = posterior.likelihood.unweighted
    method = default_method(likelihood, mean)
    sure, doubtful = (
        float(np.take_along_axis(found.probabilities, labels, 1).mean())
        for found in (
            predictive_of(mean, part, likelihood, method, _DRAWS, 0)
            for part in (torch.zeros_like(covariance), covariance)
        )
    )
    other = "" if method == "monte-carlo" else ", or predict with method='laplace-bridge'"
    if doubtful < _LEAST_SHARE * sure:
        warn_user(
            f"prior: at the precision {posterior.prior_precision:.3g} of the largest evidence, "
            f"labels of training rows have a mean probability of {doubtful:.2f}, and "
            f"{sure:.2f} by the network: predictions are underconfident. Choose the prior on "
            f"held-out rows (cross_validate_prior){other}"
        )

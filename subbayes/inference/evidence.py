r"""Prior precision and noise of a linearised Laplace approximation: by evidence or by folds.

Laplace's approximation of the log evidence, in nats,

$$ \log p(D) \approx \sum_n \log p(y_n \mid f(x_n; \hat w)) - \tfrac\lambda2 \lVert \hat w \rVert^2
   - \tfrac12 \sum_i \log(1 + e_i / \lambda) , $$

with the eigenvalues e of $V^\top V$, within a subspace those of $(VP)^\top VP$ relative to
$P^\top P$, and of $\hat w$ the part in the span of P alone (the rest is not random). Gaussian noise
a factor c wider divides e by c^2. So one decomposition serves all $\lambda$ and c.

The weights stay where they are while prior and noise change, as usual: train again under the
result, and repeat, for the empirical Bayes of MacKay (1992) and Immer et al. (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from subbayes.checks import check_count, check_positive, fail
from subbayes.curvature.forms import Form
from subbayes.curvature.restricted import Restricted
from subbayes.data import Data, n_rows, take
from subbayes.likelihoods import Gaussian, Likelihood, Standardized
from subbayes.network import Network
from subbayes.subspace import Subspace

if TYPE_CHECKING:
    from subbayes.inference.linearised_laplace import LinearisedLaplace

__all__ = ["Evidence", "cross_validated", "widened"]


def widened(likelihood: Likelihood, factor: float) -> Likelihood:
    """A Gaussian likelihood with its noise a factor wider.

    Raises:
        InputError: a likelihood without a noise scale of its own.
    """
    if isinstance(likelihood, Standardized):
        return replace(likelihood, likelihood=widened(likelihood.likelihood, factor))
    if not _has_noise(likelihood):
        fail("noise", "Gaussian noise with a scale of its own", repr(likelihood),
             "Tune the prior precision alone: noise=False")
    assert isinstance(likelihood, Gaussian)
    scale = torch.as_tensor(likelihood.noise, dtype=torch.float64) * factor
    return replace(likelihood, noise=float(scale) if scale.ndim == 0 else tuple(scale.tolist()))


def _has_noise(likelihood: Likelihood) -> bool:
    if isinstance(likelihood, Standardized):
        return _has_noise(likelihood.likelihood)
    return isinstance(likelihood, Gaussian) and not isinstance(likelihood.noise, str)


@dataclass(frozen=True)
class Evidence:
    """The log evidence as a function of prior precision and noise.

    Attributes:
        log_likelihood: at the maximum a posteriori.
        squares: sum of squares of residuals in units of the noise; NaN where that has no scale.
        targets: how many numbers were observed.
        norm: squared norm of the weights that are random.
        eigenvalues: of V'V, shape (r,).
    """

    log_likelihood: float
    squares: float
    targets: int
    norm: float
    eigenvalues: Float[np.ndarray, "r"]

    @classmethod
    def of(cls, posterior: LinearisedLaplace) -> Evidence:
        """From one pass over the data, and the posterior's eigenvalues."""
        psi, likelihood = posterior.precision, posterior.likelihood
        total, squares, targets = 0.0, 0.0, 0
        for _, inputs, y in psi.V.batches():
            with torch.no_grad():
                f = psi.network(psi.network.weights, inputs).double()
                assert y is not None
                total += float(likelihood.log_prob(f, y).sum())
                if _has_noise(likelihood):
                    mean, std = likelihood.mean(f), likelihood.variance(f).sqrt()
                    value = torch.as_tensor(y).double().reshape(mean.shape)
                    squares += float(((value - mean) / std).square().sum())
                    targets += mean.numel()
        return cls(total, squares if targets else float("nan"), targets, _random_norm(psi),
                   psi.eigenvalues().clamp_min(0).cpu().numpy())

    def log_marginal_likelihood(self, prior_precision: float, noise_factor: float = 1.0) -> float:
        """At a prior precision, and noise a factor wider than the likelihood's."""
        check_positive("prior_precision", prior_precision)
        fit = self.log_likelihood
        if noise_factor != 1:
            fit += 0.5 * self.squares * (1 - noise_factor**-2) - (
                self.targets * np.log(noise_factor))
        occam = np.log1p(self.eigenvalues / (noise_factor**2 * prior_precision)).sum()
        return float(fit - 0.5 * prior_precision * self.norm - 0.5 * occam)

    def maximum(self, noise: bool = True) -> tuple[float, float]:
        """The prior precision and the noise factor of the largest evidence.

        Args:
            noise: vary the noise too, where the likelihood is Gaussian.
        """
        from scipy.optimize import minimize

        free = noise and self.targets > 0

        def negative(at: np.ndarray) -> float:
            factor = float(np.exp(at[1])) if free else 1.0
            return -self.log_marginal_likelihood(float(np.exp(at[0])), factor)

        box = [(-20.0, 20.0), (-7.0, 7.0)][:1 + free]
        found = min((minimize(negative, [start, 0.0][:1 + free], method="L-BFGS-B", bounds=box)
                     for start in (-6.0, 0.0, 6.0)), key=lambda result: float(result.fun))
        return float(np.exp(found.x[0])), float(np.exp(found.x[1])) if free else 1.0


def _random_norm(psi: Any) -> float:
    """Squared norm of the weights, within a subspace of their part in its span."""
    weights = psi.network.weights.double()
    if not isinstance(psi, Restricted):
        return float(weights.square().sum())
    z = psi.subspace.project(torch.zeros_like(psi.network.weights)).double()
    return float(psi.subspace.push(z.to(psi.network.weights)).double().square().sum())


def cross_validated(
    network: Network,
    likelihood: Likelihood,
    data: Any,
    subspace: Subspace | None = None,
    *,
    covariance: Form = "exact",
    prior_precisions: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4),
    noise_factors: Sequence[float] = (1.0,),
    folds: int = 5,
    seed: int = 0,
    **options: Any,
) -> tuple[LinearisedLaplace, dict[tuple[float, float], float]]:
    """The posterior whose prior precision (and noise) predicts held-out folds best.

    The Gauss-Newton matrix leaves each fold out in turn; the weights stay where they are.

    Args:
        network: f(x; w).
        likelihood: p(y | f).
        data: training data, in memory.
        subspace: as for `linearised_laplace`.
        covariance: as for `linearised_laplace`.
        prior_precisions: candidates.
        noise_factors: candidates for how much wider Gaussian noise is.
        folds: how many.
        seed: of the folds.
        options: as for `linearised_laplace`.

    Returns:
        The posterior on all data, and the mean log density of held-out rows for each candidate.

    Raises:
        InputError: more folds than rows, or data that are streamed.
    """
    from subbayes.inference.linearised_laplace import linearised_laplace

    if not (len(prior_precisions) and len(noise_factors)):
        fail("prior_precisions and noise_factors", "at least one candidate of each", "none")
    rows = Data.of(data).to(network.device)
    if check_count("folds", folds, 2) > rows.n:
        fail("folds", f"at most {rows.n}, the number of rows", folds)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows.n))
    parts = [part.sort().values for part in order.tensor_split(folds)]
    scores = {(float(p), float(c)): 0.0 for p in prior_precisions for c in noise_factors}
    for held in parts:
        kept = torch.ones(rows.n, dtype=torch.bool)
        kept[held] = False
        fitted = linearised_laplace(
            network, likelihood, rows.rows(kept.nonzero().flatten()), subspace,
            covariance=covariance, prior_precision=float(prior_precisions[0]), **options)
        test = rows.rows(held)
        for (p, c) in scores:
            scores[p, c] += _score(fitted.rescaled(p, c), test) / rows.n
    best, factor = max(scores, key=lambda pair: scores[pair])
    final = linearised_laplace(network, likelihood, rows, subspace, covariance=covariance,
                               prior_precision=best, **options)
    return final.rescaled(best, factor), scores


def _score(posterior: LinearisedLaplace, test: Data) -> float:
    y = test.targets()
    noise = None if isinstance(y, torch.Tensor) else y[1]
    predictive = posterior.predict(test.inputs, noise=noise)
    value = y if isinstance(y, torch.Tensor) else (y[0], y[1])
    assert n_rows(y) == len(predictive)
    return float(predictive.log_prob(take(value, slice(None))).sum())

r"""Methods of `ssr_coverage`: sampling by importance weights, and double machine learning.

The posterior of a few directions of a small network and a few effects is sampled by adaptive
importance sampling: proposals are a mixture of t distributions around the modes that are reached
from several start points, refitted to weighted draws; the last proposals are weighted, their
weights smoothed (Vehtari et al. 2024) and resampled. It costs a few hundred batched evaluations,
where NUTS takes thousands. Pareto k says whether the weights are reliable; where they are not,
sequential Monte Carlo is used instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.model_selection import KFold

from subbayes.diagnostics import psis
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.importance_sampling import systematic_resampling
from subbayes.inference.samplers.laplace_start import Points, climb
from subbayes.inference.samplers.smc import SMC

__all__ = ["ImportanceSampler", "Mixture", "known_network", "partialling_out"]

_DF = 7.0
_ROUNDS, _PILOT, _FINAL = 3, 600, 3000
_LEAST_SIZE = 200.0  # effective draws of the final weights
_LARGEST_K = 0.7
_AT_ONCE = 500


@dataclass(frozen=True)
class Mixture:
    """A mixture of t distributions with equal weights.

    Attributes:
        means: centres.
        factors: Cholesky factors of the scale matrices, lower triangular.
    """

    means: Float[np.ndarray, "m k"]
    factors: Float[np.ndarray, "m k k"]

    def draw(self, n: int, rng: np.random.Generator) -> Float[np.ndarray, "n k"]:
        """Independent draws."""
        component = rng.integers(0, len(self.means), n)
        eps = rng.standard_normal((n, self.means.shape[1]))
        eps *= np.sqrt(_DF / rng.chisquare(_DF, n))[:, None]
        found: np.ndarray = self.means[component] + np.einsum(
            "nij,nj->ni", self.factors[component], eps
        )
        return found

    def log_density(self, z: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
        """Log density up to a constant."""
        k, parts = z.shape[1], []
        for mean, factor in zip(self.means, self.factors, strict=True):
            squares = np.square(np.linalg.solve(factor, (z - mean).T)).sum(0)
            own = -0.5 * (_DF + k) * np.log1p(squares / _DF)
            parts.append(own - np.log(np.diag(factor)).sum())
        found: np.ndarray = logsumexp(parts, axis=0)
        return found


class ImportanceSampler:
    """An engine for `fit`: draws of equal weight, by SMC if the weights are not reliable.

    The weights are reliable if Pareto k is at most 0.7 and their effective size at least 200.
    """

    def __call__(self, posterior: Any, sampling: Sampling) -> Draws:
        """Draw from a posterior; `sampling.initial` are start points."""
        rng = np.random.default_rng([sampling.seed, 21])
        start = Points.at(posterior, np.asarray(sampling.initial))
        scale = np.broadcast_to(posterior.prior.scale, posterior.rank).astype(np.float64)
        mode, factor, found = climb(posterior, start, scale)
        kept = found & (mode.value > mode.value.max() - 5) if found.any() else ~found
        spread = factor[kept] @ factor[kept].transpose(0, 2, 1)
        proposals = Mixture(mode.z[kept], np.linalg.cholesky(spread))
        past_z, past_value, past_q = [], [], []
        for i in range(_ROUNDS + 1):
            z = proposals.draw(_PILOT if i < _ROUNDS else _FINAL, rng)
            past_z.append(z)
            past_value.append(_values(posterior, z))
            past_q.append(proposals.log_density(z))
            if i < _ROUNDS:
                weights = _weights(past_value[-1] - past_q[-1])[0]
                proposals = _refitted(proposals, z, weights)
        log_weights, k = _weights(past_value[-1] - past_q[-1], True)
        if k > _LARGEST_K or 1 / np.square(log_weights).sum() < _LEAST_SIZE:
            return SMC().run(posterior, sampling)
        count = sampling.draws * sampling.chains
        chosen = rng.permutation(systematic_resampling(log_weights, count, rng))
        return Draws(
            past_z[-1][chosen].reshape(sampling.chains, sampling.draws, -1),
            meta={"seed": sampling.seed},
            engine="importance-sampling",
            independent=True,
            pareto_k=k,
        )


def _values(posterior: Any, z: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    parts = [posterior.value(z[i : i + _AT_ONCE]) for i in range(0, len(z), _AT_ONCE)]
    return np.concatenate(parts)


def _weights(
    log_ratios: Float[np.ndarray, " n"], smooth: bool = False
) -> tuple[Float[np.ndarray, " n"], float]:
    """Normalised weights and Pareto k, of smoothed weights."""
    finite = np.where(np.isfinite(log_ratios), log_ratios, -1e300)
    if not smooth:
        return np.exp(finite - logsumexp(finite)), float("nan")
    log_weights, k = psis(finite[:, None])
    return np.exp(log_weights[:, 0]), float(k[0])


def _refitted(
    old: Mixture, z: Float[np.ndarray, "n k"], weights: Float[np.ndarray, " n"]
) -> Mixture:
    """The mixture with an additional component of the moments of weighted draws."""
    size = 1 / np.square(weights).sum()
    mean = weights @ z
    spread = (z - mean).T @ ((z - mean) * weights[:, None])
    share = min(1.0, size / (10 * z.shape[1]))  # of the moments in the covariance
    own = old.factors[0] @ old.factors[0].T
    factor = np.linalg.cholesky(share * spread + (1 - share) * own + 1e-9 * np.eye(len(mean)))
    means, factors = old.means, old.factors
    return Mixture(
        np.concatenate([mean[None], means])[:4], np.concatenate([factor[None], factors])[:4]
    )


def partialling_out(
    y: Float[np.ndarray, " n"],
    treatments: Float[np.ndarray, "n d"],
    controls: Float[np.ndarray, "n c"],
    seed: int,
    folds: int = 5,
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    r"""Double machine learning of a partially linear model (Chernozhukov et al. 2018, eq. 4.4).

    $$ \hat\theta = \Bigl(\sum_i \tilde D_i \tilde D_i^\top\Bigr)^{-1} \sum_i \tilde D_i \tilde y_i
       $$

    with residuals of response and treatments from forests of extremely randomised trees of the
    other folds.

    Args:
        y: responses.
        treatments: the columns whose effects are estimated, jointly.
        controls: the columns that the forests read.
        seed: of folds and forests.
        folds: number of folds.

    Returns:
        Effects and their heteroscedasticity-robust standard errors.
    """
    both = np.column_stack([y, treatments])
    residuals = np.empty_like(both)
    for train, test in KFold(folds, shuffle=True, random_state=seed).split(controls):
        forest = ExtraTreesRegressor(100, min_samples_leaf=5, random_state=seed)
        scale = both[train].std(0)
        forest.fit(controls[train], both[train] / scale)
        residuals[test] = both[test] - forest.predict(controls[test]) * scale
    response, own = residuals[:, 0], residuals[:, 1:]
    inverse = np.linalg.inv(own.T @ own)
    effects = inverse @ own.T @ response
    scores = own * (response - own @ effects)[:, None]
    covariance = inverse @ (scores.T @ scores) @ inverse
    return effects, np.sqrt(np.diag(covariance))


def known_network(
    x: Float[np.ndarray, "n p"],
    y: Float[np.ndarray, " n"],
    f: Float[np.ndarray, " n"],
    sigma: float,
) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    r"""Effects in the population beside a network that is known, with their standard errors.

    With $f_\perp$ the part of the network that is orthogonal to the columns x, the variance is
    $(x^\top x)^{-1} x^\top (\sigma^2 I + \operatorname{diag} f_\perp^2) x (x^\top x)^{-1}$: that of
    the Bayesian bootstrap in large samples.
    """
    inverse = np.linalg.inv(x.T @ x)
    rest = f - x @ (inverse @ (x.T @ f))
    meat = x.T @ (x * (sigma**2 + rest**2)[:, None])
    return inverse @ (x.T @ y), np.sqrt(np.diag(inverse @ meat @ inverse))

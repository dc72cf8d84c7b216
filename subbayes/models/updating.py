r"""Update a posterior by new rows, without the rows that it was fitted to.

Today's posterior q(z) is the prior of the new rows, whose likelihood L(z) is at the temperature of
the fit:

- *Linearised Laplace*: outputs at the new rows are $f(x; \hat w) + J P z$, around the weights of
  the fit. With $q = N(m, A^{-1})$ the update is the linear model's recursion,
  $A' = A + (VP)^\top VP / T$, and the mean maximises $\log q(z) + \tfrac1T \log L(z)$: in one step
  for Gaussian noise, where both are exact, and in a few Newton steps with the Fisher information
  for other likelihoods, whose posterior is again approximated by a Gaussian at its mode.
- *Draws* of q are weighted by $L(z)^{1/T}$, Pareto-smoothed (Vehtari et al. 2024), and resampled
  systematically while Pareto k is at most 0.7 and half of them remain different.
- *Otherwise* sequential Monte Carlo tempers the likelihood of the new rows, with moves in the same
  coordinates, from the Gaussian with the moments of q (those of its draws are shrunk towards their
  diagonal) in the place of q: what q has beyond these moments is lost.

Forgetting by $\lambda$ takes earlier rows at the power $\lambda$: $q \propto p_0 L_0$ becomes
$p_0 L_0^\lambda = p_0^{1 - \lambda} q^\lambda$, which is Gaussian for Gaussian q and prior $p_0$;
draws are weighted by the ratio of the Gaussian with their moments after and before.

Source: Opper and Winther (1998), "A Bayesian approach to on-line learning"; Ritter, Botev and
Barber (2018), "Online structured Laplace approximations"; Chopin (2002), "A sequential particle
filter method for static models".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes import diagnostics
from subbayes.curvature.jacobian import Jacobian, curvature_root
from subbayes.curvature.layers import Layers
from subbayes.curvature.precision import cholesky
from subbayes.curvature.subspace_precision import subspace_jacobian
from subbayes.data.arrays import evenly_spaced
from subbayes.diagnostics.surprise import MOST_DRAWS, MOST_ROWS, Update, surprise
from subbayes.distributed.processes import current
from subbayes.draws import MAX_PARETO_K, Draws, Moments
from subbayes.inference.configuration import Sampling
from subbayes.inference.importance_sampling import pareto_k, systematic_resampling
from subbayes.inference.samplers.smc import SMC
from subbayes.inference.samplers.smc_moves import Reference
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import with_noise
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.utils.checks import check_positive, check_seed, fail
from subbayes.utils.memory import check_memory
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Targets
from subbayes.utils.warning import warn_user

_LEAST_DIFFERENT = 0.5  # share of the draws that resampling leaves
_LEAST_WITHOUT_MOVES = 0.1  # the same of draws that cannot be moved
_PARTICLES = 1000  # at least, of sequential Monte Carlo
_DRAWS_OF_COORDINATE = 4  # at least, for a Gaussian with the moments of the draws
_STEPS, _CONVERGED = 50, 1e-12  # of Newton's method, and its decrement at the end, in nats


def updated_draws(
    posterior: Posterior,
    draws: Draws,
    *,
    forgetting: float = 1.0,
    seed: int = 0,
    separate: bool = False,
    warnings: Sequence[str] = (),
) -> tuple[Draws, Update]:
    """Draws of a posterior after new rows, and what the update was.

    Args:
        posterior: of the new rows under the prior of the fit.
        draws: draws before these rows.
        forgetting: power of the likelihood of earlier rows.
        seed: of resampling and moves.
        separate: chains sample modes of their own, so that no Gaussian has their moments.
        warnings: of the draws before, which resampled ones keep.

    Raises:
        InputError: sharded rows or weights, or many processes;
            a forgetting that is not above 0 and at most 1; new rows too informative for importance
            weights, with separate chains or fewer than four draws of each coordinate.
    """
    if check_positive("forgetting", forgetting) > 1:
        fail("forgetting", "a number above 0 and at most 1", forgetting)
    check_seed(seed)
    if posterior.needs_all_processes or current() is not None:
        got = "sharded ones, or many processes"
        fail("new_rows", "rows and weights of one process that works alone", got)
    if draws.prediction == "linearised":
        return _update_linear_model(posterior, draws, forgetting, seed)
    return _update_draws(posterior, draws, forgetting, seed, separate, warnings)


# --- Gaussians ------------------------------------------------------------------------------------


def _precision(gaussian: Normal, k: int) -> Float[Tensor, "k k"]:
    if gaussian.factor is None:
        return torch.from_numpy(np.broadcast_to(gaussian.scale, k) ** -2.0).diag()
    return torch.cholesky_inverse(torch.from_numpy(np.ascontiguousarray(gaussian.factor)))


def forgotten(
    today: Normal, prior: Normal, forgetting: float, k: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k k"]]:
    r"""Mean and precision of $p_0^{1 - \lambda} q^\lambda$.

    Args:
        today: q.
        prior: $p_0$.
        forgetting: $\lambda$.
        k: number of coordinates.

    Example:
        >>> today = Normal(covariance=[[0.25]], mean=[3.0])
        >>> [round(float(part), 4) for part in forgotten(today, Normal(1.0), 0.5, 1)]
        [2.4, 2.5]
    """
    A, before = _precision(today, k), _precision(prior, k)
    m, m_before = (torch.from_numpy(np.broadcast_to(g.mean, k).copy()) for g in (today, prior))
    if forgetting == 1:
        return m, A
    precision = forgetting * A + (1 - forgetting) * before
    natural = forgetting * A @ m + (1 - forgetting) * before @ m_before
    mean = torch.cholesky_solve(natural[:, None], cholesky(precision, "forgetting"))[:, 0]
    return mean, precision


# --- the linear model -----------------------------------------------------------------------------


def _update_linear_model(
    posterior: Posterior, draws: Draws, forgetting: float, seed: int
) -> tuple[Draws, Update]:
    """The recursion of the linear model."""
    k, moments, data = posterior.rank, draws.moments, posterior.data
    assert moments is not None
    network = posterior.network.with_weights(posterior.subspace.shift)
    batches = [to_device(inputs, network.device) for inputs, _ in data.batches()]
    X = Jacobian.of_batches(Layers(network, batches[0]), batches)
    remedy = "Pass them in several updates, which are together one"
    check_memory("new_rows", f"{X.rows} gradients of {k} coordinates", 24 * X.rows * k, remedy)
    J = subspace_jacobian(X, posterior.subspace).cpu().reshape(X.n, X.roots, k)
    f, y = X.outputs().double().cpu(), to_device(data.targets(), torch.device("cpu"))

    few = torch.from_numpy(evenly_spaced(np.arange(X.n), MOST_ROWS))
    z = torch.from_numpy(draws.flat(MOST_DRAWS).copy())
    outputs, likelihood = f[few] + torch.einsum("nck,sk->snc", J[few], z), posterior.likelihood
    parts = split_targets(take(y, few), has_weights(likelihood, y))
    known = with_noise(likelihood, parts.noise, len(few))
    found = surprise(Predictive(outputs, known), parts.values, seed)

    today = Normal(covariance=moments.covariance, mean=moments.mean)
    prior = forgotten(today, posterior.prior, forgetting, k)
    mean, half = _newton(likelihood, f, J, y, *prior, posterior.temperature)
    eps = np.random.default_rng(seed).standard_normal((k, draws.z[..., 0].size))
    drawn = mean + torch.linalg.solve_triangular(half.T, torch.from_numpy(eps), upper=True).T
    after = Moments.of(mean.numpy(), torch.cholesky_inverse(half).contiguous().numpy())
    updated = replace(
        draws,
        z=drawn.numpy().reshape(draws.z.shape),
        stats={},
        meta={"seed": seed},
        log_evidence=math.nan,
        moments=after,
    )
    return updated, Update(X.n, "linear model", *found, forgetting=forgetting)


def _newton(
    likelihood: Likelihood,
    f: Float[Tensor, "n C"],
    J: Float[Tensor, "n C k"],
    y: Targets,
    m: Float[Tensor, "k"],
    A: Float[Tensor, "k k"],
    temperature: float,
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k k"]]:
    """The mode of the new rows' posterior, and the lower factor of its precision there.

    Args:
        likelihood: p(y | f).
        f: outputs at z = 0.
        J: their gradients in z.
        y: targets.
        m: mean before.
        A: precision before.
        temperature: T.
    """

    def value(z: Float[Tensor, "k"]) -> float:
        prior = -0.5 * (z - m) @ A @ (z - m)
        return float(prior + likelihood.log_prob(f + J @ z, y).double().sum() / temperature)

    z = m
    for _ in range(_STEPS):
        outputs = f + J @ z
        VP = torch.einsum("ncr,nck->nrk", curvature_root(likelihood, outputs, y), J).flatten(0, 1)
        half = cholesky(A + VP.T @ VP / temperature, "new_rows")
        score = likelihood.score(outputs, y).double()
        g = torch.einsum("nc,nck->k", score, J) / temperature - A @ (z - m)
        step = torch.cholesky_solve(g[:, None], half)[:, 0]
        if float(g @ step) < _CONVERGED:
            return z + step, half
        least = value(z)
        least -= 1e-9 * (1 + abs(least))  # what rounding may change
        while not value(z + step) >= least and float(step.abs().max()) > 1e-12:
            step = step / 2
        z = z + step
    warn_user(f"new_rows: Newton's method has not converged in {_STEPS} steps; refit on all rows")
    return z, half


# --- draws ----------------------------------------------------------------------------------------


def _update_draws(
    posterior: Posterior,
    draws: Draws,
    forgetting: float,
    seed: int,
    separate: bool,
    warnings: Sequence[str],
) -> tuple[Draws, Update]:
    """Importance weights, or sequential Monte Carlo where they are unreliable."""
    z, rng = draws.flat(), np.random.default_rng(seed)
    found = _surprise(posterior, z, seed)
    log_ratios = posterior.log_likelihood(z) / posterior.temperature
    if not np.isfinite(log_ratios).any():
        fail("new_rows", "rows that are possible under one of the draws", "a density of 0 at all")
    has_moments = not separate and len(z) >= _DRAWS_OF_COORDINATE * z.shape[1]
    prior = Normal()
    if has_moments and (known := draws.moments) is not None and known.covariance is not None:
        prior = Normal(covariance=known.covariance, mean=known.mean)
    elif has_moments:
        prior = _gaussian_of(z, posterior.prior)
    if forgetting < 1:
        if not has_moments:
            fail("forgetting", "1 without four draws of each coordinate in one mode", forgetting)
        today = prior
        mean, precision = forgotten(today, posterior.prior, forgetting, z.shape[1])
        covariance = torch.cholesky_inverse(cholesky(precision, "forgetting"))
        prior = Normal(covariance=covariance.numpy(), mean=mean.numpy())
        log_ratios = log_ratios + prior.log_prob(z) - today.log_prob(z)
    k = pareto_k(log_ratios)
    weights = np.exp(diagnostics.psis(np.maximum(log_ratios, -1e300)[:, None])[0][:, 0])
    chosen = z[systematic_resampling(weights, len(z), rng)]
    different = len(np.unique(chosen, axis=0)) / len(z)
    least = _LEAST_DIFFERENT if has_moments else _LEAST_WITHOUT_MOVES
    if is_exact := k <= MAX_PARETO_K and different >= least:
        method, after = "importance weights", None
        if has_moments:
            spread = np.cov(z.T, aweights=weights).reshape(z.shape[1], -1)
            after = Moments.of(weights @ z, spread)
    else:
        if not has_moments:
            fail(
                "new_rows",
                "rows for which importance weights of the draws suffice (Pareto k of at most 0.7, "
                "and a tenth of the draws left)",
                f"rows with k = {k:.2f}, and {different:.0%} left",
                "Refit on all rows; or fit in a subspace, of which Gaussians have the moments",
            )
        method, particles = "smc", _tempered(posterior, prior, len(z), seed)
        gaussian = _gaussian_of(particles, posterior.prior)
        assert gaussian.covariance is not None
        after = Moments.of(gaussian.mean, gaussian.covariance)
        chosen = evenly_spaced(particles, len(z))
    updated = Draws(
        rng.permutation(chosen).reshape(draws.z.shape),
        meta={"seed": seed, "warnings": list(warnings), "thinned_from": len(z)},
        engine=draws.engine,
        validity=draws.validity if is_exact else "approximation",
        independent=True,
        temperature=draws.temperature,
        pareto_k=k if is_exact else math.nan,
        moments=after,
    )
    return updated, Update(posterior.n, method, *found, k, forgetting)


def _gaussian_of(z: Float[np.ndarray, "S k"], prior: Normal) -> Normal:
    """The Gaussian with the moments of draws, whose unit of length is that of their prior."""
    reference = Reference.of(z, np.broadcast_to(prior.scale, z.shape[1]))
    half = reference.covariance_factor
    return Normal(covariance=half @ half.T, mean=reference.mean)


def _tempered(
    posterior: Posterior, prior: Normal, count: int, seed: int
) -> Float[np.ndarray, "S k"]:
    """Particles under the new rows' likelihood and a Gaussian in the place of q."""
    bridged: Any = copy.copy(posterior)
    bridged.prior = prior
    sampling = Sampling(draws=max(count, _PARTICLES), chains=1, seed=seed, progress=False)
    return SMC().run(bridged, sampling).flat()


def _surprise(
    posterior: Posterior, z: Float[np.ndarray, "S k"], seed: int
) -> tuple[float, float, float]:
    """How probable some of the rows are at some draws."""
    inputs, y = next(posterior.data.batches())
    few = torch.from_numpy(evenly_spaced(np.arange(n_rows(y)), MOST_ROWS))
    parts = split_targets(take(y, few), has_weights(posterior.likelihood, y))
    found = posterior.predict(z, take(inputs, few), noise=parts.noise, n_draws=MOST_DRAWS)
    return surprise(found, parts.values, seed)

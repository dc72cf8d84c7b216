r"""Gaussian regressions: the linearised posterior of all weights after one Gauss-Newton step.

For each prior precision $\lambda$ the posterior of the linearised network has the mean
$f(x; \hat w) + J(x) \delta_\lambda$, see `LinearisedPosterior.with_step`, and the epistemic
variance $\kappa^2 J \Psi_\lambda J^\top$, to which noise of variance $\sigma^2$ is added. Held-out
rows choose $\lambda$, $\kappa$ and $\sigma$: the noise of training rows is too small as soon as the
network fits them better than others. The reference is the network with the noise of held-out rows.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.laplace.linearised import LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import TargetParts
from subbayes.recommendation.classes import Networks
from subbayes.recommendation.guard import Noisy, Verdict, judge
from subbayes.utils.checks import InputError
from subbayes.utils.warning import warn_user

_PRECISIONS = tuple(10.0**k for k in range(-1, 6))
_MOST_EXACT = 5500  # weights, up to which the posterior is a matrix of their squared number


def regression(
    networks: Networks,
    likelihood: Likelihood,
    data: Data,
    held_out: Data,
    y: TargetParts,
    seed: int = 0,
) -> tuple[Predictor, list[str], Verdict]:
    """The model that is chosen, names of the candidates, and what the guard says.

    Of several networks the reference is their mixture, and the posteriors are those of the first.

    Args:
        networks: the trained network, or several.
        likelihood: Gaussian noise around its outputs.
        data: the training data.
        held_out: rows that were not trained on.
        y: their targets.
        seed: of the random divisions of held-out rows.
    """
    rows = [x for x, _ in held_out.batches()]
    target = y.values.double().numpy().reshape(len(y.values), -1)
    network, several = networks.networks[0], len(networks.networks) > 1
    name = "deep ensemble" if several else "MAP"
    point = networks.mixture([(m, None) for m in range(len(networks.networks))], likelihood, name)
    each = [point.predict(x) for x in rows]
    means = np.concatenate(
        [p.likelihood.mean(p.outputs).numpy().reshape(p.n_draws, len(p), -1) for p in each], 1
    )
    noise = np.concatenate([p.aleatoric.reshape(len(p), -1) for p in each])
    share = y.counts / y.counts.sum()
    squares = share @ ((target - means) ** 2).mean((0, 2))
    spread = share @ ((target - share @ target) ** 2).mean(1)
    if squares > spread:
        warn_user(
            f"validation: errors of {math.sqrt(squares):.3g} for targets with a standard deviation "
            f"of {math.sqrt(spread):.3g}; pass held-out targets in the units of training"
        )
    factor = float(np.sqrt(share @ ((target - means) ** 2 / noise).mean((0, 2))))
    likelihood, noise = likelihood.scale_noise(factor), factor**2 * noise
    subject = "ensemble" if several else "network"
    name = f"{subject} with the noise of held-out rows"
    candidates = [Noisy(name, means, None, noise, target)]
    form: Any = "primal" if network.size <= _MOST_EXACT else "kfac"
    base = linearised_laplace(network, likelihood, data, covariance=form)
    for precision in _PRECISIONS:
        posterior = base.with_prior_precision(precision).with_step(data)
        each = [posterior.predict(x) for x in rows]
        mean, variance = (
            np.concatenate([getattr(p, what).reshape(len(p), -1) for p in each])
            for what in ("mean", "epistemic")
        )
        name = f"linearised posterior, prior precision {precision:.2g}"
        candidates.append(Noisy(name, mean[None], variance, noise, target))
    verdict = judge(candidates, y.counts, seed, mix=False)
    chosen = int(np.argmax(verdict.weights))
    factor, scale = verdict.settings[chosen]
    model: Predictor = replace(point, likelihood=likelihood)
    if not chosen:
        with suppress(InputError):  # held-out rows that determine no noise
            model = temperature_scaling(model, held_out)
    else:
        posterior = base.with_prior_precision(_PRECISIONS[chosen - 1]).with_step(data)
        model = _scaled(posterior, scale, likelihood.scale_noise(factor))
    return model, [candidate.name for candidate in candidates], verdict


def _scaled(
    posterior: LinearisedPosterior, scale: float, likelihood: Likelihood
) -> LinearisedPosterior:
    """The posterior with standard deviations times a factor, and another noise of predictions."""
    psi = posterior.precision
    V = psi.V.with_likelihood(posterior.likelihood.scale_noise(scale))
    wider = psi.rescaled(V, psi.prior_precision / scale**2, scale**-2)
    return replace(posterior, precision=wider, likelihood=likelihood)

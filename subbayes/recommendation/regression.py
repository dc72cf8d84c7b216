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
import torch

from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.laplace.linearised import LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import TargetParts
from subbayes.networks.network import Network
from subbayes.recommendation.classes import Networks
from subbayes.recommendation.guard import Noisy, Verdict, judge
from subbayes.recommendation.mixture import Mixture
from subbayes.utils.checks import InputError
from subbayes.utils.warning import warn_user

_PRECISIONS, _FIRST = tuple(10.0**k for k in range(-1, 6)), 3
_MOST_EXACT = 5500  # weights, up to which the posterior is a matrix of their squared number


def regression(
    networks: Networks, likelihood: Likelihood, y: TargetParts, seed: int = 0
) -> tuple[Predictor, list[str], Verdict]:
    """The model that is chosen, names of the candidates, and what the guard says.

    Of several networks the reference is their mixture, and the posteriors are mixed too: with
    Kronecker factors, and without the step.

    Args:
        networks: the trained network, or several.
        likelihood: Gaussian noise around its outputs.
        y: targets of the held-out rows.
        seed: of the random divisions of held-out rows.
    """
    data, held_out = networks.data, networks.held_out
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
    form: Any = "exact" if not several and network.size <= _MOST_EXACT else "kfac"
    bases = [
        linearised_laplace(one, likelihood, data, covariance=form) for one in networks.networks
    ]
    precisions: list[float] = []

    def add(precision: float) -> float:
        """The score of the posteriors under a prior precision, which become a candidate."""
        posteriors = [base.with_prior_precision(precision) for base in bases]
        if form == "exact":  # steps by Kronecker factors lead astray
            posteriors = [posterior.with_step(data) for posterior in posteriors]
        parts = [Mixture(tuple(posteriors)).predict(x) for x in rows]
        mean = torch.cat([likelihood.mean(part.outputs) for part in parts], 1).numpy()
        variance = torch.cat([part.variances for part in parts], 1).numpy()
        kind = "linearised posteriors" if several else "linearised posterior"
        name = f"{kind}, prior precision {precision:.2g}"
        candidates.append(Noisy(name, mean, variance, noise, target))
        precisions.append(precision)
        return float((candidates[-1].log_densities @ y.counts).max())

    first = add(_PRECISIONS[_FIRST])
    for further in (_PRECISIONS[_FIRST + 1 :], _PRECISIONS[:_FIRST][::-1]):
        best = first
        for precision in further:
            score = add(precision)
            if score <= best:
                break
            best = score
    verdict = judge(candidates, y.counts, seed, mix=False)
    chosen = int(np.argmax(verdict.weights))
    factor, scale = verdict.settings[chosen]
    model: Predictor = replace(point, likelihood=likelihood)
    if not chosen:
        with suppress(InputError):  # held-out rows that determine no noise
            model = temperature_scaling(model, held_out)
    else:
        precision = precisions[chosen - 1]
        posteriors = [
            wider_posterior(one, likelihood, data, form, precision, scale, factor)
            for one in networks.networks
        ]
        model = Mixture(tuple(posteriors)) if several else posteriors[0]
    return model, [candidate.name for candidate in candidates], verdict


def wider_posterior(
    network: Network,
    likelihood: Likelihood,
    data: Data,
    form: str,
    precision: float,
    scale: float,
    factor: float,
) -> LinearisedPosterior:
    """The posterior with standard deviations times `scale`, and noise times `factor`.

    Its covariance is that of noise and of a prior of as much larger standard deviations, under
    which the Gauss-Newton step is the same. The primal form predicts without the training data.
    """
    options: Any = {"covariance": "kfac" if form == "kfac" else "primal"}
    wider = likelihood.scale_noise(scale)
    posterior = linearised_laplace(
        network, wider, data, prior_precision=precision / scale**2, **options
    )
    if form == "exact":
        posterior = posterior.with_step(data)
    return replace(posterior, likelihood=likelihood.scale_noise(factor))

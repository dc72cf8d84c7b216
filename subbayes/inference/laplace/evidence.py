r"""Prior precision and noise of a linearised Laplace approximation: by evidence or held-out rows.

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

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from subbayes.curvature.precision_factory import Form
from subbayes.curvature.subspace_precision import Restricted
from subbayes.data.data import Data, n_rows, take
from subbayes.likelihoods import Gaussian, Likelihood, Standardized
from subbayes.networks.network import Network
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_count, check_positive, fail, fail_type

if TYPE_CHECKING:
    from subbayes.inference.laplace.linearised import LinearisedPosterior

__all__ = ["Evidence", "cross_validated", "widened"]


def widened(likelihood: Likelihood, factor: float) -> Likelihood:
    """A Gaussian likelihood with its noise a factor wider.

    Raises:
        InputError: a likelihood without a noise scale of its own.
    """
    if isinstance(likelihood, Standardized):
        return replace(likelihood, likelihood=widened(likelihood.likelihood, factor))
    if not _has_noise(likelihood):
        fail(
            "noise",
            "Gaussian noise with a scale of its own",
            repr(likelihood),
            "Tune the prior precision alone: noise=False",
        )
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
    def of(cls, posterior: LinearisedPosterior) -> Evidence:
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
        return cls(
            total,
            squares if targets else float("nan"),
            targets,
            _random_norm(psi),
            psi.eigenvalues().clamp_min(0).cpu().numpy(),
        )

    def log_marginal_likelihood(self, prior_precision: float, noise_factor: float = 1.0) -> float:
        """At a prior precision, and noise a factor wider than the likelihood's."""
        check_positive("prior_precision", prior_precision)
        fit = self.log_likelihood
        if noise_factor != 1:
            fit += 0.5 * self.squares * (1 - noise_factor**-2) - (
                self.targets * np.log(noise_factor)
            )
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

        box = [(-20.0, 20.0), (-7.0, 7.0)][: 1 + free]
        found = min(
            (
                minimize(negative, [start, 0.0][: 1 + free], method="L-BFGS-B", bounds=box)
                for start in (-6.0, 0.0, 6.0)
            ),
            key=lambda result: float(result.fun),
        )
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
    validation: Any = None,
    retrain: Callable[[Data], Network] | None = None,
    folds: int = 5,
    seed: int = 0,
    **options: Any,
) -> tuple[LinearisedPosterior, dict[tuple[float, float], float]]:
    """The posterior whose prior precision (and noise) predicts held-out rows best.

    Held out are the rows of `validation`, or each of the folds of the data in turn, for which
    `retrain` trains the network anew. With neither the weights stay where they are, and only the
    Gauss-Newton matrix leaves the fold out: such weights have seen every row, need no
    uncertainty to predict it, and the scores favour a prior that is too narrow. A warning says so.

    Args:
        network: f(x; w).
        likelihood: p(y | f).
        data: training data, for folds in memory.
        subspace: as for `linearised_laplace`.
        covariance: as for `linearised_laplace`.
        prior_precisions: candidates.
        noise_factors: candidates for how much wider Gaussian noise is.
        validation: rows that the network was not trained on, with their targets; no folds then.
        retrain: a function from a fold's training data to the network trained on them, without a
            subspace: `lambda rows: train(module, likelihood, rows).network`.
        folds: how many.
        seed: of the folds.
        options: as for `linearised_laplace`.

    Returns:
        The posterior on all data, and the mean log density of held-out rows for each candidate.

    Raises:
        InputError: more folds than rows, folds of data that are streamed, or `retrain` with a
            subspace or with `validation`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 60).double()[:, None]
        >>> y = x[:, 0] + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(0))
        >>> net = Network(torch.nn.Linear(1, 1).double())
        >>> posterior, scores = cross_validated(
        ...     net, Gaussian(0.5), (x[::2], y[::2]), validation=(x[1::2], y[1::2]),
        ...     prior_precisions=(0.01, 0.1, 1.0, 10.0, 100.0))
        >>> len(scores)
        5
    """
    from subbayes.inference.laplace.linearised import linearised_laplace

    if not (len(prior_precisions) and len(noise_factors)):
        fail("prior_precisions and noise_factors", "at least one candidate of each", "none")
    _check_held_out(validation, retrain, subspace)

    def posterior(trained: Network, kept: Data, prior_precision: float) -> LinearisedPosterior:
        return linearised_laplace(
            trained,
            likelihood,
            kept,
            subspace,
            covariance=covariance,
            prior_precision=prior_precision,
            **options,
        )

    rows = Data.of(data).to(network.device)
    scores = {(float(p), float(c)): 0.0 for p in prior_precisions for c in noise_factors}
    parts = (
        _folds(rows, folds, seed)
        if validation is None
        else iter([(rows, Data.of(validation, "validation").to(network.device))])
    )
    n = 0
    for kept, held in parts:
        trained = network if retrain is None else _retrained(retrain, kept, network)
        fitted, n = posterior(trained, kept, float(prior_precisions[0])), n + held.n
        for p, c in scores:
            scores[p, c] += _score(fitted.rescaled(p, c), held)
    scores = {pair: score / n for pair, score in scores.items()}
    best, factor = max(scores, key=lambda pair: scores[pair])
    if validation is None and retrain is None:
        warnings.warn(
            "data: the weights have seen the held-out rows, whose scores favour too narrow a "
            "prior; pass validation=, rows that training has not seen, or retrain=, a function "
            "from a fold's training data to a network trained on them",
            stacklevel=2,
        )
    for name, value, tried in (
        ("prior_precisions", best, prior_precisions),
        ("noise_factors", factor, noise_factors),
    ):
        if len(tried) > 1 and value in (min(tried), max(tried)):
            end = "smallest" if value == min(tried) else "largest"
            warnings.warn(
                f"{name}: {value:g} is the {end} of those tried, and others beyond it "
                "may be better; widen the grid",
                stacklevel=2,
            )
    return posterior(network, rows, best).rescaled(best, factor), scores


def _check_held_out(validation: Any, retrain: Any, subspace: Subspace | None) -> None:
    if retrain is None:
        return
    if validation is not None:
        fail(
            "validation and retrain",
            "one of the two",
            "both",
            "Rows held out from training need no folds",
        )
    if subspace is not None:
        fail(
            "subspace",
            "None with retrain",
            repr(subspace),
            "A subspace lies around one network's weights: pass validation= instead",
        )
    if not callable(retrain) or isinstance(retrain, (Network, torch.nn.Module)):
        fail_type("retrain", "a function from a fold's training data to a Network", retrain)


def _folds(rows: Data, folds: int, seed: int) -> Iterator[tuple[Data, Data]]:
    """What is kept, and what is held out."""
    if check_count("folds", folds, 2) > rows.n:
        fail("folds", f"at most {rows.n}, the number of rows", folds)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows.n))
    for held in order.tensor_split(folds):
        kept = torch.ones(rows.n, dtype=torch.bool)
        kept[held] = False
        yield rows.rows(kept.nonzero().flatten()), rows.rows(held.sort().values)


def _retrained(retrain: Callable[[Data], Network], kept: Data, network: Network) -> Network:
    found = retrain(kept)
    if not isinstance(found, Network):
        fail_type(
            "retrain", "a function that returns a Network", found, "Return train(...).network"
        )
    if found.size != network.size:
        fail("retrain", f"networks of {network.size} weights, as the network has", found.size)
    return found


def _score(posterior: LinearisedPosterior, test: Data) -> float:
    total = 0.0
    for inputs, y in test.batches():
        noise = None if isinstance(y, torch.Tensor) else y[1]
        predictive = posterior.predict(inputs, noise=noise)
        assert n_rows(y) == len(predictive)
        value = y if isinstance(y, torch.Tensor) else (y[0], y[1])
        total += float(predictive.log_prob(take(value, slice(None))).sum())
    return total

r"""Predictives from a Gaussian over the outputs, $f(x) \sim N(\mu, \Sigma)$, in closed form.

With Gaussian noise y is Gaussian. For classes whose probabilities are the softmax of the outputs,
or the sigmoid of one, the expected softmax is approximated, with
$\kappa(v) = (1 + \tfrac\pi8 v)^{-1/2}$,

- probit: $\mathrm{softmax}_k(\kappa(\Sigma_{kk}) \mu_k)$ (MacKay 1992; eq. (12) of the paper on
  optimal subspaces), for one logit $\mathrm{sigmoid}(\kappa(\Sigma) \mu)$;
  it counts the variance of the sum of all logits, which the softmax does not depend on, and is
  underconfident where a wide prior leaves most of the variance there;
- extended probit: $p_k \propto 1 / \sum_i \exp(-\kappa(\Sigma_{kk} + \Sigma_{ii} - 2 \Sigma_{ki})
  (\mu_k - \mu_i))$, which accounts for correlations between classes (Lu, Ie and Sha 2021, "mf2");
- Laplace bridge: the mean of the Dirichlet distribution with
  $\alpha_k = \Sigma_{kk}^{-1} (1 - \tfrac2K + \tfrac{e^{\mu_k}}{K^2} \sum_i e^{-\mu_i})$ for
  logits that sum to 0 (Hobbhahn, Kristiadi and Hennig 2022).

A class whose logit is minus infinity, as of a mask, has probability 0, and the formulas are those
of the other classes.

For Monte Carlo over the outputs, also of ordered classes and of two classes with another link, see
`subbayes.Predictive`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import Moments, WrappedLikelihood
from subbayes.likelihoods.gaussian import GaussianLike
from subbayes.predictions.predictive import Predictive, check_outputs, normal_log_prob
from subbayes.utils.checks import check_choice, check_count, check_seed, fail, is_finite
from subbayes.utils.types import Outputs, RowNumbers

Array = np.ndarray
Method = Literal[
    "auto", "gaussian", "probit", "extended-probit", "laplace-bridge", "monte-carlo", "network"
]
METHODS = ("probit", "extended-probit", "laplace-bridge")
_AT_ONCE = 2**22  # pairs of logits in memory at once


def has_logits(likelihood: Likelihood, n_outputs: int) -> bool:
    """Whether class probabilities are the softmax of the outputs, or the sigmoid of one output.

    Ordered classes, and two classes with another link, have other functions of their outputs; they
    are told apart at one vector of outputs.

    Args:
        likelihood: p(y | f).
        n_outputs: number of outputs C.

    Example:
        >>> from subbayes.likelihoods import Categorical
        >>> from subbayes.likelihoods.families import OrdinalFamily
        >>> has_logits(Categorical(3), 3), has_logits(OrdinalFamily(n_classes=3), 3)
        (True, False)
    """
    if likelihood.kind != "classification" or likelihood.per_position:
        return False
    outputs = torch.linspace(-1.0, 2.0, n_outputs, dtype=torch.float64)[None]
    logits = torch.nn.functional.pad(outputs, (1, 0)) if n_outputs == 1 else outputs
    probabilities, expected = likelihood.classes(outputs), logits.softmax(-1)
    return probabilities.shape == expected.shape and bool(
        torch.allclose(probabilities.double(), expected)
    )


@dataclass(frozen=True)
class MoreVariance(GaussianLike, WrappedLikelihood):
    """Gaussian noise with the epistemic variances of each draw and row added."""

    epistemic: Tensor

    def variance(self, outputs: Outputs) -> Moments:
        """The sum of both variances."""
        return self.likelihood.variance(outputs) + self.epistemic

    @override
    def select_draws(self, index: Tensor) -> Likelihood:
        return MoreVariance(self.likelihood.select_draws(index), self.epistemic[index])


class GaussianPredictive(Predictive):
    r"""A Gaussian predictive: outputs $f \sim N(\mu, \Sigma)$ for each row, and Gaussian noise.

    Densities, quantiles and scores are those of the Gaussian instead of a mixture.

    Args:
        mean: $\mu$, shape (N, C).
        covariance: $\Sigma$ of each row, shape (N, C, C).
        likelihood: Gaussian noise around the outputs.
        joint: covariance of the outputs of all rows, shape (N C, N C), if needed.

    Raises:
        InputError: another likelihood, shapes that do not fit, or a negative variance.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> predictive = GaussianPredictive(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0),
        ...                                 Gaussian(noise=1.0))
        >>> predictive.epistemic, predictive.aleatoric, predictive.std
        (array([3.]), array([1.]), array([2.]))
    """

    kind = "gaussian"

    def __init__(
        self,
        mean: Outputs,
        covariance: Float[Tensor, "N C C"],
        likelihood: Likelihood,
        joint: Float[Tensor, "m m"] | None = None,
    ) -> None:
        super().__init__(mean[None], likelihood)
        if not likelihood.is_linear_gaussian:
            fail(
                "likelihood",
                "Gaussian noise around the outputs",
                repr(likelihood),
                "Use Monte Carlo over the outputs",
            )
        self._joint = None if joint is None else joint.detach().cpu().double()
        zeros = torch.zeros_like(self.outputs[0])
        self._unit = likelihood.mean(zeros + 1) - likelihood.mean(zeros)  # units of y
        self._rows = rows = covariance.detach().cpu().double()
        self._epistemic = rows * self._unit.unsqueeze(-1) * self._unit.unsqueeze(-2)
        self._noise = likelihood.variance(self.outputs[0]).double()
        self._mean = likelihood.mean(self.outputs[0]).double()
        variance = self._epistemic.diagonal(dim1=1, dim2=2) + self._noise
        if bool((variance < 0).any()):
            fail(
                "covariance",
                "variances of at least 0",
                f"{float(variance.min()):.3g}",
                "Load the posterior with the data and the weights that it was fitted with",
            )
        self._std = variance.sqrt()

    @classmethod
    def joined(cls, parts: Sequence[Any], likelihood: Likelihood) -> Predictive:
        """The predictions of the rows of some parts, without covariances between rows."""
        mean = torch.cat([part.outputs[0] for part in parts])
        return GaussianPredictive(mean, torch.cat([part._rows for part in parts]), likelihood)

    def __repr__(self) -> str:
        return f"GaussianPredictive(n={len(self)}, {self.likelihood!r})"

    def _scaled(self, factor: float, likelihood: Likelihood) -> Predictive:
        joint = None if self._joint is None else factor**2 * self._joint
        mean, rows = factor * self.outputs[0], factor**2 * self._rows
        return GaussianPredictive(mean, rows, likelihood, joint)

    @property
    def covariance(self) -> Float[np.ndarray, "m m"]:
        """Epistemic covariance of all rows in units of y, targets of one row together.

        Raises:
            InputError: the prediction was made without `joint=True`.
        """
        if self._joint is None:
            fail(
                "covariance",
                "a prediction with joint=True",
                "one row by row",
                "Predict with joint=True",
            )
        scale = self._unit.flatten()
        return (self._joint * scale * scale[:, None]).numpy()

    @property
    def epistemic(self) -> Array:
        """Variance of E[y | f] under the Gaussian over f."""
        values = self._epistemic.diagonal(dim1=1, dim2=2)
        return self._finite("epistemic variance", values, 1)

    @property
    @override
    def aleatoric(self) -> Array:
        return self._finite("variance", self._noise, 2)

    @override
    def components(self) -> tuple[Array, Array]:
        return self._array(self._mean[None]), self._array(self._std[None])

    def log_prob(self, y: object, moment_matched: bool = False) -> RowNumbers:
        """Log density of each row, its targets jointly (independent if moment matched)."""
        value = self._columns(self._checked_targets(y))
        if moment_matched:
            z = (value - self._mean) / self._std
            return normal_log_prob(z.numpy(), self._std.numpy())
        covariance = self._epistemic + torch.diag_embed(self._noise)
        joint = torch.distributions.MultivariateNormal(self._mean, covariance)
        return joint.log_prob(value).numpy()

    def _cdf(self, value: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        return torch.special.ndtr((value - self._mean) / self._std)

    def _quantile(self, q: float) -> Float[Tensor, "N T"]:
        return self._mean + self._std * torch.special.ndtri(torch.tensor(q, dtype=torch.float64))

    def sample(self, n: int = 1, seed: int = 0) -> Array:
        """Draw n targets per row; rows are independent without a joint covariance."""
        check_count("n", n)
        generator = torch.Generator().manual_seed(check_seed(seed))
        rows = self.outputs[0].flatten() if self._joint is not None else self.outputs[0]
        inside = self.covariance if self._joint is not None else self._epistemic
        f = gaussian_draws(torch.zeros_like(rows), torch.as_tensor(inside), n, generator)
        shape = n, *self._mean.shape
        eps = torch.randn(shape, generator=generator, dtype=torch.float64)
        return self._array(self._mean + f.reshape(shape) + eps * self._noise.sqrt())


def gaussian_draws(
    mean: Float[Tensor, "*N C"],
    covariance: Float[Tensor, "*N C C"],
    count: int,
    generator: torch.Generator,
) -> Float[Tensor, "S *N C"]:
    """Draws from Gaussians, which may be singular."""
    half = covariance_root(covariance)
    eps = torch.randn(count, *mean.shape, generator=generator, dtype=torch.float64)
    return mean + torch.einsum("...ij,s...j->s...i", half, eps.to(half.device))


def covariance_root(covariance: Float[Tensor, "*N C C"]) -> Float[Tensor, "*N C C"]:
    """A matrix R with R R' = covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


class ClassPredictive(Predictive):
    """Class probabilities in closed form from a Gaussian over the logits.

    Probabilities and densities are those of the approximation; epistemic quantities (mutual
    information, variances) are computed from draws of the logits.

    Args:
        mean: mean of the logits, shape (N, C).
        covariance: covariance of the logits of each row, shape (N, C, C).
        likelihood: one whose class probabilities are the softmax of the outputs, or the sigmoid of
            one, such as `Categorical` or `Bernoulli`.
        method: "probit", "extended-probit" or "laplace-bridge".
        n_draws: number of draws of the logits.
        seed: seed of the draws.

    Raises:
        InputError: another likelihood or method.

    Example:
        >>> from subbayes.likelihoods import Bernoulli
        >>> sure, doubt = (ClassPredictive(torch.ones(1, 1), torch.full((1, 1, 1), v), Bernoulli())
        ...                for v in (0.0, 50.0))
        >>> sure.probabilities.round(2), doubt.probabilities.round(2)
        (array([[0.27, 0.73]]), array([[0.45, 0.55]]))
    """

    kind = "gaussian"

    def __init__(
        self,
        mean: Outputs,
        covariance: Float[Tensor, "N C C"],
        likelihood: Likelihood,
        method: str = "extended-probit",
        n_draws: int = 200,
        seed: int = 0,
    ) -> None:
        if not has_logits(likelihood, mean.shape[1]):
            fail(
                "method",
                f"'auto' or 'monte-carlo' for {likelihood!r}, whose outputs are not logits of "
                "classes",
                repr(method),
            )
        mean, covariance = mean.detach().cpu().double(), covariance.detach().cpu().double()
        generator = torch.Generator().manual_seed(check_seed(seed))
        logits = gaussian_draws(mean, covariance, check_count("n_draws", n_draws), generator)
        super().__init__(logits, likelihood)
        self.method, self._seed, self._gaussian = method, seed, (mean, covariance)
        self._log_averaged = _class_log_probabilities(mean, covariance, method)
        self._averaged = self._log_averaged.exp()

    @classmethod
    def joined(cls, parts: Sequence[Any], likelihood: Likelihood) -> Predictive:
        """The predictions of the rows of some parts, as if they were made together."""
        mean, covariance = map(torch.cat, zip(*(part._gaussian for part in parts), strict=True))
        first = parts[0]
        return ClassPredictive(
            mean, covariance, likelihood, first.method, first.n_draws, first._seed
        )

    def __repr__(self) -> str:
        return f"ClassPredictive(n={len(self)}, {self.method}, {self.likelihood!r})"

    def _scaled(self, factor: float, likelihood: Likelihood) -> Predictive:
        mean, covariance = self._gaussian
        return ClassPredictive(
            factor * mean, factor**2 * covariance, likelihood, self.method, self.n_draws, self._seed
        )

    @property
    def mean(self) -> Array:
        """Means of the class indicators."""
        p = self._averaged
        return self._array(p[:, -1:] if self.outputs.shape[-1] == 1 else p)

    @property
    def aleatoric(self) -> Array:
        """p (1 - p) minus the epistemic variance."""
        return np.maximum(self.mean * (1 - self.mean) - self.epistemic, 0.0)

    @override
    def log_prob(self, y: object, moment_matched: bool = False) -> RowNumbers:
        if moment_matched:
            return super().log_prob(y, True)
        targets: Any = self._checked_targets(y)
        index = targets.reshape(len(self), 1).long()
        return self._log_averaged.gather(1, index)[:, 0].numpy()

    @override
    def sample(self, n: int = 1, seed: int = 0) -> Array:
        generator = torch.Generator().manual_seed(check_seed(seed))
        return torch.multinomial(
            self._averaged, check_count("n", n), replacement=True, generator=generator
        ).T.numpy()


def class_probabilities(
    mean: Outputs, covariance: Float[Tensor, "N C C"], method: str = "probit"
) -> Float[Tensor, "N K"]:
    """Approximate expected probabilities under Gaussian logits; one logit means two classes."""
    return _class_log_probabilities(mean, covariance, method).exp()


def _class_log_probabilities(
    mean: Outputs, covariance: Float[Tensor, "N C C"], method: str
) -> Float[Tensor, "N K"]:
    """Their logarithms, which are finite where the probabilities underflow.

    Classes whose mean logit is -inf have probability 0, and the others have the probabilities that
    they have without these classes.
    """
    check_choice("method", method, METHODS)
    if mean.shape[1] == 1:
        mean, covariance = _two_logits(mean, covariance)
        method = "extended-probit" if method == "probit" else method
    allowed = mean != -math.inf
    if bool(allowed.all()):
        return _of_finite_logits(mean, covariance, method)
    log_probabilities = torch.full_like(mean, -math.inf)
    for pattern in allowed.unique(dim=0):  # rows with the same classes: a problem of these alone
        rows, classes = (allowed == pattern).all(1).nonzero(), pattern.nonzero()[:, 0]
        within = covariance[rows[:, :, None], classes[:, None], classes]
        log_probabilities[rows, classes] = _of_finite_logits(mean[rows, classes], within, method)
    return log_probabilities


def _two_logits(
    mean: Float[Tensor, "N 1"], covariance: Float[Tensor, "N 1 1"]
) -> tuple[Float[Tensor, "N 2"], Float[Tensor, "N 2 2"]]:
    """The logits (0, f) of two classes."""
    both = torch.cat([torch.zeros_like(mean), mean], 1)
    return both, torch.nn.functional.pad(covariance, (1, 0, 1, 0))


def extended_probit(mean: Outputs, covariance: Float[Tensor, "N C C"]) -> Float[Tensor, "N K"]:
    """Expected probabilities of classes of finite logits, all rows at once; see the module."""
    if mean.shape[1] == 1:
        mean, covariance = _two_logits(mean, covariance)
    return _extended_probit(mean, covariance).exp()


def _of_finite_logits(
    mean: Float[Tensor, "N K"], covariance: Float[Tensor, "N K K"], method: str
) -> Float[Tensor, "N K"]:
    if mean.shape[1] == 1:  # the only class that is allowed
        return torch.zeros_like(mean)
    variances = covariance.diagonal(dim1=1, dim2=2)
    if method == "probit":
        return (mean * _kappa(variances)).log_softmax(-1)
    if method == "extended-probit":
        step = max(1, _AT_ONCE // mean.shape[1] ** 2)
        parts = zip(mean.split(step), covariance.split(step), strict=True)
        return torch.cat([_extended_probit(*part) for part in parts])
    return _bridge(mean, covariance)


def _extended_probit(
    mean: Float[Tensor, "n C"], covariance: Float[Tensor, "n C C"]
) -> Float[Tensor, "n C"]:
    gaps = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    variances = covariance.diagonal(dim1=1, dim2=2)
    spread = variances.unsqueeze(-1) + variances.unsqueeze(-2) - 2 * covariance
    return (-(-_kappa(spread.clamp_min(0)) * gaps).logsumexp(-1)).log_softmax(-1)


def _kappa(variance: Tensor) -> Tensor:
    return (1 + math.pi / 8 * variance).rsqrt()


def _bridge(mean: Outputs, covariance: Float[Tensor, "N C C"]) -> Outputs:
    """Mean of the Dirichlet distribution, from logits conditioned on a sum of 0."""
    variances = covariance.diagonal(dim1=1, dim2=2)
    toward, total = covariance.sum(-1), covariance.sum((-1, -2)).unsqueeze(-1)
    has_variance = total > 1e-10 * variances.sum(-1, keepdim=True)
    gain = torch.where(has_variance, toward / total, torch.zeros_like(toward))
    mean, variances = mean - gain * mean.sum(-1, keepdim=True), variances - gain * toward
    K = mean.shape[1]
    log_odds = mean + (-mean).logsumexp(-1, keepdim=True)  # at least 0
    log_counts = log_odds + torch.log1p((K**2 - 2 * K) * (-log_odds).exp())
    return (log_counts - variances.clamp_min(1e-12).log()).log_softmax(-1)


def default_method(likelihood: Likelihood, mean: Outputs) -> Method:
    """The method that "auto" stands for."""
    if likelihood.is_linear_gaussian:
        return "gaussian"
    return "extended-probit" if has_logits(likelihood, mean.shape[1]) else "monte-carlo"


def predictive_of(
    mean: Outputs,
    covariance: Float[Tensor, "N C C"],
    likelihood: Likelihood,
    method: Method,
    n_draws: int,
    seed: int,
    joint: Float[Tensor, "m m"] | None = None,
) -> Predictive:
    """The predictive distribution of a Gaussian over the outputs.

    Raises:
        InputError: means or covariances that are not finite.
    """
    check_outputs(mean[None], likelihood)
    if not is_finite(covariance):
        fail(
            "model",
            "finite covariances of the outputs",
            "NaN or infinite ones",
            "Compute in float64, or load another file",
        )
    if method == "gaussian":
        return GaussianPredictive(mean, covariance, likelihood, joint)
    if method == "monte-carlo":
        generator = torch.Generator().manual_seed(check_seed(seed))
        outputs = gaussian_draws(mean, covariance, check_count("n_draws", n_draws), generator)
        return Predictive(outputs, likelihood)
    return ClassPredictive(mean, covariance, likelihood, method, n_draws, seed)

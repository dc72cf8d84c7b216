r"""Temperature scaling (Guo et al. 2017): one temperature fitted on held-out data.

Classification divides the logits, $p_\tau(y = c) \propto \exp(f_c / \tau)$; regression multiplies
the standard deviation of the noise, $y \sim N(\mu, \tau^2 \sigma^2)$. The epistemic variance of
regressions does not change; that of logits is divided by $\tau^2$.

The temperature of classes has a prior, see `predictions.output_temperature`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.facts import Finite, Positive
from subbayes.artifacts.saving import Nested, WrappedFacts, artifact
from subbayes.baselines.map import point_estimate
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.standard_errors import mean_and_error
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import Moments, WrappedLikelihood
from subbayes.likelihoods.gaussian import GaussianLike
from subbayes.likelihoods.target_parts import TargetParts, split_targets
from subbayes.predictions.modules import Component
from subbayes.predictions.output_temperature import best_temperature
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_positive, fail
from subbayes.utils.types import OutputFunction, Outputs, Targets


class ScaledFacts(WrappedFacts):
    """What an artifact holds of `TemperatureScaled` beside the tensors of its base."""

    kinds = ("fitted-model", "sparse-network", "weight-samples", "mc-dropout")

    temperature: Positive
    gain: Finite | None
    error: Finite | None
    averaged: bool


def temperature_scaling(
    base: Any,
    validation: Any,
    likelihood: str | Likelihood | None = None,
    *,
    output: OutputFunction | None = None,
    averaged: bool = False,
) -> TemperatureScaled:
    r"""Fit the temperature of a predictor by the log-likelihood of held-out data.

    $$ \hat\tau = \arg\max_\tau \sum_n \log p_\tau(y_n \mid x_n) + \log p(\tau) $$

    Weights of held-out rows count. All components of a mixture are scaled by the same $\tau$.

    Args:
        base: a trained module, which is not changed; a baseline, a fitted model, or any object with
            `predict`.
        validation: held-out (inputs, y), `Data`, a `Dataset` or a `DataLoader`.
        likelihood: p(y | f) of a module, or its name as for `fit`; its parameters that are
            "learned" are estimated from the held-out data, with the temperature. For those of the
            training data, pass `point_estimate(module, likelihood, data)` as `base`.
        output: picks the tensor out of what a module returns, as for `Network`.
        averaged: scale the averaged class probabilities of a mixture, $\bar p^{1/\tau}$, instead of
            its components. Predictions then have no mutual information.

    Raises:
        InputError: a module without a likelihood, or a likelihood besides another `base`; a
            likelihood without a scale (counts), or held-out data of a regression for which no
            temperature is best, because they are predicted perfectly or not at all.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.baselines.map import point_estimate
        >>> from subbayes.likelihoods import Gaussian
        >>> x, y = torch.randn(40, 2), torch.randn(40)
        >>> result = subbayes.training.train(torch.nn.Linear(2, 1), Gaussian(0.1), (x, y))
        >>> temperature_scaling(point_estimate(result), (x, y)).temperature > 1
        True

        A classifier that you trained yourself, with logits of two classes:

        >>> net = torch.nn.Linear(2, 2)
        >>> labels = net(x).argmax(1)
        >>> labels[:8] = 1 - labels[:8]
        >>> temperature_scaling(net, (x, labels), "categorical").name
        'MAP + temperature'
    """
    if isinstance(base, nn.Module):
        base = point_estimate(base, likelihood, validation, output=output)
    elif likelihood is not None or output is not None:
        argument = "likelihood" if likelihood is not None else "output"
        fail(
            argument, f"none for a {type(base).__name__}, which has its own", "one", "Leave it out"
        )
    data = Data.of(validation, "validation")
    predicted = [_predicted(base, rows, y, data.has_weights) for rows, y in data.batches()]
    if averaged:
        predicted = [(_averaged(p), y) for p, y in predicted]
    counts = np.concatenate([y.counts for _, y in predicted])

    def log_densities(tau: float) -> Float[np.ndarray, "n"]:
        """Of the held-out rows at a temperature."""
        return np.concatenate([scale_predictive(p, tau).log_prob(y.values) for p, y in predicted])

    has_prior = predicted[0][0].likelihood.kind == "classification"
    tau = best_temperature(log_densities, counts, has_prior)
    gain, error = mean_and_error(log_densities(tau) - log_densities(1.0), counts)
    return TemperatureScaled(base, tau, gain, error, averaged)


@dataclass(frozen=True)
class TemperatureScaled(Predictor):
    r"""A predictor whose predictive distributions are scaled by a temperature.

    Attributes:
        base: the predictor.
        temperature: $\tau$; above 1 if the base is overconfident.
        gain: mean gain of the held-out rows over the temperature 1, in nats a row; they also chose
            the temperature.
        error: standard error of the gain.
        averaged: whether the averaged class probabilities are scaled instead of the components.
    """

    kind: ClassVar[str] = "temperature-scaled"

    base: Any
    temperature: float
    gain: float | None = None
    error: float | None = None
    averaged: bool = False

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    def __repr__(self) -> str:
        gain = "" if self.gain is None else f", gain={self.gain:.3f} ± {self.error:.3f}"
        return f"TemperatureScaled({self.base!r}, temperature={self.temperature:.4g}{gain})"

    @property
    def name(self) -> str:
        """The name of the base, with "temperature"."""
        return f"{getattr(self.base, 'name', 'model')} + temperature"

    @property
    def default_draws(self) -> int:
        """Number of draws of the base."""
        return self.base.default_draws

    def predict(self, inputs: Any, *, n_draws: int | None = None, **options: Any) -> Predictive:
        """The scaled prediction of the base, to which options are passed."""
        if n_draws is not None:
            options["n_draws"] = n_draws
        found = self.base.predict(inputs, **options)
        return scale_predictive(_averaged(found) if self.averaged else found, self.temperature)

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        parts = self.base.components(inputs, n_draws)
        if self.averaged:
            parts = [part.averaged() for part in parts]
        if self.base.likelihood.kind == "classification":
            return [part.scaled(1 / self.temperature, part.likelihood) for part in parts]
        noisier = [ScaledNoise(part.likelihood, self.temperature) for part in parts]
        return [part.scaled(1.0, one) for part, one in zip(parts, noisier, strict=True)]

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors of the base."""
        return self.base.tensors()

    def facts(self) -> ScaledFacts:
        """The base and the temperature."""
        return ScaledFacts(
            model=Nested.of(self.base),
            temperature=self.temperature,
            gain=self.gain,
            error=self.error,
            averaged=self.averaged,
        )

    def _parts(self) -> tuple[Any, Any]:
        return self.base.network, self.base.likelihood


@artifact("temperature-scaled", ScaledFacts)
def rebuild_scaled(
    tensors: dict[str, Tensor], facts: ScaledFacts, **options: Any
) -> TemperatureScaled:
    """Rebuild a scaled predictor from its artifact; `options` are those of the base."""
    base = facts.model.rebuild(tensors, **options)
    return TemperatureScaled(base, facts.temperature, facts.gain, facts.error, facts.averaged)


@dataclass(frozen=True)
class ScaledNoise(GaussianLike, WrappedLikelihood):
    """A likelihood with Gaussian noise whose standard deviation is multiplied by a factor.

    Args:
        likelihood: the likelihood.
        factor: of the standard deviation.
    """

    factor: float

    def variance(self, outputs: Outputs) -> Moments:
        """The squared factor times the variance of the likelihood."""
        return self.factor**2 * self.likelihood.variance(outputs)


def scale_predictive(predictive: Predictive, tau: float) -> Predictive:
    """Scale a predictive distribution by a temperature."""
    likelihood = predictive.likelihood
    if likelihood.kind == "classification":
        return predictive.scaled(1 / tau)
    if predictive.components() is None:
        fail(
            "likelihood",
            "classes or Gaussian noise, which have a scale",
            repr(likelihood),
            "Temperature scaling has no meaning for counts",
        )
    return predictive.scaled(1.0, ScaledNoise(likelihood, tau))


def _averaged(predictive: Predictive) -> Predictive:
    """The prediction with one component, of the averaged class probabilities."""
    pooled = predictive.likelihood.pooled(predictive.outputs)
    if pooled is None:
        fail("averaged", "False without logits of classes", "True", "Leave it out")
    found = Predictive(pooled, predictive.likelihood)
    found.classes, found.index = predictive.classes, predictive.index
    return found


def _predicted(
    base: Any, inputs: Any, y: Targets, weighted: bool
) -> tuple[Predictive, TargetParts]:
    """The prediction of the base for held-out rows, with their noise if it is known."""
    parts = split_targets(y, weighted)
    known = {} if parts.noise is None else {"noise": parts.noise}
    return base.predict(inputs, **known), parts

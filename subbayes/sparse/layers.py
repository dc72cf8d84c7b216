r"""Layers whose weights are included or excluded.

$$ w = \gamma \odot \beta, \qquad \beta \mid \gamma = 1 \sim N(\kappa, \tau^2) $$

In training mode a layer returns a draw of its outputs by one of two estimators. Their mean
gradients agree as $\delta \to 0$ where outputs enter the likelihood linearly or quadratically:

- "local" (the default): the noise of the weights is moved to the outputs (Kingma et al. 2015),
  $a \sim N(x\, \mathrm{E}[w]^\top,\, x^2\, \mathrm{Var}[w]^\top)$, with one draw for each row and
  output and
  $\mathrm{E}[w] = \alpha\kappa$, $\mathrm{Var}[w] = \alpha(\tau^2 + (1 - \alpha)\kappa^2)$.
  Where a row uses a weight more than once (convolutions, linear layers over sequences), Gaussian
  weights with these moments are drawn once for the batch, and random signs give each row another
  draw (flipout, Wen et al. 2018). If a layer reads another number of rows than the data have
  (positions folded into rows, or time before rows), all rows share one draw;
- "relaxed", as in the paper: one draw of all weights for the batch, with the concrete relaxation
  $\tilde\gamma = \sigma((\text{logit}\,\alpha - \text{logit}\,\nu) / \delta)$ (eqs. 16 and 17).

Both relax the indicators of whole units. In evaluation mode a layer uses the posterior mean of its
weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from subbayes.networks.tracing.private_torch import in_backward_pass, version_of
from subbayes.sparse.kernels import LayerDraw, SparsityPattern
from subbayes.sparse.layer_operation import LayerOperation
from subbayes.sparse.priors import SpikeSlab
from subbayes.sparse.variational_families import (
    LayerSettings,
    Logits,
    Noise,
    make_logits,
    unconstrained_sd,
)
from subbayes.utils.checks import fail

_MAX_LOGIT = 30.0  # largest argument of a relaxed indicator's sigmoid: beyond it numbers underflow


class _DrawCache:
    """What a layer remembers of its last draws; copies of a layer start empty."""

    calls: int = 0  # in training mode
    rows: int | None = None  # of the batch, if known
    kl: Tensor | None = None  # at the draw of the last forward pass
    versions: tuple[int, ...] = ()  # of the parameters at that pass
    median: tuple[Tensor, SparsityPattern] | None = None  # included weights: mask and pattern

    def __reduce__(self) -> tuple[type[_DrawCache], tuple[()]]:
        return _DrawCache, ()

    def pattern(self, mask: Bool[Tensor, "k"], shape: tuple[int, int]) -> SparsityPattern:
        """The pattern of a median model; the last one if the same weights are included."""
        known = self.median  # other threads may assign to it
        if known is None or known[0].device != mask.device or not torch.equal(known[0], mask):
            self.median = known = mask.clone(), SparsityPattern.from_mask(mask, shape)
        return known[1]


class SparseLayer(nn.Module):
    r"""A linear or convolutional layer with latent binary weights.

    Args:
        layer: the layer that it replaces, whose weights are the initial means.
        settings: the variational distribution.
        prior: of this layer.
        noise: source of random numbers.

    Attributes:
        original: the layer that it replaces, in a tuple.
        phase: "learned", "fixed" (inclusion probabilities are frozen) or "median" (exactly the
            weights with a probability above 1/2 are included).
        scales: names of parameters other than `logits` that determine inclusion.
    """

    scales: tuple[str, ...] = ()

    def __init__(
        self, layer: nn.Module, settings: LayerSettings, prior: SpikeSlab, noise: Noise
    ) -> None:
        super().__init__()
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        self.settings, self.noise = settings, noise
        self.posterior, self.structure = settings.posterior, settings.structure
        self.original = (copy.deepcopy(layer).requires_grad_(True),)  # a tuple: no submodule
        self.operation = LayerOperation(self.original[0])
        raw = unconstrained_sd(settings.sd)
        self.mean = nn.Parameter(weight.detach().clone())
        self.raw_sd = nn.Parameter(torch.full_like(weight, raw).detach())
        self.bias_mean = self.bias_raw_sd = None
        if bias is not None:
            self.bias_mean = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
            if bias.requires_grad:
                self.bias_raw_sd = nn.Parameter(torch.full_like(bias, raw).detach())
        indicators = (
            (1,)
            if self.posterior == "all"
            else (weight.shape[0],)
            if self.structure == "units"
            else (weight.shape[0], weight.shape[1:].numel())
        )
        start = weight.new_full(indicators, math.log(settings.inclusion / (1 - settings.inclusion)))
        self.logits: Logits = make_logits(self.posterior, start, settings.rank, noise)
        # their parameters are float64, which "mps" does not have
        device = torch.device("cpu") if weight.device.type == "mps" else weight.device
        self.slab = copy.deepcopy(prior.slab).to(device)
        self.inclusion = copy.deepcopy(prior.inclusion).to(device)
        self.phase = "learned"
        self._cache = _DrawCache()

    # --- the variational distribution -------------------------------------------------------

    @property
    def sd(self) -> Float[Tensor, "*W"]:
        r"""$\tau$, the standard deviations of the included weights."""
        return functional.softplus(self.raw_sd)

    @property
    def weight(self) -> Float[Tensor, "*W"]:
        """The posterior mean, for modules that read the weights; in evaluation mode only."""
        if self.training:
            fail(
                "module",
                "layers that are called, so that weights can be drawn",
                "one whose weights another module reads",
                "Name that layer in keep= of convert",
            )
        return self._mean_weight()

    def _mean_weight(self) -> Float[Tensor, "*W"]:
        return self.probability() * self.mean

    @property
    def bias(self) -> Float[Tensor, "u"] | None:
        """The posterior mean of the biases."""
        if self.bias_mean is None or self.structure == "weights":
            return self.bias_mean
        return self._masked_bias(self.bias_mean, self.probability().flatten(1)[:, 0])

    @property
    def bias_sd(self) -> Float[Tensor, "u"]:
        """Standard deviations of the biases; 0 for frozen ones."""
        assert self.bias_mean is not None
        if self.bias_raw_sd is None:
            return torch.zeros_like(self.bias_mean)
        return functional.softplus(self.bias_raw_sd)

    @property
    def excludes_weights(self) -> bool:
        """Whether draws exclude some of the weights."""
        return self.posterior != "all"

    @property
    def is_deterministic(self) -> bool:
        """Whether all inclusion indicators are known."""
        return self.phase == "median" or self.posterior == "all"

    def probability(self) -> Float[Tensor, "*W"]:
        r"""Marginal inclusion probabilities $\alpha$ of the weights, in their shape."""
        found = self.logits.probability()
        if self.phase == "median":
            found = self.logits.included().to(found)
        return self._shaped(found).expand_as(self.mean)

    def included(self) -> Bool[Tensor, "*W"]:
        """Which weights have a probability above one half."""
        return self._shaped(self.logits.included()).expand_as(self.mean)

    def _shaped(self, value: Tensor) -> Tensor:
        """Reshape values of units or weights to broadcast with the weights."""
        if self.structure == "units" or value.numel() == 1:
            return value.reshape(-1, *[1] * (self.mean.ndim - 1))
        return value.reshape(self.mean.shape)

    def _draw_logits(self) -> Tensor:
        if self.is_deterministic:
            return torch.where(self.logits.included(), _MAX_LOGIT, -_MAX_LOGIT).to(self.mean)
        logits = self.logits.draw(self.noise)
        return logits.detach() if self.phase == "fixed" else logits

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """Factors of the weights in predictions: indicators, or their probabilities.

        Args:
            structure: "sample", "median" or "all", see `SparseNetwork.weights`.
            weights: "sample" or "mean".
            count: number of draws.
            generator: of the draws.

        Returns:
            Factors that broadcast to (S, units, weights of a unit).
        """
        if self._thresholds_inclusion(structure):
            return self.included().flatten(1).to(self.mean).unsqueeze(0)
        p = self.probability().flatten(1)
        if structure == "all":
            return p.unsqueeze(0)
        columns = 1 if self.structure == "units" else p.shape[1]
        alpha = p[:, :columns].unsqueeze(0)
        if self.posterior != "mean-field":
            parts = [self.logits.sample(generator) for _ in range(count)]
            alpha = torch.sigmoid(torch.stack(parts)).reshape(count, len(p), columns)
        u = torch.rand((count, p.shape[0], columns), generator=generator, dtype=p.dtype)
        return (u.to(p.device) < alpha).to(p)

    @torch.no_grad()
    def draws(
        self, structure: str, weights: str, generator: torch.Generator
    ) -> Iterator[LayerDraw]:
        """Draw weights and bias endlessly; arguments as for `inclusion_factors`."""
        known = self._included_weights(structure, weights, generator)
        while True:
            pattern, value, sd, factors = known
            if weights == "sample":
                value = value + sd * _standard_normal(value, generator)
            bias = None if self.bias_mean is None else self.bias_mean.detach()
            if bias is not None and weights == "sample":
                bias = bias + self.bias_sd * _standard_normal(bias, generator)
            if bias is not None and factors is not None:
                bias = bias * factors
            yield LayerDraw(pattern, value, bias)
            if self._redraws_factors(structure):
                known = self._included_weights(structure, weights, generator)

    def _sd_of(self, positions: Tensor) -> Tensor:
        return functional.softplus(self.raw_sd.reshape(-1)[positions])

    def _redraws_factors(self, structure: str) -> bool:
        return structure == "sample" and not self.is_deterministic

    def _thresholds_inclusion(self, structure: str) -> bool:
        """Whether weights are included by their probabilities instead of a draw."""
        return structure == "median" or self.is_deterministic and structure != "all"

    def _included_weights(
        self, structure: str, weights: str, generator: torch.Generator
    ) -> tuple[SparsityPattern | None, Tensor, Tensor, Tensor | None]:
        """Pattern (None if all are included), means, deviations, and factors of the biases."""
        by_threshold = self.excludes_weights and self._thresholds_inclusion(structure)
        gamma = (
            self.included().flatten(1)
            if by_threshold
            else self.inclusion_factors(structure, weights, 1, generator)[0]
        )
        bias_factors = gamma[:, 0].to(self.mean) if self.structure == "units" else None
        shape = len(self.mean), self.mean[0].numel()
        factors, mean = gamma.expand(shape).reshape(-1), self.mean.reshape(-1)
        if self.excludes_weights and structure != "all":
            pattern = (
                self._cache.pattern(factors, shape)
                if by_threshold
                else SparsityPattern.from_mask(factors > 0, shape)
            )
            included = pattern.included
            if len(included) < len(factors):
                return pattern, mean[included], self._sd_of(included), bias_factors
        return None, mean * factors, self.sd.reshape(-1) * factors, bias_factors

    # --- forward ----------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Outputs: a draw in training mode, those of the posterior mean in evaluation mode.

        Raises:
            InputError: in training mode, a call while gradients are computed, which would draw
                other weights (activation checkpointing).
        """
        if input.ndim < self.mean.ndim:  # a single row
            return self.forward(input.unsqueeze(0)).squeeze(0)
        if not self.training:
            return self.operation(input, self.weight, self.bias)
        if not torch.compiler.is_compiling() and in_backward_pass():
            fail(
                "module",
                "layers that are called only in the forward pass",
                "one that is called again in the backward pass, with other draws",
                "Turn off activation checkpointing, or name its layers in keep= of convert",
            )
        self._cache.calls += 1
        return self._draw_outputs(input)

    def _independent_rows(self, x: Tensor) -> int:
        """The number of rows with separate draws: 1 if the rows are not those of the data."""
        return len(x) if self._cache.rows in (None, len(x)) else 1

    def _draw_outputs(self, x: Tensor) -> Tensor:
        logits, estimator = self._draw_logits(), self.settings.estimator
        if estimator == "local" and self.structure == "weights" and not self.is_deterministic:
            mean, variance, *sums = self._moments(logits)
            self._remember_kl(self._weights_kl(*sums))
            bias_variance = None if self.bias_mean is None else self.bias_sd.square()
            return self._draw_gaussian_outputs(x, mean, variance, self.bias_mean, bias_variance)
        self._remember_kl(self._kl_at(logits))
        gamma = self._shaped(self._relaxed_indicators(logits))
        if estimator == "relaxed":
            weight = gamma * (self.mean + self.sd * self.noise.normal(self.mean.shape, self.mean))
            bias = None
            if self.bias_mean is not None:
                noise = self.noise.normal(self.bias_mean.shape, self.bias_mean)
                bias = self._masked_bias(self.bias_mean + self.bias_sd * noise, gamma)
            return self.operation(x, weight, bias)
        bias = bias_variance = None
        if self.bias_mean is not None:
            bias = self._masked_bias(self.bias_mean, gamma)
            bias_variance = self._masked_bias(self.bias_sd.square(), gamma.square())
        variance = gamma.square() * self.sd.square()
        return self._draw_gaussian_outputs(x, gamma * self.mean, variance, bias, bias_variance)

    def _moments(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Moments of the weights and the sums that their divergence needs.

        With $\alpha = \sigma(\omega)$ for the logits $\omega$ and the divergence s of an included
        weight from the slab, these are $\mathrm{E}[w]$, $\mathrm{Var}[w]$,
        $\sum \alpha (s + \omega) - \text{softplus}(\omega)$ and $\sum \alpha$.
        """
        logits = logits.reshape(self.mean.shape)
        sd, alpha = self.sd, torch.sigmoid(logits)
        square, variance = self.mean.square(), sd.square()
        divergence = self.slab.kl(sd, square + variance) + logits
        return (
            alpha * self.mean,
            alpha * (variance + (1 - alpha) * square),
            _sum_of_rows(alpha * divergence - functional.softplus(logits)),
            _sum_of_rows(alpha),
        )

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities, which may be 0 or 1."""
        return (logits > 0).to(logits) if self.is_deterministic else torch.sigmoid(logits)

    def _relaxed_indicators(self, logits: Tensor) -> Tensor:
        if self.is_deterministic:
            return self._probabilities(logits)
        relaxed = logits - torch.logit(self.noise.uniform(logits.shape, logits))
        relaxed = relaxed / self.settings.temperature
        return torch.sigmoid(relaxed.clamp(-_MAX_LOGIT, _MAX_LOGIT))

    def _draw_gaussian_outputs(self, x: Tensor, *moments: Any) -> Tensor:
        per_row = self._independent_rows(x) == len(x)
        return self.operation.draw_outputs(x, self.noise, per_row, *moments)

    def _masked_bias(self, bias: Tensor, gamma: Tensor) -> Tensor:
        """Biases are included with their unit, and always where weights have indicators."""
        return bias * gamma.reshape(-1) if self.structure == "units" else bias

    @staticmethod
    @contextmanager
    def used_once(layers: Mapping[str, SparseLayer], rows: int) -> Iterator[None]:
        """A context in which each layer may be called once, because each call draws weights.

        Args:
            layers: by name.
            rows: number of rows of the batch; a layer that reads another number uses one draw.

        Raises:
            InputError: a layer that is called again.
        """
        for layer in layers.values():
            layer._cache.calls, layer._cache.rows = 0, rows
        try:
            yield
        finally:
            for layer in layers.values():
                layer._cache.rows = None
        twice = [name for name, layer in layers.items() if layer._cache.calls > 1]
        if twice:
            fail(
                "module",
                "layers that are called once: each call would draw other weights",
                f"{', '.join(twice)}, called again",
                "Name it in keep= of convert",
            )

    # --- the divergence ---------------------------------------------------------------------

    def kl(self) -> Float[Tensor, ""]:
        r"""$\mathrm{KL}(q(\beta, \gamma) \,\|\, p(\beta, \gamma))$ in closed form.

        $$ \sum \alpha \log\alpha + (1 - \alpha)\log(1 - \alpha) - \mathrm{E} \log p(\gamma)
           + \sum \alpha \bigl(-\tfrac12 \log(2\pi e \tau^2)
           - \mathrm{E}_{N(\kappa, \tau^2)} \log p(\beta)\bigr) $$

        Where probabilities are random, the first call after a forward pass in training mode uses
        the probabilities of that pass, unless parameters have changed since.
        """
        found, self._cache.kl = self._cache.kl, None
        if (
            found is not None
            and found.requires_grad == torch.is_grad_enabled()
            and self._cache.versions == self._versions()
        ):
            return found
        return self._kl_at(self._draw_logits())

    def _remember_kl(self, divergence: Tensor) -> None:
        self._cache.kl, self._cache.versions = divergence, self._versions()

    def _versions(self) -> tuple[int, ...]:
        """How often each parameter has been modified."""
        return tuple(version_of(p) for p in self.parameters())

    def _kl_at(self, logits: Tensor) -> Tensor:
        if self.structure == "weights" and not self.is_deterministic:
            return self._weights_kl(*self._moments(logits)[2:])
        alpha = self._probabilities(logits)
        slab_kl, bias = self._slab_kl(self.mean, self.sd).flatten(1), self._bias_kl()
        if self.structure == "units":
            total = (alpha * (slab_kl.sum(1) + bias)).sum()
        else:
            total = (alpha * slab_kl).sum() + bias.sum()
        if self.is_deterministic:
            return total
        return (
            total
            + (alpha * logits - functional.softplus(logits)).sum()
            - self.inclusion.expected_log_prob(alpha.sum(), alpha.numel())
        )

    def _weights_kl(self, weights: Tensor, count: Tensor) -> Tensor:
        """The divergence of weights with one indicator each, and of the biases."""
        inclusion = self.inclusion.expected_log_prob(count, self.mean.numel())
        return weights - inclusion + self._bias_kl().sum()

    def _bias_kl(self) -> Tensor:
        """The divergence of each bias; 0 where there is none to learn."""
        if self.bias_mean is None or self.bias_raw_sd is None:
            return self.mean.new_zeros(len(self.mean))
        return self._slab_kl(self.bias_mean, self.bias_sd)

    def _slab_kl(self, mean: Tensor, sd: Tensor) -> Tensor:
        return self.slab.kl(sd, mean.square() + sd.square())

    def extra_repr(self) -> str:
        """The replaced layer and the settings."""
        return (
            f"{self.original[0]!r}, {self.posterior}, {self.structure}, {self.settings.estimator}, "
            f"temperature={self.settings.temperature:g}"
        )


def _sum_of_rows(values: Tensor) -> Tensor:
    """The sum over all entries, in which small ones are not lost beside a large sum of others."""
    return values.flatten(1).sum(1).sum()


def _standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)

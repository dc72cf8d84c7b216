r"""Layers whose weights are included or excluded.

$$ w = \gamma \odot \beta, \qquad \beta \mid \gamma = 1 \sim N(\kappa, \tau^2) $$

In training mode a layer returns a draw of its outputs by one of two estimators. Their mean
gradients agree as $\delta \to 0$ where outputs enter the likelihood linearly or quadratically:

- "local" (the default): the weights' noise is moved to the outputs (Kingma et al. 2015),
  $a \sim N(x\, \mathrm{E}[w]^\top,\, x^2\, \mathrm{Var}[w]^\top)$,
  $\mathrm{E}[w] = \alpha\kappa$ and $\mathrm{Var}[w] = \alpha(\tau^2 + (1 - \alpha)\kappa^2)$:
  with one draw for each row and output. Gradients have less noise and no indicator is relaxed.
  Where a row uses a weight more than once (convolutions, linear layers over sequences), its outputs
  are correlated: then Gaussian weights with those two moments are drawn once for the batch, and
  random signs give each row another draw (flipout, Wen et al. 2018). Where a layer reads another
  number of rows than the data have (positions folded into rows, or time before rows), all rows
  share one draw;
- "relaxed", as in the paper: one draw of all weights for the batch, with the concrete relaxation
  $\tilde\gamma = \sigma((\text{logit}\,\alpha - \text{logit}\,\nu) / \delta)$ (eqs. 16 and 17).

Indicators of whole units are relaxed by both estimators. In evaluation mode a layer uses the
posterior mean of its weights.
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

from subbayes.networks.tracing.private_torch import in_backward_pass
from subbayes.sparse.kernels import LayerDraw, SparsityPattern
from subbayes.sparse.layer_operation import LayerOperation
from subbayes.sparse.moments import slab_kl, terms, unconstrained_sd
from subbayes.sparse.priors import SpikeSlab
from subbayes.sparse.variational_families import BASELINE_FAMILIES, Logits, Noise, make_logits
from subbayes.utils.checks import check_choice, check_positive, fail

__all__ = ["ESTIMATORS", "STRUCTURES", "SparseLayer"]

ESTIMATORS = ("local", "relaxed")
STRUCTURES = ("weights", "units")
_MOST = 30.0  # largest argument of a relaxed indicator's sigmoid: beyond it numbers underflow


class _Drawn:
    """What a layer remembers of its last draws; copies of a layer start empty.

    Attributes:
        calls: number of calls in training mode.
        rows: number of rows of the batch, if known.
        kl: the divergence at the draw of the last forward pass.
        versions: of the parameters at that pass.
        median: the weights that the last median model included, as a mask and as a pattern.
    """

    calls: int = 0
    rows: int | None = None
    kl: Tensor | None = None
    versions: tuple[int, ...] = ()
    median: tuple[Tensor, SparsityPattern] | None = None

    def __reduce__(self) -> tuple[type[_Drawn], tuple[()]]:
        return _Drawn, ()

    def pattern(self, whole: Bool[Tensor, "k"], shape: tuple[int, int]) -> SparsityPattern:
        """The pattern of a median model; the last one if the same weights are included."""
        known = self.median  # other threads may assign to it
        if known is None or known[0].device != whole.device or not torch.equal(known[0], whole):
            self.median = known = whole.clone(), SparsityPattern.from_mask(whole, shape)
        return known[1]


class SparseLayer(nn.Module):
    r"""A linear or convolutional layer with latent binary weights.

    Args:
        layer: the layer that it replaces, whose weights are the initial means.
        posterior: distribution of the inclusion indicators, one of the names in
            `variational_families`.
        structure: "weights" has an indicator for each weight, "units" one for each output unit or
            channel, its bias included.
        prior: of this layer.
        estimator: "local" or "relaxed".
        noise: source of random numbers.
        inclusion: initial inclusion probability.
        sd: initial standard deviation of the weights.
        rank: of the posterior "low-rank".
        temperature: $\delta$ of relaxed indicators.

    Attributes:
        original: the layer that it replaces, in a tuple.
        phase: "learned", "fixed" (inclusion probabilities are frozen) or "median" (weights with a
            probability above 1/2 are included for certain, and the others excluded).
        excludes_weights: whether draws exclude some of the weights.
        scales: names of parameters other than `logits` that determine inclusion.
    """

    excludes_weights = True
    scales: tuple[str, ...] = ()

    def __init__(
        self,
        layer: nn.Module,
        posterior: str,
        structure: str,
        prior: SpikeSlab,
        estimator: str,
        noise: Noise,
        *,
        inclusion: float,
        sd: float,
        rank: int,
        temperature: float,
    ) -> None:
        super().__init__()
        check_choice("structure", structure, STRUCTURES)
        check_choice("estimator", estimator, ESTIMATORS)
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        assert bias is None or isinstance(bias, Tensor)
        self.posterior, self.structure, self.estimator = posterior, structure, estimator
        self.temperature = check_positive("temperature", temperature)
        self.noise = noise
        self.original = (copy.deepcopy(layer).requires_grad_(True),)  # a tuple: no submodule
        self.operation = LayerOperation(layer)
        shape = weight.shape
        raw = unconstrained_sd(sd)
        self.mean = nn.Parameter(weight.detach().clone())
        self.raw_sd = nn.Parameter(torch.full_like(weight, raw).detach())
        self.bias_mean = (
            None
            if bias is None
            else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        )
        self.bias_raw_sd = (
            None
            if bias is None or not bias.requires_grad
            else nn.Parameter(torch.full_like(bias, raw).detach())
        )
        indicators = (
            (1,)
            if posterior in BASELINE_FAMILIES
            else (shape[0],)
            if structure == "units"
            else (shape[0], shape[1:].numel())
        )
        start = torch.full(
            indicators,
            math.log(inclusion / (1 - inclusion)),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.logits: Logits = make_logits(posterior, start, rank, noise)
        self.slab, self.inclusion = prior.copied()
        self.phase = "learned"
        self._drawn = _Drawn()

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
        return self.probability() * self.mean

    @property
    def bias(self) -> Float[Tensor, "u"] | None:
        """The posterior mean of the biases."""
        if self.bias_mean is None or self.structure == "weights":
            return self.bias_mean
        return self._kept(self.bias_mean, self.probability().flatten(1)[:, 0])

    @property
    def bias_sd(self) -> Float[Tensor, "u"]:
        """Standard deviations of the biases, 0 for frozen ones."""
        assert self.bias_mean is not None
        if self.bias_raw_sd is None:
            return torch.zeros_like(self.bias_mean)
        return functional.softplus(self.bias_raw_sd)

    @property
    def is_deterministic(self) -> bool:
        """Whether no inclusion is random."""
        return self.phase == "median" or self.posterior == "all"

    def probability(self) -> Float[Tensor, "*W"]:
        r"""Marginal inclusion probabilities $\alpha$ of the weights, shaped as they are."""
        found = self.logits.probability()
        if self.phase == "median":
            found = self.logits.included().to(found)
        return self._shaped(found).expand_as(self.mean)

    def included(self) -> Bool[Tensor, "*W"]:
        """Which weights have a probability above one half."""
        return self._shaped(self.logits.included()).expand_as(self.mean)

    def _shaped(self, value: Tensor) -> Tensor:
        """Reshape values of units or weights so that they broadcast with the weights."""
        if self.structure == "units" or value.numel() == 1:
            return value.reshape(-1, *[1] * (self.mean.ndim - 1))
        return value.reshape(self.mean.shape)

    def _drawn_logits(self) -> Tensor:
        if self.is_deterministic:
            return torch.where(self.logits.included(), _MOST, -_MOST).to(self.mean)
        logits = self.logits.draw(self.noise)
        return logits.detach() if self.phase == "fixed" else logits

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """The factors of the weights in predictions: indicators, or their probabilities.

        Args:
            structure: "sample", "median" or "all", see `SparseNetwork.weights`.
            weights: "sample" or "mean".
            count: number of draws.
            generator: of the draws.

        Returns:
            Factors that broadcast to (S, units, weights of a unit).
        """
        if self._is_settled(structure):
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
        again = self._gates_are_random(structure)
        known = self._inside(structure, weights, generator)
        while True:
            pattern, value, sd, kept = known
            if weights == "sample":
                value = value + sd * _normal(value, generator)
            bias = None if self.bias_mean is None else self.bias_mean.detach()
            if bias is not None and weights == "sample":
                bias = bias + self.bias_sd * _normal(bias, generator)
            if bias is not None and kept is not None:
                bias = bias * kept
            yield LayerDraw(pattern, value, bias)
            if again:
                known = self._inside(structure, weights, generator)

    def _sd_at(self, inside: Tensor) -> Tensor:
        return functional.softplus(self.raw_sd.reshape(-1)[inside])

    def _gates_are_random(self, structure: str) -> bool:
        return structure == "sample" and not self.is_deterministic

    def _is_settled(self, structure: str) -> bool:
        """Whether probabilities decide on inclusion, not a draw."""
        return structure == "median" or self.is_deterministic and structure != "all"

    def _inside(
        self, structure: str, weights: str, generator: torch.Generator
    ) -> tuple[SparsityPattern | None, Tensor, Tensor, Tensor | None]:
        """The pattern if not all are included, means and deviations, and factors of the biases."""
        settled = self.excludes_weights and self._is_settled(structure)
        gamma = (
            self.included().flatten(1)
            if settled
            else self.inclusion_factors(structure, weights, 1, generator)[0]
        )
        kept = gamma[:, 0].to(self.mean) if self.structure == "units" else None
        shape = len(self.mean), self.mean[0].numel()
        whole, mean = gamma.expand(shape).reshape(-1), self.mean.reshape(-1)
        if self.excludes_weights and structure != "all":
            pattern = (
                self._drawn.pattern(whole, shape)
                if settled
                else SparsityPattern.from_mask(whole > 0, shape)
            )
            inside = pattern.included
            if len(inside) < len(whole):
                return pattern, mean[inside], self._sd_at(inside), kept
        return None, mean * whole, self.sd.reshape(-1) * whole, kept

    # --- forward ----------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Outputs: a draw in training mode, those of the posterior mean in evaluation mode.

        Raises:
            InputError: in training mode, a call while gradients are computed, which would draw
                other weights (activation checkpointing).
        """
        if input.ndim < self.mean.ndim:  # a single row
            return self.forward(input.unsqueeze(0)).squeeze(0)
        x = self.operation.pad(input)
        if not self.training:
            return self._mean_outputs(x)
        if not torch.compiler.is_compiling() and in_backward_pass():
            # within backward()
            fail(
                "module",
                "layers that are called in the forward pass alone",
                "one that is called again in the backward pass, with other draws",
                "Turn off activation checkpointing, or name its layers in keep= of convert",
            )
        self._drawn.calls += 1
        return self._drawn_outputs(x)

    def _rows(self, x: Tensor) -> int:
        """The number of rows with a draw of their own: 1 if the rows are not those of the data."""
        return len(x) if self._drawn.rows in (None, len(x)) else 1

    def _mean_outputs(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight, self.bias)

    def _drawn_outputs(self, x: Tensor) -> Tensor:
        logits = self._drawn_logits()
        if self.estimator == "local" and self.structure == "weights" and not self.is_deterministic:
            mean, variance, *sums = self._terms_of(logits)
            self._keep(self._divergence(*sums))
            bias = None if self.bias_mean is None else self.bias_sd.square()
            return self._perturbed(x, mean, variance, self.bias_mean, bias)
        self._keep(self._kl_at(logits))
        gamma = self._shaped(self._indicators(logits))
        if self.estimator == "relaxed":
            weight = gamma * (self.mean + self.sd * self.noise.normal(self.mean.shape, self.mean))
            return self.operation(x, weight, self._drawn_bias(gamma))
        bias = None if self.bias_mean is None else self._kept(self.bias_mean, gamma)
        own = None if bias is None else self._kept(self.bias_sd.square(), gamma.square())
        return self._perturbed(x, gamma * self.mean, gamma.square() * self.sd.square(), bias, own)

    def _terms_of(self, logits: Tensor) -> Any:
        """See `moments`."""
        return terms(self.mean, self.raw_sd, logits.reshape(self.mean.shape), self.slab)

    def _sure(self, logits: Tensor) -> Tensor:
        """Probabilities, which may be 0 or 1."""
        return (logits > 0).to(logits) if self.is_deterministic else torch.sigmoid(logits)

    def _indicators(self, logits: Tensor) -> Tensor:
        """Relaxed indicators, from the logits of their probabilities."""
        if self.is_deterministic:
            return self._sure(logits)
        u = self.noise.uniform(logits.shape, logits)
        return torch.sigmoid(((logits - torch.logit(u)) / self.temperature).clamp(-_MOST, _MOST))

    def _perturbed(self, x: Tensor, *moments: Any) -> Tensor:
        """A draw of the outputs of Gaussian weights, one for each row of the data."""
        by_row = self._rows(x) == len(x)
        return self.operation.draw_outputs(x, self.noise, by_row, *moments)

    def _kept(self, bias: Tensor, gamma: Tensor) -> Tensor:
        """Biases are included with their unit, and always where weights have indicators."""
        return bias * gamma.reshape(-1) if self.structure == "units" else bias

    def _drawn_bias(self, gamma: Tensor) -> Tensor | None:
        if self.bias_mean is None:
            return None
        drawn = self.bias_mean + self.bias_sd * self.noise.normal(
            self.bias_mean.shape, self.bias_mean
        )
        return self._kept(drawn, gamma)

    @staticmethod
    @contextmanager
    def used_once(layers: Mapping[str, SparseLayer], rows: int) -> Iterator[None]:
        """A context in which each layer may be called once, because each call draws weights.

        Args:
            layers: by name.
            rows: number of rows of the batch. A layer that reads another number of rows (positions
                folded into them) uses one draw for all.

        Raises:
            InputError: a layer that was called more often.
        """
        for layer in layers.values():
            layer._drawn.calls, layer._drawn.rows = 0, rows
        try:
            yield
        finally:
            for layer in layers.values():
                layer._drawn.rows = None
        twice = [name for name, layer in layers.items() if layer._drawn.calls > 1]
        if twice:
            fail(
                "module",
                "layers that are used once: each use would draw weights of its own",
                f"{', '.join(twice)}, used more often",
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
        found, self._drawn.kl = self._drawn.kl, None
        if (
            found is not None
            and found.requires_grad == torch.is_grad_enabled()
            and self._drawn.versions == self._versions()
        ):
            return found
        return self._kl_at(self._drawn_logits())

    def _keep(self, divergence: Tensor) -> None:
        self._drawn.kl, self._drawn.versions = divergence, self._versions()

    def _versions(self) -> tuple[int, ...]:
        """How often each parameter has been modified."""
        return tuple(0 if p.is_inference() else p._version for p in self.parameters())

    def _kl_at(self, logits: Tensor) -> Tensor:
        if self.structure == "weights" and not self.is_deterministic:
            return self._divergence(*self._terms_of(logits)[2:])
        alpha = self._sure(logits)
        by_unit = self._slab_kl(self.mean, self.sd).flatten(1)
        bias: Tensor | float = 0.0
        if self.structure == "units":
            by_unit = by_unit.sum(1)
        if self.bias_mean is not None:
            own = self._bias_kl()
            if self.structure == "units":
                by_unit = by_unit + own
            else:
                bias = own.sum()
        total = (alpha * by_unit).sum() + bias
        if self.is_deterministic:
            return total
        return (
            total
            + (alpha * logits - functional.softplus(logits)).sum()
            - self.inclusion.expected_log_prob(alpha.sum(), alpha.numel())
        )

    def _divergence(self, weights: Tensor, count: Tensor) -> Tensor:
        """The divergence of weights with indicators of their own, and of the biases."""
        total = weights - self.inclusion.expected_log_prob(count, self.mean.numel())
        if self.bias_mean is not None:
            total = total + self._bias_kl().sum()
        return total

    def _bias_kl(self) -> Tensor:
        """The divergence of each bias, 0 for frozen ones."""
        assert self.bias_mean is not None
        if self.bias_raw_sd is None:
            return torch.zeros_like(self.bias_mean)
        return self._slab_kl(self.bias_mean, self.bias_sd)

    def _slab_kl(self, mean: Tensor, sd: Tensor) -> Tensor:
        return slab_kl(sd, mean.square() + sd.square(), self.slab)

    def extra_repr(self) -> str:
        """The replaced layer and the settings."""
        return (
            f"{self.original[0]!r}, {self.posterior}, {self.structure}, {self.estimator}, "
            f"temperature={self.temperature:g}"
        )


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)

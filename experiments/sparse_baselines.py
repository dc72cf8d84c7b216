r"""Baselines of sparse networks in the paper, with the same training and predictions.

- "dropout": inputs of a layer are dropped, separately in each row, with one learned probability
  (`DropoutLayer`; Gal et al. 2017).
- "horseshoe": inputs of a layer have random scales with half-Cauchy priors, and those with small
  scales are pruned (`HorseshoeLayer`; Louizos et al. 2017).
- `prune`: a network without posterior, from which the smallest weights or units are removed.

(Hubin and Storvik 2024, section 4.1.) Dense Gaussians and mixtures are
`sparse.convert(module, "all")`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from subbayes import sparse
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import LAYERS, select_layers
from subbayes.sparse.priors import NormalSlab, Slab, SpikeSlab, normal_log_prob
from subbayes.sparse.variational_families import (
    STRUCTURES,
    LayerSettings,
    MeanField,
    Noise,
    unconstrained_sd,
)
from subbayes.utils.checks import check_choice, check_positive, fail, fail_type
from subbayes.utils.warning import warn_user


class MixtureSlab(Slab):
    r"""$\beta \sim \pi N(0, s_1^2) + (1 - \pi) N(0, s_2^2)$, a scale mixture of two Gaussians.

    As for the `StudentTSlab`, the expected log density under a Gaussian is bounded from below by
    that at $\beta^2 = \mathrm{E}[\beta^2]$; Blundell et al. sample it instead. The scales can be
    learned, the share cannot.

    Args:
        wide: standard deviation $s_1$.
        narrow: standard deviation $s_2$.
        share: weight $\pi$ of the first component.

    Source: Blundell et al. (2015), Weight uncertainty in neural networks, eq. 7; the defaults are
    those of Hubin and Storvik (2024), section 4.1.

    Example:
        >>> slab = MixtureSlab(1.0, 0.1)
        >>> float(slab.log_prob(torch.zeros(())).detach().exp())  # doctest: +ELLIPSIS
        2.194...
    """

    log_wide: nn.Parameter
    log_narrow: nn.Parameter
    share: float

    def __init__(
        self, wide: float = 1.0, narrow: float = 2.479e-3**0.5, share: float = 0.5
    ) -> None:
        super().__init__(wide=wide, narrow=narrow)
        if not (isinstance(share, Real) and 0 < share < 1):
            fail("share", "a number strictly between 0 and 1", share)
        self.share = float(share)

    @override
    def expected_log_prob(self, square: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        wide, narrow = (normal_log_prob(square, s) for s in (self.log_wide, self.log_narrow))
        return torch.logaddexp(wide + math.log(self.share), narrow + math.log1p(-self.share))


@dataclass(frozen=True)
class Horseshoe(SpikeSlab):
    r"""Prior of the posterior "horseshoe": one scale for each input of a layer.

    $$ w_{jk} = z_k \beta_{jk}, \quad z_k = s \lambda_k, \quad s \sim C^+(0, \text{scale}), \quad
       \lambda_k \sim C^+(0, 1), \quad \beta_{jk} \sim \text{slab} $$

    Args:
        slab: of the weights before they are scaled.
        scale: of the half-Cauchy prior of the layer.
        threshold: inputs whose median scale is below this are pruned.

    Source: Louizos et al. (2017), Bayesian compression for deep learning, section 4.2.

    Example:
        >>> Horseshoe(threshold=0.1).threshold
        0.1
    """

    slab: Slab = field(default_factory=NormalSlab)
    scale: float = 1e-5
    threshold: float = 0.05

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        check_positive("threshold", self.threshold)


class _InputLayer(SparseLayer):
    """A layer with random inputs, and without indicators of weights or units."""

    def __init__(
        self, layer: nn.Module, settings: LayerSettings, prior: SpikeSlab, noise: Noise
    ) -> None:
        check_choice("structure", settings.structure, ("weights",))
        super().__init__(layer, settings, prior, noise)
        self.structure = "inputs"

    def _by_input(self, value: Float[Tensor, "r k"], x: Tensor) -> Tensor:
        """Reshape values of the inputs of each row to broadcast with x."""
        if not self.operation.linear:  # the groups share these values
            value = value.repeat(1, x.shape[1] // value.shape[1])
        return self.operation.over_positions(value, x)

    def _to_weights(self, value: Float[Tensor, "S k"]) -> Float[Tensor, "S one c"]:
        """Repeat values of the inputs for all weights of a unit."""
        each = self.mean[0, 0].numel()
        return value.repeat_interleave(each, -1).unsqueeze(1)

    def _over_units(self, value: Float[Tensor, " k"]) -> Float[Tensor, "*W"]:
        """Values of the inputs, in the shape of the weights."""
        by_weight = self._to_weights(value.unsqueeze(0)).reshape(1, *self.mean.shape[1:])
        return by_weight.expand_as(self.mean)


class DropoutLayer(_InputLayer):
    r"""Concrete dropout: $w_{jk} = \gamma_k \kappa_{jk}$, $\gamma_k \sim \text{Bernoulli}(\alpha)$.

    One $\alpha$ holds for the layer; weights and biases are points. In training each row draws its
    own relaxed indicators. The divergence is that of Gal et al., with spikes as wide as the slabs'
    posterior, whose widths cancel:

    $$ \alpha \sum_{jk} \bigl[\log p(0) - \log p(\kappa_{jk})\bigr]
       + K\bigl[\alpha\log\alpha + (1 - \alpha)\log(1 - \alpha)\bigr] - \log p(\gamma) $$

    For a normal slab the first sum is $\|\kappa\|^2 / 2 s^2$. Included inputs are not scaled up:
    $\kappa = M$, whereas the usual implementations store $\alpha M$.

    Source: Gal, Hron and Kendall (2017), Concrete dropout, eqs. 2 to 5.
    """

    def __init__(
        self, layer: nn.Module, settings: LayerSettings, prior: SpikeSlab, noise: Noise
    ) -> None:
        super().__init__(layer, settings, prior, noise)
        self.posterior = "dropout"
        start = math.log(settings.inclusion / (1 - settings.inclusion))
        self.logits = MeanField(self.mean.detach().new_full((1,), start))

    @property
    def sd(self) -> Float[Tensor, "*W"]:
        """Zeros, because weights are points."""
        return torch.zeros_like(self.raw_sd)

    def _sd_of(self, positions: Tensor) -> Tensor:
        return self.raw_sd.new_zeros(positions.shape)

    @property
    def bias_sd(self) -> Float[Tensor, " u"]:
        """Zeros, because biases are points."""
        assert self.bias_mean is not None
        return torch.zeros_like(self.bias_mean)

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """See `SparseLayer.inclusion_factors`; all weights of an input share an indicator."""
        if structure != "sample" or self.is_deterministic:
            return super().inclusion_factors(structure, weights, count, generator)
        shape = (count, self.mean.shape[1])
        u = torch.rand(shape, generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        return self._to_weights((u < torch.sigmoid(self.logits.mean)).to(u))

    def _draw_outputs(self, x: Tensor) -> Tensor:
        shape = self._independent_rows(x), self.mean.shape[1]
        gamma = self._relaxed_indicators(self._draw_logits().expand(shape))
        return self.operation(x * self._by_input(gamma, x), self.mean, self.bias_mean)

    def _kl_at(self, logits: Tensor) -> Tensor:
        alpha, k = self._probabilities(logits)[0], self.mean.shape[1]
        found = alpha * self._penalty(self.mean)
        if self.bias_raw_sd is not None:
            assert self.bias_mean is not None
            found = found + self._penalty(self.bias_mean)
        if self.is_deterministic:
            return found
        entropy = functional.softplus(logits)[0] - alpha * logits[0]
        return found - k * entropy - self.inclusion.expected_log_prob(k * alpha, k)

    def _penalty(self, value: Tensor) -> Tensor:
        return (self.slab.log_prob(torch.zeros_like(value)) - self.slab.log_prob(value)).sum()


class HorseshoeLayer(_InputLayer):
    r"""Inputs with horseshoe priors of their scales: $w_{jk} = z_k \beta_{jk}$.

    Half-Cauchy scales are square roots of products of a gamma and an inverse gamma variable,

    $$ z_k^2 = s_a s_b \lambda^a_k \lambda^b_k, \quad s_a \sim \Gamma(\tfrac12, \tau_0^2), \quad
       \lambda^a_k \sim \Gamma(\tfrac12, 1), \quad
       s_b, \lambda^b_k \sim \text{inv-}\Gamma(\tfrac12, 1), $$

    each with a log-normal posterior. In training each row draws its own scales, and its outputs
    given these. No draw excludes weights; the inclusion probability of an input is
    $P(z_k > \text{threshold})$, so that "median" prunes inputs whose median scale is below.

    Attributes:
        log_mean: means of the logarithms of $\lambda^a, \lambda^b$ (2, inputs).
        log_raw_sd: their deviations, before the softplus.
        shared_mean: means of the logarithms of $s_a, s_b$.
        shared_raw_sd: their deviations, before the softplus.
        threshold: see `Horseshoe`.

    Source: Louizos, Ullrich and Welling (2017), section 4.2 and appendix; they prune by the mode.
    """

    scales = ("log_mean", "log_raw_sd", "shared_mean", "shared_raw_sd")

    def __init__(
        self, layer: nn.Module, settings: LayerSettings, prior: SpikeSlab, noise: Noise
    ) -> None:
        super().__init__(layer, settings, prior, noise)
        self.posterior = "horseshoe"
        if not isinstance(prior, Horseshoe):
            fail_type("prior", "a Horseshoe where the posterior is 'horseshoe'", prior)
        self.log_scale, self.threshold = math.log(prior.scale), prior.threshold
        k, start = self.mean.shape[1], unconstrained_sd(settings.sd)
        # s_a starts near its prior and lambda_b far in its heavy tail, so that z is about 1
        self.log_mean = nn.Parameter(self.mean.new_zeros(2, k))
        self.log_mean.data[1] = -2 * self.log_scale
        self.log_raw_sd = nn.Parameter(self.mean.new_full((2, k), start))
        self.shared_mean = nn.Parameter(self.mean.new_tensor([2 * self.log_scale, 0.0]))
        self.shared_raw_sd = nn.Parameter(self.mean.new_full((2,), start))

    @property
    def excludes_weights(self) -> bool:
        """Never: all inputs have scales above 0."""
        return False

    def _redraws_factors(self, structure: str) -> bool:
        return True

    def _deviations(self) -> tuple[Float[Tensor, "2 k"], Float[Tensor, "2"]]:
        return functional.softplus(self.log_raw_sd), functional.softplus(self.shared_raw_sd)

    def log_scales(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"], Float[Tensor, ""]]:
        """Means of the log scales of the inputs, their own deviations, and the shared deviation."""
        own, shared = self._deviations()
        mean = 0.5 * (self.log_mean.sum(0) + self.shared_mean.sum())
        return mean, 0.5 * own.square().sum(0).sqrt(), 0.5 * shared.square().sum().sqrt()

    def _mean_scales(self) -> Float[Tensor, " k"]:
        mean, own, shared = self.log_scales()
        found = (mean + 0.5 * (own.square() + shared.square())).exp()
        return found * self._exceeds_threshold() if self.phase == "median" else found

    def _draw_scales(self, count: int, noise: Noise) -> Float[Tensor, "S k"]:
        mean, own, shared = self.log_scales()
        of_inputs, of_layer = (noise.normal((count, k), mean) for k in (len(mean), 1))
        found = (mean + own * of_inputs + shared * of_layer).exp()
        if self.phase in ("fixed", "median"):
            found = found.detach()
        return found * self._exceeds_threshold() if self.phase == "median" else found

    def _exceeds_threshold(self) -> Float[Tensor, " k"]:
        mean, _, _ = self.log_scales()
        return (mean > math.log(self.threshold)).to(mean)

    @torch.no_grad()
    def probability(self) -> Float[Tensor, "*W"]:
        """Probabilities of the inputs' scales above the threshold, shaped as the weights."""
        mean, own, shared = self.log_scales()
        found = torch.special.ndtr(
            (mean - math.log(self.threshold)) / (own.square() + shared.square()).sqrt()
        )
        if self.phase == "median":
            found = self._exceeds_threshold()
        return self._over_units(found)

    def included(self) -> Bool[Tensor, "*W"]:
        """Which weights have an input whose median scale exceeds the threshold."""
        return self.probability() > 0.5

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """The scales; with "median" those of pruned inputs are zero."""
        if weights == "mean":
            found = self._mean_scales().unsqueeze(0)
        else:
            noise = Noise(0)
            noise.generator = generator
            found = self._draw_scales(count, noise)
        return self._to_weights(
            found * self._exceeds_threshold() if structure == "median" else found
        )

    def _mean_weight(self) -> Float[Tensor, "*W"]:
        return self._over_units(self._mean_scales()) * self.mean

    def _draw_outputs(self, x: Tensor) -> Tensor:
        z = self._draw_scales(self._independent_rows(x), self.noise)
        bias = None if self.bias_mean is None else self.bias_sd.square()
        return self._draw_gaussian_outputs(
            x * self._by_input(z, x), self.mean, self.sd.square(), self.bias_mean, bias
        )

    def extra_repr(self) -> str:
        """The replaced layer and its prior."""
        return (
            f"{super().extra_repr()}, scale={math.exp(self.log_scale):g}, "
            f"threshold={self.threshold:g}"
        )

    def kl(self) -> Float[Tensor, ""]:
        """The divergence of scales, weights and biases, in closed form for a normal slab."""
        found = self._slab_kl(self.mean, self.sd).sum() + self._bias_kl().sum()
        if self.phase in ("fixed", "median"):
            return found  # scales are frozen
        own, shared = self._deviations()
        return (
            found
            + gamma_kl(self.log_mean[0], own[0]).sum()
            + inverse_gamma_kl(self.log_mean[1], own[1]).sum()
            + gamma_kl(self.shared_mean[0], shared[0], 2 * self.log_scale)
            + inverse_gamma_kl(self.shared_mean[1], shared[1])
        )


_LOG_GAMMA_HALF = 0.5 * math.log(math.pi)  # log Gamma(1/2)


def _log_normal_entropy(mean: Tensor, sd: Tensor) -> Tensor:
    return mean + sd.log() + 0.5 * math.log(2 * math.pi * math.e)


def gamma_kl(
    mean: Float[Tensor, "*S"], sd: Float[Tensor, "*S"], log_scale: float = 0.0
) -> Float[Tensor, "*S"]:
    """Divergence of log-normal distributions from the gamma with shape 1/2 and a scale."""
    expected = -0.5 * mean - (mean + 0.5 * sd.square() - log_scale).exp()
    return -_log_normal_entropy(mean, sd) - expected + _LOG_GAMMA_HALF + 0.5 * log_scale


def inverse_gamma_kl(mean: Float[Tensor, "*S"], sd: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Divergence of log-normal distributions from the inverse gamma with shape 1/2 and scale 1."""
    expected = -1.5 * mean - (-mean + 0.5 * sd.square()).exp()
    return -_log_normal_entropy(mean, sd) - expected + _LOG_GAMMA_HALF


_LAYERS: dict[str, type[SparseLayer]] = {"dropout": DropoutLayer, "horseshoe": HorseshoeLayer}
BASELINES = ("all", *_LAYERS)


def convert(
    module: nn.Module, posterior: str, prior: SpikeSlab | None = None, **options: Any
) -> nn.Module:
    """A module with a posterior of `BASELINES`, or one that `sparse.convert` takes.

    Args:
        module: as for `sparse.convert`.
        posterior: name of the posterior.
        prior: of all layers; by default that of the paper.
        options: further arguments of `sparse.convert`.
    """
    if posterior not in _LAYERS:
        return sparse.convert(module, posterior, prior=prior, **options)
    if prior is None and posterior == "horseshoe":
        prior = Horseshoe()
    return sparse.convert(module, "all", prior=prior, layer=_LAYERS[posterior], **options)


def prune(
    module: nn.Module, density: float, structure: str = "weights", keep: Collection[str] = ()
) -> nn.Module:
    """A copy of a network without its smallest weights, or hidden units.

    Args:
        module: the module, which is not changed.
        density: share of the weights, or of the hidden units, to keep.
        structure: "weights" ranks all weights of linear and convolutional layers by magnitude;
            "units" removes the units with the smallest sums of squared weights, with their biases,
            from each of these layers but the last.
        keep: names of layers, or of modules all of whose layers are kept unchanged.

    Returns:
        A copy with zeros, which `export_network` removes.

    Raises:
        InputError: a density outside (0, 1], nothing to prune, an unknown layer, shared weights,
            weights that are computed from others.

    Source: Blalock et al. (2020), What is the state of neural network pruning?

    Example:
        >>> layer = prune(nn.Linear(4, 5), 0.1)
        >>> int((layer.weight != 0).sum())
        2
    """
    if not (isinstance(density, Real) and 0 < density <= 1):
        fail("density", "a share above 0 and at most 1", density)
    check_choice("structure", structure, STRUCTURES)
    names = list(select_layers(module, keep))
    made = copy.deepcopy(module)
    last = [name for name, layer in made.named_modules() if isinstance(layer, LAYERS)][-1:]
    layers: list[Any] = [
        made.get_submodule(name) for name in names if structure == "weights" or name not in last
    ]
    if not layers:
        fail("module", f"a layer with {structure} to prune", "none")
    if structure == "units":
        for layer in layers:
            sizes = layer.weight.detach().flatten(1).square().sum(1)
            kept = _largest(sizes, max(1, round(density * len(sizes))))
            layer.weight.data *= kept.reshape(-1, *[1] * (layer.weight.ndim - 1))
            if layer.bias is not None:
                layer.bias.data *= kept
        return made
    sizes = torch.cat([layer.weight.detach().abs().reshape(-1) for layer in layers])
    parts = _largest(sizes, round(density * len(sizes))).split(
        [layer.weight.numel() for layer in layers]
    )
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data *= part.reshape(layer.weight.shape)
    empty = [name for name, part in zip(names, parts, strict=True) if not bool(part.any())]
    if empty:
        warn_user(
            f"Pruning excludes every weight of layer{'s' * (len(empty) > 1)} "
            f"{', '.join(map(repr, empty))}, whose outputs do not depend on the inputs: "
            "other layers have larger weights. Raise density, or name it in keep="
        )
    return made


def _largest(sizes: Float[Tensor, " n"], count: int) -> Bool[Tensor, " n"]:
    """A mask of the largest sizes."""
    found = torch.zeros_like(sizes, dtype=torch.bool)
    found[sizes.argsort(descending=True)[:count]] = True
    return found

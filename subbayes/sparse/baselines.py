r"""Baselines of sparse networks, with the same training and predictions.

- "all": all weights are included, each with a Gaussian posterior (Graves 2011), and a `NormalSlab`
  or a `MixtureSlab` (Blundell et al. 2015) as the prior; layers are ordinary `SparseLayer`s.
- "dropout": inputs of a layer are dropped, others in each row, with one learned probability
  (`DropoutLayer`; Gal et al. 2017).
- "horseshoe": inputs of a layer have random scales with half-Cauchy priors, and those with small
  ones are pruned (`HorseshoeLayer`; Louizos et al. 2017).
- `prune`: a point network without its smallest weights or units.

(Hubin and Storvik 2024, section 4.1.)
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from subbayes.sparse.layers import STRUCTURES, SparseLayer
from subbayes.sparse.module_surgery import LAYERS, select_layers
from subbayes.sparse.moments import unconstrained_sd
from subbayes.sparse.priors import Bernoulli, Horseshoe, NormalSlab, SpikeSlab
from subbayes.utils.checks import check_choice, fail, fail_type

__all__ = ["DropoutLayer", "HorseshoeLayer", "layer_class", "prune", "default_prior"]


class _InputLayer(SparseLayer):
    """A layer with random inputs, and without indicators of weights or units."""

    def __init__(
        self, layer: nn.Module, posterior: str, structure: str, *given: Any, **options: Any
    ) -> None:
        if structure != "weights":
            fail("structure", f"'weights' where the posterior is '{posterior}'", f"'{structure}'")
        super().__init__(layer, posterior, structure, *given, **options)
        self.structure = "inputs"

    def _by_input(self, value: Float[Tensor, "r k"], x: Tensor) -> Tensor:
        """Reshape values of the inputs of each row so that they broadcast with x."""
        if not self.operation.linear:  # groups share the values of theirs
            value = value.repeat(1, x.shape[1] // value.shape[1])
        return self.operation.over_positions(value, x)

    def _to_weights(self, value: Float[Tensor, "S k"]) -> Float[Tensor, "S one c"]:
        """Repeat values of the inputs for all weights of a unit."""
        each = self.mean[0, 0].numel()
        return value.repeat_interleave(each, -1).unsqueeze(1)


class DropoutLayer(_InputLayer):
    r"""Concrete dropout: $w_{jk} = \gamma_k \kappa_{jk}$, $\gamma_k \sim \text{Bernoulli}(\alpha)$.

    One $\alpha$ holds for the layer; weights and biases are points. In training each row draws
    relaxed indicators of its own. The divergence is that of Gal et al., with spikes of the
    width of the slabs' posterior, which cancels:

    $$ \alpha \sum_{jk} \bigl[\log p(0) - \log p(\kappa_{jk})\bigr]
       + K\bigl[\alpha\log\alpha + (1 - \alpha)\log(1 - \alpha)\bigr] - \log p(\gamma) $$

    For a normal slab the first sum is $\|\kappa\|^2 / 2 s^2$. Inputs that stay are not scaled up:
    $\kappa = M$, where usual code keeps $\alpha M$.

    Source: Gal, Hron and Kendall (2017), Concrete dropout, eqs. 2 to 5.
    """

    @property
    def sd(self) -> Float[Tensor, "*W"]:
        """Zero: weights are points."""
        return torch.zeros_like(self.raw_sd)

    def _sd_at(self, inside: Tensor) -> Tensor:
        return self.raw_sd.new_zeros(inside.shape)

    @property
    def bias_sd(self) -> Float[Tensor, "u"]:
        """Zero."""
        assert self.bias_mean is not None
        return torch.zeros_like(self.bias_mean)

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """See `SparseLayer.inclusion_factors`; whole columns are included or excluded."""
        if structure != "sample" or self.is_deterministic:
            return super().inclusion_factors(structure, weights, count, generator)
        shape = (count, self.mean.shape[1])
        u = torch.rand(shape, generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        return self._to_weights((u < torch.sigmoid(self.logits.mean)).to(u))

    def _drawn_outputs(self, x: Tensor) -> Tensor:
        gamma = self._indicators(self._drawn_logits().expand(self._rows(x), self.mean.shape[1]))
        return self.operation(x * self._by_input(gamma, x), self.mean, self.bias_mean)

    def _kl_at(self, logits: Tensor) -> Tensor:
        alpha, k = self._sure(logits)[0], self.mean.shape[1]
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
    from the Gaussian given them. No draw excludes weights; the inclusion probability of an input
    is $P(z_k > \text{threshold})$, so that "median" prunes inputs whose scale is more likely below.

    Attributes:
        log_mean: of the logarithms of $\lambda^a, \lambda^b$ (2, inputs).
        log_raw_sd: deviations of those, before the softplus.
        shared_mean: of the logarithms of $s_a, s_b$.
        shared_raw_sd: deviations of those, before the softplus.
        threshold: see `Horseshoe`.

    Source: Louizos, Ullrich and Welling (2017), section 4.2 and appendix; they prune by the mode.
    """

    excludes_weights = False
    scales = ("log_mean", "log_raw_sd", "shared_mean", "shared_raw_sd")

    def _gates_are_random(self, structure: str) -> bool:
        return True

    def __init__(
        self,
        layer: nn.Module,
        posterior: str,
        structure: str,
        prior: SpikeSlab,
        *given: Any,
        sd: float,
        **options: Any,
    ) -> None:
        super().__init__(layer, posterior, structure, prior, *given, sd=sd, **options)
        if not isinstance(prior, Horseshoe):
            fail_type("prior", "a Horseshoe where the posterior is 'horseshoe'", prior)
        self.log_scale, self.threshold = math.log(prior.scale), prior.threshold
        k, start = self.mean.shape[1], unconstrained_sd(sd)
        # s_a near its prior, and the heavy tails of lambda_b make up for it: z is about 1
        self.log_mean = nn.Parameter(self.mean.new_zeros(2, k))
        self.log_mean.data[1] = -2 * self.log_scale
        self.log_raw_sd = nn.Parameter(self.mean.new_full((2, k), start))
        self.shared_mean = nn.Parameter(self.mean.new_tensor([2 * self.log_scale, 0.0]))
        self.shared_raw_sd = nn.Parameter(self.mean.new_full((2,), start))

    def log_scales(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"], Float[Tensor, ""]]:
        """Means of the log scales of the inputs, their own deviations, and the shared deviation."""
        own, shared = (functional.softplus(raw) for raw in (self.log_raw_sd, self.shared_raw_sd))
        mean = 0.5 * (self.log_mean.sum(0) + self.shared_mean.sum())
        return mean, 0.5 * own.square().sum(0).sqrt(), 0.5 * shared.square().sum().sqrt()

    def _mean_scales(self) -> Float[Tensor, "k"]:
        mean, own, shared = self.log_scales()
        found = (mean + 0.5 * (own.square() + shared.square())).exp()
        return found * self._above() if self.phase == "median" else found

    def _drawn_scales(self, count: int, noise: Any) -> Float[Tensor, "S k"]:
        """Draws of the scales; `noise` maps a shape to standard normal numbers."""
        mean, own, shared = self.log_scales()
        found = (mean + own * noise((count, len(mean))) + shared * noise((count, 1))).exp()
        if self.phase in ("fixed", "median"):
            found = found.detach()
        return found * self._above() if self.phase == "median" else found

    def _above(self) -> Float[Tensor, "k"]:
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
            found = self._above()
        return (
            self._to_weights(found.unsqueeze(0))[0]
            .reshape(1, *self.mean.shape[1:])
            .expand_as(self.mean)
        )

    def included(self) -> Bool[Tensor, "*W"]:
        """See `SparseLayer.inside`."""
        return self.probability() > 0.5

    @torch.no_grad()
    def inclusion_factors(
        self, structure: str, weights: str, count: int, generator: torch.Generator
    ) -> Float[Tensor, "S u k"]:
        """The scales; with "median" those of pruned inputs are zero."""
        if weights == "mean":
            found = self._mean_scales().unsqueeze(0)
        else:
            found = self._drawn_scales(
                count,
                lambda shape: torch.randn(shape, generator=generator, dtype=self.mean.dtype).to(
                    self.mean.device
                ),
            )
        return self._to_weights(found * self._above() if structure == "median" else found)

    def _mean_outputs(self, x: Tensor) -> Tensor:
        scales = self._by_input(self._mean_scales().unsqueeze(0), x)
        return self.operation(x * scales, self.mean, self.bias_mean)

    def _drawn_outputs(self, x: Tensor) -> Tensor:
        z = self._drawn_scales(self._rows(x), lambda shape: self.noise.normal(shape, self.mean))
        bias = None if self.bias_mean is None else self.bias_sd.square()
        return self._perturbed(
            x * self._by_input(z, x), self.mean, self.sd.square(), self.bias_mean, bias
        )

    def extra_repr(self) -> str:
        """The replaced layer and its prior."""
        return (
            f"{super().extra_repr()}, scale={math.exp(self.log_scale):g}, "
            f"threshold={self.threshold:g}"
        )

    def kl(self) -> Float[Tensor, ""]:
        """Of scales, weights and biases, in closed form for a normal slab."""
        found = self._slab_kl(self.mean, self.sd).sum()
        if self.bias_mean is not None:
            found = found + self._bias_kl().sum()
        if self.phase in ("fixed", "median"):
            return found  # scales are frozen
        own, shared = (functional.softplus(raw) for raw in (self.log_raw_sd, self.shared_raw_sd))
        return (
            found
            + gamma_kl(self.log_mean[0], own[0]).sum()
            + inverse_gamma_kl(self.log_mean[1], own[1]).sum()
            + gamma_kl(self.shared_mean[0], shared[0], 2 * self.log_scale)
            + inverse_gamma_kl(self.shared_mean[1], shared[1])
        )


_LOG_GAMMA_HALF = 0.5 * math.log(math.pi)  # log Gamma(1/2)


def _entropy(mean: Tensor, sd: Tensor) -> Tensor:
    """Of a log-normal distribution."""
    return mean + sd.log() + 0.5 * math.log(2 * math.pi * math.e)


def gamma_kl(
    mean: Float[Tensor, "*S"], sd: Float[Tensor, "*S"], log_scale: float = 0.0
) -> Float[Tensor, "*S"]:
    """Divergence of log-normal distributions from the gamma with shape 1/2 and a scale."""
    expected = -0.5 * mean - (mean + 0.5 * sd.square() - log_scale).exp()
    return -_entropy(mean, sd) - expected + _LOG_GAMMA_HALF + 0.5 * log_scale


def inverse_gamma_kl(mean: Float[Tensor, "*S"], sd: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Divergence of log-normal distributions from the inverse gamma with shape 1/2 and scale 1."""
    expected = -1.5 * mean - (-mean + 0.5 * sd.square()).exp()
    return -_entropy(mean, sd) - expected + _LOG_GAMMA_HALF


_LAYERS: dict[str, type[SparseLayer]] = {"dropout": DropoutLayer, "horseshoe": HorseshoeLayer}


def layer_class(posterior: str) -> type[SparseLayer]:
    """The class of a posterior's layers."""
    return _LAYERS.get(posterior, SparseLayer)


def default_prior(posterior: str) -> SpikeSlab:
    """The prior of a posterior where none is given."""
    if posterior == "horseshoe":
        return Horseshoe()
    if posterior in ("all", "dropout"):
        return SpikeSlab(NormalSlab(1.0), Bernoulli(0.5))
    return SpikeSlab()


def prune(
    module: nn.Module, density: float, structure: str = "weights", keep: Collection[str] = ()
) -> nn.Module:
    """A copy of a point network without its smallest weights, or hidden units.

    Args:
        module: the module, which is not changed.
        density: share of the weights, or of the hidden units, to keep.
        structure: "weights" ranks all weights of linear and convolutional layers by magnitude;
            "units" removes the units with the smallest sums of squared weights, with their biases,
            from each of those layers but the last.
        keep: names of layers to leave unchanged, or of modules of layers.

    Returns:
        The copy, with zeros; `export_network` removes them.

    Raises:
        InputError: a density outside (0, 1], nothing to prune, a name that is no layer, shared
            weights, weights that are computed from others.

    Source: Blalock et al. (2020), What is the state of neural network pruning?

    Example:
        >>> layer = prune(nn.Linear(4, 5), 0.1)
        >>> int((layer.weight != 0).sum())
        2
    """
    if not isinstance(module, nn.Module):
        fail_type("module", "a torch.nn.Module", module)
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
            inside = _largest(sizes, max(1, round(density * len(sizes))))
            layer.weight.data *= inside.reshape(-1, *[1] * (layer.weight.ndim - 1))
            if layer.bias is not None:
                layer.bias.data *= inside
        return made
    sizes = torch.cat([layer.weight.detach().abs().reshape(-1) for layer in layers])
    parts = _largest(sizes, round(density * len(sizes))).split(
        [layer.weight.numel() for layer in layers]
    )
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data *= part.reshape(layer.weight.shape)
    empty = [name for name, part in zip(names, parts, strict=True) if not bool(part.any())]
    if empty:
        warnings.warn(
            f"Pruning excludes every weight of layer{'s' * (len(empty) > 1)} "
            f"{', '.join(map(repr, empty))}, whose outputs do not depend on the inputs: "
            "other layers have the largest weights. Raise density, or name it in keep=",
            stacklevel=2,
        )
    return made


def _largest(sizes: Float[Tensor, "n"], count: int) -> Bool[Tensor, "n"]:
    """A mask of the largest."""
    found = torch.zeros_like(sizes, dtype=torch.bool)
    found[sizes.argsort(descending=True)[:count]] = True
    return found

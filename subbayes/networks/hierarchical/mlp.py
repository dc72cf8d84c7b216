r"""A perceptron whose prior has scales of its own, all of them sampled with the weights.

Every parameter is standard normal a priori, so that the scales below are part of the network
(a non-centred hierarchical prior), and any engine samples them in `subspace="full"` with prior 1:

$$ h_1 = \tanh\bigl(\tau_1\, \tfrac{1.5}{\sqrt d}\, (Z_1 \lambda)\, x + \beta_1 b_1\bigr), \qquad
   h_l = \tanh\bigl(\tau_l\, \tfrac{1.5}{\sqrt{H}}\, Z_l h_{l - 1} + \beta_l b_l\bigr), $$

$$ f = \tfrac{\tau_V}{\sqrt H}\, V h_L + \tfrac{\tau_S e^{-1}}{\sqrt d}\, S \lambda x + c, \qquad
   \log \lambda_i, \log \tau, \log \beta \sim N(0, 1) . $$

$\lambda_i$ is the relevance of input i (Neal 1996, section 4.3). Further outputs, such as the
logarithm of a noise scale, vary around a constant m + s z by a bounded function of the last layer
and the inputs, whose scale is small a priori, so that it shrinks to a constant:

$$ \eta = m + s z + 2.5 \tanh\bigl(\tau_\eta\, g(h_L, x) / 2.5\bigr), \qquad
   \log \tau_\eta \sim N(-2.5, 1.5^2) . $$

Neal (1996), *Bayesian Learning for Neural Networks*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, structs
from torch import Tensor, nn

from subbayes.artifacts.facts import Count, Facts, Finite, Positive
from subbayes.artifacts.files import fail_damaged
from subbayes.networks.hierarchical.rank_features import RankFeatures, RankFeaturesSettings
from subbayes.utils.checks import check_count
from subbayes.utils.seeding import fork_rng

_GAIN = 1.5  # of the weights of a layer, so that tanh is neither linear nor saturated
_SKIP = math.exp(-1.0)  # typical scale of the skip
_VARYING, _SPREAD = math.exp(-2.5), 1.5  # of a varying shape: typical scale, and sd of its log
_MOST = 2.5  # by which a varying shape differs from its constant
_START = 0.5  # standard deviation of the initial parameters, in that of the prior


class Shape(NamedTuple):
    """A further output, such as the logarithm of a noise scale.

    Attributes:
        centre: its prior mean.
        scale: the prior standard deviation of its constant.
        varies: whether it depends on the inputs.
        least: a soft bound: the output is log(exp(least) + exp(value)); None for no bound.
    """

    centre: float
    scale: float
    varies: bool = False
    least: float | None = None

    def value(self, constant: Tensor, change: Tensor) -> Tensor:
        """The output (N,), from its constant, standard normal a priori, and changes of rows."""
        found = self.centre + self.scale * constant + change
        return found if self.least is None else torch.log(math.exp(self.least) + found.exp())


class HierarchicalMLP(nn.Module):
    """A perceptron with sampled scales: of relevance, layers, biases, a skip and the noise.

    Its parameters are standard normal a priori; see the equations of the module.

    Args:
        n_inputs: number of features d; further inputs are added to the first outputs.
        hidden: widths of the hidden layers, at least one.
        n_outputs: number of outputs, of which `shapes` are the last ones.
        shapes: `Shape(centre, scale, varies)` of each output that is no mean or logit.
        offset: added to the first outputs, such as the logarithm of a mean of counts.
        features: of the inputs, n_inputs of them; None takes the inputs themselves.
        seed: of the initial parameters, without touching torch's global generator.

    Example:
        >>> net = HierarchicalMLP(3, (8,), 2, [Shape(-1.5, 1.5, varies=True)], seed=0)
        >>> net(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        n_inputs: int,
        hidden: Sequence[int],
        n_outputs: int,
        shapes: Sequence[Shape | Sequence[Any]] = (),
        offset: float = 0.0,
        features: RankFeatures | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        widths = [check_count("hidden", width) for width in hidden]
        d = check_count("n_inputs", n_inputs)
        self.shapes = [Shape(*shape) for shape in shapes]
        self.offset = float(offset)
        self.settings: dict[str, Any] = {
            "n_inputs": d,
            "hidden": widths,
            "n_outputs": check_count("n_outputs", n_outputs),
            "shapes": [tuple(shape) for shape in self.shapes],
            "offset": self.offset,
            "features": None if features is None else dict(features.settings),
        }
        self.features = features
        n = n_outputs - len(self.shapes)  # means or logits
        rows = n + sum(shape.varies for shape in self.shapes)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(_START * torch.randn(*shape))

        with nullcontext() if seed is None else fork_rng(seed):
            self.relevance = normal(d)
            self.weights = nn.ParameterList(
                normal(after, before) for before, after in pairwise([d, *widths])
            )
            self.biases = nn.ParameterList(normal(width) for width in widths)
            self.weight_scales, self.bias_scales = normal(len(widths)), normal(len(widths))
            self.output, self.skip = normal(rows, widths[-1]), normal(rows, d)
            self.output_scales, self.constant = normal(2 + rows - n), normal(n)
            self.shape_constant = normal(len(self.shapes)) if self.shapes else None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, n_outputs) of inputs (N, n_inputs), or (N, columns) with features."""
        x = x if self.features is None else self.features(x)
        d = self.skip.shape[1]
        added = x[:, d:]
        x = x[:, :d]
        relevance = self.relevance.exp()
        h, incoming = x, relevance
        for weight, bias, tau, beta in zip(
            self.weights, self.biases, self.weight_scales, self.bias_scales, strict=True
        ):
            scale = incoming * (tau.exp() * _GAIN / math.sqrt(weight.shape[-1]))
            h = torch.tanh(h @ (weight * scale).mT + bias * beta.exp())
            incoming = torch.ones_like(h[0])
        tau_output, tau_skip = self.output_scales[:2].exp().split(1)
        tau_shapes = _VARYING * (_SPREAD * self.output_scales[2:]).exp()
        n = len(self.constant)
        of_output = torch.cat([tau_output.expand(n), tau_shapes]) / math.sqrt(h.shape[-1])
        of_skip = torch.cat([(tau_skip * _SKIP).expand(n), tau_shapes]) / math.sqrt(len(relevance))
        linear = h @ (self.output * of_output[:, None]).mT
        linear = linear + x @ (self.skip * (of_skip[:, None] * relevance)).mT
        first = linear[:, :n] + (self.constant + self.offset)
        if added.shape[1]:
            first = first + added
        if self.shape_constant is None:
            return first
        changes = iter((_MOST * torch.tanh(linear[:, n:] / _MOST)).unbind(-1))
        columns = [
            shape.value(constant, next(changes) if shape.varies else torch.zeros_like(first[:, 0]))
            for shape, constant in zip(self.shapes, self.shape_constant, strict=True)
        ]
        return torch.cat([first, torch.stack(columns, -1)], -1)


class HierarchicalMLPSettings(Facts, tag="hierarchical-mlp"):
    """The arguments of a `HierarchicalMLP` in an artifact."""

    n_inputs: Count
    hidden: Annotated[list[Count], Meta(min_length=1, max_length=100)]
    n_outputs: Count
    shapes: Annotated[list[tuple[Finite, Positive, bool, Finite | None]], Meta(max_length=100)]
    offset: Finite
    features: RankFeaturesSettings | None

    def __post_init__(self) -> None:
        if len(self.shapes) >= self.n_outputs:
            raise ValueError("expected fewer shapes than outputs")
        if self.features is not None and self.features.features != self.n_inputs:
            raise ValueError(f"expected {self.n_inputs} features, as the network has inputs")

    def build(self, tensors: Mapping[str, Tensor]) -> HierarchicalMLP:
        """The network, with any parameters, without touching torch's global generator.

        Args:
            tensors: those of its artifact, which have as many numbers as the network has weights.
        """
        stored = sum(tensor.numel() for tensor in tensors.values())
        sizes = [self.n_inputs, *self.hidden, self.n_outputs]
        weights = sum(before * after for before, after in pairwise(sizes))
        ranks = 0 if self.features is None else self.features.numbers
        if (most := max(weights, ranks)) > stored:
            fail_damaged(f"a network of at most {stored} numbers, as are stored", f"{most}")
        arguments = structs.asdict(self)
        if self.features is not None:
            arguments["features"] = self.features.build()
        return HierarchicalMLP(**arguments, seed=0)

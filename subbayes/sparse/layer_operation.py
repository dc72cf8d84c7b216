"""The operation of a linear or convolutional layer, with given or Gaussian weights."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from subbayes.sparse.variational_families import Noise


class LayerOperation:
    """The operation of a layer as a function of inputs, weights and bias.

    Args:
        layer: a linear or convolutional layer.

    Attributes:
        linear: whether it is a linear layer, whose channels are the last axis.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> x = torch.ones(3, 2)
        >>> bool((LayerOperation(layer)(x, layer.weight, layer.bias) == layer(x)).all())
        True
    """

    def __init__(self, layer: nn.Module) -> None:
        self.linear = isinstance(layer, nn.Linear)
        self._layer: Any = layer

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs for inputs, with the stride and the padding of the layer."""
        if self.linear:
            return functional.linear(x, weight, bias)
        return self._layer._conv_forward(x, weight, bias)

    def over_positions(self, value: Float[Tensor, "n c"], like: Tensor) -> Tensor:
        """Reshape values of rows and channels to broadcast over all positions."""
        ones = [1] * (like.ndim - 2)
        if self.linear:
            return value.reshape(len(value), *ones, -1)
        return value.reshape(*value.shape, *ones)

    def draw_outputs(
        self,
        x: Tensor,
        noise: Noise,
        per_row: bool,
        mean: Tensor,
        variance: Tensor,
        bias: Tensor | None,
        bias_variance: Tensor | None,
    ) -> Tensor:
        """A draw of the outputs of Gaussian weights.

        Args:
            x: inputs.
            noise: source of random numbers.
            per_row: whether to draw weights for each row; else once for all.
            mean: of the weights.
            variance: of the weights.
            bias: mean of the bias.
            bias_variance: variance of the bias; None if it is known.

        Source: Kingma et al. (2015), the local reparametrisation trick, if a row uses each weight
        once; Wen et al. (2018), flipout, if it uses weights several times.
        """
        if not per_row:
            weight = mean + _safe_sqrt(variance) * noise.normal(mean.shape, mean)
            if bias is not None and bias_variance is not None:
                bias = bias + _safe_sqrt(bias_variance) * noise.normal(bias.shape, bias)
            return self(x, weight, bias)
        center = self(x, mean, bias)
        if center[0].numel() == len(mean):  # a row uses each weight once
            deviation = _safe_sqrt(self(x.square(), variance, bias_variance))
            return center + deviation * noise.normal(center.shape, center)
        weight = _safe_sqrt(variance) * noise.normal(mean.shape, mean)
        output_signs = self._signs(center, noise)
        found = center + output_signs * self(x * self._signs(x, noise), weight, None)
        if bias_variance is None:
            return found
        drawn = noise.normal((len(x), len(mean)), center)
        return found + self.over_positions(_safe_sqrt(bias_variance) * drawn, center)

    def _signs(self, like: Tensor, noise: Noise) -> Tensor:
        """Random signs, one for each channel of each row."""
        count = like.shape[-1] if self.linear else like.shape[1]
        drawn = noise.uniform((len(like), count), like)
        return self.over_positions(torch.where(drawn < 0.5, -1.0, 1.0).to(like), like)


def _safe_sqrt(variance: Tensor) -> Tensor:
    """The square root, with a finite derivative at 0."""
    if variance.dtype.itemsize > 2:  # to add the smallest number is faster than a mask
        return (variance + torch.finfo(variance.dtype).tiny).sqrt()
    positive = variance > 0  # the smallest number of float16 is larger than most variances
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)

"""Convolutional networks for images of 32 x 32: residual networks, and VGG-16 without them.

ResNet-20 is the one of He et al. (2016a, section 4.2), with shortcuts without weights. The others
are those of Izmailov et al. (2019): PreResNet-164 (He et al. 2016b), VGG-16 without batch
normalisation and with dropout before the linear layers, as in the authors' code, and WRN-28-10
(Zagoruyko and Komodakis 2016). Convolutions start from normal weights of variance 2 / fan-out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "MODELS",
    "VGG",
    "BasicBlock",
    "PreActivationBlock",
    "ResidualNetwork",
    "preresnet164",
    "resnet20",
    "vgg16",
    "wideresnet28x10",
]

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
Images = Float[Tensor, "n c h w"]


def _convolution(channels: int, out: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of the images, up to the stride, without biases."""
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


def _initialise(network: nn.Module) -> None:
    """Draw the weights of convolutions with variance 2 / fan-out; their biases become 0."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class BasicBlock(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut without weights.

    Where the number of channels changes, the shortcut takes every second pixel and adds channels
    of zeros (option A of He et al. 2016a).
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(channels, out, 3, stride), _convolution(out, out)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.stride, self.added = stride, out - channels

    def forward(self, x: Images) -> Images:
        """Features."""
        found = torch.relu(self.norms[0](self.first(x)))
        found = self.norms[1](self.second(found))
        if self.stride > 1 or self.added:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return torch.relu(found + x)


class PreActivationBlock(nn.Module):
    """Convolutions, each after batch normalisation and a ReLU, and a shortcut.

    Args:
        channels: number of channels of the input.
        widths: channels after each convolution.
        sizes: sizes of the convolutions.
        strided: number of the convolution with the stride.
        stride: of the block.
        shared: apply the first normalisation and ReLU before a shortcut with weights, too.
    """

    def __init__(
        self,
        channels: int,
        widths: tuple[int, ...],
        sizes: tuple[int, ...],
        strided: int,
        stride: int,
        shared: bool,
    ) -> None:
        super().__init__()
        before = (channels, *widths[:-1])
        self.norms = nn.ModuleList(nn.BatchNorm2d(own) for own in before)
        self.layers = nn.ModuleList(
            _convolution(a, b, size, stride if i == strided else 1)
            for i, (a, b, size) in enumerate(zip(before, widths, sizes, strict=True))
        )
        changes = stride > 1 or channels != widths[-1]
        self.shortcut = _convolution(channels, widths[-1], 1, stride) if changes else None
        self.shared = shared

    def forward(self, x: Images) -> Images:
        """Features."""
        found, kept = x, x
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            found = torch.relu(norm(found))
            if i == 0 and self.shared:
                kept = found
            found = layer(found)
        return found + (x if self.shortcut is None else self.shortcut(kept))


class ResidualNetwork(nn.Module):
    """A convolution, three stages of blocks, the mean over pixels and a linear layer.

    Args:
        first: number of channels of the first convolution.
        widths: channels of the stages; the second and the third halve the size of the images.
        blocks: number of blocks of each stage.
        block: makes a block from its numbers of channels before and after it, and its stride.
        classes: number of classes.
        normalised_last: normalise and apply a ReLU after the last stage, not after the first
            convolution.
    """

    def __init__(
        self,
        first: int,
        widths: tuple[int, ...],
        blocks: int,
        block: Callable[[int, int, int], nn.Module],
        classes: int = 10,
        normalised_last: bool = True,
    ) -> None:
        super().__init__()
        self.first, self.normalised_last = _convolution(3, first), normalised_last
        parts, channels = [], first
        for stage, out in enumerate(widths):
            for number in range(blocks):
                parts.append(block(channels, out, 2 if stage and not number else 1))
                channels = out
        self.blocks = nn.Sequential(*parts)
        self.norm = nn.BatchNorm2d(channels if normalised_last else first)
        self.head = nn.Linear(channels, classes)
        _initialise(self)

    def forward(self, x: Images) -> Float[Tensor, "n classes"]:
        """Logits."""
        x = self.first(x)
        if not self.normalised_last:
            return self.head(self.blocks(torch.relu(self.norm(x))).mean((2, 3)))
        return self.head(torch.relu(self.norm(self.blocks(x))).mean((2, 3)))


class VGG(nn.Module):
    """Five stages of convolutions with ReLUs, each before a maximum over 2 x 2, and linear layers.

    Args:
        width: channels of the first stage; 64 gives VGG-16.
        classes: number of classes.
    """

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in _VGG16:
            for out in (own * width // 64 for own in stage):
                layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
                channels = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        linear = [nn.Linear(channels, channels) for _ in range(2)]
        self.head = nn.Sequential(
            nn.Dropout(),
            linear[0],
            nn.ReLU(),
            nn.Dropout(),
            linear[1],
            nn.ReLU(),
            nn.Linear(channels, classes),
        )
        _initialise(self)

    def forward(self, x: Images) -> Float[Tensor, "n classes"]:
        """Logits."""
        return self.head(self.features(x).flatten(1))


def _scaled(width: float, *channels: int) -> tuple[int, ...]:
    return tuple(max(1, round(width * own)) for own in channels)


def resnet20(width: float = 1.0, classes: int = 10) -> nn.Module:
    """ResNet-20 (He et al. 2016a): 269,722 weights at width 1, which multiplies all channels."""
    widths = _scaled(width, 16, 32, 64)
    return ResidualNetwork(widths[0], widths, 3, BasicBlock, classes, normalised_last=False)


def preresnet164(width: float = 1.0, classes: int = 10) -> nn.Module:
    """PreResNet-164 (He et al. 2016b): 18 bottleneck blocks in each stage, 1.7 million weights."""

    def block(channels: int, out: int, stride: int) -> nn.Module:
        inner = max(1, out // 4)
        return PreActivationBlock(channels, (inner, inner, out), (1, 3, 1), 1, stride, False)

    first, *widths = _scaled(width, 16, 64, 128, 256)
    return ResidualNetwork(first, tuple(widths), 18, block, classes)


def vgg16(width: float = 1.0, classes: int = 10) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015) for small images: 15.2 million weights."""
    return VGG(max(1, round(64 * width)), classes)


def wideresnet28x10(width: float = 1.0, classes: int = 10) -> nn.Module:
    """WRN-28-10 (Zagoruyko and Komodakis 2016): 36.5 million weights."""

    def block(channels: int, out: int, stride: int) -> nn.Module:
        return PreActivationBlock(channels, (out, out), (3, 3), 0, stride, True)

    first, *widths = 16, *_scaled(width, 160, 320, 640)
    return ResidualNetwork(first, tuple(widths), 4, block, classes)


MODELS = {
    "resnet20": resnet20,
    "preresnet164": preresnet164,
    "vgg16": vgg16,
    "wideresnet28x10": wideresnet28x10,
}
"""Functions of a factor of all channels and a number of classes, by name."""

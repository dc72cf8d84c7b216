"""Image data sets, and the small networks of the paper on optimal subspaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from experiments.datasets import find_file

__all__ = ["Images", "ResNet9", "SmallCNN", "as_inputs", "float32_convolutions", "lesions", "load"]

_SHEETS, _ROWS, _COLUMNS, _SIDE = 10, 25, 40, 32
_MEAN = {1: (0.5,), 3: (0.4914, 0.4822, 0.4465)}
_SCALE = {1: (0.5,), 3: (0.2470, 0.2435, 0.2616)}


@dataclass(frozen=True)
class Images:
    """Training and test images, (n, h, w) or (n, h, w, 3) of bytes, and their labels."""

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    y_new: np.ndarray


def load(name: str, data_dir: str | None = None) -> Images:
    """Load mnist, fashion_mnist or a part of cifar10 from the data directory."""
    if name != "cifar10":
        with np.load(find_file(f"{name}/{name}.npz", data_dir)) as file:
            return Images(*(file[key] for key in ("x_train", "y_train", "x_test", "y_test")))
    with np.load(find_file("cifar10/cifar10_labels.npz", data_dir)) as file:
        y, y_new = file["y_train"], file["y_test"]
    sheets = [_sheet(f"cifar10/cifar10_train_{k:02d}.webp", data_dir) for k in range(_SHEETS)]
    return Images(
        np.concatenate(sheets), y, _sheet("cifar10/cifar10_test_00.webp", data_dir), y_new
    )


def lesions(data_dir: str | None = None) -> tuple[pd.DataFrame, np.ndarray]:
    """Load HAM10000 (Tschandl et al. 2018) at 32 x 32: a row per image, and the images as bytes.

    Columns of the rows: lesion_id (several images may show one lesion), dx (the diagnosis), age
    in years (missing for some), sex, and others. Images have shape (n, 32, 32, 3).
    """
    rows = pd.read_csv(find_file("ham10000/HAM10000_metadata.csv.gz", data_dir))
    sheets = -(-len(rows) // (_ROWS * _COLUMNS))
    found = [_sheet(f"ham10000/ham10000_32x32_{k:02d}.webp", data_dir) for k in range(sheets)]
    return rows, np.concatenate(found)[: len(rows)]


def _sheet(name: str, data_dir: str | None) -> np.ndarray:
    """Split a file with a grid of colour images."""
    from PIL import Image

    with Image.open(find_file(name, data_dir)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    tiles = pixels.reshape(_ROWS, _SIDE, _COLUMNS, _SIDE, 3).transpose(0, 2, 1, 3, 4)
    return tiles.reshape(-1, _SIDE, _SIDE, 3)


def as_inputs(images: np.ndarray) -> Float[Tensor, "n c h w"]:
    """Return standardised inputs, channels first, from bytes or from values in [0, 1]."""
    values = images / np.float32(255) if images.dtype == np.uint8 else images
    values = values[:, None] if values.ndim == 3 else values.transpose(0, 3, 1, 2)
    shape = (1, -1, 1, 1)
    channels = values.shape[1]
    mean, scale = (np.reshape(of[channels], shape) for of in (_MEAN, _SCALE))
    return torch.from_numpy(((values - mean) / scale).astype(np.float32))


@contextmanager
def float32_convolutions() -> Iterator[None]:
    """Compute convolutions in float32 on GPUs that otherwise round their inputs to 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class SmallCNN(nn.Module):
    """The paper's network for images of 28 x 28 grey pixels: 12,458 weights.

    A convolution to 32 channels, then one from 32 to 32 that is applied twice, each followed by a
    ReLU and a maximum over 2 x 2, and a linear layer.
    """

    def __init__(self, classes: int = 10, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.again = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(9 * channels, classes)

    def forward(self, x: Float[Tensor, "n one h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        for layer in (self.first, self.again, self.again):
            x = torch.max_pool2d(torch.relu(layer(x)), 2)
        return self.head(x.flatten(1))


def _block(channels: int, out: int, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(channels, out, 3, padding=1),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class ResNet9(nn.Module):
    """The paper's residual network for images of 32 x 32: 668,234 weights at its width of 64."""

    def __init__(self, width: int = 64, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        wide = 2 * width
        self.first = nn.Sequential(_block(channels, width), _block(width, wide, True))
        self.residual = nn.Sequential(_block(wide, wide), _block(wide, wide))
        self.second = nn.Sequential(_block(wide, wide, True), _block(wide, width, True))
        self.last = nn.Sequential(_block(width, width), _block(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        x = self.first(x)
        x = self.second(self.residual(x) + x)
        return self.head((self.last(x) + x).amax((2, 3)))

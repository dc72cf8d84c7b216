"""Images of the CIFAR experiment: training, validation and test, and augmented epochs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from experiments import images as pictures
from subbayes.utils.seeding import derive_seed

__all__ = ["AugmentedEpochs", "Part", "Rows", "rows_of"]

_PADDING = 4


@dataclass(frozen=True)
class Part:
    """Images and their classes, on the device of the networks."""

    x: Float[Tensor, "n c h w"]
    y: Int[Tensor, " n"]


@dataclass(frozen=True)
class Rows:
    """Training images, validation images for every selected setting, and test images."""

    train: Part
    validation: Part
    test: Part

    def augmented(self, batch_size: int, seed: int) -> DataLoader:
        """Batches of augmented training images, new ones in each epoch."""
        return DataLoader(AugmentedEpochs(self.train, batch_size, seed), batch_size=None)


def rows_of(found: pictures.Images, sizes: tuple[int, int, int], seed: int, device: str) -> Rows:
    """Hold out validation images, drawn by the seed, and move all images to a device.

    Args:
        found: images and labels.
        sizes: at most so many images for training and validation, for validation alone, and test.
        seed: of the division.
        device: of the networks.
    """
    images, validation, test = sizes
    order = np.random.default_rng(derive_seed(seed, 0)).permutation(len(found.x))[:images]
    held_out, kept = order[:validation], order[validation:]

    def part(x: np.ndarray, y: np.ndarray) -> Part:
        labels = torch.from_numpy(y.astype(np.int64))
        return Part(pictures.as_inputs(x).to(device), labels.to(device))

    return Rows(
        part(found.x[kept], found.y[kept]),
        part(found.x[held_out], found.y[held_out]),
        part(found.x_new[:test], found.y_new[:test]),
    )


class AugmentedEpochs(IterableDataset):
    """Batches of images in random order, each shifted by up to 4 pixels and mirrored at random.

    An epoch is made at once, in a few operations on the device; a batch is a slice of it. Pixels
    that are shifted in have the mean colour.

    Args:
        part: images and classes.
        batch_size: images of a batch.
        seed: of order, shifts and mirror images; each epoch has new ones.
    """

    def __init__(self, part: Part, batch_size: int, seed: int) -> None:
        self.part, self.batch_size = part, batch_size
        self.padded = F.pad(part.x, (_PADDING,) * 4)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch."""
        x, y = self._epoch()
        yield from zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)

    def _epoch(self) -> tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"]]:
        device, (n, _, height, width) = self.part.x.device, self.part.x.shape
        order = torch.randperm(n, generator=self.generator)
        top, left = torch.randint(0, 2 * _PADDING + 1, (2, n, 1), generator=self.generator)
        mirrored = torch.rand(n, 1, generator=self.generator) < 0.5
        rows, columns = top + torch.arange(height), left + torch.arange(width)
        columns = torch.where(mirrored, columns.flip(1), columns)
        order, rows, columns = order.to(device), rows.to(device), columns.to(device)
        x = self.padded[order[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return x.permute(0, 3, 1, 2).contiguous(), self.part.y[order]

"""Data, networks and their training, as in a project that has never heard of posteriors.

Training uses torch alone: a fixed number of epochs, or early stopping on a tenth of the training
rows. Each network has a linear last layer; members of an ensemble differ in their seed alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss, pad

from experiments import images, table_defaults
from experiments.adapters_data import corpus_of
from experiments.datasets import find_file

__all__ = [
    "CLASSES",
    "DATASETS",
    "NUMBERS",
    "RECIPES",
    "Recipe",
    "Part",
    "Sets",
    "columns_of",
    "network_of",
    "sets_of",
    "shifted",
    "trained",
]

CLASSES = ("fashion_mnist", "cifar10", "digits", "phoneme", "dry_bean", "banking77")
"""Data sets with labels."""

NUMBERS = ("bike", "protein")
"""Data sets with a number as the target."""

DATASETS = CLASSES + NUMBERS

_SIZES = {
    "fashion_mnist": (6000, 1500, 5000),
    "cifar10": (6500, 1500, 3000),
    "digits": (1000, 330, 467),
    "phoneme": (2500, 700, 1309),
    "dry_bean": (3000, 1000, 5000),
    "banking77": (7500, 2000, 3080),
    "bike": (3000, 1000, 5000),
    "protein": (3000, 1000, 5000),
}
"""Training, validation and test rows."""

_OUTSIDE = 2000

Part = tuple[Tensor, Tensor]
Parts = tuple[Part, Part, Part]


@dataclass(frozen=True)
class Sets:
    """Inputs and targets of one seed.

    Attributes:
        train: training rows.
        validation: rows that no network is trained on.
        test: rows that nothing is chosen on.
        outside: inputs of another kind than the training rows.
    """

    train: Part
    validation: Part
    test: Part
    outside: Tensor


def sets_of(name: str, seed: int, data_dir: str | None, most: int | None = None) -> Sets:
    """Return the rows of a data set, split by a seed; at most `most` of each part."""
    make = _MAKERS.get(name, _table)
    sets = make(name, np.random.default_rng(seed), data_dir)
    if most is None:
        return sets

    def first(part: Part) -> Part:
        return part[0][:most], part[1][:most]

    return Sets(first(sets.train), first(sets.validation), first(sets.test), sets.outside[:most])


# --- data -----------------------------------------------------------------------------------------


def _split(x: Tensor, y: np.ndarray, name: str, rng: np.random.Generator) -> Parts:
    """Divide rows at random into training, validation and test rows."""
    order = rng.permutation(len(y))
    ends = np.cumsum(_SIZES[name])
    targets = torch.from_numpy(y.astype(np.float32 if name in NUMBERS else np.int64))
    rows = np.split(order[: ends[2]], ends[:2])
    train, validation, test = ((x[part], targets[part]) for part in rows)
    return train, validation, test


def _fashion_mnist(name: str, rng: np.random.Generator, data_dir: str | None) -> Sets:
    """Fashion-MNIST, and digits of MNIST outside."""
    data, other = images.load(name, data_dir), images.load("mnist", data_dir)
    rows = rng.permutation(len(data.y))[: sum(_SIZES[name])]
    parts = _split(images.as_inputs(data.x[rows]), data.y[rows], name, rng)
    return Sets(*parts, images.as_inputs(other.x_new[:_OUTSIDE]))


def _cifar10(name: str, rng: np.random.Generator, data_dir: str | None) -> Sets:
    """CIFAR-10, and photographs of skin lesions outside."""
    data = images.load(name, data_dir)
    x, y = np.concatenate([data.x, data.x_new]), np.concatenate([data.y, data.y_new])
    _, lesions = images.lesions(data_dir)
    return Sets(*_split(images.as_inputs(x), y, name, rng), images.as_inputs(lesions[:_OUTSIDE]))


def _digits(name: str, rng: np.random.Generator, data_dir: str | None) -> Sets:
    """Digits of 8 x 8 pixels, and reduced images of Fashion-MNIST outside."""
    x, y = load_digits(return_X_y=True)
    inputs = torch.from_numpy(x.astype(np.float32) / 8 - 1).reshape(-1, 1, 8, 8)
    other = images.as_inputs(images.load("fashion_mnist", data_dir).x_new[:_OUTSIDE])
    outside = avg_pool2d(pad(other, (2, 2, 2, 2), value=-1.0), 4)
    return Sets(*_split(inputs, y, name, rng), outside)


def _table(name: str, rng: np.random.Generator, data_dir: str | None) -> Sets:
    """Standardised columns; outside, test rows each of whose columns is shuffled."""
    x, y = columns_of(name, data_dir)
    train, validation, test = _split(torch.from_numpy(x.copy()), y, name, rng)
    center, scale = train[0].mean(0), train[0].std(0)
    scale[scale == 0] = 1.0
    mean, deviation = train[1].double().mean(), train[1].double().std()

    def standardised(part: Part) -> Part:
        x, y = part
        target = ((y - mean) / deviation).float()[:, None] if name in NUMBERS else y
        return ((x - center) / scale).float(), target

    inputs = standardised(test)[0][:_OUTSIDE]
    columns = [column[rng.permutation(len(inputs))] for column in inputs.T]
    outside = torch.stack(columns, 1)
    return Sets(standardised(train), standardised(validation), standardised(test), outside)


@cache
def columns_of(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return columns, and targets, of a table."""
    if name == "phoneme":
        with np.load(find_file("phoneme/phoneme.npz", data_dir), allow_pickle=False) as file:
            return file["X"].astype(np.float64), file["y"].astype(np.int64)
    frame, y = table_defaults.table(name, data_dir)
    if name in CLASSES:
        y = np.unique(y, return_inverse=True)[1]
    return frame.to_numpy(np.float64), np.asarray(y)


def _banking77(name: str, rng: np.random.Generator, data_dir: str | None) -> Sets:
    """Words that occur in at least two training texts; outside, texts of clinc150 out of scope."""
    texts = corpus_of(data_dir).texts[name]
    intents = sorted({intent for _, intent in texts.train})
    labels = {intent: i for i, intent in enumerate(intents)}
    known = [*texts.train, *texts.validation]
    order = rng.permutation(len(known))
    ends = np.cumsum(_SIZES[name][:2])
    train, validation = ([known[i] for i in rows] for rows in np.split(order[: ends[1]], ends[:1]))
    words = CountVectorizer(min_df=2, token_pattern=r"[a-z]+(?:'[a-z]+)?|[0-9]+|[?!]", binary=True)
    words.fit([text for text, _ in train])

    def inputs(of: list[str]) -> Tensor:
        return torch.from_numpy(words.transform(of).toarray().astype(np.float32))

    def part(labelled: list[tuple[str, str]]) -> Part:
        y = torch.tensor([labels[intent] for _, intent in labelled])
        return inputs([text for text, _ in labelled]), y

    return Sets(part(train), part(validation), part(texts.test), inputs(texts.outside))


_MAKERS: dict[str, Callable[..., Sets]] = {
    "fashion_mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "digits": _digits,
    "banking77": _banking77,
}


# --- shifts ---------------------------------------------------------------------------------------


def shifted(name: str, x: Tensor, seed: int) -> dict[str, Tensor]:
    """Return test inputs with noise, and images that are blurred or rotated too.

    Pixels get noise of a standard deviation of 0.15 (black is 0, white 1), a Gaussian blur of 1
    pixel (half a pixel for images of 8 x 8) and a rotation by 20 degrees; standardised columns get
    noise of a standard deviation of 0.5; texts lose each word with probability 0.3.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator)
    if name == "banking77":
        return {"words left out": x * (torch.rand(x.shape, generator=generator) > 0.3)}
    if x.ndim == 2:
        return {"noise": x + 0.5 * noise}
    scale = 4.0 if x.shape[1] == 3 else 2.0
    blur = 0.5 if x.shape[-1] == 8 else 1.0
    pixels = x.numpy()
    blurred = ndimage.gaussian_filter(pixels, (0, 0, blur, blur))
    rotated = ndimage.rotate(pixels, 20, (2, 3), reshape=False, order=1, mode="nearest")
    return {
        "noise": x + 0.15 * scale * noise,
        "blur": torch.from_numpy(blurred),
        "rotation": torch.from_numpy(rotated),
    }


# --- networks -------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x + two convolutions of it, with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_convolution(channels, channels), *_convolution(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return x + self.layers(x)


def _convolution(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def _perceptron(
    inputs: int, widths: tuple[int, ...], outputs: int, dropout: float
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def network_of(name: str, inputs: int = 0) -> nn.Sequential:
    """Return the untrained network of a data set.

    Args:
        name: of the data set.
        inputs: number of columns of a table or of words; not needed for images.
    """
    if name == "fashion_mnist":
        return nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1176, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip
    if name == "cifar10":
        return nn.Sequential(
            *_convolution(3, 16), nn.MaxPool2d(2),
            *_convolution(16, 32), nn.MaxPool2d(2),
            Residual(32), nn.MaxPool2d(2), *_convolution(32, 64),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
    if name == "digits":
        return nn.Sequential(
            *_convolution(1, 16), nn.MaxPool2d(2), *_convolution(16, 32),
            nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
    widths, outputs, dropout = {
        "phoneme": ((128, 64), 5, 0.2),
        "dry_bean": ((128, 64), 7, 0.0),
        "banking77": ((128,), 77, 0.5),
        "bike": ((64, 64), 1, 0.0),
        "protein": ((64, 64), 1, 0.0),
    }[name]
    return _perceptron(inputs, widths, outputs, dropout)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        epochs: number of passes, or the largest number with early stopping.
        optimiser: "adam" (AdamW) or "sgd" (momentum 0.9, Nesterov).
        rate: the learning rate.
        schedule: "cosine", where all epochs are run, or "constant".
        decay: weight decay.
        batch: rows of a batch.
        patience: epochs without a better loss on a tenth of the training rows; 0 for none, where
            all training rows are used for all epochs.
    """

    epochs: int
    optimiser: str = "adam"
    rate: float = 1e-3
    decay: float = 1e-4
    batch: int = 64
    patience: int = 0
    schedule: str = "cosine"


RECIPES = {
    "fashion_mnist": Recipe(12, rate=3e-3, batch=64, schedule="constant"),
    "cifar10": Recipe(10, "sgd", rate=0.1, decay=5e-4, batch=128),
    "digits": Recipe(30, batch=32),
    "phoneme": Recipe(100, patience=10, decay=1e-3),
    "dry_bean": Recipe(150, rate=2e-3, batch=128, schedule="constant"),
    "banking77": Recipe(60, rate=2e-3, batch=128, patience=5),
    "bike": Recipe(300, rate=2e-3, batch=128, patience=20),
    "protein": Recipe(300, rate=2e-3, batch=128, patience=20),
}
"""By data set."""


def trained(name: str, train: Part, seed: int, recipe: Recipe | None = None) -> nn.Sequential:
    """Return a network trained on rows, in evaluation mode; the same for the same seed."""
    recipe = recipe or RECIPES[name]
    x, y = train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = network_of(name, x.shape[-1])
        loss = mse_loss if name in NUMBERS else cross_entropy
        order = torch.randperm(len(y))
        held = len(y) // 10 if recipe.patience else 0
        _minimise(net, loss, (x, y), order[held:], order[:held], recipe)
    return net.eval()


def _minimise(
    net: nn.Module, loss: Any, rows: Part, part: Tensor, held: Tensor, recipe: Recipe
) -> None:
    """Train on a part of the rows; with held-out rows, keep the weights best on these."""
    x, y = rows
    if recipe.optimiser == "adam":
        steps: Any = torch.optim.AdamW(net.parameters(), recipe.rate, weight_decay=recipe.decay)
    else:
        steps = torch.optim.SGD(
            net.parameters(), recipe.rate, 0.9, weight_decay=recipe.decay, nesterov=True
        )
    batches = -(-len(part) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, recipe.epochs * batches)
    best, kept, waited = float("inf"), None, 0
    for _ in range(recipe.epochs):
        net.train()
        for rows_ in part[torch.randperm(len(part))].split(recipe.batch):
            steps.zero_grad()
            loss(net(x[rows_]), y[rows_]).backward()
            steps.step()
            if recipe.schedule == "cosine" and not len(held):
                schedule.step()
        if not len(held):
            continue
        net.eval()
        with torch.no_grad():
            value = float(loss(net(x[held]), y[held]))
        if value < best:
            best, kept, waited = value, copy.deepcopy(net.state_dict()), 0
        else:
            waited += 1
        if waited >= recipe.patience:
            break
    if kept is not None:
        net.load_state_dict(kept)

"""Settings and data of the toy regression, and measures of predicted curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from experiments.datasets import find_file
from experiments.store import Record
from subbayes import MLP
from subbayes.utils.seeding import derive_seed, fork_rng

FILE = "toy_regression/drbayes_data.npy"
CLUSTERS = ((-7.2, -4.8), (-1.2, 1.2), (4.8, 7.2))
GRID = np.linspace(-10, 10, 201)
SUBSPACES = ("random", "PCA", "curve")
ENGINES = ("ESS", "NUTS", "VI", "RealNVP")
BASELINES = ("SWAG", "full-space VI", "GP")
METHODS = (*(f"{s} + {e}" for s in SUBSPACES for e in ENGINES), *BASELINES)

PROCEDURE = 1
"""Increase it when a change of the code changes the results of the same settings."""

Array = np.ndarray


@dataclass(frozen=True)
class Plan:
    """Settings; those of the training are from the authors' notebook, the others are ours.

    Attributes:
        hidden: widths of the hidden layers.
        epochs: epochs of SGD to each of the two solutions.
        path_epochs: epochs of weight averaging after them, at the same constant rate.
        learning_rate: learning rate of SGD on half the squared error.
        momentum: momentum of SGD.
        batch_size: rows per step.
        snapshots: number of evenly spaced snapshots, which span the PCA subspace.
        curve_epochs: epochs of the curve between the two solutions.
        rank: rank of the random and the PCA subspace.
        swag_scale: factor of SWAG's covariance, as in the authors' notebook.
        temperature: T of all posteriors; by default N / K, the default of the authors' scripts.
        chains: number of chains of the samplers.
        draws: draws per chain, after as many of warm-up (NUTS: a quarter of both).
        vi_steps: steps of the variational fits.
        full_prior: scale of the prior of all weights, for variational inference over them.
        full_steps: steps of that fit.
        full_samples: draws per step of that fit.
        noise: standard deviation of the noise of a synthetic data set ("twin").
    """

    hidden: tuple[int, ...] = (200, 50, 50, 50)
    epochs: int = 2000
    path_epochs: int = 1000
    learning_rate: float = 1e-2
    momentum: float = 0.95
    batch_size: int = 50
    snapshots: int = 20
    curve_epochs: int = 2000
    rank: int = 10
    swag_scale: float = 10.0
    temperature: float = 40.0
    chains: int = 4
    draws: int = 400
    vi_steps: int = 2000
    full_prior: float = 1.0
    full_steps: int = 3000
    full_samples: int = 2
    noise: float = 0.05


@dataclass(frozen=True)
class Points:
    """Observations, and the true function on the grid if it is known."""

    name: str
    x: Array
    y: Array
    truth: Array | None = None

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs of the network, and targets."""
        return features(self.x), torch.tensor(self.y, dtype=torch.float32)


def features(x: Array) -> Tensor:
    """Return the two inputs of the network, (x / 2, (x / 2)^2)."""
    half = torch.tensor(x, dtype=torch.float32) / 2
    return torch.stack([half, half**2], 1)


def paper_points(data_dir: str | None) -> Points:
    """Return the authors' 400 points, whose true function is not published."""
    table = np.load(find_file(FILE, data_dir), allow_pickle=False)
    return Points("paper", table[:, 0], table[:, 1])


def twin(seed: int, like: Points, plan: Plan) -> Points:
    """Return synthetic data at the same inputs, from a network with random weights.

    Weights are N(0, 2 / fan-in), biases N(0, 0.1^2); the function is shifted and scaled to the
    mean and the standard deviation of the paper's targets.
    """
    module = MLP(2, plan.hidden, 1, seed=derive_seed(seed, 0))
    with fork_rng(derive_seed(seed, 1)), torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * ((2 / p.shape[1]) ** 0.5 if p.ndim == 2 else 0.1))
        f, grid = (module(features(at))[:, 0].double().numpy() for at in (like.x, GRID))
    scale, shift = like.y.std() / f.std(), like.y.mean()
    noise = plan.noise * np.random.default_rng([seed, 2]).standard_normal(len(f))
    return Points(
        f"twin {seed}",
        like.x,
        shift + scale * (f - f.mean()) + noise,
        shift + scale * (grid - f.mean()),
    )


def regions() -> dict[str, Array]:
    """Return masks of the grid: near the data, in the two gaps, and beyond the data."""
    near = np.any([(low <= GRID) & (high >= GRID) for low, high in CLUSTERS], 0)
    beyond = np.abs(GRID) > CLUSTERS[-1][1]
    return {"near": near, "gaps": ~near & ~beyond, "beyond": beyond}


def summary(curves: Array, points: Points, noise: float) -> Record:
    """Return the epistemic uncertainty by region, the error at the data, and the coverage."""
    mean, sd = curves.mean(0), curves.std(0)
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    fit = np.interp(points.x, GRID, mean)
    found: Record = {"rmse": float(np.sqrt(np.mean((points.y - fit) ** 2))), "noise": noise}
    found |= {f"sd {name}": float(sd[mask].mean()) for name, mask in regions().items()}
    for name in ("gaps", "beyond"):
        found[f"growth {name}"] = found[f"sd {name}"] / found["sd near"]
    if points.truth is not None:
        inside = (low <= points.truth) & (points.truth <= high)
        found |= {
            f"coverage {name}": float(inside[mask].mean()) for name, mask in regions().items()
        }
    return found

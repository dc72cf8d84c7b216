"""RealNVP (Dinh et al. 2017) on top of a Gaussian, through zuko."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call

from subbayes.checks import fail
from subbayes.inference.gaussians import FullRank, Placed
from subbayes.seeding import forked

__all__ = ["Flow", "check_flow", "load_zuko"]

Rows = Float[np.ndarray, "S k"]
TRANSFORMS, HIDDEN = 4, (32, 32)


def load_zuko() -> Any:
    """The package zuko, without its side effect: it turns torch's argument checks off.

    Raises:
        ImportError: if it is not installed.
    """
    validates = Distribution._validate_args
    try:
        import zuko
    except ImportError as error:
        raise ImportError("realnvp needs the package zuko: pip install 'subbayes[flows]'"
                          ) from error
    finally:
        Distribution.set_default_validate_args(validates)
    return zuko


def check_flow(rank: int) -> None:
    """Raise where no flow can be made.

    Raises:
        InputError: rank 1, where there is nothing to couple.
        ImportError: if zuko is not installed.
    """
    if rank < 2:
        fail("posterior", "at least 2 coordinates for realnvp", rank,
             "Use family='full-rank', or raise the rank")
    load_zuko()


class _Couplings(nn.Module):
    """Affine coupling layers that start as the identity, as a map with its log determinant."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        flow = load_zuko().flows.RealNVP(rank, transforms=TRANSFORMS, hidden_features=HIDDEN,
                                         activation=nn.SiLU)
        self.transform = flow.transform
        for layer in self.transform.modules():
            if hasattr(layer, "hyper"):
                nn.init.zeros_(layer.hyper[-1].weight)
                nn.init.zeros_(layer.hyper[-1].bias)

        self.names, parameters = zip(*self.named_parameters(), strict=True)
        self.shapes = [p.shape for p in parameters]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters out of one vector."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {name: part.view(shape)
                for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def forward(self, rows: Tensor, inverse: bool) -> tuple[Tensor, ...]:
        """From x (S, k) to noise, with the log determinant; the other way without it."""
        transform = self.transform()
        return (transform.inv(rows),) if inverse else transform.call_and_ladj(rows)


@dataclass(frozen=True)
class Flow:
    r"""$z = m + L\, T_w^{-1}(\epsilon)$ with coupling layers T in the frame of a Gaussian.

    Attributes:
        frame: the Gaussian, whose mean and factor are m and L.
        couplings: the layers.
        weights: theirs, flat, shape (p,).
    """

    frame: FullRank
    couplings: Any
    weights: Float[np.ndarray, "p"]

    @classmethod
    def on(cls, frame: FullRank, seed: int) -> Flow:
        """The Gaussian itself, with layers that are the identity."""
        with forked(seed):
            couplings = _Couplings(frame.rank).double()
        weights = nn.utils.parameters_to_vector(couplings.parameters()).detach().numpy()
        return cls(frame, couplings.requires_grad_(False), weights)

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.frame.rank

    def _run(self, weights: Tensor, rows: Tensor, inverse: bool) -> Any:
        """The couplings with given weights."""
        return functional_call(self.couplings, self.couplings.named(weights), (rows, inverse))

    def _log_q(self, weights: Tensor, x: Tensor) -> Tensor:
        """Log density in the frame of the Gaussian."""
        eps, volume = self._run(weights, x, False)
        constant = 0.5 * self.rank * float(np.log(2 * np.pi))
        return -0.5 * eps.square().sum(-1) - constant + volume

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Log density of coordinates (S, k)."""
        with torch.no_grad():
            x = torch.from_numpy(np.ascontiguousarray(self.frame.centred(z)))
            inside = self._log_q(torch.from_numpy(self.weights), x)
        return inside.numpy() - self.frame.log_volume()

    def place(self, eps: Rows) -> Placed:
        """z at standard normal draws, log q there, and what turns slopes into an ascent step.

        The step is the path derivative: the score of q at fixed weights is taken off the slope.
        """
        with torch.enable_grad():
            weights = torch.from_numpy(self.weights).requires_grad_()
            x, = self._run(weights, torch.from_numpy(eps), True)
            point = x.detach().requires_grad_()
            log_q = self._log_q(weights.detach(), point)
            score, = torch.autograd.grad(log_q.sum(), point)

        z = self.frame.pushed(point.detach().numpy())
        return (z, log_q.detach().numpy() - self.frame.log_volume(),
                partial(self._pull, weights, x, score))

    def _pull(
        self, weights: Tensor, x: Tensor, score: Tensor, slope: Rows
    ) -> Float[np.ndarray, "p"]:
        a = torch.from_numpy(slope @ self.frame.factor) - score
        return torch.autograd.grad(x, weights, a / len(a))[0].numpy()

    def moved(self, step: Float[np.ndarray, "p"]) -> Flow:
        """With weights a step further."""
        return self.like(self.weights + step)

    def numbers(self) -> Float[np.ndarray, "p"]:
        """The weights."""
        return self.weights

    def like(self, numbers: Float[np.ndarray, "p"]) -> Flow:
        """The same layers with other weights."""
        return Flow(self.frame, self.couplings, numbers)

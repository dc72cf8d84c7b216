"""RealNVP (Dinh et al. 2017) on top of a Gaussian, through zuko."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from subbayes.inference.variational.gaussians import FullRank, Placed
from subbayes.networks.global_state import keep_argument_validation
from subbayes.networks.tracing.tracer import Tracer
from subbayes.utils.checks import fail
from subbayes.utils.seeding import fork_rng

__all__ = ["Flow", "check_flow", "load_zuko"]

Rows = Float[np.ndarray, "S k"]
TRANSFORMS, HIDDEN = 4, (32, 32)
_TRACED_AFTER = 50  # steps: graphs take as long to make as 200 steps without


def load_zuko() -> Any:
    """The package zuko, without its side effect: it turns torch's argument checks off.

    Raises:
        ImportError: if it is not installed.
    """
    with keep_argument_validation():
        try:
            import zuko
        except ImportError as error:
            raise ImportError(
                "realnvp needs the package zuko: pip install 'subbayes[flows]'"
            ) from error
    return zuko


def check_flow(rank: int) -> None:
    """Raise where no flow can be made.

    Raises:
        InputError: rank 1, where there is nothing to couple.
        ImportError: if zuko is not installed.
    """
    if rank < 2:
        fail(
            "posterior",
            "at least 2 coordinates for realnvp",
            rank,
            "Use FullRankVI, or raise the rank",
        )
    load_zuko()


class _Couplings(nn.Module):
    """Affine coupling layers that start as the identity, as a map with its log determinant."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        flow = load_zuko().flows.RealNVP(
            rank, transforms=TRANSFORMS, hidden_features=HIDDEN, activation=nn.SiLU
        )
        self.transform = flow.transform
        for layer in self.transform.modules():
            if hasattr(layer, "hyper"):
                nn.init.zeros_(layer.hyper[-1].weight)
                nn.init.zeros_(layer.hyper[-1].bias)

        self.names, parameters = zip(*self.named_parameters(), strict=True)
        self.shapes = [p.shape for p in parameters]
        self.forward_pass = Tracer(self.placed, "the flow", traced_after=_TRACED_AFTER)
        self.backward_pass = Tracer(self.pulled, "the flow", traced_after=_TRACED_AFTER)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters out of one vector."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def forward(self, rows: Tensor, inverse: bool) -> tuple[Tensor, ...]:
        """From x (S, k) to noise, with the log determinant; the other way without it."""
        transform = self.transform()
        return (transform.inv(rows),) if inverse else transform.call_and_ladj(rows)

    def x(self, weights: Tensor, eps: Tensor) -> Tensor:
        """Where noise lands."""
        (x,) = functional_call(self, self.named(weights), (eps, True))
        return x

    def log_q(self, weights: Tensor, x: Tensor) -> Tensor:
        """Log density."""
        eps, volume = functional_call(self, self.named(weights), (x, False))
        constant = 0.5 * x.shape[-1] * math.log(2 * math.pi)
        return -0.5 * eps.square().sum(-1) - constant + volume

    def placed(self, weights: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where noise lands, log density and its gradient there."""

        def total(x: Tensor) -> tuple[Tensor, Tensor]:
            log_q = self.log_q(weights, x)
            return log_q.sum(), log_q

        x = self.x(weights, eps)
        score, (_, log_q) = torch.func.grad_and_value(total, has_aux=True)(x)
        return x, log_q, score

    def pulled(self, weights: Tensor, eps: Tensor, slope: Tensor) -> Tensor:
        """Gradient in the weights of x . slope."""
        pull = torch.func.vjp(lambda w: self.x(w, eps), weights)[1]
        return pull(slope)[0]


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
        with fork_rng(seed):
            couplings = _Couplings(frame.rank).double()
        weights = nn.utils.parameters_to_vector(couplings.parameters()).detach().numpy()
        return cls(frame, couplings.requires_grad_(False), weights)

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.frame.rank

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Log density of coordinates (S, k)."""
        with torch.no_grad():
            x = torch.from_numpy(np.ascontiguousarray(self.frame.centred(z)))
            inside = self.couplings.log_q(torch.from_numpy(self.weights), x)
        return inside.numpy() - self.frame.log_volume()

    def reparameterise(self, eps: Rows) -> Placed:
        """z at standard normal draws, log q there, and what turns slopes into an ascent step.

        The step is the path derivative: the score of q at fixed weights is taken off the slope.
        """
        given = torch.from_numpy(self.weights), torch.from_numpy(eps)
        with torch.no_grad():
            x, log_q, score = self.couplings.forward_pass(*given)
        return (
            self.frame.pushed(x.numpy()),
            log_q.numpy() - self.frame.log_volume(),
            partial(self._pull, given, score),
        )

    def _pull(
        self, given: tuple[Tensor, Tensor], score: Tensor, slope: Rows
    ) -> Float[np.ndarray, "p"]:
        a = torch.from_numpy(slope @ self.frame.factor) - score
        with torch.no_grad():
            pulled: Tensor = self.couplings.backward_pass(*given, a / len(a))
        return pulled.numpy()

    def stepped(self, step: Float[np.ndarray, "p"]) -> Flow:
        """With weights a step further."""
        return self.with_parameters(self.weights + step)

    def parameters_vector(self) -> Float[np.ndarray, "p"]:
        """The weights."""
        return self.weights

    def with_parameters(self, parameters_vector: Float[np.ndarray, "p"]) -> Flow:
        """The same layers with other weights."""
        return Flow(self.frame, self.couplings, parameters_vector)

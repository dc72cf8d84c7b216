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

from subbayes.inference.variational.gaussians import FullRank, Reparameterised
from subbayes.networks.global_state import keep_argument_validation
from subbayes.networks.tracing.tracer import Tracer
from subbayes.utils.checks import MissingPackageError, fail
from subbayes.utils.seeding import fork_rng

Rows = Float[np.ndarray, "S k"]
TRANSFORMS, HIDDEN = 4, (32, 32)
_TRACED_AFTER = 50  # steps; tracing takes as long as 200 untraced steps


def load_zuko() -> Any:
    """Import zuko without its side effect of disabling torch's argument validation.

    Raises:
        ImportError: zuko is not installed.
    """
    with keep_argument_validation():
        try:
            import zuko
        except ImportError as error:
            raise MissingPackageError(
                "realnvp needs the package zuko: pip install 'subbayes[flows]'"
            ) from error
    return zuko


def check_flow(rank: int) -> None:
    """Check that a flow can be built.

    Raises:
        InputError: fewer than 2 coordinates, which cannot be coupled.
        ImportError: zuko is not installed.
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
    """Affine coupling layers, initialised to the identity."""

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
        self.forward_pass = Tracer(self.sample_and_score, "the flow", traced_after=_TRACED_AFTER)
        self.backward_pass = Tracer(self.weight_gradient, "the flow", traced_after=_TRACED_AFTER)

    def parameter_dict(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes])
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def forward(self, rows: Tensor, inverse: bool) -> tuple[Tensor, ...]:
        """Noise and log determinant at x (S, k), or x at noise."""
        transform = self.transform()
        return (transform.inv(rows),) if inverse else transform.call_and_ladj(rows)

    def x(self, weights: Tensor, eps: Tensor) -> Tensor:
        (x,) = functional_call(self, self.parameter_dict(weights), (eps, True))
        return x

    def log_q(self, weights: Tensor, x: Tensor) -> Tensor:
        eps, volume = functional_call(self, self.parameter_dict(weights), (x, False))
        constant = 0.5 * x.shape[-1] * math.log(2 * math.pi)
        return -0.5 * eps.square().sum(-1) - constant + volume

    def sample_and_score(self, weights: Tensor, eps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x at noise, and log q and its gradient in x there."""

        def total(x: Tensor) -> tuple[Tensor, Tensor]:
            log_q = self.log_q(weights, x)
            return log_q.sum(), log_q

        x = self.x(weights, eps)
        score, (_, log_q) = torch.func.grad_and_value(total, has_aux=True)(x)
        return x, log_q, score

    def weight_gradient(self, weights: Tensor, eps: Tensor, slope: Tensor) -> Tensor:
        """Gradient of x . slope in the weights."""
        return torch.func.vjp(lambda w: self.x(w, eps), weights)[1](slope)[0]


@dataclass(frozen=True)
class Flow:
    r"""$z = m + L\, T_w^{-1}(\epsilon)$ with coupling layers T.

    Attributes:
        base: the Gaussian with mean m and factor L.
        couplings: the layers.
        weights: flat weights of the layers, shape (p,).
    """

    base: FullRank
    couplings: Any
    weights: Float[np.ndarray, "p"]

    @classmethod
    def identity(cls, base: FullRank, seed: int) -> Flow:
        """The Gaussian itself, with layers initialised to the identity."""
        with fork_rng(seed):
            couplings = _Couplings(base.rank).double()
        weights = nn.utils.parameters_to_vector(couplings.parameters()).detach().numpy()
        return cls(base, couplings.requires_grad_(False), weights)

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.base.rank

    def moments(self) -> None:
        """Unknown."""

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Log density of coordinates (S, k)."""
        with torch.no_grad():
            x = torch.from_numpy(np.ascontiguousarray(self.base.standardise(z)))
            inside = self.couplings.log_q(torch.from_numpy(self.weights), x)
        return inside.numpy() - self.base.log_volume()

    def reparameterise(self, eps: Rows) -> Reparameterised:
        """See `Family.reparameterise`; the score of q is subtracted from the slopes."""
        given = torch.from_numpy(self.weights), torch.from_numpy(eps)
        with torch.no_grad():
            x, log_q, score = self.couplings.forward_pass(*given)
        return (
            self.base.transform(x.numpy()),
            log_q.numpy() - self.base.log_volume(),
            partial(self._gradient, given, score),
        )

    def _gradient(
        self, given: tuple[Tensor, Tensor], score: Tensor, slope: Rows
    ) -> Float[np.ndarray, "p"]:
        a = torch.from_numpy(slope @ self.base.factor) - score
        with torch.no_grad():
            gradient: Tensor = self.couplings.backward_pass(*given, a / len(a))
        return gradient.numpy()

    def with_step(self, step: Float[np.ndarray, "p"]) -> Flow:
        """The same layers after a step of the weights."""
        return self.with_parameters(self.weights + step)

    def parameters_vector(self) -> Float[np.ndarray, "p"]:
        """The weights."""
        return self.weights

    def with_parameters(self, parameters_vector: Float[np.ndarray, "p"]) -> Flow:
        """The same layers with other weights."""
        return Flow(self.base, self.couplings, parameters_vector)

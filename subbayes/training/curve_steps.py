"""A curve in training: its control points, and the steps of a network at places on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.subspaces.curve import Curve, CurveKind, coefficients
from subbayes.training.configuration import Training
from subbayes.training.minibatches import Feed, inner
from subbayes.training.optimizer import make_optimizer
from subbayes.training.trainer import Run
from subbayes.utils.checks import check_positive, fail, fail_type
from subbayes.utils.types import Inputs, Targets

__all__ = ["ControlPoints", "CurveRun", "ExtraParameters"]

Join = Callable[[Tensor, Mapping[str, Tensor], Inputs], Tensor]

_AHEAD = 256  # places drawn at a time
_SCRATCH = 2**23  # entries of the control points' gradients that are made at a time
_PLACES = (0.5, 0.1, 0.3, 0.7, 0.9)  # where held-out data are looked at
_SMALL = 2**16  # weights of a network that is called at all places at once


class ControlPoints:
    """Control points in training: some held fixed, the others in blocks of columns.

    The gradient of a block is the outer product of the coefficients and a piece of the point's
    gradient, made when its optimiser steps, in memory that all blocks share: one block of all
    columns for a small network, many for a large one. (Blocks of 32 MiB: the C library gives
    those back to the system when they are freed.)
    """

    def __init__(
        self,
        like: Float[Tensor, "D"],
        count: int,
        fixed: Sequence[int],
        kind: CurveKind,
        training: Training,
    ) -> None:
        self.kind, self.count = kind, count
        self.fixed = list(fixed)
        self.trained = [i for i in range(count) if i not in fixed]
        self.held = like.new_empty(len(self.fixed), len(like))
        width = min(max(_SCRATCH // len(self.trained), 1), len(like))
        self.widths = [min(width, len(like) - at) for at in range(0, len(like), width)]
        self.blocks = [nn.Parameter(like.new_empty(len(self.trained), w)) for w in self.widths]
        self.scratch = like.new_empty(len(self.trained) * self.widths[0])
        none = nn.Parameter(like.new_empty(0))
        self.optimizers = [make_optimizer({"points": b}, none, training, 0.0) for b in self.blocks]

    @torch.no_grad()
    def write(self, i: int, weights: Float[Tensor, "D"]) -> None:
        """Put control point i somewhere."""
        if i in self.fixed:
            self.held[self.fixed.index(i)] = weights
            return
        for block, part in zip(self.blocks, weights.split(self.widths), strict=True):
            block[self.trained.index(i)] = part

    def coefficients(self, t: Float[Tensor, "S"]) -> list[tuple[Tensor, Tensor]]:
        """For each t the weights of the points that move, and of those that are fixed."""
        c = coefficients(t, self.count, self.kind).to(self.held)
        return list(zip(c[:, self.trained], c[:, self.fixed], strict=True))

    @torch.no_grad()
    def at(self, c: tuple[Tensor, Tensor]) -> Float[Tensor, "D"]:
        """The point with these coefficients."""
        parts = [c[0] @ block for block in self.blocks]
        point = torch.cat(parts) if len(parts) > 1 else parts[0]
        return point.addmv_(self.held.T, c[1]) if self.fixed else point

    def step(self, c: tuple[Tensor, Tensor], gradient: Float[Tensor, "D"]) -> None:
        """Move the control points along c_i g."""
        pieces = gradient.split(self.widths)
        for block, optimizer, g in zip(self.blocks, self.optimizers, pieces, strict=True):
            block.grad = self.scratch[: block.numel()].view_as(block)
            torch.outer(c[0], g, out=block.grad)
            optimizer.step()
            block.grad = None

    @torch.no_grad()
    def points(self) -> Float[Tensor, "m D"]:
        """A copy of all control points, in order."""
        points = self.held.new_empty(self.count, sum(self.widths))
        points[self.fixed] = self.held
        start = 0
        for block, width in zip(self.blocks, self.widths, strict=True):
            for row, i in zip(block, self.trained, strict=True):
                points[i, start : start + width] = row
            start += width
        return points

    def curve(self) -> Curve:
        """The curve as it is now."""
        return Curve(self.points(), self.kind)


@dataclass(frozen=True)
class ExtraParameters:
    r"""Tensors that are learned with a curve but do not lie on it, such as structured effects.

    Attributes:
        tensors: initial values by name.
        join: a function (outputs, tensors, inputs) that returns the outputs that the likelihood
            receives.
        prior_scale: s of the prior $N(0, s^2 I)$ of the tensors; None for a flat prior.

    Raises:
        InputError: no tensors, or a scale that is not positive.
    """

    tensors: Mapping[str, Tensor]
    join: Join
    prior_scale: float | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            fail("extra", "at least one tensor to learn", "none")
        if not callable(self.join):
            fail_type("join", "a function of (outputs, tensors, inputs)", self.join)
        if self.prior_scale is not None:
            check_positive("prior_scale", self.prior_scale)


class CurveRun(Run):
    """A curve in training: the steps of a module, each at another point of the curve."""

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        feed: Feed,
        training: Training,
        control: ControlPoints,
        raw: Tensor | None,
        extra: ExtraParameters | None,
        seed: int,
    ) -> None:
        self.network, self.feed, self.likelihood = network, feed, likelihood
        self.training = training
        self.inner, self.control = inner(likelihood), control
        self.join = None if extra is None else extra.join
        self.decay = training.weight_decay_for(feed.n)
        scale = None if extra is None else extra.prior_scale
        self.decay_along = 0.0 if scale is None else 1 / (scale**2 * feed.n)
        self.module = network.module_with().train().requires_grad_(False)
        begin = feed.raw if raw is None or raw.shape != feed.raw.shape else raw
        self.raw = nn.Parameter(begin.to(feed.raw, copy=True))
        self.extra = {
            name: nn.Parameter(tensor.detach().to(feed.device, copy=True))
            for name, tensor in ({} if extra is None else extra.tensors).items()
        }
        self.along = [*self.extra.values(), *([self.raw] if self.raw.numel() else [])]
        own = [make_optimizer(self.extra, self.raw, training, 0.0)] if self.along else []
        self.own = own
        self.optimizers = [*own, *control.optimizers]
        self.moving = self.extra | {f"block {i}": b for i, b in enumerate(control.blocks)}
        self.places = self._drawn(torch.Generator().manual_seed(seed))

    def _drawn(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Coefficients at t ~ U(0, 1), one after another."""
        while True:
            yield from self.control.coefficients(
                torch.rand(_AHEAD, generator=generator, dtype=torch.float64)
            )

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """One step at t ~ U(0, 1); the loss stays on the device."""
        c = next(self.places)
        weights = self.control.at(c).requires_grad_()
        outputs = self.joined(self.network.call(self.module, inputs, weights), inputs)
        loss = -self.inner.with_parameters(self.raw).log_prob(outputs, y).mean()
        for parameter in self.along:
            parameter.grad = None
        loss.backward()
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_([weights, *self.along], self.training.clip_norm)
        gradient = weights.grad
        assert gradient is not None
        if self.decay:
            gradient.add_(weights.detach(), alpha=self.decay)
        if self.decay_along:
            for parameter in self.extra.values():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=self.decay_along)
        self.control.step(c, gradient)
        for optimizer in self.own:
            optimizer.step()
        return loss.detach()

    def settle(self) -> None:
        """Give the optimisers' memory back."""
        self.optimizers = self.control.optimizers = []
        self.control.scratch = self.control.scratch[:0].clone()

    def joined(self, outputs: Tensor, inputs: Inputs) -> Tensor:
        """Outputs as the likelihood sees them."""
        return outputs if self.join is None else self.join(outputs, self.extra, inputs)

    def network_at(self, t: float) -> Network:
        """The network at t, with BatchNorm statistics of its own."""
        weights = self.control.at(*self.control.coefficients(torch.tensor([t])))
        if not self.feed.normalises:
            return self.network.with_weights(weights)
        here = self.network.with_buffers(dict(self.module.named_buffers()))
        return here.refresh_batchnorm(weights, self.feed.in_order())

    def mean_log_likelihood(self, data: Data) -> float:
        """Mean log-likelihood of held-out data over places on the curve."""
        likelihood, total = self.likelihood.with_parameters(self.raw.detach()), 0.0
        places = _PLACES if self.control.count > 1 else _PLACES[:1]
        with torch.no_grad():
            looks = self._looks(places)
            for inputs, y in data.batches(4096):
                inputs, y = to_device(inputs, self.feed.device), to_device(y, self.feed.device)
                for outputs in looks(inputs):
                    terms = likelihood.log_prob(self.joined(outputs, inputs), y)
                    total += float(terms.double().sum())
        return total / (data.n * len(places))

    def _looks(self, places: Sequence[float]) -> Callable[[Inputs], Iterable[Tensor]]:
        """A function from inputs to the outputs of the networks at some places.

        Small networks are called together: their calls cost more than their sums.
        """
        if self.feed.normalises:
            networks = [self.network_at(t) for t in places]
            return lambda x: (network(network.weights, x) for network in networks)
        points = [self.control.at(c) for c in self.control.coefficients(torch.tensor(places))]
        if self.network.size > _SMALL:
            return lambda x: (self.network(point, x) for point in points)
        rows = torch.stack(points)
        return lambda x: self.network.batched(rows, x)

    def state(self) -> Any:
        """A copy of all that moves."""
        return {n: p.detach().clone() for n, p in self.moving.items()}, self.raw.detach().clone()

    def restore(self, state: Any) -> None:
        """Go back to a copy."""
        for name, parameter in self.moving.items():
            parameter.data.copy_(state[0][name])
        self.raw.data.copy_(state[1])

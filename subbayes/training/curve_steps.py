"""Control points of a curve that is trained, and its steps at places on the curve."""

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
from subbayes.subspaces.curve import CurveKind, WeightCurve, coefficients
from subbayes.training.configuration import Training
from subbayes.training.loop import Trainable
from subbayes.training.minibatches import Minibatches, batch_likelihood
from subbayes.training.optimizer import make_optimizer
from subbayes.utils.checks import check_positive, fail, fail_type, is_finite
from subbayes.utils.types import Inputs, Targets

__all__ = ["ControlPoints", "ExtraParameters", "TrainableCurve"]

Join = Callable[[Tensor, Mapping[str, Tensor], Inputs], Tensor]

_PLACES_PER_DRAW = 256
_BUFFER_SIZE = 2**23  # entries of the control points' gradients that are computed at a time
_EVALUATED_PLACES = (0.5, 0.1, 0.3, 0.7, 0.9)  # t at which held-out data are evaluated
_SMALL_NETWORK = 2**16  # weights; smaller networks are called at all places at once


class ControlPoints:
    """Control points of a curve: some are fixed, the others are trained in blocks of columns.

    The gradient of a block is the outer product of the coefficients and a part of the gradient at
    the point. It is computed when the optimiser of the block makes its step, in memory that all
    blocks share: one block of all columns for a small network, several for a large one. Blocks are
    of 32 MiB, because the C library returns memory of this size to the system when it is freed.

    Args:
        like: a weight vector of the dtype and device to use.
        count: number of control points.
        fixed: indices of those that are not trained.
        kind: "bezier" or "polygon".
        training: settings of the optimiser.
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
        self.trainable_points = [i for i in range(count) if i not in fixed]
        self.fixed_points = like.new_empty(len(self.fixed), len(like))
        width = min(max(_BUFFER_SIZE // len(self.trainable_points), 1), len(like))
        self.widths = [min(width, len(like) - at) for at in range(0, len(like), width)]
        self.blocks = [
            nn.Parameter(like.new_empty(len(self.trainable_points), w)) for w in self.widths
        ]
        self.gradient_buffer = like.new_empty(len(self.trainable_points) * self.widths[0])
        none = nn.Parameter(like.new_empty(0))
        self.optimizers = [make_optimizer({"points": b}, none, training, 0.0) for b in self.blocks]

    @torch.no_grad()
    def set_point(self, i: int, weights: Float[Tensor, "D"]) -> None:
        """Set control point i."""
        if i in self.fixed:
            self.fixed_points[self.fixed.index(i)] = weights
            return
        for block, part in zip(self.blocks, weights.split(self.widths), strict=True):
            block[self.trainable_points.index(i)] = part

    def coefficients(self, t: Float[Tensor, "S"]) -> list[tuple[Tensor, Tensor]]:
        """For each t, the coefficients of the trained points and those of the fixed points."""
        c = coefficients(t, self.count, self.kind).to(self.fixed_points)
        return list(zip(c[:, self.trainable_points], c[:, self.fixed], strict=True))

    @torch.no_grad()
    def point(self, c: tuple[Tensor, Tensor]) -> Float[Tensor, "D"]:
        """The point of the curve with these coefficients."""
        parts = [c[0] @ block for block in self.blocks]
        point = torch.cat(parts) if len(parts) > 1 else parts[0]
        return point.addmv_(self.fixed_points.T, c[1]) if self.fixed else point

    def step(self, c: tuple[Tensor, Tensor], gradient: Float[Tensor, "D"]) -> None:
        """Make one step of each trained point with its gradient c_i g."""
        pieces = gradient.split(self.widths)
        for block, optimizer, g in zip(self.blocks, self.optimizers, pieces, strict=True):
            block.grad = self.gradient_buffer[: block.numel()].view_as(block)
            torch.outer(c[0], g, out=block.grad)
            optimizer.step()
            block.grad = None

    @torch.no_grad()
    def points(self) -> Float[Tensor, "m D"]:
        """A copy of all control points, in order."""
        points = self.fixed_points.new_empty(self.count, sum(self.widths))
        points[self.fixed] = self.fixed_points
        start = 0
        for block, width in zip(self.blocks, self.widths, strict=True):
            for row, i in zip(block, self.trainable_points, strict=True):
                points[i, start : start + width] = row
            start += width
        return points

    def curve(self) -> WeightCurve:
        """The current curve."""
        return WeightCurve(self.points(), self.kind)


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


class TrainableCurve(Trainable):
    """A curve that is trained at a new place t in each step.

    Args:
        network: the network whose weights lie on the curve.
        likelihood: p(y | f).
        minibatches: the training data.
        training: settings.
        control: the control points.
        held_out: data to evaluate after each epoch.
        likelihood_parameters: initial unconstrained parameters of the likelihood.
        extra: tensors learned with the curve.
        seed: seed of the places.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        minibatches: Minibatches,
        training: Training,
        control: ControlPoints,
        *,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
        extra: ExtraParameters | None = None,
        seed: int = 0,
    ) -> None:
        minibatches.check_held_out(held_out)
        self.network, self.minibatches, self.likelihood = network, minibatches, likelihood
        self.training, self.held_out, self.likelihoods = training, held_out, [likelihood]
        self.batch_likelihood, self.control = batch_likelihood(likelihood), control
        self.join = None if extra is None else extra.join
        self.decay = training.weight_decay_for(minibatches.n)
        scale = None if extra is None else extra.prior_scale
        self.extra_decay = 0.0 if scale is None else 1 / (scale**2 * minibatches.n)
        self.module = network.module_with().train().requires_grad_(False)
        self.unconstrained = nn.Parameter(minibatches.start_parameters(likelihood_parameters))
        self.extra = {
            name: nn.Parameter(tensor.detach().to(minibatches.device, copy=True))
            for name, tensor in ({} if extra is None else extra.tensors).items()
        }
        self.off_curve = [
            *self.extra.values(),
            *([self.unconstrained] if self.unconstrained.numel() else []),
        ]
        self.own_optimizers = (
            [make_optimizer(self.extra, self.unconstrained, training, 0.0)]
            if self.off_curve
            else []
        )
        self.optimizers = [*self.own_optimizers, *control.optimizers]
        self.trainable = self.extra | {f"block {i}": b for i, b in enumerate(control.blocks)}
        self.places = self._draw_places(torch.Generator().manual_seed(seed))

    def batches(self) -> Iterator[tuple[Inputs, Targets]]:
        """The minibatches of one epoch."""
        return self.minibatches.shuffled()

    def _draw_places(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Coefficients at t ~ U(0, 1), without end."""
        while True:
            yield from self.control.coefficients(
                torch.rand(_PLACES_PER_DRAW, generator=generator, dtype=torch.float64)
            )

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """Make one step at t ~ U(0, 1); returns the loss on the device."""
        c = next(self.places)
        weights = self.control.point(c).requires_grad_()
        outputs = self.join_outputs(self.network.call(self.module, inputs, weights), inputs)
        loss = (
            -self.batch_likelihood.with_parameters(self.unconstrained).log_prob(outputs, y).mean()
        )
        for parameter in self.off_curve:
            parameter.grad = None
        loss.backward()
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_([weights, *self.off_curve], self.training.clip_norm)
        gradient = weights.grad
        assert gradient is not None
        if self.decay:
            gradient.add_(weights.detach(), alpha=self.decay)
        if self.extra_decay:
            for parameter in self.extra.values():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=self.extra_decay)
        self.control.step(c, gradient)
        for optimizer in self.own_optimizers:
            optimizer.step()
        return loss.detach()

    def free_memory(self) -> None:
        """Free the memory of the optimisers."""
        self.optimizers = self.control.optimizers = []
        self.control.gradient_buffer = self.control.gradient_buffer[:0].clone()

    def join_outputs(self, outputs: Tensor, inputs: Inputs) -> Tensor:
        """The outputs that the likelihood receives."""
        return outputs if self.join is None else self.join(outputs, self.extra, inputs)

    def network_at(self, t: float) -> Network:
        """The network at t, with BatchNorm statistics of its own."""
        weights = self.control.point(*self.control.coefficients(torch.tensor([t])))
        if not self.minibatches.has_batchnorm:
            return self.network.with_weights(weights)
        here = self.network.with_buffers(dict(self.module.named_buffers()))
        return here.refresh_batchnorm(weights, self.minibatches.in_fixed_order())

    def are_finite(self) -> list[bool]:
        """Whether the trained weights are finite."""
        return [all(map(is_finite, self.trainable.values()))]

    def evaluate(self) -> list[float] | None:
        """Mean log-likelihood of held-out data over places on the curve."""
        if self.held_out is None:
            return None
        likelihood, total = self.likelihood.with_parameters(self.unconstrained.detach()), 0.0
        places = _EVALUATED_PLACES if self.control.count > 1 else _EVALUATED_PLACES[:1]
        with torch.no_grad():
            outputs_at = self._outputs_at(places)
            for inputs, y in self.held_out.batches(4096):
                inputs, y = (
                    to_device(inputs, self.minibatches.device),
                    to_device(y, self.minibatches.device),
                )
                for outputs in outputs_at(inputs):
                    terms = likelihood.log_prob(self.join_outputs(outputs, inputs), y)
                    total += float(terms.double().sum())
        return [total / (self.held_out.n * len(places))]

    def _outputs_at(self, places: Sequence[float]) -> Callable[[Inputs], Iterable[Tensor]]:
        """A function that returns the outputs of the networks at some places for inputs.

        Small networks are called together, because the overhead of a call exceeds its arithmetic.
        """
        if self.minibatches.has_batchnorm:
            networks = [self.network_at(t) for t in places]
            return lambda x: (network(network.weights, x) for network in networks)
        points = [self.control.point(c) for c in self.control.coefficients(torch.tensor(places))]
        if self.network.size > _SMALL_NETWORK:
            return lambda x: (self.network(point, x) for point in points)
        rows = torch.stack(points)
        return lambda x: self.network.batched(rows, x)

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of the control points, the extra tensors and the likelihood's parameters."""
        trainable = {n: p.detach().clone() for n, p in self.trainable.items()}
        return {"curve": trainable, "likelihood": self.unconstrained.detach().clone()}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore a copy."""
        for name, parameter in self.trainable.items():
            parameter.data.copy_(states[0]["curve"][name])
        self.unconstrained.data.copy_(states[0]["likelihood"])

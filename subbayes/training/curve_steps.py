"""Control points of a curve that is trained, and its steps at places on the curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.training.configuration import Training
from subbayes.training.minibatches import Minibatches
from subbayes.training.optimizer import is_bias, make_optimizer
from subbayes.training.traced_steps import SMALL_NETWORK, Gradients, set_gradients, traced_gradients
from subbayes.training.trainable import SingleTrainable
from subbayes.training.weight_curve import CurveKind, WeightCurve, coefficients
from subbayes.utils.types import Inputs, Targets, Weights

Join = Callable[[Tensor, Mapping[str, Tensor], Inputs], Tensor]

_PLACES_PER_DRAW = 256
_BUFFER_SIZE = 2**23  # entries of the control points' gradients that are computed at a time
_EVALUATED_PLACES = (0.5, 0.1, 0.3, 0.7, 0.9)  # t for held-out data


class ControlPoints:
    """Control points of a curve: some are fixed, the others are trained in blocks of columns.

    The gradient of a block is the outer product of the coefficients and a part of the gradient at
    the point. It is computed in the step of the optimiser of the block, in a buffer that all blocks
    share. Blocks have 32 MiB, because the C library returns memory of this size to the system.
    Biases with a learning rate of their own are in blocks of their own.

    Args:
        network: the network, with the dtype and device to use.
        count: number of control points.
        fixed: indices of those that are not trained.
        kind: "bezier" or "polygon".
        training: settings of the optimiser.
    """

    def __init__(
        self,
        network: Network,
        count: int,
        fixed: Sequence[int],
        kind: CurveKind,
        training: Training,
    ) -> None:
        self.kind, self.count = kind, count
        self.fixed = list(fixed)
        self.trainable_points = [i for i in range(count) if i not in fixed]
        like, trained = network.weights, len(self.trainable_points)
        self.fixed_points = like.new_empty(len(self.fixed), len(like))
        blocks = _blocks(network, training, max(_BUFFER_SIZE // trained, 1))
        self.widths = [width for _, width in blocks]
        self.blocks = [nn.Parameter(like.new_empty(trained, width)) for width in self.widths]
        self.gradient_buffer = like.new_empty(trained * max(self.widths))
        none = nn.Parameter(like.new_empty(0))
        decay = training.weight_decay_for(1) if training.is_decoupled else 0.0
        self.optimizers = [
            make_optimizer({kind: block}, none, training, decay)
            for (kind, _), block in zip(blocks, self.blocks, strict=True)
        ]

    @torch.no_grad()
    def set_point(self, i: int, weights: Weights) -> None:
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
    def point(self, c: tuple[Tensor, Tensor]) -> Weights:
        """The point of the curve with these coefficients."""
        parts = [c[0] @ block for block in self.blocks]
        point = torch.cat(parts) if len(parts) > 1 else parts[0]
        return point.addmv_(self.fixed_points.T, c[1]) if self.fixed else point

    def step(self, c: tuple[Tensor, Tensor], gradient: Weights) -> None:
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


def _blocks(network: Network, training: Training, most: int) -> list[tuple[str, int]]:
    """The kind, "weight" or "bias", and the number of columns of each block, at most `most`.

    All are of one kind if biases have the learning rate of the other weights.
    """
    apart = training.bias_lr_factor != 1
    kinds = groupby(
        network.spans.items(), lambda item: "bias" if apart and is_bias(item[0]) else "weight"
    )
    blocks = []
    for kind, spans in kinds:
        size = sum(span.stop - span.start for _, span in spans)
        blocks += [(kind, min(most, size - at)) for at in range(0, size, most)]
    return blocks


@dataclass(frozen=True)
class ExtraParameters:
    r"""Tensors that are learned with a curve but do not lie on it, such as structured effects.

    Attributes:
        tensors: initial values by name.
        join: a function (outputs, tensors, inputs) that returns the outputs that the likelihood
            receives.
        prior_scale: s of the prior $N(0, s^2 I)$ of the tensors; None for a flat prior.
        traceable: whether `join` depends on its arguments alone and uses all tensors, so that steps
            of small networks may be replayed.
    """

    tensors: Mapping[str, Tensor]
    join: Join
    prior_scale: float | None = None
    traceable: bool = False


class TrainableCurve(SingleTrainable):
    """A curve that is trained at a new place t in each step.

    Args:
        control: the control points.
        extra: tensors learned with the curve.
        seed: seed of the places. Other arguments are those of `SingleTrainable`.
    """

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        control: ControlPoints,
        *,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
        extra: ExtraParameters | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(minibatches, training, held_out, likelihood_parameters)
        self.module.requires_grad_(False)
        self.control, n = control, minibatches.n
        self.decay = 0.0 if training.is_decoupled else training.weight_decay_for(n)
        self.extra_decay = 0.0
        self.join: Join = _keep_outputs
        self.extra: dict[str, nn.Parameter] = {}
        if extra is not None:
            self.join = extra.join
            if extra.prior_scale is not None:
                self.extra_decay = 1 / (extra.prior_scale**2 * n)
            for name, tensor in extra.tensors.items():
                copy = tensor.detach().to(minibatches.device, copy=True)
                self.extra[name] = nn.Parameter(copy)
        self.off_curve, self.own_optimizers = list(self.extra.values()), []
        if self.unconstrained.numel():
            self.off_curve.append(self.unconstrained)
        if self.off_curve:
            self.own_optimizers = [make_optimizer(self.extra, self.unconstrained, training, 0.0)]
        self.optimizers = [*self.own_optimizers, *control.optimizers]
        self.trainable = self.extra | {f"block {i}": b for i, b in enumerate(control.blocks)}
        self.gradients: Gradients | None = None
        if extra is None or extra.traceable:
            epochs = training.epochs
            self.gradients = traced_gradients(self._loss_at, minibatches, self.module, epochs)
        self.places = self._draw_places(torch.Generator().manual_seed(seed))
        self.evaluated = _EVALUATED_PLACES if control.count > 1 else _EVALUATED_PLACES[:1]
        self.evaluations = len(self.evaluated)

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
        unknown = [weights, *self.off_curve]
        if self.gradients is None:
            loss = self._loss_at(unknown, inputs, y)
            for parameter in self.off_curve:
                parameter.grad = None
            loss.backward()
        else:
            slopes, loss = self.gradients([part.detach() for part in unknown], inputs, y)
            set_gradients(unknown, slopes)
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(unknown, self.training.clip_norm)
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

    def _loss_at(self, unknown: Sequence[Tensor], inputs: Inputs, y: Targets) -> Tensor:
        """The loss at weights, extra tensors and parameters of the likelihood, if it has any."""
        weights, *others = unknown
        extra = dict(zip(self.extra, others, strict=False))
        outputs = self.join(self.network.call(self.module, inputs, weights), extra, inputs)
        return self.loss(outputs, y, *others[len(extra) :])

    def free_memory(self) -> None:
        """Free the memory of the optimisers, and the traced steps."""
        self.gradients = None
        self.optimizers = self.control.optimizers = []
        self.control.gradient_buffer = self.control.gradient_buffer[:0].clone()

    def network_at(self, t: float) -> Network:
        """The network at t, with BatchNorm statistics of its own."""
        weights = self.control.point(*self.control.coefficients(torch.tensor([t])))
        if not self.minibatches.has_batchnorm:
            return self.network.with_weights(weights)
        here = self.network.with_buffers(dict(self.module.named_buffers()))
        return here.refresh_batchnorm(weights, self.minibatches.for_statistics())

    def evaluation(self) -> Callable[[Inputs], Iterable[Tensor]]:
        """The outputs of the networks at some places on the curve.

        Small networks are called together, because the overhead of a call exceeds its arithmetic.
        """
        join, extra = self.join, self.extra
        if self.minibatches.has_batchnorm:
            networks = [self.network_at(t) for t in self.evaluated]
            return lambda x: (join(network(network.weights, x), extra, x) for network in networks)
        coefficients = self.control.coefficients(torch.tensor(self.evaluated))
        points = [self.control.point(c) for c in coefficients]
        if self.network.size > SMALL_NETWORK:
            return lambda x: (join(self.network(point, x), extra, x) for point in points)
        rows = torch.stack(points)
        return lambda x: (join(outputs, extra, x) for outputs in self.network.batched(rows, x))

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of the control points, the extra tensors and the likelihood's parameters."""
        trainable = {n: p.detach().clone() for n, p in self.trainable.items()}
        return {"curve": trainable, "likelihood": self.unconstrained.detach().clone()}

    @override
    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        for name, parameter in self.trainable.items():
            parameter.data.copy_(states[0]["curve"][name])
        self.unconstrained.data.copy_(states[0]["likelihood"])


def _keep_outputs(outputs: Tensor, extra: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    return outputs

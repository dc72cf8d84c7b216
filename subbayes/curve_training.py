r"""Training of curves of low loss in weight space (Garipov et al. 2018; Dold et al. 2024).

The loss of a curve $\phi$ with control points $p_0 \dots p_k$ is the loss of training at a place
drawn anew in each step,

$$ \min_{p}\; \mathbb{E}_{t \sim U(0, 1)}\, \ell(\phi(t)), \qquad
   \frac{\partial \ell(\phi(t))}{\partial p_i} = c_i(t)\, \nabla \ell(\phi(t)), $$

so that a step costs one gradient of the network, whatever the number of control points. The
weights of a step are one vector, and so is their gradient; each control point takes its share of
it. With the ends given they stay where they are (Garipov: two solutions are trained first). With
no ends given all control points are trained at once, from initial weights of their own (Dold).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.baselines.deep_ensemble import fresh
from subbayes.checks import check_choice, check_count, fail, fail_type
from subbayes.data import Data, to_device
from subbayes.likelihoods import Likelihood
from subbayes.minibatches import Feed, inner, split
from subbayes.network import Network, Selection
from subbayes.optimizer import (
    Optimizer,
    Plan,
    Schedule,
    check_patience,
    decay_of,
    make_optimizer,
)
from subbayes.seeding import derive, forked
from subbayes.subspaces.curves import Curve, CurveKind, coefficients
from subbayes.training import History, TrainingResult, _epochs, _Run, _Stopper, swa
from subbayes.training_many import train_many
from subbayes.types import Inputs, Targets

__all__ = ["CurveResult", "connect", "restarted", "train_curve"]

Join = Callable[[Tensor, Mapping[str, Tensor], Inputs], Tensor]

_AHEAD = 256  # places drawn at a time
_SCRATCH = 2**23  # entries of the control points' gradients that are made at a time
_PLACES = (0.5, 0.1, 0.3, 0.7, 0.9)  # where held-out data are looked at
_SMALL = 2**16  # weights of a network that is called at all places at once


@dataclass(frozen=True, repr=False)
class CurveResult:
    """What training a curve returns.

    Attributes:
        curve: the curve; `curve.subspace()` holds it.
        network: at the middle of the curve, t = 1/2, BatchNorm statistics refreshed.
        likelihood: the likelihood with its parameters learned, as plain numbers.
        history: as of `TrainingResult`; losses at places drawn at random, so they scatter.
        best_epoch: the epoch whose curve this is, counted from 1.
        extra: the tensors learned along, by name.
        raw: unconstrained parameters of the likelihood.
    """

    curve: Curve
    network: Network
    likelihood: Likelihood
    history: History
    best_epoch: int
    extra: dict[str, Tensor] = field(default_factory=dict)
    raw: Float[Tensor, "p"] = field(default_factory=lambda: torch.zeros(0))

    def at(self, t: float, refresh_batchnorm: Any = None) -> Network:
        """The network at a place on the curve.

        Args:
            t: the place, in [0, 1].
            refresh_batchnorm: data to re-estimate BatchNorm statistics on; without them they
                stay those of the middle.
        """
        weights = self.curve.point(float(t)).to(self.network.weights)
        if refresh_batchnorm is None:
            return self.network.with_weights(weights)
        batches = Data.of(refresh_batchnorm).batches(1024)
        return self.network.refreshed(
            weights, ((to_device(x, self.network.device), y) for x, y in batches))

    def __repr__(self) -> str:
        return (f"CurveResult({self.curve!r}, {self.likelihood!r}, "
                f"epoch {self.best_epoch} of {len(self.history['train_loss'])})")


def train_curve(
    module: nn.Module | Network,
    likelihood: Likelihood,
    data: Any,
    *,
    ends: Sequence[Any] | None = None,
    degree: int = 2,
    kind: CurveKind = "bezier",
    epochs: int = 200,
    learning_rate: float = 1e-3,
    optimizer: Optimizer = "adam",
    momentum: float = 0.9,
    batch_size: int | None = 64,
    schedule: Schedule = "constant",
    final_learning_rate: float | None = None,
    prior_scale: float | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    extra: Mapping[str, Tensor] | None = None,
    join: Join | None = None,
    extra_prior_scale: float | None = None,
    factory: Callable[[], nn.Module] | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callable[[int, Curve], Any] | None = None,
) -> CurveResult:
    r"""Train a curve of low loss, between given solutions or from scratch.

    With `ends` these stay fixed, bit for bit, and the control points between them start on the
    straight lines from one to the next. Without, all k + 1 control points start from initial
    weights of their own and are trained in a single run.

    Only the selected weights lie on the curve; other parameters keep the module's values.
    Parameters of the likelihood are learned along, one value for the whole curve, and so are the
    tensors of `extra`.

    Memory: one copy of the weights for each control point and one for the point, one gradient, and
    the optimiser's state for the control points that move (twice their size for Adam). Early
    stopping keeps a second copy of the control points.

    Args:
        module: the module, or a `Network` of it; neither it nor its mode is changed.
        likelihood: p(y | f).
        data: as for `train`.
        ends: the solutions to connect, in order: weight vectors (D,), networks, or results of
            `train` or `swa`. Two for a Bézier curve, any number for a polygonal chain. None to
            train all control points at once.
        degree: k, the degree of a Bézier curve, 0 for a single point (plain training, with the
            tensors of `extra`); of a chain the number of segments from one solution to the next,
            2 for one bend, or in all if no solutions are given.
        kind: "bezier" or "polygon".
        epochs: passes over the data.
        learning_rate: step size.
        optimizer: "adam" or "sgd".
        momentum: of SGD.
        batch_size: rows per step; None takes all rows in each. One t is drawn for each step.
        schedule: as for `train`.
        final_learning_rate: as for `train`.
        prior_scale: s of the prior $N(0, s^2 I)$ of the weights on the curve.
        weight_decay: $\lambda$ itself, instead of `prior_scale`; by default neither.
        clip_norm: largest norm of the gradient of the log-likelihood at the point.
        validation: as for `train`; looked at in five places on the curve.
        patience: as for `train`.
        extra: tensors learned along that are not on the curve, by name, e.g. structured effects.
        join: a function (outputs, extra, inputs) that gives the outputs the likelihood sees.
        extra_prior_scale: s of the prior $N(0, s^2 I)$ of the tensors of `extra`; None for none.
        factory: makes a module with fresh weights, for curves without ends; needed where a layer
            has no `reset_parameters`.
        parameters: which parameters of a module are weights, as for `Network`.
        output: as for `Network`.
        seed: of initial weights, places, shuffling, dropout and the validation split.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, curve) after each epoch; training stops if it returns True.

    Raises:
        InputError: ends of different architectures or sizes, equal ends, nothing to train, or
            what `train` raises.

    Source: Garipov et al. (2018), "Loss surfaces, mode connectivity, and fast ensembling of
    DNNs", section 3; Dold et al. (2024), "Bayesian semi-structured subspace inference",
    algorithm 1.

    Example:
        >>> import subbayes
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> result = train_curve(net, subbayes.Gaussian(0.1), (x, x[:, 0] ** 2), epochs=5)
        >>> result.curve, result.curve.subspace()
        (Curve(bezier, degree=2, size=25), DenseSubspace(rank=2, size=25))
    """
    network = module if isinstance(module, Network) else Network(module, parameters, output)
    plan = Plan(epochs=epochs, learning_rate=learning_rate, optimizer=optimizer,
                momentum=momentum, schedule=schedule, final_learning_rate=final_learning_rate,
                clip_norm=clip_norm)
    check_choice("kind", kind, ("bezier", "polygon"))
    check_patience(patience, validation)
    fixed = _solutions(network, ends, kind, check_count("degree", degree, 0))
    _check_join(extra, join)
    stopper = _Stopper(patience)
    with forked(seed, network.device), torch.enable_grad():
        data, held_out = split(data, validation, seed)
        feed = Feed(data, likelihood, network, batch_size, seed)
        feed.check_held_out(held_out)
        decay = decay_of(prior_scale, weight_decay, feed.n)
        control = _begun(network, fixed, degree, kind, factory, seed, plan)
        along = decay_of(extra_prior_scale, None, feed.n)
        run = _CurveRun(network, likelihood, feed, plan, decay, control, _raw_of(ends),
                        extra or {}, join, derive(seed, 2), along)
        told = None if callback is None else (lambda n, _: callback(n, control.curve()))
        history = _epochs(run, held_out, stopper, None, progress, told, "Training the curve")
        run.settle()
        middle = run.network_at(0.5)
    return CurveResult(
        curve=control.curve(),
        network=middle,
        likelihood=likelihood.with_parameters(run.raw.detach()).frozen(),
        history=history,
        best_epoch=stopper.best_epoch or len(history["train_loss"]),
        extra={name: tensor.detach().clone() for name, tensor in run.extra.items()},
        raw=run.raw.detach().clone(),
    )


def connect(
    module: nn.Module,
    likelihood: Likelihood,
    data: Any,
    *,
    solutions: int = 2,
    degree: int = 2,
    kind: CurveKind | None = None,
    epochs: int = 200,
    learning_rate: float = 1e-3,
    swa_epochs: int = 0,
    swa_learning_rate: float = 1e-2,
    curve_epochs: int | None = None,
    curve_learning_rate: float | None = None,
    optimizer: Optimizer = "adam",
    batch_size: int | None = 64,
    prior_scale: float | None = None,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    factory: Callable[[], nn.Module] | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> CurveResult:
    """Train independent solutions from seeds of their own, then a curve of low loss through them.

    Args:
        module: the architecture; each solution starts from fresh initial weights. Not changed.
        likelihood: p(y | f); what is learned starts on the curve from the solutions' mean.
        data: as for `train`.
        solutions: how many; more than two need a polygonal chain.
        degree: as for `train_curve`: control points from one solution to the next, plus one.
        kind: "bezier" or "polygon"; by default a Bézier curve between two solutions and a chain
            through more.
        epochs: passes over the data to each solution.
        learning_rate: of these.
        swa_epochs: passes of stochastic weight averaging after them; 0 for none.
        swa_learning_rate: the constant rate of these.
        curve_epochs: passes for the curve; by default `epochs`.
        curve_learning_rate: of these; by default `learning_rate`.
        optimizer: of the solutions and of the curve.
        batch_size: rows per step.
        prior_scale: as for `train`, on solutions and curve.
        weight_decay: as for `train`.
        clip_norm: as for `train`.
        factory: makes a module with fresh weights; needed where a layer has no
            `reset_parameters`.
        parameters: which parameters are weights, as for `Network`; others keep their values.
        output: as for `Network`.
        seed: solution s is seeded by the seed and s.
        progress: show progress bars; None shows them on a terminal.

    Raises:
        InputError: a Bézier curve through more than two solutions, or what training raises.

    Example:
        >>> import subbayes
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = connect(subbayes.MLP(1, (5,), 1), subbayes.Gaussian(0.1), (x, x[:, 0] ** 2),
        ...                  solutions=3, epochs=5)
        >>> result.curve
        Curve(polygon, degree=4, size=16)
    """
    if check_count("solutions", solutions, 2) > 2 and kind == "bezier":
        fail("kind", "'polygon' to connect more than 2 solutions", "'bezier'")
    base = Network(module, parameters, output)
    seeds = [derive(seed, s) for s in range(solutions)]
    shared: dict[str, Any] = {
        "batch_size": batch_size, "prior_scale": prior_scale, "weight_decay": weight_decay,
        "clip_norm": clip_norm, "progress": progress}
    results: list[Any] = list(train_many(
        [restarted(base, own, factory) for own in seeds], likelihood, data, seeds=seeds,
        epochs=epochs, learning_rate=learning_rate, optimizer=optimizer,
        parameters=list(base.names), output=output, **shared))
    raws = [result.raw for result in results]
    if swa_epochs:
        results = [swa(result, likelihood, data, epochs=swa_epochs, seed=own,
                       learning_rate=swa_learning_rate, **shared)
                   for result, own in zip(results, seeds, strict=True)]
    return train_curve(
        base, likelihood, data, ends=[_Solution(r.network, raw) for r, raw in
                                      zip(results, raws, strict=True)],
        degree=degree, kind=kind or ("bezier" if solutions == 2 else "polygon"),
        epochs=epochs if curve_epochs is None else curve_epochs,
        learning_rate=learning_rate if curve_learning_rate is None else curve_learning_rate,
        optimizer=optimizer, seed=seed, **shared)


# --- where it starts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Solution:
    """A network, and what its likelihood has learned."""

    network: Network
    raw: Tensor


def restarted(
    network: Network, seed: int, factory: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """A module with fresh weights; its other parameters keep their values and stand still.

    Args:
        network: the network.
        seed: of the weights.
        factory: makes a module with fresh weights; needed where a layer has no
            `reset_parameters`.

    Raises:
        InputError: weights that are parts of parameters, since `train` moves whole ones.

    Example:
        >>> head = Network(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "last-layer")
        >>> [p.requires_grad for p in restarted(head, seed=0).parameters()]
        [False, False, True, True]
    """
    if network.masks:
        fail("parameters", "whole parameters to train solutions of their own", "masks",
             "Train them elsewhere and pass them to train_curve as ends=")
    drawn = _fresh_weights(network, factory, seed)
    made = network.module_with(drawn)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in network.names)
    return made


def _fresh_weights(
    network: Network, factory: Callable[[], nn.Module] | None, seed: int
) -> Float[Tensor, "D"]:
    """Initial weights of a seed, for a module of the same architecture."""
    module = fresh(network.module_with(), factory, seed)
    if factory is not None:
        made = Network(module, network.masks or list(network.names), network.output)
        if made.architecture != network.architecture:
            fail("factory", "modules of the architecture of the module", "another",
                 "A curve connects solutions of one architecture")
    return network.flatten(module)


def _solutions(
    network: Network, ends: Sequence[Any] | None, kind: CurveKind, degree: int
) -> list[Tensor]:
    """Weight vectors of the solutions to connect."""
    if ends is None:
        return []
    if isinstance(ends, Tensor):
        ends = list(ends)
    if not isinstance(ends, Sequence):
        fail_type("ends", "two solutions", ends)
    if len(ends) < 2 or (kind == "bezier" and len(ends) > 2):
        fail("ends", "2 solutions" if kind == "bezier" else "at least 2 solutions", len(ends),
             "Pass kind='polygon' to connect more" if len(ends) > 2 else "")
    if degree < 2:
        fail("degree", "at least 2, so that there is a point between the ends to train", degree,
             "A straight line between the ends is Curve(torch.stack(ends))")
    found = [_weights_of(network, end, i) for i, end in enumerate(ends)]
    for i, (a, b) in enumerate(zip(found, found[1:], strict=False)):
        if torch.equal(a, b):
            fail("ends", "solutions that differ", f"the same weights twice, at {i} and {i + 1}",
                 "Train the second one from another seed")
    return found


def _weights_of(network: Network, end: Any, place: int) -> Float[Tensor, "D"]:
    other = getattr(end, "network", end)
    if isinstance(other, Network):
        if other.architecture != network.architecture:
            fail(f"ends[{place}]", "the architecture of the module", "another",
                 "Train both ends from one architecture")
        other = other.weights
    if not isinstance(other, Tensor):
        fail_type(f"ends[{place}]", "a weight vector, a Network or a training result", end)
    if other.shape != (network.size,):
        fail(f"ends[{place}]", f"{network.size} weights, as the network has",
             f"shape {tuple(other.shape)}", "Flatten them with network.flatten(module)")
    return other.detach().to(network.weights)


def _raw_of(ends: Sequence[Any] | None) -> Tensor | None:
    """The mean of what the likelihoods of the ends have learned, where that is known."""
    raws = [end.raw for end in ends or () if isinstance(end, (TrainingResult, _Solution))]
    if not raws or len(raws) < len(ends or ()) or len({raw.shape for raw in raws}) > 1:
        return None
    return torch.stack(raws).mean(0)


def _check_join(extra: Mapping[str, Tensor] | None, join: Join | None) -> None:
    if (join is None) != (not extra):
        fail("join", "a function that brings the tensors of extra into the outputs" if extra
             else "tensors to learn in extra", "None" if extra else "no tensors in extra")


def _begun(
    network: Network, fixed: Sequence[Tensor], degree: int, kind: CurveKind,
    factory: Callable[[], nn.Module] | None, seed: int, plan: Plan,
) -> _ControlPoints:
    """Control points at the start: on lines between the solutions, or each from fresh weights."""
    if not fixed:
        control = _ControlPoints(network.weights, degree + 1, (), kind, plan)
        for i in range(degree + 1):
            control.write(i, _fresh_weights(network, factory, derive(seed, 3, i)))
        return control
    count = (len(fixed) - 1) * degree + 1
    control = _ControlPoints(network.weights, count, range(0, count, degree), kind, plan)
    for i in range(count):
        a, step = divmod(i, degree)
        control.write(i, torch.lerp(fixed[a], fixed[a + 1], step / degree) if step else fixed[a])
    return control


# --- the loop -------------------------------------------------------------------------------------


class _ControlPoints:
    """Control points in training: some held fixed, the others in blocks of columns.

    The gradient of a block is the outer product of the coefficients and a piece of the point's
    gradient, made when its optimiser steps, in memory that all blocks share: one block of all
    columns for a small network, many for a large one. (Blocks of 32 MiB: the C library gives
    those back to the system when they are freed.)
    """

    def __init__(
        self, like: Float[Tensor, "D"], count: int, fixed: Sequence[int], kind: CurveKind,
        plan: Plan,
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
        self.optimizers = [make_optimizer({"points": b}, none, plan, 0.0) for b in self.blocks]

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


class _CurveRun(_Run):
    """A curve in training: the steps of a module, each at another point of the curve."""

    def __init__(
        self, network: Network, likelihood: Likelihood, feed: Feed, plan: Plan, decay: float,
        control: _ControlPoints, raw: Tensor | None, extra: Mapping[str, Tensor],
        join: Join | None, seed: int, decay_along: float = 0.0,
    ) -> None:
        self.network, self.feed, self.plan, self.likelihood = network, feed, plan, likelihood
        self.inner, self.control, self.join = inner(likelihood), control, join
        self.decay, self.decay_along = decay, decay_along
        self.module = network.module_with().train().requires_grad_(False)
        begin = feed.raw if raw is None or raw.shape != feed.raw.shape else raw
        self.raw = nn.Parameter(begin.to(feed.raw, copy=True))
        self.extra = {name: nn.Parameter(tensor.detach().to(feed.device, copy=True))
                      for name, tensor in extra.items()}
        self.along = [*self.extra.values(), *([self.raw] if self.raw.numel() else [])]
        own = [make_optimizer(self.extra, self.raw, plan, 0.0)] if self.along else []
        self.own = own
        self.optimizers = [*own, *control.optimizers]
        self.moving = self.extra | {f"block {i}": b for i, b in enumerate(control.blocks)}
        self.places = self._drawn(torch.Generator().manual_seed(seed))

    def _drawn(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Coefficients at t ~ U(0, 1), one after another."""
        while True:
            yield from self.control.coefficients(
                torch.rand(_AHEAD, generator=generator, dtype=torch.float64))

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """One step at t ~ U(0, 1); the loss stays on the device."""
        c = next(self.places)
        weights = self.control.at(c).requires_grad_()
        outputs = self.joined(self.network.call(self.module, inputs, weights), inputs)
        loss = -self.inner.with_parameters(self.raw).log_prob(outputs, y).mean()
        for parameter in self.along:
            parameter.grad = None
        loss.backward()
        if self.plan.clip_norm is not None:
            nn.utils.clip_grad_norm_([weights, *self.along], self.plan.clip_norm)
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
        return here.refreshed(weights, self.feed.in_order())

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

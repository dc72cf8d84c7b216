r"""Training of several networks of one architecture at once, vectorised over members.

What a small network costs per step is the overhead of some sixty tensor operations. One
traced graph of the gradients of all members pays it once: on one core, a member of 20 with one
hidden layer of 50 takes a tenth of the time it takes alone. Members may have data of their own,
such as splits of one data set; they only have to be of one size.

Member m gets what `train` would give it alone with its seed, up to rounding. What cannot be
vectorised is trained one after the other: BatchNorm and other buffers, dropout, streamed data,
sizes that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from subbayes.checks import check_choice, check_count, fail
from subbayes.data import Data, leaves, take
from subbayes.graph import interpreted, tidy
from subbayes.likelihoods import Likelihood
from subbayes.minibatches import Feed, batch_sizes, inner, log_scale, split
from subbayes.network import Network, Selection, arguments
from subbayes.optimizer import (
    Optimizer,
    Plan,
    Schedule,
    check_patience,
    decay_of,
    make_optimizer,
)
from subbayes.progress import bar
from subbayes.seeding import forked
from subbayes.subspaces.trajectory import TrajectoryRecorder
from subbayes.training import History, SwaResult, TrainingResult, started, swa, train
from subbayes.types import Inputs, Targets
from subbayes.vectorised import say

__all__ = ["swa_many", "train_many"]

_WORTH_TRACING = 50  # steps of one shape after which the second that tracing takes pays


def train_many(
    modules: Sequence[nn.Module],
    likelihood: Likelihood | Sequence[Likelihood],
    data: Any,
    *,
    seeds: Sequence[int] | None = None,
    epochs: int = 200,
    learning_rate: float = 1e-3,
    optimizer: Optimizer = "adam",
    momentum: float = 0.9,
    batch_size: int | None = 64,
    schedule: Schedule = "constant",
    final_learning_rate: float | None = None,
    prior_scale: float | None = None,
    weight_decay: float | None = None,
    bias_lr_factor: float = 1.0,
    clip_norm: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> list[TrainingResult]:
    """Train several modules of one architecture; see `train` for what is not said here.

    Args:
        modules: one per member, of one architecture; not changed.
        likelihood: one for all, or a list of one per member (targets standardised by each
            split's own mean, say).
        data: data for all members, or a list of one per member.
        seeds: one per member; by default 0, 1, ...
        epochs: as for `train`, and so are all others that follow.
        learning_rate: step size.
        optimizer: "adam" or "sgd".
        momentum: of SGD.
        batch_size: rows per step of each member.
        schedule: of the rate.
        final_learning_rate: where the schedule ends.
        prior_scale: s of the prior of the weights.
        weight_decay: instead of `prior_scale`.
        bias_lr_factor: biases learn at this multiple of the rate.
        clip_norm: largest norm of each member's gradient.
        validation: a fraction, held-out data for all, or a list of one per member.
        patience: epochs without improvement after which a member stops.
        parameters: which parameters are weights.
        output: picks the tensor out of what the module returns.
        progress: show a progress bar.

    Returns:
        One result per member.

    Raises:
        InputError: as `train`, and lists whose lengths differ.

    Example:
        >>> import subbayes
        >>> x, y = torch.randn(30, 2), torch.randn(30)
        >>> nets = [nn.Linear(2, 1) for _ in range(3)]
        >>> results = train_many(nets, subbayes.Gaussian(), (x, y), epochs=5)
        >>> [result.network.size for result in results]
        [3, 3, 3]
    """
    plan = Plan(epochs=epochs, learning_rate=learning_rate, optimizer=optimizer,
                momentum=momentum, schedule=schedule, final_learning_rate=final_learning_rate,
                bias_lr_factor=bias_lr_factor, clip_norm=clip_norm)
    check_patience(patience, validation)
    modules = list(modules)
    count = _count("modules", modules)
    seeds = _per_member("seeds", list(range(count) if seeds is None else seeds), count)
    each = list(zip(modules, _per_member("likelihood", likelihood, count),
                    _per_member("data", data, count),
                    _per_member("validation", validation, count), seeds, strict=True))
    feeds, held_out = [], []
    for module, one, rows, part, seed in each:
        with forked(seed):
            network = Network(module, parameters, output)
            rows, held = split(rows, part, seed)
            feeds.append(Feed(rows, one, network, batch_size, seed))
            feeds[-1].check_held_out(held)
            held_out.append(held)
    decay = decay_of(prior_scale, weight_decay, feeds[0].n)
    run = _Run.of(feeds, plan, decay)
    if run is None or not _alike(held_out):
        options = {f.name: getattr(plan, f.name) for f in fields(plan)} | {
            "prior_scale": prior_scale, "weight_decay": weight_decay, "batch_size": batch_size,
            "patience": patience, "parameters": parameters, "output": output, "progress": False}
        with bar(count, "Training", progress, "members") as steps:
            return [_counted(steps, train(module, one, rows, seed=seed, validation=part,
                                          **options))
                    for module, one, rows, part, seed in each]
    return _trained(run, held_out, patience, progress)


def swa_many(
    starts: Sequence[Any],
    likelihood: Likelihood | Sequence[Likelihood],
    data: Any,
    *,
    seeds: Sequence[int] | None = None,
    epochs: int = 20,
    learning_rate: float = 1e-2,
    momentum: float = 0.9,
    batch_size: int | None = 64,
    every: int = 1,
    unit: Literal["epochs", "steps"] = "epochs",
    max_snapshots: int = 20,
    rank: int | None = None,
    prior_scale: float | None = None,
    weight_decay: float | None = None,
    bias_lr_factor: float = 1.0,
    clip_norm: float | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> list[SwaResult]:
    """Average along the trajectories of several members; see `swa` for what is not said here.

    Args:
        starts: what `train_many` returned, or trained modules of one architecture.
        likelihood: one for all, or a list of one per member.
        data: data for all members, or a list of one per member.
        seeds: one per member; by default 0, 1, ...
        epochs: as for `swa`, and so are all others that follow.
        learning_rate: the constant rate.
        momentum: of SGD.
        batch_size: rows per step of each member.
        every: take a snapshot after each `every` epochs or steps.
        unit: "epochs" or "steps".
        max_snapshots: how many of the last snapshots the recorders keep.
        rank: record in a sketch of this rank instead.
        prior_scale: s of the prior of the weights.
        weight_decay: instead of `prior_scale`.
        bias_lr_factor: biases learn at this multiple of the rate.
        clip_norm: largest norm of each member's gradient.
        parameters: which parameters of modules are weights.
        output: picks the tensor out of what the modules return.
        progress: show a progress bar.

    Returns:
        One result per member.

    Raises:
        InputError: as `swa`, and lists whose lengths differ.
    """
    check_choice("unit", unit, ("epochs", "steps"))
    check_count("every", every)
    plan = Plan(epochs=epochs, learning_rate=learning_rate, momentum=momentum,
                bias_lr_factor=bias_lr_factor, clip_norm=clip_norm)
    starts = list(starts)
    count = _count("starts", starts)
    seeds = _per_member("seeds", list(range(count) if seeds is None else seeds), count)
    each = list(zip(starts, _per_member("likelihood", likelihood, count),
                    _per_member("data", data, count), seeds, strict=True))
    feeds, raws = [], []
    for start, one, rows, seed in each:
        with forked(seed):
            network, raw = started(start, parameters, output)
            feeds.append(Feed(rows, one, network, batch_size, seed))
            raws.append(raw)
    decay = decay_of(prior_scale, weight_decay, feeds[0].n)
    run = _Run.of(feeds, plan, decay, raws)
    if run is None:
        options: dict[str, Any] = {
            "epochs": epochs, "learning_rate": learning_rate, "momentum": momentum,
            "batch_size": batch_size, "every": every, "unit": unit,
            "max_snapshots": max_snapshots, "rank": rank, "prior_scale": prior_scale,
            "weight_decay": weight_decay, "bias_lr_factor": bias_lr_factor,
            "clip_norm": clip_norm, "parameters": parameters, "output": output}
        with bar(count, "Averaging", progress, "members") as steps:
            return [_counted(steps, swa(start, one, rows, seed=seed, progress=False, **options))
                    for start, one, rows, seed in each]
    recorders = [TrajectoryRecorder(max_snapshots, rank) for _ in feeds]
    return _averaged(run, recorders, every, unit, progress)


def _count(argument: str, members: Sequence[Any]) -> int:
    if not members:
        fail(argument, "at least one member", "none")
    return len(members)


def _per_member(argument: str, values: Any, count: int) -> list[Any]:
    """A list of one per member; anything else serves all."""
    if not isinstance(values, list):
        if isinstance(values, tuple):
            values = Data.of(values, argument)  # once for all members
        return [values] * count
    if len(values) != count:
        fail(argument, f"one for each of {count} members", len(values))
    return list(values)


def _counted(steps: Any, result: Any) -> Any:
    steps.update(1)
    return result


def _alike(parts: Sequence[Data | None]) -> bool:
    """Whether held-out data can be stacked."""
    if parts[0] is None:
        return True
    return all(p is not None and p.in_memory and _shapes(p) == _shapes(parts[0]) for p in parts)


def _shapes(data: Data | None) -> Any:
    assert data is not None
    return tree_map(lambda t: (t.shape, t.dtype), (data.inputs, data.y))


# --- all members in one step ------------------------------------------------------------------


class _Run:
    """Stacked members in training; the counterpart of the run of one module."""

    @classmethod
    def of(
        cls, feeds: Sequence[Feed], plan: Plan, decay: float,
        raws: Sequence[Tensor | None] | None = None,
    ) -> _Run | None:
        """A run, or None for what has to be trained one after the other."""
        if len(feeds) < 2 or not _vectorisable(feeds):
            return None
        run = cls(feeds, plan, decay, raws)
        return run if run.works() else None

    def __init__(
        self, feeds: Sequence[Feed], plan: Plan, decay: float,
        raws: Sequence[Tensor | None] | None,
    ) -> None:
        self.feeds, self.plan, self.count = feeds, plan, len(feeds)
        self.network = feeds[0].network
        self.inner = inner(feeds[0].likelihood)
        self.module = self.network.module_with()
        named = [dict(feed.network.module_with().named_parameters()) for feed in feeds]
        moves = [n for n, p in named[0].items() if p.requires_grad
                 and (raws is None or n in self.network.names)]
        self.moving = {n: nn.Parameter(torch.stack([p[n].detach() for p in named]))
                       for n in moves}
        self.rest = {n: torch.stack([p[n].detach() for p in named])
                     for n in named[0] if n not in moves}
        self.still = {n: (mask, self.moving[n].detach().clone())
                      for n, mask in self.network.masks.items()} if raws is not None else {}
        self.raw = nn.Parameter(torch.stack([
            feed.raw if raw is None or raw.shape != feed.raw.shape else raw.to(feed.raw)
            for feed, raw in zip(feeds, raws or [None] * self.count, strict=True)]))
        self.optimizer = make_optimizer(self.moving, self.raw, plan, decay)
        self.gradients = _Gradients(self.loss)
        self.after_step: Callable[[], None] | None = None
        self._stack_data()

    def _stack_data(self) -> None:
        """Rows of all members one below the other; shared inputs once."""
        memory = [feed.memory for feed in self.feeds]
        first = memory[0]
        assert first is not None
        shared = all(m is not None and _same_tensors(m.inputs, first.inputs) for m in memory)
        members = torch.arange(self.count, device=self.network.device)[:, None]
        self.offset_y = members * self.feeds[0].n
        self.offset_x = torch.zeros_like(members) if shared else self.offset_y
        self.x = first.inputs if shared else _below([m.inputs for m in memory if m is not None])
        self.y = _below([m.y for m in memory if m is not None])

    # --- one member, as a pure function -----------------------------------------------------

    def outputs(
        self, moving: Mapping[str, Tensor], rest: Mapping[str, Tensor], x: Inputs
    ) -> Tensor:
        """Outputs of one member."""
        args, kwargs = arguments(x)
        return self.network.as_outputs(
            functional_call(self.module, {**moving, **rest}, args, kwargs), x)

    def loss(
        self, moving: Mapping[str, Tensor], raw: Tensor, rest: Mapping[str, Tensor], x: Inputs,
        y: Targets,
    ) -> Tensor:
        """Mean negative log-likelihood of one member on its batch."""
        outputs = self.outputs(moving, rest, x)
        return -self.inner.with_parameters(raw).log_prob(outputs, y).mean()

    def works(self) -> bool:
        """Whether vectorised losses are those of the members alone."""
        x, y = next(self.batches(shuffled=False))
        try:
            with torch.no_grad():
                together = vmap(self.loss)(self.moving, self.raw, self.rest, x, y)
                alone = torch.stack([self.loss(*self.member(m), _row(x, m), _row(y, m))
                                     for m in range(self.count)])
        except RuntimeError as error:
            say("training members together", error, "training one after the other")
            return False
        return torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True)

    def member(self, m: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Parameters of one member."""
        return ({n: p.detach()[m] for n, p in self.moving.items()}, self.raw.detach()[m],
                {n: p[m] for n, p in self.rest.items()})

    # --- steps ------------------------------------------------------------------------------

    def batches(self, shuffled: bool = True) -> Iterator[tuple[Inputs, Targets]]:
        """One pass; each member in an order of its own."""
        n, device = self.feeds[0].n, self.network.device
        size = self.feeds[0].batch_size or n
        if shuffled and size < n:
            order = torch.stack([torch.randperm(n, generator=f.generator) for f in self.feeds])
        else:
            order = torch.arange(n).expand(self.count, n)
        for rows in order.to(device).split(batch_sizes(n, size), 1):
            yield take(self.x, rows + self.offset_x), take(self.y, rows + self.offset_y)

    def step(self, x: Inputs, y: Targets) -> Tensor:
        """One step of every member; returns their losses (M,)."""
        with torch.no_grad():
            (grads, grad_raw), losses = self.gradients(self.moving, self.raw, self.rest, x, y)
            if self.plan.clip_norm is not None:
                grads, grad_raw = _clipped(grads, grad_raw, self.plan.clip_norm)
            for name, parameter in self.moving.items():
                parameter.grad = grads[name]
            self.raw.grad = grad_raw
            self.optimizer.step()
            for name, (mask, before) in self.still.items():
                self.moving[name].copy_(torch.where(mask, self.moving[name], before))
        if self.after_step is not None:
            self.after_step()
        return losses

    def epoch(self, number: int) -> tuple[float, list[float]]:
        """One pass; returns the rate and each member's loss."""
        rate = self.plan.rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        total = torch.zeros(self.count, dtype=torch.float64, device=self.network.device)
        for x, y in self.batches():
            total += self.step(x, y) * leaves(y)[0].shape[1]
        self._check_finite(total, number)
        losses = (total / self.feeds[0].n).tolist()
        return rate, [loss + log_scale(feed.likelihood)
                      for loss, feed in zip(losses, self.feeds, strict=True)]

    def _check_finite(self, total: Tensor, number: int) -> None:
        sizes = [p.detach().abs().flatten(1).amax(1) for p in self.moving.values()]
        finite = torch.isfinite(torch.stack([total, *sizes])).all(0)
        if not bool(finite.all()):
            m = int((~finite).nonzero()[0])
            fail("learning_rate", "a training loss that stays finite",
                 f"{float(total[m]) / self.feeds[0].n:g} in epoch {number + 1} of member {m} at "
                 f"learning rate {self.plan.learning_rate:g}",
                 "Lower the learning rate, standardise the inputs, or set clip_norm")

    def flat(self) -> Tensor:
        """Weights of all members, (M, D), as their networks flatten them."""
        parts = []
        for name in self.network.names:
            mask = self.network.masks.get(name)
            values = self.moving[name].detach()
            parts.append(values.flatten(1) if mask is None else values[:, mask])
        return torch.cat(parts, 1)

    def state(self) -> list[Tensor]:
        """All that moves; not a copy."""
        return [*(p.detach() for p in self.moving.values()), self.raw.detach()]

    def restore(self, state: list[Tensor]) -> None:
        """Go back to a state."""
        for now, before in zip(self.state(), state, strict=True):
            now.copy_(before)

    def likelihood(self, m: int, raw: Tensor) -> Likelihood:
        """A member's likelihood with its parameters learned."""
        return self.feeds[m].likelihood.with_parameters(raw).frozen()


class _Gradients:
    """Gradients and losses of all members, traced once for each shape that comes often."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.eager = vmap(grad_and_value(loss, argnums=(0, 1)))
        self.calls: dict[Any, int] = {}
        self.replays: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """((gradients, gradient in raw), losses) of the arguments of the loss."""
        flat, spec = tree_flatten(arguments)
        key = tuple(t.shape for t in flat)
        if key in self.replays:
            return self.replays[key](*flat)
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] > _WORTH_TRACING:
            self.replays[key] = self._traced(flat, spec)
        return self.eager(*arguments)

    def _traced(self, flat: list[Tensor], spec: Any) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            return self.eager(*tree_unflatten(list(tensors), spec))

        try:
            graph = make_fx(call)(*flat)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            replay = interpreted(tidy(graph, *flat), *flat)
            expected, got = tree_flatten(call(*flat))[0], tree_flatten(replay(*flat))[0]
        except Exception as error:
            say("tracing the training step", error, "going on without")
            return call
        close = all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
                    for a, b in zip(expected, got, strict=True))
        return replay if close else call


def _vectorisable(feeds: Sequence[Feed]) -> bool:
    """Data in memory of one size, one architecture, nothing random and nothing written to."""
    first = feeds[0]
    module = first.network.module_with()
    random = any(isinstance(m, nn.modules.dropout._DropoutNd) or getattr(m, "dropout", 0)
                 for m in module.modules())
    if random or any(True for _ in module.buffers()) or first.memory is None:
        return False
    return all(f.memory is not None and f.network.architecture == first.network.architecture
               and f.device == first.device and f.raw.shape == first.raw.shape
               and _shapes(f.memory) == _shapes(first.memory)
               and inner(f.likelihood).to_config() == inner(first.likelihood).to_config()
               for f in feeds)


def _same_tensors(a: Any, b: Any) -> bool:
    return all(x.data_ptr() == y.data_ptr() for x, y in zip(leaves(a), leaves(b), strict=True))


def _below(parts: Sequence[Any]) -> Any:
    """Tensors, tuples or dicts of them, one below the other."""
    flat = [tree_flatten(part) for part in parts]
    columns = zip(*(values for values, _ in flat), strict=True)
    return tree_unflatten([torch.cat(column) for column in columns], flat[0][1])


def _row(values: Any, m: int) -> Any:
    return tree_map(lambda t: t[m], values)


def _clipped(
    grads: dict[str, Tensor], raw: Tensor, limit: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of each member scaled down to a norm."""
    every = [*grads.values(), raw]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in every]).sum(0).sqrt()
    factor = (limit / (norms + 1e-6)).clamp_max(1.0)

    def scaled(g: Tensor) -> Tensor:
        return g * factor.reshape(-1, *[1] * (g.ndim - 1))

    return {n: scaled(g) for n, g in grads.items()}, scaled(raw)


# --- training ---------------------------------------------------------------------------------


def _trained(
    run: _Run, held_out: Sequence[Data | None], patience: int | None, progress: bool | None
) -> list[TrainingResult]:
    histories: list[History] = [{} for _ in run.feeds]
    best = _Best(run, patience)
    watch = _Watch(run, held_out)
    with bar(run.plan.epochs, "Training", progress, "epochs") as steps:
        for number in range(run.plan.epochs):
            rate, losses = run.epoch(number)
            values = watch.values()
            for m in best.active:
                facts = {"train_loss": losses[m], "learning_rate": rate}
                if values is not None:
                    facts["validation_log_likelihood"] = values[m]
                for name, value in facts.items():
                    histories[m].setdefault(name, []).append(value)
            steps.update(1)
            if best.done(number + 1, values):
                break
    best.restore()
    return [_result(run, m, histories[m], best.epochs[m]) for m in range(run.count)]


def _result(run: _Run, m: int, history: History, best_epoch: int) -> TrainingResult:
    network = run.feeds[m].network
    module = network.module_with()
    moving, raw, _ = run.member(m)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in moving:
                parameter.copy_(moving[name])
    return TrainingResult(
        module=module, network=Network(module, network.selection, network.output),
        likelihood=run.likelihood(m, raw), history=history,
        best_epoch=best_epoch or len(history["train_loss"]), raw=raw.clone())


class _Watch:
    """Mean log-likelihood of each member on its held-out data."""

    def __init__(self, run: _Run, held_out: Sequence[Data | None]) -> None:
        self.run = run
        self.data: Any = None
        if held_out[0] is None:
            return
        parts = [part.to(run.network.device) for part in held_out if part is not None]
        pairs = [tree_flatten((p.inputs, run.feeds[m].prepared(p.targets())))
                 for m, p in enumerate(parts)]
        columns = zip(*(values for values, _ in pairs), strict=True)
        self.data = tree_unflatten([torch.stack(c) for c in columns], pairs[0][1])

    def values(self) -> list[float] | None:
        """One number per member, in units of the targets."""
        if self.data is None:
            return None
        run = self.run
        with torch.no_grad():
            losses = vmap(run.loss)(run.moving, run.raw, run.rest, *self.data)
        return [-loss - log_scale(feed.likelihood)
                for loss, feed in zip(losses.double().tolist(), run.feeds, strict=True)]


class _Best:
    """Each member's best state, and which members still train."""

    def __init__(self, run: _Run, patience: int | None) -> None:
        self.run, self.patience = run, patience
        self.scores = [-math.inf] * run.count
        self.epochs = [0] * run.count
        self.active = list(range(run.count))
        self.saved: list[Tensor] | None = None

    def done(self, epoch: int, values: list[float] | None) -> bool:
        """Take note of an epoch (counted from 1); True when no member is left."""
        if self.patience is None or values is None:
            return False
        if self.saved is None:
            self.saved = [t.clone() for t in self.run.state()]
        for m in self.active:
            if values[m] > self.scores[m] or self.epochs[m] == 0:
                self.scores[m], self.epochs[m] = values[m], epoch
                for kept, now in zip(self.saved, self.run.state(), strict=True):
                    kept[m].copy_(now[m])
        self.active = [m for m in self.active if epoch - self.epochs[m] < self.patience]
        return not self.active

    def restore(self) -> None:
        """Go back to the best states, if they were watched."""
        if self.saved is not None:
            self.run.restore(self.saved)


# --- averaging --------------------------------------------------------------------------------


def _averaged(
    run: _Run, recorders: list[TrajectoryRecorder], every: int, unit: str, progress: bool | None
) -> list[SwaResult]:
    histories: list[History] = [{} for _ in run.feeds]
    raw, ticks = run.raw.detach().clone(), 0

    def tick() -> None:
        nonlocal raw, ticks
        ticks += 1
        if ticks % every == 0:
            for recorder, weights in zip(recorders, run.flat(), strict=True):
                recorder.update(weights)
            raw = raw + (run.raw.detach() - raw) / recorders[0].n

    run.after_step = tick if unit == "steps" else None
    with bar(run.plan.epochs, "Averaging", progress, "epochs") as steps:
        for number in range(run.plan.epochs):
            rate, losses = run.epoch(number)
            for history, loss in zip(histories, losses, strict=True):
                history.setdefault("train_loss", []).append(loss)
                history.setdefault("learning_rate", []).append(rate)
            if unit == "epochs":
                tick()
            steps.update(1)
    if recorders[0].n == 0:
        fail("every", f"at most the {ticks} {unit} of the run", every, "Run more epochs")
    return [SwaResult(
        network=feed.network.with_weights(recorder.mean), recorder=recorder, history=history,
        likelihood=run.likelihood(m, raw[m]))
        for m, (feed, recorder, history) in enumerate(
            zip(run.feeds, recorders, histories, strict=True))]

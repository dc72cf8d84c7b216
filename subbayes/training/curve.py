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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.initialisation import fresh
from subbayes.networks.network import Network, Selection
from subbayes.subspaces.curve import Curve, CurveKind
from subbayes.training.curve_steps import ControlPoints, CurveRun, Join
from subbayes.training.many import train_many
from subbayes.training.minibatches import Feed, split
from subbayes.training.optimizer import Optimizer, Plan, Schedule, check_patience, decay_of
from subbayes.training.trainer import History, Stopper, TrainingResult, epochs_of, swa
from subbayes.utils.checks import check_choice, check_count, fail, fail_type
from subbayes.utils.seeding import derive, forked

__all__ = ["CurveResult", "connect", "restarted", "train_curve"]


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
            weights, ((to_device(x, self.network.device), y) for x, y in batches)
        )

    def __repr__(self) -> str:
        return (
            f"CurveResult({self.curve!r}, {self.likelihood!r}, "
            f"epoch {self.best_epoch} of {len(self.history['train_loss'])})"
        )


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
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> result = train_curve(net, Gaussian(0.1), (x, x[:, 0] ** 2), epochs=5)
        >>> result.curve, result.curve.subspace()
        (Curve(bezier, degree=2, size=25), DenseSubspace(rank=2, size=25))
    """
    network = module if isinstance(module, Network) else Network(module, parameters, output)
    plan = Plan(
        epochs=epochs,
        learning_rate=learning_rate,
        optimizer=optimizer,
        momentum=momentum,
        schedule=schedule,
        final_learning_rate=final_learning_rate,
        clip_norm=clip_norm,
    )
    check_choice("kind", kind, ("bezier", "polygon"))
    check_patience(patience, validation)
    fixed = _solutions(network, ends, kind, check_count("degree", degree, 0))
    _check_join(extra, join)
    stopper = Stopper(patience)
    with forked(seed, network.device), torch.enable_grad():
        data, held_out = split(data, validation, seed)
        feed = Feed(data, likelihood, network, batch_size, seed)
        feed.check_held_out(held_out)
        decay = decay_of(prior_scale, weight_decay, feed.n)
        control = _begun(network, fixed, degree, kind, factory, seed, plan)
        along = decay_of(extra_prior_scale, None, feed.n)
        run = CurveRun(
            network,
            likelihood,
            feed,
            plan,
            decay,
            control,
            _raw_of(ends),
            extra or {},
            join,
            derive(seed, 2),
            along,
        )
        told = None if callback is None else (lambda n, _: callback(n, control.curve()))
        history = epochs_of(run, held_out, stopper, None, progress, told, "Training the curve")
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
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = connect(subbayes.MLP(1, (5,), 1), Gaussian(0.1), (x, x[:, 0] ** 2),
        ...                  solutions=3, epochs=5)
        >>> result.curve
        Curve(polygon, degree=4, size=16)
    """
    if check_count("solutions", solutions, 2) > 2 and kind == "bezier":
        fail("kind", "'polygon' to connect more than 2 solutions", "'bezier'")
    base = Network(module, parameters, output)
    seeds = [derive(seed, s) for s in range(solutions)]
    shared: dict[str, Any] = {
        "batch_size": batch_size,
        "prior_scale": prior_scale,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "progress": progress,
    }
    results: list[Any] = list(
        train_many(
            [restarted(base, own, factory) for own in seeds],
            likelihood,
            data,
            seeds=seeds,
            epochs=epochs,
            learning_rate=learning_rate,
            optimizer=optimizer,
            parameters=list(base.names),
            output=output,
            **shared,
        )
    )
    raws = [result.raw for result in results]
    if swa_epochs:
        results = [
            swa(
                result,
                likelihood,
                data,
                epochs=swa_epochs,
                seed=own,
                learning_rate=swa_learning_rate,
                **shared,
            )
            for result, own in zip(results, seeds, strict=True)
        ]
    return train_curve(
        base,
        likelihood,
        data,
        ends=[_Solution(r.network, raw) for r, raw in zip(results, raws, strict=True)],
        degree=degree,
        kind=kind or ("bezier" if solutions == 2 else "polygon"),
        epochs=epochs if curve_epochs is None else curve_epochs,
        learning_rate=learning_rate if curve_learning_rate is None else curve_learning_rate,
        optimizer=optimizer,
        seed=seed,
        **shared,
    )


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
        fail(
            "parameters",
            "whole parameters to train solutions of their own",
            "masks",
            "Train them elsewhere and pass them to train_curve as ends=",
        )
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
            fail(
                "factory",
                "modules of the architecture of the module",
                "another",
                "A curve connects solutions of one architecture",
            )
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
        fail(
            "ends",
            "2 solutions" if kind == "bezier" else "at least 2 solutions",
            len(ends),
            "Pass kind='polygon' to connect more" if len(ends) > 2 else "",
        )
    if degree < 2:
        fail(
            "degree",
            "at least 2, so that there is a point between the ends to train",
            degree,
            "A straight line between the ends is Curve(torch.stack(ends))",
        )
    found = [_weights_of(network, end, i) for i, end in enumerate(ends)]
    for i, (a, b) in enumerate(zip(found, found[1:], strict=False)):
        if torch.equal(a, b):
            fail(
                "ends",
                "solutions that differ",
                f"the same weights twice, at {i} and {i + 1}",
                "Train the second one from another seed",
            )
    return found


def _weights_of(network: Network, end: Any, place: int) -> Float[Tensor, "D"]:
    other = getattr(end, "network", end)
    if isinstance(other, Network):
        if other.architecture != network.architecture:
            fail(
                f"ends[{place}]",
                "the architecture of the module",
                "another",
                "Train both ends from one architecture",
            )
        other = other.weights
    if not isinstance(other, Tensor):
        fail_type(f"ends[{place}]", "a weight vector, a Network or a training result", end)
    if other.shape != (network.size,):
        fail(
            f"ends[{place}]",
            f"{network.size} weights, as the network has",
            f"shape {tuple(other.shape)}",
            "Flatten them with network.flatten(module)",
        )
    return other.detach().to(network.weights)


def _raw_of(ends: Sequence[Any] | None) -> Tensor | None:
    """The mean of what the likelihoods of the ends have learned, where that is known."""
    raws = [end.raw for end in ends or () if isinstance(end, (TrainingResult, _Solution))]
    if not raws or len(raws) < len(ends or ()) or len({raw.shape for raw in raws}) > 1:
        return None
    return torch.stack(raws).mean(0)


def _check_join(extra: Mapping[str, Tensor] | None, join: Join | None) -> None:
    if (join is None) != (not extra):
        fail(
            "join",
            "a function that brings the tensors of extra into the outputs"
            if extra
            else "tensors to learn in extra",
            "None" if extra else "no tensors in extra",
        )


def _begun(
    network: Network,
    fixed: Sequence[Tensor],
    degree: int,
    kind: CurveKind,
    factory: Callable[[], nn.Module] | None,
    seed: int,
    plan: Plan,
) -> ControlPoints:
    """Control points at the start: on lines between the solutions, or each from fresh weights."""
    if not fixed:
        control = ControlPoints(network.weights, degree + 1, (), kind, plan)
        for i in range(degree + 1):
            control.write(i, _fresh_weights(network, factory, derive(seed, 3, i)))
        return control
    count = (len(fixed) - 1) * degree + 1
    control = ControlPoints(network.weights, count, range(0, count, degree), kind, plan)
    for i in range(count):
        a, step = divmod(i, degree)
        control.write(i, torch.lerp(fixed[a], fixed[a + 1], step / degree) if step else fixed[a])
    return control

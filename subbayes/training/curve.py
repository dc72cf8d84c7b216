r"""Training of curves of low loss in weight space (Garipov et al. 2018; Dold et al. 2024).

The loss of a curve $\phi$ with control points $p_0 \dots p_k$ is the expected loss at a random
place, which is drawn in each step,

$$ \min_{p}\; \mathbb{E}_{t \sim U(0, 1)}\, \ell(\phi(t)), \qquad
   \frac{\partial \ell(\phi(t))}{\partial p_i} = c_i(t)\, \nabla \ell(\phi(t)), $$

so that a step costs one gradient of the network for any number of control points. `connect` trains
the control points between fixed solutions, which are trained first (Garipov et al.). `train_curve`
trains all control points at once, from their own initial weights (Dold et al.).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.initialisation import fresh_weights, module_with_fresh_weights
from subbayes.networks.network import Network, as_network
from subbayes.training.configuration import Training
from subbayes.training.curve_steps import ControlPoints, ExtraParameters, TrainableCurve
from subbayes.training.loop import History, run
from subbayes.training.many import train_many
from subbayes.training.minibatches import Minibatches, split_validation
from subbayes.training.trainer import TrainingResult, swa
from subbayes.training.unfinished import (
    has_converged,
    losses_up_to,
    unfinished_unsaid,
    warn_of_unfinished,
)
from subbayes.training.weight_curve import CurveKind, WeightCurve
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.seeding import derive_seed, fork_rng
from subbayes.utils.types import ModuleFactory, Weights


@dataclass(frozen=True, repr=False)
class CurveResult:
    """Result of training a curve.

    Attributes:
        curve: the curve; `curve.subspace()` holds it.
        network: at the middle of the curve, t = 1/2, BatchNorm statistics refreshed.
        likelihood: the likelihood with its learned parameters, as plain numbers.
        history: as of `TrainingResult`; the losses are those at the random places of the steps.
        best_epoch: the epoch of this curve, counted from 1.
        extra: the tensors learned with the curve, by name.
        likelihood_parameters: unconstrained parameters of the likelihood.
    """

    curve: WeightCurve
    network: Network
    likelihood: Likelihood
    history: History
    best_epoch: int
    extra: dict[str, Tensor] = field(default_factory=dict)
    likelihood_parameters: Float[Tensor, "p"] = field(default_factory=lambda: torch.zeros(0))

    def at(self, t: float, refresh_batchnorm: Any = None) -> Network:
        """The network at a place on the curve.

        Args:
            t: the place, in [0, 1].
            refresh_batchnorm: data to re-estimate BatchNorm statistics on; by default the
                statistics are those of the middle.
        """
        weights = self.curve.point(float(t)).to(self.network.weights)
        if refresh_batchnorm is None:
            return self.network.with_weights(weights)
        return self.network.refresh_batchnorm(weights, Data.of(refresh_batchnorm))

    def __repr__(self) -> str:
        return (
            f"CurveResult({self.curve!r}, {self.likelihood!r}, "
            f"epoch {self.best_epoch} of {len(self.history['train_loss'])})"
        )


def train_curve(
    module: nn.Module | Network,
    likelihood: Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    degree: int = 2,
    kind: CurveKind = "bezier",
    validation: Any = None,
    extra: ExtraParameters | None = None,
    factory: ModuleFactory | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callable[[int, WeightCurve], Any] | None = None,
) -> CurveResult:
    r"""Train a curve of low loss from scratch.

    All k + 1 control points start from their own initial weights and are trained in a single run;
    `connect` trains a curve between solutions instead. Only the weights of the network lie on the
    curve; other parameters keep the module's values. The parameters of the likelihood have one
    value for the whole curve and are learned as well, and so are the tensors of `extra`.

    Memory: one copy of the weights per control point, the current point, its gradient, and the
    state of the optimiser for the control points that are trained (twice their size for Adam).
    Early stopping keeps a second copy of the control points.

    Args:
        module: the module, or a `Network` that selects the weights of one; not changed.
        likelihood: p(y | f).
        data: as for `train`.
        training: as for `train`, for `curve_epochs` passes if given; one t is drawn for each step.
            `clip_norm` limits the gradient of the log-likelihood at the point, and `prior_scale`
            is that of the weights on the curve.
        degree: k, the degree of a Bézier curve or the number of segments of a polygonal chain;
            0 for a single point (training of one network with the tensors of `extra`).
        kind: "bezier" or "polygon".
        validation: held-out data, as for `train`; scored at five places on the curve.
        extra: tensors learned with the curve that are not on it.
        factory: makes a module with new initial weights; needed where a layer has no
            `reset_parameters`.
        seed: seed of initial weights, places, shuffling, dropout and the validation split.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, curve) after each epoch; training stops if it returns True.

    Raises:
        InputError: nothing to train, or what `train` raises.

    Source: Dold et al. (2024), "Bayesian semi-structured subspace inference", algorithm 1.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> result = train_curve(net, Gaussian(0.1), (x, x[:, 0] ** 2), Training(epochs=5))
        >>> result.curve, result.curve.subspace()
        (WeightCurve(bezier, degree=2, size=25), DenseSubspace(rank=2, size=25))
    """
    network = as_network(module)
    check_choice("kind", kind, ("bezier", "polygon"))
    check_count("degree", degree, 0)
    training = training.along_curve()

    def initial() -> ControlPoints:
        control = ControlPoints(network, degree + 1, (), kind, training)
        for i in range(degree + 1):
            control.set_point(i, fresh_weights(network, factory, derive_seed(seed, 3, i)))
        return control

    return _train_control_points(
        network, likelihood, data, training, initial, validation, seed, progress, callback, extra
    )


def _train_control_points(
    network: Network,
    likelihood: Likelihood,
    data: Any,
    training: Training,
    initial: Callable[[], ControlPoints],
    validation: Any,
    seed: int,
    progress: bool | None,
    callback: Callable[[int, WeightCurve], Any] | None,
    extra: ExtraParameters | None = None,
    likelihood_parameters: Tensor | None = None,
) -> CurveResult:
    """Train the control points that `initial` makes."""
    check_count("epochs", training.epochs)
    with fork_rng(seed, network.device), torch.enable_grad():
        data, held_out = split_validation(data, training, validation, seed)
        minibatches = Minibatches(data, likelihood, network, training.batch_size, seed)
        control = initial()
        task = TrainableCurve(
            minibatches,
            training,
            control,
            held_out=held_out,
            likelihood_parameters=likelihood_parameters,
            extra=extra,
            seed=derive_seed(seed, 2),
        )
        histories, epochs = run(
            task,
            training.epochs,
            "Training the curve",
            patience=training.patience,
            time_limit=training.time_limit,
            after_epoch=lambda epoch, _: callback and callback(epoch, control.curve()),
            progress=progress,
        )
        task.free_memory()
        middle = task.network_at(0.5)
    losses = losses_up_to(histories[0], epochs[0])
    warn_of_unfinished([has_converged(middle, minibatches, task.unconstrained.detach(), losses)])
    return CurveResult(
        curve=control.curve(),
        network=middle,
        likelihood=task.learned_likelihood(),
        history=histories[0],
        best_epoch=epochs[0],
        extra={name: tensor.detach().clone() for name, tensor in task.extra.items()},
        likelihood_parameters=task.unconstrained.detach().clone(),
    )


def connect(
    module: nn.Module | Network,
    likelihood: Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    solutions: int | Sequence[Any] = 2,
    degree: int = 2,
    kind: CurveKind | None = None,
    validation: Any = None,
    factory: ModuleFactory | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callable[[int, WeightCurve], Any] | None = None,
) -> CurveResult:
    """Train a curve of low loss through independent solutions, which are trained first if needed.

    The solutions stay fixed, bit for bit. The control points between them start on the straight
    lines from one to the next.

    Args:
        module: the architecture, or a `Network` that selects the weights of a module; not changed.
        likelihood: p(y | f); its parameters start on the curve from the solutions' mean.
        data: as for `train`.
        training: of the solutions (with `swa_epochs` of weight averaging after it) and of the
            curve (for `curve_epochs` passes if given).
        solutions: number of solutions to train, each from new initial weights, or trained ones to
            connect, in order: weight vectors (D,), networks, or results of `train` or `swa`. More
            than two need a polygonal chain.
        degree: degree of a Bézier curve, or number of segments of a chain from one solution to the
            next: 2 for one bend.
        kind: "bezier" or "polygon"; by default a Bézier curve between two solutions and a chain
            through more.
        validation: held-out data, as for `train`.
        factory: makes a module with new initial weights; needed where a layer has no
            `reset_parameters`.
        seed: solution s is seeded by the seed and s.
        progress: show progress bars; None shows them on a terminal.
        callback: called with (epoch, curve) after each epoch of the curve; its training stops if it
            returns True.

    Raises:
        InputError: a Bézier curve through more than two solutions, solutions of different
            architectures or equal ones, or what `train` raises.

    Source: Garipov et al. (2018), "Loss surfaces, mode connectivity, and fast ensembling of
    DNNs", section 3.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = connect(subbayes.MLP(1, (5,), 1), Gaussian(0.1), (x, x[:, 0] ** 2),
        ...                  Training(epochs=5, swa_epochs=0), solutions=3)
        >>> result.curve
        WeightCurve(polygon, degree=4, size=16)
    """
    network = as_network(module)
    count = solutions if isinstance(solutions, int) else len(solutions)
    check_count("solutions", count, 2)
    kind = kind or ("polygon" if count > 2 else "bezier")
    check_choice("kind", kind, ("bezier", "polygon"))
    if kind == "bezier" and count > 2:
        fail("kind", "'polygon' to connect more than 2 solutions", "'bezier'")
    check_count("degree", degree, 2)  # 1 is a straight line, which has no point to train
    ends: Sequence[Any] = (
        _train_solutions(
            network, likelihood, data, training, solutions, validation, factory, seed, progress
        )
        if isinstance(solutions, int)
        else solutions
    )
    fixed = [_weights_of(network, end, f"solutions[{i}]") for i, end in enumerate(ends)]
    if any(torch.equal(a, b) for a, b in pairwise(fixed)):
        remedy = "Train the second one from another seed"
        fail("solutions", "solutions that differ", "the same weights twice", remedy)
    training = training.along_curve()

    def initial() -> ControlPoints:
        count = (len(fixed) - 1) * degree + 1
        control = ControlPoints(network, count, range(0, count, degree), kind, training)
        for i in range(count):
            a, step = divmod(i, degree)
            control.set_point(
                i, torch.lerp(fixed[a], fixed[a + 1], step / degree) if step else fixed[a]
            )
        return control

    return _train_control_points(
        network,
        likelihood,
        data,
        training,
        initial,
        validation,
        seed,
        progress,
        callback,
        likelihood_parameters=_mean_parameters(ends),
    )


def _train_solutions(
    network: Network,
    likelihood: Likelihood,
    data: Any,
    training: Training,
    count: int,
    validation: Any,
    factory: ModuleFactory | None,
    seed: int,
    progress: bool | None,
) -> list[Any]:
    """Solutions from their own initial weights, each seeded by the seed and its number."""
    seeds = [derive_seed(seed, s) for s in range(count)]
    with unfinished_unsaid():  # the curve is trained further
        results = train_many(
            [module_with_fresh_weights(network, own, factory) for own in seeds],
            likelihood,
            data,
            training,
            seeds=seeds,
            validation=validation,
            parameters=list(network.names),
            output=network.output,
            progress=progress,
        )
    if not training.swa_epochs:
        return results
    return [
        replace(
            result,
            network=swa(result, likelihood, data, training, seed=own, progress=progress).network,
        )
        for result, own in zip(results, seeds, strict=True)
    ]


def _weights_of(network: Network, solution: Any, argument: str) -> Weights:
    weights = getattr(solution, "network", solution)
    if isinstance(weights, Network):
        if weights.architecture != network.architecture:
            fail(
                argument,
                "the architecture of the module",
                "another",
                "Train both ends from one architecture",
            )
        weights = weights.weights
    return weights.detach().to(network.weights)


def _mean_parameters(solutions: Sequence[Any]) -> Tensor | None:
    """The mean of the likelihood parameters of the solutions, if all are known."""
    known = [one.likelihood_parameters for one in solutions if isinstance(one, TrainingResult)]
    if not known or len(known) < len(solutions) or len({one.shape for one in known}) > 1:
        return None
    return torch.stack(known).mean(0)

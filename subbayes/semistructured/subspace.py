r"""Where a semi-structured model is sampled: networks in few directions, effects whole.

"curve" is algorithm 1 of Dold et al. (2024): a Bézier curve of degree k through the weights of the
networks, all control points and the effects trained at once; its affine span, with orthonormal
principal directions, holds the networks, and the effects move freely. "naive" is what the paper
warns of: effects are on the curve and projected with the rest. "full" and "last-layer" give the
networks all their weights, or those of their last layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.data import Data
from subbayes.networks.network import Network, select
from subbayes.priors import Normal
from subbayes.semistructured.effects import Effects
from subbayes.semistructured.families import Family
from subbayes.semistructured.module import DeepPart, Predictors
from subbayes.subspace import CoordinateSubspace, FullSubspace, JointSubspace, Subspace
from subbayes.subspaces.curve import Curve
from subbayes.training.configuration import Training
from subbayes.training.curve import CurveResult, ExtraParameters, train_curve
from subbayes.training.trainer import History
from subbayes.utils.checks import check_choice, check_positive, fail
from subbayes.utils.seeding import derive

__all__ = [
    "FAR",
    "SPACES",
    "Fitting",
    "Space",
    "build_ensemble",
    "build_space",
    "most_probable",
    "trained",
]

FAR = 3.0  # standard deviations of the prior within which chains start
SPACES = ("curve", "naive", "full", "last-layer")


@dataclass(frozen=True)
class Fitting:
    """How networks are trained before sampling.

    Attributes:
        epochs: passes over the data.
        learning_rate: of Adam.
        batch_size: rows per step.
        weight_decay: of the networks' weights.
        validation: share of the rows held out to choose the epoch, or None to take the last.
        patience: stop after so many epochs without a better score on them; None trains on and
            takes the best epoch.
    """

    epochs: int = 500
    learning_rate: float = 5e-3
    batch_size: int | None = 64
    weight_decay: float = 1e-4
    validation: float | None = 0.2
    patience: int | None = 100


@dataclass(frozen=True)
class Space:
    """Where the posterior lives, and where chains may start.

    Attributes:
        subspace: of all weights, effects first.
        prior: of its coordinates.
        starts: good points, shape (m, k); chains start at them in turn.
        rank: coordinates of the networks.
        kind: what it is, one of `SPACES`, or "ensemble".
        curve: the curve, where one was trained.
        history: of the training.
        projected: whether effects are projected with the networks.
    """

    subspace: Subspace
    prior: Normal
    starts: Float[np.ndarray, "m k"]
    rank: int
    kind: str = "curve"
    curve: Curve | None = None
    history: History = field(default_factory=dict)
    projected: bool = False


def build_space(
    kind: str,
    structure: Effects,
    deep: DeepPart | None,
    family: Family,
    data: Data,
    *,
    rank: int,
    fitting: Fitting,
    spread: float | str,
    weight_scale: float,
    seed: int,
    progress: bool | None,
) -> Space:
    """Train what has to be trained and say where to sample.

    Args:
        kind: one of `SPACES`; of no meaning without networks that have weights to learn.
        structure: the effects.
        deep: the networks.
        family: of the response.
        data: inputs and targets.
        rank: of the curve.
        fitting: how networks are trained.
        spread: standard deviation of the prior of the curve's coordinates; "curve" takes that of
            its control points.
        weight_scale: standard deviation of the prior of weights that move freely.
        seed: of the training.
        progress: show progress bars.
    """
    check_choice("subspace", kind, SPACES)
    start = most_probable(structure, family, data)
    if deep is None or not any(p.requires_grad for p in deep.parameters()):
        nothing = FullSubspace(torch.from_numpy(start) * 0)
        return Space(nothing, Normal(np.ones(structure.size)), start[None], 0)
    network = Network(deep)
    if rank > network.size:
        fail("rank", f"at most {network.size}, the networks' weights", rank)
    if kind == "naive":
        return _naive(structure, deep, family, data, rank, fitting, spread, start, seed, progress)
    degree = rank if kind == "curve" else 0
    result = trained(structure, deep, family, data, start, degree, fitting, seed, progress)
    effects = result.extra["effects"].double().cpu().numpy()
    if kind == "curve":
        span = result.curve.subspace("principal")
        places = result.curve.coordinates(np.linspace(0, 1, 33), span).numpy()
        inner: Subspace = span
        own = _spread(result.curve, spread)
        prior, curve = np.full(rank, own), result.curve
    else:
        middle, curve = result.network.weights, None
        if kind == "full":
            inner = FullSubspace(torch.zeros_like(middle))
            places = middle.double().cpu().numpy()[None]
        else:
            inner = CoordinateSubspace(middle, _last_layers(network))
            places = np.zeros((1, inner.rank))
        prior = np.full(inner.rank, check_positive("weight_scale", weight_scale))
    starts = np.concatenate([places, np.broadcast_to(effects, (len(places), len(effects)))], 1)
    return Space(
        JointSubspace(inner, structure.size),
        Normal(np.append(prior, np.ones(structure.size))),
        starts,
        inner.rank,
        kind,
        curve,
        result.history,
    )


def build_ensemble(
    structure: Effects,
    deep: DeepPart,
    family: Family,
    data: Data,
    *,
    members: int,
    fitting: Fitting,
    weight_scale: float,
    seed: int,
    progress: bool | None,
) -> Space:
    """A deep ensemble: networks and effects trained anew from initial weights of their own.

    Args:
        structure: the effects.
        deep: the networks.
        family: of the response.
        data: inputs and targets.
        members: how many; they are the starts of the space.
        fitting: how each is trained.
        weight_scale: standard deviation of the prior of the weights.
        seed: member s is seeded by the seed and s.
        progress: show progress bars.

    Source: Lakshminarayanan et al. (2017); Kook et al. (2022) for semi-structured models.
    """
    start, network = most_probable(structure, family, data), Network(deep)
    places, history = [], []
    for member in range(members):
        result = trained(
            structure, deep, family, data, start, 0, fitting, derive(seed, member), progress
        )
        found = [result.network.weights, result.extra["effects"]]
        places.append(np.concatenate([part.double().cpu().numpy() for part in found]))
        history.append(result.history)
    return Space(
        JointSubspace(FullSubspace(torch.zeros_like(network.weights)), structure.size),
        Normal(np.append(np.full(network.size, weight_scale), np.ones(structure.size))),
        np.stack(places),
        network.size,
        "ensemble",
        history=history[0],
    )


def trained(
    structure: Effects,
    deep: DeepPart,
    family: Family,
    data: Data,
    start: np.ndarray,
    degree: int,
    fitting: Fitting,
    seed: int,
    progress: bool | None,
    callback: Callable[[int, Curve], Any] | None = None,
) -> CurveResult:
    """Networks on a curve, or one set of them at degree 0, with the effects learned along.

    Args:
        structure: the effects.
        deep: the networks.
        family: of the response.
        data: inputs and targets.
        start: coordinates of the effects to start at.
        degree: of the curve.
        fitting: how networks are trained.
        seed: of the training.
        progress: show a progress bar.
        callback: as for `train_curve`.
    """
    network = Network(deep)
    return train_curve(
        network,
        family,
        data,
        _training(fitting),
        degree=degree,
        extra=ExtraParameters(
            {"effects": torch.from_numpy(start).to(network.dtype)},
            lambda outputs, extra, inputs: _joined(structure, deep, outputs, extra, inputs),
            prior_scale=1.0,
        ),
        seed=seed,
        progress=progress,
        callback=callback,
    )


def _training(fitting: Fitting) -> Training:
    patience = fitting.patience
    if patience is None and fitting.validation is not None:
        patience = fitting.epochs  # never stops, and takes the best
    return Training(
        epochs=fitting.epochs,
        learning_rate=fitting.learning_rate,
        batch_size=fitting.batch_size,
        weight_decay=fitting.weight_decay or None,
        clip_norm=None,
        validation=fitting.validation,
        patience=patience,
    )


def _joined(structure: Effects, deep: DeepPart, outputs: Tensor, extra: Any, inputs: Any) -> Tensor:
    eta = structure(extra["effects"], inputs["design"], inputs["offset"])
    more = eta.shape[-1] - outputs.shape[-1]
    return eta + (torch.nn.functional.pad(outputs, (0, more)) if more else outputs)


def _naive(
    structure: Effects,
    deep: DeepPart,
    family: Family,
    data: Data,
    rank: int,
    fitting: Fitting,
    spread: float | str,
    start: np.ndarray,
    seed: int,
    progress: bool | None,
) -> Space:
    network = Network(deep)

    def begun() -> Predictors:
        from subbayes.networks.initialisation import fresh

        again = fresh(deep, None, int(torch.initial_seed() % 2**31))
        assert isinstance(again, DeepPart)
        module = Predictors(structure, again, network.dtype)
        with torch.no_grad():
            module.effects.copy_(torch.from_numpy(start))
            module.effects.add_(0.1 * torch.randn_like(module.effects))
        return module

    whole = Predictors(structure, deep, network.dtype)
    result = train_curve(
        whole,
        family,
        data,
        _training(fitting),
        degree=rank,
        factory=begun,
        seed=seed,
        progress=progress,
    )
    inner = result.curve.subspace("principal")
    places = result.curve.coordinates(np.linspace(0, 1, 33), inner).numpy()
    return Space(
        inner,
        Normal(np.full(rank, _spread(result.curve, spread))),
        places,
        rank,
        "naive",
        result.curve,
        result.history,
        projected=True,
    )


def _spread(curve: Curve, spread: float | str) -> float:
    r"""Standard deviation $\sigma_\varphi$ of the prior on the curve's coordinates."""
    if spread != "curve":
        return check_positive("spread", spread)
    points = curve.points.double()
    away = (points - points.mean(0)).square().sum(1).mean()
    return float((away / curve.degree).sqrt())


def _last_layers(network: Network) -> Tensor:
    """Positions of the weights of each network's last layer with weights."""
    module = network.module_with()
    assert isinstance(module, DeepPart)
    modules = module.networks
    chosen: list[Tensor] = []
    for key, module in modules.items():
        for name in select(module, "last-layer"):
            at = network.spans[f"networks.{key}.{name}"]
            chosen.append(torch.arange(at.start, at.stop))
    return torch.cat(chosen).sort().values


def most_probable(structure: Effects, family: Family, data: Data) -> Float[np.ndarray, "P"]:
    """The most probable effects without networks, in their coordinates: where chains start."""
    parts = []
    for inputs, y in data.batches(4096):
        assert isinstance(inputs, dict)
        parts.append((inputs["design"].double(), inputs["offset"].double(), y))
    zeta = torch.zeros(structure.size, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [zeta],
        max_iter=300,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    n = data.n

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * zeta.square().sum() / n
        for x, o, y in parts:
            loss = loss - family.log_prob(structure(zeta, x, o), y).sum() / n
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    found = zeta.detach().numpy().copy()
    if not np.isfinite(found).all():
        return np.zeros(structure.size)
    return np.clip(found, -FAR, FAR)  # where effects fit all rows, sigma runs to 0

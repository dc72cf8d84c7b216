r"""Subspaces of a semi-structured model: networks in few directions, effects without restriction.

`SemiStructuredSubspace` is algorithm 1 of Dold et al. (2024): a Bézier curve of degree k through
the weight space of the networks, whose control points are trained together with the effects. The
networks are restricted to its affine span, with orthonormal principal directions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.networks.selection import select
from subbayes.priors import Normal
from subbayes.regression.posterior import Space, most_probable_effects
from subbayes.regression.shapes import EffectPoint
from subbayes.semistructured.predictors import DeepPredictor, Predictors, pad_thresholds
from subbayes.semistructured.specification import JointModel
from subbayes.subspace import CoordinateSubspace, FullSubspace, JointSubspace, Subspace
from subbayes.training.configuration import Training
from subbayes.training.curve import CurveResult, train_curve
from subbayes.training.curve_steps import ExtraParameters
from subbayes.training.loop import History
from subbayes.training.weight_curve import WeightCurve
from subbayes.utils.checks import check_choice, check_count, check_positive, fail, fail_type
from subbayes.utils.warning import warn_user

_DEFAULT_RANK = 12
_START_POINTS = 33  # along a curve


@dataclass(frozen=True)
class JointSpace(Space):
    """The space of a posterior of networks and effects, and the start points of its chains.

    Attributes:
        subspace: subspace of the effects' coordinates and all weights, effects first.
        prior: prior of its coordinates, those of the networks first.
        start_points: coordinates of trained networks and effects.
        rank: number of coordinates of the networks.
        kind: name of the subspace.
        curve: the curve, if one was trained.
        history: history of the training.
    """

    kind: str = "curve"
    curve: WeightCurve | None = None
    history: History = field(default_factory=dict)

    @property
    def projected(self) -> bool:
        """Whether the effects are projected with the networks."""
        return self.rank > 0 and not isinstance(self.subspace, JointSubspace)

    def __repr__(self) -> str:
        effects = self.subspace.rank - self.rank
        return f"JointSpace({self.kind!r}: rank={self.rank} of networks, {effects} of effects)"


# --- training -----------------------------------------------------------------------------------

TRAINING = Training(epochs=500, weight_decay=1e-4, clip_norm=None, validation=0.2, patience=100)
"""The default settings of training."""

_FIRST_EPOCHS, _FEW_EPOCHS = 5, 50  # where a best epoch says that networks are hardly trained


def train_networks(
    model: JointModel,
    effects: EffectPoint,
    degree: int,
    training: Training,
    seed: int,
    progress: bool | None,
    callback: Callable[[int, WeightCurve], Any] | None = None,
) -> CurveResult:
    """Train networks on a curve of the given degree together with the effects; see `train_curve`.

    At degree 0 the curve is a point. `effects` are the initial coordinates of the effects.

    Warns:
        UserWarning: held-out rows were predicted best in the first epochs, so that the networks are
            hardly trained.
    """
    network = Network(model.deep)

    def join(outputs: Tensor, extra: Any, inputs: Any) -> Tensor:
        eta = model.structured(extra["effects"], inputs["design"], inputs["offset"])
        return eta + pad_thresholds(outputs, eta)

    result = train_curve(
        network,
        model.family,
        model.data,
        with_best_epoch(training),
        degree=degree,
        extra=ExtraParameters(
            {"effects": torch.from_numpy(effects).to(network.dtype)},
            join,
            prior_scale=1.0,
            traceable=True,
        ),
        seed=seed,
        progress=progress,
        callback=callback,
    )
    _warn_of_untrained(result.history.get("validation_log_likelihood") or ())
    keep_statistics(model, result)
    return result


def keep_statistics(model: JointModel, result: CurveResult) -> None:
    """Give the networks of a model the BatchNorm statistics of the trained ones.

    They are those of the middle of the curve, which is a likely point of its subspace.
    """
    module = result.network.module_with()
    trained = module.deep if isinstance(module, Predictors) else module
    assert trained is not None
    for buffer, value in zip(model.deep.buffers(), trained.buffers(), strict=True):
        buffer.copy_(value)


def _warn_of_untrained(scores: Sequence[float]) -> None:
    """Warn if the networks are those of the first of many epochs."""
    best = int(np.argmax(scores)) + 1 if len(scores) else 0
    if best <= _FIRST_EPOCHS < _FEW_EPOCHS <= len(scores):
        warn_user(
            f"training: held-out rows were predicted best after {best} of {len(scores)} epochs, so "
            "that the networks are close to their initial weights and add little. The rows may "
            "be too few to hold some out: compare with Training(validation=None, patience=None, "
            "prior_scale=1.0), or another seed"
        )


def with_best_epoch(training: Training) -> Training:
    """The settings with a patience, so that the best epoch is used if rows are held out."""
    if training.validation is None or training.patience is not None:
        return training
    return replace(training, patience=training.epochs)


# --- subspaces ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkSubspace(ABC):
    """Where the weights of the networks may move: a frozen dataclass of its settings.

    Attributes:
        name: name for `SemiStructuredRegression.fit(subspace=name)`.
    """

    name: ClassVar[str]

    @abstractmethod
    def build(
        self, model: JointModel, training: Training, seed: int, progress: bool | None
    ) -> JointSpace:
        """Train the networks of a model and build the space of their weights and the effects."""


@dataclass(frozen=True)
class SemiStructuredSubspace(NetworkSubspace):
    r"""The span of a Bézier curve of networks, beside free effects (Dold et al. 2024).

    Args:
        rank: number of directions k of the networks, the degree of the curve; by default 12, or
            the number of their weights if that is smaller.
        spread: standard deviation $\sigma_\varphi$ of the prior of the networks' coordinates;
            "curve" takes that of the control points.

    """

    rank: int | None = None
    spread: float | Literal["curve"] = "curve"
    name = "curve"

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("rank", self.rank)
        if self.spread != "curve":
            check_positive("spread", self.spread)

    def _rank(self, network: Network) -> int:
        if self.rank is not None and self.rank > network.size:
            fail("rank", f"at most {network.size}, the networks' weights", self.rank)
        return min(_DEFAULT_RANK, network.size) if self.rank is None else self.rank

    def _prior_scale(self, curve: WeightCurve) -> float:
        if self.spread != "curve":
            return self.spread
        points = curve.points.double()
        variance = (points - points.mean(0)).square().sum(1).mean()
        return float((variance / curve.degree).sqrt())

    def build(
        self, model: JointModel, training: Training, seed: int, progress: bool | None
    ) -> JointSpace:
        """Train the curve and span its principal directions."""
        rank, effects = self._rank(Network(model.deep)), most_probable_effects(model)
        result = train_networks(model, effects, rank, training, seed, progress)
        span = result.curve.subspace("principal")
        places = result.curve.coordinates(np.linspace(0, 1, _START_POINTS), span).numpy()
        prior = np.full(rank, self._prior_scale(result.curve))
        return _beside_effects(self.name, model, span, prior, places, result, result.curve)


@dataclass(frozen=True)
class AllWeights(NetworkSubspace):
    """All weights of the networks: the reference, for networks of a few hundred weights.

    Args:
        weight_scale: standard deviation of the prior of the weights.
    """

    weight_scale: float = 1.0
    name = "full"

    def __post_init__(self) -> None:
        check_positive("weight_scale", self.weight_scale)

    def build(
        self, model: JointModel, training: Training, seed: int, progress: bool | None
    ) -> JointSpace:
        """Train the networks, which are the start point."""
        effects = most_probable_effects(model)
        result = train_networks(model, effects, 0, training, seed, progress)
        inner, start = self._inner(model, result.network.weights)
        prior = np.full(inner.rank, self.weight_scale)
        return _beside_effects(self.name, model, inner, prior, start, result)

    def _inner(self, model: JointModel, weights: Tensor) -> tuple[Subspace, np.ndarray]:
        """The subspace of the weights, and the coordinates of the trained weights."""
        return FullSubspace(torch.zeros_like(weights)), weights.double().cpu().numpy()[None]


@dataclass(frozen=True)
class LastLayer(AllWeights):
    """The weights of each network's last layer; the others keep their trained values.

    Args:
        weight_scale: as for `AllWeights`.
    """

    name = "last-layer"

    def _inner(self, model: JointModel, weights: Tensor) -> tuple[Subspace, np.ndarray]:
        inner = CoordinateSubspace(weights, _last_layers(Network(model.deep)))
        return inner, np.zeros((1, inner.rank))


def _beside_effects(
    kind: str,
    model: JointModel,
    inner: Subspace,
    prior: np.ndarray,
    start: np.ndarray,
    result: CurveResult,
    curve: WeightCurve | None = None,
) -> JointSpace:
    """The space of a subspace of the networks' weights and free effects."""
    size = model.structured.size
    effects = result.extra["effects"].double().cpu().numpy()
    start_points = np.concatenate([start, np.broadcast_to(effects, (len(start), size))], 1)
    return JointSpace(
        JointSubspace(inner, size),
        Normal(np.append(prior, np.ones(size))),
        start_points,
        inner.rank,
        kind,
        curve,
        result.history,
    )


def _last_layers(network: Network) -> Tensor:
    """Positions of the weights of each network's last layer."""
    deep = network.module_with()
    assert isinstance(deep, DeepPredictor)
    positions: list[Tensor] = []
    module: nn.Module
    for key, module in deep.networks.items():
        for name in select(module, "last-layer"):
            span = network.spans[f"networks.{key}.{name}"]
            positions.append(torch.arange(span.start, span.stop))
    return torch.cat(positions).sort().values


SUBSPACES: dict[str, type[NetworkSubspace]] = {
    kind.name: kind for kind in (SemiStructuredSubspace, AllWeights, LastLayer)
}
"""Subspaces by name."""


def subspace_of(subspace: str | NetworkSubspace) -> NetworkSubspace:
    """Convert a name to the subspace with default settings; return a subspace unchanged.

    Raises:
        InputError: an unknown name. InputTypeError: any other value.

    Example:
        >>> subspace_of("curve")
        SemiStructuredSubspace(rank=None, spread='curve')
    """
    if isinstance(subspace, str):
        check_choice("subspace", subspace, tuple(SUBSPACES))
        return SUBSPACES[subspace]()
    if not isinstance(subspace, NetworkSubspace):
        expected = "a name or an object such as SemiStructuredSubspace(rank=5)"
        fail_type("subspace", expected, subspace)
    return subspace


def build_space(
    subspace: NetworkSubspace,
    model: JointModel,
    training: Training,
    seed: int,
    progress: bool | None,
) -> JointSpace:
    """Build a space; of networks without weights to learn, that of the effects alone."""
    if model.deep.n_weights:
        return subspace.build(model, training, seed, progress)
    return JointSpace.of_effects(most_probable_effects(model))

"""Methods that semi-structured subspaces are compared with, from outside the package."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.networks.initialisation import fresh_module
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.regression.posterior import most_probable_effects
from subbayes.semistructured import AllWeights, NetworkSubspace, SemiStructuredSubspace
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.predictors import DeepPredictor, Predictors
from subbayes.semistructured.specification import JointModel
from subbayes.semistructured.subspace import JointSpace, keep_statistics, with_best_epoch
from subbayes.training.configuration import Training
from subbayes.training.curve import train_curve
from subbayes.utils.checks import check_count
from subbayes.utils.seeding import derive_seed

_START_POINTS = 33  # along a curve


@dataclass(frozen=True)
class NaiveSubspace(SemiStructuredSubspace):
    """The span of a curve of networks and effects, which projects the effects too.

    The posterior of the effects is too narrow (Dold et al. 2024, section 3.1).
    """

    name = "naive"

    def build(
        self, model: JointModel, training: Training, seed: int, progress: bool | None
    ) -> JointSpace:
        """Train the curve of networks and effects and span its principal directions."""
        deep = model.deep
        assert deep is not None
        rank, effects = self._rank(Network(deep)), most_probable_effects(model)

        def fresh_predictors() -> Predictors:
            copy = fresh_module(deep, None, int(torch.initial_seed() % 2**31))
            assert isinstance(copy, DeepPredictor)
            module = Predictors(model.structured, copy)
            with torch.no_grad():
                module.effects.copy_(torch.from_numpy(effects))
                module.effects.add_(0.1 * torch.randn_like(module.effects))
            return module

        result = train_curve(
            Predictors(model.structured, deep),
            model.family,
            model.data,
            with_best_epoch(training),
            degree=rank,
            factory=fresh_predictors,
            seed=seed,
            progress=progress,
        )
        keep_statistics(model, result)
        span = result.curve.subspace("principal")
        return JointSpace(
            span,
            Normal(np.full(rank, self._prior_scale(result.curve))),
            result.curve.coordinates(np.linspace(0, 1, _START_POINTS), span).numpy(),
            rank,
            self.name,
            result.curve,
            result.history,
        )


@dataclass(frozen=True)
class DeepEnsemble(NetworkSubspace):
    """Networks and effects that are trained several times, from different initial weights.

    It is fitted by `fit(subspace=ensemble, inference=ensemble.members_as_draws)`: the draws are the
    members, with the most probable effects given each network, and no posterior of the effects.

    Args:
        members: number of trainings, at least 1.

    Source: Lakshminarayanan et al. (2017); Kook et al. (2022) for semi-structured models.
    """

    members: int = 5
    _trained: list[np.ndarray] = field(default_factory=list, init=False, repr=False)
    name = "ensemble"

    def __post_init__(self) -> None:
        check_count("members", self.members)

    def build(
        self, model: JointModel, training: Training, seed: int, progress: bool | None
    ) -> JointSpace:
        """Train the members, which are the start points of the space."""
        spaces = [
            AllWeights().build(model, training, derive_seed(seed, member), progress)
            for member in range(self.members)
        ]
        points = np.concatenate([space.start_points for space in spaces])
        space = replace(spaces[0], start_points=points, kind=self.name)
        self._trained[:] = [JointPosterior(model, space, seed).with_best_effects(points)]
        return space

    def members_as_draws(self, posterior: Posterior, sampling: Sampling) -> Draws:
        """The members, as an engine."""
        points, meta = self._trained[0][None], {"seed": sampling.seed}
        return Draws(points, meta=meta, engine="deep ensemble", validity="ensemble")

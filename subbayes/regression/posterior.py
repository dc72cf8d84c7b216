"""The posterior of the effects of a regression: start points, draws, weights for predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.arrays import evenly_spaced
from subbayes.data.data import check_rows
from subbayes.diagnostics.surprise import Update
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.predictions.predictive import OUTPUTS_AT_ONCE
from subbayes.priors import Normal
from subbayes.regression.integrals.effects_sampling import are_groups_alone, draw_effects
from subbayes.regression.integrals.empirical_bayes import smoothing_coordinates
from subbayes.regression.questions.working_likelihood import interval_warnings, score_correction
from subbayes.regression.shapes import ChainDraws, EffectDraws, EffectPoint
from subbayes.regression.specification import PreparedModel
from subbayes.subspace import FullSubspace, Subspace
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.modes import Mode
from subbayes.utils.progress import progress_bar, say
from subbayes.utils.trees import n_rows
from subbayes.utils.types import Coordinates, LogDensity, Outputs, WeightsBatch

if TYPE_CHECKING:
    from subbayes.posterior import Posterior

MAX_START = 3.0  # chains start within this many standard deviations of the effects' prior
_NOISE_REDUCTIONS = 20


@dataclass(frozen=True)
class Space:
    """The space of a posterior, and the start points of its chains.

    Attributes:
        subspace: subspace of the effects' coordinates, and of all weights of networks.
        prior: prior of its coordinates.
        start_points: coordinates of probable effects.
        rank: number of coordinates of networks, which stand before those of effects.
    """

    subspace: Subspace
    prior: Normal
    start_points: Float[np.ndarray, "m k"]
    rank: int = 0

    @classmethod
    def of_effects(cls, start: EffectPoint) -> Self:
        """The space of effects alone."""
        subspace = FullSubspace(torch.zeros(len(start), dtype=torch.float64))
        return cls(subspace, Normal(np.ones(len(start))), start[None])


def most_probable_effects(model: PreparedModel) -> EffectPoint:
    """Coordinates of the most probable effects.

    Of groups that are integrated out they are those at the prior medians of the standard
    deviations: at the most probable standard deviations, which are far too large, many Newton steps
    would end.
    """
    likelihood = model.effects_likelihood
    zero = torch.zeros(model.structured.size, dtype=torch.float64)
    fixed = smoothing_coordinates(model.structured) if are_groups_alone(likelihood) else ()
    return as_start(likelihood.mode(zero, fixed)[0].numpy())


def as_start(mode: EffectPoint) -> EffectPoint:
    """A start point near a mode."""
    if not np.isfinite(mode).all():
        return np.zeros_like(mode)
    return np.clip(mode, -MAX_START, MAX_START)  # if effects fit all rows, sigma tends to 0


@dataclass(frozen=True)
class RegressionPosterior:
    """The posterior of a model's effects.

    Attributes:
        model: the model on its training rows.
        space: the space of the coordinates.
        seed: seed of the start points and of the effects.
        mode: how the density is evaluated, as for `Posterior`.
    """

    model: PreparedModel
    space: Space
    seed: int
    mode: Mode = "trace"

    def __getstate__(self) -> dict[str, Any]:
        # without the cached properties, which hold traced functions
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def density(self) -> Posterior:
        """The posterior density, at temperature 1."""
        from subbayes.regression.effects_posterior import EffectsPosterior  # reads networks

        assert isinstance(self.space.subspace, FullSubspace)
        return EffectsPosterior(self.model, self.space.subspace, self.space.prior, self.mode)

    def start_points(self, chains: int) -> Float[np.ndarray, "chains k"]:
        """Start points of chains: trained networks with the best effects, plus small noise.

        Noise that lowers the log density by more than a nat per coordinate, such as a share of the
        scale of a vague prior, is reduced.
        """
        rng = np.random.default_rng([self.seed, 1])
        trained = self.space.start_points
        rows = np.linspace(0, len(trained) - 1, chains).round().astype(int)
        noise = 0.05 * rng.standard_normal((chains, self.space.subspace.rank))
        noise *= self.space.prior.scale
        points = self.with_best_effects(trained[rows])
        least = self.density.value(points) - self.space.subspace.rank
        for _ in range(_NOISE_REDUCTIONS):
            low = ~(self.density.value(points + noise) >= least)
            if not low.any():
                break
            noise[low] *= 0.25
        return points + noise

    def with_best_effects(self, points: Coordinates) -> Coordinates:
        """Replace the effects of start points by the most probable ones."""
        return points

    # --- sampling ---------------------------------------------------------------------------

    def sample(self, engine: Engine, sampling: Sampling, *, automatic: bool = False) -> Draws:
        """Draw effects.

        Args:
            engine: the engine.
            sampling: its settings; chains start at `start_points` unless `initial` is an array.
            automatic: draw by independent proposals instead, where these fit the posterior; see
                `draw_effects`.
        """
        smooth = self.model.specification.smooth
        if automatic:
            likelihood, start = self.model.effects_likelihood, self.space.start_points[0]
            draws = draw_effects(likelihood, start, sampling, smooth)
            if draws is not None:
                return draws
        if smooth == "reml":
            expected = "'bayes' with a checkpoint, start points, many processes or streamed rows"
            fail("smooth", expected, "'reml'", "Leave them out")
        if automatic:
            line = "independent proposals around the mode do not fit the posterior"
            say(f"{line}: sampling by {engine.name}", sampling.progress)
        return engine.run(self.density, self.with_starts(engine, sampling))

    def with_starts(self, engine: Engine, sampling: Sampling, rank: int | None = None) -> Sampling:
        """Settings of a sampling from `start_points`, if the engine needs any."""
        chains = engine.start_count(sampling, self.space.subspace.rank if rank is None else rank)
        if isinstance(sampling.initial, str) and chains:
            return replace(sampling, initial=self.start_points(chains))
        return sampling

    # --- weights of draws -------------------------------------------------------------------

    def weights(self, z: Coordinates | Tensor) -> WeightsBatch:
        """Coordinates of the effects, then weights of networks."""
        return self.space.subspace.weights(torch.as_tensor(z))

    def effects_of(self, draws: Draws, n_draws: int | None = None) -> EffectDraws:
        """Coordinates of the effects of all draws, or of evenly spaced ones."""
        return np.ascontiguousarray(draws.flat(n_draws))[:, self.space.rank :]

    def predictors(
        self,
        z: Float[Tensor, "S k"],
        inputs: dict[str, Tensor],
        correction: Float[Tensor, "S q"] | None = None,
    ) -> Outputs:
        """The predictors of draws at encoded rows.

        Args:
            z: the draws.
            inputs: the rows.
            correction: subtracted from the coefficients, of a model without networks.
        """
        effects = self.weights(z)
        return self.model.structured(effects, inputs["design"], inputs["offset"], correction)

    # --- log-likelihoods of saved draws ------------------------------------------------------

    def saved_log_likelihoods(self, draws: Draws) -> ChainDraws | None:
        """The log-likelihoods that draws have, if they can be computed again.

        Ensembles and linearised Laplace have none.
        """
        if "log_likelihood" in draws.stats:
            return draws.stats["log_likelihood"]
        if "log_density" not in draws.stats:
            return None
        return draws.temperature * (draws.stats["log_density"] - self.space.prior.log_prob(draws.z))

    def log_likelihoods(self, z: Coordinates, draws: Draws) -> LogDensity:
        """The log-likelihoods at some coordinates, as those of `saved_log_likelihoods`."""
        del draws
        return self.density.log_likelihood(z)


@dataclass(frozen=True)
class FittedState:
    """Everything that fitting determines, from which a model predicts, reports and is saved.

    Attributes:
        joint: the posterior of all effects, and of networks, on the training rows.
        draws: its draws.
        settings: engine and sampling of `fit`, for `update`; None for a loaded model.
        updates: what each update by new rows was.
    """

    joint: RegressionPosterior
    draws: Draws
    settings: Mapping[str, Any] | None = None
    updates: tuple[Update, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def model(self) -> PreparedModel:
        """The model on its training rows."""
        return self.joint.model

    @property
    def space(self) -> Space:
        """The space of the coordinates."""
        return self.joint.space

    @property
    def estimand(self) -> str:
        """What the effects are effects of: without networks, they are parameters of the model."""
        return "model"

    def coefficient_shift(self, n_draws: int | None = None) -> Float[np.ndarray, "S q"] | None:
        """What the estimand, or the correction of a working likelihood, adds to the coefficients.

        Those of `StructuredPredictor.n_corrected`; None for nothing.

        Args:
            n_draws: of evenly spaced draws instead of all.
        """
        shift = self._shift
        return shift if shift is None or n_draws is None else evenly_spaced(shift, n_draws)

    def predictors(
        self, inputs: dict[str, Tensor], n_draws: int | None = None, progress: bool | None = False
    ) -> Outputs:
        """The predictors of all draws, or of evenly spaced ones, at encoded rows.

        Raises:
            InputError: no rows, or predictors that memory cannot hold.
        """
        check_rows({"inputs": inputs})
        z = torch.from_numpy(np.ascontiguousarray(self.draws.flat(n_draws)))
        shift = self._score_correction
        if shift is not None:
            chosen = shift if n_draws is None else evenly_spaced(shift, n_draws)
            correction = -torch.from_numpy(chosen)
        count, rows, width = len(z), n_rows(inputs), len(self.model.family.parameters)
        what = f"outputs of {count:,} draws at {rows:,} rows"
        check_memory("inputs", what, 8 * count * rows * width, "Pass n_draws=, or predict batches")
        found = torch.empty(count, rows, width, dtype=torch.float64)
        draws = max(1, OUTPUTS_AT_ONCE // (rows * width))
        with torch.no_grad(), progress_bar(count, "Predicting", progress, "draws") as steps:
            for start in range(0, count, draws):
                some = slice(start, start + draws)
                moved = None if shift is None else correction[some]
                found[some] = self.joint.predictors(z[some], inputs, moved)
                steps.update(len(z[some]))
        return found

    def interval_warnings(self) -> list[str]:
        """A warning of intervals that depend on a working likelihood; empty if they do not."""
        return interval_warnings(self.model, self._score_correction)

    @cached_property
    def _score_correction(self) -> Float[np.ndarray, "S p"] | None:
        return score_correction(self.model, self.draws, self.joint.effects_of(self.draws))

    @cached_property
    def _shift(self) -> Float[np.ndarray, "S q"] | None:
        return self._score_correction

"""The posterior of networks and effects: start points, draws, and weights for predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.networks.network import Network
from subbayes.networks.tracing.tracer import Mode
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import evenly_spaced
from subbayes.priors import Normal
from subbayes.regression.design.centring import Centring, Information
from subbayes.regression.integrals.coefficient_likelihood import NormalStatistics
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.effects_sampling import draw_effects
from subbayes.semistructured.collapsed_networks import CollapsedNetworks
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.effect_density import ConditionalModes, EffectDensity
from subbayes.semistructured.effects_posterior import EffectsPosterior, has_effects_alone
from subbayes.semistructured.estimand import bootstrap_projections
from subbayes.semistructured.marginalisation import marginalisation_of
from subbayes.semistructured.orthogonal_columns import (
    OrthogonalColumns,
    OrthogonalNetworks,
    orthogonal_networks,
)
from subbayes.semistructured.predictors import Predictors
from subbayes.semistructured.specification import PreparedModel
from subbayes.semistructured.subspace import MAX_START, JointSpace
from subbayes.semistructured.tempered_networks import EFFECT_BATCH, TemperedNetworks
from subbayes.semistructured.working_likelihood import interval_warnings, score_correction
from subbayes.subspace import FullSubspace, JointSubspace
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import say

_CORRECTION_BATCH = 256
_NOISE_REDUCTIONS = 20
_MOST_CHECKED = 8  # trained networks at which the effects are integrated out first
_MOST_COEFFICIENTS = 40  # to integrate out, beside those of eliminated groups
_MOST_COLUMNS = 1000  # where coefficients are integrated out
_MOST_NUMBERS = 2**27  # of the design matrix in float64, to integrate out


@dataclass(frozen=True)
class JointPosterior:
    """The posterior of a model's networks and effects in a space.

    Attributes:
        model: the model on its training rows.
        space: the space of the coordinates.
        seed: seed of the start points and of the effects.
        mode: how the density is evaluated, as for `Posterior`.
    """

    model: PreparedModel
    space: JointSpace
    seed: int
    mode: Mode = "trace"

    def __getstate__(self) -> dict[str, Any]:
        # without the cached properties, which hold traced functions
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def orthogonal(self) -> tuple[OrthogonalNetworks, ...]:
        """The networks that are made orthogonal to columns, and these."""
        return orthogonal_networks(self.model) if self.space.rank and self.model.deep else ()

    @cached_property
    def contributions(self) -> Contributions | None:
        """The networks' contributions at the training rows; None without networks to learn."""
        model = self.model
        if not self.space.rank or model.deep is None:
            return None
        width = model.structured.n_corrected
        return Contributions(model.deep, model.inputs, self.orthogonal, width)

    @cached_property
    def density(self) -> Posterior:
        """The posterior density, at temperature 1."""
        found = self._own_density()
        networks = self.space.rank and self.model.deep is not None and not self.space.projected
        if networks and self.model.structured.scaled_blocks():
            found.reparameterisation = self.reparameterisation
        return found

    def _own_density(self) -> Posterior:
        """The density, without coordinates for samplers."""
        model = self.model
        if has_effects_alone(model) and isinstance(self.space.subspace, FullSubspace):
            return EffectsPosterior(model, self.space.subspace, self.space.prior, self.mode)
        bases = {p.names: (p.columns.basis, p.columns.dual) for p in self.orthogonal}
        module = Predictors(model.structured, model.deep, bases)
        return Posterior(
            Network(module),
            model.family,
            model.data,
            self.space.subspace,
            self.space.prior,
            batch_size=model.data.n if self.orthogonal else None,
            mode=self.mode,
        )

    def reparameterisation(self, power: float) -> Centring | None:
        """Coordinates for samplers, for a power of the likelihood; None for those of the space."""
        return None if self.information is None else self.information(power)

    @cached_property
    def information(self) -> Information | None:
        """What the rows say about smooths and effects of groups beside networks; None without both.

        Without networks, these coordinates cost more than the density.
        """
        model, rank = self.model, self.space.rank
        if not rank or self.space.projected or not model.structured.scaled_blocks():
            return None
        if self.contributions is None or model.data.y is None:
            return None
        point = torch.from_numpy(self.space.start_points[:1].astype(np.float64))
        density, zeta = self.effect_density, point[:, rank:]
        assert isinstance(self.space.subspace, JointSubspace)
        deep = self.contributions(
            self.space.subspace.inner.weights(point[:, :rank].to(model.dtype))
        )
        rows = density.row_information(zeta, deep)[0]
        return Information.of(model.structured, rank, zeta[0], density.design, rows)

    @property
    def effect_density(self) -> EffectDensity:
        """The joint density of responses and effects given the networks' contributions."""
        model = self.model
        assert model.data.y is not None
        return EffectDensity(
            model.structured,
            model.family,
            model.inputs["design"].double(),
            model.inputs["offset"].double(),
            model.data.y,
        )

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

    def with_best_effects(self, points: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S k"]:
        """Replace the effects of points by the most probable ones given the networks.

        Training finds the effects given uncorrected networks; in the posterior the networks are
        orthogonal to the effects.
        """
        if self.contributions is None or self.space.projected:
            return points
        assert isinstance(self.space.subspace, JointSubspace)
        rank = self.space.rank
        networks = torch.from_numpy(points[:, :rank].copy()).to(self.model.dtype)
        deep = self.contributions(self.space.subspace.inner.weights(networks))
        modes = self._modes_beside(deep, points[:, rank:]).numpy()
        finite = np.isfinite(modes).all(1, keepdims=True)
        effects = np.where(finite, np.clip(modes, -MAX_START, MAX_START), points[:, rank:])
        return np.concatenate([points[:, :rank], effects], 1)

    def _modes_beside(
        self, deep: Float[Tensor, "S n K"], near: Float[np.ndarray, "S P"]
    ) -> Float[Tensor, "S P"]:
        """The most probable effects given each contribution of the networks."""
        density = self.effect_density
        if not self.model.structured.layout.terms:
            return ConditionalModes(density).find(deep)[0]
        modes = []  # groups are eliminated block by block
        for contributions, start in zip(deep, near, strict=True):
            beside = density.offset + contributions.double()
            parts = density.structured, density.family, density.design, beside, density.y
            likelihood = EffectsLikelihood(*parts, join=False)
            modes.append(likelihood.mode(torch.from_numpy(start.copy()))[0])
        return torch.stack(modes)

    # --- sampling ---------------------------------------------------------------------------

    def sample(
        self,
        engine: Engine,
        sampling: Sampling,
        temperature: float = 1.0,
        *,
        automatic: bool = False,
    ) -> Draws:
        """Draw networks and effects.

        Args:
            engine: the engine.
            automatic: draw the effects of a model without networks by independent proposals
                instead, where these fit the posterior; see `draw_effects`.
            sampling: its settings; chains start at `start_points` unless `initial` is an array.
            temperature: T of the networks' posterior; the effects are drawn given the networks.
        """
        if automatic and isinstance(self.density, EffectsPosterior):
            smooth, start = self.model.specification.smooth, self.space.start_points[0]
            found = draw_effects(self.density.effects, start, sampling, smooth)
            if found is not None:
                return found
            if smooth == "bayes":
                line = "independent proposals around the mode do not fit the posterior"
                say(f"{line}: sampling by {engine.name}", sampling.progress)
        if self.model.specification.smooth == "reml":
            expected = "'bayes' with a checkpoint, start points, many processes or streamed rows"
            fail("smooth", expected, "'reml'", "Leave them out")
        tempered = temperature != 1 and bool(self.space.rank)
        one_process = engine.takes_any_density() and current() is None
        collapsed = self.collapsed if one_process and not tempered else None
        rank = self.space.rank if tempered else self.space.subspace.rank
        starts = engine.start_count(sampling, rank if collapsed is None else collapsed.rank)
        if isinstance(sampling.initial, str) and starts:
            sampling = replace(sampling, initial=self.start_points(starts))
        if collapsed is not None:
            if starts:
                sampling = replace(sampling, initial=collapsed.own(sampling.initial))
            return collapsed.with_coefficients(engine.run(collapsed, sampling), sampling.seed)
        if not tempered:
            return engine.run(self.density, sampling)
        density, initial = self.tempered_networks(temperature), sampling.initial
        if not isinstance(initial, str):
            sampling = replace(sampling, initial=initial[:, : self.space.rank])
        return density.with_effects(engine.run(density, sampling), self.seed)

    @cached_property
    def collapsed(self) -> CollapsedNetworks | None:
        """The posterior without the coefficients of a normal response beside networks.

        None for other families, for networks that add to sigma, for spaces in which the effects are
        projected, for rows that are not in memory or on another device, and where the coefficients
        or the numbers of the design matrix are too many.
        """
        model, space = self.model, self.space
        if self.contributions is None or space.projected or space.prior.factor is not None:
            return None
        inputs = model.inputs
        local = model.data.in_memory and inputs["design"].device.type == "cpu"
        design = inputs["design"]
        columns = model.structured.layout.n_filled
        large = design.numel() > _MOST_NUMBERS or columns > _MOST_COLUMNS
        if not local or large or any(self.contributions.places):
            return None
        rows = model.effects_likelihood.rows
        if not isinstance(rows, NormalStatistics):
            return None
        collapsed = CollapsedNormal(model.effects_likelihood.map, rows)
        others = len(collapsed.linear) - collapsed.groups.numel()
        if not collapsed.linear or others > _MOST_COEFFICIENTS:
            return None
        if space.rank + len(collapsed.rest) < 2:  # some samplers need two coordinates
            return None
        return CollapsedNetworks(
            self._location_of,
            space.rank,
            collapsed,
            self.effect_density,
            space.prior,
            self.density.fingerprint(),
            self.mode,
        )

    def _location_of(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S n"]:
        """What the networks at some coordinates add to the location; differentiable."""
        assert self.contributions is not None
        assert isinstance(self.space.subspace, JointSubspace)
        weights = self.space.subspace.inner.weights(z.to(self.model.dtype))
        return self.contributions.differentiable(weights)[..., 0]

    def tempered_networks(self, temperature: float) -> TemperedNetworks:
        """The tempered marginal posterior of the networks, with the effects integrated out.

        Raises:
            InputError: a space in which the effects are projected, or effects that importance
                sampling does not integrate out.
        """
        space, contributions = self.space, self.contributions
        if space.projected:
            expected = "'curve', 'full' or 'last-layer' with a temperature other than 1"
            fail("subspace", expected, "one that projects the effects")
        assert isinstance(space.subspace, JointSubspace)
        assert contributions is not None
        inner = space.subspace.inner
        prior = Normal(np.broadcast_to(space.prior.scale, space.subspace.rank)[: space.rank])
        found = TemperedNetworks(
            lambda z: contributions(inner.weights(z.to(self.model.dtype))),
            marginalisation_of(self.effect_density, places=contributions.places),
            prior,
            space.rank,
            temperature,
            self.density.fingerprint(),
        )
        found.check_effects(space.start_points[:_MOST_CHECKED, : space.rank])
        return found

    # --- weights of draws -------------------------------------------------------------------

    def _weights(self, z: Float[np.ndarray, "S k"] | Tensor) -> Float[Tensor, "S D"]:
        """Coordinates of the effects, then weights of the networks."""
        return self.space.subspace.weights(torch.as_tensor(z))

    def effects_of(self, draws: Draws, n_draws: int | None = None) -> Float[np.ndarray, "S P"]:
        """Coordinates of the effects of all draws, or of evenly spaced ones."""
        flat = np.ascontiguousarray(draws.flat(n_draws))
        if not self.space.projected:
            return flat[:, self.space.rank :]
        return self._weights(flat)[:, : self.model.structured.size].double().numpy()

    def networks_of(self, draws: Draws, n_draws: int | None = None) -> Float[Tensor, "S D"]:
        """Weights of the networks of all draws, or of evenly spaced ones."""
        flat = np.ascontiguousarray(draws.flat(n_draws))
        return self._weights(flat)[:, self.model.structured.size :]

    def corrected_weights(
        self,
        draws: Draws,
        n_draws: int | None = None,
        shift: Float[np.ndarray, "S q"] | None = None,
    ) -> tuple[Callable[[slice], Tensor], int]:
        """Weights for `Predictors(corrected=True)` as a function of a slice, and their number.

        Args:
            draws: the draws.
            n_draws: of evenly spaced draws instead of all.
            shift: added to the coefficients of the columns, of all draws.
        """
        if n_draws is not None:
            check_count("n_draws", n_draws)
        flat = torch.from_numpy(np.ascontiguousarray(draws.flat(n_draws)))
        size, columns = self.model.structured.size, self.model.structured.n_corrected
        corrected = shift is not None or bool(self.orthogonal)
        corrections = torch.zeros(len(flat) if corrected else 0, columns, dtype=torch.float64)
        if shift is not None:
            chosen = shift if n_draws is None else evenly_spaced(shift, n_draws)
            corrections -= torch.from_numpy(chosen).to(corrections)
        if self.orthogonal:
            assert self.contributions is not None
            for start in range(0, len(flat), _CORRECTION_BATCH):
                rows = slice(start, start + _CORRECTION_BATCH)
                networks = self._weights(flat[rows])[:, size:]
                corrections[rows] = self.contributions.projections(networks)

        def weights_at(rows: slice) -> Tensor:
            found = self._weights(flat[rows])
            moved = corrections[rows] if corrected else found.new_zeros(len(found), columns)
            return torch.cat([found[:, :size], moved, found[:, size:]], 1)

        return weights_at, len(flat)


@dataclass(frozen=True)
class FittedState:
    """Everything that fitting determines, from which a model predicts, reports and is saved.

    Attributes:
        joint: the posterior of networks and effects on the training rows.
        draws: its draws.
        settings: the other arguments of `fit`, for `update`; None for a loaded model.
    """

    joint: JointPosterior
    draws: Draws
    settings: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def model(self) -> PreparedModel:
        """The model on its training rows."""
        return self.joint.model

    @property
    def space(self) -> JointSpace:
        """The space of the coordinates."""
        return self.joint.space

    @property
    def estimand(self) -> str:
        """What the effects are effects of: "population", "sample", or "model".

        Without networks that are orthogonal to columns nothing is projected on these, and effects
        are parameters of the model. Members of an ensemble are no posterior, but a "sample".
        """
        if not self.joint.orthogonal:
            return "model"
        return "sample" if self.draws.validity == "ensemble" else self.model.specification.effects

    def coefficient_shift(self, n_draws: int | None = None) -> Float[np.ndarray, "S q"] | None:
        """What the estimand, or the correction of a working likelihood, adds to the coefficients.

        Those of `StructuredPredictor.n_corrected`; None for nothing.

        Args:
            n_draws: of evenly spaced draws instead of all.
        """
        shift = self._shift
        return shift if shift is None or n_draws is None else evenly_spaced(shift, n_draws)

    def corrected_weights(
        self, n_draws: int | None = None
    ) -> tuple[Callable[[slice], Tensor], int]:
        """Weights of all draws, or of evenly spaced ones, for `Predictors(corrected=True)`."""
        return self.joint.corrected_weights(self.draws, n_draws, self._score_correction)

    def interval_warnings(self) -> list[str]:
        """A warning of intervals that depend on a working likelihood; empty if they do not."""
        return interval_warnings(self.model, self._score_correction)

    @cached_property
    def _score_correction(self) -> Float[np.ndarray, "S p"] | None:
        return score_correction(self.model, self.draws, self.joint.effects_of(self.draws))

    @cached_property
    def _shift(self) -> Float[np.ndarray, "S q"] | None:
        if self.estimand != "population":
            return self._score_correction
        contributions, networks = self.joint.contributions, self.joint.networks_of(self.draws)
        assert contributions is not None
        found = np.zeros((len(networks), self.model.structured.n_corrected))
        for start in range(0, len(networks), EFFECT_BATCH):
            rows = np.arange(start, min(start + EFFECT_BATCH, len(networks)))
            for columns, f in contributions.remaining(networks[rows]):
                at = rows[:, None], list(columns.columns)
                found[at] += self.projections(f, columns, rows).numpy()
        return found

    def projections(
        self, f: Float[Tensor, "S n"], columns: OrthogonalColumns, rows: Int[np.ndarray, "S"]
    ) -> Float[Tensor, "S p"]:
        """What the estimand adds to the columns' coefficients for contributions f of some draws.

        A draw has the same weights of the rows for all networks and predictors.
        """
        counts = self.model.row_weights
        weights = None if counts is None else counts.numpy()
        seeds = [(self.joint.seed, 3, int(s)) for s in rows]
        return bootstrap_projections(f, columns, seeds, weights)

"""The posterior of networks and effects: start points, draws, and weights for predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.regression.design.centring import Centring, Information
from subbayes.regression.integrals.coefficient_likelihood import NormalRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.posterior import MAX_START, FittedState, RegressionPosterior
from subbayes.regression.shapes import ChainDraws, EffectDraws, NetworkValues
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.estimand import bootstrap_projections
from subbayes.semistructured.integrals.collapsed_networks import CollapsedNetworks
from subbayes.semistructured.integrals.effect_density import EffectDensity
from subbayes.semistructured.integrals.marginalisation import marginalisation_of
from subbayes.semistructured.integrals.tempered_networks import EFFECT_BATCH, TemperedNetworks
from subbayes.semistructured.orthogonal_columns import (
    OrthogonalColumns,
    OrthogonalNetworks,
    orthogonal_networks,
)
from subbayes.semistructured.predictors import Predictors, pad_thresholds
from subbayes.semistructured.specification import JointModel
from subbayes.semistructured.subspace import JointSpace
from subbayes.subspace import JointSubspace
from subbayes.utils.checks import fail
from subbayes.utils.modes import Mode
from subbayes.utils.types import Coordinates, LogDensity, Outputs, WeightsBatch

_MOST_CHECKED = 8  # trained networks at which the effects are integrated out first
_MOST_COEFFICIENTS = 40  # to integrate out, beside those of eliminated groups
_MOST_COLUMNS = 1000  # where coefficients are integrated out
_MOST_NUMBERS = 2**27  # of the design matrix in float64, to integrate out


@dataclass(frozen=True)
class JointPosterior(RegressionPosterior):
    """The posterior of a model's networks and effects in a space; see `RegressionPosterior`."""

    model: JointModel
    space: JointSpace
    seed: int
    mode: Mode = "trace"

    @cached_property
    def orthogonal(self) -> tuple[OrthogonalNetworks, ...]:
        """The networks that are made orthogonal to columns, and these."""
        return orthogonal_networks(self.model) if self.space.rank else ()

    @cached_property
    def contributions(self) -> Contributions | None:
        """The networks' contributions at the training rows; None without networks to learn."""
        model = self.model
        if not self.space.rank:
            return None
        width = model.structured.n_corrected
        return Contributions(model.deep, model.inputs, self.orthogonal, width)

    @cached_property
    @override
    def density(self) -> Posterior:
        model = self.model
        bases = {part.names: (part.columns.basis, part.columns.dual) for part in self.orthogonal}
        density = Posterior(
            Network(Predictors(model.structured, model.deep, bases)),
            model.family,
            model.data,
            self.space.subspace,
            self.space.prior,
            batch_size=model.data.n if self.orthogonal else None,
            mode=self.mode,
        )
        if self.space.rank and not self.space.projected and model.structured.scaled_blocks():
            density.reparameterisation = self.reparameterisation
        return density

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
        deep = self.contributions(self._weights_at(point[:, :rank]))
        rows = density.row_information(zeta, deep)[0]
        return Information.of(model.structured, rank, zeta[0], density.design, rows)

    @cached_property
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

    @override
    def with_best_effects(self, points: Coordinates) -> Coordinates:
        """Replace the effects of points by the most probable ones given the networks.

        Training finds the effects given uncorrected networks; in the posterior the networks are
        orthogonal to the effects.
        """
        if self.contributions is None or self.space.projected:
            return points
        rank, density = self.space.rank, self.effect_density
        deep = self.contributions(self._weights_at(torch.from_numpy(points[:, :rank].copy())))
        starts = torch.from_numpy(points[:, rank:].copy())
        pairs = zip(deep.double(), starts, strict=True)
        modes = np.stack([density.shifted(f).mode(start)[0].numpy() for f, start in pairs])
        finite = np.isfinite(modes).all(1, keepdims=True)
        effects = np.where(finite, np.clip(modes, -MAX_START, MAX_START), points[:, rank:])
        return np.concatenate([points[:, :rank], effects], 1)

    # --- sampling ---------------------------------------------------------------------------

    @override
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
            sampling: its settings; chains start at `start_points` unless `initial` is an array.
            temperature: T of the networks' posterior; the effects are drawn given the networks.
            automatic: not used; proposals that are independent of a chain are those of effects.
        """
        rank = self.space.rank
        if temperature != 1 and rank:
            density = self.tempered_networks(temperature)
            sampling = self.with_starts(engine, sampling, rank)
            if not isinstance(sampling.initial, str):
                sampling = replace(sampling, initial=sampling.initial[:, :rank])
            return density.with_effects(engine.run(density, sampling), self.seed)
        one_process = engine.any_density and current() is None
        if one_process and self.collapsed is not None:
            collapsed = self.collapsed
            sampling = self.with_starts(engine, sampling, collapsed.rank)
            if engine.start_count(sampling, collapsed.rank):
                sampling = replace(sampling, initial=collapsed.own(sampling.initial))
            return collapsed.with_coefficients(engine.run(collapsed, sampling), sampling.seed)
        return engine.run(self.density, self.with_starts(engine, sampling))

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
        if not isinstance(rows, NormalRows):
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
            space.prior,
            self.density.fingerprint(),
            self.mode,
        )

    def _weights_at(self, networks: Float[Tensor, "S k"]) -> WeightsBatch:
        """Weights of the networks at some coordinates, which effects have no part in."""
        assert isinstance(self.space.subspace, JointSubspace)
        return self.space.subspace.inner.weights(networks.to(self.model.dtype))

    def _location_of(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S n"]:
        """What the networks at some coordinates add to the location; differentiable."""
        assert self.contributions is not None
        return self.contributions.differentiable(self._weights_at(z))[..., 0]

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
        assert contributions is not None
        prior = Normal(np.broadcast_to(space.prior.scale, space.subspace.rank)[: space.rank])
        found = TemperedNetworks(
            lambda z: contributions(self._weights_at(z)),
            marginalisation_of(self.effect_density, places=contributions.places),
            prior,
            space.rank,
            temperature,
            self.density.fingerprint(),
        )
        found.check_effects(space.start_points[:_MOST_CHECKED, : space.rank])
        return found

    # --- weights of draws -------------------------------------------------------------------

    @override
    def effects_of(self, draws: Draws, n_draws: int | None = None) -> EffectDraws:
        if not self.space.projected:
            return super().effects_of(draws, n_draws)
        flat = np.ascontiguousarray(draws.flat(n_draws))
        return self.weights(flat)[:, : self.model.structured.size].double().numpy()

    def networks_of(self, draws: Draws, n_draws: int | None = None) -> WeightsBatch:
        """Weights of the networks of all draws, or of evenly spaced ones."""
        flat = np.ascontiguousarray(draws.flat(n_draws))
        return self.weights(flat)[:, self.model.structured.size :]

    @override
    def predictors(
        self,
        z: Float[Tensor, "S k"],
        inputs: dict[str, Tensor],
        correction: Float[Tensor, "S q"] | None = None,
    ) -> Outputs:
        weights, size = self.weights(z), self.model.structured.size
        effects, networks = weights[:, :size], weights[:, size:]
        correction = self.projections(networks)
        eta = self.model.structured(effects, inputs["design"], inputs["offset"], correction)
        return eta + pad_thresholds(self.network_values(networks, inputs).to(eta), eta)

    def network_values(self, weights: WeightsBatch, inputs: dict[str, Tensor]) -> NetworkValues:
        """What networks of some weights add to the predictors, without a projection."""
        deep = self.model.deep
        if deep.n_weights:
            return Contributions(deep, inputs, (), self.model.structured.n_corrected)(weights)
        with torch.no_grad():
            return deep(**inputs).expand(len(weights), -1, -1)

    def projections(self, networks: WeightsBatch) -> Float[Tensor, "S q"] | None:
        """What is subtracted from the coefficients beside some networks; None for nothing."""
        if self.contributions is None or not self.orthogonal:
            return None
        return self.contributions.projections(networks)

    # --- log-likelihoods of saved draws ------------------------------------------------------

    @override
    def saved_log_likelihoods(self, draws: Draws) -> ChainDraws | None:
        """The same; of tempered networks those of the closed-form marginal likelihood."""
        tempered = draws.temperature != 1 and self.space.rank > 0
        if tempered and draws.meta.get("closed_form") is not True:
            return None
        if tempered and "log_likelihood" not in draws.stats:
            return None
        return super().saved_log_likelihoods(draws)

    @override
    def log_likelihoods(self, z: Coordinates, draws: Draws) -> LogDensity:
        if draws.temperature == 1 or not self.space.rank:
            return super().log_likelihoods(z, draws)
        tempered = self.tempered_networks(draws.temperature)
        return tempered.log_likelihood(z[:, : self.space.rank])


@dataclass(frozen=True)
class JointState(FittedState):
    """Everything that fitting determines; see `FittedState`."""

    joint: JointPosterior

    @property
    @override
    def model(self) -> JointModel:
        return self.joint.model

    @property
    @override
    def space(self) -> JointSpace:
        return self.joint.space

    @property
    @override
    def estimand(self) -> str:
        """What the effects are effects of: "population", "sample", or "model".

        Without networks that are orthogonal to columns nothing is projected on these, and effects
        are parameters of the model. Members of an ensemble are no posterior, but a "sample".
        """
        if not self.joint.orthogonal:
            return "model"
        return "sample" if self.draws.validity == "ensemble" else self.model.specification.effects

    @cached_property
    @override
    def _score_correction(self) -> None:
        return None

    @cached_property
    @override
    def _shift(self) -> Float[np.ndarray, "S q"] | None:
        if self.estimand != "population":
            return None
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

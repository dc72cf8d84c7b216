"""Draws of networks and effects together, and the weights that predict with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.engines import engine_of
from subbayes.networks.network import Network
from subbayes.networks.tracing.batched import Mode
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.semistructured.contributions import Contributions, Orthogonal, orthogonal_to
from subbayes.semistructured.module import Deep, Predictors
from subbayes.semistructured.specification import Fittable
from subbayes.semistructured.subspace import FAR, Space
from subbayes.semistructured.tempering import Modes, Observed, TemperedNetworks, conditional_of
from subbayes.subspace import JointSubspace
from subbayes.utils.checks import check_count, fail

__all__ = ["Sampler", "check_options"]

_CHUNK = 256


def check_options(
    inference: str | Engine | Callable[[Any, Sampling], Draws], options: dict[str, Any]
) -> None:
    """Raise `InputError` for options that are no fields of `Sampling`."""
    engine_of(inference)
    known = [f.name for f in fields(Sampling)]
    if unknown := [name for name in options if name not in known]:
        fail(
            "options",
            "fields of Sampling: " + ", ".join(known),
            ", ".join(unknown),
            "Pass settings of an engine with it, as in inference=NUTS(max_depth=8)",
        )


class Sampler:
    """Samples a model in a space, and turns draws into weights.

    Args:
        fittable: the model on its rows.
        space: where to sample.
        deep: the networks as the user gave them, kept as `deep`.
        orthogonal: as for `SemiStructuredRegression`.
        seed: of start points and effects.
        mode: how the posterior is evaluated, as for `Posterior`.

    Attributes:
        posterior: of networks and effects, at temperature 1.
        orthogonal: what networks are made orthogonal to, by predictor.
        contributions: of the networks over the rows; None without networks to learn.
    """

    def __init__(
        self,
        fittable: Fittable,
        space: Space,
        deep: dict[str, Deep],
        orthogonal: bool | str,
        seed: int,
        mode: Mode = "trace",
    ) -> None:
        self.model, self.space, self.seed = fittable, space, seed
        self.deep, self.mode, self._wanted = deep, mode, orthogonal
        self.orthogonal: dict[int, Orthogonal] = {}
        self.contributions: Contributions | None = None
        if space.rank and fittable.deep is not None:
            inputs = fittable.inputs
            self.orthogonal = orthogonal_to(fittable.design, inputs["design"], deep, orthogonal)
            self.contributions = Contributions(
                fittable.deep, inputs, self.orthogonal, len(fittable.design.names)
            )
        bases = {place: part.basis for place, part in self.orthogonal.items()}
        module = Predictors(fittable.structure, fittable.deep, fittable.dtype, bases)
        self.posterior = Posterior(
            Network(module),
            fittable.family,
            fittable.data,
            space.subspace,
            space.prior,
            batch_size=fittable.data.n if self.orthogonal else None,
            mode=mode,
        )

    def __getstate__(self) -> dict[str, Any]:
        """What makes it again: traced densities cannot be copied."""
        return {
            "model": self.model,
            "space": self.space,
            "seed": self.seed,
            "deep": self.deep,
            "wanted": self._wanted,
            "mode": self.mode,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Sampler.__init__(
            self,
            state["model"],
            state["space"],
            state["deep"],
            state["wanted"],
            state["seed"],
            state["mode"],
        )

    def starts(self, chains: int) -> Float[np.ndarray, "chains k"]:
        """Good points for the chains, scattered a little."""
        rng = np.random.default_rng([self.seed, 1])
        known = self.space.starts
        places = np.linspace(0, len(known) - 1, chains).round().astype(int)
        scatter = 0.05 * rng.standard_normal((chains, self.space.subspace.rank))
        return self.settled(known[places]) + scatter * self.space.prior.scale

    def settled(self, places: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S k"]:
        """The same networks with the effects that are the most probable beside them.

        Training learns effects beside networks as they are; here they stand beside networks
        made orthogonal to them.
        """
        if self.contributions is None or self.space.projected:
            return places
        assert isinstance(self.space.subspace, JointSubspace)
        rank, inner = self.space.rank, self.space.subspace.inner
        networks = torch.from_numpy(places[:, :rank].copy()).to(self.model.dtype)
        deep = self.contributions(inner.weights(networks))
        modes = Modes(self.observed()).of(deep)[0].numpy()
        better = np.isfinite(modes).all(1, keepdims=True)
        effects = np.where(better, np.clip(modes, -FAR, FAR), places[:, rank:])
        return np.concatenate([places[:, :rank], effects], 1)

    def observed(self) -> Observed:
        """What the effects meet."""
        model = self.model
        assert model.data.y is not None
        return Observed(
            model.structure,
            model.family,
            model.inputs["design"].double(),
            model.inputs["offset"].double(),
            model.data.y,
        )

    def draws(
        self,
        inference: str | Engine | Callable[[Any, Sampling], Draws],
        temperature: float,
        effects: str | None,
        options: dict[str, Any],
    ) -> Draws:
        """Draws of all coordinates, the networks' first."""
        initial = self.starts(options["chains"])
        if temperature == 1 or not self.space.rank:
            return self._run(inference, self.posterior, initial, options)
        density = self.tempered(temperature, effects)
        networks = self._run(inference, density, initial[:, : self.space.rank], options)
        return self._with_effects(density, networks)

    def _run(
        self,
        inference: str | Engine | Callable[[Any, Sampling], Draws],
        density: Any,
        initial: Float[np.ndarray, "chains k"],
        options: dict[str, Any],
    ) -> Draws:
        given = {name: value for name, value in options.items() if value is not None}
        return engine_of(inference).run(density, Sampling(**{"initial": initial, **given}))

    def tempered(self, temperature: float, effects: str | None) -> TemperedNetworks:
        """The density of the networks alone, the effects integrated out.

        Raises:
            InputError: effects that are projected with the networks.
        """
        model, space, contributions = self.model, self.space, self.contributions
        if space.projected:
            fail(
                "subspace",
                "'curve', 'full' or 'last-layer' with a temperature other than 1",
                "'naive', which has no effects of their own",
            )
        assert isinstance(space.subspace, JointSubspace)
        assert contributions is not None
        inner = space.subspace.inner
        prior = Normal(np.broadcast_to(space.prior.scale, space.subspace.rank)[: space.rank])
        return TemperedNetworks(
            lambda z: contributions(inner.weights(z.to(model.dtype))),
            conditional_of(effects, self.observed()),
            prior,
            space.rank,
            temperature,
            self.posterior.fingerprint(),
        )

    def _with_effects(self, density: TemperedNetworks, networks: Draws) -> Draws:
        """A draw of the effects for each draw of the networks."""
        rng = np.random.default_rng([self.seed, 2])
        flat, parts = networks.flat(), []
        for start in range(0, len(flat), 64):
            deep = density.contributions(torch.from_numpy(flat[start : start + 64].copy()))
            parts.append(density.conditional.sample(deep, rng))
        zeta = np.concatenate(parts).reshape(*networks.z.shape[:2], -1)
        return replace(networks, z=np.concatenate([networks.z, zeta], 2), moments=None)

    # --- what draws are worth ---------------------------------------------------------------

    def effects_of(self, draws: Draws, n_draws: int | None = None) -> Float[np.ndarray, "S P"]:
        """Coordinates of the effects of all draws, or of n evenly spaced ones."""
        flat = np.ascontiguousarray(draws.flat(n_draws))
        if not self.space.projected:
            return flat[:, self.space.rank :]
        weights = self.space.subspace.weights(torch.from_numpy(flat).to(self.model.dtype))
        return weights[:, : self.model.structure.size].double().numpy()

    def networks_of(self, draws: Draws, n_draws: int | None = None) -> Float[Tensor, "S D"]:
        """Weights of the networks of all draws, or of n evenly spaced ones."""
        flat = torch.from_numpy(np.ascontiguousarray(draws.flat(n_draws)))
        weights = self.space.subspace.weights(flat.to(self.model.dtype))
        return weights[:, self.model.structure.size :]

    def weights_of(
        self, draws: Draws, n_draws: int | None = None
    ) -> tuple[Callable[[slice], Tensor], int]:
        """Weights of draws for a module with a correction, by slices, and how many there are.

        Args:
            draws: of this sampler.
            n_draws: evenly spaced ones; None for all.
        """
        if n_draws is not None:
            check_count("n_draws", n_draws)
        model, space = self.model, self.space.subspace
        flat = torch.from_numpy(np.ascontiguousarray(draws.flat(n_draws)))
        size = model.structure.size
        corrections = torch.zeros(len(flat), len(model.design.names), dtype=model.dtype)
        if self.orthogonal:
            assert self.contributions is not None
            for start in range(0, len(flat), _CHUNK):
                rows = slice(start, start + _CHUNK)
                weights = space.weights(flat[rows].to(model.dtype))[:, size:]
                corrections[rows] = self.contributions.projections(weights).to(model.dtype)

        def weights_at(rows: slice) -> Tensor:
            found = space.weights(flat[rows].to(model.dtype))
            return torch.cat([found[:, :size], corrections[rows], found[:, size:]], 1)

        return weights_at, len(flat)

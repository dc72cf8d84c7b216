r"""Choose network, weight decay and prior of a table by validation rows, within a time.

First, ensembles of each network and weight decay are trained on four fifths of the rows and scored
on the others. Then chains of MCLMC start at the members, for the best weight decay of each network
and the first prior, and for the best network and the other priors; they are scored by the same
rows, after equally many steps. Scores are mean log predictive densities.

For a seed the choices depend on the time only through the number of epochs, of steps and of
candidates, which are entries of ladders and part of the record. Without a budget they are fixed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.baselines.deep_ensemble import Members, ensemble_from_results, train_members
from subbayes.data.data import Data, batch_sizes
from subbayes.draws import Draws
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.likelihoods import Likelihood, Weighted
from subbayes.models.fitted import FittedModel
from subbayes.models.presets import PRESETS, Preset, describe_preset, largest
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import (
    Rows,
    make_likelihood,
    make_module,
    without_global_variance,
)
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.tables.held_out import LOWEST, HeldOut
from subbayes.tables.preset_checkpoint import PresetCheckpoint
from subbayes.tables.preset_sampling import Clock, PlannedMCLMC, step_seconds
from subbayes.tables.preset_timing import training_seconds
from subbayes.training.loop import Diverged
from subbayes.utils.checks import fail
from subbayes.utils.progress import progress_bar, say
from subbayes.utils.seeding import derive_seed

_STREAM = 5  # of the seed, for the division of the rows and the members of candidates
_LEAST_ROWS = 20
_KEPT_DRAWS = 25  # of each chain with which priors are compared
_SLOWER = 1.5  # than the first, of posteriors that are compared


@dataclass(frozen=True)
class PresetChoice:
    """What a preset chose.

    Attributes:
        settings: of the model to fit.
        record: the choice, as values that JSON can represent.
        started: value of `time.monotonic` when the choice began.
    """

    settings: TableSettings
    record: dict[str, Any]
    started: float


def choose_settings(
    rows: Rows,
    task: str,
    settings: TableSettings,
    *,
    n_classes: int | None = None,
    weights: Float[np.ndarray, "n"] | None = None,
) -> PresetChoice:
    """Choose the settings of a model of a table by validation rows.

    Args:
        rows: features and targets.
        task: "regression", "count" or "classification".
        settings: with the preset, its budget, and the seed.
        n_classes: number of classes, where not all occur.
        weights: of the rows.

    Raises:
        InputError: settings that the preset chooses itself, fewer than 20 rows, or a budget in
            which no member can be trained.
    """
    assert settings.preset is not None
    preset, started = PRESETS[settings.preset], time.monotonic()
    _check_settings(settings)
    n = len(rows[1])
    if n < _LEAST_ROWS:
        fail("preset", f"at least {_LEAST_ROWS} rows to choose by", n, "Leave preset out")
    saved = PresetCheckpoint.of(rows, task, settings, weights)
    record = saved.read("choice")
    if record is None:
        search = _Search(preset, rows, task, settings, n_classes, weights)
        record = search.run() | {"seconds": {"choice": time.monotonic() - started}}
        saved.write("choice", record)
    return PresetChoice(
        _final_settings(preset, settings, record, n, started, saved), record, started
    )


def _check_settings(settings: TableSettings) -> None:
    """Check that nothing is given that the preset chooses."""
    training = [f"training.{part.name}" for part in fields(settings.training)]
    sampling = [f"sampling.{name}" for name in ("warmup", "thin", "initial", "time_limit")]
    for name in ("subspace", "inference", "prior", "network.hidden", *training, *sampling):
        if settings.gives(name):
            value = attrgetter(name)(settings)
            expected = f"no value of yours, since preset={settings.preset!r} chooses it"
            got = "start points" if isinstance(value, np.ndarray) else repr(value)
            fail(name, expected, got[:80], "Leave one of them out")
    if isinstance(settings.temperature, str):
        expected = f"a number with preset={settings.preset!r}"
        fail("temperature", expected, repr(settings.temperature), "Leave it out for 1")


def _final_settings(
    preset: Preset,
    settings: TableSettings,
    record: dict[str, Any],
    n: int,
    started: float,
    saved: PresetCheckpoint,
) -> TableSettings:
    """The settings of the model, from the record of a choice."""
    budget, sampling = settings.budget, settings.sampling
    limit = None if budget is None else preset.shares[2] * budget
    training = replace(
        _training(preset, n, record["epochs"], record["weight_decay"]), time_limit=limit
    )
    own: dict[str, Any] = {"chains": preset.members, "draws": preset.draws}
    if budget is not None and budget >= preset.compile_from:
        own["mode"] = "compile"
    own |= {name: getattr(sampling, name) for name in own if settings.gives(f"sampling.{name}")}
    engine = MCLMC(target=preset.target, metric="prior")
    if budget is None:
        own |= {"warmup": preset.warmup, "thin": preset.thin}
    else:
        engine = PlannedMCLMC(
            target=preset.target,
            metric="prior",
            ends=started + budget,
            load=lambda: saved.read("plan"),
            save=lambda plan: saved.write("plan", plan),
        )
    return replace(
        settings,
        preset=None,
        network=replace(settings.network, hidden=tuple(record["hidden"])),
        subspace="full",
        inference=engine,
        prior=record["prior"],
        training=training,
        sampling=replace(sampling, initial="ensemble", **own),
    )


def _training(preset: Preset, n: int, epochs: int, weight_decay: float) -> Any:
    batch = preset.batch_size if n >= preset.large else preset.training.batch_size
    return replace(preset.training, epochs=epochs, weight_decay=weight_decay, batch_size=batch)


# --- the search -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ensemble:
    """Members of a network that is compared, and their log densities of the rows held out."""

    members: Members
    terms: Float[np.ndarray, "h"]


@dataclass(frozen=True)
class _Search:
    """The comparison of candidates by validation rows."""

    preset: Preset
    rows: Rows
    task: str
    settings: TableSettings
    n_classes: int | None
    weights: Float[np.ndarray, "n"] | None
    parts: tuple[np.ndarray, np.ndarray] = field(init=False)
    held: HeldOut = field(init=False)
    likelihood: Likelihood = field(init=False)

    def __post_init__(self) -> None:
        x, y = self.rows
        likelihood = make_likelihood(
            self.settings.likelihood, self.task, y, self.n_classes, self.weights
        )
        object.__setattr__(self, "likelihood", without_global_variance(likelihood))
        order = np.random.default_rng(self._seed(0)).permutation(len(y))
        held = max(1, round(self.preset.held_out * len(y)))
        parts = np.sort(order[held:]), np.sort(order[:held])
        object.__setattr__(self, "parts", parts)
        weights = None if self.weights is None else self.weights[parts[1]]
        object.__setattr__(self, "held", HeldOut(np.asarray(y)[parts[1]], weights))

    def run(self) -> dict[str, Any]:
        """Compare ensembles, then chains; returns the record of the choice."""
        budget, preset = self.settings.budget, self.preset
        epochs, ensembles, per_epoch, networks = self._compare_networks(budget)
        chains = self._compare_chains(budget, ensembles, networks)
        best = max(range(len(networks)), key=lambda i: networks[i]["score"])
        prior = preset.priors[0]
        if chains:
            first = max(chains, key=lambda one: one["score"])
            best, prior = _best_network(networks, first["hidden"]), first["prior"]
        final = preset.training.epochs
        if budget is not None:
            ratio = self._chains / preset.compared * len(self.rows[1]) / len(self.parts[0])
            most = preset.shares[2] * budget / (per_epoch[best] * max(1.0, ratio))
            final = largest(preset.epochs, most) or preset.least_epochs
        return {
            "name": self.settings.preset,
            "budget": None if budget is None else float(budget),
            "hidden": networks[best]["hidden"],
            "weight_decay": networks[best]["weight_decay"],
            "prior": prior,
            "epochs": final,
            "compared_epochs": epochs,
            "networks": networks,
            "chains": chains,
            "candidates": [len(preset.networks), self._posteriors],
        }

    @property
    def _posteriors(self) -> int:
        """Number of posteriors to compare: each network with one prior, one with the others."""
        return len({hidden for hidden, _ in self.preset.networks}) + len(self.preset.priors) - 1

    @property
    def _chains(self) -> int:
        given = self.settings.gives("sampling.chains")
        return self.settings.sampling.chains if given else self.preset.members

    def _compare_networks(
        self, budget: float | None
    ) -> tuple[int, list[_Ensemble | None], list[float], list[dict[str, Any]]]:
        """Epochs, and ensemble, seconds of an epoch and record of each network compared."""
        candidates, epochs = self.preset.networks, self.preset.fixed_epochs
        until, overhead = math.inf, 0.0
        if budget is not None:
            until = time.monotonic() + self.preset.shares[0] * budget
            share = self.preset.shares[0] * budget
            overhead, seconds = self._measure(budget, share)
            epochs = self._epochs(share, overhead, seconds)
        found: list[_Ensemble | None] = []
        per_epoch, records = [], []
        with self._progress(len(candidates), "Choosing the network") as bar:
            for hidden, decay in Clock(until).while_time(candidates):
                began = time.monotonic()
                ensemble = self._train_ensemble((hidden, decay), epochs)
                seconds = time.monotonic() - began
                done = epochs
                score = LOWEST
                if ensemble is not None:
                    results = ensemble.members.results
                    done = max(len(one.history["train_loss"]) for one in results)
                    score = self.held.score(ensemble.terms)
                found.append(ensemble)
                per_epoch.append(max(seconds - overhead, 1e-3) / done)
                records.append({"hidden": list(hidden), "weight_decay": decay, "score": score})
                bar.update(1)
        if all(ensemble is None for ensemble in found):
            raise Diverged(
                "preset",
                "networks whose training loss stays finite",
                "every candidate diverged",
                "Check the targets, or train without preset and a lower learning rate",
            )
        return epochs, found, per_epoch, records

    def _epochs(self, share: float, overhead: float, seconds: float) -> int:
        """Epochs of each candidate: few candidates rather than few epochs."""
        ladder, candidates = self.preset.epochs, len(self.preset.networks)
        epochs = largest(ladder, (share / candidates - overhead) / seconds)
        if epochs is None or epochs < self.preset.enough_epochs:
            most = min((share - overhead) / seconds, self.preset.enough_epochs)
            epochs = largest(ladder, most) or ladder[0]
        return epochs

    def _train_ensemble(
        self, candidate: tuple[tuple[int, ...], float], epochs: int
    ) -> _Ensemble | None:
        """The ensemble of a candidate, or None if it diverges."""
        try:
            members = self._train(candidate, epochs)
        except Diverged:
            return None
        results = [replace(one, likelihood=one.likelihood.unweighted) for one in members.results]
        inputs = self._data(1).inputs
        return _Ensemble(members, self.held.terms(ensemble_from_results(results).predict(inputs)))

    def _train(self, candidate: tuple[tuple[int, ...], float], epochs: int) -> Members:
        hidden, decay = candidate
        x, y = self.rows
        settings = replace(self.settings, network=replace(self.settings.network, hidden=hidden))
        module = make_module(settings, self.likelihood, x, y, self.weights)
        training = _training(self.preset, len(self.parts[0]), epochs, decay)
        return train_members(
            module,
            self.likelihood if self.weights is None else Weighted(self.likelihood),
            self._data(0),
            replace(training, validation=None),
            members=self.preset.compared,
            seed=self._seed(1),
            validation=self._data(1),
            progress=False,
        )

    def _measure(self, budget: float, share: float) -> tuple[float, float]:
        """Seconds of a training without its epochs, and of an epoch.

        A budget is refused only if two measurements agree that it is too small.
        """
        epochs, n = self.preset.least_epochs, len(self.parts[0])
        train = partial(self._train, self.preset.networks[0])
        size = _training(self.preset, n, 1, 0.0).batch_size
        steps = 1 if size is None else len(batch_sizes(n, size))
        first = training_seconds(train, steps, share)
        least = self._least_budget(first)
        if budget >= least:
            return first
        second = training_seconds(train, steps, share)
        if self._least_budget(second) < least:
            first, least = second, self._least_budget(second)
        if budget < least:
            members = f"{self.preset.compared} networks for {epochs} epochs on {n} rows"
            fail(
                "budget",
                f"at least {math.ceil(least)} s, of which {self.preset.shares[2]:.0%} suffice to "
                f"train {members}",
                f"{budget:g} s",
                "Raise it, or use budget=None for no limit",
            )
        return first

    def _least_budget(self, seconds: tuple[float, float]) -> float:
        overhead, each = seconds
        return (overhead + self.preset.least_epochs * each) / self.preset.shares[2]

    def _compare_chains(
        self,
        budget: float | None,
        ensembles: list[_Ensemble | None],
        networks: list[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """Records of each network with the first prior, and of the best one with the others."""
        seconds = math.inf if budget is None else self.preset.shares[1] * budget
        clock = Clock(time.monotonic() + seconds)
        share = None if budget is None else seconds / self._posteriors
        found: list[dict[str, Any]] = []
        steps = self.preset.fixed_steps if share is None else None
        with self._progress(self._posteriors, "Comparing chains") as bar:
            hidden_layers = [list(h) for h in dict.fromkeys(tuple(n["hidden"]) for n in networks)]
            first, *others = self.preset.priors
            for hidden in clock.while_time(hidden_layers):
                own = ensembles[_best_network(networks, hidden)]
                found += self._score_chains(hidden, own, first, share, steps)
                steps = found[0]["steps"] if found else steps
                bar.update(1)
            if not found:
                return []
            hidden = max(found, key=lambda one: one["score"])["hidden"]
            own = ensembles[_best_network(networks, hidden)]
            for scale in clock.while_time(others, least=0):
                found += self._score_chains(hidden, own, scale, share, steps)
                bar.update(1)
        return found

    def _score_chains(
        self,
        hidden: list[int],
        ensemble: _Ensemble | None,
        scale: float,
        share: float | None,
        steps: int | None,
    ) -> list[dict[str, Any]]:
        """The record of a posterior, whose chains take some steps; none without time.

        Args:
            hidden: hidden layers of the network.
            ensemble: at whose members chains start.
            scale: of the prior.
            share: seconds, or None for no limit.
            steps: of each chain; None chooses them by the seconds.
        """
        if ensemble is None:
            return []
        results = ensemble.members.results
        weights = torch.stack([one.network.weights for one in results])
        parameters = torch.stack([one.likelihood_parameters for one in results]).mean(0)
        own = self.likelihood if self.weights is None else Weighted(self.likelihood)
        likelihood = own.with_parameters(parameters).detach()
        network, starts = results[0].network, weights.double().cpu().numpy()
        space = FullSubspace(torch.zeros_like(weights[0]))
        temperature = float(self.settings.temperature)
        posterior = Posterior(network, likelihood, self._data(0), space, Normal(scale), temperature)
        engine = MCLMC(target=self.preset.target, metric="prior")
        if share is not None:
            most = share / step_seconds(engine, posterior, starts)
            steps = largest(self.preset.steps, most) if steps is None else steps
            if steps is None or steps > _SLOWER * most:
                return []
        assert steps is not None
        thin = max(1, steps // 2 // _KEPT_DRAWS)
        draws = engine.sample(
            posterior,
            draws=_KEPT_DRAWS,
            chains=len(starts),
            warmup=steps - thin * _KEPT_DRAWS,
            thin=thin,
            seed=self._seed(2),
            initial=starts,
            progress=False,
        )
        terms = self.held.terms(self._average(network, likelihood, space, draws))
        found = {"hidden": hidden, "prior": scale, "steps": steps, "score": self.held.score(terms)}
        return [found | self.held.gain(terms, ensemble.terms)]

    def _average(
        self, network: Network, likelihood: Likelihood, space: FullSubspace, draws: Draws
    ) -> Predictive:
        """The predictive distribution of the rows held out."""
        z = torch.from_numpy(draws.flat().copy())

        def weights(rows: Any) -> Float[Tensor, "s D"]:
            return space.weights(z[rows])

        inputs = self._data(1).inputs
        return average(
            network, likelihood.unweighted, weights, inputs, count=len(z), progress=False
        )

    def _data(self, part: int) -> Data:
        """Training rows (0) or those held out (1)."""
        kept = self.parts[part]
        data = Data.of((self.rows[0][kept], self.rows[1][kept]))
        return data if self.weights is None else data.weighted(self.weights[kept])

    def _seed(self, number: int) -> int:
        return derive_seed(self.settings.sampling.seed, _STREAM, number)

    def _progress(self, total: int, what: str) -> Any:
        return progress_bar(total, what, self.settings.sampling.progress, "candidates")


def _best_network(networks: list[dict[str, Any]], hidden: list[int]) -> int:
    """The best of the networks compared with these hidden layers."""
    same = [i for i, one in enumerate(networks) if one["hidden"] == hidden]
    return max(same, key=lambda i: float(networks[i]["score"]))


# --- the record -----------------------------------------------------------------------------------


def with_record(model: FittedModel, choice: PresetChoice) -> FittedModel:
    """The fitted model with the record of the choice and its times, which are shown in a line."""
    draws, chosen = model.sampled, choice.record
    total = time.monotonic() - choice.started
    sampling = float(draws.meta["seconds"])
    seconds = chosen["seconds"] | {"sampling": sampling}
    seconds["training"] = max(total - sampling - seconds["choice"], 0.0)
    record = chosen | {"seconds": seconds}
    say(f"preset {describe_preset(record)}", choice.settings.sampling.progress)
    return replace(model, settings=model.settings | {"preset": record})

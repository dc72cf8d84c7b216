"""Methods of the experiment with adapters, each with candidates for its settings.

What is random are the adapters and the classifier. All methods of a seed share one training of
these; the ensemble, which may train for longer, has it as its first member. A method returns a
predictor. Settings that need no training, such as a temperature, are selected on the validation
rows of each seed, the others on those of seed 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import subbayes
from experiments.adapters_data import Part, Rows
from experiments.adapters_model import Architecture, adapted_model
from experiments.blob import MeanFieldSettings, blob
from experiments.store import Record
from subbayes import Sampling, Training
from subbayes.baselines import (
    WeightSamples,
    ensemble_from_results,
    mc_dropout,
    point_estimate,
    swag,
    temperature_scaling,
)
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.engine import Engine
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.inference.variational.variational import FullRankVI, MeanFieldVI
from subbayes.subspaces.random import Random
from subbayes.training import swa, train
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.utils.seeding import derive_seed

__all__ = ["METHODS", "Method", "Plan", "Session", "plan_of", "validation_nll"]

_RANDOM = ["adapters", "*.modules_to_save.*"]


@dataclass(frozen=True)
class Plan:
    """Sizes of the methods.

    Attributes:
        architecture: of the base model.
        adapter_rank: rank of the adapters.
        training: of the adapters.
        members: of the ensemble.
        draws: weight vectors that predictions average over.
        directions: of the subspace of the trajectory.
        groups: directions of random subspaces, each a group of weights.
        steps: of variational inference in a subspace.
        samples: draws of each of these steps.
        batch_size: rows of each of these steps.
        curvature_draws: combinations of the gradients of each row of which Kronecker factors are
            made.
        precisions: of the prior of Laplace-LoRA, to select from.
        scales: of the covariance of SWAG, to select from.
    """

    architecture: Architecture = Architecture()
    adapter_rank: int = 4
    training: Training = field(
        default_factory=lambda: Training(
            batch_size=64, schedule="cosine", prior_scale=1.0, swa_epochs=10, swa_learning_rate=0.05
        )
    )
    members: int = 5
    draws: int = 10
    directions: int = 9
    groups: int = 500
    steps: int = 100
    samples: int = 1
    batch_size: int = 100
    curvature_draws: int = 2
    precisions: tuple[float, ...] = (1e2, 1e3, 1e4, 1e5)
    scales: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0)


def plan_of(name: str) -> Plan:
    """The sizes for a data set; with all training texts a step has 256 of them, not 64."""
    plan = Plan()
    if name.endswith("-few"):
        return plan
    return replace(plan, training=replace(plan.training, batch_size=256))


class Session:
    """What the methods share for one seed of a data set; computed when it is first needed.

    Args:
        rows: the rows.
        weights: of the base model.
        plan: sizes.
        seed: of everything.
        settings: learning rate, number of epochs, rate of dropout and rate of weight averaging.
        known: trainings of this seed by what determines them, which is added to.
        device: device of the models.
    """

    def __init__(
        self,
        rows: Rows,
        weights: dict[str, Tensor],
        plan: Plan,
        seed: int,
        settings: Record,
        known: dict[str, Any],
        device: str = "cpu",
    ) -> None:
        self.rows, self.weights, self.plan, self.seed = rows, weights, plan, seed
        self.settings, self.known, self.device = settings, known, device
        self.training = replace(
            plan.training, learning_rate=settings["learning_rate"], epochs=settings["epochs"]
        )

    @property
    def data(self) -> tuple[dict[str, Tensor], Tensor]:
        """The training rows."""
        return self.rows.train.inputs, self.rows.train.y

    def model(self, member: int = 0) -> nn.Module:
        """The model with fresh adapters."""
        return adapted_model(
            self.weights,
            self.plan.architecture,
            len(self.rows.intents),
            self.plan.adapter_rank,
            self.settings.get("dropout", 0.0),
            derive_seed(self.seed, member),
        ).to(self.device)

    def trained(self, member: int) -> TrainingResult:
        """A member of the ensemble; the first one is the maximum a posteriori."""
        names = ("learning_rate", "epochs", "dropout")
        key = f"{member} {[self.settings.get(name) for name in names]}"
        if key not in self.known:
            self.known[key] = train(
                self.model(member),
                "categorical",
                self.data,
                self.training,
                parameters=_RANDOM,
                seed=derive_seed(self.seed, member),
                progress=False,
            )
        return self.known[key]

    def path(self, member: int = 0) -> SwaResult:
        """The trajectory of stochastic weight averaging from a member."""
        key = f"path {member} {self.settings}"
        if key not in self.known:
            self.known[key] = swa(
                self.trained(member),
                "categorical",
                self.data,
                replace(self.training, swa_learning_rate=self.settings["swa_rate"]),
                parameters=_RANDOM,
                seed=derive_seed(self.seed, member),
                progress=False,
            )
        return self.known[key]

    def with_dropout(self, rate: float) -> Session:
        """The same with dropout in the training."""
        settings = self.settings | {"dropout": rate}
        return Session(
            self.rows, self.weights, self.plan, self.seed, settings, self.known, self.device
        )

    @property
    def members(self) -> range:
        """Numbers of the members of the ensemble."""
        return range(self.plan.members)

    def best(self, candidates: Iterable[Predictor]) -> Predictor:
        """The predictor with the best log-likelihood of the validation rows."""
        return min(candidates, key=lambda one: validation_nll(one, self.rows.validation))


def validation_nll(predictor: Predictor, part: Part) -> float:
    """Mean negative log-likelihood of some rows."""
    return -float(predictor.predict(part.inputs).log_prob(part.y).mean())


# --- baselines ------------------------------------------------------------------------------------


def _map(session: Session, settings: Record) -> Predictor:
    return point_estimate(session.trained(0))


def _temperature(session: Session, settings: Record) -> Predictor:
    held_out = session.rows.validation
    return temperature_scaling(point_estimate(session.trained(0)), (held_out.inputs, held_out.y))


def _mc_dropout(session: Session, settings: Record) -> Predictor:
    """Of a network that is trained with the rate of dropout."""
    result = session.with_dropout(settings["rate"]).trained(0)
    return mc_dropout(result, n_draws=session.plan.draws, seed=session.seed)


def _swa(session: Session, settings: Record) -> Predictor:
    return point_estimate(session.path())


def _swa_ensemble(session: Session, settings: Record) -> Predictor:
    paths = [session.path(m) for m in session.members]
    weights = torch.stack([path.network.weights for path in paths])
    return WeightSamples(paths[0].network, weights, paths[0].likelihood, "SWA ensemble")


def _ensemble(session: Session, settings: Record) -> Predictor:
    return ensemble_from_results([session.trained(m) for m in session.members])


def _swag(session: Session, settings: Record) -> Predictor:
    return session.best(
        swag(session.path(), session.plan.draws, scale=scale, seed=session.seed)
        for scale in session.plan.scales
    )


def _blob(session: Session, settings: Record) -> Predictor:
    return blob(
        session.model(),
        "categorical",
        session.data,
        session.training,
        settings=MeanFieldSettings(**settings),
        n_draws=session.plan.draws,
        seed=session.seed,
        progress=False,
    )


@dataclass(frozen=True)
class FewDraws:
    """A linearised posterior that predicts by a few draws of the linearised network.

    Attributes:
        posterior: the posterior.
        n_draws: number of draws.
        seed: of the draws.
    """

    posterior: Any
    n_draws: int
    seed: int

    def predict(self, inputs: Any) -> Any:
        """Average over the draws."""
        return self.posterior.predict(
            inputs, method="monte-carlo", n_draws=self.n_draws, seed=self.seed
        )


def _laplace(session: Session, settings: Record) -> Any:
    """With the prior precision of the best validation rows."""
    posterior = linearised_laplace(
        session.trained(0).network,
        "categorical",
        session.data,
        covariance="kfac",
        mc_samples=session.plan.curvature_draws,
        progress=False,
    )
    return session.best(
        FewDraws(posterior.with_prior_precision(precision), session.plan.draws, session.seed)
        for precision in session.plan.precisions
    )


# --- subspaces ------------------------------------------------------------------------------------


def _posterior(
    session: Session, module: nn.Module, subspace: Any, engine: type[Any], settings: Record
) -> Any:
    """The posterior in a subspace of the adapters and the classifier."""
    plan = session.plan
    inference: Engine = engine(
        steps=plan.steps,
        samples=plan.samples,
        batch_size=min(plan.batch_size, len(session.rows.train.y)),
    )
    return subbayes.fit(
        module.eval(),
        session.data,
        likelihood="categorical",
        parameters=_RANDOM,
        subspace=subspace,
        inference=inference,
        prior=settings["prior"],
        temperature=settings["temperature"],
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(draws=plan.draws, chains=1, seed=session.seed, progress=False),
    )


def _random(session: Session, settings: Record) -> Predictor:
    """Around the maximum a posteriori."""
    subspace = Random(rank=session.plan.groups)
    return _posterior(session, session.trained(0).module, subspace, MeanFieldVI, settings)


def _pca(session: Session, settings: Record) -> Predictor:
    """Around the mean of the trajectory."""
    return _around_path(session, 0, settings)


def _around_path(session: Session, member: int, settings: Record) -> Any:
    path = session.path(member)
    subspace = path.recorder.pca(session.plan.directions)
    return _posterior(session, path.network.module_with(), subspace, FullRankVI, settings)


def _many(session: Session, settings: Record) -> Predictor:
    """The same around all members of the ensemble, with equal weights."""
    each = max(1, session.plan.draws // session.plan.members)
    parts = []
    for member in session.members:
        fitted = _around_path(session, member, settings)
        z = torch.from_numpy(fitted.sampled.flat(each).copy())
        parts.append(fitted.subspace.weights(z.to(fitted.network.weights)))
    first = session.path(0)
    return WeightSamples(first.network, torch.cat(parts), first.likelihood, "subspaces")


# --- table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method of the experiment.

    Attributes:
        label: its name in tables.
        fit: takes a session and settings; returns a predictor.
        candidates: settings to select from, on the validation rows of seed 0.
        fields: names of the fields of the plan that it uses beside those of the training.
        is_subspace: whether it is a posterior in a subspace of the adapters.
        base: the method whose settings are those of the training; it may be the method itself.
    """

    label: str
    fit: Callable[[Session, Record], Any]
    candidates: tuple[Record, ...] = ({},)
    fields: tuple[str, ...] = ()
    is_subspace: bool = False
    base: str = "map"


def _grid(**values: tuple[Any, ...]) -> tuple[Record, ...]:
    found: list[Record] = [{}]
    for name, options in values.items():
        found = [one | {name: option} for one in found for option in options]
    return tuple(found)


_VI = ("draws", "steps", "samples", "batch_size")
_RATE = (5e-3,)
"""On the validation rows of clinc150-few, seed 0, MAP had an NLL of 1.463 and 1.351 after 10 epochs
at 3e-3 and 5e-3, and of 1.390, 1.437 and 1.429 after 20 at 3e-3, 5e-3 and 1e-2."""

METHODS = {
    "map": Method("MAP", _map, _grid(learning_rate=_RATE, epochs=(10,))),
    "temperature": Method("temperature scaling", _temperature),
    "mc-dropout": Method("MC dropout", _mc_dropout, _grid(rate=(0.1, 0.3)), ("draws",)),
    "laplace": Method(
        "Laplace-LoRA, KFAC", _laplace, fields=("draws", "curvature_draws", "precisions")
    ),
    "blob": Method("BLoB", _blob, _grid(kl_weight=(0.1, 1.0), initial_scale=(0.05,)), ("draws",)),
    "swa": Method(
        "SWA", _swa, _grid(learning_rate=_RATE, epochs=(20,), swa_rate=(0.1, 0.2, 0.3)), base="swa"
    ),
    "swag": Method("SWAG", _swag, fields=("draws", "scales"), base="swa"),
    "random": Method(
        "random subspace",
        _random,
        _grid(prior=(0.1, 0.3), temperature=(1.0,)),
        (*_VI, "groups"),
        True,
    ),
    "pca": Method(
        "PCA subspace",
        _pca,
        _grid(prior=(1.0,), temperature=(1.0, 10.0, 100.0)),
        (*_VI, "directions"),
        True,
        base="swa",
    ),
    "ensemble": Method(
        "ensemble of adapters",
        _ensemble,
        _grid(learning_rate=_RATE, epochs=(10, 20)),
        ("members",),
        base="ensemble",
    ),
    "swa-ensemble": Method("ensemble of SWA means", _swa_ensemble, fields=("members",), base="swa"),
    "subspaces": Method(
        "PCA subspaces of an ensemble",
        _many,
        _grid(prior=(1.0,), temperature=(1.0, 10.0, 100.0)),
        (*_VI, "directions", "members"),
        True,
        base="swa",
    ),
}
"""Methods by name."""

"""Methods of the CIFAR experiment, which share the trainings and the subspaces of a seed.

Elliptical slice sampling runs on the density with batch-normalisation statistics of each point,
variational inference, which needs gradients, on the one with the statistics of the centre. All
predictions re-estimate the statistics for each weight vector on the training images.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from experiments.batchnorm_posterior import BatchNormPosterior
from experiments.cifar_data import Rows
from experiments.residual_networks import MODELS
from experiments.store import Record
from subbayes import Network, Posterior, Predictive, Sampling, Training
from subbayes.baselines import ensemble_from_results, point_estimate, swag, temperature_scaling
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.variational.variational import MeanFieldVI
from subbayes.likelihoods import Categorical
from subbayes.subspace import DenseSubspace, RandomSubspace
from subbayes.training import connect, swa, train
from subbayes.training.curve import CurveResult
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.utils.seeding import derive_seed

__all__ = ["METHODS", "PLANS", "QUICK", "SUBSPACES", "Method", "Plan", "Session", "Space"]

Predict = Callable[[torch.Tensor], Predictive]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """Sizes of a run and settings of the trainings, which are part of the keys of the records.

    Attributes:
        width: factor of the numbers of channels.
        images: number of training images, with those that are held out.
        validation: number of training images that are held out.
        test: number of test images.
        epochs: of the first phase, with the schedule of the authors: constant for half of the
            epochs, then linear to a hundredth at 90 % of them.
        swa_epochs: of weight averaging at a constant rate, from the end of the first phase; one
            snapshot in each.
        curve_epochs: of the curve between two members of the ensemble.
        batch_size: images of a step.
        learning_rate: of the first phase.
        swa_learning_rate: of weight averaging.
        weight_decay: of all trainings.
        momentum: of all trainings.
        members: of the ensemble, at least 2; the first one is the SGD solution.
        snapshots: number of the last snapshots that span the trajectory.
        rank: of the random subspace and of the PCA subspace.
        swag_draws: weight vectors of SWAG.
        temperatures: candidates, of which the validation images select one for the PCA subspace,
            which the random one shares as in the paper, and one for the curve.
        tuning_draws: draws at each candidate.
        warmup: draws of each chain that are discarded.
        draws: draws of the final posterior.
        vi_steps: of variational inference.
        vi_samples: draws of each of these steps.
        vi_batch_size: images of each of these steps.
    """

    width: float = 1.0
    images: int = 10000
    validation: int = 1000
    test: int = 1000
    epochs: int = 80
    swa_epochs: int = 32
    curve_epochs: int = 24
    batch_size: int = 128
    learning_rate: float = 0.1
    swa_learning_rate: float = 0.01
    weight_decay: float = 3e-4
    momentum: float = 0.9
    members: int = 3
    snapshots: int = 20
    rank: int = 5
    swag_draws: int = 20
    temperatures: tuple[float, ...] = (10.0, 100.0, 1000.0, 10000.0)
    tuning_draws: int = 6
    warmup: int = 2
    draws: int = 20
    vi_steps: int = 200
    vi_samples: int = 1
    vi_batch_size: int = 512

    @property
    def training(self) -> Training:
        """The settings of all trainings."""
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            optimizer="sgd",
            momentum=self.momentum,
            batch_size=self.batch_size,
            schedule="swa",
            weight_decay=self.weight_decay,
            clip_norm=None,
            swa_epochs=self.swa_epochs,
            swa_learning_rate=self.swa_learning_rate,
            max_snapshots=self.snapshots,
            curve_epochs=self.curve_epochs,
        )


PLANS = {
    "resnet20": Plan(),
    "preresnet164": Plan(epochs=160, swa_epochs=140, curve_epochs=100),
    "vgg16": Plan(
        epochs=160, swa_epochs=140, curve_epochs=100, learning_rate=0.05, weight_decay=5e-4
    ),
    "wideresnet28x10": Plan(
        epochs=160, swa_epochs=140, curve_epochs=100, swa_learning_rate=0.05, weight_decay=5e-4
    ),
}
"""Learning rates and weight decays of the authors' scripts; ResNet-20 has those of PreResNet."""

QUICK = {
    "width": 0.25,
    "images": 600,
    "validation": 100,
    "test": 100,
    "epochs": 3,
    "swa_epochs": 6,
    "curve_epochs": 2,
    "members": 2,
    "snapshots": 6,
    "swag_draws": 3,
    "temperatures": (100.0, 10000.0),
    "tuning_draws": 4,
    "warmup": 0,
    "draws": 4,
    "vi_steps": 10,
}


@dataclass(frozen=True)
class Space:
    """A subspace with the network at its centre and the scale of the prior of its coordinates."""

    network: Network
    subspace: DenseSubspace
    prior: float


class Session:
    """What the methods share for one seed of a model; computed when it is first needed.

    Args:
        model: name of the model.
        rows: images.
        plan: sizes.
        seed: of everything.

    Attributes:
        seconds: of each training, by name.
    """

    def __init__(self, model: str, rows: Rows, plan: Plan, seed: int) -> None:
        self.model, self.rows, self.plan, self.seed = model, rows, plan, seed
        self.seconds: dict[str, float] = {}
        self._known: dict[str, Any] = {}

    @property
    def clean(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The training images as they are."""
        return self.rows.train.x, self.rows.train.y

    def module(self, member: int) -> nn.Module:
        """A network with the initial weights of a member."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, member))
            return MODELS[self.model](self.plan.width).to(self.rows.train.x.device)

    def member(self, number: int) -> TrainingResult:
        """A member of the ensemble; the first one is the SGD solution."""
        return self._once(f"member {number}", lambda: self._train(train, number, number))

    def path(self) -> SwaResult:
        """The trajectory of weight averaging from the SGD solution."""
        start = self.member(0)
        return self._once("averaging", lambda: self._train(swa, 0, self.plan.members, start))

    def space(self, name: str) -> Space:
        """A subspace."""
        return self._once(f"{name} subspace", lambda: SUBSPACES[name](self))

    def connected(self) -> CurveResult:
        """The curve between the first two members of the ensemble."""
        ends = [self.member(0), self.member(1)]
        curve = partial(connect, solutions=ends)
        return self._once("curve", lambda: self._train(curve, 0, self.plan.members + 1))

    def _train(self, how: Callable[..., _T], member: int, data: int, start: Any = None) -> _T:
        """Train on augmented images; `data` seeds their order and augmentation."""
        seed = derive_seed(self.seed, 100 + data)
        return how(
            self.module(member) if start is None else start,
            Categorical(10),
            self.rows.augmented(self.plan.batch_size, seed),
            self.plan.training,
            seed=seed,
            progress=False,
        )

    def _once(self, name: str, compute: Callable[[], _T]) -> _T:
        if name not in self._known:
            started, before = time.perf_counter(), sum(self.seconds.values())
            self._known[name] = compute()
            within = sum(self.seconds.values()) - before
            self.seconds[name] = time.perf_counter() - started - within
        return self._known[name]


# --- subspaces ------------------------------------------------------------------------------------


def _pca(session: Session) -> Space:
    """The principal directions of the trajectory around its mean."""
    network = session.path().network
    subspace = session.path().recorder.pca(session.plan.rank).to(network.device)
    return Space(network, DenseSubspace(network.weights, subspace.basis()), 1.0)


def _random(session: Session) -> Space:
    """Random directions around the same mean, as wide as the first two principal directions."""
    pca = session.space("pca")
    found = RandomSubspace(pca.network.weights, session.plan.rank, derive_seed(session.seed, 50))
    scale = float(pca.subspace.basis()[:2].norm(dim=1).mean())
    return Space(pca.network, DenseSubspace(found.shift, found.basis()), scale)


def _curve(session: Session) -> Space:
    """The plane of the curve around its middle; its ends lie at distances of about 1."""
    found = session.connected()
    basis = found.curve.subspace(unit=False).basis().to(found.network.device)
    return Space(found.network, DenseSubspace(found.network.weights, basis), 1.0)


SUBSPACES: dict[str, Callable[[Session], Space]] = {"pca": _pca, "random": _random, "curve": _curve}


def posterior_of(
    session: Session, space: Space, temperature: float, kind: type[Posterior] = BatchNormPosterior
) -> Posterior:
    """The posterior of the training images as they are, in a subspace."""
    if not space.network.has_batchnorm:
        kind = Posterior
    return kind(
        space.network,
        "categorical",
        session.clean,
        space.subspace,
        space.prior,
        temperature,
        mode="eager",
    )


def sampled(session: Session, name: str, temperature: float, draws: int) -> tuple[Predict, Record]:
    """Predictions of elliptical slice sampling in a subspace, and facts of the chain."""
    posterior = posterior_of(session, session.space(name), temperature)
    found = EllipticalSlice().run(
        posterior,
        Sampling(
            draws=draws,
            chains=1,
            warmup=session.plan.warmup,
            seed=session.seed,
            initial="shift",
            progress=False,
        ),
    )
    facts = {"evaluations": float(np.mean(found.stats["evaluations"]))}
    return _predict(posterior, found.flat()), facts


def _predict(posterior: Posterior, z: np.ndarray) -> Predict:
    refresh = posterior.network.has_batchnorm
    return lambda x: posterior.predict(z, x, refresh_batchnorm=refresh)


# --- methods --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        label: in tables.
        fit: returns a function that predicts, and facts for the record; it is given the session
            and the temperature of the subspace.
        tuned: name of the subspace whose temperature it uses, or None.
    """

    label: str
    fit: Callable[[Session, float], tuple[Predict, Record]]
    tuned: str | None = None


def _sgd(session: Session, _: float) -> tuple[Predict, Record]:
    return point_estimate(session.member(0)).predict, {}


def _swa(session: Session, _: float) -> tuple[Predict, Record]:
    return point_estimate(session.path()).predict, {}


def _scaled(session: Session, _: float) -> tuple[Predict, Record]:
    held_out = session.rows.validation
    found = temperature_scaling(point_estimate(session.path()), (held_out.x, held_out.y))
    return found.predict, {"scaling": found.temperature}


def _swag(session: Session, _: float) -> tuple[Predict, Record]:
    found = swag(session.path(), session.plan.swag_draws, seed=session.seed)
    refresh = session.clean if found.network.has_batchnorm else None
    return lambda x: found.predict(x, refresh_batchnorm=refresh), {}


def _ensemble(session: Session, _: float) -> tuple[Predict, Record]:
    results = [session.member(number) for number in range(session.plan.members)]
    return ensemble_from_results(results).predict, {}


def _ess(name: str, session: Session, temperature: float) -> tuple[Predict, Record]:
    return sampled(session, name, temperature, session.plan.draws)


def _vi(name: str, session: Session, temperature: float) -> tuple[Predict, Record]:
    plan, space = session.plan, session.space(name)
    posterior = posterior_of(session, space, temperature, Posterior)
    size = min(plan.vi_batch_size, len(session.rows.train.y))
    engine = MeanFieldVI(steps=plan.vi_steps, samples=plan.vi_samples, batch_size=size)
    found = engine.fit(posterior, seed=session.seed, progress=False)
    z = found.sample(plan.draws, session.seed)
    return _predict(posterior, z), {"converged": bool(found.converged)}


METHODS = {
    "sgd": Method("SGD", _sgd),
    "swa": Method("SWA", _swa),
    "swa_temp": Method("SWA, temperature scaled", _scaled),
    "swag": Method("SWAG", _swag),
    "pca_ess": Method("PCA + ESS", partial(_ess, "pca"), "pca"),
    "pca_vi": Method("PCA + VI", partial(_vi, "pca"), "pca"),
    "random_ess": Method("random + ESS", partial(_ess, "random"), "pca"),
    "random_vi": Method("random + VI", partial(_vi, "random"), "pca"),
    "ensemble": Method("deep ensemble", _ensemble),
    "curve_ess": Method("curve + ESS", partial(_ess, "curve"), "curve"),
    "curve_vi": Method("curve + VI", partial(_vi, "curve"), "curve"),
}
"""Methods by name, in the order in which they are computed."""

"""Settings and methods of `uci_small`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from experiments import batched
from experiments.batched import Members
from experiments.uci import Array, Case, case_of, worst_rhat
from subbayes import Draws, Posterior, Predictive
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.variational.variational import MeanFieldVI
from subbayes.predictions.averaging import average
from subbayes.training.trainer import SwaResult

FIXED = (
    "hidden",
    "path_epochs",
    "clip_norm",
    "snapshots",
    "rank",
    "swag_draws",
    "chains",
    "draws",
    "rhat",
    "longest",
)
"""Settings of a plan that the results of a split depend on, besides the selected ones."""

VI_FIXED = (
    "hidden",
    "path_epochs",
    "clip_norm",
    "snapshots",
    "rank",
    "vi_steps",
    "vi_samples",
    "vi_batch_size",
    "vi_draws",
)
"""The same for variational inference."""

FURTHER_FIXED = (
    "hidden",
    "path_epochs",
    "clip_norm",
    "snapshots",
    "rank",
    "members",
    "curve_epochs",
    "chains",
    "draws",
    "nuts_draws",
)
"""The same for deep ensembles, curves and NUTS."""

CURVE_FIXED = ("curve_epochs", "clip_norm", "tuning_chains", "tuning_draws", "temperatures")
"""Settings of a plan that the temperature in the subspace of a curve depends on."""

DIVERGED = (
    "path_rates: expected rates at which training stays finite, got one that diverged. "
    "Lower the grid."
)

PROCEDURE = 1
"""Increase it when a change of the code changes the results of the same settings."""


@dataclass(frozen=True)
class Plan:
    """Fixed settings, and grids from which the others are selected.

    Attributes:
        hidden: widths of the hidden layers.
        learning_rates: grid of the initial learning rate of Adam, which follows a cosine to 0.
        weight_decays: grid of the weight decay.
        epochs: grid of the epochs of the first phase.
        bases: number of first phases from which the second phase is tried: the best ones among
            the best at each number of epochs.
        path_rates: grid of the constant learning rate of SGD along the trajectory.
        further_rates: larger rates, tried in turn as long as the largest rate so far is the best.
        path_epochs: epochs along the trajectory, with a snapshot after each.
        clip_norm: maximum gradient norm along the trajectory.
        snapshots: number of the last snapshots that span the subspace (the paper's M).
        rank: rank of the PCA subspace.
        temperatures: grid of the temperature.
        tuning_splits: number of splits whose training rows are used for model selection.
        validations: random validation sets of each split; learning rate of the trajectory and
            temperature are selected on the first of them.
        validation: fraction of the training rows held out for validation.
        tuning_chains: chains of elliptical slice sampling during model selection.
        tuning_draws: draws per chain during model selection, after as many of warm-up.
        chains: chains of the final sampling.
        draws: draws per chain, all used for prediction, after half as many of warm-up.
        rhat: threshold of the worst R-hat, above which chains are rerun at twice the length.
        longest: maximum length of a chain in multiples of `draws`.
        swag_draws: weight vectors of SWAG.
        vi_steps: maximum number of steps of the variational fit.
        vi_samples: draws per step.
        vi_batch_size: rows per step, or all rows if there are no more.
        vi_draws: draws of the fitted Gaussian.
        members: networks of the deep ensemble; the curve connects the first two.
        curve_epochs: epochs of the curve, as a share of those of the first phase.
        nuts_draws: draws per chain of NUTS, after as many of warm-up.
    """

    hidden: tuple[int, ...] = (50,)
    learning_rates: tuple[float, ...] = (3e-3, 1e-2)
    weight_decays: tuple[float, ...] = (1e-2, 3e-2, 1e-1, 3e-1)
    epochs: tuple[int, ...] = (100, 300, 1000)
    bases: int = 2
    path_rates: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)
    further_rates: tuple[float, ...] = (3e-2, 1e-1)
    path_epochs: int = 100
    clip_norm: float = 1.0
    snapshots: int = 20
    rank: int = 20
    temperatures: tuple[float, ...] = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    tuning_splits: int = 5
    validations: int = 2
    validation: float = 0.1
    tuning_chains: int = 4
    tuning_draws: int = 100
    chains: int = 8
    draws: int = 400
    rhat: float = 1.05
    longest: int = 8
    swag_draws: int = 200
    vi_steps: int = 2000
    vi_samples: int = 8
    vi_batch_size: int = 1000
    vi_draws: int = 400
    members: int = 5
    curve_epochs: float = 2.0
    nuts_draws: int = 400


PLANS = {
    "naval": Plan(
        weight_decays=(1e-5, 1e-4),
        epochs=(1000, 3000, 10000),
        bases=1,
        path_rates=(1e-5, 1e-4, 1e-3),
        further_rates=(),
        path_epochs=50,
        tuning_splits=2,
        validations=1,
        tuning_draws=50,
        temperatures=(1.0, 30.0, 1000.0),
        chains=4,
        draws=200,
        longest=1,
        curve_epochs=0.3,
        nuts_draws=200,
    )
}
"""Naval has 40 times as many rows, hence smaller grids and shorter chains."""


@dataclass(frozen=True)
class Base:
    """Settings of the first phase."""

    learning_rate: float
    weight_decay: float
    epochs: int


@dataclass(frozen=True)
class Chosen:
    """Settings selected for a data set, for each method separately."""

    sgd: Base
    swag: Base
    swag_rate: float
    pca: Base
    pca_rate: float
    temperature: float

    @property
    def paths(self) -> set[tuple[Base, float]]:
        """The trajectories that the methods use."""
        return {(self.swag, self.swag_rate), (self.pca, self.pca_rate)}


class Phases:
    """First phases and trajectories of splits, which several methods share.

    Args:
        X: inputs, shape (n, d).
        y: targets, shape (n,).
        masks: test rows of all splits, shape (splits, n).
        plan: settings.
    """

    def __init__(self, X: Array, y: Array, masks: Array, plan: Plan) -> None:
        self.rows, self.plan = (X, y, masks), plan
        self._members: dict[tuple[tuple[int, ...], Base], tuple[Members, float]] = {}
        self._paths: dict[
            tuple[tuple[int, ...], Base, float], tuple[list[SwaResult | None], float]
        ] = {}

    def cases(self, splits: tuple[int, ...]) -> list[Case]:
        """Return the rows of splits."""
        return [case_of(*self.rows, split) for split in splits]

    def members(self, splits: tuple[int, ...], base: Base) -> tuple[Members, float]:
        """Return the first phase of each split, trained together, and its seconds a split."""
        if (splits, base) not in self._members:
            started = time.process_time()
            found = train(self.cases(splits), self.plan, [base] * len(splits))
            seconds = (time.process_time() - started) / len(splits)
            self._members[splits, base] = found, seconds
        return self._members[splits, base]

    def paths(
        self, splits: tuple[int, ...], base: Base, rate: float
    ) -> tuple[list[SwaResult | None], float]:
        """Return the trajectory of each split, and its seconds a split."""
        if (splits, base, rate) not in self._paths:
            members, _ = self.members(splits, base)
            started = time.process_time()
            found = run_paths(members, self.cases(splits), self.plan, base, rate)
            seconds = (time.process_time() - started) / len(splits)
            self._paths[splits, base, rate] = found, seconds
        return self._paths[splits, base, rate]


# --- methods ------------------------------------------------------------------------------------


def train(cases: list[Case], plan: Plan, bases: list[Base]) -> Members:
    """Run the first phase of all cases, each with its own settings except for the epochs."""
    return batched.train(
        [c.table for c in cases],
        hidden=plan.hidden,
        epochs=bases[0].epochs,
        learning_rate=[b.learning_rate for b in bases],
        weight_decay=[b.weight_decay for b in bases],
        batch_size=batch_size(cases),
    )


def run_paths(
    members: Members, cases: list[Case], plan: Plan, base: Base, rate: float
) -> list[SwaResult | None]:
    """Run SGD at a constant rate from each member; None for a member that diverged."""
    return batched.average(
        members,
        epochs=plan.path_epochs,
        learning_rate=[rate] * len(cases),
        weight_decay=[base.weight_decay] * len(cases),
        batch_size=batch_size(cases),
        max_snapshots=plan.snapshots,
        clip_norm=plan.clip_norm,
    )


def batch_size(cases: list[Case]) -> int:
    """Return a tenth of the training rows."""
    return -(-len(cases[0].table.y) // 10)


def predict_sgd(members: Members, s: int, inputs: Tensor) -> Predictive:
    """Predict with the solution of the first phase."""
    network = members.network(s)
    return average(network, members.likelihood(s), network.weights[None], inputs)


def sample_ess(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Sample chains until R-hat is below the threshold, or of the maximum length."""
    for factor in (2**i for i in range(plan.longest.bit_length())):
        draws = EllipticalSlice().sample(
            posterior, draws=factor * plan.draws, chains=plan.chains, seed=seed, progress=False
        )
        if worst_rhat(draws) <= plan.rhat:
            break
    return draws


def sample_vi(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draw from a mean-field Gaussian fitted to the posterior."""
    rows = plan.vi_batch_size if plan.vi_batch_size < posterior.data.n else None
    return MeanFieldVI(steps=plan.vi_steps, samples=plan.vi_samples, batch_size=rows).sample(
        posterior, chains=1, draws=plan.vi_draws, seed=seed, progress=False
    )

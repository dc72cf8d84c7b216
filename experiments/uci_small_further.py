"""Methods beside those of the paper's tables 2 to 4: deep ensembles, curve subspaces, NUTS.

They share the first phase and the trajectory selected for the methods of the paper, and have their
own records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from experiments.batched import Members
from experiments.store import Record, versions
from experiments.uci import Case, posterior_of, sampling_record, scores
from experiments.uci_small_methods import (
    DIVERGED,
    Base,
    Chosen,
    Phases,
    Plan,
    batch_size,
    sample_ess,
    train,
)
from subbayes import Draws, Network, Posterior
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.inference.samplers.nuts import NUTS
from subbayes.subspace import DenseSubspace
from subbayes.training.configuration import Training
from subbayes.training.curve import connect
from subbayes.utils.checks import InputError
from subbayes.utils.seeding import derive_seed

METHODS = ("PCA + NUTS", "curve + ESS", "deep ensemble")


def other_members(c: Case, plan: Plan) -> list[Case]:
    """Return a case with other seeds, for the members of an ensemble after the first one."""
    return [
        replace(c, table=replace(c.table, seed=derive_seed(c.table.seed, 200 + m)))
        for m in range(1, plan.members)
    ]


def ensemble(members: list[tuple[Members, int]]) -> WeightSamples:
    """Return a deep ensemble of members, each with its own global variance."""
    networks = [one.network(s) for one, s in members]
    return WeightSamples(
        networks[0],
        torch.stack([network.weights for network in networks]),
        stack_likelihoods([one.likelihood(s) for one, s in members]),
        "deep ensemble",
    )


def run_further(
    splits: tuple[int, ...], phases: Phases, choice: Chosen, temperature: float
) -> Iterator[Record]:
    """Train the other members of all splits together, then score each split.

    Args:
        splits: the splits.
        phases: first phases and trajectories.
        choice: the settings selected for the methods of the paper.
        temperature: of the curve.
    """
    plan, cases = phases.plan, phases.cases(splits)
    first, training = phases.members(splits, choice.sgd)
    paths, trajectory = phases.paths(splits, choice.pca, choice.pca_rate)
    started = time.process_time()
    rest = [other for c in cases for other in other_members(c, plan)]
    others = train(rest, plan, [choice.sgd] * len(rest))
    seconds = {
        "members": training + (time.process_time() - started) / len(cases),
        "trajectory": phases.members(splits, choice.pca)[1] + trajectory,
    }
    for s, (c, path) in enumerate(zip(cases, paths, strict=True)):
        if path is None:
            raise InputError(DIVERGED)
        at = s * (plan.members - 1)
        members = [(first, s), *((others, at + m) for m in range(plan.members - 1))]
        yield _record(
            c,
            ensemble(members),
            posterior_of(path, c.table, plan.rank),
            plan,
            choice,
            temperature,
            seconds,
        )


def _record(
    c: Case,
    members: WeightSamples,
    pca: Posterior,
    plan: Plan,
    choice: Chosen,
    temperature: float,
    seconds: Record,
) -> Record:
    started = time.process_time()
    curve = curve_posterior(c, members.network, members.weights[:2], plan, choice.sgd)
    curve = curve.with_temperature(temperature)
    trained = time.process_time()
    along = sample_ess(curve, replace(plan, longest=1), c.table.seed)  # longer ones mix no better
    drawn = time.process_time()
    pca = pca.with_temperature(choice.temperature)
    nuts = sample_nuts(pca, plan, c.table.seed)
    return {
        "methods": {
            "PCA + NUTS": scores(pca.predict(nuts, c.inputs), c.y),
            "curve + ESS": scores(curve.predict(along, c.inputs), c.y),
            "deep ensemble": scores(members.predict(c.inputs), c.y),
        },
        "nuts": sampling_record(pca, nuts) | {"divergent": int(nuts.stats["divergent"].sum())},
        "curve": sampling_record(curve, along),
        "versions": versions(),
        "threads": 1,
        "seconds": {
            k: round(v, 2)
            for k, v in (
                seconds
                | {
                    "curve": trained - started,
                    "sampling the curve": drawn - trained,
                    "NUTS": time.process_time() - drawn,
                }
            ).items()
        },
    }


def curve_posterior(c: Case, network: Network, ends: Tensor, plan: Plan, base: Base) -> Posterior:
    """Return the posterior in the plane of a curve between two solutions, around its middle.

    The ends of the curve lie at distances of about 1, as the directions are scaled.

    Args:
        c: rows.
        network: the architecture.
        ends: weights of the two solutions, shape (2, D).
        plan: settings.
        base: settings of the first phase, which the curve shares.
    """
    data = (c.table.inputs, c.table.y)
    training = Training(
        curve_epochs=round(plan.curve_epochs * base.epochs),
        learning_rate=base.learning_rate,
        schedule="cosine",
        weight_decay=base.weight_decay,
        batch_size=batch_size([c]),
        clip_norm=plan.clip_norm,
    )
    found = connect(
        network,
        c.table.likelihood,
        data,
        training,
        solutions=list(ends),
        seed=c.table.seed,
        progress=False,
    )
    basis = found.curve.subspace(unit=False).basis()
    space = DenseSubspace(found.network.weights, basis)
    return Posterior(found.network, found.likelihood, data, space)


def sample_nuts(posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draw by NUTS, with as many steps of warm-up."""
    n = plan.nuts_draws
    return NUTS().sample(
        posterior, draws=n, warmup=n, chains=plan.chains, seed=seed, progress=False
    )

"""Model selection of `uci_small`, by likelihood on validation rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import numpy as np

from experiments.batched import Members
from experiments.store import Record, Store
from experiments.uci import (
    Array,
    Case,
    Say,
    best,
    case,
    fields_of,
    moment_matched,
    posterior_of,
    recorded_trials,
    score_or_lowest,
    summary,
)
from experiments.uci_small_further import curve_posterior, other_members
from experiments.uci_small_methods import (
    CURVE_FIXED,
    PROCEDURE,
    VI_FIXED,
    Base,
    Chosen,
    Plan,
    predict_sgd,
    run_paths,
    sample_vi,
    train,
)
from subbayes import Draws, Posterior
from subbayes.baselines.swag import swag
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.training.trainer import SwaResult
from subbayes.utils.seeding import derive_seed


def tuning_cases(X: Array, y: Array, masks: Array, plan: Plan) -> list[Case]:
    """Return validation cases, which use the training rows of the first splits only."""
    cases = []
    for v in range(plan.validations):
        for split in range(min(plan.tuning_splits, len(masks))):
            rows = np.flatnonzero(~masks[split])
            order = np.random.default_rng([split, v]).permutation(rows)
            n = round(plan.validation * len(rows))
            cases.append(case(X, y, order[n:], order[:n], derive_seed(split, v)))
    return cases


def try_training(cases: list[Case], plan: Plan, epochs: int) -> list[Record]:
    """Return the validation likelihood of SGD at all learning rates and weight decays."""
    grid = [
        Base(rate, decay, epochs) for rate in plan.learning_rates for decay in plan.weight_decays
    ]
    members = train(cases * len(grid), plan, [base for base in grid for _ in cases])
    found = []
    for i, base in enumerate(grid):
        at = range(i * len(cases), (i + 1) * len(cases))
        values = [
            moment_matched(predict_sgd(members, s, c.inputs), c.y)
            if members.finite(s)
            else -math.inf
            for s, c in zip(at, cases, strict=True)
        ]
        found.append(dataclasses.asdict(base) | summary(values))
    return found


def try_path(
    cases: list[Case], members: Members, plan: Plan, base: Base, rate: float
) -> list[Record]:
    """Return the validation likelihood of SWAG, and of the subspace at every temperature."""
    paths = run_paths(members, cases, plan, base, rate)
    swags = [
        moment_matched(swag(p, plan.swag_draws, seed=c.table.seed).predict(c.inputs), c.y)
        if p
        else -math.inf
        for p, c in zip(paths, cases, strict=True)
    ]

    return [{"method": "SWAG", "rate": rate} | summary(swags)] + [
        {"method": "PCA + ESS", "rate": rate} | row
        for row in _score_temperatures(
            _posteriors(paths, cases, plan), cases, plan, partial(_few_draws, plan)
        )
    ]


def try_vi(cases: list[Case], plan: Plan, choice: Chosen) -> list[Record]:
    """Return the validation likelihood of variational inference at every temperature."""
    base, rate = choice.pca, choice.pca_rate
    paths = run_paths(train(cases, plan, [base] * len(cases)), cases, plan, base, rate)
    return _score_temperatures(
        _posteriors(paths, cases, plan),
        cases,
        plan,
        lambda posterior, seed: sample_vi(posterior, plan, seed),
    )


def try_curve(cases: list[Case], plan: Plan, choice: Chosen) -> list[Record]:
    """Return the validation likelihood in the subspace of a curve at every temperature."""
    base = choice.sgd
    pairs = [one for c in cases for one in (c, other_members(c, plan)[0])]
    members = train(pairs, plan, [base] * len(pairs))
    posteriors = [
        curve_posterior(c, members.network(2 * s), members.rows[2 * s : 2 * s + 2, :-1], plan, base)
        for s, c in enumerate(cases)
    ]
    return _score_temperatures(posteriors, cases, plan, partial(_few_draws, plan))


def _few_draws(plan: Plan, posterior: Posterior, seed: int) -> Draws:
    n = plan.tuning_draws
    return EllipticalSlice().sample(
        posterior, draws=n, chains=plan.tuning_chains, warmup=n, seed=seed, progress=False
    )


def _posteriors(
    paths: list[SwaResult | None], cases: list[Case], plan: Plan
) -> Iterator[Posterior | None]:
    """Yield the posterior in the PCA subspace of each trajectory; None for one that diverged."""
    for path, c in zip(paths, cases, strict=True):
        yield None if path is None else posterior_of(path, c.table, plan.rank)


def _score_temperatures(
    posteriors: Iterable[Posterior | None],
    cases: list[Case],
    plan: Plan,
    sample: Callable[[Posterior, int], Draws],
) -> list[Record]:
    """Validation likelihood at every temperature, of draws by `sample(posterior, seed)`."""
    rows = []
    for posterior, c in zip(posteriors, cases, strict=True):
        if posterior is None:
            rows.append([-math.inf] * len(plan.temperatures))
            continue
        values = []
        for temperature in plan.temperatures:
            tempered = posterior.with_temperature(temperature)
            draws = sample(tempered, c.table.seed)
            values.append(moment_matched(tempered.predict(draws, c.inputs), c.y))
        rows.append(values)
    return [
        {"temperature": t} | summary(column)
        for t, column in zip(plan.temperatures, np.array(rows).T.tolist(), strict=True)
    ]


def select_settings(
    name: str, X: Array, y: Array, masks: Array, plan: Plan, store: Store, say: Say
) -> Chosen:
    """Select the settings of a data set; trials are recorded and not run again."""
    cases = functools.cache(lambda: tuning_cases(X, y, masks, plan))
    facts = _facts(name, plan)

    def trials(kind: str, settings: Record, run: Callable[[], list[Record]]) -> list[Record]:
        return recorded_trials(store, name, kind, facts | settings, run, say)

    grid = fields_of(plan, "learning_rates", "weight_decays")
    best_at = [
        best(trials("training", grid | {"epochs": e}, lambda e=e: try_training(cases(), plan, e)))
        for e in plan.epochs
    ]
    fixed = fields_of(
        plan,
        "path_epochs",
        "clip_norm",
        "snapshots",
        "rank",
        "swag_draws",
        "temperatures",
        "tuning_chains",
        "tuning_draws",
    )
    few = functools.cache(lambda: cases()[: plan.tuning_splits])
    members_of = functools.cache(lambda base: train(few(), plan, [base] * len(few())))
    swags, tempered = [], []
    for row in sorted(best_at, key=score_or_lowest, reverse=True)[: plan.bases]:
        base = _base(row)
        here: list[Record] = []
        for rate in plan.path_rates + plan.further_rates:
            if rate in plan.further_rates and best(here)["rate"] < here[-1]["rate"]:
                break
            settings = dataclasses.asdict(base) | fixed | {"rate": rate}
            swag_row, *rows = trials(
                "path",
                settings,
                lambda base=base, rate=rate: try_path(few(), members_of(base), plan, base, rate),
            )
            here += rows
            swags.append(swag_row | dataclasses.asdict(base))
        tempered += [row | dataclasses.asdict(base) for row in here]
    swag_best, pca_best = best(swags), best(tempered)
    return Chosen(
        sgd=_base(best(best_at)),
        swag=_base(swag_best),
        swag_rate=swag_best["rate"],
        pca=_base(pca_best),
        pca_rate=pca_best["rate"],
        temperature=pca_best["temperature"],
    )


def select_temperature(
    name: str,
    X: Array,
    y: Array,
    masks: Array,
    plan: Plan,
    choice: Chosen,
    store: Store,
    say: Say,
    part: Literal["vi", "curve"],
) -> float:
    """Select a temperature: of variational inference, or of draws in the subspace of a curve."""
    if part == "vi":
        further = dataclasses.asdict(choice.pca) | {"rate": choice.pca_rate}
        further |= fields_of(plan, *VI_FIXED, "temperatures")
    else:
        further = dataclasses.asdict(choice.sgd) | fields_of(plan, *CURVE_FIXED)
    run = try_vi if part == "vi" else try_curve
    found = recorded_trials(
        store,
        name,
        part,
        _facts(name, plan) | further,
        lambda: run(tuning_cases(X, y, masks, plan)[: plan.tuning_splits], plan, choice),
        say,
    )
    return float(best(found)["temperature"])


def _facts(name: str, plan: Plan) -> Record:
    """Settings that every selection depends on."""
    return {"dataset": name, "procedure": PROCEDURE} | fields_of(
        plan, "hidden", "tuning_splits", "validations", "validation"
    )


def _base(row: Record) -> Base:
    return Base(row["learning_rate"], row["weight_decay"], row["epochs"])

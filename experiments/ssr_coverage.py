"""Coverage of effects' intervals beside networks, in simulated data sets.

For a linear effect, a factor, a smooth (pointwise and across the function), random effects and
sigma, beside networks that read columns of the formula, columns that are correlated with it, or
others, with 120 and 1000 rows: how many intervals of 50, 90 and 95 % cover the effect in the
population (`effects="population"`) or over the training rows (`effects="sample"`), and how wide
they are beside those of

- an oracle, the same model without a network of responses minus the network's true function;
- a generalised additive model, with smooths of the network's other columns instead of the network;
- double machine learning (Chernozhukov et al. 2018) of the linear effects.

Several processes may run the same command: each takes data sets that no other has finished.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from experiments import ssr_coverage_tables as tables
from experiments.markdown import add_write_option, publish
from experiments.ssr_coverage_data import (
    CASES,
    GRID,
    GROUPS,
    READS,
    SIGMA,
    Rows,
    network_columns,
    simulate,
    true_effects,
)
from experiments.ssr_coverage_methods import known_network, partialling_out
from experiments.store import Record, Store, key_of
from experiments.uci import numbers_from
from subbayes import MLP, Training
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.smc import SMC
from subbayes.regression import Regression
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.joint_posterior import JointState
from subbayes.training.configuration import Schedule
from subbayes.utils.checks import check_choice

SIZES = (120, 1000)
LARGE = 400_000  # rows of the population
MANY = 2500  # data sets with a known network


@dataclass(frozen=True)
class Plan:
    """Settings of the fits.

    Attributes:
        hidden: width of the hidden layer of the networks.
        rank: directions of the networks' subspace.
        epochs: number of epochs, on all rows.
        learning_rate: learning rate of Adam.
        schedule: of the learning rate.
        prior_scale: standard deviation of the prior of the weights in training.
        draws: number of draws, the particles of one run of sequential Monte Carlo.
        integrated: whether the coefficients are integrated out beside networks; the first records
            are of all coordinates and at most 50 Crank-Nicolson steps at each power, and cannot be
            computed anew.
    """

    hidden: int = 8
    rank: int = 12
    epochs: int = 1000
    learning_rate: float = 1e-2
    schedule: Schedule = "constant"
    prior_scale: float = 1.0
    draws: int = 500
    integrated: bool = True

    def training(self) -> Training:
        """Return the settings of the training, to the mode: no rows are held out.

        Where a fifth of few rows stops training early, the subspace does not contain what all
        weights would fit, and sigma is too large.
        """
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            batch_size=None,
            prior_scale=self.prior_scale,
            clip_norm=None,
            validation=None,
            patience=None,
        )

    def facts(self) -> dict[str, Any]:
        """What identifies records; the first ones had no schedule, and sampled all coordinates."""
        found = asdict(self)
        if self.schedule == "constant":
            del found["schedule"]
        if not self.integrated:
            del found["integrated"]
        return found

    def engine(self) -> SMC:
        """Return the engine of models with networks."""
        return SMC(max_moves=20, gradients=False)

    def sampling(self, seed: int) -> Sampling:
        """Return the settings of the sampling."""
        return Sampling(draws=self.draws, chains=1, seed=seed, progress=False)


PLANS = {120: Plan(), 1000: Plan(epochs=4000, learning_rate=3e-2, schedule="cosine")}
"""Settings by number of rows: those with the lowest training loss in data sets 1001 and 1002, which
are not among those of the experiment, of eight (rates of 0.01 and 0.03, constant or with a cosine
schedule, 1000 to 16,000 epochs)."""


def fit_network(
    case: str, reads: str, rows: Rows, seed: int, plan: Plan
) -> SemiStructuredRegression:
    """Fit effects beside a network."""
    columns = network_columns(case, reads)
    levels = {"c": 3, "g": GROUPS}
    width = sum(levels.get(name, 1) for name in columns)
    network = MLP(width, (plan.hidden,), 1, "tanh", seed=seed)
    model = SemiStructuredRegression(
        f"{CASES[case].formula} + net({', '.join(columns)})", networks={"net": network}
    ).fit(
        rows.frame,
        subspace=SemiStructuredSubspace(plan.rank),
        inference=plan.engine(),
        training=plan.training(),
        sampling=plan.sampling(seed),
    )
    return model


def fit_without_network(
    formula: str, frame: pd.DataFrame, seed: int, plan: Plan
) -> SemiStructuredRegression:
    """Fit a generalised additive model."""
    return Regression(formula).fit(frame, sampling=plan.sampling(seed))


def in_sample(model: SemiStructuredRegression) -> SemiStructuredRegression:
    """Return the same draws as effects of the training rows."""
    state = model.state
    specification = replace(state.model.specification, effects="sample")
    other = SemiStructuredRegression.__new__(SemiStructuredRegression)
    joint = replace(state.joint, model=replace(state.model, specification=specification))
    other.specification, other._state = specification, JointState(joint, state.draws)
    return other


def case_draws(case: str, model: SemiStructuredRegression) -> dict[str, Float[np.ndarray, "S m"]]:
    """Return draws of the effects of a case by name."""
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    found = {}
    for name in CASES[case].names:
        if name == "g":
            levels = [f"Intercept | g[g{i:02d}]" for i in range(GROUPS)]
            zero = np.zeros(model.draws.n_chains * model.draws.n_draws)
            found[name] = np.stack([effects.get(level, zero) for level in levels], 1)
        elif name.startswith("s("):
            found[name] = model.effect(name, GRID).draws
        else:
            own = "sd(Intercept | g)" if name == "sd(g)" and name not in effects else name
            found[name] = effects[own][:, None]
    return found


def describe(draws: Float[np.ndarray, "S m"], truth: Float[np.ndarray, " m"]) -> Record:
    """Return the shares of draws below the truth, and means over points of other figures.

    "width" is that of 90 % intervals, "error" that of the mean, "sd" the standard deviation. "band"
    is the share of draws whose largest distance from the mean, in standard deviations over the
    points, is below that of the truth.
    """
    mean, sd = draws.mean(0), draws.std(0, ddof=1)
    away = np.abs((draws - mean) / sd).max(1)
    return {
        "below": (draws < truth).mean(0).round(3).tolist(),
        "width": _rounded(np.diff(np.quantile(draws, [0.05, 0.95], 0), axis=0).mean()),
        "error": _rounded((mean - truth).mean()),
        "sd": _rounded(sd.mean()),
        "band": round(float((away < np.abs((truth - mean) / sd).max()).mean()), 3),
    }


def _rounded(value: float) -> float:
    return round(float(value), 4)


def compute_record(case: str, reads: str, n: int, number: int, plan: Plan) -> Record:
    """Return what all methods find in a data set."""
    rows, started = simulate(case, reads, n, (number,)), time.perf_counter()
    model = fit_network(case, reads, rows, number, plan)
    record: Record = {"case": case, "reads": reads, "n": n, "number": number}
    own = in_sample(model)
    truth = true_effects(case, reads, rows, model, False)
    in_rows = true_effects(case, reads, rows, model, True)
    population, sample = case_draws(case, model), case_draws(case, own)
    record["population"] = {k: describe(v, truth[k]) for k, v in population.items()}
    record["sample"] = {k: describe(v, in_rows[k]) for k, v in sample.items()}
    record["sample of population"] = {k: describe(v, truth[k]) for k, v in sample.items()}
    record["seconds"] = round(time.perf_counter() - started, 2)
    others = set(network_columns(case, reads)) & {"a1", "a2"}
    smooths = "".join(f" + s({name}, k=8)" for name in sorted(others))
    gam = fit_without_network(CASES[case].formula + smooths, rows.frame, number, plan)
    record["gam"] = {k: describe(v, truth[k]) for k, v in case_draws(case, gam).items()}
    known = rows.frame.assign(y=rows.frame["y"] - rows.network)
    oracle = fit_without_network(CASES[case].formula, known, number, plan)
    simulated = true_effects(case, "other", rows, oracle, False)
    record["oracle"] = {k: describe(v, simulated[k]) for k, v in case_draws(case, oracle).items()}
    if case == "linear" and reads != "same":
        frame, names = rows.frame, CASES[case].names[:3]
        treatments = np.column_stack([frame["x"], frame["c"] == "b", frame["c"] == "c"])
        controls = frame[["a1", "a2"]].to_numpy()
        y = frame["y"].to_numpy()
        found = partialling_out(y, treatments.astype(np.float64), controls, number)
        record["dml"] = {
            name: {"error": _rounded(value - truth[name][0]), "sd": _rounded(se)}
            for name, value, se in zip(names, *found, strict=True)
        }
    return record


def known_records(n: int, numbers: Iterable[int]) -> list[Record]:
    """Effects beside a network that reads the same columns, if it and sigma were known."""

    def design(frame: pd.DataFrame) -> Float[np.ndarray, "n 4"]:
        columns = [np.ones(len(frame)), frame["x"], frame["c"] == "b", frame["c"] == "c"]
        return np.column_stack(columns).astype(np.float64)

    large = simulate("linear", "same", LARGE, (10**6 + 1,))
    truth = np.linalg.lstsq(design(large.frame), large.effect + large.network, rcond=None)[0]
    found = []
    for number in numbers:
        rows = simulate("linear", "same", n, (number,))
        y = rows.frame["y"].to_numpy()
        effects, errors = known_network(design(rows.frame), y, rows.network, SIGMA)
        own = {
            name: {"error": _rounded(effects[i] - truth[i]), "sd": _rounded(errors[i])}
            for i, name in enumerate(CASES["linear"].names[:3], 1)
        }
        found.append({"number": number, "known": own})
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--sims", type=int, default=500, help="data sets a case (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="number of the first data set")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--reads", nargs="+", default=list(READS), choices=READS)
    parser.add_argument("--n", nargs="+", type=int, default=list(SIZES), help="numbers of rows")
    parser.add_argument("--tables", action="store_true", help="only print what has been run")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, data set by data set, and print the tables."""
    plans = {n: PLANS.get(n, Plan()) if plan is None else plan for n in options.n}
    for name in options.case:
        check_choice("case", name, tuple(CASES))
    numbers = numbers_from(options.first, "sims", options.sims)
    cells = list(product(options.case, options.reads, options.n))
    stores = {cell: Store(options.results, "{}-{}-{}".format(*cell)) for cell in cells}
    for number, (case, reads, n) in product(numbers, cells):
        if options.tables:
            break
        store = stores[case, reads, n]
        key = key_of(f"{number:04d}", plans[n].facts())
        if key in store:
            continue
        record = compute_record(case, reads, n, number, plans[n])
        store.put(key, record)
        say(f"{case}, {reads}, n = {n}, data set {number}: {record['seconds']:.1f} s")
    new = _records_of(stores, plans)
    old = _records_of(stores, {n: replace(p, integrated=False) for n, p in plans.items()})
    found = tables.newest(old, new)
    text = tables.markdown(found)
    for n in sorted({r["n"] for r in found if (r["case"], r["reads"]) == ("linear", "same")}):
        own = [
            r["number"] for r in found if (r["case"], r["reads"], r["n"]) == ("linear", "same", n)
        ]
        text += "\n\n" + tables.known_markdown(n, [known_records(n, s) for s in (own, range(MANY))])
    text += "\n\n" + tables.deviations_markdown(found)
    text += "\n\n" + tables.pairs_markdown(old, new)
    publish(text, "ssr_coverage", options, say)
    return tables.summary(found)


def _records_of(
    stores: Mapping[tuple[str, str, int], Store], plans: Mapping[int, Plan]
) -> list[Record]:
    """The records of some plans, in order."""
    found: list[Record] = []
    for (_, _, n), store in stores.items():
        settings = key_of("", plans[n].facts())
        found += [r for k, r in sorted(store.records.items()) if k.endswith(settings)]
    return found

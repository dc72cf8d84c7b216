"""The interval of an effect, on simulated counts of clinics whose true effect is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from examples.demo.section import (
    Effort,
    Figure,
    Gain,
    Section,
    coverage_finding,
    mean_with_error,
    with_error,
)
from subbayes.plots.style import label_axes, new_axes
from subbayes.regression import Regression
from subbayes.reports.rendering import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLINICS, PATIENTS = 20, 15
TRUTH, LEVEL = 0.3, 0.9
FULL = "visits ~ programme + s(age) + (1 | clinic)"
PLAIN = "visits ~ programme + age"


def simulate(rng: np.random.Generator) -> pd.DataFrame:
    """Visits of patients in clinics, half of which run a programme."""
    clinic = np.repeat(np.arange(CLINICS), PATIENTS)
    programme = rng.permutation(np.arange(CLINICS) % 2)[clinic]
    age = rng.uniform(-2, 2, len(clinic))
    of_clinic = 0.4 * rng.normal(size=CLINICS)[clinic]
    rate = np.exp(0.5 + TRUTH * programme + 0.6 * np.sin(1.5 * age) + of_clinic)
    names = [f"clinic {k}" for k in clinic]
    return pd.DataFrame(
        {"visits": rng.poisson(rate), "programme": programme, "age": age, "clinic": names}
    )


def interval_of_an_effect(seed: int, effort: Effort) -> Section:
    """Count how often the interval of the programme holds its true effect."""
    rng = np.random.default_rng(seed)
    bounds: dict[str, list[tuple[float, float]]] = {FULL: [], PLAIN: []}
    for k in range(effort.replications):
        frame = simulate(rng)
        sampling = replace(effort.effects, seed=seed + k)
        for formula, found in bounds.items():
            model = Regression(formula, family="poisson").fit(frame, sampling=sampling)
            row = model.summary(level=LEVEL).loc["programme"]
            found.append((float(row.iloc[2]), float(row.iloc[3])))
    ends = {formula: np.array(found) for formula, found in bounds.items()}
    covered = {
        formula: (found[:, 0] <= TRUTH) & (found[:, 1] >= TRUTH) for formula, found in ends.items()
    }
    widths = {formula: found[:, 1] - found[:, 0] for formula, found in ends.items()}
    ratio = widths[FULL].mean() / widths[PLAIN].mean()
    return Section(
        "effect",
        "An effect and its interval",
        (
            f"{CLINICS} clinics with {PATIENTS} patients each, half of which run a programme; "
            f"visits are counts, and the programme adds {TRUTH:g} to the logarithm of their rate. "
            "Clinics differ, and the effect of age is curved. Data are simulated "
            f"{effort.replications} times.",
            f"The model has a smooth of age and an effect of each clinic: {FULL}. Beside it stands "
            f"the regression that leaves both out, {PLAIN}, also sampled.",
        ),
        (
            Table(
                ["model", f"coverage of {100 * LEVEL:.0f} % intervals", "mean width"],
                [
                    [
                        formula,
                        with_error(*mean_with_error(covered[formula]), 1, percent=True),
                        with_error(*mean_with_error(widths[formula])),
                    ]
                    for formula in bounds
                ],
                f"± one standard error over {effort.replications} simulated data sets.",
            ),
        ),
        (
            Gain.of(
                "the coverage with clinics",
                "that without",
                covered[FULL],
                covered[PLAIN],
                "percentage points",
            ),
        ),
        (
            coverage_finding("90 % intervals of the model with clinics", covered[FULL], LEVEL),
            coverage_finding("90 % intervals of the model without clinics", covered[PLAIN], LEVEL),
        ),
        {
            "effect": Figure(
                lambda: _draw(ends),
                "The intervals of the simulated data sets; blue: with clinics, orange: without. "
                f"The line is the true effect. Those with clinics are {ratio:.1f} times as wide.",
            )
        },
        {
            formula: {
                "coverage": mean_with_error(covered[formula]),
                "width": mean_with_error(widths[formula]),
            }
            for formula in bounds
        },
    )


def _draw(ends: dict[str, np.ndarray]) -> Axes:
    ax = new_axes()
    order = np.argsort(ends[FULL].mean(1))
    for k, (found, color) in enumerate(zip(ends.values(), ("#0072B2", "#D55E00"), strict=True)):
        place = np.arange(len(found)) + 0.35 * k
        ax.vlines(place, *found[order].T, color=color, linewidth=2)
    ax.axhline(TRUTH, color="#222222", linewidth=1)
    ax.set_xticks([])
    return label_axes(ax, "simulated data sets, sorted", "effect of the programme")

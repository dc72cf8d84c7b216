"""Diabetes: the interval of an effect beside a network."""

from __future__ import annotations

from dataclasses import replace

from examples.demo.section import Effort, Figure, Section, with_error
from subbayes.networks.mlp import MLP
from subbayes.plots.effects import effect
from subbayes.regression import Regression
from subbayes.reports.rendering import Table
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.subspace import TRAINING

BLOOD = [f"s{i}" for i in range(1, 7)]
TERM = "bmi"


def effect_beside_a_network(seed: int, effort: Effort, progress: bool | None = None) -> Section:
    """The effect of the body mass index, with and without a network of blood measurements."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame = frame.rename(columns={"target": "progression"})
    frame["sex"] = frame["sex"].map({1.0: "a", 2.0: "b"})
    frame[BLOOD] = (frame[BLOOD] - frame[BLOOD].mean()) / frame[BLOOD].std()
    formula = f"progression ~ {TERM} + bp + C(sex)"
    networks = {"blood": (MLP(len(BLOOD), (8,), 1, seed=seed), BLOOD)}
    sampling = replace(effort.effects, seed=seed, progress=progress)
    models = {
        "without blood measurements": Regression(formula).fit(frame, sampling=sampling),
        "with a network of them": SemiStructuredRegression(formula, deep=networks).fit(
            frame,
            sampling=sampling,
            training=replace(TRAINING, epochs=min(TRAINING.epochs, effort.epochs)),
        ),
    }
    rows, facts = [], {}
    for name, model in models.items():
        values = model.summary(level=0.9).loc[TERM]
        low, high = values.iloc[2], values.iloc[3]
        rows.append(
            [name, with_error(values["mean"], values["sd"]), f"{low:.2f} to {high:.2f}",
             f"{values['ess_bulk']:.0f}"]
        )  # fmt: skip
        facts[name] = {"mean": float(values["mean"]), "sd": float(values["sd"]),
                       "interval": [float(low), float(high)]}  # fmt: skip
    return Section(
        "effect",
        "An effect with its interval beside a network",
        (
            "The progression of diabetes of 442 patients, by body mass index, blood pressure and "
            f"sex ({formula}), and by six blood measurements, which enter through a network. One "
            "posterior has the effects and the network, so that the interval of an effect "
            "includes the uncertainty of the network.",
        ),
        Table(
            ["model", "effect of bmi", "90 % interval", "effective draws"],
            rows,
            "Posterior mean ± standard deviation, in units of progression for each kg/m².",
        ),
        (
            "Blood measurements explain part of what the body mass index seems to explain: its "
            f"effect falls from {rows[0][1]} to {rows[1][1]}.",
        ),
        {
            "effect": Figure(
                lambda: effect(models["with a network of them"].effect(TERM)),
                "The effect of the body mass index beside the network, with its interval.",
            )
        },
        facts,
    )

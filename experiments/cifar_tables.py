"""Tables of the CIFAR experiment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.cifar_methods import METHODS
from experiments.markdown import (
    distinct,
    markdown_table,
    mean_and_deviation,
    select,
    with_deviation,
)
from experiments.store import Record

__all__ = ["PAPER", "page", "summary"]

PAPER = {
    "random": ((0.6858, 0.0052), (80.17, 0.03)),
    "pca": ((0.6652, 0.004), (80.54, 0.13)),
    "curve": ((0.6493, 0.01), (81.55, 0.26)),
}
"""NLL and accuracy in % of PreResNet-164 on CIFAR-100, with all 50,000 images: table 1, as in the
authors' repository."""

_SUBSPACES = {"random": "random", "pca": "PCA", "curve": "curve"}
_SHARED = {
    "member 0": "SGD: all methods",
    "averaging": "weight averaging: all methods but SGD, ensemble and curve",
    "pca subspace": "PCA subspace: PCA and random",
    "pca temperatures": "temperature of the PCA subspace: PCA and random",
    "random subspace": "random subspace: random",
    "curve": "curve between two members: curve",
    "curve subspace": "curve subspace: curve",
    "curve temperatures": "temperature of the curve subspace: curve",
}
"""Label of what methods share, with the methods that need it."""


def _shown(values: Sequence[float], digits: int = 3, factor: float = 1.0) -> str:
    """Mean and, of several values, standard deviation."""
    mean, deviation = mean_and_deviation(factor * np.array(values))
    return with_deviation(mean, deviation if len(values) > 1 else None, digits)


def page(records: Sequence[Record]) -> str:
    """All tables; empty without records."""
    parts = []
    for model in distinct(records, "model"):
        own = select(records, model=model)
        scores = select(own, kind="scores")
        parts += [
            _scores_table(model, scores),
            _trainings_table(model, own),
            _subspaces_table(model, scores),
            _temperatures_table(model, select(own, kind="temperatures", method="pca")),
        ]
    return "\n\n".join(part for part in parts if part)


def _scores_table(model: str, records: Sequence[Record]) -> str:
    rows = []
    for method in METHODS:
        own = select(records, method=method)
        if not own:
            continue
        seconds = [r["seconds"]["fit"] + r["seconds"]["prediction"] for r in own]
        temperatures = sorted({r["temperature"] for r in own if "temperature" in r})
        rows.append(
            [
                METHODS[method].label,
                _shown([r["accuracy"] for r in own], 2, 100),
                _shown([r["nll"] for r in own]),
                with_deviation(float(np.mean([r["nll_error"] for r in own])), None),
                _shown([r["ece"] for r in own]),
                ", ".join(f"{t:g}" for t in temperatures) or "–",
                _mean_seconds(seconds, own),
                len(own),
            ]
        )
    head = ("method", "accuracy, %", "NLL", "its error", "ECE", "T", "further seconds", "seeds")
    if not rows:
        return ""
    plan, weights = records[0]["plan"], records[0]["weights"]
    devices = ", ".join(distinct(records, "device"))
    kept, epochs = plan["images"] - plan["validation"], plan["epochs"]
    title = (
        f"{model}, {weights:,} weights, CIFAR-10 with {kept:,} training images, {epochs} epochs "
        f"and {plan['swa_epochs']} of averaging; mean ± standard deviation over seeds; {devices}"
    )
    return markdown_table(head, rows, title)


def _mean_seconds(seconds: Sequence[float], records: Sequence[Record]) -> str:
    """Mean of seconds, if all records are of one device."""
    return "–" if len(distinct(records, "device")) > 1 else f"{np.mean(seconds):.0f}"


def _trainings_table(model: str, records: Sequence[Record]) -> str:
    """Seconds of what methods share: trainings, subspaces, and the selection of temperatures.

    Each is in the record of the method that needed it first. Of one that was made again after an
    interruption, each time counts as one.
    """
    shared: dict[str, list[tuple[float, Record]]] = {}
    for record in records:
        for name, seconds in record["seconds"]["trainings"].items():
            shared.setdefault(_SHARED.get(name, name), []).append((seconds, record))
        if record["kind"] == "temperatures":
            label = _SHARED[f"{record['method']} temperatures"]
            shared.setdefault(label, []).append((record["seconds"]["fit"], record))
    order = [*_SHARED.values(), *shared]
    rows = [
        [label, _mean_seconds([s for s, _ in found], [r for _, r in found])]
        for label, found in sorted(shared.items(), key=lambda one: order.index(one[0]))
    ]
    title = (
        f"{model}, seconds of what methods share, and which they need before their further seconds"
    )
    return markdown_table(("shared", "seconds"), rows, title)


def _subspaces_table(model: str, records: Sequence[Record]) -> str:
    rows = []
    for name, label in _SUBSPACES.items():
        own = select(records, method=f"{name}_ess")
        if own:
            nll, accuracy = PAPER[name]
            rows.append(
                [
                    label,
                    _shown([r["nll"] for r in own]),
                    _shown([r["accuracy"] for r in own], 2, 100),
                    with_deviation(*nll),
                    with_deviation(*accuracy, 2),
                ]
            )
    head = ("subspace", "NLL", "accuracy, %", "NLL, paper", "accuracy, %, paper")
    title = (
        f"{model}, ESS in three subspaces; the paper's figures (table 1) are of PreResNet-164 on "
        "CIFAR-100 with all images, so that only their order can be compared"
    )
    return markdown_table(head, rows, title)


def _temperatures_table(model: str, records: Sequence[Record]) -> str:
    if not records:
        return ""
    rows = []
    for i, one in enumerate(records[0]["candidates"]):
        of_seeds = [r["candidates"][i] for r in records]
        rows.append(
            [f"{one['temperature']:g}"]
            + [
                _shown([c[part][score] for c in of_seeds], digits, factor)
                for score, digits, factor in (("nll", 3, 1.0), ("accuracy", 2, 100.0))
                for part in ("validation", "test")
            ]
        )
    head = ("T", "NLL, validation", "NLL, test", "accuracy, %, validation", "accuracy, %, test")
    return markdown_table(head, rows, f"{model}, PCA + ESS by temperature (figure 11a, b)")


def summary(records: Sequence[Record]) -> Record:
    """Mean accuracy and NLL of each method, by model."""
    return {
        model: {
            method: {
                score: float(np.mean([r[score] for r in own])) for score in ("accuracy", "nll")
            }
            for method in distinct(select(records, model=model, kind="scores"), "method")
            if (own := select(records, model=model, kind="scores", method=method))
        }
        for model in distinct(records, "model")
    }

"""Schemas of what several kinds of artifacts hold: network, likelihood, prior, subspace, draws."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from subbayes.utils.schema import (
    Array,
    Deferred,
    Flag,
    Json,
    Maximum,
    Number,
    OneOf,
    Optional,
    Record,
    Rule,
    Sequence,
    Table,
    Tagged,
    Text,
    Whole,
)

__all__ = [
    "CHOICE",
    "DRAWS",
    "FACTS",
    "LIKELIHOOD",
    "MLP",
    "NETWORK",
    "NETWORK_TENSORS",
    "POSITIVE",
    "PRIOR",
    "PROBABILITY",
    "SUBSPACE",
    "draws_tensors",
    "numbers",
    "subspace_tensors",
]

POSITIVE = Number(above=0)
PROBABILITY = Number(above=0, below=1)
FACTS = Table(Json())
"""Facts that are shown or compared, and never computed with."""


def numbers(low: float = -float("inf")) -> Rule:
    """A number, or lists of numbers of any depth."""
    number = Number(low=low)
    rule: Rule = number
    for _ in range(3):
        rule = OneOf("numbers in a finite range", (number, Sequence(rule)))
    return rule


def _weights(settings: dict[str, Any]) -> int:
    """Number of weights of an MLP."""
    widths = [settings["n_inputs"], *settings["hidden"], settings["n_outputs"]]
    return sum((before + 1) * after for before, after in pairwise(widths))


MLP = Maximum(
    Record(
        {
            "n_inputs": Whole(1),
            "hidden": Sequence(Whole(1)),
            "n_outputs": Whole(1),
            "activation": Text(("relu", "tanh", "silu", "gelu")),
            "dropout": Number(low=0, below=1),
        }
    ),
    _weights,
    "stored",
)
"""Settings of an `MLP`, with at most as many weights as the artifact stores numbers."""

NETWORK = Record(
    {"architecture": Text(), "names": Sequence(Text(), least=1), "module": Optional(MLP)}
)
NETWORK_TENSORS = {
    "network.frozen.*": Array(None, values="any"),
    "network.mask.*": Array(None, values="flag"),
}

LIKELIHOOD: Rule = Tagged(
    "name",
    {
        "Gaussian": Record(
            {
                "name": Text(),
                "noise": OneOf(
                    "numbers of at least 0, 'learned' or 'per-observation'",
                    (numbers(0), Text(("learned", "per-observation"))),
                ),
            }
        ),
        "HeteroscedasticGaussian": Record(
            {
                "name": Text(),
                "global_variance": OneOf(
                    "numbers of at least 0 or 'learned'", (numbers(0), Text(("learned",)))
                ),
            }
        ),
        "Standardized": Record(
            {
                "name": Text(),
                "likelihood": Deferred(lambda: LIKELIHOOD),
                "shift": Sequence(Number(), least=1),
                "scale": Sequence(POSITIVE, least=1),
            }
        ),
        "Categorical": Record({"name": Text(), "n_classes": Optional(Whole(0))}),
    },
    Record({"name": Text()}, others=True),
)

PRIOR = Record(
    {
        "name": Text(("Normal",)),
        "scale": numbers(0),
        "mean": numbers(),
        "covariance": Optional(numbers()),
    }
)

SUBSPACE: Rule = Tagged(
    "name",
    {name: Record({"name": Text(), "rank": Whole(1)})
     for name in ("DenseSubspace", "CoordinateSubspace", "FullSubspace")}
    | {
        "RandomSubspace": Record({"name": Text(), "rank": Whole(1), "seed": Whole()}),
        "JointSubspace": Record(
            {
                "name": Text(),
                "rank": Whole(1),
                "effects": Whole(1),
                "inner": Deferred(lambda: SUBSPACE),
            }
        ),
    },
)  # fmt: skip


def subspace_tensors(config: Mapping[str, Any], prefix: str = "subspace") -> dict[str, Array]:
    """The tensors of a subspace."""
    D, k = f"{prefix} size", f"{prefix} rank"
    if config["name"] == "JointSubspace":
        return subspace_tensors(config["inner"], f"{prefix}.inner")
    arrays = {f"{prefix}.shift": Array(D)}
    if config["name"] == "DenseSubspace":
        arrays[f"{prefix}.basis"] = Array(config["rank"], D)
    if config["name"] == "CoordinateSubspace":
        arrays[f"{prefix}.indices"] = Array(k, values="index")
    return arrays


DRAWS = Record(
    {
        "meta": Record(
            optional={
                "seed": Whole(high=2**128),
                "warmup": Optional(Whole()),
                "thin": Whole(1),
                "seconds": Number(low=0),
            },
            others=True,
        ),
        "engine": Text(),
        "validity": Text(("exact", "approximation", "ensemble")),
        "independent": Flag(),
        "prediction": Text(("network", "linearised")),
        "temperature": POSITIVE,
        "pareto_k": Optional(Number(finite=False)),
        "converged": Optional(Flag()),
        "log_evidence": Optional(Number(finite=False)),
        "log_evidence_error": Optional(Number(finite=False)),
    }
)
"""Facts of a sampling run."""


def draws_tensors(rank: int | str, prediction: str = "network") -> dict[str, Array]:
    """Draws, their statistics, and the moments of an approximation."""
    arrays = {
        "z": Array("chains", "draws", rank),
        "stats.*": Array("chains", "draws", values="any", finite=False),
        "moments.mean?": Array(rank),
        "moments.sd?": Array(rank),
        "moments.covariance?": Array(rank, rank),
    }
    if prediction == "linearised":
        arrays |= {f"moments.{n}": arrays[f"moments.{n}?"] for n in ("mean", "sd", "covariance")}
    return arrays


CHOICE = Record(
    {
        "temperatures": Sequence(POSITIVE, least=1),
        "scores": Sequence(Number(finite=False), least=1),
        "standard_errors": Sequence(Number(finite=False)),
        "pareto_k": Sequence(Number(finite=False)),
        "by": Text(("loo", "validation")),
    }
)

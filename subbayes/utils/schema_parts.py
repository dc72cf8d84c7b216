"""Schemas of what several kinds of artifacts hold: network, likelihood, prior, subspace, draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from subbayes.utils.schema import (
    Rule,
    SchemaError,
    Sizes,
    TensorRule,
    anything,
    array,
    boolean,
    deferred,
    dict_of,
    list_of,
    number,
    one_of,
    optional,
    record,
    tagged,
    text,
    whole,
)
from subbayes.utils.text_table import MOST_LETTERS

__all__ = [
    "CHOICE",
    "DRAWS",
    "FACTS",
    "FAMILY",
    "HISTORY",
    "LARGEST",
    "LIKELIHOOD",
    "MLP",
    "NETWORK",
    "N_DRAWS",
    "NETWORK_TENSORS",
    "POSITIVE",
    "PRIOR",
    "PROBABILITY",
    "SUBSPACE",
    "TRAINING",
    "draws_tensors",
    "subspace_tensors",
]

POSITIVE = number(above=1e-150, below=1e150)  # squares are finite
PROBABILITY = number(above=0, below=1)
FACTS = dict_of(anything)
"""Facts that are shown or compared, and never computed with."""


HISTORY = dict_of(list_of(number(finite=False)))
"""A number for each epoch, by name."""
LARGEST = 1e18
"""Excluded limit of numbers whose square is finite in float32."""
_SHOWN = ("divergent", "least_swap_rate", "barrier")  # statistics in summaries
_COUNTED = ("divergences", "evaluations", "round_trips", "failures", "restarts")
N_DRAWS = whole(1, 10**5)
"""A number of draws that no tensor confirms."""


def _numbers(low: float = -math.inf) -> Rule:
    """A number whose square is finite in float32, or lists of them up to three levels deep."""
    rule = single = number(max(low, -LARGEST), below=LARGEST)
    for _ in range(3):
        rule = one_of("numbers in a finite range", single, list_of(rule, least=1))
    return rule


_mlp = record(
    n_inputs=whole(1),
    hidden=list_of(whole(1), most=1000),
    n_outputs=whole(1),
    activation=text("relu", "tanh", "silu", "gelu"),
    dropout=number(0, below=1),
)


def MLP(value: Any, where: str, sizes: Sizes) -> None:
    """Settings of an `MLP`, with at most as many weights as the artifact stores numbers."""
    _mlp(value, where, sizes)
    widths = [value["n_inputs"], *value["hidden"], value["n_outputs"]]
    weights = sum((before + 1) * after for before, after in pairwise(widths))
    if weights > sizes["stored"]:
        raise SchemaError(where, f"at most {sizes['stored']} numbers, as stored", str(weights))


_base = record(
    {"own?": list_of(text()), "active?": list_of(text())},
    adapters=text("float16", "bfloat16", "float32", "float64"),
    settings=text(most=64),
    shapes=text(most=64),
    values=text(most=64),
    dtypes=list_of(text(), most=100),
    model=text(most=1000),
)
NETWORK = record(
    {"base?": _base, "dtypes?": list_of(text("float16", "bfloat16", "float32", "float64"))},
    architecture=text(),
    names=list_of(text(), least=1),
    module=optional(MLP),
)
NETWORK_TENSORS = {
    "network.attribute.*": array(None, values="any"),
    "network.frozen.*": array(None, values="any"),
    "network.mask.*": array(None, values="flag"),
}

_noise = one_of(
    "numbers of at least 0, 'learned' or 'per-observation'",
    _numbers(0),
    text("learned", "per-observation"),
)
_variance = one_of("numbers of at least 0 or 'learned'", _numbers(0), text("learned"))


def _without(*refused: str) -> Rule:
    """A likelihood inside of another one, which does not hold some of them."""

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if isinstance(value, dict) and value.get("name") in refused:
            raise SchemaError(f"{where}['name']", "another likelihood inside", repr(value["name"]))
        LIKELIHOOD(value, where, sizes)

    return check


_PREDICTORS = one_of("numbers or 'learned'", _numbers(), text("learned"))


def _inner_family(value: Any, where: str, sizes: Sizes) -> None:
    """A family inside of another one, which is not around a further one but for truncation."""
    name = value.get("name") if isinstance(value, dict) else None
    if name in ("censored", "mixture"):
        raise SchemaError(f"{where}['name']", "another family inside", repr(name))
    inner = value.get("family") if name == "truncated" else None
    if isinstance(inner, dict) and inner.get("name") == "truncated":
        raise SchemaError(f"{where}['family']['name']", "another family inside", "'truncated'")
    _ANY_FAMILY(value, where, sizes)


def _ordered_classes(value: Any, where: str, sizes: Sizes) -> None:
    """A number of classes, each of which has a threshold among the numbers stored."""
    whole(2, max(1000, sizes.get("stored", 0) + 1))(value, where, sizes)


_BOUND = optional(one_of("a bound or its column", number(), text(most=1000)))
_FAMILIES: dict[str, dict[str, Rule]] = {
    **dict.fromkeys(
        (
            "normal", "poisson", "bernoulli", "negative-binomial", "gamma", "beta", "student-t",
            "log-normal", "inverse-gaussian", "zero-inflated-poisson", "hurdle-poisson",
            "zero-inflated-negative-binomial", "hurdle-negative-binomial", "weibull",
            "log-logistic",
        ),
        {"links": list_of(text(), most=100)},
    ),
    "ordinal": {
        "n_classes": _ordered_classes,
        "cumulative?": text("logit", "probit", "cloglog", "cauchit"),
    },
    "categorical": {},
    "binomial": {
        "links": list_of(text(), most=2),
        "trials": one_of("trials or their column", whole(1), text(most=1000)),
    },
    "asymmetric-laplace": {"links": list_of(text(), most=2), "quantile": PROBABILITY},
    "piecewise-exponential": {"cuts": list_of(POSITIVE, least=1, most=1000)},
    "censored": {
        "family": _inner_family,
        "status": text(most=1000),
        "upper": optional(text(most=1000)),
    },
    "truncated": {"family": _inner_family, "lower": _BOUND, "upper": _BOUND},
    "mixture": {"first": _inner_family, "second": _inner_family},
}  # fmt: skip
FAMILY: Rule = tagged(_FAMILIES)
"""Families by the names that `to_config` writes."""
_ANY_FAMILY: Rule = tagged(_FAMILIES, others={"*": anything})

LIKELIHOOD: Rule = tagged(
    {
        **_FAMILIES,
        "CommonParameters": {"likelihood": _ANY_FAMILY, "values": _PREDICTORS},
        "Gaussian": {"noise": _noise},
        "HeteroscedasticGaussian": {"global_variance": _variance},
        "Standardized": {
            "likelihood": _without("Standardized", "Weighted"),
            "shift": list_of(number(), least=1),
            "scale": list_of(POSITIVE, least=1),
        },
        "Weighted": {"likelihood": _without("Weighted")},
        "Categorical": {"n_classes": optional(whole(2))},
        "CategoricalTokens": {
            "n_classes": optional(whole(2)),
            "shift": boolean,
            "ignore_index": whole(-(2**63)),
        },
        "Bernoulli": {},
        "Poisson": {},
    },
    others={"*": anything},
)
"""Likelihoods by the names that `to_config` writes; others are objects that `load` is given."""

PRIOR = record(
    name=text("Normal"), scale=_numbers(0), mean=_numbers(), covariance=optional(_numbers())
)


def _stored(value: Any, where: str, sizes: Sizes) -> None:
    """A number of at least 1, of which the artifact stores as many."""
    whole(1, sizes["stored"])(value, where, sizes)


SUBSPACE: Rule = tagged(
    {
        **dict.fromkeys(
            ("DenseSubspace", "CoordinateSubspace", "FullSubspace"), {"rank": whole(1)}
        ),
        **dict.fromkeys(
            ("RandomSubspace", "SparseRandomSubspace"), {"rank": whole(1), "seed": whole()}
        ),
        "JointSubspace": {
            "rank": whole(1),
            "effects": _stored,
            "inner": deferred(lambda: SUBSPACE),
        },
    }
)


def subspace_tensors(config: Mapping[str, Any], prefix: str = "subspace") -> dict[str, TensorRule]:
    """The tensors of a subspace, which have to agree with its rank."""
    D, k = f"{prefix} size", config["rank"]
    if config["name"] == "JointSubspace":
        if k != (rank := config["inner"]["rank"] + config["effects"]):
            raise SchemaError(f"rank of {prefix}", str(rank), str(k))
        return subspace_tensors(config["inner"], f"{prefix}.inner")
    rules = {f"{prefix}.shift": array(k if config["name"] == "FullSubspace" else D, dtype=D)}
    if config["name"] == "DenseSubspace":
        rules[f"{prefix}.basis"] = array(k, D, dtype=D)
    if config["name"] == "CoordinateSubspace":
        rules[f"{prefix}.indices"] = array(k, values="index")
    return rules


DRAWS = record(
    meta=record(
        {
            "seed?": whole(high=2**128),
            "warmup?": optional(whole()),
            "thin?": whole(1),
            "seconds?": number(0),
            "thinned_from?": whole(1),
            "centred?": boolean,
            "batch_size?": whole(1),
            "target?": number(above=0),
            "closed_form?": boolean,
            "proposals?": whole(1),
            "effective_proposals?": number(0),
            "proposals_k?": number(finite=False),
            "warnings?": list_of(text()),
            "*": anything,
        }
    ),
    engine=text(plain=True, most=MOST_LETTERS),
    validity=text("exact", "approximation", "ensemble"),
    independent=boolean,
    prediction=text("network", "linearised", "linearised-draws"),
    temperature=POSITIVE,
    pareto_k=optional(number(finite=False)),
    converged=optional(boolean),
    log_evidence=optional(number(finite=False)),
    log_evidence_error=optional(number(finite=False)),
)
"""Facts of a sampling run."""


def draws_tensors(rank: int | str, prediction: str = "network") -> dict[str, TensorRule]:
    """Draws, their statistics, and the moments of an approximation, which `linearised` requires."""
    missing = "" if prediction == "linearised" else "?"
    shown = array("chains", "draws", values="any", below=1e15)
    counted = array("chains", "draws", values="index", below=1e15)
    return {
        "z": array("chains", "draws", rank, dtype="float64", least=1, below=LARGEST),
        **{f"stats.{name}?": shown for name in _SHOWN},
        **{f"stats.{name}?": counted for name in _COUNTED},
        "stats.*": array("chains", "draws", values="any", finite=False),
        f"moments.mean{missing}": array(rank, dtype="float64", below=LARGEST),
        f"moments.sd{missing}": array(rank, dtype="float64", values="variance", below=LARGEST),
        f"moments.covariance{missing}": array(rank, rank, dtype="float64", below=LARGEST**2),
    }


_drawn = number(-LARGEST, below=LARGEST, finite=False)

CHOICE = record(
    {"n_bad?": optional(list_of(whole(), size="temperatures"))},
    temperatures=list_of(POSITIVE, least=1, most=1000, size="temperatures"),
    scores=list_of(_drawn, size="temperatures"),
    standard_errors=list_of(_drawn, size="temperatures"),
    pareto_k=list_of(_drawn, size="temperatures"),
    by=text("loo", "validation"),
)
"""The choice of a temperature."""

TRAINING = record(
    {"time_limit?": optional(POSITIVE)},
    epochs=whole(),
    learning_rate=POSITIVE,
    optimizer=text("adam", "adamw", "sgd"),
    momentum=number(0),
    batch_size=optional(whole(1)),
    schedule=text(),
    final_learning_rate=optional(number(0)),
    prior_scale=optional(POSITIVE),
    weight_decay=optional(number(0)),
    bias_lr_factor=POSITIVE,
    clip_norm=optional(POSITIVE),
    validation=optional(number(0)),
    patience=optional(whole(1)),
    swa_epochs=whole(),
    swa_learning_rate=POSITIVE,
    max_snapshots=whole(1),
    sketch=optional(whole(1)),
    curve_epochs=optional(whole()),
)
"""Settings of training."""

_PRESET = {
    "name": text(most=64),
    "budget": optional(POSITIVE),
    "hidden": list_of(whole(1, 10**6), most=100),
    "weight_decay": number(0),
    "prior": POSITIVE,
    "epochs": whole(1),
    "compared_epochs": whole(1),
    "networks": list_of(
        record(hidden=list_of(whole(1, 10**6), most=100), weight_decay=number(0), score=number()),
        least=1,
    ),
    "chains": list_of(
        record(
            hidden=list_of(whole(1, 10**6), most=100),
            prior=POSITIVE,
            steps=whole(1),
            score=number(),
            gain=number(),
            gain_error=number(0),
        )
    ),
    "candidates": list_of(whole(1), least=2, most=2),
}
PRESET_CHOICE = record(_PRESET, seconds=record(choice=number(0)))
"""What a preset chose."""

PRESET = record(_PRESET, seconds=record(choice=number(0), training=number(0), sampling=number(0)))
"""What a preset chose, and how long each part took."""

PLAN = record(
    warmup=whole(high=2**40), draws=whole(1, 10**9), thin=whole(1, 2**40), time_limit=POSITIVE
)
"""Numbers of steps that a preset planned."""

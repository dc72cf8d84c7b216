"""The kinds of artifacts: for each, the function that rebuilds it and the schema of its content.

Loaders are dotted strings that are imported on use, so that this table imports nothing of what
it names.
"""

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
    Schema,
    Sequence,
    Table,
    Tagged,
    Text,
    Whole,
)

__all__ = ["CHECKPOINTS", "LOADERS", "SCHEMAS"]

LOADERS = {
    "fitted-model": "subbayes.models.fitted:rebuild",
    "weight-samples": "subbayes.baselines.ensemble:rebuild",
    "mc-dropout": "subbayes.baselines.mc_dropout:rebuild",
    "temperature-scaled": "subbayes.baselines.temperature_scaling:rebuild_scaled",
    "sparse-network": "subbayes.sparse.result:rebuild",
    "small-network": "subbayes.sparse.export.small_network:rebuild",
    "semi-structured-model": "subbayes.semistructured.model:rebuild",
    "data-frame-model": "subbayes.models.data_frame_model:rebuild",
    "estimator": "subbayes.models.estimator_base:rebuild",
}
"""By kind, "module:function"; the function takes tensors, facts and options by name."""

CHECKPOINTS = (
    "sampling-checkpoint",
    "sparse-training-checkpoint",
    "subspace-checkpoint",
    "temperature-checkpoint",
)
"""Kinds that only the call that wrote them reads."""

# --- parts that several kinds share -------------------------------------------------------------

_positive, _probability = Number(above=0), Number(above=0, below=1)
_facts = Table(Json())
_history = Table(Json())


def _numbers(low: float = -float("inf")) -> Rule:
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
                    (_numbers(0), Text(("learned", "per-observation"))),
                ),
            }
        ),
        "HeteroscedasticGaussian": Record(
            {
                "name": Text(),
                "global_variance": OneOf(
                    "numbers of at least 0 or 'learned'", (_numbers(0), Text(("learned",)))
                ),
            }
        ),
        "Standardized": Record(
            {
                "name": Text(),
                "likelihood": Deferred(lambda: LIKELIHOOD),
                "shift": Sequence(Number(), least=1),
                "scale": Sequence(_positive, least=1),
            }
        ),
        "Categorical": Record({"name": Text(), "n_classes": Optional(Whole(0))}),
    },
    Record({"name": Text()}, others=True),
)

PRIOR = Record(
    {
        "name": Text(("Normal",)),
        "scale": _numbers(0),
        "mean": _numbers(),
        "covariance": Optional(_numbers()),
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
        "temperature": _positive,
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


_choice = Record(
    {
        "temperatures": Sequence(_positive, least=1),
        "scores": Sequence(Number(finite=False), least=1),
        "standard_errors": Sequence(Number(finite=False)),
        "pareto_k": Sequence(Number(finite=False)),
        "by": Text(("loo", "validation")),
    }
)

# --- models -------------------------------------------------------------------------------------

_fitted = Record(
    {
        "network": NETWORK,
        "likelihood": LIKELIHOOD,
        "subspace": SUBSPACE,
        "prior": PRIOR,
        "temperature": _positive,
        "draws": Optional(DRAWS),
        "history": _history,
        "settings": Record(optional={"temperatures": Optional(_choice)}, others=True),
    }
)


def _fitted_tensors(facts: dict[str, Any]) -> dict[str, Array]:
    found = NETWORK_TENSORS | subspace_tensors(facts["subspace"])
    if facts["draws"] is None:
        return found
    return found | draws_tensors(facts["subspace"]["rank"], facts["draws"]["prediction"])


_layer = Record(
    {
        "posterior": Text(("mean-field", "mvn", "low-rank", "all", "dropout", "horseshoe")),
        "estimator": Text(("local", "relaxed")),
        "structure": Text(("weights", "units")),
        "temperature": _positive,
        "phase": Text(("learned", "fixed", "median")),
        "slab": Tagged(
            "name",
            {
                "NormalSlab": Record({"name": Text(), "scale": _positive}),
                "StudentTSlab": Record({"name": Text(), "shape": _positive, "rate": _positive}),
                "MixtureSlab": Record(
                    {"name": Text(), "wide": _positive, "narrow": _positive, "share": _probability}
                ),
            },
        ),
        "inclusion": Tagged(
            "name",
            {
                "Bernoulli": Record({"name": Text(), "probability": _probability}),
                "BetaBinomial": Record(
                    {"name": Text(), "a": _positive, "b": _positive, "shared": Flag()}
                ),
            },
        ),
    },
    {"horseshoe": Record({"scale": _positive, "threshold": Number()})},
)

_prior_of_effects = OneOf(
    "a number or the description of a prior",
    (
        Number(),
        Tagged(
            "name",
            {name: Record({"name": Text(), "options": Table(Number())})
             for name in ("NormalPrior", "Exponential")}
            | {
                "scipy": Record(
                    {
                        "name": Text(),
                        "distribution": Text(),
                        "args": Sequence(Number()),
                        "kwds": Table(Number()),
                        "factor": _positive,
                        "student": Flag(),
                    }
                ),
                "own": Record({"name": Text(), "shown": Text()}),
            },
        ),
    ),
)  # fmt: skip

_semistructured = Record(
    {
        "formula": OneOf("a formula, or one by parameter", (Text(), Table(Text()))),
        "family": OneOf(
            "a family",
            (
                Record({"name": Text(), "links": Sequence(Text())}),
                Record({"name": Text(), "n_classes": Optional(Whole(2))}),
                Record({"own": Text()}),
            ),
        ),
        "priors": Table(_prior_of_effects),
        "weights": Optional(Text()),
        "offset": Optional(Text()),
        "exposure": Optional(Text()),
        "missing": Text(("drop", "error")),
        "orthogonal": OneOf("true, false or 'auto'", (Flag(), Text(("auto",)))),
        "seed": Whole(),
        "mode": Text(("trace", "compile", "eager")),
        "columns": Sequence(
            Record(
                {"name": Text()}, {"levels": Sequence(Json()), "ordered": Flag(), "dtype": Text()}
            )
        ),
        "dropped": Whole(),
        "networks": Table(
            Record(
                {
                    "architecture": Text(),
                    "parameter": Optional(Text()),
                    "columns": Optional(Sequence(Text())),
                    "module": Optional(MLP),
                    "trained": Sequence(Text()),
                }
            )
        ),
        "space": Record(
            {
                "subspace": SUBSPACE,
                "prior": PRIOR,
                "rank": Whole(),
                "kind": Text(),
                "history": _history,
                "projected": Flag(),
                "curve": Optional(Text(("bezier", "polygon"))),
            }
        ),
        "draws": DRAWS,
    }
)


def _semistructured_tensors(facts: dict[str, Any]) -> dict[str, Array]:
    rank = facts["space"]["subspace"]["rank"]
    arrays = draws_tensors(rank) | subspace_tensors(facts["space"]["subspace"], "space")
    arrays["starts"] = Array("starts", rank)
    if facts["space"]["curve"] is not None:
        arrays["curve"] = Array("points", "curve size")
    for i in range(len(facts["columns"])):
        arrays[f"rows.{i}"] = Array("rows", values="any")
    for i in range(len(facts["networks"])):
        arrays[f"network{i}.*"] = Array(None, values="any")
    return arrays | {"inputs.*": Array(None, values="any")}


_exported = Record(
    {
        "units": Table(Sequence(Whole(), least=2)),
        "layouts": Table(Text(("dense", "csr"))),
        "weights": Sequence(Whole(), least=2),
        "inputs": Sequence(Text()),
        "outputs": Sequence(Text()),
        "fills": Table(OneOf("a number or text", (Number(finite=False), Flag(), Text()))),
        "layers": Table(Text()),
    }
)


def _exported_tensors(facts: dict[str, Any]) -> dict[str, Array]:
    arrays = {"*": Array(None, values="any")}
    for name, layout in facts["layouts"].items():
        if layout == "csr":
            key = f"{name}.weight" if name else "weight"
            arrays[f"{key}.crow_indices"] = Array(f"{key} rows", values="index")
            arrays[f"{key}.col_indices"] = Array(f"{key} entries", values="index")
            arrays[f"{key}.values"] = Array(f"{key} entries")
            arrays[f"{key}.inputs"] = Array(values="index")
    return arrays


_laplace = Record(
    {
        "network": NETWORK,
        "likelihood": LIKELIHOOD,
        "subspace": Optional(SUBSPACE),
        "form": Text(("dual", "primal", "diagonal", "low-rank", "kfac", "subspace")),
        "prior_precision": _positive,
        "rows": Whole(1),
        "memory_limit": Whole(1),
        "data": Text(),
        "inputs": Sequence(Optional(Text()), least=1),
        "structure": Text(("tensor", "tuple", "dict")),
        "options": Table(Optional(Number())),
        "layers": Sequence(Text()),
        "residual": Optional(Number(low=0)),
    }
)


def _laplace_tensors(facts: dict[str, Any]) -> dict[str, Array]:
    arrays: dict[str, Array] = NETWORK_TENSORS | {"weights": Array("D")}
    arrays |= {f"example.{i}": Array(None, values="any") for i in range(len(facts["inputs"]))}
    if facts["subspace"] is not None:
        arrays |= subspace_tensors(facts["subspace"])
    k = 0 if facts["subspace"] is None else facts["subspace"]["rank"]
    return (
        arrays
        | {
            "dual": {"kernel": Array("m", "m")},
            "primal": {"matrix": Array("D", "D")},
            "diagonal": {"squares": Array("D")},
            "low-rank": {"values": Array("r"), "vectors": Array("r", "D")},
            "kfac": {"diagonal": Array("D")}
            | {
                f"{name}.{i}": Array(f"groups {i}", *(f"{side} {i}" for side in sides))
                for i in range(len(facts["layers"]))
                for name, sides in (
                    ("outer", ("out", "out")),
                    ("inner", ("in", "in")),
                    ("values", ("out", "in")),
                )
            },
            "subspace": {"matrix": Array(k, k), "metric": Array(k, k)},
        }[facts["form"]]
    )


# --- models of tables, which hold another model -------------------------------------------------


def _tensors_of_model(facts: dict[str, Any]) -> Mapping[str, Array]:
    inner = facts["model"]
    schema = SCHEMAS[inner["kind"]]
    return schema.tensors(inner["facts"]) if callable(schema.tensors) else schema.tensors


def _model(*kinds: str) -> Rule:
    """Another model, with its kind and facts."""
    return Tagged("kind", {kind: Record({"kind": Text(), "facts": _facts_of(kind)})
                           for kind in kinds})  # fmt: skip


def _facts_of(kind: str) -> Rule:
    return Deferred(lambda: SCHEMAS[kind].facts)


_BASELINES = ("weight-samples", "mc-dropout", "temperature-scaled")
_array_model = _model("fitted-model", "sparse-network", *_BASELINES)
_labels = Sequence(OneOf("a label", (Text(), Number(), Flag())))

_data_frame = Record(
    {
        "model": _array_model,
        "column": Text(),
        "target": Record(
            {
                "task": Text(("regression", "count", "classification")),
                "shift": Number(),
                "scale": _positive,
                "classes": _labels,
            }
        ),
        "encoder": Record(
            {
                "format": Whole(),
                "options": _facts,
                "columns": Sequence(Text()),
                "named": Flag(),
                "dropped": Sequence(Text()),
                "numeric": Record(
                    {
                        "columns": Sequence(Text()),
                        "median": Sequence(Number()),
                        "mean": Sequence(Number()),
                        "variance": Sequence(Number(low=0)),
                        "scale": Sequence(_positive),
                    }
                ),
                "categorical": Record(
                    {
                        "columns": Sequence(Text()),
                        "levels": Sequence(Sequence(Text())),
                        "most_frequent": Sequence(Text()),
                    }
                ),
                "flagged": Sequence(Text()),
            }
        ),
        "rows": Optional(Record({"n": Whole(1), "targets": Text()})),
        "notes": _facts,
    }
)

_estimator = Record(
    {
        "model": _model("fitted-model", "sparse-network"),
        "class": Text(),
        "params": _facts,
        "seed": Whole(high=2**64),
        "mean": Sequence(Number(), size="columns"),
        "scale": Sequence(_positive, size="columns"),
        "feature_names": Optional(Sequence(Text(), size="columns")),
    },
    {"classes": _labels, "dtype": Text()},
)

# --- checkpoints --------------------------------------------------------------------------------

_sampling = Record(
    {"identity": _facts, "evaluations": Whole(), "rngs": Sequence(_facts, size="chains")}
)
_sparse_training = Record(
    {
        "identity": _facts,
        "finished": Whole(),
        "history": Table(Sequence(Number(finite=False))),
        "optimizer": _facts,
    }
)


def _with_network(**more: Rule) -> Record:
    return Record({"network": NETWORK, "likelihood": LIKELIHOOD, **more})


SCHEMAS = {
    "fitted-model": Schema(_fitted, _fitted_tensors),
    "weight-samples": Schema(
        Record(
            {
                "network": NETWORK,
                "likelihoods": Sequence(LIKELIHOOD, least=1),
                "name": Text(),
                "own_buffers": Flag(),
            }
        ),
        NETWORK_TENSORS | {"weights": Array("S", "D"), "buffers.*": Array(None, values="any")},
    ),
    "mc-dropout": Schema(
        _with_network(n_draws=Whole(1), seed=Whole(), name=Text()),
        NETWORK_TENSORS | {"weights": Array("D")},
    ),
    "temperature-scaled": Schema(
        Record(
            {
                "model": _model("fitted-model", "sparse-network", "weight-samples", "mc-dropout"),
                "temperature": _positive,
            }
        ),
        _tensors_of_model,
    ),
    "sparse-network": Schema(
        _with_network(layers=Table(_layer), history=_history, n_draws=Whole(1)),
        NETWORK_TENSORS | {"weights": Array("D"), "state.*": Array(None, values="any")},
    ),
    "small-network": Schema(_exported, _exported_tensors),
    "semi-structured-model": Schema(_semistructured, _semistructured_tensors),
    "data-frame-model": Schema(_data_frame, _tensors_of_model),
    "estimator": Schema(_estimator, _tensors_of_model),
    "sampling-checkpoint": Schema(
        _sampling,
        {
            "z": Array("chains", "draws", "k"),
            "count": Array("chains", values="index"),
            "state.*": Array(None, values="any", finite=False),
            "stats.*": Array("chains", "draws", values="any", finite=False),
        },
    ),
    "sparse-training-checkpoint": Schema(
        _sparse_training,
        {
            "module.*": Array(None, values="any"),
            "likelihood": Array("p"),
            "optimizer.*": Array(None, values="any"),
            "order": Array("state", values="index"),
            "noise": Array("state", values="index"),
        },
    ),
    "subspace-checkpoint": Schema(
        Record({"identity": Text(), "model": _model("fitted-model")}), _tensors_of_model
    ),
    "temperature-checkpoint": Schema(Record({"identity": Text(), "choice": _choice})),
}
"""What an artifact of each kind has to hold."""

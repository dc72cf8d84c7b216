"""The kinds of artifacts: for each, the function that rebuilds it and the schema of its content.

Loaders are dotted strings that are imported on use, so that this table imports nothing of what
it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subbayes.utils.schema import (
    Array,
    Deferred,
    Flag,
    Json,
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
from subbayes.utils.schema_parts import (
    CHOICE,
    DRAWS,
    FACTS,
    LIKELIHOOD,
    MLP,
    NETWORK,
    NETWORK_TENSORS,
    POSITIVE,
    PRIOR,
    PROBABILITY,
    SUBSPACE,
    draws_tensors,
    subspace_tensors,
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
    "linearised-laplace": "subbayes.inference.laplace.linearised:rebuild",
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

# --- models -------------------------------------------------------------------------------------

_fitted = Record(
    {
        "network": NETWORK,
        "likelihood": LIKELIHOOD,
        "subspace": SUBSPACE,
        "prior": PRIOR,
        "temperature": POSITIVE,
        "draws": Optional(DRAWS),
        "history": FACTS,
        "settings": Record(optional={"temperatures": Optional(CHOICE)}, others=True),
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
        "temperature": POSITIVE,
        "phase": Text(("learned", "fixed", "median")),
        "slab": Tagged(
            "name",
            {
                "NormalSlab": Record({"name": Text(), "scale": POSITIVE}),
                "StudentTSlab": Record({"name": Text(), "shape": POSITIVE, "rate": POSITIVE}),
                "MixtureSlab": Record(
                    {"name": Text(), "wide": POSITIVE, "narrow": POSITIVE, "share": PROBABILITY}
                ),
            },
        ),
        "inclusion": Tagged(
            "name",
            {
                "Bernoulli": Record({"name": Text(), "probability": PROBABILITY}),
                "BetaBinomial": Record(
                    {"name": Text(), "a": POSITIVE, "b": POSITIVE, "shared": Flag()}
                ),
            },
        ),
    },
    {"horseshoe": Record({"scale": POSITIVE, "threshold": Number()})},
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
                        "factor": POSITIVE,
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
                "history": FACTS,
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
        "prior_precision": POSITIVE,
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
                "scale": POSITIVE,
                "classes": _labels,
            }
        ),
        "encoder": Record(
            {
                "format": Whole(),
                "options": FACTS,
                "columns": Sequence(Text()),
                "named": Flag(),
                "dropped": Sequence(Text()),
                "numeric": Record(
                    {
                        "columns": Sequence(Text()),
                        "median": Sequence(Number()),
                        "mean": Sequence(Number()),
                        "variance": Sequence(Number(low=0)),
                        "scale": Sequence(POSITIVE),
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
        "notes": FACTS,
    }
)

_estimator = Record(
    {
        "model": _model("fitted-model", "sparse-network"),
        "class": Text(),
        "params": FACTS,
        "seed": Whole(high=2**64),
        "mean": Sequence(Number(), size="columns"),
        "scale": Sequence(POSITIVE, size="columns"),
        "feature_names": Optional(Sequence(Text(), size="columns")),
    },
    {"classes": _labels, "dtype": Text()},
)

# --- checkpoints --------------------------------------------------------------------------------

_sampling = Record(
    {"identity": FACTS, "evaluations": Whole(), "rngs": Sequence(FACTS, size="chains")}
)
_sparse_training = Record(
    {
        "identity": FACTS,
        "finished": Whole(),
        "history": Table(Sequence(Number(finite=False))),
        "optimizer": FACTS,
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
                "temperature": POSITIVE,
            }
        ),
        _tensors_of_model,
    ),
    "sparse-network": Schema(
        _with_network(layers=Table(_layer), history=FACTS, n_draws=Whole(1)),
        NETWORK_TENSORS | {"weights": Array("D"), "state.*": Array(None, values="any")},
    ),
    "small-network": Schema(_exported, _exported_tensors),
    "semi-structured-model": Schema(_semistructured, _semistructured_tensors),
    "linearised-laplace": Schema(_laplace, _laplace_tensors),
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
    "temperature-checkpoint": Schema(Record({"identity": Text(), "choice": CHOICE})),
}
"""What an artifact of each kind has to hold."""

"""The kinds of artifacts: for each, the function that rebuilds it and the schema of its content.

Loaders are dotted strings that are imported on use, so that this table imports nothing of what
it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from subbayes.utils.schema import (
    Rule,
    Schema,
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
    odd,
    one_of,
    optional,
    record,
    tagged,
    text,
    whole,
)
from subbayes.utils.schema_parts import (
    CHOICE,
    DRAWS,
    FACTS,
    FAMILY,
    HISTORY,
    LARGEST,
    LIKELIHOOD,
    MLP,
    N_DRAWS,
    NETWORK,
    NETWORK_TENSORS,
    PLAN,
    POSITIVE,
    PRESET,
    PRESET_CHOICE,
    PRIOR,
    PROBABILITY,
    SUBSPACE,
    TRAINING,
    draws_tensors,
    subspace_tensors,
)
from subbayes.utils.text_table import MOST_LETTERS, MOST_MARKS

__all__ = ["LOADERS", "SCHEMAS", "SHARES"]

LOADERS = {
    "fitted-model": "subbayes.models.fitted:rebuild",
    "weight-samples": "subbayes.baselines.ensemble:rebuild",
    "mc-dropout": "subbayes.baselines.mc_dropout:rebuild",
    "temperature-scaled": "subbayes.baselines.temperature_scaling:rebuild_scaled",
    "sparse-network": "subbayes.sparse.result:rebuild",
    "small-network": "subbayes.sparse.export.small_network:rebuild",
    "semi-structured-model": "subbayes.semistructured.model:rebuild",
    "linearised-laplace": "subbayes.inference.laplace.linearised:rebuild",
    "data-frame-model": "subbayes.tables.data_frame_model:rebuild",
    "estimator": "subbayes.tables.estimators:rebuild",
}
"""By kind, "module:function"; the function takes tensors, facts and options by name."""

SHARES = "subbayes.networks.sharded_saving:read_shares"
"""The function that reads the shards of a process; it takes a module, `read` and a device."""

_ANY_TENSOR = array(None, values="any")
_FORMULA = text(most=10_000)  # as `subbayes.semistructured.formula_grammar` allows
_NAME = text(most=MOST_LETTERS)  # of a column, a label or a level
_network = {"network": NETWORK, "likelihood": LIKELIHOOD}

# --- models of arrays -----------------------------------------------------------------------------

_fitted = record(
    _network,
    subspace=SUBSPACE,
    prior=PRIOR,
    temperature=POSITIVE,
    draws=optional(DRAWS),
    history=dict_of(HISTORY),
    settings=record(
        {
            "temperatures?": optional(CHOICE),
            "training?": optional(TRAINING),
            "subspace?": text(plain=True, most=MOST_LETTERS),
            "inference?": text(plain=True, most=MOST_LETTERS),
            "ensemble?": record(members=whole(2, 10**6)),
            "preset?": PRESET,
            "*": anything,
        }
    ),
)


def _fitted_tensors(facts: dict[str, Any]) -> dict[str, TensorRule]:
    found = NETWORK_TENSORS | subspace_tensors(facts["subspace"])
    if "ensemble" in facts["settings"]:
        found["starts?"] = array("starts", facts["subspace"]["rank"], dtype="float64", below=1e18)
    if facts["draws"] is None:
        return found
    return found | draws_tensors(facts["subspace"]["rank"], facts["draws"]["prediction"])


_slab = tagged(
    {
        "NormalSlab": {"scale": POSITIVE},
        "StudentTSlab": {"shape": POSITIVE, "rate": POSITIVE},
        "MixtureSlab": {"wide": POSITIVE, "narrow": POSITIVE, "share": PROBABILITY},
    }
)
_inclusion = tagged(
    {
        "Bernoulli": {"probability": PROBABILITY},
        "BetaBinomial": {"a": POSITIVE, "b": POSITIVE, "shared": boolean},
    }
)
_sparse_layer = record(
    {"horseshoe?": record(scale=POSITIVE, threshold=number())},
    posterior=text("mean-field", "mvn", "low-rank", "all", "dropout", "horseshoe"),
    estimator=text("local", "relaxed"),
    structure=text("weights", "units"),
    temperature=POSITIVE,
    phase=text("learned", "fixed", "median"),
    slab=_slab,
    inclusion=_inclusion,
)

_exported = record(
    {"settings?": dict_of(dict_of(text()))},  # files of earlier versions lack it, and say so
    units=dict_of(list_of(whole(), least=2, most=2)),
    layouts=dict_of(text("dense", "csr")),
    weights=list_of(whole(), least=2, most=2),
    inputs=list_of(text()),
    outputs=list_of(text()),
    fills=dict_of(one_of("a number or text", number(), boolean, text())),
    layers=dict_of(text()),
)


def _exported_tensors(facts: dict[str, Any]) -> dict[str, TensorRule]:
    rules = {"*": _ANY_TENSOR}
    for name, layout in facts["layouts"].items():
        if layout == "csr":
            key = f"{name}.weight" if name else "weight"
            rules[f"{key}.crow_indices"] = array(f"{key} rows", values="index")
            rules[f"{key}.col_indices"] = array(f"{key} entries", values="index")
            rules[f"{key}.values"] = array(f"{key} entries")
            rules[f"{key}.inputs"] = array(values="index")
    return rules


_laplace = record(
    _network,
    subspace=optional(SUBSPACE),
    form=text("dual", "primal", "diagonal", "low-rank", "kfac", "sampled", "subspace"),
    prior_precision=POSITIVE,
    rows=whole(1),
    memory_limit=whole(1),
    data=text(),
    inputs=list_of(optional(text()), least=1),
    structure=text("tensor", "tuple", "dict"),
    options=record(
        {
            "tolerance?": optional(number(1e-15, below=1)),
            "iterations?": whole(1, 10**5),
            "rounds?": whole(1, 10**6),
            "samples?": whole(1, 10**6),
            "solver?": text("auto", "dual", "primal", "minibatch"),
            "seed?": whole(),
        }
    ),
    layers=list_of(text()),
    residual=optional(number(0)),
)


_matrix = partial(array, dtype="float64", below=1e150)  # as its prior precision


def _laplace_tensors(facts: dict[str, Any]) -> dict[str, TensorRule]:
    rules = NETWORK_TENSORS | {"weights": array("D")}
    rules |= {f"example.{i}": _ANY_TENSOR for i in range(len(facts["inputs"]))}
    k = 0
    if facts["subspace"] is not None:
        rules |= subspace_tensors(facts["subspace"])
        k = facts["subspace"]["rank"]
    forms = {
        "dual": {"matrix": _matrix("m", "m")},
        "primal": {"matrix": _matrix("D", "D")},
        "diagonal": {"squares": _matrix("D", values="variance")},
        "low-rank": {"values": _matrix("r", values="variance"), "vectors": _matrix("r", "D")},
        "kfac": {"diagonal": _matrix("D", values="variance")},
        "sampled": {"draws": array("S", "D"), "fitted": _matrix("S", values="variance")},
        "subspace": {"matrix": _matrix(k, k), "metric": _matrix(k, k)},
    }
    if facts["form"] == "kfac":
        for i in range(len(facts["layers"])):
            groups, out, inputs = f"groups {i}", f"out {i}", f"in {i}"
            rules[f"outer.{i}"] = _matrix(groups, out, out)
            rules[f"inner.{i}"] = _matrix(groups, inputs, inputs)
            rules[f"values.{i}"] = _matrix(groups, out, inputs, values="variance")
    return rules | forms[facts["form"]]


# --- semi-structured regression -------------------------------------------------------------------

_prior_of_effects = one_of(
    "a number or the description of a prior",
    number(),
    tagged(
        {
            "NormalPrior": {"options": dict_of(number())},
            "Exponential": {"options": dict_of(number())},
            "HalfNormal": {"options": dict_of(number())},
            "Horseshoe": {"options": dict_of(number())},
            "Dirichlet": {"options": dict_of(number())},
            "LKJ": {"options": dict_of(number())},
            "Flat": {"options": dict_of(number())},
            "scipy": {
                "distribution": text(),
                "args": list_of(number()),
                "kwds": dict_of(number()),
                "factor": POSITIVE,
                "student": boolean,
            },
            "own": {"shown": text()},
        }
    ),
)
_MOST_TABLES = 1000


def _priors(value: Any, where: str, sizes: Sizes) -> None:
    """Priors by name, of which few have a table of quantiles of their own."""
    dict_of(_prior_of_effects)(value, where, sizes)
    made = [prior for prior in value.values() if isinstance(prior, dict)]
    tables = len({repr(prior) for prior in made if prior["name"] == "scipy"})
    if tables > _MOST_TABLES:
        raise SchemaError(where, f"at most {_MOST_TABLES} distributions of SciPy", str(tables))


_family = one_of("a family", FAMILY, record(own=text()))
_level = one_of("a level", _NAME, number(), boolean)
_column = record({"levels?": list_of(_level), "ordered?": boolean, "dtype?": text()}, name=_NAME)
_deep_network = record(
    architecture=text(),
    parameter=optional(text()),
    columns=optional(list_of(_NAME)),
    module=optional(MLP),
    trained=list_of(text()),
)
_joint_space = record(
    subspace=SUBSPACE,
    prior=PRIOR,
    rank=whole(),
    kind=text("curve", "naive", "full", "last-layer", "ensemble", "own"),
    history=HISTORY,
    projected=boolean,
    curve=optional(text("bezier", "polygon")),
)
_semistructured = record(
    {
        "smooth?": text("bayes", "reml"),
        "response_terms?": list_of(text("cens", "trunc", "trials", "weights"), most=4),
        "missing_values?": list_of(text(), most=MOST_MARKS),  # of the table of a command
    },
    formula=one_of("a formula, or one by parameter", _FORMULA, dict_of(_FORMULA)),
    family=_family,
    priors=_priors,
    weights=optional(text()),
    offset=optional(text()),
    exposure=optional(text()),
    missing=text("drop", "error"),
    orthogonal=one_of("true, false or 'auto'", boolean, text("auto")),
    effects=text("population", "sample"),
    seed=whole(),
    mode=text("trace", "compile", "eager"),
    columns=list_of(_column),
    dropped=whole(high=2**53 - 1),
    networks=dict_of(_deep_network),
    space=_joint_space,
    draws=DRAWS,
)


def _semistructured_tensors(facts: dict[str, Any]) -> dict[str, TensorRule]:
    rank = facts["space"]["subspace"]["rank"]
    rules = draws_tensors(rank) | subspace_tensors(facts["space"]["subspace"], "space")
    rules |= {"starts": array("starts", rank, below=LARGEST), "inputs.*": _ANY_TENSOR}
    if facts["space"]["curve"] is not None:
        rules["curve"] = array("points", "curve size")
    rules |= {f"rows.{i}": array("rows", values="any") for i in range(len(facts["columns"]))}
    networks = range(len(facts["networks"]))
    return rules | {f"{of}{i}.*": _ANY_TENSOR for of in ("network", "attribute") for i in networks}


# --- models that hold another model ---------------------------------------------------------------


def _tensors_of_model(facts: dict[str, Any]) -> Mapping[str, TensorRule]:
    model = facts["model"]
    return SCHEMAS[model["kind"]].tensor_rules(model["facts"])


def _tensors_of_trained(facts: dict[str, Any]) -> Mapping[str, TensorRule]:
    if facts["model"]["facts"]["draws"] is not None:
        raise SchemaError("facts['model']['facts']['draws']", "null before sampling", "draws")
    return {**_tensors_of_model(facts), "first_outputs": array(None, values="any", finite=False)}


def _model(*kinds: str) -> Rule:
    """Another model, with its kind and facts."""
    return tagged({kind: {"facts": _facts_of(kind)} for kind in kinds}, key="kind")


def _facts_of(kind: str) -> Rule:
    return deferred(lambda: SCHEMAS[kind].facts)


def _marker(value: Any, where: str, sizes: Sizes) -> None:
    """A value that stands for a missing one: text or a number; whole numbers have 64 bits."""
    if isinstance(value, int):
        whole(-(2**63), 2**63 - 1)(int(value), where, sizes)
    else:
        optional(one_of("text or a number", _NAME, number(finite=False)))(value, where, sizes)


_labels = list_of(one_of("a label", _NAME, number(), boolean))

_data_frame = record(
    model=_model(
        "fitted-model", "sparse-network", "weight-samples", "mc-dropout", "temperature-scaled"
    ),
    column=_NAME,
    target=record(task=text("regression", "count", "classification"), classes=_labels),
    encoder=record(
        format=whole(),
        options=record(
            {
                "unknown?": text("error", "ignore"),
                "missing?": text("error", "impute"),
                "missing_indicator?": boolean,
                "missing_values?": list_of(_marker, most=MOST_MARKS),
                "categorical?": list_of(_NAME),
                "max_categories?": whole(2),
            }
        ),
        columns=list_of(_NAME),
        named=boolean,
        dropped=list_of(text()),
        numeric=record(
            columns=list_of(_NAME),
            median=list_of(number()),
            mean=list_of(number()),
            variance=list_of(number(0)),
            scale=list_of(POSITIVE),
        ),
        categorical=record(
            columns=list_of(_NAME), levels=list_of(list_of(_NAME)), most_frequent=list_of(_NAME)
        ),
        flagged=list_of(text()),
    ),
    rows=optional(record(n=whole(1), targets=text())),
    notes=FACTS,
)


def _label_dtype(value: Any, where: str, sizes: Sizes) -> None:
    """A dtype of NumPy for labels, with at most 1000 letters: each label takes as much memory."""
    text()(value, where, sizes)
    if not re.fullmatch(r"\|[bO]1?|\|[iu]1|[<>][iuf][248]|[<>]U([1-9][0-9]{0,2}|1000)", value):
        _shown = value if len(value) < 60 else value[:60] + "…"
        raise SchemaError(where, "a dtype of labels", repr(_shown))


_estimator = record(
    {"class": text(), "classes?": _labels, "dtype?": _label_dtype},
    model=_model("fitted-model", "sparse-network"),
    params=record({"draws?": N_DRAWS, "*": anything}),
    seed=whole(high=2**64),
    mean=list_of(number(), size="columns"),
    scale=list_of(POSITIVE, size="columns"),
    feature_names=optional(list_of(_NAME, size="columns")),
)

_rng = record(
    bit_generator=text("PCG64"),
    state=record(state=whole(high=2**128 - 1), inc=odd(2**128 - 1)),
    has_uint32=whole(high=1),
    uinteger=whole(high=2**32 - 1),
)

# --- all kinds ------------------------------------------------------------------------------------

SCHEMAS = {
    "fitted-model": Schema(_fitted, _fitted_tensors),
    "weight-samples": Schema(
        record(
            network=NETWORK,
            likelihoods=list_of(LIKELIHOOD, least=1),
            name=text(plain=True, most=MOST_LETTERS),
            own_buffers=boolean,
        ),
        NETWORK_TENSORS | {"weights": array("S", "D"), "buffers.*": _ANY_TENSOR},
    ),
    "mc-dropout": Schema(
        record(_network, n_draws=N_DRAWS, seed=whole(), name=text(plain=True, most=MOST_LETTERS)),
        NETWORK_TENSORS | {"weights": array("D")},
    ),
    "temperature-scaled": Schema(
        record(
            model=_model("fitted-model", "sparse-network", "weight-samples", "mc-dropout"),
            temperature=POSITIVE,
        ),
        _tensors_of_model,
    ),
    "sparse-network": Schema(
        record(_network, layers=dict_of(_sparse_layer), history=HISTORY, n_draws=N_DRAWS),
        NETWORK_TENSORS | {"weights": array("D"), "state.*": _ANY_TENSOR},
    ),
    "small-network": Schema(_exported, _exported_tensors),
    "semi-structured-model": Schema(_semistructured, _semistructured_tensors),
    "linearised-laplace": Schema(_laplace, _laplace_tensors),
    "data-frame-model": Schema(_data_frame, _tensors_of_model),
    "estimator": Schema(_estimator, _tensors_of_model),
    # checkpoints, which only the call that wrote them reads
    "sampling-checkpoint": Schema(
        record(
            {"device?": text()},
            identity=FACTS,
            evaluations=whole(),
            rngs=list_of(_rng, size="chains"),
        ),
        {
            "first_outputs?": array(None, values="any", finite=False),
            "z": array("chains", "draws", "k", dtype="float64"),
            "count": array("chains", values="index", dtype="int64"),
            "state.*": array(None, values="any", finite=False),
            "stats.*": array("chains", "draws", values="any", finite=False),
            "transitions.*": array("chains", "thin", values="any", finite=False),
        },
    ),
    "sparse-training-checkpoint": Schema(
        record(
            {"stopped?": boolean, "device?": text()},
            identity=FACTS,
            finished=whole(),
            history=HISTORY,
        ),
        {
            "first_outputs?": array(None, values="any", finite=False),
            "module.*": _ANY_TENSOR,
            "likelihood": array("p"),
            "optimizer.*": _ANY_TENSOR,
            "order": array("state", values="index"),
            "noise": array("state", values="index"),
        },
    ),
    "subspace-checkpoint": Schema(
        record(identity=text(), device=text(), model=_model("fitted-model")), _tensors_of_trained
    ),
    "preset-checkpoint": Schema(record(identity=text(), choice=PRESET_CHOICE, plan=optional(PLAN))),
    "temperature-checkpoint": Schema(record(identity=text(), choice=CHOICE)),
}
"""What an artifact of each kind has to hold. Kinds without a loader are checkpoints."""

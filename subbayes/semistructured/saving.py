"""The artifact of a fitted semi-structured model.

It holds the arguments of the model, the columns and inputs of the training rows that the model
reads, the networks' weights and buffers, and the draws. Loading reads the rows as fitting did, so
that knots, levels, centres and scales are those of fitting.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import pandas as pd
import torch
from msgspec import Meta
from torch import Tensor, nn

from subbayes.artifacts.arrays import ANY, LARGEST, Array, Arrays
from subbayes.artifacts.facts import Facts, Finite, Name, Size
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import KindFacts
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.draws import Draws, DrawsFacts
from subbayes.likelihoods.families import Family, family_from_config, is_own_family
from subbayes.networks.architecture import architecture_of
from subbayes.networks.attributes import attribute_tensors, set_attributes
from subbayes.networks.mlp import MLP, MLPSettings
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.networks.tracing.tracer import Mode
from subbayes.priors import Normal
from subbayes.regression.priors.reading import PriorFacts, SavedPriors, prior_facts
from subbayes.regression.terms.parsing import least_effects
from subbayes.semistructured.design_data import AuxiliaryColumns, check_network_names, networks_from
from subbayes.semistructured.given_objects import (
    check_given_family,
    check_given_priors,
    check_log_likelihood,
)
from subbayes.semistructured.joint_posterior import FittedState, JointPosterior
from subbayes.semistructured.predictors import Deep
from subbayes.semistructured.specification import PreparedModel, Specification
from subbayes.semistructured.subspace import SUBSPACES, JointSpace
from subbayes.subspace import JointSubspace, SubspaceFacts
from subbayes.training.weight_curve import WeightCurve
from subbayes.utils.checks import InputError, fail, fail_type
from subbayes.utils.text_table import MOST_MARKS
from subbayes.utils.warning import unsaid_warnings

_Formula = Annotated[str, Meta(max_length=10_000)]  # as `formula_grammar` allows
_Level = Name | int | float | bool
_MOST_PRIORS = 1000
_NUMBERS = re.compile(r"(u?int|float)(8|16|32|64)|U?Int(8|16|32|64)|Float(32|64)|bool(ean)?")
_LEVELS = re.compile(r"object|str|string(\[(python|pyarrow)\])?|bool(ean)?")


class ColumnFacts(Facts):
    """A column of the training rows: numbers of a dtype, or indices of levels."""

    name: Name
    levels: list[_Level] | None = None
    ordered: bool | None = None
    dtype: str | None = None


class DeepFacts(Facts):
    """A network but for its tensors."""

    architecture: str
    parameter: str | None
    columns: list[Name] | None
    module: MLPSettings | None
    trained: list[str]


class SpaceFacts(Facts):
    """The coordinates of effects and weights, but for tensors."""

    subspace: SubspaceFacts
    prior: dict[str, Any]
    rank: Size
    kind: Literal["curve", "full", "last-layer", "own"]
    history: dict[Name, list[float]]
    curve: Literal["bezier", "polygon"] | None


class SemiStructuredFacts(KindFacts):
    """A fitted semi-structured model but for its tensors."""

    formula: _Formula | dict[Name, _Formula]
    family: dict[str, Any]
    priors: dict[str, Finite | PriorFacts]
    weights: str | None
    offset: str | None
    exposure: str | None
    missing: Literal["drop", "error"]
    response_terms: Annotated[
        list[Literal["cens", "trunc", "trials", "weights"]], Meta(max_length=4)
    ]
    orthogonal: bool | Literal["auto"]
    effects: Literal["population", "sample"]
    smooth: Literal["bayes", "reml"]
    seed: Size
    mode: Literal["trace", "compile", "eager"]
    columns: list[ColumnFacts]
    dropped: Annotated[int, Meta(ge=0, lt=2**53)]
    networks: dict[Name, DeepFacts]
    space: SpaceFacts
    draws: DrawsFacts
    missing_values: Annotated[list[str], Meta(max_length=MOST_MARKS)] = []

    def __post_init__(self) -> None:
        if len(set(map(repr, self.priors.values()))) > _MOST_PRIORS:
            raise ValueError(f"expected at most {_MOST_PRIORS} different priors")

    def arrays(self) -> Arrays:
        """Draws, subspace, start points, rows, networks and their inputs."""
        rank = self.space.subspace.rank
        arrays = {**self.draws.arrays(rank), **self.space.subspace.arrays("space")}
        arrays |= {"starts": Array("starts", rank, below=LARGEST), "inputs.*": ANY}
        if self.space.curve is not None:
            arrays["curve"] = Array("points", "curve size")
        arrays |= {f"rows.{i}": Array("rows", dtype="any") for i in range(len(self.columns))}
        networks = range(len(self.networks))
        return arrays | {f"{of}{i}.*": ANY for of in ("network", "attribute") for i in networks}


def tensors_of(state: FittedState) -> dict[str, Tensor | np.ndarray]:
    """The tensors to save: subspace, draws, training rows, and networks with their inputs."""
    rows, space = state.model, state.space
    found = add_prefix("space", space.subspace.tensors()) | state.draws.state()[0]
    found["starts"] = space.start_points
    if space.curve is not None:
        found["curve"] = space.curve.points
    for i, name in enumerate(_columns_of(state)):
        found[f"rows.{i}"] = _store(rows.frame[name])[0]
    for i, (name, network) in enumerate(rows.specification.deep.items()):
        found |= add_prefix(f"network{i}", network.module.state_dict())
        found |= add_prefix(f"attribute{i}", attribute_tensors(network.module))
        if network.columns is None:
            found[f"inputs.{name}"] = rows.inputs[f"deep {name}"]
    return found


def facts_of(state: FittedState) -> SemiStructuredFacts:
    """The facts to save: arguments of the model, types of its columns, and facts of the draws."""
    rows, space = state.model, state.space
    specification: Any = rows.specification  # whose texts were checked
    family = specification.family
    known = not is_own_family(family)
    formula = specification.formula
    subspace: Any = space.subspace.config()
    kind: Any = space.kind if space.kind in SUBSPACES else "own"
    curve: Any = None if space.curve is None else space.curve.kind
    return SemiStructuredFacts(
        formula=formula if isinstance(formula, str) else dict(formula),
        family=family.to_config() if known else {"own": repr(family)},
        priors={name: prior_facts(prior) for name, prior in specification.priors.items()},
        **vars(specification.auxiliary),
        missing=specification.missing,
        response_terms=list(specification.response_terms),
        orthogonal=specification.orthogonal,
        effects=specification.effects,
        smooth=specification.smooth,
        seed=state.joint.seed,
        mode=state.joint.mode,
        columns=[
            ColumnFacts(name=name, **_store(rows.frame[name])[1]) for name in _columns_of(state)
        ],
        dropped=rows.dropped,
        networks={name: _network_facts(network) for name, network in specification.deep.items()},
        space=SpaceFacts(
            subspace=subspace,
            prior=space.prior.to_config(),
            rank=space.rank,
            kind=kind,
            history=space.history,
            curve=curve,
        ),
        draws=state.draws.state()[1],
    )


def state_from(
    tensors: dict[str, Tensor],
    facts: SemiStructuredFacts,
    deep: Mapping[str, nn.Module] | None = None,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> FittedState:
    """Rebuild a fitted model; see `SemiStructuredRegression.load` for the arguments.

    Raises:
        InputError: a module, family or prior that the artifact cannot hold is not given.
    """
    given, own = dict(deep or {}), dict(priors or {})
    check_network_names("deep", given, facts.networks)
    _check_columns(facts, tensors)
    likelihood = _family(facts.family, family)
    check_given_priors(own, facts.priors, likelihood)
    networks = {
        name: _network(name, network, strip_prefix(f"network{i}", tensors), given.get(name))
        for i, (name, network) in enumerate(facts.networks.items())
    }
    for i, network in enumerate(networks.values()):
        set_attributes(network.module, strip_prefix(f"attribute{i}", tensors))
    saved_priors = SavedPriors(facts.priors, own)
    specification = Specification(
        facts.formula,
        likelihood,
        networks_from(networks, likelihood),
        saved_priors,
        AuxiliaryColumns(facts.weights, facts.offset, facts.exposure),
        facts.orthogonal,
        facts.effects,
        facts.missing,
        facts.smooth,
        tuple(facts.response_terms),
    )
    columns = facts.columns
    frame = pd.DataFrame(
        {column.name: _restore(tensors[f"rows.{i}"], column) for i, column in enumerate(columns)}
    )
    space = _space(facts.space, tensors)
    _check_splines(specification, space.subspace.size)
    with unsaid_warnings():  # `fit` has given the warnings about these rows
        inputs = strip_prefix("inputs", tensors)
        rows = specification.prepare(frame, inputs, space.subspace.size)
    rows = replace(rows, specification=replace(specification, priors=dict(saved_priors)))
    _check_sizes(space, rows)
    # a file does not start a compiler, which writes elsewhere
    mode: Mode = "trace" if facts.mode == "compile" else facts.mode
    joint = JointPosterior(replace(rows, dropped=facts.dropped), space, facts.seed, mode)
    draws = Draws.from_state(tensors, facts.draws)
    state = FittedState(joint, draws)
    unread = {column.name for column in columns} - set(_columns_of(state))
    if unread:
        _damaged("facts['columns']", "the columns that the model reads", f"{sorted(unread)} too")
    objects = {"deep": given, "family": family, "priors": own}
    if arguments := [name for name, value in objects.items() if value]:
        check_log_likelihood(joint, draws, arguments)
    return state


def _damaged(where: str, expected: str, got: Any) -> NoReturn:
    fail_damaged(f"{where} to be {expected}", got)


def _columns_of(state: FittedState) -> list[str]:
    """Columns of the training rows that the model reads."""
    rows = state.model
    names = [
        *rows.response.variables(rows.frame),
        *rows.encoder.columns,
        *rows.specification.auxiliary.columns,
        *rows.specification.family.columns,
    ]
    return list(dict.fromkeys(names))


def _network_facts(network: Deep) -> DeepFacts:
    module = network.module
    return DeepFacts(
        architecture=architecture_of(module),
        parameter=network.parameter,
        columns=None if network.columns is None else list(network.columns),
        module=MLPSettings(**module.settings) if isinstance(module, MLP) else None,
        trained=[n for n, p in module.named_parameters() if p.requires_grad],
    )


def _family(config: dict[str, Any], own: Any) -> Family:
    if own is not None:
        return check_given_family(own, config)
    if "own" in config:
        fail(
            "family",
            f"the family {config['own']}",
            "none",
            "Pass load(path, family=...): code is not saved",
        )
    try:
        return family_from_config(config, "facts['family']")
    except InputError as error:
        _damaged(error.argument, error.expected, error.got)


def _space(facts: SpaceFacts, tensors: dict[str, Tensor]) -> JointSpace:
    curve = WeightCurve(tensors["curve"], facts.curve) if facts.curve else None
    return JointSpace(
        facts.subspace.build(strip_prefix("space", tensors)),
        Normal.from_config(facts.prior),
        tensors["starts"].numpy(),
        facts.rank,
        facts.kind,
        curve,
        facts.history,
    )


def _check_sizes(space: JointSpace, rows: PreparedModel) -> None:
    """Raise for a space that is not one of the model's effects and weights."""
    where, effects, weights = "facts['space']", rows.structured.size, rows.n_weights
    total = effects + weights
    if space.subspace.size != total:
        got = f"of {space.subspace.size}"
        _damaged(where, f"a subspace of {effects} effects and {weights} weights", got)
    rank = space.subspace.rank if space.projected else space.subspace.rank - effects
    if space.rank != rank or (rank > 0) != (weights > 0):
        _damaged(f"{where}['rank']", str(rank), space.rank)
    if isinstance(space.subspace, JointSubspace) and space.subspace.effects != effects:
        _damaged(f"{where}['subspace']['effects']", str(effects), space.subspace.effects)
    try:
        space.prior.check_rank(space.subspace.rank)
    except InputError as error:
        _damaged(f"{where}['prior']", error.expected, error.got)
    curve = space.curve
    if curve is not None and curve.points.shape[1] != (total if space.projected else weights):
        _damaged("tensor 'curve'", f"points of {weights} weights", tuple(curve.points.shape))
    if not len(space.start_points):
        _damaged("tensor 'starts'", "at least one point", "none")


def _check_splines(specification: Specification, size: int) -> None:
    """Raise before any basis is evaluated for more splines than there are effects and weights."""
    right = specification.split_formula()[1]
    least = sum(least_effects(f"formula of {name!r}", text) for name, text in right.items())
    if least > size:
        _damaged("facts['formula']", f"one of at most {size} effects", f"at least {least}")


def _network(
    name: str, facts: DeepFacts, state: dict[str, Tensor], module: nn.Module | None
) -> Deep:
    """A saved network, in a copy of the module that the user passes or in a new `MLP`."""
    if module is None and facts.module is None:
        fail(
            f"deep[{name!r}]",
            f"a module of the saved architecture {facts.architecture}",
            "none",
            f"Pass load(path, deep={{{name!r}: module}}): code is not saved, only weights",
        )
    where = f"facts['networks'][{name!r}]"
    if module is None:
        dtype = next((t.dtype for t in state.values() if t.is_floating_point()), None)
        assert facts.module is not None
        module = facts.module.build(state).to(dtype)
    else:
        module = copy.deepcopy(uncompiled(module))
    if not isinstance(module, nn.Module):
        fail_type(f"deep[{name!r}]", "a module", module)
    if architecture_of(module) != facts.architecture:
        fail(
            f"deep[{name!r}]",
            f"the saved architecture {facts.architecture}",
            architecture_of(module),
            "Build it with the same layers and sizes",
        )
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    if {key: tuple(tensor.shape) for key, tensor in state.items()} != shapes:
        _damaged(f"the tensors of {where}", "those of its architecture", "others")
    unknown = set(facts.trained) - {key for key, _ in module.named_parameters()}
    if unknown:
        _damaged(f"{where}['trained']", "names of parameters", sorted(unknown))
    module.load_state_dict(state)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(key in facts.trained)
    return Deep(module, facts.columns, facts.parameter)


# --- columns of data frames ---------------------------------------------------------------------


def _store(values: pd.Series) -> tuple[np.ndarray, dict[str, Any]]:
    """A column without missing values as an array, with the facts that `_restore` needs."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        codes, levels = values.cat.codes, list(dtype.categories)
        facts: dict[str, Any] = {"levels": levels, "ordered": bool(dtype.ordered)}
    elif pd.api.types.is_numeric_dtype(dtype):
        plain = getattr(dtype, "numpy_dtype", dtype)
        shown = str(dtype) if _NUMBERS.fullmatch(str(dtype)) else str(np.dtype(plain))
        return values.to_numpy(dtype=plain, copy=True), {"dtype": shown}
    else:
        codes, uniques = pd.factorize(values)
        levels = list(uniques)
        shown = str(dtype) if _LEVELS.fullmatch(str(dtype)) else "object"
        facts = {"levels": levels, "dtype": shown}
    odd = [v for v in levels if not isinstance(v, (str, bool, int, float, np.number, np.bool_))]
    if odd:
        remedy = "Convert it to text before fitting"
        fail_type(str(values.name), "a column of numbers or text to save", odd[0], remedy)
    return np.asarray(codes, dtype=np.int64), facts


def _check_columns(facts: SemiStructuredFacts, tensors: dict[str, Tensor]) -> None:
    """Raise for columns that `_store` does not write, before any of them is built."""
    names = [column.name for column in facts.columns]
    if len(set(names)) < len(names):
        _damaged("facts['columns']", "columns with different names", names)
    read = [facts.weights, facts.offset, facts.exposure]
    read += [name for network in facts.networks.values() for name in network.columns or ()]
    unknown = {name for name in read if name is not None} - set(names)
    if unknown:
        _damaged("facts['columns']", "all columns that the model reads", f"none of {unknown}")
    with_inputs = {name for name, net in facts.networks.items() if net.columns is None}
    if with_inputs != set(inputs := strip_prefix("inputs", tensors)):
        _damaged("tensors 'inputs'", f"of the networks {sorted(with_inputs)}", sorted(inputs))
    for i, column in enumerate(facts.columns):
        where, values = f"facts['columns'][{i}]", tensors[f"rows.{i}"]
        levels, dtype = column.levels, column.dtype
        if (dtype is None) == (levels is None or column.ordered is None):
            _damaged(where, "a column with a dtype, or ordered or unordered levels", column)
        if dtype is not None and not (_NUMBERS if levels is None else _LEVELS).fullmatch(dtype):
            _damaged(f"{where}['dtype']", "a dtype of numbers or text", repr(dtype))
        kind = "bool" if values.dtype == torch.bool else "int"
        kind = "float" if values.is_floating_point() else kind
        if values.is_complex() or (levels is not None and kind != "int"):
            _damaged(f"tensor 'rows.{i}'", "numbers, whole ones for levels", values.dtype)
        if levels is None:
            if kind not in (dtype or "").lower():
                _damaged(f"{where}['dtype']", f"one of {values.dtype}", repr(dtype))
            continue
        if not all(map(_can_be_level, levels)):
            _damaged(f"{where}['levels']", "text or finite numbers", levels)
        if len(set(levels)) < len(levels):
            _damaged(f"{where}['levels']", "different levels", levels)
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < len(levels)):
            _damaged(f"tensor 'rows.{i}'", f"indices of {len(levels)} levels", "others")


def _can_be_level(level: Any) -> bool:
    """Whether pandas can hold a level: text, a finite number, or a whole one of 64 bits."""
    if isinstance(level, int):
        return -(2**63) <= level < 2**64
    return isinstance(level, str) or (isinstance(level, float) and math.isfinite(level))


def _restore(stored: Tensor, facts: ColumnFacts) -> pd.Series:
    values = stored.numpy()
    if facts.levels is None:
        return pd.Series(values).astype(facts.dtype)
    if facts.ordered is not None:
        return pd.Series(pd.Categorical.from_codes(values, facts.levels, facts.ordered))
    levels = np.empty(len(facts.levels), dtype=object)
    levels[:] = facts.levels
    return pd.Series(levels[values]).astype(facts.dtype)

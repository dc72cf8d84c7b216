"""The artifact of a fitted regression.

It holds the arguments of the model, the columns of the training rows that the model reads, and the
draws. Loading reads the rows as fitting did, so that knots, levels, centres and scales are those of
fitting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import pandas as pd
import torch
from msgspec import Meta
from torch import Tensor

from subbayes.artifacts.arrays import LARGEST, Array, Arrays
from subbayes.artifacts.facts import Facts, Finite, Name, Size
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import KindFacts
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.draws import Draws, DrawsFacts
from subbayes.likelihoods.families import Family, family_from_config, is_own_family
from subbayes.networks.tracing.tracer import Mode
from subbayes.priors import Normal
from subbayes.regression.design.rows import AuxiliaryColumns
from subbayes.regression.given_objects import (
    check_given_family,
    check_given_priors,
    check_log_likelihood,
)
from subbayes.regression.posterior import FittedState, RegressionPosterior, Space
from subbayes.regression.priors.reading import PriorFacts, SavedPriors, prior_facts
from subbayes.regression.specification import PreparedModel, Specification
from subbayes.regression.terms.parsing import RightSide
from subbayes.subspace import FullSubspace, SubspaceFacts
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


class SpaceFacts(Facts):
    """The coordinates of effects, but for tensors."""

    subspace: SubspaceFacts
    prior: dict[str, Any]


class RegressionFacts(KindFacts):
    """A fitted regression but for its tensors."""

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
    smooth: Literal["bayes", "reml"]
    seed: Size
    mode: Literal["trace", "compile", "eager"]
    columns: list[ColumnFacts]
    dropped: Annotated[int, Meta(ge=0, lt=2**53)]
    space: SpaceFacts
    draws: DrawsFacts
    missing_values: Annotated[list[str], Meta(max_length=MOST_MARKS)] = []

    def __post_init__(self) -> None:
        if len(set(map(repr, self.priors.values()))) > _MOST_PRIORS:
            raise ValueError(f"expected at most {_MOST_PRIORS} different priors")

    @property
    def other_columns(self) -> list[str]:
        """Columns that are read beside the formula's, weights and offsets."""
        return []

    def arrays(self) -> Arrays:
        """Draws, subspace, start points and rows."""
        rank = self.space.subspace.rank
        arrays = {**self.draws.arrays(rank), **self.space.subspace.arrays("space")}
        arrays["starts"] = Array("starts", rank, below=LARGEST)
        return arrays | {f"rows.{i}": Array("rows", dtype="any") for i in range(len(self.columns))}


def tensors_of(state: FittedState) -> dict[str, Tensor | np.ndarray]:
    """The tensors to save: subspace, draws and training rows."""
    tensors = add_prefix("space", state.space.subspace.tensors()) | state.draws.state()[0]
    tensors["starts"] = state.space.start_points
    for i, name in enumerate(_columns_of(state)):
        tensors[f"rows.{i}"] = _store(state.model.frame[name])[0]
    return tensors


def facts_of(state: FittedState) -> RegressionFacts:
    """The facts to save: arguments of the model, types of its columns, and facts of the draws."""
    subspace: Any = state.space.subspace.config()
    space = SpaceFacts(subspace=subspace, prior=state.space.prior.to_config())
    return RegressionFacts(**common_facts(state), space=space)


def common_facts(state: FittedState) -> dict[str, Any]:
    """The facts of any model, but for its space."""
    rows, specification = state.model, state.model.specification
    family, formula = specification.family, specification.formula
    known = not is_own_family(family)
    return {
        "formula": formula if isinstance(formula, str) else dict(formula),
        "family": family.to_config() if known else {"own": repr(family)},
        "priors": {name: prior_facts(prior) for name, prior in specification.priors.items()},
        **vars(specification.auxiliary),
        "missing": specification.missing,
        "response_terms": list(specification.response_terms),
        "smooth": specification.smooth,
        "seed": state.joint.seed,
        "mode": state.joint.mode,
        "columns": [
            ColumnFacts(name=name, **_store(rows.frame[name])[1]) for name in _columns_of(state)
        ],
        "dropped": rows.dropped,
        "draws": state.draws.state()[1],
    }


def state_from(
    tensors: dict[str, Tensor],
    facts: RegressionFacts,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> FittedState:
    """Rebuild a fitted model; see `Regression.load` for the arguments.

    Raises:
        InputError: a family or prior that the artifact cannot hold is not given.
    """
    settings, own = specification_settings(facts, family, priors)
    subspace = facts.space.subspace.build(strip_prefix("space", tensors))
    prior = Normal.from_config(facts.space.prior)
    space = Space(subspace, prior, tensors["starts"].numpy())
    rows = prepared_rows(tensors, facts, Specification(**settings), None, space)
    if not isinstance(subspace, FullSubspace) or subspace.size != rows.structured.size:
        damaged("facts['space']", f"all {rows.structured.size} effects", repr(subspace))
    joint = RegressionPosterior(rows, space, facts.seed, mode_of(facts))
    state = FittedState(joint, Draws.from_state(tensors, facts.draws))
    return checked_state(state, facts, {"family": family, "priors": own})


def specification_settings(
    facts: RegressionFacts, family: Any, priors: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a saved specification, and the priors of the user among its priors."""
    own, likelihood = dict(priors or {}), _family(facts.family, family)
    check_given_priors(own, facts.priors, likelihood)
    settings = {
        "formula": facts.formula,
        "family": likelihood,
        "priors": SavedPriors(facts.priors, own),
        "auxiliary": AuxiliaryColumns(facts.weights, facts.offset, facts.exposure),
        "missing": facts.missing,
        "smooth": facts.smooth,
        "response_terms": tuple(facts.response_terms),
    }
    return settings, own


def prepared_rows(
    tensors: dict[str, Tensor],
    facts: RegressionFacts,
    specification: Specification,
    inputs: Mapping[str, Tensor] | None,
    space: Space,
) -> Any:
    """The saved training rows, read by a specification."""
    _check_columns(facts, tensors)
    columns = enumerate(facts.columns)
    frame = pd.DataFrame({c.name: _restore(tensors[f"rows.{i}"], c) for i, c in columns})
    _check_splines(specification, space.subspace.size)
    with unsaid_warnings():  # `fit` has given the warnings about these rows
        rows = specification.prepare(frame, inputs, space.subspace.size)
    rows = replace(
        rows,
        specification=replace(rows.specification, priors=dict(specification.priors)),
        dropped=facts.dropped,
    )
    _check_sizes(space, rows)
    return rows


def mode_of(facts: RegressionFacts) -> Mode:
    """How the density is evaluated: a file does not start a compiler, which writes elsewhere."""
    return "trace" if facts.mode == "compile" else facts.mode


def checked_state(
    state: FittedState, facts: RegressionFacts, objects: Mapping[str, Any]
) -> FittedState:
    """A rebuilt model, if it reads all saved columns and the user's objects are those of the fit.

    Args:
        state: the model.
        facts: its facts.
        objects: the arguments of `load` by name.
    """
    unread = {column.name for column in facts.columns} - set(_columns_of(state))
    if unread:
        damaged("facts['columns']", "the columns that the model reads", f"{sorted(unread)} too")
    if arguments := [name for name, value in objects.items() if value]:
        check_log_likelihood(state.joint, state.draws, arguments)
    return state


def damaged(where: str, expected: str, got: Any) -> NoReturn:
    """Raise for a file whose content cannot be."""
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
        damaged(error.argument, error.expected, error.got)


def _check_sizes(space: Space, rows: PreparedModel) -> None:
    """Raise for a space that is not one of the model's effects."""
    if space.subspace.size < rows.structured.size:
        expected = f"a subspace of {rows.structured.size} effects"
        damaged("facts['space']", expected, f"of {space.subspace.size}")
    try:
        space.prior.check_rank(space.subspace.rank)
    except InputError as error:
        damaged("facts['space']['prior']", error.expected, error.got)
    if not len(space.start_points):
        damaged("tensor 'starts'", "at least one point", "none")


def _check_splines(specification: Specification, size: int) -> None:
    """Raise before any basis is evaluated for more splines than there are effects and weights."""
    right = specification.split_formula()[1]
    least = sum(
        RightSide.of(f"formula of {name!r}", text).least_effects for name, text in right.items()
    )
    if least > size:
        damaged("facts['formula']", f"one of at most {size} effects", f"at least {least}")


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


def _check_columns(facts: RegressionFacts, tensors: dict[str, Tensor]) -> None:
    """Raise for columns that `_store` does not write, before any of them is built."""
    names = [column.name for column in facts.columns]
    if len(set(names)) < len(names):
        damaged("facts['columns']", "columns with different names", names)
    read = [facts.weights, facts.offset, facts.exposure]
    read += facts.other_columns
    unknown = {name for name in read if name is not None} - set(names)
    if unknown:
        damaged("facts['columns']", "all columns that the model reads", f"none of {unknown}")
    for i, column in enumerate(facts.columns):
        where, values = f"facts['columns'][{i}]", tensors[f"rows.{i}"]
        levels, dtype = column.levels, column.dtype
        if (dtype is None) == (levels is None or column.ordered is None):
            damaged(where, "a column with a dtype, or ordered or unordered levels", column)
        if dtype is not None and not (_NUMBERS if levels is None else _LEVELS).fullmatch(dtype):
            damaged(f"{where}['dtype']", "a dtype of numbers or text", repr(dtype))
        kind = "bool" if values.dtype == torch.bool else "int"
        kind = "float" if values.is_floating_point() else kind
        if values.is_complex() or (levels is not None and kind != "int"):
            damaged(f"tensor 'rows.{i}'", "numbers, whole ones for levels", values.dtype)
        if levels is None:
            if kind not in (dtype or "").lower():
                damaged(f"{where}['dtype']", f"one of {values.dtype}", repr(dtype))
            continue
        if not all(map(_can_be_level, levels)):
            damaged(f"{where}['levels']", "text or finite numbers", levels)
        if len(set(levels)) < len(levels):
            damaged(f"{where}['levels']", "different levels", levels)
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < len(levels)):
            damaged(f"tensor 'rows.{i}'", f"indices of {len(levels)} levels", "others")


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

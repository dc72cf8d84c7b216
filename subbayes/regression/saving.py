"""The artifact of a fitted regression.

It holds the arguments of the model, the columns of the training rows that the model reads, and the
draws. Loading reads the rows as fitting did, so that knots, levels, centres and scales are those of
fitting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import pandas as pd
from msgspec import Meta
from torch import Tensor

from subbayes.artifacts.arrays import LARGEST, Array, Arrays
from subbayes.artifacts.facts import Facts, Finite, Name, Size
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import KindFacts
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.diagnostics.surprise import Update
from subbayes.draws import Draws, DrawsFacts
from subbayes.likelihoods.families import Family, family_from_config, is_own_family
from subbayes.priors import Normal
from subbayes.regression.design.rows import AuxiliaryColumns
from subbayes.regression.given_objects import check_given_family, check_log_likelihood
from subbayes.regression.posterior import FittedState, RegressionPosterior, Space
from subbayes.regression.priors.reading import PriorFacts, prior_facts, saved_priors
from subbayes.regression.specification import Specification
from subbayes.subspace import FullSubspace, SubspaceFacts
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.modes import Mode
from subbayes.utils.text_table import MOST_MARKS
from subbayes.utils.warning import unsaid_warnings

_Formula = Annotated[str, Meta(max_length=10_000)]  # as `formula_grammar` allows
_Level = Name | int | float | bool
_MOST_PRIORS = 1000
_NUMBERS = r"(u?int|float)(8|16|32|64)|U?Int(8|16|32|64)|Float(32|64)|bool(ean)?"
_TEXT = r"object|str|string(\[(python|pyarrow)\])?|bool(ean)?"


class ColumnFacts(Facts):
    """A column of the training rows: numbers of a dtype, or indices of levels."""

    name: Name
    levels: list[_Level] | None = None
    ordered: bool | None = None
    dtype: Annotated[str, Meta(pattern=f"^({_NUMBERS}|{_TEXT})$")] | None = None


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
    smooth: Literal["bayes", "reml"]
    seed: Size
    mode: Literal["trace", "compile", "eager"]
    columns: list[ColumnFacts]
    dropped: Annotated[int, Meta(ge=0, lt=2**53)]
    space: SpaceFacts
    draws: DrawsFacts
    missing_values: Annotated[list[str], Meta(max_length=MOST_MARKS)] = []
    updates: list[Update] = []  # whose rows are the last ones

    def __post_init__(self) -> None:
        if len(set(map(repr, self.priors.values()))) > _MOST_PRIORS:
            raise ValueError(f"expected at most {_MOST_PRIORS} different priors")

    def arrays(self) -> Arrays:
        """Draws, subspace, start points and rows."""
        rank = self.space.subspace.rank
        arrays = {**self.draws.arrays(rank), **self.space.subspace.arrays("space")}
        arrays["starts"] = Array("starts", rank, below=LARGEST, least=1)
        return arrays | {f"rows.{i}": Array("rows", dtype="any") for i in range(len(self.columns))}


def tensors_of(state: FittedState) -> dict[str, Tensor | np.ndarray]:
    """The tensors to save: subspace, draws and training rows."""
    tensors = add_prefix("space", state.space.subspace.tensors()) | state.draws.state()[0]
    tensors["starts"] = state.space.start_points
    for i, name in enumerate(state.model.columns):
        tensors[f"rows.{i}"] = _store(state.model.frame[name])[0]
    return tensors


def facts_of(state: FittedState) -> RegressionFacts:
    """The facts to save: arguments of the model, types of its columns, and facts of the draws."""
    subspace: Any = state.space.subspace.config()
    space = SpaceFacts(subspace=subspace, prior=state.space.prior.to_config())
    return RegressionFacts(**common_facts(state), space=space, updates=list(state.updates))


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
        "smooth": specification.smooth,
        "seed": state.joint.seed,
        "mode": state.joint.mode,
        "columns": [
            ColumnFacts(name=name, **_store(rows.frame[name])[1]) for name in state.model.columns
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
    settings = specification_settings(facts, family, priors or {})
    subspace = facts.space.subspace.build(strip_prefix("space", tensors))
    prior = Normal.from_config(facts.space.prior)
    space = Space(subspace, prior, tensors["starts"].numpy())
    rows = prepared_rows(tensors, facts, Specification(**settings), None, space)
    if not isinstance(subspace, FullSubspace) or subspace.size != rows.structured.size:
        damaged("facts['space']", f"all {rows.structured.size} effects", repr(subspace))
    joint = RegressionPosterior(rows, space, facts.seed, mode_of(facts))
    draws = Draws.from_state(tensors, facts.draws)
    state = FittedState(joint, draws, updates=tuple(facts.updates))
    check_log_likelihood(joint, state.draws, {"family": family, "priors": priors})
    return state


def specification_settings(
    facts: RegressionFacts, family: Any, priors: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a saved specification, with the family and the priors of the user."""
    return {
        "formula": facts.formula,
        "family": _family(facts.family, family),
        "priors": saved_priors(facts.priors, priors),
        "auxiliary": AuxiliaryColumns(facts.weights, facts.offset, facts.exposure),
        "missing": facts.missing,
        "smooth": facts.smooth,
    }


def prepared_rows(
    tensors: dict[str, Tensor],
    facts: RegressionFacts,
    specification: Specification,
    inputs: Mapping[str, Tensor] | None,
    space: Space,
) -> Any:
    """The saved training rows, read by a specification."""
    columns = enumerate(facts.columns)
    frame = pd.DataFrame({c.name: _restore(tensors[f"rows.{i}"], c) for i, c in columns})
    with unsaid_warnings():  # `fit` has given the warnings about these rows
        first = len(frame) - sum(update.rows for update in facts.updates)
        rows = specification.prepare(frame[: max(first, 0)], inputs, space.subspace.size)
        if facts.updates:
            rows = rows.with_rows(frame[max(first, 0) :])
    space.prior.check_rank(space.subspace.rank)
    return replace(rows, dropped=facts.dropped)


def mode_of(facts: RegressionFacts) -> Mode:
    """How the density is evaluated: a file does not start a compiler, which writes elsewhere."""
    return "trace" if facts.mode == "compile" else facts.mode


def damaged(where: str, expected: str, got: Any) -> NoReturn:
    """Raise for a file whose content cannot be."""
    fail_damaged(f"{where} to be {expected}", got)


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
    return family_from_config(config, "facts['family']")


# --- columns of data frames ---------------------------------------------------------------------


def _store(values: pd.Series) -> tuple[np.ndarray, dict[str, Any]]:
    """A column without missing values as an array, with the facts that `_restore` needs."""
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        codes, levels = values.cat.codes, list(dtype.categories)
        facts: dict[str, Any] = {"levels": levels, "ordered": bool(dtype.ordered)}
    elif pd.api.types.is_numeric_dtype(dtype):
        plain = getattr(dtype, "numpy_dtype", dtype)
        shown = str(dtype) if re.fullmatch(_NUMBERS, str(dtype)) else str(np.dtype(plain))
        return values.to_numpy(dtype=plain, copy=True), {"dtype": shown}
    else:
        codes, uniques = pd.factorize(values)
        levels = list(uniques)
        shown = str(dtype) if re.fullmatch(_TEXT, str(dtype)) else "object"
        facts = {"levels": levels, "dtype": shown}
    odd = [v for v in levels if not isinstance(v, (str, bool, int, float, np.number, np.bool_))]
    if odd:
        remedy = "Convert it to text before fitting"
        fail_type(str(values.name), "a column of numbers or text to save", odd[0], remedy)
    return np.asarray(codes, dtype=np.int64), facts


def _restore(stored: Tensor, facts: ColumnFacts) -> pd.Series:
    values = stored.numpy()
    if facts.levels is None:
        return pd.Series(values).astype(facts.dtype)
    if facts.ordered is not None:
        return pd.Series(pd.Categorical.from_codes(values, facts.levels, facts.ordered))
    levels = np.empty(len(facts.levels), dtype=object)
    levels[:] = facts.levels
    return pd.Series(levels[values]).astype(facts.dtype)

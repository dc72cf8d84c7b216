"""The specification of a regression, and the model prepared for its training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from subbayes.data.data import Data, join_targets
from subbayes.data.frames import read_frame
from subbayes.data.levels import listed
from subbayes.likelihoods.families import Family
from subbayes.regression.design.default_priors import ResponseRows, default_priors, predictor_sd
from subbayes.regression.design.design import Design, formula_variables, split_formula
from subbayes.regression.design.identifiability import check_identified
from subbayes.regression.design.model_priors import names_for_priors, priors_with
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.design.response import Response
from subbayes.regression.design.rows import (
    AuxiliaryColumns,
    RowEncoder,
    column_numbers,
    given_values,
)
from subbayes.regression.formula.checks import (
    Missing,
    complete_rows,
    plain_columns,
    with_used_categories,
)
from subbayes.regression.formula.grammar import with_columns
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.empirical_bayes import with_default_smoothing
from subbayes.regression.shapes import RowValues
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user


@dataclass(frozen=True)
class PreparedModel:
    """A specification with its training rows: all that training and sampling need.

    Attributes:
        specification: formula, family and priors.
        frame: the rows without missing values.
        response: the response and its classes.
        structured: the structured predictor, with its priors.
        encoder: converts rows to inputs.
        data: inputs and targets.
        dropped: number of rows with missing values, which were dropped.
    """

    specification: Specification
    frame: pd.DataFrame
    response: Response
    structured: StructuredPredictor
    encoder: RowEncoder
    data: Data
    dropped: int

    @property
    def design(self) -> Design:
        """The design matrix."""
        return self.structured.design

    @property
    def family(self) -> Family:
        """Distribution of the response, with its classes counted."""
        return self.structured.family

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the rows."""
        assert isinstance(self.data.inputs, dict)
        return self.data.inputs

    @property
    def columns(self) -> list[str]:
        """Columns of the rows that the model reads."""
        names = [
            *self.response.variables(self.frame),
            *self.encoder.columns,
            *self.specification.auxiliary.columns,
            *self.specification.family.columns,
        ]
        return list(dict.fromkeys(names))

    @property
    def row_weights(self) -> RowValues | None:
        """How many times each row counts; None without a column of weights."""
        if self.specification.auxiliary.weights is None:
            return None
        y = self.data.y
        assert isinstance(y, tuple)
        return y[1].double()

    def with_rows(self, data: Any) -> PreparedModel:
        """The model on its rows and others, with the columns and the priors of the first.

        Args:
            data: complete rows, or rows with missing values, which are treated as those of a fit.

        Raises:
            InputError: absent columns, levels, groups or classes that the first rows do not have,
                or responses outside the support.
        """
        specification, columns = self.specification, self.columns
        frame = read_frame("data", data)
        frame, _, dropped = specification._complete_rows(frame, columns, None)
        targets = specification.targets(frame, self.response.numbers(frame))
        self.family.check_targets(targets)
        inputs = self.encoder.inputs(frame)
        joined = {name: torch.cat([rows, inputs[name]]) for name, rows in self.inputs.items()}
        assert self.data.y is not None
        both = Data.of((joined, join_targets([self.data.y, targets])))
        first = self.frame[columns]
        frame = pd.concat([first, _as_dtypes_of(first, frame[columns])])
        rows, dropped = frame.reset_index(drop=True), self.dropped + dropped
        return replace(self, frame=rows, data=both, dropped=dropped)

    @cached_property
    def effects_likelihood(self) -> EffectsLikelihood:
        """The log-likelihood as a function of the coordinates of effects, without networks."""
        assert self.data.y is not None
        inputs = self.inputs
        return EffectsLikelihood(
            self.structured, self.family, inputs["design"], inputs["offset"], self.data.y
        )


@dataclass(frozen=True)
class Specification:
    """Formula, family and priors; see `Regression`."""

    formula: str | Mapping[str, str]
    family: Family
    priors: Mapping[str, Any]
    auxiliary: AuxiliaryColumns
    missing: Missing
    smooth: str = "bayes"

    def facts(self) -> dict[str, str]:
        """What a description of the model says about its formula, and what belongs to a row."""
        formula = self.formula
        if not isinstance(formula, str):
            formula = "; ".join(f"{name}: {text}" for name, text in formula.items())
        own = {name: c for name, c in self.family.known.items() if isinstance(c, str)}
        if status := self.family.response_columns:
            own["censoring"] = ", ".join(status)
        auxiliary = {n: getattr(self.auxiliary, n) for n in ("weights", "offset", "exposure")}
        own |= {name: column for name, column in auxiliary.items() if column is not None}
        rows = ", ".join(f"{name} in {column}" for name, column in own.items())
        return {"formula": formula} | ({"of each row": rows} if rows else {})

    def split_formula(self) -> tuple[str, dict[str, str]]:
        """The response, and the right-hand side of each parameter; by default an intercept.

        Raises:
            InputError: formulas that cannot be split, or for unknown parameters.
        """
        parameters = self.family.formula_names
        response, given = split_formula(self.formula, parameters[0])
        unknown = [name for name in given if name not in parameters]
        if unknown:
            fail("formula", "formulas for " + ", ".join(parameters), ", ".join(unknown))
        return response, {name: given.get(name, "1") for name in parameters}

    def prepare(
        self, data: Any, inputs: Mapping[str, Any] | None = None, most_effects: int | None = None
    ) -> PreparedModel:
        """Read the training rows.

        Args:
            data: a data frame of any library, or a dict of columns.
            inputs: inputs of networks without columns, by name; None without networks.
            most_effects: of a fitted model: the size of its space, above which formulas are not
                evaluated. Whether the data identify its effects is not checked again.

        Raises:
            InputError: see `Regression.fit`.
        """
        left, right = self.split_formula()
        frame = read_frame("data", data)
        if not len(frame):
            fail("data", "at least one row", "an empty data frame")
        read = Response(left).variables(frame)
        taken = {*read, *self.auxiliary.columns, *self.family.columns}
        formula = with_columns(self.formula, [c for c in map(str, frame) if c not in taken])
        if formula != self.formula:  # "y ~ ."
            return replace(self, formula=formula).prepare(data, inputs, most_effects)
        effects = formula_variables(right, frame)
        if len(read) == 1 and read[0] in effects:
            fail("formula", f"effects other than those of the response {read[0]!r}", repr(left))
        columns = [*read, *effects, *self.family.columns]
        classes = _declared_classes(frame, left) if self.family.n_thresholds else None
        frame, inputs, dropped = self._complete_rows(frame, columns, inputs)
        if classes is not None:  # declared classes are part of an order, whether rows have them
            frame = frame.assign(**{left: frame[left].cat.set_categories(classes)})
        response = Response.from_rows(left, frame, self.family)
        y = response.numbers(frame)
        absent = [label for i, label in enumerate(response.labels or ()) if not (y == i).any()]
        family = self.family.with_classes(response.labels or ())
        specification = self.with_classes(family)
        known = given_values(family, frame)
        family.check_known(y, known)
        without = ("mu",) if family.n_thresholds else ()
        counts = self._counts(frame)
        design = Design(family.right_sides(right), frame, without, most_effects, counts)
        _check_names(design, family)
        targets = self.targets(frame, y)
        family.check_targets(targets)
        y = family.level_values(y, known)
        matrix, offsets = design.rows(frame)
        offset = offsets[:, 0] + self.auxiliary.total_offset(frame, family)
        defaults = default_priors(design, family, y, offset, counts)
        priors = priors_with(design, defaults, specification.priors, names_for_priors(family))
        unused: list[str] = []
        if self.smooth == "reml":
            priors, unused = with_default_smoothing(priors, defaults, design.names)
        if most_effects is None:
            if absent:
                warn_user(
                    f"{left}: no row has the declared classes {listed(map(str, absent))}, whose "
                    "probabilities follow from the priors of thresholds; leave them out by "
                    f"data[{left!r}].cat.remove_unused_categories()"
                )
            if unused:
                warn_user(
                    f"the priors of {', '.join(unused)} are not used: smooth='reml' sets these to "
                    "the maximum of the likelihood; leave the priors out, or use smooth='bayes'"
                )
            check_identified(design, matrix, priors, defaults, specification.priors)
        structured = StructuredPredictor(design, family, priors)
        encoder = specification.encoder(design, family, frame)
        data = Data.of((encoder.inputs(frame, inputs), targets))
        model = PreparedModel(specification, frame, response, structured, encoder, data, dropped)
        return specification.completed(model, predictor_sd(family, ResponseRows(y, offset, counts)))

    # --- what a model with networks adds -----------------------------------------------------

    @property
    def other_columns(self) -> tuple[str, ...]:
        """Columns of the rows that are read beside the formula's."""
        return ()

    def with_classes(self, family: Family) -> Self:
        """The specification for a family whose classes are known."""
        del family
        return self

    def encoder(self, design: Design, family: Family, frame: pd.DataFrame) -> RowEncoder:
        """What converts rows to inputs."""
        del frame
        return RowEncoder(design, family, self.auxiliary)

    def inputs_of(
        self, inputs: Mapping[str, Any] | None, complete: Bool[np.ndarray, "n"]
    ) -> Mapping[str, Any] | None:
        """The inputs that belong to complete rows."""
        del complete
        return inputs

    def completed(self, model: PreparedModel, scale: float) -> PreparedModel:
        """The prepared model with all that is beside its effects.

        Args:
            model: the model without it.
            scale: standard deviation of the response on the scale of the predictor.
        """
        del scale
        return model

    # -------------------------------------------------------------------------------------------

    def _complete_rows(
        self, frame: pd.DataFrame, columns: list[str], inputs: Mapping[str, Any] | None
    ) -> tuple[pd.DataFrame, Mapping[str, Any] | None, int]:
        """The rows without missing values, their inputs, and how many rows were dropped."""
        of_rows = [*columns, *self.auxiliary.columns]
        frame = plain_columns(frame, of_rows, training=True)
        of_response = {name: frame[name].to_numpy() for name in self.family.response_columns}
        for name, read in self.family.needed(of_response).items():
            frame = frame.assign(**{name: frame[name].where(read | frame[name].notna(), 0.0)})
        columns = [*columns, *self.other_columns, *self.auxiliary.columns]
        complete, counts = complete_rows(frame, columns, self.missing)
        dropped = len(frame) - int(complete.sum())
        if self.auxiliary.weights is not None and pd.api.types.is_numeric_dtype(
            weights := frame[self.auxiliary.weights]
        ):
            counted = complete & (weights != 0).to_numpy(dtype=bool, na_value=True)
            if complete.any() and not counted.any():
                fail("weights", f"a number above 0 in column {weights.name!r}", "zeros only")
            complete = counted
        if dropped:
            shown = ", ".join(f"{n} in {name}" for name, n in counts.items())
            warn_user(
                f"{dropped} of {len(frame)} rows have missing values ({shown}) and are dropped"
            )
        inputs = self.inputs_of(inputs, complete)
        if not complete.all():  # missing values, or weights of 0
            frame = with_used_categories(frame[complete], of_rows)
        return frame.reset_index(drop=True), inputs, dropped

    def _counts(self, frame: pd.DataFrame) -> RowNumbers | None:
        """How many times each training row counts; None if each counts once."""
        if self.auxiliary.weights is None:
            return None
        found = column_numbers(self.auxiliary.weights, frame)
        wrong = found[~((found > 0) & np.isfinite(found))]
        if len(wrong):
            fail("weights", "finite numbers of at least 0", f"{wrong[0]:g}")
        return found

    def targets(self, frame: pd.DataFrame, y: RowNumbers) -> Any:
        """Targets of rows from their responses: with their status if censored, and weights."""
        columns = {name: frame[name].to_numpy() for name in self.family.response_columns}
        values = torch.from_numpy(self.family.responses(y, columns))
        if self.auxiliary.weights is None:
            return values
        return values, torch.from_numpy(column_numbers(self.auxiliary.weights, frame))


def _as_dtypes_of(first: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the dtypes of others, in columns whose values these hold."""
    for name, dtype in first.dtypes.items():
        same = rows[name].astype(dtype)
        if (same == rows[name]).all():
            rows = rows.assign(**{str(name): same})
    return rows


def _declared_classes(frame: pd.DataFrame, response: str) -> pd.Index | None:
    """The categories of a response, also those that no row has."""
    if response not in frame.columns or not isinstance(frame[response].dtype, pd.CategoricalDtype):
        return None
    return frame[response].cat.categories


def _check_names(design: Design, family: Family) -> None:
    """Raise for effects that have the name of a parameter, whose draws and prior it would take."""
    taken = set(names_for_priors(family)[1:])
    if family.n_thresholds:
        taken |= {"threshold", "gap"}
    terms = (term.name for term in design.terms if term.kind != "intercept")
    for name in (*design.names, *terms):
        if name in taken:
            expected = f"columns that are not called like a parameter of family {family.label!r}"
            fail("formula", expected, repr(name), "Rename the column")

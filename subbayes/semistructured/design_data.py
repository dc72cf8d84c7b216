"""Convert a data frame, and the tensors of networks, to the inputs and targets of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from subbayes.data.arrays import to_tensor
from subbayes.data.encoder import TabularEncoder
from subbayes.data.frames import quote
from subbayes.data.levels import check_kinds, check_read_differently, levels_of
from subbayes.likelihoods.families import Family
from subbayes.networks.outputs import HALF
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.regression.design.design import Design, NewLevels
from subbayes.regression.formula.checks import check_columns, check_complete, plain_columns
from subbayes.regression.formula.grammar import check_formula, formula_errors
from subbayes.regression.formula.numbers import model_matrix
from subbayes.semistructured.network_places import check_parameter
from subbayes.semistructured.predictors import Deep
from subbayes.utils.checks import fail, fail_type, number_text

_MOST_CLASSES = 50  # of numbers


@dataclass(frozen=True)
class AuxiliaryColumns:
    """Columns of the data frame that weight observations or shift the predictor.

    Args:
        weights: column of observation weights.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
    """

    weights: str | None = None
    offset: str | None = None
    exposure: str | None = None

    def __post_init__(self) -> None:
        for argument, value in vars(self).items():
            if value is not None and not isinstance(value, str):
                fail_type(
                    argument,
                    "the name of a column of the data frame",
                    value,
                    f"Add the column: data.assign({argument}=...), {argument}={argument!r}",
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are set."""
        return tuple(column for column in vars(self).values() if column is not None)

    def total_offset(self, frame: pd.DataFrame, family: Family) -> Float[np.ndarray, "n"]:
        """Offset plus log exposure, added to the location's predictor."""
        total = np.zeros(len(frame))
        if self.offset is not None:
            total += column_numbers(self.offset, frame)
        if self.exposure is not None:
            if family.links[0] != "log":
                fail("exposure", "a family with a log link", repr(family), "Pass offset= instead")
            exposure = column_numbers(self.exposure, frame)
            if not (exposure > 0).all():
                fail(self.exposure, "exposures above 0", f"{exposure.min():g}")
            total += np.log(exposure)
        return total


def column_numbers(name: str, frame: pd.DataFrame) -> Float[np.ndarray, "n"]:
    """A column as numbers in float64.

    Raises:
        InputError: text, dates, or other values that are not numbers.

    Example:
        >>> column_numbers("age", pd.DataFrame({"age": [20, 30]}))
        array([20., 30.])
    """
    frame = plain_columns(frame, [name])
    try:
        return frame[name].to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError):
        fail(name, "numbers", f"values such as {frame[name].iloc[0]!r}")


def given_values(family: Family, frame: pd.DataFrame) -> dict[str, Float[np.ndarray, "n"]]:
    """Values of the parameters that are given, such as the number of trials, by parameter."""
    return {
        name: column_numbers(value, frame)
        if isinstance(value, str)
        else np.full(len(frame), float(value))
        for name, value in family.known.items()
    }


@dataclass(frozen=True)
class Response:
    """The response: a column or an expression, and its classes.

    Attributes:
        name: the left-hand side of the formula.
        labels: classes in order, for families of classes.
    """

    name: str
    labels: tuple[Any, ...] | None = None

    @classmethod
    def from_rows(cls, name: str, frame: pd.DataFrame, family: Family) -> Response:
        """The response of training rows.

        Raises:
            InputError: a number of classes that the family does not accept, or unordered text for
                a family of ordered classes.
        """
        if family.kind != "classification":
            return cls(name)
        values = frame[name] if name in frame.columns else pd.Series(_evaluate(name, frame))
        check_read_differently(name, values)
        if family.is_ordered:
            _check_ordered(name, values)
        if isinstance(values.dtype, pd.CategoricalDtype):
            labels = values.cat.categories.tolist()
        else:
            labels = levels_of(values)
            _check_classes(name, labels, len(values), family)
        if family.is_binary and len(labels) != 2:
            fail(
                name,
                "2 classes for family 'bernoulli'",
                f"{len(labels)}: " + ", ".join(map(str, labels[:5])),
                "Use family='categorical', or 'ordinal' for ordered classes"
                if len(labels) > 2
                else "",
            )
        if len(labels) < 2:
            fail(name, "at least 2 classes", ", ".join(map(str, labels)))
        return cls(name, tuple(labels))

    def numbers(self, frame: pd.DataFrame) -> np.ndarray:
        """The response as numbers, shape (n,).

        Raises:
            InputError: unknown columns, values that are not numbers, or classes unseen in training.
        """
        frame = plain_columns(frame, self.variables(frame))
        present = self.name in frame.columns
        if self.labels is None:
            return column_numbers(self.name, frame) if present else _evaluate(self.name, frame)
        values = np.asarray(frame[self.name] if present else _evaluate(self.name, frame))
        code = {label: i for i, label in enumerate(self.labels)}
        unseen = [v for v in pd.unique(values) if v not in code]
        if unseen:
            check_kinds(self.name, self.labels, pd.Series(values))
            fail(
                self.name,
                "classes seen in training: " + ", ".join(map(str, self.labels)),
                ", ".join(map(str, unseen)),
            )
        return np.array([code[v] for v in values], dtype=np.float64)

    def facts(self, family: Family) -> dict[str, str]:
        """What a description of the model says about its classes; nothing without classes.

        Example:
            >>> from subbayes.likelihoods.families import BernoulliFamily
            >>> Response("sick", ("no", "yes")).facts(BernoulliFamily())
            {'response': "sick: the probability of 'yes', beside 'no'"}
        """
        if self.labels is None:
            return {}
        labels = [quote([v]) if isinstance(v, str) else str(v) for v in self.labels[:10]]
        rest = [f"{len(self.labels) - 10} more"] if len(self.labels) > 10 else []
        return {"response": f"{self.name}: {family.classes_text(labels, rest)}"}

    def variables(self, frame: pd.DataFrame) -> tuple[str, ...]:
        """Columns of the data frame that the response is computed from."""
        if self.name in frame.columns:
            return (self.name,)
        with formula_errors("response", self.name):
            return check_formula("response", self.name, frame, response=True)


def _check_classes(name: str, labels: list[Any], rows: int, family: Family) -> None:
    """Raise for numbers that are measurements rather than classes, each of which is a parameter.

    They are measurements if there are more than 50 of them, or if they are not whole numbers and
    more than half of the rows differ. Two classes are whole numbers.
    """
    if not all(isinstance(v, (int, float)) for v in labels):
        return
    fractions = [value for value in labels if not float(value).is_integer()]
    whole = not fractions
    if family.is_binary:
        if fractions:
            expected = "two classes for family 'bernoulli'"
            got = f"numbers such as {number_text(fractions[0])}"
            remedy = "Write counts: 'successes | trials(n)'; or use family='beta' for proportions"
            fail(name, expected, got, remedy)
        return
    if len(labels) <= _MOST_CLASSES and (whole or 2 * len(labels) <= rows):
        return
    expected = f"classes for family {family.label!r}, at most {_MOST_CLASSES} numbers"
    got = f"{len(labels)} different numbers in {rows} rows, such as {labels[0]:g}"
    remedy = (
        "Use a family of numbers, such as 'normal', group them by pd.cut, or pass pd.Categorical"
    )
    fail(name, expected, got, f"{remedy} if each number is a class")


def _check_ordered(name: str, values: pd.Series) -> None:
    """Raise for text as ordered classes: alphabetical order is rarely intended."""
    category = isinstance(values.dtype, pd.CategoricalDtype)
    if category and values.cat.ordered:
        return
    classes = list(values.cat.categories) if category else sorted(values.unique(), key=str)
    if pd.api.types.is_numeric_dtype(pd.Series(classes).infer_objects()):
        return
    fail(
        name,
        "ordered classes for family 'ordinal'",
        "text without an order; it would be " + " < ".join(map(str, classes)),
        f"Pass pd.Categorical(data[{name!r}], categories="
        "[lowest, ..., highest], ordered=True), or numbers",
    )


def _evaluate(expression: str, frame: pd.DataFrame) -> np.ndarray:
    """The value of an expression such as `np.log(y)`."""
    with formula_errors("response", expression), np.errstate(all="ignore"):
        columns = check_formula("response", expression, frame, response=True)
        matrix = model_matrix(f"{expression} - 1", frame[list(columns)], {"np": np})
    values = np.array(matrix, dtype=np.float64)
    if values.shape[1] != 1:
        fail("formula", "one response", f"{expression!r}, {values.shape[1]} columns")
    undefined = np.flatnonzero(~np.isfinite(values[:, 0]))
    if len(undefined):
        got = f"{len(undefined)} rows without one, the first at position {undefined[0]}"
        fail(expression, "finite numbers", got, "Drop these rows, or transform it another way")
    return values[:, 0]


class RowEncoder:
    """Convert rows of a data frame to the inputs of `Predictors`.

    Args:
        design: the design matrix.
        family: distribution of the response.
        auxiliary: weights, offset and exposure.
        deep: the networks.
        frame: training rows, which determine how the columns of networks are scaled.
        dtype: of the inputs of networks.
    """

    def __init__(
        self,
        design: Design,
        family: Family,
        auxiliary: AuxiliaryColumns,
        deep: Mapping[str, Deep],
        frame: pd.DataFrame,
        dtype: torch.dtype,
    ) -> None:
        self.design, self.family, self.auxiliary = design, family, auxiliary
        self.deep, self.dtype = dict(deep), dtype
        self.column_encoders: dict[str, TabularEncoder] = {}
        for name, part in self.deep.items():
            if part.columns is not None:
                check_columns(part.columns, frame)
                self.column_encoders[name] = TabularEncoder().fit(frame[list(part.columns)])

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data frame that predictions need."""
        return tuple(dict.fromkeys([*self.design.variables, *self._other_columns]))

    @property
    def columns_of_groups(self) -> tuple[str, ...]:
        """Those that the effects of groups alone read."""
        others = self._other_columns
        return tuple(name for name in self.design.variables_of_groups if name not in others)

    @property
    def _other_columns(self) -> list[str]:
        """Columns of networks, offsets and known parameters."""
        deep = [c for part in self.deep.values() for c in part.columns or ()]
        offsets = [c for c in (self.auxiliary.offset, self.auxiliary.exposure) if c is not None]
        return [*deep, *offsets, *(v for v in self.family.known.values() if isinstance(v, str))]

    def inputs(
        self,
        frame: pd.DataFrame,
        tensors: Mapping[str, Any] | None = None,
        new_levels: NewLevels = "error",
    ) -> dict[str, Tensor]:
        """The inputs of rows, with `tensors` by name for the networks without columns.

        Raises:
            InputError: a network without its input, or what `network_input` raises.
        """
        offsets = [c for c in (self.auxiliary.offset, self.auxiliary.exposure) if c is not None]
        check_columns(self.columns, frame)
        given = [value for value in self.family.known.values() if isinstance(value, str)]
        frame = plain_columns(frame, [*self.design.variables, *offsets, *given])
        if not len(frame):
            fail("data", "at least one row", "none")
        columns, shifts = self.design.rows(frame, new_levels)
        shifts[:, 0] += self.auxiliary.total_offset(frame, self.family)
        known = given_values(self.family, frame)
        self.family.check_given(known)
        for name, values in known.items():
            shifts[:, self.design.parameters.index(name)] += values
        found = {
            "design": torch.from_numpy(columns),  # in float64, whatever the networks are in
            "offset": torch.from_numpy(shifts),
        }
        tensors = dict(tensors or {})
        for name, part in self.deep.items():
            if part.columns is not None:
                found[f"deep {name}"] = self.encode_columns(name, frame)
                continue
            if name not in tensors:
                expected = f"a tensor for the network {name!r}"
                remedy = f"Pass inputs={{{name!r}: ...}}"
                fail("inputs", expected, ", ".join(tensors) or "none", remedy)
            tensor = network_input(name, tensors[name], len(frame))
            found[f"deep {name}"] = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        check_network_names("inputs", tensors, self.deep)
        return found

    def encode_columns(self, name: str, frame: pd.DataFrame) -> Float[Tensor, "n q"]:
        """The columns that a network reads: standardised numbers and indicators of levels.

        Raises:
            InputError: missing values, or levels unseen in training, by column.
        """
        encoder = self.column_encoders[name]
        check_complete(encoder.columns_, frame)
        values = encoder.transform(frame[encoder.columns_])
        return torch.from_numpy(values).to(self.dtype)


def network_input(name: str, value: Any, n: int) -> Tensor:
    """The input of a network without columns, as a tensor with one entry per row.

    Args:
        name: name of the network.
        value: a tensor, an array, or a map-style Dataset whose item i belongs to row i. Of an
            item that is a tuple or a list only the first element is read: labels are ignored.
        n: number of rows.

    Raises:
        InputError: a different number of entries, a Dataset without a length, or items of
            different shapes or dtypes.
    """
    argument, is_dataset = f"inputs[{name!r}]", isinstance(value, Dataset)
    if isinstance(value, IterableDataset) or (is_dataset and not hasattr(value, "__len__")):
        expected = "a map-style Dataset, with a length"
        fail(argument, expected, type(value).__name__, "Read it into a tensor")
    entries = value if is_dataset else to_tensor(argument, value)
    if len(entries) != n:
        fail(argument, f"{n} rows, as the data frame has", len(entries))
    if not is_dataset:
        return entries
    found = torch.empty(0)
    for i in range(n):
        item = entries[i]
        part = to_tensor(f"{argument}[{i}]", item[0] if isinstance(item, (tuple, list)) else item)
        if i == 0:  # allocated once, as images may fill much of the memory
            found = torch.empty(n, *part.shape, dtype=part.dtype)
        if _describe(part) != _describe(found[0]):
            fail(
                f"{argument}[{i}]",
                f"{_describe(found[0])} as in the first entry",
                _describe(part),
                "Return items of one shape and dtype",
            )
        found[i] = part
    return found


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}"


def check_network_names(argument: str, names: Iterable[str], networks: Iterable[str]) -> None:
    """Raise `InputError` for names that are not those of networks."""
    known = list(networks)
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = "names of networks: " + (", ".join(known) or "there are none")
        fail(argument, expected, ", ".join(unknown))


def networks_from(deep: Mapping[str, Any] | None, family: Family) -> dict[str, Deep]:
    """Convert modules, pairs (module, columns) or `Deep` to networks by name.

    Raises:
        InputError: an unknown parameter; of classes without an order `Specification.prepare`
            checks it, when these are known. InputTypeError: any other value.
    """
    found: dict[str, Deep] = {}
    if deep is not None and not isinstance(deep, Mapping):
        fail_type("deep", "a dict of networks by name, such as {'net': (module, ['x'])}", deep)
    for name, part in (deep or {}).items():
        if isinstance(part, nn.Module):
            part = Deep(part)
        elif isinstance(part, tuple) and len(part) == 2:
            names = (part[1],) if isinstance(part[1], str) else tuple(part[1])
            part = Deep(part[0], columns=names)
        if not isinstance(part, Deep) or not isinstance(part.module, nn.Module):
            fail_type(f"deep[{name!r}]", "a module, a pair (module, columns) or a Deep", part)
        if (module := uncompiled(part.module)) is not part.module:
            part = replace(part, module=module)
        if half := next((p.dtype for p in part.module.parameters() if p.dtype in HALF), None):
            remedy = "Effects need more digits: pass module.float()"
            fail(f"deep[{name!r}]", "a module of float32 or float64", half, remedy)
        if not family.has_predictor_per_class:  # whose classes the rows determine
            check_parameter(str(name), part, family)
        found[str(name)] = part
    return found

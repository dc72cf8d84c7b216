"""What a user asks for, and what becomes of it on his rows: a design, priors, tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.data import Data
from subbayes.data.encoder import TabularEncoder
from subbayes.networks.network import Network
from subbayes.semistructured.design_data import Extras, Response, Rows, complete
from subbayes.semistructured.effects import Effects, chosen_priors, default_priors
from subbayes.semistructured.families import Family, OrdinalFamily
from subbayes.semistructured.formula import Design, Missing, split_formula
from subbayes.semistructured.module import Deep, DeepPart, Predictors
from subbayes.utils.checks import InputError, fail

__all__ = ["Fittable", "Specification"]


@dataclass(frozen=True)
class Fittable:
    """A specification on rows: all that training and sampling need.

    Attributes:
        frame: the rows without missing values.
        response: the left-hand side.
        family: of the response, its classes counted.
        design: the columns of the formulas.
        structure: the effects, with their priors.
        rows: turns rows into inputs.
        data: inputs and targets.
        deep: the networks, or None.
        dtype: of the networks, float64 without any.
        dropped: number of rows left out.
    """

    frame: pd.DataFrame
    response: Response
    family: Family
    design: Design
    structure: Effects
    rows: Rows
    data: Data
    deep: DeepPart | None
    dtype: torch.dtype
    dropped: int

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the rows."""
        assert isinstance(self.data.inputs, dict)
        return self.data.inputs

    @property
    def n_weights(self) -> int:
        """Weights of the networks that are learned."""
        return (
            0
            if self.deep is None
            else sum(p.numel() for p in self.deep.parameters() if p.requires_grad)
        )


@dataclass(frozen=True)
class Specification:
    """Formula, family, networks and priors, as for `SemiStructuredRegression`."""

    formula: str | Mapping[str, str]
    family: Family
    deep: dict[str, Deep]
    priors: dict[str, Any]
    extras: Extras
    missing: Missing

    @property
    def response(self) -> str:
        """The left-hand side of the formula."""
        return split_formula(self.formula, self.family.parameters[0])[0]

    @property
    def right(self) -> dict[str, str]:
        """Effects of every parameter; those without a formula have an intercept."""
        given = split_formula(self.formula, self.family.parameters[0])[1]
        parameters = ("mu",) if self._ordinal else self.family.parameters
        unknown = [name for name in given if name not in parameters]
        if unknown:
            fail("formula", "formulas for " + ", ".join(parameters), ", ".join(unknown))
        return {name: given.get(name, "1") for name in parameters}

    @property
    def _ordinal(self) -> bool:
        return isinstance(self.family, OrdinalFamily)

    @property
    def _without_intercept(self) -> tuple[str, ...]:
        return ("mu",) if self._ordinal else ()

    def on(self, data: Any, inputs: Mapping[str, Any] | None) -> Fittable:
        """Read the rows.

        Args:
            data: a data frame, or what makes one.
            inputs: what networks without columns read, by name.

        Raises:
            InputError: see `SemiStructuredRegression.fit`.
        """
        frame, tensors, dropped = self._complete(data, inputs)
        response = Response.of(self.response, frame, self.family)
        y = response.numbers(frame)
        family = self.family
        if isinstance(family, OrdinalFamily):
            assert response.labels is not None
            family = OrdinalFamily(n_classes=len(response.labels))
        design = Design(self.right, frame, self._without_intercept)
        targets = self._targets(frame, y)
        family.check_targets(targets)
        priors = chosen_priors(design, default_priors(design, family, y), self.priors)
        self._check_separable(design, frame)
        structure = Effects(design, family, priors)
        dtypes = [p.dtype for part in self.deep.values() for p in part.module.parameters()]
        dtype = dtypes[0] if dtypes else torch.float64
        rows = Rows(design, family, self.extras, self.deep, frame, dtype)
        found = rows.inputs(frame, tensors)
        deep = self._networks(structure, found, y, dtype, rows)
        return Fittable(
            frame,
            response,
            family,
            design,
            structure,
            rows,
            Data.of((found, targets)),
            deep,
            dtype,
            dropped,
        )

    def _complete(
        self, data: Any, inputs: Mapping[str, Any] | None
    ) -> tuple[pd.DataFrame, dict[str, Any], int]:
        frame = data if isinstance(data, pd.DataFrame) else pd.DataFrame(data)
        whole = frame.dropna()
        known = Design(
            self.right, whole if len(whole) else frame, self._without_intercept
        ).variables
        deep = [c for part in self.deep.values() for c in part.columns or ()]
        columns = tuple(
            dict.fromkeys(
                [*Response(self.response).variables(frame), *known, *deep, *self.extras.columns]
            )
        )
        kept, tensors, lacking = complete(frame, inputs, columns, self.missing)
        dropped = len(frame) - len(kept)
        if dropped:
            shown = ", ".join(f"{n} in {name}" for name, n in lacking.items())
            warnings.warn(
                f"{dropped} of {len(frame)} rows have missing values ({shown}) and are left out",
                stacklevel=4,
            )
        return kept, tensors, dropped

    def _targets(self, frame: pd.DataFrame, y: Float[np.ndarray, "n"]) -> Any:
        values = torch.from_numpy(y)
        if self.extras.weights is None:
            return values
        weight = frame[self.extras.weights].to_numpy(dtype=np.float64, copy=True)
        return values, torch.from_numpy(weight)

    def _check_separable(self, design: Design, frame: pd.DataFrame) -> None:
        """Effects that the data cannot tell apart need priors of the user's own."""
        if self.priors:
            return
        free = [i for t in design.terms for i in t.columns if i not in t.penalised]
        if len(free) >= len(frame):
            fail(
                "priors",
                "priors of your own for as many effects as rows",
                f"{len(free)} effects for {len(frame)} rows",
                "Pass priors={term: scale}",
            )
        same = design.collinear(design.matrix(frame)[0])
        if same:
            fail(
                "formula",
                "columns that are not sums of others",
                "; ".join(same),
                "Leave one out, or pass priors={term: scale}",
            )

    def _networks(
        self,
        structure: Effects,
        found: dict[str, Tensor],
        y: Float[np.ndarray, "n"],
        dtype: torch.dtype,
        rows: Rows,
    ) -> DeepPart | None:
        if not self.deep:
            return None
        names = structure.design.parameters
        places = {name: names.index(part.parameter or names[0]) for name, part in self.deep.items()}
        scales = torch.ones(len(names), dtype=torch.float64)
        if self.family.links[0] == "identity" and not self._ordinal:
            scales[0] = float(np.std(y))
        modules = {name: part.module for name, part in self.deep.items()}
        deep = DeepPart(modules, places, scales, len(names))
        whole = Predictors(structure, deep, dtype)
        few = {name: tensor[:2] for name, tensor in found.items()}
        try:
            Network(whole).check(few)
        except InputError as error:
            _, _, reason = str(error).partition(", got ")[2].partition(": ")
            if not str(error).startswith("inputs: expected what the module takes"):
                raise
            fail(
                "deep",
                "modules that take "
                + "; ".join(
                    f"{name!r} {_described(few[f'deep {name}'], rows.encoders.get(name))}"
                    for name in self.deep
                ),
                reason.partition(". Convert")[0],
                "Give the first layer of each as many inputs",
            )
        return deep


def _described(values: Tensor, encoder: TabularEncoder | None) -> str:
    """What a network reads, in words."""
    if encoder is None:
        return f"{values.dtype} of shape (N, " + ", ".join(map(str, values.shape[1:])) + ")"
    names = list(encoder.get_feature_names_out())
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"{len(names)} number{'s' * (len(names) != 1)} a row ({shown})"

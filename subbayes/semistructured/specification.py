"""The specification of a model with networks, and the model prepared for its training rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from subbayes.data.encoder import TabularEncoder
from subbayes.data.frames import read_frame
from subbayes.likelihoods.families import Family
from subbayes.networks.network import Network
from subbayes.networks.outputs import CallError
from subbayes.regression.design.design import Design
from subbayes.regression.specification import PreparedModel, Specification
from subbayes.semistructured.network_inputs import NetworkRowEncoder, network_columns, network_input
from subbayes.semistructured.network_places import check_has_columns, with_classes
from subbayes.semistructured.network_terms import reading_inputs, without_networks
from subbayes.semistructured.predictors import (
    DeepPredictor,
    NetworkTerm,
    Predictors,
    with_own_statistics,
)
from subbayes.utils.checks import error_text, fail


@dataclass(frozen=True)
class JointModel(PreparedModel):
    """A specification with its training rows and networks.

    Attributes:
        deep: the networks.
    """

    specification: JointSpecification
    encoder: NetworkRowEncoder
    deep: DeepPredictor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the networks."""
        return self.encoder.dtype


@dataclass(frozen=True)
class JointSpecification(Specification):
    """Formula, family, networks and priors; see `SemiStructuredRegression`."""

    deep: dict[str, NetworkTerm] = field(default_factory=dict)
    orthogonal: bool | str = "auto"
    effects: str = "population"

    def networks_of(self, parameter: str, location: str) -> list[str]:
        """Names of the networks that add to the predictor of a parameter.

        Args:
            parameter: name of the parameter.
            location: the parameter of networks that name none.
        """
        return [name for name, n in self.deep.items() if (n.parameter or location) == parameter]

    @property
    @override
    def other_columns(self) -> tuple[str, ...]:
        return tuple(network_columns(self.deep))

    @override
    def split_formula(self) -> tuple[str, dict[str, str]]:
        plain = without_networks(self.formula, self.deep, self.family)[0]
        return super(JointSpecification, replace(self, formula=plain)).split_formula()

    @override
    def prepare(
        self, data: Any, inputs: Mapping[str, Any] | None = None, most_effects: int | None = None
    ) -> PreparedModel:
        frame = read_frame("data", data)
        own = replace(self, deep=reading_inputs(self.deep, inputs, frame.columns))
        return super(JointSpecification, own).prepare(frame, inputs, most_effects)

    @override
    def with_classes(self, family: Family) -> Self:
        return replace(self, deep=with_own_statistics(with_classes(self.deep, family)))

    @override
    def encoder(self, design: Design, family: Family, frame: pd.DataFrame) -> NetworkRowEncoder:
        return NetworkRowEncoder(design, family, self.auxiliary, self.deep, frame)

    @override
    def inputs_of(
        self, inputs: Mapping[str, Any] | None, complete: Bool[np.ndarray, "n"]
    ) -> Mapping[str, Any] | None:
        if inputs is None or complete.all():
            return inputs
        rows = torch.from_numpy(complete)
        return {name: network_input(name, x, len(complete))[rows] for name, x in inputs.items()}

    @override
    def completed(self, model: PreparedModel, scale: float) -> JointModel:
        assert isinstance(model.encoder, NetworkRowEncoder)
        if self.orthogonal is True:
            check_has_columns(self.deep, model.design, model.family)
        names = model.design.parameters
        places = {name: names.index(part.parameter or names[0]) for name, part in self.deep.items()}
        scales = torch.ones(len(names), dtype=torch.float64)
        scales[0] = scale
        modules = {name: part.module for name, part in self.deep.items()}
        deep = DeepPredictor(modules, places, scales, len(names))
        few = {name: tensor[:2] for name, tensor in model.inputs.items()}
        try:
            Network(Predictors(model.structured, deep)).check(few)
        except CallError as error:
            encoders = model.encoder.column_encoders
            shown = [
                f"{name!r} {_describe(few[f'deep {name}'], encoders.get(name))}"
                for name in self.deep
            ]
            fail(
                "networks",
                "modules that take " + "; ".join(shown),
                error_text(error.__cause__ or error),
                "Give the first layer of each as many inputs",
                error,
            )
        parts: Any = {part.name: getattr(model, part.name) for part in fields(model)}
        return JointModel(**parts, deep=deep)


def _describe(values: Tensor, encoder: TabularEncoder | None) -> str:
    """Describe the inputs of a network in words."""
    if encoder is None:
        return f"{values.dtype} of shape (N, " + ", ".join(map(str, values.shape[1:])) + ")"
    names = list(encoder.get_feature_names_out())
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"{len(names)} number{'s' * (len(names) != 1)} a row ({shown})"

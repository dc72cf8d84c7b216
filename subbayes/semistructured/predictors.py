r"""The predictors of a semi-structured model as one module of all unknowns.

$$ \eta = X\beta + \mathrm{offset} + \sum_m s\, \mathrm{DNN}_m(u_m) $$

(Dold et al. 2024, eq. 1.) The parameters of the module are the coordinates of the effects, first,
and the weights of the networks. Its input is a dict of the design, the offsets and the inputs of
each network. All is in float64 but the networks, whose outputs are converted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.networks.layer_kinds import batch_norms
from subbayes.networks.module_copy import shared_copy
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.effects_posterior import EffectsModule
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs

_PROBE_ROWS = 2  # smaller batches than this only determine shapes of outputs


@dataclass(frozen=True)
class NetworkTerm:
    """A network as a term of a formula, such as `deep(u, v)`.

    Attributes:
        module: from its inputs to one number per row, shape (N, 1) or (N,).
        reads: columns of the data frame that it reads, where numbers are standardised and factors
            become indicators; or the name of one entry of `inputs`.
        parameter: distribution parameter whose formula it is in; None for the location.
        is_tensor: whether it reads an entry of `inputs`.
    """

    module: nn.Module
    reads: tuple[str, ...]
    parameter: str | None = None
    is_tensor: bool = False

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of the data frame that it reads; None if it reads a tensor."""
        return None if self.is_tensor else self.reads


def with_own_statistics(deep: Mapping[str, NetworkTerm]) -> dict[str, NetworkTerm]:
    """Networks with copies of their modules if these have BatchNorm statistics, which fits set.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> with_own_statistics({"a": NetworkTerm(norm, ("u",))})["a"].module is norm
        False
    """
    modules = nn.ModuleList(part.module for part in deep.values())
    copies: Any = shared_copy(modules) if batch_norms(modules) else modules
    return {
        name: replace(part, module=module)
        for (name, part), module in zip(deep.items(), copies, strict=True)
    }


class DeepPredictor(nn.Module):
    """The networks' contributions to the predictors.

    Args:
        modules: the networks by name.
        places: position of the predictor that each network adds to.
        scales: factor of the outputs by predictor: the standard deviation of the response for an
            identity link, so that initial networks have the right scale.
        width: number of predictors K.
    """

    _scales: Tensor

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        places: Mapping[str, int],
        scales: Float[Tensor, "K"],
        width: int,
    ) -> None:
        super().__init__()
        # positions: names may have dots, or be those of attributes of a module
        self._keys = {name: f"network{i}" for i, name in enumerate(modules)}
        self.networks = nn.ModuleDict({self._keys[name]: m for name, m in modules.items()})
        self.places, self.width = dict(places), width
        self.register_buffer("_scales", scales.double(), persistent=False)

    @property
    def n_weights(self) -> int:
        """Number of weights to learn."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def forward(self, **inputs: Tensor) -> Float[Tensor, "N K"]:
        """Contributions to the predictors, shape (N, K)."""
        found: dict[int, Tensor] = {}
        for name, place in self.places.items():
            value = self.output(name, inputs)
            found[place] = found[place] + value if place in found else value
        zero = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(place, zero) for place in range(self.width)]).mT

    def output(self, name: str, inputs: Mapping[str, Tensor]) -> Float[Tensor, "N"]:
        """What a single network adds to its predictor."""
        rows = inputs[f"deep {name}"]
        outputs = self.networks[self._keys[name]](rows)
        if outputs.shape == (len(rows), 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape != (len(rows),):
            fail(
                f"networks[{name!r}]",
                "a module with one output a row, shape (N, 1)",
                f"outputs of shape {tuple(outputs.shape)} for {len(rows)} rows",
                "Give its last layer one output, and other parameters networks of their own",
            )
        return outputs * self._scales[self.places[name]].to(outputs)


class Predictors(EffectsModule):
    r"""All predictors of a model, as a module of the coordinates of effects and the networks.

    Args:
        structured: the structured predictor.
        deep: the networks.
        orthogonal: by names of networks of one predictor, B and D of shape (N, r) for the columns
            to which they are made orthogonal over the rows: $f - B D^\top f$; for batches of
            exactly these rows. Other networks are left as they are.
    """

    def __init__(
        self,
        structured: StructuredPredictor,
        deep: DeepPredictor,
        orthogonal: Mapping[tuple[str, ...], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(structured)
        self.deep = deep
        bases = orthogonal or {}
        self._groups = list(bases)
        for i, (basis, dual) in enumerate(bases.values()):
            self.register_buffer(f"_basis{i}", basis.double(), persistent=False)
            self.register_buffer(f"_dual{i}", dual.double(), persistent=False)
        alone = set(deep.places).difference(*bases)
        self._groups += [(name,) for name in deep.places if name in alone]

    @override
    def forward(self, **inputs: Tensor) -> Outputs:
        """Predictors, shape (N, C)."""
        eta = super().forward(**inputs)
        columns, places = list(eta.unbind(-1)), self.deep.places
        for i, names in enumerate(self._groups):
            values = sum_of(self.deep.output(name, inputs).to(eta.dtype) for name in names)
            columns[places[names[0]]] = columns[places[names[0]]] + self._orthogonalised(i, values)
        return torch.stack(columns).mT

    def _orthogonalised(self, group: int, values: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        basis: Tensor | None = getattr(self, f"_basis{group}", None)
        if basis is None or len(values) <= _PROBE_ROWS:
            return values
        if len(basis) != len(values):
            fail(
                "batch_size",
                f"all {len(basis)} rows at once: the networks are made "
                "orthogonal to the effects over them",
                f"{len(values)} rows",
                "Pass orthogonal=False, or a larger memory_limit",
            )
        return values - (values @ getattr(self, f"_dual{group}")) @ basis.T


def sum_of(values: Iterable[Float[Tensor, "N"]]) -> Float[Tensor, "N"]:
    """The sum of at least one tensor, without the zero that `sum` begins with."""
    return functools.reduce(torch.add, values)


def pad_thresholds(deep: Tensor, eta: Tensor) -> Tensor:
    """Append zeros for the thresholds of an ordinal response, to which networks do not add."""
    missing = eta.shape[-1] - deep.shape[-1]
    return nn.functional.pad(deep, (0, missing)) if missing else deep

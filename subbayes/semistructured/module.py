r"""The predictors of a semi-structured model as one module of all that is unknown.

$$ \eta = X\beta + \mathrm{offset} + \sum_m s\, \mathrm{DNN}_m(u_m) $$

(Dold et al. 2024, eq. 1.) The module's weights are the coordinates of the effects, first, and the
weights of the networks; its inputs a dict with the design, the offsets and what each network reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.semistructured.effects import Effects
from subbayes.utils.checks import fail

__all__ = ["Deep", "DeepPart", "Predictors"]

_LOOK = 2  # rows of a batch that is only looked at for its shapes


@dataclass(frozen=True)
class Deep:
    """A network of a semi-structured model.

    Args:
        module: from its inputs to one number a row, shape (N, 1) or (N,).
        columns: columns of the data frame it reads: numbers are standardised, factors turned
            into indicators. None: it reads the tensor or Dataset given by its name.
        parameter: whose predictor it adds to; by default the location's.

    Example:
        >>> Deep(nn.Linear(2, 1), columns=["age", "bmi"]).parameter is None
        True
    """

    module: nn.Module
    columns: tuple[str, ...] | list[str] | None = None
    parameter: str | None = None


class DeepPart(nn.Module):
    """What the networks add to the predictors.

    Args:
        modules: the networks by name.
        parameter: the place of the predictor each adds to.
        scales: what the outputs are multiplied by, by place: the spread of the response for an
            identity link, so that networks start where they are good.
        width: number of predictors K.
    """

    _onto: Tensor

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameter: Mapping[str, int],
        scales: Float[Tensor, "K"],
        width: int,
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({_key(name): m for name, m in modules.items()})
        self.named = {name: _key(name) for name in modules}
        onto = torch.zeros(len(modules), width, dtype=torch.float64)
        for row, name in zip(onto, modules, strict=True):
            row[parameter[name]] = scales[parameter[name]]
        self.register_buffer("_onto", onto, persistent=False)

    def forward(self, **inputs: Tensor) -> Float[Tensor, "N K"]:
        """Contributions to the predictors, shape (N, K)."""
        values = torch.cat([self._output(name, inputs) for name in self.named], -1)
        return values @ self._onto.to(values)

    def alone(self, name: str, inputs: Mapping[str, Tensor]) -> Float[Tensor, "N K"]:
        """Contributions of one of the networks, which need its inputs alone.

        Args:
            name: of the network.
            inputs: by name, as for `forward`.
        """
        value = self._output(name, inputs)
        return value * self._onto[list(self.named).index(name)].to(value)

    def _output(self, name: str, inputs: Mapping[str, Tensor]) -> Float[Tensor, "N 1"]:
        given = inputs[f"deep {name}"]
        found = self.networks[self.named[name]](given)
        if found.shape == given.shape[:1]:
            found = found.unsqueeze(-1)
        if found.shape != (len(given), 1):
            fail(
                f"deep[{name!r}]",
                "a module with one output a row, shape (N, 1)",
                f"outputs of shape {tuple(found.shape)} for {len(given)} rows",
                "Give its last layer one output; other parameters have networks of their own, "
                "Deep(module, columns, parameter='sigma')",
            )
        return found


class Predictors(nn.Module):
    """All predictors of a model, as a module of the coordinates of effects and networks.

    Args:
        structure: the effects.
        deep: the networks; None for a model of effects alone.
        orthogonal: for each predictor an orthonormal basis of its columns over the rows, shape
            (N, r), that the networks are made orthogonal to; only for a batch of these rows.
        corrected: the module has a further parameter, `correction`, that is subtracted from the
            coefficients.
    """

    def __init__(
        self,
        structure: Effects,
        deep: DeepPart | None,
        dtype: torch.dtype,
        orthogonal: Mapping[int, Float[Tensor, "N r"]] | None = None,
        corrected: bool = False,
    ) -> None:
        super().__init__()
        self.effects = nn.Parameter(torch.zeros(structure.size, dtype=dtype))
        if corrected:
            self.correction = nn.Parameter(torch.zeros(len(structure.design.names), dtype=dtype))
        self.corrected = corrected
        self.structure, self.deep = structure, deep
        self._projected = sorted(orthogonal or {})
        for place, basis in (orthogonal or {}).items():
            self.register_buffer(f"_basis{place}", basis.to(dtype), persistent=False)

    def forward(self, **inputs: Tensor) -> Float[Tensor, "N C"]:
        """Predictors, shape (N, C)."""
        correction = self.correction if self.corrected else None
        eta = self.structure(self.effects, inputs["design"], inputs["offset"], correction)
        if self.deep is None:
            return eta
        return eta + self._padded(self._orthogonal(self.deep(**inputs)), eta)

    def _padded(self, deep: Tensor, eta: Tensor) -> Tensor:
        """Networks leave the thresholds of an ordinal response alone."""
        more = eta.shape[-1] - deep.shape[-1]
        return nn.functional.pad(deep, (0, more)) if more else deep

    def _orthogonal(self, deep: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        if not self._projected:
            return deep
        columns = list(deep.unbind(-1))
        for place in self._projected:
            basis = getattr(self, f"_basis{place}")
            if len(deep) <= _LOOK:
                continue
            if len(basis) != len(deep):
                fail(
                    "batch_size",
                    f"all {len(basis)} rows at once: the networks are made "
                    "orthogonal to the effects over them",
                    f"{len(deep)} rows",
                    "Pass orthogonal=False, or a larger memory_limit",
                )
            columns[place] = columns[place] - basis @ (basis.T @ columns[place])
        return torch.stack(columns, -1)


def _key(name: str) -> str:
    """A name that a module dict takes."""
    return name.replace(".", "_").replace(" ", "_") or "_"

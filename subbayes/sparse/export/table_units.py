"""The small network of a model of a table, with inputs and outputs in the units of the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood, Standardized
from subbayes.networks.mlp import MLP
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.result import SparseNetwork
from subbayes.utils.checks import fail
from subbayes.utils.warning import warn_user

__all__ = ["export_in_table_units"]

_MAX_OFFSET = 1e4  # of a mean from zero, in standard deviations, for float32


def export_in_table_units(
    result: SparseNetwork,
    mean: Float[ndarray, "d"],
    scale: Float[ndarray, "d"],
    rows: Float[Tensor, "n d"] | None = None,
    layout: str = "auto",
    *,
    inputs: Iterable[str] = (),
    classes: Iterable[Any] = (),
    fills: Mapping[str, Any] | None = None,
) -> SmallNetwork:
    """The small network of a network of standardised columns, with the scales folded in.

    It reads columns in their own units. The outputs of a regression are the mean in the units of y
    and, for `HeteroscedasticGaussian`, the raw variance of the standardised y; those of counts are
    the logarithm of the mean, those of classes the logits.

    Args:
        result: a sparse `MLP`.
        mean: subtracted from the columns before the network reads them.
        scale: by which the columns are then divided.
        rows: in their own units, to choose layouts with.
        layout: see `SparseNetwork.export`.
        inputs: names of the columns.
        classes: labels.
        fills: see `SmallNetwork`.

    Raises:
        InputError: an unknown layout, or a module that is not an `MLP`.
    """
    whole = result.network.module_with(result.weights("median", "mean")[0])
    if not isinstance(whole, MLP):
        fail("module", "an MLP, whose first layer reads the columns", type(whole).__name__)
    names = [str(name) for name in inputs]
    _warn_of_offsets(mean, scale, names)
    _fold_scales(whole, mean, scale, result.likelihood)
    small = export_network(whole, tuple(result.layers), rows, layout)
    count: Any = whole.layers[-1].out_features
    return replace(
        small,
        inputs=tuple(names),
        fills=dict(fills or {}),
        outputs=_outputs(result.likelihood, count, classes),
    )


def _outputs(likelihood: Likelihood, count: int, classes: Iterable[Any]) -> tuple[str, ...]:
    if likelihood.kind == "classification":
        return tuple(f"logit[{label}]" for label in classes)
    mean = "log mean" if likelihood.kind == "count" else "mean"
    return mean, *["raw variance"] * (count - 1)


def _warn_of_offsets(
    mean: Float[ndarray, "d"], scale: Float[ndarray, "d"], names: Sequence[str]
) -> None:
    """Warn of columns of which float32 loses digits."""
    distant = (abs(mean) > _MAX_OFFSET * scale).nonzero()[0]
    if len(distant):
        worst = float((abs(mean) / scale)[distant].max())
        columns = ", ".join(
            repr(names[k]) if k < len(names) else f"number {k}" for k in distant[:5]
        )
        warn_user(
            f"Columns {columns} vary little compared to their means: in float32 the exported "
            "network reads them with an error of up to "
            f"{worst * 2.0**-24:.1g} standard deviations. Subtract a constant from them before "
            "fitting",
            UserWarning,
        )


@torch.no_grad()
def _fold_scales(
    module: MLP, mean: Float[ndarray, "d"], scale: Float[ndarray, "d"], likelihood: Likelihood
) -> None:
    r"""$W (x - m) / s + b = (W / s) x + (b - (W / s) m)$, and likewise for the outputs."""
    first, last = module.layers[0], module.layers[-1]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    weight = first.weight.double() / torch.from_numpy(scale)
    first.bias.copy_(first.bias.double() - weight @ torch.from_numpy(mean))
    first.weight.copy_(weight)
    if isinstance(likelihood, Standardized):
        last.weight[0] *= likelihood.scale[0]
        last.bias[0] = last.bias[0] * likelihood.scale[0] + likelihood.shift[0]

"""The small network of a model of a table, with inputs and outputs in the units of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from numpy import asarray, ndarray
from torch import Tensor, nn

from subbayes.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
)
from subbayes.likelihoods.families import (
    Family,
    GammaFamily,
    InverseGaussianFamily,
    LogNormalFamily,
    NegativeBinomialFamily,
    StudentTFamily,
)
from subbayes.networks.mlp import MLP
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.result import SparseNetwork
from subbayes.utils.checks import fail
from subbayes.utils.warning import warn_user

_MAX_OFFSET = 1e4  # of a mean from zero, in standard deviations, for float32

_LINEAR, _LOG, _FREE = "linear", "log", "free"

_OUTPUTS: dict[type[Likelihood], tuple[tuple[str, str], ...]] = {
    Gaussian: (("mean", _LINEAR),),
    HeteroscedasticGaussian: (("mean", _LINEAR), ("raw variance", _FREE)),
    Poisson: (("log mean", _LOG),),
    NegativeBinomialFamily: (("log mean", _LOG), ("log shape", _FREE)),
    StudentTFamily: (("mean", _LINEAR), ("log sigma", _LOG), ("log(nu - 1)", _FREE)),
    LogNormalFamily: (("log median", _LOG), ("log sigma", _FREE)),
    GammaFamily: (("log mean", _LOG), ("log shape", _FREE)),
    InverseGaussianFamily: (("log mean", _LOG), ("log shape", _LOG)),
}
"""Names of the outputs of a likelihood, and how each changes with the units of y.

Of s y + a instead of y, "linear" outputs f are s f + a, "log" ones are f + log s, and "free" ones
are the same.
"""


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

    It reads columns in their own units. Its outputs are the logits of classes, or parameters of
    p(y | x) in the units of y, in this order:

    | likelihood | outputs |
    | --- | --- |
    | gaussian | "mean" |
    | heteroscedastic | "mean", "raw variance" (of the standardised y: see below) |
    | student-t | "mean", "log sigma", "log(nu - 1)" |
    | log-normal | "log median" (the mean of log y), "log sigma" (the sd of log y is sigma) |
    | gamma, inverse-gaussian | "log mean", "log shape" |
    | poisson | "log mean" |
    | negative-binomial | "log mean", "log shape" |

    The variance of a heteroscedastic y is the square of the scale of y times the sum of the
    softplus of the raw variance and the global variance, which are in `result.likelihood`.

    Args:
        result: a sparse `MLP`.
        mean: subtracted from the columns before the network reads them.
        scale: by which the columns are then divided.
        rows: in their own units; see `export_network`.
        layout: see `SparseNetwork.export`.
        inputs: names of the columns.
        classes: labels.
        fills: see `SmallNetwork`.

    Warns:
        Of columns and targets with means more than 10,000 standard deviations from 0, of which
        float32 loses digits.

    Raises:
        InputError: an unknown layout, a module that is not an `MLP`, or a likelihood whose
            parameters are not known in the units of y.
    """
    whole = result.network.module_with(result.weights("median", "mean")[0])
    if not isinstance(whole, MLP):
        fail("module", "an MLP, whose first layer reads the columns", type(whole).__name__)
    names = [str(name) for name in inputs]
    likelihood = result.likelihood.unweighted
    if likelihood.kind == "classification":
        outputs = [(f"logit[{label}]", _FREE) for label in classes]
    else:
        outputs = _outputs_of(likelihood, whole)
    _warn_of_offsets(mean, scale, partial(_named, names), "reads")
    _fold_inputs(whole, mean, scale)
    if isinstance(likelihood, Standardized):
        shift, units = asarray(likelihood.shift), asarray(likelihood.scale)
        _warn_of_offsets(shift, units, lambda _: "The targets", "returns")
        _fold_outputs(whole, likelihood, [change for _, change in outputs])
    small = export_network(whole, tuple(result.layers), rows, layout)
    return replace(
        small,
        inputs=tuple(names),
        fills=dict(fills or {}),
        outputs=tuple(name for name, _ in outputs),
    )


def _outputs_of(likelihood: Likelihood, module: MLP) -> list[tuple[str, str]]:
    """Names of the outputs of numbers or counts, and how they change with the units of y."""
    inner = likelihood.likelihood if isinstance(likelihood, Standardized) else likelihood
    shifted = isinstance(likelihood, Standardized) and any(likelihood.shift)
    found = list(_OUTPUTS.get(type(inner), ()))
    if (
        len(found) != module.layers[-1].out_features
        or (isinstance(inner, Family) and inner != type(inner)())  # with other links
        or (shifted and found[0][1] == _LOG)
    ):
        fail(
            "likelihood",
            "one whose outputs are known in the units of y",
            repr(likelihood),
            "Use SparseNetwork.export, whose outputs are those of the network",
        )
    return found


def _named(names: Sequence[str], columns: Sequence[int]) -> str:
    """The first few of the columns, by name where they have one."""
    shown = (repr(names[k]) if k < len(names) else f"number {k}" for k in columns[:5])
    return f"Columns {', '.join(shown)}"


def _warn_of_offsets(
    mean: Float[ndarray, "d"],
    scale: Float[ndarray, "d"],
    subject: Callable[[Sequence[int]], str],
    verb: str,
) -> None:
    """Warn of columns or targets of which float32 loses digits."""
    distant = (abs(mean) > _MAX_OFFSET * scale).nonzero()[0]
    if len(distant):
        worst = float((abs(mean) / scale)[distant].max())
        warn_user(
            f"{subject(distant.tolist())} vary little compared to their means: in float32 the "
            f"exported network {verb} them with an error of up to "
            f"{worst * 2.0**-24:.1g} standard deviations. Subtract a constant from them before "
            "fitting",
            UserWarning,
        )


@torch.no_grad()
def _fold_inputs(module: MLP, mean: Float[ndarray, "d"], scale: Float[ndarray, "d"]) -> None:
    r"""$W (x - m) / s + b = (W / s) x + (b - (W / s) m)$."""
    first = module.layers[0]
    assert isinstance(first, nn.Linear)
    weight = first.weight.double() / torch.from_numpy(scale)
    first.bias.copy_(first.bias.double() - weight @ torch.from_numpy(mean))
    first.weight.copy_(weight)


@torch.no_grad()
def _fold_outputs(module: MLP, likelihood: Standardized, changes: Sequence[str]) -> None:
    """Fold the units of y into the last layer; see `_OUTPUTS`."""
    last, shift, scale = module.layers[-1], likelihood.shift[0], likelihood.scale[0]
    assert isinstance(last, nn.Linear)
    for k, change in enumerate(changes):
        if change == _LINEAR:
            last.weight[k] *= scale
            last.bias[k] = last.bias[k] * scale + shift
        elif change == _LOG:
            last.bias[k] += math.log(scale)

r"""Flat priors, which are improper: the posterior is that of the likelihood alone.

Effects are functions of standard normal coordinates, for which there is no flat prior. In its place
is the limit that numbers cannot tell from it: a normal prior with $10^4$ times the scale of the
default prior (100 times, of the predictors of other parameters than the location). Of n rows that
determine an effect, it moves the effect by less than $10^{-8} / n$ of a standard error for each one
that separates it from 0. A flat prior of $\log\sigma$ is $p(\sigma) \propto 1 / \sigma$; with flat
priors of all coefficients the posterior of a linear model is then that of Jeffreys' rule, whose
coefficients have a t distribution around least squares.

The posterior is proper only if the rows determine all effects with flat priors. Columns that are
sums of each other, as many effects as rows, and separated classes raise an error before the fit,
and effects whose posterior has the width of the prior raise one after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.design.design import Design
from subbayes.regression.design.priors import Exponential, NormalPrior, priors_of_columns
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    from subbayes.regression.design.predictor import StructuredPredictor


_FACTOR, _OTHER_FACTOR = 1e4, 1e2  # of the scale of a default prior
_MOST = 0.05  # standard deviation of an effect that rows determine, in those of its prior


@dataclass(frozen=True, repr=False)
class Flat(EffectPrior):
    r"""A flat prior of a coefficient or an intercept, $p(\theta) \propto 1$, without networks.

    Of "sigma", "shape" and other parameters it is flat in the predictor: $p(\sigma) \propto 1 /
    \sigma$ for a logarithmic link. Standard deviations of smooths and random effects need proper
    priors. An improper prior has no draws and no density: `prior_predictive` and the Savage-Dickey
    ratio of `hypothesis("x = 0")` raise an error.

    Raises:
        InputError: in `fit`, an effect that the rows do not determine, so that the posterior is
            improper; a model with networks; the prior of a standard deviation, a correlation or a
            threshold.

    Example:
        >>> import pandas as pd
        >>> from subbayes import Sampling, SemiStructuredRegression
        >>> frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0] * 5})
        >>> frame["y"] = 2 * frame["x"] + np.tile([0.1, -0.1, -0.1, 0.1], 5)
        >>> priors = {"Intercept": Flat(), "x": Flat(), "sigma": Flat()}
        >>> few = Sampling(draws=500, chains=2, progress=False)
        >>> model = SemiStructuredRegression("y ~ x", priors=priors).fit(frame, sampling=few)
        >>> model.summary().loc["x", "mean"].round(2)
        np.float64(2.0)
    """

    def from_standard(self, zeta: Tensor) -> Tensor:
        """Raise, as it is not the distribution of a function of a normal coordinate."""
        fail("prior", "a proper prior", "Flat()", "Pass a scale, such as priors={'age': 10.0}")


@dataclass(frozen=True, repr=False)
class _Limit(NormalPrior):
    """The normal prior in the place of a flat one."""

    def __repr__(self) -> str:
        return "Flat()"


def with_limits(
    priors: Mapping[str, EffectPrior], defaults: Mapping[str, EffectPrior], design: Design
) -> dict[str, EffectPrior]:
    """Replace flat priors by normal ones that cannot be told from them.

    Args:
        priors: prior by term or column.
        defaults: the default priors, by term.
        design: the design matrix.

    Raises:
        InputError: the flat prior of anything but a coefficient or an intercept.
    """
    terms = {design.names[i]: t for t in design.terms for i in t.unpenalised}
    terms |= {t.name: t for t in design.terms if t.unpenalised}
    found = dict(priors)
    for name, prior in priors.items():
        if not isinstance(prior, Flat):
            continue
        if name not in terms:
            fail(f"priors[{name!r}]", "a proper prior", "Flat()", "Only coefficients can have it")
        default, term = defaults[terms[name].name], terms[name]
        if isinstance(default, Exponential):  # of sigma itself
            default = NormalPrior(float(np.log(default.mean)), 1.0)
        assert isinstance(default, NormalPrior)
        is_location = term.parameter == design.parameters[0]
        factor = _FACTOR if is_location else _OTHER_FACTOR
        found[name] = _Limit(default.mean, factor * default.scale)
    return found


def flat_columns(design: Design, priors: Mapping[str, EffectPrior]) -> list[int]:
    """Positions of the columns whose coefficients have flat priors."""
    return [
        i
        for term in design.terms
        for own, prior in priors_of_columns(term, design.names, priors)
        if isinstance(prior, _Limit)
        for i in own
    ]


def check_determined(structured: StructuredPredictor, zeta: Float[np.ndarray, "S P"]) -> None:
    """Raise for effects with flat priors that the rows do not determine.

    Args:
        structured: the structured predictor.
        zeta: draws of the coordinates.
    """
    flat = flat_columns(structured.design, structured.priors)
    wide = [structured.names[i] for i in flat if zeta[:, i].std() > _MOST]
    if wide:
        fail(
            "priors",
            "proper priors for effects that the rows do not determine",
            "Flat() of " + ", ".join(wide[:5]) + ", ..." * (len(wide) > 5),
            "The posterior is improper: pass a scale",
        )


def improper_effects(structured: StructuredPredictor) -> set[str]:
    """Names of the reported effects whose prior is flat, or that are sums with such effects."""
    design = structured.design
    flat = set(flat_columns(design, structured.priors))
    parameters = {design.column_parameters[i] for i in flat}
    found = {design.names[i] for i in flat}
    for term in design.terms:
        if term.kind == "intercept" and term.parameter in parameters:
            found |= {term.name, term.parameter}
    if design.parameters[0] in parameters:
        found |= {f"threshold[{j}]" for j in range(len(structured.thresholds))}
    return found

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

from dataclasses import dataclass

from torch import Tensor

from subbayes.regression.priors.normal import NormalPrior
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import fail


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
        >>> import numpy as np
        >>> import pandas as pd
        >>> from subbayes import Regression, Sampling
        >>> frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0] * 5})
        >>> frame["y"] = 2 * frame["x"] + np.tile([0.1, -0.1, -0.1, 0.1], 5)
        >>> priors = {"Intercept": Flat(), "x": Flat(), "sigma": Flat()}
        >>> few = Sampling(draws=500, chains=2, progress=False)
        >>> model = Regression("y ~ x", priors=priors).fit(frame, sampling=few)
        >>> model.summary().loc["x", "mean"].round(2)
        np.float64(2.0)
    """

    name = "flat"

    def from_standard(self, zeta: Tensor) -> Tensor:
        """Raise, as it is not the distribution of a function of a normal coordinate."""
        fail("prior", "a proper prior", "Flat()", "Pass a scale, such as priors={'age': 10.0}")


@dataclass(frozen=True, repr=False)
class FlatLimit(NormalPrior):
    """The normal prior in the place of a flat one."""

    def __repr__(self) -> str:
        return "Flat()"

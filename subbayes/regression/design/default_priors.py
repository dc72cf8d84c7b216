"""Default priors of effects, which the scales of the response and of the columns determine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from subbayes.likelihoods.around.mixture import allowed_rows
from subbayes.likelihoods.families import Family
from subbayes.likelihoods.links import LINKS, PROBABILITY_LINKS
from subbayes.regression.design.design import Design
from subbayes.regression.priors.dirichlet import Dirichlet
from subbayes.regression.priors.exponential import Exponential
from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.lkj import LKJ
from subbayes.regression.priors.normal import NormalPrior
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.terms.columns import column_means, column_scales
from subbayes.regression.terms.law import Hyperparameter
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

_DEFAULT_SCALE = 2.5  # of priors, in standard deviations of the predictor over the column


def default_priors(
    design: Design,
    family: Family,
    y: RowNumbers,
    offset: RowNumbers | float = 0.0,
    weights: RowNumbers | None = None,
) -> dict[str, EffectPrior]:
    r"""Weakly informative priors, scaled by the data as in rstanarm (Goodrich et al. 2024).

    With $s_y$ the standard deviation of y for an identity link and 1 for others: coefficients
    $N(0, (2.5\, s_y / s_x)^2)$, where $s_x$ is the standard deviation of the column, or what a
    regression on the columns of other terms with the same variables leaves of it, so that an
    interaction with an uncentred column is not shrunk away (without an intercept, roots of mean
    squares of both take the place of standard deviations); the intercept, at the means of the
    columns, $N(m, (2.5\, s_y)^2)$ around the overall mean on the scale of the link; sigma
    exponential with mean $s_y$, the standard deviation of y itself if the link is another one;
    shapes $\log r \sim N(1, 2^2)$, of inverse Gaussian responses relative to the mean of y;
    precisions $\log \phi \sim N(2, 2^2)$; standard deviations of smooths and random effects
    exponential with mean $s_y$; degrees of freedom $\log(\nu - 1) \sim N(2.5, 1)$. The y of a
    log-normal response is its logarithm. Components of a mixture have the priors of their families,
    from the responses that these allow. Classes have $s_y = 1$ and m = 0.

    Other parameters have $N(0, 1)$ on the scale of their links. What a parameter of `Custom` means
    is not known: one that is called sigma, shape, precision or nu has the prior of that name, and
    any other scale with the units of y needs a prior in these, such as `priors={"b": 2.0}`.

    The intercept is the level beside the offset o, so that $s_y$ is the standard deviation of
    $y - o$, and m is the mean of $y - o$ for an identity link, the logarithm of
    $\sum y / \sum e^o$ for a logarithm, and the overall mean less that of o for other links.

    Args:
        design: the design matrix of the training rows.
        family: distribution of the response.
        y: the response.
        offset: of the location's predictor, with the logarithm of the exposure.
        weights: how many times each row counts in means and standard deviations; by default once.
    """
    priors: dict[str, EffectPrior] = {}
    rows = ResponseRows(y, offset, weights)
    predictor_sd(family, rows)  # which checks the response
    for term in design.terms:
        of, name, own = _component(family, term.parameter, rows)
        is_location = name in of.locations
        sd = predictor_sd(of, own) if is_location else 1.0
        factor = _DEFAULT_SCALE if is_location else 1.0
        if term.law is not None:
            parts = term.law.hyperparameters
            priors |= {part.name: _default_prior(part, sd, factor) for part in parts}
        if term.kind == "intercept":
            priors[term.name] = _intercept_prior(of, name, own)
        elif term.unpenalised:
            scales = design.prior_scale[term.unpenalised]
            scale = float(np.sqrt(np.mean(scales[scales > 0] ** 2))) if (scales > 0).any() else 1.0
            if term.parameter not in design.centred:  # the effects make up the level as well
                sd = float(np.hypot(sd, _level(of, name, own)))
            priors[term.name] = NormalPrior(0.0, factor * sd / scale)
    if family.n_thresholds and not family.has_ordered_thresholds:
        priors["threshold"] = NormalPrior(rows.mean(offset), 3.0)
    elif family.n_thresholds:
        first = NormalPrior(rows.mean(offset) - 1.0, 3.0)
        priors |= {"threshold": first, "gap": Exponential(1.5)}
    return priors


@dataclass(frozen=True)
class ResponseRows:
    """Responses, offsets, and how many times each row counts."""

    y: RowNumbers
    offset: RowNumbers | float
    weights: RowNumbers | None

    def mean(self, values: RowNumbers | float) -> float:
        """The mean of numbers of the rows."""
        return float(column_means(np.broadcast_to(values, self.y.shape), self.weights))

    def sd(self, values: RowNumbers) -> float:
        """The standard deviation of numbers of the rows; 0 if it is rounding."""
        return float(column_scales(values[:, None], weights=self.weights)[0])

    @property
    def values(self) -> tuple[RowNumbers, ...]:
        """The responses, and the weights that a family of the user need not accept."""
        return (self.y,) if self.weights is None else (self.y, self.weights)


def _component(
    family: Family, parameter: str, rows: ResponseRows
) -> tuple[Family, str, ResponseRows]:
    """The family of a parameter and its name there, with the rows that the family allows."""
    of, name = family.component(parameter)
    if of is family:
        return of, name, rows
    own = allowed_rows(of, rows.y)
    offset = np.broadcast_to(rows.offset, rows.y.shape)[own]
    return (
        of,
        name,
        ResponseRows(rows.y[own], offset, None if rows.weights is None else rows.weights[own]),
    )


def _default_prior(part: Hyperparameter, sd: float, factor: float) -> EffectPrior:
    """The default prior, given the scale of the predictor and the factor of effects."""
    match part.kind:
        case "correlation":
            return LKJ(1.0)
        case "simplex":
            return Dirichlet(1.0)
        case "length":
            return Flexible(stats.lognorm(0.75), part.scale)
        case "effect":
            return NormalPrior(0.0, factor * sd * part.scale)
    return Exponential(sd * part.scale)


def predictor_sd(family: Family, rows: ResponseRows) -> float:
    """The expected scale of the location's predictor beside its offset.

    The standard deviation of the response less the offset for an identity link, else 1.

    Raises:
        InputError: a constant response, or one that is the offset and a constant.
    """
    family, _, rows = _component(family, family.locations[0], rows)
    if family.links[0] != "identity" or family.kind == "classification":
        return 1.0
    y = family.location_values(rows.y)
    if not rows.sd(y) > 0:
        fail("y", "responses that vary", "a constant column")
    sd = rows.sd(y - rows.offset)
    if not sd > 1e-12 * rows.sd(y):
        fail("y", "responses that are not the offset and a constant", "no other variation")
    return sd


def _intercept_prior(
    family: Family, parameter: str, rows: ResponseRows
) -> NormalPrior | Exponential:
    link = family.links[0]
    if parameter in family.locations:
        level, shift = family.level(*rows.values), rows.mean(rows.offset)
        if link == "log":
            if not level > 0:  # zeros only, or a location that is not the mean
                _check_positive_mean(family, level)
                level = 1e-3 * (1.0 if family.kind == "count" else rows.sd(rows.y))
            level = float(np.log(level))
            most = np.max(rows.offset)  # its exponential may overflow
            shift = float(most + np.log(rows.mean(np.exp(rows.offset - most))))
        elif link in PROBABILITY_LINKS:
            share = torch.tensor(np.clip(level, 0.01, 0.99), dtype=torch.float64)
            level = float(LINKS[link][0](share))
        elif link == "logm1":
            level = float(np.log(max(level - 1, 1e-3)))
        return NormalPrior(level - shift, _DEFAULT_SCALE * predictor_sd(family, rows))
    if parameter == "sigma":
        values = family.location_values(rows.y)
        return Exponential(rows.sd(values - rows.offset if link == "identity" else values))
    return NormalPrior(*family.predictor_prior(parameter, *rows.values))


def _check_positive_mean(family: Family, level: float) -> None:
    """Raise for a mean that a logarithmic link cannot reach; single responses may be negative."""
    if family.is_mean and bool(family.allows(torch.tensor([-1.0]))):
        expected = "responses whose mean is above 0, for the link 'log'"
        fail("y", expected, f"a mean of {level:.4g}", "Use link='identity'")


def _level(family: Family, parameter: str, rows: ResponseRows) -> float:
    """The centre of the default prior of an intercept, on the scale of the link."""
    prior = _intercept_prior(family, parameter, rows)
    if prior.positive:  # of a scale itself
        link = LINKS[family.link(parameter)][0]
        return float(link(torch.tensor(prior.mean, dtype=torch.float64)))
    return prior.mean

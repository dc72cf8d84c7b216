"""Effects with flat priors: the limits in their place, and whether the rows determine them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from subbayes.regression.design.design import Design
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.priors.exponential import Exponential
from subbayes.regression.priors.flat import Flat, FlatLimit
from subbayes.regression.priors.normal import NormalPrior, is_normal
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import EffectDraws
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    from subbayes.regression.design.predictor import StructuredPredictor


_FACTOR, _OTHER_FACTOR = 1e4, 1e2  # of the scale of a default prior
_MOST = 0.05  # standard deviation of an effect that rows determine, in those of its prior


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
        if not is_normal(default):  # of sigma itself
            assert isinstance(default, Exponential)
            default = NormalPrior(float(np.log(default.mean)), 1.0)
        is_location = term.parameter == design.parameters[0]
        factor = _FACTOR if is_location else _OTHER_FACTOR
        found[name] = FlatLimit(default.mean, factor * default.scale)
    return found


def flat_columns(design: Design, priors: Mapping[str, EffectPrior]) -> list[int]:
    """Positions of the columns whose coefficients have flat priors."""
    return [
        i
        for term in design.terms
        for own, prior in priors_of_columns(term, design.names, priors)
        if isinstance(prior, FlatLimit)
        for i in own
    ]


def check_determined(structured: StructuredPredictor, zeta: EffectDraws) -> None:
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

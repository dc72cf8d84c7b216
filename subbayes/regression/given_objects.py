"""Objects of the user that a file does not hold, compared with what the file says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from subbayes.artifacts.facts import encode
from subbayes.draws import Draws
from subbayes.likelihoods.families import Family, is_own_family
from subbayes.predictions.averaging import evenly_spaced
from subbayes.regression.design.model_priors import names_for_priors
from subbayes.regression.posterior import RegressionPosterior
from subbayes.regression.priors.reading import PriorFacts, prior_facts, prior_of_term
from subbayes.utils.checks import closest, fail, fail_type
from subbayes.utils.text_table import without_addresses
from subbayes.utils.warning import unsaid_warnings

_COMPARED = 4  # draws whose log-likelihoods are computed again
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative; 0.01 in 16 bits


def _shown(value: Any) -> str:
    """The text of an object without addresses of functions, which differ between runs."""
    return without_addresses(repr(value))


def check_given_family(family: Any, saved: Mapping[str, Any]) -> Family:
    """Return a family of the user if it is the one that a file describes.

    Args:
        family: the argument.
        saved: the description of a known family, or the text of another one.

    Raises:
        InputError: parameters, links or settings that differ. InputTypeError: not a family.
    """
    if not isinstance(family, Family):
        fail_type("family", "a Family, the one that the model was fitted with", family)
    known = not is_own_family(family)
    if "own" in saved:
        if known or _shown(family) != without_addresses(saved["own"]):
            remedy = "Pass the family that the model was fitted with"
            fail("family", f"the saved {saved['own']}", repr(family), remedy)
    elif not known or encode(family.to_config()) != encode(saved):
        remedy = "Leave it out: the file holds the family"
        fail("family", f"the saved {dict(saved)}", repr(family), remedy)
    return family


def check_given_priors(priors: Mapping[str, Any], saved: Mapping[str, Any], family: Family) -> None:
    """Raise for priors of the user that are not those that a file describes.

    Args:
        priors: the argument.
        saved: the descriptions of all priors by name, see `prior_facts`.
        family: distribution of the response.

    Raises:
        InputError: a name that the file does not have, or a prior that differs.
    """
    for name, value in priors.items():
        if name not in saved:
            expected = "names of priors in the file: " + (", ".join(saved) or "there are none")
            fail("priors", expected, repr(name), closest(name, saved))
        facts = saved[name]
        names = names_for_priors(family)
        prior = prior_of_term(name, value, names)
        if not isinstance(facts, PriorFacts):
            facts = prior_facts(prior_of_term(name, facts, names))
        if not facts.is_of(prior):
            remedy = "Pass the prior that the model was fitted with"
            fail(f"priors[{name!r}]", f"the saved {facts.shown}", repr(prior), remedy)


def check_log_likelihood(
    joint: RegressionPosterior, draws: Draws, arguments: Sequence[str]
) -> None:
    """Raise for objects of the user under which draws have other log-likelihoods than the saved.

    Args:
        joint: the posterior, with these objects.
        draws: the saved draws.
        arguments: names of the arguments of `load` that hold these objects.

    Raises:
        InputError: log-likelihoods that differ by more than rounding.
    """
    values = joint.saved_log_likelihoods(draws)
    if values is None:
        return
    saved = evenly_spaced(values.astype(np.float64).ravel(), _COMPARED)
    z = evenly_spaced(draws.flat(), _COMPARED).copy()
    with unsaid_warnings():  # a copy of the posterior, as the caller's warns when used
        again = replace(joint).log_likelihoods(z, draws)
    size = _TOLERANCE.get(joint.model.encoder.dtype, 0.01) * (1 + np.abs(saved))
    bad = ~(np.abs(again - saved) <= size) & np.isfinite(saved)
    if bad.any():
        i = int(bad.argmax())
        fail(
            " or ".join(arguments),
            f"those of the fitted model, under which a draw has log-likelihood {saved[i]:.6g}",
            f"others, under which it has {again[i]:.6g}",
            "Pass the objects that the model was fitted with",
        )

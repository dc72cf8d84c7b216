"""Families and priors of the user's own, which an artifact names but does not hold.

Who loads the model passes them again: they have to be those that the artifact describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subbayes.likelihoods.families import FAMILIES, Family
from subbayes.semistructured.effect_priors import prior_of_term
from subbayes.semistructured.joint_posterior import FittedState
from subbayes.semistructured.saved_priors import prior_config
from subbayes.utils.checks import fail, fail_type

__all__ = ["check_given_family", "check_given_priors", "check_log_likelihood"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_COMPARED = 3  # draws
_TOLERANCE = 1e-3  # of a log-likelihood, relative: other versions may sum in another order
_REMEDY = "Pass that of the fit, or none if the artifact holds it"


def check_given_family(family: Any, saved: Mapping[str, Any]) -> None:
    """Check that a family given to `load` is the one that an artifact describes.

    Args:
        family: what the user passes.
        saved: the description.

    Raises:
        InputError: another family.
        InputTypeError: no family.
    """
    if not isinstance(family, Family):
        fail_type("family", "a family of subbayes.likelihoods.families", family)
    known = type(family) in FAMILIES.values()
    shown = _plain(family.to_config()) if known else {"own": _shown(family)}
    expected = {"own": _ADDRESS.sub("", saved["own"])} if "own" in saved else _plain(saved)
    if shown != expected:
        described = f"the saved family {expected.get('own', expected)}"
        fail("family", described, repr(family), _REMEDY)


def check_given_priors(
    priors: Any, saved: Mapping[str, Any], parameters: Sequence[str]
) -> dict[str, Any]:
    """Check that priors given to `load` are those that an artifact describes, and return them.

    Args:
        priors: what the user passes, by name.
        saved: the descriptions by name.
        parameters: parameters of the family.

    Raises:
        InputError: a name that the artifact does not have, or another prior.
        InputTypeError: no dict.
    """
    if not isinstance(priors, Mapping):
        fail_type("priors", "a dict of priors by name", priors)
    for name, prior in priors.items():
        if name not in saved:
            fail("priors", f"names of saved priors: {', '.join(saved) or 'none'}", repr(name))
        made, config = prior_of_term(name, prior, parameters), saved[name]
        if not isinstance(config, dict):
            continue  # a number of an earlier version
        if config["name"] == "own":
            same = _shown(made) == _ADDRESS.sub("", config["shown"])
        else:
            same = _plain(prior_config(made)) == _plain(config)
        if not same:
            described = f"the saved prior {config.get('shown', config)}"
            fail(f"priors[{name!r}]", described, repr(made), _REMEDY)
    return dict(priors)


def check_log_likelihood(state: FittedState) -> None:
    """Check that code of the user's gives some draws the log-likelihood that was saved.

    Raises:
        InputError: another log-likelihood.
    """
    draws = state.draws
    saved = draws.stats.get("log_likelihood")
    if saved is None:
        return
    places = np.linspace(0, draws.n_draws - 1, min(_COMPARED, draws.n_draws)).astype(int)
    values = state.joint.density.log_likelihood(draws.z[0, places])
    for found, value in zip(values, saved[0, places], strict=True):
        if np.isfinite(value) and not abs(found - value) <= _TOLERANCE * (1 + abs(value)):
            fail(
                "family",
                f"the saved log-likelihood of a draw, {value:.6g}",
                f"{found:.6g}",
                "Pass the family and the priors of the fit",
            )


def _shown(value: Any) -> str:
    """The text of an object without its address."""
    return _ADDRESS.sub("", repr(value))


def _plain(config: Any) -> Any:
    """A description as JSON holds it."""
    return json.loads(json.dumps(config, default=float))

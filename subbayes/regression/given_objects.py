"""Objects of the user that a file does not hold, compared with what the file says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from subbayes.data.arrays import evenly_spaced
from subbayes.draws import Draws
from subbayes.likelihoods.families import Family, family_from_config
from subbayes.regression.posterior import RegressionPosterior
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.text_table import without_addresses
from subbayes.utils.warning import unsaid_warnings

_COMPARED = 4  # draws whose log-likelihoods are computed again
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative; 0.01 in 16 bits


def check_given_family(family: Any, saved: Mapping[str, Any]) -> Family:
    """Return a family of the user if it reads as the one that a file describes.

    Args:
        family: the argument.
        saved: the description of a known family, or the text of another one.

    Raises:
        InputError: another family. InputTypeError: not a family.
    """
    if not isinstance(family, Family):
        fail_type("family", "a Family, the one that the model was fitted with", family)
    shown = saved["own"] if "own" in saved else repr(family_from_config(saved, "family"))
    if without_addresses(repr(family)) != without_addresses(shown):
        remedy = "Pass the family that the model was fitted with"
        fail("family", f"the saved {shown}", repr(family), remedy)
    return family


def check_log_likelihood(
    joint: RegressionPosterior, draws: Draws, objects: Mapping[str, Any]
) -> None:
    """Raise for objects of the user under which draws have other log-likelihoods than the saved.

    Args:
        joint: the posterior, with these objects.
        draws: the saved draws.
        objects: the arguments of `load` that hold these objects, by name.

    Raises:
        InputError: log-likelihoods that differ by more than rounding.
    """
    arguments = [name for name, value in objects.items() if value]
    values = joint.saved_log_likelihoods(draws) if arguments else None
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

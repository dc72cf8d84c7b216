"""Log densities that are not numbers."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def reject_undefined(log_density: Float[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Log densities with minus infinity for NaN and plus infinity.

    Samplers never move to such points. A chain could not leave a point of infinite density, and
    no draw of a density that has an integral is at one.

    Example:
        >>> reject_undefined(np.array([-1.0, np.nan, np.inf, -np.inf]))
        array([ -1., -inf, -inf, -inf])
    """
    return np.where(log_density < np.inf, log_density, -np.inf)

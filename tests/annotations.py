"""The checks of annotations at run time that `make types` and `make test-all` use."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from beartype import BeartypeConf, FrozenDict, beartype

checked = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a float, as for mypy
        hint_overrides=FrozenDict(
            {
                Self: Any,  # which has no meaning in a method by itself
                int: int | np.integer | torch.SymInt,  # numbers of rows of an export are symbols
            }
        ),
    )
)
"""The decorator of functions."""

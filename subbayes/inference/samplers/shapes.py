"""Shapes of what a sampler knows of its chains."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int

ChainPoints: TypeAlias = Float[np.ndarray, "chains k"]
ChainValues: TypeAlias = Float[np.ndarray, "chains"]
ChainCounts: TypeAlias = Int[np.ndarray, "chains"]
ChainMask: TypeAlias = Bool[np.ndarray, "chains"]
SomeChains: TypeAlias = Int[np.ndarray, "c"]
"""Numbers of some of the chains."""

r"""The stack of compared methods: weights of held-out rows, and the guard of `recommend`.

Each method has the temperature of the held-out rows. The stack is shipped if its cross-fitted gain
over the reference exceeds two standard errors, else it is the reference (weight 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from subbayes.diagnostics.standard_errors import error_of_mean
from subbayes.recommendation.guard import Candidate, judge
from subbayes.utils.types import RowNumbers

_REFERENCES = "temperature-scaling", "map"  # both are MAP with a temperature here


@dataclass(frozen=True)
class StackedMethods:
    """A mixture of methods, weighted by held-out rows.

    Attributes:
        weights: by key of the method; 1 for the reference if the others did not surely gain.
        reference: key of MAP with a temperature, or of the first method.
        gain: cross-fitted mean gain over the reference on the held-out rows, in nats.
        error: its standard error.
        log_likelihood: mean log density of a test row under the stack.
        difference: of it and of the reference with its temperature, and the standard error.
    """

    weights: dict[str, float]
    reference: str
    gain: float
    error: float
    log_likelihood: float
    difference: tuple[float, float]

    @classmethod
    def of(
        cls,
        held_out: Mapping[str, RowNumbers],
        test: Mapping[str, Float[np.ndarray, "M"]],
        counts: RowNumbers,
        seed: int = 0,
    ) -> StackedMethods:
        """Weigh methods by the log densities of rows that were not used for fitting.

        Args:
            held_out: log densities of held-out rows, by method.
            test: those of test rows.
            counts: how many times each held-out row counts.
            seed: of the random divisions of the held-out rows.

        Example:
            >>> rng = np.random.default_rng(0)
            >>> worse = rng.normal(-1.0, 0.1, 400)
            >>> rows = {"map": worse, "ensemble": worse + 0.2}
            >>> StackedMethods.of(rows, rows, np.ones(400)).weights["ensemble"]
            1.0
        """
        reference = next((key for key in _REFERENCES if key in held_out), next(iter(held_out)))
        keys = [reference, *(key for key in held_out if key != reference)]
        verdict = judge([_Scored(key, held_out[key]) for key in keys], counts, seed)
        stacked = logsumexp(
            np.stack([test[key] for key in keys], 1), axis=1, b=np.array(verdict.weights)
        )
        gains = stacked - test[reference]
        return cls(
            weights=dict(zip(keys, verdict.weights, strict=True)),
            reference=reference,
            gain=verdict.gain,
            error=verdict.error,
            log_likelihood=float(stacked.mean()),
            difference=(float(gains.mean()), float(error_of_mean(gains))),
        )

    @property
    def is_shipped(self) -> bool:
        """Whether the stack surely gained over the reference."""
        return self.weights[self.reference] < 1

    def to_text(self, names: Mapping[str, str]) -> str:
        """One line: the score, the weights, and the gain.

        Args:
            names: of the methods, by key.
        """
        held_out = f"{self.gain:+.3f} ± {self.error:.3f} nats a held-out row, cross-fitted"
        reference = f"{names[self.reference]}, calibrated"
        if not self.is_shipped:
            return f"stacked: as {reference}; the others did not surely gain ({held_out})."
        parts = [f"{weight:.0%} {names[key]}" for key, weight in self.weights.items() if weight]
        gain, error = self.difference
        return (
            f"stacked: log-likelihood {self.log_likelihood:.3f}, {gain:+.3f} ± {error:.3f} from "
            f"{reference}; {', '.join(parts)} ({held_out})."
        )


class _Scored(Candidate):
    """A method with known log densities of the held-out rows.

    Args:
        name: of the method.
        log_densities: of the rows.
    """

    def __init__(self, name: str, log_densities: RowNumbers) -> None:
        self.name, self.settings, self._known = name, [1.0], log_densities

    def _at(self, setting: float) -> RowNumbers:
        return self._known

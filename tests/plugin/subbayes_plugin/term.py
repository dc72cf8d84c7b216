"""A periodic effect of a column: `wave(hour, period=24)`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from subbayes.regression.formula.options import number
from subbayes.regression.terms.calls import CallTerm
from subbayes.regression.terms.law import LearnedTerm


class Wave(CallTerm):
    """A sine and a cosine, whose amplitudes share a standard deviation."""

    options = {"period": number(0.001, 1000)}

    def learn(self, argument, frame, prefix, weights=None):
        """The columns, of which only the period has to be known."""
        name = prefix + self.name
        labels = (f"{name}[sin]", f"{name}[cos]")
        period = self.call.options.get("period", 1.0)
        return [WaveColumns(name=name, labels=labels, variables=self.call.columns, period=period)]


@dataclass(frozen=True)
class WaveColumns(LearnedTerm):
    """The two columns."""

    period: float

    def columns(self, frame):
        """Of rows."""
        angle = 2 * np.pi * frame[self.variables[0]].to_numpy(dtype=float) / self.period
        return np.column_stack([np.sin(angle), np.cos(angle)])

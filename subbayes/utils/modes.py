"""How a function is evaluated repeatedly, without importing torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["trace", "eager", "compile"]
MODES = ("trace", "compile", "eager")
"""How a function is evaluated repeatedly, see `subbayes.networks.tracing.tracer`."""

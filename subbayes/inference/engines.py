"""Engines by name: from a word to the function that draws from a posterior."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from subbayes.draws import Draws
from subbayes.utils.checks import check_choice

__all__ = ["ENGINES", "arguments_of", "engine_of"]

ENGINES = {
    "elliptical-slice": "subbayes.inference.samplers.elliptical_slice:elliptical_slice",
    "nuts": "subbayes.inference.samplers.nuts:nuts",
    "hmc": "subbayes.inference.samplers.hmc:hmc",
    "slice": "subbayes.inference.samplers.slice:slice_sampling",
    "parallel-tempering": "subbayes.inference.samplers.parallel_tempering:parallel_tempering",
    "smc": "subbayes.inference.samplers.smc:smc",
    "laplace": "subbayes.inference.laplace.laplace:laplace",
    "laplace-linearised": "subbayes.inference.laplace.engine:laplace_linearised",
    "vi": "subbayes.inference.variational.variational:mean_field_vi",
    "full-rank-vi": "subbayes.inference.variational.variational:full_rank_vi",
    "realnvp": "subbayes.inference.variational.variational:realnvp",
}


def arguments_of(engine: Callable[..., Draws], **offered: Any) -> dict[str, Any]:
    """The arguments that an engine takes: approximations have no warm-up and no checkpoint."""
    parameters = inspect.signature(engine).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def engine_of(inference: str | Callable[..., Draws]) -> Callable[..., Draws]:
    """The engine of a name, or the function itself.

    Args:
        inference: one of `ENGINES`, or a function from a posterior to draws.

    Raises:
        InputError: an unknown name. ImportError: an engine whose package is not installed.
    """
    if callable(inference):
        return inference
    check_choice("inference", inference, ENGINES)
    if inference == "realnvp":  # say before the training what is not installed
        importlib.import_module("subbayes.inference.variational.flows").load_zuko()
    room, _, name = ENGINES[inference].partition(":")
    return getattr(importlib.import_module(room), name)

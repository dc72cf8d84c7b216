"""The registry of inference engines: from a name to an engine with its default settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, FunctionEngine
from subbayes.utils.checks import check_choice, fail_type

__all__ = ["ENGINES", "engine_class", "engine_of"]

ENGINES = {
    "elliptical-slice": "samplers.elliptical_slice:EllipticalSlice",
    "nuts": "samplers.nuts:NUTS",
    "hmc": "samplers.hmc:HMC",
    "slice": "samplers.slice:SliceSampling",
    "parallel-tempering": "samplers.parallel_tempering:ParallelTempering",
    "smc": "samplers.smc:SMC",
    "laplace": "laplace.laplace:Laplace",
    "laplace-linearised": "laplace.linearised_engine:LinearisedLaplace",
    "vi": "variational.variational:MeanFieldVI",
    "full-rank-vi": "variational.variational:FullRankVI",
    "realnvp": "variational.variational:RealNVP",
}


def engine_class(name: str) -> type[Engine]:
    """The class of an engine by its name, imported on first use.

    Raises:
        InputError: an unknown name.
    """
    check_choice("inference", name, ENGINES)
    module, _, attribute = ENGINES[name].partition(":")
    found: type[Engine] = getattr(
        importlib.import_module(f"subbayes.inference.{module}"), attribute
    )
    return found


def engine_of(inference: str | Engine | Callable[[Any, Sampling], Draws]) -> Engine:
    """The engine that the argument `inference` stands for.

    Args:
        inference: a name of `ENGINES`, which takes the default settings; an engine; or a
            function (posterior, sampling) -> Draws.

    Raises:
        InputError: an unknown name.
        InputTypeError: something else.

    Example:
        >>> engine_of("nuts").target_acceptance
        0.8
    """
    if isinstance(inference, str):
        return engine_class(inference)()
    if isinstance(inference, Engine):
        return inference
    if isinstance(inference, type) or not callable(inference):
        fail_type(
            "inference",
            "a name, an engine such as NUTS(), or a function (posterior, sampling) -> Draws",
            inference,
        )
    return FunctionEngine(inference)

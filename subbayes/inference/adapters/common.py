"""Base class of the adapters, the density they evaluate, and the conversion of their draws."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.chains import Density
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.utils.log_densities import reject_undefined

__all__ = [
    "ExternalSampler",
    "Value",
    "adapted_draws",
    "default_warmup",
    "import_package",
    "show_progress",
]


def import_package(package: str) -> Any:
    """Import a sampler's package; the error says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"adapters.{package.split('.')[0]} needs {package.split('.')[0]}: "
            "pip install 'subbayes[samplers]'"
        ) from error


class ExternalSampler(Engine):
    """An engine that runs the sampler of another package, whose name it has."""

    any_density: ClassVar[bool] = True

    def check(self, rank: int | None = None) -> None:
        """Check that the package is installed."""
        import_package(self.name)


class Value:
    """The tempered log density, with counts of its evaluations and the time since its creation.

    Attributes:
        posterior: the density.
        evaluations: number of points evaluated.
        batches: number of calls.
        started: `time.perf_counter()` at the creation.
    """

    def __init__(self, posterior: Density) -> None:
        self.posterior = posterior
        self.evaluations = self.batches = 0
        self.started = time.perf_counter()

    def likelihood(self, z: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Log-likelihood divided by the temperature, never NaN or plus infinity."""
        self.evaluations += len(z)
        self.batches += 1
        value = self.posterior.log_likelihood(z) / self.posterior.temperature
        return reject_undefined(value)

    def __call__(self, z: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Tempered log density."""
        return self.likelihood(z) + self.posterior.prior.log_prob(z)

    def gradient(
        self, z: Float[np.ndarray, "S k"]
    ) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S k"]]:
        """Tempered log density and gradient; zero density where either is not finite."""
        self.evaluations += len(z)
        self.batches += 1
        assert isinstance(self.posterior, GradientDensity)
        value, gradient = self.posterior.value_and_grad(z)
        possible = np.isfinite(value) & np.isfinite(gradient).all(1)
        return np.where(possible, value, -np.inf), np.where(possible[:, None], gradient, 0.0)


def adapted_draws(
    engine: str,
    z: Float[np.ndarray, "chains draws k"],
    stats: dict[str, Any],
    value: Value,
    meta: dict[str, Any],
    **facts: Any,
) -> Draws:
    """The draws of another package's sampler, with its statistics, `meta` and other fields."""
    return Draws(
        np.array(z, dtype=np.float64, order="C"),
        {name: np.array(numbers) for name, numbers in stats.items()},
        {
            "density_evaluations": value.evaluations,
            "batched_evaluations": value.batches,
            "seconds": time.perf_counter() - value.started,
        }
        | meta,
        engine=engine,
        temperature=value.posterior.temperature,
        **facts,
    )


def default_warmup(sampling: Sampling, least: int) -> int:
    """Warm-up draws; by default as many as are kept, and at least `least`."""
    return max(sampling.draws, least) if sampling.warmup is None else sampling.warmup


def show_progress(progress: bool | None) -> bool:
    """Whether to show the progress bar of another package."""
    return sys.stderr.isatty() if progress is None else progress

"""What the adapters share: the import of a package, the density, and the facts of a run."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.samplers.chains import Density
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.utils.checks import check_count, fail

__all__ = ["Value", "check_counts", "check_gradient", "finished", "needed", "on_terminal"]


def needed(package: str) -> Any:
    """Import a sampler's package.

    Raises:
        ImportError: it is not installed; the line says what to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"adapters.{package.split('.')[0]} needs {package.split('.')[0]}: "
            "pip install 'subbayes[samplers]'"
        ) from error


def check_counts(**counts: tuple[int, int]) -> None:
    """Check whole numbers, each given with the least one allowed."""
    for name, (number, least) in counts.items():
        check_count(name, number, least)


def check_gradient(posterior: Any) -> None:
    """Raise `InputError` for a density without gradients."""
    if not isinstance(posterior, GradientDensity):
        fail(
            "posterior",
            "a density with value_and_grad",
            type(posterior).__name__,
            "Use adapters.emcee, which needs no gradient",
        )


class Value:
    """The tempered log density of a density object, which counts its evaluations.

    Attributes:
        posterior: the density.
        evaluations: points evaluated.
        batches: calls.
    """

    def __init__(self, posterior: Density) -> None:
        self.posterior = posterior
        self.evaluations = self.batches = 0

    def likelihood(self, z: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Log-likelihood divided by the temperature, never NaN."""
        self.evaluations += len(z)
        self.batches += 1
        value = self.posterior.log_likelihood(z) / self.posterior.temperature
        return np.where(np.isnan(value), -np.inf, value)

    def __call__(self, z: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Tempered log density."""
        return self.likelihood(z) + self.posterior.prior.log_prob(z)

    def gradient(
        self, z: Float[np.ndarray, "S k"]
    ) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S k"]]:
        """Tempered log density and gradient; impossible where either is not finite."""
        self.evaluations += len(z)
        self.batches += 1
        assert isinstance(self.posterior, GradientDensity)
        value, gradient = self.posterior.value_and_grad(z)
        possible = np.isfinite(value) & np.isfinite(gradient).all(1)
        return np.where(possible, value, -np.inf), np.where(possible[:, None], gradient, 0.0)


def finished(
    sampler: str,
    z: Float[np.ndarray, "chains draws k"],
    stats: dict[str, Any],
    value: Value,
    started: float,
    **meta: Any,
) -> Draws:
    """The draws with what every run notes of itself."""
    plain = {name: np.array(numbers) for name, numbers in stats.items()}
    return Draws(
        np.array(z, dtype=np.float64, order="C"),
        plain,
        {
            "sampler": sampler,
            "temperature": value.posterior.temperature,
            "density_evaluations": value.evaluations,
            "batched_evaluations": value.batches,
            "seconds": time.perf_counter() - started,
        }
        | meta,
    )


def on_terminal(progress: bool | None) -> bool:
    """Whether another library's progress bar is to be seen."""
    return sys.stderr.isatty() if progress is None else progress

"""What all inference engines share: settings with a `run` that draws from a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from subbayes.draws import Draws, Validity
from subbayes.inference.configuration import Sampling

__all__ = ["Engine", "FunctionEngine"]


@dataclass(frozen=True)
class Engine(ABC):
    """A method of inference: a frozen dataclass of its settings.

    Attributes:
        name: of the method, as `fit(..., inference=name)` takes it.
        validity: "exact", "approximation" or "ensemble"; see `Draws`.
    """

    name: ClassVar[str]
    validity: ClassVar[Validity] = "exact"

    def check(self, rank: int | None = None) -> None:  # noqa: B027, most need no check
        """Check before training that this engine can run.

        Args:
            rank: number of coordinates of the subspace; None if it is not known yet.

        Raises:
            ImportError: a package is not installed.
            InputError: too many or too few coordinates for this engine.
        """

    @abstractmethod
    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        """Draw from a posterior.

        Args:
            posterior: the density, a `Posterior` or an object with the same methods.
            sampling: number of draws and chains, seed, checkpoint, progress.
        """

    def sample(
        self,
        posterior: Any,
        *,
        draws: int = 500,
        chains: int = 8,
        warmup: int | None = None,
        thin: int = 1,
        seed: int = 0,
        initial: str | np.ndarray = "prior",
        checkpoint: str | Path | None = None,
        checkpoint_seconds: float = 10.0,
        progress: bool | None = None,
    ) -> Draws:
        """Draw from a posterior; the arguments are the fields of `Sampling`.

        Args:
            posterior: the density, a `Posterior` or an object with the same methods.
            draws: draws to keep per chain.
            chains: number of chains, evaluated together.
            warmup: draws per chain to discard first; None takes the default of the engine.
            thin: keep every `thin`-th draw.
            seed: seed; every chain has its own random stream.
            initial: "prior", "shift" (z = 0), or start points of shape (chains, k).
            checkpoint: folder to save the run in and resume it from, bit for bit.
            checkpoint_seconds: time between checkpoints.
            progress: show a progress bar; None shows it on a terminal.
        """
        return self.run(
            posterior,
            Sampling(
                draws=draws,
                chains=chains,
                warmup=warmup,
                thin=thin,
                seed=seed,
                initial=initial,
                checkpoint=checkpoint,
                checkpoint_seconds=checkpoint_seconds,
                progress=progress,
            ),
        )


@dataclass(frozen=True)
class FunctionEngine(Engine):
    """A function of your own as an engine.

    Attributes:
        function: takes a posterior and a `Sampling`, and returns `Draws`.

    Example:
        >>> def prior_draws(posterior, sampling):
        ...     rng = np.random.default_rng(sampling.seed)
        ...     return Draws(posterior.prior.sample((sampling.chains, sampling.draws, 2), rng))
        >>> FunctionEngine(prior_draws).name
        'prior_draws'
    """

    function: Callable[[Any, Sampling], Draws]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function."""
        return getattr(self.function, "__name__", "custom")

    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        """Call the function, and note its name and the temperature of the posterior."""
        draws = self.function(posterior, sampling)
        return replace(draws, engine=draws.engine or self.name, temperature=posterior.temperature)

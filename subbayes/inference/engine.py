"""Base class of inference engines, and their registry by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from subbayes.draws import Draws, Validity
from subbayes.inference.configuration import Sampling
from subbayes.utils import registry
from subbayes.utils.checks import check_choice, fail_type
from subbayes.utils.registry import Registry

ENGINES: Registry[type[Engine]] = registry.ENGINES
"""The engines by name, in the order of lists; others by `ENGINES.register` or an entry point."""


@dataclass(frozen=True)
class Engine(ABC):
    """An inference method: a frozen dataclass of its settings.

    Attributes:
        name: of the method, as `fit(..., inference=name)` takes it.
        label: its name in tables and figures; empty for `name`.
        validity: "exact", "approximation" or "ensemble"; see `Draws`.
        independent: whether its draws are independent of each other; see `Draws`.
        uses_initial: whether its chains start at `Sampling.initial`.
        any_density: whether it needs no more of a posterior than the density and its gradient.
        linearises: whether it predicts by the network linearised at the centre of the subspace.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    validity: ClassVar[Validity] = "exact"
    independent: ClassVar[bool] = False
    uses_initial: ClassVar[bool] = False
    any_density: ClassVar[bool] = False
    linearises: ClassVar[bool] = False

    def check(self, rank: int | None = None) -> None:  # noqa: B027, most need no check
        """Check before training that this engine can run.

        Args:
            rank: number of coordinates of the subspace; None if it is not known yet.

        Raises:
            ImportError: a package is not installed.
            InputError: too many or too few coordinates for this engine.
        """

    def start_count(self, sampling: Sampling, rank: int) -> int:
        """Number of start points that a run takes, in `rank` coordinates; 0 if it takes none."""
        return sampling.chains if self.uses_initial else 0

    @classmethod
    def warnings(cls, draws: Draws) -> list[str]:
        """Problems of draws that are specific to this engine, in addition to `Draws.warnings`."""
        return []

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
        """Draw from a `Posterior` or an object like it; see `Sampling` for the settings."""
        sampling = Sampling(
            draws=draws,
            chains=chains,
            warmup=warmup,
            thin=thin,
            seed=seed,
            initial=initial,
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
            progress=progress,
        )
        return self.run(posterior, sampling)


@dataclass(frozen=True)
class FunctionEngine(Engine):
    """A custom function as an engine.

    Attributes:
        function: takes a posterior and a `Sampling`, and returns `Draws`.

    Example:
        >>> def prior_draws(posterior, sampling):
        ...     rng = np.random.default_rng(sampling.seed)
        ...     return Draws(posterior.prior.sample((sampling.chains, sampling.draws, 2), rng))
        >>> FunctionEngine(prior_draws).name
        'prior_draws'
    """

    uses_initial: ClassVar[bool] = True
    function: Callable[[Any, Sampling], Draws]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function, such as "own nuts" if it has the name of an engine."""
        name = getattr(self.function, "__name__", "custom")
        return f"own {name}" if name in ENGINES else name

    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        """Call the function; set the name and the temperature of its draws."""
        draws = self.function(posterior, sampling)
        if not isinstance(draws, Draws):
            remedy = "Return subbayes.Draws(z) of an array (chains, draws, k)"
            fail_type("inference", "a function that returns Draws", draws, remedy)
        return replace(draws, engine=draws.engine or self.name, temperature=posterior.temperature)


def engine_of(inference: str | Engine | Callable[[Any, Sampling], Draws]) -> Engine:
    """The engine of an argument `inference`.

    Args:
        inference: a name of `ENGINES`, for the default settings; an engine; or a function
            (posterior, sampling) -> Draws.

    Raises:
        InputError: an unknown name.
        InputTypeError: another type.

    Example:
        >>> engine_of("nuts").target_acceptance
        0.8
    """
    if isinstance(inference, str):
        check_choice("inference", inference, ENGINES, "subbayes.inference.engine.ENGINES")
        return ENGINES[inference]()
    if isinstance(inference, Engine):
        return inference
    if isinstance(inference, type) or not callable(inference):
        fail_type(
            "inference",
            "a name, an engine such as NUTS(), or a function (posterior, sampling) -> Draws",
            inference,
        )
    return FunctionEngine(inference)

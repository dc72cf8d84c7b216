"""Chains of MCLMC whose number of steps fits into the time that is left of a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.mclmc import MCLMC

_Item = TypeVar("_Item")

_TIMED = 20  # steps whose time is measured
_LEAST_STEPS = 200  # of a chain, whatever the time
_RESERVE = 0.03  # share of the time that is left for slower steps
_LEAST_SECONDS = 1.0


@dataclass
class Clock:
    """Allows items as long as one more ends in time if it is as slow as the slowest before it.

    Attributes:
        until: value of `time.monotonic` at which they end.
        slowest: seconds of the slowest one.
    """

    until: float
    slowest: float = 0.0

    def while_time(self, items: Sequence[_Item], least: int = 1) -> Iterator[_Item]:
        """Items while there is time, and at least some.

        Args:
            items: each of which the caller works at before it takes the next.
            least: number of items whatever the time.
        """
        for i, item in enumerate(items):
            began = time.monotonic()
            if i >= least and began + self.slowest > self.until:
                return
            yield item
            self.slowest = max(self.slowest, time.monotonic() - began)


def step_seconds(engine: MCLMC, posterior: Any, initial: Float[np.ndarray, "chains k"]) -> float:
    """Measure the seconds of a step of all chains, after one that traces the density.

    Args:
        engine: the sampler.
        posterior: the density.
        initial: start points.
    """
    own = replace(engine, step_size=1e-3 * float(np.sqrt(initial.shape[1])))
    seconds = 0.0
    for thin in (3, _TIMED):
        started = time.perf_counter()
        own.sample(
            posterior,
            draws=1,
            chains=len(initial),
            warmup=0,
            thin=thin,
            initial=initial,
            progress=False,
        )
        seconds = (time.perf_counter() - started) / thin
    return seconds


class _Planned(MCLMC):
    """MCLMC with a plan, whose draws come late rather than not at all where steps become slower."""

    finishes_warmup: ClassVar[bool] = True


@dataclass(frozen=True)
class PlannedMCLMC(MCLMC):
    """MCLMC that chooses its numbers of steps when it starts, for the time that is left.

    Half of the steps are the warm-up. It also ends at that time if steps become slower.

    Attributes:
        ends: value of `time.monotonic` at which sampling ends.
        load: returns the plan of an interrupted run, or None.
        save: keeps a plan for a run that resumes.
    """

    name: ClassVar[str] = "mclmc"
    ends: float = 0.0
    load: Callable[[], dict[str, Any] | None] | None = None
    save: Callable[[dict[str, Any]], None] | None = None

    @override
    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        started = time.perf_counter()
        engine = _Planned(self.target, self.length, self.metric, self.step_size, self.integrator)
        plan = self.load() if self.load is not None else None
        if plan is None:
            plan = self._plan(engine, posterior, sampling)
            if self.save is not None:
                self.save(plan)
        draws = engine.run(posterior, replace(sampling, **plan))
        seconds = time.perf_counter() - started  # with those of the plan and of a compilation
        return replace(draws, meta=draws.meta | {"seconds": seconds})

    def _plan(self, engine: MCLMC, posterior: Any, sampling: Sampling) -> dict[str, Any]:
        """Warm-up, draws, thinning and the time limit."""
        initial = np.asarray(sampling.initial, dtype=np.float64)
        seconds = step_seconds(engine, posterior, initial)
        left = max(self.ends - time.monotonic(), _LEAST_SECONDS)
        steps = max(int((1 - _RESERVE) * left / seconds), _LEAST_STEPS)
        kept = steps - steps // 2
        draws = min(sampling.draws, kept)
        thin = kept // draws
        return {
            "warmup": steps - draws * thin,
            "draws": draws,
            "thin": thin,
            "time_limit": float(left),
        }

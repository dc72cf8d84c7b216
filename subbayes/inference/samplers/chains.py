"""Run a kernel on several chains, with storage, seeds, progress, checkpoints and interruption.

**No chain waits for another.** A kernel's step is one batched density evaluation, and a chain
that finishes a draw starts its next one at once. Each chain has its own random stream, so that its
draws do not depend on the number of chains.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.random_numbers import copy_state, invalid_values
from subbayes.priors import Normal
from subbayes.utils import artifact
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import progress_bar
from subbayes.utils.saving import fail_checkpoint, read_checkpoint
from subbayes.utils.tensor_file import add_prefix, strip_prefix

__all__ = [
    "Density",
    "Info",
    "Kernel",
    "Sampler",
    "chain_generators",
    "prior_scale",
    "run",
    "start_points",
]

Rngs = list[np.random.Generator]
KIND = "sampling-checkpoint"
_RETRIES = 100
_MOST_STEPS = 200_000  # without a draw of any chain
_STATS, _COPIES = 4, 16  # numbers per draw and vectors per chain that every kernel holds


@runtime_checkable
class Density(Protocol):
    """The interface of a posterior that kernels use; implement it for a density of your own.

    Attributes:
        rank: number of coordinates k.
        prior: the Gaussian prior.
        temperature: T, the divisor of the log-likelihood.
    """

    rank: int
    prior: Normal
    temperature: float

    def log_likelihood(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, "chains"]:
        """Log-likelihood at temperature 1 of each chain's point."""

    def fingerprint(self) -> str:
        """A digest of the density, which identifies a checkpoint."""


@dataclass(frozen=True)
class Info:
    """The report of a step: which chains finished a draw, and statistics of those draws."""

    finished: Bool[np.ndarray, "chains"]
    stats: dict[str, np.ndarray]


@runtime_checkable
class Kernel(Protocol):
    """A sampler: a name, `init` and `step`.

    A kernel with settings is a dataclass of fields that JSON has; they are part of a checkpoint.
    The state is a frozen dataclass of NumPy arrays whose first axis is the chain, with a field
    `z` of shape (chains, k). An attribute `statistics`, if there is one, has the type (float, int
    or bool) of each statistic by name, with which those of a checkpoint are compared. A method
    `invalid`, if there is one, takes a state of a checkpoint and returns the name of an array with
    values that no run can have, or None.
    """

    name: str

    @property
    def state_type(self) -> type[Any]:
        """The class of the state."""

    def init(self, posterior: Any, z: Float[np.ndarray, "chains k"], rngs: Rngs) -> Any:
        """The state at start points z."""

    def step(self, posterior: Any, state: Any, rngs: Rngs) -> tuple[Any, Info]:
        """One batched evaluation: the new state and its report. May change `state` in place."""


@dataclass(frozen=True)
class Sampler(Engine):
    """An engine that runs a kernel on several Markov chains."""

    @abstractmethod
    def kernel(self, posterior: Any, warmup: int) -> Kernel:
        """The transition for this posterior, which may adapt in `warmup` draws per chain."""

    def default_warmup(self, sampling: Sampling) -> int:
        """Warm-up draws if the caller gives none: half of the draws kept."""
        return sampling.draws // 2

    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        warmup = self.default_warmup(sampling) if sampling.warmup is None else sampling.warmup
        return run(self.kernel(posterior, warmup), posterior, replace(sampling, warmup=warmup))


@dataclass
class _Store:
    """Draws so far, and the number of draws that each chain has finished."""

    z: np.ndarray
    stats: dict[str, np.ndarray]
    count: np.ndarray
    evaluations: int = 0

    def add(self, state: Any, info: Info, warmup: int, thin: int) -> None:
        self.evaluations += 1
        if not info.finished.any():
            return
        self.count += info.finished
        kept, phase = np.divmod(self.count - warmup - 1, thin)
        c = (
            info.finished & (phase == thin - 1) & (kept >= 0) & (kept < self.z.shape[1])
        ).nonzero()[0]
        if not c.size:
            return
        at = kept[c]
        self.z[c, at] = state.z[c]
        for name, values in info.stats.items():
            if name not in self.stats:
                self.stats[name] = np.zeros(self.z.shape[:2], dtype=values.dtype)
            self.stats[name][c, at] = values[c]

    def resized(self, draws: int) -> _Store:
        """A copy with another number of draws, cut or padded with zeros."""

        def fit(array: np.ndarray) -> np.ndarray:
            out = np.zeros((array.shape[0], draws, *array.shape[2:]), array.dtype)
            n = min(draws, array.shape[1])
            out[:, :n] = array[:, :n]
            return out

        return _Store(
            fit(self.z), {k: fit(v) for k, v in self.stats.items()}, self.count, self.evaluations
        )


def run(kernel: Kernel, posterior: Density, sampling: Sampling) -> Draws:
    """Run a kernel until every chain has its draws.

    A checkpoint is written every `checkpoint_seconds`, and on Ctrl-C and SIGTERM. A run that finds
    its own checkpoint resumes from it with the same draws, bit for bit, as an uninterrupted run; a
    larger number of draws extends it.

    Args:
        kernel: the transition.
        posterior: the density.
        sampling: the settings; a `warmup` of None is 0.

    Raises:
        InputError: a checkpoint of another posterior or other settings, or start points where
            the density is not finite.
    """
    draws, chains, thin, seed = sampling.draws, sampling.chains, sampling.thin, sampling.seed
    warmup = sampling.warmup or 0
    started = time.perf_counter()
    _check_memory(kernel, posterior, chains, draws)
    rngs = chain_generators(seed, chains)
    saved = None
    if sampling.checkpoint is not None:
        identity = _identity(kernel, posterior, sampling)
        saved = _Checkpoint(Path(sampling.checkpoint), kernel, identity, posterior.rank)
    state = kernel.init(posterior, start_points(posterior, sampling.initial, rngs), rngs)
    store = _Store(np.zeros((chains, draws, posterior.rank)), {}, np.zeros(chains, dtype=np.int64))
    resumed = saved.read(state, rngs) if saved else None
    if resumed is not None:
        state, store = resumed
        store = store.resized(max(draws, store.z.shape[1]))  # a longer run keeps its draws
    needed = warmup + draws * thin
    finished_chains = {
        int(c): _FinishedChain.of(state, rngs, c) for c in np.flatnonzero(store.count >= needed)
    }
    with (
        _interruptible(saved is not None) as interrupted,
        progress_bar(
            needed * chains, f"Sampling ({kernel.name})", sampling.progress, "draws"
        ) as steps,
    ):
        steps.update(int(np.minimum(store.count, needed).sum()))
        last, idle = time.monotonic(), 0
        while (active := store.count < needed).any():
            state, info = kernel.step(posterior, state, rngs)
            finished = info.finished & active
            store.add(state, Info(finished, info.stats), warmup, thin)
            idle += 1
            if idle > _MOST_STEPS:
                _fail_without_draws(kernel)
            if done := int(finished.sum()):
                idle = 0
                for c in (finished & (store.count == needed)).nonzero()[0]:
                    finished_chains[int(c)] = _FinishedChain.of(state, rngs, c)
                steps.update(done)
            if saved and (interrupted or time.monotonic() - last > sampling.checkpoint_seconds):
                saved.write(state, store, rngs, finished_chains)
                last = time.monotonic()
            if interrupted:
                break
    if interrupted:
        _raise_again(interrupted[0])
    if saved:
        saved.write(state, store, rngs, finished_chains)
    if store.z.shape[1] > draws:
        store = store.resized(draws)
    return Draws(
        store.z,
        store.stats,
        {
            "seed": seed,
            "warmup": warmup,
            "thin": thin,
            "batched_evaluations": store.evaluations,
            "seconds": time.perf_counter() - started,
        },
        engine=kernel.name,
        temperature=posterior.temperature,
    )


def _fail_without_draws(kernel: Kernel) -> NoReturn:
    fail(
        "posterior",
        f"a density from which {kernel.name} draws",
        f"no draw of any chain in {_MOST_STEPS} evaluations",
        "Check that it is finite where chains start, and delete a checkpoint that was changed",
    )


@dataclass(frozen=True)
class _FinishedChain:
    """The state of a chain when it had all its draws, from which a longer run continues.

    The chain keeps stepping, since all chains form one batch, but its draws are ignored.
    """

    row: dict[str, Any]
    rng: Any

    @classmethod
    def of(cls, state: Any, rngs: Rngs, c: Any) -> _FinishedChain:
        return cls(
            {name: array[c].copy() for name, array in vars(state).items()},
            rngs[c].bit_generator.state,
        )


def _check_memory(kernel: Kernel, posterior: Density, chains: int, draws: int) -> None:
    """Check that draws, states, weights and gradients fit into memory, by a lower bound."""
    k = posterior.rank
    matrices = 8 * k if getattr(kernel, "metric", "diagonal") == "dense" else 0
    numbers = draws * (k + _STATS) + k * (_COPIES + matrices)
    network = getattr(posterior, "network", None)
    weights = 0 if network is None else 2 * network.size * network.weights.element_size()
    check_memory(
        "chains",
        f"{chains} chains of {draws} draws",
        chains * (8 * numbers + weights),
        "Run fewer chains or draws, or thin them (thin=...)",
    )


def _identity(kernel: Kernel, posterior: Density, sampling: Sampling) -> dict[str, Any]:
    """What a checkpoint must have in common with a run that resumes from it."""
    initial = sampling.initial
    if not isinstance(initial, str):
        initial = artifact.fingerprint({"initial": np.asarray(initial, dtype=np.float64)}, {})
    identity = {
        "posterior": posterior.fingerprint(),
        "sampler": kernel.name,
        "chains": sampling.chains,
        "warmup": sampling.warmup or 0,
        "thin": sampling.thin,
        "seed": sampling.seed,
        "initial": initial,
    }
    if dataclasses.is_dataclass(kernel):
        identity["kernel settings"] = dataclasses.asdict(kernel)
    return identity


def prior_scale(posterior: Density) -> Float[np.ndarray, "k"]:
    """Standard deviation of the prior in each coordinate."""
    return np.broadcast_to(posterior.prior.scale, (posterior.rank,)).astype(np.float64)


def chain_generators(seed: int, chains: int) -> Rngs:
    """A random generator for each chain, independent of the number of chains.

    Example:
        >>> [rng.integers(100) for rng in chain_generators(0, 3)][:2] == [
        ...     rng.integers(100) for rng in chain_generators(0, 2)]
        True
    """
    return [
        np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(chains)
    ]


def start_points(
    posterior: Density, initial: str | np.ndarray, rngs: Rngs
) -> Float[np.ndarray, "chains k"]:
    """Start points where the density is finite; draws from the prior are repeated until it is.

    Args:
        posterior: the density.
        initial: as in `Sampling`.
        rngs: a generator per chain.

    Raises:
        InputError: start points of zero density, or of another shape.
    """
    chains, k = len(rngs), posterior.rank
    if isinstance(initial, str):
        z = np.zeros((chains, k))
        if initial == "prior":
            z = np.stack([posterior.prior.sample((k,), rng) for rng in rngs])
    else:
        z = np.array(initial, dtype=np.float64)
        if z.shape != (chains, k):
            fail("initial", f"shape ({chains}, {k})", z.shape)
    for _ in range(_RETRIES):
        bad = ~np.isfinite(posterior.log_likelihood(z))
        if not bad.any():
            return z
        if not isinstance(initial, str) or initial != "prior":
            break
        for c in np.flatnonzero(bad):
            z[c] = posterior.prior.sample((k,), rngs[c])
    fail(
        "initial",
        "start points where the log density is finite",
        f"minus infinity at {int(bad.sum())} of {chains}",
        "Use initial='shift', a narrower prior, or check the data and the trained weights",
    )


@dataclass(frozen=True)
class _Checkpoint:
    """The folder of a checkpoint, and the identity and rank of the runs that may resume from it."""

    path: Path
    kernel: Kernel
    identity: dict[str, Any]
    rank: int

    def write(
        self, state: Any, store: _Store, rngs: Rngs, finished_chains: dict[int, _FinishedChain]
    ) -> None:
        state = copy_state(state)
        for c, chain in finished_chains.items():
            for name, value in chain.row.items():
                getattr(state, name)[c] = value
        tensors = add_prefix("state", vars(state)) | add_prefix("stats", store.stats)
        tensors |= {"z": store.z, "count": store.count}
        meta = {
            "identity": self.identity,
            "evaluations": store.evaluations,
            "rngs": [
                finished_chains[c].rng if c in finished_chains else rng.bit_generator.state
                for c, rng in enumerate(rngs)
            ],
        }
        artifact.write(self.path, KIND, tensors, meta, overwrite=True)

    def read(self, fresh: Any, rngs: Rngs) -> tuple[Any, _Store] | None:
        found = read_checkpoint(self.path, KIND)
        if found is None:
            return None
        tensors, meta, _ = found
        for key, value in self.identity.items():
            if meta["identity"].get(key) != value:
                default = ", which follows draws unless it is given" if key == "warmup" else ""
                fail_checkpoint(f"one made with the same {key}{default}", f"another in {self.path}")
        shape = tensors["z"].shape
        if (shape[0], shape[2]) != (len(rngs), self.rank):
            expected = f"draws of {len(rngs)} chains of rank {self.rank}"
            fail_checkpoint(expected, f"shape {tuple(shape)}")
        arrays, stats = (
            {name: tensor.numpy() for name, tensor in strip_prefix(prefix, tensors).items()}
            for prefix in ("state", "stats")
        )
        wrong = _other_arrays(fresh, arrays)
        if wrong is None:
            state = self.kernel.state_type(**arrays)
            check = getattr(self.kernel, "invalid", None)
            wrong = invalid_values(state, ()) if check is None else check(state)
        if wrong is not None:
            expected = f"the state of the sampler {self.kernel.name}"
            fail_checkpoint(expected, f"other values of {wrong[:60]!r}")
        store = _Store(tensors["z"].numpy(), stats, tensors["count"].numpy(), meta["evaluations"])
        most = store.z.shape[1]
        kept = (store.count - self.identity["warmup"]) // self.identity["thin"]
        if (kept > most).any():  # draws that are not there would be zeros
            fail_checkpoint(f"at most {most} draws of each chain", f"counts of {int(kept.max())}")
        known = getattr(self.kernel, "statistics", None)
        if known is not None and (stats or (kept > 0).any()):
            types = {name: np.dtype(kind) for name, kind in known.items()}
            if {name: array.dtype for name, array in stats.items()} != types:
                expected = f"the statistics of {self.kernel.name}: {', '.join(known)}"
                fail_checkpoint(expected, "others, or of other types")
        for rng, rng_state in zip(rngs, meta["rngs"], strict=True):
            rng.bit_generator.state = rng_state
        return state, store


def _other_arrays(state: Any, arrays: dict[str, np.ndarray]) -> str | None:
    """The name of an array of another shape or dtype than a state has, if there is one."""
    expected = {name: (array.shape, array.dtype) for name, array in vars(state).items()}
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    return next((n for n in sorted(expected | found) if expected.get(n) != found.get(n)), None)


@contextmanager
def _interruptible(active: bool) -> Iterator[list[int]]:
    """Record SIGINT and SIGTERM instead of exiting, so that the run is saved first."""
    received: list[int] = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield received
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_again(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    os.kill(os.getpid(), number)

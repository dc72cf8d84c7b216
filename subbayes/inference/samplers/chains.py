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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from subbayes.artifacts.folder import write
from subbayes.artifacts.saving import fail_checkpoint, has_checkpoint, read_checkpoint
from subbayes.artifacts.tensors import add_prefix, fingerprint, strip_prefix
from subbayes.diagnostics import ebfmi
from subbayes.distributed.chain_groups import ChainGroups, divided_chains
from subbayes.distributed.processes import on_first
from subbayes.draws import Draws
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.shapes import ChainMask, ChainPoints
from subbayes.inference.samplers.states import copy_state
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import progress_bar

KIND = "sampling-checkpoint"
_OF_TRANSITIONS = ("divergent", "energy")  # statistics of which all transitions count
_OF_DENSITY = 0.01  # relative error of sums over observations in 16 bits


def check_folder(checkpoint: str | Path | None) -> None:
    """Check before anything is computed that a folder, if any, can hold or holds a checkpoint.

    Raises:
        InputError: as `has_checkpoint`.
    """
    if checkpoint is not None:
        on_first(lambda: has_checkpoint(checkpoint, KIND))


@dataclass
class Store:
    """Draws so far, and the number of draws that each chain has finished.

    Attributes:
        z: the draws kept.
        stats: their statistics.
        count: the draws of each chain, with those of the warm-up and those not kept.
        evaluations: batched evaluations.
        transitions: divergences and energies, also of draws that are not kept.
    """

    z: np.ndarray
    stats: dict[str, np.ndarray]
    count: np.ndarray
    evaluations: int = 0
    transitions: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, state: Any, info: Info, warmup: int, thin: int) -> None:
        """Add the draws that a step has finished."""
        self.evaluations += info.evaluations
        if not info.finished.any():
            return
        self.count += info.finished
        draws = self.z.shape[1]
        place = self.count - warmup - 1  # of the transition
        sampled = info.finished & (place >= 0) & (place < draws * thin)
        if thin > 1:
            each = {name: info.stats[name] for name in _OF_TRANSITIONS if name in info.stats}
            _put(self.transitions, each, sampled.nonzero()[0], place, draws * thin)
        c = (sampled & (place % thin == thin - 1)).nonzero()[0]
        if c.size:
            self.z[c, place[c] // thin] = state.z[c]
            _put(self.stats, info.stats, c, place // thin, draws)

    def all_stats(self, thin: int) -> dict[str, np.ndarray]:
        """The statistics, with those of all transitions that warnings use."""
        found, shape = dict(self.stats), self.z.shape[:2]
        if "divergent" in self.transitions:
            found["divergences"] = self.transitions["divergent"].reshape(*shape, thin).sum(2)
        if "energy" in self.transitions:
            found["ebfmi"] = np.repeat(ebfmi(self.transitions["energy"])[:, None], shape[1], 1)
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, whose first axis is the chain."""
        arrays = {"z": self.z, "count": self.count} | add_prefix("stats", self.stats)
        return arrays | add_prefix("transitions", self.transitions)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], evaluations: int) -> Store:
        """The inverse of `arrays`."""
        stats, transitions = (strip_prefix(name, arrays) for name in ("stats", "transitions"))
        return cls(arrays["z"], stats, arrays["count"], evaluations, transitions)

    def gathered(self, groups: ChainGroups) -> Store:
        """The draws of the chains of all processes."""
        evaluations = max(groups.gather(self.evaluations))  # those of the longest chain
        return Store.of(groups.gather_rows(self.arrays()), evaluations)

    def resized(self, draws: int) -> Store:
        """A copy with another number of draws, cut or padded with zeros."""
        before = self.z.shape[1]

        def fit(array: np.ndarray) -> np.ndarray:
            each = array.shape[1] // before  # transitions of a draw
            out = np.zeros((array.shape[0], draws * each, *array.shape[2:]), array.dtype)
            n = min(draws, before) * each
            out[:, :n] = array[:, :n]
            return out

        stats, transitions = (
            {name: fit(values) for name, values in part.items()}
            for part in (self.stats, self.transitions)
        )
        return replace(self, z=fit(self.z), stats=stats, transitions=transitions)


def _put(
    arrays: dict[str, np.ndarray],
    values: Mapping[str, np.ndarray],
    chains: np.ndarray,
    places: np.ndarray,
    length: int,
) -> None:
    """Store a value of each of these chains at its place."""
    for name, value in values.items():
        if name not in arrays:
            arrays[name] = np.zeros((len(value), length), dtype=value.dtype)
        arrays[name][chains, places[chains]] = value[chains]


@dataclass(frozen=True)
class FinishedChain:
    """The state of a chain when it had all its draws, from which a longer run continues.

    The chain keeps stepping, since all chains form one batch, but its draws are ignored.
    """

    row: dict[str, Any]
    rng: Any

    @classmethod
    def of(cls, state: Any, rngs: Rngs, c: Any) -> FinishedChain:
        """The state of a chain."""
        return cls(
            {name: array[c].copy() for name, array in vars(state).items()},
            rngs[c].bit_generator.state,
        )


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a checkpoint, and the identity and density of runs that may resume from it.

    It holds the chains of all processes, so that another number of them can resume it.
    """

    path: Path
    kernel: Kernel
    identity: dict[str, Any]
    posterior: Density
    groups: ChainGroups

    def write(
        self,
        state: Any,
        store: Store,
        rngs: Rngs,
        finished_chains: dict[int, FinishedChain],
        seconds: float,
    ) -> None:
        """Save the chains of all processes, and the seconds that they took."""
        state = copy_state(state)
        for c, chain in finished_chains.items():
            for name, value in chain.row.items():
                getattr(state, name)[c] = value
        store = store.gathered(self.groups)
        first = {"z": state.z[:1], "log_likelihood": self.posterior.log_likelihood(state.z[:1])}
        checked = self.groups.gather(first)[0]
        tensors = self.groups.gather_rows(add_prefix("state", vars(state))) | store.arrays()
        tensors |= add_prefix("checked", checked)
        generators = [
            finished_chains[c].rng if c in finished_chains else rng.bit_generator.state
            for c, rng in enumerate(rngs)
        ]
        meta = {
            "identity": self.identity,
            "evaluations": store.evaluations,
            "seconds": seconds,
            "rngs": [state for part in self.groups.gather(generators) for state in part],
        }
        write(self.path, KIND, tensors, meta, overwrite=True)

    def read(self, rngs: Rngs) -> tuple[Any, Store, float] | None:
        """State and draws of the chains of this process, and seconds; None if nothing is saved.

        Args:
            rngs: the generator of each chain, whose states are set.
        """
        checkpoint = self.groups.on_first(lambda: read_checkpoint(self.path, KIND))
        if checkpoint is None:
            return None
        tensors, meta, _ = checkpoint
        for key, value in self.identity.items():
            if meta["identity"].get(key) != value:
                default = ", which follows draws unless it is given" if key == "warmup" else ""
                fail_checkpoint(f"one made with the same {key}{default}", f"another in {self.path}")
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self._check_density(**strip_prefix("checked", arrays))
        chains = self.groups.own
        for rng, rng_state in zip(rngs, meta["rngs"][chains], strict=True):
            rng.bit_generator.state = rng_state
        own = {name: array[chains] for name, array in arrays.items()}
        state = self.kernel.state_type(**strip_prefix("state", own))
        return state, Store.of(own, meta["evaluations"]), meta["seconds"]

    def _check_density(
        self, z: Float[np.ndarray, "one k"], log_likelihood: Float[np.ndarray, "one"]
    ) -> None:
        """Compute the density of the first chain again: its code may have changed since."""
        computed = self.posterior.log_likelihood(z)
        if not np.allclose(log_likelihood, computed, rtol=_OF_DENSITY, atol=_OF_DENSITY):
            expected = "one of the same density, with its log-likelihood at the first chain"
            fail_checkpoint(expected, f"another in {self.path}")


Rngs = list[np.random.Generator]
_RETRIES = 100
_STATS, _COPIES = 4, 16  # numbers per draw and vectors per chain that every kernel holds


@dataclass(frozen=True)
class Info:
    """The report of a step.

    Attributes:
        finished: which chains finished a draw.
        stats: statistics of those draws.
        evaluations: batched evaluations of the step.
    """

    finished: ChainMask
    stats: dict[str, np.ndarray]
    evaluations: int = 1


@runtime_checkable
class Kernel(Protocol):
    """A sampler: a name, `init` and `step`.

    A kernel with settings is a dataclass of fields that JSON has; they are part of a checkpoint.
    The state is a frozen dataclass of NumPy arrays whose first axis is the chain, with a field
    `z` of shape (chains, k).
    """

    name: str

    @property
    def state_type(self) -> type[Any]:
        """The class of the state."""

    def init(self, posterior: Any, z: ChainPoints, rngs: Rngs) -> Any:
        """The state at start points z."""

    def step(self, posterior: Any, state: Any, rngs: Rngs) -> tuple[Any, Info]:
        """One batched evaluation, or as many for every chain: the new state and its report.

        May change `state` in place.
        """


@dataclass(frozen=True)
class Sampler(Engine):
    """An engine that runs a kernel on several Markov chains."""

    uses_initial: ClassVar[bool] = True

    @abstractmethod
    def kernel(self, posterior: Any, warmup: int) -> Kernel:
        """The transition for this posterior, which may adapt in `warmup` draws per chain."""

    def default_warmup(self, sampling: Sampling) -> int:
        """Warm-up draws if the caller gives none: half of the draws kept."""
        return sampling.draws // 2

    @override
    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        warmup = self.default_warmup(sampling) if sampling.warmup is None else sampling.warmup
        kernel = self.kernel(posterior, warmup)
        sampling = replace(sampling, warmup=warmup)
        return run(kernel, posterior, sampling)


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
        InputError: a checkpoint of another posterior or other settings, or start points where the
            density is not finite.
    """
    check_folder(sampling.checkpoint)
    check_same_run(kernel.name, posterior, sampling)
    with divided_chains(posterior, sampling.chains, sampling.chain_groups) as groups:
        return _run(kernel, posterior, sampling, groups)


def _run(kernel: Kernel, posterior: Density, sampling: Sampling, groups: ChainGroups) -> Draws:
    """Run the chains of this process, and return those of all."""
    draws, thin, seed = sampling.draws, sampling.thin, sampling.seed
    warmup = sampling.warmup or 0
    started = time.perf_counter()
    chains = groups.own.stop - groups.own.start
    _check_memory(kernel, posterior, chains, draws)
    rngs = chain_generators(seed, sampling.chains)[groups.own]
    saved = None
    if sampling.checkpoint is not None:
        identity = _identity(kernel, posterior, sampling)
        saved = Checkpoint(Path(sampling.checkpoint), kernel, identity, posterior, groups)
    resumed = saved.read(rngs) if saved else None
    if resumed is None:
        initial = _own_rows(sampling.initial, sampling.chains, groups)
        state = kernel.init(posterior, start_points(posterior, initial, rngs), rngs)
        store = Store(np.zeros((chains, draws, posterior.rank)), {}, np.zeros(chains, np.int64))
    else:
        state, store, seconds = resumed
        started -= seconds
        store = store.resized(max(draws, store.z.shape[1]))  # a longer run keeps its draws
    needed = warmup + draws * thin
    finished_chains = {
        int(c): FinishedChain.of(state, rngs, c) for c in np.flatnonzero(store.count >= needed)
    }
    with (
        _interruptible(saved is not None) as interrupted,
        progress_bar(
            needed * chains, f"Sampling ({kernel.name})", sampling.progress, "draws"
        ) as steps,
    ):
        steps.update(int(np.minimum(store.count, needed).sum()))
        last = begun = time.monotonic()
        stop, round_steps = 0, 1
        active, goes_on = store.count < needed, True
        while goes_on and not stop:
            for _ in range(round_steps):
                if not active.any():
                    break
                state, info = kernel.step(posterior, state, rngs)
                finished = info.finished & active
                store.add(state, replace(info, finished=finished), warmup, thin)
                if done := int(finished.sum()):
                    for c in (finished & (store.count == needed)).nonzero()[0]:
                        finished_chains[int(c)] = FinishedChain.of(state, rngs, c)
                    steps.update(done)
                active = store.count < needed
            now = time.monotonic()
            due = saved is not None and now - last > sampling.checkpoint_seconds
            stop, due, goes_on, round_steps = groups.exchange(
                max(interrupted, default=0), due, bool(active.any()), (now - begun) / round_steps
            )
            if saved and (stop or due):
                saved.write(state, store, rngs, finished_chains, time.perf_counter() - started)
                last = time.monotonic()
            begun = time.monotonic()
    if stop or interrupted:
        _raise_again(stop or interrupted[0])
    seconds = time.perf_counter() - started
    if saved:
        saved.write(state, store, rngs, finished_chains, seconds)
    if store.z.shape[1] > draws:
        store = store.resized(draws)
    gathered = store.gathered(groups)
    return Draws(
        gathered.z,
        gathered.all_stats(thin),
        {
            "seed": seed,
            "warmup": warmup,
            "thin": thin,
            "batched_evaluations": gathered.evaluations,
            "seconds": seconds,
        },
        engine=kernel.name,
        temperature=posterior.temperature,
    )


def _own_rows(initial: str | np.ndarray, chains: int, groups: ChainGroups) -> str | np.ndarray:
    """The start points of the chains of this process."""
    if isinstance(initial, str) or np.shape(initial)[:1] != (chains,):
        return initial
    return np.asarray(initial)[groups.own]


def _check_memory(kernel: Kernel, posterior: Density, chains: int, draws: int) -> None:
    """Check that draws, states, weights and gradients fit into memory, by a lower bound."""
    k = posterior.rank
    matrices = 8 * k if getattr(kernel, "metric", "diagonal") == "dense" else 0
    numbers = draws * (k + _STATS) + k * (_COPIES + matrices)
    network = getattr(posterior, "network", None)
    if network is None or getattr(network, "is_sharded", False):
        weights = 0
    else:
        weights = 2 * network.size * network.weights.element_size()
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
        initial = fingerprint({"initial": np.asarray(initial, dtype=np.float64)}, {})
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


def start_points(posterior: Density, initial: str | np.ndarray, rngs: Rngs) -> ChainPoints:
    """Start points where the density is finite; draws from the prior are repeated until it is.

    Args:
        posterior: the density.
        initial: as in `Sampling`.
        rngs: a generator per chain.

    Raises:
        InputError: start points of zero density, or of another shape.
    """
    chains, k = len(rngs), posterior.rank
    if isinstance(initial, str) and initial == "ensemble":
        fail(
            "initial",
            "'prior', 'shift' or an array (chains, k) for a posterior",
            "'ensemble'",
            "subbayes.fit trains the networks that chains start at",
        )
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
        f"an infinite one or NaN at {int(bad.sum())} of {chains}",
        "Use initial='shift', a narrower prior, or check the data and the trained weights",
    )


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

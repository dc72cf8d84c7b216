"""The draws of chains so far, and their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from subbayes.diagnostics.thinning import TRANSITION_STATISTICS, interval_statistics, interval_types
from subbayes.distributed.chain_groups import ChainGroups
from subbayes.distributed.processes import on_first
from subbayes.inference.samplers.random_numbers import copy_state
from subbayes.networks.validation import FirstOutputs
from subbayes.posterior import Posterior
from subbayes.utils import artifact
from subbayes.utils.saving import fail_checkpoint, has_checkpoint, read_checkpoint
from subbayes.utils.tensor_file import add_prefix, strip_prefix

if TYPE_CHECKING:
    from subbayes.inference.samplers.chains import Density, Info, Kernel, Rngs

__all__ = ["Checkpoint", "FinishedChain", "Store", "check_folder"]

KIND = "sampling-checkpoint"
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)
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
        transitions: divergences and energies since the last draw kept, shape (chains, thin).
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
        kept, phase = np.divmod(self.count - warmup - 1, thin)
        sampled = info.finished & (kept >= 0) & (kept < self.z.shape[1])
        if thin > 1:
            self._add_transitions(info, sampled.nonzero()[0], phase, thin)
        c = (sampled & (phase == thin - 1)).nonzero()[0]
        if not c.size:
            return
        at = kept[c]
        self.z[c, at] = state.z[c]
        stats = {name: values[c] for name, values in info.stats.items()}
        if self.transitions:
            stats |= interval_statistics(
                {name: values[c] for name, values in self.transitions.items()},
                self._energy_before(c, at),
            )
        for name, values in stats.items():
            if name not in self.stats:
                self.stats[name] = np.zeros(self.z.shape[:2], dtype=values.dtype)
            self.stats[name][c, at] = values

    def _add_transitions(self, info: Info, c: np.ndarray, phase: np.ndarray, thin: int) -> None:
        """Keep the statistics that draws not kept have an effect on."""
        for name in TRANSITION_STATISTICS:
            if name in info.stats:
                values = info.stats[name]
                if name not in self.transitions:
                    self.transitions[name] = np.zeros((len(values), thin), dtype=values.dtype)
                self.transitions[name][c, phase[c]] = values[c]

    def _energy_before(self, c: np.ndarray, at: np.ndarray) -> np.ndarray | None:
        """The energy of the last draw kept of each chain, NaN if there is none."""
        energy = self.stats.get("energy")
        if energy is None:
            return None
        return np.where(at > 0, energy[c, at - 1], np.nan)

    def gathered(self, groups: ChainGroups) -> Store:
        """The draws of the chains of all processes."""
        rows = groups.gather_rows(
            {"z": self.z, "count": self.count}
            | add_prefix("s", self.stats)
            | add_prefix("t", self.transitions)
        )
        evaluations = max(groups.gather(self.evaluations))  # those of the longest chain
        stats, transitions = strip_prefix("s", rows), strip_prefix("t", rows)
        return Store(rows["z"], stats, rows["count"], evaluations, transitions)

    def part(self, chains: slice) -> Store:
        """Some of the chains."""
        stats, transitions = (
            {name: values[chains] for name, values in arrays.items()}
            for arrays in (self.stats, self.transitions)
        )
        return Store(self.z[chains], stats, self.count[chains], self.evaluations, transitions)

    def resized(self, draws: int) -> Store:
        """A copy with another number of draws, cut or padded with zeros."""

        def fit(array: np.ndarray) -> np.ndarray:
            out = np.zeros((array.shape[0], draws, *array.shape[2:]), array.dtype)
            n = min(draws, array.shape[1])
            out[:, :n] = array[:, :n]
            return out

        return replace(self, z=fit(self.z), stats={k: fit(v) for k, v in self.stats.items()})


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

    def restore(self, state: Any, rngs: Rngs, c: Any) -> None:
        """Return the chain to this state, in place."""
        for name, value in self.row.items():
            getattr(state, name)[c] = value
        rngs[c].bit_generator.state = self.rng


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a checkpoint, and the identity and density of runs that may resume from it.

    It holds all chains, however they are divided among processes.
    """

    path: Path
    kernel: Kernel
    identity: dict[str, Any]
    posterior: Density
    groups: ChainGroups

    def write(
        self, state: Any, store: Store, rngs: Rngs, finished_chains: dict[int, FinishedChain]
    ) -> None:
        """Save the chains of all processes."""
        state = copy_state(state)
        for c, chain in finished_chains.items():
            for name, value in chain.row.items():
                getattr(state, name)[c] = value
        store = store.gathered(self.groups)
        tensors = self.groups.gather_rows(add_prefix("state", vars(state)))
        tensors |= add_prefix("stats", store.stats) | {"z": store.z, "count": store.count}
        tensors |= add_prefix("transitions", store.transitions)
        own = [
            finished_chains[c].rng if c in finished_chains else rng.bit_generator.state
            for c, rng in enumerate(rngs)
        ]
        meta = {
            "identity": self.identity,
            "evaluations": store.evaluations,
            "rngs": [state for part in self.groups.gather(own) for state in part],
        }
        if (outputs := self._first_outputs) is not None:
            tensors["first_outputs"] = outputs.values.numpy()
            meta["device"] = outputs.device
        artifact.write(self.path, KIND, tensors, meta, overwrite=True)

    def read(self, fresh: Any, rngs: Rngs) -> tuple[Any, Store] | None:
        """The state and the draws of the chains of this process, or None if nothing is saved.

        Args:
            fresh: a state of these chains, for the shapes of its arrays.
            rngs: the generator of each chain, whose states are set.
        """
        found = self.groups.on_first(lambda: read_checkpoint(self.path, KIND))
        if found is None:
            return None
        tensors, meta, _ = found
        for key, value in self.identity.items():
            if meta["identity"].get(key) != value:
                default = ", which follows draws unless it is given" if key == "warmup" else ""
                fail_checkpoint(f"one made with the same {key}{default}", f"another in {self.path}")
        outputs = tensors.pop("first_outputs", None)
        if outputs is not None and (expected_outputs := self._first_outputs) is not None:
            assert isinstance(self.posterior, Posterior)
            saved = FirstOutputs(outputs, meta["device"])
            if not saved.agrees_with(expected_outputs, self.posterior.network.rounding):
                expected = "one of a module and output= that return the same outputs"
                fail_checkpoint(expected, f"others at the same weights in {self.path}")
        shape = tensors["z"].shape
        if (shape[0], shape[2]) != (self.identity["chains"], self.posterior.rank):
            expected = f"draws of {self.identity['chains']} chains of rank {self.posterior.rank}"
            fail_checkpoint(expected, f"shape {tuple(shape)}")
        for name, tensor in tensors.items():
            if tensor.dtype not in _DTYPES:
                fail_checkpoint("arrays of numbers that NumPy has", f"{tensor.dtype} in {name!r}")
        arrays, stats, transitions = (
            {name: tensor.numpy() for name, tensor in strip_prefix(prefix, tensors).items()}
            for prefix in ("state", "stats", "transitions")
        )
        wrong = _other_arrays(fresh, arrays, self.identity["chains"])
        if wrong is not None:
            expected = f"the arrays of the state of the sampler {self.kernel.name}"
            fail_checkpoint(expected, f"another shape or dtype of {wrong[:60]!r}")
        self._check_density(self.kernel.state_type(**arrays))
        store = Store(
            tensors["z"].numpy(), stats, tensors["count"].numpy(), meta["evaluations"], transitions
        )
        most = store.z.shape[1]
        kept = (store.count - self.identity["warmup"]) // self.identity["thin"]
        if (kept > most).any():  # draws that are not there would be zeros
            fail_checkpoint(f"at most {most} draws of each chain", f"counts of {int(kept.max())}")
        known = getattr(self.kernel, "statistics", None)
        if known is not None:
            self._check_statistics(known, store, bool((kept > 0).any()))
        own = self.groups.own
        for rng, rng_state in zip(rngs, meta["rngs"][own], strict=True):
            rng.bit_generator.state = rng_state
        state = self.kernel.state_type(**{name: array[own] for name, array in arrays.items()})
        return state, store.part(own)

    @cached_property
    def _first_outputs(self) -> FirstOutputs | None:
        """The outputs of the first rows; None of a density without a network in this process."""
        if not isinstance(self.posterior, Posterior) or self.posterior.network.is_sharded:
            return None
        network = self.posterior.network
        return FirstOutputs.of(network, self.posterior.subspace.shift, self.posterior.data)

    def _check_statistics(self, known: dict[str, type], store: Store, has_draws: bool) -> None:
        """Check the names and types of statistics, and their shapes between draws."""
        thin, chains = self.identity["thin"], self.identity["chains"]
        all_known = known | interval_types(known, thin)
        own = {name: known[name] for name in TRANSITION_STATISTICS if name in known and thin > 1}
        for arrays, types, needed in (
            (store.stats, all_known, has_draws),
            (store.transitions, own, has_draws),
        ):
            found = {name: array.dtype for name, array in arrays.items()}
            if (arrays or needed) and found != {n: np.dtype(kind) for n, kind in types.items()}:
                expected = f"the statistics of {self.kernel.name}: {', '.join(types)}"
                fail_checkpoint(expected, "others, or of other types")
        if any(array.shape != (chains, thin) for array in store.transitions.values()):
            fail_checkpoint(f"statistics of {thin} transitions", "those of another number")

    def _check_density(self, state: Any) -> None:
        """Check points and log densities of a state: code of the density may have changed since."""
        if not np.isfinite(state.z).all():
            fail_checkpoint("finite points of the chains", "others")
        densities = getattr(self.kernel, "densities", None)
        if densities is None:
            return
        stored, computed = densities(self.posterior, state)
        if not np.allclose(stored, computed, rtol=_OF_DENSITY, atol=_OF_DENSITY):
            expected = "one of the same density, with its log densities at the points of the chains"
            fail_checkpoint(expected, "other log densities")


def _other_arrays(state: Any, arrays: dict[str, np.ndarray], chains: int) -> str | None:
    """The name of an array of another shape or dtype than a state has, if there is one."""
    expected = {
        name: ((chains, *array.shape[1:]), array.dtype) for name, array in vars(state).items()
    }
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    return next((n for n in sorted(expected | found) if expected.get(n) != found.get(n)), None)

"""Checkpoints of `fit`: the trained subspace, the chosen temperature and the sampling run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.distributed.divided_rows import gathered
from subbayes.distributed.processes import current, on_first
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.likelihoods import Likelihood
from subbayes.models.fitted import FittedModel
from subbayes.networks.network import Network
from subbayes.networks.validation import FirstOutputs
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches
from subbayes.priors import EvidencePrior, Normal
from subbayes.subspace import DenseSubspace, Subspace
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.subspaces.full import Full
from subbayes.subspaces.optimal import Optimal
from subbayes.subspaces.pca import PCA
from subbayes.subspaces.random import Random
from subbayes.utils import artifact
from subbayes.utils.checks import InputError
from subbayes.utils.saving import (
    fail_checkpoint,
    has_checkpoint,
    nested_facts,
    read_checkpoint,
    rebuild,
)
from subbayes.utils.schema_parts import METHODS
from subbayes.utils.strict_json import decode, encode
from subbayes.utils.trees import leaves, to_device

__all__ = [
    "PARTS",
    "FitCheckpoint",
    "check_checkpoint",
    "check_saved_prior",
    "check_saved_subspace",
    "delete_checkpoint",
    "parts_of",
]

PARTS = {
    "preset": "preset-checkpoint",
    "trained": "subspace-checkpoint",
    "temperature": "temperature-checkpoint",
    "sampling": "sampling-checkpoint",
    "sparse": "sparse-training-checkpoint",
}
"""Folders in a checkpoint folder, with the kinds of their artifacts."""


@dataclass(frozen=True)
class FitCheckpoint:
    """The folder from which an interrupted `fit` resumes.

    Attributes:
        folder: the folder; it need not exist.
        identity: digest of everything that determines the trained subspace, but for the code of
            the module and of `output`, which the outputs of the first rows identify.
        data: training data.
    """

    folder: Path
    identity: str
    data: Data

    @classmethod
    def of(
        cls, folder: str | Path, network: Network, data: Data, inputs: Any, settings: dict[str, Any]
    ) -> FitCheckpoint:
        """The checkpoint of a call with an untrained network.

        Args:
            folder: the folder; it need not exist.
            network: before training.
            data: training data.
            inputs: inputs for which the subspace is chosen, or None.
            settings: those of `fit_settings`.
        """
        tensors = {"weights": network.weights} | network.used_frozen | _tensors_of_inputs(inputs)
        facts = settings | {"architecture": network.architecture}
        if data.division is None:
            tensors |= _tensors(data)
        else:
            own = artifact.fingerprint(_tensors(data) if data.n else {}, {})
            facts |= {"rows of each process": gathered(data, own)}
        return cls(Path(folder), artifact.fingerprint(tensors, facts), data)

    @property
    def sampling(self) -> Path:
        """The folder of the sampling run."""
        return self.folder / "sampling"

    def load(
        self,
        model: nn.Module,
        output: Callable[[Any], Tensor] | None,
        likelihood: Likelihood | None,
        device: torch.device,
    ) -> FittedModel | None:
        """Load the trained subspace, or return None if there is none.

        Args:
            model: the module.
            output: as for `fit`.
            likelihood: replaces the saved one, or None.
            device: that of the network before training, where `fit` continues.

        Raises:
            InputError: a damaged checkpoint, or one of another call.
        """
        found = on_first(lambda: read_checkpoint(self.folder / "trained", PARTS["trained"]))
        if found is None:
            return None
        kind, facts = found.facts["model"]["kind"], found.facts["model"]["facts"]
        given = {"module": model, "output": output, "likelihood": likelihood}
        options = {name: value for name, value in given.items() if value is not None}
        try:
            tensors = to_device(found.tensors, device)
            saved = FirstOutputs(tensors.pop("first_outputs").cpu(), found.facts["device"])
            trained: FittedModel = rebuild(kind, tensors, facts, options)
        except InputError as error:
            raise InputError("checkpoint", error.expected, error.got, error.remedy) from error
        if found.facts["identity"] != self.identity:
            expected = "one made with the same model, data and settings"
            fail_checkpoint(expected, f"another in {self.folder}")
        outputs = FirstOutputs.of(trained.network, trained.network.weights, self.data)
        if not saved.agrees_with(outputs, trained.network.rounding):
            expected = "one of a module and output= that return the same outputs"
            fail_checkpoint(expected, f"others at the same weights in {self.folder}")
        return trained

    def save(self, trained: FittedModel) -> None:
        """Save the trained subspace, a model without draws."""
        outputs = FirstOutputs.of(trained.network, trained.network.weights, self.data)
        facts = {
            "identity": self.identity,
            "device": outputs.device,
            "model": nested_facts(trained),
        }
        tensors = trained.tensors() | {"first_outputs": outputs.values}
        artifact.write(self.folder / "trained", PARTS["trained"], tensors, facts, overwrite=True)

    def temperature(self, posterior: Posterior, by: str, **options: Any) -> TemperatureChoice:
        """Load the chosen temperature, or choose it with `choose_temperature` and save it."""
        path, held_out = self.folder / "temperature", options.get("validation")
        identity = artifact.fingerprint(
            {} if held_out is None else _tensors(Data.of(held_out, "validation")),
            {
                "posterior": posterior.with_temperature(1.0).fingerprint(),
                "by": by,
                "seed": options["seed"],
            },
        )
        found = on_first(lambda: read_checkpoint(path, PARTS["temperature"]))
        if found is not None and found.facts["identity"] == identity:
            return TemperatureChoice.of(found.facts["choice"])
        choice = choose_temperature(posterior, by=by, **options)
        facts = {"identity": identity, "choice": dataclasses.asdict(choice)}
        artifact.write(path, PARTS["temperature"], {}, facts, overwrite=True)
        return choice


def check_checkpoint(folder: str | Path | None) -> None:
    """Check all parts of a checkpoint before the first is computed.

    Args:
        folder: the folder; it need not exist. None for no checkpoint.

    Raises:
        InputError: as `has_checkpoint`, for one of the parts.

    Example:
        >>> check_checkpoint("new/folder")
    """
    if folder is not None:
        for name, kind in PARTS.items():
            has_checkpoint(Path(folder) / name, kind)


def parts_of(folder: str | Path) -> set[str]:
    """Names of the parts of a checkpoint that are there.

    Example:
        >>> parts_of("no/such/folder")
        set()
    """
    return {name for name, kind in PARTS.items() if artifact.kind_of(Path(folder) / name) == kind}


def delete_checkpoint(folder: str | Path) -> None:
    """Delete the checkpoints in a folder, and the folder if it is then empty.

    Files and artifacts that do not belong to a checkpoint are not deleted, nor are the targets of
    symbolic links in the folder.

    Args:
        folder: the folder; it need not exist.

    Example:
        >>> delete_checkpoint("no/such/folder")
    """
    for name, kind in PARTS.items():
        artifact.delete(Path(folder) / name, kind)
    with suppress(OSError):
        Path(folder).rmdir()


def check_saved_subspace(
    saved: FittedModel,
    method: SubspaceMethod,
    network: Network,
    settings: dict[str, Any],
    seed: int,
) -> None:
    """Check the subspace of a checkpoint against what the method of the call builds."""
    space, rank = saved.subspace, method.expected_rank(network)
    if saved.settings != decode(encode(settings)):
        fail_checkpoint("the settings of this call", "others")
    given = method.subspace if isinstance(method, FixedSubspace) else None
    dtype = network.dtype if given is None else given.shift.dtype
    if space.shift.dtype != dtype:
        fail_checkpoint(f"weights of {dtype}, as this call has", str(space.shift.dtype))
    kind = space.config()["name"]
    expected = (given.config()["name"],) if given else METHODS.get(method.name, (kind,))
    if isinstance(method, Random):
        expected = (method.subspace_class(network).__name__,)
    if kind not in expected:
        fail_checkpoint(f"a {expected[0]}, as this call builds", f"a {kind}")
    # A trajectory or a Jacobian may span fewer directions.
    fewer = isinstance(method, Optimal) or (isinstance(method, PCA) and method.rank is None)
    if rank is not None and not (space.rank == rank or (fewer and space.rank < rank)):
        fail_checkpoint(f"a subspace of rank {rank}, as this call builds", f"rank {space.rank}")
    if given and not _are_equal(space, given):
        fail_checkpoint("the subspace of this call", "another")
    if isinstance(method, Random) and space.config()["seed"] != seed:
        fail_checkpoint(
            f"the random directions of seed {seed}", f"those of seed {space.config()['seed']}"
        )
    dense = isinstance(space, DenseSubspace) and method.name in METHODS
    if dense and not bool(space.basis().any(1).all()):
        fail_checkpoint("a basis of directions", "directions of length 0")
    if isinstance(method, Full) and method.centre == "zero" and bool(space.shift.any()):
        fail_checkpoint("all weights around zero", "another centre")


def _are_equal(one: Subspace, other: Subspace) -> bool:
    """Whether subspaces have the same settings and the same tensors."""
    a, b = one.tensors(), other.tensors()
    return one.config() == other.config() and all(
        torch.equal(tensor.cpu(), b[name].cpu()) for name, tensor in a.items()
    )


def check_saved_prior(
    saved: FittedModel,
    method: SubspaceMethod,
    prior: Normal | EvidencePrior | float,
    network: Network,
) -> None:
    """Check the prior of a checkpoint against the call, which determines all but its evidence."""
    evidence = isinstance(prior, EvidencePrior)
    scale = 1.0 if isinstance(prior, (Normal, EvidencePrior)) else prior
    scale = method.prior_scale(scale, network)
    expected = prior if isinstance(prior, Normal) else method.prior(saved.subspace, scale)
    for name in ("mean",) if evidence else ("mean", "scale", "factor"):
        own, other = getattr(saved.prior, name), getattr(expected, name)
        if (own is None) != (other is None) or not (
            own is None or (own.shape == other.shape and np.allclose(own, other, rtol=1e-6))
        ):
            fail_checkpoint(f"the prior {expected!r} of this call", f"another {name}")


def _tensors_of_inputs(inputs: Any) -> dict[str, Tensor]:
    """All tensors of inputs, or of a loader of them, under unique names."""
    return {
        f"inputs.{i}.{j}": t
        for i, batch in enumerate([] if inputs is None else input_batches(inputs))
        for j, t in enumerate(leaves(batch))
    }


def check_same_inputs(inputs: Any, data: Data) -> None:
    """Check that all processes choose a subspace for the same inputs, if each has rows of its own.

    Raises:
        InputError: in all processes, if they differ.

    Example:
        >>> x = torch.zeros(3, 1)
        >>> check_same_inputs(x, Data.of((x, x[:, 0])))
    """
    processes = current()
    if processes is not None and data.division is not None:
        digest = artifact.fingerprint(_tensors_of_inputs(inputs), {})
        remedy = "Give the subspace the same inputs in every process"
        processes.agree({"inputs of the subspace": digest}, remedy)


def _tensors(data: Data) -> dict[str, Tensor]:
    """All tensors of the data under unique names."""
    return {
        f"data.{i}.{j}": t
        for i, (x, y) in enumerate(data.batches(65536))
        for j, t in enumerate([*leaves(x), *leaves(y)])
    }

"""Checkpoints of `fit`: the trained subspace, the chosen temperature and the sampling run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subbayes.artifacts.folder import delete, kind_of, write
from subbayes.artifacts.saving import Nested, fail_checkpoint, has_checkpoint, read_checkpoint
from subbayes.artifacts.tensors import fingerprint
from subbayes.data.data import Data
from subbayes.distributed.divided_rows import gathered
from subbayes.distributed.processes import on_first
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.models.fitted import FittedModel
from subbayes.networks.network import Network
from subbayes.networks.validation import FirstOutputs
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches
from subbayes.subspace import Subspace
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.utils.checks import InputError, error_text
from subbayes.utils.trees import leaves

__all__ = ["PARTS", "FitCheckpoint", "check_checkpoint", "delete_checkpoint", "parts_of"]

STACK_PARTS = tuple(
    f"{stage}-{m}{noise}"
    for stage in ("candidate", "member")
    for m in range(10)
    for noise in ("", "-constant")
)
"""Folders of the chains of a stack of hierarchical networks."""

PARTS = {
    **dict.fromkeys(STACK_PARTS, "sampling-checkpoint"),
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
        identity: digest of everything that determines the trained subspace, except for the code
            of the module and of `output`; the outputs of the first rows identify these.
        data: training data.
    """

    folder: Path
    identity: str
    data: Data

    @classmethod
    def of(
        cls,
        folder: str | Path,
        network: Network,
        data: Data,
        method: SubspaceMethod,
        settings: dict[str, Any],
    ) -> FitCheckpoint:
        """The checkpoint of a call with an untrained network.

        Args:
            folder: the folder; it need not exist.
            network: before training.
            data: training data.
            method: how the subspace is chosen.
            settings: those of `fit_settings`.
        """
        tensors = {"weights": network.weights} | network.used_frozen | tensors_of_inputs(method)
        facts = settings | {"architecture": network.architecture}
        if data.division is None:
            tensors |= _tensors(data)
        else:
            digest = fingerprint(_tensors(data) if data.n else {}, {})
            facts |= {"rows of each process": gathered(data, digest)}
        return cls(Path(folder), fingerprint(tensors, facts), data)

    @property
    def sampling(self) -> Path:
        """The folder of the sampling run."""
        return self.folder / "sampling"

    def load(
        self, restore: Callable[[dict[str, Tensor], Any], FittedModel], method: SubspaceMethod
    ) -> FittedModel | None:
        """Load the trained subspace, or return None if there is none.

        Args:
            restore: makes the model from its tensors and facts.
            method: how the subspace is chosen.

        Raises:
            InputError: a damaged checkpoint, or one of another call.
        """
        checkpoint = on_first(lambda: read_checkpoint(self.folder / "trained", PARTS["trained"]))
        if checkpoint is None:
            return None
        try:
            tensors = dict(checkpoint.tensors)
            saved = FirstOutputs(tensors.pop("first_outputs").cpu(), checkpoint.facts["device"])
            trained = restore(tensors, checkpoint.facts["model"]["facts"])
        except InputError as error:
            fail_checkpoint("one of this model", error_text(error))
        if checkpoint.facts["identity"] != self.identity:
            expected = "one made with the same model, data and settings"
            fail_checkpoint(expected, f"another in {self.folder}")
        outputs = FirstOutputs.of(trained.network, trained.network.weights, self.data)
        if not saved.agrees_with(outputs, trained.network.rounding):
            expected = "one of a module and output= that return the same outputs"
            fail_checkpoint(expected, f"others at the same weights in {self.folder}")
        if isinstance(method, FixedSubspace) and not _are_equal(trained.subspace, method.subspace):
            fail_checkpoint("the subspace of this call", "another")  # no setting holds its tensors
        return trained

    def save(self, trained: FittedModel) -> None:
        """Save the trained subspace, a model without draws."""
        outputs = FirstOutputs.of(trained.network, trained.network.weights, self.data)
        facts = {"identity": self.identity, "device": outputs.device, "model": Nested.of(trained)}
        tensors = trained.tensors() | {"first_outputs": outputs.values}
        write(self.folder / "trained", PARTS["trained"], tensors, facts, overwrite=True)

    def temperature(self, posterior: Posterior, by: str, **options: Any) -> TemperatureChoice:
        """Load the chosen temperature, or choose it with `choose_temperature` and save it."""
        path, held_out = self.folder / "temperature", options.get("validation")
        identity = fingerprint(
            {} if held_out is None else _tensors(Data.of(held_out, "validation")),
            {
                "posterior": posterior.with_temperature(1.0).fingerprint(),
                "by": by,
                "seed": options["seed"],
                "inference": repr(options.get("inference")),
            },
        )
        checkpoint = on_first(lambda: read_checkpoint(path, PARTS["temperature"]))
        if checkpoint is not None and checkpoint.facts["identity"] == identity:
            return TemperatureChoice.of(checkpoint.facts["choice"])
        choice = choose_temperature(posterior, by=by, **options)
        facts = {"identity": identity, "choice": dataclasses.asdict(choice)}
        write(path, PARTS["temperature"], {}, facts, overwrite=True)
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
    return {name for name, kind in PARTS.items() if kind_of(Path(folder) / name) == kind}


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
        delete(Path(folder) / name, kind)
    with suppress(OSError):
        Path(folder).rmdir()


def _are_equal(one: Subspace, other: Subspace) -> bool:
    """Whether subspaces have the same settings and the same tensors."""
    a, b = one.tensors(), other.tensors()
    return one.config() == other.config() and all(
        torch.equal(tensor.cpu(), b[name].cpu()) for name, tensor in a.items()
    )


def tensors_of_inputs(method: SubspaceMethod) -> dict[str, Tensor]:
    """All tensors of the inputs for which a subspace is chosen, under unique names."""
    inputs = getattr(method, "inputs", None)
    return {
        f"inputs.{i}.{j}": t
        for i, batch in enumerate([] if inputs is None else input_batches(inputs))
        for j, t in enumerate(leaves(batch))
    }


def _tensors(data: Data) -> dict[str, Tensor]:
    """All tensors of the data under unique names."""
    return {
        f"data.{i}.{j}": t
        for i, (x, y) in enumerate(data.batches(65536))
        for j, t in enumerate([*leaves(x), *leaves(y)])
    }

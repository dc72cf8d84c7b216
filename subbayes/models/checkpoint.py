"""Checkpoints of `fit`: the trained subspace, the chosen temperature and the sampling run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subbayes.data.data import Data, leaves
from subbayes.distributed.processes import on_first
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.likelihoods import Likelihood
from subbayes.models.fitted import FittedModel, rebuild
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches
from subbayes.utils import artifact
from subbayes.utils.checks import InputError
from subbayes.utils.saving import fail_checkpoint, nested_facts, read_checkpoint

__all__ = ["PARTS", "FitCheckpoint", "delete_checkpoint"]

PARTS = {
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
        identity: digest of everything that determines the trained subspace.
    """

    folder: Path
    identity: str

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
        tensors = {"weights": network.weights} | network.frozen | _tensors(data)
        for i, batch in enumerate([] if inputs is None else input_batches(inputs)):
            tensors |= {f"inputs.{i}.{j}": t for j, t in enumerate(leaves(batch))}
        facts = settings | {"architecture": network.architecture}
        return cls(Path(folder), artifact.fingerprint(tensors, facts))

    @property
    def sampling(self) -> Path:
        """The folder of the sampling run."""
        return self.folder / "sampling"

    def load(
        self,
        model: nn.Module,
        output: Callable[[Any], Tensor] | None,
        likelihood: Likelihood | None,
    ) -> FittedModel | None:
        """Load the trained subspace, or return None if there is none.

        Args:
            model: the module.
            output: as for `fit`.
            likelihood: replaces the saved one, or None.

        Raises:
            InputError: a damaged checkpoint, or one of another call.
        """
        found = on_first(lambda: read_checkpoint(self.folder / "trained", PARTS["trained"]))
        if found is None:
            return None
        facts = found.facts["model"]["facts"]
        try:
            trained = rebuild(found.tensors, facts, model, output=output, likelihood=likelihood)
        except InputError as error:
            raise InputError("checkpoint", error.expected, error.got, error.remedy) from error
        if found.facts["identity"] != self.identity:
            expected = "one made with the same model, data and settings"
            fail_checkpoint(expected, f"another in {self.folder}")
        return trained

    def save(self, trained: FittedModel) -> None:
        """Save the trained subspace, a model without draws."""
        facts = {"identity": self.identity, "model": nested_facts(trained)}
        artifact.write(
            self.folder / "trained", PARTS["trained"], trained.tensors(), facts, overwrite=True
        )

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


def _tensors(data: Data) -> dict[str, Tensor]:
    """All tensors of the data under unique names."""
    return {
        f"data.{i}.{j}": t
        for i, (x, y) in enumerate(data.batches(65536))
        for j, t in enumerate([*leaves(x), *leaves(y)])
    }

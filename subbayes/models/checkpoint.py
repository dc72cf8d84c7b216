"""Checkpoints of `fit`: the trained subspace, the chosen temperature and the sampling run."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subbayes.data.data import Data, leaves
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.likelihoods import Likelihood
from subbayes.models.fitted import FittedModel, load
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches
from subbayes.utils import artifact
from subbayes.utils.checks import InputError, fail

__all__ = ["FitCheckpoint", "clear_checkpoint"]

_TEMPERATURE = "temperature-choice"
_PARTS = ("trained", "temperature", "sampling")


@dataclass(frozen=True)
class FitCheckpoint:
    """The folder from which an interrupted `fit` resumes.

    Attributes:
        folder: the folder; it need not exist.
        identity: digest of all that determines the trained subspace.
    """

    folder: Path
    identity: str

    @classmethod
    def of(
        cls, folder: str | Path, network: Network, data: Data, inputs: Any, settings: dict[str, Any]
    ) -> FitCheckpoint:
        """The checkpoint of a call.

        Args:
            folder: the folder.
            network: before training.
            data: training data.
            inputs: for which the subspace is chosen, or None.
            settings: how it is trained and built.
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
        """The trained subspace, if the folder holds one.

        Args:
            model: the module.
            output: as for `fit`.
            likelihood: in place of the saved one.

        Raises:
            InputError: a damaged checkpoint, or one of another call.
        """
        path = self.folder / "trained"
        if not artifact.is_artifact(path):
            return None
        try:
            trained = load(path, model, output=output, likelihood=likelihood)
        except InputError as error:
            raise InputError(f"checkpoint: {error}") from error
        if trained.extra.get("identity") != self.identity:
            fail(
                "checkpoint",
                "one made with the same model, data and settings",
                f"another in {self.folder}",
                "Delete it to start again, or choose another path",
            )
        return trained

    def save(self, trained: FittedModel) -> None:
        """Save the trained subspace.

        Args:
            trained: a model without draws.
        """
        marked = dataclasses.replace(trained, extra={"identity": self.identity})
        marked.save(self.folder / "trained", overwrite=True)

    def temperature(self, posterior: Posterior, by: str, **options: Any) -> TemperatureChoice:
        """The temperature that an earlier call chose, or choose it now.

        Args:
            posterior: the posterior.
            by: "loo" or "validation".
            options: of `choose_temperature`.
        """
        path, held_out = self.folder / "temperature", options.get("validation")
        identity = artifact.fingerprint(
            {} if held_out is None else _tensors(Data.of(held_out, "validation")),
            {
                "posterior": posterior.with_temperature(1.0).fingerprint(),
                "by": by,
                "seed": options["seed"],
            },
        )
        if artifact.is_artifact(path):
            _, saved = artifact.read(path, _TEMPERATURE)
            if saved["identity"] == identity:
                facts: dict[str, Any] = {
                    k: tuple(v) if isinstance(v, list) else v for k, v in saved["choice"].items()
                }
                return TemperatureChoice(**facts)
        choice = choose_temperature(posterior, by=by, **options)
        facts = {"identity": identity, "choice": dataclasses.asdict(choice)}
        artifact.write(path, _TEMPERATURE, {}, facts, overwrite=True)
        return choice


def clear_checkpoint(folder: str | Path) -> None:
    """Remove what `fit` saved in its checkpoint folder, and the folder if that empties it.

    Args:
        folder: the folder; it need not exist.

    Example:
        >>> clear_checkpoint("no/such/folder")
    """
    for name in _PARTS:
        path = Path(folder) / name
        if artifact.is_artifact(path):
            shutil.rmtree(path)
    with suppress(OSError):
        Path(folder).rmdir()


def _tensors(data: Data) -> dict[str, Tensor]:
    """All tensors of the data under unique names."""
    return {
        f"data.{i}.{j}": t
        for i, (x, y) in enumerate(data.batches(65536))
        for j, t in enumerate([*leaves(x), *leaves(y)])
    }

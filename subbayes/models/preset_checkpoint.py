"""The checkpoint of a preset: what it chose, and the numbers of steps that it planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.models.presets import Preset, check_preset_choice
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import Rows
from subbayes.utils import artifact
from subbayes.utils.configuration import to_mapping
from subbayes.utils.saving import fail_checkpoint, read_checkpoint

__all__ = ["PresetCheckpoint", "check_saved_choice"]

_KIND = "preset-checkpoint"


@dataclass(frozen=True)
class PresetCheckpoint:
    """Where an interrupted fit keeps its choice and its numbers of steps."""

    folder: Path | None
    identity: str

    @classmethod
    def of(
        cls, rows: Rows, task: str, settings: TableSettings, weights: Float[np.ndarray, "n"] | None
    ) -> PresetCheckpoint:
        """The checkpoint in the folder of the sampling, if it has one."""
        if settings.sampling.checkpoint is None:
            return cls(None, "")
        own = replace(settings.sampling, checkpoint=None, progress=None)
        facts = {"task": task, "settings": to_mapping(replace(settings, sampling=own))}
        if settings.given:  # also values that are those of the defaults
            facts["given"] = sorted(settings.given)
        arrays = {"x": rows[0], "y": rows[1]} | ({} if weights is None else {"weights": weights})
        return cls(
            Path(settings.sampling.checkpoint) / "preset", artifact.fingerprint(arrays, facts)
        )

    def read(self, part: str) -> dict[str, Any] | None:
        """What was saved of a part, "choice" or "plan", or None."""
        found = None if self.folder is None else read_checkpoint(self.folder, _KIND)
        if found is None:
            return None
        if found.facts["identity"] != self.identity:
            fail_checkpoint("one made with the same rows and settings", f"another in {self.folder}")
        return found.facts[part]

    def write(self, part: str, values: dict[str, Any]) -> None:
        """Save a part; a plan comes after a choice."""
        if self.folder is None:
            return
        facts = {"identity": self.identity, "choice": values, "plan": None}
        if part == "plan":
            facts |= {"choice": self.read("choice"), "plan": values}
        artifact.write(self.folder, _KIND, {}, facts, overwrite=True)


def check_saved_choice(preset: Preset, settings: TableSettings, record: dict[str, Any]) -> None:
    """Check that a choice from a checkpoint is one that the preset makes.

    Raises:
        InputError: another preset or budget, or a choice that is not among the candidates or has
            not the best score.
    """
    budget = None if settings.budget is None else float(settings.budget)
    possible: dict[str, list[Any]] = {
        "name": [settings.preset],
        "budget": [budget],
        "hidden": [list(hidden) for hidden, _ in preset.networks],
        "weight_decay": [decay for _, decay in preset.networks],
        "prior": list(preset.priors),
        "epochs": [*preset.epochs, preset.training.epochs, preset.least_epochs],
    }
    for name, values in possible.items():
        if record[name] not in values:
            fail_checkpoint(f"{name} of the preset, {str(values)[:80]}", str(record[name])[:40])
    check_preset_choice(record, fail_checkpoint)

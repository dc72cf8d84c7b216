"""The checkpoint of a preset: what it chose, and the numbers of steps that it planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.artifacts.folder import write
from subbayes.artifacts.saving import fail_checkpoint, read_checkpoint
from subbayes.artifacts.tensors import fingerprint
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import Rows
from subbayes.utils.configuration import to_mapping

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
        return cls(Path(settings.sampling.checkpoint) / "preset", fingerprint(arrays, facts))

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
        write(self.folder, _KIND, {}, facts, overwrite=True)

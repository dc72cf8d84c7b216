"""Presets: what a model of a table chooses by itself, within a number of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from subbayes.artifacts.facts import Count, Name, Positive
from subbayes.training.configuration import Training


@dataclass(frozen=True)
class Preset:
    """Candidates, sizes and shares of the time of a preset.

    Numbers of epochs and of steps are entries of ladders, the largest that the time allows, so
    that two runs with a similar speed make the same choices.

    Attributes:
        networks: hidden layers and weight decays to choose from, in the order of comparison.
        priors: scales of the prior of the weights to choose from, the default first.
        training: of each member.
        batch_size: rows of a step of training from `large` rows.
        large: number of rows.
        target: of MCLMC, at the start and at the end of the warm-up.
        members: chains, each from a member of an ensemble, unless the sampling has others.
        compared: members and chains of each candidate.
        draws: of each chain, unless the sampling has others.
        held_out: share of the rows by which candidates are compared.
        epochs: ladder of epochs.
        steps: ladder of steps of chains with which networks and priors are compared.
        least_epochs: of the members, whatever the time.
        enough_epochs: with fewer of them, fewer candidates are compared.
        compile_from: budget from which the density is compiled, unless the sampling has a mode.
        fixed_epochs: epochs of candidates without a budget.
        fixed_steps: steps with which they are compared without a budget.
        warmup: steps of the warm-up without a budget.
        thin: steps for each draw without a budget.
        shares: of the budget, to compare ensembles, to compare chains, and to train the members;
            the rest is for sampling.
    """

    networks: tuple[tuple[tuple[int, ...], float], ...]
    priors: tuple[float, ...]
    training: Training = field(
        default_factory=lambda: Training(
            epochs=1000, learning_rate=5e-3, patience=50, validation=0.1, swa_epochs=0
        )
    )
    batch_size: int = 256
    large: int = 5000
    target: tuple[float, float] = (0.5, 0.1)
    members: int = 10
    compared: int = 4
    draws: int = 100
    held_out: float = 0.2
    epochs: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1000)
    steps: tuple[int, ...] = (200, 500, 1000, 2000, 5000, 10_000)
    least_epochs: int = 10
    enough_epochs: int = 100
    compile_from: float = 600.0
    fixed_epochs: int = 200
    fixed_steps: int = 2000
    warmup: int = 12_000
    thin: int = 80
    shares: tuple[float, float, float] = (0.1, 0.2, 0.12)


PRESETS = {
    "best": Preset(
        networks=tuple(
            (hidden, decay)
            for decay in (1e-4, 1e-3)
            for hidden in ((16, 16, 16, 16), (32, 32), (64, 64))
        ),
        priors=(0.5, 0.3, 1.0),
    )
}
"""Presets by name. "best" samples all weights by MCLMC, from an ensemble."""


def largest(ladder: Sequence[int], most: float) -> int | None:
    """The largest entry of a ladder up to a number, or None.

    Example:
        >>> largest((10, 20, 50), 49.0), largest((10, 20), 5.0)
        (20, None)
    """
    return max((entry for entry in ladder if entry <= most), default=None)


class _Compared(TypedDict):
    hidden: list[Count]
    score: float


class _Chains(_Compared):
    prior: Positive
    steps: Count
    gain: float
    gain_error: float


class _Seconds(TypedDict):
    choice: float
    training: float
    sampling: float


class PresetRecord(TypedDict):
    """What a preset chose, and how long each part took."""

    name: Name
    budget: Positive | None
    hidden: list[Count]
    weight_decay: float
    prior: Positive
    epochs: Count
    networks: list[_Compared]
    chains: list[_Chains]
    candidates: tuple[Count, Count]
    seconds: _Seconds


def _best_chains(record: Mapping[str, Any]) -> dict[str, Any] | None:
    return max(record["chains"], key=lambda one: float(one["score"]), default=None)


def describe_preset(record: Mapping[str, Any]) -> str:
    """What a preset chose and how long each part took, in one line.

    Args:
        record: of a fitted model, `settings["preset"]`.
    """
    hidden = "-".join(map(str, record["hidden"]))
    budget = "" if record["budget"] is None else f" within {record['budget']:g} s"
    networks = f"{len(record['networks'])} of {record['candidates'][0]} networks"
    chains = f"{len(record['chains'])} of {record['candidates'][1]} posteriors"
    best = _best_chains(record)
    if best is not None and best["gain_error"] < 1e3:
        gain = f"{best['gain']:+.2f} ± {best['gain_error']:.2f}"
        chains += f" (mean log density {gain} from that of their ensemble)"
    seconds = record["seconds"]
    return (
        f"{record['name']!r}{budget}: hidden layers {hidden}, weight decay "
        f"{record['weight_decay']:g}, prior scale {record['prior']:g}, {record['epochs']} epochs, "
        f"from {networks} and {chains}; {seconds['choice']:.0f} s to choose, "
        f"{seconds['training']:.0f} s to train, {seconds['sampling']:.0f} s to sample"
    )


_UNKNOWN = 1e30  # the standard error of a gain of densities that are not finite
_MORE_TIME = "give it more time (budget=...)"
PRESET_REMEDY = f"preset: it chose the sizes of this run: {_MORE_TIME}, or leave preset out"
"""A line after the warnings of draws, whose remedies name what a preset chooses itself."""


def preset_warnings(record: Mapping[str, Any]) -> list[str]:
    """A warning where the chosen chains predicted worse than the ensemble at which they started.

    Both predicted the rows that the preset held out to choose by; the difference has to exceed two
    of its standard errors.

    Args:
        record: of a choice or of a fitted model.

    Example:
        >>> chains = {"hidden": [16], "prior": 0.5, "steps": 200, "score": -0.9}
        >>> record = {"chains": [chains | {"gain": -0.4, "gain_error": 0.1}]}
        >>> preset_warnings(record)[0].partition(": ")[0]
        'chains of 200 steps scored 0.40 ± 0.10 below the ensemble at which they started'
    """
    best = _best_chains(record)
    if best is not None and best["score"] <= -_UNKNOWN:
        return [
            f"chains of {best['steps']} steps gave a row that was held out a density of 0: "
            f"{_MORE_TIME}, or use deep_ensemble(...)"
        ]
    if best is None or best["gain"] >= -2 * best["gain_error"]:
        return []
    gain, error = best["gain"], best["gain_error"]
    return [
        f"chains of {best['steps']} steps scored {-gain:.2f} ± {error:.2f} below the ensemble at "
        f"which they started: {_MORE_TIME}, or use deep_ensemble(...)"
    ]

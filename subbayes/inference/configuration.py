"""The settings that all inference engines share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from subbayes.utils.checks import (
    check_choice,
    check_count,
    check_positive_or_zero,
    check_seed,
    fail,
)
from subbayes.utils.modes import MODES, Mode


@dataclass(frozen=True)
class Sampling:
    """Length, seed, checkpoint and progress of a sampling run.

    Engines whose draws are independent (`SMC`, `Laplace`, `MeanFieldVI`, ...) ignore `warmup`,
    `thin`, `initial` and `checkpoint`.

    Attributes:
        draws: draws to keep per chain.
        chains: number of chains, evaluated together.
        warmup: draws per chain to discard first, in which samplers adapt; None takes the default
            of the engine.
        thin: keep every `thin`-th draw.
        seed: seed; every chain has its own random stream.
        initial: "prior" (start at draws from the prior), "shift" (start at z = 0), "ensemble" (in
            `fit`: start each chain at a network of its own, trained from other initial weights), or
            start points of shape (chains, k).
        mode: how the posterior that `fit` and models of tables build evaluates its density:
            "trace", "compile" (for long runs) or "eager"; an engine uses the mode of its posterior.
        checkpoint: folder to save the run in and resume it from, bit for bit.
        checkpoint_seconds: time between checkpoints.
        progress: show progress bars; None shows them on a terminal.
        chain_groups: number of groups of the processes of `torchrun`, each with chains of its own;
            the processes of a group have different rows. None chooses it.

    Raises:
        InputError: a value that is out of range.

    Example:
        >>> Sampling(draws=200, seed=1).chains
        8
    """

    draws: int = 500
    chains: int = 8
    warmup: int | None = None
    thin: int = 1
    seed: int = 0
    initial: Any = "prior"
    mode: Mode = "trace"
    checkpoint: str | Path | None = None
    checkpoint_seconds: float = 10.0
    progress: bool | None = None
    chain_groups: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("draws", 1), ("chains", 1), ("thin", 1)):
            check_count(name, getattr(self, name), least)
        check_seed(self.seed)
        if self.warmup is not None:
            check_count("warmup", self.warmup, 0)
        if self.chain_groups is not None:
            check_count("chain_groups", self.chain_groups)
        if isinstance(self.initial, str):
            check_choice("initial", self.initial, ("prior", "shift", "ensemble"))
        else:
            self._check_points()
        check_choice("mode", self.mode, MODES)
        # 0 saves after every step
        check_positive_or_zero("checkpoint_seconds", self.checkpoint_seconds)

    def _check_points(self) -> None:
        """Check start points, which a file of settings may hold, before a network is trained."""
        expected = "'prior', 'shift', 'ensemble' or an array (chains, k) of numbers"
        try:
            points = np.asarray(self.initial, dtype=np.float64)
        except (ValueError, TypeError):
            fail("initial", expected, repr(self.initial))
        if points.ndim != 2:
            fail("initial", expected, repr(self.initial))

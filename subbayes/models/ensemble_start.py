r"""Chains that start at the members of a deep ensemble (Sommer et al. 2025).

M networks are trained from different initial weights, and chain m starts at the weights $w_m$ of
member m, in the coordinates of the subspace:

$$ z_m = \arg\min_z \lVert \hat w + Pz - w_m \rVert . $$

In the full weight space this is the member itself. In another subspace it is the point closest to
the member, which is spread as the members are but is not a solution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from subbayes.baselines.deep_ensemble import train_members
from subbayes.data.data import Data
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.likelihoods import Likelihood
from subbayes.models.fitted import FittedModel
from subbayes.models.processes import is_divided
from subbayes.networks.initialisation import fresh_weights, module_with_fresh_weights
from subbayes.networks.network import Network
from subbayes.priors import EvidencePrior, Normal
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.training.unfinished import warn_of_unfinished
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.types import ModuleFactory
from subbayes.utils.warning import warn_user

_FIXED = (
    "likelihood: its parameters, such as the noise, stay as the members learned them while all "
    "weights are sampled"
)
_STALE = (
    f"{_FIXED}, which is too small where members fit the rows closely: use a heteroscedastic "
    "likelihood, whose noise is an output of the network (global_variance=1e-6), or a known noise"
)


def starts_at_ensemble(sampling: Sampling) -> bool:
    """Whether chains start at the members of an ensemble."""
    return isinstance(sampling.initial, str) and sampling.initial == "ensemble"


def ensemble_settings(sampling: Sampling) -> dict[str, Any]:
    """The number of members, for the settings of a fitted model; empty without an ensemble."""
    return {"ensemble": {"members": sampling.chains}} if starts_at_ensemble(sampling) else {}


@dataclass(frozen=True)
class EnsembleStart:
    """Trains the network of a posterior, and the ensemble if its chains start at one.

    Attributes:
        model: the module.
        network: its network before training.
        likelihood: p(y | f) before training.
        data: training data.
        training: how networks are trained.
        sampling: number of chains, seed and start points.
        method: how the subspace is chosen.
        factory: makes a module with fresh weights for each member, or None for those of each
            layer's `reset_parameters`.
    """

    model: nn.Module
    network: Network
    likelihood: Likelihood
    data: Data
    training: Training
    sampling: Sampling
    method: SubspaceMethod
    factory: ModuleFactory | None = None

    @property
    def trains_others(self) -> bool:
        """Whether the module has trainable parameters that are not weights of the network."""
        named = self.model.named_parameters()
        return any(p.requires_grad and name not in self.network.names for name, p in named)

    @property
    def needs_trained_network(self) -> bool:
        """Whether the subspace is built around a trained network of its own.

        Members take its place for all weights around zero, unless the module has other parameters,
        whose trained values they share.
        """
        return self.method.needs_trained_network or self.trains_others

    def check(self, engine: Engine, prior: Normal | EvidencePrior | float) -> None:
        """Check before training that chains can start at an ensemble, if `initial` asks for one.

        Raises:
            InputError: an engine without start points, one chain, members that the subspace cannot
                represent, no epochs, or draws that do not fit into memory; a factory that nothing
                uses, or that makes modules of another architecture.
        """
        if not starts_at_ensemble(self.sampling):
            if self.factory is not None and not self.method.trains_networks:
                fail(
                    "factory",
                    "None unless several networks are trained",
                    f"a function with initial={self.sampling.initial!r}"[:80],
                    "Leave it out, or use initial='ensemble' or subspace='curve'",
                )
            return
        if not engine.uses_initial:
            fail(
                "initial",
                "a sampler with chains for 'ensemble'",
                f"inference={engine.name!r}",
                "Use 'mclmc', 'nuts', 'elliptical-slice' or another Markov chain sampler",
            )
        if is_divided(self.network, self.data):
            fail(
                "initial",
                "start points for sharded weights or rows",
                "'ensemble', whose members train on all rows in one process",
                "Pass an array, or leave it out",
            )
        self._check_members()
        if isinstance(prior, EvidencePrior) and not self.needs_trained_network:
            fail(
                "prior",
                "a scale or a Normal for all weights with initial='ensemble'",
                "'evidence', which needs a trained network",
                "Pass a number, such as 1.0",
            )
        chains, draws = self.sampling.chains, self.sampling.draws
        rank = min(self.method.expected_rank(self.network) or 0, self.network.size)
        check_memory(
            "draws",
            f"{chains} chains of {draws} draws of {rank} coordinates",
            8 * chains * draws * rank,
            "Run fewer chains or draws, or thin them (thin=...)",
        )

    def _check_members(self) -> None:
        if self.sampling.chains < 2:
            fail(
                "chains",
                "at least 2 for initial='ensemble', one for each member",
                self.sampling.chains,
                "Raise it, or use initial='shift' to start at the trained network",
            )
        if self.network.has_batchnorm:
            fail(
                "initial",
                "a module without BatchNorm for 'ensemble'",
                "one whose members have statistics of their own",
                "Use initial='shift', or LayerNorm or GroupNorm",
            )
        if self.network.masks:
            fail(
                "initial",
                "whole parameters as weights for 'ensemble'",
                "masks, beside which members have other weights",
                "Use initial='prior' or initial='shift'",
            )
        if isinstance(self.method, FixedSubspace):
            fail(
                "initial",
                "a subspace that is chosen after training for 'ensemble'",
                f"{self.method.name}, with which nothing is trained",
                "Pass start points: initial=subspace.project(weights)",
            )
        if not self.training.epochs:
            fail(
                "epochs",
                "at least 1 to train the members of initial='ensemble'",
                0,
                "Raise it, or use initial='shift' for a module that is trained already",
            )
        if self.factory is not None:
            fresh_weights(self.network, self.factory, self.sampling.seed)

    def fit(
        self, train: Callable[[], Trained], build: Callable[[Trained], FittedModel]
    ) -> FittedModel:
        """Train, and build a model without draws, with start points if there is an ensemble.

        Args:
            train: trains the network around which the subspace is built.
            build: builds the subspace and its prior around it.
        """
        if not starts_at_ensemble(self.sampling):
            return build(train())
        trained = train() if self.needs_trained_network else None
        started = time.perf_counter()
        members = self.train_members(trained)
        seconds = time.perf_counter() - started
        if trained is None:
            warn_of_unfinished([one.converged for one in members])
        if trained is None and not self.likelihood.is_complete:
            counts = self.likelihood.kind == "count"
            warn_user(f"{_FIXED}: use a likelihood without any" if counts else _STALE)
        fitted = build(trained or self._trained_from(members, seconds))
        weights = torch.stack([one.network.weights for one in members])
        starts = fitted.subspace.project(weights.to(fitted.subspace.shift))
        histories = {f"member {m}": one.history for m, one in enumerate(members)}
        facts = {"best_epoch": [float(one.best_epoch) for one in members]}
        return replace(
            fitted,
            starts=starts.double().cpu().numpy(),
            history=fitted.history | {"ensemble": facts} | histories,
        )

    def train_members(self, trained: Trained | None) -> list[TrainingResult]:
        """Train one member for each chain, those of `deep_ensemble` with the same seed.

        Args:
            trained: a trained network, whose parameters that are not weights are frozen at their
                values; None trains all parameters.
        """
        module, factory = self.model, self.factory
        if trained is not None and self.trains_others:
            network = trained.network
            module = network.module_with()
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in self.network.names)
            if self.factory is not None:
                factory = partial(_with_trained_others, network, self.factory)
        return train_members(
            module,
            self.likelihood,
            self.data,
            self.training,
            members=self.sampling.chains,
            factory=factory,
            seed=self.sampling.seed,
            parameters=self.network.selection,
            output=self.network.output,
            progress=self.sampling.progress,
        )

    def _trained_from(self, members: list[TrainingResult], seconds: float) -> Trained:
        """Members in the place of a trained network.

        Parameters of the likelihood are averaged as those of weight averaging are, without
        constraints.
        """
        first = members[0]
        mean = torch.stack([one.likelihood_parameters for one in members]).mean(0)
        likelihood = self.likelihood.with_parameters(mean).detach()
        return Trained(
            first.network,
            likelihood,
            first,
            SwaResult(first.network, likelihood, TrajectoryRecorder(), {}),
            self.data,
            self.training,
            self.sampling.seed,
            (seconds, 0.0),
            self.sampling.progress,
        )


def _with_trained_others(network: Network, factory: ModuleFactory) -> nn.Module:
    """A module with weights of a factory, and the frozen values of the other parameters."""
    seed = int(torch.randint(2**62, ()))  # of torch's generator, which is that of the member
    return module_with_fresh_weights(network, seed, factory)

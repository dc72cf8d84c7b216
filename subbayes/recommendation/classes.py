"""Classes and counts: last layers solved again under priors of several scales, and stacked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.temperature_scaling import TemperatureScaled
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, Weighted
from subbayes.likelihoods.target_parts import TargetParts
from subbayes.networks.network import Network
from subbayes.predictions.averaging import outputs
from subbayes.recommendation.guard import Candidate, Scaled, Verdict, judge
from subbayes.recommendation.last_layer import LastLayer, solve

_PRECISIONS = tuple(10.0 ** (k / 2) for k in range(6, -5, -1))
_WORSE = 2  # prior precisions in a row that score less than the best one, after which to stop
_MOST_NUMBERS = 2**27  # of features in memory, 1 GiB; of more rows some are left out
_PARTS, _PARTS_OF_ENSEMBLES = 10, 4  # equal parts that weights of a stack are rounded to


@dataclass(frozen=True)
class Networks:
    """Trained networks of one architecture, whose predictions are averaged.

    Attributes:
        networks: the networks.
        lasts: their last layers, or None if one has outputs of another kind.
    """

    networks: Sequence[Network]
    lasts: Sequence[LastLayer] | None

    @classmethod
    def of(cls, networks: Sequence[Network], data: Data) -> Networks:
        """The networks, with their last layers."""
        lasts = [LastLayer.of(network, data) for network in networks]
        whole = [last for last in lasts if last is not None]
        return cls(networks, whole if len(whole) == len(lasts) else None)

    def outputs(self, data: Data) -> Float[Tensor, "S N C"]:
        """Outputs of each network."""
        if self.lasts is not None:
            return torch.stack([last.features(data)[1] for last in self.lasts])
        each = [
            [
                outputs(network, network.weights[None].__getitem__, 1, x)[0]
                for x, _ in data.batches()
            ]
            for network in self.networks
        ]
        return torch.stack([torch.cat(parts) for parts in each])

    def matrices(self) -> list[Tensor]:
        """Weights of the last layers as they were trained."""
        assert self.lasts is not None
        return [last.matrix(last.network.weights) for last in self.lasts]

    def with_last_layers(
        self, parts: Sequence[tuple[Sequence[Tensor], int]], likelihood: Likelihood, name: str
    ) -> WeightSamples:
        """A model with last layers, each of which counts several times."""
        assert self.lasts is not None
        rows = [
            (m, matrix) for matrices, count in parts for _ in range(count)
            for m, matrix in enumerate(matrices)
        ]  # fmt: skip
        if len(self.networks) == 1:
            last = self.lasts[0]
            weights = torch.stack([last.flat(matrix) for _, matrix in rows])
            return WeightSamples(last.network, weights, likelihood, name)
        weights = torch.stack([self._with_last(m, matrix) for m, matrix in rows])
        return self._samples(weights, [m for m, _ in rows], likelihood, name)

    def as_trained(self, likelihood: Likelihood, name: str) -> WeightSamples:
        """A model of the networks as they are."""
        weights = torch.stack([network.weights for network in self.networks])
        return self._samples(weights, list(range(len(weights))), likelihood, name)

    def _with_last(self, m: int, matrix: Tensor) -> Tensor:
        assert self.lasts is not None
        network, last = self.networks[m], self.lasts[m]
        weights, flat = network.weights.clone(), last.flat(matrix)
        for name, span in last.network.spans.items():
            weights[network.spans[name]] = flat[span]
        return weights

    def _samples(
        self, weights: Tensor, members: list[int], likelihood: Likelihood, name: str
    ) -> WeightSamples:
        frozen = [self._different[m] for m in members] if self._different[0] else None
        return WeightSamples(self.networks[0], weights, likelihood, name, frozen)

    @cached_property
    def _different(self) -> list[dict[str, Tensor]]:
        """Buffers of each network that are not those of the first."""
        each = [network.frozen for network in self.networks]
        names = [n for n, t in each[0].items() if any(not torch.equal(t, own[n]) for own in each)]
        return [{name: own[name] for name in names} for own in each]


def classes(
    networks: Networks,
    likelihood: Likelihood,
    data: Data,
    held_out: Data,
    y: TargetParts,
    seed: int = 0,
) -> tuple[Predictor, list[str], Verdict]:
    """The model that is chosen, names of the candidates, and what the guard says.

    Args:
        networks: the trained network, or several.
        likelihood: p(y | f).
        data: the training data.
        held_out: rows that were not trained on.
        y: their targets.
        seed: of the random halves of held-out rows.
    """
    several = len(networks.networks) > 1
    tempered = likelihood.kind == "classification"
    subject = "ensemble" if several else "network"
    name = f"{subject} with a temperature" if tempered else subject
    candidates: list[Candidate] = []

    def add(name: str, outputs: Tensor) -> None:
        candidates.append(Scaled(name, outputs, likelihood.unweighted, y.unweighted, tempered))

    add(name, networks.outputs(held_out))
    heads: list[Sequence[Tensor]] = []
    if networks.lasts is not None:
        heads.append(networks.matrices())
        best, worse = -math.inf, 0
        for precision, matrices, solved in _path(networks, likelihood, data, held_out):
            add(f"last layer solved again, prior precision {precision:.2g}", solved)
            heads.append(matrices)
            score = float((candidates[-1].log_densities @ y.counts).max())
            best, worse = (score, 0) if score > best else (best, worse + 1)
            if worse == _WORSE:
                break
    verdict = judge(candidates, y.counts, seed)
    names = [candidate.name for candidate in candidates]
    likelihood = likelihood.unweighted
    if verdict.ships:
        parts = _PARTS_OF_ENSEMBLES if several else _PARTS
        model: Predictor = networks.with_last_layers(
            [
                ([matrix / tau for matrix in matrices], count)
                for matrices, tau, count in zip(
                    heads, verdict.settings, _counts(verdict.weights, parts), strict=True
                )
                if count
            ],
            likelihood,
            "last layers solved again",
        )
    else:
        model = networks.as_trained(likelihood, "deep ensemble" if several else "MAP")
        if verdict.settings[0] != 1:
            model = TemperatureScaled(model, verdict.settings[0])
    return model, names, verdict


def _path(
    networks: Networks, likelihood: Likelihood, data: Data, held_out: Data
) -> Iterator[tuple[float, list[Tensor], Float[Tensor, "S N C"]]]:
    """Last layers under one prior precision after another, and their outputs of held-out rows."""
    assert networks.lasts is not None
    width = len(networks.lasts) * networks.matrices()[0].shape[1]
    if data.n * width > _MOST_NUMBERS:
        data = data.rows(torch.linspace(0, data.n - 1, _MOST_NUMBERS // width).long())
    if data.has_weights and not isinstance(likelihood, Weighted):
        likelihood = Weighted(likelihood)
    features = [last.features(data)[0] for last in networks.lasts]
    new = [last.features(held_out)[0] for last in networks.lasts]
    matrices, targets = networks.matrices(), data.targets()
    for precision in _PRECISIONS:
        matrices = [
            solve(phi, targets, likelihood, start, precision)
            for phi, start in zip(features, matrices, strict=True)
        ]
        yield (
            precision,
            matrices,
            torch.stack([phi @ matrix.T for phi, matrix in zip(new, matrices, strict=True)]),
        )


def _counts(weights: Sequence[float], parts: int) -> list[int]:
    """Weights rounded to equal parts, as the smallest whole numbers of these shares.

    Example:
        >>> _counts([0.52, 0.0, 0.48], 10), _counts([0.0, 1.0], 10)
        ([1, 0, 1], [0, 1])
    """
    exact = np.asarray(weights) * parts
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: parts - counts.sum()]] += 1
    return [int(count) for count in counts // np.gcd.reduce(counts)]

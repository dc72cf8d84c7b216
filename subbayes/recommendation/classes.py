"""Classes and counts: last layers solved again under priors of several scales, and stacked.

Layers are solved on the training rows under N(0, 1/λ), and on the held-out rows under a prior
around the trained layer with its temperature. If the average over images and their mirror images
surely improves the network, it takes the network's place in all candidates but the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, Weighted
from subbayes.likelihoods.target_parts import TargetParts
from subbayes.networks.network import Network
from subbayes.predictions.averaging import outputs
from subbayes.recommendation.guard import Candidate, Scaled, Verdict, judge, mixture_log_prob
from subbayes.recommendation.last_layer import LastLayer, solve
from subbayes.recommendation.mirrored import Mirrored
from subbayes.utils.checks import InputError
from subbayes.utils.trees import take
from subbayes.utils.types import Outputs, RowNumbers, Weights

_PRECISIONS = tuple(10.0**k for k in range(3, -3, -1))  # until one scores less than the last
_NEAR = 300.0, 100.0, 30.0, 10.0  # prior precisions around trained layers
_FOLDS = 5  # parts of the held-out rows, each of which is predicted by the others
_MOST_NUMBERS = 2**27  # of features in memory, 1 GiB; of more rows some are left out
_PARTS, _PARTS_OF_ENSEMBLES = 10, 4  # equal parts that weights of a stack are rounded to


MaybeParts = Sequence[tuple[int, Tensor | None]]
Parts = Sequence[tuple[int, Tensor]]
"""Numbers of networks and their last layers, which have equal weights in a mixture."""


@dataclass(frozen=True)
class Networks:
    """Trained networks of one architecture.

    Attributes:
        networks: the networks.
        lasts: their last layers, or None if one has outputs of another kind.
        data: the training data.
        held_out: rows that were not trained on.
    """

    networks: Sequence[Network]
    lasts: Sequence[LastLayer] | None
    data: Data
    held_out: Data
    _features: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, networks: Sequence[Network], data: Data, held_out: Data) -> Networks:
        """The networks, with their last layers."""
        lasts = [LastLayer.of(network, data) for network in networks]
        known = [last for last in lasts if last is not None]
        width = sum(last.network.size // last.n_outputs for last in known)
        if data.in_memory and data.n * width > _MOST_NUMBERS:
            data = data.rows(torch.linspace(0, data.n - 1, _MOST_NUMBERS // width).long())
        return cls(networks, known if len(known) == len(lasts) else None, data, held_out)

    def features(self, m: int, data: Data) -> tuple[Float[Tensor, "N H"], Outputs]:
        """Inputs of the last layer of a network, and outputs, which are computed once."""
        assert self.lasts is not None
        key = m, data is self.held_out
        if key not in self._features:
            self._features[key] = self.lasts[m].features(data)
        return self._features[key]

    def mirrored(self) -> Networks | None:
        """The networks of images averaged with mirror images, or None for other inputs."""
        inputs = self.data.first()[0]
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            return None
        each = [Mirrored.network(network) for network in self.networks]
        return Networks.of(each, self.data, self.held_out)

    def outputs(self, group: Sequence[int]) -> Outputs:
        """Outputs of some of the networks for the held-out rows."""
        if self.lasts is not None:
            return torch.stack([self.features(m, self.held_out)[1] for m in group])
        each = []
        for network in (self.networks[m] for m in group):
            weights_at, rows = network.weights[None].__getitem__, self.held_out.batches()
            each.append(torch.cat([outputs(network, weights_at, 1, x)[0] for x, _ in rows]))
        return torch.stack(each)

    def as_trained(self, group: Sequence[int]) -> Parts:
        """Some of the networks with their own last layers."""
        if self.lasts is None:
            return []
        return [(m, self.lasts[m].matrix(self.networks[m].weights[self._last(m)])) for m in group]

    def solved(
        self, group: Sequence[int], likelihood: Likelihood
    ) -> Iterator[tuple[float, Parts, Outputs]]:
        """Last layers under one prior precision after another, and outputs of held-out rows."""
        if self.lasts is None:
            return
        matrices = [one for _, one in self.as_trained(group)]
        if self.data.has_weights and not isinstance(likelihood, Weighted):
            likelihood = Weighted(likelihood)
        features = [self.features(m, self.data)[0] for m in group]
        new = [self.features(m, self.held_out)[0] for m in group]
        targets = self.data.targets()
        for precision in _PRECISIONS:
            matrices = [
                solve(phi, targets, likelihood, start, precision)
                for phi, start in zip(features, matrices, strict=True)
            ]
            found = [phi @ matrix.T for phi, matrix in zip(new, matrices, strict=True)]
            yield precision, list(zip(group, matrices, strict=True)), torch.stack(found)

    def mixture(
        self, rows: Sequence[tuple[int, Tensor | None]], likelihood: Likelihood, name: str
    ) -> WeightSamples:
        """The model that averages networks with other last layers, or their own."""
        if self.lasts is not None and all(not m and matrix is not None for m, matrix in rows):
            last = self.lasts[0]  # the same network before it, which runs once
            weights = torch.stack([last.flat(matrix) for _, matrix in rows if matrix is not None])
            return WeightSamples(last.network, weights, likelihood, name)
        weights = torch.stack([self._with_last(m, matrix) for m, matrix in rows])
        frozen = [self._different[m] for m, _ in rows] if self._different[0] else None
        return WeightSamples(self.networks[0], weights, likelihood, name, frozen)

    def _last(self, m: int) -> Int[Tensor, "P"]:
        """Positions of the weights of the last layer among those of a network."""
        assert self.lasts is not None
        spans = self.networks[m].spans
        names = self.lasts[m].network.names
        return torch.cat([torch.arange(spans[n].start, spans[n].stop) for n in names])

    def _with_last(self, m: int, matrix: Tensor | None) -> Weights:
        weights = self.networks[m].weights.clone()
        if matrix is not None and self.lasts is not None:
            weights[self._last(m)] = self.lasts[m].flat(matrix)
        return weights

    @cached_property
    def _different(self) -> list[dict[str, Tensor]]:
        """Buffers of each network that are not those of the first."""
        each = [network.frozen for network in self.networks]
        names = [n for n, t in each[0].items() if any(not torch.equal(t, own[n]) for own in each)]
        return [{name: own[name] for name in names} for own in each]


class Corrected(Candidate):
    r"""Last layers solved on held-out rows, under the prior $N(\hat w / \tau, \lambda^{-1} I)$.

    Each row is predicted by layers that were solved without the fifth of rows that it belongs to.

    Args:
        name: what the table calls it.
        networks: the trained networks.
        group: numbers of those whose predictions are averaged.
        tau: the temperature of these predictions.
        likelihood: p(y | f).
        y: targets of the held-out rows.
        seed: of the division of these rows.
    """

    settings = _NEAR

    def __init__(
        self,
        name: str,
        networks: Networks,
        group: Sequence[int],
        tau: float,
        likelihood: Likelihood,
        y: TargetParts,
        seed: int,
    ) -> None:
        self.name, self.group, self.y = name, group, y.unweighted
        self.features = [networks.features(m, networks.held_out)[0] for m in group]
        self.centres = [matrix / tau for _, matrix in networks.as_trained(group)]
        self.targets = networks.held_out.targets()
        self.likelihood = likelihood if y.weights is None else Weighted(likelihood)
        self.fold = np.random.default_rng(seed).permutation(len(y.counts)) % _FOLDS

    def layers(self, precision: float) -> Parts:
        """Last layers that are solved on all held-out rows."""
        every = torch.ones(len(self.fold), dtype=torch.bool)
        matrices = [
            self._solved(phi, every, precision, centre, centre)
            for phi, centre in zip(self.features, self.centres, strict=True)
        ]
        return list(zip(self.group, matrices, strict=True))

    @override
    def _at(self, setting: float) -> RowNumbers:
        each = []
        layers = self.layers(setting)
        for phi, centre, (_, start) in zip(self.features, self.centres, layers, strict=True):
            outputs = phi @ start.T
            for k in range(_FOLDS):
                scored = torch.from_numpy(self.fold == k)
                matrix = self._solved(phi, ~scored, setting, start, centre)
                outputs[scored] = phi[scored] @ matrix.T
            each.append(outputs)
        return mixture_log_prob(self.likelihood.unweighted, torch.stack(each), self.y)

    def _solved(
        self, phi: Tensor, rows: Tensor, precision: float, start: Tensor, centre: Tensor
    ) -> Float[Tensor, "C H"]:
        targets = take(self.targets, rows)
        return solve(phi[rows], targets, self.likelihood, start, precision, centre)


def classes(
    networks: Networks,
    groups: Mapping[str, Sequence[int]],
    likelihood: Likelihood,
    y: TargetParts,
    seed: int = 0,
) -> tuple[Predictor, list[str], Verdict]:
    """The model that is chosen, names of the candidates, and what the guard says.

    Args:
        networks: the trained networks.
        groups: numbers of those whose predictions are averaged, by name; the first are the
            reference.
        likelihood: p(y | f).
        y: targets of the held-out rows.
        seed: of the random divisions of held-out rows.
    """
    tempered, averaged = likelihood.kind == "classification", False
    trained_with, likelihood = likelihood, likelihood.unweighted
    candidates: list[Candidate] = []
    layers: list[Callable[[float], MaybeParts]] = []  # of each candidate at a setting

    def own(networks: Networks, group: Sequence[int]) -> Callable[[float], MaybeParts]:
        return _divided(networks.as_trained(group) or [(m, None) for m in group])

    def scaled(name: str, outputs: Tensor, stacks: bool = True) -> Scaled:
        return Scaled(name, outputs, likelihood, y.unweighted, tempered, stacks)

    def add(candidate: Candidate, parts: Callable[[float], MaybeParts]) -> float:
        candidates.append(candidate)
        layers.append(parts)
        return float((candidate.log_densities @ y.counts).max())

    plain = networks
    mirrored = networks.mirrored() if tempered else None
    if mirrored is not None:
        group = next(iter(groups.values()))
        pair = [scaled("", one.outputs(group)) for one in (plain, mirrored)]
        if judge(pair, y.counts, seed, mix=False).ships:
            networks = mirrored
    for name, group in groups.items():
        title = f"{name} with a temperature" if tempered else name
        outputs = plain.outputs(group)
        parts = own(plain, group)
        pooled = likelihood.pooled(outputs) if tempered and len(group) > 1 else None
        if pooled is not None:
            averaged = True
            add(scaled(f"{title} after averaging", pooled, stacks=False), parts)
        if networks is not plain:
            if not candidates:
                add(scaled(title, outputs, stacks=False), parts)
            name = f"mirrored {name}"
            title = f"mirrored {title}"
            outputs = networks.outputs(group)
            parts = own(networks, group)
        trained = scaled(title, outputs)
        add(trained, parts)
        if networks.lasts is None:
            continue
        best = -math.inf
        for precision, again, solved in networks.solved(group, trained_with):
            label = f"{name}, last layer under prior precision {precision:.2g}"
            score = add(scaled(label, solved), _divided(again))
            if score < best:
                break
            best = score
        tau = trained.settings[trained.best(np.arange(len(y.counts)), y.counts)]
        label = f"{name}, last layer corrected by held-out rows"
        near = Corrected(label, networks, group, tau, likelihood, y, seed)
        add(near, near.layers)
    verdict = judge(candidates, y.counts, seed, mix=networks.lasts is not None)
    names = [candidate.name for candidate in candidates]
    if verdict.ships and networks.lasts is not None:
        several = max(map(len, groups.values())) > 1
        counts = _counts(verdict.weights, _PARTS_OF_ENSEMBLES if several else _PARTS)
        rows = [
            row
            for layers_at, setting, count in zip(layers, verdict.settings, counts, strict=True)
            if count
            for row in [*layers_at(setting)] * count
        ]
        return networks.mixture(rows, likelihood, "last layers solved again"), names, verdict
    chosen = int(np.argmax(verdict.weights))
    rows = [(m, None) for m, _ in layers[chosen](1.0)]
    name = "deep ensemble" if len(rows) > 1 else "SWA" if chosen else "MAP"
    shipped = networks if chosen else plain
    model: Predictor = shipped.mixture(rows, likelihood, name)
    if tempered:
        with suppress(InputError):  # held-out rows that determine no temperature
            model = temperature_scaling(model, networks.held_out, averaged=averaged and not chosen)
    return model, names, verdict


def _divided(parts: MaybeParts) -> Callable[[float], MaybeParts]:
    """Last layers as functions of the temperature of their outputs."""
    return lambda tau: [(m, None if matrix is None else matrix / tau) for m, matrix in parts]


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

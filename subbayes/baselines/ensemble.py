r"""Weight vectors whose predictions are averaged: MAP, SWA, SWAG and deep ensembles.

$$ p(y \mid x) = \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w_s)) $$
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Line
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import KindFacts, artifact
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.data.arrays import evenly_spaced
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import (
    CommonParameters,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Standardized,
    from_config,
    holds_own,
    saved_likelihood,
)
from subbayes.networks.batched_module import BatchedModule
from subbayes.networks.network import Network
from subbayes.networks.saving import (
    NETWORK_ARRAYS,
    NetworkFacts,
    known_outputs,
    network_facts,
    network_from,
    network_tensors,
)
from subbayes.networks.token_outputs import output_for
from subbayes.networks.validation import warn_of_probable_outputs
from subbayes.predictions.averaging import average, average_of_batches, outputs
from subbayes.predictions.modules import Component, Sampled
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Inputs, OutputFunction, Outputs


class SamplesFacts(KindFacts):
    """What an artifact holds of `WeightSamples` beside their tensors."""

    network: NetworkFacts
    likelihoods: list[dict[str, Any]]
    name: Line
    own_buffers: bool

    def arrays(self) -> Arrays:
        """The network, weight vectors, and their buffers."""
        return {**NETWORK_ARRAYS, "weights": Array("S", "D"), "buffers.*": ANY}


@dataclass(frozen=True)
class WeightSamples(Predictor):
    """Weight vectors of one network, with equal weights in the mixture.

    Args:
        network: the network.
        weights: S weight vectors, shape (S, D).
        likelihood: one for all, or one for each weight vector (with `stack_likelihoods`).
        name: what tables call it.
        frozen: parameters that are not weights, and buffers, of each weight vector, if they differ
            (BatchNorm statistics of ensemble members).

    Raises:
        InputError: weights that are not finite; `frozen` of other names or shapes than the
            network's.

    Example:
        >>> network = Network(torch.nn.Linear(2, 1))
        >>> samples = WeightSamples(network, torch.randn(5, 3), Gaussian(noise=1.0), "prior")
        >>> samples.predict(torch.zeros(4, 2))
        Predictive(n=4, draws=5, Gaussian(noise=1.0))
    """

    kind: ClassVar[str] = "weight-samples"

    network: Network
    weights: Tensor
    likelihood: Likelihood
    name: str
    frozen: Sequence[Mapping[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.weights).all()):
            fail(
                "weights",
                "finite weights",
                "NaN or infinite ones",
                "The training that made them diverged: lower its learning rate",
            )
        kinds = [{name: (t.shape, t.dtype) for name, t in own.items()} for own in self.frozen or ()]
        known = {name: (t.shape, t.dtype) for name, t in self.network.frozen.items()}
        for own in kinds:
            if own != kinds[0] or any(known.get(name) != own[name] for name in own):
                names = ", ".join(sorted(own)) or "none"
                expected = "names, shapes and dtypes of the network, equal for all weights"
                fail("frozen", expected, names)

    def __repr__(self) -> str:
        return (
            f"WeightSamples({self.network!r}, {len(self.weights)} weight vectors, "
            f"{self.likelihood!r}, {self.name!r})"
        )

    @property
    @override
    def default_draws(self) -> int:
        return len(self.weights)

    def predict(
        self,
        inputs: Any,
        *,
        n_draws: int | None = None,
        noise: Any = None,
        refresh_batchnorm: Any = None,
        memory_limit: int = 2**30,
        progress: bool | None = False,
    ) -> Predictive:
        """Average the predictions of the weight vectors; see `Predictor.predict`.

        `refresh_batchnorm` are data on which BatchNorm statistics are re-estimated for each weight
        vector, at the cost of one pass over them per vector. `n_draws` selects evenly spaced ones.
        """
        refresh = (
            None if refresh_batchnorm is None else Data.of(refresh_batchnorm, "refresh_batchnorm")
        )
        every = np.arange(len(self.weights))
        index = torch.from_numpy(every if n_draws is None else evenly_spaced(every, n_draws))
        likelihood = self.likelihood.select_draws(index)
        options: dict[str, Any] = {"refresh_batchnorm": refresh, "memory_limit": memory_limit}
        if self.frozen is None:
            weights = self.weights[index.to(self.weights.device)]
            found = average(
                self.network, likelihood, weights, inputs, noise=noise, progress=progress, **options
            )
        else:
            evaluate = partial(self._outputs_of_members, index.tolist(), options)
            found = average_of_batches(self.network, likelihood, evaluate, inputs, noise)
        warn_of_probable_outputs(found.outputs, self.likelihood)
        return found

    def _outputs_of_members(
        self, members: list[int], options: dict[str, Any], inputs: Inputs
    ) -> Outputs:
        """Outputs of weight vectors with buffers of their own."""
        return torch.cat(
            [
                outputs(self._networks[s], self.weights[s, None].__getitem__, 1, inputs, **options)
                for s in members
            ]
        )

    @cached_property
    def _networks(self) -> list[Network]:
        """The network with the buffers of each weight vector, so that its checks are kept."""
        return [self.network.with_buffers(own) for own in self.frozen or ()]

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        every = np.arange(len(self.weights))
        index = torch.from_numpy(every if n_draws is None else evenly_spaced(every, n_draws))
        frozen = None if self.frozen is None else [self.frozen[s] for s in index]
        outputs = BatchedModule(self.network, self.weights[index.to(self.weights.device)], frozen)
        return [Sampled(outputs, self.likelihood.select_draws(index), len(index))]

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The network, the weight vectors, and buffers of each if they differ."""
        tensors: dict[str, Tensor | np.ndarray] = {**network_tensors(self.network)}
        tensors["weights"] = self.weights
        for s, own in enumerate(self.frozen or ()):
            tensors |= add_prefix(f"buffers.{s}", own)
        return tensors

    def facts(self) -> SamplesFacts:
        """The architecture, the name, and one likelihood or one for each weight vector."""
        each = [
            _flat(self.likelihood.select_draws(torch.tensor([s])).to_config())
            for s in range(len(self.weights))
        ]
        return SamplesFacts(
            network=network_facts(self.network),
            likelihoods=each if any(one != each[0] for one in each) else each[:1],
            name=self.name,
            own_buffers=self.frozen is not None,
        )


@artifact("weight-samples", SamplesFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: SamplesFacts,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> WeightSamples:
    """Rebuild weight vectors from their artifact; see `subbayes.load`."""
    weights = tensors["weights"]
    if (n := len(facts.likelihoods)) not in (1, len(weights)):
        fail_damaged(f"likelihoods for {len(weights)} weight vectors, or one for all", n)
    buffers = _buffers(tensors, len(weights))
    n_outputs = known_outputs(facts.network, output)
    if likelihood is None:
        each = [from_config(config, n_outputs) for config in facts.likelihoods]
        likelihood = stack_likelihoods(each)
    elif n == 1:
        likelihood = saved_likelihood(facts.likelihoods[0], likelihood, n_outputs)
    elif not isinstance(likelihood, Likelihood):
        fail_type("likelihood", "a Likelihood", likelihood)
    elif holds_own(facts.likelihoods[0]) and not isinstance(likelihood, CommonParameters):
        each = [saved_likelihood(one, likelihood, n_outputs) for one in facts.likelihoods]
        likelihood = stack_likelihoods(each)
    output = output_for(likelihood, output)
    network = network_from(tensors, facts.network, weights[0], module, output)
    return WeightSamples(
        network, weights, likelihood, facts.name, buffers if facts.own_buffers else None
    )


def _buffers(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The buffers of each weight vector by name, in one pass over the tensors."""
    buffers: list[dict[str, Tensor]] = [{} for _ in range(count)]
    places = {str(s): own for s, own in enumerate(buffers)}
    for key, tensor in strip_prefix("buffers", tensors).items():
        place, _, name = key.partition(".")
        places[place][name] = tensor
    return buffers


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten the parameters of one draw, (1, 1, T) in a stack, to lists of T numbers."""
    return {
        k: _flat(v) if isinstance(v, dict) else np.ravel(v).tolist() if isinstance(v, list) else v
        for k, v in config.items()
    }


def stack_likelihoods(likelihoods: Sequence[Likelihood]) -> Likelihood:
    """One likelihood whose parameters differ between S draws, as tensors of shape (S, 1, T).

    Args:
        likelihoods: one per draw, of one kind.

    Raises:
        InputError: kinds or units that differ, or parameters that are not learned.

    Example:
        >>> stack_likelihoods([Gaussian(noise=(1.0,)), Gaussian(noise=(2.0,))]).noise.shape
        torch.Size([2, 1, 1])
    """
    first: Any = likelihoods[0]
    each: list[Any] = list(likelihoods)
    if all(one.to_config() == first.to_config() for one in each):
        return first
    if any(type(one) is not type(first) for one in each):
        fail("likelihoods", "likelihoods of one kind", "several")
    if isinstance(first, Gaussian):
        return replace(first, noise=_stack([one.noise for one in each]))
    if isinstance(first, HeteroscedasticGaussian):
        return replace(first, global_variance=_stack([one.global_variance for one in each]))
    if isinstance(first, CommonParameters):
        return replace(first, values=_stack([one.values for one in each]))
    if isinstance(first, Standardized):
        if len({(one.shift, one.scale) for one in each}) > 1:
            fail("likelihoods", "targets standardised with the same units", "different units")
        return replace(first, likelihood=stack_likelihoods([one.likelihood for one in each]))
    fail("likelihoods", "the same parameters for all, or a Gaussian likelihood", repr(first))


def _stack(values: Sequence[Any]) -> Tensor:
    rows = [torch.as_tensor(value, dtype=torch.float64).reshape(-1) for value in values]
    return torch.stack(rows).unsqueeze(1)

"""A trained sparse network: inclusion probabilities, predictions in every mode, and export."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import DrawCount, Name, Numbers
from subbayes.artifacts.saving import KindFacts, artifact
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, saved_likelihood
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
from subbayes.predictions.averaging import BatchOutputs, average_of_batches, outputs
from subbayes.predictions.modules import Component, Sampled
from subbayes.predictions.predictive import Predictive
from subbayes.sparse.convert import sparse_layers
from subbayes.sparse.dependency_graph import readers_of_inputs
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.tiled_layers import SampledNetwork
from subbayes.sparse.kernels import LayerDraw
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import replace_layer
from subbayes.sparse.path_inclusion import path_probability
from subbayes.sparse.saving import LayerFacts, layer_facts, layers_from
from subbayes.training.loop import History
from subbayes.utils.checks import check_choice, check_count, check_seed, fail
from subbayes.utils.types import Inputs, OutputFunction, Outputs, WeightsBatch
from subbayes.utils.warning import warn_user

STRUCTURE_MODES = ("sample", "all", "median")
WEIGHT_MODES = ("sample", "mean")
_MIN_WEIGHTS = 50_000  # sparse products are faster from this many weights of linear layers
_MAX_DENSITY = 0.25  # up to this density
_BYTES = 40  # of a weight of a draw: its value, the positions in its pattern, and in a vector


class SparseFacts(KindFacts):
    """A `SparseNetwork` but for its tensors."""

    network: NetworkFacts
    likelihood: dict[str, Any]
    layers: dict[Name, LayerFacts]
    history: Numbers
    n_draws: DrawCount

    def arrays(self) -> Arrays:
        """The original network, and the state of the converted module."""
        return {**NETWORK_ARRAYS, "weights": Array("D"), "state.*": ANY}


def revert(module: nn.Module) -> nn.Module:
    r"""A copy of a converted module with its original layers, at the means of included weights.

    These means are $\kappa$; `SparseNetwork.weights("all", "mean")` has the posterior means
    $\alpha\kappa$.
    """
    made = copy.deepcopy(module)
    for name, layer in sparse_layers(module).items():
        original = copy.deepcopy(layer.original[0])
        means = {"weight": layer.mean, "bias": layer.bias_mean}
        original.load_state_dict(  # assigned: the layer may be on another device by now
            {name: value.detach().clone() for name, value in means.items() if value is not None},
            assign=True,
        )
        made = replace_layer(made, name, original)
    return made.eval()


@dataclass(frozen=True)
class SparseNetwork(Predictor):
    r"""A posterior over structure and weights of a network.

    Attributes:
        module: the converted module, in evaluation mode.
        likelihood: with its parameters learned.
        history: by epoch: "elbo" (in the units of y; mean over steps), "kl", "density" (share of
            weights with an inclusion probability above 1/2), and for classes "accuracy" of draws
            on training rows, which count as often as their weights.
        output: picks the tensor out of what the module returns, as for `Network`.
        n_draws: default number of networks drawn for a prediction.
    """

    kind: ClassVar[str] = "sparse-network"
    modes: ClassVar[tuple[str, ...]] = ("structure", "weights")

    module: nn.Module
    likelihood: Likelihood
    history: History = field(default_factory=dict)
    output: OutputFunction | None = None
    n_draws: int = 10

    def __post_init__(self) -> None:
        if not sparse_layers(self.module):
            fail("module", "a module that convert() has made", "one without sparse layers")

    @cached_property
    def network(self) -> Network:
        """The network as a function of one weight vector, without indicators."""
        return Network(revert(self.module), output=self.output)

    @property
    def layers(self) -> dict[str, SparseLayer]:
        """The sparse layers by name."""
        return sparse_layers(self.module)

    def __repr__(self) -> str:
        return (
            f"SparseNetwork({len(self.layers)} layers, {self.network.size} weights, "
            f"density {self.density():.3g}, {self.likelihood!r})"
        )

    # --- the interface of predictors --------------------------------------------------------

    @property
    @override
    def label(self) -> str:
        return "sparse network"

    @property
    @override
    def default_draws(self) -> int:
        return self.n_draws

    @override
    def describe(self) -> dict[str, str]:
        return super().describe() | {"density": f"{100 * self.density():.3g} % of the weights"}

    def fit_summary(self) -> dict[str, Any]:
        """Density and mean inclusion probabilities by layer."""
        return {
            "method": "sparse",
            "density": self.density(),
            "inclusion": self.inclusion()["mean probability"].to_dict(),
        }

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The state of the converted module, and its original network."""
        return {
            **network_tensors(self.network),
            "weights": self.network.weights,
            **add_prefix("state", self.module.state_dict()),
        }

    def facts(self) -> SparseFacts:
        """Settings of the layers, priors, likelihood and history."""
        return SparseFacts(
            network=network_facts(self.network),
            likelihood=self.likelihood.to_config(),
            layers={name: layer_facts(layer) for name, layer in self.layers.items()},
            history=self.history,
            n_draws=self.n_draws,
        )

    # --- structure --------------------------------------------------------------------------

    @staticmethod
    def density_of(layers: Mapping[str, SparseLayer]) -> float:
        """Share of weights with an inclusion probability above one half."""
        included = sum(int(layer.included().count_nonzero()) for layer in layers.values())
        return included / sum(layer.mean.numel() for layer in layers.values())

    def density(self, structure: str = "median") -> float:
        """Share of the weights that a prediction uses.

        Args:
            structure: "median" counts probabilities above 1/2; "sample" gives the expected share
                in a draw; "all" is 1. Biases and layers that are not converted do not count.
        """
        check_choice("structure", structure, STRUCTURE_MODES)
        if structure == "all":
            return 1.0
        if structure == "median":
            return self.density_of(self.layers)
        total = sum(
            float(layer.probability().sum()) if layer.excludes_weights else layer.mean.numel()
            for layer in self.layers.values()
        )
        return total / sum(layer.mean.numel() for layer in self.layers.values())

    def inclusion(self) -> pd.DataFrame:
        """Inclusion by layer: weights, mean probability, density, prior probability.

        Example:
            >>> from subbayes import sparse
            >>> from subbayes.likelihoods import Gaussian
            >>> SparseNetwork(sparse.convert(nn.Linear(2, 1)), Gaussian(1.0)).inclusion().shape
            (1, 4)
        """
        rows = {}
        for name, layer in self.layers.items():
            p = layer.probability()
            rows[name] = {
                "weights": p.numel(),
                "mean probability": float(p.mean()),
                "density": float(layer.included().double().mean()),
                "prior probability": layer.inclusion.probability if layer.excludes_weights else 1.0,
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")

    def feature_inclusion(
        self, layer: str | None = None, draws: int = 1000, seed: int = 0
    ) -> Float[np.ndarray, "inputs"]:
        """Probability that an input is connected to the output by included weights of a layer.

        If the layer alone reads the input, that is the probability that the input is used at all.
        Weights of units that nothing reads do not count, because the data carry no information on
        them. See `path_inclusion.path_probability`.

        Args:
            layer: whose inputs; by default the first converted layer that reads those of the
                module. A warning tells if anything else reads these too, or may do so.
            draws: of the indicators of the layers that follow.
            seed: of the draws.

        Returns:
            One probability for each input feature or channel.

        Raises:
            InputError: an unknown layer, or one with indicators of whole units.

        Example:
            >>> from subbayes import sparse
            >>> from subbayes.likelihoods import Gaussian
            >>> net = sparse.convert(nn.Linear(2, 1), inclusion=0.25)
            >>> SparseNetwork(net, Gaussian(1.0)).feature_inclusion().round(2).tolist()
            [0.25, 0.25]
        """
        names, module = list(self.layers), self.network.module_with()
        if layer is None:
            readers, alone = readers_of_inputs(module, names)
            layer = (readers or names)[0]
            if len(readers) > 1 or not alone:
                others = (
                    ", ".join(map(repr, readers[1:])) or "something other than converted layers"
                )
                warn_user(
                    f"The module's inputs may be read by {others} too: these are the "
                    f"probabilities that they are used through layer {layer!r}. Pass "
                    f"layer={layer!r} if that is what you want"
                )
        check_choice("layer", layer, names)
        if self.layers[layer].structure == "units":
            fail("layer", "a layer with an indicator for each weight", "one of whole units")
        return path_probability(
            module, self.layers, layer, check_count("draws", draws), check_seed(seed)
        ).numpy()

    # --- weights and predictions ------------------------------------------------------------

    def weights(
        self, structure: str = "sample", weights: str = "sample", draws: int = 10, seed: int = 0
    ) -> WeightsBatch:
        r"""Weight vectors of `network`, with zeros for excluded weights.

        Args:
            structure: "sample" draws the indicators, "median" includes weights with a probability
                above 1/2, "all" multiplies weights by their probabilities.
            weights: "sample" draws the included weights, "mean" uses their means; "all" with
                "mean" is the posterior mean $\alpha\kappa$.
            draws: number of draws; one if nothing is drawn.
            seed: of the draws.

        Raises:
            InputError: "all" with "sample" where draws exclude weights, which the paper does not
                define.

        Source: Hubin and Storvik (2024), section 3.4, with $\delta = 0$.
        """
        return self._vectors(list(self._draws(structure, weights, draws, seed)))

    @torch.no_grad()
    def _vectors(self, drawn: list[dict[str, LayerDraw]]) -> WeightsBatch:
        """Convert draws to weight vectors, and empty them to save memory."""
        spans = self.network.spans
        found = self.network.weights.expand(len(drawn), -1).clone()
        for row, draw in zip(found, drawn, strict=True):
            for name, own in draw.items():
                prefix = f"{name}." if name else ""
                own.write_dense(row[spans[f"{prefix}weight"]])
                if own.bias is not None:
                    row[spans[f"{prefix}bias"]] = own.bias
            draw.clear()
        return found

    def _draws(
        self, structure: str, weights: str, draws: int, seed: int
    ) -> Iterator[dict[str, LayerDraw]]:
        """Draw one network after the other; their number does not change the first ones."""
        check_choice("structure", structure, STRUCTURE_MODES)
        check_choice("weights", weights, WEIGHT_MODES)
        excluding = any(layer.excludes_weights for layer in self.layers.values())
        if (structure, weights) == ("all", "sample") and excluding:
            fail(
                "weights",
                "'mean' with structure='all', which uses expected weights",
                "'sample'",
                "Pass weights='mean', or another structure",
            )
        random = structure == "sample" or weights == "sample"
        count = check_count("draws", draws) if random else 1
        generator = torch.Generator().manual_seed(check_seed(seed))
        streams = {
            name: layer.draws(structure, weights, generator) for name, layer in self.layers.items()
        }
        for _ in range(count):
            yield {name: next(stream) for name, stream in streams.items()}

    def predict(
        self,
        inputs: Any,
        *,
        n_draws: int | None = None,
        noise: Any = None,
        structure: str = "sample",
        weights: str = "sample",
        seed: int = 0,
        memory_limit: int = 2**30,
        progress: bool | None = False,
    ) -> Predictive:
        """Average predictions over draws of the network; see `Predictor.predict`.

        `structure` ("sample", "median" or "all") and `weights` ("sample" or "mean") are those of
        `weights`, and `seed` is that of the draws. `memory_limit` also bounds the memory of the
        weights: where the draws do not fit, they are made again for each batch of a loader, in
        parts that fit.
        """
        count = self.n_draws if n_draws is None else check_count("n_draws", n_draws)
        at_once = max(1, memory_limit // (_BYTES * self.network.size))
        options: dict[str, Any] = {"memory_limit": memory_limit, "progress": progress}

        def parts() -> Iterator[BatchOutputs]:
            draws = self._draws(structure, weights, count, seed)
            while drawn := list(islice(draws, at_once)):
                yield self._outputs_of(drawn, options)

        kept = list(parts()) if count <= at_once else None

        def evaluate(batch: Inputs) -> Outputs:
            found = [outputs_of(batch) for outputs_of in kept or parts()]
            return found[0] if len(found) == 1 else torch.cat(found)

        return average_of_batches(self.network, self.likelihood, evaluate, inputs, noise)

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        count = self.n_draws if n_draws is None else check_count("n_draws", n_draws)
        outputs = BatchedModule(self.network, self.weights(draws=count))
        return [Sampled(outputs, self.likelihood, count)]

    def _outputs_of(
        self, drawn: list[dict[str, LayerDraw]], options: dict[str, Any]
    ) -> BatchOutputs:
        """The outputs of some draws, as a function of a batch."""
        if self._uses_sparse_products(drawn[0]):
            return partial(self._sampled_network.outputs, drawn, **options)
        vectors = self._vectors(drawn)
        return partial(outputs, self.network, vectors.__getitem__, len(vectors), **options)

    @cached_property
    def _sampled_network(self) -> SampledNetwork:
        return SampledNetwork(self.network, tuple(self.layers))

    def _uses_sparse_products(self, drawn: dict[str, LayerDraw]) -> bool:
        """Whether predictions by products with sparse matrices are faster."""
        linear = [own for name, own in drawn.items() if self.layers[name].operation.linear]
        included = sum(len(own.values) for own in linear)
        total = sum(
            len(own.values) if own.pattern is None else math.prod(own.pattern.shape)
            for own in linear
        )
        return (
            total >= _MIN_WEIGHTS
            and self.network.device.type == "cpu"
            and included <= _MAX_DENSITY * total
        )

    # --- other models -----------------------------------------------------------------------

    def small_network(self, example: Any = None, layout: str = "auto") -> SmallNetwork:
        """The median model with the means of its weights, as a small plain module.

        Args:
            example: inputs of the module; without them "auto" keeps all layers dense.
            layout: "dense", "csr" (compressed sparse rows), or "auto"; see `export_network`.

        Returns:
            A module whose outputs are those of `predict(structure="median", weights="mean")`, and
            what was removed.

        Example:
            >>> from subbayes import sparse
            >>> from subbayes.likelihoods import Gaussian
            >>> net = sparse.convert(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)))
            >>> sparse.SparseNetwork(net, Gaussian(1.0)).small_network().units
            {'0': (9, 9), '2': (1, 1)}
        """
        whole = self.network.module_with(self.weights("median", "mean")[0])
        return export_network(whole, tuple(self.layers), example, layout)


@artifact("sparse-network", SparseFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: SparseFacts,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> SparseNetwork:
    """Rebuild a sparse network from its artifact; see `subbayes.load`."""
    network = network_from(tensors, facts.network, tensors["weights"], module)
    state = strip_prefix("state", tensors)
    # without memory first: facts alone may ask for the square of the weights
    shapes = layers_from(network.module_with().to("meta"), facts.layers, state)
    shapes.load_state_dict(state, assign=True)
    made = layers_from(network.module_with(), facts.layers, state)
    made.eval().load_state_dict(state)
    return SparseNetwork(
        made,
        saved_likelihood(facts.likelihood, likelihood, known_outputs(facts.network, output)),
        facts.history,
        output,
        facts.n_draws,
    )

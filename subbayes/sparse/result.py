"""A trained sparse network: predictions in every mode, inclusion, density."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, from_config
from subbayes.networks.network import Network
from subbayes.networks.saving import network_facts, network_from, network_tensors
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.sparse.convert import sparse_layers
from subbayes.sparse.dependency_graph import readers_of_inputs
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.tiled_layers import SampledNetwork
from subbayes.sparse.kernels import LayerDraw
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import replace_layer
from subbayes.sparse.path_inclusion import path_probability
from subbayes.sparse.priors import NormalSlab, Slab, StudentTSlab
from subbayes.sparse.saving import layer_facts, layer_from
from subbayes.sparse.variational_families import ALWAYS_INCLUDED, Noise
from subbayes.subspace import CoordinateSubspace
from subbayes.training.loop import History
from subbayes.utils.artifact import add_prefix, strip_prefix
from subbayes.utils.checks import check_choice, check_count, fail

__all__ = ["STRUCTURE_MODES", "WEIGHT_MODES", "SparseNetwork", "rebuild", "revert"]

STRUCTURE_MODES = ("sample", "all", "median")
WEIGHT_MODES = ("sample", "mean")
_MIN_WEIGHTS = 50_000  # weights of linear layers for which sparse products are worth it,
_MAX_DENSITY = 0.25  # and the density up to which


def revert(module: nn.Module) -> nn.Module:
    r"""A module with the layers it was converted from, with the means of weights that are in.

    That is $\kappa$ in all of them; `SparseNetwork.weights("all", "mean")` has the posterior means
    $\alpha\kappa$.
    """
    made = copy.deepcopy(module)
    for name, layer in sparse_layers(module).items():
        made = replace_layer(made, name, _restored(layer))
    return made.eval()


def _restored(layer: SparseLayer) -> nn.Module:
    found = copy.deepcopy(layer.original[0])
    means = {"weight": layer.mean} | ({} if layer.bias_mean is None else {"bias": layer.bias_mean})
    found.load_state_dict(  # assigned, for the layer may have moved to another device or dtype
        {name: value.detach().clone() for name, value in means.items()}, assign=True
    )
    return found.train(layer.training)


def _scale(slab: Slab) -> float:
    """Of the normal prior that takes a slab's place."""
    hyper = {name: math.exp(float(value.detach())) for name, value in slab.named_parameters()}
    if isinstance(slab, NormalSlab):
        return hyper["log_scale"]
    if isinstance(slab, StudentTSlab):
        return math.sqrt(hyper["log_rate"] / hyper["log_shape"])
    return 1.0


@dataclass(frozen=True)
class SparseNetwork(Predictor):
    r"""A posterior over structure and weights of a network.

    Attributes:
        module: the converted module, in evaluation mode.
        likelihood: with its parameters learned.
        history: by epoch: "elbo" (mean over steps), "kl", "density" (share of weights with an
            inclusion probability above 1/2), "accuracy" of draws on training rows.
        output: picks the tensor out of what the module returns, as for `Network`.
        n_draws: number of networks drawn for a prediction, by default.
    """

    kind: ClassVar[str] = "sparse-network"
    modes: ClassVar[tuple[str, ...]] = ("structure", "weights")

    module: nn.Module
    likelihood: Likelihood
    history: History = field(default_factory=dict)
    output: Callable[[Any], Tensor] | None = None
    n_draws: int = 10

    def __post_init__(self) -> None:
        if not sparse_layers(self.module):
            fail("module", "a module that convert() has made", "one without sparse layers")

    @cached_property
    def network(self) -> Network:
        """The network without indicators, as a function of one weight vector."""
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

    # --- what every model has ---------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name of the method in tables."""
        return "sparse network"

    @property
    def default_draws(self) -> int:
        """Number of networks drawn for a prediction, by default."""
        return self.n_draws

    def describe(self) -> dict[str, str]:
        """What the model is, in words."""
        return super().describe() | {"density": f"{100 * self.density():.3g} % of the weights"}

    def fit_summary(self) -> dict[str, Any]:
        """Density, and mean inclusion probability by layer."""
        return {
            "method": "sparse",
            "density": self.density(),
            "inclusion": self.inclusion()["mean probability"].to_dict(),
        }

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The converted module and the network that it was made from."""
        return {
            **network_tensors(self.network),
            "weights": self.network.weights,
            **add_prefix("state", self.module.state_dict()),
        }

    def facts(self) -> dict[str, Any]:
        """Settings of the layers, priors, likelihood and history."""
        return {
            "network": network_facts(self.network),
            "likelihood": self.likelihood.to_config(),
            "layers": {name: layer_facts(layer) for name, layer in self.layers.items()},
            "history": self.history,
            "n_draws": self.n_draws,
        }

    # --- structure --------------------------------------------------------------------------

    @staticmethod
    def density_of(layers: Mapping[str, SparseLayer]) -> float:
        """Share of weights with an inclusion probability above one half."""
        inside = sum(int(layer.included().count_nonzero()) for layer in layers.values())
        return inside / sum(layer.mean.numel() for layer in layers.values())

    def density(self, structure: str = "median") -> float:
        """Share of the weights that a prediction uses.

        Args:
            structure: "median" counts probabilities above 1/2; "sample" gives the expected share
                in a draw; "all" is 1. Biases do not count, nor do layers that were kept.
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
                "prior probability": 1.0
                if layer.posterior in ALWAYS_INCLUDED
                else layer.inclusion.probability,
            }
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")

    def feature_inclusion(
        self, layer: str | None = None, draws: int = 1000, seed: int = 0
    ) -> Float[np.ndarray, "inputs"]:
        """Probability that weights which are in lead from an input through a layer to the output.

        That is the probability that the input is used at all, if the layer alone reads it. Weights
        that lead to units which nothing reads do not count: of them the data say nothing. See
        `paths.path_probability`.

        Args:
            layer: whose inputs; by default the first converted layer that reads the module's. A
                warning says where these surely are read, or may be, by something else too.
            draws: of the indicators of the layers that follow.
            seed: of the draws.

        Returns:
            One probability for each input feature or channel.

        Raises:
            InputError: no such layer, or one whose whole units are in or out.

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
                others = ", ".join(map(repr, readers[1:])) or "something beside converted layers"
                warnings.warn(
                    f"The module's inputs may be read by {others} too: these are the "
                    f"probabilities that they are used through layer {layer!r}. Pass "
                    f"layer={layer!r} where that is meant",
                    stacklevel=2,
                )
        check_choice("layer", layer, names)
        if self.layers[layer].structure == "units":
            fail("layer", "a layer with an indicator for each weight", "one of whole units")
        return path_probability(
            module, self.layers, layer, check_count("draws", draws), check_count("seed", seed, 0)
        ).numpy()

    # --- weights and predictions ------------------------------------------------------------

    def weights(
        self, structure: str = "sample", weights: str = "sample", draws: int = 10, seed: int = 0
    ) -> Float[Tensor, "S D"]:
        r"""Weight vectors of `network`, zeros where weights are out.

        Args:
            structure: indicators: "sample" draws them, "median" has those with a probability
                above 1/2, "all" takes their expectation.
            weights: "sample" draws the weights that are in, "mean" takes their means: with "all"
                that is the posterior mean $\alpha\kappa$.
            draws: how many; one where nothing is drawn.
            seed: of the draws.

        Raises:
            InputError: "all" with "sample" where draws leave weights out, no mode of the paper.

        Source: Hubin and Storvik (2024), section 3.4, with $\delta = 0$.
        """
        return self._vectors(list(self._draws(structure, weights, draws, seed)))

    @torch.no_grad()
    def _vectors(self, drawn: list[dict[str, LayerDraw]]) -> Float[Tensor, "S D"]:
        """Draws as weight vectors; they are emptied, so that their numbers are not held twice."""
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
        """One draw after the other: the first ones are the same however many follow."""
        check_choice("structure", structure, STRUCTURE_MODES)
        check_choice("weights", weights, WEIGHT_MODES)
        dense = all(layer.posterior in ALWAYS_INCLUDED for layer in self.layers.values())
        if (structure, weights) == ("all", "sample") and not dense:
            fail(
                "weights",
                "'mean' where all weights are in at their expectation",
                "'sample'",
                "Pass weights='mean' beside structure='all', or another structure",
            )
        random = structure == "sample" or weights == "sample"
        count = check_count("draws", draws) if random else 1
        generator = torch.Generator().manual_seed(check_count("seed", seed, 0))
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
        structure: str = "sample",
        weights: str = "sample",
        seed: int = 0,
        memory_limit: int = 2**30,
        progress: bool | None = False,
    ) -> Predictive:
        """Predictions of new inputs, averaged over draws of the network.

        Args:
            inputs: in the form the module takes, or a loader of them.
            n_draws: number of draws R; by default that of the network.
            structure: "sample" (SIM), "median" (MED) or "all" (ALL).
            weights: "sample" (SIM) or "mean" (MEA).
            seed: of the draws.
            memory_limit: bytes of activations held at once.
            progress: show a progress bar; None shows it on a terminal.
        """
        count = self.n_draws if n_draws is None else check_count("n_draws", n_draws)
        drawn = list(self._draws(structure, weights, count, seed))
        if self._uses_sparse_products(drawn[0]):
            return Predictive(
                self._sampled_network.outputs(
                    drawn, inputs, memory_limit=memory_limit, progress=progress
                ),
                self.likelihood,
            )
        return average(
            self.network,
            self.likelihood,
            self._vectors(drawn),
            inputs,
            memory_limit=memory_limit,
            progress=progress,
        )

    @cached_property
    def _sampled_network(self) -> SampledNetwork:
        return SampledNetwork(self.network, tuple(self.layers))

    def _uses_sparse_products(self, drawn: dict[str, LayerDraw]) -> bool:
        """Whether products with sparse matrices are the faster way to predict."""
        linear = [own for name, own in drawn.items() if self.layers[name].operation.linear]
        inside = sum(len(own.values) for own in linear)
        total = sum(
            len(own.values) if own.pattern is None else math.prod(own.pattern.shape)
            for own in linear
        )
        return (
            total >= _MIN_WEIGHTS
            and self.network.device.type == "cpu"
            and inside <= _MAX_DENSITY * total
        )

    # --- what is taken away -----------------------------------------------------------------

    def export(self, example: Any = None, layout: str = "auto") -> SmallNetwork:
        """The median model with the means of its weights, as a small plain module.

        Args:
            example: inputs to choose layouts with, of the size that will be predicted; without
                them all layers are dense.
            layout: "dense", "csr" (compressed sparse rows), or "auto", whichever is faster.

        Returns:
            A module whose outputs are those of `predict(structure="median", weights="mean")`, and
            what was removed.

        Example:
            >>> from subbayes import sparse
            >>> from subbayes.likelihoods import Gaussian
            >>> net = sparse.convert(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)))
            >>> sparse.SparseNetwork(net, Gaussian(1.0)).export().units
            {'0': (9, 9), '2': (1, 1)}
        """
        whole = self.network.module_with(self.weights("median", "mean")[0])
        return export_network(whole, tuple(self.layers), example, layout)

    def posterior(self, data: Any, prior_scale: float | None = None, **options: Any) -> Posterior:
        r"""The posterior of the weights of the median model, for any sampler.

        Args:
            data: the rows.
            prior_scale: standard deviation of the weights' normal prior. By default each layer's
                weights and biases have the scale of its slab: s of a `NormalSlab`, that of the t,
                $\sqrt{b / a}$, of a `StudentTSlab`; all others have 1.
            options: further arguments of `Posterior`.

        Returns:
            A posterior over the weights that are in, and the biases; coordinates are deviations
            from their means. The prior is centred where the weights are 0.
        """
        start = self.weights("median", "mean")[0]
        inside = torch.ones_like(start, dtype=torch.bool)
        scales = torch.ones_like(start, dtype=torch.float64)
        for name, layer in self.layers.items():
            prefix, kept = f"{name}." if name else "", layer.included()
            weight = self.network.spans[f"{prefix}weight"]
            inside[weight], scales[weight] = kept.reshape(-1), _scale(layer.slab)
            if layer.bias_mean is not None:
                bias = self.network.spans[f"{prefix}bias"]
                scales[bias], inside[bias] = _scale(layer.slab), layer.bias_raw_sd is not None
                if layer.structure == "units" and layer.bias_raw_sd is not None:
                    inside[bias] = kept.flatten(1)[:, 0]
        at = inside.nonzero()[:, 0]
        scale = scales[at].cpu().numpy() if prior_scale is None else np.full(len(at), prior_scale)
        prior = Normal(scale, mean=-start[at].double().cpu().numpy())
        return Posterior(
            self.network.with_weights(start),
            self.likelihood,
            data,
            CoordinateSubspace(start, at),
            prior,
            **options,
        )


def rebuild(
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> SparseNetwork:
    """Rebuild a sparse network from its artifact; see `subbayes.load`.

    Args:
        tensors: as saved.
        facts: as saved.
        module: a module of the architecture that was converted, unless it is an `MLP`.
        likelihood: a likelihood of your own.
        output: picks the tensor out of what the module returns, as for `fit`.
    """
    made = network_from(tensors, facts["network"], tensors["weights"], module).module_with()
    state, noise = strip_prefix("state", tensors), Noise(0)
    for name, config in facts["layers"].items():
        layer = made.get_submodule(name)
        if isinstance(layer.bias, Tensor):  # a frozen bias has no deviations
            layer.bias.requires_grad_(f"{name}.bias_raw_sd".lstrip(".") in state)
        made = replace_layer(made, name, layer_from(layer, config, name, state, noise))
    made.eval().load_state_dict(state)
    return SparseNetwork(
        made,
        likelihood or from_config(facts["likelihood"]),
        facts["history"],
        output,
        facts["n_draws"],
    )

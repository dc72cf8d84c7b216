r"""MC dropout (Gal and Ghahramani 2016): dropout stays active at prediction.

$$ p(y \mid x) \approx \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w \odot m_s)), \qquad
   m_s \sim \mathrm{dropout} $$
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.baselines.trained_network import network_and_likelihood
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, saved_likelihood
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.layer_kinds import DROPOUTS
from subbayes.networks.network import Network
from subbayes.networks.saving import known_outputs, network_facts, network_from, network_tensors
from subbayes.networks.token_outputs import output_for
from subbayes.predictions.averaging import input_batches, with_noise
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.utils.checks import check_count, fail
from subbayes.utils.seeding import derive_seed, fork_rng
from subbayes.utils.torch_lock import torch_lock
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs

__all__ = ["McDropout", "check_dropout", "mc_dropout", "rebuild"]


def mc_dropout(
    trained: Any,
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    *,
    n_draws: int = 30,
    seed: int = 0,
    output: Callable[[Any], Tensor] | None = None,
) -> McDropout:
    """Predict with random dropout masks.

    One draw is one set of masks, the same for all rows, so that a draw is a function of x, as it is
    for every other method, and does not depend on the batch size or on the other rows. For a single
    row the distribution is that of the paper. Dropout that is not a layer of its own
    (`functional.dropout`, the `dropout` argument of recurrent and attention layers) is not detected
    and stays off.

    Args:
        trained: what `train` returned for a module with dropout layers, or such a module, trained
            with them; it is not changed.
        likelihood: p(y | f), or its name as for `fit`; needed for a module.
        data: training data, from which parameters of the likelihood that are "learned" are
            estimated, with dropout off; needed for a module with such a likelihood.
        n_draws: number of sets of masks S.
        seed: seed of the masks.
        output: picks the tensor out of what a module returns, as for `Network`.

    Raises:
        InputError: no dropout layer with a probability above 0, or a module without a likelihood
            or the data that it needs.
        InputTypeError: neither a result nor a module.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> result = subbayes.training.train(net, Gaussian(), data, subbayes.Training(epochs=2))
        >>> mc_dropout(result, n_draws=10).predict(data[0]).n_draws
        10
    """
    check_count("n_draws", n_draws)
    network, likelihood = network_and_likelihood(trained, likelihood, data, output)
    return _with_masks(network, likelihood, n_draws, seed)


def check_dropout(module: nn.Module) -> None:
    """Check that a module has dropout layers to draw masks of.

    Raises:
        InputError: no dropout layer with a probability above 0.
    """
    if not any(map(_is_active, module.modules())):
        fail(
            "module",
            "at least one dropout layer with p above 0",
            "none",
            "Train a module with nn.Dropout layers",
        )


def _is_active(layer: nn.Module) -> bool:
    return isinstance(layer, DROPOUTS) and layer.p > 0


def rebuild(
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> McDropout:
    """Rebuild MC dropout from its artifact; see `subbayes.load`."""
    likelihood = saved_likelihood(
        facts["likelihood"], likelihood, known_outputs(facts["network"], output)
    )
    output = output_for(likelihood, output)
    network = network_from(tensors, facts["network"], tensors["weights"], module, output)
    return replace(
        _with_masks(network, likelihood, facts["n_draws"], facts["seed"]), name=facts["name"]
    )


def _with_masks(network: Network, likelihood: Likelihood, n_draws: int, seed: int) -> McDropout:
    module = network.module_with()
    check_dropout(module)
    masks = _insert_masks(module, seed)
    return McDropout(network, module, likelihood, n_draws, tuple(masks), seed=seed)


@dataclass(frozen=True)
class McDropout(Predictor):
    """A module whose dropout layers use one mask per draw.

    Attributes:
        network: the network.
        module: a copy of its module, with masks in place of dropout layers.
        likelihood: p(y | f).
        n_draws: number of sets of masks.
        masks: the masks.
        name: what tables call it.
        seed: seed of the masks.
    """

    kind: ClassVar[str] = "mc-dropout"

    network: Network
    module: nn.Module
    likelihood: Likelihood
    n_draws: int
    masks: tuple[Mask, ...]
    name: str = "MC dropout"
    seed: int = 0

    def __repr__(self) -> str:
        return f"McDropout({self.network!r}, {self.likelihood!r}, n_draws={self.n_draws})"

    @property
    def default_draws(self) -> int:
        """Number of sets of masks."""
        return self.n_draws

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The network with its weights."""
        return {**network_tensors(self.network), "weights": self.network.weights}

    def facts(self) -> dict[str, Any]:
        """The architecture, the likelihood and the seed of the masks."""
        return {
            "network": network_facts(self.network),
            "likelihood": self.likelihood.to_config(),
            "n_draws": self.n_draws,
            "seed": self.seed,
            "name": self.name,
        }

    def predict(
        self,
        inputs: Any,
        *,
        n_draws: int | None = None,
        noise: Any = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Average over at most `n_draws` sets of masks; see `Predictor.predict`.

        `batch_size` is the number of rows per pass, by default all.
        """
        count = self.n_draws
        if n_draws is not None:
            count = min(count, check_count("n_draws", n_draws))
        parts = []
        # the module holds the masks of one draw at a time
        with torch.no_grad(), torch_lock, attention_without_fused_kernels():
            for batch in input_batches(inputs, self.network):
                rows = to_device(batch, self.network.device)
                self.network.check(rows)
                if any(mask.axes is None for mask in self.masks):
                    self._find_axes(rows)
                parts.append(torch.stack([self._draw(s, rows, batch_size) for s in range(count)]))
        outputs = torch.cat(parts, 1)
        check_outputs(outputs, self.likelihood)
        return Predictive(outputs, with_noise(self.likelihood, noise, outputs.shape[1]))

    def _find_axes(self, inputs: Inputs) -> None:
        """Find the axis of the rows in each call of a mask: that which grows with their number."""
        shapes = []
        for n in (2, 3):
            seen: list[list[torch.Size]] = [[] for _ in self.masks]
            for mask, own in zip(self.masks, seen, strict=True):
                mask.seen = own
            try:
                self.network.call(self.module, take(inputs, torch.zeros(n, dtype=torch.long)))
            finally:
                for mask in self.masks:
                    mask.seen = None
            shapes.append(seen)
        for mask, two, three in zip(self.masks, *shapes, strict=True):
            mask.axes = [
                next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 0)
                for one, other in zip(two, three, strict=False)
            ]

    def _draw(self, s: int, inputs: Inputs, batch_size: int | None) -> Float[Tensor, "N C"]:
        n = n_rows(inputs)
        size = n if batch_size is None else check_count("batch_size", batch_size)
        parts = []
        for start in range(0, n, size):
            for mask in self.masks:
                mask.begin(s)
            parts.append(self.network.call(self.module, take(inputs, slice(start, start + size))))
        return torch.cat(parts).cpu()


class Mask(nn.Module):
    """A dropout layer with one mask for all rows, drawn from a seed.

    Given its mask every kind of dropout is affine, x -> a x + b, where b is the output for zeros
    and a + b the output for ones.

    Attributes:
        axes: the axis of the rows in each call of a pass; by default the first.
        seen: None, or a list to which shapes are added instead of a mask being applied.
    """

    def __init__(self, layer: nn.Module, seed: int) -> None:
        super().__init__()
        self.layer = layer.train()
        self.seed, self.draw, self.call = seed, 0, 0
        self.axes: list[int] | None = None
        self.seen: list[torch.Size] | None = None

    def begin(self, draw: int) -> None:
        """Begin a pass of a draw, in which each call of the layer has its own mask."""
        self.draw, self.call = draw, 0

    def forward(self, x: Tensor) -> Tensor:
        """The output a x + b."""
        if self.seen is not None:
            self.seen.append(x.shape)
            return x
        axes = self.axes or []
        axis = axes[self.call] if self.call < len(axes) else 0
        one_row = torch.ones_like(x.narrow(axis, 0, 1))
        seed = derive_seed(self.seed, self.draw, self.call)
        self.call += 1
        with fork_rng(seed, x.device):
            of_zeros = self.layer(torch.zeros_like(one_row))
        with fork_rng(seed, x.device):
            of_ones = self.layer(one_row)
        return of_zeros + x * (of_ones - of_zeros)


def _insert_masks(module: nn.Module, seed: int) -> list[Mask]:
    """Replace dropout layers by masks, a layer that is used several times by one mask."""
    masks: dict[int, Mask] = {}
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if path and _is_active(layer):
            mask = masks.setdefault(id(layer), Mask(layer, derive_seed(seed, len(masks))))
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, mask)
    return list(masks.values())

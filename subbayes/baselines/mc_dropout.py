r"""MC dropout (Gal and Ghahramani 2016): dropout left on at prediction.

$$ p(y \mid x) \approx \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w \odot m_s)), \qquad
   m_s \sim \mathrm{dropout} $$
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import n_rows, take, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.layer_kinds import DROPOUTS
from subbayes.networks.network import Network
from subbayes.predictions.averaging import input_batches, with_noise
from subbayes.predictions.predictive import Predictive
from subbayes.training.trainer import TrainingResult
from subbayes.utils.checks import check_count, fail, fail_type
from subbayes.utils.seeding import derive, forked
from subbayes.utils.types import Inputs

__all__ = ["McDropout", "mc_dropout"]


def mc_dropout(
    trained: Any,
    likelihood: Likelihood | None = None,
    *,
    n_draws: int = 30,
    seed: int = 0,
    output: Callable[[Any], Tensor] | None = None,
) -> McDropout:
    """Predict with random dropout masks.

    One draw is one set of masks, the same for all rows, so that a draw is a function of x as it
    is for every other method; for one row the distribution is that of the paper. Hence neither
    the batch size nor the other rows matter. Dropout that is not a layer of its own is not
    found and stays off: `functional.dropout`, and the `dropout` argument of recurrent and
    attention layers.

    Args:
        trained: what `train` returned for a module with dropout layers, or such a module.
        likelihood: p(y | f), for a module.
        n_draws: number of sets of masks S.
        seed: seed of the masks.
        output: picks the tensor out of what a module returns, as for `Network`.

    Raises:
        InputError: no dropout layer with a probability above 0.
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
    if isinstance(trained, TrainingResult):
        network, likelihood = trained.network, likelihood or trained.likelihood
    elif isinstance(trained, nn.Module):
        network = Network(trained, output=output)
    else:
        fail_type("trained", "a TrainingResult or a module", trained)
    if likelihood is None:
        fail("likelihood", "the likelihood the module was trained with", "None")
    module = network.module_with()
    masks = _replace(module, seed)
    if not masks:
        fail(
            "module",
            "at least one dropout layer with p above 0",
            "none",
            "Train a module with nn.Dropout layers",
        )
    return McDropout(network, module, likelihood, n_draws, tuple(masks))


@dataclass(frozen=True)
class McDropout:
    """A module whose dropout layers draw one mask per draw.

    Attributes:
        network: the network it was made of.
        module: a copy with masks in place of dropout layers.
        likelihood: p(y | f).
        n_draws: number of sets of masks.
        masks: the masks.
        name: what tables call it.
    """

    network: Network
    module: nn.Module
    likelihood: Likelihood
    n_draws: int
    masks: tuple[Mask, ...]
    name: str = "MC dropout"

    def predict(
        self, inputs: Any, *, noise: Any = None, batch_size: int | None = None
    ) -> Predictive:
        """Average over the sets of masks.

        Args:
            inputs: new inputs in the form the module takes, or a loader of them.
            noise: noise scale per new row, for `Gaussian(noise="per-observation")`.
            batch_size: rows per pass; by default all.
        """
        parts = []
        with torch.no_grad(), attention_without_fused_kernels():
            for batch in input_batches(inputs):
                rows = to_device(batch, self.network.device)
                self.network.check(rows)
                parts.append(
                    torch.stack([self._draw(s, rows, batch_size) for s in range(self.n_draws)])
                )
        outputs = torch.cat(parts, 1)
        return Predictive(outputs, with_noise(self.likelihood, noise, outputs.shape[1]))

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

    Given its mask every kind of dropout is affine, x -> a x + b: b is what it makes of zeros,
    a + b what it makes of ones.
    """

    def __init__(self, layer: nn.Module, seed: int) -> None:
        super().__init__()
        self.layer = layer.train()
        self.seed, self.draw, self.call = seed, 0, 0

    def begin(self, draw: int) -> None:
        """A pass of a draw begins; a layer called twice in it has two masks."""
        self.draw, self.call = draw, 0

    def forward(self, x: Tensor) -> Tensor:
        """a x + b."""
        one_row = torch.ones_like(x[:1])
        seed = derive(self.seed, self.draw, self.call)
        self.call += 1
        with forked(seed, x.device):
            of_zeros = self.layer(torch.zeros_like(one_row))
        with forked(seed, x.device):
            of_ones = self.layer(one_row)
        return of_zeros + x * (of_ones - of_zeros)


def _replace(module: nn.Module, seed: int) -> list[Mask]:
    """Put masks in place of dropout layers, one for each layer however often it is used."""
    masks: dict[int, Mask] = {}
    for parent, name, layer in list(_dropouts(module)):
        mask = masks.setdefault(id(layer), Mask(layer, derive(seed, len(masks))))
        setattr(parent, name, mask)
    return list(masks.values())


def _dropouts(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for path, child in module.named_modules(remove_duplicate=False):
        if path and isinstance(child, DROPOUTS) and child.p > 0:
            parent, _, name = path.rpartition(".")
            yield module.get_submodule(parent), name, child

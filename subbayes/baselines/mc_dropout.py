r"""MC dropout (Gal and Ghahramani 2016): dropout stays active at prediction.

$$ p(y \mid x) \approx \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w \odot m_s)), \qquad
   m_s \sim \mathrm{dropout} $$
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subbayes.artifacts.arrays import Array, Arrays
from subbayes.artifacts.facts import DrawCount, Line, Size
from subbayes.artifacts.saving import KindFacts, artifact
from subbayes.baselines.trained_network import network_and_likelihood
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood, saved_likelihood
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.layer_kinds import has_dropout, train_dropout
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
from subbayes.predictions.averaging import input_batches, with_noise
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.utils.checks import check_count, fail
from subbayes.utils.seeding import derive_seed, fork_rng, torch_lock
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs, OutputFunction, Outputs

_DROPOUT_FUNCTIONS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)


def mc_dropout(
    trained: Any,
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    *,
    n_draws: int = 30,
    seed: int = 0,
    output: OutputFunction | None = None,
) -> McDropout:
    """Predict with random dropout masks.

    One draw is one set of masks, the same for all rows, so that a draw is a function of x, as it is
    for every other method, and does not depend on the batch size or on the other rows. For a single
    row the distribution is that of the paper. This holds for dropout layers and for
    `functional.dropout`. Dropout inside recurrent and attention layers (their argument `dropout`,
    `scaled_dot_product_attention`) draws masks for each row, as in training.

    Modules with a `forward` of their own are in training mode, for the dropout that they call;
    BatchNorm and the other layers of torch are in evaluation mode.

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
    if not any(map(has_dropout, module.modules())):
        fail(
            "module",
            "at least one dropout layer with p above 0",
            "none",
            "Train a module with nn.Dropout layers; calls of functional.dropout are not found",
        )


class DropoutFacts(KindFacts):
    """What an artifact holds of `McDropout` beside its tensors."""

    network: NetworkFacts
    likelihood: dict[str, Any]
    n_draws: DrawCount
    seed: Size
    name: Line

    def arrays(self) -> Arrays:
        """The network with its weights."""
        return {**NETWORK_ARRAYS, "weights": Array("D")}


@artifact("mc-dropout", DropoutFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: DropoutFacts,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> McDropout:
    """Rebuild MC dropout from its artifact; see `subbayes.load`."""
    likelihood = saved_likelihood(
        facts.likelihood, likelihood, known_outputs(facts.network, output)
    )
    output = output_for(likelihood, output)
    network = network_from(tensors, facts.network, tensors["weights"], module, output)
    return replace(_with_masks(network, likelihood, facts.n_draws, facts.seed), name=facts.name)


def _with_masks(network: Network, likelihood: Likelihood, n_draws: int, seed: int) -> McDropout:
    module = network.module_with()
    check_dropout(module)
    train_dropout(module)
    return McDropout(network, module, likelihood, n_draws, DropoutMasks(seed), seed=seed)


@dataclass(frozen=True)
class McDropout(Predictor):
    """A module whose dropout uses one mask per draw.

    Attributes:
        network: the network.
        module: a copy of its module, with dropout in training mode.
        likelihood: p(y | f).
        n_draws: number of sets of masks.
        masks: the masks of the draws.
        name: what tables call it.
        seed: seed of the masks.
    """

    kind: ClassVar[str] = "mc-dropout"

    network: Network
    module: nn.Module
    likelihood: Likelihood
    n_draws: int
    masks: DropoutMasks
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

    def facts(self) -> DropoutFacts:
        """The architecture, the likelihood and the seed of the masks."""
        return DropoutFacts(
            network=network_facts(self.network),
            likelihood=self.likelihood.to_config(),
            n_draws=self.n_draws,
            seed=self.seed,
            name=self.name,
        )

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
        # the masks are those of one draw at a time
        with torch.no_grad(), torch_lock, attention_without_fused_kernels():
            for batch in input_batches(inputs, self.network):
                rows = to_device(batch, self.network.device)
                self.network.check(rows)
                if self.masks.axes is None:
                    self._find_axes(rows)
                parts.append(torch.stack([self._draw(s, rows, batch_size) for s in range(count)]))
        outputs = torch.cat(parts, 1)
        check_outputs(outputs, self.likelihood)
        return Predictive(outputs, with_noise(self.likelihood, noise, outputs.shape[1]))

    def _find_axes(self, inputs: Inputs) -> None:
        """Find the axis of the rows in each call of dropout: that which grows with their number."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        shapes = []
        for n in (2, 3):
            self.masks.recorded = []
            try:
                self._call(take(inputs, torch.zeros(n, dtype=torch.long)))
                shapes.append(self.masks.recorded)
            finally:
                self.masks.recorded = None
        for name, buffer in self.module.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                buffer.copy_(buffers[name])
                fail(
                    "module",
                    "buffers that a pass in training mode leaves alone, but for BatchNorm layers",
                    f"another value of {name!r}",
                    "Use layers of torch for normalisation",
                )
        self.masks.axes = [
            next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 0)
            for one, other in zip(*shapes, strict=False)
        ]

    def _draw(self, s: int, inputs: Inputs, batch_size: int | None) -> Outputs:
        n = n_rows(inputs)
        size = n if batch_size is None else check_count("batch_size", batch_size)
        parts = []
        for start in range(0, n, size):
            self.masks.begin(s)
            parts.append(self._call(take(inputs, slice(start, start + size)), s))
        return torch.cat(parts).cpu()

    def _call(self, inputs: Inputs, draw: int = 0) -> Outputs:
        """Outputs of a draw, whose masks of each row are drawn from a seed."""
        recurrent = any(isinstance(part, nn.RNNBase) for part in self.module.modules())
        # cuDNN seeds the dropout of recurrent layers once for all passes
        kernels = torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()
        with fork_rng(derive_seed(self.seed, draw), self.network.device), kernels, self.masks:
            return self.network.call(self.module, inputs, {})


class DropoutMasks(TorchFunctionMode):
    """A context in which dropout uses one mask for all rows, drawn from a seed.

    Given its mask every kind of dropout is affine, x -> a x + b, where b is the output for zeros
    and a + b the output for ones.

    Args:
        seed: seed of the masks.

    Attributes:
        axes: the axis of the rows in each call of a pass; by default the first.
        recorded: None, or a list to which shapes are added instead of a mask being applied.

    Example:
        >>> masks = DropoutMasks(seed=0)
        >>> with masks:
        ...     outputs = functional.dropout(torch.ones(3, 50))
        >>> bool((outputs == outputs[0]).all()), bool((outputs == 0).any())
        (True, True)
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.draw, self.call = seed, 0, 0
        self.axes: list[int] | None = None
        self.recorded: list[torch.Size] | None = None

    def begin(self, draw: int) -> None:
        """Begin a pass of a draw, in which each call of dropout has its own mask."""
        self.draw, self.call = draw, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, with a mask for all rows if it is dropout."""
        kwargs = kwargs or {}
        if func not in _DROPOUT_FUNCTIONS:
            return func(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        p, training = call.arguments["p"], call.arguments["training"]
        if not (training and p > 0):
            return func(*args, **kwargs)
        x = call.arguments["input"]
        outputs = self._masked(lambda rows: func(rows, p, True), x)
        return x.copy_(outputs) if call.arguments["inplace"] else outputs

    def _masked(self, dropout: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.recorded is not None:
            self.recorded.append(x.shape)
            return x
        axes = self.axes or []
        axis = axes[self.call] if self.call < len(axes) else 0
        one_row = torch.ones_like(x.narrow(axis, 0, 1))
        seed = derive_seed(self.seed, self.draw, self.call)
        self.call += 1
        with fork_rng(seed, x.device):
            of_zeros = dropout(torch.zeros_like(one_row))
        with fork_rng(seed, x.device):
            of_ones = dropout(one_row)
        return of_zeros + x * (of_ones - of_zeros)

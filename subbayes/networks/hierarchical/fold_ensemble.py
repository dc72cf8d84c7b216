r"""Plain networks, each trained without one fold of the rows, whose outputs are averaged.

Numbers have a linear map of periodic embeddings of their own, with learned frequencies, and all
inputs a learned scale; the layers are in the parametrisation of the neural tangent kernel. Adam's
rate has four cosine cycles and ends at 0, so that the last step is the best one without rows held
out. A small form of Holzmüller, Grinsztajn and Steinwart (2024), *Better by default*.

The output of a row by the network that was trained without it is as far from its target as that of
a new row.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from subbayes.utils.seeding import fork_rng, give_way

_FOLDS, _HIDDEN = 5, (64, 64, 64)
COLUMN_SIZE = _FOLDS * _HIDDEN[0]
"""Numbers that an ensemble has at least for each column, and for each embedding."""

_FREQUENCIES, _EMBEDDED = 16, 3  # of a number: cosines, and what a linear map makes of them
_CLIP = 3.0  # standard deviations at which columns bend towards a bound
_STEPS, _BATCH, _MOST_EPOCHS = 2000, 128, 256
_RATES = {"weight": 0.2, "input": 1.2}  # of Adam
_SLOW_RATE = 0.02  # of biases and embeddings
_WEIGHT_DECAY, _DROPOUT = 0.02, 0.15


class FoldEnsemble(nn.Module):
    """The mean of five plain networks, one for each fold of the rows.

    Args:
        columns: number of columns d, best standardised.
        numbers: positions of columns with embeddings, those of more than two values.

    Example:
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> ensemble, out_of_fold = FoldEnsemble.fit(x, x[:, 0], seed=0)
        >>> ensemble(x).shape, out_of_fold.shape
        (torch.Size([40, 1]), torch.Size([40, 1]))
    """

    frequencies: Tensor
    phases: Tensor
    embedding: Tensor
    input_scale: Tensor

    def __init__(self, columns: int, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = list(numbers)
        c = len(numbers)
        k = _FREQUENCIES
        inputs = columns + c * _EMBEDDED
        tensors = {
            "frequencies": 0.1 * torch.randn(_FOLDS, 1, c, k),
            "phases": torch.rand(_FOLDS, 1, c, k),
            "embedding": (2 * torch.rand(_FOLDS, c, k, _EMBEDDED) - 1) / math.sqrt(k),
            "input_scale": torch.ones(_FOLDS, 1, inputs),
        }
        for layer, (before, after) in enumerate(pairwise([inputs, *_HIDDEN, 1])):
            start = 1.0 if layer < len(_HIDDEN) else 0.0
            tensors[f"weight_{layer}"] = start * torch.randn(_FOLDS, before, after)
            tensors[f"bias_{layer}"] = start * torch.randn(_FOLDS, 1, after)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @classmethod
    def fit(
        cls,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n"],
        weights: Float[np.ndarray, "n"] | None = None,
        *,
        seed: int,
    ) -> tuple[FoldEnsemble, Float[Tensor, "n 1"]]:
        """Train the networks by squared errors.

        Args:
            x: columns, float32.
            y: targets, best standardised.
            weights: of the rows.
            seed: of folds, start, batches and dropout, without touching torch's global generator.

        Returns:
            The ensemble, and for each row the output of the network that was trained without it.
        """
        share = torch.ones(len(y)) if weights is None else torch.from_numpy(weights).float()
        with fork_rng(seed), torch.enable_grad():
            found = cls(x.shape[1], [k for k, one in enumerate(x.mT) if len(one.unique()) > 2])
            fold = torch.randperm(len(y)) % _FOLDS
            found._train(x, y.float(), share / share.mean(), fold)
        each = torch.cat([found._each(rows) for rows in x.split(1000)], 1)
        return found, each[fold, torch.arange(len(y))]

    def _train(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n"],
        weights: Float[Tensor, "n"],
        fold: Int[Tensor, "n"],
    ) -> None:
        n = max(1, len(y) - math.ceil(len(y) / _FOLDS))  # rows of each network
        known = torch.stack([(fold != k).nonzero()[:n, 0] for k in range(_FOLDS)])
        groups = []
        for name, tensor in self.named_buffers():
            rate = _RATES.get(name.split("_")[0], _SLOW_RATE)
            decay = 0.0 if name.startswith("bias") else _WEIGHT_DECAY
            groups.append({"params": [tensor.requires_grad_()], "rate": rate, "decay": decay})
        optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        steps = min(_STEPS, _MOST_EPOCHS * math.ceil(n / _BATCH))
        for time in np.arange(steps) / steps:
            cycle = math.sin(math.pi * math.log2(1 + 15 * time)) ** 2
            shrinking = 1.0 if time < 0.5 else math.sin(math.pi * time) ** 2
            for group in optimiser.param_groups:
                group["lr"] = cycle * group["rate"]
                group["weight_decay"] = shrinking * group["decay"]
            rows = known.gather(1, torch.randint(n, (_FOLDS, min(n, _BATCH))))
            errors = self._each(x[rows], _DROPOUT * shrinking)[..., 0] - y[rows]
            optimiser.zero_grad()
            (weights[rows] * errors.square()).mean(1).sum().backward()
            optimiser.step()
            give_way()
        for tensor in self.buffers():
            tensor.requires_grad_(False)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        """The mean of the networks."""
        return self._each(x).mean(0)

    def _each(self, x: Float[Tensor, "*folds n d"], dropout: float = 0.0) -> Float[Tensor, "k n 1"]:
        """The output of each network, of the same rows or of rows of its own."""
        z = (x / torch.sqrt(1 + (x / _CLIP).square())).expand(_FOLDS, -1, -1)
        angles = 2 * math.pi * (self.frequencies * z[..., self.numbers, None] + self.phases)
        embedded = torch.einsum("kncf,kcfe->knce", angles.cos(), self.embedding)
        h = torch.cat([z, embedded.flatten(2)], -1) * self.input_scale
        for layer in range(len(_HIDDEN) + 1):
            h = F.dropout(F.mish(h), dropout) if layer else h
            weight = self.get_buffer(f"weight_{layer}") / math.sqrt(h.shape[-1])
            h = h @ weight + self.get_buffer(f"bias_{layer}")
        return h

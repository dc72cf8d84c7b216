"""The likelihood of one label at every place of a row: pixels of an image, tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Kind, Likelihood, Moments, check_tensor
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import Outputs, PerPoint, Targets

__all__ = ["CategoricalPlaces"]


@dataclass(frozen=True)
class CategoricalPlaces(Likelihood):
    r"""Labels of places in each row: $y_{np} \sim \mathrm{Categorical}(\mathrm{softmax}(f_{np}))$.

    The outputs of a row are those of its places one after another, K adjacent logits each. For a
    module that returns (N, K, height, width), pass `Network(module, output=...)` the function
    `lambda out: out.flatten(2).mT.flatten(1)`. Targets are whole numbers of shape (N, P).
    Means and variances are those of the indicators of each class at each place, (N, P K): as
    counts of each class in one trial. The curvature is one K x K block for each place.

    Args:
        n_classes: number of classes K.

    Raises:
        InputError: fewer than two classes.

    Example:
        >>> likelihood = CategoricalPlaces(2)
        >>> logits = torch.tensor([[0.0, 0.0, 9.0, 0.0]])  # two places
        >>> likelihood.log_prob(logits, torch.tensor([[0, 0]]))
        tensor([-0.6933])
        >>> likelihood.curvature_blocks(logits).shape
        torch.Size([1, 2, 2, 2])
    """

    n_classes: int
    kind: ClassVar[Kind] = "count"

    def __post_init__(self) -> None:
        check_count("n_classes", self.n_classes, 2)

    def _places(self, outputs: Outputs) -> Float[Tensor, "*S N P K"]:
        return outputs.reshape(*outputs.shape[:-1], -1, self.n_classes)

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log probability of the labels of each row, shape (..., N)."""
        assert isinstance(y, Tensor)
        log_p = self._places(outputs).log_softmax(-1)
        index = y.long().reshape(len(y), -1, 1).expand(*log_p.shape[:-1], 1)
        return log_p.gather(-1, index).squeeze(-1).sum(-1)

    def mean(self, outputs: Outputs) -> Moments:
        """Class probabilities of each place, shape (..., N, P K)."""
        return self._places(outputs).softmax(-1).flatten(-2)

    def variance(self, outputs: Outputs) -> Moments:
        """Variances of the indicators of each class at each place."""
        p = self.mean(outputs)
        return p * (1 - p)

    def curvature_blocks(self, outputs: Outputs) -> Float[Tensor, "*S N P K K"]:
        r"""$\mathrm{diag}(p) - p p^\top$ for each place."""
        p = self._places(outputs).softmax(-1)
        others = 1 - torch.eye(self.n_classes, dtype=p.dtype, device=p.device)
        pairs = p.unsqueeze(-1) * p.unsqueeze(-2) * others  # 1 - p would round to 0
        return torch.diag_embed(pairs.sum(-1)) - pairs

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The blocks on the diagonal of a matrix, for few places."""
        blocks = self.curvature_blocks(outputs)
        places, K = blocks.shape[-3], self.n_classes
        eye = torch.eye(places, dtype=blocks.dtype, device=blocks.device)
        whole = torch.einsum("...pij,pq->...piqj", blocks, eye)
        return whole.reshape(*blocks.shape[:-3], places * K, places * K)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """Indicators of one label for each place, shape (..., N, P K)."""
        p = self._places(outputs).softmax(-1).double().cpu()
        u = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)
        labels = (u > p.cumsum(-1)[..., :-1]).sum(-1)
        return torch.nn.functional.one_hot(labels, self.n_classes).double().flatten(-2)

    def n_outputs(self, y: Targets) -> int:
        """One output per class and place."""
        assert isinstance(y, Tensor)
        return self.n_classes * (y[0].numel() if len(y) else y.shape[1:].numel())

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for labels that are not integers 0..K-1."""
        y = check_tensor(
            y,
            "whole-number labels of shape (N, places)",
            lambda y: y.ndim > 1 and bool((y == y.long()).all()),
            "Pass one label for each place",
        )
        bad = (y < 0) | (y >= self.n_classes)
        if bool(bad.any()):
            fail("y", f"labels in 0..{self.n_classes - 1}", int(y[bad][0]), "Raise n_classes")

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for outputs that are not K for each place."""
        if n_outputs % self.n_classes:
            fail("module", f"{self.n_classes} outputs for each place", n_outputs)

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        return {"name": "CategoricalPlaces", "n_classes": self.n_classes}

"""Likelihoods of labels of several classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Kind, Likelihood, Moments, check_tensor
from subbayes.likelihoods.curvature_blocks import SoftmaxBlocks
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import Curvatures, Outputs, PerPoint, Targets


class ClassLikelihood(Likelihood):
    """Base class of likelihoods of labels, whose mean are the probabilities of the classes."""

    kind: ClassVar[Kind] = "classification"

    def variance(self, outputs: Outputs) -> Moments:
        """Variance of each class indicator."""
        p = self.mean(outputs)
        return p * (1 - p)

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        p = self.classes(outputs).double().cpu()
        u = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)
        return (u > p.cumsum(-1)[..., :-1]).sum(-1)


class SoftmaxLikelihood(ClassLikelihood):
    """Base class of likelihoods whose class probabilities are a softmax of the outputs."""

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return _softmax(outputs)

    @override
    def pooled(self, outputs: Outputs) -> Outputs:
        return outputs.log_softmax(-1).logsumexp(0, keepdim=True) - math.log(len(outputs))

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\Lambda = \mathrm{diag}(p) - p p^\top$."""
        return SoftmaxLikelihood.curvature_blocks(self, outputs).dense().squeeze(-3)

    def curvature_blocks(self, outputs: Outputs) -> SoftmaxBlocks:
        """One block, without matrices."""
        return SoftmaxBlocks(_softmax(outputs).unsqueeze(-2))


@dataclass(frozen=True)
class Categorical(SoftmaxLikelihood):
    r"""Class labels: $y \sim \mathrm{Categorical}(\mathrm{softmax}(f))$.

    Args:
        n_classes: number of classes K; by default as many as the network has outputs.
    """

    n_classes: int | None = None

    def __post_init__(self) -> None:
        if self.n_classes is not None:
            check_count("n_classes", self.n_classes, 2)

    @override
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        assert isinstance(y, Tensor)
        index = y.long().expand(outputs.shape[:-1])
        if not _many_rows(outputs):
            return outputs.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        by_class = outputs.transpose(-1, -2).contiguous().log_softmax(-2)
        return by_class.gather(-2, index.unsqueeze(-2)).squeeze(-2)

    @override
    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        assert isinstance(y, Tensor)
        index = y.long().expand(outputs.shape[:-1]).unsqueeze(-1)
        negative = -_softmax(outputs)
        return negative.scatter_add(-1, index, torch.ones_like(negative[..., :1]))

    def n_outputs(self, y: Targets) -> int:
        """One output per class."""
        assert isinstance(y, Tensor)
        return self.n_classes or max(2, int(y.max()) + 1)

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` for fewer outputs than classes."""
        assert isinstance(y, Tensor)
        if self.n_classes is not None:
            return super().check_outputs(n_outputs, y)
        self.check_parameters(n_outputs)
        if int(y.max()) >= n_outputs:
            fail(
                "y",
                f"labels in 0..{n_outputs - 1}, the module's {n_outputs} outputs",
                int(y.max()),
                "Encode labels as 0..K-1 or widen the last layer",
            )

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for another number of outputs than classes, or a single one."""
        if self.n_classes not in (None, n_outputs):
            remedy = f"Give the last layer {self.n_classes} outputs"
            fail("module", f"{self.n_classes} outputs for {self!r}", n_outputs, remedy)
        if n_outputs < 2:
            remedy = "Use Bernoulli for one logit"
            fail("module", "at least 2 outputs for Categorical", n_outputs, remedy)

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for labels that are not integers 0..K-1."""
        y = check_tensor(
            y,
            "whole-number labels of shape (N,)",
            lambda y: y.ndim == 1 and bool((y == y.long()).all()),
            "Encode the labels as 0..K-1: y[:, 0] of one column, y.argmax(1) of one column for "
            "each class; for a label of each token use likelihood='causal-lm' or 'tokens'",
        )
        top = self.n_classes - 1 if self.n_classes else math.inf
        if bool((y < 0).any()) or bool((y > top).any()):
            bad = int(y[(y < 0) | (y > top)][0])
            fail(
                "y",
                f"labels in 0..{'K-1' if math.isinf(top) else top}",
                bad,
                "Encode the labels as 0..K-1",
            )


def _many_rows(outputs: Outputs) -> bool:
    """Whether a softmax over leading classes is faster.

    On a CPU torch does not vectorise over fewer than 16 classes in the last dimension, and takes
    five to ten times as long.
    """
    return (
        not torch.compiler.is_exporting()
        and outputs.device.type == "cpu"
        and outputs.ndim > 1
        and outputs.shape[-1] < 16
        and outputs.shape[-2] >= 64
    )


def _softmax(outputs: Outputs) -> Outputs:
    if not _many_rows(outputs):
        return outputs.softmax(-1)
    n = outputs.shape[-2]
    # full SIMD registers, so that results do not depend on the position of a row
    by_class = F.pad(outputs.transpose(-1, -2), (0, -n % 32)).contiguous()
    return by_class.softmax(-2)[..., :n].transpose(-1, -2)

r"""The likelihood of labels of the positions of a row: tokens of a text, pixels of an image."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Likelihood, Moments, check_tensor
from subbayes.likelihoods.curvature_blocks import SoftmaxBlocks
from subbayes.likelihoods.families.classes import ClassLikelihood
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import Curvatures, Outputs, PerPoint, Targets

_MOST_CURVATURE = 4096  # outputs of a row, whose curvature has the square of their number


@dataclass(frozen=True)
class CategoricalTokens(ClassLikelihood):
    r"""Labels of the positions of a sequence, or of the pixels of an image, some of them ignored.

    $$ \log p(y \mid f) = \sum_{t:\, y_t \ne i} \log \mathrm{softmax}(f_t)_{y_t} $$

    with i = `ignore_index`. Targets have shape (N, L). Outputs have shape (N, L V), the logits of V
    classes for each of L positions; `fit` and `Posterior` take modules that return (N, L, V).

    Args:
        n_classes: number of classes V, of the vocabulary of a language model; `fit` and `Posterior`
            find it in the outputs.
        shift: compare the logits of each position with the label of the next one, as causal
            language models of transformers do for labels that equal the inputs. The label of the
            first token after padding, which no token predicts, has to be the ignored one.
        ignore_index: label of the positions that do not count, such as padding.

    Example:
        >>> likelihood = CategoricalTokens(n_classes=4)
        >>> y = torch.tensor([[2, -100], [1, 3]])
        >>> likelihood.log_prob(torch.zeros(2, 8), y)
        tensor([-1.3863, -2.7726], dtype=torch.float64)
    """

    n_classes: int | None = None
    shift: bool = False
    ignore_index: int = -100
    kept: Bool[Tensor, "N L"] | None = field(default=None, repr=False)
    per_position = True
    unsaved = ("kept",)

    def __post_init__(self) -> None:
        if self.n_classes is not None:
            check_count("n_classes", self.n_classes, 2)

    @classmethod
    def causal(cls) -> CategoricalTokens:
        """The likelihood of causal language models: each position predicts the next token."""
        return cls(shift=True)

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Sum of the log probabilities of the labels of each row, in float64, shape (..., N)."""
        assert isinstance(y, Tensor)
        logits, y, kept = self._compared(outputs, y)
        index = torch.where(kept, y, 0).long().expand(logits.shape[:-1])
        chosen = logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return torch.where(kept, chosen, 0).sum(-1, dtype=torch.float64)

    def classes(self, outputs: Outputs) -> Float[Tensor, "*rows K"]:
        """Probabilities of the classes of each position, shape (..., N, L, V)."""
        return self._logits(outputs).softmax(-1)

    def mean(self, outputs: Outputs) -> Moments:
        """Probabilities of the classes of all positions, shape (..., N, L V)."""
        return self.classes(outputs).flatten(-2)

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\mathrm{diag}(p_t) - p_t p_t^\top$ for each position that counts, 0 between positions.

        Which positions count is known after `for_targets`.

        Raises:
            InputError: more than 4096 outputs for a row.
        """
        if outputs.shape[-1] > _MOST_CURVATURE:
            fail(
                "likelihood",
                f"at most {_MOST_CURVATURE} outputs of a row (positions times classes) for "
                "matrices of their curvature",
                outputs.shape[-1],
                "Use covariance='sampled' or a subspace, which take products with the curvature",
            )
        blocks = CategoricalTokens.curvature_blocks(self, outputs).dense()
        same = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
        whole = blocks.unsqueeze(-2) * same[:, None, :, None]  # (..., L, V, L, V)
        return whole.flatten(-4, -3).flatten(-2)

    def curvature_blocks(self, outputs: Outputs) -> SoftmaxBlocks:
        """The blocks of the curvature, one for each position, without matrices."""
        p = self.classes(outputs)
        return SoftmaxBlocks(p, None if self.kept is None else self.kept.to(p))

    def for_targets(self, y: Targets | None) -> Likelihood:
        """The likelihood in whose curvature only the positions of these labels count."""
        if y is None:
            return self
        assert isinstance(y, Tensor)
        kept = y != self.ignore_index
        if self.shift:  # the last position predicts a token that is not known
            kept = torch.cat([kept[:, 1:], torch.zeros_like(kept[:, :1])], 1)
        return replace(self, kept=kept)

    @override
    def select_rows(self, index: Tensor) -> Likelihood:
        return self if self.kept is None else replace(self, kept=self.kept[index])

    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        """The likelihood with the number of classes of these outputs."""
        assert isinstance(y, Tensor)
        return self if self.n_classes else replace(self, n_classes=n_outputs // y.shape[1])

    def as_rows(
        self, outputs: Outputs, y: Int[Tensor, "N L"]
    ) -> tuple[Float[Tensor, "S M V"], Int[Tensor, "M"]]:
        """Logits and labels of the M positions that count, as those of M observations."""
        logits, y, kept = self._compared(outputs, y)
        return logits[:, kept], y[kept]

    def _compared(self, outputs: Outputs, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and the labels that they predict, by position, and which positions count."""
        logits = outputs.unflatten(-1, (y.shape[-1], self._classes_of(outputs.shape[-1], y)))
        if self.shift:
            logits, y = logits[..., :-1, :], y[:, 1:]
        return logits, y, y != self.ignore_index

    def n_outputs(self, y: Targets) -> int:
        """One output per class and position."""
        assert isinstance(y, Tensor)
        return y.shape[1] * (self.n_classes or max(2, self._largest(y) + 1))

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` for outputs that are not the same number for each position."""
        assert isinstance(y, Tensor)
        self._check_labels(y, self._classes_of(n_outputs, y))

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets that are not labels of positions, or are all ignored.

        Labels have to be below the number of classes, if it is known.
        """
        y = check_tensor(
            y,
            "whole-number labels of shape (N, positions)",
            lambda y: y.ndim == 2 and bool((y == y.long()).all()),
            "Pass one label for each token, and for pixels y.flatten(1); for one label per row "
            "use likelihood='categorical'",
        )
        bad = (y < 0) & (y != self.ignore_index)
        if bool(bad.any()):
            expected = f"labels of at least 0, or {self.ignore_index} for positions to ignore"
            fail("y", expected, int(y[bad][0]))
        if self.n_classes is not None:
            self._check_labels(y, self.n_classes)
        counted = y[:, 1:] if self.shift else y
        if not bool((counted != self.ignore_index).any()):
            after = " after the first position" if self.shift else ""
            fail(
                "y",
                f"at least one label that is not ignored{after}",
                f"{self.ignore_index} everywhere",
                "Set labels to the token ids, and only padding and prompts to the ignored value",
            )

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for outputs that are not a multiple of the classes."""
        if self.n_classes is not None and n_outputs % self.n_classes:
            fail("n_classes", f"a divisor of {n_outputs} outputs", self.n_classes)

    def _classes_of(self, n_outputs: int, y: Tensor) -> int:
        """The number of classes V of L V outputs of a row, for labels of L positions."""
        length = y.shape[-1]
        found, rest = divmod(n_outputs, max(length, 1))
        if rest or found < 2 or found != (self.n_classes or found):
            classes = self.n_classes or "classes"
            fail(
                "module",
                f"logits of shape (N, {length}, {classes}), as the labels have {length} positions",
                f"{n_outputs} outputs for each row",
                "Pass labels for each position, and a model with a head for tokens",
            )
        return found

    def _largest(self, y: Tensor) -> int:
        """The largest label of the positions that count; -1 if there are none."""
        counted = y[y != self.ignore_index]
        return int(counted.max()) if counted.numel() else -1

    def _check_labels(self, y: Tensor, n_classes: int) -> None:
        if (largest := self._largest(y)) >= n_classes:
            fail(
                "y",
                f"labels in 0..{n_classes - 1}, the module's {n_classes} outputs of a position",
                largest,
                f"Use {self.ignore_index} for positions that do not count",
            )

    def _logits(self, outputs: Outputs) -> Float[Tensor, "*S N L K"]:
        if self.n_classes is None:
            fail(
                "likelihood",
                "a known number of classes to predict with",
                repr(self),
                "Pass CategoricalTokens(n_classes=...), the size of the vocabulary",
            )
        return outputs.unflatten(-1, (-1, self.n_classes))

"""Scores of the labels of tokens or pixels, whose rows may be predicted batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Shaped

from subbayes.data.arrays import to_targets
from subbayes.diagnostics.calibration import calibration_error
from subbayes.diagnostics.checks import class_labels
from subbayes.likelihoods import Categorical, CategoricalTokens
from subbayes.predictions.predictive import Predictive
from subbayes.utils.trees import leaves
from subbayes.utils.types import RowNumbers

_BINS = 15  # of the calibration error


@dataclass(frozen=True)
class TokenScores:
    """What scores need of each row and of each token that counts.

    Attributes:
        rows: log predictive density of each row, in nats.
        tokens: of each token.
        brier: Brier score of each token.
        confidence: probability of its most probable class.
        correct: whether that is its label.
        row_weights: how often each row counts.
        token_weights: how often the row of each token counts.

    Example:
        >>> import torch
        >>> predictive = Predictive(torch.zeros(1, 2, 6), CategoricalTokens(2))
        >>> parts = [TokenScores.of(predictive, torch.tensor([[0, 1, -100], [0, 0, 0]]))]
        >>> {name: round(value, 3) for name, value in TokenScores.joined(parts).scores().items()}
        {'log_likelihood': -1.733, 'log_likelihood_per_token': -0.693, 'perplexity': 2.0,
         'accuracy': 0.8, 'brier': 0.5, 'ece': 0.3}
    """

    rows: RowNumbers
    tokens: Float[np.ndarray, "M"]
    brier: Float[np.ndarray, "M"]
    confidence: Float[np.ndarray, "M"]
    correct: Bool[np.ndarray, "M"]
    row_weights: RowNumbers
    token_weights: Float[np.ndarray, "M"]

    @classmethod
    def of(
        cls, predictive: Predictive, y: object, weights: RowNumbers | None = None
    ) -> TokenScores:
        """Of predictions for labels y of shape (N, L), some of them ignored.

        Args:
            predictive: of a likelihood `CategoricalTokens`.
            y: the labels.
            weights: how often each row counts; once by default.
        """
        likelihood = predictive.likelihood
        assert isinstance(likelihood, CategoricalTokens)
        labels = leaves(to_targets(y, "y"))[0].cpu().long()
        outputs, counted = likelihood.as_rows(predictive.outputs, labels)
        each = Predictive(outputs, Categorical())
        p, values = class_labels(each, counted, "scores of tokens")
        right = p[np.arange(len(p)), values]
        if weights is None:
            weights = np.ones(len(labels))
        predicted = labels[:, 1:] if likelihood.shift else labels
        tokens_of_row = (predicted != likelihood.ignore_index).sum(1).numpy()
        return cls(
            predictive.log_prob(labels),
            each.log_prob(counted),
            (p**2).sum(1) - 2 * right + 1,
            p.max(1),
            p.argmax(1) == values,
            weights,
            np.repeat(weights, tokens_of_row),
        )

    @classmethod
    def joined(cls, parts: Iterable[TokenScores]) -> TokenScores:
        """Those of all rows from those of batches."""
        found = list(parts)
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in found]) for name in names))

    def scores(self) -> dict[str, float]:
        """Means over rows, and over the tokens that count."""
        weights = self.token_weights
        mean = weighted_mean(self.tokens, weights)
        return {
            "log_likelihood": weighted_mean(self.rows, self.row_weights),
            "log_likelihood_per_token": mean,
            "perplexity": math.exp(-mean),
            "accuracy": weighted_mean(self.correct, weights),
            "brier": weighted_mean(self.brier, weights),
            "ece": calibration_error(self.confidence, self.correct, _BINS, weights),
        }


def weighted_mean(values: Shaped[np.ndarray, "M"], weights: Float[np.ndarray, "M"]) -> float:
    """A mean in which values of weight 0 do not count, even infinite ones."""
    counted = weights > 0
    return float(np.average(values[counted], weights=weights[counted]))

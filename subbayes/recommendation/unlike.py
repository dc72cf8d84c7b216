"""How unlike the training data inputs are: a score in [0, 1], from two scores of uncertainty.

Of classes the entropy of the predictions and the mutual information of a posterior of the last
layer, of regressions the epistemic variance. Each becomes the share of held-out rows that have a
smaller value; the larger of these shares becomes the share of held-out rows with a smaller one
again, so that the score of rows like the training data is uniform. Neither of the two is safe
alone: entropy misses inputs far away to which the network gives sure labels, mutual information
inputs between classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.precision_factory import root
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.laplace.linearised import Evidence, LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood
from subbayes.recommendation.last_layer import LastLayer
from subbayes.utils.types import RowNumbers

_MARKS = 1000  # held-out rows that are scored, evenly spaced if they are in memory
_DRAWS = 100  # of outputs, for mutual information
_LARGE = 1500  # weights of a last layer, from which on its posterior is approximated by factors


def posterior_of(
    last: LastLayer, likelihood: Likelihood, data: Data, features: Float[Tensor, "N H"]
) -> LinearisedPosterior:
    """The posterior of a last layer under the prior of the largest evidence.

    Args:
        last: the layer.
        likelihood: p(y | f).
        data: the training data.
        features: what the layer is called with for these rows.
    """
    network, alone = last.network, last.alone()
    inputs = features[:, :-1] if last.has_bias else features
    rows = replace(data, inputs=inputs, y=data.targets(), loader=None, source=None)
    form: Any = "primal" if network.size <= _LARGE else "kfac"
    posterior = linearised_laplace(alone, likelihood, rows, covariance=form)
    posterior = posterior.with_prior_and_noise(*Evidence.of(posterior).maximum(noise=True))
    psi = posterior.precision
    of_inputs = root(network, psi.V.likelihood or likelihood, data)
    return replace(posterior, precision=psi.rescaled(of_inputs, psi.prior_precision, 1.0))


@dataclass(frozen=True)
class Unlike:
    """The score of how unlike the training data inputs are.

    Attributes:
        posterior: of the last layer.
        marks: scores of held-out rows in ascending order, and at last the larger of their shares.
    """

    posterior: LinearisedPosterior
    marks: Float[Tensor, "q m"]

    @classmethod
    def of(cls, model: Predictor, posterior: LinearisedPosterior, held_out: Data) -> Unlike:
        """The score whose shares are those of held-out rows.

        Args:
            model: what predicts.
            posterior: of the last layer.
            held_out: rows that were not trained on.
        """
        if held_out.in_memory and held_out.n > _MARKS:
            held_out = held_out.rows(torch.linspace(0, held_out.n - 1, _MARKS).long())
        each = _joined(model, posterior, held_out)
        marks = np.sort(each, 1)
        larger = np.sort(_shares(marks, each).max(0))[None]
        return cls(posterior, torch.from_numpy(np.concatenate([marks, larger])))

    def __call__(self, model: Predictor, inputs: Any) -> RowNumbers:
        """The scores of inputs."""
        marks = self.marks.numpy()
        larger = _shares(marks[:-1], _scores(model, self.posterior, inputs)).max(0)
        return _shares(marks[-1:], larger[None])[0]


def _shares(
    marks: Float[np.ndarray, "q m"], values: Float[np.ndarray, "q N"]
) -> Float[np.ndarray, "q N"]:
    """Shares of the marks below values, counting equal ones half."""
    pairs = zip(marks, values, strict=True)
    found = [(np.searchsorted(m, v) + np.searchsorted(m, v, "right")) / 2 for m, v in pairs]
    return np.stack(found) / marks.shape[1]


def _joined(
    model: Predictor, posterior: LinearisedPosterior, data: Data
) -> Float[np.ndarray, "q N"]:
    return np.concatenate([_scores(model, posterior, x) for x, _ in data.batches()], 1)


def _scores(
    model: Predictor, posterior: LinearisedPosterior, inputs: Any
) -> Float[np.ndarray, "q N"]:
    if posterior.likelihood.kind != "classification":
        variance = posterior.predict(inputs).epistemic
        return variance.reshape(len(variance), -1).mean(1)[None]
    drawn = posterior.predict(inputs, method="monte-carlo", n_draws=_DRAWS)
    return np.stack([model.predict(inputs).entropy, drawn.mutual_information])

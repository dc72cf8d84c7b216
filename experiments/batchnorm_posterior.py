r"""A posterior whose BatchNorm statistics follow the weights.

`Posterior` uses the BatchNorm statistics of its network for all z, which is cheap and
differentiable but underestimates the density far from the weights of the network. Here they are
re-estimated on the training data at each z,

$$ \log p(D \mid z) = \sum_n \log p\bigl(y_n \mid f(x_n;\, w(z), s(w(z), D))\bigr), \qquad
   w(z) = \hat w + Pz , $$

as for points on a curve of low loss (Garipov et al. 2018, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.draws import Draws
from subbayes.likelihoods.target_parts import has_weights, one_copy_log_prob
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.predictive import Predictive
from subbayes.priors import reject_undefined
from subbayes.utils.checks import fail
from subbayes.utils.trees import to_device
from subbayes.utils.types import Coordinates, Inputs, LogDensity

_ROWS = 1024


class BatchNormPosterior(Posterior):
    """A `Posterior` that re-estimates the BatchNorm statistics at each z.

    Has the arguments of `Posterior`. An evaluation costs two passes over the data per point, one
    point after the other, and has no gradient: sample it with `EllipticalSlice` or `SliceSampling`
    on small data, or sample `Posterior` and predict with `refresh_batchnorm=True`. The statistics
    are those of all rows of a weight above 0, each of which counts once, whatever its weight. They
    are collected in batches of about 1024 rows, in random order with a fixed seed if the rows are
    in memory. The module is not changed.

    Raises:
        InputError: what `Posterior` raises; `value_and_grad` and `log_prob` always.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> module = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        >>> net = Network(module)
        >>> data = torch.randn(40, 2), torch.randn(40)
        >>> space = subbayes.subspace.RandomSubspace(net.weights, 2)
        >>> posterior = BatchNormPosterior(net, Gaussian(noise=1.0), data, space)
        >>> posterior.value(np.zeros((4, 2))).shape
        (4,)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        weighted = has_weights(self.likelihood, self.data.first()[1])
        self.data = replace(self.data, has_weights=weighted)  # rows of weight 0 have no statistics

    def _warn_of_other_statistics(self) -> None:
        """Nothing to warn of: statistics follow the weights."""

    def network_at(self, z: np.ndarray) -> Network:
        """The network at z (k,), with its BatchNorm statistics."""
        return self._network(self.subspace.weights(self._coordinates(z[None]))[0])

    @override
    def log_likelihood(self, z: Coordinates) -> LogDensity:
        return reject_undefined(self._terms(z, self.likelihood.log_prob).sum(1))

    @override
    def pointwise(self, z: Coordinates) -> Float[np.ndarray, "S n"]:
        return self._terms(z, functools.partial(one_copy_log_prob, self.likelihood))

    def _terms(
        self, z: Coordinates, log_prob: Callable[[Tensor, Any], Tensor]
    ) -> Float[np.ndarray, "S n"]:
        rows = []
        with torch.no_grad():
            for weights in self.subspace.weights(self._coordinates(z)):
                network = self._network(weights)
                parts = [
                    log_prob(network(weights, x), y).double().cpu()
                    for x, y in self._device_batches()
                ]
                rows.append(torch.cat(parts).numpy())
        return np.stack(rows)

    def value_and_grad(self, z: Coordinates, rows: Any = None) -> NoReturn:
        """Raises `InputError`: there is no gradient."""
        self._no_gradient()

    def log_prob(self, z: Tensor) -> NoReturn:
        """Raises `InputError`: there is no gradient."""
        self._no_gradient()

    def predict(
        self,
        draws: Draws | Coordinates,
        inputs: Any,
        *,
        refresh_batchnorm: bool = True,
        **options: Any,
    ) -> Predictive:
        """Average predictions over draws, each with its own statistics; see `Posterior.predict`."""
        return super().predict(draws, inputs, refresh_batchnorm=refresh_batchnorm, **options)

    @override
    def fingerprint(self) -> str:
        return "refreshed " + super().fingerprint()

    def _network(self, weights: Tensor) -> Network:
        return self.network.refresh_batchnorm(weights, self.data)

    def _device_batches(self) -> Iterator[tuple[Inputs, Any]]:
        for inputs, y in self.data.batches(_ROWS):
            yield to_device(inputs, self.network.device), to_device(y, self.network.device)

    def _no_gradient(self) -> NoReturn:
        fail(
            "posterior",
            "a density with gradients",
            "one with BatchNorm statistics of each z",
            "Use EllipticalSlice or SliceSampling, or Posterior, which keeps one set of them",
        )

r"""The tempered posterior over subspace coordinates, streamed over data, vectorised over chains.

$$ \log p_T(z \mid D) = \tfrac{1}{T} \sum_n \log p(y_n \mid f(x_n;\, \hat w + Pz)) + \log p(z) $$

(Izmailov et al. 2019, eq. 4, up to its constant.) It is deterministic, runs over all
observations whatever the batch size, and is summed in float64: a slice threshold is lost in
float32.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.data.data import Data, n_rows, named_leaves, take, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.tracing.layout import observations_last, takes_observations_last
from subbayes.networks.tracing.memory import bytes_per_row, reuse_memory
from subbayes.networks.tracing.tracer import MODES, Mode, Tracer
from subbayes.networks.tracing.vectorised import Vectorised
from subbayes.predictions.averaging import average, evenly_spaced
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.types import Coordinates, Inputs, LogDensity, Targets

if TYPE_CHECKING:
    from subbayes.draws import Draws

__all__ = ["Posterior", "check_fit"]

# Activations that together stay below this are reused from one evaluation to the next (see
# `reuse_memory`); larger ones are fetched anew, which costs more than a small network's arithmetic.
_RECYCLED_BYTES = 32 * 2**20
_LEAST_ROWS = 256


class Posterior:
    """The posterior over coordinates z of a subspace, and a plain callable for any sampler.

    `value` and `value_and_grad` take and return NumPy arrays of shape (chains, k), so that
    every sampler, ours or another library's, can run on it; `log_prob` takes tensors and
    differentiates.

    Args:
        network: the network f(x; w).
        likelihood: p(y | f), with all its own parameters learned.
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        subspace: where the weights may move.
        prior: p(z); by default standard normal.
        temperature: T in the equation above; 1 is the posterior, larger is wider.
        batch_size: rows evaluated at once; by default as many as `memory_limit` allows.
        mode: "trace" replays a traced graph, "compile" compiles it on top (5 to 30 s, pays for
            long runs), "eager" does neither.
        memory_limit: bytes one evaluation may take for activations.

    Raises:
        InputError: anything that does not fit together, in one line.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(torch.nn.Linear(2, 1))
        >>> x, y = torch.randn(20, 2), torch.randn(20)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = Posterior(net, Gaussian(noise=1.0), (x, y), space)
        >>> posterior.value(np.zeros((4, 3))).shape
        (4,)
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Any,
        subspace: Subspace,
        prior: Normal | None = None,
        temperature: float = 1.0,
        *,
        batch_size: int | None = None,
        mode: Mode = "trace",
        memory_limit: int = 2**30,
    ) -> None:
        check_choice("mode", mode, MODES)
        self.network = network
        self.likelihood = likelihood
        self.data = Data.of(data).to(network.device)
        self.subspace = (
            subspace if subspace.shift.device == network.device else subspace.to(network.device)
        )
        self.prior = Normal() if prior is None else prior
        self.temperature = check_positive("temperature", temperature)
        self.mode = mode
        self.memory_limit = memory_limit
        self.batch_size = (
            batch_size if batch_size is None else check_count("batch_size", batch_size)
        )
        self._check()
        first = to_device(self.data.first()[0], network.device)
        self._row_bytes = bytes_per_row(network, first)
        self._observations_last = takes_observations_last(network, first)
        self._tracers: dict[str, Tracer] = {}
        reuse_memory()

    def _check(self) -> None:
        """Everything must fit together before anything long starts."""
        if self.subspace.size != self.network.size:
            fail(
                "subspace",
                f"{self.network.size} weights, as the network has",
                self.subspace.size,
                "Build it from this network's weights",
            )
        self.prior.check_rank(self.rank)
        if not self.likelihood.learned:
            fail(
                "likelihood",
                "all parameters learned or given",
                repr(self.likelihood),
                "Use the likelihood train(...) returns, or likelihood.estimated(outputs, y)",
            )
        check_fit(self.network, self.likelihood, self.data)

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.subspace.rank

    def __repr__(self) -> str:
        return (
            f"Posterior(n={self.data.n}, {self.subspace!r}, {self.prior!r}, "
            f"temperature={self.temperature:g})"
        )

    def with_temperature(self, temperature: float) -> Posterior:
        """The same posterior at another temperature; traced graphs are shared."""
        other = copy.copy(self)
        other.temperature = check_positive("temperature", temperature)
        return other

    # --- evaluation -------------------------------------------------------------------------

    def _single(self, reduce: bool) -> Callable[..., Tensor]:
        def log_likelihood(place: Tensor, inputs: Inputs, y: Targets) -> Tensor:
            weights = self._weights(place, inside=True)
            terms = self.likelihood.log_prob(self._outputs(weights, inputs), y).double()
            return terms.sum() if reduce else terms

        return log_likelihood

    def _gradient(self, place: Tensor, inputs: Inputs, y: Targets) -> tuple[Tensor, Tensor]:
        """Gradient and value: the score of the outputs, pulled back."""
        outputs, pull = torch.func.vjp(  # type: ignore[misc]
            lambda w: self._outputs(w, inputs), self._weights(place, inside=True)
        )
        (gradient,) = pull(self.likelihood.score(outputs, y))
        value = self.likelihood.log_prob(outputs, y).double().sum()
        return self._pulled(gradient, inside=True), value

    def _weights(self, points: Tensor, inside: bool) -> Tensor:
        """Weights at z, found inside the traced density or before it."""
        return self.subspace.weights(points) if inside is self.subspace.traceable else points

    def _pulled(self, gradient: Tensor, inside: bool) -> Tensor:
        """The gradient in z, found inside the traced density or after it."""
        return (
            self.subspace.pull(gradient).double() if inside is self.subspace.traceable else gradient
        )

    def _outputs(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """Network outputs, with observations last in memory if the module allows it."""
        with observations_last() if self._observations_last else nullcontext():
            return self.network(weights, inputs)

    def _tracer(self, what: str) -> Tracer:
        if what not in self._tracers:
            single = self._gradient if what == "grad" else self._single(what != "pointwise")
            self._tracers[what] = Tracer(
                Vectorised(single),
                "the log density",
                "eager" if what == "log_prob" else self.mode,
                tolerance=1e-3,
            )
        return self._tracers[what]

    def _rows_at_once(self, chains: int, factor: int = 1) -> int:
        if self.batch_size is not None:
            return self.batch_size
        row = self._row_bytes * chains * factor
        rows = self.memory_limit // row
        if rows < 1:
            fail(
                "memory_limit",
                f"at least {row / 2**20:.3g} MiB for one row of {chains} chains",
                f"{self.memory_limit / 2**20:.3g} MiB",
                "Run fewer chains or raise the limit",
            )
        if self.network.device.type == "cpu":
            rows = min(rows, max(_LEAST_ROWS, _RECYCLED_BYTES // row))
        pieces = math.ceil(self.data.n / rows)
        return math.ceil(self.data.n / pieces)

    def _batches(
        self, chains: int, factor: int = 1, data: Data | None = None
    ) -> Iterator[tuple[Inputs, Targets]]:
        size = self._rows_at_once(chains, factor)
        data = self.data if data is None else data
        if data.inputs is not None and data.y is not None and data.n <= size:
            yield data.inputs, data.y
            return
        for inputs, y in data.batches(size):
            if n_rows(y) <= size:
                yield (to_device(inputs, self.network.device), to_device(y, self.network.device))
                continue
            for start in range(0, n_rows(y), size):  # a loader's batches may be larger
                rows = slice(start, start + size)
                yield (
                    to_device(take(inputs, rows), self.network.device),
                    to_device(take(y, rows), self.network.device),
                )

    def _coordinates(self, z: Any) -> Tensor:
        array = np.ascontiguousarray(z, dtype=np.float64)
        if array.ndim != 2 or array.shape[1] != self.rank or len(array) == 0:
            fail("z", f"shape (chains, {self.rank})", array.shape)
        return torch.from_numpy(array).to(self.network.device)

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Sum of log p(y | f) over all observations at temperature 1, shape (chains,).

        A value that is not a number counts as minus infinity: such weights are impossible.
        """
        evaluate = self._tracer("value")
        with torch.no_grad():
            place = self._weights(self._coordinates(z), inside=False)
            total = sum(evaluate(place, x, y) for x, y in self._batches(len(place)))
        assert isinstance(total, Tensor)
        return _impossible_where_nan(total.cpu().numpy())

    def value(self, z: Coordinates) -> LogDensity:
        """Tempered log density at z, up to its constant, shape (chains,).

        Args:
            z: coordinates, shape (chains, k).
        """
        prior = self.prior.log_prob(self._coordinates(z).cpu().numpy())
        return _impossible_where_nan(self.log_likelihood(z) / self.temperature + prior)

    def value_and_grad(
        self, z: Coordinates, rows: Int[np.ndarray, "b"] | None = None
    ) -> tuple[LogDensity, Coordinates]:
        r"""Tempered log density, shape (chains,), and its gradient, shape (chains, k).

        Args:
            z: coordinates, shape (chains, k).
            rows: positions of b observations; their log-likelihood counts N / b times. Over rows
                drawn at random, value and gradient have those of all observations as their mean:

                $$ \tfrac{N}{bT} \sum_{n \in \text{rows}} \log p(y_n \mid z) + \log p(z) $$

        Raises:
            InputError: rows that are not there, or data that are streamed.
        """
        data, share = self.data if rows is None else self._some(rows), self.temperature
        if rows is not None:
            share *= len(rows) / self.data.n
        points = self._coordinates(z)
        evaluate = self._tracer("grad")
        with torch.no_grad():
            place = self._weights(points, inside=False)
            parts = (evaluate(place, x, y) for x, y in self._batches(len(points), 3, data))
            grad, value = functools.reduce(_added, parts)
            grad = self._pulled(grad, inside=False)
        prior, prior_slope = self.prior.value_and_grad(points.cpu().numpy())
        total = value.cpu().numpy() / share + prior
        return _impossible_where_nan(total), grad.cpu().numpy() / share + prior_slope

    def _some(self, rows: Int[np.ndarray, "b"]) -> Data:
        """The given rows of the data."""
        if len(rows) == 0 or rows.min() < 0 or rows.max() >= self.data.n:
            fail(
                "rows",
                f"positions in 0..{self.data.n - 1}",
                "none" if len(rows) == 0 else f"{rows.min()}..{rows.max()}",
            )
        return self.data.rows(torch.from_numpy(rows).to(self.network.device))

    def log_prob(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S"]:
        """Tempered log density of a tensor of coordinates (..., k), differentiable."""
        if z.ndim == 0 or z.shape[-1] != self.rank:
            fail("z", f"shape (..., {self.rank})", tuple(z.shape))
        points = z.reshape(-1, self.rank)
        evaluate, place = self._tracer("log_prob"), self._weights(points, inside=False)
        total = sum(evaluate(place, x, y) for x, y in self._batches(len(points), factor=3))
        assert isinstance(total, Tensor)
        value = total / self.temperature + self.prior.log_prob_tensor(points)
        return value.reshape(z.shape[:-1])

    def pointwise(self, z: Coordinates) -> Float[np.ndarray, "S n"]:
        """Log-likelihood of each observation at temperature 1, shape (S, N)."""
        points = self._coordinates(z)
        evaluate = self._tracer("pointwise")
        with torch.no_grad():
            return np.concatenate(
                [
                    torch.cat(
                        [
                            evaluate(self._weights(part, inside=False), x, y).cpu()
                            for x, y in self._batches(len(part))
                        ],
                        1,
                    ).numpy()
                    for part in points.split(64)
                ]
            )

    # --- prediction -------------------------------------------------------------------------

    def predict(
        self,
        draws: Draws | Coordinates,
        inputs: Any,
        *,
        noise: Any = None,
        n_draws: int | None = None,
        refresh_batchnorm: bool = False,
        progress: bool | None = False,
    ) -> Predictive:
        """Bayesian model average over draws (Izmailov et al. 2019, eq. 3).

        Args:
            draws: what inference returned, or coordinates (S, k).
            inputs: new inputs in the form the module takes, or a loader of them.
            noise: noise scale per new row, for `Gaussian(noise="per-observation")`.
            n_draws: use this many evenly spaced draws instead of all.
            refresh_batchnorm: re-estimate BatchNorm statistics for each draw on the training
                inputs; costs one pass over them per draw.
            progress: show a progress bar; None shows it on a terminal.

        Raises:
            InputError: inputs the module does not take, or that hold NaN.
        """
        z = draws if isinstance(draws, (np.ndarray, Tensor, list)) else draws.flat()
        points = self._coordinates(z)
        if n_draws is not None:
            points = self._coordinates(evenly_spaced(points.cpu().numpy(), n_draws))
        return average(
            self.network,
            self.likelihood,
            lambda rows: self.subspace.weights(points[rows]),
            inputs,
            count=len(points),
            noise=noise,
            memory_limit=self.memory_limit,
            refresh_batchnorm=self.data if refresh_batchnorm else None,
            progress=progress,
        )

    # --- identity ---------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A digest of all that defines this density, to tell whether a checkpoint is its own."""
        facts = {
            "architecture": self.network.architecture,
            "names": self.network.names,
            "likelihood": self.likelihood.to_config(),
            "prior": self.prior.to_config(),
            "subspace": self.subspace.config(),
            "temperature": self.temperature,
            "n": self.data.n,
        }
        parts = [
            ("subspace", self.subspace.tensors()),
            ("frozen", self.network.frozen),
            ("mask", self.network.masks),
        ]
        batches = (
            (kind, named_leaves(part))
            for pair in self.data.batches(4096)
            for kind, part in zip(("inputs", "targets"), pair, strict=True)
        )
        digests = _digests(chain(parts, batches))
        return hashlib.sha256(
            json.dumps([facts, digests], sort_keys=True, default=repr).encode()
        ).hexdigest()


def _digests(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, str]:
    """A digest of each named tensor; tensors that come in batches count as joined."""
    digests: dict[str, Any] = {}
    for kind, tensors in parts:
        for name, tensor in tensors.items():
            start = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
            digest = digests.setdefault(f"{kind} {name}", start)
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy())
    return {name: digest.hexdigest() for name, digest in digests.items()}


def check_fit(network: Network, likelihood: Likelihood, data: Data) -> None:
    """Raise `InputError` unless module, likelihood, inputs and targets fit together."""
    targets = data.targets()
    likelihood.check_targets(targets)
    inputs = to_device(data.first()[0], network.device)
    likelihood.check_outputs(network.check(inputs), targets)


def _added(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0] + b[0], a[1] + b[1]


def _impossible_where_nan(values: LogDensity) -> LogDensity:
    return np.where(np.isnan(values), -np.inf, values)

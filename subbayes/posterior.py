r"""The tempered posterior over subspace coordinates, streamed over data, vectorised over chains.

$$ \log p_T(z \mid D) = \tfrac{1}{T} \sum_n \log p(y_n \mid f(x_n;\, \hat w + Pz)) + \log p(z) $$

(Izmailov et al. 2019, eq. 4, up to a constant.) It is deterministic, covers all observations for
every batch size, and is summed in float64, since float32 is too coarse for slice thresholds.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from subbayes.data.arrays import evenly_spaced
from subbayes.data.data import Data, split_batches
from subbayes.data.digests import batch_digests
from subbayes.distributed.blocks import Blocks, BlockSize, BlockSums
from subbayes.distributed.divided_rows import every_row, exchanged, gathered
from subbayes.distributed.processes import current
from subbayes.distributed.sharded_weights import joined_processes
from subbayes.draws import Draws
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import has_weights, one_copy_log_prob, split_targets
from subbayes.networks.network import Network, check_network
from subbayes.networks.sharded.network import ShardedDensity, ShardedNetwork
from subbayes.networks.tracing import memory
from subbayes.networks.tracing.layout import observations_last, takes_observations_last
from subbayes.networks.tracing.reverse_mode import vjp
from subbayes.networks.tracing.tracer import Tracer
from subbayes.networks.tracing.vectorised import Vectorised
from subbayes.networks.validation import check_divided_fit, check_gradients
from subbayes.predictions.averaging import average, evenly
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal, normal_prior, reject_undefined
from subbayes.subspace import Subspace, check_subspace
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.modes import MODES, Mode
from subbayes.utils.trees import to_device, tree_map
from subbayes.utils.types import Batch, Coordinates, Inputs, LogDensity, Targets
from subbayes.utils.warning import warn_user

__all__ = ["Posterior"]

_MIN_ROWS, _MIN_CHAINS = 256, 16
_GRADIENT = 3  # memory of a gradient, in that of a value


class Posterior:
    """The posterior of coordinates z of a subspace, for samplers of any library.

    `value` and `value_and_grad` take and return NumPy arrays of shape (chains, k); `log_prob` takes
    tensors and is differentiable.

    Args:
        network: the network f(x; w).
        likelihood: p(y | f), with all its own parameters given or estimated, or its name as for
            `fit`.
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        subspace: the subspace of the weights.
        prior: p(z); by default standard normal.
        temperature: T in the equation above; 1 gives the posterior, larger values flatten it.
        batch_size: rows evaluated at once; by default as many as `memory_limit` allows.
        mode: "trace" replays a traced graph, unless the network is a large frozen model or one of
            transformers; "compile" also compiles it (5 to 30 s, for long runs), "eager" does
            neither.
        memory_limit: bytes of activations of one evaluation, in which the chains of large networks
            take turns; by default 1 GiB, on CUDA up to a quarter of the device's memory, or what
            the gradient of one row takes.
        outputs: number of outputs C, if `check_fit` has accepted a network of this architecture
            with this likelihood and these data; by default it checks them.

    Raises:
        InputError: network, likelihood, data, subspace and prior are incompatible.

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

    reparameterisation: Callable[[float], Any] | None = None
    """Other coordinates for samplers, by the power of the likelihood; see
    `subbayes.inference.samplers.reparameterisation`."""

    def __init__(
        self,
        network: Network,
        likelihood: str | Likelihood,
        data: Any,
        subspace: Subspace,
        prior: Normal | float | None = None,
        temperature: float = 1.0,
        *,
        batch_size: int | None = None,
        mode: Mode = "trace",
        memory_limit: int | None = None,
        outputs: int | None = None,
    ) -> None:
        check_choice("mode", mode, MODES)
        check_network(network)
        self.network = network
        likelihood = as_likelihood(likelihood)
        self.data = exchanged(data).to(network.device)
        self.n = every_row(self.data)
        own = check_subspace(subspace).shift.device == network.device
        self.subspace = subspace if own else subspace.to(network.device)
        self.prior = normal_prior(prior)
        self.temperature = check_positive("temperature", temperature)
        self.mode = mode
        self.batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self.subspace.check_size(network.size)
        self.prior.check_rank(self.rank)
        likelihood.check_complete()
        if outputs is None:
            outputs = check_divided_fit(network, likelihood, self.data)
        self.likelihood = likelihood.for_outputs(outputs, self.data.first()[1])
        self._warn_of_other_statistics()
        first = self._example = to_device(self.data.first()[0], network.device)
        self._observations_last = takes_observations_last(network, first)
        self._row_bytes = network.bytes_per_row(first)
        self._limits = memory.ActivationLimits(memory_limit, _GRADIENT * self._row_bytes)
        self._is_eager = mode == "trace" and not network.is_traced
        self._tracers: dict[str, Any] = {}
        self._blocks: dict[int, Blocks] = {}
        memory.reuse_memory()

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.subspace.rank

    @property
    def memory_limit(self) -> int:
        """Bytes of activations of one evaluation."""
        return self._limits.of(self.network.device)

    @property
    def needs_all_processes(self) -> bool:
        """Whether weights or rows are sharded, so that an evaluation takes all processes."""
        return self.network.is_sharded or self.data.division is not None

    def __repr__(self) -> str:
        return (
            f"Posterior(n={self.n}, {self.subspace!r}, {self.prior!r}, "
            f"temperature={self.temperature:g})"
        )

    def _warn_of_other_statistics(self) -> None:
        if self.network.has_batchnorm and not self.network.lies_in(self.subspace):
            warn_user(
                "subspace: the network's weights are not in it, whose BatchNorm statistics are "
                "used; pass network.centred_on(w, data) with a likely point w of it, such as "
                "subspace.shift if that is a solution, and predict with refresh_batchnorm=True"
            )

    def with_temperature(self, temperature: float) -> Posterior:
        """The same posterior at another temperature; traced graphs are shared."""
        other = copy.copy(self)
        other.temperature = check_positive("temperature", temperature)
        other._tracers = self._tracers
        return other

    def to(self, device: torch.device | str) -> Posterior:
        """The same posterior with network, subspace and data in memory on another device."""
        other = copy.copy(self)
        other.network, other.subspace = self.network.to(device), self.subspace.to(device)
        if self.data.in_memory:
            # Data.to refuses data on an accelerator, which belong to another network.
            both = tree_map(lambda tensor: tensor.to(device), (self.data.inputs, self.data.y))
            other.data = replace(self.data, inputs=both[0], y=both[1])
        other._tracers, other._blocks = {}, {}
        other.__dict__.pop("block_size", None)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """The state without traced graphs, which cannot be pickled and are traced again."""
        return self.__dict__ | {"_tracers": {}, "_blocks": {}}

    # --- evaluation -------------------------------------------------------------------------

    def _log_likelihood(self, reduce: bool, point: Tensor, inputs: Inputs, y: Targets) -> Tensor:
        outputs = self._outputs(self._weights_at(point), inputs)
        if reduce:
            return self.likelihood.log_prob(outputs, y).double().sum()
        return one_copy_log_prob(self.likelihood, outputs, y).double()

    def _gradient(self, point: Tensor, inputs: Inputs, y: Targets) -> tuple[Tensor, Tensor]:
        """Gradient and value, from the score of the outputs."""
        outputs, pull = vjp(lambda w: self._outputs(w, inputs), self._weights_at(point))
        (gradient,) = pull(self.likelihood.score(outputs, y))
        value = self.likelihood.log_prob(outputs, y).double().sum()
        if self.subspace.traceable:
            gradient = self.subspace.pull(gradient).double()
        return gradient, value

    def _points(self, z: Tensor) -> Tensor:
        """Arguments of the traced function: z, or the weights if the subspace is not traceable."""
        return z if self.subspace.traceable else self.subspace.weights(z)

    def _weights_at(self, point: Tensor) -> Tensor:
        """Weights at an argument of the traced function."""
        return self.subspace.weights(point) if self.subspace.traceable else point

    def _outputs(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """Network outputs, with observations last in memory if the module allows it."""
        with observations_last() if self._observations_last else nullcontext():
            return self.network(weights, inputs)

    def _tracer(self, what: str) -> Tracer | ShardedDensity:
        if what not in self._tracers and isinstance(self.network, ShardedNetwork):
            self._tracers[what] = self.network.density(self.likelihood, what)
        if what not in self._tracers:
            if what in ("grad", "log_prob"):
                check_gradients(self.network, self._example)
            single: Any = self._gradient
            if what != "grad":
                single = functools.partial(self._log_likelihood, what != "pointwise")
            self._tracers[what] = Tracer(
                Vectorised(single, said=self.network.fallbacks, alone=self._is_eager),
                "the log density",
                "eager" if what == "log_prob" or self._is_eager else self.mode,
                tolerance=1e-3,
            )
        return self._tracers[what]

    def _chains_at_once(self, chains: int, factor: int = 1) -> int:
        if self.batch_size is not None:
            held = self._row_bytes * factor * min(self.batch_size, self.data.n)
            cached = self.network.device.type == "cpu" and self.data.in_memory
            most = memory.REUSED_BYTES // max(2 * held, 1) if cached else chains  # half of a cache
            return evenly(chains, max(_MIN_CHAINS, most))
        row = self._row_bytes * factor
        return evenly(chains, self._limits.check(row, self.network.device) // row)

    def _rows_at_once(self, chains: int, factor: int = 1) -> int:
        if self.batch_size is not None:
            return self.batch_size
        row = self._row_bytes * chains * factor
        rows = self.memory_limit // row
        if self.network.device.type == "cpu":
            rows = min(rows, max(_MIN_ROWS, memory.REUSED_BYTES // row))
        return evenly(self.data.n, rows)

    def _batches(self, chains: int, factor: int = 1, data: Data | None = None) -> Iterator[Batch]:
        size = self._rows_at_once(chains, factor)
        data = self.data if data is None else data
        if data.inputs is not None and data.y is not None and data.n <= size:
            yield data.inputs, data.y
            return
        yield from split_batches(data.batches(size), size, self.network.device)

    @functools.cached_property
    def block_size(self) -> BlockSize:
        """Rows of a block and points that are evaluated in one call, on many processes."""
        on_cpu = self.network.device.type == "cpu"
        shares = self.data.division.shares if self.data.division else ()
        most = min(self._limits.block, memory.REUSED_BYTES) if on_cpu else self._limits.block
        size = BlockSize.of(self.n, self._row_bytes, most, self.batch_size, shares, on_cpu)
        return replace(size, chains=1) if self.network.is_sharded else size

    def _own_blocks(self, data: Data | None = None) -> Blocks | None:
        """The blocks of rows of this process, of all data by default; None if it works alone."""
        processes = joined_processes() if self.needs_all_processes else current()
        if processes is None:
            return None
        size, device, in_step = self.block_size, self.network.device, self.network.is_sharded
        if data is not None:
            return Blocks.of(data, replace(size, n=data.n), processes, device, in_step)
        shape = processes.data_processes
        if shape not in self._blocks:
            self._blocks[shape] = Blocks.of(self.data, size, processes, device, in_step)
        return self._blocks[shape]

    def _coordinates(self, z: Any) -> Tensor:
        array = np.array(z, dtype=np.float64, order="C")  # JAX's arrays are read-only
        if array.ndim != 2 or array.shape[1] != self.rank or len(array) == 0:
            fail("z", f"shape (chains, {self.rank})", array.shape)
        return torch.from_numpy(array).to(self.network.device)

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Sum of log p(y | f) over all observations at temperature 1, shape (chains,).

        NaN and plus infinity become minus infinity, so that samplers reject such weights.
        """
        evaluate, blocks = self._tracer("value"), self._own_blocks()
        if blocks is not None:
            return reject_undefined(self._block_sums(blocks, "value", z)[:, 0])
        with torch.no_grad():
            points = self._points(self._coordinates(z))
            totals = [
                sum(evaluate(part, x, y) for x, y in self._batches(len(part)))
                for part in points.split(self._chains_at_once(len(points)))
            ]
        return reject_undefined(torch.cat(totals).cpu().numpy())

    def value(self, z: Coordinates) -> LogDensity:
        """Tempered log density up to a constant, shape (chains,), at z of shape (chains, k)."""
        prior = self.prior.log_prob(self._coordinates(z).cpu().numpy())
        return reject_undefined(self.log_likelihood(z) / self.temperature + prior)

    def value_and_grad(
        self, z: Coordinates, rows: Shaped[np.ndarray, "b"] | None = None
    ) -> tuple[LogDensity, Coordinates]:
        r"""Tempered log density, shape (chains,), and its gradient, shape (chains, k).

        Args:
            z: coordinates, shape (chains, k).
            rows: positions of b observations, whose log-likelihood is multiplied by N / b. For
                random rows, value and gradient are unbiased estimates:

                $$ \tfrac{N}{bT} \sum_{n \in \text{rows}} \log p(y_n \mid z) + \log p(z) $$

        Raises:
            InputError: positions outside the data, a Boolean mask, or streamed data.
        """
        data, share = self.data if rows is None else self._subset(rows), self.temperature
        if rows is not None:
            share *= len(rows) / self.n
        coordinates = self._coordinates(z)
        if (blocks := self._own_blocks(None if rows is None else data)) is not None:
            sums = self._block_sums(blocks, "grad", z)
            value, grad = sums[:, 0], sums[:, 1:]
        else:
            value, grad = self._sums(coordinates, data)
        prior, prior_grad = self.prior.value_and_grad(coordinates.cpu().numpy())
        return reject_undefined(value / share + prior), grad / share + prior_grad

    def _sums(self, coordinates: Tensor, data: Data) -> tuple[LogDensity, Coordinates]:
        """Log-likelihood of some data and its gradient."""
        evaluate = self._tracer("grad")
        with torch.no_grad():
            points = self._points(coordinates)
            found = [
                functools.reduce(
                    _add,
                    (evaluate(part, x, y) for x, y in self._batches(len(part), _GRADIENT, data)),
                )
                for part in points.split(self._chains_at_once(len(points), _GRADIENT))
            ]
            grad, value = map(torch.cat, zip(*found, strict=True))
            if not self.subspace.traceable:
                grad = self.subspace.pull(grad).double()
        return value.cpu().numpy(), grad.cpu().numpy()

    def _block_sums(
        self, blocks: Blocks, what: str, z: Coordinates
    ) -> Float[np.ndarray, "chains columns"]:
        """Exact sums over blocks: the log-likelihood, followed for "grad" by its gradient."""
        evaluate = self._tracer(what)

        def columns(part: Tensor, inputs: Inputs, y: Any) -> Tensor:
            found = evaluate(self._points(part), inputs, y)
            if what == "value":
                return found[:, None]
            grad, value = found
            if not self.subspace.traceable:
                grad = self.subspace.pull(grad).double()
            return torch.cat([value[:, None], grad], 1)

        with torch.no_grad():
            width = 1 if what == "value" else 1 + self.rank
            return blocks.total(columns, self._coordinates(z), width, evaluate)

    def _subset(self, rows: Shaped[np.ndarray, "b"]) -> Data:
        """The given rows of the data."""
        if rows.dtype == bool or len(rows) == 0 or rows.min() < 0 or rows.max() >= self.data.n:
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
        coordinates = z.reshape(-1, self.rank)
        if (blocks := self._own_blocks()) is not None:
            sums = functools.partial(self._block_sums, blocks, "grad")
            total = BlockSums.apply(coordinates, sums)
        else:
            evaluate, points = self._tracer("log_prob"), self._points(coordinates)
            totals = [
                sum(evaluate(part, x, y) for x, y in self._batches(len(part), _GRADIENT))
                for part in points.split(self._chains_at_once(len(points), _GRADIENT))
            ]
            total = torch.cat(totals)
        value = total / self.temperature + self.prior.log_prob_tensor(coordinates)
        return value.reshape(z.shape[:-1])

    @functools.cached_property
    def row_weights(self) -> Float[np.ndarray, "n"] | None:
        """How many times each observation counts, shape (N,); None if each counts once."""
        known = has_weights(self.likelihood, self.data.first()[1])
        own = split_targets(self.data.targets(), True).counts[: self.data.n] if known else None
        return None if own is None else np.concatenate(gathered(self.data, own))

    def pointwise(self, z: Coordinates) -> Float[np.ndarray, "S n"]:
        """Log density of one copy of each observation, whatever its weight, shape (S, N)."""
        points = self._coordinates(z)
        evaluate, blocks = self._tracer("pointwise"), self._own_blocks()
        size, terms = min(64, self._chains_at_once(len(points))), np.empty((0, 0))
        with torch.no_grad():
            for start in range(0, len(points), size):
                part = points[start : start + size]
                if blocks is not None:
                    found = blocks.pointwise(lambda z, x, y: evaluate(self._points(z), x, y), part)
                else:
                    rows = [evaluate(self._points(part), *b) for b in self._batches(len(part))]
                    found = torch.cat(rows, 1).cpu().numpy()
                terms = terms if start else np.empty((len(points), found.shape[1]), found.dtype)
                terms[start : start + size] = found
        return terms

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
            draws: draws of an inference engine, or coordinates (S, k).
            inputs: new inputs in the form the module takes, or a loader of them.
            noise: noise scale per new row, for `Gaussian(noise="per-observation")`.
            n_draws: number of evenly spaced draws to use instead of all.
            refresh_batchnorm: re-estimate BatchNorm statistics on the training inputs for each
                draw, at the cost of one pass over them per draw.
            progress: show a progress bar; None shows it on a terminal.

        Raises:
            InputError: inputs that the module does not accept, or that contain NaN.
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
        """A digest of everything that defines the density, to match checkpoints."""
        facts = {
            "architecture": self.network.architecture,
            "names": self.network.names,
            "likelihood": self.likelihood.to_config(),
            "prior": self.prior.to_config(),
            "subspace": self.subspace.config(),
            "temperature": self.temperature,
            "n": self.n,
        }
        parts = [
            ("subspace", self.subspace.tensors()),
            ("frozen", self.network.used_frozen),
            ("mask", self.network.masks),
        ]
        digests = gathered(self.data, batch_digests(parts) | self.data.digests())
        return hashlib.sha256(
            json.dumps([facts, digests], sort_keys=True, default=repr).encode()
        ).hexdigest()


def _add(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0] + b[0], a[1] + b[1]

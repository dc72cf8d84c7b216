r"""Active learning over a pool: which rows to label next.

All scores are information in nats, from functions $f_s$ drawn once, so that draws are joint over
all rows:

- BALD (Houlsby et al. 2011): what the label of a row says about the model, $I(y; f)$.
- BatchBALD (Kirsch, van Amersfoort and Gal 2019): what the labels of a batch say together,
  $I(y_1, \dots, y_b; f)$, greedily. Joint entropies of classes are sums over all configurations of
  labels while these are few, and estimates from configurations drawn from the posterior then.
- EPIG (Bickford Smith et al. 2023): what the label of a row says about those of rows that the
  model is to predict, $\tfrac1M \sum_m I(y; y^*_m)$.
- Thompson sampling: each draw takes the row at which its function is largest.

For numbers the joint distribution of functions at rows is the Gaussian with the moments of the
draws, and the noise has their median variance; of several targets there is no information here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.artifacts.files import StrPath, as_path, atomic_write_text
from subbayes.data.arrays import to_inputs
from subbayes.data.to_pandas import to_pandas
from subbayes.networks.network import arguments
from subbayes.predictions.averaging import input_batches
from subbayes.utils.checks import check_choice, check_count, check_seed, fail
from subbayes.utils.trees import leaves, n_rows, take
from subbayes.utils.types import RowNumbers

__all__ = ["Pool", "bald", "batch_bald", "epig", "thompson"]

_ROWS = 256  # of which functions are computed at once
_CONFIGURATIONS = 1000  # of labels of a batch
_AT_ONCE = 64  # rows whose gains are computed before others may be left out
_NUMBERS = 2**24  # of a joint distribution in memory at once


@dataclass(frozen=True)
class _Functions:
    """Functions at rows: probabilities of classes, or means with one variance of noise a row."""

    values: Float[Tensor, "S N K"]
    noise: Float[Tensor, "N"] | None

    @property
    def root(self) -> Float[Tensor, "N S"]:
        """A root of the covariance of functions between rows, in units of the noise."""
        assert self.noise is not None
        centred = self.values[..., 0] - self.values[..., 0].mean(0)
        return (centred / max(len(centred) - 1, 1) ** 0.5 / self.noise.sqrt()).T


def _functions(model: Any, rows: Any, n_draws: int | None) -> _Functions:
    """The functions of a model, or of the model of an estimator, at rows."""
    if hasattr(model, "model_"):
        model, rows = model.model_, model._inputs(rows)
    drawn, means, noises = None, [], []
    with torch.no_grad():
        for batch in input_batches(rows, model.network):
            drawn = drawn or model.functions(take(batch, slice(3)), n_draws=n_draws)
            for start in range(0, n_rows(batch), _ROWS):
                args, kwargs = arguments(take(batch, slice(start, start + _ROWS)))
                mean, noise = drawn.moments(*args, **kwargs)
                means.append(mean)
                noises.append(noise)
    values, noise = torch.cat(means, 1), torch.cat(noises, 1)
    assert drawn is not None
    if drawn.classes:
        return _Functions(values, None)
    if values.shape[-1] > 1:
        fail("model", "a model of classes or of one target", f"{values.shape[-1]} targets")
    return _Functions(values, noise[..., 0].median(0).values)


# --- scores ---------------------------------------------------------------------------------------


def bald(model: Any, rows: Any, *, n_draws: int | None = None) -> RowNumbers:
    r"""What the label of each row says about the model, in nats.

    Of classes $H[\bar p] - \tfrac1S \sum_s H[p_s]$, of numbers $\tfrac12 \log(1 + v / \sigma^2)$.

    Args:
        model: a fitted model, or an estimator.
        rows: N rows in the form that `predict` takes.
        n_draws: number of draws, all by default.

    Raises:
        InputError: several targets; a model that has no functions to draw, see
            `Predictor.functions`.

    Example:
        >>> import subbayes
        >>> from subbayes.baselines.ensemble import WeightSamples
        >>> network = subbayes.Network(torch.nn.Linear(1, 1))
        >>> slopes = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
        >>> model = WeightSamples(network, slopes, subbayes.likelihoods.Gaussian(1.0), "two")
        >>> bald(model, torch.tensor([[0.0], [1.0]])).round(2)
        array([0.  , 0.55])
    """
    f = _functions(model, rows, n_draws)
    return _bald(f).numpy()


def _bald(f: _Functions) -> Float[Tensor, "N"]:
    if f.noise is not None:
        return 0.5 * f.root.square().sum(1).log1p()
    p, entr = f.values, torch.special.entr
    return (entr(p.mean(0)).sum(-1) - entr(p).sum(-1).mean(0)).clamp_min(0.0)


def epig(model: Any, rows: Any, targets: Any, *, n_draws: int | None = None) -> RowNumbers:
    """What the label of each row says about the labels of targets, on average, in nats.

    Args:
        model: a fitted model, or an estimator.
        rows: N rows in the form that `predict` takes.
        targets: rows that the model is to predict; some hundreds are enough.
        n_draws: number of draws, all by default.

    Raises:
        InputError: as `bald`.
    """
    return _epig(_functions(model, rows, n_draws), _functions(model, targets, n_draws)).numpy()


def _epig(f: _Functions, g: _Functions) -> Float[Tensor, "N"]:
    if f.noise is not None:
        a, b = (part.root / (1 + part.root.square().sum(1, keepdim=True)).sqrt() for part in (f, g))
        return -0.5 * (a @ b.T).square().neg().log1p().mean(1)
    entr, (S, M, K) = torch.special.entr, g.values.shape
    total = entr(g.values.mean(0)).sum(-1).mean()
    others = g.values.flatten(1) / S
    at_once = max(1, _NUMBERS // (M * K * K))
    joints = [
        entr(some.flatten(1).T @ others).reshape(some.shape[1], -1).sum(1) / M
        for some in f.values.split(at_once, 1)
    ]
    return (entr(f.values.mean(0)).sum(-1) + total - torch.cat(joints)).clamp_min(0.0)


# --- batches --------------------------------------------------------------------------------------


def batch_bald(
    model: Any, rows: Any, batch: int, *, n_draws: int | None = None, seed: int = 0
) -> Int[np.ndarray, "batch"]:
    """Positions of rows whose labels together say most about the model, chosen greedily.

    Args:
        model: a fitted model, or an estimator.
        rows: N rows in the form that `predict` takes.
        batch: how many to choose.
        n_draws: number of draws, all by default.
        seed: of configurations of labels.

    Raises:
        InputError: as `bald`; fewer rows than the batch.

    Example:
        >>> import subbayes
        >>> from subbayes.baselines.ensemble import WeightSamples
        >>> network = subbayes.Network(torch.nn.Linear(2, 1, bias=False))
        >>> weights = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> model = WeightSamples(network, weights, subbayes.likelihoods.Gaussian(0.1), "four")
        >>> batch_bald(model, torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), 2)
        array([0, 2])
    """
    f = _functions(model, rows, n_draws)
    _check_batch(batch, f.values.shape[1])
    return np.array(_batch_bald(f, batch, seed), dtype=int)


def _check_batch(batch: int, n: int) -> None:
    if check_count("batch", batch) > n:
        fail("batch", f"at most the {n} rows", batch)


def _batch_bald(f: _Functions, batch: int, seed: int) -> list[int]:
    chosen: list[int] = []
    if f.noise is not None:
        root = f.root
        for _ in range(batch):
            scores = root.square().sum(1)
            scores[chosen] = -1.0
            chosen.append(int(scores.argmax()))
            row = root[chosen[-1]]
            variance = row.square().sum()
            # the root of the covariance given y at this row, whose noise has variance 1
            gain = (1 - (1 + variance).rsqrt()) / variance.clamp_min(1e-300)
            root = root - gain * (root @ row)[:, None] * row
        return chosen
    p, generator = f.values, torch.Generator().manual_seed(check_seed(seed))
    S, n, K = p.shape
    conditional = torch.special.entr(p).sum(-1).mean(0)
    # all of the labels chosen with their probabilities under each draw, or some with those of draws
    configurations, weight, known = p.new_ones(1, S), 1.0, 0.0
    # what a row adds never grows with the rows chosen: earlier gains are bounds
    gains = p.new_full((n,), torch.inf)
    for k in range(batch):
        best = -torch.inf
        for rows in gains.argsort(descending=True, stable=True).split(_AT_ONCE):
            if gains[rows[0]] <= best:
                break
            gains[rows] = weight * _joint_entropy(configurations, p[:, rows]) - known
            gains[rows] -= conditional[rows]
            gains[chosen] = -torch.inf
            best = max(best, float(gains[rows].max()))
        chosen.append(int(gains.argmax()))
        gains[chosen] = -torch.inf
        if K ** (k + 1) <= _CONFIGURATIONS:
            configurations = (configurations[:, None] * p[:, chosen[-1]].T).reshape(-1, S)
            known = float(torch.special.entr(configurations.mean(1)).sum())
        else:
            configurations = _drawn_configurations(p[:, chosen], generator)
            weight, known = 1 / len(configurations), 0.0
    return chosen


def _joint_entropy(
    configurations: Float[Tensor, "M S"], p: Float[Tensor, "S N K"]
) -> Float[Tensor, "N"]:
    """Sums over configurations of the entropy of each row's label together with them."""
    at_once = max(1, _NUMBERS // (len(configurations) * p.shape[2]))
    found = []
    for some in p.split(at_once, 1):
        joint = configurations @ some.flatten(1) / len(p)
        found.append(torch.special.entr(joint).sum(0).reshape(some.shape[1:]).sum(-1))
    return torch.cat(found)


def _drawn_configurations(
    p: Float[Tensor, "S b K"], generator: torch.Generator
) -> Float[Tensor, "M S"]:
    """Weights of the draws given configurations of labels, of which each draw gives as many."""
    S, b, K = p.shape
    count = -(-_CONFIGURATIONS // S)
    labels = torch.multinomial(p.reshape(-1, K), count, replacement=True, generator=generator)
    labels = labels.reshape(S, b, count).movedim(1, 2).reshape(-1, b)
    log_p = p.clamp_min(1e-300).log()
    log_likelihood = torch.stack([log_p[:, k, labels[:, k]] for k in range(b)]).sum(0)
    return S * log_likelihood.softmax(0).T


def thompson(
    model: Any, rows: Any, batch: int, *, n_draws: int | None = None, seed: int = 0
) -> Int[np.ndarray, "batch"]:
    """Positions of different rows, at each of which another function drawn is largest.

    Args:
        model: a fitted model of one number, or an estimator; fit to -y to minimise.
        rows: N rows in the form that `predict` takes.
        batch: how many to choose.
        n_draws: number of draws, all by default.
        seed: of the order of the draws.

    Raises:
        InputError: as `bald`; classes; fewer rows than the batch.
    """
    f = _functions(model, rows, n_draws)
    if f.noise is None:
        fail("model", "a model of one number", "one of classes")
    _check_batch(batch, f.values.shape[1])
    order = np.random.default_rng(check_seed(seed)).permutation(len(f.values))
    values, chosen = f.values[..., 0].clone(), []
    for k in range(batch):
        chosen.append(int(values[order[k % len(order)]].argmax()))
        values[:, chosen[-1]] = -torch.inf
    return np.array(chosen)


# --- pools ----------------------------------------------------------------------------------------

METHODS = {"batch-bald": batch_bald, "thompson": thompson}
"""Choices of batches by name, for `Pool.ask`."""


class Pool:
    """Rows without labels, and a budget of labels: ask for rows, tell their labels.

    With a path the state is saved after each step, and a pool made again from the same rows and
    path goes on from there: rows asked for without an answer are asked for again. Of rows that are
    equal one is asked for.

    Args:
        rows: an array, a tensor or a tuple or dict of them, or a data frame.
        budget: number of labels.
        path: a JSON file of the state.

    Attributes:
        labels: labels by position of the row, in the order of the answers.
        pending: positions of rows asked for.

    Raises:
        InputError: a file of another pool.

    Example:
        >>> pool = Pool(np.arange(6.0)[:, None], budget=3)
        >>> positions = pool.ask(None, 2, "random")
        >>> pool.tell(10 * positions)
        >>> len(pool.ask(None, 2, "random")), pool.remaining
        (1, 1)
    """

    def __init__(self, rows: Any, budget: int, path: StrPath | None = None) -> None:
        rows = to_pandas("rows", rows)
        is_table = hasattr(rows, "iloc") or isinstance(rows, np.ndarray)
        self.rows = rows if is_table else to_inputs(rows, "rows")
        self.budget = check_count("budget", budget)
        self.path: Path | None = None if path is None else as_path(path)
        self.labels: dict[int, Any] = {}
        self.pending: list[int] = []
        keys = _row_keys(self.rows)
        _, self._first, self._group = np.unique(keys, return_index=True, return_inverse=True)
        self._digest = hashlib.sha256(keys.tobytes()).hexdigest()
        if self.path is not None and self.path.exists():
            state = json.loads(self.path.read_text())
            if state["rows"] != self._digest:
                fail(
                    "path", "the file of a pool of these rows", str(self.path), "Name another file"
                )
            self.labels = dict(zip(state["positions"], state["labels"], strict=True))
            self.pending = state["pending"]

    @property
    def remaining(self) -> int:
        """Number of labels left in the budget."""
        return max(self.budget - len(self.labels), 0)

    @property
    def labelled(self) -> tuple[Any, np.ndarray]:
        """The rows with labels, and these, in the order of the answers."""
        return _take(self.rows, list(self.labels)), np.array(list(self.labels.values()))

    def candidates(self) -> Int[np.ndarray, "n"]:
        """Positions of rows that may be asked for: one of equal rows, none that has a label."""
        known = self._group[list(self.labels)]
        return np.sort(self._first[~np.isin(self._group[self._first], known)])

    def ask(
        self,
        model: Any,
        batch: int = 1,
        method: str | Callable[[Any, Any], np.ndarray] = "batch-bald",
        *,
        n_draws: int | None = None,
        seed: int = 0,
    ) -> Int[np.ndarray, "n"]:
        """Positions of the rows to label next: fewer than the batch at the end of budget or pool.

        Args:
            model: a fitted model, or an estimator; None for "random".
            batch: number of rows.
            method: "batch-bald", "thompson" or "random", or a function from model and rows to a
                score of each row, such as `bald` or `partial(epig, targets=...)`.
            n_draws: number of draws of a method with a name, all by default.
            seed: of random choices.

        Raises:
            InputError: another method; as the function of the method.
        """
        check_count("batch", batch)
        if self.pending:
            return np.array(self.pending)
        positions = self.candidates()
        count = min(batch, self.remaining, len(positions))
        if not count:
            return np.array([], dtype=int)
        rows = _take(self.rows, positions)
        if callable(method):
            chosen = np.argsort(-np.asarray(method(model, rows)), kind="stable")[:count]
        elif method == "random":
            rng = np.random.default_rng((seed, len(self.labels)))
            chosen = rng.permutation(len(positions))[:count]
        else:
            check_choice("method", method, [*METHODS, "random"])
            chosen = METHODS[method](model, rows, count, n_draws=n_draws, seed=seed)
        self.pending = [int(position) for position in positions[chosen]]
        self._save()
        return np.array(self.pending)

    def tell(self, labels: Sequence[Any] | np.ndarray) -> None:
        """Labels of the rows asked for, in their order.

        Raises:
            InputError: another number of labels.
        """
        values = np.asarray(labels).tolist()
        if len(values) != len(self.pending):
            fail("labels", f"{len(self.pending)} labels, of the rows asked for", len(values))
        self.labels |= dict(zip(self.pending, values, strict=True))
        self.pending = []
        self._save()

    def _save(self) -> None:
        if self.path is not None:
            state = {
                "rows": self._digest,
                "positions": list(self.labels),
                "labels": list(self.labels.values()),
                "pending": self.pending,
            }
            atomic_write_text(self.path, json.dumps(state))


def _take(rows: Any, positions: Any) -> Any:
    if isinstance(rows, (tuple, dict, Tensor)):
        return take(rows, positions)
    return rows.iloc[positions] if hasattr(rows, "iloc") else rows[positions]


def _row_keys(rows: Any) -> np.ndarray:
    """A number of each row, the same for equal rows."""
    import pandas as pd

    if isinstance(rows, (tuple, dict, Tensor)):
        rows = np.concatenate([part.reshape(len(part), -1).numpy() for part in leaves(rows)], 1)
    table = rows if hasattr(rows, "iloc") else pd.DataFrame(rows.reshape(len(rows), -1))
    return pd.util.hash_pandas_object(table, index=False).to_numpy()

r"""Trains many small networks of one shape at once, each with its own settings.

`subbayes.training.train_many` trains networks with the same learning rate and weight decay. Here
each network has its own, for a grid of settings on many splits: the networks are rows of one
matrix, and a step takes as many tensor operations as a step of one network. Results agree with
those of `subbayes.training.train` and `subbayes.training.swa`, see the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes import MLP, Network
from subbayes.data.data import batch_sizes
from subbayes.likelihoods import HeteroscedasticGaussian, Standardized
from subbayes.training.loop import Trainable, run
from subbayes.training.trainer import SwaResult
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.seeding import derive_seed

__all__ = ["Members", "Table", "average", "train"]


@dataclass(frozen=True)
class Table:
    """Training rows of one member: standardised inputs, and targets in their own units.

    Attributes:
        inputs: (n, d).
        y: (n,).
        seed: of the initial weights and of the shuffling.
    """

    inputs: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    seed: int

    @property
    def likelihood(self) -> Standardized:
        """Heteroscedastic likelihood with a global variance, on standardised targets."""
        return Standardized.of(HeteroscedasticGaussian(), self.y)


@dataclass(frozen=True)
class Members:
    """Trained networks: row s is the flat weights of member s, then its raw global variance.

    Attributes:
        tables: their training rows.
        hidden: widths of the hidden layers.
        rows: (S, D + 1).
    """

    tables: tuple[Table, ...]
    hidden: tuple[int, ...]
    rows: Float[Tensor, "S P"]

    def finite(self, s: int) -> bool:
        """Return whether the weights of member s are finite."""
        return bool(torch.isfinite(self.rows[s]).all())

    def network(self, s: int) -> Network:
        """Return the network of member s."""
        return self.network_at(s, self.rows[s, :-1])

    def network_at(self, s: int, weights: Float[Tensor, " D"]) -> Network:
        """Return the network of member s at other weights."""
        table = self.tables[s]
        module = MLP(table.inputs.shape[1], self.hidden, 2, seed=table.seed)
        return Network(module).with_weights(weights)

    def likelihood(self, s: int, raw: Float[Tensor, " 1"] | None = None) -> Standardized:
        """Return the likelihood of member s, at its global variance or at `raw`."""
        raw = self.rows[s, -1:] if raw is None else raw
        return self.tables[s].likelihood.with_parameters(raw).detach()


def train(
    tables: list[Table],
    *,
    hidden: tuple[int, ...] = (50,),
    epochs: int,
    learning_rate: list[float],
    weight_decay: list[float],
    batch_size: int,
    progress: bool | None = None,
) -> Members:
    """Train all members by Adam with a cosine schedule, to their maxima a posteriori.

    Args:
        tables: S tables of one shape.
        hidden: widths of the hidden layers.
        epochs: passes over the data.
        learning_rate: one per member, at the start.
        weight_decay: one per member.
        batch_size: rows per step.
        progress: show a progress bar.
    """
    rows = torch.stack([_initial(t, hidden) for t in tables])
    start = Members(tuple(tables), hidden, rows)
    rates = torch.tensor(learning_rate)[:, None]

    def rate(epoch: int) -> Tensor:
        return rates * (1 + math.cos(math.pi * epoch / epochs)) / 2

    task = _Rows(start, batch_size, weight_decay, rate, _Adam(rows))
    run(task, epochs, f"Training {len(rows)} networks", progress=progress)
    return Members(start.tables, hidden, task.rows.detach())


def average(
    start: Members,
    *,
    epochs: int,
    learning_rate: list[float],
    weight_decay: list[float],
    batch_size: int,
    max_snapshots: int,
    clip_norm: float | None = None,
    momentum: float = 0.9,
    progress: bool | None = None,
) -> list[SwaResult | None]:
    """Continue with SGD at a constant rate, and average snapshots after each epoch.

    Args:
        start: trained members.
        epochs: passes over the data.
        learning_rate: one per member.
        weight_decay: one per member.
        batch_size: rows per step.
        max_snapshots: how many of the last snapshots the recorders keep.
        clip_norm: largest norm of each member's gradient of the log-likelihood.
        momentum: of SGD.
        progress: show a progress bar.

    Returns:
        One result per member; None for a member that diverged.
    """
    recorders = [TrajectoryRecorder(max_snapshots) for _ in start.tables]
    raw = torch.zeros(len(recorders), 1)
    rates = torch.tensor(learning_rate)[:, None]
    optimizer = _Momentum(start.rows, momentum)
    task = _Rows(start, batch_size, weight_decay, lambda _: rates, optimizer, clip_norm)

    def snapshot(*_: Any) -> None:
        rows = task.rows.detach()
        raw.add_(rows[:, -1:])
        for recorder, row in zip(recorders, rows, strict=True):
            if bool(torch.isfinite(row).all()):
                recorder.update(row[:-1])

    run(
        task, epochs, f"Training {len(recorders)} networks", after_epoch=snapshot, progress=progress
    )
    return [
        SwaResult(start.network_at(s, r.mean), start.likelihood(s, raw[s] / epochs), r, {})
        if r.n == epochs
        else None
        for s, r in enumerate(recorders)
    ]


def _initial(table: Table, hidden: tuple[int, ...]) -> Float[Tensor, " P"]:
    weights = Network(MLP(table.inputs.shape[1], hidden, 2, seed=table.seed)).weights
    return torch.cat([weights, table.likelihood.init_parameters(table.y).to(weights)])


class _Rows(Trainable):
    """Networks as rows of one matrix, each with its own learning rate and weight decay.

    A member that diverges does not affect the others.

    Args:
        start: the networks.
        batch_size: rows per step.
        weight_decay: one per member.
        rate: returns the learning rates of an epoch, shape (S, 1).
        optimizer: updates the matrix.
        clip_norm: largest norm of each member's gradient of the log-likelihood.
    """

    batch_axis = 1

    def __init__(
        self,
        start: Members,
        batch_size: int,
        weight_decay: list[float],
        rate: Callable[[int], Tensor],
        optimizer: _Adam | _Momentum,
        clip_norm: float | None = None,
    ) -> None:
        tables = start.tables
        self.likelihoods = [table.likelihood for table in tables]
        self.batch_size, self.rate, self.optimizer = batch_size, rate, optimizer
        self.clip_norm = clip_norm
        self.rows = start.rows.clone().requires_grad_()
        self.inputs = torch.stack([t.inputs for t in tables])
        self.y = torch.stack([t.likelihood.standardize(t.y).to(self.inputs) for t in tables])[
            ..., None
        ]
        self.generators = [torch.Generator().manual_seed(derive_seed(t.seed, 0)) for t in tables]
        widths = [self.inputs.shape[2], *start.hidden, 2]
        self.shapes = list(zip(widths[1:], widths, strict=False))
        self.decay = torch.tensor(weight_decay)[:, None].repeat(1, self.rows.shape[1])
        self.decay[:, -1] = 0

    def begin_epoch(self, number: int) -> None:
        """Set the learning rates."""
        self.rates = self.rate(number)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield minibatches, with the rows of each member in its own order."""
        members, n = torch.arange(len(self.rows))[:, None], self.y.shape[1]
        order = torch.stack([torch.randperm(n, generator=g) for g in self.generators])
        for batch in order.split(batch_sizes(n, self.batch_size), 1):
            yield self.inputs[members, batch], self.y[members, batch]

    def step(self, inputs: Tensor, y: Tensor) -> None:
        """Make one step of every member."""
        (gradient,) = torch.autograd.grad(self.loss(inputs, y), self.rows)
        with torch.no_grad():
            if self.clip_norm is not None:
                norm = gradient.norm(dim=1, keepdim=True)
                gradient *= (self.clip_norm / (norm + 1e-6)).clamp(max=1)
            self.optimizer.step(self.rows, gradient.addcmul_(self.decay, self.rows), self.rates)

    def loss(self, inputs: Tensor, y: Tensor) -> Tensor:
        """Sum over members of their mean negative log-likelihoods of a minibatch."""
        *layers, raw = self.rows.split([k for o, i in self.shapes for k in (o * i, o)] + [1], 1)
        h = inputs
        for at, (n_out, n_in) in enumerate(self.shapes):
            weight, bias = layers[2 * at].reshape(-1, n_out, n_in), layers[2 * at + 1]
            h = torch.baddbmm(bias[:, None], h if at == 0 else h.relu(), weight.mT)
        likelihood = HeteroscedasticGaussian().with_parameters(raw[..., None])
        return -likelihood.log_prob(h, y).mean(1).sum()

    def end_epoch(self, number: int, losses: list[Any], rows: list[int]) -> list[dict[str, float]]:
        """Return no metrics, so that a step does not wait for its loss."""
        return [{} for _ in self.likelihoods]

    def state(self, member: int = 0) -> dict[str, Any]:
        """Return a copy of a member."""
        return {"row": self.rows.detach()[member].clone()}

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore a copy of each member."""
        with torch.no_grad():
            self.rows.copy_(torch.stack([state["row"] for state in states]))


class _Adam:
    """Adam (Kingma & Ba 2015) with a learning rate per row."""

    def __init__(self, rows: Tensor) -> None:
        self.m, self.v, self.t = torch.zeros_like(rows), torch.zeros_like(rows), 0

    def step(self, rows: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Update rows in place."""
        self.t += 1
        self.m.lerp_(gradient, 0.1)
        self.v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (self.v / (1 - 0.999**self.t)).sqrt_().add_(1e-8)
        rows -= rate / (1 - 0.9**self.t) * self.m / scale


class _Momentum:
    """SGD with momentum and a learning rate per row."""

    def __init__(self, rows: Tensor, momentum: float) -> None:
        self.buffer, self.momentum = torch.zeros_like(rows), momentum

    def step(self, rows: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Update rows in place."""
        self.buffer.mul_(self.momentum).add_(gradient)
        rows -= rate * self.buffer

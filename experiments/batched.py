r"""Trains many small networks of one shape at once, each as `subbayes.training.train` would alone.

A step of a network of a few hundred weights costs the interpreter far more than it costs the
processor. Here the networks of all splits and settings are rows of one matrix, so that a step
is paid once for all of them: the same loss, shuffling, Adam and SGD as
`subbayes.training.train` and `subbayes.training.swa`, which the tests compare member by member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from subbayes import MLP, Network
from subbayes.likelihoods import HeteroscedasticGaussian, Standardized
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.trainer import SwaResult
from subbayes.utils.progress import bar
from subbayes.utils.seeding import derive

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
        """Heteroscedastic with a global variance, on targets standardised by these rows."""
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
        """Whether the training of member s went well."""
        return bool(torch.isfinite(self.rows[s]).all())

    def network(self, s: int) -> Network:
        """The network of member s."""
        return self.network_at(s, self.rows[s, :-1])

    def network_at(self, s: int, weights: Float[Tensor, " D"]) -> Network:
        """The network of member s at other weights."""
        table = self.tables[s]
        module = MLP(table.inputs.shape[1], self.hidden, 2, seed=table.seed)
        return Network(module).with_weights(weights)

    def likelihood(self, s: int, raw: Float[Tensor, " 1"] | None = None) -> Standardized:
        """The likelihood of member s at its global variance, or at another."""
        raw = self.rows[s, -1:] if raw is None else raw
        return self.tables[s].likelihood.with_parameters(raw).frozen()


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
    start = Members(tuple(tables), hidden, torch.stack([_initial(t, hidden) for t in tables]))
    rates = torch.tensor(learning_rate)[:, None]
    adam = _Adam(start.rows)

    def rate(epoch: int) -> Tensor:
        return rates * (1 + math.cos(math.pi * epoch / epochs)) / 2

    rows = _run(start, epochs, batch_size, weight_decay, rate, adam.step, None, None, progress)
    return Members(start.tables, hidden, rows)


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
    """Go on by SGD at a constant rate, and average snapshots after each epoch.

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
    sgd = _Momentum(start.rows, momentum)

    def snapshot(rows: Tensor) -> None:
        raw.add_(rows[:, -1:])
        for recorder, row in zip(recorders, rows, strict=True):
            if bool(torch.isfinite(row).all()):
                recorder.update(row[:-1])

    _run(
        start,
        epochs,
        batch_size,
        weight_decay,
        lambda _: rates,
        sgd.step,
        clip_norm,
        snapshot,
        progress,
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


def _run(
    start: Members,
    epochs: int,
    batch_size: int,
    weight_decay: list[float],
    rate: Callable[[int], Tensor],
    step: Callable[[Tensor, Tensor, Tensor], None],
    clip_norm: float | None,
    after_epoch: Callable[[Tensor], None] | None,
    progress: bool | None,
) -> Float[Tensor, "S P"]:
    """All epochs; returns the new rows."""
    rows = start.rows.clone().requires_grad_()
    loss = _Loss(start)
    decay = torch.tensor(weight_decay)[:, None].repeat(1, rows.shape[1])
    decay[:, -1] = 0
    with bar(epochs, f"Training {len(rows)} networks", progress, "epochs") as steps:
        for epoch in range(epochs):
            for batch in loss.batches(batch_size):
                (gradient,) = torch.autograd.grad(loss(rows, batch), rows)
                with torch.no_grad():
                    if clip_norm is not None:
                        norm = gradient.norm(dim=1, keepdim=True)
                        gradient *= (clip_norm / (norm + 1e-6)).clamp(max=1)
                    step(rows, gradient.addcmul_(decay, rows), rate(epoch))
            if after_epoch is not None:
                after_epoch(rows.detach())
            steps.update(1)
    return rows.detach()


class _Loss:
    """Sum over members of their mean negative log-likelihoods of a minibatch."""

    def __init__(self, members: Members) -> None:
        tables = members.tables
        self.inputs = torch.stack([t.inputs for t in tables])
        self.y = torch.stack([t.likelihood.inward(t.y).to(self.inputs) for t in tables])[..., None]
        self.generators = [torch.Generator().manual_seed(derive(t.seed, 0)) for t in tables]
        widths = [self.inputs.shape[2], *members.hidden, 2]
        self.shapes = list(zip(widths[1:], widths, strict=False))

    def batches(self, size: int) -> Iterator[Tensor]:
        """Rows of each member in an order of its own; a last single row joins the one before."""
        n = self.y.shape[1]
        order = torch.stack([torch.randperm(n, generator=g) for g in self.generators])
        ends = [*range(size, n, size), n]
        if size > 1 and len(ends) > 1 and ends[-1] - ends[-2] == 1:
            del ends[-2]
        for begin, end in zip([0, *ends], ends, strict=False):
            yield order[:, begin:end]

    def __call__(self, rows: Tensor, batch: Tensor) -> Tensor:
        members = torch.arange(len(rows))[:, None]
        *layers, raw = rows.split([k for o, i in self.shapes for k in (o * i, o)] + [1], 1)
        h = self.inputs[members, batch]
        for at, (n_out, n_in) in enumerate(self.shapes):
            weight, bias = layers[2 * at].reshape(-1, n_out, n_in), layers[2 * at + 1]
            h = torch.baddbmm(bias[:, None], h if at == 0 else h.relu(), weight.mT)
        likelihood = HeteroscedasticGaussian(softplus(raw)[..., None])
        return -likelihood.log_prob(h, self.y[members, batch]).mean(1).sum()


class _Adam:
    """Adam (Kingma & Ba 2015) on rows with a rate of their own."""

    def __init__(self, rows: Tensor) -> None:
        self.m, self.v, self.t = torch.zeros_like(rows), torch.zeros_like(rows), 0

    def step(self, rows: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """One step, in place."""
        self.t += 1
        self.m.lerp_(gradient, 0.1)
        self.v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (self.v / (1 - 0.999**self.t)).sqrt_().add_(1e-8)
        rows -= rate / (1 - 0.9**self.t) * self.m / scale


class _Momentum:
    """SGD with momentum on rows with a rate of their own."""

    def __init__(self, rows: Tensor, momentum: float) -> None:
        self.buffer, self.momentum = torch.zeros_like(rows), momentum

    def step(self, rows: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """One step, in place."""
        self.buffer.mul_(self.momentum).add_(gradient)
        rows -= rate * self.buffer

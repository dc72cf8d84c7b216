"""Networks of one architecture in one step of training: their weights lie one below the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from subbayes.data.data import Data, leaves, take
from subbayes.likelihoods import Likelihood
from subbayes.networks.layer_kinds import DROPOUTS
from subbayes.networks.network import arguments
from subbayes.networks.tracing.tracer import Tracer
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.training.configuration import Training
from subbayes.training.minibatches import Feed, batch_sizes, inner, log_scale
from subbayes.training.optimizer import make_optimizer
from subbayes.utils.checks import fail
from subbayes.utils.trees import tensors_of, tree_map, with_tensors
from subbayes.utils.types import Inputs, Targets

__all__ = ["StackedRun", "alike"]

_WORTH_TRACING = 50  # steps of one shape after which the second that tracing takes pays


class StackedRun:
    """Stacked members in training; the counterpart of the run of one module."""

    @classmethod
    def of(
        cls, feeds: Sequence[Feed], training: Training, raws: Sequence[Tensor | None] | None = None
    ) -> StackedRun | None:
        """A run, or None for what has to be trained one after the other."""
        if len(feeds) < 2 or not _vectorisable(feeds):
            return None
        run = cls(feeds, training, raws)
        return run if run.works() else None

    def __init__(
        self, feeds: Sequence[Feed], training: Training, raws: Sequence[Tensor | None] | None
    ) -> None:
        self.feeds, self.training, self.count = feeds, training, len(feeds)
        self.network = feeds[0].network
        self.inner = inner(feeds[0].likelihood)
        self.module = self.network.module_with()
        named = [dict(feed.network.module_with().named_parameters()) for feed in feeds]
        moves = [
            n
            for n, p in named[0].items()
            if p.requires_grad and (raws is None or n in self.network.names)
        ]
        self.moving = {n: nn.Parameter(torch.stack([p[n].detach() for p in named])) for n in moves}
        self.rest = {
            n: torch.stack([p[n].detach() for p in named]) for n in named[0] if n not in moves
        }
        self.still = (
            {n: (mask, self.moving[n].detach().clone()) for n, mask in self.network.masks.items()}
            if raws is not None
            else {}
        )
        self.raw = nn.Parameter(
            torch.stack(
                [
                    feed.raw if raw is None or raw.shape != feed.raw.shape else raw.to(feed.raw)
                    for feed, raw in zip(feeds, raws or [None] * self.count, strict=True)
                ]
            )
        )
        self.optimizer = make_optimizer(
            self.moving, self.raw, training, training.weight_decay_for(feeds[0].n)
        )
        self.gradients = Tracer(
            vmap(grad_and_value(self.loss, argnums=(0, 1))),
            "the training step",
            traced_after=_WORTH_TRACING,
            tolerance=1e-5,
            verify_always=True,
        )
        self.after_step: Callable[[], None] | None = None
        self._stack_data()

    def _stack_data(self) -> None:
        """Rows of all members one below the other; shared inputs once."""
        memory = [feed.memory for feed in self.feeds]
        first = memory[0]
        assert first is not None
        shared = all(m is not None and _same_tensors(m.inputs, first.inputs) for m in memory)
        members = torch.arange(self.count, device=self.network.device)[:, None]
        self.offset_y = members * self.feeds[0].n
        self.offset_x = torch.zeros_like(members) if shared else self.offset_y
        self.x = first.inputs if shared else _below([m.inputs for m in memory if m is not None])
        self.y = _below([m.y for m in memory if m is not None])

    # --- one member, as a pure function -----------------------------------------------------

    def outputs(
        self, moving: Mapping[str, Tensor], rest: Mapping[str, Tensor], x: Inputs
    ) -> Tensor:
        """Outputs of one member."""
        args, kwargs = arguments(x)
        return self.network.as_outputs(
            functional_call(self.module, {**moving, **rest}, args, kwargs), x
        )

    def loss(
        self,
        moving: Mapping[str, Tensor],
        raw: Tensor,
        rest: Mapping[str, Tensor],
        x: Inputs,
        y: Targets,
    ) -> Tensor:
        """Mean negative log-likelihood of one member on its batch."""
        outputs = self.outputs(moving, rest, x)
        return -self.inner.with_parameters(raw).log_prob(outputs, y).mean()

    def works(self) -> bool:
        """Whether vectorised losses are those of the members alone."""
        x, y = next(self.batches(shuffled=False))
        try:
            with torch.no_grad():
                together = vmap(self.loss)(self.moving, self.raw, self.rest, x, y)
                alone = torch.stack(
                    [self.loss(*self.member(m), _row(x, m), _row(y, m)) for m in range(self.count)]
                )
        except RuntimeError as error:
            warn_of_fallback("training members together", error, "training one after the other")
            return False
        return torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True)

    def member(self, m: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Parameters of one member."""
        return (
            {n: p.detach()[m] for n, p in self.moving.items()},
            self.raw.detach()[m],
            {n: p[m] for n, p in self.rest.items()},
        )

    # --- steps ------------------------------------------------------------------------------

    def batches(self, shuffled: bool = True) -> Iterator[tuple[Inputs, Targets]]:
        """One pass; each member in an order of its own."""
        n, device = self.feeds[0].n, self.network.device
        size = self.feeds[0].batch_size or n
        if shuffled and size < n:
            order = torch.stack([torch.randperm(n, generator=f.generator) for f in self.feeds])
        else:
            order = torch.arange(n).expand(self.count, n)
        for rows in order.to(device).split(batch_sizes(n, size), 1):
            yield take(self.x, rows + self.offset_x), take(self.y, rows + self.offset_y)

    def step(self, x: Inputs, y: Targets) -> Tensor:
        """One step of every member; returns their losses (M,)."""
        with torch.no_grad():
            (grads, grad_raw), losses = self.gradients(self.moving, self.raw, self.rest, x, y)
            if self.training.clip_norm is not None:
                grads, grad_raw = _clipped(grads, grad_raw, self.training.clip_norm)
            for name, parameter in self.moving.items():
                parameter.grad = grads[name]
            self.raw.grad = grad_raw
            self.optimizer.step()
            for name, (mask, before) in self.still.items():
                self.moving[name].copy_(torch.where(mask, self.moving[name], before))
        if self.after_step is not None:
            self.after_step()
        return losses

    def epoch(self, number: int) -> tuple[float, list[float]]:
        """One pass; returns the rate and each member's loss."""
        rate = self.training.rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        total = torch.zeros(self.count, dtype=torch.float64, device=self.network.device)
        for x, y in self.batches():
            total += self.step(x, y) * leaves(y)[0].shape[1]
        self._check_finite(total, number)
        losses = (total / self.feeds[0].n).tolist()
        return rate, [
            loss + log_scale(feed.likelihood) for loss, feed in zip(losses, self.feeds, strict=True)
        ]

    def _check_finite(self, total: Tensor, number: int) -> None:
        sizes = [p.detach().abs().flatten(1).amax(1) for p in self.moving.values()]
        finite = torch.isfinite(torch.stack([total, *sizes])).all(0)
        if not bool(finite.all()):
            m = int((~finite).nonzero()[0])
            fail(
                "learning_rate",
                "a training loss that stays finite",
                f"{float(total[m]) / self.feeds[0].n:g} in epoch {number + 1} of member {m} at "
                f"learning rate {self.training.learning_rate:g}",
                "Lower the learning rate, standardise the inputs, or set clip_norm",
            )

    def flat(self) -> Tensor:
        """Weights of all members, (M, D), as their networks flatten them."""
        parts = []
        for name in self.network.names:
            mask = self.network.masks.get(name)
            values = self.moving[name].detach()
            parts.append(values.flatten(1) if mask is None else values[:, mask])
        return torch.cat(parts, 1)

    def state(self) -> list[Tensor]:
        """All that moves; not a copy."""
        return [*(p.detach() for p in self.moving.values()), self.raw.detach()]

    def restore(self, state: list[Tensor]) -> None:
        """Go back to a state."""
        for now, before in zip(self.state(), state, strict=True):
            now.copy_(before)

    def likelihood(self, m: int, raw: Tensor) -> Likelihood:
        """A member's likelihood with its parameters learned."""
        return self.feeds[m].likelihood.with_parameters(raw).frozen()


def _vectorisable(feeds: Sequence[Feed]) -> bool:
    """Data in memory of one size, one architecture, nothing random and nothing written to."""
    first = feeds[0]
    module = first.network.module_with()
    random = any(isinstance(m, DROPOUTS) or getattr(m, "dropout", 0) for m in module.modules())
    if random or any(True for _ in module.buffers()) or first.memory is None:
        return False
    return all(
        f.memory is not None
        and f.network.architecture == first.network.architecture
        and f.device == first.device
        and f.raw.shape == first.raw.shape
        and _shapes(f.memory) == _shapes(first.memory)
        and inner(f.likelihood).to_config() == inner(first.likelihood).to_config()
        for f in feeds
    )


def _same_tensors(a: Any, b: Any) -> bool:
    return all(x.data_ptr() == y.data_ptr() for x, y in zip(leaves(a), leaves(b), strict=True))


def _below(parts: Sequence[Any]) -> Any:
    """Tensors, tuples or dicts of them, one below the other."""
    columns = zip(*map(tensors_of, parts), strict=True)
    return with_tensors(parts[0], map(torch.cat, columns))


def _row(values: Any, m: int) -> Any:
    return tree_map(lambda t: t[m], values)


def _clipped(
    grads: dict[str, Tensor], raw: Tensor, limit: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of each member scaled down to a norm."""
    every = [*grads.values(), raw]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in every]).sum(0).sqrt()
    factor = (limit / (norms + 1e-6)).clamp_max(1.0)

    def scaled(g: Tensor) -> Tensor:
        return g * factor.reshape(-1, *[1] * (g.ndim - 1))

    return {n: scaled(g) for n, g in grads.items()}, scaled(raw)


def alike(parts: Sequence[Data | None]) -> bool:
    """Whether held-out data can be stacked."""
    if parts[0] is None:
        return True
    return all(p is not None and p.in_memory and _shapes(p) == _shapes(parts[0]) for p in parts)


def _shapes(data: Data | None) -> Any:
    assert data is not None
    return tree_map(lambda t: (t.shape, t.dtype), (data.inputs, data.y))

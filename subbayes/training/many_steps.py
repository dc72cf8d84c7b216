"""Networks of one architecture that are trained in the same steps, vectorised over members."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from typing_extensions import override

from subbayes.data.data import Data, batch_sizes
from subbayes.likelihoods.target_parts import mean_weight
from subbayes.networks.layer_kinds import DROPOUTS, set_training_mode
from subbayes.networks.module_copy import call_with
from subbayes.networks.network import arguments
from subbayes.networks.tracing.tracer import Tracer
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.training.configuration import Training
from subbayes.training.float_copies import FloatCopies
from subbayes.training.loop import Trainable, log_scale
from subbayes.training.minibatches import Minibatches
from subbayes.training.optimizer import make_optimizer
from subbayes.training.traced_steps import set_gradients
from subbayes.utils.trees import is_same_view, leaves, take, tensors_of, tree_map, with_tensors
from subbayes.utils.types import Batch, Inputs, Targets

TRACED_AFTER = 50
"""Steps of one shape that are not traced; tracing takes about a second."""


class TrainableNetworks(Trainable):
    """Networks of one architecture with stacked parameters, of shapes (members, ...)."""

    batch_axis = 1

    @classmethod
    def of(
        cls,
        minibatches: Sequence[Minibatches],
        training: Training,
        held_out: Sequence[Data | None] = (None,),
    ) -> TrainableNetworks | None:
        """Stacked networks, or None for members that cannot be vectorised.

        Args:
            minibatches: of each member, with its network and likelihood.
            training: settings.
            held_out: data to evaluate after each epoch, or None, for each member.
        """
        if len(minibatches) < 2 or not _are_stackable(minibatches, held_out):
            return None
        task = cls(minibatches, training, held_out)
        return task if task.is_vectorisable() else None

    def __init__(
        self,
        minibatches: Sequence[Minibatches],
        training: Training,
        held_out: Sequence[Data | None],
    ) -> None:
        self.minibatches, self.training, self.count = minibatches, training, len(minibatches)
        self.likelihoods = [member.likelihood for member in minibatches]
        self.network = minibatches[0].network
        self.batch_likelihood = minibatches[0].likelihood.of_standardized
        self.module = set_training_mode(self.network.module_with(), self.network.fixed_norms)
        named = [dict(member.network.module_with().named_parameters()) for member in minibatches]
        trainable = [n for n, p in named[0].items() if p.requires_grad]
        stacked = {n: nn.Parameter(torch.stack([p[n].detach() for p in named])) for n in trainable}
        self.trainable = FloatCopies(stacked).by_name  # rounded in each call
        self._dtypes = {n: p.dtype for n, p in stacked.items()}
        self.frozen = {
            n: torch.stack([p[n].detach() for p in named]) for n in named[0] if n not in trainable
        }
        self.unconstrained = nn.Parameter(
            torch.stack([member.initial_parameters for member in minibatches])
        )
        decay = training.weight_decay_for(minibatches[0].n)
        self.optimizers = [make_optimizer(self.trainable, self.unconstrained, training, decay)]
        self.gradients = Tracer(
            vmap(grad_and_value(self.loss, argnums=(0, 1))),
            "the training step",
            traced_after=TRACED_AFTER,
            tolerance=1e-5,
            verify_always=True,
        )
        self._stack_data()
        self.held_out = self._stacked(held_out)
        self._held_out_weights = [
            mean_weight(likelihood, part.targets())
            for part, likelihood in zip(held_out, self.likelihoods, strict=False)
            if part is not None
        ]

    def _stack_data(self) -> None:
        """Concatenate the rows of all members; inputs that all members share are kept once."""
        memory = [member.memory for member in self.minibatches]
        first = memory[0]
        assert first is not None
        shared = all(m is not None and _same_tensors(m.inputs, first.inputs) for m in memory)
        members = torch.arange(self.count, device=self.network.device)[:, None]
        self.offset_y = members * self.minibatches[0].n
        self.offset_x = torch.zeros_like(members) if shared else self.offset_y
        self.x = (
            first.inputs if shared else _concatenated([m.inputs for m in memory if m is not None])
        )
        self.y = _concatenated([m.y for m in memory if m is not None])

    def loss(
        self,
        trainable: Mapping[str, Tensor],
        likelihood_parameters: Tensor,
        frozen: Mapping[str, Tensor],
        x: Inputs,
        y: Targets,
    ) -> Tensor:
        """Mean negative log-likelihood of one member on its batch, as a pure function."""
        args, kwargs = arguments(x)
        values = {n: p.to(self._dtypes[n]) for n, p in trainable.items()} | dict(frozen)
        returned = call_with(self.module, values, self.network.tied, args, kwargs)
        likelihood = self.batch_likelihood.with_parameters(likelihood_parameters)
        return -likelihood.log_prob(self.network.as_outputs(returned, x), y).mean()

    def is_vectorisable(self) -> bool:
        """Whether the vectorised losses equal those of each member alone."""
        x, y = next(self.batches(shuffled=False))
        try:
            with torch.no_grad():
                together = vmap(self.loss)(self.trainable, self.unconstrained, self.frozen, x, y)
                alone = torch.stack(
                    [
                        self.loss(*self.parameters_of(m), _member_of(x, m), _member_of(y, m))
                        for m in range(self.count)
                    ]
                )
        except RuntimeError as error:
            warn_of_fallback("training members together", error, "training one after the other")
            return False
        return torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True)

    def parameters_of(self, m: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Parameters of one member."""
        return (
            {n: p.detach()[m] for n, p in self.trainable.items()},
            self.unconstrained.detach()[m],
            {n: p[m] for n, p in self.frozen.items()},
        )

    def batches(self, shuffled: bool = True) -> Iterator[Batch]:
        """The minibatches of one epoch; each member has its own order."""
        n, device = self.minibatches[0].n, self.network.device
        size = self.minibatches[0].batch_size or n
        if shuffled and size < n:
            order = torch.stack(
                [torch.randperm(n, generator=f.generator) for f in self.minibatches]
            )
        else:
            order = torch.arange(n).expand(self.count, n)
        for rows in order.to(device).split(batch_sizes(n, size), 1):
            yield take(self.x, rows + self.offset_x), take(self.y, rows + self.offset_y)

    def step(self, x: Inputs, y: Targets) -> Tensor:
        """Make one step of every member; returns their losses (M,)."""
        with torch.no_grad():
            (by_name, own), losses = self.gradients(
                self.trainable, self.unconstrained, self.frozen, x, y
            )
            gradients = [*(by_name[name] for name in self.trainable), own]
            if self.training.clip_norm is not None:
                gradients = _clip_norms(gradients, self.training.clip_norm)
            parameters = [*self.trainable.values(), self.unconstrained]
            set_gradients(parameters, gradients, copies=False)
            self.optimizers[0].step()
        return losses

    @override
    def are_finite(self) -> list[bool]:
        sizes = [p.detach().abs().flatten(1).amax(1) for p in self.trainable.values()]
        return torch.isfinite(torch.stack(sizes)).all(0).tolist()

    def _stacked(self, held_out: Sequence[Data | None]) -> Any:
        """Held-out inputs and targets, with an axis for the members."""
        if held_out[0] is None:
            return None
        parts = [part.to(self.network.device) for part in held_out if part is not None]
        pairs = [
            (p.inputs, self.minibatches[m].prepare_targets(p.targets()))
            for m, p in enumerate(parts)
        ]
        columns = zip(*map(tensors_of, pairs), strict=True)
        return with_tensors(pairs[0], map(torch.stack, columns))

    @override
    def evaluate(self) -> list[float] | None:
        if self.held_out is None:
            return None
        self.module.eval()
        with torch.no_grad():
            losses = vmap(self.loss)(
                self.trainable, self.unconstrained, self.frozen, *self.held_out
            )
        set_training_mode(self.module, self.network.fixed_norms)
        members = zip(
            losses.double().tolist(), self._held_out_weights, self.likelihoods, strict=True
        )
        return [-loss / weight - log_scale(likelihood) for loss, weight, likelihood in members]

    @override
    def mean_weights(self) -> list[float]:
        return [member.mean_weight for member in self.minibatches]

    @override
    def state(self, member: int = 0) -> dict[str, Any]:
        weights = {n: p.detach()[member].clone() for n, p in self.trainable.items()}
        return {"weights": weights, "likelihood": self.unconstrained.detach()[member].clone()}

    @override
    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        with torch.no_grad():
            for m, state in enumerate(states):
                for name, value in state["weights"].items():
                    self.trainable[name][m].copy_(value)
                self.unconstrained[m].copy_(state["likelihood"])


_MOST_FROZEN = 64 * 2**20  # bytes, of which a vectorised step has a copy for each member


def _are_stackable(minibatches: Sequence[Minibatches], held_out: Sequence[Data | None]) -> bool:
    """Whether members have data in memory of one shape, one architecture, no dropout or buffers."""
    if held_out[0] is not None and not all(
        p is not None and p.in_memory and _shapes(p) == _shapes(held_out[0]) for p in held_out
    ):
        return False
    first = minibatches[0]
    module = first.network.module_with()
    random = any(isinstance(m, DROPOUTS) or getattr(m, "dropout", 0) for m in module.modules())
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    if random or any(True for _ in module.buffers()) or first.memory is None:
        return False
    if frozen > _MOST_FROZEN:
        return False
    return all(
        f.memory is not None
        and f.network.architecture == first.network.architecture
        and f.device == first.device
        and f.initial_parameters.shape == first.initial_parameters.shape
        and _shapes(f.memory) == _shapes(first.memory)
        and f.likelihood.of_standardized.to_config() == first.likelihood.of_standardized.to_config()
        for f in minibatches
    )


def _same_tensors(a: Any, b: Any) -> bool:
    return all(is_same_view(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def _concatenated(parts: Sequence[Any]) -> Any:
    """Concatenated tensors, or tuples or dicts of them."""
    columns = zip(*map(tensors_of, parts), strict=True)
    return with_tensors(parts[0], map(torch.cat, columns))


def _member_of(values: Any, m: int) -> Any:
    return tree_map(lambda t: t[m], values)


def _clip_norms(gradients: list[Tensor], limit: float) -> list[Tensor]:
    """Gradients of each member, scaled to a norm of at most `limit`."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    factor = (limit / (norms + 1e-6)).clamp_max(1.0)
    return [g * factor.reshape(-1, *[1] * (g.ndim - 1)) for g in gradients]


def _shapes(data: Data | None) -> Any:
    assert data is not None
    return tree_map(lambda t: (t.shape, t.dtype), (data.inputs, data.y))

"""One network, or one curve, that the training loop trains: its steps, and its state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.networks.layer_kinds import set_training_mode
from subbayes.training.configuration import Training
from subbayes.training.float_copies import FloatCopies
from subbayes.training.loop import Trainable
from subbayes.training.minibatches import Minibatches
from subbayes.training.optimizer import make_optimizer
from subbayes.training.shared_steps import SharedSteps
from subbayes.training.traced_steps import Gradients, set_gradients, traced_gradients
from subbayes.utils.checks import is_finite
from subbayes.utils.trees import n_rows, to_device
from subbayes.utils.types import Batch, Inputs, Targets


class SingleTrainable(Trainable):
    """One network or one curve, with a likelihood.

    Args:
        minibatches: the training data, with the network, whose module is copied.
        training: settings.
        held_out: data to evaluate after each epoch.
        likelihood_parameters: initial unconstrained parameters of the likelihood.
    """

    trainable: dict[str, nn.Parameter]
    evaluations = 1  # outputs per row that `evaluate` averages over

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
    ) -> None:
        minibatches.check_held_out(held_out)
        self.minibatches, self.training, self.held_out = minibatches, training, held_out
        self.network, self.likelihood = minibatches.network, minibatches.likelihood
        self.likelihoods = [self.likelihood]
        self.batch_likelihood = self.likelihood.of_standardized
        self.module = self.network.module_with()
        self.set_training_mode()
        start = initial = minibatches.initial_parameters
        if likelihood_parameters is not None and likelihood_parameters.shape == initial.shape:
            start = likelihood_parameters
        self.unconstrained = nn.Parameter(start.to(initial, copy=True))

    def set_training_mode(self) -> None:
        """Set training mode, except for frozen BatchNorm layers in evaluation mode."""
        set_training_mode(self.module, self.network.fixed_norms)

    @abstractmethod
    def evaluation(self) -> Callable[[Inputs], Iterable[Tensor]]:
        """A function that returns outputs for inputs, to evaluate held-out data."""

    @property
    def shared(self) -> SharedSteps | None:
        """What processes with sharded rows exchange."""
        return self.minibatches.shared

    @override
    def batches(self) -> Iterator[Batch]:
        own = self.minibatches.shuffled()
        return own if self.shared is None else self.shared.in_step(own)

    def rows_of(self, y: Targets) -> int:
        """Number of rows of a batch, of all processes."""
        return super().rows_of(y) if self.shared is None else self.shared.rows

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set in any of the processes that train together."""
        return flag if self.shared is None else bool(self.shared.processes.highest(int(flag))[0])

    def loss(self, outputs: Tensor, y: Targets, own: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of a minibatch, at given parameters of the likelihood."""
        own = self.unconstrained if own is None else own
        return -self.batch_likelihood.with_parameters(own).log_prob(outputs, y).mean()

    @override
    def are_finite(self) -> list[bool]:
        return [all(map(is_finite, self.trainable.values()))]

    @override
    def mean_weights(self) -> list[float]:
        return [self.minibatches.mean_weight]

    def evaluate(self) -> list[float] | None:
        """Mean log-likelihood of held-out data by their weights, in evaluation mode."""
        if self.held_out is None:
            return None
        likelihood, total = self.likelihood.with_parameters(self.unconstrained.detach()), 0.0
        count = 0.0
        device = self.minibatches.device
        with torch.no_grad():
            outputs_of = self.evaluation()
            for inputs, y in self.held_out.batches(4096):
                count += float(split_targets(y, has_weights(likelihood, y)).counts.sum())
                if n_rows(y) == 0:
                    continue
                inputs, y = to_device(inputs, device), to_device(y, device)
                for outputs in outputs_of(inputs):
                    total += float(likelihood.log_prob(outputs, y).double().sum())
        if self.shared is not None and self.held_out.division is not None:
            sums = torch.tensor([total, count], dtype=torch.float64)
            total, count = self.shared.processes.add(sums).tolist()
        return [total / (count * self.evaluations)]

    def learned_likelihood(self) -> Likelihood:
        """The likelihood with its learned parameters, as plain numbers."""
        return self.likelihood.with_parameters(self.unconstrained.detach()).detach()


class TrainableNetwork(SingleTrainable):
    """One module, trained with its own training mode, dropout and BatchNorm.

    Args:
        only_selected: train only the selected weights, for weight averaging.
        watched: a function of the caller is given the module, and may change it. Other arguments
            are those of `SingleTrainable`.

    Attributes:
        trainable: parameters of the module.
        copies: what optimisers step in their place.
        others: what is trained besides parameters of the module.
    """

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
        only_selected: bool = False,
        watched: bool = False,
    ) -> None:
        super().__init__(minibatches, training, held_out, likelihood_parameters)
        network = self.network
        if only_selected:
            self.rate_argument = "swa_learning_rate"
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.trainable = {n: p for n, p in named.items() if not only_selected or n in network.names}
        for name, parameter in named.items():
            parameter.requires_grad_(name in self.trainable)
        masks = network.masks if only_selected else {}
        self.partial = {n: (mask, named[n].detach().clone()) for n, mask in masks.items()}
        self.copies = FloatCopies(self.trainable)
        self.others = [self.unconstrained] if self.unconstrained.numel() else []
        decay = training.weight_decay_for(minibatches.n)
        self.optimizers = [make_optimizer(self.copies.by_name, self.unconstrained, training, decay)]
        self.gradients: Gradients | None = None
        self.watched = watched
        if not watched:
            epochs = training.epochs
            self.gradients = traced_gradients(self._loss_at, minibatches, self.module, epochs)

    def free_memory(self) -> None:
        """Free the traced steps, which refer to this object."""
        self.gradients = None

    def _loss_at(self, unknown: Sequence[Tensor], inputs: Inputs, y: Targets) -> Tensor:
        """The loss at trained parameters and those of the likelihood."""
        weights, own = unknown[: len(self.trainable)], unknown[len(self.trainable) :]
        values = dict(zip(self.trainable, weights, strict=True))
        return self.loss(self.network.call(self.module, inputs, values), y, *own)

    @override
    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        loss = self._gradients_of(inputs, y)
        if self.shared is not None:
            loss = self.shared.mean([*self.trainable.values(), *self.others], loss, n_rows(y))
        self.update()
        return loss.detach()

    def _gradients_of(self, inputs: Inputs, y: Targets) -> Tensor:
        """Set the gradients of a batch, and return its loss."""
        if n_rows(y) == 0:  # only other processes have rows
            self.clear_gradients()
            return self.unconstrained.new_zeros(())
        if self.gradients is None:
            loss = self.loss(self.network.call(self.module, inputs), y)
            self.clear_gradients()
            loss.backward()
        else:
            parameters = [*self.trainable.values(), *self.others]
            slopes, loss = self.gradients([p.detach() for p in parameters], inputs, y)
            set_gradients(parameters, slopes)
        return loss

    def end_epoch(self, number: int, losses: list[Any], rows: list[int]) -> list[dict[str, float]]:
        """The metrics of an epoch; after the first one all processes compare their modules."""
        metrics = super().end_epoch(number, losses, rows)
        if number == 0:
            self.check_shared()
        return metrics

    def check_shared(self) -> None:
        """Check that processes that train together have the same module."""
        if self.shared is not None:
            parameters = dict(self.module.named_parameters())
            parameters = {f"module.{name}": value for name, value in parameters.items()}
            parameters |= self.copies.by_name | {"likelihood": self.unconstrained}
            self.shared.check_same(parameters, dict(self.module.named_buffers()))

    def clear_gradients(self) -> None:
        """Clear the gradients of the last step."""
        for parameter in (*self.trainable.values(), *self.copies.by_name.values(), *self.others):
            parameter.grad = None

    @torch.no_grad()
    def update(self) -> None:
        """Clip the gradients of all parameters, and make a step of the optimisers."""
        own = self.copies.by_name
        self.copies.receive(changed=self.watched)
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_([*own.values(), *self.others], self.training.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        for name, (mask, before) in self.partial.items():  # entries that are not weights
            own[name].copy_(torch.where(mask, own[name], before))
        self.copies.round()

    def evaluation(self) -> Callable[[Inputs], Iterable[Tensor]]:
        """A function that returns the outputs of the module."""
        return lambda inputs: [self.network.call(self.module, inputs)]

    @override
    def evaluate(self) -> list[float] | None:
        self.module.eval()
        scores = super().evaluate()
        self.set_training_mode()
        return scores

    def weights(self) -> Tensor:
        """The selected weights."""
        return self.network.flatten(self.copies.by_name)

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of the trained parameters, the buffers and the likelihood's parameters."""
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in named if not p.requires_grad}
        state = self.module.state_dict()
        module = {n: t.detach().clone() for n, t in state.items() if n not in frozen}
        buffers = {n: b.detach().clone() for n, b in self.module.named_buffers() if n not in state}
        return {
            "module": module,
            "other buffers": buffers,
            "copies": self.copies.state(),
            "likelihood": self.unconstrained.detach().clone(),
        }

    @torch.no_grad()
    @override
    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        state = states[0]
        self.module.load_state_dict(state["module"], strict=False)  # frozen ones are as before
        for name, buffer in self.module.named_buffers():
            if name in state["other buffers"]:
                buffer.copy_(state["other buffers"][name])
        self.copies.restore(state["copies"])
        self.unconstrained.copy_(state["likelihood"])

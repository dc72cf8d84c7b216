"""Training of sparse networks, and its checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.files import as_path
from subbayes.artifacts.folder import write
from subbayes.artifacts.saving import fail_checkpoint, read_checkpoint
from subbayes.artifacts.tensors import add_prefix, fingerprint, strip_prefix
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.networks.identity.architecture import architecture_of
from subbayes.networks.layer_kinds import BATCH_NORMS, frozen_in_evaluation, set_training_mode
from subbayes.networks.network import Network
from subbayes.networks.validation import FirstOutputs
from subbayes.sparse.configuration import LearningRates, SparseTraining, parameters_by_kind
from subbayes.sparse.convert import kl, sparse_layers
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.result import SparseNetwork, revert
from subbayes.sparse.steps import Steps
from subbayes.sparse.variational_families import Noise
from subbayes.training.loop import Diverged, History, Trainable, log_scale, run
from subbayes.training.minibatches import Minibatches
from subbayes.training.unfinished import has_converged, warn_of_unfinished
from subbayes.utils.checks import fail, is_finite
from subbayes.utils.seeding import derive_seed, fork_rng
from subbayes.utils.trees import n_rows, named_leaves, tree_map
from subbayes.utils.types import Batch, Inputs, OutputFunction, Outputs, Targets
from subbayes.utils.warning import warn_user


class Objective(nn.Module):
    """The objective of a step as a module, so that it is a function of its parameters.

    Args:
        run: whose network is trained.

    Attributes:
        measures_accuracy: whether correct predictions are counted.
    """

    weight: Tensor

    def __init__(self, run: TrainableSparseNetwork) -> None:
        super().__init__()
        self.module, self.unconstrained = run.module, run.unconstrained
        weight = torch.ones((), device=run.unconstrained.device)
        self.register_buffer("weight", weight)  # of the divergence
        self.run = (run,)  # in a tuple, so that it is not registered as a submodule
        likelihood = run.likelihood
        self.measures_accuracy = likelihood.kind == "classification" and not likelihood.per_position

    def forward(self, inputs: Inputs, y: Targets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss per row, the two parts of the ELBO, and the number of correct predictions.

        A correct prediction of a row with a weight counts as often as the weight says.
        """
        (run,) = self.run
        with SparseLayer.used_once(run.layers, n_rows(inputs)):
            outputs = run.network.call(self.module, inputs)
        terms = run.batch_likelihood.with_parameters(self.unconstrained).log_prob(outputs, y)
        divergence = kl(self.module)
        expected = terms.sum() * (run.minibatches.n / len(terms))
        if self.measures_accuracy:
            correct = _count_correct(run.batch_likelihood, outputs.detach(), y)
        else:
            correct = torch.zeros((), device=outputs.device)
        loss = (self.weight * divergence - expected) / run.minibatches.n
        return loss, expected.detach(), divergence.detach(), correct


def _count_correct(likelihood: Likelihood, outputs: Outputs, y: Targets) -> Float[Tensor, ""]:
    """The number of rows whose most likely class is theirs, or the sum of their weights."""
    parts = split_targets(y, has_weights(likelihood, y))
    p = likelihood.mean(outputs)
    chosen = p.argmax(-1) if p.shape[-1] > 1 else (p[..., 0] > 0.5).long()
    hits = (chosen == parts.values.reshape(chosen.shape)).float()
    return (hits if parts.weights is None else hits * parts.weights).sum()


def count_rows(likelihood: Likelihood, y: Targets) -> Float[Tensor, ""]:
    """As how many rows a batch counts: the sum of its weights if there are any.

    Example:
        >>> from subbayes.likelihoods import Categorical, Weighted
        >>> y = torch.tensor([0, 1, 1])
        >>> count_rows(Categorical(2), y)
        tensor(3.)
        >>> count_rows(Weighted(Categorical(2)), (y, torch.tensor([1.0, 0.0, 4.0])))
        tensor(5.)
    """
    parts = split_targets(y, has_weights(likelihood, y))
    if parts.weights is None:
        return torch.full((), float(n_rows(y)), device=parts.values.device, dtype=torch.float32)
    return parts.weights.float().sum()


KIND = "sparse-training-checkpoint"
_SECONDS = 1.0  # between two checkpoints, at least
_DRAWS_OF_NOISE = 10  # of the network, with which the learned noise is compared


def fit(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: SparseTraining = SparseTraining(),
    *,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    callback: Callable[[int, SparseNetwork], Any] | None = None,
    output: OutputFunction | None = None,
) -> SparseNetwork:
    """Train a converted module by stochastic variational inference.

    Args:
        module: what `convert` returned; not changed.
        likelihood: p(y | f), or its name as for `fit`; its parameters are learned as well.
        data: as for `subbayes.training.train`: a pair of tensors, a Dataset or a loader.
        training: epochs, learning rates and the other settings.
        seed: of shuffling, dropout and the random numbers of the layers.
        checkpoint: a folder to save to after epochs, at most once a second, and at the end. A run
            that finds a checkpoint resumes from it, and its result is that of an uninterrupted
            run, bit for bit (for data in memory). Changes of the module's code and of `output` are
            recognised by the outputs of the first rows in memory. A run that its callback has
            stopped is not continued, unless there is no callback.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, current network) after each epoch; training stops if it
            returns True.
        output: picks the tensor out of what the module returns, as for `Network`.

    Returns:
        The trained network. If the ELBO becomes NaN, training ends with a warning that names the
        layer, and the network is that of the last good epoch.

    Raises:
        InputError: a module without sparse layers, a layer called twice, a checkpoint of another
            run, or data that do not match the likelihood.

    Warns:
        sklearn.exceptions.ConvergenceWarning: learned parameters of the likelihood that have not
            converged.

    Source: Hubin and Storvik (2024), algorithm 1 and section 4.1.

    Example:
        >>> from subbayes import sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(60, 3), torch.randn(60)
        >>> net = sparse.convert(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
        >>> training = sparse.SparseTraining(epochs=2)
        >>> result = sparse.fit(net, Gaussian(), data, training, progress=False)
        >>> result.predict(data[0], n_draws=5).n_draws
        5
    """
    likelihood = as_likelihood(likelihood)
    if not sparse_layers(module):
        fail("module", "a module that convert() has made", "one without sparse layers")
    task = TrainableSparseNetwork(module, likelihood, data, training, seed, output)
    saved = None if checkpoint is None else _Checkpoint(checkpoint, task)
    with saved or nullcontext():
        (history,), _ = run(
            task,
            sum(training.phases.values()),
            "Training the sparse network",
            after_epoch=None
            if callback is None
            else lambda epoch, found: callback(epoch, task.result(found[0])),
            checkpoint=saved,
            progress=progress,
        )
    result = task.result(history)
    _warn_of_empty_layers(result)
    warn_of_unfinished([task.has_converged(result)])
    return result


def _warn_of_empty_layers(result: SparseNetwork) -> None:
    empty = [
        name
        for name, layer in result.layers.items()
        if layer.excludes_weights and not bool(layer.included().any())
    ]
    if empty:
        warn_user(
            f"The median model excludes every weight of layer{'s' * (len(empty) > 1)} "
            f"{', '.join(map(repr, empty))}, whose outputs do not depend on the inputs: "
            "the data do not support them, or training was too short. Try more epochs, a higher "
            "learning rate, or a higher prior inclusion probability"
        )


class TrainableSparseNetwork(Trainable):
    """A converted module and everything that changes in its training; arguments as for `fit`."""

    displayed = ("elbo", "density", "accuracy")
    recovers = True

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        data: Any,
        training: SparseTraining,
        seed: int = 0,
        output: OutputFunction | None = None,
    ) -> None:
        self.frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        self.module = copy.deepcopy(module)
        set_training_mode(self.module, frozen_in_evaluation(module))
        self.frozen_ids = {id(p) for p in self.module.parameters() if not p.requires_grad}
        self.layers = sparse_layers(self.module)
        self.network = Network(revert(self.module), output=output)
        self.likelihood, self.batch_likelihood = likelihood, likelihood.of_standardized
        self.likelihoods, self.settings, self.seed = [likelihood], training, seed
        self.minibatches = Minibatches(data, likelihood, self.network, training.batch_size, seed)
        self._freeze_batchnorm()
        self.rates = training.learning_rates or LearningRates.for_steps(
            training.epochs * self.minibatches.n_batches
        )
        noise = Noise(derive_seed(seed, 2))
        for layer in self.layers.values():
            layer.noise = noise
        self.unconstrained = nn.Parameter(self.minibatches.initial_parameters.clone())
        self.groups = parameters_by_kind(self.module) | (
            {"likelihood": [self.unconstrained]} if self.unconstrained.numel() else {}
        )
        self.optimizer = torch.optim.Adam(
            [{"params": params, "lr": 0.0} for params in self.groups.values()],
            fused=self.unconstrained.device.type in ("cpu", "cuda"),
        )
        self.objective = Objective(self)
        self.phase, self.number, self.rows = "", 0, 0

    def _freeze_batchnorm(self) -> None:
        """Use stored BatchNorm statistics if all rows of a batch share their indicators.

        Statistics of the batch would undo the indicators by scaling nearly excluded units up again.
        Statistics that were never updated are collected with the given weights first.
        """
        if not any(
            layer.structure == "units" or layer.settings.estimator == "relaxed"
            for layer in self.layers.values()
        ):
            return
        norms = {
            name: own
            for name, own in self.module.named_modules()
            if isinstance(own, BATCH_NORMS) and own.track_running_stats
        }
        unseen = [name for name, norm in norms.items() if norm.num_batches_tracked == 0]
        if unseen:
            seen = self.network.refresh_batchnorm(
                self.network.weights, self.minibatches.for_statistics()
            )
            known = dict(seen.module_with().named_buffers())
            for name, buffer in self.module.named_buffers():
                if name.rpartition(".")[0] in unseen:
                    buffer.copy_(known[name])
        for norm in norms.values():
            norm.eval()

    def begin_epoch(self, number: int) -> None:
        """At the beginning of a phase, set its trained parameters and learning rates."""
        self.number, self.rows = number, 0
        phase = self._phase_of(number)
        if phase != self.phase:
            self._begin_phase(phase)

    def _phase_of(self, number: int) -> str:
        """The phase of an epoch."""
        of_epochs = [phase for phase, count in self.settings.phases.items() for _ in range(count)]
        return of_epochs[number]

    def phases_of_layers(self, number: int) -> dict[str, str]:
        """The phase of each layer in an epoch."""
        phase = self._phase_of(number)
        return dict.fromkeys(self.layers, phase if phase in ("fixed", "median") else "learned")

    def _begin_phase(self, phase: str) -> None:
        self.phase = phase
        early, structure = phase == "early", phase in ("early", "main")
        is_learned = {
            "weights": True,
            "likelihood": True,
            "inclusion": structure,
            "covariance": structure,
            "scales": structure,
            "inclusion_prior": early,
            "slab": early,
        }
        for (name, params), group in zip(
            self.groups.items(), self.optimizer.param_groups, strict=True
        ):
            group["lr"] = self.rates.of(name, early)
            for parameter in params:  # the user may have frozen some
                parameter.requires_grad_(is_learned[name] and id(parameter) not in self.frozen_ids)
        self._set_phases(self.phases_of_layers(self.number))
        self.optimizer.zero_grad(set_to_none=True)  # Adam skips parameters without gradients
        self.steps = Steps(
            self.objective,
            self.layers,
            self.settings.mode,
            lambda rows: self.settings.phases[phase] * self.minibatches.n_batches_of(rows),
        )

    def _set_phases(self, phases: Mapping[str, str]) -> None:
        for name, layer in self.layers.items():
            layer.phase = phases[name]

    def epoch(
        self, number: int, after_step: Callable[[], None] | None = None
    ) -> list[dict[str, float]]:
        """Make one pass over the data, with a seed that depends on the epoch."""
        with (
            fork_rng(derive_seed(self.seed, 3, number), self.minibatches.device),
            torch.enable_grad(),
        ):
            return super().epoch(number, after_step)

    @override
    def batches(self) -> Iterator[Batch]:
        return self.minibatches.shuffled()

    def step(self, inputs: Inputs, y: Targets) -> tuple[float, float, float, float]:
        """Make one step; returns both parts of the ELBO, the correct rows and all rows.

        The ELBO is in the units of y, in which each log density is lower by the log of its scale.
        """
        self.rows += n_rows(y)
        warmup, done = self.settings.kl_warmup_epochs, self.number + self.rows / self.minibatches.n
        self.objective.weight.fill_(min(1.0, done / warmup) if warmup else 1.0)
        _, expected, divergence, correct = self.steps(inputs, y)
        self.optimizer.step()
        counted = count_rows(self.likelihood, y)
        # at once, since a device is waited for
        values = torch.stack([expected, divergence, correct, counted]).tolist()
        expected, divergence, correct, counted = values
        if not math.isfinite(expected - divergence):
            raise Diverged(f"The ELBO became NaN ({self._non_finite_part()})")
        densities = counted * self.minibatches.n / n_rows(y)  # in the expected log-likelihood
        return expected - densities * log_scale(self.likelihood), divergence, correct, counted

    def end_epoch(self, number: int, losses: list[Any], rows: list[int]) -> list[dict[str, float]]:
        """Mean ELBO and divergence over the steps, density, and accuracy for classes."""
        if broken := self._non_finite_part(""):
            raise Diverged(f"A parameter became NaN ({broken})")
        metrics = {
            "elbo": sum(expected - divergence for expected, divergence, *_ in losses) / len(losses),
            "kl": sum(divergence for _, divergence, *_ in losses) / len(losses),
            "density": SparseNetwork.density_of(self.layers),
        }
        if self.objective.measures_accuracy:
            counted = sum(counted for *_, counted in losses)
            metrics["accuracy"] = sum(correct for *_, correct, _ in losses) / counted
        return [metrics]

    def _non_finite_part(self, default: str = "the likelihood") -> str:
        """The first layer or parameter with NaN or infinite values."""
        bad = {name: p for name, p in self.module.named_parameters() if not is_finite(p)}
        for name, layer in self.layers.items():
            if any(p is own for p in bad.values() for own in layer.parameters()):
                return f"layer {name!r}"
        return f"parameter {next(iter(bad))!r}" if bad else default

    # --- states and results -----------------------------------------------------------------

    def fingerprint(self) -> str:
        """A digest of the module, the likelihood and, if in memory, the data."""
        tensors = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        memory = self.minibatches.memory
        if memory is not None and memory.inputs is not None:
            parts = {"x": memory.inputs, "y": memory.targets()}
            tensors |= {
                f"{kind}.{name}": value
                for kind, part in parts.items()
                for name, value in named_leaves(part).items()
            }
        return fingerprint(
            tensors,
            {
                "module": architecture_of(self.module),
                "rows": self.minibatches.n,
                "likelihood": self.likelihood.to_config(),
            },
        )

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of everything that the next epoch depends on."""
        return tree_map(
            lambda v: v.detach().clone(),
            {
                "module": dict(self.module.state_dict()),
                "likelihood": self.unconstrained,
                "optimizer": self.optimizer.state_dict(),
                "phases": {name: layer.phase for name, layer in self.layers.items()},
                **{name: generator.get_state() for name, generator in self.generators.items()},
            },
        )

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """The random generators of the order of rows and of the noise."""
        noise = next(iter(self.layers.values())).noise
        return {"order": self.minibatches.generator, "noise": noise.generator}

    def has_converged(self, result: SparseNetwork) -> bool:
        """Whether the likelihood's parameters suit the residuals of draws of the weights."""
        history, n = result.history, self.minibatches.n
        bounds = zip(history.get("elbo", ()), history.get("kl", ()), strict=True)
        losses = [-(elbo + divergence) / n for elbo, divergence in bounds]

        def draw_outputs(inputs: Inputs) -> Outputs:
            return result.predict(inputs, n_draws=_DRAWS_OF_NOISE).outputs

        learned = self.unconstrained.detach()
        return has_converged(self.network, self.minibatches, learned, losses, draw_outputs)

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore a state; the next epoch begins its phase again."""
        (state,) = states
        self.phase = ""
        self._set_phases(state["phases"])
        self.module.load_state_dict(state["module"])
        self.unconstrained.data.copy_(state["likelihood"])
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                if name != "step":  # a fused step reads both in the order of their memory
                    moments[name] = torch.empty_like(parameter).copy_(moment)
        for name, generator in self.generators.items():
            generator.set_state(state[name])

    def result(self, history: History) -> SparseNetwork:
        """The current network."""
        module = copy.deepcopy(self.module).eval()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return SparseNetwork(
            module,
            self.likelihood.with_parameters(self.unconstrained.detach()).detach().unweighted,
            {name: list(values) for name, values in history.items()},
            self.network.output,
        )


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class _Checkpoint:
    """A folder with the state after an epoch, written at most once a second and at the end."""

    def __init__(self, path: str | Path, task: TrainableSparseNetwork) -> None:
        self.path = as_path(path)
        settings = asdict(task.settings) | {"rates": asdict(task.rates)}
        settings |= {"seed": task.seed, "run": task.fingerprint()}
        self.identity = decode(encode(settings))  # as read from a file
        self.rounding = task.network.rounding
        self.outputs: FirstOutputs | None = None
        if (rows := task.minibatches.memory) is not None:  # a loader may have other first rows
            self.outputs = FirstOutputs.of(task.network, task.network.weights, rows)
        self.unsaved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self.written = -math.inf

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def read(self, task: Trainable) -> tuple[int, History, bool]:
        """Restore a saved state, if any.

        Returns:
            The number of finished epochs, the history, and whether training stopped there.
        """
        found = read_checkpoint(self.path, KIND)
        if found is None:
            return 0, {}, False
        tensors, facts, _ = found
        if facts["identity"] != self.identity:
            expected = "a checkpoint of a run with these settings"
            fail_checkpoint(expected, f"another at '{self.path}'")
        if "first_outputs" in tensors and self.outputs is not None:
            saved = FirstOutputs(tensors.pop("first_outputs"), facts["device"])
            if not saved.agrees_with(self.outputs, self.rounding):
                expected = "one of a module and output= that return the same outputs"
                fail_checkpoint(expected, f"others at the same weights at '{self.path}'")
        assert isinstance(task, TrainableSparseNetwork)
        finished = int(facts["finished"])
        state: dict[str, Any] = {name: tensors[name] for name in ("likelihood", *task.generators)}
        state["module"] = strip_prefix("module", tensors)
        state["phases"] = task.phases_of_layers(finished - 1)
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in strip_prefix("optimizer", tensors).items():
            place, _, kind = name.partition(".")
            moments.setdefault(int(place), {})[kind] = tensor
        state["optimizer"] = task.optimizer.state_dict() | {"state": moments}
        task.restore([state])
        return finished, facts["history"], facts.get("stopped", False)

    def write(
        self, state: dict[str, Any], history: History, finished: int, stopped: bool = False
    ) -> None:
        """Save the state after an epoch, and whether training has stopped there."""
        tensors = add_prefix("module", state["module"])
        for i, values in state["optimizer"]["state"].items():
            tensors |= {f"optimizer.{i}.{name}": values[name] for name in _MOMENTS}
        tensors |= {name: state[name] for name in ("likelihood", "order", "noise")}
        facts = {
            "identity": self.identity,
            "finished": finished,
            "history": {name: list(values) for name, values in history.items()},
            "stopped": stopped,
        }
        if self.outputs is not None:
            tensors["first_outputs"] = self.outputs.values
            facts["device"] = self.outputs.device
        self.unsaved = tensors, facts
        if time.monotonic() - self.written >= _SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self.unsaved is not None:
            write(self.path, KIND, *self.unsaved, overwrite=True)
            self.written = time.monotonic()
        self.unsaved = None

"""Training of sparse networks in three phases, and what comes out of it.

First the hyper-parameters of the priors are learned along (empirical Bayes), while the weight of
the divergence rises from 0 to 1, then networks and inclusion alone, and, if asked for, the weights
alone with the structure standing still (Hubin and Storvik 2024, sections 3.4.5 and 4.1; the rising
weight is ours).
"""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.data.data import n_rows, named_leaves
from subbayes.likelihoods import Likelihood
from subbayes.networks.layer_kinds import BATCH_NORMS
from subbayes.networks.network import Network, architecture_of
from subbayes.networks.tracing.tracer import MODES, Mode
from subbayes.sparse.convert import kl, sparse_layers
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.learning_rates import Rates, by_rate
from subbayes.sparse.result import SparseNetwork, plain
from subbayes.sparse.steps import Steps
from subbayes.sparse.variational_families import Noise
from subbayes.training.minibatches import Feed, inner
from subbayes.training.optimizer import Adam
from subbayes.training.trainer import History
from subbayes.utils.artifact import fingerprint
from subbayes.utils.checks import check_choice, check_count, fail, fail_type, is_finite
from subbayes.utils.files import as_path, atomic_write_bytes
from subbayes.utils.progress import bar
from subbayes.utils.seeding import derive, forked
from subbayes.utils.trees import tree_map
from subbayes.utils.types import Inputs, Targets

__all__ = ["fit"]

POST = ("none", "fixed", "median")
_EARLY, _RISING = 0.8, 0.4  # of the epochs
_EVERY = 1.0  # seconds between two checkpoints, at least


def fit(
    module: nn.Module,
    likelihood: Likelihood,
    data: Any,
    *,
    epochs: int = 250,
    early_epochs: int | None = None,
    kl_epochs: int | None = None,
    post: str = "none",
    post_epochs: int = 50,
    rates: Rates | None = None,
    batch_size: int | None = 100,
    seed: int = 0,
    mode: Mode = "trace",
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    callback: Callable[[int, SparseNetwork], Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> SparseNetwork:
    """Train a converted module by stochastic variational inference.

    Args:
        module: what `convert` returned; not changed.
        likelihood: p(y | f); parameters of it are learned along.
        data: as for `subbayes.training.train`: a pair of tensors, a Dataset or a loader.
        epochs: passes over the data with indicators that are learned, the early ones included.
        early_epochs: of these, in which the hyper-parameters of the priors are learned too; by
            default four in five.
        kl_epochs: of these, in which the weight of the divergence rises from 0 to 1, so that the
            network learns before weights go; by default two in five, but not more than
            `early_epochs` unless that is 0: priors learned before the divergence counts are those
            of a network in which everything is in.
        post: "none"; "fixed" trains the weights on with inclusion probabilities as they are;
            "median" those of the median model alone.
        post_epochs: passes of that.
        rates: learning rates; by default `Rates.paced` for the number of steps.
        batch_size: rows per step.
        seed: of shuffling, dropout and the layers' draws.
        mode: "trace" replays a step that was traced once; "compile" compiles it, which takes 10 to
            30 s a phase and halves the time of a large network's step; "eager" does neither. Few
            steps are taken eagerly, as are those of modules with dropout or batch normalisation.
        checkpoint: a file to save to after epochs, once a second at most, and at the end; a run
            that finds it there goes on from it and ends as an uninterrupted one, bit for bit (for
            data in memory).
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, the network as it is) after each epoch; training stops if
            it returns True.
        output: picks the tensor out of what the module returns, as for `Network`.

    Returns:
        The trained network. Where the ELBO stops being a number, training ends with a warning
        that names the layer, and the network is that of the last good epoch.

    Raises:
        InputError: a module without sparse layers, a layer used twice, a checkpoint of another
            run, or data and likelihood that do not fit.

    Source: Hubin and Storvik (2024), algorithm 1 and section 4.1.

    Example:
        >>> from subbayes import sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(60, 3), torch.randn(60)
        >>> net = sparse.convert(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
        >>> result = sparse.fit(net, Gaussian(), data, epochs=2, progress=False)
        >>> result.predict(data[0], draws=5).n_draws
        5
    """
    if not isinstance(likelihood, Likelihood):
        fail_type("likelihood", "a likelihood, such as Gaussian() or Categorical(3)", likelihood)
    if not (rates is None or isinstance(rates, Rates)):
        fail_type("rates", "Rates, such as Rates(weights=0.01)", rates)
    check_choice("post", post, POST)
    check_choice("mode", mode, MODES)
    if not sparse_layers(module):
        fail("module", "a module that convert() has made", "one without sparse layers")
    if callback is not None and not callable(callback):
        fail_type("callback", "a function of (epoch, network)", callback)
    epochs = check_count("epochs", epochs)
    early = _of(epochs, "early_epochs", early_epochs, _EARLY)
    rising = _of(epochs, "kl_epochs", kl_epochs, _RISING)
    if kl_epochs is None and early > 0:
        rising = min(rising, early)
    last = 0 if post == "none" else check_count("post_epochs", post_epochs)
    run = _Run(module, likelihood, data, rates, epochs, batch_size, seed, mode, output)
    saved = _Checkpoint(
        checkpoint,
        {
            "epochs": (early, epochs, last),
            "kl_epochs": rising,
            "post": post,
            "rates": asdict(run.rates),
            "batch_size": batch_size,
            "seed": seed,
            "mode": mode,
            "run": "" if checkpoint is None else run.fingerprint(),
        },
    )
    history: History = {}
    first = saved.read(run, history)
    total = epochs + last

    def enter(number: int) -> None:
        phase = "early" if number < early else "main" if number < epochs else post
        run.enter(phase, {"early": early, "main": epochs - early}.get(phase, last))

    enter(min(first, total - 1))
    with bar(total, "Training the sparse network", progress, "epochs") as steps, saved:
        steps.update(first)
        good = run.state()
        for number in range(first, total):
            enter(number)
            facts, broken = run.epoch(number, rising)
            if broken:
                run.restore(good)
                warnings.warn(
                    f"The ELBO is no number in epoch {number + 1}, by {broken}: training "
                    "ends with the network of the epoch before. Lower the rates, or "
                    "standardise the inputs",
                    stacklevel=2,
                )
                break
            good = run.state()
            for name, fact in facts.items():
                history.setdefault(name, []).append(fact)
            steps.set_postfix(_shown(facts), refresh=False)
            steps.update(1)
            saved.write(good, history, number + 1)
            if callback and callback(number + 1, run.result(history)) is True:
                break
    result = run.result(history)
    _warn_if_empty(result)
    return result


def _warn_if_empty(result: SparseNetwork) -> None:
    empty = [
        name
        for name, layer in result.layers.items()
        if layer.drops and not bool(layer.inside().any())
    ]
    if empty:
        warnings.warn(
            f"The median model has nothing in in layer{'s' * (len(empty) > 1)} "
            f"{', '.join(map(repr, empty))}, whose outputs do not depend on the inputs: "
            "the data say nothing of them, or training was too short or too slow. Try "
            "more epochs, a higher learning rate, or a higher prior inclusion",
            stacklevel=3,
        )


def _of(epochs: int, name: str, count: int | None, share: float) -> int:
    """So many of the epochs; by default a share."""
    if count is None:
        return round(share * epochs)
    if check_count(name, count, 0) > epochs:
        fail(name, f"at most the number of epochs, {epochs}", count)
    return int(count)


def _shown(facts: dict[str, float]) -> dict[str, str]:
    return {name: f"{facts[name]:.4g}" for name in ("elbo", "density", "accuracy") if name in facts}


class _Run:
    """A converted module in training."""

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood,
        data: Any,
        rates: Rates | None,
        epochs: int,
        batch_size: int | None,
        seed: int,
        mode: Mode,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        self.module = _in_training(copy.deepcopy(module))
        self.still = {id(p) for p in self.module.parameters() if not p.requires_grad}
        self.layers = sparse_layers(self.module)
        self.network = Network(plain(self.module), output=output)
        self.likelihood, self.inner = likelihood, inner(likelihood)
        self.seed, self.mode = seed, mode
        self.feed = Feed(data, likelihood, self.network, batch_size, seed)
        self._rest_norms()
        self.rates = rates or Rates.paced(epochs * self.feed.steps)
        if absent := self.feed.absent:
            warnings.warn(
                f"data: no row of class{'es' * (len(absent) > 1)} "
                f"{', '.join(map(str, absent))}, for which the network has an output: "
                "what it says of them is its prior's. Add such rows, or leave the "
                "output out",
                stacklevel=3,
            )
        noise = Noise(derive(seed, 2))
        for layer in self.layers.values():
            layer.noise = noise
        self.raw = nn.Parameter(self.feed.raw.clone())
        self.groups = by_rate(self.module) | (
            {"likelihood": [self.raw]} if self.raw.numel() else {}
        )
        self.optimizer = Adam([{"params": params, "lr": 0.0} for params in self.groups.values()])
        self.objective = _Objective(self)
        self.phase = ""

    def _rest_norms(self) -> None:
        """Have batch norms use their stored statistics where a batch shares its indicators.

        Those of the batch would undo what indicators do: units that are nearly out would be scaled
        up again. Statistics that nothing has been seen for are those of the module as it came.
        """
        if not any(
            layer.structure == "units" or layer.estimator == "relaxed"
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
            seen = self.network.refresh_batchnorm(self.network.weights, self.feed.in_order())
            known = dict(seen.module_with().named_buffers())
            for name, buffer in self.module.named_buffers():
                if name.rpartition(".")[0] in unseen:
                    buffer.copy_(known[name])
        for norm in norms.values():
            norm.eval()

    def enter(self, phase: str, epochs: int) -> None:
        """Set what moves, and how fast, in a phase of so many epochs."""
        if phase == self.phase:
            return
        self.phase = phase
        early, learns = phase == "early", phase in ("early", "main")
        moves = {
            "weights": True,
            "likelihood": True,
            "inclusion": learns,
            "covariance": learns,
            "scales": learns,
            "inclusion_prior": early,
            "slab": early,
        }
        for (name, params), group in zip(
            self.groups.items(), self.optimizer.param_groups, strict=True
        ):
            group["lr"] = self.rates.of(name, early)
            for parameter in params:  # not those that stand still by their user's will
                parameter.requires_grad_(moves[name] and id(parameter) not in self.still)
        for layer in self.layers.values():
            layer.phase = phase if phase in ("fixed", "median") else "learned"
        self.optimizer.zero_grad(set_to_none=True)  # what stands still now is left alone
        self.steps = Steps(
            self.objective, self.layers, self.mode, lambda rows: epochs * self.feed.batches_of(rows)
        )

    def epoch(self, number: int, rising: int) -> tuple[dict[str, float], str]:
        """One pass: what goes into the history, and the layer that broke, if one did.

        Args:
            number: of passes before.
            rising: passes in which the weight of the divergence rises.
        """
        sums = {"elbo": 0.0, "kl": 0.0, "right": 0.0}
        rows = steps = 0
        with forked(derive(self.seed, 3, number), self.feed.device), torch.enable_grad():
            for inputs, y in self.feed.epoch():
                done = number + (rows + n_rows(y)) / self.feed.n
                self.objective.weight.fill_(min(1.0, done / rising) if rising else 1.0)
                fit_terms, divergence, right, n = self._step(inputs, y)
                sums["elbo"] += fit_terms - divergence
                sums["kl"] += divergence
                sums["right"] += right
                rows, steps = rows + n, steps + 1
                if not math.isfinite(fit_terms - divergence):
                    return {}, self._broken()
        if broken := self._broken(None):
            return {}, broken
        facts = {
            "elbo": sums["elbo"] / steps,
            "kl": sums["kl"] / steps,
            "density": SparseNetwork.density_of(self.layers),
        }
        if self.likelihood.kind == "classification":
            facts["accuracy"] = sums["right"] / rows
        return facts, ""

    def _step(self, inputs: Inputs, y: Targets) -> tuple[float, float, float, int]:
        _, fitted, divergence, right = self.steps(inputs, y)
        self.optimizer.step()
        return float(fitted), float(divergence), float(right), n_rows(y)

    def _broken(self, default: str | None = "the likelihood") -> str:
        """The first layer with parameters that are no numbers."""
        odd = {name: p for name, p in self.module.named_parameters() if not is_finite(p)}
        for name, layer in self.layers.items():
            if any(p is own for p in odd.values() for own in layer.parameters()):
                return f"layer {name!r}"
        return f"parameter {next(iter(odd))!r}" if odd else default or ""

    # --- copies -----------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """A digest of what is trained, from where, and on which rows, where these are in memory."""
        tensors = {f"module.{name}": value for name, value in self.module.state_dict().items()}
        memory = self.feed.memory
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
                "rows": self.feed.n,
                "likelihood": self.likelihood.to_config(),
            },
        )

    def state(self) -> dict[str, Any]:
        """All that the next epoch depends on."""
        noise = next(iter(self.layers.values())).noise
        return tree_map(
            lambda v: v.detach().clone(),
            {
                "module": dict(self.module.state_dict()),
                "raw": self.raw,
                "optimizer": self.optimizer.state_dict(),
                "order": self.feed.generator.get_state(),
                "noise": noise.generator.get_state(),
            },
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a copy."""
        self.module.load_state_dict(state["module"])
        self.raw.data.copy_(state["raw"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.feed.generator.set_state(state["order"])
        next(iter(self.layers.values())).noise.generator.set_state(state["noise"])

    def result(self, history: History) -> SparseNetwork:
        """The network as it is now."""
        module = copy.deepcopy(self.module).eval()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return SparseNetwork(
            module,
            self.likelihood.with_parameters(self.raw.detach()).frozen(),
            {name: list(values) for name, values in history.items()},
            self.network.output,
        )


def _in_training(module: nn.Module) -> nn.Module:
    """In training mode but for frozen modules that were not."""
    resting = [
        m
        for m in module.modules()
        if not m.training
        and any(True for _ in m.parameters())
        and not any(p.requires_grad for p in m.parameters())
    ]
    module.train()
    for frozen in resting:
        frozen.eval()
    return module


class _Objective(nn.Module):
    """What a step needs of a run, as a function of its parameters.

    Args:
        run: whose module is in training.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.module, self.raw = run.module, run.raw
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(()))  # of the divergence
        self.run = (run,)  # a tuple: no module's business

    def forward(self, inputs: Inputs, y: Targets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss per row, the two parts of the ELBO, and how many predictions are right."""
        (run,) = self.run
        with SparseLayer.used_once(run.layers, n_rows(inputs)):
            outputs = run.network.call(self.module, inputs)
        terms = run.inner.with_parameters(self.raw).log_prob(outputs, y)
        divergence = kl(self.module)
        fitted = terms.sum() * (run.feed.n / len(terms))
        right = torch.zeros(())
        if run.likelihood.kind == "classification" and isinstance(y, Tensor):
            p = run.inner.mean(outputs.detach())
            chosen = p.argmax(-1) if p.shape[-1] > 1 else (p[..., 0] > 0.5).long()
            right = (chosen == y.reshape(chosen.shape)).sum()
        loss = (self.weight * divergence - fitted) / run.feed.n
        return loss, fitted.detach(), divergence.detach(), right


class _Checkpoint:
    """A file with the state after an epoch; without a path, nothing.

    It is written once a second at most, and with the last state when the block is left.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self.path = None if path is None else as_path(path)
        self.settings = repr(settings)
        self.waiting: dict[str, Any] = {}
        self.written = -math.inf

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()

    def read(self, run: _Run, history: History) -> int:
        """Go on from a file that is there; the number of finished epochs."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            saved = torch.load(self.path, weights_only=True, map_location=run.feed.device)
            same = saved["settings"] == self.settings
        except Exception:
            fail(
                "checkpoint",
                "a checkpoint of sparse training",
                f"another file, or a damaged one: '{self.path}'",
                "Delete it to start again, or choose another path",
            )
        if not same:
            fail(
                "checkpoint",
                "a checkpoint of a run with these settings, made by this version",
                f"another at '{self.path}'",
                "Delete it to start again, or choose another path",
            )
        run.restore(saved["state"])
        history.update(saved["history"])
        return int(saved["finished"])

    def write(self, state: dict[str, Any], history: History, finished: int) -> None:
        """Save the state after an epoch, whole or not at all."""
        self.waiting = {
            "settings": self.settings,
            "state": state,
            "finished": finished,
            "history": {name: list(values) for name, values in history.items()},
        }
        if time.monotonic() - self.written >= _EVERY:
            self._flush()

    def _flush(self) -> None:
        if self.path is not None and self.waiting:
            file = io.BytesIO()
            torch.save(self.waiting, file)
            atomic_write_bytes(self.path, file.getvalue())
            self.written = time.monotonic()
        self.waiting = {}

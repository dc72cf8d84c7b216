"""A fitted model: what is random, how it was inferred, and predictions; saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.diagnostics import metrics
from subbayes.draws import Draws
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods import from_config as likelihood_from_config
from subbayes.networks.mlp import MLP
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.subspace import from_config as subspace_from_config
from subbayes.utils import artifact
from subbayes.utils.checks import fail

__all__ = ["FittedModel", "load", "network_from", "network_state", "part"]

KIND = "fitted-model"


@dataclass(frozen=True)
class FittedModel:
    """What `fit` returns: everything a prediction needs, and how it came about.

    Attributes:
        network: the network, centred on the subspace's shift.
        likelihood: p(y | f), parameters learned.
        subspace: where the weights may move.
        prior: p(z).
        temperature: T of the posterior.
        draws: draws of z, or None before sampling.
        posterior: the density; None for a model loaded without its data.
        history: numbers per epoch of the training phases.
        settings: what `fit` was asked for, as JSON-able values.
        extra: JSON-able facts of the caller, saved along.
    """

    network: Network
    likelihood: Likelihood
    subspace: Subspace
    prior: Normal
    temperature: float = 1.0
    draws: Draws | None = None
    posterior: Posterior | None = None
    history: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def predict(
        self,
        inputs: Any,
        *,
        noise: Any = None,
        n_draws: int | None = None,
        progress: bool | None = False,
    ) -> Predictive:
        """Average predictions over the draws; of linearised Laplace, in closed form.

        Args:
            inputs: new inputs in the form the module takes, or a loader of them.
            noise: noise scale per row, for `Gaussian(noise="per-observation")`.
            n_draws: use this many evenly spaced draws instead of all.
            progress: show a progress bar; None shows it on a terminal.

        Raises:
            InputError: inputs the module does not take.
        """
        if self.draws is None:
            fail("model", "a model with draws to predict from", "one that was not sampled yet")
        if self.draws.prediction == "linearised":
            from subbayes.inference.laplace.linearised_engine import predict_linearised

            return predict_linearised(
                self.network,
                self.likelihood,
                self.subspace,
                self.draws,
                inputs,
                noise=noise,
                n_draws=n_draws,
            )
        z = torch.from_numpy(self.draws.flat(n_draws).copy()).to(self.network.device)
        return average(
            self.network,
            self.likelihood,
            lambda rows: self.subspace.weights(z[rows]),
            inputs,
            count=len(z),
            noise=noise,
            progress=progress,
        )

    def evaluate(self, inputs: Any, y: Any, level: float = 0.95) -> dict[str, float]:
        """Scores of the predictions on data with known targets; see `metrics.score`."""
        return metrics.score(self.predict(inputs), y, level=level)

    def warnings(self) -> list[str]:
        """What is wrong with the run, each with a remedy."""
        return [] if self.draws is None else self.draws.warnings()

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON, no pickle; see `load`.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        tensors, meta = self._state()
        artifact.write(path, KIND, tensors, meta, overwrite=overwrite)
        return Path(path)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = network_state(self.network)
        tensors |= {f"subspace.{k}": v for k, v in self.subspace.tensors().items()}
        facts = None
        if self.draws is not None:
            arrays, facts = self.draws.state()
            tensors |= {name: torch.from_numpy(values) for name, values in arrays.items()}
        meta |= {
            "likelihood": self.likelihood.to_config(),
            "subspace": self.subspace.config(),
            "prior": self.prior.to_config(),
            "temperature": self.temperature,
            "draws": facts,
            "history": self.history,
            "settings": self.settings,
            "extra": self.extra,
        }
        return tensors, meta

    def __repr__(self) -> str:
        return (
            f"FittedModel({self.network!r}, {self.subspace!r}, "
            f"temperature={self.temperature:g}, {self.draws!r})"
        )


def load(
    path: str | Path,
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Likelihood | None = None,
    output: Callable[[Any], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> FittedModel:
    """Load what `FittedModel.save` wrote.

    Args:
        path: the folder.
        module: a module of the same architecture, for models of a module of your own; its
            weights do not matter and it is not changed.
        data: the training data, to have `posterior` as well.
        likelihood: for a likelihood of your own, which the file cannot hold.
        output: picks the tensor out of what the module returns, as for `fit`.
        device: where to put it.

    Raises:
        InputError: not such a folder, damaged, of a newer version, or of another architecture.
    """
    tensors, meta = artifact.read(path, KIND, device=str(device))
    subspace = subspace_from_config(meta["subspace"], part(tensors, "subspace"))
    network = network_from(tensors, meta, subspace.shift, module, output=output, path=path)
    likelihood = likelihood or likelihood_from_config(meta["likelihood"])
    prior, temperature = Normal.from_config(meta["prior"]), meta["temperature"]
    draws = None
    if "z" in tensors:
        draws = Draws.from_state({k: v.cpu().numpy() for k, v in tensors.items()}, meta["draws"])
    posterior = None
    if data is not None:
        posterior = Posterior(network, likelihood, data, subspace, prior, temperature)
    return FittedModel(
        network,
        likelihood,
        subspace,
        prior,
        temperature,
        draws,
        posterior,
        meta["history"],
        meta["settings"],
        meta["extra"],
    )


def network_state(network: Network) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What has to be saved of a network but its weights: tensors, and a JSON-able rest.

    Example:
        >>> network_state(Network(MLP(2, (), 1)))[1]["module"]["n_inputs"]
        2
    """
    tensors = {f"frozen.{k}": v for k, v in network.frozen.items()}
    tensors |= {f"mask.{k}": v for k, v in network.masks.items()}
    module = network.module_with()
    return tensors, {
        "architecture": network.architecture,
        "names": list(network.names),
        "module": module.settings if isinstance(module, MLP) else None,
    }


def network_from(
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    weights: Tensor,
    module: nn.Module | None = None,
    *,
    output: Callable[[Any], Tensor] | None = None,
    path: str | Path = "",
) -> Network:
    """The network whose `network_state` this is, at these weights.

    Args:
        tensors: as saved.
        meta: as saved.
        weights: its weights (D,), which decide on device and dtype.
        module: a module of the same architecture, unless it is an `MLP`.
        output: picks the tensor out of what the module returns.
        path: where it comes from, for errors.

    Raises:
        InputError: no module, or one of another architecture.
    """
    if module is None:
        if meta["module"] is None:
            fail(
                "module",
                f"a module of the saved architecture for '{path}'",
                "none",
                "Pass load(path, module=...): code is not saved, only weights",
            )
        module = MLP(**meta["module"], seed=0)  # weights follow; torch's generator is let be
    chosen = part(tensors, "mask") or meta["names"]
    known = (
        dict(module.named_parameters(remove_duplicate=False))
        if isinstance(module, nn.Module)
        else chosen
    )
    if any(name not in known for name in chosen):
        fail(
            "module",
            f"the saved architecture {_short(meta['architecture'])}",
            _short(f"{type(module).__name__}: {module!r}"),
            "Build it with the same layers and sizes",
        )
    network = Network(module, chosen, output)
    if network.architecture != meta["architecture"]:
        fail(
            "module",
            f"the saved architecture {_short(meta['architecture'])}",
            _short(network.architecture),
            "Build it with the same layers and sizes",
        )
    if (network.device, network.dtype) != (weights.device, weights.dtype):
        network = network.to(weights.device, weights.dtype)
    return network.with_buffers(part(tensors, "frozen")).with_weights(weights)


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix` and a dot, without it."""
    start = prefix + "."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def _short(text: str, width: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"

"""From a module and data to calibrated predictions in one call."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from subbayes import likelihoods
from subbayes.data.data import Data, leaves
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.engines import ENGINES, engine_of
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.likelihoods import Likelihood
from subbayes.models.fitted import FittedModel, load
from subbayes.models.subspace_choice import (
    AT_INPUTS,
    SUBSPACES,
    build_subspace,
    by_evidence,
    check_evidence,
    check_sizes,
    check_subspace,
    prior_within,
    widened,
)
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.tracing.tracer import Mode
from subbayes.posterior import Posterior, check_fit
from subbayes.predictions.averaging import input_batches
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained, learned, train_second_end, train_trajectory
from subbayes.utils import artifact
from subbayes.utils.checks import (
    InputError,
    check_choice,
    check_count,
    check_positive,
    fail,
    fail_type,
)
from subbayes.utils.types import Form

__all__ = [
    "ENGINES",
    "SUBSPACES",
    "FittedModel",
    "Trained",
    "Training",
    "build_subspace",
    "check_sizes",
    "check_subspace",
    "fit",
    "forget",
    "load",
    "prior_within",
    "train_second_end",
    "train_trajectory",
]

CHOICE = "temperature-choice"


def fit(
    model: nn.Module,
    data: Any,
    *,
    likelihood: str | Likelihood = "gaussian",
    subspace: str | Subspace | Callable[[Trained], Subspace] = "pca",
    inference: str | Engine | Callable[[Any, Sampling], Draws] = "elliptical-slice",
    rank: int | None = None,
    prior: Normal | float | str = 1.0,
    scale_prior: bool = False,
    inputs: Any = None,
    covariance: Form = "exact",
    temperature: float | str = 1.0,
    validation: Any = None,
    training: Training | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    draws: int = 500,
    chains: int = 8,
    warmup: int | None = None,
    seed: int = 0,
    mode: Mode = "trace",
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> FittedModel:
    r"""Train, build a subspace, sample its posterior: a model that says how sure it is.

    Args:
        model: any module; it is neither written to nor switched to another mode.
        data: (inputs, y), a `Dataset` or a `DataLoader`.
        likelihood: "gaussian" (one learned noise), "heteroscedastic", "categorical",
            "bernoulli", "poisson", or a likelihood object.
        subspace: "pca" (of the SGD trajectory), "random", "curve" (of low loss to a second
            solution, which is trained for it), "optimal" (for the linearised Laplace
            approximation), "subnetwork" (the weights that together keep most of its predictive
            variance), "full", a `Subspace` (then nothing is trained and `model` is used as it
            is), or a function of the `Trained` result.
        inference: "elliptical-slice", "nuts", "hmc", "slice", "parallel-tempering", "smc",
            "laplace", "laplace-linearised" (predicts by the linearised network), "vi",
            "full-rank-vi", "realnvp", an engine with settings of its own such as
            `NUTS(target_acceptance=0.9)`, or a function (posterior, sampling) -> Draws.
        rank: number of coordinates k; None takes 5 for "pca" and "random", or fewer where the
            trajectory or the weights have fewer directions, 20 for "optimal", 100 for
            "subnetwork" and 2 for "curve".
        prior: of z: a scale or a `Normal`; with subspace="optimal" a scale is that of the
            weights, $w \sim N(\hat w, s^2 I)$ within the subspace. "evidence", for the subspaces
            "optimal", "subnetwork" and "full", takes the scale of the largest evidence of
            linearised Laplace over all weights, and with a `Gaussian` likelihood its noise too.
        scale_prior: of a subnetwork of |S| of the D weights, make the scale of the prior
            $\sqrt{D / |S|}$ times larger, so that the outputs keep about the variance that they
            have under a prior of all weights; the subnetwork is chosen under it too.
        inputs: for subspace="optimal" or "subnetwork", without labels: the inputs to be
            predicted, for which it is then chosen; by default recombined training inputs for the
            former, the training inputs for the latter.
        covariance: for subspace="optimal": the covariance of the weights by which it is chosen,
            "exact", or "kfac", "low-rank" or "diagonal" where neither N C nor D numbers squared
            fit into memory.
        temperature: T, or "loo" or "validation" to choose it from the draws.
        validation: held-out data for `temperature="validation"`.
        training: how to train; `Training(epochs=0)` for a module that is trained already, with
                `swa_epochs=0` too to leave its weights where they are (not for "pca").
        parameters: which parameters are weights, as for `Network`; e.g. "last-layer".
        output: picks the tensor out of what the module returns, as for `Network`.
        draws: draws per chain.
        chains: number of chains.
        warmup: draws per chain to drop first; by default half of the draws kept.
        seed: the same seed gives the same model.
        mode: "trace", "compile" (pays for long runs) or "eager".
        checkpoint: folder to save the trained subspace and the sampling run in; a call that was
            interrupted goes on from there and yields the same draws.
        progress: show progress bars; None shows them on a terminal.

    Returns:
        A `FittedModel`: `.predict(inputs)`, `.evaluate(inputs, y)`, `.draws`, `.save(path)`.

    Raises:
        InputError: anything that does not fit together, in one line.

    Example:
        >>> import torch
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> y = torch.sin(3 * x[:, 0])
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = fit(net, (x, y), rank=3, draws=50, training=Training(epochs=20),
        ...             progress=False)
        >>> model.predict(x[:5]).std.shape
        (5,)
    """
    source, data = data, Data.of(data)
    if not isinstance(source, (DataLoader, Dataset)):  # these shuffle, and in a way of their own
        source = data
    likelihood = _likelihood(likelihood)
    network = Network(model, parameters, output)
    check_fit(network, likelihood, data)
    training = Training() if training is None else training
    if not isinstance(training, Training):
        fail_type("training", "a Training(epochs=..., ...)", training)
    engine = engine_of(inference)
    tunes = isinstance(prior, str)
    if tunes:
        if prior != "evidence":
            fail("prior", "a number above 0, a Normal or 'evidence'", repr(prior))
        check_evidence(subspace, network, data, covariance)
    scale = None if isinstance(prior, Normal) else 1.0 if tunes else check_positive("prior", prior)
    check_choice("mode", mode, ("trace", "eager", "compile"))
    _check_sampling(draws, chains, warmup, seed, temperature, validation)
    check_subspace(subspace, rank, network, training)
    if inputs is not None and subspace not in AT_INPUTS:
        fail(
            "inputs",
            "subspace='optimal' or 'subnetwork', chosen for inputs",
            repr(subspace),
            "Leave them out; predict(inputs) comes later",
        )
    check_sizes(network, data, subspace, rank, engine, inputs, covariance, tunes)
    widening = (
        widened(1.0 if scale is not None else None, subspace, rank, network.size)
        if scale_prior
        else 1.0
    )
    scale = None if scale is None else scale * widening
    prior = prior if isinstance(prior, Normal) else Normal(1.0 if scale is None else scale)
    settings: dict[str, Any] = {
        "likelihood": likelihood.to_config(),
        "rank": rank,
        "seed": seed,
        "subspace": subspace if isinstance(subspace, str) else repr(subspace),
        "training": dataclasses.asdict(training),
    }
    if subspace in AT_INPUTS:
        settings |= {"prior_scale": scale, "covariance": covariance}
    if tunes:
        settings |= {"prior": "evidence", "covariance": covariance}
    folder = None if checkpoint is None else Path(checkpoint)
    prepared = _resumed(folder, model, parameters, output, data, likelihood, settings, inputs)
    if prepared is None:
        network, likelihood, space, history, scale = _prepared(
            model,
            likelihood,
            source,
            subspace,
            rank,
            training,
            parameters,
            output,
            seed,
            progress,
            inputs,
            scale,
            covariance,
            tunes,
        )
        if scale is not None:
            prior = prior_within(space, scale) if subspace == "optimal" else Normal(scale)
        prepared = FittedModel(
            network, likelihood, space, prior, history=history, settings=settings
        )
        if folder is not None:
            identity = _identity(model, parameters, data, settings, inputs)
            dataclasses.replace(prepared, extra={"identity": identity}).save(
                folder / "trained", overwrite=True
            )
    if subspace == "optimal" or tunes:
        prior = prepared.prior
    posterior = Posterior(
        prepared.network, prepared.likelihood, data, prepared.subspace, prior, mode=mode
    )
    posterior, chosen = _tempered(posterior, temperature, validation, seed, progress, folder)
    sample = engine.run(
        posterior,
        Sampling(
            draws=draws,
            chains=chains,
            warmup=warmup,
            seed=seed,
            mode=mode,
            progress=progress,
            checkpoint=None if folder is None else folder / "sampling",
        ),
    )
    return dataclasses.replace(
        prepared,
        prior=prior,
        temperature=posterior.temperature,
        draws=sample,
        posterior=posterior,
        settings=settings | {"inference": engine.name, "temperatures": chosen},
        extra={},
    )


def _likelihood(likelihood: str | Likelihood) -> Likelihood:
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str):
        fail_type("likelihood", "a name or a Likelihood", likelihood)
    check_choice(
        "likelihood",
        likelihood,
        ("gaussian", "heteroscedastic", "categorical", "bernoulli", "poisson"),
    )
    return likelihoods.from_config({"name": likelihood})


def _check_sampling(
    draws: int,
    chains: int,
    warmup: int | None,
    seed: int,
    temperature: float | str,
    validation: Any,
) -> None:
    """Refuse now what would be refused after the training."""
    for name, value, least in (
        ("draws", draws, 1),
        ("chains", chains, 1),
        ("seed", seed, 0),
        ("warmup", 0 if warmup is None else warmup, 0),
    ):
        check_count(name, value, least)
    if not isinstance(temperature, str):
        check_positive("temperature", temperature)
        return
    check_choice("temperature", temperature, ("loo", "validation"))
    if temperature == "validation" and validation is None:
        fail(
            "validation",
            "held-out data for temperature='validation'",
            None,
            "Pass data, or use temperature='loo'",
        )


def _prepared(
    model: nn.Module,
    likelihood: Likelihood,
    data: Any,
    subspace: str | Subspace | Callable[[Trained], Subspace],
    rank: int | None,
    training: Training,
    parameters: Selection,
    output: Callable[[Any], Tensor] | None,
    seed: int,
    progress: bool | None,
    inputs: Any = None,
    scale: float | None = 1.0,
    covariance: Form = "exact",
    tunes: bool = False,
) -> tuple[Network, Likelihood, Subspace, dict[str, Any], float | None]:
    """The network, its likelihood, the subspace to sample in, and the scale of the prior."""
    if isinstance(subspace, Subspace):
        network = Network(model, parameters, output).with_weights(subspace.shift)
        return network, learned(network, likelihood, Data.of(data)), subspace, {}, scale
    trained = train_trajectory(
        model,
        likelihood,
        data,
        training,
        parameters=parameters,
        output=output,
        seed=seed,
        progress=progress,
    )
    if tunes and scale is not None:
        likelihood, found = by_evidence(trained.network, trained.likelihood, data, covariance)
        trained, scale = dataclasses.replace(trained, likelihood=likelihood), scale * found
    space = build_subspace(
        subspace,
        trained,
        rank,
        seed,
        data=data,
        training=training,
        progress=progress,
        inputs=inputs,
        prior_scale=1.0 if scale is None else scale,
        covariance=covariance,
    )
    return trained.network, trained.likelihood, space, trained.history, scale


def _tempered(
    posterior: Posterior,
    temperature: float | str,
    validation: Any,
    seed: int,
    progress: bool | None,
    folder: Path | None,
) -> tuple[Posterior, dict[str, Any] | None]:
    """The posterior at its temperature, and how it was chosen; an earlier choice is read back."""
    if not isinstance(temperature, str):
        return posterior.with_temperature(temperature), None
    path, choice = None if folder is None else folder / "temperature", None
    identity = "" if path is None else _choice_identity(posterior, temperature, validation, seed)
    if path is not None and artifact.is_artifact(path):
        _, saved = artifact.read(path, CHOICE)
        if saved["identity"] == identity:
            facts: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in saved["choice"].items()
            }
            choice = TemperatureChoice(**facts)
    if choice is None:
        choice = choose_temperature(
            posterior, by=temperature, validation=validation, seed=seed, progress=progress
        )
        if path is not None:
            artifact.write(
                path,
                CHOICE,
                {},
                {"identity": identity, "choice": dataclasses.asdict(choice)},
                overwrite=True,
            )
    return posterior.with_temperature(choice.best), dataclasses.asdict(choice)


def _choice_identity(posterior: Posterior, by: str, validation: Any, seed: int) -> str:
    """A digest of all that determines the choice of a temperature."""
    held_out = {} if validation is None else _tensors(Data.of(validation, "validation"))
    return artifact.fingerprint(
        held_out,
        {"posterior": posterior.with_temperature(1.0).fingerprint(), "by": by, "seed": seed},
    )


def _tensors(data: Data) -> dict[str, Tensor]:
    """All tensors of the data, by names of their own."""
    return {
        f"data.{i}.{j}": t
        for i, (x, y) in enumerate(data.batches(65536))
        for j, t in enumerate([*leaves(x), *leaves(y)])
    }


def _identity(
    model: nn.Module,
    parameters: Selection,
    data: Data,
    settings: dict[str, Any],
    inputs: Any = None,
) -> str:
    """A digest of all that determines the trained subspace."""
    network = Network(model, parameters)
    tensors = {"weights": network.weights} | network.frozen | _tensors(data)
    for i, batch in enumerate([] if inputs is None else input_batches(inputs)):
        tensors |= {f"inputs.{i}.{j}": t for j, t in enumerate(leaves(batch))}
    return artifact.fingerprint(tensors, settings | {"architecture": network.architecture})


def _resumed(
    folder: Path | None,
    model: nn.Module,
    parameters: Selection,
    output: Callable[[Any], Tensor] | None,
    data: Data,
    likelihood: Likelihood,
    settings: dict[str, Any],
    inputs: Any = None,
) -> FittedModel | None:
    """The trained subspace of an interrupted call, if the folder holds one."""
    if folder is None or not artifact.is_artifact(folder / "trained"):
        return None
    tuned = "prior" in settings and isinstance(likelihood, likelihoods.Gaussian)
    known = likelihood if likelihood.learned and not tuned else None  # may not be in the file
    try:
        prepared = load(folder / "trained", model, output=output, likelihood=known)
    except InputError as error:
        raise InputError(f"checkpoint: {error}") from error
    if prepared.extra.get("identity") != _identity(model, parameters, data, settings, inputs):
        fail(
            "checkpoint",
            "one made with the same model, data and settings",
            f"another in {folder}",
            "Delete it to start again, or choose another path",
        )
    return prepared


def forget(checkpoint: str | Path) -> None:
    """Remove what `fit` saved in its checkpoint folder, and the folder if that empties it.

    Args:
        checkpoint: the folder; it need not exist.

    Example:
        >>> forget("no/such/folder")
    """
    for name in ("trained", "temperature", "sampling"):
        path = Path(checkpoint) / name
        if artifact.is_artifact(path):
            shutil.rmtree(path)
    with suppress(OSError):
        Path(checkpoint).rmdir()

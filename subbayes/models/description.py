"""Descriptions of fitted models in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from subbayes.inference.tempering import TemperatureChoice
from subbayes.models.presets import describe_preset
from subbayes.networks.description import describe_likelihood, describe_network
from subbayes.utils.text_table import printable

if TYPE_CHECKING:
    from subbayes.models.fitted import FittedModel

__all__ = ["describe", "method_label"]


def describe(model: FittedModel) -> dict[str, str]:
    """Describe a fitted model, with one sentence for each part.

    Args:
        model: the model.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.MLP(2, (5,), 1, seed=0)
        >>> model = subbayes.fit(net, (torch.randn(30, 2), torch.randn(30)),
        ...                      subspace=subbayes.subspaces.PCA(rank=2),
        ...                      training=subbayes.Training(epochs=2, swa_epochs=5),
        ...                      sampling=subbayes.Sampling(draws=20))
        >>> describe(model)["subspace"]
        'the 2 leading principal components of the SGD trajectory, centred at its mean'
    """
    chosen = model.settings.get("preset")
    preset = {} if chosen is None else {"preset": describe_preset(chosen)}
    parts = preset | {
        "network": describe_network(model.network),
        "likelihood": describe_likelihood(model.likelihood),
        "training": _training(model),
        "subspace": _subspace(model),
        "prior": _prior(model),
        "temperature": _temperature(model),
        "inference": _inference(model),
    }
    return {name: printable(text) for name, text in parts.items()}  # names may be from a file


_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "Sgd"}


def _has_trajectory(model: FittedModel) -> bool:
    """Whether a phase of SGD followed training; members of an ensemble have none."""
    alone = "ensemble" in model.history and not model.history.get("swa", {}).get("train_loss")
    return bool(model.settings["training"]["swa_epochs"]) and not alone


def _training(model: FittedModel) -> str:
    training = model.settings.get("training")
    if not training:
        return ""
    batch = training["batch_size"]
    rows = "full batches" if batch is None else f"batches of {batch}"
    prior = "no prior on the weights"
    if training["prior_scale"] is not None:
        prior = f"prior N(0, {training['prior_scale']:g}²) on each weight"
    elif training["weight_decay"] is not None:
        prior = f"weight decay {training['weight_decay']:g}"
    if training.get("clip_norm") is not None:
        prior += f", gradients clipped to norm {training['clip_norm']:g}"
    first = (
        f"{training['epochs']} epochs of {_OPTIMIZERS[training['optimizer']]} with learning rate "
        f"{training['learning_rate']:g}"
        if training["epochs"]
        else "a network trained before"
    )
    if not _has_trajectory(model):
        return f"{first}, {rows}, {prior}" if training["epochs"] else first
    return (
        f"{first}, {rows}, {prior}; then {training['swa_epochs']} epochs of SGD with constant "
        f"learning rate {training['swa_learning_rate']:g}, with a snapshot after each"
    )


def _subspace(model: FittedModel) -> str:
    k, name = model.subspace.rank, model.settings.get("subspace")
    centre = "centred at the mean of the SGD trajectory"
    if model.settings.get("training") and not _has_trajectory(model):
        centre = "centred at the weights of the network"
    settings = model.settings.get("subspace_settings")
    if isinstance(settings, Mapping) and settings.get("centre") == "zero":
        centre = "centred at zero"
    return {
        "pca": f"the {k} leading principal components of the SGD trajectory, centred at its mean",
        "random": f"{k} random directions, {centre}",
        "curve": f"{k} directions that contain a curve of low loss to a second solution, {centre}",
        "optimal": f"the {k} directions that keep most of the predictive covariance, {centre}",
        "subnetwork": f"the {k} weights that keep most of the predictive variance, {centre}",
        "full": f"all {k} weights, {centre}",
    }.get(str(name), repr(model.subspace))


def _prior(model: FittedModel) -> str:
    prior = model.prior
    plain = prior.factor is None and prior.scale.size == 1 and not np.any(prior.mean)
    if plain:
        return f"N(0, {float(prior.scale.reshape(-1)[0]):g}²) on each coordinate z"
    return f"{prior!r} on the coordinates z"


def _temperature(model: FittedModel) -> str:
    chosen, text = model.settings.get("temperatures"), f"T = {model.temperature:g}"
    if not chosen:
        return text
    by = "leave-one-out scores" if chosen["by"] == "loo" else "the validation rows"
    text += f", chosen by {by} among {', '.join(f'{t:g}' for t in chosen['temperatures'])}"
    if bad := TemperatureChoice.of(chosen).n_bad_of_best:
        text += f" (unreliable: Pareto k is too large at {bad} rows)"
    return text


def _inference(model: FittedModel) -> str:
    draws = model.draws
    if draws is None:
        return "not sampled"
    engine = draws.engine.replace("-", " ")
    how = "sampling" if draws.validity == "exact" else draws.validity
    parts = [f"{engine} {how}, {draws.n_chains} chains of {draws.n_draws} draws".lstrip()]
    if model.starts is not None:
        parts.append("each from a network of its own")
    if "warmup" in draws.meta:
        parts.append(f"{draws.meta['warmup']} warm-up steps each")
    if "evaluations" in draws.stats:
        of = "draw" if draws.meta.get("thin", 1) == 1 else "step"
        parts.append(f"{draws.stats['evaluations'].mean():.1f} density evaluations per {of}")
    if "seconds" in draws.meta:
        parts.append(f"{draws.meta['seconds']:.1f} s")
    return ", ".join(parts)


_LABELS = {
    "pca": "PCA",
    "elliptical-slice": "ESS",
    "nuts": "NUTS",
    "hmc": "HMC",
    "mclmc": "MCLMC",
    "mams": "MAMS",
    "smc": "SMC",
    "laplace": "Laplace",
    "laplace-linearised": "linearised Laplace",
    "vi": "VI",
    "full-rank-vi": "full-rank VI",
    "realnvp": "RealNVP",
}


def method_label(subspace: str, engine: str) -> str:
    """The name of a method in tables.

    Example:
        >>> method_label("pca", "elliptical-slice")
        'PCA + ESS'
    """
    return printable(f"{_LABELS.get(subspace, subspace)} + {_LABELS.get(engine, engine)}")

"""What was fitted, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from subbayes.networks.description import describe_likelihood, describe_network

if TYPE_CHECKING:
    from subbayes.models.fitted import FittedModel

__all__ = ["describe", "method_label"]


def describe(model: FittedModel) -> dict[str, str]:
    """What was fitted, in words: one sentence for each part.

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
        'the 2 principal directions of that trajectory, around its mean'
    """
    return {
        "network": describe_network(model.network),
        "likelihood": describe_likelihood(model.likelihood),
        "training": _trained(model.settings.get("training")),
        "subspace": _subspace(model),
        "prior": _prior(model),
        "temperature": _temperature(model),
        "inference": _inference(model),
    }


def _trained(training: Mapping[str, Any] | None) -> str:
    if not training:
        return ""
    batch = training["batch_size"]
    rows = "all rows a step" if batch is None else f"batches of {batch}"
    prior = "no prior on the weights"
    if training["prior_scale"] is not None:
        prior = f"prior N(0, {training['prior_scale']:g}²) on each weight"
    elif training["weight_decay"] is not None:
        prior = f"weight decay {training['weight_decay']:g}"
    if training.get("clip_norm") is not None:
        prior += f", gradients of norm at most {training['clip_norm']:g}"
    first = (
        f"{training['epochs']} epochs of {training['optimizer'].title()} at rate "
        f"{training['learning_rate']:g}"
        if training["epochs"]
        else "trained beforehand"
    )
    if not training["swa_epochs"]:
        return f"{first}, {rows}, {prior}" if training["epochs"] else first
    return (
        f"{first}, {rows}, {prior}; then {training['swa_epochs']} epochs of SGD at the "
        f"constant rate {training['swa_learning_rate']:g}, a snapshot after each"
    )


def _subspace(model: FittedModel) -> str:
    k, name = model.subspace.rank, model.settings.get("subspace")
    return {
        "pca": f"the {k} principal directions of that trajectory, around its mean",
        "random": f"{k} random directions around the mean of that trajectory",
        "curve": f"the {k} directions that hold a curve of low loss from that mean to a second "
        "solution, trained likewise",
        "optimal": f"the {k} directions that keep most of the predictive covariance, around "
        "the mean of that trajectory",
        "subnetwork": f"the {k} weights that keep most of the predictive variance, at the "
        "mean of that trajectory",
        "full": f"all {k} weights, around the mean of that trajectory",
    }.get(str(name), repr(model.subspace))


def _prior(model: FittedModel) -> str:
    prior = model.prior
    plain = prior.factor is None and prior.scale.size == 1 and not np.any(prior.mean)
    what = f"N(0, {float(prior.scale.reshape(-1)[0]):g}²)" if plain else repr(prior)
    return f"{what} on each coordinate z" if plain else f"{what} on the coordinates z"


def _temperature(model: FittedModel) -> str:
    chosen, text = model.settings.get("temperatures"), f"T = {model.temperature:g}"
    if not chosen:
        return text
    by = "leave-one-out" if chosen["by"] == "loo" else "the validation rows"
    return f"{text}, chosen by {by} among {', '.join(f'{t:g}' for t in chosen['temperatures'])}"


def _inference(model: FittedModel) -> str:
    draws = model.draws
    if draws is None:
        return "not sampled"
    engine = draws.engine.replace("-", " ")
    how = "sampling" if draws.validity == "exact" else draws.validity
    said = [f"{engine} {how}, {draws.n_chains} chains of {draws.n_draws} draws".lstrip()]
    if "warmup" in draws.meta:
        said.append(f"after {draws.meta['warmup']} of warm-up each")
    if "evaluations" in draws.stats:
        said.append(f"{draws.stats['evaluations'].mean():.1f} evaluations of the density a draw")
    if "seconds" in draws.meta:
        said.append(f"{draws.meta['seconds']:.1f} s")
    return ", ".join(said)


_SUBSPACES = {
    "pca": "PCA",
    "random": "random",
    "curve": "curve",
    "optimal": "optimal",
    "subnetwork": "subnetwork",
}
_ENGINES = {
    "elliptical-slice": "ESS",
    "nuts": "NUTS",
    "hmc": "HMC",
    "smc": "SMC",
    "laplace": "Laplace",
    "laplace-linearised": "linearised Laplace",
    "vi": "VI",
    "full-rank-vi": "full-rank VI",
    "realnvp": "RealNVP",
}


def method_label(model: FittedModel) -> str:
    """The name of a fitted model's method in tables.

    Args:
        model: the model.
    """
    subspace = _SUBSPACES.get(str(model.settings.get("subspace")), "posterior")
    engine = str(model.settings.get("inference", "elliptical-slice"))
    if subspace == "posterior" and engine == "elliptical-slice":
        return subspace
    return f"{subspace} + {_ENGINES.get(engine, engine)}"

"""Saving weight vectors and loading them back, as models of `fit` are: safetensors and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from subbayes.baselines.ensemble import WeightSamples, stacked
from subbayes.likelihoods import Likelihood, from_config
from subbayes.models.fitted import network_from, network_state, part
from subbayes.utils import artifact

__all__ = ["KIND", "load", "save"]

KIND = "weight-samples"


def save(
    samples: WeightSamples,
    path: str | Path,
    extra: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Save weight vectors with their network and likelihood as a folder.

    Args:
        samples: MAP, SWA, SWAG draws or a deep ensemble.
        path: the folder.
        extra: JSON-able facts of the caller, saved along.
        overwrite: replace what is there.

    Raises:
        InputError: the path is taken (pass `overwrite=True`), or cannot be written.

    Example:
        >>> from subbayes import MLP, Network
        >>> from subbayes.likelihoods import Gaussian
        >>> network = Network(MLP(2, (3,), 1, seed=0))
        >>> samples = WeightSamples(network, network.weights[None], Gaussian(1.0), "MAP")
        >>> load(save(samples, "map"))[0].name
        'MAP'
    """
    tensors, meta = network_state(samples.network)
    tensors["weights"] = samples.weights
    for s, own in enumerate(samples.frozen or ()):
        tensors |= {f"own.{s}.{name}": tensor for name, tensor in own.items()}
    meta |= {
        "name": samples.name,
        "own": samples.frozen is not None,
        "likelihoods": _configs(samples),
        "extra": extra or {},
    }
    artifact.write(path, KIND, tensors, meta, overwrite=overwrite)
    return Path(path)


def load(path: str | Path, module: nn.Module | None = None) -> tuple[WeightSamples, dict[str, Any]]:
    """Load what `save` wrote: the weight vectors, and the facts saved along.

    Args:
        path: the folder.
        module: a module of the same architecture, unless it is an `MLP`.

    Raises:
        InputError: no such artifact, a damaged one, or one of another architecture.
    """
    tensors, meta = artifact.read(path, KIND)
    network = network_from(tensors, meta, tensors["weights"][0], module, path=path)
    frozen = [part(tensors, f"own.{s}") for s in range(len(tensors["weights"]))]
    samples = WeightSamples(
        network,
        tensors["weights"],
        stacked([from_config(c) for c in meta["likelihoods"]]),
        meta["name"],
        frozen if meta["own"] else None,
    )
    return samples, meta["extra"]


def _configs(samples: WeightSamples) -> list[dict[str, Any]]:
    """The likelihood of each weight vector, or one for all."""
    each = [_flat(_member(samples.likelihood, s)) for s in range(len(samples.weights))]
    return each if any(one != each[0] for one in each) else each[:1]


def _member(likelihood: Likelihood, s: int) -> dict[str, Any]:
    return likelihood.select_draws(torch.tensor([s])).to_config()


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of one draw, (1, 1, T) in a stack, as a list of T numbers."""
    return {
        k: _flat(v) if isinstance(v, dict) else np.ravel(v).tolist() if isinstance(v, list) else v
        for k, v in config.items()
    }

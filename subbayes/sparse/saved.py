"""Saving sparse networks and loading them back, as models of `fit` are: safetensors and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subbayes.likelihoods import from_config
from subbayes.models.fitted import network_from, network_state, part
from subbayes.sparse import priors
from subbayes.sparse.baselines import HorseshoeLayer, layer_of
from subbayes.sparse.layers import STRUCTURES, SparseLayer
from subbayes.sparse.module_surgery import replaced
from subbayes.sparse.priors import Horseshoe, Inclusion, Slab, SpikeSlab
from subbayes.sparse.result import SparseNetwork
from subbayes.sparse.variational_families import Noise
from subbayes.utils import artifact
from subbayes.utils.checks import fail

__all__ = ["KIND", "load", "save"]

KIND = "sparse-network"


def save(
    network: SparseNetwork,
    path: str | Path,
    extra: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Save a sparse network with its posterior, priors and likelihood as a folder.

    Args:
        network: as `sparse.fit` returned it.
        path: the folder.
        extra: JSON-able facts of the caller, saved along.
        overwrite: replace what is there.

    Raises:
        InputError: a prior of one's own, which the file cannot hold; the path is taken (pass
            `overwrite=True`), or cannot be written.

    Example:
        >>> from subbayes import MLP, sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> network = sparse.SparseNetwork(sparse.convert(MLP(2, (3,), 1, seed=0)), Gaussian(1.0))
        >>> load(save(network, "sparse"))[0].density() == network.density()
        True
    """
    tensors, meta = network_state(network.network)
    state = network.module.state_dict()
    tensors |= {"weights": network.network.weights} | {f"state.{k}": v for k, v in state.items()}
    meta |= {
        "layers": {name: _config(layer) for name, layer in network.layers.items()},
        "history": network.history,
        "likelihood": network.likelihood.to_config(),
        "extra": extra or {},
    }
    artifact.write(path, KIND, tensors, meta, overwrite=overwrite)
    return Path(path)


def load(
    path: str | Path, module: nn.Module | None = None, output: Callable[[Any], Tensor] | None = None
) -> tuple[SparseNetwork, dict[str, Any]]:
    """Load what `save` wrote: the network, and the facts saved along.

    Args:
        path: the folder.
        module: a module of the architecture that was converted, unless it is an `MLP`.
        output: picks the tensor out of what the module returns, as for `fit`.

    Raises:
        InputError: no such artifact, a damaged one, or one of another architecture.
    """
    tensors, meta = artifact.read(path, KIND)
    made = network_from(tensors, meta, tensors["weights"], module, path=path).module_with()
    state, noise = part(tensors, "state"), Noise(0)
    for name, config in meta["layers"].items():
        # earlier files say once, beside the layers, what is the same in all of them
        own = made.get_submodule(name)
        if isinstance(own.bias, Tensor):  # a frozen one has no deviations
            own.bias.requires_grad_(f"{name}.bias_raw_sd".lstrip(".") in state)
        layer = _layer(own, meta | config, _rank(state, name), noise)
        made = replaced(made, name, layer)
    made.eval().load_state_dict(state)
    likelihood = from_config(meta["likelihood"])
    return SparseNetwork(made, likelihood, meta["history"], output), meta["extra"]


def _layer(plain: nn.Module, config: dict[str, Any], rank: int, noise: Noise) -> SparseLayer:
    """A layer as it was made, at parameters that its state replaces."""
    found = layer_of(config["posterior"])(
        plain,
        config["posterior"],
        config["structure"],
        _both(config),
        config["estimator"],
        noise,
        inclusion=0.5,
        sd=1.0,
        rank=rank,
        temperature=config["temperature"],
    )
    found.phase = config["phase"]
    return found


def _config(layer: SparseLayer) -> dict[str, Any]:
    config = {
        "posterior": layer.posterior,
        "estimator": layer.estimator,
        "structure": layer.structure if layer.structure in STRUCTURES else "weights",
        "temperature": layer.temperature,
        "phase": layer.phase,
        "slab": _written(layer.slab),
        "inclusion": _written(layer.inclusion),
    }
    if isinstance(layer, HorseshoeLayer):
        config["horseshoe"] = {"scale": math.exp(layer.log_scale), "threshold": layer.threshold}
    return config


def _both(config: dict[str, Any]) -> SpikeSlab:
    """The prior of a layer."""
    slab, inclusion = _prior(config["slab"]), _prior(config["inclusion"])
    if "horseshoe" in config:
        return Horseshoe(slab=slab, inclusion=inclusion, **config["horseshoe"])
    return SpikeSlab(slab, inclusion)


def _written(prior: Slab | Inclusion) -> dict[str, Any]:
    """The class of a prior and its arguments."""
    name = type(prior).__name__
    if getattr(priors, name, None) is not type(prior):
        fail("network", "priors of subbayes.sparse", name, "Save module.state_dict() yourself")
    values: dict[str, Any] = {
        key.removeprefix("log_"): math.exp(float(value.detach()))
        for key, value in prior.named_parameters()
    }
    for key in ("shared", "probability", "share"):
        if key in type(prior).__init__.__annotations__:
            values[key] = getattr(prior, key)
    return {"name": name, **values}


def _prior(config: dict[str, Any]) -> Any:
    found = getattr(priors, config["name"], None)
    if not (isinstance(found, type) and issubclass(found, (Slab, Inclusion))):
        fail("path", "a prior of this version", config["name"], "Upgrade subbayes")
    return found(**{key: value for key, value in config.items() if key != "name"})


def _rank(state: dict[str, Tensor], name: str) -> int:
    factor = state.get(f"{name}.logits.factor" if name else "logits.factor")
    return 1 if factor is None else factor.shape[-1]

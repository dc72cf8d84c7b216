"""Settings of sparse layers in an artifact, and layers rebuilt from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from subbayes.artifacts.facts import Facts, Positive
from subbayes.sparse import priors
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import LAYERS, replace_layer
from subbayes.sparse.priors import Inclusion, Slab, SpikeSlab
from subbayes.sparse.variational_families import LayerSettings, Noise
from subbayes.utils.checks import fail


class LayerFacts(Facts):
    """Settings and priors of a sparse layer."""

    posterior: Literal["mean-field", "mvn", "low-rank", "all"]
    estimator: Literal["local", "relaxed"]
    structure: Literal["weights", "units"]
    temperature: Positive
    phase: Literal["learned", "fixed", "median"]
    slab: dict[str, Any]
    inclusion: dict[str, Any]


def layers_from(
    module: nn.Module, facts: Mapping[str, LayerFacts], state: Mapping[str, Tensor]
) -> nn.Module:
    """Replace layers of a module by sparse ones, whose parameters have yet to be loaded.

    Args:
        module: the module, changed in place.
        facts: by layer, what `layer_facts` returned.
        state: the saved state of the module.

    Raises:
        InputError: a layer that the module does not have, or that cannot be sparse.
    """
    noise = Noise(0)
    for name, config in facts.items():
        layer = dict(module.named_modules()).get(name)
        if not isinstance(layer, LAYERS):
            fail("module", f"a linear or convolutional layer {name[:60]!r}", type(layer).__name__)
        if isinstance(layer.bias, Tensor):  # frozen biases have no deviations
            layer.bias.requires_grad_(f"{name}.bias_raw_sd".lstrip(".") in state)
        module = replace_layer(module, name, _layer_from(layer, config, name, state, noise))
    return module


def _layer_from(
    plain: nn.Module, config: LayerFacts, name: str, state: Mapping[str, Tensor], noise: Noise
) -> SparseLayer:
    factor = state.get(f"{name}.logits.factor".lstrip("."))
    settings = LayerSettings(
        config.posterior,
        config.structure,
        config.estimator,
        rank=1 if factor is None or not factor.ndim else factor.shape[-1],
        temperature=config.temperature,
    )
    prior = SpikeSlab(_prior(config.slab), _prior(config.inclusion))
    made = SparseLayer(plain, settings, prior, noise)
    made.phase = config.phase
    return made


def layer_facts(layer: SparseLayer) -> LayerFacts:
    """The settings and the priors of a layer.

    Raises:
        InputError: a prior or a class of layers of your own, which the file cannot hold.
    """
    if type(layer) is not SparseLayer:
        _fail_of_own(f"a {type(layer).__name__}")
    settings: Any = layer.settings
    phase: Any = layer.phase
    return LayerFacts(
        posterior=settings.posterior,
        estimator=settings.estimator,
        structure=settings.structure,
        temperature=settings.temperature,
        phase=phase,
        slab=_prior_facts(layer.slab),
        inclusion=_prior_facts(layer.inclusion),
    )


def _fail_of_own(name: str) -> NoReturn:
    remedy = "Save module.state_dict() yourself"
    fail("network", "layers and priors of subbayes.sparse", name, remedy)


def _prior_facts(prior: Slab | Inclusion) -> dict[str, Any]:
    name = type(prior).__name__
    if getattr(priors, name, None) is not type(prior):
        _fail_of_own(name)
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

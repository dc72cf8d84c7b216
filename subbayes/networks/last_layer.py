"""Whether the layer that was registered last is the one that runs last."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from subbayes.networks.selection import LAST_LAYER, aliases_of, layer_of
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import Inputs
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.networks.network import Network


def warn_of_another_last_layer(network: Network, inputs: Inputs) -> None:
    """Warn if "last-layer" selects a layer after which another one with weights runs.

    Args:
        network: the network.
        inputs: rows, of which one is evaluated.
    """
    selected = network.selection == LAST_LAYER or network.selection == [LAST_LAYER]
    if not (selected and network.copy_frozen and n_rows(inputs)):  # of modules that can be copied
        return
    module, ran = network.module_with(), []
    aliases, own = aliases_of(module), {}

    def record(name: str, *_: Any) -> None:
        ran.append(name)

    for name, part in module.named_modules():
        named = part.named_parameters(recurse=False, remove_duplicate=False)
        own[name] = [aliases[f"{name}.{one}".strip(".")] for one, p in named if p.requires_grad]
        if own[name]:
            part.register_forward_hook(partial(record, name))
    with torch.no_grad():
        network.call(module, take(inputs, slice(1)))
    if not ran or not set(own[ran[-1]]).isdisjoint(network.names):
        return
    chosen, last = layer_of(network.names[0]), layer_of(f"{ran[-1]}.")
    warn_user(
        f"parameters: 'last-layer' selects {chosen!r}, which the module registers last, but "
        f"{last!r} runs last: select it with parameters='{last}.*'"
    )

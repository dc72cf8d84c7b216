"""Layers of peft with the derivatives of their outputs.

The library peft leaves the norm of the weights out of the gradient of DoRA (Liu et al. 2024,
section 4.3), which trains well with a constant norm. The gradient of a density needs all of it.
LoHa defines its gradient by a function that transforms of `torch.func` refuse. Networks compute
both by autograd from the same outputs: in their private copy, or in sharded modules, which cannot
be copied, for the time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DORA, _LOHA = "peft.tuners.lora.dora", "peft.tuners.loha.layer"
_FACTORS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_BESIDE = ("hada_t1", "hada_t2", "rank_dropout", "scaling", "get_base_layer")


def differentiate_layers_of_peft(module: nn.Module) -> None:
    """Give layers of DoRA and LoHa the derivatives of their outputs, which stay as they are.

    Args:
        module: a private copy; changed in place. Copies of it keep the change.
    """
    for part, name, method in _methods(module):
        vars(part)[name] = method


@contextmanager
def differentiable_layers_of_peft(module: nn.Module) -> Iterator[None]:
    """Within it, layers of DoRA and LoHa have the derivatives of their outputs.

    Args:
        module: the module, which is as before afterwards.
    """
    changed = list(_methods(module))
    try:
        for part, name, method in changed:
            vars(part)[name] = method
        yield
    finally:
        for part, name, _ in changed:
            vars(part).pop(name, None)


def _methods(module: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Layers whose derivatives are others than those of their outputs, and what to call instead."""
    for part in module.modules():
        rooms = {kind.__module__ for kind in type(part).__mro__}  # fully_shard derives a class
        own = vars(part)
        if _DORA in rooms and "forward" not in own:
            yield part, "forward", partial(_with_norm_in_gradient, part)
        elif _LOHA in rooms and "get_delta_weight" not in own and _has_factors(part):
            yield part, "get_delta_weight", partial(_change_of_weights, part)


class _WithoutDetach(TorchFunctionMode):
    """Within it, `Tensor.detach` returns the tensor itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **kwargs or {})


def _with_norm_in_gradient(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer of DoRA, whose only detached tensors lead to the norm."""
    with _WithoutDetach():
        return type(layer).forward(layer, *args, **kwargs)


def _has_factors(layer: Any) -> bool:
    return callable(getattr(layer, "get_delta_weight", None)) and all(
        hasattr(layer, name) for name in (*_FACTORS, *_BESIDE)
    )


def _change_of_weights(layer: Any, adapter: str, **options: Any) -> Tensor:
    r"""What an adapter of LoHa adds to the weights, $(A_1 B_1) \odot (A_2 B_2)$ times a scale."""
    if options.get("apply_rank_dropout") or (layer.training and layer.rank_dropout[adapter]):
        found: Tensor = type(layer).get_delta_weight(layer, adapter, **options)
        return found
    a, b, c, d = (getattr(layer, name)[adapter] for name in _FACTORS)
    if adapter in layer.hada_t1:  # of a convolution, with a core for each kernel position
        first, second = (
            torch.einsum("ij...,jr,ip->pr...", core[adapter], right, left)
            for core, left, right in ((layer.hada_t1, a, b), (layer.hada_t2, c, d))
        )
    else:
        first, second = a @ b, c @ d
    scale = torch.tensor(layer.scaling[adapter])
    return (first * second * scale).reshape(layer.get_base_layer().weight.shape)

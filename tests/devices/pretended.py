"""A pretended accelerator: tensors that say they are on another device and compute on the CPU.

Within `pretended_device()` a module or a tensor that is moved to the device "lazy", which nothing
else uses by default, becomes a `PretendedTensor`. It computes what a CPU tensor computes, and
refuses what CUDA refuses: operations on tensors of two devices (numbers, tensors without
dimensions, may come from the CPU), generators of another device, and NumPy. So code that mixes
devices fails on a machine that has only a CPU.

Stricter than CUDA: masks and indices of `x[...]` have to be on the device of x. CUDA copies them,
which waits for the device at every call.

Unlike CUDA: `module.to(device)` makes new parameters, so that tied ones are no longer tied, and
graphs are run by Python, since TorchScript does not see the operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("lazy")
_aten = torch.ops.aten
_TRANSFERS = {_aten._to_copy.default, _aten.copy_.default}
_NO_NUMBERS = {_aten.cat.default, _aten.stack.default}


class PretendedTensor(Tensor):
    """A tensor on the pretended device, with its values in a CPU tensor."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> PretendedTensor:
        found = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
        )
        found.values = values
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.values.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def __repr__(self) -> str:
        return f"PretendedTensor({self.values!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]


class _Mode(TorchDispatchMode):
    """Makes tensors on the pretended device, which no operand announces."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """The pretended device, for as long as the context lasts."""
    only_lift = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` reaches the mode
    trace = torch._C._create_graph_by_tracing
    torch._C._create_graph_by_tracing = _no_torchscript
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(only_lift)
        torch._C._create_graph_by_tracing = trace


def _no_torchscript(*_: Any) -> Any:
    raise RuntimeError("TorchScript does not see operations on the pretended device")


def _is_device(value: Any) -> bool:
    return isinstance(value, (torch.device, str)) and torch.device(value).type == DEVICE.type


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, structure = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendedTensor)]
    asked = kwargs.get("device")
    if func is _aten._to_copy.default and asked is None:
        asked = tensors[0].device
    on_device = bool(ours) if asked is None else _is_device(asked)
    if func in _TRANSFERS:
        on_device = isinstance(tensors[0], PretendedTensor) if asked is None else on_device
    elif ours or on_device:
        _check(func, args, kwargs, tensors)
    _check_generator(func, flat, on_device)
    inner = [
        value.values
        if isinstance(value, PretendedTensor)
        else torch.device("cpu")
        if isinstance(value, torch.device)
        else value
        for value in flat
    ]
    inner_args, inner_kwargs = tree_unflatten(inner, structure)
    if func is _aten._efficientzerotensor.default:  # has no memory, which kernels rely on
        func = _aten.zeros.default
    found = func(*inner_args, **inner_kwargs)
    if not on_device:
        return found
    if torch.Tag.inplace_view in func.tags:
        _change_shape(func, args, kwargs)
    given = {id(value.values): value for value in ours}  # in-place operations return an operand
    return tree_map(
        lambda v: (
            given.get(id(v))
            if id(v) in given
            else PretendedTensor(v)
            if isinstance(v, Tensor)
            else v
        ),
        found,
    )


def _change_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run an operation that changes the shape of its operand on the wrapper, by its meta kernel."""
    before = torch._C._meta_in_tls_dispatch_include()
    with no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def _check(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
    """Refuse tensors of two devices; those without dimensions are numbers unless written to."""
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    written = [
        given.get(argument.name)
        for argument in schema
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    outputs = [id(value) for value in tree_flatten(written)[0]]
    least = 0 if func in _NO_NUMBERS else 1
    for tensor in tensors:
        own = isinstance(tensor, PretendedTensor)
        if not own and (tensor.ndim >= least or id(tensor) in outputs):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and cpu, in {func} of {[_described(t) for t in tensors]}"
            )


def _described(tensor: Tensor) -> str:
    return f"{tensor.device.type}{tuple(tensor.shape)}"


def _check_generator(func: Any, values: list[Any], on_device: bool) -> None:
    for value in values:
        if isinstance(value, torch.Generator) and on_device:
            raise RuntimeError(
                f"Expected a '{DEVICE.type}' device type for generator but found "
                f"'{value.device.type}' in {func}"
            )

"""All private and experimental interfaces of torch that the package uses.

With the environment variable `SUBBAYES_PRIVATE_TORCH=0`, read at each call, none of those that save
time is used. Results are the same up to rounding; each function states what is lost. What
has no public equivalent (hooks, versions, sizes of results, the original of a compiled module) is
always read.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from subbayes.networks.global_state import keep_argument_validation
from subbayes.utils.trees import tensors_of

_PROFILING_CALLS = 3


def private_torch_enabled() -> bool:
    """Whether private interfaces of torch may be used."""
    return os.environ.get("SUBBAYES_PRIVATE_TORCH", "1") != "0"


def capture_graph(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule | None:
    """The operations of a function of tensors as a graph, or None if not enabled.

    Callers compile the code of the graph when they have changed it.

    Without it every function is evaluated eagerly: a gradient of `benchmarks nuts` with 4 chains
    takes 2.0 ms instead of 0.68 ms traced and 0.32 ms compiled, and the bars of `ess`, `nuts` and
    `sparse` are missed.
    """
    if not private_torch_enabled():
        return None
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # The tracer makes a fake tensor for each result, each of a mode of its own if there is none
    # around it: a third of the time.
    with tracing(TracingContext(FakeTensorMode())):
        graph = make_fx(function)(*tensors)
    graph.graph.eliminate_dead_code()
    return graph


def compile_graph(graph: GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """A captured graph compiled for tensors of these shapes and strides, which are not checked.

    `torch.compile` adds 13 us to a call even without guards, 4 % of a compiled gradient of
    `benchmarks nuts` with 4 chains, whose bar (1) is met with 1 % to spare. The C++ wrapper takes
    5 % less than the Python wrapper on the CPU; for a CUDA device it takes a minute to compile.
    Without this function nothing is compiled.

    Args:
        graph: the graph, which is not changed.
        tensors: tensors that it is called with.

    Raises:
        Exception: there is no compiler, or it does not accept the graph.
    """
    import torch._inductor

    operations = copy.deepcopy(graph.graph)  # the compiler changes what it is given
    for node in operations.nodes:
        node.meta.clear()  # fake tensors of the capture
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    options = {"cpp_wrapper": on_cpu, "cpp.enable_floating_point_contract_flag": "fast"}
    with torch.no_grad(), keep_argument_validation():
        module = GraphModule(graph, operations)
        call = torch._inductor.compile(module, list(tensors), options=options)
        call(*tensors)
    return cast("Callable[..., Any]", call)


def interpret_graph(graph: GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """A captured graph as a function that the interpreter of TorchScript runs, if it can.

    The interpreter calls an operation in 2 us instead of the 5 us of Python: 8 traced chains of
    `benchmarks ess` are 2.5 to 2.7 times as fast as the plain sampler instead of 2.0 times
    (bar: 2.5). Without it Python runs the graph. `torch.jit.trace`, which torch has deprecated,
    would keep every function in a global registry.

    The function is called until TorchScript has finished its profiling, so that the same tensors
    give the same bits in every later call.

    Args:
        graph: the graph, whose results are a flat tuple.
        tensors: tensors of the shapes that it is called with.
    """
    forward = graph.forward  # calling the module instead adds 10 us
    if not private_torch_enabled():
        return forward
    names = [f"argument{i}" for i in range(len(tensors))]
    inputs = tuple(tensor.detach() for tensor in tensors)
    try:
        with torch.no_grad():
            traced, _ = torch._C._create_graph_by_tracing(
                lambda *given: forward(*given), inputs, lambda _: "", True, False, None, names
            )
            function = torch._C._create_function_from_graph("replay", traced)
            for _ in range(_PROFILING_CALLS):
                found = function(*inputs)
            same = all(map(_same_bits, found, function(*inputs)))
    except Exception:  # an operation that TorchScript does not know
        return forward
    return function if same else forward


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


class _CountBytes(TorchDispatchMode):
    """Within it, the bytes of all tensors that operations return are added up."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports torch._dynamo, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        given = {_address(tensor) for tensor in tensors_of([args, kwargs or {}])} - {None}
        for tensor in tensors_of(result):
            if _address(tensor) not in given:
                self.total += tensor.numel() * tensor.element_size()
        return result


def count_bytes(function: Callable[[], Any]) -> int:
    """The bytes of all tensors that the operations of a function return; views take none."""
    with _CountBytes() as counted:
        function()
    return counted.total


def _address(tensor: Tensor) -> int | None:
    """The address of a tensor's memory, which its views share; None for sparse tensors."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def in_backward_pass() -> bool:
    """Whether autograd is computing gradients, as in the recomputation of a checkpointed part.

    Without it activation checkpointing of sparse layers is not refused.
    """
    return private_torch_enabled() and torch._C._current_graph_task_id() != -1


def is_traced() -> bool:
    """Whether a call is recorded: compiled, exported or traced by TorchScript."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module without the wrappers of `torch.compile`, also around its submodules.

    Modules around a wrapper are copied; parameters and buffers are shared.

    Example:
        >>> from subbayes.networks.global_state import keep_argument_validation
        >>> with keep_argument_validation():  # which torch.compile turns off
        ...     compiled = torch.compile(nn.Tanh())
        >>> uncompiled(nn.Sequential(compiled))
        Sequential(
          (0): Tanh()
        )
    """
    if isinstance(original := getattr(module, "_orig_mod", None), nn.Module):
        return uncompiled(original)
    if not any(hasattr(part, "_orig_mod") for part in module.modules()):
        return module
    plain = copy.copy(module)
    plain._modules = {
        name: child if child is None else uncompiled(child)
        for name, child in module._modules.items()
    }
    return plain


def convert_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module to a real floating dtype, and complex parameters and buffers accordingly.

    `nn.Module.to` would drop imaginary parts, and `double` leave complex numbers as they are.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> layer.register_buffer("phase", torch.tensor(1j))
        >>> convert_dtype(layer, torch.float64).phase
        tensor(0.+1.j, dtype=torch.complex128)
    """
    of_complex = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(of_complex)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(convert)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks.

    Example:
        >>> layer = nn.ReLU()
        >>> handle = layer.register_forward_hook(print)
        >>> has_hooks(layer), has_hooks(nn.ReLU())
        (True, False)
    """
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(most_forward_hooks(module) or backward)


def most_forward_hooks(module: nn.Module) -> int:
    """The number of forward hooks or of forward pre-hooks, whichever is larger."""
    return max(len(module._forward_hooks), len(module._forward_pre_hooks))


def copy_forward_hooks(source: nn.Module, target: nn.Module) -> None:
    """Add the forward hooks and forward pre-hooks of one module to another."""
    for hooks in (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    ):
        getattr(target, hooks).update(getattr(source, hooks))


def map_forward_hooks(module: nn.Module, function: Callable[[Any], Any]) -> None:
    """Replace each forward hook of a module by what a function returns for it."""
    module._forward_hooks.update({key: function(h) for key, h in module._forward_hooks.items()})


def version_of(tensor: Tensor) -> int:
    """The number of in-place modifications of a tensor; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version

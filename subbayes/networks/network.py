"""A module as a pure function of one flat weight vector.

`Network` never writes into the user's module and never changes its mode: it keeps a private
structural copy in evaluation mode and calls it with `torch.func.functional_call`.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from subbayes.data.data import leaves, n_rows, take
from subbayes.networks.tracing.vectorised import Vectorised
from subbayes.utils.checks import InputError, InputTypeError, fail, fail_type
from subbayes.utils.types import Inputs

__all__ = [
    "Network",
    "Selection",
    "arguments",
    "as_outputs",
    "check_network",
    "plain_attention",
    "select",
    "taking_turns",
]

Selection = str | list[str] | Callable[[str, Tensor], bool] | Mapping[str, Tensor | np.ndarray]


# A call puts weights into the private copy and turns switches of torch while it lasts, and a
# tracer patches every module: threads take turns.
taking_turns = threading.RLock()


_WRAPPERS = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)


class Network:
    r"""A module seen as a pure function f(x; w) of one flat vector w of selected weights.

    The selected parameters, flattened in `named_parameters` order, are the weights
    $w \in \mathbb{R}^D$; everything else is frozen at its value of now. Tied parameters count
    once. Dropout is off and BatchNorm uses its stored statistics. The user's module is neither
    written to nor switched to another mode; later changes to it do not reach the network.

    Args:
        module: any module that returns one tensor of shape (N, C), or (N,) for C = 1.
        parameters: which trainable parameters are weights: "all"; "last-layer"; a name pattern
            such as "head.*" or a list of patterns; a function of (name, parameter); or a dict
            from names to boolean masks. Parameters with `requires_grad=False` stay frozen.
        output: picks the tensor out of what the module returns, for modules that return
            something else, e.g. `lambda out: out.logits`.

    Attributes:
        in_training: kinds of layers that were in training mode and are read otherwise.

    Raises:
        InputTypeError: `module` is not a `torch.nn.Module`.
        InputError: nothing trainable is selected, or a name does not exist.

    Example:
        >>> network = Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        >>> network.size
        21
        >>> network(network.weights, torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Selection = "all",
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            fail_type("module", "a torch.nn.Module", module)
        if isinstance(module, _WRAPPERS):
            fail_type(
                "module", "a plain torch.nn.Module", module, "Pass the module it was made from"
            )
        module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
        self.output = output
        self.selection = parameters
        self.in_training: tuple[str, ...] = _in_training(module)
        self._module = _private_copy(module)
        named = dict(self._module.named_parameters())
        chosen = select(module, parameters)
        self.names: tuple[str, ...] = tuple(chosen)
        self._masks = {name: mask for name, mask in chosen.items() if mask is not None}
        self._shapes = {name: named[name].shape for name in self.names}
        self._dtypes = {name: named[name].dtype for name in self.names}
        self._sizes = [
            int(self._masks[n].sum()) if n in self._masks else named[n].numel() for n in self.names
        ]
        self._frozen = {
            n: p.detach() for n, p in named.items() if n not in chosen or n in self._masks
        }
        self._frozen |= dict(self._module.named_buffers())
        self.weights: Tensor = self.flatten(named)
        self._loops = False

    # --- what it is -------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of selected weights D."""
        return self.weights.numel()

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not weights, and buffers, by name."""
        return dict(self._frozen)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean masks of the parameters of which only a part are weights, by name."""
        return dict(self._masks)

    @property
    def architecture(self) -> str:
        """What the module prints as, to tell one architecture from another."""
        return architecture_of(self._module)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.device

    @property
    def spans(self) -> dict[str, slice]:
        """Where in the flat vector the weights of each selected parameter lie."""
        ends = np.cumsum(self._sizes)
        return {
            name: slice(int(end) - size, int(end))
            for name, size, end in zip(self.names, self._sizes, ends, strict=True)
        }

    def owners(self) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
        """Submodules with selected parameters of their own: name, module, and these by attribute.

        A parameter goes by the first of its names, also where several submodules share it.
        """
        aliases = _aliases(self._module)
        for name, module in self._module.named_modules():
            full = {own: f"{name}.{own}" if name else own for own in module._parameters}
            chosen = {
                own: aliases[path]
                for own, path in full.items()
                if aliases.get(path) in self._shapes
            }
            if chosen:
                yield name, module, chosen

    @contextmanager
    def watched(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Call a hook (module, args, kwargs, output) after each call of the named submodules."""
        modules = dict(self._module.named_modules())
        with taking_turns:
            handles = [
                modules[name].register_forward_hook(hook, with_kwargs=True)
                for name, hook in hooks.items()
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def __repr__(self) -> str:
        kind = type(self._module).__name__
        return f"Network({kind}, {self.size} weights in {len(self.names)} parameters)"

    # --- weights ----------------------------------------------------------------------------

    def flatten(self, source: nn.Module | Mapping[str, Tensor]) -> Float[Tensor, "D"]:
        """Flatten the selected parameters of a module or state dict of this architecture.

        Raises:
            InputError: a parameter is missing or has another shape.
        """
        values = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
        parts = []
        for name in self.names:
            if name not in values or values[name].shape != self._shapes[name]:
                got = tuple(values[name].shape) if name in values else "nothing"
                fail(
                    "source",
                    f"a parameter {name} of shape {tuple(self._shapes[name])}",
                    got,
                    "Pass a module of the same architecture",
                )
            value = values[name].detach()
            mask = self._masks.get(name)
            parts.append(value.reshape(-1) if mask is None else value[mask])
        return torch.cat(parts).clone()

    def unflatten(self, weights: Float[Tensor, "D"]) -> dict[str, Tensor]:
        """Named parameters from a flat vector; differentiable, and usable under `vmap`."""
        named = {}
        for name, part in zip(self.names, weights.split(self._sizes), strict=True):
            part = part.to(self._dtypes[name])
            mask = self._masks.get(name)
            if mask is not None:
                index = mask.reshape(-1).nonzero().squeeze(1)
                part = self._frozen[name].reshape(-1).scatter(0, index, part)
            named[name] = part.reshape(self._shapes[name])
        return named

    def with_weights(self, weights: Float[Tensor, "D"]) -> Network:
        """The same network centred on other weights."""
        self._check_size(weights)
        other = copy.copy(self)
        other.weights = weights.detach().to(self.weights).clone()
        return other

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Network:
        """The same network with other buffers, e.g. refreshed BatchNorm statistics."""
        other = copy.copy(self)
        other._frozen = self._frozen | dict(buffers)
        return other

    def warn_of_mode(self) -> None:
        """Say, where it matters, that a module in training mode is read in evaluation mode."""
        if self.in_training:
            warnings.warn(
                f"module: {' and '.join(self.in_training)} in training mode, read in evaluation "
                "mode: dropout off, BatchNorm by its stored statistics. The module itself stays as "
                "it is; call .eval() on it before Network(module) if this is what you want",
                stacklevel=4,
            )

    def module_with(self, weights: Float[Tensor, "D"] | None = None) -> nn.Module:
        """A new module, in evaluation mode, holding these weights (default: the network's)."""
        self._check_size(self.weights if weights is None else weights)
        module = _private_copy(self._module)
        values = self._frozen | self.unflatten(self.weights if weights is None else weights)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(values[name])
        return module

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Network:
        """The same network on another device or in another floating dtype."""
        module = self.module_with().to(device=device, dtype=dtype)
        other = Network(module, self.selection, self.output)
        other.in_training = self.in_training
        return other

    # --- calls ------------------------------------------------------------------------------

    def __call__(self, weights: Float[Tensor, "D"], inputs: Inputs) -> Float[Tensor, "N C"]:
        """Outputs f(x; w) of shape (N, C) for one weight vector; differentiable in w."""
        self._check_size(weights)
        args, kwargs = arguments(inputs)
        with taking_turns, plain_attention():
            out = functional_call(
                self._module, self._frozen | self.unflatten(weights), args, kwargs
            )
        return self.as_outputs(out, inputs)

    def batched(self, weights: Float[Tensor, "S D"], inputs: Inputs) -> Float[Tensor, "S N C"]:
        """Outputs of S weight vectors on the same inputs, in one vectorised call if possible."""
        many = Vectorised(self.__call__)
        many.loops = self._loops
        outputs = many(weights, inputs)
        self._loops = many.loops
        return outputs

    def call(
        self, module: nn.Module, inputs: Inputs, weights: Float[Tensor, "D"] | None = None
    ) -> Float[Tensor, "N C"]:
        """Outputs of a module of this architecture as it is: its weights, mode and hooks.

        Args:
            module: the module.
            inputs: its inputs.
            weights: stand in for the selected parameters, which keep their values.
        """
        args, kwargs = arguments(inputs)
        if weights is None:
            return self.as_outputs(module(*args, **kwargs), inputs)
        return self.as_outputs(
            functional_call(module, self.unflatten(weights), args, kwargs), inputs
        )

    def check(self, inputs: Inputs) -> int:
        """Try the first rows and return the number of outputs C.

        Raises:
            InputError: the module does not take these inputs, or returns another shape.
            InputTypeError: the module returns something else than a tensor.
        """
        self._check_placement(inputs)
        rows, used = take(inputs, slice(2)), _copied(take(inputs, slice(2)))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                out, again = self(self.weights, used), self(self.weights, _copied(rows))
                alone = self(self.weights, _copied(take(rows, slice(1))))
        except (InputError, InputTypeError):
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if "more than 1 value per channel when training" in reason:
                fail(
                    "module",
                    "normalisation with running statistics",
                    "one by the rows of a batch, also in evaluation mode",
                    "Use track_running_stats=True, or batch_norm with training=self.training",
                )
            got = " and ".join(
                f"rows of shape {tuple(t.shape[1:])}, {t.dtype}" for t in leaves(rows)
            )
            odd = [t for t in leaves(rows) if t.is_floating_point() and t.dtype != self.dtype]
            fail(
                "inputs",
                "what the module takes",
                f"{got}: {reason[:200]}",
                f"Convert the inputs with .to({self.dtype})"
                if odd
                else "Convert or reshape the inputs (whole numbers with .float())",
            )
        if not all(map(torch.equal, leaves(rows), leaves(used))):
            fail(
                "module",
                "inputs left as they are",
                "inputs the call has written into",
                "Write x = x / 255, say, for x /= 255",
            )
        if bool(out.isnan().any()):
            fail(
                "module",
                "outputs that are numbers",
                "NaN",
                "Train it again from finite weights, with a lower learning rate",
            )
        if not _same(out, again):
            fail(
                "module",
                "the same outputs at each call in evaluation mode",
                "others",
                "Use nn.Dropout, or functional.dropout with training=self.training",
            )
        if not _same(out[:1], alone):
            fail(
                "module",
                "outputs of a row that depend on that row alone",
                "others beside other rows",
                "Use batch_first=True, or normalisation with running statistics",
            )
        return out.shape[-1]

    def refreshed(
        self, weights: Float[Tensor, "D"], batches: Iterator[tuple[Inputs, Any]]
    ) -> Network:
        """The network at `weights` with BatchNorm statistics re-estimated on `batches`.

        Statistics are averages over batches, weighted by their rows. Costs one forward pass over
        the batches per weight vector, so S draws cost S passes.

        Args:
            weights: where to evaluate.
            batches: pairs (inputs, anything), read once.
        """
        module = self.module_with(weights)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        norms = [m for m in norms if m.track_running_stats]
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        with torch.no_grad():
            seen = 0
            for inputs, _ in batches if norms else ():
                rows = n_rows(inputs)
                if rows == 1 and seen:  # has no variance of its own
                    continue
                seen += rows
                for norm in norms:
                    norm.momentum = rows / seen
                args, kwargs = arguments(inputs)
                module(*args, **kwargs)
        other = self.with_weights(weights).with_buffers(
            {name: b.clone() for name, b in module.named_buffers()}
        )
        other.in_training = ()
        return other

    # --- checks -----------------------------------------------------------------------------

    def _check_size(self, weights: Tensor) -> None:
        if weights.shape != (self.size,):
            fail(
                "weights",
                f"{self.size} entries",
                f"shape {tuple(weights.shape)}",
                "The subspace must belong to this network's selected parameters",
            )

    def _check_placement(self, inputs: Inputs) -> None:
        for tensor in leaves(inputs):
            if tensor.device != self.device:
                fail(
                    "inputs",
                    f"tensors on {self.device}, where the module is",
                    tensor.device,
                    "Move one of them with .to(device)",
                )

    def as_outputs(self, out: Any, inputs: Inputs) -> Tensor:
        """What a module returned for these inputs, as outputs of shape (N, C)."""
        return as_outputs(out, inputs, self.output)


def as_outputs(out: Any, inputs: Inputs, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """What a module returned for these inputs, as outputs of shape (N, C).

    Args:
        out: what it returned.
        inputs: of the module.
        output: picks the tensor out of that.

    Raises:
        InputError: outputs of another shape, or of another type than real numbers.
        InputTypeError: not a tensor.
    """
    if output is not None:
        out = output(out)
    if not isinstance(out, Tensor):
        fail_type(
            "module",
            "one tensor as its output",
            out,
            "Pass output=..., e.g. output=lambda out: out.logits",
        )
    n = n_rows(inputs)
    if not out.is_floating_point():
        fail("module", "real numbers as outputs", out.dtype, "Return logits or means, not labels")
    if out.ndim < 2 and out.shape[:1] == (n,):
        return out.unsqueeze(-1)
    if out.ndim < 2 and n == 1:  # one row, squeezed away
        return out.reshape(1, -1)
    if out.ndim != 2 or out.shape[0] != n:
        fail(
            "module",
            f"outputs of shape ({n}, C) for {n} inputs",
            tuple(out.shape),
            "Flatten the outputs per observation",
        )
    return out


def check_network(network: Any) -> None:
    """Check that a network is one, and not the module it is to be made from."""
    if not isinstance(network, Network):
        fail_type("network", "a Network", network, "Wrap the module: Network(module)")


def architecture_of(module: nn.Module) -> str:
    """What a module prints as, to tell one architecture from another.

    Args:
        module: the module.

    Example:
        >>> architecture_of(nn.Tanh())
        'Tanh: Tanh()'
    """
    text = f"{type(module).__qualname__}: {module!r}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # a function prints its address


def _copied(inputs: Inputs) -> Inputs:
    return take(inputs, torch.arange(n_rows(inputs), device=leaves(inputs)[0].device))


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Fused attention has no forward-mode rule and no batching rule: use plain kernels."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs as a module is called with them: a tuple by position, a dict by name."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs, {}) if isinstance(inputs, tuple) else ((inputs,), {})


def _results(module: nn.Module) -> dict[int, Any]:
    """Copies of what deepcopy refuses: tensors that hooks such as weight norm left behind."""
    loose = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return {
        id(t): torch.empty(0) if is_functorch_wrapped_tensor(t) else t.detach().clone()
        for t in loose
        if is_functorch_wrapped_tensor(t) or not t.is_leaf
    }


def _private_copy(module: nn.Module) -> nn.Module:
    """A structural copy in evaluation mode with values of its own."""
    if any(map(is_lazy, module.parameters())):
        fail(
            "module",
            "parameters with shapes",
            "lazy ones that wait for a first batch",
            "Call the module on a batch once",
        )
    try:
        duplicate = copy.deepcopy(module, _results(module))
    except Exception as error:
        fail(
            "module",
            "a module that can be copied",
            f"{type(error).__name__}: {error}",
            "Detach what cannot be copied (trainers, open files) first",
        )
    return duplicate.eval()


def _in_training(module: nn.Module) -> tuple[str, ...]:
    """Kinds of layers in training mode whose outputs would be others in evaluation mode."""
    kinds = {
        type(m).__name__: None
        for m in module.modules()
        if m.training
        and (
            isinstance(m, nn.modules.batchnorm._NormBase)
            and m.track_running_stats
            or isinstance(m, nn.modules.dropout._DropoutNd)
            and m.p > 0
            or isinstance(m, (nn.RNNBase, nn.MultiheadAttention))
            and m.dropout > 0
        )
    }
    return tuple(kinds)


def _aliases(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter, tied ones under each of theirs, and the first of them."""
    first = {id(p): n for n, p in module.named_parameters()}
    return {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}


def _layer(name: str) -> str:
    """The layer a parameter belongs to, also as part of a parametrisation such as weight norm."""
    return (
        re.split(r"(?:^|\.)parametrizations\.", name)[0]
        if "parametrizations." in name
        else (name.rpartition(".")[0])
    )


def select(module: nn.Module, parameters: Selection) -> dict[str, Tensor | None]:
    """Names of the selected trainable parameters, each with its mask or None."""
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    aliases = {n: first for n, first in _aliases(module).items() if first in trainable}
    if not trainable:
        fail(
            "module",
            "at least one trainable parameter",
            "none (all have requires_grad=False)"
            if any(True for _ in module.parameters())
            else "a module without parameters",
            "Set requires_grad on what should be random",
        )
    if isinstance(parameters, Mapping):
        return _masked(trainable, {aliases.get(n, n): mask for n, mask in parameters.items()})
    if parameters == "all":
        return dict.fromkeys(trainable)
    if parameters == "last-layer":
        last = _layer(list(aliases)[-1])
        wanted = {first for n, first in aliases.items() if _layer(n) == last}
    elif callable(parameters):
        wanted = {n for n, p in trainable.items() if parameters(n, p)}
    else:
        patterns = [parameters] if isinstance(parameters, str) else parameters
        if not isinstance(patterns, (list, tuple)):
            fail_type(
                "parameters",
                "a pattern, a list of patterns, a function or a dict of masks",
                parameters,
            )
        wanted = {first for n, first in aliases.items() if any(fnmatchcase(n, p) for p in patterns)}
    chosen: dict[str, Tensor | None] = dict.fromkeys(n for n in trainable if n in wanted)
    if not chosen:
        fail(
            "parameters",
            "a pattern that selects a trainable parameter",
            repr(parameters),
            "Trainable are: " + ", ".join(list(trainable)[:8]),
        )
    return chosen


def _masked(
    trainable: Mapping[str, Tensor], masks: Mapping[str, Tensor | np.ndarray]
) -> dict[str, Tensor | None]:
    chosen: dict[str, Tensor | None] = {}
    unknown = [name for name in masks if name not in trainable]
    if unknown:
        fail("parameters", "names of trainable parameters", ", ".join(unknown))
    for name, parameter in trainable.items():
        if name not in masks:
            continue
        mask = torch.as_tensor(masks[name])
        if mask.dtype != torch.bool or mask.shape != parameter.shape:
            fail(
                f"parameters[{name!r}]",
                f"a boolean mask of shape {tuple(parameter.shape)}",
                f"{mask.dtype} of shape {tuple(mask.shape)}",
            )
        if mask.any():
            chosen[name] = mask.to(parameter.device)
    if not chosen:
        fail("parameters", "a mask that selects at least one weight", "masks that select none")
    return chosen

"""A module as a pure function of one flat weight vector.

`Network` calls a private copy of the user's module in evaluation mode with
`torch.func.functional_call`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.networks.adapters.in_use import replaced_names
from subbayes.networks.adapters.names import base_names_of, is_of_transformers
from subbayes.networks.batch_statistics import collect_statistics, statistics_batches
from subbayes.networks.embeddings import check_embeddings
from subbayes.networks.global_state import (
    attention_without_fused_kernels,
    outside_inference_mode,
    recurrence_without_fused_kernels,
)
from subbayes.networks.identity.architecture import architecture_of
from subbayes.networks.identity.attributes import attribute_tensors, set_attributes
from subbayes.networks.identity.shared_weights import SharedWeights
from subbayes.networks.layer_kinds import (
    batch_norms,
    fixed_batch_norms,
    has_dropout,
    layers_in_training,
)
from subbayes.networks.module_copy import (
    CopiedUnderLock,
    call_with,
    private_copy,
    set_values,
    tied_names,
)
from subbayes.networks.outputs import HALF, as_outputs, check_outputs
from subbayes.networks.selection import Selection, aliases_of, select, selects_adapters
from subbayes.networks.token_outputs import check_decoder_inputs, with_decoder
from subbayes.networks.tracing.private_torch import convert_dtype, count_bytes, uncompiled
from subbayes.networks.tracing.vectorised import Vectorised, contiguous
from subbayes.utils.checks import check_device, fail, fail_type
from subbayes.utils.memory import BoundedCache
from subbayes.utils.seeding import torch_lock
from subbayes.utils.trees import leaves, n_rows, row_kind, take, tree_map
from subbayes.utils.types import Inputs, OutputFunction, Weights, WeightsBatch
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.subspace import Subspace


def _start_states(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Zero states made from the input of a recurrent layer, where it is called without states."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].ndim != 3:
        return None
    rows = args[0].shape[0 if layer.batch_first else 1]
    runs = layer.num_layers * (2 if layer.bidirectional else 1)
    state = args[0].new_zeros(runs, rows, layer.proj_size or layer.hidden_size)
    if not isinstance(layer, nn.LSTM):
        return args[0], state
    return args[0], (state, args[0].new_zeros(runs, rows, layer.hidden_size))


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_LARGE = 64 * 2**20  # bytes of frozen tensors


class Network(CopiedUnderLock):
    r"""A module as a pure function f(x; w) of one flat vector w of selected weights.

    The selected parameters, flattened in `named_parameters` order, are the weights
    $w \in \mathbb{R}^D$; all others are frozen at their current values. Tied parameters count once.
    Dropout is off and BatchNorm uses its stored statistics. The user's module and its mode are not
    changed. Selected and trainable parameters are copied, and buffers, so that later changes to
    them do not affect the network; parameters with `requires_grad=False`, such as the weights of a
    base model beside adapters, are shared with the module and take no further memory.

    Weights of 16 bits (float16, bfloat16) are kept in float32 and rounded in each call; outputs of
    16 bits are converted to float32.

    Args:
        module: any module that returns one tensor of shape (N, C), or (N,) for C = 1, or an object
            whose attribute `logits` is one.
        parameters: which trainable parameters are weights: "all"; "last-layer", as registered;
            "adapters" (LoRA and others, of the library peft or with the usual names); a name
            pattern such as "head.*"; a list of these; a function of (name, parameter); or a dict
            from names to boolean masks. Parameters with `requires_grad=False` stay frozen.
        output: selects the output tensor from the return value of the module, e.g.
            `lambda out: out.logits`.
        copy_frozen: copy frozen parameters, so that later changes of the module have no effect; by
            default unless `parameters` selects adapters, whose base model is shared.
        copy_module: copy the module; False for one in evaluation mode that nothing else uses.

    Attributes:
        base_names: frozen parameters that artifacts do not hold: for "adapters", those of the base
            model, which is kept elsewhere; see `subbayes.networks.saving`.
        in_training: kinds of layers in training mode that behave differently in evaluation mode.
        fixed_norms: names of frozen BatchNorm layers in evaluation mode, where they stay.
        row_bytes: bytes of activations per observation, by kind of inputs.
        tied: further names of shared parameters, with the first name.
        unused: frozen parameters of heads with trained copies.

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

    is_sharded = False  # among processes

    @outside_inference_mode
    def __init__(
        self,
        module: nn.Module,
        parameters: Selection = "all",
        output: OutputFunction | None = None,
        *,
        copy_frozen: bool | None = None,
        copy_module: bool = True,
    ) -> None:
        if not isinstance(module, nn.Module):
            fail_type("module", "a torch.nn.Module", module)
        if isinstance(module, _WRAPPERS):
            fail_type(
                "module", "a plain torch.nn.Module", module, "Pass the module it was made from"
            )
        module = uncompiled(module)
        if output is not None and not callable(output):
            fail_type("output", "a function of what the module returns", output)
        self.output = with_decoder(module, output)
        self.selection = parameters
        self.in_training, self.fixed_norms = layers_in_training(module), fixed_batch_norms(module)
        chosen = select(module, parameters)
        check_embeddings(module, chosen)
        adapters = selects_adapters(parameters)
        self.copy_frozen = not adapters if copy_frozen is None else copy_frozen
        self._module = private_copy(module, chosen, self.copy_frozen) if copy_module else module
        self.tied = tied_names(self._module)
        self._has_lstm = any(isinstance(part, nn.LSTM) for part in self._module.modules())
        named = dict(self._module.named_parameters())
        self._set_parameters(named, chosen)
        self._frozen = {
            n: p.detach() for n, p in named.items() if n not in chosen or n in self._masks
        }
        self.unused = frozenset(replaced_names(self._module) if adapters else ())
        base = base_names_of(named, [n for n in self._frozen if n not in self.unused])
        self.base_names: tuple[str, ...] = base if adapters else ()
        self.shared_weights = None if self.copy_frozen else SharedWeights(self._frozen)
        self._frozen |= dict(self._module.named_buffers())
        self.weights: Tensor = self.flatten(named)

    def _set_parameters(
        self, named: Mapping[str, nn.Parameter], chosen: Mapping[str, Tensor | None]
    ) -> None:
        """Set what follows from the parameters that are weights, and empty caches."""
        self.names: tuple[str, ...] = tuple(chosen)
        self._masks = {name: mask for name, mask in chosen.items() if mask is not None}
        self._shapes = {name: named[name].shape for name in self.names}
        self._dtypes = {name: named[name].dtype for name in self.names}
        self._sizes = [
            int(self._masks[n].sum()) if n in self._masks else named[n].numel() for n in self.names
        ]
        self._not_vectorised: str | None = None
        self.fallbacks: set[str] = set()  # of which this network and its copies have warned
        self._checked: BoundedCache[int] = BoundedCache()
        self.row_bytes: BoundedCache[int] = BoundedCache()

    # --- properties -------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of selected weights D."""
        return self.weights.numel()

    @property
    def has_batchnorm(self) -> bool:
        """Whether the module has BatchNorm layers, besides `fixed_norms`."""
        return bool(batch_norms(self._module, self.fixed_norms))

    @property
    def has_dropout(self) -> bool:
        """Whether the module has layers with dropout."""
        return any(map(has_dropout, self._module.modules()))

    @property
    def is_traced(self) -> bool:
        """Whether traced graphs are worth their time.

        They are not for models of transformers, which read attention masks through Python, nor
        beside a large frozen model, whose arithmetic takes far longer than the calls.
        """
        large = sum(t.nbytes for t in self._frozen.values()) > _LARGE
        return not (large or is_of_transformers(self._module))

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not weights, and buffers, by name."""
        return dict(self._frozen)

    @property
    def used_frozen(self) -> dict[str, Tensor]:
        """Those that outputs may depend on: `frozen` without `unused`."""
        return {name: t for name, t in self._frozen.items() if name not in self.unused}

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean masks of the parameters of which only a part are weights, by name."""
        return dict(self._masks)

    @property
    def architecture(self) -> str:
        """The printed form of the module, which identifies its architecture."""
        return architecture_of(self._module)

    @property
    def attributes(self) -> dict[str, Tensor]:
        """Tensors that the module keeps beside its parameters and buffers."""
        return attribute_tensors(self._module)

    def set_attributes(self, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors that the private copy of the module keeps, as `attributes` returns them."""
        set_attributes(self._module, tensors)

    @property
    def template(self) -> nn.Module:
        """The private copy of the module, whose selected parameters may have any values."""
        return self._module

    @property
    def forward(self) -> Callable[..., Any]:
        """The method of the module that `call` calls, for its signature."""
        return self._module.forward

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weights.dtype

    @property
    def rounding(self) -> float:
        """The relative rounding error of the coarsest floating dtype in the module."""
        values = [self.weights, *self._frozen.values(), *self._module.parameters()]
        return max(
            torch.finfo(t.dtype).eps for t in values if t.is_floating_point() or t.is_complex()
        )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.device

    @property
    def spans(self) -> dict[str, slice]:
        """Positions of each selected parameter in the flat vector."""
        ends = np.cumsum(self._sizes)
        return {
            name: slice(int(end) - size, int(end))
            for name, size, end in zip(self.names, self._sizes, ends, strict=True)
        }

    def owners(self) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
        """Submodules that own selected parameters: name, module, parameter names by attribute.

        A shared parameter has its first name in all submodules.
        """
        aliases = aliases_of(self._module)
        for name, module in self._module.named_modules():
            own_parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            full = {own: f"{name}.{own}" if name else own for own, _ in own_parameters}
            chosen = {
                own: aliases[path]
                for own, path in full.items()
                if aliases.get(path) in self._shapes
            }
            if chosen:
                yield name, module, chosen

    @contextmanager
    def forward_hooks(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Call a hook (module, args, kwargs, output) after each call of the named submodules."""
        modules = dict(self._module.named_modules())
        with torch_lock:
            handles = [
                modules[name].register_forward_hook(hook, with_kwargs=True)
                for name, hook in hooks.items()
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    @contextmanager
    def states_by_row(self) -> Iterator[None]:
        """Start recurrent layers from states that are batched by `vmap` as their inputs are.

        The layers add the inputs to their states in place, which states without rows refuse.
        """
        layers = [part for part in self._module.modules() if isinstance(part, nn.RNNBase)]
        with torch_lock:
            handles = [layer.register_forward_pre_hook(_start_states) for layer in layers]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def __repr__(self) -> str:
        kind = type(self._module).__name__
        return f"Network({kind}, {self.size} weights in {len(self.names)} parameters)"

    # --- weights ----------------------------------------------------------------------------

    def flatten(self, source: nn.Module | Mapping[str, Tensor]) -> Weights:
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
        flat = torch.cat(parts)
        return flat.float() if flat.dtype in HALF else flat.clone()

    def unflatten(self, weights: Weights) -> dict[str, Tensor]:
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

    def with_weights(self, weights: Weights) -> Network:
        """The same network centred on other weights."""
        self._check_size(weights)
        other = copy.copy(self)
        other.weights = weights.detach().to(self.weights).clone()
        other._checked = BoundedCache()
        return other

    def with_buffers(self, buffers: Mapping[str, Tensor]) -> Network:
        """The same network with other buffers, e.g. refreshed BatchNorm statistics."""
        other = copy.copy(self)
        other._frozen = self._frozen | dict(buffers)
        if any(
            name in self.base_names and t is not self._frozen[name] for name, t in buffers.items()
        ):
            other.shared_weights = SharedWeights({n: other._frozen[n] for n in self.base_names})
        other._checked = BoundedCache()
        return other

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a parameter of the weights in the module."""
        return self._dtypes[name]

    def warn_if_training(self) -> None:
        """Warn that a module in training mode is evaluated in evaluation mode."""
        if self.in_training:
            warn_user(
                f"module: {' and '.join(self.in_training)} in training mode, evaluated in "
                "evaluation mode: dropout is off, BatchNorm uses its stored statistics. The module "
                "itself is not changed; call .eval() on it before Network(module) to avoid this "
                "warning"
            )

    def module_with(self, weights: Weights | None = None) -> nn.Module:
        """A new module in evaluation mode with these weights (default: the network's)."""
        weights = self.weights if weights is None else weights
        self._check_size(weights)
        module = private_copy(self._module, self.names, self.copy_frozen)
        values = self._frozen | self.unflatten(weights)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.data_ptr() != values[name].data_ptr() or not tensor.numel():
                    set_values(tensor, values[name])
        return module

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Network:
        """The same network on another device or in another floating dtype."""
        module = self.module_with().to(device=check_device(device))
        if dtype is not None:
            convert_dtype(module, dtype)
        other = self.of_module(module)
        other.in_training = self.in_training
        return other

    def of_module(self, module: nn.Module) -> Network:
        """The same network of a changed copy of its module, which nothing else uses any more."""
        other = Network(
            module.eval(),
            self.selection,
            self.output,
            copy_frozen=self.copy_frozen,
            copy_module=False,
        )
        other.base_names, other.unused = self.base_names, self.unused
        other.fixed_norms = self.fixed_norms
        return other

    # --- calls ------------------------------------------------------------------------------

    def __call__(self, weights: Weights, inputs: Inputs) -> Float[Tensor, "N C"]:
        """Outputs f(x; w) of shape (N, C) for one weight vector; differentiable in w."""
        self._check_size(weights)
        args, kwargs = arguments(contiguous(inputs))
        recurrent = recurrence_without_fused_kernels() if self._has_lstm else nullcontext()
        with torch_lock, attention_without_fused_kernels(), recurrent:
            values = self._frozen | self.unflatten(weights)
            out = call_with(self._module, values, self.tied, args, kwargs)
        return self.as_outputs(out, inputs)

    def batched(self, weights: WeightsBatch, inputs: Inputs) -> Float[Tensor, "S N C"]:
        """Outputs of S weight vectors on the same inputs, in one vectorised call if possible."""
        batched = Vectorised(self.__call__, said=self.fallbacks)
        batched.reason = self._not_vectorised
        outputs, self._not_vectorised = batched(weights, inputs), batched.reason
        return outputs

    def call(
        self,
        module: nn.Module,
        inputs: Inputs,
        weights: Weights | Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "N C"]:
        """Outputs of a module of this architecture in its own mode, with its own hooks.

        Args:
            module: the module.
            inputs: its inputs.
            weights: used instead of its selected parameters, or parameters by name.
        """
        args, kwargs = arguments(inputs)
        values = self.unflatten(weights) if isinstance(weights, Tensor) else weights
        return self.as_outputs(call_with(module, values, self.tied, args, kwargs), inputs)

    def check(self, inputs: Inputs) -> int:
        """Evaluate the first rows and return the number of outputs C.

        Inputs of the same shapes and dtypes are checked once.

        Raises:
            InputError: the module does not accept these inputs, or returns another shape.
            InputTypeError: the module does not return a tensor.
        """
        check_decoder_inputs(self.output, inputs)
        for tensor in leaves(inputs):
            if tensor.device != self.device:
                expected = f"tensors on {self.device}, where the module is"
                fail("inputs", expected, tensor.device, "Move one of them with .to(device)")
        return self._checked.get(
            (row_kind(inputs), n_rows(inputs) == 1),
            lambda: check_outputs(
                partial(self, self.weights), take(inputs, slice(2)), self.dtype, self.rounding
            ),
        )

    def bytes_per_row(self, inputs: Inputs) -> int:
        """Bytes of activations per observation, for choosing batch sizes."""

        def count(rows: int) -> int:
            first = take(inputs, [0] * rows)
            with torch.no_grad():
                return count_bytes(lambda: self(self.weights, first))

        return self.row_bytes.get(row_kind(inputs), lambda: max(count(2) - count(1), 1))

    def changed_weights(self, *, every_number: bool = False) -> str | None:
        """The name of a parameter of the base model that has changed since the network was made.

        Args:
            every_number: read all numbers that the checksum reads, as saving does; by default a
                sample of them, unless torch has counted a modification.
        """
        if not self.base_names or self.shared_weights is None:
            return None
        return self.shared_weights.changed(self.frozen, self.base_names, every_number=every_number)

    def warn_if_changed(self) -> None:
        """Warn of predictions with a base model that has changed since the network was made."""
        if (name := self.changed_weights()) is not None:
            warn_user(
                f"module: weights of the base model have changed since the posterior was fitted or "
                f"loaded ({name}), and its predictions with them: load it around a fresh base "
                "model, and merge adapters or train in a copy"
            )

    def refresh_batchnorm(
        self, weights: Weights, data: Data | Iterable[tuple[Inputs, Any]]
    ) -> Network:
        """The network at `weights` with BatchNorm statistics re-estimated on `data`.

        Mean and variance of the values of each layer over all rows, in one forward pass; see
        `subbayes.networks.batch_statistics`.

        Args:
            weights: the weights of the result.
            data: the rows, or pairs (inputs, anything), read once; inputs are moved to the device.

        Raises:
            InputError: one row alone, whose variance is undefined, or sharded rows, since the
                statistics need all of them.
        """
        if isinstance(data, Data) and data.division is not None and self.has_batchnorm:
            expected = "all rows in each process, for BatchNorm statistics"
            remedy = "Pass all rows to each process"
            fail("data", expected, "sharded rows", remedy)
        buffers = {name: self._frozen[name].clone() for name, _ in self._module.named_buffers()}
        if any(norm.track_running_stats for norm in batch_norms(self._module, self.fixed_norms)):
            module = self.module_with(weights)
            norms = [m for m in batch_norms(module, self.fixed_norms) if m.track_running_stats]
            batches = statistics_batches(self.bytes_per_row, self.device, data)
            collect_statistics(module, norms, map(arguments, batches))
            buffers = dict(module.named_buffers())
        other = self.with_weights(weights).with_buffers(buffers)
        other.in_training = ()
        return other

    def is_centred_on(self, weights: Weights) -> bool:
        """Whether its weights are these, and with them its BatchNorm statistics."""
        return torch.equal(weights.to(self.weights), self.weights)

    def lies_in(self, subspace: Subspace) -> bool:
        """Whether its weights are a point of a subspace, within rounding.

        If so, its BatchNorm statistics are those of a point of the subspace.

        Args:
            subspace: of its weights.

        Example:
            >>> from subbayes.subspace import DenseSubspace
            >>> network = Network(nn.Linear(2, 1))
            >>> around = DenseSubspace(network.weights + 1, torch.ones(1, 3))
            >>> network.lies_in(around), network.with_weights(torch.arange(3.0)).lies_in(around)
            (True, False)
        """
        if self.is_centred_on(subspace.shift):
            return True
        weights = self.weights.to(subspace.shift)
        nearest = subspace.weights(subspace.project(weights))
        within = 1e-3 * (weights - subspace.shift).norm() + 1e-5 * weights.norm()
        return bool((nearest - weights).norm() <= within)

    def centred_on(self, weights: Weights, data: Any) -> Network:
        """The network at `weights`, with BatchNorm statistics of these weights.

        Args:
            weights: the weights of the result, shape (D,).
            data: the training data, in any form of `Data.of`; the statistics, if there are any, are
                re-estimated on them in one pass if the network has other weights.

        Raises:
            InputError: another number of weights.

        Example:
            >>> network = Network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
            >>> data = torch.randn(20, 2) + 5, torch.zeros(20)
            >>> moved = network.centred_on(torch.ones(network.size), data)
            >>> float(moved(moved.weights, data[0]).mean().round())
            1.0
        """
        self._check_size(weights)
        if self.is_centred_on(weights):
            return self
        if not self.has_batchnorm:
            return self.with_weights(weights)
        return self.refresh_batchnorm(weights.to(self.weights), Data.of(data))

    def _check_size(self, weights: Tensor) -> None:
        if weights.shape != (self.size,):
            fail(
                "weights",
                f"{self.size} entries",
                f"shape {tuple(weights.shape)}",
                "The subspace must belong to this network's selected parameters",
            )

    def as_outputs(self, out: Any, inputs: Inputs) -> Tensor:
        """Check the return value of a module and return outputs of shape (N, C)."""
        return as_outputs(out, inputs, self.output)


def check_network(network: Any) -> None:
    """Check that `network` is a `Network` and not a plain module."""
    if not isinstance(network, Network):
        fail_type("network", "a Network", network, "Wrap the module: Network(module)")


def as_network(
    module: nn.Module | Network, parameters: Selection = "all", output: OutputFunction | None = None
) -> Network:
    """The network of a module, or the network itself."""
    return module if isinstance(module, Network) else Network(module, parameters, output)


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments of a module: a tuple by position, a dict by name.

    A module that calls `requires_grad_` of its inputs changes aliases, and not the data.
    """
    inputs = tree_map(lambda tensor: tensor if tensor.requires_grad else tensor.detach(), inputs)
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs, {}) if isinstance(inputs, tuple) else ((inputs,), {})

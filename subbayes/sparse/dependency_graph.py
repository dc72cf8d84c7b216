"""Which layer reads the units of which, and whether rows are read one by one, by tracing a module.

Where units branch (skip connections) or pass through something unknown there is no link. Nor is
there one where the reader works along another axis: units of linear layers are along the last axis,
channels of convolutions along the second; or where a size is written down, as in x.view(-1, 320),
which would be another with fewer units.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from subbayes.networks.global_state import torch_lock
from subbayes.networks.layer_kinds import BATCH_NORMS
from subbayes.networks.network import arguments
from subbayes.sparse.module_surgery import LAYERS, hooked, own_parameters

__all__ = ["Flow", "Link", "links", "readers_of_inputs"]

# What a node does is the type of a module, a function, or a method of tensors (`_what`).
_NAMES = (
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "hardswish",
    "hardtanh",
    "hardsigmoid",
    "tanh",
    "sigmoid",
    "logsigmoid",
    "softplus",
    "softsign",
    "clamp",
    "clamp_min",
)
_PER_VALUE = {
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    *(
        getattr(space, name)
        for space in (functional, torch, Tensor)
        for name in _NAMES
        if hasattr(space, name)
    ),
}
_NOTHING = {
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    functional.dropout,
    functional.dropout2d,
    Tensor.contiguous,
}
_POOLS: dict[int, set[Any]] = {  # by dimensions of the weight of what they pool
    2: set(),
    3: {
        nn.MaxPool1d,
        nn.AvgPool1d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveMaxPool1d,
        functional.max_pool1d,
        functional.avg_pool1d,
        functional.adaptive_avg_pool1d,
        torch.max_pool1d,
        torch.avg_pool1d,
        torch.adaptive_avg_pool1d,
        functional.adaptive_max_pool1d,
    },
    4: {
        nn.MaxPool2d,
        nn.AvgPool2d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveMaxPool2d,
        functional.max_pool2d,
        functional.avg_pool2d,
        functional.adaptive_avg_pool2d,
        torch.max_pool2d,
        functional.adaptive_max_pool2d,
    },
}
_OVER_POSITIONS = {torch.mean, Tensor.mean, torch.amax, Tensor.amax}
_AVERAGES = {nn.AvgPool1d, nn.AvgPool2d, functional.avg_pool1d, functional.avg_pool2d}
_AVERAGED = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)  # arguments of the functions
_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_OVERWRITE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Hardtanh)
_JOINS = (operator.add, operator.mul, torch.add, torch.mul)


@dataclass
class Link:
    """Units of `source` that `reader` alone reads, through `path`.

    Attributes:
        source: a layer.
        reader: another.
        path: what happens to the units between, as functions of a constant for each.
        norms: those in between.
        by_unit: whether these surely have a number for each unit. After a linear layer they do if
            its outputs are (n, units), and not if these are (n, t, units).
    """

    source: str
    reader: str
    path: list[Callable[[Tensor], Tensor]]
    norms: list[str]
    by_unit: bool


def links(module: nn.Module, names: Collection[str], example: Any = None) -> list[Link]:
    """The links from layers of these names that lead to a linear or convolutional layer.

    A layer that is called twice has none, nor has a grouped convolution, one whose weights are
    shared, computed, or read by other ways than its call, or one with hooks; and none goes through
    what has hooks.

    Args:
        module: the module, in evaluation mode.
        names: of layers.
        example: inputs of the module: they show which outputs of linear layers are (n, units).
            Without them those are known that come after flattening.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> [(link.source, link.reader) for link in links(net, ("0", "2"))]
        [('0', '2')]
    """
    graph = _graph(module)
    if graph is None:
        return []
    modules = dict(module.named_modules())
    once = _once(graph, module)
    found = _in_blocks(graph, module, names)
    for node in graph.nodes:
        own = _called(node, modules)
        if isinstance(own, LAYERS) and node.target in names and node.target in once:
            if getattr(own, "groups", 1) != 1:
                continue  # its units go with groups of its inputs
            link = _followed(node, modules)
            if link is not None and once.issuperset((link.reader, *link.norms)):
                found.append(link)
    unsure = [link for link in found if not link.by_unit]
    if unsure and example is not None:
        tables = _tables(module, [link.source for link in unsure], example)
        for link in unsure:
            link.by_unit = link.source in tables
    return found


def readers_of_inputs(module: nn.Module, names: Collection[str]) -> tuple[list[str], bool]:
    """The layers that read the module's inputs themselves, and whether these surely are all.

    They may be flattened, normalised or pooled before, or go through functions of single numbers.

    Args:
        module: the module, in evaluation mode.
        names: of layers.

    Returns:
        The names in the order of their calls. None where control flow depends on data.

    Example:
        >>> readers_of_inputs(nn.Sequential(nn.Flatten(), nn.Linear(4, 9), nn.Linear(9, 1)), ("1",))
        (['1'], True)
    """
    if "" in names:  # the module is a layer
        return [""], True
    graph = _graph(module)
    if graph is None:
        return [], False
    modules, found, alone = dict(module.named_modules()), [], True
    waiting = [node for node in graph.nodes if node.op == "placeholder"]
    while waiting:
        for user in _users(waiting.pop(0)):
            if user.op == "call_module" and user.target in names:
                found.append(user)
            elif _passes(user, modules):
                waiting.append(user)
            else:
                alone = False
    return list(dict.fromkeys(str(node.target) for node in graph.nodes if node in found)), alone


@torch.no_grad()
def _tables(module: nn.Module, names: Collection[str], example: Any) -> set[str]:
    """Layers whose outputs on an example are (n, units)."""
    found: set[str] = set()

    def note(name: str, _: nn.Module, __: Any, outputs: Tensor) -> None:
        if outputs.ndim == 2:
            found.add(name)

    hooks = [
        module.get_submodule(name).register_forward_hook(functools.partial(note, name))
        for name in names
    ]
    try:
        args, kwargs = arguments(example)
        module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class Flow:
    """What is known of how numbers flow through a module.

    Attributes:
        by_row: whether it reads the last dimension of its one input, row by row: there is nothing
            but linear layers, functions of single numbers, and sums and products of what these
            give. Then inputs may have any number of leading dimensions.
        functions: modules, functions of single numbers, that alone read the outputs of a layer
            and read nothing else: they may overwrite these.
        read: layers whose parameters something reads itself, beside their calls.
    """

    by_row: bool
    functions: tuple[str, ...]
    read: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module, names: Collection[str]) -> Flow:
        """By tracing a module.

        Args:
            module: the module.
            names: of the layers whose outputs may be overwritten.

        Example:
            >>> Flow.of(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1)), ("0",))
            Flow(by_row=True, functions=('1',), read=frozenset())
            >>> Flow.of(nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), ("0",)).by_row
            False
        """
        graph = _graph(module)
        if graph is None:
            return cls(False, ())
        modules = dict(module.named_modules())
        plain = not hooked(module) and all(_reads_rows(node, modules) for node in graph.nodes)
        inputs = sum(node.op == "placeholder" for node in graph.nodes)
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        return cls(
            plain and inputs == 1,
            tuple(
                str(reader.target)
                for node in graph.nodes
                if _called(node, modules) and node.target in names and len(node.users) == 1
                for reader in node.users
                if isinstance(_called(reader, modules), _OVERWRITE)
                and called.count(reader.target) == 1
            ),
            _read(graph),
        )

    def overwrite(self, module: nn.Module) -> None:
        """Have the functions overwrite what they read."""
        for name in self.functions:
            own: Any = module.get_submodule(name)
            own.inplace = True


def _reads_rows(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op in ("placeholder", "output"):
        return node.op == "placeholder" or isinstance(node.args[0], fx.Node)
    if node.op == "call_function" and node.target in _JOINS:
        return all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs
    return isinstance(_called(node, modules), nn.Linear) or _function(node, modules) is not None


# --- tracing --------------------------------------------------------------------------------------


def _graph(module: nn.Module) -> fx.Graph | None:
    """What a module does, unless its control flow depends on data."""
    try:
        with torch_lock, _length_traced(module):
            return fx.Tracer().trace(module)
    except Exception:
        return None


@contextmanager
def _length_traced(module: nn.Module) -> Iterator[None]:
    """Have len(x) in the forward methods of a module traced as x.size(0), which torch refuses."""
    spaces = {
        id(space): space
        for own in module.modules()
        if (space := getattr(own.forward, "__globals__", None)) is not None
        and "len" not in space
        and not str(space.get("__name__")).startswith("torch.")
    }
    for space in spaces.values():
        space["len"] = _length
    try:
        yield
    finally:
        for space in spaces.values():
            del space["len"]


def _length(x: Any) -> Any:
    return x.size(0) if isinstance(x, fx.Proxy) else len(x)


def _once(graph: fx.Graph, module: nn.Module) -> set[str]:
    """Modules that are called once, with parameters that nothing else reads."""
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    read = _read(graph)
    held = _held(module)
    return {
        name
        for name, own in module.named_modules()
        if calls[name] == 1
        and name not in read
        and not (isinstance(own, LAYERS) and "weight" not in own_parameters(own))
        and all(held[id(p)] == 1 for p in own_parameters(own).values())
    }


def _in_blocks(graph: fx.Graph, module: nn.Module, names: Collection[str]) -> list[Link]:
    """Those of the feed-forward parts of transformers, whose inside is not traced."""
    read, held, found = _read(graph), _held(module), []
    for name, block in module.named_modules():
        if type(block) not in _BLOCKS:
            continue
        own: Any = block
        source, reader = (f"{name}.{part}".lstrip(".") for part in ("linear1", "linear2"))
        parts = [own.linear1, own.linear2, own.dropout, own.activation]
        plain = all(
            type(part) is nn.Linear
            and not {source, reader} & read
            and all(held[id(p)] == 1 for p in own_parameters(part).values())
            for part in parts[:2]
        )
        calls = not any(isinstance(part, nn.Module) and hooked(part) for part in parts)
        known = own.activation in _PER_VALUE or type(own.activation) in _PER_VALUE
        if plain and calls and known and {source, reader} <= {*names}:
            found.append(Link(source, reader, [own.activation], [], True))
    return found


def _held(module: nn.Module) -> Counter[int]:
    """In how many places each parameter is."""
    return Counter(id(p) for own in module.modules() for p in own_parameters(own).values())


def _read(graph: fx.Graph) -> frozenset[str]:
    """Modules whose parameters or buffers something reads itself."""
    return frozenset(
        str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"
    )


def _called(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module that is called, if its call is all that happens."""
    own = modules[str(node.target)] if node.op == "call_module" else None
    return None if own is None or hooked(own) else own


def _what(node: fx.Node, modules: dict[str, nn.Module]) -> Any:
    """What a node does with its first argument; nothing known, if with other tensors too."""
    own = _called(node, modules)
    if node.op == "call_module" and own is None:
        return None
    if any(
        not isinstance(a, bool | int | float | str | tuple | list | None)
        or isinstance(a, tuple | list)
        and any(isinstance(b, fx.Node) for b in a)
        for a in (*node.args[1:], *node.kwargs.values())
    ):
        return None
    if own is not None:
        return type(own)
    return getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target


def _function(node: fx.Node, modules: dict[str, nn.Module]) -> Callable[[Tensor], Tensor] | None:
    """What a node makes of single numbers, if it is a known function of these."""
    own, what = _called(node, modules), _what(node, modules)
    if what in _NOTHING:
        return _same
    if what not in _PER_VALUE or getattr(own, "num_parameters", 1) != 1:  # a slope for each unit
        return None
    return own or functools.partial(_applied, what, node.args[1:], dict(node.kwargs))


def _same(x: Tensor) -> Tensor:
    return x


def _applied(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Tensor:
    return call(x, *args, **kwargs)


# --- from a layer to its reader -------------------------------------------------------------------


def _followed(node: fx.Node, modules: dict[str, nn.Module]) -> Link | None:
    """From a layer to the one that reads it, if only values, pools and norms are between."""
    source = _called(node, modules)
    assert isinstance(source, LAYERS)
    link = Link(
        str(node.target), "", [], [], not isinstance(source, nn.Linear) or _is_table(node, modules)
    )
    flattened = False
    while len(users := _users(node)) == 1:
        (node,) = users
        own = _called(node, modules)
        if isinstance(own, LAYERS):
            link.reader, link.by_unit = str(node.target), link.by_unit or not link.norms
            return link if _reads(own, source, flattened) else None
        function = _function(node, modules)
        reduced = _over_positions(node, modules, source.weight.ndim)
        if reduced and not flattened:
            flattened = reduced == "away"
        elif _flattens(node, modules):
            flattened = True
        elif isinstance(own, BATCH_NORMS) and not flattened:
            link.norms.append(str(node.target))
            link.path.append(functools.partial(_normalised, own))
        elif function is not None:
            link.path.append(function)
        elif flattened or not _pools(node, modules, source.weight.ndim):
            return None
    return None


def _users(node: fx.Node) -> list[fx.Node]:
    """What reads the numbers of a node, and not only how many rows it has."""
    return [user for user in node.users if not _asks_rows(user)]


def _asks_rows(node: fx.Node) -> bool:
    """Whether a node is the shape of another, of which only the number of rows is used."""
    if _is_rows(node):
        return True
    return _is_shape(node) and all(
        _is_rows(user) or not user.users and user.target is operator.getitem for user in node.users
    )


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and node.args[1:] == ("shape",)


def _is_rows(node: fx.Node) -> bool:
    """Whether a node is x.size(0) or x.shape[0]."""
    if node.op == "call_method":
        return node.target == "size" and node.args[1:] == (0,)
    return (
        node.target is operator.getitem
        and node.args[1:] == (0,)
        and isinstance(node.args[0], fx.Node)
        and _is_shape(node.args[0])
    )


def _reads(reader: nn.Module, source: nn.Module, flattened: bool) -> bool:
    """Whether a layer reads the axis that has the units of another."""
    if isinstance(reader, nn.Linear):  # the last one, after flattening with positions by unit
        return (
            flattened and reader.in_features % len(source.weight) == 0  # type: ignore[arg-type]
            if not isinstance(source, nn.Linear)
            else reader.in_features == source.out_features
        )  # so flattening joined none
    return type(reader) is type(source) and getattr(reader, "groups", 1) == 1 and not flattened


def _is_table(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether outputs surely are (n, units): what they are made of was flattened."""
    return any(_flattens(above, modules) for above in _above(node, modules))


def _above(node: fx.Node, modules: dict[str, nn.Module]) -> Iterator[fx.Node]:
    """A node, and those it is made of with the same rows."""
    yield node
    while (
        node.args
        and isinstance(node.args[0], fx.Node)
        and (isinstance(_called(node, modules), LAYERS) or _passes(node, modules))
    ):
        node = node.args[0]
        yield node


def _passes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node is a norm, a pool, a flattening or a function of single numbers."""
    return (
        isinstance(_called(node, modules), BATCH_NORMS)
        or _function(node, modules) is not None
        or _flattens(node, modules)
        or any(_pools(node, modules, dims) for dims in _POOLS)
    )


def _normalised(norm: Any, constant: Tensor) -> Tensor:
    """What normalisation by stored statistics makes of a constant of each unit."""
    if norm.running_mean is None or norm.running_var is None:
        return torch.full_like(constant, torch.nan)  # by those of the batch: it is not known
    return functional.batch_norm(
        constant[None],
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        False,
        0.0,
        norm.eps,
    )[0]


def _pools(node: fx.Node, modules: dict[str, nn.Module], dims: int) -> bool:
    """Whether a node pools positions and leaves constants as they are, at borders too."""
    own, what = _called(node, modules), _what(node, modules)
    if what not in _POOLS[dims] or what not in _AVERAGES:
        return what in _POOLS[dims]
    given = vars(own) if own else dict(zip(_AVERAGED, node.args, strict=False)) | node.kwargs
    return (
        given.get("padding", 0) in (0, (0,), (0, 0), [0], [0, 0])
        and given.get("divisor_override") is None
    )


def _over_positions(node: fx.Node, modules: dict[str, nn.Module], dims: int) -> str:
    """Whether a node reduces all positions to one, which is "kept" or "away"; else ""."""
    if _what(node, modules) not in _OVER_POSITIONS or dims < 3:
        return ""
    given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    axes, kept = given.pop("dim", ()), given.pop("keepdim", False)
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    if given or not all(isinstance(axis, int) for axis in axes):
        return ""
    if {axis % dims for axis in axes} != set(range(2, dims)):
        return ""
    return "kept" if kept else "away"


def _flattens(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node leaves rows of numbers."""
    own, what = _called(node, modules), _what(node, modules)
    if isinstance(own, nn.Flatten):
        return (own.start_dim, own.end_dim) == (1, -1)
    if what in (torch.flatten, Tensor.flatten):
        given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
        return given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})
    views = node.op != "call_module" and node.target in ("view", "reshape", torch.reshape)
    if not views or node.kwargs:
        return False
    shape = node.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    if len(shape) != 2 or shape[1] != -1 or not isinstance(shape[0], fx.Node):
        return False
    rows, read = shape[0], node.args[0]
    return _is_rows(rows) and isinstance(read, fx.Node) and _counted(rows) in _above(read, modules)


def _counted(rows: fx.Node) -> Any:
    """Whose rows x.size(0) or x.shape[0] counts."""
    asked: Any = rows.args[0]
    return asked.args[0] if rows.target is operator.getitem else asked

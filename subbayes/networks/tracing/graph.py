r"""Small rewrites of a traced graph: fewer operations, fewer allocations, the same numbers.

A traced density is a straight line of tensor operations. Views that change nothing are dropped,
and pointwise operations write into an operand that nothing else reads, which saves fetching
fresh memory for every activation. On the CPU, a float32 tanh becomes $1 - 2\sigma(-2x)$, which
takes a third of the time and differs by at most 2e-7, or, where a compiler follows, a ratio of
polynomials, which takes half of that and differs by 3.2e-7; a softplus is then made of the sigmoid
that its gradient needs anyway, without a logarithm; and a matrix product of few columns is taken as
the product of the transposes, which takes a quarter.

A rewritten graph is then handed to the interpreter of TorchScript, which calls the same operations
one after another in about 2 us each instead of the 6 us that Python needs: a third to a half of the
time of a small network.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributions import Distribution
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

__all__ = ["compiled", "folded", "interpreted", "tidy"]

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.squeeze_.dims,
    aten.unsqueeze.default,
    aten.transpose.int,
}
_SAME_SHAPE_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default}
_FRESH = {
    aten.bmm.default,
    aten.mm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
}
_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.relu.default: aten.relu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.log.default: aten.log_.default,
    aten.exp.default: aten.exp_.default,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
}
_POINTWISE = {
    aten.relu.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.softplus.default,
    aten.gelu.default,
    aten.silu.default,
    aten.elu.default,
    aten.leaky_relu.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.softplus_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
}
_TANH_IS_ONE = 7.90531110763549805
_TANH_ABOVE = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_BELOW = (
    4.89352518554385e-03,
    2.26843463243900e-03,
    1.18534705686654e-04,
    1.19825839466702e-06,
)
_LOG1P = (2.000000008e00, 6.666632041e-01, 4.002465133e-01, 2.796434470e-01, 2.816145376e-01)
_NARROW = 16  # columns
_USUAL_SOFTPLUS = ((), (1, 20))  # beta and threshold
_SETTLING = 3  # calls after which the interpreter has profiled and simplified a function
_SMALL = 16  # numbers of a constant that are compared
_NOTED = "shape of the result"
_COMMUTES = {aten.add.Tensor, aten.mul.Tensor}


def tidy(
    graph_module: GraphModule, *arguments: torch.Tensor, compiles: bool = False
) -> GraphModule:
    """Rewrite a traced graph and return it; its result is the same.

    Args:
        graph_module: what `make_fx` returned; changed in place.
        arguments: what it was traced with; run through it once for the shapes.
        compiles: leave to a compiler what it does by itself: joining pointwise operations, and
            letting them write into operands that nothing else reads.
    """
    graph = graph_module.graph
    with torch.no_grad():
        _Run(graph_module).run(*arguments)
        _straighten(graph)
        graph_module.recompile()
        _Run(graph_module).run(*arguments)
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    on_cpu = all(argument.device.type == "cpu" for argument in arguments)
    if on_cpu and compiles:
        _quick_softplus(graph)
    _share(graph)
    graph.eliminate_dead_code()
    if on_cpu:
        _quick_tanh(graph, compiles)
        _narrow_products(graph)
        graph_module.recompile()
        with torch.no_grad():
            _Run(graph_module).run(*arguments)
    if not compiles:
        fresh: set[Node] = set()
        for node in graph.nodes:
            if node.op == "call_function":
                _write_in_place(node, fresh)
    graph.lint()
    graph_module.recompile()
    return graph_module


def folded(
    graph_module: GraphModule, arguments: Sequence[torch.Tensor], still: Sequence[bool]
) -> list[torch.Tensor]:
    """Compute once what depends on nothing but arguments that stand still.

    Args:
        graph_module: what `make_fx` returned; changed in place. It takes the results as further
            arguments, after its own.
        arguments: what it was traced with.
        still: of each argument, whether it is the same in all calls.

    Returns:
        The further arguments.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, scale = torch.arange(3.0), torch.tensor(2.0)
        >>> graph = make_fx(lambda x, scale: x * scale.exp().log())(x, scale)
        >>> more = folded(graph, [x, scale], [False, True])
        >>> more, graph(x, scale, *more)
        ([tensor(2.)], tensor([0., 2., 4.]))
    """
    graph = graph_module.graph
    if not all(map(_is_pure, _calls(graph))):
        return []  # what is written into in one call would be found so by the next
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values: dict[Node, Any] = {
        node: value for node, value, own in zip(placeholders, arguments, still, strict=True) if own
    }
    depends = set(values)  # others are made of nothing: a compiler makes them in passing
    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph_module, str(node.target))
        elif node.op == "call_function" and all(
            source in values for source in node.all_input_nodes
        ):
            args, named = map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **named)
            if depends.intersection(node.all_input_nodes):
                depends.add(node)
    found: list[torch.Tensor] = []
    for node in [node for node in _calls(graph) if node in depends]:
        readers = [user for user in node.users if user not in depends]
        if not readers or not isinstance(values[node], torch.Tensor):
            continue
        with graph.inserting_after(placeholders[-1]):
            placeholders.append(graph.placeholder(f"folded{len(found)}"))
        node.replace_all_uses_with(placeholders[-1], delete_user_cb=readers.__contains__)
        found.append(values[node].clone())
    graph.eliminate_dead_code()
    graph_module.recompile()
    return found


def interpreted(graph_module: GraphModule, *arguments: torch.Tensor) -> Callable[..., Any]:
    """The graph as a function that TorchScript interprets, or Python where it cannot.

    The function lives as long as it is referenced (`torch.jit.trace` keeps whatever it has traced),
    and settles before it is returned: the same arguments give the same bits in every call.
    Arguments that are differentiated by `backward` take Python's way.

    Args:
        graph_module: a graph of tensor operations.
        arguments: tensors of the shapes it is for; run through it a few times.
    """
    plain = getattr(graph_module, "forward", graph_module)  # a module's call costs 10 us more
    inputs = tuple(argument.detach() for argument in arguments)
    try:
        with torch.no_grad():
            script = _script(plain, inputs)
            for _ in range(_SETTLING):
                settled = script(*inputs)
            same = _same(settled, script(*inputs))
    except Exception:  # what TorchScript cannot say is said by Python, only slower
        return plain
    if not same:
        return plain

    def call(*tensors: torch.Tensor) -> Any:
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return plain(*tensors) if differentiated else script(*tensors)

    return call


def compiled(graph_module: GraphModule, *arguments: torch.Tensor) -> Callable[..., Any]:
    """The graph compiled for arguments of these shapes and strides, which nothing checks.

    `torch.compile` would check them at each call, which takes longer than a small network.

    Args:
        graph_module: a graph of tensor operations.
        arguments: tensors of the shapes and strides it is for.

    Raises:
        Exception: no compiler, or a graph it fails on.
    """
    import torch._inductor.config

    graph = copy.deepcopy(graph_module.graph)  # the compiler rewrites what it is given
    for node in graph.nodes:
        node.meta.clear()  # of the tracing, with fake tensors of another world
    validates = Distribution._validate_args
    try:
        with (
            torch.no_grad(),
            torch._inductor.config.patch(
                {"cpp_wrapper": True, "cpp.enable_floating_point_contract_flag": "fast"}
            ),
        ):
            call = torch._inductor.compile(GraphModule(graph_module, graph), list(arguments))
            call(*arguments)
    finally:  # the compiler turns it off for everybody
        Distribution.set_default_validate_args(validates)
    return cast("Callable[..., Any]", call)


def _script(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
    """A function of its own, as `torch.jit.trace` makes one, but not kept by a global registry."""
    names = [f"argument{i}" for i in range(len(inputs))]
    traced, _ = torch._C._create_graph_by_tracing(
        lambda *tensors: function(*tensors), inputs, lambda _: "", True, False, None, names
    )
    return torch._C._create_function_from_graph("replay", traced)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return all(_same(x, y) for x, y in zip(a, b, strict=True))


def _straighten(graph: Graph) -> None:
    """Move transpositions past pointwise functions, and cancel those that meet.

    A compiler would otherwise lay the function's result out anew, against the grain.
    """
    for node in list(graph.nodes):
        turned = [arg for arg in node.args if isinstance(arg, Node)]
        if node.target not in _POINTWISE or not _turned_alike(turned):
            continue
        with graph.inserting_before(node):
            inner = graph.call_function(
                node.target,
                tuple(arg.args[0] if isinstance(arg, Node) else arg for arg in node.args),
                node.kwargs,
            )
            outer = graph.call_function(aten.transpose.int, (inner, *turned[0].args[1:]))
        outer.meta = dict(node.meta)
        node.replace_all_uses_with(outer)
        graph.erase_node(node)
    for node in list(graph.nodes):
        source = node.args[0] if node.target is aten.transpose.int else None
        if (
            isinstance(source, Node)
            and source.target is aten.transpose.int
            and _axes(source) == _axes(node)
        ):
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _turned_alike(nodes: list[Node]) -> bool:
    """Whether all are transpositions of the same two axes of tensors of one shape."""
    return bool(nodes) and all(
        node.target is aten.transpose.int
        and _axes(node) == _axes(nodes[0])
        and _shape(node).shape == _shape(nodes[0]).shape  # type: ignore[union-attr]
        for node in nodes
    )


def _share(graph: Graph) -> None:
    """Compute what is asked for twice once, if all operations are pure."""
    if not all(map(_is_pure, _calls(graph))):
        return
    for node in _calls(graph):
        if node.target is aten.lift_fresh_copy.default:  # nothing writes into the constant
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    seen: dict[Any, Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"] + _calls(graph):
        key = node.target, _hashable(node.args), _hashable(node.kwargs)
        if node.op == "get_attr":
            key = _constant(graph, node)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _calls(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _constant(graph: Graph, node: Node) -> Any:
    """A constant tensor as a key; a large one is only itself."""
    value = getattr(graph.owning_module, str(node.target), None)
    if not isinstance(value, torch.Tensor) or value.numel() > _SMALL:
        return node
    return value.dtype, value.device, str(value.tolist())


def _is_pure(node: Node) -> bool:
    """Whether it neither writes into its operands nor draws random numbers."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not (
        node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
    )


def _hashable(value: Any) -> Any:
    """Arguments as a key; numbers that are equal but of another type differ."""
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return type(value), value


def _quick_tanh(graph: Graph, compiles: bool) -> None:
    """Put float32 tanh down as what takes less time.

    A compiler joins many operations into one: the ratio of two polynomials. Otherwise a sigmoid,
    with its factor in the product with weights before it.
    """
    for node in list(graph.nodes):
        shape = _shape(node)
        if node.target is not aten.tanh.default or shape is None or shape.dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            if compiles:
                out = _ratio_for_tanh(graph, node.args[0])
            else:
                out = graph.call_function(aten.sigmoid.default, (_times_minus_two(graph, node),))
                out = graph.call_function(aten.rsub.Scalar, (out, 1.0, 2.0))
        node.replace_all_uses_with(out)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _ratio_for_tanh(graph: Graph, x: Any) -> Node:
    r"""$x\, p(x^2) / q(x^2)$, the minimax approximation that Eigen and XLA use in float32."""
    call = graph.call_function
    x = call(aten.clamp.default, (x, -_TANH_IS_ONE, _TANH_IS_ONE))
    square = call(aten.mul.Tensor, (x, x))

    above = call(aten.mul.Tensor, (x, _polynomial(graph, square, _TANH_ABOVE)))
    return call(aten.div.Tensor, (above, _polynomial(graph, square, _TANH_BELOW)))


def _polynomial(graph: Graph, x: Node, coefficients: tuple[float, ...]) -> Node:
    """By Horner's rule; the constant is the first of the coefficients."""
    call = graph.call_function
    value = call(aten.mul.Tensor, (x, coefficients[-1]))
    for coefficient in coefficients[-2:0:-1]:
        value = call(aten.mul.Tensor, (call(aten.add.Tensor, (value, coefficient)), x))
    return call(aten.add.Tensor, (value, coefficients[0]))


def _quick_softplus(graph: Graph) -> None:
    """Put float32 softplus and its gradient down by one sigmoid."""
    for node in list(graph.nodes):
        shape = _shape(node)
        if shape is None or shape.dtype != torch.float32:
            continue
        with graph.inserting_before(node):
            if node.target is aten.softplus.default and node.args[1:] in _USUAL_SOFTPLUS:
                out = _softplus_by_sigmoid(graph, node.args[0])
            elif node.target is aten.softplus_backward.default and node.args[2:] in _USUAL_SOFTPLUS:
                own = graph.call_function(aten.sigmoid.default, (node.args[1],))
                out = graph.call_function(aten.mul.Tensor, (node.args[0], own))
            else:
                continue
        node.replace_all_uses_with(out)
        graph.erase_node(node)


def _softplus_by_sigmoid(graph: Graph, x: Any) -> Node:
    r"""$\max(x, 0) - \log(1 - m)$ with $m = \min(\sigma, 1 - \sigma)$, relative error 3.2e-7.

    $-\log(1 - m) = 2\,\mathrm{artanh}\, z$ with $z = m / (2 - m) \le 1 / 3$ is z times a polynomial
    of z², fitted to 4e-9.
    """
    call = graph.call_function
    above = call(aten.sigmoid.default, (x,))
    m = call(aten.minimum.default, (above, call(aten.rsub.Scalar, (above, 1.0))))
    z = call(aten.div.Tensor, (m, call(aten.rsub.Scalar, (m, 2.0))))
    series = _polynomial(graph, call(aten.mul.Tensor, (z, z)), _LOG1P)
    return call(
        aten.add.Tensor, (call(aten.relu.default, (x,)), call(aten.mul.Tensor, (z, series)))
    )


def _times_minus_two(graph: Graph, node: Node) -> Node:
    """-2x of the operand of a node; of x = W a + b, in one operation."""
    x = node.args[0]
    assert isinstance(x, Node)
    if x.target is aten.add.Tensor and not x.kwargs and len(x.users) == 1:
        product, bias = x.args
        shape = _shape(bias)
        if (
            isinstance(product, Node)
            and product.target is aten.bmm.default
            and shape is not None
            and len(product.users) == 1
            and len(shape.shape) == 3
        ):
            return graph.call_function(
                aten.baddbmm.default, (bias, *product.args), {"beta": -2.0, "alpha": -2.0}
            )
    return graph.call_function(aten.mul.Tensor, (x, -2.0))


def _narrow_products(graph: Graph) -> None:
    """Take (B^T A^T)^T for A B with few columns, which the library is slow at."""
    for node in list(graph.nodes):
        if node.target is not aten.mm.default:
            continue
        a, b = _shape(node.args[0]), _shape(node.args[1])
        if a is None or b is None or b.shape[1] > _NARROW or a.shape[0] < 4 * b.shape[1]:
            continue
        with graph.inserting_before(node):
            flipped = [graph.call_function(aten.t.default, (part,)) for part in node.args[::-1]]
            product = graph.call_function(aten.mm.default, tuple(flipped))
            out = graph.call_function(aten.t.default, (product,))
            out = graph.call_function(
                aten.clone.default, (out,), {"memory_format": torch.contiguous_format}
            )
        node.replace_all_uses_with(out)
        graph.erase_node(node)


def _axes(node: Node) -> set[Any]:
    """The two axes a transposition swaps, counted from the front."""
    shape = _shape(node)
    assert shape is not None
    axes: tuple[Any, ...] = node.args[1:3]
    return {axis % len(shape.shape) for axis in axes}


@dataclass(frozen=True)
class _Shape:
    """Of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]


class _Run(Interpreter):
    """Notes shapes of results; unlike torch's own it prints nothing where an operation fails."""

    def run_node(self, n: Node) -> Any:
        """As always."""
        found = super().run_node(n)
        if isinstance(found, torch.Tensor):
            n.meta[_NOTED] = _Shape(found.shape, found.dtype, found.stride())
        return found


def _shape(node: Any) -> _Shape | None:
    """Shape, dtype and strides of a node's result, if it is one tensor."""
    meta: _Shape | None = node.meta.get(_NOTED) if isinstance(node, Node) else None
    return meta


def _alike(a: Any, b: Any) -> bool:
    """Whether two nodes have results of one shape, dtype and layout."""
    x, y = _shape(a), _shape(b)
    if x is None or y is None:
        return False
    return bool((x.shape, x.dtype, x.stride) == (y.shape, y.dtype, y.stride))


def _is_identity(node: Node) -> bool:
    """A view onto the same shape and strides, or a product with 1."""
    if not node.args or not _alike(node.args[0], node):
        return False
    if node.target in _SAME_SHAPE_VIEWS:
        return True
    return node.target is aten.mul.Scalar and bool(node.args[1] == 1)


def _owned(node: Any, fresh: set[Node]) -> bool:
    """Whether nothing but the one reader of `node` can see its memory."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target in _FRESH or node in fresh:
            return True
        if node.target not in _VIEWS or node.target is aten.expand.default:
            return False
        node = node.args[0]
    return False


def _write_in_place(node: Node, fresh: set[Node]) -> None:
    """Turn a pointwise operation into its in-place form where its operand is free to take."""
    if node.target not in _IN_PLACE:
        return
    fresh.add(node)
    orders = [node.args]
    if node.target in _COMMUTES and len(node.args) == 2 and not node.kwargs:
        orders.append((node.args[1], node.args[0]))
    for args in orders:
        if _alike(args[0], node) and _owned(args[0], fresh):
            node.target = _IN_PLACE[node.target]
            node.args = tuple(args)
            return

r"""The factors of the gradient of a layer's weights, for each kind of layer.

For one observation n and one cotangent of the outputs, the gradient of a weight matrix is a sum
of outer products over the places t of a layer (time steps, pixels),

$$ G_n = \sum_t g_{nt} \otimes a_{nt} . $$

The left factor g is the gradient of the layer's output. The right factor a is the input of a
linear layer, the patch under a convolution (group by group), the normalised input of a
normalisation (each weight is a group), or the one-hot index of an embedding (transposed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from subbayes.networks.layer_kinds import BATCH_NORMS

RightFactor = Callable[[slice], Float[Tensor, "n t groups i"]]
"""From a slice of rows to their right factors."""


@dataclass(frozen=True)
class Kind:
    """How the factors of a kind of layer are computed.

    Attributes:
        name: "linear", "conv", "norm" or "embedding".
        ndim: smallest number of dimensions of an input with a dimension of rows.
        right: from (module, input, rows N) to the right factor, of shape (n, T, groups, I). It
            reads the module's attributes at once, since they may change after the call.
        left: from (module, gradient of the output, rows N) to g, of shape (N, T, groups, O).
    """

    name: str
    ndim: int
    right: Callable[[nn.Module, Tensor, int], RightFactor]
    left: Callable[[nn.Module, Tensor, int], Float[Tensor, "n t groups o"]]


def _linear_right(module: nn.Module, x: Tensor, n: int) -> RightFactor:
    a = x.reshape(n, -1, 1, x.shape[-1])
    return lambda rows: a[rows]


def _linear_left(module: nn.Module, g: Tensor, n: int) -> Tensor:
    return g.reshape(n, -1, 1, g.shape[-1])


class _Patches:
    """Patches of the input of a convolution, whole or only selected entries."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d, x: Tensor) -> None:
        self.x, self.groups, flat = x, module.groups, isinstance(module, nn.Conv1d)
        self.padding = module._reversed_padding_repeated_twice
        self.mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self.kernel, self.dilation, self.stride = (
            (1, *size) if flat else size
            for size in (module.kernel_size, module.dilation, module.stride)
        )

    def _windows(self, rows: slice) -> Float[Tensor, "n c kh kw h w"]:
        padded = F.pad(self.x[rows], self.padding, mode=self.mode)
        windows = padded.unsqueeze(2) if padded.ndim == 3 else padded
        for axis in (0, 1):
            reach = (self.kernel[axis] - 1) * self.dilation[axis] + 1
            windows = windows.unfold(2 + axis, reach, self.stride[axis])
        return windows[..., :: self.dilation[0], :: self.dilation[1]].movedim((4, 5), (2, 3))

    def __call__(self, rows: slice) -> Float[Tensor, "n t groups i"]:
        """Whole patches of some rows."""
        columns = self._windows(rows).flatten(1, 3).flatten(2)  # n, c k k, T
        return columns.unflatten(1, (self.groups, -1)).permute(0, 3, 1, 2)

    def columns(self, which: Tensor) -> Float[Tensor, "n p t"]:
        """Selected entries (group and input, as one index) of the patches of all rows."""
        height, width = self.kernel
        chosen = self._windows(slice(None))[
            :, which // (height * width), which // width % height, which % width
        ]
        return chosen.flatten(2)


@dataclass(frozen=True)
class ConcatenatedRuns:
    """The right factor of a layer that runs several times, concatenated over places."""

    runs: Sequence[RightFactor]

    def __call__(self, rows: slice) -> Float[Tensor, "n t groups i"]:
        """The factors of some rows."""
        return torch.cat([run(rows) for run in self.runs], 1)


def right_columns(right: RightFactor, which: Int[Tensor, "p"]) -> Float[Tensor, "n p t"]:
    """Selected entries (group and input, as one index) of a right factor, for all rows."""
    if isinstance(right, ConcatenatedRuns):
        return torch.cat([right_columns(run, which) for run in right.runs], 2)
    if isinstance(right, _Patches):
        return right.columns(which)
    return right(slice(None)).flatten(2).mT.index_select(1, which)


def _conv_right(module: nn.Module, x: Tensor, n: int) -> RightFactor:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    return _Patches(module, x)


def _conv_left(module: nn.Module, g: Tensor, n: int) -> Tensor:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    return g.flatten(2).unflatten(1, (module.groups, -1)).permute(0, 3, 1, 2)


def _norm_right(module: nn.Module, x: Tensor, n: int) -> RightFactor:
    if isinstance(module, BATCH_NORMS):
        mean, var = module.running_mean, module.running_var
        assert mean is not None
        assert var is not None
        scale = (var + module.eps).rsqrt()

        def standardised(rows: slice) -> Tensor:
            shape = (-1, *[1] * (x.ndim - 2))
            return _channels_last((x[rows] - mean.reshape(shape)) * scale.reshape(shape))

        return standardised
    if isinstance(module, nn.GroupNorm):
        return lambda rows: _channels_last(F.group_norm(x[rows], module.num_groups, eps=module.eps))
    assert isinstance(module, nn.LayerNorm)
    size = module.normalized_shape
    rows_first = x.reshape(n, -1, *size)
    return lambda rows: (
        F.layer_norm(rows_first[rows], size, eps=module.eps).flatten(2).unsqueeze(-1)
    )


def _channels_last(x: Tensor) -> Tensor:
    """(n, C, *places) as (n, T, C, 1)."""
    return x.reshape(*x.shape[:2], -1).transpose(1, 2).unsqueeze(-1)


def _norm_left(module: nn.Module, g: Tensor, n: int) -> Tensor:
    if not isinstance(module, nn.LayerNorm):
        return _channels_last(g)
    return g.reshape(n, -1, *module.normalized_shape).flatten(2).unsqueeze(-1)


def _embedding_right(module: nn.Module, x: Tensor, n: int) -> RightFactor:
    """The index, or -1 for padding."""
    assert isinstance(module, nn.Embedding)
    index = x.reshape(n, -1, 1, 1)
    if module.padding_idx is not None:
        index = index.masked_fill(index == module.padding_idx, -1)
    return lambda rows: index[rows]


_KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: Kind("linear", 2, _linear_right, _linear_left),
    nn.Conv1d: Kind("conv", 3, _conv_right, _conv_left),
    nn.Conv2d: Kind("conv", 4, _conv_right, _conv_left),
    nn.Embedding: Kind("embedding", 1, _embedding_right, _linear_left),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
        Kind("norm", 2, _norm_right, _norm_left),
    ),
    nn.LayerNorm: Kind("norm", 2, _norm_right, _norm_left),
}


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a module, or None if it is unknown.

    A subclass has the kind of its parent, since gradients are verified anyway.
    """
    found = next((_KINDS[c] for c in type(module).__mro__ if c in _KINDS), None)
    if isinstance(module, BATCH_NORMS) and module.running_mean is None:
        return None
    if found is not None and isinstance(module, nn.LayerNorm):
        return replace(found, ndim=1 + len(module.normalized_shape))
    return found


def sum_of_outer_products(
    left: Float[Tensor, "n t groups o"], right: Float[Tensor, "n t groups i"]
) -> Float[Tensor, "n p"]:
    """The flat gradient of the weight for each row."""
    if left.shape[-1] == right.shape[-1] == 1:
        return (left * right).sum(1).flatten(1)
    if left.shape[1] == 1:
        return (left[:, 0].unsqueeze(-1) * right[:, 0].unsqueeze(-2)).flatten(1)
    return torch.einsum("ntgo,ntgi->ngoi", left, right).flatten(1)


def embedding_gradient(
    left: Float[Tensor, "n t one e"], index: Tensor, size: int
) -> Float[Tensor, "n p"]:
    """The flat gradient of an embedding for each row."""
    n, t, _, e = left.shape
    rows = left.new_zeros(n, size + 1, e)  # the last is for padding, index -1
    where = (index.reshape(n, t, 1) % (size + 1)).expand(n, t, e)
    return rows.scatter_add_(1, where, left.reshape(n, t, e))[:, :size].flatten(1)

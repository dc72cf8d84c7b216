"""A linear layer whose weights are stored as compressed sparse rows."""

from __future__ import annotations

import copy
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.tracing.private_torch import is_traced
from subbayes.sparse.kernels import BagIndices, sparse_linear, without_beta_warning
from subbayes.utils.checks import fail


class CsrLinear(nn.Module):
    """A linear layer whose weights are stored as compressed sparse rows.

    Args:
        layer: a dense layer, whose zeros are not stored.

    Attributes:
        keeps_tiles: whether outputs may be transposed in memory, for layers that map row by row.

    Example:
        >>> import torch
        >>> layer = nn.Linear(3, 2)
        >>> small = CsrLinear(layer)
        >>> bool(torch.allclose(small(torch.ones(4, 3)), layer(torch.ones(4, 3))))
        True
    """

    weight: Tensor
    bias: Tensor | None
    keeps_tiles = False

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        with without_beta_warning():
            self.register_buffer("weight", layer.weight.detach().to_sparse_csr())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())
        self._cached: tuple[Tensor, BagIndices, Tensor] | None = None

    def forward(self, input: Float[Tensor, "*N i"]) -> Float[Tensor, "*N o"]:
        """Outputs, shape (..., out_features).

        Raises:
            InputError: rows of another size, or a call that is traced or compiled.
        """
        if is_traced():
            fail(
                "module",
                "a call that is neither traced nor compiled, because of CSR layers",
                "one that is",
                "Export with layout='dense'",
            )
        weight = self.weight
        known = self._cached
        if known is None or known[0] is not weight:
            bags = BagIndices(weight.crow_indices(), weight.col_indices(), self.in_features)
            self._cached = known = weight, bags, weight.values()
        found = sparse_linear(input, *known[1:], self.bias)
        return found if self.keeps_tiles else found.contiguous()

    def _load_from_state_dict(self, *given: Any) -> None:
        self._cached = None  # weights are copied into the existing tensor
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cached": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> CsrLinear:
        memo[id(self.weight)] = self.weight.clone()  # torch cannot deepcopy sparse layouts
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__getstate__(), memo)
        return made

    def extra_repr(self) -> str:
        """Sizes and number of weights."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"weights={self.weight.values().numel()}"
        )

    def dense(self) -> nn.Linear:
        """The same layer with a dense weight."""
        layer = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        layer.weight.data.copy_(self.weight.to_dense())
        if self.bias is not None:
            layer.bias.data.copy_(self.bias)
        return layer.requires_grad_(False).train(self.training)

"""Logits of the positions of a sequence as the outputs of a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.utils.checks import fail, fail_type

__all__ = ["TokenOutputs", "output_for"]


@dataclass(frozen=True)
class TokenOutputs:
    """The logits (N, L, V) that a module returns, as outputs (N, L V) for `CategoricalTokens`.

    Args:
        output: selects the logits from the return value; by default its attribute `logits`, or the
            return value itself.

    Raises:
        InputError: logits of another number of dimensions.
        InputTypeError: no tensor.

    Example:
        >>> import torch
        >>> TokenOutputs()(torch.zeros(2, 5, 3)).shape
        torch.Size([2, 15])
    """

    output: Callable[[Any], Tensor] | None = None

    def __call__(self, returned: Any) -> Float[Tensor, "N C"]:
        """Outputs (N, L V) from what the module returns."""
        logits = getattr(returned, "logits", returned)
        if self.output is not None:
            logits = self.output(returned)
        if not isinstance(logits, Tensor):
            fail_type("module", "logits (N, positions, classes)", returned, "Pass output=...")
        if logits.ndim == 3:
            return logits.flatten(1)
        fail(
            "module",
            "logits of shape (N, positions, classes)",
            tuple(logits.shape),
            "For one label per row use likelihood='categorical'",
        )


def output_for(
    likelihood: str | Likelihood, output: Callable[[Any], Tensor] | None
) -> Callable[[Any], Tensor] | None:
    """The argument `output` of a `Network` for a likelihood: of logits of positions for tokens.

    Example:
        >>> from subbayes.likelihoods import CategoricalTokens
        >>> output_for(CategoricalTokens(), None)
        TokenOutputs(output=None)
    """
    if as_likelihood(likelihood).per_position and not isinstance(output, TokenOutputs):
        return TokenOutputs(output)
    return output

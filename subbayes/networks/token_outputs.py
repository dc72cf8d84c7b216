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
        n_classes: the number of classes V; any if None.

    Raises:
        InputError: logits of another number of dimensions or classes.
        InputTypeError: no tensor.

    Example:
        >>> import torch
        >>> TokenOutputs()(torch.zeros(2, 5, 3)).shape
        torch.Size([2, 15])
    """

    output: Callable[[Any], Tensor] | None = None
    n_classes: int | None = None

    def __call__(self, returned: Any) -> Float[Tensor, "N C"]:
        """Outputs (N, L V) from what the module returns."""
        logits = getattr(returned, "logits", returned)
        if self.output is not None:
            logits = self.output(returned)
        if not isinstance(logits, Tensor):
            fail_type("module", "logits (N, positions, classes)", returned, "Pass output=...")
        if logits.ndim == 3:
            if self.n_classes not in (None, logits.shape[2]):
                expected = f"logits of {self.n_classes} classes, as the likelihood has"
                fail("module", expected, logits.shape[2])
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
        TokenOutputs(output=None, n_classes=None)
    """
    likelihood = as_likelihood(likelihood)
    if not likelihood.per_position:
        return output
    own = output.output if isinstance(output, TokenOutputs) else output
    return TokenOutputs(own, getattr(likelihood, "n_classes", None))

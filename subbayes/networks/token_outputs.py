"""Logits of the positions of a sequence as the outputs of a network."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Inputs, OutputFunction, Outputs

__all__ = ["TokenOutputs"]

_OF_DECODER = {"decoder_input_ids", "decoder_inputs_embeds"}


@dataclass(frozen=True)
class TokenOutputs:
    """The logits (N, L, V) that a module returns, as outputs (N, L V) for `CategoricalTokens`.

    Args:
        output: selects the logits from the return value; by default its attribute `logits`, or the
            return value itself.
        n_classes: the number of classes V; any if None.
        has_decoder: whether the logits are those of a decoder with inputs of its own, beside an
            encoder; `Network` finds it.

    Raises:
        InputError: logits of another number of dimensions or classes.
        InputTypeError: no tensor.

    Example:
        >>> import torch
        >>> TokenOutputs()(torch.zeros(2, 5, 3)).shape
        torch.Size([2, 15])
    """

    output: OutputFunction | None = None
    n_classes: int | None = None
    has_decoder: bool = field(default=False, repr=False)

    def __call__(self, returned: Any) -> Outputs:
        """Outputs (N, L V) from what the module returns."""
        return self.logits(returned).flatten(1)

    def logits(self, returned: Any) -> Float[Tensor, "N L V"]:
        """Logits (N, L, V) of the positions of the inputs from what the module returns."""
        logits = getattr(returned, "logits", returned)
        if self.output is not None:
            logits = self.output(returned)
        if not isinstance(logits, Tensor):
            fail_type("module", "logits (N, positions, classes)", returned, "Pass output=...")
        if logits.ndim != 3:
            remedy = "For one label per row use likelihood='categorical'"
            if logits.ndim > 3:
                remedy = (
                    "For pixels with classes in dimension 1 pass output=lambda o: o.flatten(2).mT, "
                    "and labels y.flatten(1)"
                )
            fail("module", "logits of shape (N, positions, classes)", tuple(logits.shape), remedy)
        if self.n_classes not in (None, logits.shape[2]):
            expected = f"logits of {self.n_classes} classes, as the likelihood has"
            fail("module", expected, logits.shape[2])
        return logits


def output_for(
    likelihood: str | Likelihood, output: OutputFunction | None
) -> OutputFunction | None:
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


def with_decoder(module: nn.Module, output: OutputFunction | None) -> OutputFunction | None:
    """The argument `output` of a `Network`, which knows whether logits are those of a decoder.

    Example:
        >>> with_decoder(nn.Linear(2, 1), TokenOutputs())
        TokenOutputs(output=None, n_classes=None)
    """
    if not isinstance(output, TokenOutputs):
        return output
    return replace(output, has_decoder=_has_decoder(module))


def _has_decoder(module: nn.Module) -> bool:
    """Whether a model of transformers, with or without adapters, has a decoder with inputs."""
    own = getattr(module, "get_base_model", None)
    base = own() if callable(own) else module
    takes = _OF_DECODER & inspect.signature(base.forward).parameters.keys()
    return bool(takes and getattr(getattr(base, "config", None), "is_encoder_decoder", False))


def check_decoder_inputs(output: Any, inputs: Inputs) -> None:
    """Check that rows have the inputs of the decoder, for the logits of its positions.

    Some models make them from the labels, which are the targets here, and others silently from the
    inputs of the encoder.

    Args:
        output: that of a network; only `TokenOutputs` of a decoder are checked.
        inputs: a few rows.

    Raises:
        InputError: rows without them.

    Example:
        >>> import torch
        >>> ids = torch.zeros(3, 2).long()
        >>> rows = {"input_ids": ids, "decoder_input_ids": ids}
        >>> check_decoder_inputs(TokenOutputs(has_decoder=True), rows)
    """
    if not (isinstance(output, TokenOutputs) and output.has_decoder):
        return
    if not (isinstance(inputs, dict) and _OF_DECODER & inputs.keys()):
        fail(
            "inputs",
            "decoder_input_ids, which the decoder reads, by name",
            ", ".join(inputs) if isinstance(inputs, dict) else "no dict",
            "Add model.prepare_decoder_input_ids_from_labels(labels), as "
            "DataCollatorForSeq2Seq(tokenizer, model) does",
        )

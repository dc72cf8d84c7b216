"""Checks of targets, and of the log density of a user's own likelihood, before fitting.

A log density of shape (N, 1) in place of (N,), or the sum over rows, would be broadcast to another
posterior without an error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from subbayes.data.data import Data, join_targets
from subbayes.likelihoods.base import Likelihood, WrappedLikelihood, is_of_package, target_values
from subbayes.likelihoods.target_parts import one_copy_log_prob
from subbayes.utils.checks import fail
from subbayes.utils.trees import take, tree_map
from subbayes.utils.types import Batch, Inputs, Outputs, Targets

_DRAWS, _ROWS = 4, 5  # numbers that targets and outputs rarely have
_ELEMENTWISE = "Compute it elementwise, without sums or means"


def is_own(likelihood: Likelihood) -> bool:
    """Whether a likelihood, or one that it wraps, is of a class outside the package.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> is_own(Gaussian(1.0))
        False
    """
    if not is_of_package(type(likelihood)):
        return True
    return isinstance(likelihood, WrappedLikelihood) and is_own(likelihood.likelihood)


def check_padding(likelihood: Likelihood, inputs: Inputs | None, y: Targets) -> None:
    """Check that labels of padding do not count, nor labels predicted from it, in one batch.

    The first token of a row that is padded on the left would be predicted from a position of
    padding, where the logits depend on how long the padding is.

    Raises:
        InputError: other labels than the ignored one where `attention_mask` of the inputs (or
            `decoder_attention_mask`, if there is a decoder) is 0, or, if each position predicts the
            next label, where it is 0 at the position before.
    """
    if not (likelihood.per_position and isinstance(inputs, dict)):
        return
    name = "attention_mask"  # of an encoder and a decoder, that of the latter has the labels
    if any(key.startswith("decoder_input") for key in inputs):
        name = f"decoder_{name}"
    mask, labels = inputs.get(name), target_values(y)
    if mask is None or mask.shape != labels.shape:
        return
    ignored = ignored_label(likelihood)
    counted, absent = labels != ignored, mask == 0
    if bool((counted & absent).any()):
        fail(
            "y",
            f"the label {ignored} where {name} is 0",
            f"other labels at {int((counted & absent).sum())} positions of padding",
            f"Set labels[{name} == 0] = {ignored}",
        )
    after = counted[:, 1:] & absent[:, :-1]
    if getattr(likelihood.unweighted, "shift", False) and bool(after.any()):
        fail(
            "y",
            f"the label {ignored} at the first token after padding, which no token predicts",
            f"other labels there in {int(after.any(1).sum())} rows",
            f"Set labels[:, 1:][{name}[:, :-1] == 0] = {ignored}, or pad on the right",
        )


def join_checked_targets(likelihood: Likelihood, batches: Iterable[Batch]) -> Targets:
    """The targets of all batches, on the CPU, whose padding is checked batch by batch.

    Labels of batches that are padded to lengths of their own are padded to the longest of them.

    Args:
        likelihood: p(y | f).
        batches: pairs (inputs, targets).

    Raises:
        InputError: as `check_padding`.

    Example:
        >>> from subbayes.likelihoods import CategoricalTokens
        >>> short, long = torch.tensor([[3]]), torch.tensor([[1, 2]])
        >>> join_checked_targets(CategoricalTokens(), [(short, short), (long, long)])
        tensor([[   3, -100],
                [   1,    2]])
    """
    parts = []
    for inputs, y in batches:
        check_padding(likelihood, inputs, y)
        parts.append(tree_map(Tensor.cpu, y))
    return join_targets(parts, ignored_label(likelihood))


def checked_targets(likelihood: Likelihood, data: Data) -> Targets:
    """The targets of all rows, on the CPU if they are streamed, whose padding is checked.

    Raises:
        InputError: as `check_padding`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> checked_targets(Gaussian(), Data.of((torch.zeros(2, 1), torch.ones(2))))
        tensor([1., 1.])
    """
    if not data.in_memory and data.n:
        return join_checked_targets(likelihood, data.batches())
    targets = data.targets()
    check_padding(likelihood, data.inputs, targets)
    return targets


def ignored_label(likelihood: Likelihood) -> int:
    """The label of positions that do not count.

    Example:
        >>> from subbayes.likelihoods import CategoricalTokens
        >>> ignored_label(CategoricalTokens(ignore_index=0))
        0
    """
    return int(getattr(likelihood.unweighted, "ignore_index", -100))


def sized_likelihood(
    likelihood: Likelihood, n_outputs: int, first: Targets, targets: Targets
) -> Likelihood:
    """The likelihood with the sizes that the outputs determine, checked with all targets.

    Batches of tokens have lengths of their own: their outputs are compared with labels of the same
    rows, and the labels of all rows with the number of classes.

    Args:
        likelihood: p(y | f).
        n_outputs: number of outputs of the first rows.
        first: targets of the first rows.
        targets: targets of all rows.

    Raises:
        InputError: outputs or targets that the likelihood does not accept.

    Example:
        >>> from subbayes.likelihoods import CategoricalTokens
        >>> first, targets = torch.tensor([[1]]), torch.tensor([[1, -100], [2, 3]])
        >>> sized_likelihood(CategoricalTokens(), 4, first, targets).n_classes
        4
    """
    rows = first if likelihood.per_position else targets
    likelihood.check_outputs(n_outputs, rows)
    sized = likelihood.for_outputs(n_outputs, rows)
    if likelihood.per_position:
        sized.check_targets(targets)
    return sized


def check_log_prob(likelihood: Likelihood, outputs: Outputs, y: Targets) -> None:
    """Check that a user's log density is one number for each row and draw, of this row alone.

    Args:
        likelihood: p(y | f); one of the package is not checked.
        outputs: network outputs at one or more rows, shape (n, C).
        y: their targets.

    Raises:
        InputError: another shape, or a density that depends on other rows or draws.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> check_log_prob(Gaussian(1.0), torch.zeros(2, 1), torch.zeros(2))
    """
    if not is_own(likelihood):
        return
    if not likelihood.is_complete:
        likelihood = likelihood.with_parameters(likelihood.init_parameters(y).to(outputs))
    index = torch.arange(_ROWS) % len(outputs)
    y, shifts = take(y, index), torch.linspace(0, 0.5, _DRAWS).to(outputs)
    f = outputs.detach()[index] + shifts[:, None, None]
    together = one_copy_log_prob(likelihood, f, y)
    if together.shape != f.shape[:-1]:
        expected = f"log_prob to return one log density per row and draw, shape {(_DRAWS, _ROWS)}"
        fail("likelihood", expected, f"shape {tuple(together.shape)}", _ELEMENTWISE)
    alone = one_copy_log_prob(likelihood, f[:1, :1], take(y, slice(1)))
    tolerance = torch.finfo(alone.dtype).eps ** 0.5
    if not torch.allclose(together[:1, :1], alone, tolerance, tolerance, equal_nan=True):
        expected = "log_prob to return the log density of each row and draw on its own"
        fail("likelihood", expected, "one that depends on others", _ELEMENTWISE)

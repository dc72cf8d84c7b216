"""Checks of targets, and of what the methods of a user's own likelihood return, before fitting.

A log density of shape (N, 1) in place of (N,), or the sum over rows, would be broadcast to another
posterior without an error. The methods are called with a few rows and draws; classes of the package
are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.arrays import check_dense
from subbayes.data.data import Data, join_targets
from subbayes.likelihoods.base import Kind, Likelihood, WrappedLikelihood, n_targets, target_values
from subbayes.likelihoods.target_parts import one_copy_log_prob
from subbayes.utils.checks import InputError, InputTypeError, error_text, fail
from subbayes.utils.seeding import fork_rng
from subbayes.utils.trees import take, tree_map
from subbayes.utils.types import Inputs, Outputs, Targets
from subbayes.utils.warning import warn_user

_MOST_CLASSES = 20  # in a warning
_DRAWS, _ROWS = 4, 5  # numbers that targets and outputs rarely have
_ELEMENTWISE = (
    "the log density of each row and draw on its own",
    "one that depends on other rows or draws",
    "Compute it elementwise, without sums or means",
)
_NUMBER = "a whole number of at least 1"


def is_own(likelihood: Likelihood) -> bool:
    """Whether a likelihood, or one that it wraps, is of a class outside the package.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> is_own(Gaussian(1.0))
        False
    """
    if type(likelihood).__module__.partition(".")[0] != "subbayes":
        return True
    return isinstance(likelihood, WrappedLikelihood) and is_own(likelihood.likelihood)


def check_sizes(likelihood: Likelihood, y: Targets) -> None:
    """Check the kind and the number of outputs of a user's likelihood, and its check of targets.

    Raises:
        InputError: the kind is unknown; the number is not a whole one of at least 1; the targets
            are refused by another means than an error.
    """
    if not is_own(likelihood):
        return
    kind, kinds = getattr(likelihood, "kind", None), get_args(Kind)
    if kind not in kinds:
        expected = f"a kind of {_name(likelihood)}, one of {', '.join(map(repr, kinds))}"
        fail("likelihood", expected, repr(kind))
    (number,) = _parts(likelihood, "n_outputs", _NUMBER, y, required=True)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        _refuse(likelihood, "n_outputs", _NUMBER, repr(number))
    expected = "None, or to raise InputError"
    if _parts(likelihood, "check_targets", expected, y, required=True)[0] is False:
        _refuse(likelihood, "check_targets", expected, "False")


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


def join_checked_targets(
    likelihood: Likelihood, batches: Iterable[tuple[Inputs, Targets]]
) -> Targets:
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


def absent_classes(likelihood: Likelihood, n_outputs: int, y: Targets) -> list[int]:
    """Labels without rows, in a classification.

    Args:
        likelihood: p(y | f).
        n_outputs: number of outputs of the network; 1 for two classes.
        y: labels (N,).

    Example:
        >>> from subbayes.likelihoods import Categorical
        >>> absent_classes(Categorical(), 4, torch.tensor([0, 3, 3]))
        [1, 2]
    """
    if likelihood.kind != "classification" or not isinstance(y, Tensor) or y.ndim > 1:
        return []
    present = set(y.long().unique().tolist())
    return [label for label in range(max(n_outputs, 2)) if label not in present]


def warn_of_absent_classes(absent: Sequence[int]) -> None:
    """Warn of classes without rows; see `absent_classes`."""
    if absent:
        shown = ", ".join(map(str, absent[:_MOST_CLASSES]))
        more = f" and {len(absent) - _MOST_CLASSES} more" if len(absent) > _MOST_CLASSES else ""
        warn_user(
            f"data: no row of class{'es' * (len(absent) > 1)} {shown}{more}, for which the network "
            "has an output: its predictions for these come from the prior. Add such rows, or "
            "remove the output"
        )


def check_results(likelihood: Likelihood, outputs: Outputs, y: Targets) -> None:
    """Check the results of the methods of a user's likelihood at a few rows.

    `log_prob` has to return one number for each row and draw, which depends on no other and has
    gradients; `mean`, `variance`, `sample`, and `score`, `curvature`, `cdf`, `quantiles` and
    `components` where a class defines them, results of the shapes that `Likelihood` describes.
    Those that raise `NotImplementedError` or `InputError` are taken to be absent.

    Args:
        likelihood: p(y | f); one of the package is not checked.
        outputs: network outputs at one or more rows, shape (n, C).
        y: their targets.

    Raises:
        InputError: a method fails, or returns something else.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> check_results(Gaussian(1.0), torch.zeros(2, 1), torch.zeros(2))
    """
    if not is_own(likelihood):
        return
    index = torch.arange(_ROWS) % len(outputs)
    outputs, y = take(outputs.detach(), index), take(y, index)
    likelihood = _completed(likelihood, outputs, y)
    f = outputs.expand(_DRAWS, *outputs.shape).clone()
    with fork_rng(0):
        _check_log_prob(likelihood, f, y)
        if not likelihood.per_position:
            _check_derivatives(likelihood, f, y)
            with torch.no_grad():
                _check_moments(likelihood.detach(), f.cpu(), tree_map(Tensor.cpu, y))


def _completed(likelihood: Likelihood, outputs: Tensor, y: Targets) -> Likelihood:
    """The likelihood with the initial values of the parameters that training learns."""
    if likelihood.is_complete:
        return likelihood
    name, expected = "init_parameters", "the initial values of its parameters, shape (p,)"
    (values,) = _parts(likelihood, name, expected, y, required=True)
    if not isinstance(values, Tensor) or values.ndim != 1:
        _refuse(likelihood, name, expected, _described(values))
    name, values = "with_parameters", values.to(outputs)
    (found,) = _parts(likelihood, name, "a likelihood", values, required=True)
    if not isinstance(found, Likelihood):
        _refuse(likelihood, name, "a likelihood", type(found).__name__)
    return found


def _check_log_prob(likelihood: Likelihood, f: Tensor, y: Targets) -> None:
    """Check the log density of rows, and of rows and draws."""
    refuse = partial(_refuse, likelihood, "log_prob")

    def evaluate(f: Tensor, y: Targets) -> Tensor:
        quantity, shape = "one log density per row and draw", f.shape[:-1]
        found = _tensors(likelihood, "log_prob", quantity, shape, f, y, required=True)
        if len(found) != 1:
            refuse("one tensor", f"a tuple of {len(found)}")
        return found[0]

    def place(row: int) -> str:
        return f"the outputs {f[0, row].tolist()}"

    evaluate(f[0], y)
    check_density(refuse, partial(evaluate, y=y), f, place)
    together, alone = evaluate(f, y)[:, :1], evaluate(f[:, :1], take(y, slice(1)))
    tolerance = torch.finfo(alone.dtype).eps ** 0.5
    if not torch.allclose(together, alone, rtol=tolerance, atol=tolerance, equal_nan=True):
        refuse(*_ELEMENTWISE)


def _check_derivatives(likelihood: Likelihood, f: Tensor, y: Targets) -> None:
    """Check the derivatives in the outputs that a class defines."""
    quantity = "one value per row, draw and output"
    if _defines(likelihood, "score"):
        _tensors(likelihood, "score", quantity, f.shape, f, y)
    if _defines(likelihood, "curvature"):
        quantity = "one value per row, draw and pair of outputs"
        _tensors(likelihood, "curvature", quantity, (*f.shape, f.shape[-1]), f)


def _check_moments(likelihood: Likelihood, f: Tensor, y: Targets) -> None:
    """Check what predictions use, which are computed on the CPU."""
    quantity, value = "one value per row, draw and target", target_values(y)
    shape = (*f.shape[:-1], n_targets(y))
    if likelihood.kind == "classification":
        for mean in _parts(likelihood, "mean", quantity, f):
            shape = (*shape[:-1], *getattr(mean, "shape", ())[-1:])
    _tensors(likelihood, "mean", quantity, shape, f)
    for variance in _tensors(likelihood, "variance", quantity, shape, f):
        if bool((variance < 0).any()):
            _refuse(likelihood, "variance", "at least 0", f"{float(variance.min()):.4g}")
    generator = torch.Generator().manual_seed(0)
    labels = (f.shape[:-1],) if likelihood.kind == "classification" else ()
    _tensors(likelihood, "sample", quantity, shape, f, generator, or_shapes=labels)
    if _defines(likelihood, "cdf"):
        for found in _tensors(likelihood, "cdf", quantity, shape, f, value):
            if not bool(((found >= 0) & (found <= 1)).all()):
                got = f"values from {float(found.min()):.4g} to {float(found.max()):.4g}"
                _refuse(likelihood, "cdf", "probabilities", got)
    if _defines(likelihood, "quantiles"):
        _tensors(likelihood, "quantiles", quantity, shape, f, 0.5, or_none=True)
    if _defines(likelihood, "components"):
        _tensors(likelihood, "components", quantity, shape, f, or_none=True)


# --- functions of the user ------------------------------------------------------------------------


def check_result(
    refuse: Callable[..., NoReturn],
    name: str,
    found: Any,
    expected: str,
    shapes: tuple[tuple[int, ...], ...],
) -> Tensor:
    """The result of a function of the user, if it is a tensor of real numbers of one of the shapes.

    Args:
        refuse: raises an error from what was expected, what came and the remedy.
        name: of the function; draws may be whole numbers, and log densities need their digits.
        found: the result.
        expected: a description of such a result.
        shapes: those allowed.
    """
    if not isinstance(found, Tensor):
        refuse(expected, type(found).__name__, "Compute it in torch")
    check_dense(name, found)
    if found.shape not in shapes:
        remedy = "Compute it elementwise, without sums or means"
        refuse(expected, f"shape {tuple(found.shape)}", remedy)
    if not (found.is_floating_point() or name.endswith(("sample", "draw"))):
        refuse("numbers in floating point", f"{found.dtype}")
    if name.endswith("log_prob") and found.dtype.itemsize < 4:  # sums over rows lose their digits
        expected = "log densities in float32 or float64"
        refuse(expected, f"{found.dtype}", "Compute it in float32")
    return found


def check_density(
    refuse: Callable[..., NoReturn],
    evaluate: Callable[[Tensor], Tensor],
    f: Float[Tensor, "S n C"],
    place: Callable[[int], str],
) -> None:
    """Check that log densities are numbers, have gradients and do not depend on other rows.

    Args:
        refuse: as for `check_result`.
        evaluate: from outputs or predictors to the log density of each row and draw.
        f: these outputs.
        place: describes a row.
    """
    with torch.enable_grad():
        f = f.clone().requires_grad_()
        found = evaluate(f)
        if not found.requires_grad:
            remedy = "Compute it in torch, and do not detach its arguments"
            refuse("log densities that have gradients", "some without gradients", remedy)
        (gradient,) = torch.autograd.grad(found[0, 0], f)
    bad = ~(found[0] < math.inf)  # NaN too
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        refuse("log densities that are numbers", f"{found[0, row].item()} at {place(row)}")
    gradient[0, 0] = 0.0
    if bool(gradient.nan_to_num(0.0).any()):
        refuse(*_ELEMENTWISE)


def _own(likelihood: Likelihood) -> Likelihood:
    """The likelihood of the user within those of the package that wrap it."""
    while isinstance(likelihood, WrappedLikelihood) and is_own(likelihood.likelihood):
        likelihood = likelihood.likelihood
    return likelihood


def _name(likelihood: Likelihood) -> str:
    return type(_own(likelihood)).__name__


def _defines(likelihood: Likelihood, name: str) -> bool:
    """Whether a class of the user has a method that is not the default one."""
    return getattr(type(_own(likelihood)), name) is not getattr(Likelihood, name)


def _parts(
    likelihood: Likelihood, name: str, expected: str, *arguments: Any, required: bool = False
) -> list[Any]:
    """What a method returns, a tuple in its parts; nothing if the class does not have it."""
    try:
        if name == "log_prob":
            found: Any = one_copy_log_prob(likelihood, *arguments)
        else:
            found = getattr(likelihood, name)(*arguments)
    except (InputError, InputTypeError, NotImplementedError):
        if required:
            raise
        return []
    except Exception as error:
        got = f"{type(error).__name__}: {error_text(error)}"
        _refuse(likelihood, name, expected, got, cause=error)
    return list(found) if isinstance(found, tuple) else [found]


def _tensors(
    likelihood: Likelihood,
    name: str,
    quantity: str,
    shape: tuple[int, ...],
    *arguments: Any,
    or_shapes: tuple[tuple[int, ...], ...] = (),
    or_none: bool = False,
    required: bool = False,
) -> list[Tensor]:
    """What a method returns, if it is of tensors of real numbers of this shape."""
    shape = tuple(shape)
    expected = f"{quantity}, shape {shape} for outputs {tuple(arguments[0].shape)}"
    parts = _parts(likelihood, name, expected, *arguments, required=required)
    parts = [part for part in parts if not (or_none and part is None)]
    refuse = partial(_refuse, likelihood, name)
    return [
        check_result(refuse, f"{_name(likelihood)}.{name}", part, expected, (shape, *or_shapes))
        for part in parts
    ]


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(
    likelihood: Likelihood,
    name: str,
    expected: str,
    got: str,
    remedy: str = "",
    cause: BaseException | None = None,
) -> NoReturn:
    """Raise `InputError` about a method of the class of the user."""
    fail("likelihood", f"{_name(likelihood)}.{name} to return {expected}", got, remedy, cause)

"""The functions that formulas may call, and their options."""

from __future__ import annotations

from typing import Any, NoReturn

from subbayes.regression.formula.grammar import (
    ALLOWED,
    Bar,
    Constant,
    FunctionCall,
    Name,
    Node,
    Operation,
    label,
    written,
)
from subbayes.regression.formula.options import FLAG, Option, list_of, one_of, read_options, whole
from subbayes.utils.checks import closest, fail
from subbayes.utils.registry import TERMS

_OF_ONE = (
    *("abs", "cbrt", "ceil", "exp", "exp2", "expm1", "floor", "sign", "sqrt"),
    *("log", "log10", "log1p", "log2", "square"),
    *("arcsinh", "arctan", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
)
NUMPY = {
    **dict.fromkeys((*_OF_ONE, *(f"np.{name}" for name in _OF_ONE)), 1),
    **dict.fromkeys(("np.arctan2", "np.maximum", "np.minimum", "np.power"), 2),
    **dict.fromkeys(("np.clip", "np.where"), 3),
}
"""Functions of NumPy as they may be written, and their numbers of arguments."""

_NUMBER: Option = ("a number", lambda v: isinstance(v, (int, float)))
_LABEL: Option = ("a level", lambda v: isinstance(v, (int, float, str)))
_EXTRAPOLATION = one_of("raise", "clip", "na", "zero", "extend")
_SPLINE = {"df": whole(1, 1000), "knots": list_of("numbers", _NUMBER[1])}
_BOUNDS = {"lower_bound": _NUMBER, "upper_bound": _NUMBER}
_CUBIC = {**_SPLINE, **_BOUNDS, "constraints": one_of("center"), "extrapolation": _EXTRAPOLATION}
_TRANSFORMS: dict[str, dict[str, Option]] = {
    "center": {},
    "scale": {"center": FLAG, "scale": FLAG, "ddof": _NUMBER},
    "standardize": {"center": FLAG, "rescale": FLAG, "ddof": _NUMBER},
    "poly": {"degree": whole(1, 50), "raw": FLAG},
}
"""Functions of one argument that learn from training rows, with the options that follow it."""
FACTORS: dict[str, dict[str, Option]] = {
    "offset": {},
    "C": {
        "contrasts": (
            "contrasts such as Treatment('a') or contr.sum",
            lambda v: bool(_kind_of_contrasts(v)),
        ),
        "levels": list_of("levels", _LABEL[1]),
        "spans_intercept": FLAG,
    },
    "bs": {
        **_SPLINE,
        "degree": whole(0, 20),
        "include_intercept": FLAG,
        **_BOUNDS,
        "extrapolation": _EXTRAPOLATION,
    },
    **dict.fromkeys(("cc", "cr", "cs"), _CUBIC),
}
"""Functions that are a factor of their own."""
_CONTRASTS: dict[str, dict[str, Option]] = {
    **dict.fromkeys(("treatment", "SAS"), {"reference": _LABEL, "base": _LABEL}),
    "sum": {},
    "poly": {"scores": list_of("numbers", _NUMBER[1])},
    "helmert": {"reverse": FLAG, "scale": FLAG},
    "diff": {"backward": FLAG},
}
KNOWN = _TRANSFORMS | FACTORS
"""Functions of an expression, with the options that follow it."""


def options_of(argument: str, call: FunctionCall) -> dict[str, Any]:
    """The options of a function, which follow its first argument.

    Raises:
        InputError: unknown options or other values.
    """
    known, text = KNOWN[call.function], written(call)
    return read_options(argument, text, known, call.arguments[1:], call.keywords)


def contrasts_of(argument: str, node: Node) -> tuple[str, dict[str, Any]]:
    """The kind and the options of contrasts.

    Example:
        >>> from subbayes.regression.formula.grammar import parse
        >>> contrasts_of("formula", parse("formula", "Treatment('b')"))
        ('treatment', {'reference': 'b'})
    """
    kind = _kind_of_contrasts(node)
    call = node if isinstance(node, FunctionCall) else FunctionCall(kind, ())
    known = _CONTRASTS[kind]
    return kind, read_options(argument, written(node), known, call.arguments, call.keywords)


def _kind_of_contrasts(node: Any) -> str:
    """`sum` of `contr.sum` and `Sum`; "" of anything else."""
    if not isinstance(node, (FunctionCall, Constant, Name)):
        return ""
    name = node.function if isinstance(node, FunctionCall) else label(node)
    kind = name.removeprefix("contr.")
    if kind == name:  # Treatment, Sum, Poly, Helmert and Diff
        kind = name.lower() if name == name.capitalize() else ""
    return kind if kind in _CONTRASTS else ""


def refuse(argument: str, node: Node, factor: str, response: bool) -> NoReturn:
    """Raise for a part of a factor that is no column, number or known function.

    Args:
        argument: name of the argument, for errors.
        node: the part.
        factor: the factor, as written.
        response: whether it is the response.
    """
    got, function = repr(written(node)), node.function if isinstance(node, FunctionCall) else ""
    if isinstance(node, FunctionCall) and function in TERMS:
        fail_as_summand(argument, node)
    if isinstance(node, Operation) and node.symbol == "^":
        remedy = f"Write {factor.replace(' ', '').replace('^', '**')}"
        fail(argument, "powers with **", repr(factor), remedy)
    if response and function in KNOWN:
        remedy = "Transform the column before fitting"
        fail(argument, "an elementwise response", repr(factor), remedy)
    remedy = closest(function, [*KNOWN, *TERMS, *NUMPY])
    if function and not remedy:
        remedy = f"A network is a term of SemiStructuredRegression(networks={{{function!r}: ...}})"
    if response:
        remedy = _OF_RESPONSES.get(function, "")
    fail(argument, ALLOWED, f"{got} in {factor!r}", remedy)


_OF_RESPONSES = {
    "cbind": "Write 'successes | trials(n)' in the place of cbind(successes, n - successes)",
    "Surv": "Write 'time | cens(alive)', where alive is true if the event was not seen",
}


def fail_as_summand(argument: str, term: FunctionCall | Bar) -> NoReturn:
    """Raise for a term of this package in another place than a sum."""
    remedy = "Add it with +: it cannot be in an interaction, another call or (... | g)"
    name = term.function if isinstance(term, FunctionCall) else ""
    fail(argument, f"{name}(...) as a summand", repr(term.source), remedy)

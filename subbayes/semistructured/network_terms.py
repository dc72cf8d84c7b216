"""Networks as terms of a formula: `y ~ x + s(z) + deep(u, v)`, as in deepregression.

The name of the term is that of the network. Its arguments are columns of the data frame, or the
name of one entry of `inputs`, such as images (Rügamer et al. 2023, "deepregression: a flexible
neural network framework for semi-structured deep distributional regression").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from subbayes.likelihoods.families import Family
from subbayes.networks.outputs import HALF
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.regression.formula.grammar import FunctionCall, split_at, summands
from subbayes.regression.terms.calls import Call, CallTerm, parse_call
from subbayes.semistructured.predictors import NetworkTerm
from subbayes.utils.checks import closest, fail, fail_type

_MOST = 10_000  # columns of a network


class NetworkCall(CallTerm):
    """A network as written."""

    most_columns = (1, _MOST)


def without_networks(
    formula: Any, names: Collection[str], family: Family
) -> tuple[Any, list[tuple[str | None, Call]]]:
    """A formula without its networks, and these with the parameter of their formula.

    Args:
        formula: the formula, or one for each parameter. Those of classes of a categorical response
            have networks alone.
        names: names of networks.
        family: distribution of the response.

    Raises:
        InputError: a network in an interaction or of an expression.

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> rest, ((_, call),) = without_networks("y ~ x + deep(u, v)", ["deep"], NormalFamily())
        >>> rest, call.function, call.columns
        ('y ~ x', 'deep', ('u', 'v'))
    """
    if not isinstance(formula, Mapping):
        rest, calls = _without_networks(formula, names)
        return rest, [(None, call) for call in calls]
    plain, found = {}, list[tuple[str | None, Call]]()
    location, *others = family.formula_names
    for parameter, text in formula.items():
        rest, calls = _without_networks(text, names)
        found += [(None if parameter == location else parameter, call) for call in calls]
        of_class = family.has_predictor_per_class and parameter not in (location, *others)
        if not (of_class and calls and rest in ("1", "~ 1")):
            plain[parameter] = rest
    return plain, found


def _without_networks(text: Any, names: Collection[str]) -> tuple[Any, list[Call]]:
    if not isinstance(text, str):  # reported with the formula
        return text, []
    *left, right = split_at(text, "~")
    if not right.strip():
        return text, []
    rest, calls = "", []
    for sign, source, node in summands("formula", right):
        if sign == "+" and isinstance(node, FunctionCall) and node.function in names:
            call = parse_call("formula", node, NetworkCall)  # type: ignore[type-abstract]
            calls.append(call)
        else:
            rest += f" {sign} {source}"
    if not calls:
        return text, []
    rest = rest.removeprefix(" + ").strip() or "1"
    return "~".join([*left, f" {rest}"]) if left else rest, calls


def network_terms(
    formula: str | Mapping[str, str], networks: Mapping[str, Any], family: Family
) -> dict[str, NetworkTerm]:
    """The networks of a formula, by name.

    Raises:
        InputError: a network that is not one term of the formula, or of another dtype.
        InputTypeError: no dict of modules.
    """
    if not isinstance(networks, Mapping):
        fail_type("networks", "a dict of modules by name, such as {'deep': module}", networks)
    found: dict[str, NetworkTerm] = {}
    for parameter, call in without_networks(formula, networks, family)[1]:
        name = call.function
        if name in found:
            remedy = "Pass another module under another name"
            fail("formula", f"one term {name}(...)", "two", remedy)
        found[name] = NetworkTerm(_checked(name, networks[name]), call.columns, parameter)
    absent = [name for name in networks if name not in found]
    if absent or not found:
        remedy = "" if absent else "Use subbayes.Regression without networks"
        name = (absent or ["deep"])[0]
        fail("formula", f"a term {name}(...) of each network", f"none in {formula!r}", remedy)
    return found


def _checked(name: str, module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        fail_type(f"networks[{name!r}]", "a module", module)
    module = uncompiled(module)
    if half := next((p.dtype for p in module.parameters() if p.dtype in HALF), None):
        remedy = "Effects need more digits: pass module.float()"
        fail(f"networks[{name!r}]", "a module of float32 or float64", half, remedy)
    return module


def reading_inputs(
    networks: Mapping[str, NetworkTerm], inputs: Mapping[str, Any] | None, columns: Collection[Any]
) -> dict[str, NetworkTerm]:
    """Networks, of which those read tensors whose argument is the name of an input.

    Raises:
        InputError: the only argument of a network is neither an input nor one of the columns.
    """
    names = set(inputs or ())
    found = {}
    for name, part in networks.items():
        is_tensor = len(part.reads) == 1 and names.issuperset(part.reads)
        if len(part.reads) == 1 and not is_tensor and part.reads[0] not in columns:
            (entry,) = part.reads
            remedy = closest(entry, [*names, *columns]) or f"Pass inputs={{{entry!r}: ...}}"
            expected = f"an entry {entry!r} for {name}({entry}), or a column of that name"
            fail("inputs", expected, "neither", remedy)
        found[name] = replace(part, is_tensor=is_tensor)
    return found

"""Which predictor each network adds to.

The predictor of the reference class of a categorical response is 0. A network there would change
the log odds of all other classes at once, and share the effects of each with its formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design
from subbayes.semistructured.predictors import Deep
from subbayes.utils.checks import closest, fail


def _accepted(family: Family) -> tuple[str, ...]:
    """The parameters with a predictor that is not given."""
    return tuple(name for name in family.formula_parameters if name not in family.known)


def check_parameter(name: str, network: Deep, family: Family) -> None:
    """Raise `InputError` for a network of an unknown or given parameter."""
    accepted, own = _accepted(family), network.parameter
    if own is None or own in accepted:
        return
    remedy = closest(own, accepted)
    if family.has_predictor_per_class and own == family.parameters[0]:
        label = own.partition("[")[2][:-1]
        remedy = f"Class {label!r} is the reference, whose predictor is 0"
    fail(f"parameter of deep[{name!r}]", f"one of {', '.join(accepted)}", repr(own), remedy)


def with_classes(deep: Mapping[str, Deep], family: Family) -> dict[str, Deep]:
    """Networks with their parameter, of a family whose classes are known.

    Args:
        deep: the networks by name. For a categorical response those without a parameter, or with
            that of the formula, add to the only class beside the reference.
        family: distribution of the response.

    Raises:
        InputError: an unknown parameter; or none, with several classes beside the reference.
    """
    if not family.has_predictor_per_class:
        return dict(deep)
    found, accepted = {}, _accepted(family)
    for name, network in deep.items():
        own = network
        if network.parameter in (None, *family.formula_names):
            if len(accepted) > 1:
                fail(
                    f"parameter of deep[{name!r}]",
                    f"one of {', '.join(accepted)}",
                    repr(network.parameter),
                    "A network adds to the log odds of one class to the reference: pass "
                    f"Deep(module, columns, parameter={accepted[0]!r}), a network for each class",
                )
            own = replace(network, parameter=accepted[0])
        check_parameter(name, own, family)
        found[name] = own
    return found


def check_has_columns(deep: Mapping[str, Deep], design: Design, family: Family) -> None:
    """Raise `InputError` for a network without a column that `orthogonal=True` could use."""
    for name, network in deep.items():
        parameter, read = network.parameter or design.parameters[0], set(network.columns or ())
        terms = [t for t in design.terms if t.parameter == parameter]
        usable = any(t.kind != "random" or read & set(t.groups) for t in terms)
        if not usable and not family.n_thresholds:
            expected = f"'auto' or False beside the network {name!r} of {parameter!r}"
            remedy = "The formula of that parameter has no columns to be orthogonal to"
            fail("orthogonal", expected, "True", remedy)

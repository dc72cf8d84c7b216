"""Which predictor each network adds to.

The predictor of the reference class of a categorical response is 0. A network there would change
the log odds of all other classes at once, and share the effects of each with its formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design
from subbayes.semistructured.predictors import NetworkTerm
from subbayes.utils.checks import closest, fail


def with_classes(deep: Mapping[str, NetworkTerm], family: Family) -> dict[str, NetworkTerm]:
    """Networks with their parameter, of a family whose classes are known.

    Args:
        deep: the networks by name. For a categorical response those of the formula of all classes
            add to the only class beside the reference.
        family: distribution of the response.

    Raises:
        InputError: the formula of an unknown class; or of all, with several beside the reference.
    """
    if not family.has_predictor_per_class:
        return dict(deep)
    found, accepted = {}, family.locations
    for name, network in deep.items():
        if network.parameter is None and len(accepted) == 1:
            network = replace(network, parameter=accepted[0])
        own = network.parameter
        if own is None:
            remedy = (
                f"Pass {{..., {accepted[0]!r}: '~ {name}(...)'}}, with a network for each class"
            )
            fail("formula", f"the class whose log odds {name}(...) adds to", "all classes", remedy)
        if own not in accepted:
            remedy = closest(own, accepted)
            if own == family.parameters[0]:
                remedy = f"The predictor of the reference, {own}, is 0"
            fail("formula", f"networks of {', '.join(accepted)}", repr(own), remedy)
        found[name] = network
    return found


def check_has_columns(deep: Mapping[str, NetworkTerm], design: Design, family: Family) -> None:
    """Raise `InputError` for a network without a column that `orthogonal=True` could use."""
    for name, network in deep.items():
        parameter, read = network.parameter or design.parameters[0], set(network.columns or ())
        terms = [t for t in design.terms if t.parameter == parameter]
        usable = any(t.kind != "random" or read & set(t.groups) for t in terms)
        if not usable and not family.n_thresholds:
            expected = f"'auto' or False beside the network {name!r} of {parameter!r}"
            remedy = "The formula of that parameter has no columns to be orthogonal to"
            fail("orthogonal", expected, "True", remedy)

r"""Likelihoods p(y | f): the distribution of the target y given the network outputs f.

Likelihoods are immutable. Their own parameters (a noise scale, a global variance) are numbers, or
"learned" before training: `init_parameters` returns unconstrained initial values and
`with_parameters` sets them. Outputs have shape (..., N, C); every method keeps the leading
dimensions, so that one call evaluates many draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subbayes.artifacts.facts import encode
from subbayes.likelihoods.base import Likelihood, with_tuples
from subbayes.likelihoods.families import (
    FAMILIES,
    Bernoulli,
    Categorical,
    CommonParameters,
    Family,
    Poisson,
    family_from_config,
)
from subbayes.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from subbayes.likelihoods.several import SeveralTargets
from subbayes.likelihoods.standardized import Standardized
from subbayes.likelihoods.tokens import CategoricalTokens
from subbayes.likelihoods.weighted import Weighted
from subbayes.utils.checks import closest, fail, fail_type, one_of
from subbayes.utils.registry import Registry

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "Categorical",
    "CategoricalTokens",
    "CommonParameters",
    "Family",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "SeveralTargets",
    "Standardized",
    "Weighted",
    "as_likelihood",
    "from_config",
]

_LISTING = "subbayes.likelihoods.LIKELIHOODS"
LIKELIHOODS: Registry[Callable[..., Likelihood]] = Registry(
    "likelihood",
    {
        "gaussian": "subbayes.likelihoods.gaussian:Gaussian",
        "heteroscedastic": "subbayes.likelihoods.gaussian:HeteroscedasticGaussian",
        "tokens": "subbayes.likelihoods.tokens:CategoricalTokens",
        "causal-lm": "subbayes.likelihoods.tokens:CategoricalTokens.causal",
    },
)
"""Likelihoods that are no families by name; others by `register` or an entry point.

A likelihood of another package is saved without its class if `to_config` names it as here.
"""
_BY_NAME = {kind.__name__: kind for kind in (Gaussian, HeteroscedasticGaussian, CategoricalTokens)}
_WRAPPERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (CommonParameters, SeveralTargets, Standardized, Weighted)
}

_OTHER_NAMES = {
    "cross_entropy": "categorical",
    "multinomial": "categorical",
    "softmax": "categorical",
    "classification": "categorical",
    "bce": "bernoulli",
    "binary": "bernoulli",
    "binomial": "bernoulli",
    "logistic": "bernoulli",
    "sigmoid": "bernoulli",
    "mse": "gaussian",
    "normal": "gaussian",
    "regression": "gaussian",
    "count": "poisson",
    "student": "student-t",
    "lognormal": "log-normal",
    "negbin": "negative-binomial",
    "causal_lm": "causal-lm",
    "language_modeling": "causal-lm",
    "token_classification": "tokens",
    "token_cls": "tokens",
    "masked_lm": "tokens",
    "seq_cls": "categorical",
}  # of other libraries, losses and tasks


def as_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Convert the argument `likelihood` of `fit`; a name makes one with its defaults.

    Raises:
        InputError: an unknown name.
        InputTypeError: neither a name nor a likelihood.

    Example:
        >>> as_likelihood("bernoulli")
        bernoulli(mu: logit)
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str):
        fail_type("likelihood", "a name or a Likelihood", likelihood)
    other = _OTHER_NAMES.get(likelihood.lower().replace("-", "_").replace(" ", "_"))
    if likelihood in LIKELIHOODS:
        return LIKELIHOODS[likelihood]()
    if likelihood in FAMILIES and FAMILIES[likelihood].is_for_networks:
        return FAMILIES[likelihood]()
    names = (*LIKELIHOODS, *(name for name, kind in FAMILIES.items() if kind.is_for_networks))
    remedy = f"Use {other!r}" if other else closest(likelihood, names)
    fail("likelihood", one_of(names, _LISTING), repr(likelihood), remedy)


def from_config(config: dict[str, Any], n_outputs: int | None = None) -> Likelihood:
    """Rebuild a likelihood from `Likelihood.to_config`.

    Args:
        config: the description.
        n_outputs: number of outputs of the network, to compare its parameters with, if known.

    Raises:
        InputError: an unknown name (pass a user-defined likelihood to the loading function
            instead), or parameters that do not fit the outputs.
    """
    made = _made(config)
    if n_outputs is not None:
        made.check_parameters(n_outputs)
    return made


def holds_own(config: dict[str, Any]) -> bool:
    """Whether a description is of a likelihood or family of the user, or of one around it.

    Example:
        >>> holds_own({"name": "Weighted", "likelihood": {"name": "Laplacian"}})
        True
    """
    name = config["name"]
    if name in _WRAPPERS:
        return holds_own(config["likelihood"])
    if name in FAMILIES:
        return any(holds_own(part) for part in config.values() if isinstance(part, dict))
    return name not in _BY_NAME and not LIKELIHOODS.is_of_others(name)


def saved_likelihood(
    config: dict[str, Any], given: Likelihood | None, n_outputs: int | None = None
) -> Likelihood:
    """The likelihood of an artifact: one of the user's own if it is given, else the saved one.

    Args:
        config: the description in the artifact.
        given: the likelihood that the user passes to `load`: of one of the user's own within
            another one, such as `Standardized`, the inner one or both.
        n_outputs: as for `from_config`.

    Raises:
        InputError: as `from_config`; or a likelihood is given that the artifact contradicts.
        InputTypeError: no likelihood.
    """
    if given is None:
        return from_config(config, n_outputs)
    if not isinstance(given, Likelihood):
        fail_type("likelihood", "a Likelihood", given)
    own = _innermost(given) if holds_own(config) else None
    saved = _made(config, own)
    if n_outputs is not None:
        saved.check_parameters(n_outputs)
    if given is not own and (type(saved) is not type(given) or repr(saved) != repr(given)):
        remedy = "Leave it out: the artifact holds the likelihood"
        if own is not None:
            remedy = f"Pass {own!r}: the artifact holds what is around it"
        fail("likelihood", f"the saved {saved!r}", repr(given), remedy)
    return saved


def _innermost(likelihood: Any) -> Any:
    """What likelihoods of the package wrap."""
    wrappers: Any = tuple(_WRAPPERS.values())
    while isinstance(likelihood, wrappers):
        likelihood = likelihood.likelihood
    return likelihood


def _made(config: dict[str, Any], own: Likelihood | None = None) -> Likelihood:
    """The likelihood of a description, around one of the user's own if it is given."""
    options = with_tuples(config)
    name = options.pop("name")
    if name in _WRAPPERS:
        inner = _made(options.pop("likelihood"), own)
        return _WRAPPERS[name](inner, **options)
    if own is not None:
        if encode(own.to_config()) != encode(config):
            remedy = "Pass the likelihood that the model was fitted with"
            fail("likelihood", f"the saved {config}", f"{own!r}: {own.to_config()}", remedy)
        return own
    if holds_own(config):
        fail(
            "likelihood",
            "a likelihood of this package",
            repr(name),
            "Pass a likelihood object of your own instead, load(path, likelihood=...)",
        )
    if name in FAMILIES:
        return family_from_config(config)
    made: Callable[..., Likelihood] = _BY_NAME.get(name) or LIKELIHOODS[name]
    return made(**options)

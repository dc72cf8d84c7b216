"""Priors of effects in a file: their descriptions, and how they are read.

A distribution of SciPy takes milliseconds and its table 65 kB, so that no prior of a file is built
before all names of priors are known to be those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from scipy import stats

from subbayes.likelihoods.families import Family
from subbayes.regression.design.flat_prior import Flat
from subbayes.regression.design.horseshoe import Horseshoe
from subbayes.regression.design.priors import (
    Exponential,
    Flexible,
    HalfNormal,
    NormalPrior,
    StudentT,
)
from subbayes.regression.priors.dirichlet import Dirichlet
from subbayes.regression.priors.lkj import LKJ
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive, fail

_PARAMETRIC: dict[str, Callable[..., EffectPrior]] = {
    "NormalPrior": NormalPrior,
    "Exponential": Exponential,
    "HalfNormal": HalfNormal,
    "LKJ": LKJ,
    "Dirichlet": Dirichlet,
    "Horseshoe": Horseshoe,
    "Flat": Flat,
}


def prior_config(value: Any) -> Any:
    """Describe a number, a prior or a distribution of SciPy by values that JSON can hold.

    Example:
        >>> prior_from("priors", prior_config(NormalPrior(1.0, 2.0)))
        NormalPrior(mean=1, scale=2)
    """
    if isinstance(value, (int, float)):
        return value
    if type(value) in _PARAMETRIC.values():
        shown = {k: v for k, v in vars(value).items() if not k.startswith("_")}
        return {"name": type(value).__name__, "options": shown}
    own = type(value) in (Flexible, StudentT)  # not subclasses, whose maps may differ
    inner = value.distribution if own else value
    name = getattr(getattr(inner, "dist", None), "name", "")
    if isinstance(getattr(stats, name, None), stats.rv_continuous):
        return {
            "name": "scipy",
            "distribution": name,
            "args": list(inner.args),
            "kwds": dict(inner.kwds),
            "factor": getattr(value, "factor", 1.0),
            "student": isinstance(value, StudentT),
        }
    return {"name": "own", "shown": repr(value)}


def prior_from(name: str, config: Any) -> Any:
    """Rebuild a prior from its `prior_config`; `name` is its name in errors.

    Raises:
        InputError: a prior of the user's own class, which a file cannot hold.
    """
    if not isinstance(config, dict):
        return config
    argument, options = f"priors[{name!r}]", config.get("options", {})
    if config["name"] == "own":
        fail(
            argument,
            f"the prior {config['shown']}",
            "none",
            f"Pass load(path, priors={{{name!r}: ...}}): code is not saved",
        )
    try:
        if config["name"] in _PARAMETRIC:
            return _PARAMETRIC[config["name"]](**options)
        if config["student"]:
            return StudentT(config["args"][0], config["factor"])
        if config["distribution"] not in QUICK:
            fail(
                argument,
                f"a distribution of scipy.stats, one of {', '.join(QUICK)}",
                config["distribution"],
                f"Pass load(path, priors={{{name!r}: ...}}) for others",
            )
        distribution = getattr(stats, config["distribution"])
        return Flexible(distribution(*config["args"], **config["kwds"]), config["factor"])
    except (IndexError, TypeError):
        made = _PARAMETRIC.get(config["name"])
        names = "" if made is None else f", {' and '.join(signature(made).parameters)}"
        fail(argument, f"the parameters of {config['name']!r}{names}", config)


QUICK = (
    "beta", "cauchy", "chi", "chi2", "expon", "exponweib", "f", "gamma", "genextreme", "genpareto",
    "gumbel_l", "gumbel_r", "halfcauchy", "halflogistic", "halfnorm", "hypsecant", "invgamma",
    "laplace", "loggamma", "logistic", "loglaplace", "lognorm", "loguniform", "lomax", "maxwell",
    "norm", "pareto", "powerlaw", "rayleigh", "t", "triang", "truncnorm", "uniform", "weibull_max",
    "weibull_min",
)  # fmt: skip
"""Distributions that a file may name: others integrate and search for minutes."""


class SavedPriors(Mapping[str, Any]):
    """The priors of a file by name, each of which is built when it is first read.

    Terms with the same distribution share it.

    Args:
        configs: description of each, see `prior_config`.
        given: priors of the user, which replace those of the same names.
        family: distribution of the response.
    """

    def __init__(
        self, configs: Mapping[str, Any], given: Mapping[str, Any], family: Family
    ) -> None:
        self._configs, self._given, self._family = configs, given, family
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        config = self._configs[name]
        if name in self._given:
            return self._given[name]
        if not isinstance(config, dict):
            return self._from_number(name, config)
        key = repr(config)
        if key not in self._built:
            self._built[key] = prior_from(name, config)
        return self._built[key]

    def _from_number(self, name: str, config: Any) -> Any:
        """Earlier versions saved numbers, which were priors of log parameters."""
        if name in (*self._family.parameters[1:], "gap"):
            return NormalPrior(0.0, check_positive(f"facts['priors'][{name!r}]", config))
        return config

    def __contains__(self, name: object) -> bool:
        return name in self._configs  # without building it

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

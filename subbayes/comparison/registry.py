"""Posteriors in subspaces as methods of `compare_methods`, and all methods by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from subbayes.comparison.chains import SampledMethod, timed_sampling
from subbayes.comparison.methods import ComparedMethod, GivenModel, Setup, timed
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.engine import ENGINES, Engine, engine_of
from subbayes.models.ensemble_start import starts_at_ensemble
from subbayes.models.fit import as_prior, build, check_prior, check_temperature, fit_settings
from subbayes.models.fitted import method_label
from subbayes.networks.validation import check_fit
from subbayes.priors import EvidencePrior, Normal
from subbayes.subspaces.base import SubspaceMethod
from subbayes.subspaces.registry import SUBSPACES, SubspaceChoice, subspace_method
from subbayes.utils import registry
from subbayes.utils.checks import check_choice, fail
from subbayes.utils.registry import Registry

__all__ = [
    "BASELINES",
    "METHODS",
    "Comparable",
    "SubspaceInference",
    "methods_by_key",
    "named_methods",
]


@dataclass(frozen=True)
class SubspaceInference(SampledMethod):
    """A posterior in a subspace, as `fit` computes it from the shared training.

    Attributes:
        subspace: as for `fit`; so are inference, prior and temperature.
        most_draws: predict with at most this many draws, evenly spaced.

    Example:
        >>> SubspaceInference("pca", "nuts").label
        'PCA + NUTS'
    """

    subspace: SubspaceChoice = "pca"
    inference: str | Engine = "elliptical-slice"
    prior: Normal | EvidencePrior | float | str = 1.0
    temperature: float | str = 1.0
    most_draws: int = 1000
    phases: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        as_prior(self.prior)

    @property
    def method(self) -> SubspaceMethod:
        """How the subspace is chosen."""
        return subspace_method(self.subspace)

    @property
    def key(self) -> str:  # type: ignore[override]
        """The subspace, and the engine unless it is elliptical slice sampling."""
        engine = engine_of(self.inference).name
        short = {full: short for short, full in _ENGINES.items()}.get(engine, engine)
        return f"{self.method.name}-{short}".removesuffix("-")

    @property
    def label(self) -> str:  # type: ignore[override]
        """The subspace and the engine."""
        return method_label(self.method.name, engine_of(self.inference).name)

    def check(self, setup: Setup) -> None:
        """Check what `fit` checks."""
        network, method = setup.network, self.method.with_factory(setup.factory)
        if starts_at_ensemble(setup.sampling):
            fail(
                "initial",
                "'prior', 'shift' or an array (chains, k) to compare methods",
                "'ensemble'",
                "Use method 'mclmc', or subbayes.fit, which train networks to start at",
            )
        check_temperature(self.temperature, setup.validation)
        method.check(network, setup.data, setup.training)
        outputs = check_fit(network, setup.likelihood, setup.data)
        check_prior(as_prior(self.prior), method, network, setup.data, outputs)
        engine_of(self.inference).check(method.expected_rank(network))

    def fit(self, setup: Setup) -> tuple[Any, dict[str, float]]:
        """Build the subspace and sample the posterior; the time of a curve counts as training."""
        method, prior = self.method.with_factory(setup.factory), as_prior(self.prior)
        settings = fit_settings(
            setup.likelihood, method, prior, setup.training, setup.sampling.seed
        )
        trains = method.trains_networks
        prepared, before = timed(lambda: build(setup.trained, method, prior, settings), trains)
        engine = engine_of(self.inference)
        return timed_sampling(prepared, before, setup, engine, setup.sampling, self.temperature)

    def config(self) -> dict[str, Any]:
        """The settings as values that JSON can represent."""
        return {
            "subspace": self.method.name,
            "subspace_settings": self.method.config(),
            "inference": engine_of(self.inference).name,
            "prior": repr(self.prior),
            "temperature": self.temperature,
            "most_draws": self.most_draws,
        }


# --- by name --------------------------------------------------------------------------------------

BASELINES: Registry[type[ComparedMethod]] = registry.BASELINES
"""Methods without a subspace by name; others by `BASELINES.register` or an entry point."""
_ENGINES = {"": "elliptical-slice", "laplace": "laplace-linearised"}
"""Engines that names of methods shorten."""


class _Methods(Mapping[str, ComparedMethod]):
    """Baselines, subspaces such as "pca", and subspaces with an engine such as "pca-nuts"."""

    def __getitem__(self, name: str) -> ComparedMethod:
        if name in BASELINES:
            return BASELINES[name]()
        if name in SUBSPACES:
            return SubspaceInference(name)
        for subspace in SUBSPACES:
            engine = name.removeprefix(f"{subspace}-")
            if engine not in ("", name) and _ENGINES.get(engine, engine) in ENGINES:
                return SubspaceInference(subspace, _ENGINES.get(engine, engine))
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        subspaces = [name for name in SUBSPACES if name != "full"]
        return iter([*BASELINES, *subspaces, "optimal-laplace", "subnetwork-laplace"])

    def __len__(self) -> int:
        return sum(1 for _ in self)


METHODS = _Methods()
"""The methods with their default settings, by name."""
_LISTING = "subbayes.comparison.registry.METHODS"

Comparable = str | ComparedMethod | SubspaceMethod | Predictor


def methods_by_key(
    methods: Sequence[Comparable] | Mapping[str, Comparable],
) -> dict[str, ComparedMethod]:
    """Convert names, methods and subspaces to methods, by their keys in the table of scores.

    Args:
        methods: names of `METHODS`, methods, subspace methods or fitted models; or a dict of them
            by your own keys.

    Raises:
        InputError: no methods, an unknown name, or a repeated key.

    Example:
        >>> from subbayes.subspaces import PCA
        >>> list(methods_by_key(["map", PCA(rank=2)]))
        ['map', 'pca']
    """
    if isinstance(methods, str) or not methods:
        fail("methods", "several names in a list", repr(methods), f"{_LISTING} lists them")
    if isinstance(methods, Mapping):
        return {key: _as_method(method) for key, method in methods.items()}
    found = [_as_method(method) for method in methods]
    if len({method.key for method in found}) < len(found):
        names = [method.key for method in found]
        fail("methods", "each method once", names, "Name them: {'PCA of rank 2': PCA(2), ...}")
    return {method.key: method for method in found}


def _as_method(method: Any) -> ComparedMethod:
    if isinstance(method, ComparedMethod):
        return method
    if isinstance(method, SubspaceMethod):
        return SubspaceInference(method)
    if isinstance(method, Predictor):
        return GivenModel(method)
    if method not in METHODS:
        check_choice("methods", method, METHODS, _LISTING)
    return METHODS[method]


def named_methods(
    names: Sequence[str],
    *,
    draws: int = 30,
    members: int = 5,
    most_draws: int = 1000,
    **posterior: Any,
) -> list[ComparedMethod]:
    """Methods by name, with shared settings.

    Args:
        names: of `METHODS`.
        draws: of SWAG, MC dropout, mean-field VI and sparse networks.
        members: number of networks of a deep ensemble, and of chains that start at one.
        most_draws: number of draws that posteriors predict with.
        posterior: "rank", "inputs" and "covariance" for the subspaces that have them; "prior" and
            "temperature" for all posteriors.

    Raises:
        InputError: a setting that none of the methods uses.

    Example:
        >>> named_methods(["map", "pca"], rank=3)[1].method
        PCA(rank=3)
    """
    shared = {k: posterior.pop(k) for k in ("prior", "temperature") if k in posterior}
    unused = {k for k, v in posterior.items() if k != "rank" and v not in (None, "exact")}
    found: list[ComparedMethod] = []
    for method in methods_by_key(names).values():
        own = {"draws": draws, "members": members, "most_draws": most_draws} | shared
        if isinstance(method, SubspaceInference):
            fields = {field.name for field in dataclasses.fields(method.method)}
            given = {k: v for k, v in posterior.items() if k in fields}
            unused -= set(given)
            own |= {"subspace": dataclasses.replace(method.method, **given)}
        fields = {field.name for field in dataclasses.fields(method)}
        found.append(dataclasses.replace(method, **{k: v for k, v in own.items() if k in fields}))
    for name in sorted(unused):
        users = [
            key
            for key, method in METHODS.items()
            if isinstance(method, SubspaceInference) and hasattr(method.method, name)
        ]
        fail(
            name,
            f"one of {', '.join(users)} among the methods, which use it",
            "others alone",
            "Leave it out",
        )
    return found

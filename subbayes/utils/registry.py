"""Classes by name, those of other packages too, and names that are imported on first use.

Importing `subbayes` reads this file and nothing else, so that it is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from operator import attrgetter
from typing import Any, TypeVar

try:
    __version__ = version("subbayes")
except PackageNotFoundError:  # run from sources that are not installed
    __version__ = "0+unknown"

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping from names to classes of one kind, which are imported when they are asked for.

    A class gets into it by the table of this library, by `register`, or by an entry point of the
    group "subbayes.KIND" of an installed package:

        [project.entry-points."subbayes.engine"]
        random-walk = "mypackage:RandomWalk"

    Args:
        kind: what the classes are, as the argument that takes their names is called.
        own: the names of this library, each with "module:attribute".

    Example:
        >>> engines = Registry("engine", {"nuts": "subbayes.inference.samplers.nuts:NUTS"})
        >>> engines["nuts"].__name__, "hmc" in engines, list(engines)
        ('NUTS', False, ['nuts'])
    """

    def __init__(self, kind: str, own: Mapping[str, str]) -> None:
        self.kind = kind
        self._places = dict(own)
        self._registered: dict[str, T] = {}

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        """Entry points of other packages, which are looked for once: it takes milliseconds."""
        return {point.name: point for point in entry_points(group=f"subbayes.{self.kind}")}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that makes a class known by a name.

        Raises:
            InputError: a name that is taken.

        Example:
            >>> colours = Registry("colour", {})
            >>> @colours.register("red")
            ... class Red: ...
            >>> colours["red"] is Red
            True
        """
        if name in self._places or name in self._registered:
            from subbayes.utils.checks import fail

            fail("name", f"another name of a {self.kind}", f"{name!r}, which is taken")

        def add(item: T) -> T:
            self._registered[name] = item
            return item

        return add

    def is_of_others(self, name: str) -> bool:
        """Whether a name is known and not of this library."""
        return name in self and name not in self._places

    def __getitem__(self, name: str) -> T:
        if name in self._registered:
            return self._registered[name]
        if name in self._places:
            module, _, attribute = self._places[name].partition(":")
            found: Any = attrgetter(attribute)(importlib.import_module(module))
        elif name in self._installed:
            found = self._installed[name].load()
        else:
            raise KeyError(name)
        self._registered[name] = found
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._places, *self._installed, *self._registered]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        # the names of this library are known without a look at what else is installed
        return name in self._registered or name in self._places or name in self._installed


def lazy_imports(
    package: str, names: Mapping[str, str], rooms: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: its dotted name.
        names: public names, each with the module of the package that defines it.
        rooms: modules of the package that are attributes too.
    """

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted([*names, *rooms])


# Names are here, where no class is imported, for the help of the command line.
_SAMPLERS, _APPROXIMATIONS = "subbayes.inference.samplers", "subbayes.inference.variational"
ENGINES: Registry[Any] = Registry(
    "engine",
    {
        "elliptical-slice": f"{_SAMPLERS}.elliptical_slice:EllipticalSlice",
        "nuts": f"{_SAMPLERS}.nuts:NUTS",
        "hmc": f"{_SAMPLERS}.hmc:HMC",
        "mclmc": f"{_SAMPLERS}.mclmc:MCLMC",
        "mams": f"{_SAMPLERS}.mams:MAMS",
        "slice": f"{_SAMPLERS}.slice:SliceSampling",
        "parallel-tempering": f"{_SAMPLERS}.parallel_tempering:ParallelTempering",
        "smc": f"{_SAMPLERS}.smc:SMC",
        "laplace": "subbayes.inference.laplace.laplace:Laplace",
        "laplace-linearised": "subbayes.inference.laplace.linearised_engine:LinearisedLaplace",
        "vi": f"{_APPROXIMATIONS}.variational:MeanFieldVI",
        "full-rank-vi": f"{_APPROXIMATIONS}.variational:FullRankVI",
        "realnvp": f"{_APPROXIMATIONS}.variational:RealNVP",
    },
)
SUBSPACES: Registry[Any] = Registry(
    "subspace",
    {
        "pca": "subbayes.subspaces.pca:PCA",
        "random": "subbayes.subspaces.random:Random",
        "curve": "subbayes.subspaces.curve:Curve",
        "optimal": "subbayes.subspaces.optimal:Optimal",
        "subnetwork": "subbayes.subspaces.subnetwork:Subnetwork",
        "full": "subbayes.subspaces.full:Full",
    },
)
_METHODS, _CHAINS = "subbayes.comparison.methods", "subbayes.comparison.chains"
BASELINES: Registry[Any] = Registry(
    "baseline",
    {
        "map": f"{_METHODS}:MAP",
        "swa": f"{_METHODS}:SWA",
        "swag": f"{_METHODS}:SWAG",
        "ensemble": f"{_METHODS}:DeepEnsemble",
        "mc-dropout": f"{_METHODS}:MonteCarloDropout",
        "temperature-scaling": f"{_METHODS}:TemperatureScaling",
        "recommend": f"{_METHODS}:Recommended",
        "laplace": f"{_METHODS}:AllWeightsLaplace",
        "mclmc": f"{_CHAINS}:MicrocanonicalEnsemble",
        "sparse": f"{_METHODS}:SparseNetworks",
    },
)
_TERMS = "subbayes.regression.terms"
TERMS: Registry[Any] = Registry(
    "term",
    {
        "s": f"{_TERMS}.factor_smooths:AnySmoothTerm",
        "te": f"{_TERMS}.smooths:TensorTerm",
        "ti": f"{_TERMS}.smooths:TensorTerm",
        "t2": f"{_TERMS}.smooths:PlainTensorTerm",
        "mo": f"{_TERMS}.monotonic:MonotonicTerm",
        "gp": f"{_TERMS}.gaussian_process:GaussianTerm",
        "re": f"{_TERMS}.group_effects:RandomIntercept",
    },
)
_PRIORS = "subbayes.regression.priors"
PRIORS: Registry[Any] = Registry(
    "prior",
    {
        "normal": f"{_PRIORS}.normal:NormalPrior",
        "student_t": f"{_PRIORS}.student_t:StudentT",
        "exponential": f"{_PRIORS}.exponential:Exponential",
        "half_normal": f"{_PRIORS}.half_normal:HalfNormal",
        "scipy": f"{_PRIORS}.flexible:Flexible",
        "horseshoe": f"{_PRIORS}.horseshoe:Horseshoe",
        "lkj": f"{_PRIORS}.lkj:LKJ",
        "dirichlet": f"{_PRIORS}.dirichlet:Dirichlet",
    },
)

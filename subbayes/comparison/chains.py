"""All weights by MCLMC from the members of an ensemble, as a method of `compare_methods`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from subbayes.comparison.methods import ComparedMethod, Setup, timed
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.models.ensemble_start import EnsembleStart, ensemble_settings
from subbayes.models.fit import as_prior, build, check_temperature, fit_settings, sample
from subbayes.models.fitted import FittedModel
from subbayes.models.table_networks import without_global_variance
from subbayes.networks.validation import check_fit
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspaces.full import Full
from subbayes.utils.checks import fail

_WARMUP = 4000


def timed_sampling(
    prepared: FittedModel,
    before: dict[str, float],
    setup: Setup,
    engine: Engine,
    sampling: Sampling,
    temperature: float | str,
) -> tuple[FittedModel, dict[str, float]]:
    """Sample the posterior of a model without draws, and add to the seconds that it took before."""
    model, after = timed(
        lambda: sample(prepared, setup.data, engine, sampling, temperature, setup.validation)
    )
    return model, {name: before[name] + after[name] for name in before}


class SampledMethod(ComparedMethod):
    """A posterior that is sampled, whose predictions average at most `most_draws`."""

    most_draws: int

    @override
    def fit_model(self, setup: Setup) -> Any:
        return self.fit(setup)[0]

    @override
    def predict(self, model: Any, inputs: Any, noise: Any) -> Predictive:
        return model.predict(inputs, noise=noise, n_draws=self.most_draws)


@dataclass(frozen=True)
class MicrocanonicalEnsemble(SampledMethod):
    """The posterior of all weights by MCLMC, each chain from a member of an ensemble.

    It is what `fit` does with `subspace="full"`, `Sampling(initial="ensemble")` and the engine
    `MCLMC(target=(0.5, 0.1), metric="prior")`. A `HeteroscedasticGaussian` in `Standardized`, as
    that of tables, has a global variance of 1e-6 in its place where the variance would be learned,
    as in estimators. Source: Sommer et al. (2025).

    Attributes:
        members: number of networks, and of chains.
        warmup: steps of each chain before its draws; None takes those of the sampling, or 4000.
        draws_per_chain: draws of each chain; those of the sampling are of other methods.
        thin: steps for each draw, likewise.
        prior: of the weights: a scale, or a `Normal`.
        temperature: as for `fit`.
        most_draws: predict with at most this many draws, evenly spaced.

    Example:
        >>> MicrocanonicalEnsemble(members=10).label
        'all weights + MCLMC'
    """

    members: int = 5
    warmup: int | None = None
    draws_per_chain: int = 50
    thin: int = 40
    prior: Normal | float = 1.0
    temperature: float | str = 1.0
    most_draws: int = 1000
    key: ClassVar[str] = "mclmc"
    label: ClassVar[str] = "all weights + MCLMC"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members < 2:
            expected = f"at least 2 for {self.key!r}, a chain from each"
            fail("members", expected, self.members, f"Raise it, or leave {self.key!r} out")

    @property
    def engine(self) -> MCLMC:
        """The sampler."""
        return MCLMC(target=(0.5, 0.1), metric="prior")

    def check(self, setup: Setup) -> None:
        """Check what `fit` checks."""
        setup.check_epochs(self.key, "the networks that chains start at")
        as_prior(self.prior)
        check_temperature(self.temperature, setup.validation)
        if setup.network.has_batchnorm:
            expected = f"a module without BatchNorm for {self.key!r}"
            got = "one whose members have statistics of their own"
            fail("methods", expected, got, f"Leave {self.key!r} out, or use LayerNorm")
        start = self._start(self._with_own_likelihood(setup))
        start.method.check(start.network, setup.data, setup.training)
        start.check(self.engine, self.prior)
        self.engine.check(start.network.size)

    def fit(self, setup: Setup) -> tuple[Any, dict[str, float]]:
        """Train the ensemble and sample the posterior; the ensemble counts as training."""
        setup = self._with_own_likelihood(setup)
        start = self._start(setup)
        settings = fit_settings(
            start.likelihood, start.method, self.prior, setup.training, start.sampling.seed
        )
        settings |= ensemble_settings(start.sampling)
        make = partial(build, method=start.method, prior=self.prior, settings=settings)
        prepared, before = timed(lambda: start.fit(lambda: setup.trained, make), training=True)
        sampling = replace(start.sampling, initial=prepared.starts)
        return timed_sampling(prepared, before, setup, self.engine, sampling, self.temperature)

    def config(self) -> dict[str, Any]:
        """The settings as values that JSON can represent."""
        return super().config() | {"prior": repr(self.prior)}

    def _with_own_likelihood(self, setup: Setup) -> Setup:
        """The setup without a learned global variance, which other methods of it keep."""
        likelihood = without_global_variance(setup.likelihood)
        return setup if likelihood is setup.likelihood else replace(setup, likelihood=likelihood)

    def _start(self, setup: Setup) -> EnsembleStart:
        given = setup.sampling.warmup if self.warmup is None else self.warmup
        sampling = replace(
            setup.sampling,
            initial="ensemble",
            chains=self.members,
            draws=self.draws_per_chain,
            warmup=_WARMUP if given is None else given,
            thin=self.thin,
        )
        network = setup.network
        outputs = check_fit(network, setup.likelihood, setup.data)
        return EnsembleStart(
            setup.module,
            network,
            setup.likelihood.for_outputs(outputs, setup.data.first()[1]),
            setup.data,
            setup.training,
            sampling,
            Full(centre="zero"),
            setup.factory,
        )

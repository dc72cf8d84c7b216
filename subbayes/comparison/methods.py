"""Methods that `compare_methods` compares, other than posteriors in subspaces."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from subbayes import sparse
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.map import point_estimate
from subbayes.baselines.mc_dropout import check_dropout, mc_dropout
from subbayes.baselines.swag import swag
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.curvature.precision_factory import check_exact
from subbayes.data.data import Data
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised import linearised_laplace, tune_prior
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.networks.validation import check_fit
from subbayes.predictions.predictive import Predictive
from subbayes.recommendation.recommend import Budget, recommend
from subbayes.sparse.configuration import LearningRates, SparseTraining
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained, estimate_parameters, train_trajectory
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.types import FORMS, Form, ModuleFactory, OutputFunction

__all__ = [
    "MAP",
    "SWA",
    "SWAG",
    "AllWeightsLaplace",
    "ComparedMethod",
    "DeepEnsemble",
    "GivenModel",
    "MonteCarloDropout",
    "Recommended",
    "Setup",
    "SparseNetworks",
    "TemperatureScaling",
    "sparse_training",
    "timed",
]


@dataclass(frozen=True)
class Setup:
    """What the methods of a comparison share: module, data, training and sampling.

    Attributes:
        module: the module with its initial weights.
        likelihood: before training.
        data: training data.
        training: how networks are trained.
        sampling: how posteriors are sampled; its seed is used by all methods.
        factory: makes a module with fresh weights, or None.
        validation: held-out data, or None.
        parameters: which parameters are weights.
        output: picks the tensor out of what the module returns.
    """

    module: nn.Module
    likelihood: Likelihood
    data: Data
    training: Training
    sampling: Sampling
    factory: ModuleFactory | None = None
    validation: Any = None
    parameters: Selection = "all"
    output: OutputFunction | None = None

    @property
    def network(self) -> Network:
        """The network before training."""
        return Network(self.module, self.parameters, output_for(self.likelihood, self.output))

    @cached_property
    def trained(self) -> Trained:
        """The training that methods share."""
        return train_trajectory(
            self.module,
            self.likelihood,
            self.data,
            self.training,
            parameters=self.parameters,
            output=self.output,
            seed=self.sampling.seed,
            progress=self.sampling.progress,
        )

    def maximum_a_posteriori(self) -> WeightSamples:
        """The network after the first phase of training, or the given one without epochs."""
        if self.trained.result is not None:
            return point_estimate(self.trained.result)
        return point_estimate(self.network, self.likelihood, self.data)

    def check_epochs(self, key: str, trained: str) -> None:
        """Check that there are epochs to train what the method `key` needs.

        Raises:
            InputError: there are none.
        """
        if not self.training.epochs:
            fail(
                "training",
                f"epochs above 0 to train {trained}",
                0,
                f"Leave {key!r} out of methods for a module that is trained already",
            )


@dataclass(frozen=True)
class ComparedMethod(ABC):
    """A method of a comparison: a frozen dataclass of its settings.

    Attributes:
        key: its name in `METHODS` and in tables.
        label: its name in reports.
        phases: number of phases of the shared training that it needs.
        trains: whether its own time is that of training, not of inference.
        needs_validation: whether it needs held-out data.
    """

    key: ClassVar[str]
    label: ClassVar[str]
    phases: ClassVar[int] = 0
    trains: ClassVar[bool] = False
    needs_validation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in {"draws", "members", "most_draws"} & {field.name for field in fields(self)}:
            check_count(name, getattr(self, name))

    def check(self, setup: Setup) -> None:  # noqa: B027, some need no check
        """Check before training that the method can be fitted.

        Raises:
            InputError: the setup lacks something that the method needs.
        """

    @abstractmethod
    def fit_model(self, setup: Setup) -> Any:
        """Fit the method."""

    def fit(self, setup: Setup) -> tuple[Any, dict[str, float]]:
        """Fit the method; return the model and the seconds of its own training and inference."""
        return timed(lambda: self.fit_model(setup), self.trains)

    def predict(self, model: Any, inputs: Any, noise: Any) -> Predictive:
        """Predictions of a fitted model at new inputs; `noise` is the scale per row, or None."""
        return model.predict(inputs) if noise is None else model.predict(inputs, noise=noise)

    def config(self) -> dict[str, Any]:
        """The settings as values that JSON can represent."""
        return asdict(self)


def timed(function: Callable[[], Any], training: bool = False) -> tuple[Any, dict[str, float]]:
    """Call a function; return its result, and its seconds as those of training or inference."""
    started = time.perf_counter()
    found = function()
    seconds = time.perf_counter() - started
    return found, {
        "training_seconds": seconds if training else 0.0,
        "inference_seconds": 0.0 if training else seconds,
    }


def sparse_training(
    training: Training, n_rows: int, early_epochs: int | None = None
) -> SparseTraining:
    """The training of a sparse network with the epochs, learning rate and batches of another.

    Args:
        training: of the other network.
        n_rows: number of training rows.
        early_epochs: epochs that learn the priors; by default four in five.
    """
    batches = 1 if training.batch_size is None else math.ceil(n_rows / training.batch_size)
    return SparseTraining(
        epochs=training.epochs,
        early_epochs=early_epochs,
        learning_rates=LearningRates.uniform(training.learning_rate, training.epochs * batches),
        batch_size=training.batch_size,
    )


# --- baselines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MAP(ComparedMethod):
    """The maximum a posteriori estimate."""

    key: ClassVar[str] = "map"
    label: ClassVar[str] = "MAP"
    phases: ClassVar[int] = 1

    def fit_model(self, setup: Setup) -> WeightSamples:
        """Train the first phase."""
        return setup.maximum_a_posteriori()


@dataclass(frozen=True)
class SWA(ComparedMethod):
    """Stochastic weight averaging: the mean of the trajectory."""

    key: ClassVar[str] = "swa"
    label: ClassVar[str] = "SWA"
    phases: ClassVar[int] = 2

    def check(self, setup: Setup) -> None:
        """Check that there is a second phase."""
        if not setup.training.swa_epochs:
            remedy = f"Leave {self.key!r} out of methods"
            fail("swa_epochs", f"at least 1 for {self.key!r}", 0, remedy)

    def fit_model(self, setup: Setup) -> WeightSamples:
        """Train both phases."""
        return point_estimate(setup.trained.swa)


@dataclass(frozen=True)
class SWAG(SWA):
    """Draws from a Gaussian fitted to the trajectory.

    Attributes:
        draws: number of weight vectors.
    """

    draws: int = 30
    key: ClassVar[str] = "swag"
    label: ClassVar[str] = "SWAG"

    def fit_model(self, setup: Setup) -> WeightSamples:
        """Draw weight vectors."""
        return swag(setup.trained.swa, self.draws, seed=setup.sampling.seed)


@dataclass(frozen=True)
class DeepEnsemble(ComparedMethod):
    """Networks with different initial weights, each trained as in the first phase.

    Attributes:
        members: number of networks.
    """

    members: int = 5
    key: ClassVar[str] = "ensemble"
    label: ClassVar[str] = "deep ensemble"
    trains: ClassVar[bool] = True

    @override
    def check(self, setup: Setup) -> None:
        setup.check_epochs(self.key, "an ensemble")

    @override
    def fit_model(self, setup: Setup) -> WeightSamples:
        return deep_ensemble(
            setup.module,
            setup.likelihood,
            setup.data,
            setup.training,
            members=self.members,
            factory=setup.factory,
            parameters=setup.parameters,
            output=setup.output,
            seed=setup.sampling.seed,
            progress=setup.sampling.progress,
        )


@dataclass(frozen=True)
class MonteCarloDropout(ComparedMethod):
    """Dropout masks at prediction time, for a module with dropout layers.

    Attributes:
        draws: number of masks.
    """

    draws: int = 30
    key: ClassVar[str] = "mc-dropout"
    label: ClassVar[str] = "MC dropout"
    phases: ClassVar[int] = 1

    def check(self, setup: Setup) -> None:
        """Check that there is a dropout layer."""
        check_dropout(setup.module)

    def fit_model(self, setup: Setup) -> Any:
        """Draw masks."""
        options: dict[str, Any] = {"n_draws": self.draws, "seed": setup.sampling.seed}
        if setup.trained.result is not None:
            return mc_dropout(setup.trained.result, **options)
        return mc_dropout(setup.network, setup.likelihood, setup.data, **options)


@dataclass(frozen=True)
class TemperatureScaling(ComparedMethod):
    """The maximum a posteriori estimate with a temperature fitted to validation data."""

    key: ClassVar[str] = "temperature-scaling"
    label: ClassVar[str] = "MAP + temperature"
    phases: ClassVar[int] = 1
    needs_validation: ClassVar[bool] = True

    def check(self, setup: Setup) -> None:
        """Check that there are validation data."""
        if setup.validation is None:
            fail(
                "validation",
                f"held-out data for {self.key!r}",
                None,
                f"Pass data, or leave {self.key!r} out of methods",
            )

    @override
    def fit_model(self, setup: Setup) -> Any:
        return temperature_scaling(setup.maximum_a_posteriori(), setup.validation)


@dataclass(frozen=True)
class Recommended(TemperatureScaling):
    """What `subbayes.recommend` makes of the maximum a posteriori estimate.

    Attributes:
        budget: "seconds" or "minutes".
    """

    budget: Budget = "seconds"
    key: ClassVar[str] = "recommend"
    label: ClassVar[str] = "recommended"

    @override
    def fit_model(self, setup: Setup) -> Any:
        found = setup.maximum_a_posteriori()
        return recommend(
            found.network.module_with(found.weights[0]),
            setup.data,
            validation=setup.validation,
            likelihood=found.likelihood,
            budget=self.budget,
            output=setup.output,
            seed=setup.sampling.seed,
            progress=setup.sampling.progress,
        )


@dataclass(frozen=True)
class GivenModel(ComparedMethod):
    """A model that is fitted already, such as one of another training.

    Attributes:
        model: the model, whose test rows are those of the comparison.
    """

    model: Predictor
    key: ClassVar[str] = "model"
    label: ClassVar[str] = "the given model"

    @override
    def fit_model(self, setup: Setup) -> Predictor:
        return self.model

    @override
    def config(self) -> dict[str, Any]:
        return dict(self.model.describe())


@dataclass(frozen=True)
class AllWeightsLaplace(ComparedMethod):
    """Linearised Laplace of all selected weights around the maximum a posteriori.

    Of adapters, with `covariance="kfac"`, it is Laplace-LoRA.

    Attributes:
        covariance: form of the covariance, as for `linearised_laplace`.
        prior_precision: of the weights; None is that of the largest evidence, with the noise of a
            Gaussian likelihood.
    """

    covariance: Form = "exact"
    prior_precision: float | None = None
    key: ClassVar[str] = "laplace"
    label: ClassVar[str] = "linearised Laplace"
    phases: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("covariance", self.covariance, FORMS)
        if self.prior_precision is not None:
            check_positive("prior_precision", self.prior_precision)

    def check(self, setup: Setup) -> None:
        """Check that an exact covariance fits into memory."""
        network = setup.network
        outputs = check_fit(network, setup.likelihood, setup.data)
        if self.covariance in ("exact", "dual", "primal"):
            check_exact(self.covariance, setup.data.n, outputs, network.size)

    def fit_model(self, setup: Setup) -> Any:
        """Linearise the network and choose the prior."""
        network, likelihood = setup.network, setup.likelihood
        if (result := setup.trained.result) is not None:
            network, likelihood = result.network, result.likelihood
        posterior = linearised_laplace(
            network,
            estimate_parameters(network, likelihood, setup.data),
            setup.data,
            covariance=self.covariance,
            prior_precision=self.prior_precision or 1.0,
            progress=setup.sampling.progress,
        )
        return tune_prior(posterior) if self.prior_precision is None else posterior


@dataclass(frozen=True)
class SparseNetworks(ComparedMethod):
    """Draws of a mean-field sparse network (`sparse.fit`), trained for the same epochs.

    Attributes:
        draws: number of networks drawn.
    """

    draws: int = 30
    key: ClassVar[str] = "sparse"
    label: ClassVar[str] = "sparse network"
    trains: ClassVar[bool] = True

    def check(self, setup: Setup) -> None:
        """Check that the module returns a tensor and is trained."""
        if setup.output is not None:
            fail(
                "output",
                "none, as sparse networks take modules that return one tensor",
                "a function",
                "Leave 'sparse' out of methods",
            )
        setup.check_epochs(self.key, "a sparse network")

    @override
    def fit_model(self, setup: Setup) -> WeightSamples:
        names, seed = setup.network.spans, setup.sampling.seed
        module = _only_trainable(setup.module, setup.network)
        keep = [
            name
            for name, layer in module.named_modules()
            if f"{name}.weight" not in names and hasattr(layer, "weight")
        ]
        found = sparse.fit(
            sparse.convert(module, keep=keep, seed=seed),
            setup.likelihood,
            setup.data,
            sparse_training(setup.training, setup.data.n),
            seed=seed,
            progress=setup.sampling.progress,
        )
        weights = found.weights(draws=self.draws, seed=seed)
        return WeightSamples(found.network, weights, found.likelihood, self.label)


def _only_trainable(module: nn.Module, network: Network) -> nn.Module:
    """The module if its trainable parameters are those of the network, or a copy where they are."""
    names = network.spans
    if all(p.requires_grad == (name in names) for name, p in module.named_parameters()):
        return module
    module = copy.deepcopy(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    return module

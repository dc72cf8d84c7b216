"""Several methods on the same data: one training where they share it, one table of scores."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from subbayes import sparse
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.map import point
from subbayes.baselines.mc_dropout import McDropout, mc_dropout
from subbayes.baselines.swag import swag
from subbayes.baselines.temperature_scaling import TemperatureScaled, temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Likelihood
from subbayes.models.fit import FittedModel, fit
from subbayes.models.subspace_choice import (
    SUBSPACES,
    build_subspace,
    check_sizes,
    check_subspace,
    prior_within,
)
from subbayes.networks.initialisation import fresh
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.posterior import check_fit
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.training.configuration import Training
from subbayes.training.curve import restarted
from subbayes.training.pipeline import Trained, train_trajectory
from subbayes.utils.checks import check_choice, check_count, check_positive, fail, fail_type
from subbayes.utils.types import Form, Targets

__all__ = ["METHODS", "Comparison", "Predictor", "compare_methods", "shown"]

METHODS = {
    "map": "MAP",
    "swa": "SWA",
    "swag": "SWAG",
    "ensemble": "deep ensemble",
    "mc-dropout": "MC dropout",
    "temperature-scaling": "MAP + temperature",
    "pca": "PCA + ESS",
    "random": "random + ESS",
    "curve": "curve + ESS",
    "optimal": "optimal + ESS",
    "optimal-laplace": "optimal + linearised Laplace",
    "subnetwork": "subnetwork + ESS",
    "subnetwork-laplace": "subnetwork + linearised Laplace",
    "sparse": "sparse network",
}
"""The methods, and what tables call them."""

_ALONE = ("ensemble", "sparse")  # trained by themselves
_AT_INPUTS = ("optimal", "optimal-laplace", "subnetwork", "subnetwork-laplace")

Predictor = WeightSamples | McDropout | TemperatureScaled | FittedModel


@dataclass(frozen=True)
class Comparison:
    """Methods side by side.

    Attributes:
        table: one row per method, with its name, the scores of `metrics.score`, and seconds:
            "training_seconds" of all training it needs, "inference_seconds" of what comes after
            (choosing a temperature, sampling), "prediction_seconds" for the test rows, and
            "seconds", their sum. Training that methods share is done once and counted in full
            for each of them: the seconds are what a method costs by itself, and add up to more
            than the comparison took.
        predictives: predictions of the test rows, by method.
        models: what predicts, by method; a `FittedModel` for the subspaces.
        y: targets of the test rows.
        settings: what was asked for, as JSON-able values.
        trained: the training that methods share, or None where none of them needs it.
    """

    table: pd.DataFrame
    predictives: dict[str, Predictive]
    models: dict[str, Predictor]
    y: Targets
    settings: dict[str, Any] = field(default_factory=dict)
    trained: Trained | None = None

    def differences(self) -> pd.DataFrame:
        r"""Log-likelihood of each method less that of the best, with its standard error.

        $$ \bar d = \frac{1}{N} \sum_n d_n, \qquad
           \mathrm{se} = \sqrt{\frac{\mathrm{Var}(d)}{N}}, \qquad
           d_n = \log p(y_n) - \log p_{\mathrm{best}}(y_n) $$

        Test rows are the same for all methods, so that the error of a difference is smaller
        than that of either score. It says nothing about another seed or another split.

        Returns:
            A table with columns "method", "difference" and "se", in nats per observation.
        """
        terms = {key: predictive.log_prob(self.y) for key, predictive in self.predictives.items()}
        best = max(terms, key=lambda key: terms[key].mean())
        rows = [
            (
                METHODS[key],
                (values - terms[best]).mean(),
                (values - terms[best]).std() / np.sqrt(len(values)),
            )
            for key, values in terms.items()
        ]
        return pd.DataFrame(
            rows, columns=["method", "difference", "se"], index=pd.Index(list(terms), name="key")
        )

    def warnings(self) -> dict[str, list[str]]:
        """What is wrong with the sampling runs, each with a remedy, by method."""
        said = {
            key: model.warnings()
            for key, model in self.models.items()
            if isinstance(model, FittedModel)
        }
        return {key: lines for key, lines in said.items() if lines}

    def to_dict(self) -> dict[str, Any]:
        """Scores, differences, warnings and settings, as JSON-able values."""
        rows = self.table.join(self.differences()[["difference", "se"]])
        scores = [
            {"key": key} | {name: _plain(value) for name, value in row.items()}
            for key, row in rows.to_dict("index").items()
        ]
        return {
            "scores": scores,
            "n_test": len(next(iter(self.predictives.values()))),
            "warnings": self.warnings(),
            "settings": self.settings,
        }

    def to_text(self) -> str:
        """The table of scores in plain text, for a terminal."""
        percent = f"{100 * self.settings.get('level', 0.95):g} %"
        heads = {
            "log_likelihood": "log-likelihood",
            "rmse": "RMSE",
            "crps": "CRPS",
            "coverage": f"coverage of {percent}",
            "accuracy": "accuracy",
            "brier": "Brier",
            "ece": "ECE",
            "auroc": "AUROC",
            "seconds": "seconds",
        }
        kept = [key for key in heads if key in self.table.columns]
        rows = [["method", *(heads[key] for key in kept)]]
        rows += [
            [str(row["method"]), *(shown(key, row[key]) for key in kept)]
            for row in self.table.to_dict("records")
        ]
        widths = [max(len(row[j]) for row in rows) for j in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if j else cell.ljust(width)
                for j, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.table['method'])})"


def shown(score: str, value: float) -> str:
    """A score as tables print it.

    Args:
        score: its name.
        value: its value.

    Example:
        >>> shown("coverage", 0.9432), shown("rmse", 54.2), shown("seconds", 3.21)
        ('94.3 %', '54.20', '3.2')
    """
    if not np.isfinite(value):
        return "-"
    if score in ("coverage", "accuracy"):
        return f"{100 * value:.1f} %"
    size = int(np.floor(np.log10(abs(value)))) if value else 0
    digits = {"log_likelihood": 3, "seconds": 1, "auroc": 3, "brier": 4, "ece": 4}.get(
        score, min(max(3 - size, 0), 8)
    )
    return f"{value:.{digits}f}"


def _plain(value: Any) -> str | float | None:
    """A text, a float, or None where JSON has no number for it."""
    if isinstance(value, str):
        return value
    return float(value) if np.isfinite(value) else None


def compare_methods(
    module: nn.Module | Callable[[], nn.Module],
    likelihood: Likelihood,
    data: Any,
    test: Any,
    methods: Sequence[str] = ("map", "swa", "swag", "ensemble", "pca", "random"),
    *,
    training: Training | None = None,
    rank: int | None = None,
    prior: Normal | float = 1.0,
    inputs: Any = None,
    covariance: Form = "exact",
    temperature: float | str = 1.0,
    validation: Any = None,
    draws: int = 500,
    chains: int = 8,
    warmup: int | None = None,
    members: int = 5,
    n_draws: int = 30,
    most_draws: int = 1000,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    level: float = 0.95,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Fit several methods to the same data and score them on the same test rows.

    MAP, SWA, SWAG, MC dropout, temperature scaling and the subspaces start from one training,
    `train_trajectory`; a deep ensemble trains its members anew, and so is a sparse network
    (`sparse.fit`, mean-field), with as many epochs.

    Args:
        module: the architecture, never changed; or a function that makes a module with fresh
            weights from torch's global generator, which is seeded for it.
        likelihood: p(y | f).
        data: training data.
        test: rows to score on, with their targets.
        methods: names out of `METHODS`, in the order of the table. "mc-dropout" needs a module
            with dropout layers, "temperature-scaling" validation data. "optimal" and "subnetwork"
            are sampled through the network itself; with "-laplace" they have the closed form of
            its linearisation.
        training: how to train; ensemble members go through its first phase.
        rank: number of coordinates of the subspaces; None as in `fit`.
        prior: of z: a scale or a `Normal`; as in `fit`, a scale is that of the weights within the
            optimal subspace.
        inputs: for which "optimal" and "subnetwork" are chosen, as in `fit`: none, or inputs
            without targets. Those of the test rows are allowed; the choice then knows what it will
            be asked, as the other methods do not.
        covariance: by which "optimal" is chosen, as in `fit`.
        temperature: T of the subspaces, or "loo" or "validation" to choose it for each.
        validation: held-out data, for "temperature-scaling" and `temperature="validation"`.
        draws: draws per chain.
        chains: number of chains.
        warmup: draws per chain to drop first; by default half of the draws kept.
        members: networks of the deep ensemble.
        n_draws: weight vectors of SWAG, masks of MC dropout, draws of a sparse network.
        most_draws: subspaces predict with so many of their draws, evenly spaced.
        parameters: which parameters are weights, as for `Network`.
        output: picks the tensor out of what the module returns, as for `Network`.
        level: probability of the interval whose coverage and width are scored.
        seed: the same seed gives the same comparison, but for the seconds.
        progress: show progress bars; None shows them on a terminal.

    Raises:
        InputError: an unknown method, or one that lacks what it needs; what `fit` raises.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-2, 2, 80)[:, None]
        >>> y = torch.sin(2 * x[:, 0])
        >>> comparison = compare_methods(
        ...     subbayes.MLP(1, (10,), 1, seed=0), Gaussian(), (x[::2], y[::2]),
        ...     (x[1::2], y[1::2]), methods=("map", "pca"), rank=2, draws=20, progress=False,
        ...     training=Training(epochs=20, swa_epochs=5, swa_learning_rate=1e-3))
        >>> comparison.table["method"].tolist()
        ['MAP', 'PCA + ESS']
    """
    bench = _Bench(
        module=_module(module, seed),
        likelihood=likelihood,
        data=Data.of(data),
        validation=validation,
        training=training or Training(),
        prior=prior,
        rank=rank,
        inputs=inputs,
        covariance=covariance,
        temperature=temperature,
        draws=draws,
        chains=chains,
        warmup=warmup,
        members=members,
        n_draws=check_count("n_draws", n_draws),
        factory=_factory(module),
        seed=seed,
        parameters=parameters,
        output=output,
        progress=progress,
    )
    rows = Data.of(test, "test")
    bench.check(methods, rows)
    check_count("most_draws", most_draws)
    table, predictives, models = [], {}, {}
    for key in methods:
        models[key], seconds = bench.run(key)
        with _timed(seconds, "prediction_seconds"):
            predictives[key] = _predicted(models[key], rows, most_draws)
        scores = metrics.score(predictives[key], _values(rows.targets()), level)
        table.append(
            {"method": METHODS[key], **scores, "seconds": sum(seconds.values()), **seconds}
        )
    return Comparison(
        pd.DataFrame(table, index=pd.Index(methods, name="key")),
        predictives,
        models,
        _values(rows.targets()),
        bench.settings() | {"level": level},
        bench.__dict__.get("trained"),
    )


def _engine(key: str) -> str:
    return "laplace-linearised" if key.endswith("-laplace") else "elliptical-slice"


def _module(module: Any, seed: int) -> nn.Module:
    if not callable(module):
        fail_type("module", "a module, or a function that makes one", module)
    return module if isinstance(module, nn.Module) else fresh(nn.Identity(), module, seed)


def _factory(module: Any) -> Callable[[], nn.Module] | None:
    return None if isinstance(module, nn.Module) else module


def _values(y: Targets) -> Tensor:
    """Targets without known noise scales."""
    return y if isinstance(y, Tensor) else y[0]


def _predicted(model: Any, rows: Data, most_draws: int) -> Predictive:
    """Predictions of test rows, with their noise where it is known."""
    y = rows.targets()
    options: dict[str, Any] = {} if isinstance(y, Tensor) else {"noise": y[1]}
    if isinstance(model, FittedModel):
        options["n_draws"] = most_draws
    return model.predict(rows.inputs if rows.in_memory else rows.loader, **options)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


# --- the methods --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """What the methods have in common."""

    module: nn.Module
    likelihood: Likelihood
    data: Data
    validation: Any
    training: Training
    prior: Normal | float
    rank: int | None
    inputs: Any
    covariance: Form
    temperature: float | str
    draws: int
    chains: int
    warmup: int | None
    members: int
    n_draws: int
    factory: Callable[[], nn.Module] | None
    seed: int
    parameters: Selection
    output: Callable[[Any], Tensor] | None
    progress: bool | None

    def check(self, methods: Sequence[str], test: Data) -> None:
        """Refuse now what would be refused after the training."""
        if isinstance(methods, str) or not methods:
            fail("methods", f"several of {', '.join(METHODS)}", repr(methods))
        for key in methods:
            check_choice("methods", key, METHODS)
        if len(set(methods)) < len(methods):
            fail("methods", "each method once", list(methods))
        if not isinstance(self.prior, Normal):
            check_positive("prior", self.prior)
        if self.validation is None and (
            "temperature-scaling" in methods or self.temperature == "validation"
        ):
            fail(
                "validation",
                "held-out data for temperature scaling or the choice of a temperature",
                None,
                "Pass data, or leave them out",
            )
        if "mc-dropout" in methods:
            mc_dropout(self.module, self.likelihood)
        if "sparse" in methods and self.output is not None:
            fail(
                "output",
                "none, as sparse networks take modules that return one tensor",
                "a function",
                "Leave 'sparse' out of methods",
            )
        for key, what in (
            ("ensemble", "an ensemble"),
            ("curve", "a curve's other end"),
            ("sparse", "a sparse network"),
        ):
            if key in methods and not self.training.epochs:
                fail(
                    "training",
                    f"epochs above 0 to train {what}",
                    0,
                    f"Leave {key!r} out of methods for a module that is trained already",
                )
        for key in ("swa", "swag"):
            if key in methods and not self.training.swa_epochs:
                fail("swa_epochs", f"at least 1 for {key!r}", 0, f"Leave {key!r} out of methods")
        for name, given, users in (
            ("inputs", self.inputs is not None, _AT_INPUTS),
            ("covariance", self.covariance != "exact", _AT_INPUTS[:2]),
        ):
            if given and not set(users) & set(methods):
                fail(
                    name,
                    f"one of {', '.join(users)} among the methods, which use it",
                    "others alone",
                    "Leave it out",
                )
        network = Network(self.module, self.parameters, self.output)
        if "curve" in methods:
            check_count("rank", 2 if self.rank is None else self.rank, 2)
            restarted(network, 0, self.factory)
        for part in (self.data, test):
            check_fit(network, self.likelihood, part)
        for key in methods:
            self.check_space(key, network)

    def check_space(self, key: str, network: Network) -> None:
        """Refuse now a rank, inputs or sizes that a subspace could not have."""
        name = key.partition("-")[0]
        if name not in SUBSPACES:
            return
        check_subspace(name, self.rank, network, self.training, self.factory)
        check_sizes(
            network,
            self.data,
            name,
            self.rank,
            _engine(key),
            self.inputs if key in _AT_INPUTS else None,
            self.covariance if name == "optimal" else "exact",
        )

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
            seed=self.seed,
            progress=self.progress,
        )

    def run(self, key: str) -> tuple[Any, dict[str, float]]:
        """The fitted method, and the seconds of its training and its inference."""
        if key in _ALONE:
            seconds: dict[str, float] = {}
            with _timed(seconds, "training_seconds"):
                model: Any = getattr(self, key)()
            return model, seconds | {"inference_seconds": 0.0}
        first, second = self.trained.seconds
        short = key in ("map", "mc-dropout", "temperature-scaling")
        seconds = {"training_seconds": first if short else first + second}
        if key == "curve":
            with _timed(seconds, "curve_seconds"):
                _ = self.curve_space  # cached: what trains is timed as training
            seconds["training_seconds"] += seconds.pop("curve_seconds")
        with _timed(seconds, "inference_seconds"):
            model = (
                self.chosen(key) if key in _AT_INPUTS else (getattr(self, key.replace("-", "_"))())
            )
        return model, seconds

    def map(self) -> WeightSamples:
        if self.trained.result is not None:
            return point(self.trained.result)
        network = Network(self.module, self.parameters, self.output)
        weights = network.weights[None]
        raw = average(
            network,
            self.likelihood,
            weights,
            self.data.inputs if self.data.in_memory else self.data.loader,
        )
        learned = self.likelihood.estimated(raw.outputs[0], self.data.targets())
        return WeightSamples(network, weights, learned, "MAP")

    def swa(self) -> WeightSamples:
        return point(self.trained.swa)

    def swag(self) -> WeightSamples:
        return swag(self.trained.swa, self.n_draws, seed=self.seed)

    def ensemble(self) -> WeightSamples:
        return deep_ensemble(
            self.module,
            self.likelihood,
            self.data,
            self.training,
            members=self.members,
            factory=self.factory,
            parameters=self.parameters,
            output=self.output,
            seed=self.seed,
            progress=self.progress,
        )

    def sparse(self) -> WeightSamples:
        plan, names = self.training, Network(self.module, self.parameters).spans
        module = copy.deepcopy(self.module)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in names)
        keep = [
            name
            for name, layer in module.named_modules()
            if f"{name}.weight" not in names and hasattr(layer, "weight")
        ]
        batches = 1 if plan.batch_size is None else math.ceil(self.data.n / plan.batch_size)
        found = sparse.fit(
            sparse.convert(module, keep=keep, seed=self.seed),
            self.likelihood,
            self.data,
            sparse.SparseTraining(
                epochs=plan.epochs,
                batch_size=plan.batch_size,
                learning_rates=sparse.LearningRates.uniform(
                    plan.learning_rate, plan.epochs * batches
                ),
            ),
            seed=self.seed,
            progress=self.progress,
        )
        return WeightSamples(
            found.network,
            found.weights(draws=self.n_draws, seed=self.seed),
            found.likelihood,
            METHODS["sparse"],
        )

    def mc_dropout(self) -> McDropout:
        if self.trained.result is not None:
            return mc_dropout(
                self.trained.result, n_draws=self.n_draws, seed=self.seed, output=self.output
            )
        return mc_dropout(
            self.module,
            self.map().likelihood,
            n_draws=self.n_draws,
            seed=self.seed,
            output=self.output,
        )

    def temperature_scaling(self) -> TemperatureScaled:
        return temperature_scaling(self.map(), self.validation)

    def pca(self) -> FittedModel:
        return self.sampled("pca")

    def random(self) -> FittedModel:
        return self.sampled("random")

    def curve(self) -> FittedModel:
        return self.sampled("curve", self.curve_space)

    @cached_property
    def curve_space(self) -> Subspace:
        """A second solution and the curve to it, trained."""
        return build_subspace(
            "curve",
            self.trained,
            self.rank,
            self.seed,
            data=self.data,
            training=self.training,
            factory=self.factory,
            progress=self.progress,
        )

    def chosen(self, key: str) -> FittedModel:
        """A subspace chosen for what it keeps of the predictive covariance."""
        name, inference = key.partition("-")[0], _engine(key)
        scale = None if isinstance(self.prior, Normal) else float(self.prior)
        space = build_subspace(
            name,
            self.trained,
            self.rank,
            self.seed,
            data=self.data,
            inputs=self.inputs,
            prior_scale=1.0 if scale is None else scale,
            covariance=self.covariance,
        )
        prior = (
            prior_within(space, scale) if (name == "optimal" and scale is not None) else self.prior
        )
        model = self.sampled(name, space, inference, prior)
        return dataclasses.replace(
            model, settings=model.settings | {"prior_scale": scale, "covariance": self.covariance}
        )

    def sampled(
        self,
        name: str,
        space: Subspace | None = None,
        inference: str = "elliptical-slice",
        prior: Normal | float | None = None,
    ) -> FittedModel:
        """A subspace around the shared training, sampled as `fit` does."""
        trained = self.trained
        if space is None:
            space = build_subspace(name, trained, self.rank, self.seed)
        model = fit(
            trained.network.module_with(),
            self.data,
            likelihood=trained.likelihood,
            subspace=space,
            rank=self.rank,
            inference=inference,
            prior=self.prior if prior is None else prior,
            temperature=self.temperature,
            validation=self.validation,
            training=self.training,
            parameters=self.parameters,
            output=self.output,
            draws=self.draws,
            chains=self.chains,
            warmup=self.warmup,
            seed=self.seed,
            progress=self.progress,
        )
        return dataclasses.replace(
            model,
            history=trained.history,
            settings=model.settings | {"subspace": name, "likelihood": self.likelihood.to_config()},
        )

    def settings(self) -> dict[str, Any]:
        names = ("rank", "temperature", "draws", "chains", "warmup", "members", "n_draws", "seed")
        return {name: getattr(self, name) for name in names} | {
            "inputs": self.inputs is not None,
            "covariance": self.covariance,
            "likelihood": self.likelihood.to_config(),
            "prior": repr(self.prior),
            "training": dataclasses.asdict(self.training),
            "n_train": self.data.n,
        }

"""Compare methods on the same data, with shared training where possible."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from subbayes.baselines.temperature_scaling import scale_predictive, temperature_scaling
from subbayes.comparison.methods import Setup, TemperatureScaling
from subbayes.comparison.registry import Comparable, methods_by_key
from subbayes.comparison.stacking import StackedMethods
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.standard_errors import error_of_mean
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Likelihood, Weighted, as_likelihood
from subbayes.likelihoods.target_parts import split_targets
from subbayes.networks.initialisation import fresh_module
from subbayes.networks.selection import Selection
from subbayes.networks.validation import check_fit
from subbayes.predictions.predictive import Predictive
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import InputError, check_choice, fail, fail_type
from subbayes.utils.text_table import json_value, text_table
from subbayes.utils.types import ModuleFactory, OutputFunction, RowNumbers, Targets

SCORE_HEADINGS = {
    "log_likelihood": "log-likelihood",
    "calibrated_log_likelihood": "log-likelihood, calibrated",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage": "coverage of {level} %",
    "interval_width": "width of {level} %",
    "accuracy": "accuracy",
    "brier": "Brier",
    "ece": "ECE",
    "auroc": "AUROC",
    "seconds": "seconds",
}
"""Headings of the scores in tables; `level` is that of the intervals in percent."""


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_methods`.

    Attributes:
        table: one row per method, with its name, the scores of `metrics.score`, and seconds:
            "training_seconds" of all training it needs, "inference_seconds" (choosing a
            temperature, sampling), "prediction_seconds" for the test rows, and "seconds", their
            sum. Shared training is done once and counted in full for each method: the seconds are
            the cost of a method by itself. With validation data, "calibrated_log_likelihood" is
            that of the predictions with the best temperature for these; see `temperature_scaling`.
        predictives: predictions of the test rows, by method.
        models: fitted models, by method; a `FittedModel` for the subspaces.
        y: targets of the test rows.
        settings: arguments of the comparison, as values that JSON can represent.
        trained: the shared training, or None if no method needs it.
        stack: the mixture of the methods with the weights of the validation rows, if there are
            some.
    """

    table: pd.DataFrame
    predictives: dict[str, Predictive]
    models: dict[str, Predictor]
    y: Targets
    settings: dict[str, Any] = field(default_factory=dict)
    trained: Trained | None = None
    stack: StackedMethods | None = None

    @property
    def level(self) -> float:
        """The probability of the intervals whose coverage and width are scored."""
        return float(self.settings.get("level", 0.95))

    def differences(self, reference: str | None = None) -> pd.DataFrame:
        r"""Difference of each log-likelihood to that of a reference, with standard error.

        $$ \bar d = \frac{1}{N} \sum_n d_n, \qquad
           \mathrm{se} = \sqrt{\frac{\sum_n (d_n - \bar d)^2}{N (N - 1)}}, \qquad
           d_n = \log p(y_n) - \log p_{\mathrm{reference}}(y_n) $$

        Test rows are the same for all methods, so the standard error of a difference is smaller
        than that of either score. It does not include the variation over seeds and splits.

        Args:
            reference: key of a method, such as "temperature-scaling"; by default the best one.

        Returns:
            A table with columns "method", "difference" and "se", in nats per observation; of one
            row "se" is NaN.
        """
        terms = {key: predictive.log_prob(self.y) for key, predictive in self.predictives.items()}
        if reference is None:
            reference = max(terms, key=lambda key: terms[key].mean())
        check_choice("reference", reference, terms)
        gaps = {key: values - terms[reference] for key, values in terms.items()}
        rows = [
            (self.table.loc[key, "method"], gap.mean(), error_of_mean(gap))
            for key, gap in gaps.items()
        ]
        return pd.DataFrame(
            rows, columns=["method", "difference", "se"], index=pd.Index(list(terms), name="key")
        )

    def warnings(self) -> dict[str, list[str]]:
        """Problems of the sampling runs, each with a remedy, by method."""
        warnings = {key: model.warnings() for key, model in self.models.items()}
        return {key: lines for key, lines in warnings.items() if lines}

    def to_dict(self, reference: str | None = None) -> dict[str, Any]:
        """Scores, differences, warnings and settings, as values that JSON can represent.

        Args:
            reference: of the differences, as for `differences`.
        """
        rows = self.table.join(self.differences(reference)[["difference", "se"]])
        scores = [{"key": key} | json_value(row) for key, row in rows.to_dict("index").items()]
        return {
            "scores": scores,
            "n_test": len(next(iter(self.predictives.values()))),
            "warnings": self.warnings(),
            "settings": self.settings,
            "stack": None if self.stack is None else dataclasses.asdict(self.stack),
        }

    def cells(self, scores: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """Headings and formatted cells of a table of scores; scores of other tasks are omitted.

        Args:
            scores: keys of `SCORE_HEADINGS`.
        """
        level = f"{100 * self.level:g}"
        scores = [name for name in scores if name in self.table.columns]
        rows = [
            [str(row["method"]), *(format_score(name, row[name]) for name in scores)]
            for row in self.table.to_dict("records")
        ]
        return ["method", *(SCORE_HEADINGS[name].format(level=level) for name in scores)], rows

    def to_text(self, reference: str | None = None) -> str:
        """The table of scores in plain text, for a terminal.

        Methods that `warnings` has something of are marked.

        Args:
            reference: key of the method whose log-likelihood is subtracted; by default
                "temperature-scaling", or the first.
        """
        head, cells = self.cells([name for name in SCORE_HEADINGS if name != "interval_width"])
        if reference is None:
            keys = [str(key) for key in self.table.index]
            reference = TemperatureScaling.key if TemperatureScaling.key in keys else keys[0]
        warned = self.warnings()
        head.insert(2, f"minus that of {self.table.loc[reference, 'method']}")
        for row, (key, of_method) in zip(
            cells, self.differences(reference).iterrows(), strict=True
        ):
            difference = f"{of_method['difference']:+.3f} ± {of_method['se']:.3f}"
            row.insert(2, "" if key == reference else difference)
            row[0] += "*" if key in warned else ""
        lines = [
            text_table(head, cells),
            "± one standard error over the test rows; differences within two of them are ties.",
        ]
        if self.stack is not None:
            lines.append(self.stack.to_text(self.table["method"].to_dict()))
        if warned:
            lines.append(
                "* with warnings: its draws may not be those of its posterior, so that its place "
                "in this table may change with other settings or another seed."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.table['method'])})"


def format_score(score: str, value: float) -> str:
    """Format a score for a table.

    Args:
        score: a key of `SCORE_HEADINGS`.
        value: its value.

    Example:
        >>> format_score("coverage", 0.9432), format_score("rmse", 54.2)
        ('94.3 %', '54.20')
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


def compare_methods(
    module: nn.Module | ModuleFactory,
    likelihood: str | Likelihood,
    data: Any,
    test: Any,
    methods: Sequence[Comparable] | Mapping[str, Comparable] = (
        "map",
        "swa",
        "swag",
        "ensemble",
        "pca",
        "random",
    ),
    *,
    training: Training | None = None,
    sampling: Sampling | None = None,
    validation: Any = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    level: float = 0.95,
) -> Comparison:
    """Fit several methods to the same data and score them on the same test rows.

    MAP, SWA, SWAG, MC dropout, temperature scaling and the subspaces share one training,
    `train_trajectory`; the members of a deep ensemble, those at which chains of MCLMC start,
    mean-field Gaussian weights and a mean-field sparse network (`sparse.fit`) are trained
    separately, with the same number of epochs.

    Args:
        module: the architecture, which is not changed; or a function that makes a module with
            fresh weights from torch's global generator, which is seeded for it.
        likelihood: p(y | f), or its name as for `fit`.
        data: training data.
        test: rows to score on, with their targets.
        methods: in the order of the table: names of `METHODS`, objects such as
            `DeepEnsemble(members=10)` of `subbayes.comparison.methods` and
            `SubspaceInference(PCA(rank=5), NUTS(), temperature="loo")`, or subspaces such as
            `PCA(rank=5)`; models that are fitted already; or a dict of them by your own names, to
            compare variants of a method.
            "mc-dropout" needs a module with dropout layers, "temperature-scaling" and "recommend"
            (`subbayes.recommend` for the MAP network) need validation data.
            "laplace" is linearised Laplace of all weights, with the prior of the largest evidence;
            `AllWeightsLaplace(covariance="kfac")` of adapters is Laplace-LoRA.
            "mclmc" samples all weights from the members of an ensemble.
            "optimal" and "subnetwork" are sampled through the network; with "-laplace" they have
            the closed form of its linearisation. Their `inputs` may be those of the test rows, an
            advantage over the other methods.
        training: how to train; ensemble members go through its first phase.
        sampling: how posteriors are sampled; its seed is used by all methods.
        validation: held-out data, for "temperature-scaling", "recommend" and
            `temperature="validation"`, and to calibrate each method.
        parameters: which parameters are weights, as for `Network`.
        output: picks the tensor out of what the module returns, as for `Network`.
        level: probability of the interval whose coverage and width are scored.

    Raises:
        InputError: an unknown method, or one whose requirements are not met; see also `fit`.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> from subbayes.subspaces import PCA
        >>> x = torch.linspace(-2, 2, 80)[:, None]
        >>> y = torch.sin(2 * x[:, 0])
        >>> comparison = compare_methods(
        ...     subbayes.MLP(1, (10,), 1, seed=0), Gaussian(), (x[::2], y[::2]),
        ...     (x[1::2], y[1::2]), methods=("map", PCA(rank=2)),
        ...     training=Training(epochs=20, swa_epochs=5, swa_learning_rate=1e-3),
        ...     sampling=Sampling(draws=20, progress=False))
        >>> comparison.table["method"].tolist()
        ['MAP', 'PCA + ESS']
    """
    if not callable(module):
        fail_type("module", "a module, or a function that makes one", module)
    likelihood = as_likelihood(likelihood)
    sampling, training = sampling or Sampling(), training or Training()
    factory = None if isinstance(module, nn.Module) else module
    if not isinstance(module, nn.Module):
        module = fresh_module(nn.Identity(), module, sampling.seed)
    chosen, rows, data = methods_by_key(methods), Data.of(test, "test"), Data.of(data)
    if data.has_weights and not isinstance(likelihood, Weighted):
        likelihood = Weighted(likelihood)
    if rows.has_weights:
        fail("test", "rows that count alike", "weighted ones", "Leave the weights out")
    setup = Setup(
        module, likelihood, data, training, sampling, factory, validation, parameters, output
    )
    for method in chosen.values():
        method.check(setup)
    check_fit(setup.network, likelihood, data)
    check_fit(setup.network, likelihood.unweighted, rows)

    inputs, y = rows.inputs if rows.in_memory else rows.loader, rows.targets()
    values, noise = (y, None) if isinstance(y, Tensor) else y
    table, predictives, models = [], {}, {}
    held_out = None if validation is None else Data.of(validation, "validation")
    held_out_terms = {}
    test_terms = {}
    counts = np.zeros(0)
    for key, method in chosen.items():
        shared = sum(setup.trained.seconds[: method.phases]) if method.phases else 0.0
        models[key], seconds = method.fit(setup)
        seconds["training_seconds"] += shared
        started = time.perf_counter()
        predictives[key] = method.predict(models[key], inputs, noise)
        seconds["prediction_seconds"] = time.perf_counter() - started
        calibrated = {}
        if held_out is not None:
            tau, held_out_terms[key], counts = _calibration(models[key], held_out)
            if tau is None:
                test_terms[key] = predictives[key].log_prob(values)
            else:
                test_terms[key] = scale_predictive(predictives[key], tau).log_prob(values)
                calibrated["calibrated_log_likelihood"] = float(test_terms[key].mean())
        table.append(
            {
                "method": method.label if key == method.key else key,
                **metrics.score(predictives[key], values, level),
                **calibrated,
                "seconds": sum(seconds.values()),
                **seconds,
            }
        )
    settings = {
        "methods": {key: method.config() for key, method in chosen.items()},
        "likelihood": likelihood.to_config(),
        "training": dataclasses.asdict(training),
        "draws": sampling.draws,
        "chains": sampling.chains,
        "warmup": sampling.warmup,
        "seed": sampling.seed,
        "n_train": setup.data.n,
        "level": level,
    }
    shared_training = setup.__dict__.get("trained")
    return Comparison(
        pd.DataFrame(table, index=pd.Index(list(chosen), name="key")),
        predictives,
        models,
        values,
        settings,
        shared_training,
        StackedMethods.of(held_out_terms, test_terms, counts, sampling.seed)
        if len(held_out_terms) > 1
        else None,
    )


def _calibration(model: Predictor, data: Data) -> tuple[float | None, RowNumbers, RowNumbers]:
    """The temperature of held-out rows, their log densities with it, and how often they count."""
    tau = None
    with suppress(InputError):  # rows that determine none, or counts
        model = temperature_scaling(model, data)
        tau = model.temperature
    terms = []
    counts = []
    for inputs, y in data.batches():
        split = split_targets(y, data.has_weights)
        known = {} if split.noise is None else {"noise": split.noise}
        terms.append(model.predict(inputs, **known).log_prob(split.values))
        counts.append(split.counts)
    return tau, np.concatenate(terms), np.concatenate(counts)

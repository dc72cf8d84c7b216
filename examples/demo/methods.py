"""Six methods on Friedman's regression problem, whose true density is known.

The prior scale of the weights and the temperature are chosen on validation rows; the test rows are
only used for the table of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import stats
from torch import nn

from examples.demo.section import Effort, Figure, Section, compared, with_error
from subbayes import plots
from subbayes.comparison.comparison import Comparison, compare_methods
from subbayes.comparison.registry import named_methods
from subbayes.data.encoder import TabularEncoder
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.diagnostics import metrics
from subbayes.diagnostics.standard_errors import standard_errors
from subbayes.likelihoods import Likelihood
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import make_likelihood, make_module
from subbayes.reports.rendering import Table
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.training.configuration import Training
from subbayes.training.trainer import train
from subbayes.utils.progress import progress_bar

COLUMN, NOISE = "y", 1.0
SIZES = (150, 100, 1000)  # training, validation and test rows
METHODS = ("map", "swa", "swag", "ensemble", "pca", "random")

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Training, validation and test rows, with encodings learned from the training rows.

    Attributes:
        train: training rows; so are the next two.
        validation: rows to choose the prior and the temperature.
        test: rows to score.
        encoder: of the inputs.
        target: of the outputs.
        true_log_likelihood: that of the test targets under the density they were drawn from.
    """

    train: pd.DataFrame
    validation: pd.DataFrame
    test: pd.DataFrame
    encoder: TabularEncoder
    target: Target
    true_log_likelihood: float

    @classmethod
    def simulate(cls, seed: int) -> Rows:
        """Draw rows of Friedman's problem: five of ten inputs matter."""
        from sklearn.datasets import make_friedman1

        X, mean = make_friedman1(sum(SIZES), noise=0.0, random_state=seed)
        y = mean + NOISE * np.random.default_rng(seed).normal(size=len(mean))
        table = pd.DataFrame(X, columns=[f"x{i}" for i in range(1, 11)]).assign(**{COLUMN: y})
        ends = np.cumsum(SIZES)
        train, validation, test = (
            table.iloc[end - size : end] for size, end in zip(SIZES, ends, strict=True)
        )
        features, values = split_target(train, COLUMN)
        best = float(stats.norm.logpdf(y[ends[1] :], mean[ends[1] :], NOISE).mean())
        return cls(
            train, validation, test, TabularEncoder().fit(features), Target.infer(values), best
        )

    def encoded(self, part: pd.DataFrame) -> Pair:
        """Inputs and targets of some rows."""
        features, values = split_target(part, COLUMN)
        return self.encoder.transform(features), values.to_numpy(dtype=np.float64, copy=True)

    def likelihood(self) -> Likelihood:
        """Heteroscedastic with a global variance, in the units of the target."""
        return make_likelihood(None, "regression", self.encoded(self.train)[1])


@dataclass(frozen=True)
class Methods:
    """The comparison, and what it rests on.

    Attributes:
        rows: the data.
        comparison: scores and models of the methods.
        model: the posterior in the PCA subspace, as a model of tables.
        prior_scale: the scale chosen on the validation rows.
    """

    rows: Rows
    comparison: Comparison
    model: DataFrameModel
    prior_scale: float

    def section(self) -> Section:
        """The table of scores."""
        comparison = self.comparison
        differences = comparison.differences()
        rows, facts = [], []
        for key, row in comparison.table.iterrows():
            errors = standard_errors(comparison.predictives[str(key)], comparison.y)
            gap, error = differences.loc[key, ["difference", "se"]]
            rows.append(
                [
                    str(row["method"]),
                    with_error(row["log_likelihood"], errors["log_likelihood"], 3),
                    with_error(gap, error, 3) if gap else "",
                    compared(gap, error),
                    with_error(row["rmse"], errors["rmse"]),
                    with_error(row["coverage"], errors["coverage"], 1, percent=True),
                    f"{row['seconds']:.1f}",
                ]
            )
            facts.append({"key": key, **errors})
        n = len(comparison.predictives["pca"])
        table = Table(
            ["method", "log-likelihood", "to the best", "", "RMSE", "coverage of 95 %", "seconds"],
            rows,
            f"{n} test rows; ± one standard error over them. Log-likelihood in nats per row. A "
            "difference to the best within two of its standard errors is a tie. Seconds are the "
            "cost of a method by itself, including training.",
        )
        return Section(
            "methods",
            "Six methods on one table",
            (
                f"Friedman's problem (1991), y = 10 sin(π x1 x2) + 20 (x3 − 1/2)² + 10 x4 + 5 x5 + "
                f"noise: ten inputs, of which five matter, {SIZES[0]} training rows, {SIZES[1]} "
                f"validation rows, which chose the prior scale {self.prior_scale:g} of the weights "
                "and the temperatures, and test rows that were used for this table only.",
            ),
            table,
            self._findings(),
            {
                "scores": Figure(
                    lambda: plots.scores(comparison.table, errors=dict(
                        zip(differences["method"], differences["se"], strict=True)
                    )),
                    "Log-likelihood of the test rows. Lines: one standard error of the difference "
                    "to the best method.",
                ),
                "coverage": Figure(
                    lambda: plots.scores(comparison.table, "coverage"),
                    "Coverage of the 95 % intervals; the dashed line is the target.",
                ),
            },
            comparison.to_dict()
            | {
                "standard_errors": facts,
                "prior_scale": self.prior_scale,
                "true_log_likelihood": self.rows.true_log_likelihood,
            },
        )  # fmt: skip

    def _findings(self) -> tuple[str, ...]:
        differences = self.comparison.differences()
        draws = self.model.fitted_model.draws
        assert draws is not None
        best = differences["difference"].idxmax()
        tied = [
            row["method"]
            for key, row in differences.iterrows()
            if key != best and compared(row["difference"], row["se"]) == "tie"
        ]
        also = f"; {' and '.join(tied)} within two standard errors" if tied else "; no ties"
        return (
            f"Best: {differences.loc[best, 'method']}{also}. The true density scores "
            f"{self.rows.true_log_likelihood:.3f}.",
            f"PCA + ESS: R-hat at most {draws.rhat().max():.3f}, effective sample size at least "
            f"{draws.ess_bulk().min():.0f}.",
            *(
                f"Warning, {key}: {line}"
                for key, lines in self.comparison.warnings().items()
                for line in lines
            ),
        )


def compare(seed: int, effort: Effort, progress: bool | None = None) -> Methods:
    """Choose the prior, and fit and score the methods."""
    rows = Rows.simulate(seed)
    settings = effort.settings
    data, validation = rows.encoded(rows.train), rows.encoded(rows.validation)
    likelihood = rows.likelihood()
    module = make_module(settings, likelihood, *data)
    scale = choose_prior_scale(
        module, likelihood, data, validation, settings, effort.scales, progress
    )
    training = settings.change({"training.prior_scale": scale}).training_for(
        "regression", len(rows.train)
    )
    parts = data, validation, rows.encoded(rows.test)
    comparison = fit_methods(module, likelihood, parts, METHODS, training, effort, progress)
    model = DataFrameModel(comparison.models["pca"], rows.encoder, rows.target, COLUMN)
    return Methods(rows, comparison, model, scale)


def fit_methods(
    module: nn.Module,
    likelihood: Likelihood,
    parts: tuple[Pair, Pair, Pair],
    methods: Sequence[str],
    training: Training,
    effort: Effort,
    progress: bool | None,
) -> Comparison:
    """Fit methods to training rows, and predict test rows.

    Args:
        module: the network.
        likelihood: of the targets.
        parts: training, validation and test rows.
        methods: keys of methods.
        training: how the network is trained.
        effort: number of members, subspace, temperature and sampling.
        progress: show bars.
    """
    settings, (data, validation, test) = effort.settings, parts
    return compare_methods(
        module,
        likelihood,
        data,
        test,
        named_methods(
            methods,
            members=effort.members,
            rank=getattr(settings.subspace, "rank", None),
            temperature=settings.temperature,
        ),
        training=training,
        sampling=replace(settings.sampling, progress=progress),
        validation=validation,
    )


def choose_prior_scale(
    module: nn.Module,
    likelihood: Likelihood,
    data: Pair,
    validation: Pair,
    settings: TableSettings,
    scales: Sequence[float],
    progress: bool | None = None,
) -> float:
    """The prior scale with the largest log-likelihood of the validation rows.

    Args:
        module: the network.
        likelihood: of the targets.
        data: training rows.
        validation: other rows.
        settings: of training, except for the scale.
        scales: candidates.
        progress: show a bar.
    """
    from subbayes.baselines.map import point_estimate

    x, y = validation
    plan: Training = replace(settings.training, validation=None, patience=None)
    scores = []
    with progress_bar(len(scales), "Choosing the prior", progress, "scales") as steps:
        for scale in scales:
            result = train(
                module,
                likelihood,
                data,
                replace(plan, prior_scale=scale),
                seed=settings.sampling.seed,
                progress=False,
            )
            scores.append(metrics.log_likelihood(point_estimate(result).predict(x), y))
            steps.update(1)
    return float(scales[int(np.argmax(scores))])

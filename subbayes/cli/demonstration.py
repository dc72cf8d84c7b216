"""Compare six methods on scikit-learn's diabetes data, and write tables, plots and a report.

The prior scale of the weights and the temperature are chosen on validation rows; the test rows are
only used for the table of scores.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from subbayes import plots
from subbayes.data.encoder import TabularEncoder
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.diagnostics import metrics
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Likelihood
from subbayes.models.array_model import make_likelihood, make_module
from subbayes.models.data_frame_model import DataFrameModel
from subbayes.models.method_comparison import Comparison, compare_methods, named_methods
from subbayes.models.settings import TableSettings
from subbayes.predictions.predictive import Predictive
from subbayes.reports.model_report import write_report
from subbayes.subspaces.pca import PCA
from subbayes.training.configuration import Training
from subbayes.training.trainer import train
from subbayes.utils.checks import check_seed
from subbayes.utils.files import atomic_write_text
from subbayes.utils.overwritable_files import OverwritableFiles
from subbayes.utils.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["SETTINGS", "Demo", "run"]

COLUMN = "progression"
SCALES = (0.1, 0.2, 0.3, 0.5, 1.0)
PARTS = (0.6, 0.2)  # fractions of training and validation rows

SETTINGS = TableSettings(
    subspace=PCA(rank=5),
    temperature="validation",
    training=Training(epochs=100, learning_rate=1e-2, swa_epochs=50, swa_learning_rate=2e-2),
    sampling=Sampling(draws=1000, chains=8, warmup=300),
)
"""Settings of the demo. The prior scale is chosen among `SCALES`."""


@dataclass(frozen=True)
class Demo:
    """The result of the demo.

    Attributes:
        comparison: scores and models of the methods.
        model: the posterior in the PCA subspace, as a model of tables.
        folder: the folder of results.
        prior_scale: the scale chosen on the validation rows.
        linear_rmse: test RMSE of linear regression, for reference.
        seconds: total time.
    """

    comparison: Comparison
    model: DataFrameModel
    folder: Path
    prior_scale: float
    linear_rmse: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Scores and choices, as values that JSON can represent."""
        return self.comparison.to_dict() | {
            "folder": str(self.folder),
            "prior_scale": self.prior_scale,
            "linear_rmse": self.linear_rmse,
            "total_seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The table of scores, with notes."""
        n, draws = len(self.predictive), self.fitted.draws
        gap = self.comparison.differences()["se"].max()
        return "\n".join(
            [
                f"Disease progression of {n} test patients",
                "",
                self.comparison.to_text(),
                "",
                "Log-likelihood in nats per patient; differences below about "
                f"{2 * gap:.2f} are noise here.",
                f"For reference: linear regression has an RMSE of {self.linear_rmse:.2f}.",
                f"PCA + ESS: R-hat at most {draws.rhat().max():.3f}, effective sample size at "
                f"least {draws.ess_bulk().min():.0f}.",
                *(
                    f"Warning, {key}: {line}"
                    for key, lines in self.comparison.warnings().items()
                    for line in lines
                ),
            ]
        )

    @property
    def fitted(self) -> Any:
        """The posterior in the PCA subspace."""
        return self.model.fitted_model

    @property
    def predictive(self) -> Predictive:
        """Its predictions of the test rows."""
        return self.comparison.predictives["pca"]

    def hint(self) -> str:
        """What to do next."""
        return "\n".join(
            [
                f"  open {self.folder / 'report.html'} in a browser",
                f"  subbayes predict {self.folder} {self.folder / 'test.csv'} "
                "--out predictions.csv",
                "  subbayes fit YOUR.csv --target COLUMN --out runs/yours",
                f"  in Python: subbayes.load('{self.folder / 'model'}').model.draws.summary()",
            ]
        )


def _errors(demo: Demo) -> dict[str, float]:
    differences = demo.comparison.differences()
    return dict(zip(differences["method"], differences["se"], strict=True))


def _spectrum(demo: Demo) -> Axes:
    trained = demo.comparison.trained
    assert trained is not None
    return plots.spectrum(trained.swa.recorder, demo.fitted.subspace.rank)


PLOTS: dict[str, Callable[[Demo], Axes]] = {
    "scores": lambda demo: plots.scores(demo.comparison.table, errors=_errors(demo)),
    "coverage": lambda demo: plots.scores(demo.comparison.table, "coverage"),
    "intervals": lambda demo: plots.intervals(
        demo.predictive, demo.comparison.y, name="disease progression"
    ),
    "calibration": lambda demo: plots.calibration(
        demo.predictive, demo.comparison.y, label="PCA + ESS"
    ),
    "pit": lambda demo: plots.pit(demo.predictive, demo.comparison.y),
    "density": lambda demo: plots.density(demo.fitted.posterior, demo.fitted.draws),
    "spectrum": _spectrum,
    "trace": lambda demo: plots.trace(demo.fitted.draws, 0),
    "ranks": lambda demo: plots.ranks(demo.fitted.draws, 0),
    "autocorrelation": lambda demo: plots.autocorrelation(demo.fitted.draws),
    "ess": lambda demo: plots.ess(demo.fitted.draws),
    "training": lambda demo: plots.training_history(demo.fitted.history),
    "temperature": lambda demo: plots.temperature(demo.fitted.settings["temperatures"]),
}
FILES = (
    "model/manifest.json",
    *(f"{name}.csv" for name in ("train", "validation", "test", "predictions", "scores")),
    "scores.json",
    "report.html",
    *(f"plots/{name}.png" for name in PLOTS),
)


def run(
    out: str | Path = "runs/demo",
    seed: int = 0,
    progress: bool | None = None,
    *,
    settings: TableSettings = SETTINGS,
    scales: Sequence[float] = SCALES,
    members: int = 5,
    show: bool = True,
) -> Demo:
    """Fit, compare, save and report.

    Args:
        out: folder for the posterior, tables, plots and report. Only files that the demo wrote
            itself are overwritten.
        seed: of the split, of training and of sampling.
        progress: show progress bars; None shows them on a terminal.
        settings: of network, training and sampling, except for the seed and the prior scale.
        scales: candidate scales of the prior of the weights.
        members: number of networks of the deep ensemble.
        show: print the table to standard output, and steps and hints to standard error.

    Raises:
        InputError: the folder contains files of the same names that the demo did not write.
    """
    check_seed(seed)
    started = time.perf_counter()
    files = OverwritableFiles(out, FILES)
    settings = settings.change({"sampling.seed": seed})
    rows = _Rows.of(seed)

    def print_step(text: str) -> None:
        if show:
            print(text, file=sys.stderr, flush=True)

    with _one_thread():
        print_step(
            f"[1/4] diabetes: {len(rows.train)} training, {len(rows.validation)} validation and "
            f"{len(rows.test)} test rows"
        )
        scale = _prior_scale(rows, settings, scales, progress)
        settings = settings.change({"training.prior_scale": scale})
        print_step(
            f"[2/4] validation chose the prior N(0, {scale:g}²) of each weight; fitting methods"
        )
        comparison = _compare(rows, settings, members, progress)
        model = DataFrameModel(comparison.models["pca"], rows.encoder, rows.target, COLUMN)
        demo = Demo(comparison, model, files.folder, scale, rows.linear_rmse(), 0.0)
        print_step(f"[3/4] writing {files.folder}")
        files.begin()
        demo = dataclasses.replace(demo, seconds=time.perf_counter() - started)
        _write(demo, rows, seed, progress)
        files.finish()
        demo = dataclasses.replace(demo, seconds=time.perf_counter() - started)
        print_step(f"[4/4] done in {demo.seconds:.0f} s\n")
        if show:
            print(demo.to_text(), flush=True)
        print_step(f"\nnext:\n{demo.hint()}")
    return demo


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread, which is fastest for a small network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the data -----------------------------------------------------------------------------------

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Rows:
    """Training, validation and test rows, with encodings learned from the training rows."""

    train: pd.DataFrame
    validation: pd.DataFrame
    test: pd.DataFrame
    encoder: TabularEncoder
    target: Target

    @classmethod
    def of(cls, seed: int) -> _Rows:
        from sklearn.datasets import load_diabetes

        table = load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": COLUMN})
        order = np.random.default_rng(seed).permutation(len(table))
        first, second = np.cumsum([round(part * len(table)) for part in PARTS])
        train, validation, test = (
            table.iloc[np.sort(index)] for index in np.split(order, [first, second])
        )
        features, values = split_target(train, COLUMN)
        return cls(train, validation, test, TabularEncoder().fit(features), Target.infer(values))

    def encoded(self, part: pd.DataFrame) -> Pair:
        features, values = split_target(part, COLUMN)
        return self.encoder.transform(features), values.to_numpy(dtype=np.float64, copy=True)

    def likelihood(self) -> Likelihood:
        """Heteroscedastic with a global variance, in the units of the target."""
        return make_likelihood(None, "regression", self.encoded(self.train)[1])

    def linear_rmse(self) -> float:
        """Test RMSE of linear regression."""
        from sklearn.linear_model import LinearRegression

        x, y = self.encoded(self.test)
        predicted = LinearRegression().fit(*self.encoded(self.train)).predict(x)
        return float(np.sqrt(np.mean((predicted - y) ** 2)))


# --- fitting ------------------------------------------------------------------------------------


def _prior_scale(
    rows: _Rows, settings: TableSettings, scales: Sequence[float], progress: bool | None
) -> float:
    """The prior scale with the largest validation log-likelihood."""
    from subbayes.baselines.map import point_estimate

    data, (x, y) = rows.encoded(rows.train), rows.encoded(rows.validation)
    likelihood = rows.likelihood()
    module, plan = make_module(settings, likelihood, *data), settings.training
    scores = []
    with progress_bar(len(scales), "Choosing the prior", progress, "scales") as steps:
        for scale in scales:
            result = train(
                module,
                likelihood,
                data,
                replace(plan, prior_scale=scale, validation=None, patience=None),
                seed=settings.sampling.seed,
                progress=False,
            )
            scores.append(metrics.log_likelihood(point_estimate(result).predict(x), y))
            steps.update(1)
    return float(scales[int(np.argmax(scores))])


def _compare(
    rows: _Rows, settings: TableSettings, members: int, progress: bool | None
) -> Comparison:
    data, likelihood = rows.encoded(rows.train), rows.likelihood()
    return compare_methods(
        make_module(settings, likelihood, *data),
        likelihood,
        data,
        rows.encoded(rows.test),
        named_methods(
            ("map", "swa", "swag", "ensemble", "pca", "random"),
            members=members,
            rank=getattr(settings.subspace, "rank", None),
            temperature=settings.temperature,
        ),
        training=settings.training_for("regression"),
        sampling=replace(settings.sampling, progress=progress),
        validation=rows.encoded(rows.validation),
    )


# --- writing ------------------------------------------------------------------------------------


def _plots_of(demo: Demo) -> dict[str, Callable[[Demo], Axes]]:
    """The plots, without that of the temperature if none was chosen."""
    chosen = demo.fitted.settings["temperatures"] is not None
    return {name: draw for name, draw in PLOTS.items() if chosen or name != "temperature"}


def _write(demo: Demo, rows: _Rows, seed: int, progress: bool | None) -> None:
    """Write the posterior, tables, plots and report."""
    folder, comparison = demo.folder, demo.comparison
    drawings = _plots_of(demo)
    with progress_bar(len(drawings) + 3, "Writing", progress, "files") as steps:
        demo.model.save(folder / "model", overwrite=True)
        for name in ("train", "validation", "test"):
            atomic_write_text(folder / f"{name}.csv", getattr(rows, name).to_csv(index=False))
        steps.update(1)
        predictions = demo.predictive.to_frame()
        predictions.insert(0, "observed", rows.encoded(rows.test)[1])
        atomic_write_text(folder / "predictions.csv", predictions.to_csv(index=False))
        atomic_write_text(folder / "scores.csv", comparison.table.to_csv(index=False))
        atomic_write_text(folder / "scores.json", json.dumps(demo.to_dict(), indent=1) + "\n")
        steps.update(1)
        for name, draw in drawings.items():
            plots.save(draw(demo), folder / "plots" / f"{name}.png")
            steps.update(1)
        write_report(
            comparison,
            folder / "report.html",
            title="Disease progression with uncertainty",
            name="disease progression",
            method="pca",
            command=_command(demo, seed),
            notes=_notes(demo, rows, seed),
        )
        steps.update(1)


def _command(demo: Demo, seed: int) -> str:
    return (
        f"subbayes demo --seed {seed}\n\n"
        f"# the posterior, in Python\nimport subbayes\n"
        f"model = subbayes.load({str(demo.folder / 'model')!r})\n"
        f"print(model.model.draws.summary())\n\n"
        f"# predictions for a table with the same columns\n"
        f"subbayes predict {demo.folder} {demo.folder / 'test.csv'} --out predictions.csv"
    )


def _notes(demo: Demo, rows: _Rows, seed: int) -> list[str]:
    return [
        f"442 patients of scikit-learn's diabetes data, split with seed {seed} into "
        f"{len(rows.train)} training, {len(rows.validation)} validation and {len(rows.test)} test "
        f"rows. The prior scale {demo.prior_scale:g} of the weights and the temperatures were "
        "chosen on the validation rows; the test rows were only used for this table.",
        f"For reference: linear regression on the same training rows has a test RMSE of "
        f"{demo.linear_rmse:.2f}. These data are noisy and close to linear, so good methods have "
        "similar scores.",
    ]

"""The main job on real data: one network, six methods, one table, a report.

scikit-learn's `diabetes`: 442 patients, 10 measurements, disease progression a year later. A seed
splits the rows into training, validation and test parts. The scale of the prior on the weights
and the temperature are chosen on the validation part; the test part is used once, for the table.
"""

from __future__ import annotations

import argparse
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

from subbayes.data.encoder import TabularEncoder
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.diagnostics import metrics
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Likelihood
from subbayes.models.data_frame_model import TableModel, make_likelihood, make_module
from subbayes.models.fitted import FittedModel
from subbayes.models.method_comparison import Comparison, compare_methods, named_methods
from subbayes.models.settings import TableSettings
from subbayes.subspaces.pca import PCA
from subbayes.training.configuration import Training
from subbayes.training.trainer import train
from subbayes.utils.checks import check_count
from subbayes.utils.files import atomic_write_text
from subbayes.utils.overwritable_files import OverwritableFiles
from subbayes.utils.progress import progress_bar

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["SETTINGS", "Demo", "main", "run"]

COLUMN = "progression"
SCALES = (0.1, 0.2, 0.3, 0.5, 1.0)
PARTS = (0.6, 0.2)  # training, validation; the rest is for the test

SETTINGS = TableSettings(
    subspace=PCA(rank=5),
    temperature="validation",
    training=Training(epochs=100, learning_rate=1e-2, swa_epochs=50, swa_learning_rate=2e-2),
    sampling=Sampling(draws=1000, chains=8, warmup=300),
)
"""How the demo is fitted. The prior's scale is chosen among `SCALES`."""

PLOTS = (
    "scores",
    "coverage",
    "intervals",
    "calibration",
    "pit",
    "density",
    "spectrum",
    "trace",
    "ranks",
    "autocorrelation",
    "ess",
    "training",
    "temperature",
)
FILES = (
    "model/manifest.json",
    "train.csv",
    "validation.csv",
    "test.csv",
    "predictions.csv",
    "scores.csv",
    "scores.json",
    "report.html",
    *(f"plots/{name}.png" for name in PLOTS),
)


@dataclass(frozen=True)
class Demo:
    """What the demo returns.

    Attributes:
        comparison: the methods, their scores and models.
        model: the PCA subspace's posterior, with what turns a table into its inputs.
        folder: where everything lies.
        prior_scale: the scale chosen on the validation rows.
        linear_rmse: test RMSE of linear regression on the training rows, for orientation.
        seconds: what all of it took.
    """

    comparison: Comparison
    model: TableModel
    folder: Path
    prior_scale: float
    linear_rmse: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Scores and choices, as JSON-able values."""
        return self.comparison.to_dict() | {
            "folder": str(self.folder),
            "prior_scale": self.prior_scale,
            "linear_rmse": self.linear_rmse,
            "total_seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The table, with what is needed to read it."""
        n, model = len(self.comparison.predictives["pca"]), self.comparison.models["pca"]
        assert isinstance(model, FittedModel)
        draws = model.draws
        assert draws is not None
        gap = self.comparison.differences()["se"].max()
        return "\n".join(
            [
                f"Disease progression of {n} test patients",
                "",
                self.comparison.to_text(),
                "",
                "Log-likelihood in nats a patient, of the whole mixture; differences below about "
                f"{2 * gap:.2f} are noise here.",
                f"For orientation: linear regression has an RMSE of {self.linear_rmse:.2f}.",
                f"PCA + ESS: R-hat at most {draws.rhat().max():.3f}, effective sample size at "
                f"least {draws.ess_bulk().min():.0f}.",
                *(
                    f"Warning, {key}: {line}"
                    for key, lines in self.comparison.warnings().items()
                    for line in lines
                ),
            ]
        )

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
        out: folder for the posterior, tables, plots and report. Only files the demo wrote
            itself are overwritten.
        seed: of the split, of training and of sampling.
        progress: show progress bars; None shows them on a terminal.
        settings: how to fit; the seed and the prior's scale are set.
        scales: candidate scales of the prior on the weights.
        members: networks of the deep ensemble.
        show: print the table to standard output, and steps and hints to standard error.

    Raises:
        InputError: a folder with files of the same names that are not the demo's.
    """
    check_count("seed", seed, 0)
    files = OverwritableFiles(out, FILES)
    with _one_thread():
        return _run(files, seed, progress, settings, scales, members, show)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For so small a network a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(
    files: OverwritableFiles,
    seed: int,
    progress: bool | None,
    settings: TableSettings,
    scales: Sequence[float],
    members: int,
    show: bool,
) -> Demo:
    started, out = time.perf_counter(), files.folder
    say = _speaker(show)
    rows = _Rows.of(seed)
    settings = settings.change({"sampling.seed": seed})
    say(
        f"[1/4] diabetes: {len(rows.train)} rows to train on, {len(rows.validation)} to choose "
        f"with, {len(rows.test)} to test on"
    )
    scale = _prior_scale(rows, settings, scales, progress)
    settings = settings.change({"training.prior_scale": scale})
    say(
        f"[2/4] prior N(0, {scale:g}²) on each weight fits the validation rows best; now the six "
        "methods"
    )
    comparison = _compare(rows, settings, members, progress)
    fitted = comparison.models["pca"]
    assert isinstance(fitted, FittedModel)
    model = TableModel(fitted, rows.encoder, rows.target, COLUMN)
    demo = Demo(comparison, model, out, scale, rows.linear_rmse(), time.perf_counter() - started)
    say(f"[3/4] writing {out}")
    files.begin()
    _write(demo, rows, seed, progress)
    files.finish()
    demo = dataclasses.replace(demo, seconds=time.perf_counter() - started)
    say(f"[4/4] done in {demo.seconds:.0f} s\n")
    if show:
        print(demo.to_text(), flush=True)
    say(f"\nnext:\n{demo.hint()}")
    return demo


def _speaker(show: bool) -> Callable[[str], None]:
    """Words to standard error, or none."""
    return (lambda text: print(text, file=sys.stderr, flush=True)) if show else lambda text: None


# --- the data -----------------------------------------------------------------------------------

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class _Rows:
    """The three parts of the table, and how they are encoded: learned from the training part."""

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
    """The scale of the prior whose network predicts the validation rows best."""
    from subbayes.baselines.map import point_estimate

    data, (x, y), likelihood = (
        rows.encoded(rows.train),
        rows.encoded(rows.validation),
        (rows.likelihood()),
    )
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


def _write(demo: Demo, rows: _Rows, seed: int, progress: bool | None) -> None:
    """The posterior, tables, plots and report."""
    from subbayes import plots
    from subbayes.reports.model_report import write_report

    folder, comparison = demo.folder, demo.comparison
    drawings = _drawings(demo)
    with progress_bar(len(drawings) + 3, "Writing", progress, "files") as steps:
        demo.model.save(folder / "model", overwrite=True)
        for name in ("train", "validation", "test"):
            atomic_write_text(folder / f"{name}.csv", getattr(rows, name).to_csv(index=False))
        steps.update(1)
        predictions = comparison.predictives["pca"].to_frame()
        predictions.insert(0, "observed", rows.encoded(rows.test)[1])
        atomic_write_text(folder / "predictions.csv", predictions.to_csv(index=False))
        atomic_write_text(folder / "scores.csv", comparison.table.to_csv(index=False))
        atomic_write_text(folder / "scores.json", json.dumps(demo.to_dict(), indent=1) + "\n")
        steps.update(1)
        for name, draw in drawings.items():
            plots.save(draw(), folder / "plots" / f"{name}.png")
            steps.update(1)
        write_report(
            comparison,
            folder / "report.html",
            title="Disease progression, and how sure we are",
            name="disease progression",
            method="pca",
            command=_command(demo, seed),
            notes=_notes(demo, rows, seed),
        )
        steps.update(1)


def _drawings(demo: Demo) -> dict[str, Callable[[], Axes]]:
    from subbayes import plots

    comparison, model = demo.comparison, demo.model.sampled
    predictive, y = comparison.predictives["pca"], comparison.y
    assert isinstance(model, FittedModel)
    draws, posterior, trained = model.draws, model.posterior, comparison.trained
    assert draws is not None
    assert posterior is not None
    assert trained is not None
    gaps = comparison.differences()
    errors = dict(zip(gaps["method"], gaps["se"], strict=True))
    made: dict[str, Callable[[], Axes]] = {
        "scores": lambda: plots.scores(comparison.table, errors=errors),
        "coverage": lambda: plots.scores(comparison.table, "coverage"),
        "intervals": lambda: plots.intervals(predictive, y, name="disease progression"),
        "calibration": lambda: plots.calibration(predictive, y, label="PCA + ESS"),
        "pit": lambda: plots.pit(predictive, y),
        "density": lambda: plots.density(posterior, draws),
        "spectrum": lambda: plots.spectrum(trained.swa.recorder, model.subspace.rank),
        "trace": lambda: plots.trace(draws, 0),
        "ranks": lambda: plots.ranks(draws, 0),
        "autocorrelation": lambda: plots.autocorrelation(draws),
        "ess": lambda: plots.ess(draws),
        "training": lambda: plots.training_history(model.history),
    }
    chosen = model.settings["temperatures"]
    if chosen is not None:
        made["temperature"] = lambda: plots.temperature(chosen)
    return made


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
        f"442 patients of scikit-learn's diabetes data, split by seed {seed}: {len(rows.train)} "
        f"to train on, {len(rows.validation)} to choose with, {len(rows.test)} to test on. The "
        f"scale {demo.prior_scale:g} of the prior on the weights and the temperatures were chosen "
        "on the second part; the third was used once, for this table.",
        f"For orientation: linear regression on the same training rows has a test RMSE of "
        f"{demo.linear_rmse:.2f}. These data are close to linear and noisy, so methods that are "
        "fitted sensibly lie close together.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m subbayes.cli.demonstration`."""
    parser = argparse.ArgumentParser(
        prog="python -m subbayes.cli.demonstration",
        description="Fit, compare, save and report on scikit-learn's diabetes data.",
    )
    parser.add_argument("--out", default="runs/demo", help="folder for the results")
    parser.add_argument("--seed", type=int, default=0, help="of split, training and sampling")
    given = parser.parse_args(arguments)
    run(given.out, given.seed)


if __name__ == "__main__":
    main()

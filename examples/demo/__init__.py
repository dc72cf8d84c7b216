"""Five short studies that show what a posterior adds, with one report.

Methods on a table, the uncertainty between and beyond the data, a classifier that abstains, an
effect with its interval beside a network, and the small network of a sparse posterior.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.demo.curve import between_and_beyond
from examples.demo.digits import abstention
from examples.demo.effect import effect_beside_a_network
from examples.demo.methods import COLUMN, Methods, compare
from examples.demo.section import Effort, Section
from examples.demo.small_network import small_network
from subbayes.artifacts.files import as_path, atomic_write_text
from subbayes.inference.configuration import Sampling
from subbayes.models.settings import Perceptron, TableSettings
from subbayes.reports.model_report import write_report
from subbayes.reports.rendering import Picture, render
from subbayes.subspaces.pca import PCA
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_seed, fail

if TYPE_CHECKING:
    from subbayes.predictions.predictive import Predictive

__all__ = ["EFFORT", "Demo", "Effort", "run"]

EFFORT = Effort(
    TableSettings(
        network=Perceptron(hidden=(16, 16), activation="tanh"),
        subspace=PCA(rank=5),
        temperature="validation",
        training=Training(epochs=150, learning_rate=1e-2, swa_epochs=50, swa_learning_rate=2e-2),
        sampling=Sampling(draws=1000, chains=4, warmup=300),
    )
)
"""How long the demo trains and samples, for about a minute in all."""

_MARK = "made-by-subbayes-demo"
_FIGURES = ("scores", "coverage", "curve", "abstention", "rotation", "effect", "inclusion")
FILES = (
    "model/manifest.json",
    *(f"{name}.csv" for name in ("train", "validation", "test", "predictions", "scores")),
    "scores.json",
    "small.safetensors",
    "report.html",
    "model-report.html",
    *(f"plots/{name}.png" for name in _FIGURES),
)


@dataclass(frozen=True)
class Demo:
    """The result of the demo.

    Attributes:
        methods: the comparison of methods on a table.
        sections: what each part found.
        folder: the folder of results.
        seconds: total time.
    """

    methods: Methods
    sections: tuple[Section, ...]
    folder: Path
    seconds: float

    @property
    def predictive(self) -> Predictive:
        """Predictions of the test rows of the table by the saved model."""
        return self.methods.comparison.predictives["pca"]

    def to_dict(self) -> dict[str, Any]:
        """The numbers of each part, as values that JSON can represent."""
        return {section.key: section.facts for section in self.sections} | {
            "folder": str(self.folder),
            "total_seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The tables and findings of all parts."""
        return "\n\n\n".join(section.to_text() for section in self.sections)

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
    effort: Effort = EFFORT,
    show: bool = True,
) -> Demo:
    """Fit, compare, save and report.

    Args:
        out: folder for the posterior, tables, plots and reports: a new one, or that of an earlier
            demo, whose files of the same names are overwritten.
        seed: of data, splits, training and sampling.
        progress: show progress bars; None shows them on a terminal.
        effort: how long to train and sample.
        show: print tables to standard output, and steps and hints to standard error.

    Raises:
        InputError: the folder has files, and no demo was written to it.
    """
    check_seed(seed)
    started = time.perf_counter()
    folder = _own_folder(out)
    effort = replace(effort, settings=effort.settings.change({"sampling.seed": seed}))

    def print_step(text: str) -> None:
        if show:
            print(text, file=sys.stderr, flush=True)

    sections: list[Section] = []

    def keep(section: Section) -> None:
        sections.append(section)
        if show:
            print(f"\n{section.to_text()}\n", flush=True)

    with _one_thread():
        print_step("[1/6] six methods on a table")
        methods = compare(seed, effort, progress)
        keep(methods.section())
        print_step("[2/6] one input")
        keep(between_and_beyond(seed, effort.epochs))
        print_step("[3/6] handwritten digits")
        keep(abstention(seed, effort, progress))
        print_step("[4/6] an effect beside a network")
        keep(effect_beside_a_network(seed, effort, progress))
        atomic_write_text(folder / _MARK, "")
        print_step("[5/6] a sparse network")
        keep(small_network(methods.rows, seed, effort.epochs, folder, progress))
        print_step(f"[6/6] writing {folder}")
        demo = Demo(methods, tuple(sections), folder, time.perf_counter() - started)
        _write(demo, seed)
        demo = replace(demo, seconds=time.perf_counter() - started)
        print_step(f"done in {demo.seconds:.0f} s\n\nnext:\n{demo.hint()}")
    return demo


def _own_folder(out: str | Path) -> Path:
    """The folder, if nothing in it is of anybody else."""
    folder, remedy = as_path(out), "Choose another folder"
    if folder.exists() and not folder.is_dir():
        fail("out", "a folder", f"a file: '{folder}'", remedy)
    if folder.exists() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        fail("out", "a new folder, or that of an earlier demo", f"'{folder}' with files", remedy)
    return folder


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread, which is fastest for a small network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- writing ------------------------------------------------------------------------------------


def _write(demo: Demo, seed: int) -> None:
    """Write the posterior, tables, plots and reports."""
    folder, rows, comparison = demo.folder, demo.methods.rows, demo.methods.comparison
    demo.methods.model.save(folder / "model", overwrite=True)
    for name in ("train", "validation", "test"):
        atomic_write_text(folder / f"{name}.csv", getattr(rows, name).to_csv(index=False))
    predictions = demo.predictive.to_frame()
    predictions.insert(0, "observed", rows.encoded(rows.test)[1])
    atomic_write_text(folder / "predictions.csv", predictions.to_csv(index=False))
    atomic_write_text(folder / "scores.csv", comparison.table.to_csv(index=False))
    atomic_write_text(folder / "scores.json", json.dumps(demo.to_dict(), indent=1) + "\n")
    pictures: dict[str, list[Picture]] = {
        section.key: section.save_figures(folder / "plots") for section in demo.sections
    }
    text = render(
        Path(__file__).with_name("report.html"),
        title="What a posterior adds",
        lead="Five short studies: methods on a table, the uncertainty between and beyond the "
        "data, a classifier that abstains, an effect beside a network, and the small network of "
        "a sparse posterior. Numbers have their standard errors; differences within two of them "
        "are called ties.",
        sections=demo.sections,
        pictures=pictures,
        details="model-report.html",
        command=_command(demo, seed),
    )
    atomic_write_text(folder / "report.html", text)
    write_report(
        comparison,
        folder / "model-report.html",
        title="The methods on the table, and the posterior in the PCA subspace",
        name=COLUMN,
        method="pca",
        command=_command(demo, seed),
    )


def _command(demo: Demo, seed: int) -> str:
    return (
        f"python -m examples.demo --seed {seed}\n\n"
        f"# the posterior, in Python\nimport subbayes\n"
        f"model = subbayes.load({str(demo.folder / 'model')!r})\n"
        f"print(model.model.draws.summary())\n\n"
        f"# predictions for a table with the same columns\n"
        f"subbayes predict {demo.folder} {demo.folder / 'test.csv'} --out predictions.csv"
    )

"""Five short studies of where a posterior pays, and where it does not, with one report.

Two small tables, a trained classifier, the interval of an effect, the small network of a sparse
posterior, and a model that is updated and exported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from examples.demo.classifier import trained_classifier
from examples.demo.effect import interval_of_an_effect
from examples.demo.section import Effort, Section
from examples.demo.small_network import network_that_is_left
from examples.demo.table import NOISE, Rows, small_tables
from examples.demo.update import update_and_export
from subbayes.artifacts.files import as_path, atomic_write_text
from subbayes.reports.rendering import Picture, Table, render
from subbayes.utils.checks import check_seed, fail

__all__ = ["EFFORT", "Demo", "Effort", "run"]

EFFORT = Effort()
"""How long the demo trains and samples, for about two minutes in all."""

_MARK = "made-by-subbayes-demo"
_FIGURES = ("gains", "unlike", "reliability", "effect", "inclusion")
FILES = (
    "model/manifest.json",
    "train.csv",
    "scores.json",
    "small.safetensors",
    "updated.pt2",
    "report.html",
    *(f"plots/{name}.png" for name in _FIGURES),
)


@dataclass(frozen=True)
class Demo:
    """The result of the demo.

    Attributes:
        sections: what each part found.
        folder: the folder of results.
        seconds: total time.
    """

    sections: tuple[Section, ...]
    folder: Path
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The numbers of each part, as values that JSON can represent."""
        return {section.key: section.to_dict() for section in self.sections} | {
            "folder": str(self.folder),
            "total_seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The tables and findings of all parts."""
        return "\n\n\n".join(section.to_text() for section in self.sections)

    def overview(self) -> Table:
        """Each method beside the best of the others, in one table."""
        rows = [
            [gain.verdict, gain.what, gain.beside, gain.to_text(unit=False), gain.unit]
            for section in self.sections
            for gain in section.closest()
        ]
        return Table(
            ["result", "of", "beside the best other", "gain", "in"],
            rows,
            "Paired differences ± one standard error; a difference within two of them is a tie.",
            best=[(i, 0) for i, row in enumerate(rows) if row[0] == "better"],
        )

    def hint(self) -> str:
        """What to do next."""
        return "\n".join(
            [
                f"  open {self.folder / 'report.html'} in a browser",
                "  subbayes fit YOUR.csv --target COLUMN --out runs/yours",
                f"  in Python: subbayes.TableRegressor.load('{self.folder / 'model'}')",
            ]
        )


def run(
    out: str | Path = "runs/demo", seed: int = 0, *, effort: Effort = EFFORT, show: bool = True
) -> Demo:
    """Fit, compare, save and report.

    Args:
        out: folder for models, scores, plots and the report: a new one, or that of an earlier
            demo, whose files of the same names are overwritten.
        seed: of data, splits, training and sampling.
        effort: how long to train and sample.
        show: print tables to standard output, and steps and hints to standard error.

    Raises:
        InputError: the folder has files, and no demo was written to it.
    """
    check_seed(seed)
    started = time.perf_counter()
    folder = _own_folder(out)
    atomic_write_text(folder / _MARK, "")
    sections: list[Section] = []

    def print_step(text: str) -> None:
        if show:
            print(text, file=sys.stderr, flush=True)

    def keep(section: Section) -> None:
        sections.append(section)
        if show:
            print(f"\n{section.to_text()}\n", flush=True)

    with _one_thread():
        print_step("[1/6] small tables")
        tables, model = small_tables(seed, effort)
        keep(tables)
        print_step("[2/6] a trained classifier")
        keep(trained_classifier(seed, effort))
        print_step("[3/6] the interval of an effect")
        keep(interval_of_an_effect(seed, effort))
        print_step("[4/6] a sparse network")
        keep(network_that_is_left(seed, effort, folder))
        print_step("[5/6] update and export")
        keep(update_and_export(seed, effort, folder))
        print_step(f"[6/6] writing {folder}")
        model.save(folder / "model", overwrite=True)
        train = Rows.simulate(next(iter(NOISE)), seed).frame()
        atomic_write_text(folder / "train.csv", train.to_csv(index=False))
        demo = Demo(tuple(sections), folder, time.perf_counter() - started)
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


def _write(demo: Demo, seed: int) -> None:
    """Write the scores, figures and the report."""
    folder = demo.folder
    atomic_write_text(folder / "scores.json", json.dumps(demo.to_dict(), indent=1) + "\n")
    pictures: dict[str, list[Picture]] = {
        section.key: section.save_figures(folder / "plots") for section in demo.sections
    }
    text = render(
        Path(__file__).with_name("report.html"),
        title="Where a posterior pays, and where it does not",
        lead="Five short studies, each beside the simple thing that one would do otherwise, on the "
        "same rows. Green is what holds, grey what makes no sure difference, orange what fails, "
        "loses or costs.",
        overview=demo.overview(),
        sections=demo.sections,
        pictures=pictures,
        command=f"python -m examples.demo --seed {seed}",
    )
    atomic_write_text(folder / "report.html", text)

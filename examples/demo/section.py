"""The parts of the demo: what each shows, as text, tables, findings and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from subbayes import plots
from subbayes.inference.configuration import Sampling
from subbayes.reports.rendering import Picture, Table, picture
from subbayes.tables.hierarchical import EFFORTS
from subbayes.tables.hierarchical import Effort as TableEffort
from subbayes.utils.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Effort:
    """How long the parts of the demo train and sample.

    Attributes:
        table: of `TableRegressor`.
        epochs: of networks of tables.
        classifier_epochs: of the classifiers.
        replications: simulated data sets, over which the coverage of an effect is counted.
        effects: sampling of regressions.
        sparse_epochs: of the sparse network.
        update_epochs: of the network that is updated.
    """

    table: TableEffort = EFFORTS["quick"]
    epochs: int = 300
    classifier_epochs: int = 20
    replications: int = 40
    effects: Sampling = Sampling(draws=300, chains=4, warmup=200, progress=False)
    sparse_epochs: int = 300
    update_epochs: int = 300


@dataclass(frozen=True)
class Finding:
    """One line of result.

    Attributes:
        kind: "good" for what holds, "tie" for what makes no sure difference, "bad" for what fails
            or loses.
        text: the line.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Gain:
    """How much better a method is than what a user would do otherwise, on the same rows.

    Attributes:
        what: what is compared.
        beside: what it is compared with.
        gain: the paired difference; above 0 the method is better.
        error: its standard error.
        unit: of both.
    """

    what: str
    beside: str
    gain: float
    error: float
    unit: str = "nats a row"

    @classmethod
    def of(
        cls, what: str, beside: str, ours: np.ndarray, theirs: np.ndarray, unit: str = "nats a row"
    ) -> Gain:
        """The mean difference of two scores of the same rows, and its standard error.

        Example:
            >>> Gain.of("A", "B", np.array([2.0, 3.0]), np.array([1.0, 0.0])).to_text()
            '+2.000 ± 1.000 nats a row'
        """
        difference = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
        return cls(what, beside, *mean_with_error(difference), unit)

    @property
    def kind(self) -> str:
        """A "tie" within two standard errors of 0, else "good" or "bad".

        Example:
            >>> [Gain("A", "B", gain, 0.1).kind for gain in (0.3, 0.1, -0.3)]
            ['good', 'tie', 'bad']
        """
        if abs(self.gain) <= 2 * self.error:
            return "tie"
        return "good" if self.gain > 0 else "bad"

    @property
    def verdict(self) -> str:
        """The kind in a word."""
        return {"good": "better", "tie": "tie", "bad": "worse"}[self.kind]

    def to_text(self, unit: bool = True) -> str:
        """The difference with its standard error, and with its unit."""
        factor, digits = (100, 1) if self.unit == "percentage points" else (1, 3)
        text = f"{factor * self.gain:+.{digits}f} ± {factor * self.error:.{digits}f}"
        return (f"{text} {self.unit}" if unit else text).replace("-", "−")


@dataclass(frozen=True)
class Figure:
    """A figure of a section, drawn when it is needed.

    Attributes:
        draw: draws it.
        caption: text below it.
    """

    draw: Callable[[], Axes]
    caption: str


@dataclass(frozen=True)
class Section:
    """What a part of the demo found.

    Attributes:
        key: short name in `scores.json`.
        title: heading.
        text: paragraphs of the report.
        tables: numbers, each with its standard error.
        gains: differences to what a user would do otherwise.
        notes: further findings.
        figures: by name.
        facts: the numbers, as values that JSON can represent.
    """

    key: str
    title: str
    text: tuple[str, ...]
    tables: tuple[Table, ...]
    gains: tuple[Gain, ...]
    notes: tuple[Finding, ...] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def findings(self, kind: str) -> list[str]:
        """The sentences of a kind: "good", "tie" or "bad"."""
        groups: dict[tuple[str, str], list[Gain]] = {}
        for gain in self.gains:
            if gain.kind == kind:
                groups.setdefault((gain.what, gain.unit), []).append(gain)
        verdict = {"good": "is better than", "tie": "is tied with", "bad": "is worse than"}[kind]
        sentences = []
        for (what, unit), group in groups.items():
            sides = [f"{one.beside} ({one.to_text(unit=False)})" for one in group]
            sentences.append(f"{what} {verdict}: {', '.join(sides)}; in {unit}.")
        sentences += [note.text for note in self.notes if note.kind == kind]
        return [text[0].upper() + text[1:] for text in sentences]

    def closest(self) -> list[Gain]:
        """Of each method the comparison with the best of the others."""
        worst: dict[str, Gain] = {}
        for gain in self.gains:
            if gain.what not in worst or gain.gain < worst[gain.what].gain:
                worst[gain.what] = gain
        return list(worst.values())

    def to_text(self) -> str:
        """Heading, tables and findings in plain text."""
        lines = [self.title]
        for table in self.tables:
            lines += ["", text_table(table.head, table.rows)]
        lines.append("")
        for kind, mark in (("good", "+"), ("tie", "="), ("bad", "-")):
            lines += [f"{mark} {text}" for text in self.findings(kind)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The facts, and the gains with their standard errors."""
        rows = [
            {"what": one.what, "beside": one.beside, "gain": one.gain, "error": one.error,
             "unit": one.unit, "verdict": one.verdict}
            for one in self.gains
        ]  # fmt: skip
        return self.facts | {"gains": rows}

    def save_figures(self, folder: Path) -> list[Picture]:
        """Write the figures to a folder as PNG files; returns them as pictures of a page."""
        return [
            picture(plots.save(figure.draw(), folder / f"{name}.png").read_bytes(), figure.caption)
            for name, figure in self.figures.items()
        ]


def mean_with_error(values: np.ndarray) -> tuple[float, float]:
    """A mean and its standard error.

    Example:
        >>> mean_with_error(np.array([1.0, 3.0]))
        (2.0, 1.0)
    """
    values = np.asarray(values, dtype=float)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def with_error(value: float, error: float, digits: int = 2, percent: bool = False) -> str:
    """A number with its standard error.

    Example:
        >>> with_error(0.954, 0.0101), with_error(0.954, 0.0101, 1, percent=True)
        ('0.95 ± 0.01', '95.4 ± 1.0 %')
    """
    factor, unit = (100, " %") if percent else (1, "")
    return f"{factor * value:.{digits}f} ± {factor * error:.{digits}f}{unit}".replace("-", "−")


def coverage_finding(what: str, covered: np.ndarray, level: float) -> Finding:
    """Whether intervals hold as many values as they claim, within two standard errors.

    The standard error is that of intervals that hold exactly their level.

    Example:
        >>> coverage_finding("95 % intervals", np.ones(1000, dtype=bool), 0.95)
        Finding(kind='bad', text='95 % intervals hold 100.0 %: too wide.')
    """
    share, error = float(np.mean(covered)), np.sqrt(level * (1 - level) / len(covered))
    text = f"{what} hold {100 * share:.1f} %"
    if abs(share - level) <= 2 * error:
        return Finding("good", f"{text}, within two standard errors of {100 * level:.0f} %.")
    return Finding("bad", f"{text}: too {'narrow' if share < level else 'wide'}.")

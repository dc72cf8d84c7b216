"""The parts of the demo: what each shows, as text, a table and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subbayes import plots
from subbayes.inference.configuration import Sampling
from subbayes.models.settings import TableSettings
from subbayes.reports.rendering import Picture, Table, picture
from subbayes.utils.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Effort:
    """How long the parts of the demo train and sample.

    Attributes:
        settings: of the methods that are compared. The prior scale is chosen among `scales`.
        scales: candidate scales of the prior of the weights.
        members: number of networks of the deep ensemble.
        epochs: of the network of one input, and of the sparse network; those of the network
            beside effects are at most as many.
        effects: sampling of the semi-structured model.
    """

    settings: TableSettings
    scales: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 1.0)
    members: int = 5
    epochs: int = 1000
    effects: Sampling = Sampling(draws=400, chains=4, warmup=500)


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
        key: short name, of its figures and in `scores.json`.
        title: heading.
        text: paragraphs of the report.
        table: numbers, each with its standard error.
        findings: one line for each result, for the terminal and the report.
        figures: by name.
        facts: the numbers, as values that JSON can represent.
    """

    key: str
    title: str
    text: tuple[str, ...]
    table: Table
    findings: tuple[str, ...]
    figures: dict[str, Figure] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """Heading, table and findings in plain text."""
        parts = [self.title, "", text_table(self.table.head, self.table.rows), "", *self.findings]
        return "\n".join(parts)

    def save_figures(self, folder: Path) -> list[Picture]:
        """Write the figures to a folder as PNG files; returns them as pictures of a page."""
        return [
            picture(plots.save(figure.draw(), folder / f"{name}.png").read_bytes(), figure.caption)
            for name, figure in self.figures.items()
        ]


def with_error(value: float, error: float, digits: int = 2, percent: bool = False) -> str:
    """A number with its standard error.

    Example:
        >>> with_error(0.954, 0.0101), with_error(0.954, 0.0101, 1, percent=True)
        ('0.95 ± 0.01', '95.4 ± 1.0 %')
    """
    factor, unit = (100, " %") if percent else (1, "")
    return f"{factor * value:.{digits}f} ± {factor * error:.{digits}f}{unit}"


def compared(difference: float, error: float) -> str:
    """Call a difference to the best a "tie" within two standard errors of 0, else "worse".

    Example:
        >>> compared(0.0, 0.0), compared(-0.1, 0.06), compared(-0.1, 0.02)
        ('best', 'tie', 'worse')
    """
    if difference == 0:
        return "best"
    return "tie" if abs(difference) < 2 * error else "worse"

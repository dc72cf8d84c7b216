"""Tables and figures of the toy regression, as a gallery and on a page of the documentation."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from PIL import Image

from experiments.markdown import markdown_table, write_between
from experiments.store import Record
from experiments.toy_regression_methods import Results
from subbayes import Draws, plots
from subbayes.artifacts.files import atomic_write_bytes, atomic_write_text
from subbayes.plots.style import INK, RED, legend, legend_entry
from subbayes.reports.rendering import Table, picture, render

_Y = (-1.9, 1.9)
_OUTLINES = {"VI": (INK, "--"), "RealNVP": (RED, "-")}
_COLORS = 96  # per picture: keeps the files small without visible loss

FIGURES = {
    "figure1": (
        "Figure 1: elliptical slice sampling in a random subspace of rank 10 (above) and in the "
        "subspace of a curve between two solutions (below). Left the predictions, right the "
        "log density over the first two coordinates with the draws."
    ),
    "figure3": (
        "Figure 3: elliptical slice sampling in three subspaces (above); variational inference "
        "over all weights, SWAG and a Gaussian process (below)."
    ),
    "figure8": "Figure 8: every engine (rows) in every subspace (columns).",
    "figure9": (
        "Figure 9: the log density over the first two coordinates, with the draws of every engine "
        "(rows) in every subspace (columns)."
    ),
    "together": (
        "The engines on one surface: draws of the two samplers, and outlines of the two "
        "approximations (their means and covariances, at two standard deviations)."
    ),
    "spectra": (
        "Figures 6 and 7: the largest eigenvalues of the Hessian and of the Fisher information at "
        "the first solution, by Lanczos, and of the covariance of the trajectory; each divided by "
        "the sum of those shown."
    ),
}


# --- pictures -----------------------------------------------------------------------------------


def pictures(
    found: Results, spectra: dict[str, Any], methods: Sequence[Sequence[str]]
) -> dict[str, Figure]:
    """Return the figures of one data set; those whose methods were not run are omitted.

    Args:
        found: results of the data set.
        spectra: largest eigenvalues of the Hessian and the Fisher information.
        methods: names of the methods, one row per engine and one column per subspace.
    """
    every = sum(map(list, methods), [])
    makers: dict[str, tuple[Callable[[], Figure], Iterable[str]]] = {
        "figure1": (lambda: _figure1(found), ("random + ESS", "curve + ESS")),
        "figure3": (lambda: _bands(found, _FIGURE3), sum(_FIGURE3, [])),
        "figure8": (lambda: _bands(found, methods), every),
        "figure9": (lambda: _densities(found, methods), every),
        "together": (
            lambda: _together(found, [name.split(" + ")[0] for name in methods[0]]),
            every,
        ),
        "spectra": (lambda: _spectra(found, spectra), ()),
    }
    return {
        name: make()
        for name, (make, needed) in makers.items()
        if all(method in found.arrays for method in needed)
    }


_FIGURE3 = [["random + ESS", "PCA + ESS", "curve + ESS"], ["full-space VI", "SWAG", "GP"]]


def _band(found: Results, method: str, ax: Axes, key: bool) -> None:
    points = found.points
    plots.bands(found.predictive(method), found.grid, curves=8, ax=ax, data=(points.x, points.y))
    if points.truth is not None:
        ax.plot(found.grid, points.truth, "--", color=plots.style.RED, linewidth=1.2)
    ax.set_ylim(*_Y)
    ax.set_xlim(found.grid[0], found.grid[-1])
    _set_title(ax, method, key)


def _set_title(ax: Axes, title: str, key: bool) -> None:
    """Set a title inside the axes, and remove the legend unless `key`."""
    legend = ax.get_legend()
    if legend is not None and not key:
        legend.remove()
    ax.annotate(
        title,
        (0.03, 0.96),
        xycoords="axes fraction",
        va="top",
        weight="bold",
        size=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 2},
    )


def _bands(found: Results, methods: Sequence[Sequence[str]]) -> Figure:
    axes = plots.grid(len(methods), len(methods[0]), width=3.5, height=2.5)
    for i, (row, names) in enumerate(zip(axes, methods, strict=True)):
        for j, (ax, name) in enumerate(zip(row, names, strict=True)):
            _band(found, name, ax, key=False)
            if i < len(axes) - 1:
                ax.set_xlabel("")
            if j:
                ax.set_ylabel("")
    _shared_legend(axes[0][0])
    return _figure(axes)


def _shared_legend(ax: Axes) -> None:
    """Add one legend above the figure."""
    figure = ax.figure
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9.5
    )


def _figure(axes: Sequence[Sequence[Axes]]) -> Figure:
    figure = axes[0][0].figure
    assert isinstance(figure, Figure)
    return figure


def _draws(found: Results, method: str) -> Draws:
    return Draws(found.arrays[method]["z"])


def _spans(found: Results, subspace: str) -> Any:
    """Return the range of the draws of elliptical slice sampling, used for all engines."""
    z = _draws(found, f"{subspace} + ESS").flat()[:, :2]
    low, high = np.quantile(z, [0.002, 0.998], axis=0)
    pad = 0.3 * (high - low)
    return tuple((float(a), float(b)) for a, b in zip(low - pad, high + pad, strict=True))


def _figure1(found: Results) -> Figure:
    axes = plots.grid(2, 2, width=4.4, height=3.1)
    for row, subspace in zip(axes, ("random", "curve"), strict=True):
        method = f"{subspace} + ESS"
        _band(found, method, row[0], key=False)
        plots.density(
            found.posterior(subspace), _draws(found, method), n_draws=300, size=31, ax=row[1]
        )
        _set_title(row[1], method, key=False)
    _shared_legend(axes[0][0])
    return _figure(axes)


def _densities(found: Results, names: Sequence[Sequence[str]]) -> Figure:
    axes = plots.grid(len(names), len(names[0]), width=3.9, height=2.9)
    for row, methods in zip(axes, names, strict=True):
        for ax, method in zip(row, methods, strict=True):
            subspace = method.split(" + ")[0]
            plots.density(
                found.posterior(subspace),
                _draws(found, method),
                n_draws=250,
                size=31,
                spans=_spans(found, subspace),
                ax=ax,
            )
            _set_title(ax, method, key=False)
    return _figure(axes)


def _together(found: Results, subspaces: Sequence[str]) -> Figure:
    axes = plots.grid(1, len(subspaces), width=4.6, height=3.9)
    for ax, subspace in zip(axes[0], subspaces, strict=True):

        def of(engine: str, subspace: str = subspace) -> Draws:
            return _draws(found, f"{subspace} + {engine}")

        plots.density(
            found.posterior(subspace),
            {e: of(e) for e in ("ESS", "NUTS")},
            n_draws=200,
            spans=_spans(found, subspace),
            ax=ax,
        )
        lines = [_ellipse(ax, e, of(e), *style) for e, style in _OUTLINES.items()]
        known = ax.get_legend().legend_handles
        legend(ax, columns=3, handles=[*known[:2], *lines, *known[2:]])
        _set_title(ax, subspace, key=ax is axes[0][0])
    return _figure(axes)


def _ellipse(ax: Axes, name: str, draws: Draws, color: str, style: str) -> Line2D:
    """Draw two standard deviations of the Gaussian of draws over the first two coordinates."""
    factor = np.linalg.cholesky(draws.covariance()[:2, :2])
    angle = np.linspace(0, 2 * np.pi, 201)
    points = draws.mean()[:2] + 2 * np.stack([np.cos(angle), np.sin(angle)], 1) @ factor.T
    white = [withStroke(linewidth=3.2, foreground="white")]
    ax.plot(*points.T, style, color=color, linewidth=1.6, path_effects=white)
    return legend_entry(name, color, linestyle=style, linewidth=1.6)


def _spectra(found: Results, spectra: dict[str, Any]) -> Figure:
    ax = plots.spectra(
        {
            "Hessian": spectra["hessian"][0],
            "Fisher information": spectra["fisher"][0],
            "trajectory": found.model.recorder,
        },
        share=True,
    )
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def small_png(figure: Figure, dpi: int = 95) -> bytes:
    """Render a figure with a reduced palette, for the repository."""
    with Image.open(io.BytesIO(plots.png(figure, dpi))) as picture:
        buffer = io.BytesIO()
        picture.convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(
            buffer, "png", optimize=True
        )
    return buffer.getvalue()


# --- tables -------------------------------------------------------------------------------------

_HEAD = (
    "method",
    "sd near the data",
    "in the gaps",
    "beyond",
    "growth in the gaps",
    "growth beyond",
    "RMSE at the data",
    "R-hat or Pareto k",
    "CPU s",
)
_COVERED = ("method", "near the data", "in the gaps", "beyond")


def rows(records: dict[str, Record]) -> list[list[str]]:
    """Return one row per method: uncertainty by region, error at the data, and diagnostics."""
    return [
        [
            method,
            *(f"{r[f'sd {name}']:.4f}" for name in ("near", "gaps", "beyond")),
            *(f"{r[f'growth {name}']:.1f} ×" for name in ("gaps", "beyond")),
            f"{r['rmse']:.4f}",
            f"R-hat {r['rhat']:.2f}"
            if r.get("rhat")
            else f"k {r['pareto_k']:.2f}"
            if r.get("pareto_k")
            else "",
            f"{r['seconds']:.0f}",
        ]
        for method, r in records.items()
    ]


def coverage_rows(twins: Sequence[Results]) -> list[list[str]]:
    """Return the coverage of the true function by 95 % intervals, averaged over twins."""
    return [
        [
            method,
            *(
                f"{np.mean([one.records[method][f'coverage {name}'] for one in twins]):.2f}"
                for name in ("near", "gaps", "beyond")
            ),
        ]
        for method in twins[0].records
    ]


def markdown(found: Sequence[Results]) -> str:
    """Return both tables."""
    paper, twins = found[0], found[1:]
    title = "Standard deviation of the curves (epistemic), and its growth"
    parts = [markdown_table(_HEAD, rows(paper.records), title)]
    if twins:
        count = f"{len(twins)} twin{'s' * (len(twins) > 1)} of the data"
        title = f"Coverage of the true function by 95 % of the curves, on {count}"
        parts.append(markdown_table(_COVERED, coverage_rows(twins), title))
    return "\n\n".join(parts)


# --- pages --------------------------------------------------------------------------------------


def write(
    found: Sequence[Results],
    spectra: dict[str, Any],
    methods: Sequence[Sequence[str]],
    gallery: str | None,
    page: str | None,
) -> None:
    """Write the gallery, and tables and figures of a page of the documentation.

    Args:
        found: results of the paper's data, then those of twins.
        spectra: largest eigenvalues of the Hessian and the Fisher information.
        methods: names of the methods, one row per engine and one column per subspace.
        gallery: an HTML file, or None.
        page: a page with marks, or None; figures go to `images/toy_regression` beside it.

    Raises:
        InputError: a page without the marks.
    """
    figures = pictures(found[0], spectra, methods)
    drawn = {name: small_png(figure) for name, figure in figures.items()}
    if gallery:
        atomic_write_text(gallery, _gallery(found, drawn))
    if page:
        images = Path(page).parent / "images" / "toy_regression"
        for name, data in drawn.items():
            atomic_write_bytes(images / f"{name}.png", data)
        write_between(page, "toy_regression", markdown(found))


def _gallery(found: Sequence[Results], drawn: dict[str, bytes]) -> str:
    paper, twins = found[0], found[1:]
    sections: list[tuple[str, Any]] = [
        (
            FIGURES[name].split(":")[0] if name != "together" else "Side by side",
            picture(data, FIGURES[name]),
        )
        for name, data in drawn.items()
    ]
    sections.append(
        (
            "Growth of the uncertainty away from the data",
            Table(
                _HEAD,
                rows(paper.records),
                "Standard deviation of the curves, averaged over the grid points near "
                "the data, in the two gaps, and beyond; growth is relative to "
                "near the data. Noise: "
                f"{paper.model.noise:.3f}.",
            ),
        )
    )
    if twins:
        sections.append(
            (
                "Coverage of the true function",
                Table(
                    _COVERED,
                    coverage_rows(twins),
                    "Share of each region in which 95 % of the curves hold the true function, "
                    f"on {len(twins)} data sets drawn from networks with random weights.",
                ),
            )
        )
    return render(
        "sections.html",
        title="Toy regression: subspaces and engines",
        lead="The 400 points of Izmailov et al. (2019), a network with hidden layers of 200, 50, "
        "50 and 50, and the predictions of each subspace and each engine away from the data.",
        sections=sections,
        wide=True,
    )

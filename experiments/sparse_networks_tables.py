"""Tables of the experiments on sparse networks: the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.markdown import distinct, markdown_table, select
from experiments.sparse_networks import METHODS, MODES
from experiments.store import Record

__all__ = ["NETWORKS", "PRUNED", "TABULAR", "markdown", "tabular_markdown"]

NETWORKS: dict[str, dict[str, tuple[tuple[float, ...], ...]]] = {
    "mnist": {
        "LBBNN-SSP-MF": (
            (0.968, 0.981, 0.981, 0.969, 0.980, 0.981),
            (0.090, 0.079),
            (0.999, 8322, 0.999, 8444),
        ),
        "LBBNN-SSP-MVN": (
            (0.965, 0.978, 0.978, 0.968, 0.977, 0.974),
            (0.180, 0.163),
            (1.000, 7818, 1.000, 7928),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.959, 0.979, 0.976, 0.959, 0.979, 0.975),
            (0.450, 0.449),
            (1.000, 7760, 1.000, 7764),
        ),
        "BNN-GP-MF": ((0.965, 0.984, 0.984), (1.000,), (0.999, 8477)),
        "BNN-MGP-MF": ((0.965, 0.982, 0.983), (1.000,), (0.999, 8329)),
        "BNN-GP-CMF": ((0.982, 0.984, 0.984), (0.226,), (0.995, 9581)),
        "BNN-HP-MF": (
            (0.964, 0.982, 0.966, 0.965, 0.982, 0.965),
            (1.000, 0.194),
            (1.000, 3, 1.000, 2),
        ),
    },
    "fashion_mnist": {
        "LBBNN-SSP-MF": (
            (0.864, 0.883, 0.882, 0.867, 0.883, 0.880),
            (0.120, 0.108),
            (0.995, 4946, 0.995, 5025),
        ),
        "LBBNN-SSP-MVN": (
            (0.858, 0.879, 0.875, 0.865, 0.877, 0.871),
            (0.156, 0.129),
            (0.995, 4503, 0.995, 4694),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.849, 0.876, 0.864, 0.849, 0.877, 0.862),
            (0.456, 0.455),
            (0.996, 4485, 0.996, 4486),
        ),
        "BNN-GP-MF": ((0.864, 0.893, 0.886), (1.000,), (0.997, 5089)),
        "BNN-MGP-MF": ((0.867, 0.893, 0.888), (1.000,), (0.996, 5151)),
        "BNN-GP-CMF": ((0.896, 0.897, 0.896), (0.094,), (0.942, 8825)),
        "BNN-HP-MF": (
            (0.864, 0.887, 0.867, 0.865, 0.887, 0.865),
            (1.000, 0.302),
            (1.000, 181, 1.000, 179),
        ),
    },
    "phoneme": {
        "LBBNN-SSP-MF": (
            (0.913, 0.927, 0.925, 0.923, 0.925, 0.925),
            (0.371, 0.307),
            (0.992, 690, 0.984, 757),
        ),
        "LBBNN-SSP-MVN": (
            (0.919, 0.929, 0.926, 0.925, 0.929, 0.924),
            (0.255, 0.225),
            (0.995, 649, 0.995, 668),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.918, 0.929, 0.921, 0.918, 0.929, 0.917),
            (0.497, 0.497),
            (0.994, 663, 0.995, 664),
        ),
        "BNN-GP-MF": ((0.915, 0.919, 0.917), (1.000,), (0.966, 834)),
        "BNN-MGP-MF": ((0.913, 0.916, 0.921), (1.000,), (0.969, 833)),
        "BNN-GP-CMF": ((0.879, 0.922, 0.873), (0.509,), (0.965, 187)),
        "BNN-HP-MF": (
            (0.921, 0.921, 0.921, 0.919, 0.919, 0.920),
            (1.000, 0.457),
            (0.895, 19, 0.926, 28),
        ),
    },
}
"""Tables 2 to 4 and A2 to A4: accuracies in the order of `MODES`, densities of "SIM" and "MED", and
accuracy and number of the decided at R = 10 of the same; "PRN" stands as "MED". For comparison."""

POST: dict[str, dict[str, tuple[tuple[float | None, ...], ...]]] = {
    "mnist": {
        "LBBNN-SSP-MF": (
            (0.967, 0.980, 0.982, 0.969, 0.980, 0.981),
            (0.090, 0.079),
            (0.999, 8346, 0.999, 8472),
        ),
        "LBBNN-SSP-MVN": (
            (0.967, 0.979, 0.980, 0.973, 0.978, 0.976),
            (0.180, 0.163),
            (1.000, 7994, 1.000, 8107),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.971, 0.978, 0.979, 0.973, 0.978, 0.978),
            (0.450, 0.449),
            (0.999, 8366, 0.999, 8645),
        ),
        "BNN-GP-CMF": ((0.982, 0.984, 0.983), (0.226,), (0.995, 9586)),
        "BNN-HP-MF": (
            (None, None, None, 0.967, 0.982, 0.966),
            (None, 0.194),
            (None, None, 1.000, 7),
        ),
    },
    "fashion_mnist": {
        "LBBNN-SSP-MF": (
            (0.863, 0.884, 0.882, 0.866, 0.885, 0.882),
            (0.120, 0.108),
            (0.995, 4932, 0.995, 4994),
        ),
        "LBBNN-SSP-MVN": (
            (0.859, 0.880, 0.876, 0.863, 0.878, 0.873),
            (0.156, 0.129),
            (0.996, 4615, 0.995, 4801),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.847, 0.875, 0.866, 0.846, 0.876, 0.864),
            (0.456, 0.455),
            (0.996, 4431, 0.996, 4426),
        ),
        "BNN-GP-CMF": ((0.897, 0.897, 0.896), (0.094,), (0.943, 8826)),
        "BNN-HP-MF": (
            (None, None, None, 0.867, 0.888, 0.868),
            (None, 0.302),
            (None, None, 1.000, 147),
        ),
    },
    "phoneme": {
        "LBBNN-SSP-MF": (
            (0.917, 0.927, 0.924, 0.924, 0.924, 0.925),
            (0.120, 0.108),
            (0.991, 703, 0.981, 772),
        ),
        "LBBNN-SSP-MVN": (
            (0.922, 0.931, 0.927, 0.923, 0.928, 0.924),
            (0.255, 0.225),
            (0.993, 682, 0.991, 691),
        ),
        "LBBNN-SSP-LFMVN": (
            (0.919, 0.929, 0.921, 0.917, 0.928, 0.917),
            (0.497, 0.497),
            (0.994, 678, 0.994, 676),
        ),
        "BNN-GP-CMF": ((0.882, 0.921, 0.877), (0.509,), (0.960, 189)),
        "BNN-HP-MF": (
            (None, None, None, 0.913, 0.917, 0.917),
            (None, 0.457),
            (None, None, 0.936, 37),
        ),
    },
}
"""Tables A8 to A10: the same after post-training. Rows of the horseshoe are those of its pruned
network alone, and the densities of PHONEME's first method are those of
FashionMNIST there. For comparison."""

INCLUSION: dict[str, dict[str, tuple[float, ...]]] = {
    "mnist": {
        "LBBNN-SSP-MF": (0.0844, 0.0959, 0.2945),
        "LBBNN-SSP-MVN": (0.2975, 0.0368, 0.1394),
        "LBBNN-SSP-LFMVN": (0.4474, 0.4525, 0.4815),
    },
    "fashion_mnist": {
        "LBBNN-SSP-MF": (0.1323, 0.1005, 0.2790),
        "LBBNN-SSP-MVN": (0.2461, 0.0392, 0.1462),
        "LBBNN-SSP-LFMVN": (0.4589, 0.4516, 0.4805),
    },
    "phoneme": {
        "LBBNN-SSP-MF": (0.3806, 0.3670, 0.4236),
        "LBBNN-SSP-MVN": (0.3201, 0.2287, 0.2763),
        "LBBNN-SSP-LFMVN": (0.4973, 0.4972, 0.4979),
    },
}
"""Table 5: mean inclusion probabilities by layer."""

PRUNED: dict[str, dict[float, tuple[float, float]]] = {
    "mnist": {
        1.0: (0.9811, 0.9811),
        0.5: (0.9803, 0.8717),
        0.226: (0.9660, 0.36915),
        0.194: (0.9613, 0.3232),
        0.18: (0.9571, 0.31685),
        0.163: (0.9507, 0.2976),
        0.09: (0.8005, 0.18235),
        0.079: (0.7773, 0.19055),
    },
    "fashion_mnist": {
        1.0: (0.8947, 0.8947),
        0.5: (0.8515, 0.29865),
        0.302: (0.6761, 0.17175),
        0.156: (0.41595, 0.1146),
        0.129: (0.3904, 0.10515),
        0.12: (0.39775, 0.0998),
        0.108: (0.3875, 0.10325),
        0.094: (0.3634, 0.0979),
    },
    "phoneme": {
        1.0: (0.9240, 0.9250),
        0.6: (0.9225, 0.8805),
        0.509: (0.9210, 0.8265),
        0.457: (0.9210, 0.8095),
        0.371: (0.9185, 0.7605),
        0.307: (0.9170, 0.7195),
        0.255: (0.9100, 0.6790),
        0.225: (0.9070, 0.6495),
    },
}
"""Tables A5 to A7: accuracy of point networks with pruned neurons and weights, by density."""

TABULAR: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "credit_approval": {
        "LBBNN-SSP-MF": (0.862, 0.812, 0.913, 0.446),
        "LBBNN-SSP-MVN": (0.855, 0.812, 0.913, 0.427),
        "LBBNN-SSP-LFMVN": (0.819, 0.739, 0.913, 0.500),
        "BNN-GP-MF": (0.841, 0.783, 0.899, 1.0),
    },
    "bank_marketing": {
        "LBBNN-SSP-MF": (0.907, 0.903, 0.917, 0.448),
        "LBBNN-SSP-MVN": (0.904, 0.895, 0.911, 0.428),
        "LBBNN-SSP-LFMVN": (0.911, 0.904, 0.917, 0.501),
        "BNN-GP-MF": (0.911, 0.907, 0.919, 1.0),
    },
    "adult": {
        "LBBNN-SSP-MF": (0.857, 0.853, 0.864, 0.456),
        "LBBNN-SSP-MVN": (0.857, 0.851, 0.862, 0.443),
        "LBBNN-SSP-LFMVN": (0.853, 0.848, 0.861, 0.500),
        "BNN-GP-MF": (0.851, 0.847, 0.856, 1.0),
    },
    "dry_bean": {
        "LBBNN-SSP-MF": (0.927, 0.913, 0.938, 0.455),
        "LBBNN-SSP-MVN": (0.928, 0.903, 0.939, 0.438),
        "LBBNN-SSP-LFMVN": (0.918, 0.905, 0.930, 0.501),
        "BNN-GP-MF": (0.934, 0.908, 0.943, 1.0),
    },
    "raisin": {
        "LBBNN-SSP-MF": (0.856, 0.833, 0.922, 0.445),
        "LBBNN-SSP-MVN": (0.850, 0.833, 0.922, 0.425),
        "LBBNN-SSP-LFMVN": (0.850, 0.833, 0.922, 0.501),
        "BNN-GP-MF": (0.878, 0.811, 0.922, 1.0),
    },
    "pistachio": {
        "LBBNN-SSP-MF": (0.932, 0.907, 0.958, 0.450),
        "LBBNN-SSP-MVN": (0.932, 0.916, 0.967, 0.430),
        "LBBNN-SSP-LFMVN": (0.930, 0.879, 0.967, 0.501),
        "BNN-GP-MF": (0.935, 0.921, 0.958, 1.0),
    },
}
"""Table A11: mean, least and largest accuracy over ten folds, of "MED SIM 10" (dense networks: "SIM
SIM 10"), and density."""


def markdown(found: list[Record]) -> str:
    """Return the tables of networks for images and phonemes."""
    parts = [
        make(name, select(found, dataset=name))
        for name in distinct(found, "dataset")
        for make in (_accuracies, _decided, _inclusion, _pruned)
    ]
    return "\n\n".join(part for part in parts if part)


def _methods(found: list[Record]) -> list[str]:
    return [m for m in METHODS if select(found, method=m)]


def _figures(name: str, found: list[Record]) -> dict[str, Any]:
    """Return the paper's figures, with or without post-training as in the records."""
    plain = any(r["plan"]["post"] == "none" for r in found)
    return (NETWORKS if plain else POST)[name]


def _epochs(found: list[Record]) -> str:
    return ", ".join(str(e) for e in sorted({r["epochs"] for r in found}))


def _schedule(found: list[Record]) -> str:
    counts = sorted({len(select(found, method=m)) for m in _methods(found)})
    runs = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    post = {r["plan"]["post"] for r in found} - {"none"}
    after = f", post-training '{post.pop()}' among them" if post else ""
    return f"{runs} run{'s' * (counts[-1] > 1)} of {_epochs(found)} epochs{after}"


def _spread(values: list[float], centre: Callable[..., Any] = np.median) -> str:
    """Format median or mean, minimum and maximum."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{centre(values):.3f} ({min(values):.3f}, {max(values):.3f})"


def _share(value: float) -> str:
    """Format a density or a probability, which may be very small."""
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"


def _beside(ours: str, theirs: float | int | None, digits: int = 3) -> str:
    return ours if theirs is None else f"{ours} [{theirs:.{digits}f}]"


def _scores(found: list[Record], mode: str, key: str) -> list[float]:
    return [
        r["modes"][mode][key]
        for r in found
        if mode in r["modes"] and r["modes"][mode][key] is not None
    ]


def _accuracies(name: str, found: list[Record]) -> str:
    rows = []
    for method in [m for m in _methods(found) if m != "FNN"]:
        own, paper = select(found, method=method), _figures(name, found).get(method)
        theirs = dict(zip(MODES, paper[0], strict=False)) if paper else {}
        rows.append(
            [
                method,
                *(
                    _beside(_spread(values), theirs.get(mode))
                    if (values := _scores(own, mode, "accuracy"))
                    else ""
                    for mode in MODES
                ),
                len(own),
            ]
        )
    return markdown_table(
        ["method", *MODES, "runs"],
        rows,
        f"Accuracy, {name}, {_schedule(found)}: median (least, largest) [the paper's]",
    )


def _decided(name: str, found: list[Record]) -> str:
    rows = []
    for method in [m for m in _methods(found) if m != "FNN"]:
        own, paper = select(found, method=method), _figures(name, found).get(method)
        seconds = [r["epoch_seconds"] for r in own if r["epoch_seconds"] is not None]
        for i, structure in enumerate(("SIM", "MED")):
            mode = f"{structure} SIM 10"
            if not _scores(own, mode, "decided"):
                continue
            right, number = paper[2][2 * i : 2 * i + 2] if paper else (None, None)
            density = _scores(own, f"{structure} SIM 1", "density")
            sure = _scores(own, mode, "decided_accuracy")
            rows.append(
                [
                    method,
                    mode,
                    _beside(f"{np.median(sure):.3f}" if sure else "none", right),
                    _beside(f"{np.median(_scores(own, mode, 'decided')):.0f}", number, 0),
                    _beside(_share(float(np.median(density))), paper[1][i] if paper else None),
                    f"{np.median(seconds):.1f}" if seconds else "",
                ]
            )
    return markdown_table(
        [
            "method",
            "mode",
            "accuracy of those",
            "labels given",
            "density of one draw",
            "seconds an epoch",
        ],
        rows,
        f"Labels given where the averaged probability exceeds 0.95, {name} [the paper's]",
    )


def _inclusion(name: str, found: list[Record]) -> str:
    rows = []
    for method in [m for m in _methods(found) if m.startswith("LBBNN")]:
        own = select(found, method=method)
        layers = list(own[0]["layers"])
        means = [np.median([r["layers"][at]["mean probability"] for r in own]) for at in layers]
        theirs = INCLUSION[name].get(method, (None,) * len(layers))
        rows.append(
            [method, *(_beside(_share(float(a)), b) for a, b in zip(means, theirs, strict=True))]
        )
    return markdown_table(
        ["method", "first", "second", "third"],
        rows,
        f"Mean inclusion probability by layer, {name} [the paper's]",
    )


def _pruned(name: str, found: list[Record]) -> str:
    own = select(found, method="FNN")
    if not own:
        return ""
    rows = []
    for density in own[0]["plan"]["densities"]:
        theirs = PRUNED[name].get(density, (None, None))
        rows.append(
            [
                f"{density:.3f}",
                *(
                    _beside(_spread(_scores(own, f"{structure} {density:g}", "accuracy")), figure)
                    for structure, figure in zip(("units", "weights"), theirs, strict=True)
                ),
                len(own),
            ]
        )
    return markdown_table(
        ["density", "neurons", "weights", "runs"],
        rows,
        f"Accuracy of the pruned point network, {name} [the paper's]",
    )


def tabular_markdown(found: list[Record]) -> str:
    """Return the table of the six tabular data sets."""
    rows = []
    for name in distinct(found, "dataset"):
        for method in _methods(select(found, dataset=name)):
            own = select(found, dataset=name, method=method)
            mode = (
                "weights 1"
                if method == "FNN"
                else ("MED SIM 10" if "MED SIM 10" in own[0]["modes"] else "SIM SIM 10")
            )
            paper = TABULAR[name].get(method)
            said = "" if paper is None else "{:.3f} ({:.3f}, {:.3f})".format(*paper[:3])
            rows.append(
                [
                    name,
                    method,
                    mode,
                    _spread(_scores(own, mode, "accuracy"), np.mean),
                    said,
                    _beside(
                        _share(float(np.mean(_scores(own, mode, "density")))),
                        None if paper is None else paper[3],
                    ),
                    str(len(own)),
                    f"{sum(r['seconds_in_all'] for r in own) / 60:.0f}",
                ]
            )
    return markdown_table(
        [
            "data",
            "method",
            "mode",
            "accuracy",
            "the paper's",
            "density [the paper's]",
            "folds",
            "minutes",
        ],
        rows,
        f"Accuracy, {_epochs(found)} epochs: mean (least, largest) over folds",
    )

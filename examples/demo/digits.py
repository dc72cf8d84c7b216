"""Handwritten digits: a classifier that abstains on digits that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from examples.demo.methods import choose_prior_scale, fit_methods
from examples.demo.section import Effort, Figure, Section, with_error
from subbayes import plots
from subbayes.comparison.comparison import Comparison
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.standard_errors import auroc_difference, auroc_with_error, standard_errors
from subbayes.likelihoods import Categorical
from subbayes.networks.mlp import MLP
from subbayes.plots.style import label_axes, legend, new_axes
from subbayes.reports.rendering import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from subbayes.predictions.predictive import Predictive


KNOWN = 8  # digits 0 to 7 are trained on, 8 and 9 are not
SIZES = (100, 200)  # training and validation rows
SCALES = (0.3, 0.5, 1.0, 2.0, 4.0)
METHODS = ("map", "ensemble", "pca", "optimal-laplace")
ROTATION = 30  # degrees
ANGLES = tuple(range(0, 91, 15))
ANSWERED = 0.4  # share of rows answered


@dataclass(frozen=True)
class _Digits:
    """Images of 8 × 8 pixels as rows from 0 to 1, with their labels."""

    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    unseen: tuple[np.ndarray, np.ndarray]

    @classmethod
    def split(cls, seed: int) -> _Digits:
        from sklearn.datasets import load_digits

        X, y = load_digits(return_X_y=True)
        X = (X / 16).astype(np.float32)
        known = np.random.default_rng(seed).permutation(np.flatnonzero(y < KNOWN))
        parts = np.split(known, np.cumsum(SIZES))
        return cls(*((X[rows], y[rows]) for rows in (*parts, np.flatnonzero(y >= KNOWN))))


def _rotate(images: np.ndarray, angle: float) -> np.ndarray:
    """The images, shape (N, 64), rotated by an angle in degrees."""
    from scipy.ndimage import rotate

    square = images.reshape(-1, 8, 8)
    turned = rotate(square, angle, axes=(1, 2), reshape=False, order=1)
    return turned.reshape(len(images), 64).astype(np.float32)


def abstention(seed: int, effort: Effort, progress: bool | None = None) -> Section:
    """Entropy as the reason to abstain: accuracy of what is answered, and AUROC."""
    digits, likelihood = _Digits.split(seed), Categorical(KNOWN)
    module = MLP(64, (32,), KNOWN, seed=seed)
    settings = effort.settings
    scale = choose_prior_scale(
        module, likelihood, digits.train, digits.validation, settings, SCALES, progress
    )
    training = replace(settings.training, prior_scale=scale)
    parts = digits.train, digits.validation, digits.test
    comparison = fit_methods(module, likelihood, parts, METHODS, training, effort, progress)
    rotated = _rotate(digits.test[0], ROTATION)
    groups = {
        key: {
            "known": comparison.predictives[key],
            "unseen": _predict(model, digits.unseen[0]),
            "rotated": _predict(model, rotated),
            "mixed": _predict(model, np.concatenate([digits.test[0], digits.unseen[0], rotated])),
        }
        for key, model in comparison.models.items()
    }
    return _section(digits, comparison, groups, scale)


def _predict(model: Predictor, images: np.ndarray) -> Predictive:
    return model.predict(torch.from_numpy(images))


Groups = dict[str, dict[str, "Predictive"]]


def _section(digits: _Digits, comparison: Comparison, groups: Groups, scale: float) -> Section:
    labels = np.concatenate([digits.test[1], digits.unseen[1], digits.test[1]])
    rows: list[list[str]] = []
    facts: dict[str, Any] = {}
    for key, group in groups.items():
        name = str(comparison.table.loc[key, "method"])
        errors = standard_errors(group["known"], digits.test[1])
        entropies = {kind: predictive.entropy for kind, predictive in group.items()}
        accuracy = float(comparison.table.loc[key, "accuracy"])
        answered, answered_error = _selective_accuracy(group["mixed"], labels)
        areas = {
            kind: auroc_with_error(entropies["known"], entropies[kind])
            for kind in ("unseen", "rotated")
        }
        gap, error = auroc_difference(
            (entropies["known"], entropies["unseen"]),
            tuple(groups["map"][kind].entropy for kind in ("known", "unseen")),  # type: ignore[arg-type]
        )
        facts[key] = {
            "accuracy": [accuracy, errors["accuracy"]],
            "answered": [answered, answered_error],
            "auroc": areas,
            "unseen_to_map": [gap, error],
        }
        rows.append(
            [
                name,
                with_error(accuracy, errors["accuracy"], 1, percent=True),
                with_error(answered, answered_error, 1, percent=True),
                with_error(*areas["unseen"], 3),
                with_error(gap, error, 3) if key != "map" else "",
                with_error(*areas["rotated"], 3),
            ]
        )
    best = max(facts, key=lambda key: facts[key]["auroc"]["unseen"][0])
    gap, error = facts[best]["unseen_to_map"]
    return Section(
        "digits",
        "A classifier that abstains",
        (
            f"A network trained on {SIZES[0]} images of the digits 0 to {KNOWN - 1} (scikit-learn's"
            f" digits, 8 × 8 pixels) meets {len(digits.test[1])} further images of them, and "
            f"{len(digits.unseen[1])} of the digits 8 and 9, which it cannot get right, and the "
            f"known digits rotated by {ROTATION} degrees. It answers where the entropy of its "
            "prediction is low, and abstains elsewhere. The prior scale "
            f"{scale:g} and the temperature were chosen on {SIZES[1]} validation images of known "
            "digits.",
        ),
        Table(
            [
                "method",
                "accuracy on 0 to 7",
                f"of {100 * ANSWERED:.0f} % answered",
                "AUROC of 8 and 9",
                "more than MAP",
                "AUROC of rotations",
            ],
            rows,
            "± one standard error over test images. AUROC: the probability that an image of the "
            "other kind has a higher entropy than one of a known digit, upright. "
            f"{100 * ANSWERED:.0f} % answered: accuracy of the images with the lowest entropy, "
            "among all three kinds together.",
        ),
        (
            f"Best at unseen digits: {comparison.table.loc[best, 'method']}, AUROC "
            f"{facts[best]['auroc']['unseen'][0]:.3f}, {gap:+.3f} ± {error:.3f} to the single "
            f"network{' (a tie)' if abs(gap) < 2 * error else ''}.",
        ),
        {
            "abstention": Figure(
                lambda: _draw_accuracy(comparison, groups, labels),
                "Accuracy of the images that are answered, of all three kinds together, against "
                "their share.",
            ),
            "rotation": Figure(
                lambda: _draw_rotation(digits, comparison),
                "Mean entropy of predictions for known digits that are rotated; bands: two "
                "standard errors. Digits on their side are doubted less than tilted ones.",
            ),
        },
        facts | {"prior_scale": scale},
    )


def _selective_accuracy(predictive: Predictive, labels: np.ndarray) -> tuple[float, float]:
    """Accuracy of the rows with the lowest entropy, and its standard error."""
    answered = np.argsort(predictive.entropy, kind="stable")[: int(ANSWERED * len(labels))]
    share = float(np.mean(predictive.labels[answered] == labels[answered]))
    return share, float(np.sqrt(share * (1 - share) / len(answered)))


def _draw_accuracy(comparison: Comparison, groups: Groups, labels: np.ndarray) -> Axes:
    ax = new_axes()
    for key, group in groups.items():
        name = str(comparison.table.loc[key, "method"])
        plots.selective_accuracy(group["mixed"], labels, label=name, ax=ax)
    ax.set_ylim(0.6, 1.01)
    return ax


def _draw_rotation(digits: _Digits, comparison: Comparison) -> Axes:
    ax = new_axes()
    for key, model in comparison.models.items():
        values = np.stack([_predict(model, _rotate(digits.test[0], a)).entropy for a in ANGLES])
        mean, half = values.mean(1), 2 * values.std(1) / np.sqrt(values.shape[1])
        (line,) = ax.plot(ANGLES, mean, "o-", label=str(comparison.table.loc[key, "method"]))
        ax.fill_between(ANGLES, mean - half, mean + half, color=line.get_color(), alpha=0.2)
    ax.set_xticks(ANGLES)
    return legend(label_axes(ax, "rotation in degrees", "entropy in nats"))

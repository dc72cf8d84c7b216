"""A trained classifier: one call that improves its probabilities and finds unlike inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import subbayes
from examples.demo.section import (
    Effort,
    Figure,
    Finding,
    Gain,
    Section,
    mean_with_error,
    with_error,
)
from subbayes import plots
from subbayes.baselines import point_estimate, temperature_scaling
from subbayes.diagnostics.standard_errors import auroc_difference, auroc_with_error
from subbayes.plots.style import grid
from subbayes.reports.rendering import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from subbayes.predictions.predictive import Predictive
    from subbayes.recommendation import Recommendation

SIZES = (300, 400)  # training and held-out rows
ALONE, SCALED, OURS = "the network alone", "temperature scaling", "recommend"
UNLIKE = 0.95


@dataclass(frozen=True)
class Digits:
    """Images of 8 × 8 pixels as rows of 64 numbers from 0 to 1, with their labels."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def split(cls, seed: int) -> Digits:
        """Divide the digits of scikit-learn at random."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(labels))
        x = torch.tensor(images[order] / 16, dtype=torch.float32)
        y = torch.tensor(labels[order])
        a, b = np.cumsum(SIZES)
        return cls((x[:a], y[:a]), (x[a:b], y[a:b]), (x[b:], y[b:]))

    def others(self, seed: int) -> dict[str, Tensor]:
        """Inputs of other kinds, made of the test images."""
        images = self.test[0].reshape(-1, 8, 8)
        noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(seed))
        turned = torch.rot90(images, 1, (1, 2))
        made = {"inverted digits": 1 - images, "turned digits": turned, "noise": noise}
        return {name: part.reshape(-1, 64) for name, part in made.items()}


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS = {"CNN": (_cnn, 3e-3), "perceptron": (_perceptron, 1e-2)}


def _train(make: Any, rate: float, digits: Digits, seed: int, epochs: int) -> nn.Module:
    """Train a network as anybody would, without this library."""
    torch.manual_seed(seed)
    x, y = digits.train
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net


def trained_classifier(seed: int, effort: Effort) -> Section:
    """What `recommend` makes of two trained networks, and its score of unlike inputs."""
    digits = Digits.split(seed)
    y = digits.test[1].numpy()
    lines: list[list[str]] = []
    gains: list[Gain] = []
    notes: list[Finding] = []
    facts: dict[str, Any] = {}
    predictions: dict[str, dict[str, Predictive]] = {}
    models: dict[str, dict[str, Any]] = {}
    for name, (make, rate) in NETWORKS.items():
        net = _train(make, rate, digits, seed, effort.classifier_epochs)
        started = time.perf_counter()
        model = subbayes.recommend(
            net, digits.train, validation=digits.held_out, likelihood="categorical"
        )
        seconds = time.perf_counter() - started
        scaled = temperature_scaling(net, digits.held_out, "categorical")
        models[name] = {ALONE: point_estimate(net, "categorical"), SCALED: scaled, OURS: model}
        found = {key: one.predict(digits.test[0]) for key, one in models[name].items()}
        predictions[name] = found
        scores = {key: one.log_prob(y) for key, one in found.items()}
        ours = scores[OURS]
        gain = {
            other: Gain.of(f"{name}: {OURS}", other, ours, scores[other])
            for other in (ALONE, SCALED)
        }
        gains += gain.values()
        kind = "good" if model.ships_stack else "tie"
        notes.append(Finding(kind, f"What it says of the {name}: {_sentence(model)}"))
        facts[name] = {"sentence": model.summary(), "seconds": seconds}
        for key, one in found.items():
            right = one.labels == y
            doubt = one.probabilities.max(1) - right
            facts[name][key] = {
                "log_score": mean_with_error(scores[key]),
                "accuracy": mean_with_error(right),
                "overconfidence": mean_with_error(doubt),
            }
            lines.append(
                [
                    f"{name}: {key}",
                    with_error(*mean_with_error(scores[key]), 3),
                    gain[key].to_text(unit=False) if key in gain else "",
                    with_error(*mean_with_error(right), 1, percent=True),
                    with_error(*mean_with_error(doubt), 1, percent=True),
                ]
            )
        notes.append(_calibration(name, found[OURS], y))
    name = "CNN"
    rows = _unlike(models[name], digits, digits.others(seed))
    facts["unlike"] = rows
    for kind, row in rows.items():
        gains.append(Gain("the score unlike(x)", f"entropy on {kind}", *row["gain"], "AUROC"))
    return Section(
        "classifier",
        "A trained classifier",
        (
            "A CNN and a perceptron for the digits of scikit-learn, trained on "
            f"{SIZES[0]} images with torch alone. One call, subbayes.recommend, compares what can "
            f"be done with them on {SIZES[1]} held-out images, and changes nothing that does not "
            f"surely help. Scores are of {len(y)} further images.",
            "The score unlike(x) says which inputs are unlike the training data: among inputs "
            "like them, one in twenty has a score above 0.95. It is compared with the entropy of "
            "the temperature-scaled network, which is what one would look at otherwise.",
        ),
        (
            Table(
                ["network", "log score", "gain of recommend", "accuracy", "confidence − accuracy"],
                lines,
                "± one standard error over test images; gains are paired, in nats an image. "
                "Confidence is the mean probability of the predicted class.",
            ),
            Table(
                [
                    "inputs of another kind",
                    "AUROC of unlike(x)",
                    "of entropy",
                    "difference",
                    "above 0.95",
                    "digits above 0.95",
                ],
                [
                    [
                        kind,
                        with_error(*row["unlike"], 3),
                        with_error(*row["entropy"], 3),
                        with_error(*row["gain"], 3),
                        with_error(*row["flagged"], 1, percent=True),
                        with_error(*row["false_alarms"], 1, percent=True),
                    ]
                    for kind, row in rows.items()
                ],
                "The CNN. AUROC, the area under the ROC curve, is the "
                "probability that an image of the other kind has a higher score than a digit; ± "
                "one standard error.",
            ),
        ),
        tuple(gains),
        tuple(notes),
        {
            "unlike": Figure(
                lambda: _draw_images(models[name][OURS], digits, digits.others(seed)),
                "The test digit of the median score and its variants (turned by 90 degrees), with "
                "their labels and scores.",
            ),
            "reliability": Figure(
                lambda: _draw_reliability(predictions[name], y),
                "Accuracy against confidence of the CNN. On the diagonal probabilities are right.",
            ),
        },
        facts,
    )


def _sentence(model: Recommendation) -> str:
    """The sentence of the recommendation, with layers of several priors counted once."""
    if not model.ships_stack:
        return model.summary()
    count = sum(row["weight"] > 0 for row in model.rows)
    return (
        f"the last layer solved again, an average over {count} candidates: {model.gain:+.3f} ± "
        f"{model.error:.3f} nats a row on {model.held_out} held-out rows over {model.reference}."
    )


def _calibration(name: str, predictive: Predictive, y: np.ndarray) -> Finding:
    gap, error = mean_with_error(predictive.probabilities.max(1) - (predictive.labels == y))
    text = f"{name}: confidence and accuracy differ by {with_error(gap, error, 1, percent=True)}"
    if abs(gap) <= 2 * error:
        return Finding("good", f"{text}, within two standard errors of 0.")
    return Finding("bad", f"{text}: it is {'over' if gap > 0 else 'under'}confident.")


def _unlike(
    models: dict[str, Any], digits: Digits, others: dict[str, Tensor]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Areas under ROC curves and shares above 0.95 by kind of input."""

    def scores(x: Tensor) -> dict[str, np.ndarray]:
        return {"unlike": models[OURS].unlike(x), "entropy": models[SCALED].predict(x).entropy}

    known, found = scores(digits.test[0]), {}
    for kind, x in others.items():
        other = scores(x)
        found[kind] = {key: auroc_with_error(known[key], other[key]) for key in known} | {
            "gain": auroc_difference(
                (known["unlike"], other["unlike"]), (known["entropy"], other["entropy"])
            ),
            "flagged": mean_with_error(other["unlike"] > UNLIKE),
            "false_alarms": mean_with_error(known["unlike"] > UNLIKE),
        }
    return found


def _draw_images(model: Recommendation, digits: Digits, others: dict[str, Tensor]) -> Axes:
    kinds = {"digit": digits.test[0], **others}
    scores = model.unlike(digits.test[0])
    middle = int(np.argsort(scores, kind="stable")[len(scores) // 2])
    (axes,) = grid(1, len(kinds), width=1.7, height=2.3)
    for ax, (kind, x) in zip(axes, kinds.items(), strict=True):
        row = x[middle : middle + 1]
        ax.imshow(1 - row.reshape(8, 8), cmap="gray", vmin=0, vmax=1)
        ax.set_axis_off()
        label, score = model.predict(row).labels[0], model.unlike(row)[0]
        ax.set_title(f"{kind.split()[0]}\n“{label}”, unlike {score:.2f}", fontsize=9)
    return axes[0]


def _draw_reliability(predictions: dict[str, Predictive], y: np.ndarray) -> Axes:
    ax = plots.reliability(predictions[ALONE], y, label=ALONE)
    return plots.reliability(predictions[OURS], y, label=OURS, ax=ax)

"""One input: uncertainty between and beyond the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from examples.demo.section import Figure, Section
from subbayes import plots
from subbayes.inference.configuration import Sampling
from subbayes.models.fit import fit
from subbayes.networks.mlp import MLP
from subbayes.plots.style import legend
from subbayes.reports.rendering import Table
from subbayes.training.configuration import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from subbayes.models.fitted import FittedModel


NOISE = 0.1
PLACES = {"in the data": (-2.0, 1.75), "between": (0.0,), "beyond": (-4.0, 3.5)}


def _truth(x: np.ndarray) -> np.ndarray:
    return np.sin(1.5 * x) + 0.3 * x


def between_and_beyond(seed: int, epochs: int) -> Section:
    """Linearised Laplace over all weights, fitted to two groups of points."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-3, -1, 30), rng.uniform(1, 2.5, 30)])
    y = _truth(x) + NOISE * rng.normal(size=len(x))
    model = fit(
        MLP(1, (32,), 1, activation="tanh", seed=seed),
        (torch.from_numpy(x).float()[:, None], torch.from_numpy(y).float()),
        likelihood="gaussian",
        subspace="full",
        inference="laplace-linearised",
        prior="evidence",
        training=Training(epochs=epochs, learning_rate=1e-2, swa_epochs=0, prior_scale=1.0),
        sampling=Sampling(seed=seed, progress=False),
    )
    rows, facts = [], {}
    for place, points in PLACES.items():
        predictive = model.predict(torch.tensor(points)[:, None])
        epistemic = float(np.sqrt(np.mean(predictive.epistemic)))
        aleatoric = float(np.sqrt(np.mean(predictive.aleatoric)))
        rows.append([place, f"{epistemic:.3f}", f"{aleatoric:.3f}"])
        facts[place] = {"epistemic": epistemic, "aleatoric": aleatoric}
    ratio = facts["between"]["epistemic"] / facts["in the data"]["epistemic"]
    return Section(
        "curve",
        "Between and beyond the data",
        (
            "A network of one hidden layer of 32 units, trained on 60 points in two groups. "
            "Linearised Laplace over all its weights, with the prior scale of the largest "
            "evidence, adds the uncertainty of the curve to the noise: it is small where there "
            "are data, and grows between and beyond them.",
        ),
        Table(
            ["place", "sd of the curve", "sd of the noise"],
            rows,
            "Standard deviations of the posterior, in closed form, without Monte Carlo error. The "
            f"noise of the data is {NOISE:g}.",
        ),
        (f"The curve is {ratio:.1f} times as uncertain between the groups as in them.",),
        {
            "curve": Figure(
                lambda: _draw(model, x, y),
                "Mean and 95 % band of observations. Dashed: the curve that the points were drawn "
                "from.",
            )
        },
        facts,
    )


def _draw(model: FittedModel, x: np.ndarray, y: np.ndarray) -> Axes:
    place = np.linspace(-5, 4.5, 200)
    predictive = model.predict(torch.from_numpy(place).float()[:, None])
    ax = plots.bands(predictive, place, data=(x, y))
    ax.plot(place, _truth(place), "k--", linewidth=1.0, label="true curve")
    ax.set_ylim(-4, 4)
    return legend(ax)

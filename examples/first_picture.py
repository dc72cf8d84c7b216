"""The picture of the first page: a band for a table, and answers that a classifier may withhold.

python -m examples.first_picture docs/images/first.png
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import nn

import subbayes
from subbayes import TableRegressor, plots


def band(ax: Axes) -> None:
    """A table of one column, whose noise grows, and in which a range is missing."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-1, 0, 90), rng.uniform(0.5, 1, 60)])
    y = np.sin(5 * x) + (0.1 + 0.25 * (x > 0.5)) * rng.standard_normal(len(x))
    model = TableRegressor(random_state=0).fit(x[:, None], y)
    line = np.linspace(-1.4, 1.4, 300)
    plots.bands(model.predict_dist(line[:, None]), line, data=(x, y), ax=ax)


def withheld(ax: Axes) -> None:
    """A trained classifier of digits, and what `recommend` makes of it."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32)
    y = torch.tensor(labels[order])
    train, held_out, test = slice(0, 300), slice(300, 700), slice(700, None)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[train]), y[train]).backward()
        optimizer.step()
    model = subbayes.recommend(
        net, (x[train], y[train]), validation=(x[held_out], y[held_out]), likelihood="categorical"
    )
    print(model.summary())
    plots.selective_accuracy(model.predict(x[test]), y[test].numpy(), label="digits", ax=ax)


def main() -> None:
    """Draw both and save them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ((left, right),) = plots.grid(1, 2)
        band(left)
        withheld(right)
    plots.save(left, sys.argv[1])


if __name__ == "__main__":
    main()

"""Names with "$" are shown as they are, in labels, ticks and legends."""

import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from subbayes import Sampling, plots
from subbayes.plots.style import label_axes, legend, new_axes, png
from subbayes.regression import Regression
from subbayes.utils.text_table import shortened


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name",
    [
        "$\\frac{$",
        "price in $ and $",
        "a_$b$",
        "$\\mathdefault{a}$ $\\frac{$",
        "$\\mathdefault{" + 450 * "{",
    ],
)
def test_names_are_not_parsed_as_mathematics(name):
    ax = plots.feature_inclusion(pd.Series({name: 0.9, "other": 0.1}))
    ax.plot([0, 1], [0, 1], label=name)
    legend(label_axes(ax, name, name))
    assert png(ax)[1:4] == b"PNG"
    shown = [text.get_text().replace("\\$", "$") for text in ax.get_yticklabels()]
    assert shortened(name) in shown
    assert ax.get_xlabel().replace("\\$", "$") == name


@pytest.mark.usefixtures("unchecked")
def test_figures_of_effects_can_be_written_by_matplotlib_itself():
    name, rng = "$\\bad{$", np.random.default_rng(0)
    frame = pd.DataFrame({"band": np.repeat([name, "b", "c"], 20), "y": rng.normal(size=60)})
    sampling = Sampling(draws=50, chains=2, progress=False)
    model = Regression("y ~ re(band)").fit(frame, sampling=sampling)
    figure = model.plot()
    figure.savefig(io.BytesIO(), format="png")
    shown = [text.get_text().replace("\\$", "$") for text in figure.axes[0].get_xticklabels()]
    assert name in shown
    ax = plots.feature_inclusion(pd.Series({name: 0.9, "other": 0.1}))
    ax.figure.savefig(io.BytesIO(), format="png")


def test_labels_of_axes_of_the_user_stay_mathematics():
    ax = new_axes()
    ax.set_title("$x^2$")
    plots.feature_inclusion(pd.Series({"a": 0.9, "b": 0.1}), ax=ax)
    assert ax.get_title() == "$x^2$"


def test_ticks_of_logarithmic_axes_stay_mathematics():
    ax = new_axes()
    ax.loglog(np.logspace(-3, 3, 9), np.ones(9))
    png(ax)
    ticks = [text.get_text() for text in ax.get_xticklabels()]
    assert any(text.startswith("$\\mathdefault{10^{") for text in ticks)
    plt.close(ax.figure)

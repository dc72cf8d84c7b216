"""Names with "$" are shown as they are, in labels, ticks and legends."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from subbayes import plots
from subbayes.plots.style import label_axes, legend, new_axes, png
from subbayes.utils.text_table import shortened


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


def test_ticks_of_logarithmic_axes_stay_mathematics():
    ax = new_axes()
    ax.loglog(np.logspace(-3, 3, 9), np.ones(9))
    png(ax)
    ticks = [text.get_text() for text in ax.get_xticklabels()]
    assert any(text.startswith("$\\mathdefault{10^{") for text in ticks)
    plt.close(ax.figure)

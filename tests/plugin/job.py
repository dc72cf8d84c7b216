"""What a user of two packages does; the other one is found by its entry points."""

import sys
import warnings
from pathlib import Path

import numpy as np
import torch

import subbayes
from subbayes.comparison import compare_methods
from subbayes.reports.model_report import write_report


def main():
    """Fit, save, load, report and compare."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    y = x[:, 0] + 0.3 * torch.randn(80, generator=generator)
    assert "subbayes_plugin" not in sys.modules

    sampling = subbayes.Sampling(draws=20, chains=2, warmup=20, progress=False, mode="eager")
    training = subbayes.Training(epochs=5, swa_epochs=3)
    net = subbayes.MLP(2, (4,), 1, seed=0)
    options = {"training": training, "sampling": sampling, "likelihood": "laplacian"}
    model = subbayes.fit(net, (x, y), subspace="stripes", inference="random-walk", **options)
    assert model.label == "stripes + random walk"
    assert "3 stripes of weights" in model.describe()["subspace"]

    assert "a random walk needs thousands of draws: raise draws=..." in model.warnings()

    loaded = subbayes.load(model.save(folder / "model"))
    assert repr(loaded.likelihood) == "Laplacian(0.5)"
    assert type(loaded.subspace).__name__ == "StripedSubspace"
    np.testing.assert_array_equal(loaded.predict(x).mean, model.predict(x).mean)
    loaded.with_data((x, y))  # the density of the saved draws is that of the data
    page = write_report(loaded, folder / "report.html", test=(x, y)).read_text()
    assert "3 stripes of weights" in page

    names = ["map", "rounded", "stripes", "pca-random-walk"]
    found = compare_methods(
        net, "laplacian", (x, y), (x, y), methods=names, training=training, sampling=sampling
    )
    assert list(found.table.index) == names
    assert "rounded weights" in found.to_text()
    print("done")


if __name__ == "__main__":
    main()

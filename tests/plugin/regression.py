"""What a user of two packages does with the family of one of them."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

import subbayes
from subbayes.cli import run
from subbayes.likelihoods import as_likelihood
from subbayes.likelihoods.families import family_from_name
from subbayes.regression import Regression


def main():
    """Fit, summarise, predict, save and load."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    x = rng.standard_normal(300)
    y = 1 + 0.5 * x + stats.gumbel_r(0, 0.7).rvs(300, random_state=rng)
    rows = pd.DataFrame({"x": x, "y": y})
    rows.to_csv(folder / "rows.csv", index=False)

    assert "subbayes_plugin" not in sys.modules
    sampling = subbayes.Sampling(draws=400, chains=2, progress=False)
    model = Regression("y ~ x", family="gumbel").fit(rows, sampling=sampling)
    effects = model.summary()["mean"]
    assert abs(effects["x"] - 0.5) < 0.15
    assert abs(effects["sigma"] - 0.7) < 0.15

    loaded = Regression.load(model.save(folder / "model"))
    found = loaded.predict(rows)
    np.testing.assert_array_equal(found.mean, model.predict(rows).mean)
    level = np.euler_gamma * 0.7 + 1 + 0.5 * x
    assert np.abs(found.mean.ravel() - level).mean() < 0.2

    # defaults that follow from the density and the distribution of SciPy
    family, eta = family_from_name("gumbel"), torch.tensor([[0.5, -0.2]]).double()
    scale = np.exp(-0.2)
    frozen = stats.gumbel_r(0.5, scale)
    np.testing.assert_allclose(family.mean(eta), [[frozen.mean()]])
    np.testing.assert_allclose(family.variance(eta), [[frozen.var()]])
    np.testing.assert_allclose(family.quantiles(eta, 0.3), [[frozen.ppf(0.3)]])
    np.testing.assert_allclose(family.cdf(eta, torch.ones(1)), [[frozen.cdf(1.0)]])
    gamma = np.euler_gamma
    fisher = [[1, gamma - 1], [gamma - 1, np.pi**2 / 6 + (1 - gamma) ** 2]]
    fisher = np.array(fisher) / [[scale**2, scale], [scale, 1]]
    np.testing.assert_allclose(family.curvature(eta)[0], fisher, rtol=1e-4)

    net = subbayes.MLP(1, (4,), 1, seed=0)
    likelihood = as_likelihood("gumbel").for_outputs(1, torch.from_numpy(y))
    assert likelihood.init_parameters(torch.from_numpy(y)).shape == (1,)
    fitted = subbayes.fit(
        net,
        (x[:, None].astype("float32"), y.astype("float32")),
        likelihood="gumbel",
        training=subbayes.Training(epochs=3, swa_epochs=2),
        sampling=subbayes.Sampling(draws=20, chains=2, progress=False, mode="eager"),
    )
    again = subbayes.load(fitted.save(folder / "network"))
    assert repr(again.likelihood) == repr(fitted.likelihood)
    words = ["regress", str(folder / "rows.csv"), "y ~ x", "--family", "gumbel", "--quiet"]
    assert run([*words, "--draws", "300", "--out", str(folder / "out")]) == 0
    assert list((folder / "out").iterdir())

    from regression_job import main as fit_with_a_term_and_a_prior  # of this script's folder

    (folder / "term").mkdir()
    fit_with_a_term_and_a_prior(folder / "term")
    print("done")


if __name__ == "__main__":
    main()

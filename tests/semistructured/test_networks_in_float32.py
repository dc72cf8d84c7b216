"""Networks in float32: effects, design and densities are in float64 beside them."""

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import MLP, Sampling, SemiStructuredRegression, Training, load
from subbayes.priors import Normal
from subbayes.regression import NormalPrior
from subbayes.semistructured import SemiStructuredSubspace
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.subspace import JointSpace
from subbayes.subspace import DenseSubspace, JointSubspace

TRAINING = Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None)
pytestmark = pytest.mark.filterwarnings("ignore:effects have not mixed")


def table(mean, n=60):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n)})
    frame["y"] = mean + frame.x + np.sin(2 * frame.z) + 0.5 * rng.normal(size=n)
    return frame


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mean", "priors"),
    [
        (0.0, None),
        (1e5, None),
        (1e6, None),
        (1e6, {"Intercept": NormalPrior(0.0, 1e9)}),  # the coordinate has to keep its digits too
    ],
)
def test_the_density_along_the_intercept_is_that_of_float64(mean, priors):
    frame = table(mean)
    found = []
    for dtype in (torch.float32, torch.float64):
        deep = {"net": MLP(1, (4,), 1, seed=0).to(dtype)}
        model = SemiStructuredRegression(
            "y ~ x + net(z)", family="student-t", networks=deep, priors=priors
        )
        rows = model.specification.prepare(frame, None)
        inner = DenseSubspace(torch.zeros(13).to(dtype), torch.eye(13)[:2].to(dtype))
        subspace = JointSubspace(inner, rows.structured.size)
        start = np.zeros((1, subspace.rank))
        space = JointSpace(subspace, Normal(np.ones(subspace.rank)), start, 2)
        found.append(JointPosterior(rows, space, 1))
    z = np.tile(found[1].start_points(1)[0], (41, 1))
    scale = found[0].model.structured.priors["Intercept"].scale
    z[:, 2] += np.linspace(-0.2, 0.2, 41) / scale
    values, gradients = zip(*(one.density.value_and_grad(z) for one in found), strict=True)
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=2e-4)  # of the networks' outputs
    np.testing.assert_allclose(gradients[0][:, 2:], gradients[1][:, 2:], rtol=1e-4, atol=1e-3)
    change = np.diff(values[0]) - np.diff(values[1])
    assert np.abs(change).max() < 1e-6 * np.abs(values[1]).max()
    assert (np.diff(np.diff(values[0])) < 0).all()  # concave: no steps


@pytest.mark.slow
def test_predictions_contributions_and_saved_models_keep_the_digits(tmp_path):
    """The same model with a response that is shifted by 1e6 is shifted by 1e6."""
    sampling = Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager")
    found = []
    for mean in (0.0, 1e6):
        deep = {"net": MLP(1, (4,), 1, seed=0)}
        model = SemiStructuredRegression("y ~ x + net(z)", family="student-t", networks=deep)
        quick = {"inference": "elliptical-slice", "sampling": sampling, "training": TRAINING}
        model.fit(table(mean), subspace=SemiStructuredSubspace(2), **quick)
        new = table(mean).head()
        assert model.state.model.inputs["design"].dtype == torch.float64
        assert model.state.model.inputs["deep net"].dtype == torch.float32
        predicted, parts = model.predict(new).mean, model.contributions(new)
        total = parts["structured"]["mean"] + parts["deep"]["mean"]
        np.testing.assert_allclose(total, parts["predictor"]["mean"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(predicted, total, rtol=0, atol=1e-4)
        again = load(model.save(tmp_path / f"{mean}"))
        np.testing.assert_array_equal(again.predict(new).mean, predicted)
        found.append(np.asarray(predicted) - mean)
    assert np.abs(found[1] - found[0]).max() < 3  # of one scale: draws differ

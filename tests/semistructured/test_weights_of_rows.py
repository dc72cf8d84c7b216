"""A row of weight k is k equal rows: in the columns of terms, and in means of networks."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from subbayes import Sampling, SemiStructuredRegression, Training
from subbayes.likelihoods.families import FAMILIES
from subbayes.regression import Regression
from subbayes.regression.design.default_priors import default_priors
from subbayes.regression.design.design import Design

pytestmark = pytest.mark.filterwarnings("ignore:.*have not mixed")
rng = np.random.default_rng(0)
N = 60
FRAME = pd.DataFrame(
    {
        "x": rng.exponential(size=N),
        "z": rng.normal(3, 1, N),
        "k": rng.integers(0, 4, N),
        "g": np.tile(list("uvw"), N // 3),
    }
)
COUNTS = np.where(FRAME.x < 0.5, 20, 1)
REPEATED = FRAME.loc[np.repeat(FRAME.index, COUNTS)].reset_index(drop=True)
TERMS = (
    "s(x)", "s(x, df=6)", "s(x, bs='ps', k=6)", "s(x, bs='cr', k=6)", "s(x, bs='cc', k=6)",
    "s(x, bs='tp', k=6)", "s(x, z, k=8)", "te(x, z, k=4)", "ti(x, z, k=4)", "s(x, by=z, k=5)",
    "s(x, by=g, k=5)", "ti(x, z, by=g, k=4)", "te(x, z, by=g, k=4)", "gp(x)", "mo(k)",
    "(1 + x | g)", "(x + z | g)", "(x || g)", "re(g)", "(0 + x | g)",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* effects of groups are")
@pytest.mark.parametrize("term", TERMS)
def test_terms_learn_from_a_row_of_weight_k_as_from_k_rows(term):
    weights = COUNTS.astype(float)
    found = Design({"mu": f"1 + {term}"}, FRAME, weights=weights)
    expected = Design({"mu": f"1 + {term}"}, REPEATED)
    assert found.names == expected.names
    tight = {"rtol": 1e-6, "atol": 1e-7}
    np.testing.assert_allclose(found.matrix(FRAME)[0], expected.matrix(FRAME)[0], **tight)
    np.testing.assert_allclose(found.prior_scale, expected.prior_scale, **tight)
    for a, b in zip(found.terms, expected.terms, strict=True):
        if a.law is not None:
            np.testing.assert_allclose(
                [part.scale for part in a.law.hyperparameters],
                [part.scale for part in b.law.hyperparameters],
            )
            if hasattr(a.law, "means"):
                np.testing.assert_allclose(a.law.means, b.law.means)
    y, family = np.sin(FRAME.x.to_numpy()), FAMILIES["normal"]()
    priors = default_priors(found, family, y, weights=weights)
    repeated = default_priors(expected, family, np.repeat(y, COUNTS))
    assert priors.keys() == repeated.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize("bs", ["ps", "cr"])
def test_smooths_of_weighted_rows_have_the_posterior_of_repeated_rows(bs):
    y = np.exp(-FRAME.x) * 3 + 0.2 * rng.normal(size=N)
    rows = FRAME.assign(y=y, w=COUNTS)
    repeated = rows.loc[np.repeat(rows.index, COUNTS)].reset_index(drop=True)
    few = Sampling(draws=50, chains=2, seed=1, progress=False)
    term, found = f"s(x, bs='{bs}', k=6)", []
    for data, weights in ((rows, "w"), (repeated, None)):
        model = Regression(f"y ~ {term}", weights=weights)
        found.append(model.fit(data, sampling=few).summary()[["mean", "sd"]])
    pd.testing.assert_frame_equal(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("effects", ["sample", "population"])
def test_partial_dependences_have_the_weighted_mean_0(orthogonal, effects):
    rows = FRAME.assign(y=FRAME.x + rng.normal(size=N), w=COUNTS)
    options = {"weights": "w", "orthogonal": orthogonal, "effects": effects}
    deep = {"net": nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))}
    model = SemiStructuredRegression("y ~ x + net(x)", networks=deep, **options)
    model.fit(
        rows,
        sampling=Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
        training=Training(epochs=5, batch_size=None, clip_norm=None),
    )
    found = model.effect("net", rows["x"].tolist()).draws
    assert np.abs(found @ COUNTS / COUNTS.sum()).max() < 1e-5
    assert np.abs(found.mean(1)).max() > 1e-3


def test_partial_dependences_average_over_weighted_rows():
    """A network of two columns, without weights to learn, by its own average."""
    rows = FRAME.assign(y=FRAME.x + rng.normal(size=N), w=COUNTS)

    class Product(nn.Module):
        def forward(self, inputs):
            return inputs[:, :1] * inputs[:, 1:].square()

    model = SemiStructuredRegression(
        "y ~ x + net(x, z)", networks={"net": Product()}, weights="w", orthogonal=False
    )
    model.fit(rows, sampling=Sampling(draws=6, chains=2, progress=False))
    found = model.effect("net", [0.0, 2.0], variable="x").draws
    state = model.state.model
    encoded = state.encoder.encode_columns("net", rows).double().numpy()
    slope = np.average(encoded[:, 1] ** 2, weights=COUNTS)
    scale = float(state.deep._scales[0])
    step = 2.0 / FRAME.x.std(ddof=0)
    np.testing.assert_allclose(found[:, 1] - found[:, 0], slope * step * scale, rtol=1e-5)
    assert isinstance(state.row_weights, torch.Tensor)


@pytest.mark.few(1)
def test_reports_and_lines_weigh_rows_as_scores_do(tmp_path):
    frame = FRAME.assign(y=FRAME.z, w=np.where(FRAME.z > 3, 1000.0, 1.0))
    sampling = Sampling(draws=20, chains=2, progress=False)
    model = Regression("y ~ x + z", weights="w").fit(frame, sampling=sampling)
    heavy = frame.z[frame.w > 1]
    groups = model.conditional_effect("x", by="z").groups
    np.testing.assert_allclose(groups, np.quantile(heavy, [0.1, 0.5, 0.9]), atol=0.1)
    test = frame.assign(w=np.where(np.arange(N) < 30, 10.0, 0.0))
    model.report(tmp_path / "page.html", test=test)
    page = (tmp_path / "page.html").read_text()
    scores = model.score_samples(test)[:30]
    assert f"{N} test rows, mean per row</td><td>{scores.mean():.3f}</td>" in page
    assert scores.mean() == pytest.approx(model.evaluate(test)["log_likelihood"])


@pytest.mark.parametrize("family", ["normal", "bernoulli"])
def test_reports_score_beside_an_intercept_alone(tmp_path, family):
    y = FRAME.x + FRAME.z if family == "normal" else FRAME.x + FRAME.z > FRAME.z.mean()
    frame = FRAME.assign(y=y)
    sampling = Sampling(draws=250, chains=4, progress=False)
    model = Regression("y ~ x + z", family=family).fit(frame, sampling=sampling)
    alone = Regression("y ~ 1", family=family).fit(frame, sampling=sampling)
    gains = model.score_samples(frame) - alone.score_samples(frame)
    left_out, error = model.loo().difference(alone.loo())
    page = model.report(tmp_path / "page.html", test=frame).read_text()
    se = gains.std(ddof=1) / N**0.5
    assert f"<td>{gains.mean():.3f}</td><td>{se:.3f}</td>" in page
    assert f"<td>{left_out / N:.3f}</td><td>{error / N:.3f}</td>" in page
    assert f"{gains.mean():+.3f}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{se:.3f} nats" in page
    assert "the terms improve predictions" in page

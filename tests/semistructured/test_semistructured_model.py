"""Semi-structured regression end to end: closed forms, offsets, identifiability, bad input."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from experiments.ssr_spaces import NaiveSubspace
from subbayes import InputError, Training
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.smc import SMC
from subbayes.regression import Exponential, NormalPrior, Regression
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.subspace import train_networks

SHORT = Training(epochs=20, batch_size=None, weight_decay=1e-4, clip_norm=None)
pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations
QUICK = {
    "sampling": Sampling(draws=10, chains=2, warmup=5, progress=False, mode="eager"),
    "training": SHORT,
}


def table(n=80, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"x": rng.normal(2, 3, n), "sex": rng.choice(["f", "m"], n), "u": rng.uniform(-2, 2, n)}
    )
    eta = 0.4 + 0.3 * frame.x - 0.5 * (frame.sex == "m")
    frame["y"] = eta + 0.7 * rng.normal(size=n)
    frame["count"] = rng.poisson(np.exp(0.3 * eta))
    return frame


def net(width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


def close(draws, mean, covariance, factor=5.0):
    """Check means and covariances within `factor` standard errors of the effective sample."""
    flat = draws.reshape(-1, draws.shape[-1])
    n = len(flat) / 2
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(flat.mean(0) - mean) < factor * sd / np.sqrt(n))
    found = np.cov(flat, rowvar=False)
    error = np.sqrt((np.outer(sd, sd) ** 2 + covariance**2) / n)
    assert np.all(np.abs(found - covariance) < factor * error)


# --- without a network it is a generalised linear model ------------------------------------------


def test_a_normal_model_matches_its_conjugate_posterior():
    """Coefficients given sigma are Gaussian; sigma on a grid."""
    frame = table()
    priors = {"Intercept": NormalPrior(0.0, 2.0), "x": 0.5, "C(sex)": 1.0}
    model = Regression("y ~ x + C(sex)", priors=priors).fit(
        frame, sampling=Sampling(draws=500, chains=4, progress=False)
    )
    x = np.column_stack(
        [np.ones(80), frame.x - frame.x.mean(), (frame.sex == "m") - (frame.sex == "m").mean()]
    )
    inverse = np.diag([1 / 4, 1 / 0.25, 1.0])
    y, grid = frame.y.to_numpy(), np.linspace(0.3, 1.4, 2000)
    logs, means, covs = [], [], []
    for sigma in grid:
        covariance = np.linalg.inv(x.T @ x / sigma**2 + inverse)
        mean = covariance @ x.T @ y / sigma**2
        whole = sigma**2 * np.eye(80) + x @ np.diag([4, 0.25, 1.0]) @ x.T
        means.append(mean)
        covs.append(covariance)
        _, log_det = np.linalg.slogdet(whole)
        logs.append(
            -0.5 * (log_det + y @ np.linalg.solve(whole, y)) - sigma / y.std()
        )  # the default prior of sigma
    w = np.exp(np.array(logs) - max(logs))
    w /= w.sum()
    mean = w @ np.array(means)
    cov = np.einsum("s,sij->ij", w, np.array(covs)) + np.cov(
        np.array(means).T, aweights=w, bias=True
    )
    turn = np.eye(3)
    turn[0, 1:] = [-frame.x.mean(), -(frame.sex == "m").mean()]  # the uncentred intercept
    found = model.effects()
    drawn = np.stack([found[k] for k in ("Intercept", "x", "C(sex)[T.m]")], -1)
    close(drawn, turn @ mean, turn @ cov @ turn.T)
    sigma_mean = w @ grid
    sigma_sd = np.sqrt(w @ (grid - sigma_mean) ** 2)
    close(found["sigma"][..., None], np.array([sigma_mean]), np.array([[sigma_sd**2]]))
    row = model.summary().loc["x"]
    assert row["hdi 95% low"] < row["mean"] < row["hdi 95% high"]
    assert row["rhat"] < 1.02


def test_effects_given_a_fixed_sigma_match_their_normal_posterior(tmp_path):
    """No coordinate is left once the coefficients are integrated out."""
    frame = table()
    formulas, priors = {"mu": "y ~ 0 + x + z", "sigma": "0"}, {"x": 0.5, "z": 0.5}
    frame["z"] = np.cos(np.arange(80.0))
    model = Regression(formulas, priors=priors).fit(
        frame, sampling=Sampling(draws=500, chains=4, progress=False)
    )
    x = frame[["x", "z"]].to_numpy()
    covariance = np.linalg.inv(x.T @ x + np.eye(2) / 0.25)
    drawn = np.stack([model.effects()[name] for name in ("x", "z")], -1)
    close(drawn, covariance @ x.T @ frame.y.to_numpy(), covariance)
    model.save(tmp_path / "model")
    assert list(model.summary().index) == ["x", "z"]
    means = [one.predict(frame).mean for one in (model, Regression.load(tmp_path / "model"))]
    np.testing.assert_array_equal(*means)


@pytest.mark.few(1)
@pytest.mark.parametrize("inference", ["hmc", "nuts", "elliptical-slice"])
def test_a_poisson_model_with_exposure_matches_a_grid(inference):
    """Against a grid over intercept and slope."""
    frame = table().assign(time=lambda d: np.linspace(0.5, 2, len(d)))
    priors = {"Intercept": NormalPrior(0.0, 1.0), "x": 0.3}
    draws = 2000 if inference == "elliptical-slice" else 400
    model = Regression("count ~ x", family="poisson", priors=priors, exposure="time").fit(
        frame, inference=inference, sampling=Sampling(draws=draws, chains=4, progress=False)
    )
    a, b = np.meshgrid(np.linspace(-1, 1.5, 400), np.linspace(-0.3, 0.5, 400), indexing="ij")
    eta = a[..., None] + b[..., None] * (frame.x - frame.x.mean()).to_numpy()
    rate = np.exp(eta) * frame.time.to_numpy()
    log = (frame["count"].to_numpy() * np.log(rate) - rate).sum(-1) - 0.5 * (a**2 + (b / 0.3) ** 2)
    w = np.exp(log - log.max()).reshape(-1)
    w /= w.sum()
    points = np.column_stack([(a - b * frame.x.mean()).reshape(-1), b.reshape(-1)])
    mean = w @ points
    cov = np.cov(points.T, aweights=w, bias=True)
    found = model.effects()
    drawn = np.stack([found["Intercept"], found["x"]], -1)
    close(drawn[:, :: 6 if inference == "elliptical-slice" else 1], mean, cov)
    expected = np.exp(points @ np.array([1.0, 3.0])) @ w * 2.0
    predicted = model.predict(pd.DataFrame({"x": [3.0], "time": [2.0]})).mean[0]
    assert predicted == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_a_frozen_network_is_an_offset():
    frame = table()
    module = net().requires_grad_(False)
    values = frame[["u"]].to_numpy(dtype=np.float32)
    with torch.no_grad():
        scaled = torch.from_numpy((values - values.mean()) / values.std(ddof=0))
        added = module(scaled)[:, 0].numpy()
    options = {"sampling": Sampling(draws=300, chains=4, progress=False)}
    beside = SemiStructuredRegression(
        "count ~ x + net(u)", networks={"net": module}, family="poisson"
    ).fit(frame, **options)
    plain = Regression("count ~ x", family="poisson", offset="o").fit(
        frame.assign(o=added), **options
    )
    one, two = beside.effects(), plain.effects()
    drawn = np.stack([two["Intercept"], two["x"]], -1).reshape(-1, 2)
    close(np.stack([one["Intercept"], one["x"]], -1), drawn.mean(0), np.cov(drawn.T), factor=7)


# --- with networks ------------------------------------------------------------------------------


@pytest.mark.slow
def test_effects_beside_orthogonal_networks_are_recovered():
    """The network can represent the effect; with orthogonal networks the effect is recovered."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"u": rng.uniform(-2, 2, 150)})
    f = 0.8 * (frame.u**2 - (frame.u**2).mean())
    frame["y"] = 1 + 1.5 * frame.u + f + 0.2 * rng.normal(size=150)
    networks = {"net": net(8)}
    model = SemiStructuredRegression("y ~ u + net(u)", networks=networks, effects="sample").fit(
        frame,
        sampling=Sampling(draws=200, chains=2, progress=False),
        training=Training(
            epochs=150,
            batch_size=None,
            weight_decay=1e-4,
            clip_norm=None,
            validation=0.2,
            patience=100,
        ),
        subspace=SemiStructuredSubspace(2),
    )
    x = np.column_stack([np.ones(150), frame.u])
    least_squares = np.linalg.lstsq(x, frame.y, rcond=None)[0]
    row = model.summary().loc["u"]
    assert abs(row["mean"] - least_squares[1]) < 0.05
    assert row["sd"] < 0.05
    network = model.state.joint.contributions(
        model.posterior.subspace.weights(torch.from_numpy(model.draws.flat()[:3]).float())[
            :, model.state.model.structured.size :
        ]
    )
    design = model.state.model.inputs["design"].double()[:, :2]
    np.testing.assert_allclose((network[..., 0] @ design).numpy(), 0, atol=1e-4)
    # the module with its correction predicts what the posterior sees at the training rows
    outputs = model.predict(frame, n_draws=5).outputs
    seen = model.posterior.pointwise(model.draws.flat(5))
    again = model.state.model.family.log_prob(outputs, torch.from_numpy(frame.y.to_numpy().copy()))
    np.testing.assert_allclose(again.numpy(), seen, atol=2e-4)


@pytest.mark.slow
def test_networks_of_other_columns_are_centred_but_not_those_of_tensors():
    frame = table()
    networks = {"net": net()}
    model = SemiStructuredRegression("y ~ x + net(u)", networks=networks, effects="sample").fit(
        frame, **QUICK, subspace=SemiStructuredSubspace(2)
    )
    deep = model.contributions(frame)["deep"]["mean"]
    assert abs(deep.mean()) < 1e-4 * frame.y.std()
    assert model.orthogonal_to == {"net": "intercept"}
    for options, expected in (({}, False), ({"orthogonal": True}, True)):
        own = SemiStructuredRegression("y ~ x + net(net)", networks={"net": net()}, **options).fit(
            frame,
            inputs={"net": frame[["u"]].to_numpy(dtype=np.float32)},
            **QUICK,
            subspace=SemiStructuredSubspace(2),
        )
        assert ("effects" in own.orthogonal_to.values()) is expected


def test_predictions_do_not_depend_on_other_rows():
    frame = table()
    model = SemiStructuredRegression("y ~ x + u + net(u)", networks={"net": net()}).fit(
        frame, **QUICK, subspace=SemiStructuredSubspace(2)
    )
    whole = model.predict(frame).outputs
    np.testing.assert_allclose(model.predict(frame.iloc[5:7]).outputs, whole[:, 5:7], atol=1e-5)


def test_the_users_module_and_the_global_generator_are_unchanged():
    frame, module = table(), nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    SemiStructuredRegression("y ~ x + net(u)", networks={"net": module}).fit(
        frame, **QUICK, subspace=SemiStructuredSubspace(2)
    )
    assert module.training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_seed_gives_the_same_draws():
    frame = table()
    draws = [
        SemiStructuredRegression("y ~ x + net(u)", networks={"net": net()})
        .fit(
            frame,
            subspace=SemiStructuredSubspace(2),
            training=SHORT,
            sampling=replace(QUICK["sampling"], seed=seed),
        )
        .draws.z
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_networks_of_tensors_and_of_other_parameters():
    frame = table()
    images = torch.randn(80, 1, 4, 4)
    cnn = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
    model = SemiStructuredRegression(
        {"mu": "y ~ x + cnn(image)", "sigma": "~ noise(u)"}, networks={"cnn": cnn, "noise": net()}
    ).fit(frame, inputs={"image": images}, **QUICK, subspace=SemiStructuredSubspace(2))
    found = model.predict(frame.iloc[:3], inputs={"image": images[:3]})
    batches = list(model.predict_batches(frame, inputs={"image": images}, batch_size=33))
    assert [len(batch) for batch in batches] == [33, 33, len(frame) - 66]
    joined = torch.cat([batch.outputs for batch in batches], 1)
    whole = model.predict(frame, {"image": images})
    torch.testing.assert_close(joined, whole.outputs, rtol=1e-6, atol=1e-6)
    few = next(model.predict_batches(frame, inputs={"image": images}, n_draws=2))
    assert few.outputs.shape[:2] == (2, len(frame))
    assert found.outputs.shape == (20, 3, 2)
    assert float(found.outputs[0, :, 1].std()) > 0  # the second network reaches sigma
    with pytest.raises(InputError, match=r"a tensor for cnn\(image\)"):
        model.predict(frame.iloc[:3])
    with pytest.raises(InputError, match=r"inputs\['image'\]: expected 3 rows"):
        model.predict(frame.iloc[:3], inputs={"image": images})
    with pytest.raises(InputError, match="names in the formula: image, got other"):
        model.predict(frame.iloc[:3], inputs={"image": images[:3], "other": images})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("subspace", "rank"),
    [
        (SemiStructuredSubspace(2), 2 + 2),
        (NaiveSubspace(2), 2),
        pytest.param("full", 13 + 2, marks=pytest.mark.slow),
        ("last-layer", 5 + 2),
    ],
)
def test_every_space_runs(subspace, rank):
    frame = table()
    model = SemiStructuredRegression(
        "count ~ x + net(u)", networks={"net": net()}, family="poisson"
    ).fit(frame, subspace=subspace, **QUICK)
    assert model.draws.rank == rank
    assert set(model.effects()) == {"Intercept", "x"}
    assert np.isfinite(model.predict(frame).log_prob(frame["count"].to_numpy())).all()


@pytest.mark.parametrize(
    ("family", "y"),
    [
        ("bernoulli", lambda d: np.where(d.y > 1, "yes", "no")),
        ("ordinal", lambda d: pd.cut(d.y, [-9, 0, 1, 9], labels=["low", "mid", "high"])),
        ("negative-binomial", lambda d: d["count"]),
        ("gamma", lambda d: d.y.abs() + 0.1),
        ("beta", lambda d: 1 / (1 + np.exp(-d.y))),
    ],
)
def test_every_family_recovers_a_sign(family, y):
    frame = table(300).assign(r=y)
    model = Regression("r ~ x", family=family).fit(
        frame, sampling=Sampling(draws=80, chains=4, progress=False)
    )
    row = model.summary().loc["x"]
    assert row["mean"] > 0
    assert row["direction"] > 0.95 or family == "gamma"
    assert len(model.predict(frame)) == 300


@pytest.mark.slow
def test_distributional_regression_finds_the_scale():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=400)})
    frame["y"] = 1 + frame.x + np.exp(-0.5 + 0.4 * frame.x) * rng.normal(size=400)
    found = (
        Regression({"mu": "y ~ x", "sigma": "~ x"})
        .fit(frame, sampling=Sampling(draws=200, chains=4, progress=False))
        .summary()
    )
    assert abs(found.loc["sigma.x", "mean"] - 0.4) < 4 * found.loc["sigma.x", "sd"]
    assert abs(found.loc["sigma.Intercept", "mean"] + 0.5) < 4 * found.loc["sigma.Intercept", "sd"]


# --- bad input ----------------------------------------------------------------------------------


def test_bad_input_raises_with_its_name():
    frame = table()
    with pytest.raises(InputError, match="none called z"):
        Regression("y ~ x + z").fit(frame)
    with pytest.raises(InputError, match="columns that vary and are no sums of others, got w = x"):
        Regression("y ~ x + w").fit(frame.assign(w=2 * frame.x))
    few = frame.iloc[:3]
    with pytest.raises(InputError, match="more rows than effects, got 4 effects for 3 rows"):
        Regression("y ~ x + u").fit(few)
    text = frame.assign(w=[f"{value:.9f}" for value in np.linspace(0, 1, len(frame))])
    levels = "of the levels of 'w'. Pass priors={term: scale}, or convert 'w' if it should be numb"
    with pytest.raises(InputError, match=re.escape(levels)):
        Regression("y ~ x + w").fit(text)
    remedy = re.escape("Write 'successes | trials(n)' in the place of cbind(")
    with pytest.raises(InputError, match=remedy):
        Regression("cbind(y, 9 - y) ~ x", family="binomial").fit(frame)
    with pytest.raises(InputError, match="counts.*for family 'poisson'"):
        Regression("y ~ x", family="poisson").fit(frame)
    with pytest.raises(InputError, match="one output a row"):
        SemiStructuredRegression("y ~ x + net(u)", networks={"net": nn.Linear(1, 2)}).fit(frame)
    with pytest.raises(InputError, match="'net' for net"):
        SemiStructuredRegression("y ~ x + net(net)", networks={"net": nn.Linear(1, 1)}).fit(frame)
    with pytest.raises(InputError, match="rank: expected at most 2"):
        SemiStructuredRegression("y ~ x + net(u)", networks={"net": nn.Linear(1, 1)}).fit(
            frame, subspace=SemiStructuredSubspace(3)
        )
    with pytest.raises(InputError, match="2 classes"):
        Regression("sex3 ~ x", family="bernoulli").fit(frame.assign(sex3=np.arange(80) % 3))
    with pytest.raises(InputError, match="formulas for mu, sigma"):
        Regression({"mu": "y ~ x", "tau": "~ x"}).fit(frame)
    with pytest.raises(InputError, match="formulas for mu, sigma"):
        SemiStructuredRegression({"mu": "y ~ x", "tau": "~ net(u)"}, networks={"net": net()}).fit(
            frame
        )
    with pytest.raises(InputError, match="a fitted model"):
        Regression("y ~ x").predict(frame)
    with pytest.raises(InputError, match="subspace: expected one of"):
        SemiStructuredRegression("y ~ x + net(u)", networks={"net": net()}).fit(
            frame, subspace="line"
        )
    with pytest.raises(InputError, match="a family with a log link"):
        Regression("y ~ x", exposure="u").fit(frame)


def test_user_priors_allow_unidentified_effects():
    frame = table().iloc[:3]
    model = Regression("y ~ x + u", priors={"x": 1.0, "u": 1.0}).fit(
        frame, sampling=Sampling(draws=50, chains=4, warmup=50, progress=False)
    )
    assert set(model.effects()) == {"Intercept", "x", "u", "sigma"}


def test_missing_values_are_dropped_with_a_warning_or_raise():
    frame = table()
    frame.loc[[3, 5], "x"] = np.nan
    frame.loc[7, "y"] = np.nan
    with pytest.warns(UserWarning, match=r"3 of 80 rows have missing values \(1 in y, 2 in x\)"):
        model = Regression("y ~ x").fit(
            frame, sampling=Sampling(draws=20, chains=4, warmup=5, progress=False, mode="eager")
        )
    assert model.state.model.data.n == 77
    assert model.state.model.dropped == 3
    with pytest.raises(InputError, match="1 in y, 2 in x"):
        Regression("y ~ x", missing="error").fit(frame)
    with pytest.raises(InputError, match="x: expected no missing values, got 2 of 80"):
        model.predict(frame)


def test_unseen_levels_raise_or_use_the_reference():
    frame = table()
    model = Regression("y ~ C(sex)").fit(
        frame, sampling=Sampling(draws=20, chains=4, warmup=5, progress=False, mode="eager")
    )
    new = pd.DataFrame({"sex": ["x", "f"]})
    with pytest.raises(InputError, match="sex: expected the levels seen in training: f, m, got x"):
        model.predict(new)
    mean = model.predict(new, new_levels="reference").mean
    assert mean[0] == mean[1]


# --- what people read ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    frame = table().assign(g=lambda d: np.arange(len(d)) % 3)
    return frame, SemiStructuredRegression(
        "y ~ x + C(sex) + s(u) + re(g) + net(x)", networks={"net": net()}
    ).fit(
        frame,
        sampling=Sampling(draws=40, chains=2, warmup=5, progress=False, mode="eager"),
        training=SHORT,
        subspace=SemiStructuredSubspace(2),
    )


def test_partial_effects_are_the_terms_of_the_predictor(fitted):
    frame, model = fitted
    draws = model.effects()
    linear = model.effect("x", values=[1.0, 2.0])
    slope = draws["x"].reshape(-1)
    np.testing.assert_allclose(np.diff(linear.draws, axis=1)[:, 0], slope, rtol=1e-9)
    np.testing.assert_allclose(model.effect("x", values=[frame.x.mean()]).draws, 0, atol=1e-12)
    factor = model.effect("sex")
    np.testing.assert_allclose(factor.draws[:, 0], 0, atol=1e-12)
    np.testing.assert_allclose(factor.draws[:, 1], draws["C(sex)[T.m]"].reshape(-1))
    random = model.effect("re(g)")
    np.testing.assert_allclose(random.draws[:, 1], draws["Intercept | g[1]"].reshape(-1))
    # over the rows all terms and the intercept at the mean add up to the structured part
    terms = [model.effect(name, values=frame[name]).draws for name in ("x", "u")]
    terms.append(random.draws[:, frame.g])
    sex = (
        draws["C(sex)[T.m]"].reshape(-1, 1)
        * ((frame.sex == "m") - (frame.sex == "m").mean()).to_numpy()
    )
    table = model.contributions(frame, n_draws=80)
    zeta = torch.from_numpy(model.state.joint.effects_of(model.draws))
    beta = model.state.model.structured.coefficients(zeta).numpy() + model.state.coefficient_shift()
    beta = beta[:, :1]
    total = beta + sum(terms) + sex
    np.testing.assert_allclose(table["structured"]["mean"], total.mean(0), atol=1e-4)
    smooth = model.effect("s(u)")
    assert smooth.table().columns.tolist() == ["u", "mean", "sd", "2.5%", "97.5%"]
    assert len(smooth.x) == 100
    with pytest.raises(InputError, match="term: expected one of 'Intercept', 'x'"):
        model.effect("w")


def test_contributions_add_up_to_predictions(fitted):
    frame, model = fitted
    table = model.contributions(frame.iloc[:6])
    np.testing.assert_allclose(
        table["structured"]["mean"] + table["deep"]["mean"], table["predictor"]["mean"], atol=1e-6
    )
    np.testing.assert_allclose(
        table["predictor"]["mean"], model.predict(frame.iloc[:6]).mean, atol=1e-4
    )
    noise = model.contributions(frame.iloc[:6], parameter="sigma")
    np.testing.assert_allclose(noise["deep"]["mean"], 0, atol=1e-12)


def test_to_arviz_names_the_effects(fitted):
    pytest.importorskip("arviz")
    frame, model = fitted
    data = model.to_arviz()
    effects = data.posterior["effects"]
    assert effects.shape == (2, 40, len(model.effects()))
    np.testing.assert_allclose(effects.sel(effect="x"), model.effects()["x"])
    assert data.log_likelihood["y"].shape == (2, 40, 80)
    assert data.posterior_predictive["y"].shape == (2, 40, 80)
    np.testing.assert_allclose(data.observed_data["y"], frame.y)


def test_held_out_rows_are_scored_by_their_densities(fitted):
    frame, model = fitted
    held = model.score_samples(frame.iloc[:5])
    np.testing.assert_allclose(held, model.predict(frame.iloc[:5]).log_prob(frame.y[:5]))


@pytest.mark.slow
def test_a_report_contains_effects_and_figures(fitted, tmp_path, monkeypatch):
    frame, model = fitted
    path = model.report(tmp_path / "report.html", title="All of it", test=frame.iloc[:9])
    text = path.read_text()
    for piece in ("All of it", "C(sex)[T.m]", "sd(s(u))", "9 test rows", "orthogonal"):
        assert piece in text
    # the forest; x, sex, u, g and the network; traces and ranks of four effects
    assert text.count("<img") == 1 + 5 + 8
    monkeypatch.setattr("subbayes.regression.report._MOST_PARTIALS", 2)
    text = model.report(tmp_path / "few.html").read_text()
    assert text.count("<img") == 1 + 2 + 8
    assert text.count("Further terms are in the table alone.") >= 1


def test_the_best_epoch_is_used_with_and_without_patience():
    frame = table(60)
    model = SemiStructuredRegression("y ~ x + n(u)", networks={"n": net()})
    rows = model.specification.prepare(frame, None)
    for patience in (None, 40):
        fitting = Training(
            epochs=40,
            learning_rate=0.1,
            batch_size=8,
            weight_decay=1e-4,
            clip_norm=None,
            validation=0.2,
            patience=patience,
        )
        found = train_networks(rows, np.zeros(rows.structured.size), 1, fitting, 0, False)
        held_out = found.history["validation_log_likelihood"]
        assert len(held_out) == 40
        assert found.best_epoch == 1 + np.argmax(held_out) < 40


# --- what a model withstands ---------------------------------------------------------------------


FEW = {"sampling": Sampling(draws=20, chains=2, warmup=5, progress=False, mode="eager")}


def test_a_failed_prediction_does_not_change_the_model():
    frame = table()
    model = Regression("y ~ x + C(sex)").fit(frame, **FEW)
    expected = model.predict(frame.head(3)).mean
    for bad, said in (
        (frame.head(1).assign(x="7"), "x: expected numbers, as in training"),
        (frame.head(1).assign(sex="q"), "sex: expected the levels seen in training"),
        (frame.head(0), "data: expected at least one row"),
    ):
        with pytest.raises(InputError, match=said):
            model.predict(bad)
    np.testing.assert_array_equal(model.predict(frame.head(3)).mean, expected)
    model.effect("x")


def test_terms_that_are_not_finite_raise():
    frame = table().assign(z=lambda d: d.u.abs() + 0.1)
    with pytest.raises(InputError, match=r"term 'np.log\(z\)': expected finite numbers, got 2 row"):
        Regression("y ~ np.log(z)").fit(frame.assign(z=frame.z.where(frame.index > 1, -1.0)), **FEW)
    model = Regression("y ~ np.log(z)").fit(frame, **FEW)
    with pytest.raises(InputError, match="1 rows without one, the first at position 2"):
        model.predict(frame.head(3).assign(z=[1.0, 2.0, -1.0]))


@pytest.mark.slow
def test_sampled_effects_of_new_groups_have_the_group_variance():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"school": np.repeat(np.arange(12), 8)})
    frame["y"] = rng.normal(size=12)[frame.school] + 0.2 * rng.normal(size=96)
    model = Regression("y ~ re(school)").fit(
        frame, sampling=Sampling(draws=300, chains=2, warmup=200, progress=False)
    )
    new = pd.DataFrame({"school": [3, 99, 99, 100]})
    with pytest.raises(InputError, match="Pass new_levels='sample'"):
        model.predict(new)
    with pytest.raises(InputError, match="school: expected numbers, as in training"):
        model.predict(pd.DataFrame({"school": ["3"]}))
    average = model.predict(new, new_levels="reference")
    drawn = model.predict(new, new_levels="sample")
    tau = model.effects()["sd(Intercept | school)"]
    assert drawn.epistemic[1] == pytest.approx(average.epistemic[1] + (tau**2).mean(), rel=0.25)
    np.testing.assert_array_equal(drawn.outputs[:, 1], drawn.outputs[:, 2])  # one school
    assert np.abs(drawn.outputs[:, 1] - drawn.outputs[:, 3]).max() > 0.1
    np.testing.assert_array_equal(drawn.outputs[:, 0], average.outputs[:, 0])
    again = model.predict(new, new_levels="sample")
    np.testing.assert_array_equal(again.outputs, drawn.outputs)


@pytest.mark.slow
def test_orthogonal_to_is_reported():
    frame = table(40)
    for wanted, said in (("auto", "intercept"), (True, "effects"), (False, "nothing")):
        model = SemiStructuredRegression("y ~ x + n(u)", networks={"n": net()}, orthogonal=wanted)
        model.fit(frame, **QUICK, subspace=SemiStructuredSubspace(2))
        assert model.orthogonal_to == {"n": said}
        assert ("effects" in model.orthogonal_to.values()) is (said == "effects")


def test_priors_accept_the_names_of_the_summary():
    model = Regression("y ~ s(x)", priors={"sd(s(x))": 0.5, "sigma": Exponential(2)})
    model.fit(table(), **FEW)
    assert repr(model.state.model.structured.priors["sd(s(x))"]) == "Exponential(mean=0.5)"
    assert repr(model.state.model.structured.priors["sigma.Intercept"]) == "Exponential(mean=2)"


def test_networks_are_needed():
    with pytest.raises(InputError, match=r"Use subbayes\.Regression"):
        SemiStructuredRegression("y ~ x", networks={})


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("starts", [0, 5])
def test_engines_get_as_many_start_points_as_they_take(temperature, starts):
    received = []

    class Recording(SMC):
        def start_count(self, sampling, rank):
            return starts

        def run(self, posterior, sampling):
            received.append((np.shape(sampling.initial), (starts, posterior.rank)))
            return super().run(posterior, sampling)

    model = SemiStructuredRegression("y ~ x + net(u)", networks={"net": net()})
    model.fit(table(), inference=Recording(), temperature=temperature, **QUICK)
    ((found, expected),) = received
    assert found == (expected if starts else ())


def test_networks_whose_names_read_alike_are_networks_of_their_own(tmp_path):
    """Names are also those of attributes of a module."""
    rows = table(30).rename(columns={"u": "z"})
    names = ["net_a", "net_a_", "type", "values", "train", "forward", "réseau"]
    networks = {name: nn.Linear(1, 1) for name in names}
    reads = {name: "xz"[i % 2] for i, name in enumerate(names)}
    formula = "y ~ " + " + ".join(f"{name}({column})" for name, column in reads.items())
    model = SemiStructuredRegression(formula, networks=networks).specification.prepare(rows, None)
    assert model.deep.n_weights == 2 * len(names)
    expected = 0.0
    for name in names:
        module, column = networks[name], reads[name]
        standard = (rows[column] - rows[column].mean()) / rows[column].std(ddof=0)
        inputs = torch.tensor(standard.to_numpy()[:, None]).float()
        own = module(inputs)[:, 0] * model.deep._scales[0]
        torch.testing.assert_close(
            model.deep.output(name, model.inputs), own.float(), atol=1e-5, rtol=1e-5
        )
        expected = expected + own
    found = model.deep(**model.inputs)[:, 0]
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=1e-5)


def test_models_of_networks_whose_names_read_alike_are_saved(tmp_path):
    networks = {name: net(2, i) for i, name in enumerate(["net_a", "net_a_", "type"])}
    formula = "y ~ x + net_a(u) + net_a_(u) + type(u)"
    model = SemiStructuredRegression(formula, networks=networks, orthogonal=False)
    with pytest.warns(UserWarning, match="have not mixed"):
        fitted = model.fit(table(), subspace="last-layer", **QUICK)
    assert fitted.draws.z.shape[-1] == 3 * 3 + 3  # weights of last layers; intercept, x, sigma
    fitted.save(tmp_path / "m")
    modules = {name: net(2) for name in networks}
    again = SemiStructuredRegression.load(tmp_path / "m", networks=modules)
    np.testing.assert_array_equal(again.predict(table()).mean, fitted.predict(table()).mean)

"""Effects that vary among groups: against statsmodels, closed forms and calibration."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

from subbayes import InputError
from subbayes.inference.configuration import Sampling
from subbayes.regression import LKJ, Exponential, Regression
from subbayes.regression.questions.new_groups import _generator

FEW = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
}


def prepared(formula, frame, **options):
    return Regression(formula, **options).specification.prepare(frame, None)


def sleep_study(groups=18, rows=10, seed=0):
    """Reaction times as in the study that lme4 is documented with."""
    rng = np.random.default_rng(seed)
    g, x = np.repeat(np.arange(groups), rows), np.tile(np.arange(rows), groups)
    covariance = np.array([[24.0**2, 0.3 * 24 * 6], [0.3 * 24 * 6, 6.0**2]])
    u = rng.multivariate_normal([0, 0], covariance, groups)
    y = 251 + 10.5 * x + u[g, 0] + u[g, 1] * x + 25 * rng.normal(size=len(g))
    return pd.DataFrame({"y": y, "days": x.astype(float), "subject": [f"s{i:02}" for i in g]})


def test_means_and_covariances_of_random_effects_are_those_of_statsmodels():
    mixed_lm = pytest.importorskip("statsmodels.formula.api").mixedlm
    frame = sleep_study()
    peer = mixed_lm("y ~ days", frame, groups="subject", re_formula="~ days").fit(reml=True)
    covariance = peer.cov_re.to_numpy()
    to_mean = np.array([[1.0, frame.days.mean()], [0.0, 1.0]])  # where the prior is set
    centred = to_mean @ covariance @ to_mean.T
    tau = np.sqrt(np.diag(centred))
    correlation = centred[0, 1] / tau.prod()
    priors = {"sd(subject)": Exponential(20.0), "cor(subject)": LKJ(1.0)}
    model = prepared("y ~ days + (days | subject)", frame, priors=priors)
    structured, design = model.structured, model.design
    zeta = torch.zeros(structured.size, dtype=torch.float64)
    at = structured.names.index
    for name, value in zip(("Intercept", "days"), tau, strict=True):
        zeta[at(f"sd({name} | subject)")] = -special.ndtri(np.exp(-value / 20.0))
    zeta[at("cor(subject)")] = special.ndtri((1 + correlation) / 2)
    term = design.term("(1 + days | subject)")
    places = list(term.columns)
    jacobian = torch.func.jacrev(structured.coefficients)(zeta)[places][:, places].numpy()
    prior = jacobian @ jacobian.T
    np.testing.assert_allclose(prior[:2, :2], centred, rtol=1e-6)
    assert not prior[:2, 2:].any()

    z = design.matrix(frame)[0][:, places]
    fixed = peer.fe_params["Intercept"] + peer.fe_params["days"] * frame.days.to_numpy()
    precision = np.linalg.inv(prior) + z.T @ z / peer.scale
    posterior = np.linalg.inv(precision)
    mean = posterior @ z.T @ (frame.y.to_numpy() - fixed) / peer.scale
    mean = term.law.at_zero(torch.from_numpy(mean)).numpy().reshape(-1, 2)
    to_zero = np.linalg.inv(to_mean)
    for i, group in enumerate(sorted(frame.subject.unique())):
        np.testing.assert_allclose(mean[i], peer.random_effects[group], rtol=1e-4, atol=1e-4)
        own = to_zero @ posterior[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] @ to_zero.T
        np.testing.assert_allclose(own, peer.random_effects_cov[group], rtol=1e-4, atol=1e-4)


def test_correlated_effects_do_not_depend_on_the_origin_of_a_column():
    """At equal coordinates, whose prior is standard normal, models of both have one predictor."""
    frame = sleep_study()
    frame["z"] = np.cos(np.arange(len(frame)))
    zeta = np.random.default_rng(0).normal(size=(3, 70))
    found, at_zero = [], []
    for origin in (0.0, -2000.0):
        rows = frame.assign(days=frame.days - origin, z=frame.z + origin)
        model = prepared("y ~ days + z + (days + z | subject)", rows)
        structured, (matrix, offset) = (
            model.structured,
            map(torch.from_numpy, model.design.matrix(rows)),
        )
        own = torch.from_numpy(zeta[:, : structured.size])
        found.append(torch.stack([structured(point, matrix, offset) for point in own]).numpy())
        reported = structured.reported(own.numpy())
        slopes = np.stack([reported[f"{name} | subject[s03]"] for name in ("days", "z")])
        moved = reported["Intercept | subject[s03]"] + slopes.T @ [-origin, origin]
        at_zero.append([moved, *slopes, reported["sd(days | subject)"]])
        factor = structured.group_factor("(1 + days + z | subject)", own).numpy()
        origin_from_mean = [1.0, -rows.days.mean(), -rows.z.mean()]
        sds = np.linalg.norm(origin_from_mean @ factor, axis=-1)
        np.testing.assert_allclose(reported["sd(Intercept | subject)"], sds)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8)
    np.testing.assert_allclose(at_zero[1], at_zero[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("origin", [1e5, 1e8])
def test_designs_of_correlated_effects_do_not_depend_on_the_origin_of_a_column(origin):
    """Columns far from 0 have the digits of centred ones, as with the origin at their mean."""
    frame = sleep_study(6, 5).assign(days=lambda f: np.round(f.days * 0.37, 2))
    moved = frame.assign(days=frame.days + origin)
    term, new = "(1 + days | subject)", moved.iloc[:2].assign(subject="new")
    designs = [prepared(f"y ~ {term}", rows).design for rows in (frame, moved)]
    a, b = (
        design.matrix(rows)[0][:, list(design.term(term).columns)]
        for design, rows in zip(designs, (frame, moved), strict=True)
    )
    rounding = 4 * np.spacing(origin)
    np.testing.assert_allclose(b, a, rtol=0, atol=rounding)
    found = designs[1].new_groups(new)[term].loadings
    expected = np.column_stack([np.ones(2), frame.days[:2] - frame.days.mean()])
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_models_of_correlated_effects_fit_far_from_0(family):
    frame = sleep_study(6, 5).assign(y=lambda f: f.y / 100)
    frame["y"] = frame.y if family == "gaussian" else frame.y.round()
    few, found = Sampling(draws=20, chains=2, progress=False, seed=1), []
    for origin in (0.0, 1e8):
        rows = frame.assign(days=frame.days + origin)
        model = Regression("y ~ days + (1 + days | subject)", family=family)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "effects have not mixed")
            fitted = model.fit(rows, sampling=few)
        slope = fitted.effect("days | subject").draws
        level = fitted.effect("Intercept | subject").draws + slope * origin
        found.append([fitted.predict(rows).mean, slope.mean(0), level.mean(0)])
    for b, a in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(b, a, rtol=0.02, atol=0.02)


def test_slopes_without_a_correlation_far_from_0_are_warned_of():
    frame = sleep_study(4, 4)
    frame["year"] = frame.days + 2000
    for term, what in (
        ("year || subject", "uncorrelated with the"),
        ("0 + year | subject", "all of"),
    ):
        with pytest.warns(UserWarning, match=f"effects of groups are {what}.*where year is 0"):
            prepared(f"y ~ ({term})", frame)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for term in ("year | subject", "days || subject", "0 + days | subject", "1 | subject"):
            prepared(f"y ~ ({term})", frame)


@pytest.mark.slow
def test_posteriors_of_many_groups_agree_with_restricted_maximum_likelihood():
    mixed_lm = pytest.importorskip("statsmodels.formula.api").mixedlm
    frame = sleep_study(40, 8, seed=1)
    frame["days"] -= frame.days.mean()
    peer = mixed_lm("y ~ days", frame, groups="subject", re_formula="~ days").fit(reml=True)
    model = Regression("y ~ days + (days | subject)").fit(
        frame, sampling=Sampling(draws=400, warmup=400, chains=2, seed=0, progress=False)
    )
    found = model.summary()
    for i, name in enumerate(("Intercept", "days")):
        spread = found["sd"][name]
        assert abs(found["mean"][name] - peer.fe_params[name]) < 0.25 * spread
        np.testing.assert_allclose(spread, peer.bse_fe[name], rtol=0.25)
        sd = f"sd({name} | subject)"
        tau = np.sqrt(np.diag(peer.cov_re)[i])
        assert abs(found["mean"][sd] - tau) < found["sd"][sd]
    for group, effects in list(peer.random_effects.items())[:10]:
        spread = found["sd"][f"days | subject[{group}]"]
        assert abs(found["mean"][f"days | subject[{group}]"] - effects["days"]) < 0.5 * spread


def test_effects_of_groups_have_the_covariance_of_their_law():
    frame = sleep_study(3, 4).assign(z=lambda d: np.sin(np.arange(len(d))))
    for bar, correlated in (("|", True), ("||", False)):
        model = prepared(f"y ~ (1 + days + z {bar} subject)", frame)
        structured, term = model.structured, model.design.terms[1]
        extra = torch.randn(structured.size, dtype=torch.float64)
        reported = structured.reported(extra.numpy()[None])
        names = ("Intercept", "days", "z")
        tau = [reported[f"sd({name} | subject)"][0] for name in names]
        correlation = np.eye(3)
        for i in range(3):
            for j in range(i):
                key = f"cor({names[j]}, {names[i]} | subject)"
                assert (key in reported) == correlated
                correlation[i, j] = correlation[j, i] = reported[key][0] if correlated else 0
        expected = correlation * np.outer(tau, tau)
        places = list(term.columns)
        jacobian = torch.func.jacrev(structured.coefficients)(extra)[places][:, places]
        jacobian = term.law.at_zero(jacobian.mT).mT.numpy()
        np.testing.assert_allclose(jacobian @ jacobian.T, np.kron(np.eye(3), expected), atol=1e-9)
        factor = term.law.at_zero(structured.group_factor(term.name, extra).mT).mT.numpy()
        np.testing.assert_allclose(factor @ factor.T, expected)


def test_columns_are_products_of_effects_and_indicators_of_groups():
    frame = pd.DataFrame(
        {
            "my x": [1.0, 2.0, 3.0, 4.0, 5.0, 7.0],
            "größe": list("aabbcc"),
            "h": [1, 2, 1, 2, 1, 1],
            "y": [1.0, 0.0, 2.0, 1.0, 3.0, 2.5],
        }
    )
    formula = "y ~ (1 + `my x` | größe/h) + (0 + C(h) | `größe`:h)"
    with pytest.raises(InputError, match="effects with different names"):
        prepared("y ~ (1 | größe/h) + (h | `größe`:h)", frame)
    design = prepared(formula, frame, priors={"sd(größe)": 1.0}).design
    assert [t.name for t in design.terms][1:4] == [
        "(1 + `my x` | größe)",
        "(1 + `my x` | größe:h)",
        "(0 + C(h) | größe:h)",
    ]
    columns = pd.DataFrame(design.matrix(frame)[0], columns=design.names)
    own, x = frame["größe"] == "b", frame["my x"] - frame["my x"].mean()
    np.testing.assert_array_equal(columns["Intercept | größe[b]"], own)
    np.testing.assert_array_equal(columns["my x | größe[b]"], own * x)
    both = own & (frame.h == 2)
    np.testing.assert_array_equal(columns["my x | größe:h[b:2]"], both * x)
    np.testing.assert_array_equal(columns["C(h)[2] | größe:h[b:2]"], both)
    assert not design.center[list(design.terms[1].columns)].any()


def test_unseen_groups_have_sampled_effects_or_none():
    frame = sleep_study(6, 6).assign(half=lambda d: np.where(d.days > 2, "late", "early"))
    frame = frame[~((frame.subject == "s00") & (frame.half == "late"))]
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression("y ~ days + (days | subject/half)").fit(frame, **FEW)
    new = frame.iloc[:2].assign(subject=["s00", "new"], half="late")
    with pytest.raises(InputError, match="subject: expected the levels seen .*, got new. Pass new"):
        model.predict(new)
    with pytest.raises(InputError, match=r"subject:half: .* 1 rows with others, such as s00:late"):
        model.predict(new.iloc[:1])
    average, sampled = (
        model.predict(new, new_levels=rule).outputs[..., 0].double().numpy()
        for rule in ("reference", "sample")
    )
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    x = new.days.to_numpy()
    fixed = effects["Intercept"][:, None] + effects["days"][:, None] * x
    np.testing.assert_allclose(average[:, 1], fixed[:, 1], rtol=1e-6)
    known = effects["Intercept | subject[s00]"] + effects["days | subject[s00]"] * x[0]
    np.testing.assert_allclose(average[:, 0], fixed[:, 0] + known, rtol=1e-6)
    assert (sampled != average).all()
    again = model.predict(new, new_levels="sample").outputs[..., 0].double().numpy()
    np.testing.assert_array_equal(sampled, again)


@pytest.fixture(scope="module")
def nested():
    """A model of intercepts of groups, of their combinations and of a column of whole numbers."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": list("abcd") * 12, "h": list("uvw") * 16, "id": np.arange(48) % 6})
    frame["y"] = rng.normal(size=48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Regression("y ~ 1 + (1 | g/h) + re(id)").fit(frame, **FEW)


def shifts(model, rows):
    """What sampled effects of new groups add to the predictor, by draw and row."""
    outputs = [model.predict(rows, new_levels=rule).outputs for rule in ("sample", "reference")]
    return (outputs[0] - outputs[1])[..., 0].double().numpy()


def test_predictions_without_groups_need_none():
    rng = np.random.default_rng(0)
    size = 48
    frame = pd.DataFrame({"g": list("abcd") * 12, "my id": np.arange(size) % 6})
    frame["h"], frame["k"] = list("uvw") * 16, pd.Categorical(list("mnnm") * 12)
    frame[["x", "slope", "e", "y"]] = rng.uniform(1, 2, size=(size, 4))
    formula = "y ~ x + C(h) + offset(e) + (slope | g:h) + (1 | k) + re(`my id`) + re(e)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Regression({"mu": formula, "sigma": "~ (1 | g)"}).fit(frame, **FEW)
    expected = model.predict(frame, groups=False).outputs
    needed = frame[["x", "h", "e"]]
    strange = pd.to_datetime(["2024-01-05"] * size)
    others = frame.assign(g=None, slope="text", k="new", **{"my id": strange})
    for rows in (needed, others, frame.assign(g="new"), frame[["g", *frame.columns]]):
        found = model.predict(rows, groups=False).outputs
        np.testing.assert_array_equal(found, expected)
    repeated = needed.set_axis([0] * size)
    np.testing.assert_array_equal(model.predict(repeated, groups=False).outputs, expected)
    for name in needed:
        line = rf"data: expected columns .*, got none called {name}\. It has "
        with pytest.raises(InputError, match=line) as error:
            model.predict(needed.drop(columns=name), groups=False)
        assert "slope" not in str(error.value)
    unseen = needed.assign(h="new")
    with pytest.raises(InputError, match="h: expected the levels seen in training: u, v, w, got"):
        model.predict(unseen, groups=False)
    found = model.predict(unseen, groups=False, new_levels="reference").outputs
    same = model.predict(needed.assign(h="u"), groups=False).outputs
    np.testing.assert_array_equal(found, same)


def test_new_groups_have_the_same_effects_in_every_call_batch_and_order(nested):
    rows = pd.DataFrame({"g": list("qrqaq"), "h": list("uuuxv"), "id": [90, 1, 91, 90, 2]})
    found = shifts(nested, rows)
    assert len(np.unique(found)) == found.size  # each row has another combination
    order = [3, 0, 4, 2, 1]
    np.testing.assert_allclose(shifts(nested, rows.iloc[order]), found[:, order], rtol=1e-4)
    alone = [shifts(nested, rows.iloc[[i]])[:, 0] for i in range(len(rows))]
    np.testing.assert_allclose(np.stack(alone, 1), found, rtol=1e-4, atol=1e-6)
    whole = nested.predict(rows, new_levels="sample").outputs
    batches = nested.predict_batches(rows, batch_size=1, new_levels="sample")
    np.testing.assert_allclose(torch.cat([b.outputs for b in batches], 1), whole, rtol=1e-5)
    fewer = nested.predict(rows, new_levels="sample", n_draws=4).outputs
    assert (whole[:, None] - fewer).abs().amax((-2, -1)).amin(0).max() < 1e-5  # of these draws
    for kind in (float, np.int8, object):
        np.testing.assert_array_equal(shifts(nested, rows.astype({"id": kind})), found)


def test_sampled_effects_of_new_groups_are_independent_and_have_their_variance(nested):
    zeta = torch.from_numpy(nested.state.joint.effects_of(nested.draws))
    factor = nested.state.model.structured.group_factor
    sd = {name: factor(name, zeta).numpy().ravel() for name in ("(1 | g)", "(1 | g:h)", "(1 | id)")}
    labels = [f"new {i}" for i in range(300)]
    rows = pd.DataFrame({"g": "a", "h": "u", "id": 0}, index=range(300))
    by_term = {
        "(1 | g:h)": shifts(nested, rows.assign(h=labels)) / sd["(1 | g:h)"][:, None],
        "(1 | id)": shifts(nested, rows.assign(id=range(100, 400))) / sd["(1 | id)"][:, None],
    }
    both = np.sqrt(sd["(1 | g)"] ** 2 + sd["(1 | g:h)"] ** 2)
    by_term["(1 | g/h)"] = shifts(nested, rows.assign(g=labels)) / both[:, None]
    for unit in by_term.values():  # (draws, labels)
        assert abs(unit.mean()) < 4 / np.sqrt(unit.size)
        assert abs(unit.var() - 1) < 4 * np.sqrt(2 / unit.size)
        for a, b in ((unit[:, 1:], unit[:, :-1]), (unit[1:], unit[:-1])):
            assert abs((a * b).mean()) < 4 / np.sqrt(a.size)
    together = by_term["(1 | g:h)"] * by_term["(1 | id)"]
    assert abs(together.mean()) < 4 / np.sqrt(together.size)


def test_labels_that_are_equal_have_one_generator():
    def first(*label, seed=0, term="(1 | g)"):
        return _generator(seed, term, label).standard_normal()

    assert first("q") == pytest.approx(0.388842883296896)  # in every process
    assert first(1) == first(1.0) == first(np.int64(1)) == first(np.float32(1)) == first(True)
    others = [first(1), first("1"), first("q"), first("q", seed=1), first("q", term="(1 | h)")]
    others += [first("a", "b:c"), first("a:b", "c"), first("b", "a"), first(1.5), first(None)]
    assert len(set(others)) == len(others)


@pytest.mark.slow
def test_sampled_effects_of_a_new_group_have_its_covariance():
    frame = sleep_study(5, 6)
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression("y ~ (days | subject)").fit(
            frame,
            inference="elliptical-slice",
            sampling=Sampling(draws=2000, chains=2, warmup=10, progress=False),
        )
    new = frame.iloc[:2].assign(subject="new", days=[0.0, 3.0])
    shift = (
        model.predict(new, new_levels="sample").outputs[..., 0]
        - model.predict(new, new_levels="reference").outputs[..., 0]
    ).double()
    structured, name = model.state.model.structured, "(1 + days | subject)"
    factor = structured.group_factor(name, torch.from_numpy(model.draws.flat().copy()))
    middle = frame.days.mean()
    rows = torch.tensor([[1.0, -middle], [1.0, 3 - middle]], dtype=torch.float64)
    unit = torch.linalg.solve(rows @ factor, shift.unsqueeze(-1))[..., 0].numpy()
    assert np.all(np.abs(unit.mean(0)) < 4 / np.sqrt(4000))
    assert np.all(np.abs(np.cov(unit.T) - np.eye(2)) < 5 * np.sqrt(2 / 4000))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "formula", ["y ~ (x | h)", "y ~ (1 + x | g)", "y ~ 0 + (1 | g:h)", "y ~ (1 | x)"]
)
def test_one_group_of_one_row_and_more_groups_than_rows_fit(formula):
    frame = pd.DataFrame({"y": np.arange(6.0) % 4, "x": np.arange(6.0), "g": list("abcdef")})
    frame["h"] = pd.Categorical(["a"] * 6, categories=["a", "b"])
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula).fit(frame, **FEW)
    assert np.isfinite(model.predict(frame).mean).all()


def test_priors_summary_effects_and_saved_models(tmp_path):
    frame = sleep_study(4, 6)
    priors = {"sd(subject)": 0.5, "cor(subject)": LKJ(2.0), "sd(days | subject)": Exponential(3.0)}
    formulas = {"mu": "y ~ days + (days | subject)", "sigma": "~ (1 | subject)"}
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formulas, priors=priors).fit(frame, **FEW)
    assert model.priors["sd(Intercept | subject)"] == Exponential(0.5)
    assert model.priors["sd(days | subject)"] == Exponential(3.0)
    assert model.priors["cor(subject)"] == LKJ(2.0)
    summary = model.summary()
    own = ["Intercept", "days", "sd(Intercept | subject)", "sd(days | subject)"]
    own += ["cor(Intercept, days | subject)", "sigma.Intercept", "sd(sigma.Intercept | subject)"]
    assert summary.index[:7].tolist() == model.summary(groups=False).index.tolist() == own
    assert all(name.endswith("]") for name in summary.index[7:])
    assert set(summary.index) == set(model.effects())
    scales = ["mu"] * 4 + [""] + ["log(sigma)"] * 2
    assert list(summary.attrs["scales"].values())[:7] == scales
    assert summary.attrs["scales"]["sigma.Intercept | subject[s01]"] == "log(sigma)"
    assert model.space.subspace.rank == 19
    without = model.predict(frame, groups=False).outputs  # the effects of the formula alone
    flat = {name: draws.reshape(-1, 1) for name, draws in model.effects().items()}
    expected = flat["Intercept"] + flat["days"] * frame["days"].to_numpy()
    np.testing.assert_allclose(without[..., 0], expected, rtol=1e-4, atol=1e-4)
    log_sigma = np.broadcast_to(flat["sigma.Intercept"], expected.shape)
    np.testing.assert_allclose(without[..., 1], log_sigma, rtol=1e-4, atol=1e-4)
    unseen = model.predict(frame.assign(subject="new"), new_levels="reference").outputs
    np.testing.assert_allclose(without, unseen, rtol=1e-5, atol=1e-5)
    partial = model.effect("days | subject")
    assert partial.table()["subject"].tolist() == ["s00", "s01", "s02", "s03"]
    draws = model.effects()["days | subject[s01]"].reshape(-1)
    np.testing.assert_allclose(partial.draws[:, 1], draws)
    with pytest.raises(InputError, match=r"expected one of 'Intercept \| subject', 'days \| sub"):
        model.effect("(1 + days | subject)")
    assert model.effect("sigma.(1 | subject)").draws.shape == (12, 4)
    assert len(model.plot().axes) == 4
    model.save(tmp_path / "m")
    again = Regression.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict(frame).mean, model.predict(frame).mean)
    assert again.priors["cor(subject)"] == LKJ(2.0)


@pytest.mark.usefixtures("unchecked")
def test_priors_of_the_wrong_kind_raise():
    frame = sleep_study(4, 6)
    for priors in ({"cor(subject)": 2.0}, {"sd(subject)": LKJ(2.0)}, {"days": LKJ(1.0)}):
        with pytest.raises(
            InputError, match=r"a prior of a (correlation, such as LKJ\(2\)|number), got"
        ):
            prepared("y ~ days + (days | subject)", frame, priors=priors)


@pytest.mark.slow
def test_ranks_of_parameters_drawn_from_the_prior_are_uniform():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": np.repeat(np.arange(6), 5), "x": np.tile(np.arange(5.0) - 2, 6)})
    priors = {"Intercept": 1.0, "sd(g)": 1.0, "cor(g)": LKJ(2.0), "sigma": Exponential(1.0)}
    ranks: dict[str, list[int]] = {}
    names = ["Intercept", "sd(x | g)", "cor(Intercept, x | g)", "x | g[0]"]
    runs, kept = 60, 49
    reference = prepared("y ~ (x | g)", frame.assign(y=rng.normal(size=30)), priors=priors)
    for run in range(runs):
        zeta = torch.from_numpy(rng.standard_normal(reference.structured.size))
        with torch.no_grad():
            inputs = reference.inputs
            eta = reference.structured(zeta, inputs["design"], inputs["offset"]).numpy()
        data = frame.assign(y=eta[:, 0] + np.exp(eta[:, 1]) * rng.standard_normal(30))
        truth = reference.structured.reported(zeta.numpy()[None])
        model = Regression("y ~ (x | g)", priors=priors)
        sampling = Sampling(draws=kept * 4, warmup=200, chains=1, seed=run, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draws = model.fit(data, sampling=sampling).effects()
        for name in names:
            thinned = draws[name].reshape(-1)[::4]
            ranks.setdefault(name, []).append(int((thinned < truth[name][0]).sum()))
    for name in names:
        uniform = (np.array(ranks[name]) + 0.5) / (kept + 1)
        assert stats.kstest(uniform, "uniform").pvalue > 1e-3, name

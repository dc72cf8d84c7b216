"""Formulas: designs, smooths, priors as maps, and errors that name columns and levels."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods.families import (
    BetaFamily,
    GammaFamily,
    NegativeBinomialFamily,
    NormalFamily,
    OrdinalFamily,
)
from subbayes.regression import Exponential, Flexible, HalfNormal, NormalPrior, Regression, StudentT
from subbayes.regression.design.default_priors import default_priors
from subbayes.regression.design.design import Design, split_formula
from subbayes.regression.design.identifiability import collinear
from subbayes.regression.design.model_priors import priors_with
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.formula.checks import complete_rows
from subbayes.regression.priors.reading import prior_of


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "x": rng.uniform(1, 10, 60),
            "z": rng.normal(size=60),
            "sex": rng.choice(["f", "m"], 60),
            "g": rng.choice(list("abc"), 60),
        }
    )


# --- formulas -----------------------------------------------------------------------------------


def test_a_design_has_named_terms_and_centred_columns(frame):
    design = Design(
        {"mu": "x + C(sex) + s(z) + re(g) + offset(np.log(x))", "sigma": "1 + z"}, frame
    )
    kinds = {t.name: t.kind for t in design.terms}
    assert kinds == {
        "Intercept": "intercept",
        "x": "linear",
        "C(sex)": "factor",
        "s(z)": "smooth",
        "(1 | g)": "random",
        "sigma.Intercept": "intercept",
        "sigma.z": "linear",
    }
    matrix, offset = design.matrix(frame)
    named = dict(zip(design.names, matrix.T, strict=True))
    np.testing.assert_allclose(named["x"], frame.x - frame.x.mean())
    np.testing.assert_allclose(named["Intercept"], 1)
    np.testing.assert_allclose(named["sigma.z"], frame.z - frame.z.mean())
    np.testing.assert_allclose(offset, np.column_stack([np.log(frame.x), np.zeros(60)]))
    np.testing.assert_allclose(named["Intercept | g[b]"], frame.g == "b")
    few = design.matrix(frame.iloc[:3])[0]
    np.testing.assert_allclose(few, matrix[:3], atol=1e-12)


def test_smooths_are_cubic_splines_with_their_penalty(frame):
    """Against the textbook: fitted values of the mixed model are those of penalised splines."""
    from scipy.interpolate import BSpline

    df, tau, noise = 8, 0.7, 0.5
    design = Design({"mu": f"s(z, df={df})"}, frame)
    matrix = design.matrix(frame)[0]
    y = np.sin(frame.z.to_numpy())
    (smooth,) = (t for t in design.terms if t.kind == "smooth")
    wiggles = matrix[:, list(smooth.penalised)]
    fixed = np.column_stack([np.ones(60), matrix[:, smooth.columns[0]]])
    whole = np.column_stack([fixed, wiggles])
    penalty = np.diag([0, 0, *[noise**2 / tau**2] * wiggles.shape[1]])
    ours = whole @ np.linalg.solve(whole.T @ whole + penalty, whole.T @ y)
    low, high = frame.z.min(), frame.z.max()
    step = (high - low) / (df - 3)
    knots = low + step * np.arange(-3, df + 1)
    basis = BSpline(knots, np.eye(df), 3)(frame.z.to_numpy().clip(low, high - 1e-12))
    second = np.diff(np.eye(df), 2, axis=0)
    # the columns are scaled to a mean squared length of one: undo it in the penalty
    values, vectors = np.linalg.eigh(second.T @ second)
    turned = basis @ (vectors[:, 2:] / np.sqrt(values[2:]))
    line = np.column_stack([np.ones(60), frame.z])
    rest = turned - line @ np.linalg.lstsq(line, turned, rcond=None)[0]
    size2 = (rest**2).sum(1).mean()
    lam = noise**2 * size2 / tau**2
    theirs = basis @ np.linalg.solve(basis.T @ basis + lam * second.T @ second, basis.T @ y)
    np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_smooths_extrapolate_linearly(frame):
    design = Design({"mu": "s(z)"}, frame)
    z = frame.z.max() + np.array([0.0, 1.0, 2.0])
    columns = design.matrix(pd.DataFrame({"z": z}))[0]
    np.testing.assert_allclose(np.diff(columns, 2, axis=0), 0, atol=1e-6)


def test_split_formula():
    assert split_formula("y ~ x", "mu") == ("y", {"mu": "x"})
    assert split_formula({"mu": "y ~ x", "sigma": "~ z"}, "mu") == ("y", {"mu": "x", "sigma": "z"})
    for wrong, said in (
        ("x + z", "a response"),
        ("~ x", "a response"),
        ({"sigma": "~ z"}, "one for 'mu'"),
        ({"mu": "y ~ x", "sigma": "y ~ z"}, "effects alone"),
    ):
        with pytest.raises(InputError, match=said):
            split_formula(wrong, "mu")


def test_tildes_in_names_belong_to_these():
    assert split_formula("`a~b` ~ x + `c ~ d`", "mu") == ("`a~b`", {"mu": "x + `c ~ d`"})
    with pytest.raises(InputError, match="a response and effects"):
        split_formula("y ~ x ~ z", "mu")
    columns = pd.DataFrame(np.random.default_rng(0).uniform(1, 2, (9, 3)))
    columns.columns = ["a~b", "c~d", "e|f~"]
    model = Regression("`a~b` | weights(`e|f~`) ~ `c~d`")
    prepared = model.specification.prepare(columns, None)
    assert prepared.design.names[:2] == ["Intercept", "c~d"]
    np.testing.assert_array_equal(prepared.data.y[0], columns["a~b"])


def test_errors_name_columns_and_levels(frame):
    with pytest.raises(InputError, match="none called sexx. Did you mean 'sex'"):
        Design({"mu": "x + C(sexx)"}, frame)
    with pytest.raises(InputError, match="a formula such as"):
        Design({"mu": "x + ("}, frame)
    with pytest.raises(InputError, match="as a summand"):
        Design({"mu": "s(x):z"}, frame)
    with pytest.raises(InputError, match="df= to be a whole number from 3 to 1000"):
        Design({"mu": "s(x, df=1000000)"}, frame)
    design = Design({"mu": "x + C(g)"}, frame)
    with pytest.raises(InputError, match="g: expected the levels seen in training: a, b, c, got d"):
        design.matrix(frame.assign(g="d"))
    with pytest.raises(InputError, match="x: expected no missing values, got 60 of 60"):
        design.matrix(frame.assign(x=np.nan))
    with pytest.raises(InputError, match="none called g"):
        design.matrix(frame.drop(columns="g"))
    known = design.matrix(frame.assign(g="a"))[0]
    np.testing.assert_allclose(design.matrix(frame.assign(g="d"), "reference")[0], known)


@pytest.mark.parametrize(
    "term", ["`my, g`", "C(`my, g`)", "C(`my, g`, Treatment('b'))", "re(`my, g`)"]
)
def test_levels_of_columns_in_backquotes_are_checked(frame, term):
    frame = frame.rename(columns={"g": "my, g"})
    design = Design({"mu": f"x + {term}", "sigma": f"{term}"}, frame)
    with pytest.raises(InputError, match="my, g: expected the levels seen in training: a, b, c"):
        design.matrix(frame.assign(**{"my, g": "d"}))


@pytest.mark.parametrize(
    "term", ["one", "C(one)", "z:one", "0 + one", "C(yes)", "(one | sex)", "C(cat) + sex"]
)
def test_factors_with_one_level_are_refused(frame, term):
    one = pd.Categorical(["a"] * 60, ["a", "b"])
    frame = frame.assign(one="a", yes=True, cat=one, sex=["f", "m"] * 30)
    model = Regression(f"x ~ z + {term}")
    with pytest.raises(InputError, match="^(one|yes|cat): expected at least 2 levels.* Leave it"):
        model.fit(frame)
    names = Design({"mu": "C(one, levels=['a', 'b']) + re(one) + yes"}, frame).names
    assert names[1:] == ["C(one, levels=['a', 'b'])[T.b]", "yes", "Intercept | one[a]"]


def test_collinear_columns_are_reported(frame):
    frame = frame.assign(w=lambda d: 2 * d.x - d.z, one=3.0)
    design = Design({"mu": "x + z + w + C(sex)"}, frame)
    (said,) = collinear(design, design.matrix(frame)[0], range(len(design.names)))
    assert sorted(said.replace(" = ", " + ").split(" + ")) == ["w", "x", "z"]
    with pytest.raises(InputError, match="no sums of others, got one"):
        Regression("z ~ x + one").fit(frame)
    design = Design({"mu": "x + z"}, frame)
    assert collinear(design, design.matrix(frame)[0], range(len(design.names))) == []


def test_missing_values_are_counted():
    frame = pd.DataFrame({"a": [1.0, np.nan, 3.0], "b": ["x", "y", None]})
    kept, lacking = complete_rows(frame, ("a", "b"), "drop")
    assert kept.tolist() == [True, False, False]
    assert lacking == {"a": 1, "b": 1}
    with pytest.raises(InputError, match="1 in a, 1 in b"):
        complete_rows(frame, ("a", "b"), "error")


# --- priors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "oracle"),
    [
        (NormalPrior(1.0, 2.0), stats.norm(1, 2)),
        (Exponential(0.5), stats.expon(scale=0.5)),
        (HalfNormal(0.5), stats.halfnorm(scale=0.5)),
        (StudentT(3, 2.0), stats.t(3, scale=2)),
        (Flexible(stats.halfnorm(scale=2)), stats.halfnorm(scale=2)),
        (Flexible(stats.laplace(scale=0.3)), stats.laplace(scale=0.3)),
        (Flexible(stats.gamma(2.0)), stats.gamma(2.0)),
        (Exponential(2.0), stats.expon(scale=2)),
        (StudentT(3, 1.0), stats.t(3)),
        (NormalPrior(3.0, 6.0), stats.norm(3, 6)),
    ],
)
def test_priors_map_standard_normal_quantiles_to_their_own(prior, oracle):
    zeta = np.linspace(-7, 7, 301)
    expected = np.where(zeta < 0, oracle.ppf(stats.norm.cdf(zeta)), oracle.isf(stats.norm.sf(zeta)))
    at = torch.from_numpy(zeta).requires_grad_()
    found = prior.from_standard(at)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6, atol=1e-8)
    (slope,) = torch.autograd.grad(found.sum(), at)
    inner = np.abs(zeta) < 5
    density = stats.norm.pdf(zeta) / oracle.pdf(expected)
    np.testing.assert_allclose(slope.numpy()[inner], density[inner], rtol=2e-3, atol=1e-6)
    assert prior.positive == (oracle.support()[0] >= 0)


def test_prior_of_numbers_and_scipy_distributions():
    assert prior_of("p", 2) == NormalPrior(0.0, 2.0)
    assert isinstance(prior_of("p", stats.laplace()), Flexible)
    with pytest.raises(InputError, match="p: expected a"):
        prior_of("p", -1.0)


@pytest.mark.usefixtures("unchecked")
def test_prior_of_other_types_raises():
    with pytest.raises(TypeError, match="a prior, a number"):
        prior_of("p", "normal")
    with pytest.raises(TypeError, match="continuous distribution"):
        prior_of("p", stats.poisson(2.0))


def test_half_normal_quantiles_are_exact_in_both_tails():
    zeta = torch.linspace(-30, 8, 77, dtype=torch.float64, requires_grad=True)
    value = HalfNormal(2.0).from_standard(zeta)
    (slope,) = torch.autograd.grad(value.sum(), zeta)
    z = zeta.detach().numpy()
    log_tail = stats.norm.logsf(z)  # log P(theta > value)
    found = value.detach().numpy()
    np.testing.assert_allclose(stats.halfnorm.logsf(found, scale=2)[z > 0], log_tail[z > 0])
    np.testing.assert_allclose(
        np.log(2 * stats.norm.pdf(0) * found / 2)[z < -9], stats.norm.logcdf(z)[z < -9]
    )
    expected = stats.norm.logpdf(z) - stats.halfnorm.logpdf(found, scale=2)
    np.testing.assert_allclose(slope.log().numpy(), expected, rtol=1e-6)
    batched = torch.func.vmap(HalfNormal(2.0).from_standard)(zeta.detach())
    torch.testing.assert_close(batched, value.detach())


@pytest.mark.parametrize(
    ("family", "parameter"),
    [
        (NormalFamily(), "sigma"),
        (GammaFamily(), "shape"),
        (NegativeBinomialFamily(), "shape"),
        (BetaFamily(), "precision"),
    ],
)
def test_a_number_for_a_positive_parameter_is_the_scale_of_its_half_normal(
    frame, family, parameter
):
    right = {"mu": "x", parameter: "1"}
    design = Design(right, frame)
    y = np.random.default_rng(0).uniform(0.1, 0.9, 60)
    priors = priors_with(design, default_priors(design, family, y), {parameter: 0.7})
    effects = StructuredPredictor(design, family, priors)
    place = effects.names.index(f"{parameter}.Intercept")
    # draws from the prior of the parameter, against scipy
    zeta = np.random.default_rng(1).normal(size=(4000, effects.size))
    draws = effects.reported(zeta)[parameter]
    assert stats.kstest(draws, stats.halfnorm(scale=0.7).cdf).pvalue > 0.01
    # the density of its logarithm has the Jacobian of the logarithm
    at = torch.linspace(-4, 4, 81, dtype=torch.float64)

    def logarithm(value):
        point = torch.zeros(effects.size, dtype=torch.float64)
        point[place] = value
        return effects.coefficients(point)[place]

    eta = np.array([float(logarithm(value)) for value in at])
    slopes = np.array([float(torch.func.grad(logarithm)(value)) for value in at])
    density = stats.norm.pdf(at.numpy()) / slopes
    expected = stats.halfnorm.pdf(np.exp(eta), scale=0.7) * np.exp(eta)
    np.testing.assert_allclose(density, expected, rtol=1e-6)


def test_numbers_for_positive_quantities_are_scales_of_positive_priors(frame):
    design = Design({"mu": "x + re(g)", "sigma": "z"}, frame)
    defaults = default_priors(design, NormalFamily(), frame.x.to_numpy())
    given = {"sigma": 1.0, "sigma.z": 2.0, "sd(Intercept | g)": 3.0}
    priors = priors_with(design, defaults, given)
    assert priors["sigma.Intercept"] == HalfNormal(1.0)
    assert priors["sigma.z"] == NormalPrior(0.0, 2.0)
    assert priors["sd(Intercept | g)"] == Exponential(3.0)
    logarithm = priors_with(design, defaults, {"sigma.Intercept": 1.0})
    assert logarithm["sigma.Intercept"] == NormalPrior(0.0, 1.0)
    design = Design({"mu": "x"}, frame, ("mu",))
    defaults = default_priors(design, OrdinalFamily(n_classes=3), np.zeros(60))
    assert priors_with(design, defaults, {"gap": 2})["gap"] == HalfNormal(2.0)
    with pytest.raises(InputError, match="a prior of a positive number"):
        priors_with(design, defaults, {"gap": NormalPrior()})
    with pytest.raises(InputError, match=r"priors\['gap'\]: expected a finite number above 0"):
        priors_with(design, defaults, {"gap": -1})


# --- effects ------------------------------------------------------------------------------------


def test_coefficients_and_reported_effects_of_a_design(frame):
    family = NormalFamily()
    design = Design({"mu": "x + s(z, df=6) + re(g)", "sigma": "1"}, frame)
    y = frame.x.to_numpy()
    priors = default_priors(design, family, y) | {"x": StudentT(3, 1.0)}
    effects = StructuredPredictor(design, family, priors)
    assert effects.names[-2:] == ["sd(s(z, df=6))", "sd(Intercept | g)"]
    zeta = torch.from_numpy(np.random.default_rng(1).normal(size=(5, effects.size)))
    beta = effects.coefficients(zeta)
    at = {name: i for i, name in enumerate(effects.names)}
    tau = priors["sd(Intercept | g)"].from_standard(zeta[:, at["sd(Intercept | g)"]])
    torch.testing.assert_close(
        beta[:, at["Intercept | g[b]"]], tau * zeta[:, at["Intercept | g[b]"]]
    )
    torch.testing.assert_close(beta[:, at["x"]], priors["x"].from_standard(zeta[:, at["x"]]))
    sigma = priors["sigma.Intercept"].from_standard(zeta[:, at["sigma.Intercept"]])
    matrix, offset = map(torch.from_numpy, design.matrix(frame))
    eta = effects(zeta[0], matrix, offset)
    torch.testing.assert_close(
        eta[:, 0], matrix[:, design.column_parameters.index("mu") : -1] @ beta[0, :-1]
    )
    torch.testing.assert_close(eta[:, 1].exp(), sigma[:1].expand(60))
    said = effects.reported(zeta.numpy())
    # uncentred columns with the reported intercept give the same predictor
    raw = matrix + torch.from_numpy(design.center)
    own = [i for i, n in enumerate(design.names) if n not in ("Intercept", "sigma.Intercept")]
    again = said["Intercept"][0] + raw[:, own].numpy() @ beta[0, own].numpy()
    np.testing.assert_allclose(again, eta[:, 0].numpy())
    np.testing.assert_allclose(said["sigma"], sigma.numpy())
    assert "sd(Intercept | g)" in said
    assert "s(z, df=6)[wiggle1]" not in said


def test_thresholds_increase_and_are_reported_for_uncentred_columns(frame):
    family = OrdinalFamily(n_classes=3)
    design = Design({"mu": "x"}, frame, ("mu",))
    effects = StructuredPredictor(design, family, default_priors(design, family, np.zeros(60)))
    zeta = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 3)))
    matrix, offset = map(torch.from_numpy, design.matrix(frame))
    eta = effects(zeta[0], matrix, offset)
    assert eta.shape == (60, 3)
    assert bool((eta[:, 2] > eta[:, 1]).all())
    said = effects.reported(zeta.numpy())
    np.testing.assert_allclose(
        said["threshold[0]"][0] - frame.x * said["x"][0], (eta[:, 1] - eta[:, 0]).numpy()
    )


def test_user_priors_replace_defaults_by_term(frame):
    design = Design({"mu": "x + s(z)", "sigma": "1"}, frame)
    defaults = default_priors(design, NormalFamily(), frame.x.to_numpy())
    priors = priors_with(design, defaults, {"x": 0.5, "sd(s(z))": Exponential(3.0)})
    assert priors["x"] == NormalPrior(0.0, 0.5)
    assert priors["sd(s(z))"] == Exponential(3.0)
    with pytest.raises(InputError, match="names of terms"):
        priors_with(design, defaults, {"w": 1.0})
    with pytest.raises(InputError, match="a prior of a positive number"):
        priors_with(design, defaults, {"sd(s(z))": NormalPrior()})
    scale = 2.5 * frame.x.std(ddof=0) / frame.x.std(ddof=0)
    assert defaults["x"].scale == pytest.approx(scale)

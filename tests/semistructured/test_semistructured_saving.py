"""Saving of fitted semi-structured models: artifacts, pickles, copies."""

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn

from subbayes import MLP, InputError, Training, load
from subbayes.artifacts import folder as artifact
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods.families import Custom, NormalFamily, StudentTFamily
from subbayes.regression import (
    EffectPrior,
    Exponential,
    HalfNormal,
    NormalPrior,
    Regression,
    StudentT,
)
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace

QUICK = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
    "training": Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None),
    "subspace": SemiStructuredSubspace(2),
}
pytestmark = pytest.mark.filterwarnings("ignore:effects have not mixed")


def cnn(width=2):
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(4 * width, 1)
    )


class Wide(NormalPrior):
    """A prior of a user's class."""


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=30),
            "n": rng.integers(0, 9, 30).astype("int16"),
            "sex": rng.choice(["f", "m"], 30),
            "old": rng.random(30) < 0.5,
            "grade": pd.Categorical(rng.choice(["lo", "hi"], 30), ["lo", "hi"], ordered=True),
            "school": pd.array(rng.integers(0, 4, 30), dtype="Int64"),
            "unused": [object()] * 30,
        }
    )
    frame["y"] = pd.Categorical(
        rng.choice(["bad", "fair", "good"], 30), ["bad", "fair", "good"], ordered=True
    )
    frame.loc[4, "x"] = np.nan
    images = torch.from_numpy(rng.random((30, 1, 4, 4), dtype=np.float32))
    model = SemiStructuredRegression(
        "y ~ C(sex) + C(grade) + old + s(x, df=5) + re(school) + image(image) + table(x, n)",
        family="ordinal",
        networks={"image": cnn().eval(), "table": MLP(2, (3,), 1)},
        orthogonal=True,
        priors={
            "C(sex)": StudentT(4, 0.5),
            "sd(re(school))": 0.5,
            "old": stats.laplace(scale=2),
            "C(grade)": NormalPrior(0.1, 2.0),
            "sd(s(x, df=5))": Exponential(0.3),
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampling = replace(QUICK["sampling"], seed=3)
        model.fit(frame, {"image": images}, **QUICK | {"sampling": sampling})
    return frame.drop(index=4), images[torch.arange(30) != 4], model


def same(found, model, frame, images):
    rows, inputs = frame.iloc[:7], {"image": images[:7]}
    assert torch.equal(found.predict(rows, inputs).outputs, model.predict(rows, inputs).outputs)
    pd.testing.assert_frame_equal(found.summary(), model.summary())
    assert np.array_equal(found.loo(quiet=True).pointwise, model.loo(quiet=True).pointwise)
    assert np.array_equal(found.effect("s(x, df=5)").draws, model.effect("s(x, df=5)").draws)
    assert repr(found) == repr(model)
    assert found.classes == ("bad", "fair", "good")
    assert found.state.model.dropped == 1
    assert repr(found.state.model.structured.priors) == repr(model.state.model.structured.priors)


def test_a_loaded_model_gives_the_same_results(fitted, tmp_path):
    frame, images, model = fitted
    assert model.save(tmp_path / "model") == tmp_path / "model"
    assert {p.suffix for p in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}
    module = cnn()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    loaded = SemiStructuredRegression.load(tmp_path / "model", {"image": module})
    same(loaded, model, frame, images)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.training
    assert torch.equal(loaded.space.curve.points, model.space.curve.points)
    assert loaded.space.history == model.space.history
    assert loaded.draws.meta == model.draws.meta
    columns = loaded.state.model.frame
    assert "unused" not in columns
    for name in columns:
        pd.testing.assert_series_equal(columns[name], model.state.model.frame[name])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "again",
    [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, lambda m: _by_joblib(m)],
    ids=["pickle", "deepcopy", "joblib"],
)
def test_a_copied_model_gives_the_same_results(fitted, again):
    frame, images, model = fitted
    same(again(model), model, frame, images)


def _by_joblib(model):
    import io

    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


def test_loading_requires_what_a_file_cannot_contain(fitted, tmp_path):
    _, _, model = fitted
    path = model.save(tmp_path / "model")
    with pytest.raises(InputError, match="overwrite"):
        model.save(path)
    model.save(path, overwrite=True)
    with pytest.raises(InputError, match=r"networks\['image'\].*got none. Pass load\(path, netw"):
        SemiStructuredRegression.load(path)
    with pytest.raises(InputError, match=r"networks\['image'\]: expected the saved architecture"):
        SemiStructuredRegression.load(path, {"image": cnn(3)})
    with pytest.raises(InputError, match="names in the formula: image, table, got other"):
        SemiStructuredRegression.load(path, {"other": cnn()})
    with pytest.raises(InputError, match="a fitted model"):
        Regression("y ~ x").save(tmp_path / "new")
    frame = pd.DataFrame({"x": np.arange(9.0), "y": np.arange(9.0) % 4})
    own = Regression("y ~ x", priors={"x": Wide(0.0, 9.0)}).fit(frame, sampling=QUICK["sampling"])
    path = own.save(tmp_path / "own")
    with pytest.raises(InputError, match=r"priors\['x'\]: expected the prior Wide\(mean=0"):
        Regression.load(path)
    loaded = Regression.load(path, priors={"x": Wide(0.0, 9.0)})
    assert torch.equal(loaded.predict(frame).outputs, own.predict(frame).outputs)


# --- damaged and older files ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"x": rng.normal(size=20), "g": rng.choice(["a", "b"], 20), "y": rng.normal(size=20)}
    )
    priors = {"sigma": 0.5, "x": 2, "C(g)": StudentT(3, 1.0)}
    model = SemiStructuredRegression(
        "y ~ x + C(g) + net(x)", networks={"net": MLP(1, (2,), 1)}, priors=priors, weights="x"
    )
    frame["x"] = frame["x"].abs()
    return model.fit(frame, **QUICK), tmp_path_factory.mktemp("small")


def reloaded(saved, path, facts=None, tensors=None):
    """Load the artifact with other facts and tensors; `None` removes a tensor."""
    changed = {k: v for k, v in (saved.tensors | (tensors or {})).items() if v is not None}
    artifact.write(path, saved.kind, changed, facts or saved.facts, overwrite=True)
    return SemiStructuredRegression.load(path)


def replaced(facts, place, value):
    """A copy of facts with another value at a place, such as ("space", "rank")."""
    facts = copy.deepcopy(facts)
    inner = facts
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return facts


DAMAGED = [
    (("formula",), 1),
    (("formula",), "y ~"),
    (("formula",), "y ~ x"),  # without C(g): a column that the model does not read
    (("formula",), "y ~ x + w"),
    (("formula",), {"mu": "y ~ x + C(g)", "tau": "~ x"}),
    (("family",), {"name": "os.system", "links": ["identity", "log"]}),
    (("family",), {"name": "normal", "links": ["identity"]}),
    (("family",), {"name": "normal", "links": ["identity", "logit"]}),
    (("family",), {"name": "normal", "n_classes": 3}),
    (("family",), {"name": "ordinal", "n_classes": 10**9}),
    (("family",), {"name": "ordinal", "links": ["identity"]}),
    (("family",), {"name": "ordinal", "n_classes": 3, "cumulative": "log"}),
    (("priors", "x"), float("nan")),
    (("priors", "x"), -1.0),
    (("priors", "x"), {"name": "normal", "options": {"mean": 0.0, "scale": -1.0}}),
    (("priors", "x"), {"name": "normal", "options": {"size": 1.0}}),
    (("priors", "nothing"), {"name": "normal", "options": {"mean": 0.0, "scale": 1.0}}),
    *(
        (
            ("priors", "x"),
            {"name": "scipy", "distribution": name, "args": args, "kwds": kwds, "factor": 1.0}
            | {"student": student},
        )
        for name, args, kwds, student in (
            ("bootstrap", [], {}, False),
            ("__loader__", [], {}, False),
            ("poisson", [1.0], {}, False),
            ("rv_histogram", [1.0], {}, False),
            ("studentized_range", [3.0, 10.0], {}, False),  # would integrate for minutes
            ("norm", [1.0, 2.0, 3.0], {}, False),
            ("norm", [], {"size": 10**9}, False),
            ("norm", [0.0, -1.0], {}, False),
            ("t", [], {}, True),
        )
    ),
    (("weights",), "w"),
    (("offset",), "w"),
    (("exposure",), "x"),
    (("seed",), -1),
    (("mode",), "jit"),
    (("dropped",), -1),
    (("columns", 0, "name"), "g"),
    (("columns", 0, "dtype"), "complex128"),
    (("columns", 0, "dtype"), "category"),
    (("columns", 0, "dtype"), "datetime64[ns]"),
    (("columns", 0), {"name": "y", "dtype": "object", "levels": ["a"]}),
    (("columns", 1, "levels"), ["a"]),
    (("columns", 1, "levels"), ["a", "a"]),
    (("columns", 1, "levels"), ["a", None]),
    (("columns", 1, "levels"), ["a", ["b"]]),
    (("networks", "net", "parameter"), "tau"),
    (("networks", "net", "columns"), ["w"]),
    (("networks", "net", "columns"), ["x", "y"]),
    (("networks", "net", "trained"), ["layers.9.weight"]),
    (("networks", "net", "trained"), []),
    (("networks", "net", "module", "hidden"), [3]),
    (("networks", "net", "module", "activation"), "system"),
    (("space", "rank"), 1),
    (("space", "subspace", "effects"), 1),
    (("space", "subspace", "inner", "rank"), 1),
    (("space", "prior", "scale"), [1.0, 2.0]),
    (("space", "prior", "scale"), -1.0),
    (("space", "curve"), "line"),
    (("draws", "temperature"), 0.0),
    (("draws", "validity"), "perfect"),
]


@pytest.mark.few(32)
@pytest.mark.parametrize(("place", "value"), DAMAGED)
def test_facts_that_do_not_fit_are_refused_in_one_line(small, place, value):
    model, folder = small
    saved = artifact.read(model.save(folder / "model", overwrite=True))
    with pytest.raises((InputError, TypeError)) as error:
        reloaded(saved, folder / "forged", replaced(saved.facts, place, value))
    assert type(error.value).__module__.startswith("subbayes")
    assert "\n" not in str(error.value)


def test_networks_are_orthogonal_to_the_same_columns_after_loading(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": rng.integers(0, 4, 30), "y": rng.normal(size=30)})
    deep = {"net": MLP(1, (2,), 1)}
    model = SemiStructuredRegression("y ~ 1 + (1 | g) + net(g)", networks=deep).fit(frame, **QUICK)
    loaded = SemiStructuredRegression.load(model.save(tmp_path / "model"))
    assert loaded.orthogonal_to == model.orthogonal_to
    np.testing.assert_array_equal(loaded.predict(frame).mean, model.predict(frame).mean)


def test_tensors_that_do_not_fit_are_refused_in_one_line(small):
    model, folder = small
    saved = artifact.read(model.save(folder / "model", overwrite=True))
    tensors = saved.tensors
    for name, value in {
        "rows.0": tensors["rows.0"][:-1].clone(),
        "rows.1": tensors["rows.1"] + 1,
        "rows.2": tensors["rows.2"] * torch.nan,
        "starts": tensors["starts"][:0].clone(),
        "curve": tensors["curve"][:, 1:].clone(),
        "z": tensors["z"][..., 1:].clone(),
        "space.inner.shift": tensors["space.inner.shift"][1:].clone(),
        "network0.layers.0.weight": None,
        "network0.layers.0.bias": torch.zeros(3),
        "inputs.net": torch.zeros(20, 1),
        "other": torch.zeros(1),
    }.items():
        with pytest.raises(InputError) as error:
            reloaded(saved, folder / "forged", tensors={name: value})
        assert "\n" not in str(error.value)


def test_numbers_are_saved_as_numbers(small):
    model, folder = small
    saved = artifact.read(model.save(folder / "model", overwrite=True))
    assert saved.facts["priors"] == {"sigma": 0.5, "x": 2.0} | saved.facts["priors"]
    now = reloaded(saved, folder / "forged").state.model.structured.priors
    assert now["sigma.Intercept"] == HalfNormal(0.5)
    assert now["x"] == NormalPrior(0.0, 2.0)


def test_splines_that_a_formula_leaves_out_are_not_counted(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "y": rng.normal(size=60)})
    formula = "y ~ bs(x, df=6) + bs(x,  df=6) + bs(x, df=50) - bs(x,df=50)"
    model = Regression(formula).fit(frame, sampling=QUICK["sampling"])
    again = Regression.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(frame).mean, model.predict(frame).mean)


@pytest.mark.parametrize(
    ("formula", "options"),
    [
        ("y ~ x + offset(o)", {}),
        ("y ~ offset(o)", {}),
        ("n ~ x + offset( log(t) )", {"family": "poisson"}),
        ("y ~ x + offset(o)", {"offset": "o"}),
        ({"mu": "y ~ x", "sigma": "~ offset(o)"}, {}),
    ],
)
def test_offsets_are_no_effects_when_a_file_is_checked(tmp_path, formula, options):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=40) for name in "yxo"})
    frame = frame.assign(n=rng.poisson(2.0, 40), t=rng.uniform(1, 2, 40))
    model = Regression(formula, **options).fit(frame, sampling=QUICK["sampling"])
    again = Regression.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(frame).mean, model.predict(frame).mean)


def members_at_start(posterior, sampling):
    return Draws(sampling.initial[:, None], validity="ensemble")


def test_an_ensemble_is_saved_as_one_and_not_as_a_posterior(small):
    _, folder = small
    frame = pd.DataFrame({"x": np.linspace(-1, 1, 20), "y": np.linspace(0, 1, 20) ** 2})
    model = SemiStructuredRegression("y ~ x + net(x)", networks={"net": MLP(1, (2,), 1)})
    model.fit(frame, **(QUICK | {"inference": members_at_start}))
    model.save(folder / "model", overwrite=True)
    assert not SemiStructuredRegression.load(folder / "model").is_posterior


def test_a_file_does_not_start_a_compiler(small):
    model, folder = small
    saved = artifact.read(model.save(folder / "model", overwrite=True))
    for stored, loaded in {"compile": "trace", "trace": "trace", "eager": "eager"}.items():
        found = reloaded(saved, folder / "forged", replaced(saved.facts, ("mode",), stored))
        assert found.state.joint.mode == loaded


# --- priors in a file, and objects that only the caller has ---------------------------------------


def scipy_prior(**changes):
    options = {"distribution": "norm", "args": [], "kwds": {}, "factor": 1.0} | changes
    return {"name": "scipy", "options": options}


def test_few_priors_of_a_file_have_tables_and_terms_share_them(small):
    model, folder = small
    saved = artifact.read(model.save(folder / "model", overwrite=True))
    laplace = scipy_prior(distribution="laplace")
    facts = replaced(saved.facts, ("priors",), {"x": laplace, "C(g)": dict(laplace)})
    priors = reloaded(saved, folder / "forged", facts).state.model.structured.priors
    assert priors["x"] is priors["C(g)"]
    many = {f"x{i}": scipy_prior(args=[float(i)]) for i in range(1001)}
    with pytest.raises(InputError, match="at most 1000 different priors"):
        reloaded(saved, folder / "forged", replaced(saved.facts, ("priors",), many))


def own_prior(factor):
    """A prior of a user's class, whose text does not show the factor."""

    class Own(EffectPrior):
        def from_standard(self, zeta):
            return factor * zeta.sinh()

    return Own()


def own_family(power, links=("identity", "log")):
    return Custom(
        log_prob=lambda y, m, s: -(((y - m) / s).abs() ** power) - s.log(),
        parameters=("m", "s"),
        links=links,
        variance_of=lambda m, s: s**2,
    )


@pytest.fixture(scope="module")
def with_own(tmp_path_factory):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 30))
    frame = pd.DataFrame({"x": x, "w": w, "v": x * w, "y": x + rng.normal(size=30)})
    priors = {"x": own_prior(1.0), "w": stats.skewnorm(3), "v": stats.laplace(scale=0.5)}
    model = Regression("y ~ x + w + v", family=own_family(1.5), priors=priors)
    path = tmp_path_factory.mktemp("own") / "model"
    return model.fit(frame, sampling=QUICK["sampling"]).save(path), model


OWN = {"family": own_family(1.5), "priors": {"x": own_prior(1.0), "w": stats.skewnorm(3)}}


@pytest.mark.parametrize("prior", [stats.skewnorm(a=3), stats.skewnorm(3, loc=0, scale=1.0)])
def test_objects_of_the_fitted_model_are_accepted(with_own, prior):
    path, model = with_own
    given = OWN | {"priors": OWN["priors"] | {"w": prior, "v": stats.laplace(0, 0.5)}}
    loaded = load(path, **given)
    pd.testing.assert_frame_equal(loaded.summary(), model.summary())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": stats.skewnorm(30)}, "family or priors: expected those of the fitted model, under"),
        ({"v": NormalPrior(0, 50)}, "family or priors: expected those of the fitted model, under"),
        ({"x": NormalPrior(0, 1)}, "family or priors: expected those of the fitted model, under"),
        ({"x": own_prior(2.0)}, "family or priors: expected those of the fitted model, under"),
        ({"X": 1.0}, r"priors: expected names of priors in the file: x, w, v, got 'X'. Did you"),
        ({"v": "wide"}, r"priors\['v'\]: expected a prior, a number"),
    ],
)
def test_other_priors_than_those_of_the_fitted_model_are_refused(with_own, change, message):
    with pytest.raises((InputError, TypeError), match=message):
        load(with_own[0], **OWN | {"priors": OWN["priors"] | change})


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (NormalFamily(), r"family: expected the saved custom\(m: identity, s: log\), got normal"),
        (own_family(1.5, ("identity", "logm1")), "family: expected the saved custom"),
        (own_family(2.0), "family or priors: expected those of the fitted model, under which"),
        (3, "family: expected a Family, the one that the model was fitted with, got int"),
        ("normal", "family: expected a Family, the one that the model was fitted with, got str"),
    ],
)
def test_another_family_than_that_of_the_fitted_model_is_refused(with_own, family, message):
    with pytest.raises((InputError, TypeError), match=message):
        load(with_own[0], **OWN | {"family": family})


def test_objects_that_contradict_the_file_are_refused(small):
    model, folder = small
    path = model.save(folder / "model", overwrite=True)
    same = {"family": NormalFamily(), "priors": {"sigma": 0.5, "C(g)": StudentT(3, 1.0)}}
    assert repr(load(path, **same)) == repr(model)
    for given, message in {
        "family": (StudentTFamily(), "family: expected the saved normal"),
        "priors": (
            {"C(g)": StudentT(4, 1.0)},
            r"expected the saved StudentT\(df=3, scale=1\), got",
        ),
    }.items():
        with pytest.raises(InputError, match=message[1]):
            load(path, **{given: message[0]})


def test_a_module_that_computes_something_else_is_refused(tmp_path):
    def module(function):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(1, 3), nn.Linear(3, 1)

            def forward(self, x):
                return self.outer(function(self.inner(x)))

        return Net()

    frame = pd.DataFrame({"x": np.linspace(-2, 2, 20), "y": np.linspace(-1, 2, 20) ** 2})
    deep = {"net": module(torch.tanh)}
    model = SemiStructuredRegression("y ~ net(x)", networks=deep).fit(frame, **QUICK)
    path = model.save(tmp_path / "model")
    assert repr(load(path, networks={"net": module(torch.tanh)})) == repr(model)
    with pytest.raises(
        InputError, match="networks: expected those of the fitted model, under which"
    ):
        load(path, networks={"net": module(torch.relu)})


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "column",
    [
        np.arange(40).astype(">f8") % 7,
        (np.arange(40) % 3).astype(">i4"),
        np.arange(40).astype(np.longdouble),
        pd.arrays.SparseArray(np.arange(40.0) % 5),
        pd.Categorical(np.where(np.arange(40) % 3, 1e20, 2.0)),
        pd.Categorical(pd.Series([2**63 + 1, 2] * 20, dtype="uint64")),
        "bool[pyarrow]",
        "halffloat[pyarrow]",
        "string[pyarrow]",
        "dictionary",
    ],
    ids=str,
)
def test_columns_of_any_format_are_saved(column, tmp_path):
    if isinstance(column, str):
        pa = pytest.importorskip("pyarrow")
        kind = {
            "bool[pyarrow]": pa.bool_(),
            "halffloat[pyarrow]": pa.float16(),
            "string[pyarrow]": pa.string(),
            "dictionary": pa.dictionary(pa.int32(), pa.string()),
        }[column]
        numbers = np.arange(40) % 2
        plain = ["ab"[i] for i in numbers] if "string" in str(kind) else numbers
        plain = numbers.astype(bool) if kind == pa.bool_() else plain
        plain = plain.astype("float16") if kind == pa.float16() else plain
        column = pd.Series(plain).astype(pd.ArrowDtype(kind))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": column, "y": rng.normal(size=40)})
    formula = "y ~ C(x)" if pd.Series(column).dtype == ">i4" else "y ~ x"
    model = Regression(formula).fit(frame, sampling=QUICK["sampling"])
    model.save(tmp_path / "model")
    loaded = Regression.load(tmp_path / "model")
    found = [of.predict(frame.head(5)).mean for of in (model, loaded)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ([["u"], ["v"]] * 20, "x: expected numbers, booleans, text or categories, got a list"),
        (["u", ("v", [1])] * 20, "x: expected numbers, booleans, text or categories, got a tuple"),
        (pd.Categorical([1.0, np.inf] * 20), "x: expected categories that are text or finite"),
    ],
)
def test_cells_that_cannot_be_saved_are_refused_in_fit(values, pattern):
    x = pd.Series(values, dtype=None if isinstance(values, pd.Categorical) else object)
    frame = pd.DataFrame({"x": x, "y": np.random.default_rng(0).normal(size=40)})
    with pytest.raises(InputError, match=pattern):
        Regression("y ~ x").fit(frame)


def test_lists_in_new_rows_are_refused(fitted):
    frame, images, model = fitted
    for name in ("sex", "school", "x"):
        cells = pd.Series([[1]] * 5, dtype=object, index=frame.index[:5])
        with pytest.raises(InputError, match=f"{name}: .* got .*"):
            model.predict(frame.head(5).assign(**{name: cells}), {"image": images[:5]})


def test_networks_of_16_bits_are_refused():
    with pytest.raises(InputError, match="'f'.*: expected a module of float32 or float64, got"):
        SemiStructuredRegression("y ~ f(x)", networks={"f": MLP(1, (3,), 1).bfloat16()})


def test_networks_keep_their_dtype(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(30, 2)), columns=["x", "y"])
    deep = {"f": MLP(1, (3,), 1).double()}
    model = SemiStructuredRegression("y ~ f(x)", networks=deep).fit(frame, **QUICK)
    model.save(tmp_path / "model")
    loaded = SemiStructuredRegression.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(frame).mean, model.predict(frame).mean)


@pytest.mark.slow
def test_predictions_in_threads_leave_the_filters_of_warnings_alone(fitted):
    frame, images, model = fitted
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with ThreadPoolExecutor(4) as pool:
            rows = [(frame.iloc[[i]], {"image": images[i : i + 1]}) for i in range(20)]
            means = list(pool.map(lambda row: model.predict(*row).mean, rows))
        # pandas itself may leave filters of single categories behind
        with pytest.raises(UserWarning, match="still an error"):
            warnings.warn("still an error", UserWarning, stacklevel=1)
    alone = [model.predict(*row).mean for row in rows]
    np.testing.assert_array_equal(means, alone)


@pytest.mark.parametrize(
    ("formula", "weights"),
    [
        ("y ~ s(x)", None),
        ("y ~ s(x, by=g, bs='cr', k=4)", None),
        ("y ~ mo(g)", "w"),
        ("y ~ gp(x, k=4)", "w"),
        ("y ~ x + (1 | g)", None),
    ],
)
def test_terms_predict_the_same_after_loading(tmp_path, formula, weights):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=40), "g": np.arange(40) % 3, "w": 2.0})
    frame["y"] = rng.normal(size=40)
    model = Regression(formula, weights=weights).fit(frame, sampling=QUICK["sampling"])
    found = Regression.load(model.save(tmp_path / "model")).predict(frame).mean
    np.testing.assert_array_equal(found, model.predict(frame).mean)


class Shifted(nn.Module):
    """A network with a tensor that it keeps as a plain attribute."""

    def __init__(self, bend):
        super().__init__()
        self.inner, self.outer, self.bend = nn.Linear(1, 3), nn.Linear(3, 1), torch.tensor(bend)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x) * self.bend))


def test_compiled_networks_and_their_plain_tensors_are_saved(tmp_path):
    frame = pd.DataFrame({"x": np.linspace(-2, 2, 20), "y": np.linspace(-1, 2, 20) ** 2})
    validates = torch.distributions.Distribution._validate_args
    compiled = [torch.compile(Shifted(value)) for value in (2.0, 3.0)]
    torch.distributions.Distribution.set_default_validate_args(validates)  # torch turns it off
    deep = {"net": compiled[0]}
    model = SemiStructuredRegression("y ~ net(x)", networks=deep).fit(frame, **QUICK)
    path = model.save(tmp_path / "model")
    for other in (Shifted(3.0), compiled[1]):
        again = load(path, networks={"net": other})
        assert np.array_equal(again.predict(frame).mean, model.predict(frame).mean)

"""Artifacts with digests that fit, whose types, sizes or ranges do not.

Random mutations change one part; these change several, as an attacker would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import subbayes
from fuzz.models import FRAME, MODELS, X, Y
from subbayes import InputError, InputTypeError
from subbayes.artifacts import folder as artifact
from subbayes.regression.terms.columns import FormulaColumns

Facts = dict[str, Any]
Tensors = dict[str, Tensor]
Change = Callable[[Tensors, Facts], Any]

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Tensors, Facts, str]]:
    """The content of an artifact of each example, made once."""
    made: dict[str, Any] = {}
    folder = tmp_path_factory.mktemp("stored")

    def content(name: str) -> tuple[Tensors, Facts, str]:
        if name not in made:
            if "realnvp" in name and find_spec("zuko") is None:  # its import has effects
                pytest.skip("needs zuko")
            MODELS[name].make(folder / name)
            made[name] = artifact.read(folder / name)
        tensors, facts, kind = made[name]
        return (
            {name: tensor.clone() for name, tensor in tensors.items()},
            copy.deepcopy(facts),
            kind,
        )

    return content


def check_refused(path: Path, content: tuple[Tensors, Facts, str], use: Callable[[Path], Any]):
    tensors, facts, kind = content
    artifact.write(path, kind, tensors, facts)
    with pytest.raises(InputError) as caught:
        use(path)
    assert "\n" not in str(caught.value)


def set_fact(facts: Facts, place: str, value: Any) -> None:
    *outer, last = place.split("/")
    for key in outer:
        facts = facts[key]
    facts[last] = value


def full_of_rank_1(tensors: Tensors, facts: Facts) -> None:
    facts["subspace"]["rank"] = 1
    facts["draws"]["prediction"] = "network"
    tensors["z"] = tensors["z"][..., :1].contiguous()
    for name in [name for name in tensors if name.startswith("moments")]:
        del tensors[name]


def one_index(tensors: Tensors, facts: Facts) -> None:
    tensors["subspace.indices"] = tensors["subspace.indices"][:1].clone()


def no_draws(tensors: Tensors, facts: Facts) -> None:
    for name in [name for name in tensors if name == "z" or name.startswith("stats.")]:
        tensors[name] = tensors[name][:, :0].contiguous()


def statistic(name: str, value: float) -> Change:
    def change(tensors: Tensors, facts: Facts) -> None:
        shape = tensors["z"].shape[:2]
        tensors[f"stats.{name}"] = torch.full(shape, value, dtype=torch.float64)

    return change


def huge_draws(tensors: Tensors, facts: Facts) -> None:
    tensors["z"] = torch.full_like(tensors["z"], 1e200)


def numeric_twice(tensors: Tensors, facts: Facts) -> None:
    numeric = facts["encoder"]["numeric"]
    for name in numeric:
        numeric[name] = numeric[name] + numeric[name][:1]


def of_labels(classes: list[Any], dtype: str) -> Change:
    return lambda tensors, facts: facts.update(classes=classes, dtype=dtype)


def bernoulli(tensors: Tensors, facts: Facts) -> None:
    facts["model"]["facts"]["likelihood"] = {"name": "bernoulli"}


def classification(*classes: str) -> Change:
    return lambda tensors, facts: facts["target"].update(
        task="classification", classes=list(classes)
    )


def without_buffers_of_one(tensors: Tensors, facts: Facts) -> None:
    facts["own_buffers"] = True
    tensors["buffers.7.norm"] = torch.zeros(2)


def formula(text: str) -> Change:
    return lambda tensors, facts: facts.update(formula=text)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, facts: tensors.update({name: change(tensors[name]).contiguous()})


def factors_of_groups(tensors: Tensors, facts: Facts) -> None:
    """As many groups as outputs, of a layer that has one group."""
    o, i = tensors["values.0"].shape[1:]
    tensors["values.0"] = tensors["values.0"].reshape(o, 1, i)
    tensors["outer.0"] = torch.ones(o, 1, 1, dtype=torch.float64)
    tensors["inner.0"] = torch.eye(i, dtype=torch.float64).expand(o, i, i).contiguous()


def encoding(name: str, value: Any) -> Change:
    return lambda tensors, facts: facts["encoder"]["options"].update({name: value})


def option(name: str, value: Any) -> Change:
    return lambda tensors, facts: facts["precision"]["options"].update({name: value})


def fact(place: str, value: Any) -> Change:
    return lambda tensors, facts: set_fact(facts, place, value)


SAMPLED = "laplace-sampled"
FITTED = "fitted-full-linearised"
TERMS = "semi-structured-terms"
OF_LAPLACE: dict[str, tuple[str, Change]] = {
    "eigenvectors that overflow": ("laplace-kfac", tensor("inner.1", lambda t: t * 0 + 1e300)),
    "eigenvalues beyond the prior": ("laplace-kfac", tensor("values.0", lambda t: t + 1e300)),
    "factors of groups": ("laplace-kfac", factors_of_groups),
    "a basis of NaN": ("laplace-subspace", tensor("metric", lambda t: t * np.nan)),
    "a negative matrix in a subspace": ("laplace-subspace", tensor("matrix", torch.neg)),
    "no subspace": ("laplace-subspace", fact("precision/form", "primal")),
    "an indefinite matrix": (
        "laplace-primal",
        tensor("matrix", lambda t: t.diag().diag() + t.max() * (1 - torch.eye(len(t)))),
    ),
    "an indefinite Gram matrix": ("laplace-dual", tensor("matrix", lambda t: t - t.mean())),
    "a Gram matrix of other rows": ("laplace-dual", tensor("matrix", lambda t: t[:5, :5])),
    "a Gram matrix of other data": ("laplace-dual", tensor("matrix", lambda t: 1.01 * t)),
    "a Gram matrix in another order": ("laplace-dual", tensor("matrix", lambda t: t.flip(0, 1))),
    "negative eigenvalues of low rank": ("laplace-low-rank", tensor("values", torch.neg)),
    "iterations without end": ("laplace-low-rank", option("iterations", 10**15)),
    "many iterations": ("laplace-low-rank", option("iterations", 10**6)),
    "a tolerance below rounding": ("laplace-low-rank", option("tolerance", 1e-300)),
    "an option of text": ("laplace-low-rank", option("seed", "0")),
    "another option": ("laplace-low-rank", option("rank", 3)),
    "no error of the draws": (SAMPLED, fact("precision/residual", None)),
    "negative standard deviations": (FITTED, tensor("moments.sd", torch.neg)),
}


def likelihood_of(name: str, **options: Any) -> Change:
    """Another likelihood of the innermost model."""

    def change(tensors: Tensors, facts: Facts) -> None:
        while "model" in facts:
            facts = facts["model"]["facts"]
        config = {"name": name, **options}
        if "likelihoods" in facts:
            facts["likelihoods"] = [config]
        else:
            facts["likelihood"] = config

    return change


SEVEN = likelihood_of("categorical", n_classes=7)
KINDS = (
    "fitted-pca", "fitted-own-classes", "laplace-primal", "mc-dropout", "samples",
    "sparse-mean-field", "temperature-scaled", "data-frame-sparse", "estimator-classifier",
)  # fmt: skip


MANY = "y ~ a + C(c) + " + " + ".join(f"s(a, k=990, degree={i})" for i in range(1, 11))


LONG = "x" * 1001


def a_long_level(tensors: Tensors, facts: Facts) -> None:
    facts["encoder"]["categorical"]["levels"][0][-1] = "z" + LONG


CONTRADICTIONS: dict[str, tuple[str, Change]] = {
    "a name of many characters": ("samples", fact("name", LONG)),
    "a formula of many characters": ("semi-structured", fact("formula", "y ~ a" + " + a" * 2500)),
    "a subspace of many characters": ("fitted-pca", fact("settings/subspace", "own" + LONG)),
    "an engine of many characters": ("fitted-pca", fact("draws/engine", "own" + LONG)),
    "a network of many characters": (
        "semi-structured",
        lambda tensors, facts: facts["networks"].update({LONG: facts["networks"].pop("net")}),
    ),
    "a level of many characters": ("data-frame", a_long_level),
    "a mark of many characters": (
        "data-frame-sparse",
        fact("encoder/options/missing_values", [LONG]),
    ),
    "a level of many characters in a formula": (
        "semi-structured",
        lambda tensors, facts: [
            c["levels"].append(LONG) for c in facts["columns"] if c["levels"] is not None
        ],
    ),
    "a full subspace of fewer coordinates": ("fitted-full-linearised", full_of_rank_1),
    "fewer indices than coordinates": ("fitted-own-classes", one_index),
    "no draws": ("fitted-pca", no_draws),
    "draws that overflow": ("fitted-pca", huge_draws),
    "divergences that are no numbers": ("fitted-pca", statistic("divergent", np.nan)),
    "divergences between draws that are no numbers": (
        "fitted-pca",
        statistic("divergences", np.nan),
    ),
    "infinite divergences": ("fitted-pca", statistic("divergent", np.inf)),
    "an infinite barrier": ("fitted-pca", statistic("barrier", np.inf)),
    "an engine that is no text": (
        "fitted-pca",
        lambda tensors, facts: set_fact(facts, "settings/inference", []),
    ),
    **{
        f"control characters: {name} {place}": (name, fact(place, "a\x1b[31m\n"))
        for name, place in (
            ("fitted-pca", "draws/engine"),
            ("fitted-pca", "settings/subspace"),
            ("fitted-pca", "settings/inference"),
            ("samples", "name"),
            ("mc-dropout", "name"),
        )
    },
    **{
        f"an estimator of {name} {str(value)[:30]}": (
            "estimator-classifier",
            fact(f"params/{name}", value),
        )
        for name, value in (("network", {"hidden": "many"}), ("bogus", 1))
    },
    "start points that overflow": ("semi-structured", tensor("starts", lambda t: t * 0 + 1e30)),
    "more dropped rows than float64 counts": ("semi-structured", fact("dropped", 2**53)),
    "a space of no kind": ("semi-structured", fact("space/kind", "<b>")),
    "a column twice": ("data-frame", numeric_twice),
    "an unknown column is flagged": (
        "data-frame",
        lambda tensors, facts: set_fact(facts, "encoder/flagged", ["z"]),
    ),
    "a list as marker": ("data-frame", encoding("missing_values", [[0]])),
    "an unknown option": ("data-frame", encoding("seed", 0)),
    "fewer classes than outputs": ("data-frame-sparse", classification("x", "y")),
    "labels that are cut": ("estimator-classifier", of_labels(["abc", "abd", "b"], "<U2")),
    "labels that are rounded": ("estimator-classifier", of_labels([0.4, 0.6, 1.2], "<i8")),
    "labels as flags": ("estimator-classifier", of_labels([0, 1, 2], "|b1")),
    "labels beyond their dtype": ("estimator-classifier", of_labels([0, 1, 300], "|u1")),
    "equal labels": ("estimator-classifier", of_labels([0, 0, 1], "<i8")),
    "labels that are not sorted": ("estimator-classifier", of_labels([2, 1, 0], "<i8")),
    "probabilities of each class alone": ("estimator-classifier", bernoulli),
    **{f"seven classes: {name}": (name, SEVEN) for name in KINDS},
    "more classes than memory": ("samples", likelihood_of("categorical", n_classes=2**62)),
    "classes of one output": ("samples", likelihood_of("categorical", n_classes=None)),
    "weighted classes of one output": (
        "mc-dropout",
        likelihood_of("Weighted", likelihood={"name": "categorical", "n_classes": 7}),
    ),
    "one logit of three outputs": ("fitted-own-classes", likelihood_of("bernoulli")),
    "weighted logit of three outputs": (
        "fitted-own-classes",
        likelihood_of("Weighted", likelihood={"name": "bernoulli"}),
    ),
    "negative eigenvalues": (
        "laplace-kfac",
        lambda tensors, facts: tensors.update({"values.0": -1 - tensors["values.0"]}),
    ),
    "buffers of no weight vector": ("samples", without_buffers_of_one),
    "splines of 1_000": ("semi-structured", formula("y ~ a + C(c) + s(a, df=1_000)")),
    "splines in hexadecimal": ("semi-structured", formula("y ~ a + C(c) + s(a, df=0x3e8)")),
    "splines of an expression": ("semi-structured", formula("y ~ C(c) + s(I(a), df=1000)")),
    "a smooth of many functions": ("semi-structured", formula("y ~ s(a, bs='cr', k=1000)")),
    "a large tensor product": ("semi-structured", formula("y ~ C(c) + te(a, b, k=50)")),
    "a large Gaussian process": ("semi-structured", formula("y ~ C(c) + gp(a, k=500)")),
    "splines that vary among groups": ("semi-structured", formula("y ~ (bs(a, df=900) | c)")),
    "groups of another column": (TERMS, formula("y ~ (1 + b | a)")),
    "correlations of a normal": (
        TERMS,
        fact("priors/cor(c)", {"name": "NormalPrior", "options": {"mean": 0.0}}),
    ),
    "a negative eta": (TERMS, fact("priors/cor(c)", {"name": "LKJ", "options": {"eta": -1.0}})),
    "an option of no prior": (
        TERMS,
        fact("priors/simplex(mo(d))", {"name": "Dirichlet", "options": {"eta": 1.0}}),
    ),
    "many splines": ("semi-structured", formula(MANY)),
    "a formula that takes long to match": (
        "semi-structured",
        formula("y ~ a + " + "a" * 3000 + "(" + "df=1," * 1200),
    ),
}


@pytest.mark.parametrize("what", OF_LAPLACE)
def test_contradictions_of_laplace_are_refused(tmp_path: Path, stored: Any, what: str):
    name, change = OF_LAPLACE[what]
    tensors, facts, kind = stored(name)
    data = {"data": (X, Y)} if name in ("laplace-dual", "laplace-low-rank") else {}
    artifact.write(tmp_path / "genuine", kind, tensors, facts)
    subbayes.load(tmp_path / "genuine", **data)
    change(tensors, facts)
    check_refused(tmp_path / "forged", (tensors, facts, kind), partial(subbayes.load, **data))


FAMILIES: dict[str, tuple[Any, str]] = {
    "ordinal": ({"name": "ordinal", "n_classes": 3}, "expected 3 outputs for ordinal"),
    "ordinal of too many classes": (
        {"name": "ordinal", "n_classes": 30_000_000},
        r"n_classes'\]: expected at most 100000",
    ),
    "ordinal without classes": ({"name": "ordinal", "n_classes": None}, "n_classes: expected"),
    "categorical": ({"name": "categorical"}, "expected at least 2 outputs for categorical"),
    "weibull": ({"name": "weibull", "links": ["log", "log"]}, "expected 2 outputs for weibull"),
    "piecewise": ({"name": "piecewise-exponential", "cuts": [0.1, 0.2]}, "expected 3 outputs"),
    "mixture": (
        {
            "name": "mixture",
            "first": {"name": "normal", "links": ["identity", "log"]},
            "second": {"name": "normal", "links": ["identity", "log"]},
        },
        "expected 5 outputs for mixture",
    ),
    "censored": (
        {
            "name": "censored",
            "family": {"name": "weibull", "links": ["log", "log"]},
            "status": "x",
            "upper": None,
        },
        "expected 2 outputs for censored weibull",
    ),
}


@pytest.mark.parametrize("what", FAMILIES)
@pytest.mark.parametrize("name", ["fitted-pca", "samples", "mc-dropout"])
def test_families_of_other_numbers_of_outputs_are_refused(
    tmp_path: Path, stored: Any, name: str, what: str
):
    tensors, facts, kind = stored(name)
    config, words = FAMILIES[what]
    if "likelihoods" in facts:
        facts["likelihoods"] = [config] * len(facts["likelihoods"])
    else:
        facts["likelihood"] = config
    artifact.write(tmp_path / "forged", kind, tensors, facts)
    with pytest.raises((InputError, InputTypeError), match=words):
        subbayes.load(tmp_path / "forged")


@pytest.mark.few(7)
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_refused(tmp_path: Path, stored: Any, what: str):
    name, change = CONTRADICTIONS[what]
    tensors, facts, kind = stored(name)
    change(tensors, facts)
    check_refused(tmp_path / "forged", (tensors, facts, kind), subbayes.load)


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [
        ("fitted-pca", "subspace.basis", 3e38),
        ("fitted-pca", "subspace.shift", 3e38),
        ("samples", "weights", 3e38),
        ("mc-dropout", "weights", -3e38),
        ("fitted-full-linearised", "subspace.shift", 3e38),
        ("laplace-primal", "weights", 3e38),
        ("laplace-sampled", "weights", 3e38),
    ],
)
def test_predictions_that_are_not_finite_are_refused(
    tmp_path: Path, stored: Any, name: str, tensor: str, value: float
):
    """Weights that are finite, and overflow with the inputs."""
    tensors, facts, kind = stored(name)
    tensors[tensor] = torch.full_like(tensors[tensor], value)
    check_refused(
        tmp_path / "forged",
        (tensors, facts, kind),
        lambda path: subbayes.load(path).predict(1e3 * X).mean,
    )


def _rows(tensors: Tensors, count: int) -> None:
    for name in [name for name in tensors if name.startswith("rows.")]:
        tensors[name] = tensors[name].repeat(count // len(tensors[name]) + 1)[:count]


def classes_of_splines(tensors: Tensors, facts: Facts) -> None:
    """1000 classes, of which each has its own 500 splines."""
    _rows(tensors, 2000)
    facts["formula"] = "c ~ s(a, df=500)"
    facts["family"] = {"name": "categorical", "n_classes": None}
    at = [column["name"] for column in facts["columns"]].index("c")
    facts["columns"][at]["levels"] = [str(i) for i in range(1000)]
    tensors[f"rows.{at}"] = torch.arange(2000) % 1000


def hazards_of_levels(tensors: Tensors, facts: Facts) -> None:
    """The hazard of each of 500 intervals depends on a factor with 1000 levels."""
    _rows(tensors, 2000)
    facts["family"]["cuts"] = [float(i) for i in range(1, 500)]
    at = [column["name"] for column in facts["columns"]].index("a")
    tensors[f"rows.{at}"] = torch.arange(2000) % 1000 + 0.5
    facts["formula"] = "t ~ C(a)"


@pytest.mark.parametrize(
    ("name", "change"),
    [("semi-structured", classes_of_splines), ("semi-structured-hazards", hazards_of_levels)],
)
def test_formulas_of_many_parameters_are_refused_before_they_are_evaluated(
    tmp_path: Path, stored: Any, monkeypatch: pytest.MonkeyPatch, name: str, change: Change
):
    tensors, facts, kind = stored(name)
    change(tensors, facts)
    evaluated = []
    learn = FormulaColumns.learn

    def counted(*args: Any) -> Any:
        evaluated.append(args)
        return learn(*args)

    monkeypatch.setattr(FormulaColumns, "learn", counted)
    check_refused(tmp_path / "forged", (tensors, facts, kind), subbayes.load)
    assert len(evaluated) <= 2


_WITH_EVIDENCE = ("fitted-smc", "fitted-vi", "fitted-parallel-tempering", "fitted-laplace")


@pytest.mark.few(1)
@pytest.mark.parametrize("n", [1, 2, 7, 30, 51])
def test_thinned_draws_are_loaded(tmp_path: Path, stored: Any, n: int):
    for i, name in enumerate(_WITH_EVIDENCE):
        artifact.write(tmp_path / f"whole{i}", *_of_kind(stored(name)))
        model = subbayes.load(tmp_path / f"whole{i}")
        back = subbayes.load(model.save(tmp_path / f"thin{i}", n_draws=n))
        assert back.draws.n_chains * back.draws.n_draws <= max(n, model.draws.n_chains)
        again = subbayes.load(back.save(tmp_path / f"again{i}", n_draws=max(1, n // 2)))
        assert again.draws.log_evidence == pytest.approx(model.draws.log_evidence, nan_ok=True)


def _of_kind(content: tuple[Tensors, Facts, str]) -> tuple[str, Tensors, Facts]:
    tensors, facts, kind = content
    return kind, tensors, facts


def test_facts_for_display_may_be_missing(tmp_path: Path, stored: Any):
    """Warnings of all draws, the method, statistics of a ladder: nothing computes with them."""
    tensors, facts, kind = stored("fitted-pca")
    facts["draws"]["meta"]["thinned_from"] = 100
    del facts["settings"]["subspace"]
    shape = tensors["z"].shape[:2]
    tensors["stats.least_swap_rate"] = torch.full(shape, 0.1, dtype=torch.float64)
    artifact.write(tmp_path / "forged", kind, tensors, facts)
    model = subbayes.load(tmp_path / "forged")
    assert repr(model)
    assert model.describe()
    assert model.label == "posterior + ESS"
    assert model.fit_summary()["method"] == "posterior"
    assert np.isfinite(model.predict(X).mean).all()


def test_loading_networks_keeps_the_random_state(tmp_path: Path, stored: Any):
    tensors, facts, kind = stored("semi-structured")
    artifact.write(tmp_path / "model", kind, tensors, facts)
    before = torch.get_rng_state()
    model = subbayes.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)
    assert np.isfinite(model.predict(FRAME).mean).all()

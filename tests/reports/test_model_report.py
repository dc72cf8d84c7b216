"""A report is one file that needs nothing else, says what is true, and trusts no text."""

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from fits import compare, fit_options
from jinja2 import UndefinedError
from matplotlib.image import imread

import subbayes
from subbayes import MLP, Draws, InputError, InputTypeError, Training, fit
from subbayes.artifacts.files import ArtifactError
from subbayes.baselines.ensemble import WeightSamples
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.function_space import ChainPredictions
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
)
from subbayes.models.fitted import FittedModel, describe
from subbayes.plots.sparse import sparse_history
from subbayes.plots.style import new_axes, png
from subbayes.plots.training import training_history
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.reports import model_report as report
from subbayes.reports.model_report import WORDS, write_report
from subbayes.reports.rendering import Table, _environment, render
from subbayes.tables.stacked import Stack

PLAN = Training(epochs=4, swa_epochs=5, swa_learning_rate=1e-3, batch_size=20)
VOID = {"meta", "img", "br"}


@pytest.fixture(autouse=True)
def one_small_picture(request, monkeypatch):
    """Replace pictures by a small one, because rendering is slow and few tests need it."""
    if "real_pictures" not in request.fixturenames:
        small = png(new_axes(), dpi=10)
        monkeypatch.setattr("subbayes.reports.rendering.png", lambda drawn: small)


@pytest.fixture
def real_pictures():
    """Request real pictures."""


def rows(n=40, columns=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=generator)
    return x, x[:, 0] + 0.3 * torch.randn(n, generator=generator)


def model(likelihood=None, data=None, outputs=1, **options):
    data = rows() if data is None else data
    net = MLP(data[0].shape[1], (5,), outputs, "tanh", seed=0)
    return fit(
        net,
        data,
        **fit_options(
            likelihood=likelihood or Gaussian(),
            training=PLAN,
            progress=False,
            **{"rank": 2, "draws": 12, "chains": 2} | options,
        ),
    )


class Page(HTMLParser):
    """Parse a page, and check that tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.images = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def read(path):
    page = Page(path.read_text(encoding="utf-8"))
    page.sections = re.findall(r"<h2>(.*?)</h2>", path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def fitted():
    return model()


@pytest.fixture(scope="module")
def comparison():
    return compare(
        MLP(2, (5,), 1, "tanh", seed=0),
        Gaussian(),
        rows(),
        rows(30, seed=1),
        ("map", "swag", "pca", "random"),
        training=PLAN,
        rank=2,
        draws=30,
        chains=2,
        progress=False,
    )


ALL = [
    "Scores on test rows",
    "Predictions and calibration",
    "What was fitted",
    "The posterior",
    "Convergence of the chains",
    "Agreement of the chains in predictions",
    "Training",
    "How to reproduce",
    "Terms",
]


def test_comparison_report_has_all_sections(comparison, tmp_path):
    path = write_report(
        comparison,
        tmp_path / "new" / "report.html",
        name="yield",
        unit="t/ha",
        title="Wheat",
        command="make wheat",
        notes=["a note"],
    )
    page = read(path)
    assert page.sections == ALL
    assert ("title", {}) in page.tags
    for text in (
        "Wheat",
        "make wheat",
        "a note",
        f"torch {torch.__version__}",
        "fingerprint",
        "MAP",
        "SWAG",
        "PCA + ESS",
        "random + ESS",
        *(set(WORDS) - report._OF_CLASSES),
    ):
        assert text in page.words
    for key in comparison.table.index:
        assert f"{comparison.table.loc[key, 'log_likelihood']:.3f}" in page.words
    draws = comparison.models["pca"].draws
    assert f"{draws.rhat().max():.4f}" in page.words
    assert f"{draws.ess_bulk().min():.0f}" in page.words


def test_page_is_self_contained(comparison, tmp_path, real_pictures):
    text = write_report(comparison, tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object"})
    assert "url(" not in text
    assert "@import" not in text
    for _, attributes in page.tags:
        assert not {"src", "href"} & set(attributes) or attributes["src"].startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    assert len(page.images) >= 10
    for image in page.images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert imread(io.BytesIO(base64.b64decode(data, validate=True))).std() > 0.02
        assert len(image["alt"]) > 20
    assert '<html lang="en">' in text
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags


def test_user_text_is_escaped(fitted, tmp_path):
    nasty = "<script>alert('x')</script> & \"quoted\" $\\alpha$"
    path = write_report(
        fitted,
        tmp_path / "r.html",
        test=rows(seed=1),
        title=nasty,
        name=nasty,
        unit=nasty,
        command=nasty,
        notes=[nasty],
    )
    page = read(path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.words.count("<script>alert('x')</script>") >= 4


@pytest.mark.slow
def test_report_is_deterministic(fitted, tmp_path, real_pictures):
    first, second = (
        write_report(fitted, tmp_path / f"{i}.html", test=rows(seed=1)).read_bytes()
        for i in range(2)
    )
    assert first == second


def test_scores_are_those_of_the_test_rows(fitted, tmp_path):
    test = rows(seed=1)
    page = read(write_report(fitted, tmp_path / "r.html", test=test))
    scores = metrics.score(fitted.predict(test[0]), test[1])
    assert f"{scores['log_likelihood']:.3f}" in page.words
    assert f"contain {100 * scores['coverage']:.0f} % of the test rows" in page.words
    alone = float(test[1].double().std(correction=0))
    assert f"error of {scores['rmse']:.4g}; that of one prediction for all rows" in page.words
    assert f"their average, is {alone:.4g}." in page.words
    assert f"without inputs {alone:.3f}" in page.words


def test_a_classifier_is_judged_beside_the_class_shares(fitted):
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]])
    predictive = Predictive(probabilities.log()[None].repeat(1, 25, 1), Categorical(2))
    y = torch.tensor([0, 0, 0, 1]).repeat(25)
    point = WeightSamples(fitted.network, fitted.network.weights[None], Categorical(2), "MAP")
    content = report._Content(point, "", predictive, y, None, None, "y", "")
    kind, (quality, trust) = report._quality(content)
    assert quality.startswith("100.0 % of 100 test rows are classified correctly")
    assert "has 75.0 % of them" in quality
    assert kind == "tie"
    assert "75.0 % on average, and 100.0 % of them are right: it is underconfident." in trust
    constant = Predictive(torch.tensor([0.75, 0.25]).log().expand(1, 100, 2), Categorical(2))
    scores = metrics.score(constant, y)
    expected = {key: scores[key] for key in ("log_likelihood", "accuracy")}
    assert report._constant_scores(content) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_a_test_row_of_weight_zero_has_no_part_in_the_scores(fitted, tmp_path):
    x, y = rows(seed=1)
    counted = torch.arange(len(y)) % 3 > 0
    tests = {
        "weighted": Data.of((x, y)).weighted(counted.double().numpy()),
        "counted": (x[counted], y[counted]),
        "all": (x, y),
    }
    scores = {}
    for name, test in tests.items():
        words = read(write_report(fitted, tmp_path / f"{name}.html", test=test)).words
        scores[name] = re.search(r"(-?\d\.\d{3}) (\d\.\d{3}) (\d\.\d{4}) \d+\.\d %", words)[0]
    assert scores["weighted"] == scores["counted"] != scores["all"]


def test_without_test_rows_there_are_no_scores(fitted, tmp_path):
    page = read(write_report(fitted, tmp_path / "r.html"))
    assert page.sections == [
        s for s in ALL if s not in ("Scores on test rows", "Predictions and calibration", ALL[5])
    ]


def test_chains_are_compared_by_their_predictions(fitted, tmp_path, monkeypatch):
    test = rows(seed=1)
    found = fitted.chain_predictions(test[0])
    page = read(write_report(fitted, tmp_path / "r.html", test=test))
    assert f"R-hat of predictions {np.nanmedian(found.rhat):.2f} (median)" in page.words
    assert "Chains differ" not in page.words
    lines = ["chains differ: raise chains=..."]
    monkeypatch.setattr(ChainPredictions, "warnings", lambda self: lines)
    page = read(write_report(fitted, tmp_path / "r.html", test=test))
    assert "Chains differ: raise chains=.... " in page.words
    z = fitted.draws.z
    single = dataclasses.replace(fitted, draws=Draws(z[:1]))
    assert ALL[5] not in read(write_report(single, tmp_path / "r.html", test=test)).sections


def test_density_of_a_loaded_model_needs_data(fitted, tmp_path):
    loaded = subbayes.load(fitted.save(tmp_path / "model"))
    assert loaded.posterior is None
    bare = read(write_report(loaded, tmp_path / "bare.html"))
    assert "The posterior" not in bare.sections
    assert "fingerprint" not in bare.words
    whole = read(write_report(loaded, tmp_path / "whole.html", data=rows()))
    assert "The posterior" in whole.sections
    assert fitted.posterior.fingerprint()[:16] in whole.words


def test_a_loaded_model_of_weighted_rows_takes_their_weights(tmp_path):
    weighted = Data.of(rows()).weighted(np.arange(40) % 3)
    options = fit_options(likelihood=Gaussian(), training=PLAN, progress=False, rank=2, draws=12)
    fitted = fit(MLP(2, (5,), 1, "tanh", seed=0), weighted, **options)
    loaded = subbayes.load(fitted.save(tmp_path / "model"))
    page = read(write_report(loaded, tmp_path / "r.html", data=weighted))
    assert fitted.posterior.fingerprint()[:16] in page.words


def test_unconverged_chains_are_reported(fitted, tmp_path):
    z = fitted.draws.z.copy()
    z[0] += 5
    apart = dataclasses.replace(fitted, draws=Draws(z, fitted.draws.stats, fitted.draws.meta))
    page = read(write_report(apart, tmp_path / "r.html"))
    assert "The chains have not converged" in page.words
    assert "above 1.01: chains " in page.words
    assert f"The largest R-hat is {apart.draws.rhat().max():.3f}" in page.words
    assert ("div", {"class": "bad"}) in page.tags


def test_converged_chains_are_reported(fitted, tmp_path):
    z = np.random.default_rng(0).normal(size=(2, 500, 2))
    settled = dataclasses.replace(fitted, draws=Draws(z))
    page = read(write_report(settled, tmp_path / "r.html"))
    assert f"The chains agree. The largest R-hat is {settled.draws.rhat().max():.3f}" in page.words
    assert ("div", {"class": "bad"}) not in page.tags


def test_a_stack_whose_intervals_are_too_narrow_is_reported(fitted, tmp_path):
    for coverage, reported in ((0.75, True), (0.9, False)):
        stack = Stack((fitted,), (fitted.default_draws,), {"coverage": coverage, "held_out": 200})
        page = read(write_report(stack, tmp_path / "r.html", test=rows(seed=1)))
        assert (
            "Predictions were too narrow: intervals of 90% held 75.0%" in page.words
        ) == reported


def test_chains_around_networks_of_their_own_are_judged_by_their_predictions(tmp_path):
    data, test = rows(), rows(seed=1)
    own = model(data=data, subspace="full")
    starts = own.draws.z[:, 0] + np.arange(own.draws.n_chains)[:, None]
    z = starts[:, None] + 1e-3 * np.random.default_rng(0).normal(size=own.draws.z.shape)
    apart = dataclasses.replace(own, starts=starts, draws=Draws(z), posterior=None)
    words = read(write_report(apart, tmp_path / "r.html", test=test)).words
    assert "The chains agree" not in words
    assert (
        "their weights are not compared. See the remedies below: R-hat of the predictions" in words
    )
    assert "Chains differ in what they predict" in words
    together = np.random.default_rng(0).normal(size=z.shape) * 1e-3 + starts[0]
    agree = dataclasses.replace(apart, draws=Draws(together))
    words = read(write_report(agree, tmp_path / "a.html", test=test)).words
    assert "The chains agree in what they predict: R-hat of the predictions of test rows" in words
    words = read(write_report(agree, tmp_path / "n.html")).words
    assert "Test rows compare their predictions." in words


def test_curves_over_a_single_input(tmp_path):
    data = rows(columns=1)
    page = read(write_report(model(data=data), tmp_path / "r.html", data=data))
    assert any("curve over the input" in image["alt"] for image in page.images)
    classes = data[0], (data[1] > 0).double()
    page = read(write_report(model(Bernoulli(), classes), tmp_path / "c.html", data=classes))
    assert not any("curve over the input" in image["alt"] for image in page.images)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Categorical(3), 3, lambda y: (y > 0).long() + (y > 1).long()),
        (Bernoulli(), 1, lambda y: (y > 0).double()),
        (Poisson(), 1, lambda y: y.exp().round()),
        (HeteroscedasticGaussian(), 4, lambda y: torch.stack([y, -y], 1)),
    ],
)
def test_any_likelihood(likelihood, outputs, targets, tmp_path):
    x, y = rows()
    held = rows(60, seed=1)
    chosen = model(likelihood, (x, targets(y)), outputs)
    page = read(write_report(chosen, tmp_path / "r.html", test=(held[0], targets(held[1]))))
    assert page.sections == ALL
    sorted_out = likelihood.kind == "classification"
    assert ("Accuracy among the rows" in page.words) == sorted_out
    assert ("RMSE" in page.words) != sorted_out


def test_known_noise_per_row(tmp_path):
    x, y = rows(columns=1)
    noisy = model(Gaussian("per-observation"), (x, (y, torch.full((40,), 0.3))))
    test = rows(columns=1, seed=1)
    page = read(
        write_report(noisy, tmp_path / "r.html", test=(test[0], (test[1], torch.full((40,), 0.3))))
    )
    assert "coverage" in page.words


def test_a_baseline_has_scores_and_no_posterior(fitted, tmp_path):
    point = WeightSamples(fitted.network, fitted.network.weights[None], fitted.likelihood, "SWA")
    page = read(write_report(point, tmp_path / "r.html", test=rows(seed=1)))
    assert page.sections == [
        "Scores on test rows",
        "Predictions and calibration",
        "What was fitted",
        "How to reproduce",
        "Terms",
    ]
    assert "SWA" in page.words
    assert "R-hat" not in page.words


@pytest.mark.slow
def test_comparison_report_shows_the_requested_method(comparison, tmp_path):
    page = read(write_report(comparison, tmp_path / "r.html", method="random"))
    assert "2 random directions" in page.words
    page = read(write_report(comparison, tmp_path / "m.html", method="map"))
    assert "The posterior" not in page.sections
    with pytest.raises(InputError, match="method: expected one of 'map', 'swag', .*, got 'swa'"):
        write_report(comparison, tmp_path / "s.html", method="swa")


def test_rank_one_full_and_few_draws(tmp_path):
    page = read(write_report(model(rank=1), tmp_path / "one.html"))
    assert "The posterior" not in page.sections
    page = read(write_report(model(subspace="full", draws=2), tmp_path / "full.html"))
    assert "Too few draws to tell" in page.words
    assert "Fewer than 4 draws per chain" in page.words


def test_long_tables_of_coordinates_are_shortened(fitted, tmp_path):
    z = np.random.default_rng(0).normal(size=(2, 20, 60))
    many = dataclasses.replace(fitted, draws=Draws(z), posterior=None)
    page = read(write_report(many, tmp_path / "r.html"))
    assert "The 30 of 60 coordinates with the largest R-hat" in page.words
    assert len(re.findall(r"z\[\d+\] -?\d", page.words)) == 30


def test_failed_write_keeps_the_existing_report(fitted, tmp_path, monkeypatch):
    path = write_report(fitted, tmp_path / "r.html")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(ArtifactError, match="path: expected free disk space, got No space left"):
        write_report(fitted, path, title="another")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.slow
def test_an_existing_report_is_kept_on_request(fitted, tmp_path):
    path = tmp_path / "r.html"
    path.write_text("notes")
    with pytest.raises(ArtifactError, match="expected a new file, got an existing one"):
        write_report(fitted, path, overwrite=False)
    assert path.read_text() == "notes"


def test_subject_of_another_type(unchecked, tmp_path):
    with pytest.raises(
        InputTypeError, match="subject: expected a fitted model or a Comparison, got Linear"
    ):
        write_report(torch.nn.Linear(1, 1), tmp_path / "r.html")


# --- descriptions -------------------------------------------------------------------------------


def test_describe_settings(fitted):
    words = describe(fitted)
    assert words["network"] == (
        "a multilayer perceptron: 2 inputs, a hidden layer of 5 (tanh), 1 output; 21 weights"
    )
    assert words["training"] == (
        "epochs 4, optimizer adam, learning rate 0.005, batch size 20, swa epochs 5, "
        "swa learning rate 0.001"
    )
    assert words["prior"] == "N(0, 1²) on each coordinate z"
    assert words["temperature"] == "T = 1"
    assert words["inference"].startswith(
        "elliptical slice sampling, 2 chains of 12 draws, 6 warm-up steps each, "
    )


def test_describe_other_choices(fitted):
    chosen = {
        "by": "loo",
        "temperatures": (1.0, 30.0),
        "scores": (0.0, 1.0),
        "standard_errors": (0.1, 0.1),
        "pareto_k": (0.1, 0.1),
    }
    training = fitted.settings["training"] | {"epochs": 0, "batch_size": None, "weight_decay": 0.01}
    other = dataclasses.replace(
        fitted,
        temperature=30.0,
        prior=Normal(covariance=np.eye(2)),
        likelihood=Standardized(HeteroscedasticGaussian(0.25), (3.0,), (2.0,)),
        settings={"temperatures": chosen, "training": training, "subspace": "random"},
    )
    words = describe(other)
    assert words["temperature"] == "T = 30, chosen by leave-one-out scores among 1, 30"
    assert words["training"].startswith("a network trained before, weight decay 0.01")
    assert words["subspace"] == "2 random directions, centred at the mean of the SGD trajectory"
    assert words["prior"] == "Normal(covariance of rank 2) on the coordinates z"
    assert words["likelihood"] == (
        "Gaussian noise with a variance that depends on the input, plus a global variance of "
        "0.25; the network works on (y - 3) / 2"
    )


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [
        (Categorical(4), "probabilities of 4 classes"),
        (Gaussian((1.0, 2.5)), "deviation of 1, 2.5"),
        (Bernoulli(), "the probability of class 1 of two"),
        (Poisson(), "counts with a rate"),
        (Gaussian("per-observation"), "Gaussian(noise='per-observation')"),
    ],
)
def test_describe_likelihoods(fitted, likelihood, words):
    text = describe(dataclasses.replace(fitted, likelihood=likelihood))["likelihood"]
    assert text.endswith(words)


@pytest.mark.parametrize(
    ("hidden", "words"), [((), "no hidden layer"), ((3, 4), "hidden layers of 3 and 4 (relu)")]
)
def test_describe_networks(fitted, hidden, words):
    network = subbayes.Network(MLP(2, hidden, 1))
    text = describe(dataclasses.replace(fitted, network=network))["network"]
    assert f"2 inputs, {words}, 1 output" in text


def test_warnings_of_other_methods_are_named(comparison, tmp_path):
    page = read(write_report(comparison, tmp_path / "r.html"))
    for line in comparison.warnings()["random"]:
        assert f"random + ESS: {line}." in page.words
        assert f"PCA + ESS: {line}." not in page.words


class Apart(FittedModel):
    """A model whose chains are compared by their predictions."""

    has_separate_chains = True


@pytest.mark.parametrize("shown", ["independent draws", "separate chains", "without draws"])
def test_warnings_of_other_methods_are_named_beside_any_model(comparison, shown):
    pca = comparison.models["pca"]
    changed = {
        "independent draws": dataclasses.replace(
            pca, draws=dataclasses.replace(pca.draws, independent=True)
        ),
        "separate chains": Apart(
            **{field.name: getattr(pca, field.name) for field in dataclasses.fields(pca)}
        ),
        "without draws": dataclasses.replace(pca, draws=None),
    }[shown]
    models = comparison.models | {"pca": changed}
    content = report._content(
        dataclasses.replace(comparison, models=models), None, None, "y", "", "pca"
    )
    expected = [f"random + ESS: {line}." for line in comparison.warnings()["random"]]
    boxes = report._verdict(content, None)
    assert expected
    assert [lines[0] for _, lines in boxes if lines[0] in expected] == expected
    assert len(boxes) - len(expected) == 1 + (shown != "without draws")


def test_coverage_of_calibrated_counts_is_expected_by_chance():
    y = torch.poisson(torch.full((500,), 0.3), generator=torch.Generator().manual_seed(0))
    predictive = Predictive(torch.full((1, 500, 1), 0.3).log(), Poisson())
    kind, text = report._coverage(predictive, y)
    assert kind == "good"
    found = re.findall(r"(\d+) (?:% of|to|% are)", text)
    inside = float((y <= 2).double().mean())  # 0.9964 are expected
    assert found == [f"{100 * inside:.0f}", "99", "100"]


def test_a_comparison_at_another_level_says_so(comparison, tmp_path):
    settings = comparison.settings | {"level": 0.8}
    page = read(
        write_report(dataclasses.replace(comparison, settings=settings), tmp_path / "r.html")
    )
    assert "coverage of 80 %" in page.words
    assert "Coverage of the 80 % interval" in page.words
    assert "95 % interval on the test rows" not in page.words


def test_describe_without_settings_and_draws(fitted):
    words = describe(dataclasses.replace(fitted, settings={}, draws=None))
    assert words["training"] == ""
    assert words["subspace"] == repr(fitted.subspace)
    assert words["inference"] == "not sampled"


# --- templates ----------------------------------------------------------------------------------


def parts(name, *arguments):
    """The text of one macro of the templates."""
    return getattr(_environment().get_template("parts.html").module, name)(*arguments)


def test_empty_parts_render_as_nothing():
    assert parts("definitions", {"a": ""}) == ""
    assert parts("figures", []) == ""
    assert parts("paragraphs", ["", ""]) == ""
    empty = Table([], [])
    page = Page(render("sections.html", title="t", lead="", sections=[("kept", empty)]))
    assert page.words == "t t kept"


def test_tables_escape_and_mark_cells():
    table = Table(["<a>", "b"], [["1 < 2", "3"], ["x", "y"]], "c & d", best=[(0, 1)])
    page = Page(parts("table", table))
    assert page.words == "<a> b 1 < 2 3 x y c & d"
    assert [attributes for tag, attributes in page.tags if tag == "td"] == [
        {},
        {"class": "best"},
        {},
        {},
    ]


def test_templates_require_all_variables():
    with pytest.raises(UndefinedError, match="'lead' is undefined"):
        render("sections.html", title="t", sections=[])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("inference", "label", "chains"),
    [("laplace", "PCA + Laplace", False), ("hmc", "PCA + HMC", True)],
)
def test_report_names_the_engine_and_omits_chains_of_approximations(
    tmp_path, inference, label, chains
):
    path = write_report(model(inference=inference), tmp_path / "r.html", test=rows(seed=1))
    text = path.read_text(encoding="utf-8")
    assert label in text
    assert "PCA + ESS" not in text
    assert ("The chains " in text) is chains
    assert ("approximation with independent draws" in text) is not chains


# --- content of files -----------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\u202e\x9b31m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "losses",
    [[np.inf, 2.0, 1.0], [np.nan] * 3, [-np.inf, np.inf, 1.0], [1e308, -1e308, 0.0], [2.0], []],
)
def test_losses_that_are_not_finite_do_not_stop_a_report(tmp_path, real_pictures, losses):
    history = {
        "train": {"train_loss": losses, "validation_log_likelihood": [np.nan]},
        "swa": {"train_loss": [np.inf]},
        "other": {"x": [1.0]},
    }
    found = dataclasses.replace(model(), history=history)
    assert "<h2>" in write_report(found, tmp_path / "page.html").read_text()


def test_losses_that_are_not_finite_are_marked():
    axes = training_history({"train_loss": [np.inf, 2.0, np.nan, 1.0]})
    (marks,) = (line for line in axes.lines if line.get_label() == "NaN or infinite")
    np.testing.assert_array_equal(marks.get_xdata(), [1, 3])
    above, _ = sparse_history({"elbo": [-np.inf, -2.0, np.nan], "density": [0.5, np.nan]})
    (marks,) = (line for line in above.lines if line.get_label() == "NaN or infinite")
    np.testing.assert_array_equal(marks.get_xdata(), [1, 3])


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Glyph")
def test_control_characters_are_shown_as_text(tmp_path, real_pictures):
    found = model()
    draws = dataclasses.replace(found.draws, engine=EVIL, meta={"warmup": EVIL})
    found = dataclasses.replace(found, draws=draws, settings={"subspace": EVIL})
    x, y = rows()
    page = write_report(
        found, tmp_path / "page.html", test=(x, y), title=EVIL, name=EVIL, unit=EVIL,
        command=EVIL, notes=[EVIL],
    ).read_text()  # fmt: skip
    assert not CONTROL.search(page)
    assert "\\x1b]0;owned\\x07\\u202e\\x9b31m" in page
    for text in (found.label, *found.describe().values(), found.card()):
        assert not CONTROL.search(text)

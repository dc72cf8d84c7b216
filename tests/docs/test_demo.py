"""The demo, made small: what it leaves behind, what it says, what it never overwrites."""

import doctest
import json
import pickle
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import make_friedman1, make_friedman3
from sklearn.gaussian_process import GaussianProcessRegressor

from examples import demo
from examples.demo import classifier, effect, small_network, table
from examples.demo import section as sections
from examples.demo.__main__ import main
from examples.demo.section import Effort, Finding, Gain, Section
from subbayes import InputError, TableRegressor
from subbayes.inference.configuration import Sampling
from subbayes.plots.style import new_axes, png
from subbayes.reports.rendering import Table
from subbayes.tables.hierarchical import Candidate
from subbayes.tables.hierarchical import Effort as TableEffort

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

SMALL = Effort(
    table=TableEffort((Candidate((4,), 1),), climb=20, constant=20, chains=2, steps=40),
    epochs=5,
    classifier_epochs=5,
    replications=3,
    effects=Sampling(draws=40, chains=2, warmup=20, progress=False),
    sparse_epochs=5,
    update_epochs=10,
)


def small(out, seed=0, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short chains do not mix
        return demo.run(out, seed, effort=SMALL, **options)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Render plots at low resolution, and leave out slow methods of the comparison."""
    patch = pytest.MonkeyPatch()
    others = ("random forest", "one network")
    patch.setattr(table, "OTHERS", {name: table.OTHERS[name] for name in others})
    patch.setattr(small_network, "_gaussian_process", GaussianProcessRegressor)
    tiny = png(new_axes(), dpi=10)
    for place in ("subbayes.plots.style.png", "subbayes.reports.rendering.png"):
        patch.setattr(place, lambda *_: tiny)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def said():
    """Standard output and standard error of the demo."""
    return StringIO(), StringIO()


@pytest.fixture(scope="module")
def done(tmp_path_factory, said):
    with redirect_stdout(said[0]), redirect_stderr(said[1]):
        return small(tmp_path_factory.mktemp("demo") / "runs" / "demo")


# --- results ------------------------------------------------------------------------------------


def test_demo_writes_exactly_the_listed_files(done):
    found = {str(p.relative_to(done.folder)) for p in done.folder.rglob("*") if p.is_file()}
    tensors = {name for name in found if name.startswith("model/tensors-")}
    assert found - tensors == {*demo.FILES, "made-by-subbayes-demo"}
    assert len(tensors) == 1


def test_numbers_of_the_page_are_those_of_the_results(done):
    facts = json.loads((done.folder / "scores.json").read_text())
    report = (done.folder / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert [section.key for section in done.sections] == list(facts)[:5]
    for section in done.sections:
        assert f"<h2>{section.title}</h2>" in report
        for gain, read in zip(section.gains, facts[section.key]["gains"], strict=True):
            assert [gain.gain, gain.error, gain.verdict] == [
                read["gain"],
                read["error"],
                read["verdict"],
            ]
            assert gain.to_text(unit=False) in report
        for kind in ("good", "tie", "bad"):
            box = report.split(f"<h2>{section.title}</h2>")[1].split("</section>")[0]
            assert (f'<div class="{kind}">' in box) == bool(section.findings(kind))


def test_gain_over_trees_is_that_of_the_saved_model(done):
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import KFold, cross_val_predict

    x, y = make_friedman3(2250, noise=0.1, random_state=0)
    read = pd.read_csv(done.folder / "train.csv")
    np.testing.assert_allclose(read, np.c_[x, y][:250], rtol=1e-12)
    ours = TableRegressor.load(done.folder / "model").predict_dist(x[250:]).log_prob(y[250:])
    trees = RandomForestRegressor(random_state=0)
    folds = KFold(5, shuffle=True, random_state=0)
    residuals = y[:250] - cross_val_predict(trees, x[:250], y[:250], cv=folds)
    variance = np.mean(residuals**2)
    errors = y[250:] - trees.fit(x[:250], y[:250]).predict(x[250:])
    theirs = -0.5 * (np.log(2 * np.pi * variance) + errors**2 / variance)
    (gain,) = (
        one
        for one in done.sections[0].gains
        if (one.what, one.beside) == ("Friedman #3: TableRegressor", "random forest")
    )
    assert gain.gain == pytest.approx(np.mean(ours - theirs), rel=1e-4)
    assert gain.error == pytest.approx(np.std(ours - theirs, ddof=1) / np.sqrt(2000), rel=1e-4)


def test_small_network_is_that_of_the_file(done):
    tensors = load_file(done.folder / "small.safetensors")
    facts = done.to_dict()["sparse"]["the small network"]
    x, y = make_friedman1(2500, noise=1.0, random_state=0)
    outputs = torch.from_numpy(x[500:]).float()
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    for i in layers:
        product = outputs @ tensors.get(f"layers.{i}.weight", torch.zeros(0, 0)).T
        outputs = product + tensors.get(f"layers.{i}.bias", 0.0)
        outputs = outputs if i == layers[-1] else outputs.relu()
    rmse = np.sqrt(np.mean((outputs[:, 0].double().numpy() - y[500:]) ** 2))
    assert facts["rmse"][0] == pytest.approx(rmse, rel=1e-4)
    assert facts["bytes"] == (done.folder / "small.safetensors").stat().st_size
    assert facts["numbers"] == sum(int((tensor != 0).sum()) for tensor in tensors.values())


def test_updates_and_export_agree_with_one_fit(done):
    facts = done.to_dict()["update"]
    assert facts["difference"] < 1e-4
    assert facts["exported_difference"] < 1e-4
    assert facts["updated"]["log_score"] == pytest.approx(
        facts["one fit of all rows"]["log_score"], rel=1e-4
    )


def test_tables_go_to_stdout_and_steps_to_stderr(done, said):
    out, err = (text.getvalue() for text in said)
    for section in done.sections:
        assert section.to_text() in out
    assert "[1/6]" in err
    assert "report.html in a browser" in err


# --- data ---------------------------------------------------------------------------------------


def test_parts_of_the_digits_are_disjoint():
    digits = classifier.Digits.split(0)
    parts = (digits.train, digits.held_out, digits.test)
    assert [len(part[1]) for part in parts] == [300, 400, 1097]
    others = digits.others(0)
    images = digits.test[0].numpy().reshape(-1, 8, 8)
    turned = np.rot90(images, 1, axes=(1, 2)).reshape(-1, 64)
    np.testing.assert_array_equal(others["turned digits"], turned)
    np.testing.assert_array_equal(others["inverted digits"], 1 - digits.test[0])


def test_effect_of_the_simulated_programme():
    rng = np.random.default_rng(0)
    rates = [effect.simulate(rng).groupby("programme")["visits"].mean() for _ in range(400)]
    ratios = np.log([rate[1] / rate[0] for rate in rates])
    error = ratios.std(ddof=1) / np.sqrt(len(ratios))
    assert abs(ratios.mean() - effect.TRUTH) < 4 * error


# --- findings -----------------------------------------------------------------------------------


def test_only_what_holds_is_good():
    ours, noise = np.zeros(400), np.tile([-1.0, 1.0], 200)  # standard error 0.05
    section = Section(
        "key",
        "title",
        (),
        (Table(["a"], [["1"]]),),
        tuple(
            Gain.of("ours", name, ours, noise + shift)
            for name, shift in (("weaker", -1.0), ("equal", 0.01), ("stronger", 1.0))
        ),
        (Finding("bad", "slow"),),
    )
    assert section.findings("good") == [
        "Ours is better than: weaker (+1.000 ± 0.050); in nats a row."
    ]
    assert section.findings("tie") == ["Ours is tied with: equal (−0.010 ± 0.050); in nats a row."]
    assert section.findings("bad") == [
        "Ours is worse than: stronger (−1.000 ± 0.050); in nats a row.",
        "Slow",
    ]
    assert [gain.beside for gain in section.closest()] == ["stronger"]


@pytest.mark.parametrize(("share", "kind"), [(0.95, "good"), (0.93, "bad"), (0.97, "bad")])
def test_coverage_that_fails_is_not_good(share, kind):
    covered = np.arange(1000) < 1000 * share
    assert sections.coverage_finding("intervals", covered, 0.95).kind == kind


def test_warnings_of_a_fit_are_not_good(monkeypatch):
    rows = table.Rows.simulate("Friedman #3", 0)
    forecast = table.Forecast.normal(rows, rows.y_test, 1.0)

    class Model:
        class model_:
            @staticmethod
            def warnings():
                return ["steps failed"]

    found = {table.OURS: forecast, **dict.fromkeys(table.OTHERS, forecast)}
    monkeypatch.setattr(table, "forecasts", lambda *_: (Model, found))
    section, _ = table.small_tables(0, SMALL)
    assert sum("steps failed" in text for text in section.findings("bad")) == 2


def test_numbers_of_a_module_are_counted():
    layer = torch.nn.Linear(3, 2)
    torch.nn.init.zeros_(layer.bias)
    assert small_network.count(pickle.loads(pickle.dumps(layer))) == 6


def test_number_of_threads_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with demo._one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- existing files -----------------------------------------------------------------------------


@pytest.mark.slow
def test_rerun_keeps_other_files_in_the_folder(done, capsys):
    mine = done.folder / "plots" / "mine.png"
    mine.write_bytes(b"mine")
    again = small(done.folder, show=False)
    assert capsys.readouterr() == ("", "")
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    for section, before in zip(again.sections, done.sections, strict=True):
        assert section.gains == before.gains


def test_files_of_others_are_refused_before_fitting(tmp_path, monkeypatch):
    (tmp_path / "scores.csv").write_text("theirs")
    monkeypatch.setattr(demo, "small_tables", lambda *_: pytest.fail("started"))
    with pytest.raises(InputError, match="out: expected a new folder, or that of an earlier demo"):
        small(tmp_path, show=False)
    assert (tmp_path / "scores.csv").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("seed", "message"),
    [(-1, "seed: expected a whole number of at least 0"), (0.5, "seed: expected a whole number")],
)
def test_bad_seeds(seed, message, tmp_path):
    with pytest.raises(InputError, match=message):
        demo.run(tmp_path, seed)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "demo").write_text("x")
    with pytest.raises(InputError, match="out: expected a folder, got a file: '.*demo'"):
        small(tmp_path / "demo", show=False)


# --- command line -------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch):
    """What the command line runs, in place of the demo."""
    calls = []

    class Result:
        def to_dict(self):
            return {"scores": [1.0, float("nan")]}

        def to_text(self):
            return "table"

    def run(*arguments, show):
        calls.append((*arguments, show))
        return Result()

    monkeypatch.setattr("examples.demo.__main__.run", run)
    return calls


@pytest.mark.parametrize(
    ("words", "arguments", "printed"),
    [
        ([], (Path("runs/demo"), 0, True), ""),
        (["--seed", "3", "--quiet"], (Path("runs/demo"), 3, False), "table\n"),
        (["--out", "a", "--json"], (Path("a"), 0, False), '{"scores": [1.0, null]}\n'),
    ],
)
def test_options(words, arguments, printed, called, capsys):
    assert main(words) == 0
    assert called == [arguments]
    assert capsys.readouterr() == (printed, "")


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "theirs.txt").write_text("x")
    assert main(["--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("subbayes: error: out: expected a new folder, or that of an earlier demo")
    assert err.count("\n") == 1


def test_interruption(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.demo.__main__.run", interrupt)
    assert main([]) == 130
    assert capsys.readouterr().err == "subbayes: interrupted\n"


@pytest.mark.parametrize("module", [sections, small_network])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried > 0

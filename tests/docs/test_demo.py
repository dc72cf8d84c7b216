"""The demo, made small: what it leaves behind, what it never overwrites, what it never looks at."""

import dataclasses
import doctest
import json
import shutil
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from cases import nested, training_options
from safetensors.torch import load_file
from scipy import stats

import subbayes
from examples import demo
from examples.demo import digits, methods
from examples.demo import section as sections
from examples.demo.__main__ import main
from examples.demo.section import Effort
from subbayes import InputError, subspaces
from subbayes.inference.configuration import Sampling
from subbayes.inference.tempering import choose_temperature
from subbayes.plots.style import new_axes, png
from subbayes.tables.data_frame_model import DataFrameModel

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

SMALL = Effort(
    demo.EFFORT.settings.change(
        nested(hidden=(5,), rank=2, epochs=4, swa_epochs=5, draws=20, chains=2, warmup=5)
    ),
    scales=(0.3, 1.0),
    members=2,
    epochs=5,
    effects=Sampling(draws=20, chains=2, warmup=5, mode="eager"),
)


def small(out, seed=0, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short chains do not mix
        return demo.run(out, seed, False, effort=SMALL, **options)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Render plots at low resolution; try two temperatures with few draws."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "subbayes.models.fit.choose_temperature",
        partial(choose_temperature, temperatures=(1.0, 10.0), draws=10, chains=2),
    )
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


# --- files --------------------------------------------------------------------------------------


def test_demo_writes_exactly_the_listed_files(done):
    found = {str(p.relative_to(done.folder)) for p in done.folder.rglob("*") if p.is_file()}
    tensors = {name for name in found if name.startswith("model/tensors-")}
    assert found - tensors == {*demo.FILES, "made-by-subbayes-demo"}
    assert len(tensors) == 1


def test_scores_agree_in_all_files(done):
    table = done.methods.comparison.table
    assert table.index.tolist() == ["map", "swa", "swag", "ensemble", "pca", "random"]
    read = pd.read_csv(done.folder / "scores.csv")
    pd.testing.assert_frame_equal(read, table.reset_index(drop=True))
    facts = json.loads((done.folder / "scores.json").read_text())
    assert [row["rmse"] for row in facts["methods"]["scores"]] == table["rmse"].tolist()
    assert facts["methods"]["prior_scale"] == done.methods.prior_scale
    report = (done.folder / "report.html").read_text(encoding="utf-8")
    for value in table["log_likelihood"]:
        assert f">{value:.3f} ± " in report
    for section in done.sections:
        assert f"<h2>{section.title}</h2>" in report


def test_predictions_come_from_the_saved_model(done):
    model = DataFrameModel.load(done.folder / "model")
    test = pd.read_csv(done.folder / "test.csv")
    read = pd.read_csv(done.folder / "predictions.csv")
    np.testing.assert_allclose(read.pop("observed"), test["y"], rtol=1e-12)
    pd.testing.assert_frame_equal(read, model.frame(test), rtol=1e-5)
    plain = subbayes.load(done.folder / "model")
    np.testing.assert_array_equal(plain.model.draws.z, done.methods.model.model.draws.z)


def test_rows_are_those_of_the_problem(done):
    rows = [pd.read_csv(done.folder / f"{name}.csv") for name in ("train", "validation", "test")]
    assert [len(part) for part in rows] == [150, 100, 1000]
    whole = pd.concat(rows, ignore_index=True)
    x = whole[[f"x{i}" for i in range(1, 11)]].to_numpy().T
    mean = 10 * np.sin(np.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4]
    noise = whole["y"] - mean
    assert noise.std() == pytest.approx(methods.NOISE, abs=0.06)
    best = stats.norm.logpdf(noise[-1000:], 0, methods.NOISE).mean()
    assert done.methods.rows.true_log_likelihood == pytest.approx(best)


def test_tables_go_to_stdout_and_steps_to_stderr(done, said):
    out, err = (text.getvalue() for text in said)
    for section in done.sections:
        assert section.to_text() in out
    assert "[1/6]" in err
    assert "report.html in a browser" in err
    assert "subbayes fit YOUR.csv" in err


def test_small_network_is_that_of_the_file(done):
    tensors = load_file(done.folder / "small.safetensors")
    facts = done.to_dict()["sparse"]["the small network"]
    x, y = done.methods.rows.encoded(done.methods.rows.test)
    train = done.methods.rows.encoded(done.methods.rows.train)[1]
    outputs = torch.from_numpy(x)
    for i in sorted({int(name.split(".")[1]) for name in tensors}):
        layer = {n.removeprefix(f"layers.{i}."): t for n, t in tensors.items() if f".{i}." in n}
        weight = layer.get("weight")
        if weight is None:
            parts = [layer[f"weight.{part}"] for part in ("crow_indices", "col_indices", "values")]
            size = (len(parts[0]) - 1, int(layer["weight.inputs"]))
            weight = torch.sparse_csr_tensor(*parts, size=size).to_dense()
        outputs = (outputs.tanh() if i else outputs) @ weight.T + layer.get("bias", 0.0)
    error = outputs[:, 0].double().numpy() * train.std() + train.mean() - y
    assert facts["rmse"][0] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-5)


def test_unseen_digits_are_in_no_other_part():
    parts = digits._Digits.split(0)
    assert [len(part[1]) for part in (parts.train, parts.validation)] == [100, 200]
    assert set(parts.unseen[1]) == {8, 9}
    for part in (parts.train, parts.validation, parts.test):
        assert set(part[1]) == set(range(8))
    images = np.concatenate([part[0] for part in (parts.train, parts.validation, parts.test)])
    assert len(images) + len(parts.unseen[0]) == 1797


def test_rotation_by_a_right_angle_moves_pixels():
    images = np.random.default_rng(0).random((3, 64), dtype=np.float32)
    expected = np.rot90(images.reshape(-1, 8, 8), 1, axes=(1, 2)).reshape(3, 64)
    np.testing.assert_allclose(digits._rotate(images, 90), expected, atol=1e-6)
    np.testing.assert_array_equal(digits._rotate(images, 0), images)


def test_number_of_threads_is_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with demo._one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- choices ------------------------------------------------------------------------------------


def test_choices_do_not_depend_on_test_rows(done, monkeypatch):
    rows = methods.Rows.simulate(0)
    lied = rows.test.assign(y=rows.test["y"].to_numpy()[::-1] * 3)
    other = dataclasses.replace(rows, test=lied)
    monkeypatch.setattr(methods.Rows, "simulate", lambda seed: other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = methods.compare(0, SMALL, False)
    assert again.prior_scale == done.methods.prior_scale
    for key in ("pca", "random"):
        np.testing.assert_array_equal(
            again.comparison.models[key].draws.z, done.methods.comparison.models[key].draws.z
        )


def test_prior_scale_maximises_validation_log_likelihood(done):
    rows = methods.Rows.simulate(0)
    x, y = rows.encoded(rows.validation)
    data, likelihood = rows.encoded(rows.train), rows.likelihood()
    module = methods.make_module(SMALL.settings, likelihood, *data)
    scores = {}
    for scale in SMALL.scales:
        result = subbayes.training.train(
            module,
            likelihood,
            data,
            **training_options(
                epochs=5,
                prior_scale=scale,
                learning_rate=SMALL.settings.training.learning_rate,
                batch_size=64,
            ),
        )
        outputs = result.network(result.network.weights, torch.from_numpy(x))[None]
        predictive = subbayes.Predictive(outputs, result.likelihood)
        scores[scale] = predictive.log_prob(y).mean()
    assert done.methods.prior_scale == max(scores, key=scores.get)


def test_encoding_is_learned_from_the_training_part():
    rows = methods.Rows.simulate(0)
    x, _ = rows.encoded(rows.train)
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    assert abs(rows.encoded(rows.test)[0].mean(0)).max() > 0.01


# --- existing files -----------------------------------------------------------------------------


@pytest.mark.slow
def test_rerun_keeps_other_files_in_the_folder(done, tmp_path, capsys):
    tmp_path = shutil.copytree(done.folder, tmp_path / "demo")
    mine = tmp_path / "plots" / "mine.png"
    mine.write_bytes(b"mine")
    again = small(tmp_path, show=False)
    assert capsys.readouterr() == ("", "")
    assert mine.read_bytes() == b"mine"
    same = ["log_likelihood", "rmse", "crps", "coverage"]
    pd.testing.assert_frame_equal(
        again.methods.comparison.table[same], done.methods.comparison.table[same]
    )


def test_existing_file_of_the_same_name_is_refused_before_fitting(tmp_path, monkeypatch):
    (tmp_path / "scores.csv").write_text("theirs")
    monkeypatch.setattr(demo, "compare", lambda *_: pytest.fail("started"))
    with pytest.raises(InputError, match="out: expected a new folder, or that of an earlier demo"):
        small(tmp_path, show=False)
    assert (tmp_path / "scores.csv").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


def test_another_model_is_not_overwritten(tmp_path):
    net = subbayes.MLP(1, (2,), 1, seed=0)
    x = torch.linspace(-1, 1, 20)[:, None]
    plan = subbayes.Training(epochs=2, swa_epochs=3)
    subbayes.fit(
        net, (x, x[:, 0]), subspace=subspaces.PCA(rank=1), training=plan, sampling=Sampling(draws=5)
    ).save(tmp_path / "model")
    with pytest.raises(InputError, match="out: expected a new folder, or that of an earlier demo"):
        small(tmp_path, show=False)
    assert subbayes.load(tmp_path / "model").draws.n_draws == 5


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
        ([], (Path("runs/demo"), 0, None, True), ""),
        (["--seed", "3", "--quiet"], (Path("runs/demo"), 3, False, False), "table\n"),
        (["--out", "a", "--json"], (Path("a"), 0, None, False), '{"scores": [1.0, null]}\n'),
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


def test_examples_in_docstrings():
    failed, tried = doctest.testmod(sections)
    assert failed == 0
    assert tried > 0

"""The code of guides and method pages runs, and prints what the pages say."""

import re
from functools import partial
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from pages import ROOT, SIZES, run_page, same_output

import subbayes
from subbayes import distributed, likelihoods
from subbayes.comparison.registry import METHODS
from subbayes.inference.engine import ENGINES as ENGINE_NAMES
from subbayes.likelihoods.families import FAMILIES
from subbayes.models.settings import LIKELIHOODS
from subbayes.tables.hierarchical import Candidate, Effort

DOCS = ROOT / "docs"
needs_botorch = pytest.mark.skipif(find_spec("botorch") is None, reason="no botorch")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
ADAPTERS = pytest.param("adapters", marks=needs_peft)
GUIDES = (
    "trained-cnn",
    ADAPTERS,
    "unseen",
    "serve",
    "guarantees",
    "many-processes",
    "comparing-methods",
    "clinical-images",
    "counts-in-space",
    "survival",
    "update",
    pytest.param("decide", marks=needs_botorch),
    "from-bambi-brms",
    "from-mgcv",
)
TABLES = ("from-scikit-learn", "from-gp-libraries", "time-series")
OTHERS = (
    "diagnostics",
    "methods/deep-ensembles",
    "methods/map-swa",
    "methods/microcanonical",
    "methods/mc-dropout",
    "methods/temperature-scaling",
)
LONGER = (
    "methods/all-weights",
    "methods/curves",
    "methods/linearised-laplace",
    "methods/optimal-subspace",
    "methods/own-density",
    "methods/sparse",
    "methods/spectra",
    "methods/subnetworks",
    "methods/temperature",
    "methods/variational-inference",
)
ENGINES = (
    "elliptical-slice-sampling",
    "hamiltonian-monte-carlo",
    "laplace",
    "parallel-tempering",
    "pca",
    "random",
    "sequential-monte-carlo",
    "slice-sampling",
    "swag",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of chains as short as these
    pytest.mark.usefixtures("unchecked"),
]
SMALL = Effort((Candidate((4,), 1),), climb=50, constant=50, chains=2, steps=100)
SMALL_TABLES = {
    **SIZES,
    r'effort="quick"': "effort=SMALL",
    r'"(swa_)?epochs": \d+': r'"\1epochs": 5',
    "steps = 50": "steps = 5",
    r"in range\(350\)": "in range(5)",
    "cv=[35]": "cv=2",
}
"""Sizes of pages whose tables would take most of a minute."""
nearly = partial(same_output, relative=0.15, absolute=0.06)


@pytest.fixture(autouse=True)
def alone():
    """Leave the processes that a page has joined."""
    yield
    distributed.leave()


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_guides_run_and_print_what_they_say(name, tmp_path, monkeypatch):
    page = DOCS / "guides" / f"{name}.md"
    monkeypatch.chdir(tmp_path)  # where examples save models
    with torch.random.fork_rng(devices=[]):
        run_page(page, nearly, leave_out="import FastAPI")
    assert f"guides/{page.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*OTHERS, *LONGER])
def test_examples_of_other_pages_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert len(run_page(DOCS / f"{name}.md")) > 3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ENGINES)
def test_examples_of_engines_run_at_small_sizes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert len(run_page(DOCS / "methods" / f"{name}.md", sizes=SIZES)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_guides_with_tables_run_at_small_sizes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        page = DOCS / "guides" / f"{name}.md"
        found = run_page(page, sizes=SMALL_TABLES, names={"SMALL": SMALL})
    assert "TableRegressor" in found


@pytest.mark.slow
def test_the_gallery_draws_its_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "gallery.md"
    with torch.random.fork_rng(devices=[]):
        run_page(page, sizes=SMALL_TABLES, names={"SMALL": SMALL})
    shown = re.findall(r"\]\(images/gallery/([\w-]+\.png)\)", page.read_text(encoding="utf-8"))
    assert {path.name for path in tmp_path.iterdir()} == set(shown)
    assert all((DOCS / "images" / "gallery" / name).exists() for name in shown)


@pytest.fixture
def names():
    """A module, a model, data and tables that pages take for granted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x, module = torch.randn(40, 3), subbayes.MLP(3, (5,), 1, seed=0)
    y, few = x[:, 0] + 0.1 * x[:, 1], subbayes.Sampling(draws=8, chains=2, progress=False)
    training = subbayes.Training(epochs=3, swa_epochs=8)
    rng = np.random.default_rng(0)
    n = 60
    frame = pd.DataFrame(
        {
            "age": rng.uniform(20, 80, n),
            "dose": rng.uniform(-2, 2, n),
            "size": rng.uniform(50, 150, n),
            "clinic": rng.choice(list("abcdef"), n),
            "town": rng.choice(["bonn", "kiel", "ulm"], n),
        }
    )
    frame["visits"] = rng.poisson(np.exp(0.02 * frame["age"] + np.sin(frame["dose"])))
    frame["price"] = 2 * frame["size"] + 20 * (frame["town"] == "ulm") + rng.normal(0, 10, n)
    model = subbayes.fit(module, (x, y), training=training, sampling=few)
    return {
        "subbayes": subbayes,
        "model": model,
        "posterior": model.posterior,
        "net": module,
        "module": module,
        "x": x,
        "y": y,
        "data": (x, y),
        "weights": torch.ones(40),
        "frame": frame,
        "new": frame.head(),
    }


@pytest.fixture
def short_regressions(monkeypatch):
    """Regressions whose length the page leaves to the defaults have few draws."""
    long = subbayes.SemiStructuredRegression.fit
    few = subbayes.Sampling(draws=20, chains=2, warmup=20, progress=False)

    def short(self, frame, **options):
        networks = {"training": subbayes.Training(epochs=3)} if self.specification.deep else {}
        return long(self, frame, **{"sampling": few, **networks, **options})

    monkeypatch.setattr(subbayes.SemiStructuredRegression, "fit", short)


@pytest.mark.few(1)
@pytest.mark.parametrize("page", ["concepts", "artifacts", "methods/other-samplers"])
def test_examples_that_continue_others_run(page, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(DOCS / f"{page}.md", leave_out="(posterior, sampling)", names=names, sizes=SIZES)


@pytest.mark.slow
@pytest.mark.usefixtures("short_regressions")
def test_all_examples_of_the_readme_run(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        found = run_page(ROOT / "README.md", names=names, sizes=SIZES)
    assert (found["lower"] < found["mean"]).all()
    assert (found["mean"] < found["upper"]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("short_regressions")
def test_examples_of_regressions_run_at_small_sizes(tmp_path, monkeypatch):
    pytest.importorskip("arviz")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = run_page(DOCS / "methods" / "semi-structured.md", sizes=SIZES)
    assert found["again"].predict(found["frame"].head()).mean.shape == (5,)


@pytest.mark.parametrize(
    ("page", "choices"),
    [
        ("cli.md", [*ENGINE_NAMES, *(name for names in LIKELIHOODS.values() for name in names)]),
        ("guides/comparing-methods.md", METHODS),
    ],
)
def test_pages_name_every_choice(page, choices):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [name for name in choices if not re.search(f'`"?{name}"?`', text)] == []


def test_the_table_of_likelihoods_has_their_names():
    section = (DOCS / "concepts.md").read_text(encoding="utf-8").partition("## Likelihoods")[2]
    rows = [line for line in section.partition("## ")[0].splitlines() if line.startswith('| `"')]
    named = {name for row in rows for name in re.findall(r'`"([\w-]+)"`', row.split("|")[1])}
    known = {*likelihoods.LIKELIHOODS}
    known |= {name for name, family in FAMILIES.items() if family.is_for_networks}
    assert named <= known
    assert known - named <= set(FAMILIES) - {"poisson", "bernoulli"}


@pytest.mark.skipif(find_spec("fastapi") is None, reason="fastapi is not installed")
@pytest.mark.skipif(find_spec("httpx") is None, reason="httpx is not installed")
def test_the_service_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from fastapi.testclient import TestClient

    with torch.random.fork_rng(devices=[]):
        names = run_page(DOCS / "guides" / "serve.md")
    client, rows = TestClient(names["app"]), names["x"][:3]
    answer = client.post("/predict", json={"rows": rows.tolist()})
    assert answer.status_code == 200
    expected = names["served"].predict(rows, n_draws=30)
    np.testing.assert_allclose(answer.json()["probabilities"], expected.probabilities, atol=1e-3)
    assert answer.json()["label"] == expected.labels.tolist()
    refused = client.post("/predict", json={"rows": [[0.0, 1.0]]})
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("inputs: expected what the module takes")

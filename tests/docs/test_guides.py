"""The code of guides and method pages runs, and prints what the pages say."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from pages import ROOT, run_page, same_output

DOCS = ROOT / "docs"
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
ADAPTERS = pytest.param("adapters", marks=needs_peft)
GUIDES = (
    "trained-cnn",
    ADAPTERS,
    "unseen",
    "serve",
    "many-processes",
    "clinical-images",
    "counts-in-space",
    "survival",
)
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
    "methods/blob",
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
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of chains as short as these
    pytest.mark.usefixtures("unchecked"),
]
nearly = partial(same_output, relative=0.15, absolute=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_guides_run_and_print_what_they_say(name, tmp_path, monkeypatch):
    page = DOCS / "guides" / f"{name}.md"
    monkeypatch.chdir(tmp_path)  # where examples save models
    with torch.random.fork_rng(devices=[]):
        run_page(page, nearly, leave_out="import FastAPI")
    assert f"guides/{page.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [*OTHERS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)]
)
def test_examples_of_other_pages_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert len(run_page(DOCS / f"{name}.md")) > 3


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

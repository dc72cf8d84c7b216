"""The experiment on image classifiers on a device, against the same on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from image_cases import KINDS, TINY

from experiments import images
from experiments import laplace_images as experiment

PLAN = replace(TINY, approximate_curvature=24)
PLANS = {"mnist": PLAN, "cifar10": replace(PLAN, corrupted=0, corrupted_ranks=(), large=())}
COMPARED = ("exact, inputs to predict", "KFAC, training inputs", "predictive, training inputs")


def fake_images(name, data_dir=None):
    rng = np.random.default_rng(0)
    shape = (32, 32, 3) if name == "cifar10" else (28, 28)
    x, y = rng.integers(0, 256, (40, *shape)), rng.integers(0, 10, 40)
    return images.Images(x[:30].astype(np.uint8), y[:30], x[30:].astype(np.uint8), y[30:])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_subspaces_of_image_classifiers(device, name, monkeypatch):
    monkeypatch.setattr(experiment.pictures, "load", fake_images)
    some = {kind: experiment.CORRUPTIONS[kind] for kind in KINDS}
    monkeypatch.setattr(experiment, "CORRUPTIONS", some)
    found, expected = (
        experiment.compute_record(name, 0, PLANS[name], None, lambda *_: None, where)
        for where in (device, torch.device("cpu"))
    )
    assert found["device"] == str(device)
    assert found["form"] == expected["form"]
    for key in ("log_trace", "test_accuracy"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3)
    for kind in COMPARED:
        for rank, measures in expected["subspaces"][kind].items():
            assert found["subspaces"][kind][rank] == pytest.approx(measures, rel=1e-2, abs=1e-3)
    for kind, one in expected["corrupted"].items():
        assert found["corrupted"][kind]["trace"] == pytest.approx(one["trace"], rel=1e-3)
        assert found["corrupted"][kind]["accuracy"] == pytest.approx(one["accuracy"])

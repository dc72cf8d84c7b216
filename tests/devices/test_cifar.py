"""The CIFAR experiment on a device."""

import argparse
import math

import pytest
from cifar_cases import TINY, coloured_images

from experiments import cifar


@pytest.mark.slow
def test_trainings_and_subspaces_stay_on_the_device(device, tmp_path):
    options = argparse.Namespace(
        model=["resnet20"],
        methods="swag,pca_ess,random_vi,ensemble,curve_ess",
        seeds=1,
        first=0,
        device=str(device),
        recorded=False,
        results=str(tmp_path),
        write=None,
    )
    found = cifar.run(options, lambda *_: None, TINY, coloured_images())["resnet20"]
    assert list(found) == options.methods.split(",")
    assert all(math.isfinite(scores["nll"]) for scores in found.values())

"""Every engine under the shape checks of its annotations, which longer tests go without."""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec

import numpy as np
import pytest
from oracles import LinearGaussian

from subbayes.models.fit import ENGINES


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name == "realnvp" and find_spec("zuko") is None, reason="needs zuko"
            ),
        )
        for name in ENGINES
    ],
)
def test_arrays_have_the_shapes_the_annotations_say(name):
    module, function = ENGINES[name].split(":")
    engine = getattr(importlib.import_module(module), function)
    short = {"warmup": 12} if "warmup" in inspect.signature(engine).parameters else {}
    draws = engine(LinearGaussian(n=40).posterior(), draws=4, chains=3, progress=False, **short)
    assert draws.z.shape == (3, 4, 2)
    assert np.isfinite(draws.z).all()

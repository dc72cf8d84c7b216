"""Every engine under the shape checks of its annotations, as `make types` runs it."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from oracles import LinearGaussian

from subbayes.inference.engine import ENGINES, engine_of


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(find_spec("zuko") is None, reason="needs zuko"),
                pytest.mark.slow,
            ]
            if name == "realnvp"
            else [],
        )
        for name in ENGINES
    ],
)
def test_arrays_have_the_shapes_the_annotations_say(name):
    draws = engine_of(name).sample(
        LinearGaussian(n=40).posterior(), draws=4, chains=3, warmup=12, progress=False
    )
    assert draws.z.shape == (3, 4, 2)
    assert np.isfinite(draws.z).all()

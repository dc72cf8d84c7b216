"""Settings of a sampling run that are refused when they are made."""

from __future__ import annotations

import numpy as np
import pytest

from subbayes import InputError, Sampling

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("initial", ["prior", "shift", np.zeros((2, 3)), [[1, 2], [3, 4]]])
def test_start_points(initial):
    assert Sampling(initial=initial).initial is initial


def test_start_points_that_are_refused():
    with pytest.raises(InputError, match="^initial: expected one of 'prior', 'shift', 'ensemble'"):
        Sampling(initial="mode")


def test_time_between_checkpoints():
    assert Sampling(checkpoint_seconds=0).checkpoint_seconds == 0
    for wrong in (None, "", -1.0, float("nan")):
        with pytest.raises(InputError, match="checkpoint_seconds: expected a number of at least"):
            Sampling(checkpoint_seconds=wrong)

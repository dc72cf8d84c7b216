"""Settings of a sampling run that are refused when they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from subbayes import InputError, Sampling

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("initial", ["prior", "shift", np.zeros((2, 3)), [[1, 2], [3, 4]]])
def test_start_points(initial):
    assert Sampling(initial=initial).initial is initial


@pytest.mark.parametrize(
    "initial",
    [
        "mode",
        None,
        3.0,
        [1.0, 2.0],
        [[1, 2], [3]],
        [["a", "b"]],
        [["a", 1]],
        [{}],
        np.zeros((2, 2, 2)),
        [[True]],
        [[1.0, np.nan]],
        torch.zeros(2, 2, requires_grad=True),
    ],
    ids=str,
)
def test_start_points_that_are_refused(initial):
    with pytest.raises(InputError, match="^initial: expected 'prior', 'shift', 'ensemble' or an"):
        Sampling(initial=initial)


def test_time_between_checkpoints():
    assert Sampling(checkpoint_seconds=0).checkpoint_seconds == 0
    for wrong in (None, "", -1.0, float("nan")):
        with pytest.raises(InputError, match="checkpoint_seconds: expected a number of at least"):
            Sampling(checkpoint_seconds=wrong)

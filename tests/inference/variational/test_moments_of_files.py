"""Moments of an approximation that is read from a file are those of its draws."""

import numpy as np
import pytest
import torch

from subbayes import Draws, InputError
from subbayes.draws import Moments

MEAN, FACTOR = np.array([1.0, -2.0, 0.5]), np.array([[1.0, 0, 0], [0.9, 0.5, 0], [0, 0.3, 2.0]])


def draws(n=400, dense=True):
    eps = np.random.default_rng(0).standard_normal((2, n // 2, 3))
    if dense:
        moments, z = Moments.of(MEAN, FACTOR @ FACTOR.T), MEAN + eps @ FACTOR.T
    else:
        sd = np.diag(FACTOR)
        moments, z = Moments(MEAN, sd), MEAN + eps * sd
    return Draws(z, engine="full-rank-vi", validity="approximation", moments=moments)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("n", [12, 400])
def test_moments_are_those_of_the_draws(dense, n):
    arrays, facts = draws(n, dense).state()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert np.array_equal(Draws.from_state(tensors, facts).z, arrays["z"])
    changes = [{"z": tensors["z"] * 1000}, {"moments.mean": tensors["moments.mean"] + 1e6}]
    if dense and n == 400:
        sd = tensors["moments.sd"]
        changes += [{"moments.covariance": torch.diag(sd**2)}]
        changes += [{"moments.covariance": torch.outer(sd, sd)}]
    for change in changes:
        with pytest.raises(InputError, match="moments"):
            Draws.from_state(tensors | change, facts)

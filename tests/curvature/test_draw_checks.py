"""Draws that belong to their seed and prior pass, whatever solved them; forged ones do not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subbayes
from subbayes import InputError
from subbayes.curvature.draw_checks import check_draws
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian

pytestmark = pytest.mark.filterwarnings("ignore:tolerance")


def sampled(seed=0, prior_precision=1.0, dtype=torch.float64, n=24, **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=dtype)
    network = subbayes.Network(subbayes.MLP(2, (4,), 1, seed=0).to(dtype))
    found = linearised_laplace(
        network, Gaussian(0.3), (x, x[:, 0] ** 2), covariance="sampled",
        prior_precision=prior_precision, seed=seed, **options,
    ).precision  # fmt: skip
    return found.draws, found.settings, found.products, prior_precision


@pytest.mark.parametrize("solver", ["dual", "primal", "minibatch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior_precision", [1e-4, 1.0, 1e4])
def test_every_solver_passes(solver, dtype, prior_precision):
    check_draws(*sampled(1, prior_precision, dtype, solver=solver, samples=20))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-2, 1.0, 50.0]), st.sampled_from([3, 24, 100]))
def test_every_seed_passes(seed, prior_precision, n):
    check_draws(*sampled(seed, prior_precision, n=n, samples=30))


@pytest.mark.parametrize("solver", ["dual", "primal"])
@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_solutions_that_did_not_converge_pass(solver, iterations):
    draws, *others = sampled(
        2, 0.1, iterations=iterations, tolerance=1e-8, solver=solver, samples=2
    )
    assert draws.error > 1e-3
    check_draws(draws, *others)


def test_updated_draws_pass():
    """Solved again from the draws at another prior precision."""
    draws, chosen, products, _ = sampled(3, 1.0, samples=30)
    again = chosen.draw(products, 4.0, start=draws)
    check_draws(again, chosen, products, 4.0)
    with pytest.raises(InputError, match="expected draws .*, got others"):
        check_draws(again, chosen, products, 1.0)


FORGED = {
    "of another order": lambda d: replace(d, x=d.x.flip(0)),
    "that are wider": lambda d: replace(d, x=1.5 * d.x),
    "that are narrower": lambda d: replace(d, x=0.5 * d.x),
    "of the other sign": lambda d: replace(d, x=-d.x),
    "of 0": lambda d: replace(d, x=0 * d.x),
    "one by 1000": lambda d: replace(d, x=torch.cat([d.x[:-1], 1000 * d.x[-1:]])),
    "of a larger effective dimension": lambda d: replace(d, fitted=2 * d.fitted + 17),
    "that the data determine": lambda d: replace(d, x=1e-3 * d.x, fitted=0 * d.fitted + 17.5),
    "of noise of their size": lambda d: replace(
        d, x=torch.randn(d.x.shape, dtype=d.x.dtype) * d.x.square().mean().sqrt()
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_draws_are_refused(what):
    draws, chosen, *others = sampled(0, samples=64, n=6)
    torch.manual_seed(0)
    with pytest.raises(InputError, match="The artifact is damaged"):
        check_draws(FORGED[what](draws), chosen, *others)
    check_draws(draws, chosen, *others)
    with pytest.raises(InputError, match="that start from those of the prior by their seed"):
        check_draws(draws, replace(chosen, seed=1), *others)

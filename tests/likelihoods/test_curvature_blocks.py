"""Products with the curvature in outputs, and with its roots, against dense matrices."""

import cases
import numpy as np
import pytest
import torch

from subbayes import InputError
from subbayes.likelihoods import Categorical, CategoricalTokens, Weighted
from subbayes.likelihoods.curvature_blocks import DenseBlocks, SoftmaxBlocks

SAME = dict(rtol=1e-10, atol=1e-12)


def check(blocks, curvature):
    """Products of the whole matrix of each row."""
    n, c, _ = curvature.shape
    u = torch.randn(3, n, c, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.einsum("ncd,snd->snc", curvature, u)
    torch.testing.assert_close(blocks.times(u), exact, **SAME)
    root = blocks.root()
    torch.testing.assert_close(root.times(root.transposed(u)), exact, **SAME)
    v = torch.randn(3, n, c, generator=torch.Generator().manual_seed(1)).double()
    inner = (root.times(u) * v).sum(-1), (u * root.transposed(v)).sum(-1)
    torch.testing.assert_close(*inner, **SAME)
    whole = torch.stack([torch.block_diag(*one) for one in blocks.dense()])
    torch.testing.assert_close(whole, curvature, **SAME)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(cases.LIKELIHOODS))
def test_products_are_those_of_the_curvature(name, weighted):
    noise, rng = cases.LIKELIHOODS[name], np.random.default_rng(0)
    y, f = noise.targets(rng, 7), torch.from_numpy(rng.normal(size=(7, noise.n_outputs)))
    likelihood = noise.likelihood.for_outputs(noise.n_outputs, y).for_targets(y)
    curvature = likelihood.curvature(f)
    if weighted:
        a = torch.tensor([0.0, 1.0, 2.5, 1.0, 0.3, 0.0, 4.0]).double()
        likelihood, curvature = Weighted(likelihood, a), a[:, None, None] * curvature
    check(likelihood.curvature_blocks(f), curvature)


@pytest.mark.parametrize("shift", [False, True])
def test_positions_that_are_ignored_have_none(shift):
    y = torch.tensor([[1, 2, -100, 0], [0, -100, -100, 2]])
    f = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).double()
    likelihood = CategoricalTokens(3, shift=shift).for_targets(y)
    check(likelihood.curvature_blocks(f), likelihood.curvature(f))
    rows = Weighted(CategoricalTokens(3, shift=shift)).for_targets((y, torch.tensor([2.0, 0.5])))
    check(
        rows.curvature_blocks(f), torch.tensor([2.0, 0.5])[:, None, None] * likelihood.curvature(f)
    )


def test_saturated_probabilities_keep_their_small_curvature():
    """Entries of 1e-13 beside 1 are found, from outputs of float32 too."""
    f = torch.tensor([[30.0, 0.0, -1.0]])
    p = f.double().softmax(-1)
    blocks = Categorical().curvature_blocks(f.double())
    e = torch.eye(3).double()[:, None]
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected[0, 0, 0] = p[0, 0] * p[0, 1:].sum()
    found = blocks.root().times(blocks.root().transposed(e))[:, 0]
    torch.testing.assert_close(found, expected[0], rtol=1e-9, atol=0)
    assert Categorical().curvature_blocks(f).times(e.float()).dtype == torch.float32


def test_vocabularies_need_no_matrices():
    f = torch.randn(1, 4 * 30_000, generator=torch.Generator().manual_seed(0))
    blocks = CategoricalTokens(30_000).curvature_blocks(f)
    assert isinstance(blocks, SoftmaxBlocks)
    assert blocks.width == 1
    u = torch.zeros(1, *f.shape)
    u[0, 0, 30_005] = 1
    p = f.double().unflatten(1, (4, -1)).softmax(-1)[0, 1]
    exact = torch.zeros(4, 30_000).double()
    exact[1] = -p * p[5]
    exact[1, 5] += p[5]
    torch.testing.assert_close(
        blocks.times(u)[0, 0].double(), exact.flatten(), rtol=1e-5, atol=1e-12
    )


class Sharper(Categorical):
    """A subclass that changes the curvature alone."""

    def curvature(self, outputs):
        return 3 * super().curvature(outputs)


def test_a_subclass_with_its_own_curvature_has_it_in_blocks_too():
    f = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    check(Sharper().curvature_blocks(f), 3 * Categorical().curvature(f))
    assert isinstance(Sharper().curvature_blocks(f), DenseBlocks)


def test_curvature_without_a_root_is_refused():
    f = torch.tensor([[float("nan"), 0.0]]).double()
    for blocks in (Categorical().curvature_blocks(f), DenseBlocks.diagonal(f)):
        with pytest.raises(InputError, match="likelihood: expected finite curvature"):
            blocks.root()
    with pytest.raises(InputError, match="positive semi-definite curvature.*eigenvalue of -1"):
        DenseBlocks(-torch.eye(2).double().reshape(1, 1, 2, 2)).root()

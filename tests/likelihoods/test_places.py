"""One label at every place of a row, against `Categorical` at each place."""

import numpy as np
import pytest
import torch

from subbayes import InputError
from subbayes.likelihoods import Categorical, CategoricalPlaces, from_config

F = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(20).reshape(5, 4) % 3
LIKELIHOOD = CategoricalPlaces(3)


def test_every_place_is_categorical():
    places, one = F.reshape(2, 5, 4, 3), Categorical()
    log_p = sum(one.log_prob(places[:, :, p], Y[:, p]) for p in range(4))
    torch.testing.assert_close(LIKELIHOOD.log_prob(F, Y), log_p)
    torch.testing.assert_close(LIKELIHOOD.mean(F).reshape(2, 5, 4, 3), places.softmax(-1))
    blocks = LIKELIHOOD.curvature_blocks(F)
    torch.testing.assert_close(blocks, one.curvature(places))
    whole = LIKELIHOOD.curvature(F)
    torch.testing.assert_close(whole[1, 2], torch.block_diag(*blocks[1, 2]))
    hessian = torch.func.hessian(lambda f: -LIKELIHOOD.log_prob(f[None], Y[:1])[0])(F[0, 0])
    torch.testing.assert_close(whole[0, 0], hessian)
    score = torch.func.grad(lambda f: LIKELIHOOD.log_prob(f, Y).sum())(F)
    torch.testing.assert_close(LIKELIHOOD.score(F, Y), score)


def test_draws_have_the_probabilities():
    many = F[0].expand(4000, 5, 12)
    drawn = LIKELIHOOD.sample(many, torch.Generator().manual_seed(0))
    p = LIKELIHOOD.mean(F[0])
    assert ((drawn.mean(0) - p).abs() < 4.5 * (p * (1 - p) / 4000).sqrt()).all()
    np.testing.assert_allclose(drawn.reshape(-1, 4, 3).sum(2), 1)
    torch.testing.assert_close(
        LIKELIHOOD.variance(F), LIKELIHOOD.mean(F) * (1 - LIKELIHOOD.mean(F))
    )


def test_configuration_and_bad_input():
    assert from_config(LIKELIHOOD.to_config(), 12) == LIKELIHOOD
    assert LIKELIHOOD.n_outputs(Y) == 12
    LIKELIHOOD.check_targets(Y)
    for call, message in [
        (lambda: CategoricalPlaces(1), "n_classes: expected a whole number of at least 2"),
        (lambda: LIKELIHOOD.check_targets(Y + 1), r"y: expected labels in 0\.\.2, got 3"),
        (lambda: LIKELIHOOD.check_targets(Y[:, 0]), "y: expected whole-number labels of shape"),
        (lambda: LIKELIHOOD.check_targets(Y + 0.5), "y: expected whole-number labels of shape"),
        (lambda: from_config(LIKELIHOOD.to_config(), 11), "module: expected 3 outputs for each"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)

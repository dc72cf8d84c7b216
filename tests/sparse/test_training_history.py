"""The history of sparse training: accuracies and ELBOs, with weights of rows and units of y."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from subbayes import sparse
from subbayes.data.data import Data
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    CategoricalTokens,
    Gaussian,
    HeteroscedasticGaussian,
    Standardized,
    Weighted,
)

N = 40
STILL = sparse.LearningRates(*[1e-12] * len(sparse.LearningRates.__dataclass_fields__))


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, generator=generator)
    weights = torch.randint(0, 4, (N,), generator=generator).float()
    return x, weights


def certain(outputs):
    """A network that training does not change, and whose draws are all but equal."""
    torch.manual_seed(0)
    made = nn.Linear(2, outputs)
    return made, sparse.convert(made, "all", sd=1e-6)


def train(module, likelihood, data, epochs=3, batch_size=16):
    settings = sparse.SparseTraining(epochs=epochs, batch_size=batch_size, learning_rates=STILL)
    return sparse.fit(module, likelihood, data, settings, progress=False)


@pytest.mark.parametrize("form", ["tensors", "traced", "loader"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "likelihood", [Categorical(2), Bernoulli(), Bernoulli(("probit",))], ids=repr
)
def test_accuracy_counts_rows_as_often_as_their_weights(likelihood, weighted, form):
    x, weights = rows()
    one = not isinstance(likelihood, Categorical)
    plain, made = certain(1 if one else 2)
    outputs = plain(x).detach()
    chosen = (outputs[:, 0] > 0).long() if one else outputs.argmax(1)
    wrong = torch.arange(N) % 3 == 0
    y = torch.where(wrong, 1 - chosen, chosen)
    if not weighted:
        weights = torch.ones(N)
        data = x, y
    elif isinstance(likelihood, Bernoulli):
        data = x, (y, weights)
    else:
        data, likelihood = Data.of((x, y)).weighted(weights), Weighted(likelihood)
        data = data.inputs, data.y
    if form == "loader":
        data = DataLoader([(x[i], *_row(data[1], i)) for i in range(N)], 7, collate_fn=_joined)
    expected = float(weights[~wrong].sum() / weights.sum())
    epochs = 25 if form == "traced" else 3  # with 50 batches of one size
    found = train(made, likelihood, data, epochs).history["accuracy"]
    assert found == pytest.approx([expected] * epochs, rel=1e-6)


def _row(y, i):
    return (y[i],) if isinstance(y, torch.Tensor) else tuple(part[i] for part in y)


def _joined(batch):
    x, *y = (torch.stack(parts) for parts in zip(*batch, strict=True))
    return x, y[0] if len(y) == 1 else tuple(y)


def test_accuracy_is_left_out_for_labels_of_positions():
    x, _ = rows()
    y = torch.randint(0, 3, (N, 2), generator=torch.Generator().manual_seed(0))
    assert train(certain(6)[1], CategoricalTokens(3), (x, y)).history.keys() == {
        "elbo",
        "kl",
        "density",
    }


@pytest.mark.parametrize("batch_size", [None, N // 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", [Gaussian(0.3), HeteroscedasticGaussian(0.3)], ids=repr)
def test_elbo_is_in_the_units_of_y(likelihood, weighted, batch_size):
    """It equals that of `elbo`, and those of other units differ by the logarithm of the scale."""
    x, weights = rows()
    if batch_size is not None:
        weights = weights + 1  # rows of weight 0 are left out, and batches would differ in size
    y = x[:, 0] + 0.3
    n = float(weights.sum()) if weighted else N
    found = {}
    for scale in (1.0, 1000.0):
        units = Standardized.of(likelihood, scale * y)
        data = Data.of((x, scale * y))
        if weighted:
            units, data = Weighted(units), data.weighted(weights)
        made = certain(2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)[1]
        network = train(made, units, (data.inputs, data.y), batch_size=batch_size)
        found[scale] = network.history["elbo"][-1]
        exact = sparse.elbo(network.module.train(), units, x, data.y, N)
        assert found[scale] == pytest.approx(float(exact.detach()), rel=1e-4)
    assert found[1000.0] == pytest.approx(found[1.0] - n * math.log(1000), rel=1e-4)

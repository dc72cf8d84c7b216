"""The history of sparse training: accuracies of rows with weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from subbayes import sparse
from subbayes.data.data import Data
from subbayes.likelihoods import Bernoulli, Categorical, CategoricalTokens, Weighted
from subbayes.likelihoods.families import BernoulliFamily

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


def train(module, likelihood, data, epochs=3):
    settings = sparse.SparseTraining(epochs=epochs, batch_size=16, learning_rates=STILL)
    return sparse.fit(module, likelihood, data, settings, progress=False)


@pytest.mark.parametrize("form", ["tensors", "traced", "loader"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", [Categorical(2), Bernoulli(), BernoulliFamily()], ids=repr)
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
    elif isinstance(likelihood, BernoulliFamily):
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

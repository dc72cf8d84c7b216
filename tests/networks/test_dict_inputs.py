"""Modules like those of transformers: inputs by name, an object with logits, dicts as batches."""

from collections import UserDict

import cases
import numpy as np
import pytest
import torch
from fits import fit_options
from jacobians import dense, dense_rows
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import subbayes
from subbayes import InputTypeError, Network
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical
from subbayes.subspaces.optimal import optimal, optimal_for
from subbayes.subspaces.subnetwork import from_mask, subnetwork

N, NEW, LENGTH, WORDS, CLASSES = 12, 5, 6, 11, 3


class Classifier(nn.Module):
    """Tokens and their mask to logits, or to a loss too where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8, padding_idx=0), nn.Embedding(LENGTH, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, input_ids, attention_mask, labels=None) -> cases.ModelOutput:
        h = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        logits = self.classifier((h * weights).sum(1))
        assert labels is None, "labels are no inputs"
        return cases.ModelOutput(loss=None, logits=logits, hidden_states=(h,))


class Sentences(Dataset):
    """Rows as dicts with labels, as tokenised data sets are."""

    def __init__(self, encoding, y) -> None:
        self.encoding, self.y = encoding, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i):
        return {name: t[i] for name, t in self.encoding.items()} | {"labels": self.y[i]}


@pytest.fixture(scope="module")
def made():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Classifier().double()
        lengths = 2 + torch.arange(N) % (LENGTH - 1)
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        ids = torch.randint(1, WORDS, (N, LENGTH)) * mask
    encoding = UserDict(input_ids=ids, attention_mask=mask)  # as a BatchEncoding is
    y = torch.arange(N) % CLASSES
    network = Network(module, output=lambda out: out.logits)
    new = UserDict({name: t[:NEW] for name, t in encoding.items()})
    V = dense_rows(network, Categorical(), dict(encoding), y)
    H = V.T @ V + 2.0 * torch.eye(network.size).double()
    J = dense(network, dict(new)).flatten(0, 1)
    return module, network, encoding, y, new, H, J


@pytest.mark.parametrize("form", ["dual", "primal"])
def test_covariance_equals_that_of_the_dense_jacobian(made, form):
    _, network, encoding, y, new, H, J = made
    posterior = linearised_laplace(
        network, Categorical(), (encoding, y), covariance=form, prior_precision=2.0
    )
    truth = J @ torch.linalg.solve(H, J.T)
    torch.testing.assert_close(posterior.covariance(new), truth, rtol=1e-8, atol=1e-10)
    rows = truth.reshape(NEW, CLASSES, NEW, CLASSES)
    blocks = torch.stack([rows[n, :, n] for n in range(NEW)])
    mean = network(network.weights, dict(new)).detach()
    expected = subbayes.predictions.gaussian.class_probabilities(mean, blocks, "probit")
    np.testing.assert_allclose(
        posterior.predict(new, method="probit").probabilities, expected, rtol=1e-8
    )


def test_the_optimal_subspace_attains_the_bound(made):
    _, network, encoding, y, new, H, J = made
    truth = J @ torch.linalg.solve(H, J.T)
    values, vectors = torch.linalg.eigh(truth)
    space = optimal(network, Categorical(), (encoding, y), inputs=new, rank=4, prior_precision=2.0)
    inside = linearised_laplace(network, Categorical(), (encoding, y), space, prior_precision=2.0)
    best = vectors[:, -4:] * values[-4:] @ vectors[:, -4:].T
    torch.testing.assert_close(inside.covariance(new), best, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("by", ["predictive", "variance", "last-layer", "mask"])
def test_subnetworks_equal_those_of_the_dense_jacobian(made, by):
    _, network, encoding, y, new, H, J = made
    data = encoding, y
    space = (
        from_mask(network, torch.arange(0, network.size, 40))
        if by == "mask"
        else subnetwork(
            network,
            Categorical(),
            data,
            rank=None if by == "last-layer" else 20,
            by=by,
            inputs=new,
            prior_precision=2.0,
        )
    )
    S = space.indices
    truth = J[:, S] @ torch.linalg.solve(H[S][:, S], J[:, S].T)
    found = linearised_laplace(network, Categorical(), data, space, prior_precision=2.0)
    torch.testing.assert_close(found.covariance(new), truth, rtol=1e-8, atol=1e-12)


def test_batches_of_dicts_with_labels_are_data(made):
    """From a data set, a shuffling loader, and one encoding: the same; labels are no inputs."""
    _, network, encoding, y, new, H, J = made
    rows, whole = Sentences(encoding, y), UserDict(labels=y, **encoding)
    truth = J @ torch.linalg.solve(H, J.T)
    shuffling = DataLoader(rows, batch_size=5, shuffle=True, collate_fn=default_collate)
    for data in (rows, shuffling, whole):
        assert torch.equal(Data.of(data).targets(), y)
        posterior = linearised_laplace(network, Categorical(), data, prior_precision=2.0)
        torch.testing.assert_close(posterior.covariance(new), truth, rtol=1e-8, atol=1e-10)
    by_loader = posterior.predict(DataLoader(rows, batch_size=5)).probabilities
    np.testing.assert_allclose(by_loader, posterior.predict(encoding).probabilities, rtol=1e-9)
    space = optimal_for(posterior.precision, DataLoader(rows, batch_size=5), 3)[0]
    assert space.rank == 3
    with pytest.raises(InputTypeError, match="or a dict with 'labels', got dict"):
        Data.of(DataLoader([dict(encoding)], batch_size=None))


def test_batches_of_different_lengths(made):
    """A collator pads each batch to its own length: outputs and gradients are those of each."""
    _, network, encoding, y, *_ = made
    short = {name: t[:1, :2] for name, t in encoding.items()}
    long = {name: t[3:6] for name, t in encoding.items()}
    loader = DataLoader([short, long], batch_size=None)
    posterior = linearised_laplace(network, Categorical(), (encoding, y), prior_precision=2.0)
    apart = [posterior.predict(part).probabilities for part in (short, long)]
    np.testing.assert_allclose(posterior.predict(loader).probabilities, np.concatenate(apart))


@pytest.mark.few(1)
@pytest.mark.parametrize("subspace", ["optimal", "subnetwork"])
def test_fit_accepts_dict_inputs(made, subspace):
    module, _, encoding, y, new, *_ = made
    model = subbayes.fit(
        module,
        (encoding, y),
        **fit_options(
            likelihood="categorical",
            subspace=subspace,
            rank=4,
            inputs=new,
            inference="laplace-linearised",
            output=lambda out: out.logits,
            draws=10,
            progress=False,
            training=subbayes.Training(epochs=1, swa_epochs=1),
        ),
    )
    p = model.predict(new).probabilities
    assert p.shape == (NEW, CLASSES)
    np.testing.assert_allclose(p.sum(1), 1)

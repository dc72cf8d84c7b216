"""Warnings of networks without a batching rule: one for a model, and none of torch's own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import subbayes
from subbayes import Sampling, Training
from subbayes.subspaces.random import Random

SHORT = dict(
    subspace=Random(rank=2),
    training=Training(epochs=1, swa_epochs=1),
    sampling=Sampling(draws=3, chains=2, warmup=2, progress=False),
)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(2, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


def messages(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return [str(w.message) for w in caught], found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("inference", ["elliptical-slice", "nuts"])
def test_a_recurrent_model_warns_once(kind, inference):
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 2), torch.randn(12)
    said, model = messages(
        lambda: subbayes.fit(Recurrent(kind), (x, y), inference=inference, **SHORT)
    )
    about = [text for text in said if "vectorising over weights failed" in text]
    assert len(about) == 1
    for call in (lambda: model.predict(x), lambda: model.evaluate(x, y)):
        assert not any("vectorising" in text for text in messages(call)[0])
    said, other = messages(lambda: subbayes.fit(Recurrent(kind), (x, y), **SHORT))
    assert sum("vectorising over weights failed" in text for text in said) == 1


def test_images_in_channels_last_format_have_the_same_outputs_without_warnings_of_torch():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    )
    x, y = torch.randn(12, 3, 6, 6), torch.randn(12)
    last = x.to(memory_format=torch.channels_last)
    said, model = messages(
        lambda: subbayes.fit(net.to(memory_format=torch.channels_last), (last, y), **SHORT)
    )
    more, found = messages(lambda: model.predict(last))
    assert not any("performance drop" in text for text in said + more)
    torch.testing.assert_close(found.outputs, model.predict(x).outputs)

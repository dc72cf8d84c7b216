"""Exported networks are loaded into modules that compute the same, and into no others."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, sparse


class Power(nn.Module):
    """A layer of a class of its own, which says how it is set."""

    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def forward(self, x):
        return x.abs() ** self.exponent

    def extra_repr(self):
        return f"exponent={self.exponent}"


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def between(layer):
    return nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 1))


def convolution(**options):
    return nn.Sequential(nn.Conv1d(1, 3, 3, **options), nn.AdaptiveAvgPool1d(1), nn.Flatten())


def encoder(**options):
    options = {"nhead": 2, "dim_feedforward": 5, "batch_first": True} | options
    return nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, **options), nn.Flatten())


@pytest.mark.parametrize(
    ("module", "other", "what"),
    [
        (between(nn.LeakyReLU(0.5)), between(nn.LeakyReLU()), "1 (negative_slope=0.01 instead of"),
        (between(nn.BatchNorm1d(6)), between(nn.BatchNorm1d(6, eps=1.0)), "1 (eps=1.0 instead of"),
        (between(nn.GELU()), between(nn.GELU("tanh")), "1 (approximate='tanh' instead of 'none')"),
        (between(nn.Softplus(2.0)), between(nn.Softplus()), "1 (beta=1.0 instead of 2.0)"),
        (encoder(activation=torch.sin), encoder(activation=torch.tanh), "(activation=tanh instead"),
        (between(Power(2)), between(Power(3)), "1 (extra_repr=exponent=3 instead of exponent=2)"),
        (convolution(), convolution(padding=1), "0 (padding=(1,) instead of (0,))"),
        (convolution(), convolution(stride=2), "0 (stride=(2,) instead of (1,))"),
        (encoder(), encoder(nhead=4), "1.self_attn (num_heads=4 instead of 2"),
        (encoder(), encoder(activation=torch.tanh), "1 (activation=tanh instead of relu)"),
        (between(nn.ReLU()), Doubled(*between(nn.ReLU())), "the module (class=Doubled instead"),
    ],
    ids=range(11),
)
def test_modules_with_other_settings_are_rejected(tmp_path, module, other, what):
    shape = {nn.Conv1d: (7, 1, 9), nn.Linear: (7, 3, 4)}[type(module[0])]
    if any(isinstance(own, nn.BatchNorm1d) for own in module):
        shape = 7, 4
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    small = sparse.export_network(module, example=x)
    file = small.save(tmp_path / "small.safetensors")
    torch.testing.assert_close(subbayes.load(file, copy.deepcopy(module))(x), small(x))
    assert not torch.allclose(other.eval()(x), module.eval()(x))
    with pytest.raises(InputError, match=re.escape(what)):
        subbayes.load(file, other)


def test_settings_without_effect_may_differ(tmp_path):
    def module(p, inplace, momentum):
        norm = nn.BatchNorm1d(6, momentum=momentum)
        return between(nn.Sequential(nn.ReLU(inplace=inplace), nn.Dropout(p), norm))

    x = torch.randn(5, 4)
    for layout in ("dense", "csr"):
        small = sparse.export_network(module(0.1, False, 0.1), layout=layout, example=x)
        file = small.save(tmp_path / f"{layout}.safetensors")
        torch.testing.assert_close(subbayes.load(file, module(0.5, True, 0.2))(x), small(x))

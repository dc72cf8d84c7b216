"""Draws of the outputs of sparse layers: their standard deviations in every dtype."""

import pytest
import torch
from torch import nn

from subbayes import sparse
from subbayes.sparse.layer_operation import LayerOperation
from subbayes.sparse.variational_families import Noise

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sd", [1e-3, 0.5])
@pytest.mark.parametrize(
    ("make", "shape", "rows"),
    [(lambda: nn.Linear(4, 1), (4,), 900), (lambda: nn.Conv1d(4, 1, 2), (4, 3), 1)],
    ids=["once", "several positions"],
)
def test_outputs_have_the_standard_deviation_of_the_weights(make, shape, rows, sd, dtype):
    """In training, where a small floor of variances would be added for each output."""
    torch.manual_seed(0)
    made = sparse.convert(make().to(dtype), "all", sd=sd).train()
    with torch.no_grad():
        made.mean.zero_()
        made.bias_mean.zero_()
        x, calls = torch.ones(rows, *shape, dtype=dtype), 900 // rows
        drawn = torch.cat([made(x) for _ in range(calls)]).float()  # rows may share weights
    exact = sd * (made.mean.numel() + 1) ** 0.5  # of the weights and the bias
    coarse = 0.02 if dtype.itemsize == 2 else 1e-6  # 1e-6 has few digits in float16
    assert float(drawn[:, 0].std()) == pytest.approx(exact, rel=coarse + 4 / 1800**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [True, False])
def test_gradients_are_finite_where_variances_are_zero(per_row, dtype):
    layer = nn.Linear(3, 2).to(dtype)
    sd = torch.tensor([[0.0, 1e-3, 1.0], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    bias_sd = torch.zeros(2, dtype=dtype, requires_grad=True)
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=dtype)
    drawn = LayerOperation(layer).draw_outputs(
        x, Noise(0), per_row, layer.weight, sd.square(), layer.bias, bias_sd.square()
    )
    gradients = torch.autograd.grad(drawn.sum(), [sd, bias_sd])
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert bool((gradients[1] == 0).all())
    assert bool((gradients[0][0, 1:] != 0).all())
    torch.testing.assert_close(drawn[:, 1], layer(x)[:, 1], atol=1e-6, rtol=0)

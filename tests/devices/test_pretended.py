"""The pretended device computes what the CPU does, and refuses what CUDA refuses."""

import numpy as np
import pytest
import torch
from torch import nn

from .pretended import PretendedTensor, pretended_device


@pytest.fixture
def device():
    with pretended_device() as pretended:
        yield pretended


def test_values_are_those_of_the_cpu(device):
    x = torch.randn(5, 3)
    layer = nn.Linear(3, 2)
    moved = nn.Linear(3, 2)
    moved.load_state_dict(layer.state_dict())
    moved.to(device)
    found = moved(x.to(device))
    assert isinstance(found, PretendedTensor)
    assert found.device == device
    assert torch.equal(found.cpu(), layer(x))
    found.sum().backward()
    layer(x).sum().backward()
    assert moved.weight.grad.device == device
    assert torch.equal(moved.weight.grad.cpu(), layer.weight.grad)
    x = x.to(device)
    x[0] = 1.0
    x += torch.ones(3, device=device)
    assert x[0].tolist() == [2.0, 2.0, 2.0]
    assert x.max().item() == float(x.cpu().max())


@pytest.mark.parametrize(
    "mixture",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a @ b.T,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a[0, 0], b[0, 0]]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.index_select(0, torch.tensor([0])),
        lambda a, b: b.index_select(0, torch.tensor([0], device=a.device)),
        lambda a, b: a.scatter(0, torch.zeros(1, 2, dtype=torch.long), 1.0),
        lambda a, b: b[torch.tensor([0], device=a.device)],
        lambda a, b: a.add_(b),
        lambda a, b: b.add_(a),
        lambda a, b: torch.zeros(()).add_(a.sum()),
        lambda a, b: nn.functional.linear(a, b),
        lambda a, b: torch.linalg.solve(a, b),
    ],
)
def test_mixtures_of_devices_are_refused(device, mixture):
    a, b = torch.eye(2).to(device), torch.eye(2)
    with pytest.raises(RuntimeError, match="same device"):
        mixture(a, b)


def test_what_cuda_allows_is_allowed(device):
    a, number = torch.eye(2).to(device), torch.tensor(2.0)
    assert (a * number).cpu().tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert (number - a).device == device
    assert torch.where(a > 0, a, number).device == device
    b = torch.empty(2, 2)
    b.copy_(a)
    assert torch.equal(b, torch.eye(2))
    assert torch.equal(a.copy_(torch.ones(2, 2)).cpu(), torch.ones(2, 2))
    assert torch.zeros(3, device=device).device == device
    assert torch.zeros_like(a).device == a.new_zeros(3).device == device
    assert torch.arange(3, device=device).device == device
    assert a.to("cpu").device.type == torch.zeros_like(a, device="cpu").device.type == "cpu"


def test_numpy_and_generators_of_the_cpu_are_refused(device):
    a = torch.ones(2).to(device)
    with pytest.raises(TypeError, match="can't convert"):
        a.numpy()
    with pytest.raises(TypeError, match="can't convert"):
        np.asarray(a)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, generator=generator, device=device)
    with pytest.raises(RuntimeError, match="generator"):
        torch.multinomial(a, 1, generator=generator)


def test_derivatives_of_functorch(device):
    x, y = torch.randn(4, 3), torch.randn(3)

    def value(row, other):
        return (row * other).sin().sum()

    for transform in (
        torch.func.vmap(value, (0, None)),
        torch.func.vmap(torch.func.grad(value), (0, None)),
        torch.func.jacfwd(lambda x, y: torch.func.vmap(value, (0, None))(x, y)),
        lambda x, y: torch.func.jvp(lambda x: x.sin() @ y, (x,), (x,))[1],
    ):
        torch.testing.assert_close(transform(x.to(device), y.to(device)).cpu(), transform(x, y))


def test_the_device_is_gone_afterwards():
    with pretended_device() as device:
        torch.zeros(2, device=device)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.zeros(2, device=device)

"""Our Adam takes torch's steps, bit for bit, whatever moves and whatever is loaded."""

import copy

import torch
from torch import nn

from subbayes.training.optimizer import Adam


def groups():
    """Two groups of rates, one of them of two types."""
    generator = torch.Generator().manual_seed(0)
    first = [
        nn.Parameter(torch.randn(3, 4, generator=generator)),
        nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64)),
        nn.Parameter(torch.randn(5, generator=generator)),
    ]
    second = [nn.Parameter(torch.randn(2, generator=generator))]
    return [{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01, "weight_decay": 0.3}]


def walk(optimizer, steps, *, still=(), seed=1):
    """Steps along the same gradients; parameters of these numbers have none."""
    generator = torch.Generator().manual_seed(seed)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    for _ in range(steps):
        for i, parameter in enumerate(every):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if i not in still:
                parameter.grad = drawn
        optimizer.step()
    return [p.detach().clone() for p in every]


def check_same(ours, torchs):
    for a, b in zip(ours, torchs, strict=True):
        assert torch.equal(a, b)


def test_steps_are_torchs_whatever_moves():
    ours, torchs = Adam(groups()), torch.optim.Adam(groups(), fused=True)
    for still in ((), (1, 3), (0,), ()):
        before = [p.detach().clone() for p in ours.param_groups[0]["params"]]
        check_same(walk(ours, 4, still=still), walk(torchs, 4, still=still))
        for i, (a, b) in enumerate(zip(before, ours.param_groups[0]["params"], strict=True)):
            assert torch.equal(a, b) == (i in still)


def test_rates_may_change_between_steps():
    ours, torchs = Adam(groups()), torch.optim.Adam(groups(), fused=True)
    for rate in (0.1, 0.0, 0.5):
        for optimizer in (ours, torchs):
            optimizer.param_groups[0]["lr"] = rate
        check_same(walk(ours, 3), walk(torchs, 3))


def test_a_state_that_is_loaded_is_gone_on_from():
    whole, half = Adam(groups()), Adam(groups())
    walk(whole, 3)
    middle = copy.deepcopy(whole.state_dict())
    values = [p.detach().clone() for group in whole.param_groups for p in group["params"]]
    expected = walk(whole, 3, seed=2)
    walk(half, 5)
    half.load_state_dict(middle)
    with torch.no_grad():
        for p, value in zip(
            (p for g in half.param_groups for p in g["params"]), values, strict=True
        ):
            p.copy_(value)
    check_same(walk(half, 3, seed=2), expected)
    again = torch.optim.Adam(groups(), fused=True)
    again.load_state_dict(middle)
    assert again.state_dict()["state"].keys() == middle["state"].keys()

"""Initial weights of modules, beside frozen parts and against those of constructors."""

import copy

import pytest
import torch
from torch import nn

from subbayes import InputError
from subbayes.networks.initialisation import fresh_module, reinitialise
from subbayes.utils.seeding import fork_rng


class Whole(nn.Module):
    """A module whose own `reset_parameters` sets the parameters of its layers."""

    def __init__(self):
        super().__init__()
        self.back, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.reset_parameters()

    def reset_parameters(self):
        for layer in (self.back, self.head):
            nn.init.normal_(layer.weight, 7.0)
            nn.init.zeros_(layer.bias)


class Replacing(Whole):
    """One whose method exchanges the parameters for others."""

    def reset_parameters(self):
        for layer in (self.back, self.head):
            layer.weight = nn.Parameter(torch.randn(layer.weight.shape))
            layer.bias = nn.Parameter(torch.randn(layer.bias.shape))


def with_normalised_backbone():
    back = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
    for _ in range(3):
        back(torch.randn(9, 3) + 5)
    return nn.Sequential(back.eval(), nn.Linear(4, 1))


KINDS = {
    "own method": (Whole, "back"),
    "own method that replaces": (Replacing, "back"),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), "encoder"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "out_proj"),
    "statistics": (with_normalised_backbone, "0"),
}


def frozen(kind):
    """A module, the name of its frozen part, and a copy of it that shares no memory."""
    make, part = KINDS[kind]
    with fork_rng(0):
        module = make()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.rand_like(parameter)
    module.get_submodule(part).requires_grad_(False)
    return module, part, copy.deepcopy(module)


def same(module, other, part=""):
    states = [one.get_submodule(part).state_dict() for one in (module, other)]
    return all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("from_factory", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts_keep_their_values(kind, from_factory):
    module, part, before = frozen(kind)
    made = fresh_module(module, KINDS[kind][0] if from_factory else None, 1)
    assert same(module, before)
    assert same(made, before, part)
    assert {n: p.requires_grad for n, p in made.named_parameters()} == {
        n: p.requires_grad for n, p in before.named_parameters()
    }
    assert made.get_submodule(part).training == before.get_submodule(part).training
    trained = [n for n, p in before.named_parameters() if p.requires_grad]
    fresh, old = dict(made.named_parameters()), dict(before.named_parameters())
    assert not any(torch.equal(fresh[n], old[n]) for n in trained)


@pytest.mark.parametrize("kind", ["own method", "transformer", "attention"])
def test_initial_weights_are_those_of_the_constructor(kind):
    """Parts are reset before what holds them, which may set their parameters once more."""
    make, _ = KINDS[kind]
    with fork_rng(0):
        expected = dict(make().named_parameters())
    for name, found in reinitialise(make(), 1).named_parameters():
        other, is_constant = expected[name], expected[name].std(correction=0) < 1e-6
        if is_constant:
            assert torch.equal(found, other), name
        else:
            n = found.numel()
            assert abs(found.std() / other.std() - 1) < 4 * n**-0.5, name
            assert abs(found.mean() - other.mean()) < 4 * other.std() * (2 / n) ** 0.5, name
            assert not torch.equal(found, other), name


class Partly(nn.Linear):
    """A layer with a parameter that its method does not set."""

    def __init__(self):
        super().__init__(3, 4)
        self.scale = nn.Parameter(torch.ones(4))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), "one in Linear 0 that .* set weight_g"),
        (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), "one in Linear 0 that .* weight_orig"),
        (Partly, "one in Partly 0 that does not set scale. Set it there, or pass factory="),
        (lambda: nn.ParameterList([torch.ones(2)]), "none in ParameterList 0. Add one, or pass"),
    ],
)
def test_parameters_that_nothing_sets_need_a_factory(layer, got):
    module = nn.Sequential(layer(), nn.Linear(4, 1))
    with pytest.raises(InputError, match=f"a reset_parameters method in every .*, got {got}"):
        reinitialise(module, 0)
    module[0].requires_grad_(False)
    assert same(reinitialise(module, 0)[0], module[0])


def test_a_factory_has_the_frozen_parameters_of_the_module():
    module, *_ = frozen("own method")
    for other in (nn.Linear(3, 1), nn.ModuleDict({"back": nn.Linear(3, 5)})):
        with pytest.raises(InputError, match="factory: expected modules of the same architecture"):
            fresh_module(module, lambda other=other: other, 0)

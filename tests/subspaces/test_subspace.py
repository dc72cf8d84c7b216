"""Laws of affine subspaces, and every kind against its dense matrix."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

from subbayes import InputError, subspace
from subbayes.artifacts.facts import as_facts
from subbayes.subspace import (
    CoordinateSubspace,
    DenseSubspace,
    FullSubspace,
    JointSubspace,
    RandomSubspace,
    SparseRandomSubspace,
    Subspace,
    SubspaceFacts,
)
from subbayes.utils.memory import index_dtype

D, K = 7, 3
GROUPS_OF_SEED_42 = ([0, 0, 2, 1, 0, 2, 2, 0, 1, 1], [1, -1, 1, -1, 1, -1, -1, 1, 1, -1])
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def shift(dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(D, seed=9).to(dtype)


def uncached(monkeypatch: pytest.MonkeyPatch, w: Tensor, rank: int, seed: int = 0) -> Subspace:
    with monkeypatch.context() as patch:
        patch.setattr(subspace, "_CACHE_BYTES", 0)
        space = RandomSubspace(w, rank, seed)
    assert space._cached is None
    return space


KINDS: dict[str, Callable[[Tensor], Subspace]] = {
    "dense": lambda w: DenseSubspace(w, normal(K, D, seed=1)),
    "coordinate": lambda w: CoordinateSubspace(w, torch.tensor([5, 0, 3])),
    "full": lambda w: FullSubspace(w),
    "random": lambda w: RandomSubspace(w, K, seed=2),
    "sparse random": lambda w: SparseRandomSubspace(w, K, seed=2),
}


@pytest.fixture(params=[*KINDS, "random, uncached"])
def make(request, monkeypatch):
    if request.param in KINDS:
        return KINDS[request.param]
    return lambda w: uncached(monkeypatch, w, K, seed=2)


# --- laws ----------------------------------------------------------------------------------------


def test_operations_equal_those_of_shift_and_basis(make):
    space = make(shift())
    basis, z, v = space.basis(), normal(4, space.rank), normal(4, D)
    assert basis.shape == (space.rank, D)
    assert (space.rank, space.size) == (len(basis), D)
    close = torch.testing.assert_close
    close(space.push(z), z @ basis)
    close(space.weights(z), shift() + z @ basis)
    close(space.pull(v), v @ basis.T)
    close(space.project(v), torch.linalg.lstsq(basis.T, (v - shift()).T).solution.T)
    close(space.basis(), Subspace.basis(space))


@pytest.mark.parametrize("leading", [(), (1,), (4,), (2, 3)])
def test_leading_dimensions(make, leading):
    space = make(shift())
    z, v = normal(*leading, space.rank), normal(*leading, D)
    for function, argument, size in (
        (space.push, z, D),
        (space.weights, z, D),
        (space.pull, v, space.rank),
        (space.project, v, space.rank),
    ):
        found = function(argument)
        assert found.shape == (*leading, size)
        rows = [function(row) for row in argument.reshape(-1, argument.shape[-1])]
        torch.testing.assert_close(found.reshape(-1, size), torch.stack(rows))


@given(st.integers(0, 10**6), st.sampled_from(sorted(KINDS)))
def test_project_inverts_weights(seed, kind):
    space = KINDS[kind](shift())
    z = normal(2, space.rank, seed=seed)
    torch.testing.assert_close(space.project(space.weights(z)), z)


@given(st.integers(0, 10**6), st.sampled_from(sorted(KINDS)))
def test_pull_is_the_adjoint_of_push(seed, kind):
    space = KINDS[kind](shift())
    z, v = normal(space.rank, seed=seed), normal(D, seed=seed + 1)
    torch.testing.assert_close(space.push(z) @ v, z @ space.pull(v))


@given(st.integers(0, 10**6), st.sampled_from(sorted(KINDS)))
def test_projections_are_closest_points(seed, kind):
    space = KINDS[kind](shift())
    w = normal(D, seed=seed)
    gap = w - space.weights(space.project(w))
    torch.testing.assert_close(
        space.pull(gap), torch.zeros(space.rank, dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_dependent_rows_give_coordinates_of_least_norm():
    row = normal(D, seed=3)
    space = DenseSubspace(shift(), torch.stack([row, 2 * row, torch.zeros(D)]))
    z = space.project(shift() + 5 * row)
    torch.testing.assert_close(z, torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))


def test_vmap_and_derivatives(make):
    space = make(shift())
    z, v = normal(4, space.rank), normal(4, D)
    close = torch.testing.assert_close
    close(vmap(space.weights)(z), space.weights(z))
    close(vmap(space.push)(z), space.push(z))
    close(vmap(space.pull)(v), space.pull(v))
    close(vmap(space.project)(v), space.project(v))
    close(jacrev(space.weights)(z[0]), space.basis().T)
    close(jacfwd(space.weights)(z[0]), space.basis().T)
    close(
        vmap(jacrev(lambda z: space.weights(z).sin().sum()))(z), space.pull(space.weights(z).cos())
    )


# --- kinds ---------------------------------------------------------------------------------------


def test_coordinates_are_unit_rows():
    indices = torch.tensor([5, 0, 3])
    one, other = (
        CoordinateSubspace(shift(), indices),
        DenseSubspace(shift(), torch.eye(D, dtype=torch.float64)[indices]),
    )
    z, v = normal(4, K), normal(4, D)
    assert torch.equal(one.basis(), other.basis())
    assert torch.equal(one.push(z), other.push(z))
    assert torch.equal(one.pull(v), other.pull(v))
    torch.testing.assert_close(one.project(v), other.project(v))


def test_full_is_the_identity():
    space = FullSubspace(shift())
    z = normal(4, D)
    assert torch.equal(space.basis(), torch.eye(D, dtype=torch.float64))
    assert torch.equal(space.weights(z), shift() + z)
    assert torch.equal(space.push(z), z)
    assert torch.equal(space.pull(z), z)
    assert torch.equal(space.project(z), z - shift())


def test_random_directions_have_norm_one_and_spread_evenly():
    basis = RandomSubspace(torch.zeros(4000, dtype=torch.float64), 20, seed=3).basis()
    torch.testing.assert_close(
        basis.norm(dim=1), torch.ones(20, dtype=torch.float64), rtol=1e-14, atol=0
    )
    cosines = (basis @ basis.T)[~torch.eye(20, dtype=torch.bool)]
    assert abs(cosines).max() < 5 / 4000**0.5  # each N(0, 1/D)
    assert abs(basis.mean()) < 4.5 / (4000 * 20 * 4000) ** 0.5


def test_random_directions_depend_on_the_seed_and_their_number_alone(monkeypatch):
    w = torch.zeros(50, dtype=torch.float64)
    basis = RandomSubspace(w, 4, seed=1).basis()
    assert torch.equal(basis, RandomSubspace(w + 1, 4, seed=1).basis())
    assert torch.equal(basis[:2], RandomSubspace(w, 2, seed=1).basis())
    assert not torch.isclose(basis, RandomSubspace(w, 4, seed=2).basis()).any()
    single = RandomSubspace(w.float(), 4, seed=1).basis()
    torch.testing.assert_close(single.double(), basis, rtol=1e-6, atol=1e-9)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    other = uncached(monkeypatch, w, 4, seed=1)
    assert torch.equal(other.basis(), basis)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**63 - 1])
def test_any_seed_below_2_to_63_is_accepted(seed):
    assert torch.isfinite(RandomSubspace(shift(), 2, seed).basis()).all()
    with pytest.raises(InputError, match=r"seed: expected a whole number below 2\*\*63"):
        RandomSubspace(shift(), 2, seed + 2**63)


def test_adjacent_seeds_have_different_directions():
    rows = torch.cat([RandomSubspace(shift(), 3, seed).basis() for seed in range(10)])
    assert len(torch.unique(rows, dim=0)) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_cache_the_numbers_are_the_same(monkeypatch, dtype):
    w = normal(40).to(dtype)
    cached, other = RandomSubspace(w, 5, seed=4), uncached(monkeypatch, w, 5, seed=4)
    z, v = normal(3, 5).to(dtype), normal(3, 40).to(dtype)
    for name, argument in (("push", z), ("weights", z), ("pull", v), ("project", v)):
        torch.testing.assert_close(getattr(other, name)(argument), getattr(cached, name)(argument))


def test_a_random_subspace_saves_no_directions():
    assert set(RandomSubspace(shift(), 3).tensors()) == {"shift"}
    assert set(SparseRandomSubspace(shift(), 3).tensors()) == {"shift"}


@pytest.mark.parametrize(("size", "rank"), [(7, 3), (12, 4), (5, 5), (1, 1), (1000, 7), (9, 1)])
def test_each_weight_has_one_entry_and_groups_have_equal_sizes(size, rank):
    basis = SparseRandomSubspace(torch.zeros(size, dtype=torch.float64), rank, seed=5).basis()
    entries = basis != 0
    assert bool((entries.sum(0) == 1).all())
    sizes = entries.sum(1)
    assert int(sizes.max() - sizes.min()) <= 1
    torch.testing.assert_close(
        basis @ basis.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-14
    )
    expected = torch.where(entries, (1 / sizes.double().sqrt())[:, None], 0.0)
    torch.testing.assert_close(basis.abs(), expected, rtol=1e-15, atol=0)


def test_groups_and_signs_of_a_sparse_subspace_are_random():
    """Two weights share a group with probability 1/k, and a sign with 1/2, for any two places."""
    size, rank, seeds = 40, 4, 2000
    w = torch.zeros(size, dtype=torch.float64)
    bases = torch.stack([SparseRandomSubspace(w, rank, seed).basis() for seed in range(seeds)])
    group, sign = bases.abs().argmax(1), bases.sum(1).sign()
    for a, b in ((0, 1), (0, 4), (3, 39), (17, 18)):
        together = float((group[:, a] == group[:, b]).double().mean())
        p = (size / rank - 1) / (size - 1)
        assert abs(together - p) < 4.5 * (p * (1 - p) / seeds) ** 0.5
        alike = float((sign[:, a] == sign[:, b]).double().mean())
        assert abs(alike - 0.5) < 4.5 * (0.25 / seeds) ** 0.5
    share = (group == 0).double().mean(0)
    assert float((share - 1 / rank).abs().max()) < 5 * (3 / 16 / seeds) ** 0.5
    assert float(sign.double().mean(0).abs().max()) < 5 / seeds**0.5


def test_weights_have_the_variances_of_a_gaussian_subspace():
    size, rank = 600, 30
    w = torch.zeros(size, dtype=torch.float64)
    sparse = SparseRandomSubspace(w, rank, seed=1).basis().square().sum(0)
    torch.testing.assert_close(sparse, torch.full_like(sparse, rank / size))
    gaussian = RandomSubspace(w, rank, seed=1).basis().square().sum(0)
    assert abs(float(gaussian.mean()) / (rank / size) - 1) < 1e-12


def test_a_sparse_subspace_depends_on_the_seed_alone():
    w = normal(50)
    basis = SparseRandomSubspace(w, 4, seed=1).basis()
    assert torch.equal(basis, SparseRandomSubspace(w + 1, 4, seed=1).basis())
    assert not torch.equal(basis, SparseRandomSubspace(w, 4, seed=2).basis())
    before = torch.get_rng_state()
    SparseRandomSubspace(w, 4, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sparse_subspace_of_a_seed_is_that_of_every_version():
    """Files hold the seed alone, so that the groups of a seed must never change."""
    space = SparseRandomSubspace(torch.zeros(10, dtype=torch.float64), 3, seed=42)
    group = space.basis().abs().argmax(0).tolist()
    signs = space.basis().sum(0).sign().int().tolist()
    assert (group, signs) == GROUPS_OF_SEED_42


def test_a_sparse_subspace_stores_three_numbers_for_each_weight():
    space = SparseRandomSubspace(torch.zeros(10_000), 50)
    tensors = [t for t in vars(space).values() if isinstance(t, Tensor)]
    index = index_dtype(10_000).itemsize  # 4, but 8 where vmap cannot take less
    assert sum(t.nbytes for t in tensors) == (4 + 4 + 2 * index) * 10_000  # with the shift


def test_sums_of_large_groups_are_accurate():
    """Terms of one sign, which rounding adds up for: groups of 200 000 weights in float32."""
    size = 400_000
    space = SparseRandomSubspace(torch.zeros(size), 2, seed=0)
    v = space.entries.sign() * torch.rand(size, generator=torch.Generator().manual_seed(0))
    exact = SparseRandomSubspace(torch.zeros(size, dtype=torch.float64), 2).pull(v.double())
    torch.testing.assert_close(space.pull(v).double(), exact, rtol=2e-6, atol=0)


# --- dtypes, devices, configs --------------------------------------------------------------------


def test_coordinates_in_float64_become_weights_in_the_networks_dtype(make):
    space = make(shift(torch.float32))
    z = normal(2, space.rank)
    for found in (
        space.push(z),
        space.weights(z),
        space.basis(),
        space.pull(normal(2, D).float()),
        space.project(normal(2, D).float()),
    ):
        assert found.dtype == torch.float32
    exact = make(shift())
    torch.testing.assert_close(space.weights(z).double(), exact.weights(z), rtol=1e-5, atol=1e-5)


def test_weights_in_float64_are_taken_by_a_subspace_in_float32(make):
    space, v = make(shift(torch.float32)), normal(2, D)
    torch.testing.assert_close(space.pull(v).float(), space.pull(v.float()))
    torch.testing.assert_close(space.project(v).float(), space.project(v.float()))
    joint = JointSubspace(space, 1)
    z = normal(2, joint.rank)
    torch.testing.assert_close(joint.project(joint.weights(z)), z, rtol=1e-4, atol=1e-5)


def test_projections_in_float32_lose_little():
    basis = normal(K, 500, seed=1).float() * torch.tensor([[1.0], [1e-2], [1e-3]])
    space = DenseSubspace(torch.zeros(500), basis)
    z = torch.tensor([1.0, 50.0, -300.0])
    torch.testing.assert_close(space.project(space.weights(z)), z, rtol=1e-3, atol=1e-4)


def test_to_another_dtype(make):
    space = make(shift())
    single = space.to("cpu", torch.float32)
    assert type(single) is type(space)
    assert single.shift.dtype == single.basis().dtype == torch.float32
    torch.testing.assert_close(single.basis(), space.basis().float())
    assert space.to("cpu").shift.dtype == torch.float64
    back = single.to("cpu", torch.float64)
    torch.testing.assert_close(back.basis(), space.basis(), rtol=1e-5, atol=1e-6)


def test_config_round_trip_through_json(make):
    space = make(shift())
    config = json.loads(json.dumps(space.config()))
    tensors = {k: v.clone() for k, v in space.tensors().items()}
    again = as_facts(config, SubspaceFacts).build(tensors)
    assert type(again) is type(space)
    assert torch.equal(again.shift, space.shift)
    assert torch.equal(again.basis(), space.basis())
    assert again.config() == space.config()


def test_config_of_an_unknown_kind():
    with pytest.raises(msgspec.ValidationError, match="got 'Curve', whose class registers itself"):
        as_facts({"name": "Curve", "rank": 1}, SubspaceFacts)


def test_history_is_dropped_and_nothing_is_said_in_more_than_a_line(make):
    space = make(shift().requires_grad_() * 1)
    assert not space.shift.requires_grad
    assert repr(space) == f"{type(space).__name__}(rank={space.rank}, size=7)"


def test_gradients_stay_out_of_the_basis():
    basis = normal(2, D).requires_grad_()
    space = DenseSubspace(shift(), basis)
    assert not space.basis().requires_grad


# --- bad input -----------------------------------------------------------------------------------


NAN = torch.full((1, D), float("nan"))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: DenseSubspace(shift(), normal(2, 5)),
            r"basis: expected shape \(k, 7\).*got \(2, 5\)",
        ),
        (lambda: DenseSubspace(shift(), normal(D)), r"basis: expected shape \(k, 7\).*got \(7,\)"),
        (lambda: DenseSubspace(normal(1, D), normal(2, D)), r"basis: expected shape"),
        (lambda: DenseSubspace(shift(), normal(8, D)), "basis: .*at most 7 rows.*got 8"),
        (lambda: DenseSubspace(shift(), normal(0, D)), "basis: expected "),
        (
            lambda: DenseSubspace(shift(), NAN),
            "basis: expected finite numbers, got NaN or infinite",
        ),
        (lambda: DenseSubspace(NAN[0], normal(2, D)), "basis: expected finite numbers"),
        (
            lambda: CoordinateSubspace(shift(), torch.tensor([0, 7])),
            r"indices: expected distinct positions in 0\.\.6",
        ),
        (lambda: CoordinateSubspace(shift(), torch.tensor([-1])), "indices: expected distinct"),
        (lambda: CoordinateSubspace(shift(), torch.tensor([1, 1])), "indices: expected distinct"),
        (
            lambda: CoordinateSubspace(shift(), torch.tensor([], dtype=torch.int64)),
            "indices: expected",
        ),
        (lambda: CoordinateSubspace(shift(), torch.tensor([[1, 2]])), r"indices: .*got .*\(1, 2\)"),
        (
            lambda: CoordinateSubspace(shift(), torch.tensor([0.0, 2.5])),
            "indices: .*got torch.float32",
        ),
        (
            lambda: CoordinateSubspace(shift(), torch.ones(D, dtype=torch.bool)),
            "indices: .*got torch.bool.*nonzero",
        ),
        (
            lambda: RandomSubspace(shift(), 8),
            "rank: expected at most 7, the number of weights, got 8",
        ),
        (lambda: RandomSubspace(shift(), 0), "rank: expected a whole number of at least 1, got 0"),
        (
            lambda: SparseRandomSubspace(shift(), 8),
            "rank: expected at most 7, the number of weights, got 8",
        ),
        (
            lambda: RandomSubspace(shift(), 2, seed=-1),
            "seed: expected a whole number of at least 0",
        ),
    ],
)
def test_subspaces_that_cannot_be(make, what):
    with pytest.raises(InputError, match=what) as e:
        make()
    assert "\n" not in str(e.value)


def test_tensors_have_the_layout_in_which_they_are_loaded():
    """Products of a transposed basis round differently, so that a resumed run would have other
    draws."""
    w = torch.stack([shift(), shift()], 1)[:, 0]
    for space in (
        DenseSubspace(w, normal(D, K).T),
        CoordinateSubspace(w, torch.tensor([2, 1])),
        FullSubspace(w),
        RandomSubspace(w, 2),
        SparseRandomSubspace(w, 2),
    ):
        assert all(tensor.is_contiguous() for tensor in space.tensors().values())
        again = as_facts(space.config(), SubspaceFacts).build(space.tensors())
        z = normal(3, space.rank)
        assert torch.equal(again.push(z), space.push(z))

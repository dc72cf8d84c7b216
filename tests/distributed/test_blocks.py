"""Sums over blocks of rows in one process, against the same density without blocks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from distributed.engine_cases import posterior, rows
from distributed.launch import results
from distributed.padded_cases import items, pad, padded_values
from subbayes import distributed
from subbayes.data.data import Data
from subbayes.data.division import Division
from subbayes.distributed.blocks import Blocks, BlockSize
from subbayes.distributed.exact_sum import encode
from subbayes.distributed.processes import Processes
from subbayes.inference import NUTS
from subbayes.utils.checks import InputError
from subbayes.utils.trees import take

SHARES = [[[], [4, 4, 3, 3, 2, 2]], [[4, 4, 4, 4], [4, 4, 3, 3]]]
Z = np.random.default_rng(0).standard_normal((6, 4))


@pytest.fixture
def joined(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield distributed.join()
    distributed.leave()


def in_blocks(evaluate):
    """What a function returns after `join`."""
    distributed.join()
    try:
        return evaluate()
    finally:
        distributed.leave()


def gradient(density):
    points = torch.from_numpy(Z).requires_grad_()
    value = density.log_prob(points)
    value.sum().backward()
    return value.detach().numpy(), points.grad.numpy()


@pytest.mark.few(1)
@pytest.mark.parametrize("size", ["even", "uneven", "empty"])
def test_blocks_give_the_same_density(size):
    density, subset = posterior(size), np.arange(0, 60, 7)
    for evaluate in (
        lambda: (density.log_likelihood(Z), density.value(Z)),
        lambda: density.value_and_grad(Z),
        lambda: density.value_and_grad(Z, subset),
        lambda: gradient(density),
        lambda: (density.pointwise(Z),),
    ):
        for found, expected in zip(in_blocks(evaluate), evaluate(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("untraced")
def test_the_log_likelihood_is_the_exact_sum_of_its_blocks(joined):
    density, (x, y) = posterior("uneven"), rows(200)
    blocks = [
        posterior(data=(x[i : i + 32], y[i : i + 32])).log_likelihood(Z[:4])
        for i in range(0, 200, 32)
    ]
    found = density.log_likelihood(Z[:4])
    assert found.tolist() == [math.fsum(terms) for terms in zip(*blocks, strict=True)]


@pytest.mark.slow
def test_loaders_and_tensors_have_the_same_bits(joined):
    x, y = rows(200)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=48)

    class InOrder(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    iterable = torch.utils.data.DataLoader(InOrder(), batch_size=50)
    expected = posterior("uneven").value_and_grad(Z)
    for given in (loader, iterable):
        streamed = Data.of(given, memory_limit=0)
        assert not streamed.in_memory
        found = posterior(data=streamed).value_and_grad(Z)
        assert all(map(np.array_equal, found, expected))


COLLATE = {
    "drops every fourth row": lambda rows: [row for row in rows if row[2] % 4],
    "repeats every fourth row": lambda rows: [r for row in rows for r in [row] * (1 + row[2] // 9)],
    "sorts the rows of a batch": lambda rows: sorted(rows, key=lambda row: float(row[1])),
}


def collated(change):
    """A posterior of streamed rows whose batches a function has changed."""
    x, y = rows(40)
    loader = torch.utils.data.DataLoader(
        list(zip(x, y, range(40), strict=True)),
        batch_size=6,
        collate_fn=lambda some: tuple(
            torch.stack(part) for part in zip(*[row[:2] for row in change(some)], strict=True)
        ),
    )
    return posterior(data=Data.of(loader, memory_limit=0), batch_size=11)


@pytest.mark.usefixtures("untraced")
@pytest.mark.few(1)
@pytest.mark.parametrize("change", COLLATE.values(), ids=COLLATE)
def test_rows_that_a_collate_fn_changes_are_those_of_the_loader(change):
    density = collated(change)
    expected = density.log_likelihood(Z), density.pointwise(Z)
    found = in_blocks(lambda: (density.log_likelihood(Z), density.pointwise(Z)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_as_many_rows_in_other_batches_are_an_error(joined):
    def change(some):  # the first batch has one row less and the last one more
        first, last = some[0][2] == 0, some[-1][2] == 39
        return some[1:] if first else some + some[:1] if last else some

    expected = "data: expected a batch of 6 rows from row 0, got one of 5. Let the dataset"
    with pytest.raises(InputError, match=expected):
        collated(change).log_likelihood(Z)


@pytest.mark.slow
def test_draws_do_not_depend_on_the_block_of_other_chains(joined):
    density = posterior("empty")
    options = {"draws": 10, "warmup": 30, "seed": 2, "progress": False}
    eight = NUTS().sample(density, chains=8, **options)
    four = NUTS().sample(density, chains=4, **options)
    assert np.array_equal(eight.z[:4], four.z)


@pytest.mark.usefixtures("untraced")
@pytest.mark.few(1)
@pytest.mark.parametrize("loaded", [1, 2, 11])
@pytest.mark.parametrize("batch_size", [None, 2, 4])
def test_batches_of_lengths_of_their_own_give_the_density_of_one_length(loaded, batch_size):
    found = in_blocks(lambda: padded_values(loaded, batch_size))
    assert found["off"] < 1e-13


@pytest.mark.slow
def test_batches_of_lengths_of_their_own_have_the_same_bits_in_two_processes():
    cases = [["padded_values", loaded, size] for loaded in (1, 2, 3) for size in (None, 2, 4)]
    sharded = [["padded_sharded", loaded, size] for loaded in (1, 2) for size in (2, 4)]
    sharded += [["padded_divided", lengths, 4] for lengths in SHARES]
    alone = results(1, cases)[0]
    for found in results(2, cases + sharded):
        for case in map(json.dumps, cases):
            assert found[case] == alone[case], case
        for case in map(json.dumps, sharded):
            assert found[case]["off"] < 1e-12, case


class Told(Processes):
    """Processes of which another makes seven evaluations."""

    def highest(self, *numbers):
        self.given = numbers
        return [7]


@pytest.mark.parametrize("lengths", [[], [4] * 4, [4, 4, 3, 3, 2, 2]])
@pytest.mark.parametrize("source", ["tensors", "in order", "batches"])
def test_each_process_in_step_tells_the_others_its_number_of_evaluations(lengths, source):
    example, rows = pad(items([4, 4])), items(lengths)
    if source == "tensors" or not lengths:
        rows = items([4] * len(lengths))
        given = pad(rows) if rows else tuple(take(part, slice(0)) for part in example)
    else:
        sampler = (
            torch.utils.data.SequentialSampler(rows) if source == "in order" else range(len(rows))
        )
        given = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=pad, sampler=sampler)
    data = Data.of(given, divided=True, memory_limit=0)
    data = replace(data, division=Division((len(lengths), 6), example))
    processes = Told(0, 2)
    size = BlockSize(len(lengths) + 6, 4, 1)
    blocks = Blocks.of(data, size, processes, torch.device("cpu"), in_step=True)
    steps = [y is not None for _, _, y in blocks.steps()]
    assert processes.given == (sum(steps),)
    assert len(steps) == 7


class Tracer:
    """One that turns eager in the second block."""

    mode, calls = "trace", 0

    def use_eager(self, reason):
        self.mode = "eager"

    def evaluate(self, points, inputs, y):
        self.calls += 1
        if self.calls == 2:
            self.mode = "eager"
        return torch.full((len(points), 1), 1.0 if self.mode == "eager" else 100.0).double()


def test_sums_are_evaluated_again_after_a_traced_graph_has_failed():
    tracer, processes = Tracer(), Processes()
    data = Data.of((torch.zeros(30, 1), torch.zeros(30)))
    blocks = Blocks.of(data, BlockSize(30, 10, 4), processes, torch.device("cpu"))
    total = blocks.total(tracer.evaluate, torch.zeros(5, 2), 1, tracer)
    assert total.tolist() == [[3.0]] * 5
    assert processes.reductions == 2
    assert processes.traffic == 2 * (encode(np.zeros((5, 1))).nbytes + 8)


def test_a_density_of_one_block_has_the_bits_of_one_call(joined):
    density = posterior("uneven", batch_size=200)
    found = density.value_and_grad(Z[:4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(density, "_own_blocks", lambda data: None)
        expected = density.value_and_grad(Z[:4])
    assert all(map(np.array_equal, found, expected))
    (blocks,) = density._blocks.values()
    assert blocks.single
    assert joined.traffic == 8 * Z[:4].size + 8 * 4 + 8


class Recording(Processes):
    """Processes whose sums are those of this one, with the numbers that it would pass on."""

    def sum_over_data(self, numbers):
        self.given = numbers
        return numbers


@pytest.mark.parametrize("shares", [(30, 0), (0, 30)])
def test_the_bits_of_one_block_are_passed_on_by_any_process(shares):
    terms = torch.tensor([[1.5, -0.0], [math.nan, -1e300]], dtype=torch.float64)
    passed = []
    for rank, share in enumerate(shares):
        data = Data.of((torch.zeros(share, 1), torch.zeros(share)), divided=True)
        object.__setattr__(data, "division", Division(shares))
        processes = Recording(rank, 2)
        blocks = Blocks.of(data, BlockSize(30, 40, 2), processes, torch.device("cpu"))
        blocks.total(lambda points, inputs, y: terms, torch.zeros(2, 2), 2, Tracer())
        passed.append(processes.given)
    total = sum(passed)[:-1].reshape(2, 2)
    assert total.tolist() == terms.numpy().view(np.int64).tolist()


def test_joining_restores_what_it_changes(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        processes = distributed.join()
        assert torch.get_num_threads() == 1
        assert distributed.join() is processes is distributed.current()
        assert processes.mesh is None
        distributed.leave()
        assert torch.get_num_threads() == 2
        assert distributed.current() is None
    finally:
        torch.set_num_threads(before)

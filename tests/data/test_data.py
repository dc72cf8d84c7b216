"""Inputs and targets in a fixed order: every accepted form gives the same rows."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from subbayes import InputError, InputTypeError, Network, Posterior, Training
from subbayes.baselines import point_estimate
from subbayes.data.arrays import to_inputs, to_targets
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian
from subbayes.subspace import FullSubspace
from subbayes.training import train
from subbayes.utils.trees import leaves, take, to_device

N = 11
X = torch.arange(2.0 * N).reshape(N, 2)
Y = torch.arange(float(N))


def joined(data: Data, batch_size: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors of inputs and targets, concatenated over batches."""
    pairs = [(leaves(x), leaves(y)) for x, y in data.batches(batch_size)]
    return (
        [torch.cat(part) for part in zip(*(x for x, _ in pairs), strict=True)],
        [torch.cat(part) for part in zip(*(y for _, y in pairs), strict=True)],
    )


@pytest.mark.parametrize("memory_limit", [0, 2**20])
def test_digests_are_those_of_all_rows_in_any_form(memory_limit):
    whole = Data.of((X, Y))
    assert whole.digests().keys() == {"inputs ", "targets "}
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    assert Data.of(loader, memory_limit=memory_limit).digests() == whole.digests()
    other = X.clone()
    other[-2, 1] += 1
    changed = Data.of(DataLoader(TensorDataset(other, Y), batch_size=4), memory_limit=memory_limit)
    assert changed.digests()["targets "] == whole.digests()["targets "]
    assert changed.digests()["inputs "] != whole.digests()["inputs "]


def test_a_loader_is_read_once_for_its_digests():
    read = []

    class Rows(Dataset):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            read.append(i)
            return X[i], Y[i]

    data = Data.of(Rows(), memory_limit=0)
    read.clear()
    assert data.digests() == data.digests()
    assert read == list(range(N))


def shares_by_sampler(n: int, count: int, **options: Any) -> list[Data]:
    """The rows of each process of a loader with a DistributedSampler."""
    own_batches = options.pop("own_batches", False)
    dataset, found = TensorDataset(X[:n], Y[:n]), []
    for rank in range(count):
        sampler = DistributedSampler(dataset, count, rank, **options)
        loader = DataLoader(dataset, 4, sampler=sampler)
        if own_batches:
            loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False))
        found.append(Data.of(loader, divided=True, memory_limit=0))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle": True, "seed": 3},
        {"drop_last": True},
        {"own_batches": True, "shuffle": False},
    ],
)
def test_a_distributed_sampler_gives_each_row_to_one_process(options):
    """11 rows of 3 processes are 12 with the padding, and 9 with `drop_last`."""
    shares = shares_by_sampler(N, 3, **options)
    assert [data.n for data in shares] == [4, 4, 3]
    rows = torch.cat([joined(data)[1][0] for data in shares])
    assert rows.sort().values.tolist() == Y.tolist()
    assert {len(y) for data in shares for _, y in data.batches()} == {3, 4}


def test_a_sampler_of_ones_own_that_repeats_rows_is_refused():
    class Sampler(DistributedSampler):
        pass

    dataset = TensorDataset(X, Y)
    loader = DataLoader(dataset, 4, sampler=Sampler(dataset, 3, 0))
    with pytest.raises(
        InputError,
        match=r"data: expected rows that only one process has, got a Sampler that repeats rows. "
        r"Use DistributedSampler, or Subset\(dataset, range\(rank, 11, processes\)\)",
    ):
        Data.of(loader, divided=True)
    even = DataLoader(dataset, 4, sampler=Sampler(dataset, 11, 0, shuffle=False))
    assert Data.of(even, divided=True).n == 1

    class Batches(list):  # without a size
        sampler = DistributedSampler(dataset, 3, 0)

    own = DataLoader(dataset, batch_sampler=Batches([[0, 3], [6]]))
    with pytest.raises(InputError, match="a batch sampler with a batch_size around Distributed"):
        Data.of(own, divided=True)


def check_rows_in_order(data: Data, batch_size: int | None = None) -> None:
    assert data.n == N
    (x,), (y,) = joined(data, batch_size)
    assert torch.equal(x, X.to(x.dtype))
    assert torch.equal(y.reshape(-1), Y.to(y.dtype))
    targets = data.targets()
    assert isinstance(targets, Tensor)
    assert torch.equal(targets.reshape(-1), Y.to(targets.dtype))


def loader(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=4, **options)


# --- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X.double().numpy(), Y.double().numpy()),
        (X.tolist(), Y.tolist()),
        (pd.DataFrame(X.numpy()), pd.Series(Y.numpy())),
        (X, Y[:, None]),
        (X.numpy().astype(np.float16), Y.numpy().astype(np.int32)),
        (X[torch.arange(N - 1, -1, -1)].numpy()[::-1], Y.flip(0).numpy()[::-1]),
        TensorDataset(X, Y),
        loader(),
        loader(shuffle=True),
        loader(drop_last=True),
        loader(shuffle=True, drop_last=True),
        loader(sampler=SequentialSampler(range(N)), drop_last=True),
        DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(range(N), 3, False)),
        DataLoader(
            TensorDataset(X, Y), batch_sampler=BatchSampler(RandomSampler(range(N)), 4, True)
        ),
        DataLoader(TensorDataset(X, Y), batch_size=1, shuffle=True),
        Data.of((X, Y)),
    ],
    ids=range(19),
)
def test_every_form_gives_the_rows_in_order(form):
    data = Data.of(form)
    check_rows_in_order(data)
    check_rows_in_order(data)  # and again
    inputs, y = data.first()
    assert torch.equal(inputs.float(), X[: len(inputs)])
    assert 1 <= len(y) <= 2


def test_dtypes_of_arrays():
    data = Data.of((X.double().numpy(), Y.double().numpy()))
    assert data.inputs.dtype == torch.get_default_dtype()
    assert data.y.dtype == torch.float64  # units of y may be large
    assert Data.of((X.double(), Y)).inputs.dtype == torch.float64  # tensors stay what they are
    assert to_inputs(np.arange(3)).dtype == torch.int64
    assert to_inputs(np.array([True, False])).dtype == torch.bool
    assert to_targets((np.zeros(2), [1.0, 2.0]))[1].dtype == torch.float64


def test_read_only_arrays_give_no_warning(recwarn):
    array = X.numpy().copy()
    array.flags.writeable = False
    check_rows_in_order(Data.of((array, Y)))
    assert not recwarn.list


def test_tensors_are_detached():
    assert not Data.of((X.clone().requires_grad_() * 1, Y)).inputs.requires_grad


@cases.parametrize(
    cases.Case("dict", "per-observation"),
    cases.Case("tuple", "per-observation"),
    cases.Case("cnn", "categorical"),
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_dicts_and_tuples_streamed_equal_those_in_memory(case, shuffle):
    built = case.build()
    memory = Data.of((built.inputs, built.y))
    streamed = cases.streamed(cases.Rows(built.inputs, built.y), batch_size=3, shuffle=shuffle)
    assert memory.in_memory
    assert not streamed.in_memory
    for a, b in zip(joined(memory, 2), joined(streamed), strict=True):
        assert all(map(torch.equal, a, b))
    x, _ = next(iter(streamed.batches()))
    assert type(x) is type(built.inputs)
    assert all(map(torch.equal, leaves(streamed.targets()), leaves(built.y)))


def test_a_dataset_is_read_in_order():
    for limit in (0, 2**20):
        data = Data.of(cases.Rows(X, Y), memory_limit=limit)
        check_rows_in_order(data)
        assert data.in_memory == (limit > 0)


class Stream(IterableDataset):
    """An iterable dataset with a new iterator in each pass."""

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        Stream(),
        DataLoader(Stream(), batch_size=3),
        DataLoader(Stream(), batch_size=4, drop_last=True),
    ],
    ids=["dataset", "loader", "drop_last"],
)
def test_iterable_datasets(form):
    check_rows_in_order(Data.of(form))
    check_rows_in_order(Data.of(form, memory_limit=0))


def test_a_subset_stays_a_subset():
    some = [1, 4, 5, 9]
    for form in (
        DataLoader(Subset(TensorDataset(X, Y), some), batch_size=3, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=3, sampler=some, drop_last=True),
    ):
        assert torch.equal(Data.of(form).targets(), Y[some])


def test_collate_functions_are_kept():
    def double(rows: list) -> tuple[Tensor, Tensor]:
        return 2 * torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])

    (x,), _ = joined(Data.of(loader(collate_fn=double, shuffle=True)))
    assert torch.equal(x, 2 * X)


@given(st.integers(1, 30), st.integers(1, 40))
def test_order_and_sum_are_the_same_for_any_batch_size(n, size):
    x, y = torch.arange(3.0 * n).reshape(n, 3), torch.arange(float(n))
    data = Data.of((x, y))
    streamed = cases.streamed(TensorDataset(x, y), batch_size=size, shuffle=True)
    for (inputs,), (targets,) in (joined(data, size), joined(streamed)):
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
    assert all(len(y) <= size for _, y in data.batches(size))


def test_data_in_memory_have_one_batch_by_default():
    data = Data.of((X, Y))
    assert len(list(data.batches())) == 1
    assert len(list(data.batches(4))) == 3
    with pytest.raises(InputError, match="batch_size: expected a whole number of at least 1"):
        list(data.batches(0))


def test_rows_of_streamed_data_raise():
    some = Data.of((X, Y)).rows(torch.tensor([3, 1]))
    assert some.n == 2
    assert torch.equal(some.y, Y[[3, 1]])
    with pytest.raises(InputError, match="data: expected tensors in memory.*got a loader"):
        Data.of(loader(), memory_limit=0).rows(torch.tensor([0]))


def test_take_keeps_the_structure():
    parts = take({"a": X, "b": Y}, slice(2))
    assert list(parts) == ["a", "b"]
    assert len(take((X, Y), slice(3))) == 2


def test_repr():
    assert repr(Data.of((X, Y))) == "Data(n=11, in memory)"
    assert repr(Data.of(loader())) == "Data(n=11, in memory)"
    assert repr(Data.of(loader(), memory_limit=0)) == "Data(n=11, streamed)"


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_reading_does_not_advance_global_generators(options):
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    data = Data.of(loader(**options))
    data.first()
    data.targets()
    list(data.batches())
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # noqa: NPY002


def test_the_users_loader_is_unchanged():
    own = loader(shuffle=True, drop_last=True)
    before = dict(vars(own))
    list(Data.of(own).batches())
    assert vars(own) == before
    assert len(list(own)) == N // 4


# --- rows of loaders in memory -------------------------------------------------------------------


class Counted(Dataset):
    """Counts how often its rows are read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        return X[i], Y[i]


def test_rows_of_a_loader_are_read_once():
    rows = Counted()
    data = Data.of(DataLoader(rows, batch_size=4, shuffle=True, drop_last=True))
    first = rows.read
    check_rows_in_order(data)
    assert rows.read == first
    network = Network(torch.nn.Linear(2, 1))
    posterior = Posterior(network, Gaussian(1.0), data, FullSubspace(network.weights))
    posterior.value_and_grad(np.zeros((1, 3)))
    assert rows.read == first
    assert data.rows(torch.tensor([1])).source is None  # training must not read the others


@pytest.mark.parametrize("dataset", [False, True])
def test_rows_that_do_not_fit_are_read_again_with_a_warning(dataset):
    rows = Counted()
    form = rows if dataset else DataLoader(rows, batch_size=4)
    size = N * 3 * 4  # two inputs and a target in float32
    with pytest.warns(UserWarning, match=r"data: .* MiB of rows are above memory_limit.*") as said:
        data = Data.of(form, memory_limit=size - 1)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert not data.in_memory
    first = rows.read
    check_rows_in_order(data)
    assert rows.read >= first + N
    assert Data.of(form, memory_limit=size).in_memory
    assert not Data.of(form, memory_limit=0).in_memory  # which warns of nothing
    with pytest.raises(InputError, match="memory_limit: expected a whole number of at least 0"):
        Data.of(form, memory_limit=-1)


def test_little_free_memory_lowers_the_limit(monkeypatch):
    monkeypatch.setattr("subbayes.data.cache.available_memory", lambda: 4 * N * 3 * 4 - 1)
    with pytest.warns(UserWarning, match="memory_limit"):
        assert not Data.of(loader()).in_memory


def test_batches_of_different_widths_are_kept_as_they_are():
    """As of sentences, which are padded by batch."""
    rows = Counted()

    def pad(some: list) -> tuple[Tensor, Tensor]:
        x, y = map(torch.stack, zip(*some, strict=True))
        return torch.nn.functional.pad(x, (0, int(y.sum() > 20))), y

    data = Data.of(DataLoader(rows, batch_size=4, collate_fn=pad))
    first = rows.read
    widths = {x.shape[1] for x, _ in data.batches()}
    assert len(widths) == 2
    assert torch.equal(data.targets(), Y)
    assert rows.read == first
    assert not data.in_memory


def test_training_follows_the_loader_of_rows_in_memory():
    rows = Counted()
    data = Data.of(DataLoader(rows, batch_size=4, shuffle=True))
    first = rows.read
    train(torch.nn.Linear(2, 1), Gaussian(1.0), data, Training(epochs=3))
    assert rows.read >= first + 3 * N


def test_rows_of_a_loader_can_be_weighted():
    data = Data.of(loader()).weighted(np.arange(1.0, N + 1))
    assert data.source is None
    assert data.has_weights


# --- bad input -----------------------------------------------------------------------------------


def check_raises(form: Any, what: str, error: type[Exception] = InputError) -> None:
    with pytest.raises(error, match=what) as e:
        Data.of(form)
    assert "\n" not in str(e.value)


class Augmented(Dataset):
    """Adds new noise to its rows in each pass."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + torch.randn(2), Y[i]


class Exhausted(IterableDataset):
    """Can be iterated over once."""

    def __init__(self) -> None:
        self.rows = iter(zip(X, Y, strict=True))

    def __iter__(self):
        return self.rows


class ShuffledStream(IterableDataset):
    def __iter__(self):
        return iter([(X[i], Y[i]) for i in torch.randperm(N)])


@pytest.mark.parametrize(
    "form",
    [
        DataLoader(Augmented(), batch_size=4),
        DataLoader(Augmented(), batch_size=4, shuffle=True),
        Augmented(),
        ShuffledStream(),
        loader(sampler=SubsetRandomSampler(range(N))),
        DataLoader(
            TensorDataset(X, Y), batch_sampler=BatchSampler(SubsetRandomSampler(range(N)), 4, False)
        ),
    ],
    ids=range(6),
)
def test_rows_that_change_between_passes_raise(form):
    check_raises(
        form,
        "data: expected the same rows at each pass, got other values in the second pass. "
        "Turn off shuffling and random augmentation",
    )


def test_a_weighted_sampler_is_replaced_by_weights():
    check_raises(
        loader(sampler=WeightedRandomSampler([1.0] * N, N)),
        "the same rows at each pass, got other values in the second pass. Leave out the sampler "
        r"and pass Data.of\(\(inputs, y\)\).weighted",
    )


@pytest.mark.slow
def test_random_augmentation_in_worker_processes_raises():
    check_raises(DataLoader(Augmented(), batch_size=4, num_workers=1), "the same rows at each pass")


def test_a_loader_that_is_exhausted_after_a_pass_raises():
    check_raises(
        DataLoader(Exhausted(), batch_size=4),
        "a loader that can be read again, got one that is exhausted",
    )


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (
            (X, Y[:-1]),
            "data inputs and data targets: expected the same number of rows, got 11 and 10",
        ),
        (((X, X[:-1]), Y), r"data inputs\[0\] and data inputs\[1\]: .*got 11 and 10"),
        ((X, (Y, Y[:2])), "got 11 and 2"),
        (
            ({"a": X, "b": X[:2]}, Y),
            r"data inputs\['a'\] and data inputs\['b'\]: expected the same n",
        ),
        (((X, X * np.nan), Y), r"data inputs\[1\]: expected finite numbers"),
        ((X[:0], Y[:0]), "data: expected at least one row, got an empty table"),
        (DataLoader(TensorDataset(X[:0], Y[:0])), "data: expected at least one row, got an empty"),
        ((X, torch.tensor(1.0)), "one row per observation, got a scalar"),
        ((1.0, Y), "one row per observation, got a scalar"),
        (({}, Y), "data inputs: expected at least one tensor, got an empty collection"),
        (
            ([["a"]] * N, Y),
            "data inputs: expected numbers, got an array of dtype <U1. Encode strings",
        ),
        ((np.array([[1, "a"]] * N, dtype=object), Y), "got an array of dtype object. Encode"),
        ((pd.DataFrame({"a": range(N), "b": ["x"] * N}), Y), "got an array of dtype (object|str)"),
        ((X, np.array(["yes"] * N)), "data targets: expected numbers"),
        ((X, np.array(["2020-01-01"] * N, dtype="datetime64[D]")), "dtype datetime64"),
        (
            ([[1.0], [1.0, 2.0]], [0.0, 1.0]),
            "data inputs: expected rows of one length, got a ragged",
        ),
    ],
)
def test_invalid_pairs_raise(form, what):
    check_raises(form, what)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_raise(bad):
    x, y = X.clone(), Y.clone()
    x[3, 1] = y[5] = bad
    check_raises(
        (x, Y),
        r"data inputs: expected finite numbers, got 1 NaN or infinite value \(first in "
        r"row 3\). Drop or impute",
    )
    check_raises((X, y), "data targets: .*row 5")
    check_raises((X, (Y, y)), r"data targets\[1\]: .*row 5")
    check_raises(({"a": X, "b": x}, Y), r"data inputs\['b'\]: .*row 3")
    check_raises(DataLoader(TensorDataset(X, y), batch_size=4), "data targets: .*finite")


@pytest.mark.parametrize(
    "form",
    [
        X,
        X.numpy(),
        (X,),
        (X, Y, Y),
        [1, 2, 3],
        "train.csv",
        None,
        {"inputs": X, "y": Y},
        (pair for pair in [(X, Y)]),
    ],
)
def test_other_types_of_data_raise(form):
    check_raises(
        form,
        r"data: expected a pair \(inputs, y\)(, a dict with 'labels')?, a DataLoader or a Dataset, "
        "got",
        InputTypeError,
    )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: X.to_sparse(), "a nested or sparse tensor. Convert"),
        (lambda: X.to("meta"), "one of torch.float32 on meta"),
        (lambda: torch.nested.nested_tensor([X[0], X[0, :1]]), "a nested or sparse tensor"),
        (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "one of torch.qint8"),
        (lambda: X.to(torch.complex64), "one of torch.complex64"),
        (lambda: X.to(torch.float8_e4m3fn), "one of torch.float8_e4m3fn"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of formats that may change
def test_tensors_that_are_not_dense_raise(make, got):
    tensor = make()
    expected = f"expected a dense tensor of real numbers, got {got}"
    check_raises((tensor, Y), f"data inputs: {expected}")
    check_raises(({"x": X, "z": tensor}, Y), rf"data inputs\['z'\]: {expected}")
    check_raises((X, tensor), f"data targets: {expected}")
    batches = DataLoader([(X, Y), (tensor, Y)], batch_size=None)
    check_raises(batches, f"data inputs: {expected}")
    model = point_estimate(torch.nn.Linear(2, 2), "categorical")
    for inputs in (tensor, DataLoader([tensor], batch_size=None)):
        with pytest.raises(InputError, match=f"inputs: {expected}"):
            model.predict(inputs)


def test_rows_that_are_dicts_are_data():
    rows = [{"a": X[i], "b": X[i].tolist(), "labels": i} for i in range(3)]
    data = Data.of(rows)
    assert data.n == 3
    assert torch.equal(data.inputs["a"], X[:3])
    assert torch.equal(data.inputs["b"], X[:3])
    assert data.y.tolist() == [0, 1, 2]
    check_raises(
        [*rows, {"a": X[0], "labels": 0}], "rows with the keys .* got 'a', 'labels' .first in row"
    )
    check_raises(
        [*rows, {"a": X[0, :1], "b": X[0], "labels": 0}],
        r"data\['a'\]: expected rows of one shape, got \(1,\) and \(2,\). Pad or cut",
    )


def test_batches_that_are_not_pairs_raise():
    check_raises(
        DataLoader(TensorDataset(X), batch_size=4),
        r"data batch: expected a pair \(inputs, y\)"
        ", got list. Set a collate_fn",
        InputTypeError,
    )
    check_raises(DataLoader(TensorDataset(X, Y, Y)), "data batch: expected a pair", InputTypeError)
    check_raises(
        (X, {"y": Y}),
        "data targets: expected a tensor or a tuple of tensors, got dict",
        InputTypeError,
    )
    check_raises(
        (X, None), "data targets: expected a tensor or an array, got NoneType", InputTypeError
    )


def test_errors_name_the_argument_of_the_caller():
    with pytest.raises(InputError, match="^validation inputs and validation targets: "):
        Data.of((X, Y[:3]), "validation")


def test_data_on_another_device_raise():
    """The meta device stands in for a GPU."""
    tensor = torch.zeros(3, 2, device="meta")
    with pytest.raises(
        InputError,
        match=r"data: expected tensors on the CPU or on cpu, where "
        r"the module is, got meta\. Move the module or the data",
    ):
        to_device((tensor,), torch.device("cpu"))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * (N - 1) + [np.inf], rf"row each, got inf \(first in row {N - 1}\)"),
        ([1.0, np.nan, *[1.0] * (N - 2)], r"row each, got nan \(first in row 1\)"),
        ([-1.0, *[1.0] * (N - 1)], r"row each, got -1 \(first in row 0\)"),
        (np.ones((N, 1)), r"row each, got shape \(.*, 1\). Pass weights of shape \(N,\)"),
    ],
)
def test_weights_that_are_not_numbers_are_named(weights, message):
    message = message.replace("row each", "one finite number of at least 0 for each row")
    with pytest.raises(InputError, match=f"weights: expected {message}"):
        Data.of((X, Y)).weighted(weights)


def test_masked_entries_raise():
    masked = np.ma.masked_array(X.numpy(), X.numpy() > 0)
    got = rf"expected no masked entries, got {int((X > 0).sum())} of {X.numel()}. Drop these rows"
    check_raises((masked, Y), f"data inputs: {got}")
    check_raises(((X, masked), Y), rf"data inputs\[1\]: {got}")
    check_raises((X, np.ma.masked_array(Y.numpy(), True)), "data targets: expected no masked")
    none = np.ma.masked_array(X.numpy(), np.zeros(X.shape, dtype=bool))
    torch.testing.assert_close(Data.of((none, Y)).inputs, X)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f8", ">i4", np.longdouble, ">u2", np.uint64])
def test_numbers_in_formats_that_torch_lacks_are_converted(dtype):
    array = np.arange(6).reshape(3, 2).astype(dtype)
    data = Data.of((array, array[:, 0]))
    assert data.inputs.tolist() == array.tolist()
    assert data.targets().tolist() == array[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_labels_are_converted(dtype):
    labels = torch.tensor([0, 2, 1]).to(dtype)
    assert Data.of((X[:3], labels)).targets().tolist() == [0, 2, 1]
    assert Data.of((X[:3], labels)).targets().dtype == torch.int64
    check_raises(
        (X[:3], np.array([0, 1, 2**63], dtype=np.uint64)),
        r"data targets: expected numbers below 2\^63, got 9223372036854775808. Convert",
    )

"""Sums over rows that processes share, in one process that has joined no other."""

import numpy as np
import pytest
import torch

import subbayes
from subbayes import distributed
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.precision_factory import precision, root
from subbayes.curvature.row_sums import first_rows, sum_over_rows
from subbayes.data.data import Data
from subbayes.distributed.blocks import BlockSize
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.utils import memory


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return subbayes.Network(subbayes.MLP(3, (6,), 1, "tanh", seed=0).double())


@pytest.fixture
def data():
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(1)).double()
    return x, x[:, 0] * x[:, 1]


@pytest.fixture
def joined():
    yield distributed.join()
    distributed.leave()


def in_blocks(network, data):
    return root(network, Gaussian(0.3), data, size=BlockSize(90, 20, 1))


def test_a_sum_is_the_exact_sum_of_its_blocks(network, data, joined):
    V, seen = in_blocks(network, data), []

    def of(rows):
        seen.append((rows.offset, rows.n))
        return rows.gram().sum(), rows.pull(torch.ones(1, rows.rows).double())

    total, vector = sum_over_rows(V, of)
    assert seen == [(0, 20), (20, 20), (40, 20), (60, 20), (80, 10)]
    terms = [of(V.at_rows(*(part[i : i + 20] for part in data))) for i in range(0, 90, 20)]
    assert float(total) == pytest.approx(float(sum(term[0] for term in terms)), rel=1e-14)
    assert vector.shape == (1, network.size)
    torch.testing.assert_close(vector, sum(term[1] for term in terms), rtol=1e-12, atol=1e-12)


def test_a_jacobian_that_is_not_shared_is_summed_at_once(network, data):
    V = in_blocks(network, data)
    seen = []
    sum_over_rows(V, lambda rows: seen.append(rows) or (torch.zeros(1),))
    assert V.share is None
    assert seen == [V]


@pytest.mark.parametrize("form", ["primal", "dual", "diagonal", "kfac", "low-rank"])
def test_forms_of_one_process_that_has_joined_are_those_of_one_alone(network, data, form):
    alone = precision(network, Gaussian(0.3), data, form)
    distributed.join()
    try:
        found = precision(network, Gaussian(0.3), data, form)
    finally:
        distributed.leave()
    assert found.V.share is not None
    x = data[0][:7]
    torch.testing.assert_close(found.covariance(x), alone.covariance(x), rtol=1e-6, atol=1e-12)


def test_random_combinations_of_kfac_do_not_depend_on_blocks(data):
    net = subbayes.Network(subbayes.MLP(3, (6,), 4, "tanh", seed=0).double())
    x, y = data[0], (data[1] > 0).long()
    found = [
        precision(net, Categorical(), (x, y), "kfac", mc_samples=2, memory_limit=limit)
        for limit in (None, 4000)
    ]
    steps = [one.V.step for one in found]
    assert steps[1] < 10 < steps[0]
    sigma = [one.covariance(x[:5]) for one in found]
    torch.testing.assert_close(sigma[0], sigma[1], rtol=1e-10, atol=1e-14)


def test_sums_that_do_not_fit_are_refused(network, data, joined, monkeypatch):
    V = in_blocks(network, data)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(subbayes.InputError, match="data: expected .*exact sums of 324900 numbers"):
        sum_over_rows(V, lambda rows: (torch.zeros(570, 570),))


def test_first_rows_are_those_of_the_data(network, data):
    V = in_blocks(network, data)
    inputs, y = first_rows(V, 5)
    assert torch.equal(inputs, data[0][:5])
    assert torch.equal(y, data[1][:5])


def test_work_of_the_first_process_is_done_alone(network, data, joined):
    def work():
        assert distributed.current() is None
        return in_blocks(network, data).share

    assert joined.on_first(work) is None
    assert distributed.current() is joined
    assert in_blocks(network, data).share is not None
    with pytest.raises(ZeroDivisionError):
        joined.on_first(lambda: 1 / 0)
    assert distributed.current() is joined


def test_a_jacobian_keeps_two_rows_and_not_the_batch_they_are_from(network, data):
    V = Jacobian.of_data(Layers(network, data[0][:2]), Gaussian(0.3), Data.of(data))
    inputs, y = V.first()
    assert inputs.shape == (2, 3)
    assert inputs.untyped_storage().nbytes() == 48
    assert np.array_equal(y, data[1][:2])


@pytest.mark.parametrize("form", ["primal", "diagonal", "kfac"])
@pytest.mark.parametrize("scale", [1e-11, 1e11])
def test_exact_sums_take_any_scale(network, data, joined, form, scale):
    x, y = data
    deviations = [
        precision(network, Gaussian(0.3 * c), (x, c * y), form, prior_precision=2 / c**2)
        .covariance(x[:5])
        .diagonal()
        .sqrt()
        / c
        for c in (1.0, scale)
    ]
    torch.testing.assert_close(deviations[1], deviations[0], rtol=1e-9, atol=0)

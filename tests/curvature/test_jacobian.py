"""Products with Jacobians of inputs and data against the dense ones."""

import cases
import pytest
import torch
from jacobians import Many, dense, dense_rows
from torch.utils.data import DataLoader, TensorDataset

from subbayes import Network
from subbayes.curvature import gram as gram_module
from subbayes.curvature import jacobian as jacobian_module
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.data.data import Data, join_batches
from subbayes.inference import linearised_laplace
from subbayes.likelihoods import Categorical
from subbayes.subspaces.optimal import optimal
from subbayes.subspaces.subnetwork import subnetwork
from subbayes.utils import progress
from subbayes.utils.trees import n_rows, take


def check(V: Jacobian, X: Jacobian, dense_V: torch.Tensor, dense_X: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(3, V.size, generator=generator, dtype=torch.float64)
    scale = torch.rand(V.size, generator=generator, dtype=torch.float64)
    u = torch.randn(2, V.rows, generator=generator, dtype=torch.float64)
    same = dict(rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(V.gram(), dense_V @ dense_V.T, **same)
    torch.testing.assert_close(V.gram(X), dense_V @ dense_X.T, **same)
    torch.testing.assert_close(V.gram(X, scale), dense_V * scale @ dense_X.T, **same)
    torch.testing.assert_close(V.push(basis), basis @ dense_V.T, **same)
    torch.testing.assert_close(V.pull(u), u @ dense_V, **same)
    torch.testing.assert_close(torch.cat([rows for _, rows in X.dense(100)]), dense_X, **same)


CHOSEN = list(
    {(c.network, c.likelihood): c for c in cases.CASES if c.dtype == torch.float64}.values()
)


@pytest.mark.few(7)
@pytest.mark.filterwarnings("ignore:vectorising over")
@pytest.mark.parametrize(
    ("case", "limit"),
    [
        *((case, 2**28) for case in CHOSEN),
        *(
            (case, 1)
            for case in CHOSEN
            if case.network in ("mlp", "dict") and case.data == "loader"
        ),
    ],
    ids=lambda value: value.name if isinstance(value, cases.Case) else str(value),
)
def test_products_for_every_network_and_likelihood(case, limit):
    built = case.build()
    plan, data = Layers(built.network, built.inputs), Data.of(built.data)
    half = take(built.inputs, slice(0, 3))
    V = Jacobian.of_data(plan, built.likelihood, data, limit)
    X = Jacobian.of_inputs(plan, half, limit)
    assert V.rows == n_rows(built.y) * V.roots
    check(
        V,
        X,
        dense_rows(built.network, built.likelihood, built.inputs, built.y),
        dense(built.network, half).flatten(0, 1),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("outer", [1, 2**28])
def test_products_for_every_kind_of_layer_in_small_pieces(outer, monkeypatch):
    torch.manual_seed(0)
    for name in ("_OUTER", "_INNER", "_PAIRS"):
        monkeypatch.setattr(gram_module, name, outer)
    network, x = Network(Many().double()), torch.randn(6, 4, 6).double()
    plan = Layers(network, x)
    J = dense(network, x).flatten(0, 1)
    check(Jacobian.of_inputs(plan, x, 1), Jacobian.of_inputs(plan, x[:2]), J, J[:6])


@pytest.mark.parametrize("factored", [True, False])
def test_both_algorithms_for_gram_matrices(factored, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(
        gram_module,
        "_factored",
        lambda a, b, scale: (
            factored and not scale and a.layer.weight is not None and a.left.shape[3] == 1
        ),
    )
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2),
        torch.nn.Flatten(),
        torch.nn.Tanh(),
        torch.nn.Unflatten(1, (4, 2)),
        torch.nn.Linear(2, 3, bias=False),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 2),
    )
    text = torch.nn.Sequential(
        torch.nn.Embedding(5, 3, padding_idx=1), torch.nn.Flatten(), torch.nn.Linear(9, 2)
    )
    for module, x in ((net, torch.randn(4, 1, 3, 3)), (text, torch.randint(5, (4, 3)))):
        network = Network(module.double())
        x = x.double() if x.is_floating_point() else x
        J = dense(network, x).flatten(0, 1)
        X = Jacobian.of_inputs(Layers(network, x), x)
        torch.testing.assert_close(X.gram(), J @ J.T, rtol=1e-10, atol=1e-10)


def test_push_and_pull_of_many_vectors_and_large_gram_blocks():
    torch.manual_seed(0)
    network = Network(Many().double())
    x = torch.randn(5, 4, 6).double()
    plan, J = Layers(network, x), dense(network, x).flatten(0, 1)
    X = Jacobian.of_inputs(plan, x, 3 * Jacobian.of_inputs(plan, x).row_bytes)
    assert X.step == 3
    basis = torch.randn(80, network.size).double()
    u = torch.randn(40, X.rows).double()
    torch.testing.assert_close(X.push(basis), basis @ J.T)
    torch.testing.assert_close(X.pull(u), u @ J)
    torch.testing.assert_close(X.gram(), J @ J.T)
    assert X._gram_step() == 3  # a limit that was given is kept
    whole = Jacobian.of_inputs(plan, x)
    whole.step = 3
    assert whole._gram_step() >= 5
    torch.testing.assert_close(whole.gram(X), J @ J.T)


def test_gram_matrices_are_whole_while_the_free_memory_falls(monkeypatch):
    torch.manual_seed(0)
    network = Network(Many().double())
    x = torch.randn(9, 4, 6).double()
    X, J = Jacobian.of_inputs(Layers(network, x), x), dense(network, x).flatten(0, 1)
    X.step = 1
    blocks = iter([5, 4, 3, 2, *[1] * 100])
    monkeypatch.setattr(jacobian_module, "available_memory", lambda: 8 * next(blocks) * X.row_bytes)
    torch.testing.assert_close(X.gram(), J @ J.T)
    torch.testing.assert_close(X.gram(X), J @ J.T)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches_of_a_loader_are_joined(batch):
    """A Gram matrix costs the square of the number of blocks, not of the loader's batches."""
    torch.manual_seed(0)
    network, x, y = Network(torch.nn.Linear(3, 2).double()), torch.randn(7, 3), torch.arange(7) % 2
    x, plan = x.double(), Layers(network, x.double())
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    V, whole = (Jacobian.of_data(plan, Categorical(), Data.of(data)) for data in (loader, (x, y)))
    assert [len(part[1]) for part in V.batches()] == [7]
    assert torch.equal(V.gram(), whole.gram())
    assert torch.equal(
        V.gram(Jacobian.of_inputs(plan, loader)), whole.gram(whole.output_jacobian())
    )
    assert [len(part[1]) for part in V.batches(4)] == {1: [4, 3], 2: [4, 3], 7: [4, 3]}[batch]


def test_batches_of_different_shapes_are_not_joined():
    rows = [(torch.zeros(2, length), None) for length in (3, 3, 4, 3)]
    assert [x.shape for x, _ in join_batches(rows, 9)] == [(4, 3), (2, 4), (2, 3)]
    named = [({"a": torch.zeros(2, 3)}, (torch.zeros(2), torch.ones(2)))] * 3
    ((x, (y, noise)),) = join_batches(named, 6)
    assert x["a"].shape == (6, 3)
    assert torch.equal(noise, torch.ones(6))
    assert y.shape == (6,)


def test_progress_counts_all_work_and_estimates_minutes(monkeypatch, capsys):
    """The listener gets an estimate after the first block, and a line at the end."""
    clock = iter(range(0, 100_000, 40))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: float(next(clock)))
    torch.manual_seed(0)
    network, x = Network(Many().double().eval()), torch.randn(6, 4, 6).double()
    J, lines = Jacobian.of_inputs(Layers(network, x), x, 1), []
    token = progress.STAGE_LISTENER.set(lines.append)
    try:
        J.gram()
        assert lines == []
        J.progress = None
        J.gram()
        assert lines[0].startswith("Gram matrix: about ")
        assert lines[-1].startswith("Gram matrix: 36 pairs in ")
        lines.clear()
        J.push(torch.ones(1, network.size).double())
        assert lines[0] == "Jacobian: about 8 min"  # the bar reads the clock once too
        assert lines[-1].startswith("Jacobian: 6 rows in ")
    finally:
        progress.STAGE_LISTENER.reset(token)
    J.progress = True
    J.outputs()
    assert "Jacobian: about" not in capsys.readouterr().err  # known from the products
    J.pull(torch.ones(1, J.rows))
    assert "Jacobian: about 4 min" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_fits_and_subspaces_pass_progress_on(shown, monkeypatch):
    seen = []
    real = jacobian_module.estimated_progress
    monkeypatch.setattr(
        jacobian_module,
        "estimated_progress",
        lambda n, what, show, unit: seen.append(show) or real(n, what, False, unit),
    )
    torch.manual_seed(0)
    network, x = Network(torch.nn.Linear(3, 2).double()), torch.randn(7, 3).double()
    rows = Categorical(), (x, torch.arange(7) % 2)
    posterior = linearised_laplace(network, *rows, progress=shown)
    posterior.predict(x)
    subnetwork(network, *rows, rank=2, progress=shown)
    space = optimal(network, *rows, inputs=x, rank=2, progress=shown)
    linearised_laplace(network, *rows, space, progress=shown).predict(x)
    assert shown in seen
    assert (not shown) not in seen or shown  # passes within others are silent

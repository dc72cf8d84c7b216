"""Scores of sketched Lanczos against dense projections, and the bound on their error."""

import numpy as np
import pytest
import torch
from jacobians import dense, dense_rows, problem

import subbayes
from subbayes import InputError, Network
from subbayes.inference import sketched_lanczos
from subbayes.inference.laplace.sketched_lanczos import FourierSketch
from subbayes.likelihoods import Gaussian

pytestmark = pytest.mark.filterwarnings("ignore")


def krylov(V, rank, seed=0):
    """An orthonormal basis of the space of `rank` products, orthogonalised at every step."""
    v = torch.from_numpy(np.random.default_rng([seed, 1]).standard_normal(V.shape[1]))
    rows = [v / v.norm()]
    for _ in range(rank - 1):
        v = V.T @ (V @ rows[-1])
        for _ in range(2):
            Q = torch.stack(rows)
            v = v - Q.T @ (Q @ v)
        rows.append(v / v.norm())
    return torch.stack(rows)


def left(J, Q):
    return (J - J @ Q.T @ Q).square().sum(-1)


@pytest.mark.parametrize("classes", [1, 3])
def test_scores_equal_dense_projections_without_a_sketch(classes):
    net, likelihood, data, new = problem(0, classes)
    found = sketched_lanczos(net, likelihood, data, rank=6, sketch=10_000, progress=False)
    assert found.sketch.is_identity
    V, J = dense_rows(net, likelihood, *data), dense(net, new)
    exact = left(J, krylov(V, 6)).sum(1)
    np.testing.assert_allclose(found.scores(new), exact, rtol=1e-5)


def test_the_error_is_bounded_by_the_distortion_of_the_sketch():
    net, likelihood, data, new = problem(1, 3, width=60)
    Q, J = krylov(dense_rows(net, likelihood, *data), 8), dense(net, new)
    worst = 0.0
    for seed in range(5):
        found = sketched_lanczos(net, likelihood, data, rank=8, sketch=150, seed=seed,
                                 progress=False)  # fmt: skip
        assert found.basis.shape[1] == 150 < net.size
        Q = krylov(dense_rows(net, likelihood, *data), 8, seed)
        scores, exact = found.scores(new), left(J, Q).sum(1).numpy()
        for n in range(len(new)):
            span = torch.linalg.qr(torch.cat([Q, J[n]]).T)[0].T
            values = torch.linalg.svdvals(found.sketch(span)).square()
            low, high = float(values[-1]), float(values[0])
            assert low - 1e-6 <= scores[n] / exact[n] <= high + 1e-6
            worst = max(worst, abs(scores[n] / exact[n] - 1))
    assert 0 < worst < 0.5


def test_the_sketch_preserves_norms_on_average():
    v = torch.randn(1, 301, generator=torch.Generator().manual_seed(0)).double()
    v = v.cumsum(1)  # smooth: without the signs all of it would be in a few frequencies
    ratios = [float(FourierSketch(301, 40, s)(v).square().sum() / v.square().sum())
              for s in range(300)]  # fmt: skip
    assert abs(np.mean(ratios) - 300 / 301) < 4.5 * np.std(ratios) / 300**0.5
    assert np.std(ratios) < 2 * (2 / 40) ** 0.5


def test_memory_and_ranks():
    net, likelihood, data, new = problem(0, width=400)
    found = sketched_lanczos(net, likelihood, data, rank=5, sketch=64, progress=False)
    assert found.basis.shape == (5, 64)
    assert found.bytes < 5 * 64 * 8 + 9 * net.size
    whole = sketched_lanczos(net, likelihood, data, rank=100, sketch=2000, progress=False)
    assert len(whole.basis) <= 30  # 15 rows, the first vector, and some rounding
    assert (whole.scores(data[0]) < 1e-6 * dense(net, data[0]).square().sum((1, 2)).numpy()).all()
    assert (whole.scores(new) <= found.scores(new) * 1.8).all()
    again = sketched_lanczos(net, likelihood, data, rank=5, sketch=64, progress=False)
    assert np.array_equal(again.scores(new), found.scores(new))
    assert "rank=5, sketch=64" in repr(found)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-5), (torch.float32, 0.1)])
def test_more_products_than_the_matrix_has_directions_add_none(dtype, rtol):
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 2, generator=generator).to(dtype) for n in (5, 4))
    net = Network(subbayes.MLP(2, (40,), 1, "tanh", seed=0).to(dtype))
    likelihood, y = Gaussian(0.1), x[:, 0]
    rows = torch.linalg.qr(dense_rows(net, likelihood, x, y).double().T)[0].T
    exact = left(dense(net, new).double(), rows).sum(1)
    for rank in (6, 20, 50, 150):
        found = sketched_lanczos(net, likelihood, (x, y), rank=rank, progress=False)
        assert 5 <= len(found.basis) <= 6
        np.testing.assert_allclose(found.scores(new), exact, rtol=rtol)


def test_gradients_of_zero_have_no_basis():
    net = Network(torch.nn.Linear(2, 1, bias=False).double())
    x = torch.zeros(3, 2).double()
    found = sketched_lanczos(net, Gaussian(1.0), (x, x[:, 0]), rank=2, progress=False)
    assert len(found.basis) == 0
    np.testing.assert_allclose(found.scores(torch.ones(1, 2).double()), [2.0])


def test_bad_settings():
    net, likelihood, data, _ = problem(0)
    for name, message in [("rank", "rank: expected a whole"), ("sketch", "sketch: expected a wh")]:
        with pytest.raises(InputError, match=message):
            sketched_lanczos(net, likelihood, data, **{name: 0})


def test_sketches_have_to_be_larger_than_the_rank():
    net, likelihood, data, new = problem(0, 1)
    with pytest.raises(InputError, match="sketch: expected more numbers than the 8 directions"):
        sketched_lanczos(net, likelihood, data, rank=8, sketch=8)
    expected = sketched_lanczos(net, likelihood, data, rank=5, sketch=64, progress=False)
    with torch.inference_mode():
        found = sketched_lanczos(net, likelihood, data, rank=5, sketch=64, progress=False)
        scores = found.scores(new.clone())
    np.testing.assert_array_equal(scores, expected.scores(new))

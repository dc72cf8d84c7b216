"""Curves against de Casteljau, closed forms, autograd through every control point and peers."""

import copy
import dataclasses
import gc
import math

import numpy as np
import pytest
import torch
from cases import nested, training_options
from fits import compare, fit_options
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import make_moons
from torch import nn

from subbayes import MLP, InputError, Network, Training, fit, subspaces
from subbayes.data.data import Data
from subbayes.likelihoods import Categorical, Gaussian, Poisson
from subbayes.models.fitted import FittedModel
from subbayes.networks.initialisation import module_with_fresh_weights
from subbayes.training.curve import connect, train_curve
from subbayes.training.curve_steps import ControlPoints, ExtraParameters, TrainableCurve
from subbayes.training.minibatches import Minibatches
from subbayes.training.pipeline import train_trajectory
from subbayes.training.trainer import swa, train
from subbayes.training.weight_curve import WeightCurve, coefficients


def points(count=4, size=9, seed=0, dtype=torch.float64):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def table(n=60, d=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=dtype)
    w = torch.linspace(-1, 2, d, dtype=dtype)
    return x, x @ w + 0.5 * torch.randn(n, generator=generator, dtype=dtype)


def moons(n=200, seed=0):
    x, y = make_moons(n, noise=0.15, random_state=seed)
    return torch.from_numpy(x).float(), torch.from_numpy(y)


def net(d=3, outputs=1, dropout=0.0, norm=False, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(8)] if norm else []
        middle += [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(nn.Linear(d, 8), nn.Tanh(), *middle, nn.Linear(8, outputs))


def mean_losses(weights, result, data):
    """Mean negative log-likelihoods of the networks with these weights."""
    x, y = data
    outputs = (result.network(w.to(result.network.weights), x) for w in weights)
    return np.array([-float(result.likelihood.log_prob(f, y).mean()) for f in outputs])


class Residual(nn.Module):
    """Convolutions, BatchNorm and a skip connection, as in a small residual network."""

    def __init__(self, c=2):
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, c)

    def forward(self, x):
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.relu(x + self.norm1(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Bare(nn.Module):
    """A parameter without a layer: nothing says how to draw it anew."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x @ self.weight


QUICK = {"epochs": 3, "batch_size": 16, "learning_rate": 1e-2, "progress": False}


# --- the curve --------------------------------------------------------------------------------


def de_casteljau(p, t):
    while len(p) > 1:
        p = (1 - t) * p[:-1] + t * p[1:]
    return p[0]


@given(degree=st.integers(1, 12), t=st.floats(0, 1))
def test_bezier_is_de_casteljau(degree, t):
    p = points(degree + 1)
    torch.testing.assert_close(WeightCurve(p).point(t), de_casteljau(p, t), rtol=0, atol=1e-13)


@given(segments=st.integers(1, 12), t=st.floats(0, 1))
def test_polygon_is_linear_interpolation(segments, t):
    p = points(segments + 1)
    places = np.linspace(0, 1, segments + 1)
    expected = [np.interp(t, places, column) for column in p.T.numpy()]
    np.testing.assert_allclose(WeightCurve(p, "polygon").point(t), expected, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 16, 60, 300])
def test_bernstein_polynomials_of_high_degree(degree):
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    c = coefficients(t, degree + 1)
    assert bool((c >= 0).all())
    np.testing.assert_allclose(c.sum(-1), 1, rtol=1e-13)
    exact = [
        [
            math.comb(degree, i) * float(s) ** i * (1 - float(s)) ** (degree - i)
            for i in range(degree + 1)
        ]
        for s in t
    ]
    np.testing.assert_allclose(c, np.array(exact, float), rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("kind", ["bezier", "polygon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_vectorised_and_ends_are_exact(kind, dtype):
    curve = WeightCurve(points(5, dtype=dtype), kind)
    ts = torch.tensor([0.0, 0.3, 1.0])
    many = curve.point(ts)
    assert many.shape == (3, 9)
    assert many.dtype == dtype
    torch.testing.assert_close(many[1], curve.point(0.3), rtol=1e-5, atol=1e-6)
    assert torch.equal(many[0], curve.points[0])
    assert torch.equal(many[2], curve.points[-1])
    assert curve.coefficients(np.array([[0.1, 0.2]])).shape == (1, 2, 5)


# --- its subspace -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bezier", "polygon"])
@pytest.mark.parametrize("basis", ["ends", "principal"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_curve_lies_in_its_subspace(kind, basis, unit, count):
    curve = WeightCurve(points(count), kind)
    space = curve.subspace(basis, unit)
    ts = torch.linspace(0, 1, 23, dtype=torch.float64)
    on = curve.point(ts)
    assert space.rank == count - 1
    torch.testing.assert_close(space.weights(space.project(on)), on, rtol=0, atol=1e-12)
    z = curve.coordinates(ts, space)
    torch.testing.assert_close(z, space.project(on), rtol=0, atol=1e-11)
    torch.testing.assert_close(space.weights(z), on, rtol=0, atol=1e-12)


def test_the_basis_is_that_of_the_paper():
    p = points(3)
    space, middle = WeightCurve(p).subspace(), WeightCurve(p).point(0.5)
    shift = (p[0] + p[2]) / 2
    torch.testing.assert_close(space.shift, shift)
    torch.testing.assert_close(space.basis()[0], (p[0] - shift) / (p[0] - shift).norm())
    torch.testing.assert_close(space.basis()[1], (middle - shift) / (middle - shift).norm())
    half = float((p[0] - shift).norm())
    torch.testing.assert_close(
        WeightCurve(p).coordinates([0.0, 1.0]),
        torch.tensor([[half, 0], [-half, 0]], dtype=torch.float64),
    )


def test_ends_have_coordinate_one_without_normalisation():
    z = WeightCurve(points(4)).coordinates([0.0, 1.0], WeightCurve(points(4)).subspace(unit=False))
    torch.testing.assert_close(z, torch.tensor([[1.0, 0, 0], [-1, 0, 0]], dtype=torch.float64))


def test_principal_directions_are_those_of_scikit_learn():
    from sklearn.decomposition import PCA

    p = points(5)
    peer = PCA(4).fit(p.numpy())
    space = WeightCurve(p).subspace("principal")
    np.testing.assert_allclose(space.shift, peer.mean_, atol=1e-14)
    np.testing.assert_allclose(
        np.abs(space.basis().numpy() @ peer.components_.T), np.eye(4), atol=1e-10
    )
    wide = WeightCurve(p).subspace("principal", unit=False).basis()
    np.testing.assert_allclose(wide.norm(dim=1), peer.explained_variance_**0.5, rtol=1e-10)


@pytest.mark.parametrize("basis", ["ends", "principal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subspace_of_a_straight_curve_raises(basis, dtype):
    a, b = points(2, dtype=dtype)
    with pytest.raises(InputError, match="curve: expected control points that span 2 directions"):
        WeightCurve(torch.stack([a, torch.lerp(a, b, 0.5), b])).subspace(basis)


# --- training ---------------------------------------------------------------------------------


STEP = Training(
    epochs=1, learning_rate=1.0, optimizer="sgd", momentum=0.0, clip_norm=None, batch_size=None
)


def curve_run(control, network, data, training=STEP):
    minibatches = Minibatches(data, Gaussian(0.7), network, None, 0)
    return TrainableCurve(minibatches, training, control, seed=5)


@pytest.mark.parametrize("kind", ["bezier", "polygon"])
@pytest.mark.parametrize("fixed", [(), (0, 4), (0, 2, 4)])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("scratch", "factor"), [(1, 1.0), (7, 1.0), (7, 3.0), (2**20, 3.0)])
def test_gradient_step_equals_autograd_through_the_control_points(
    kind, fixed, clip, scratch, factor, monkeypatch
):
    monkeypatch.setattr("subbayes.training.curve_steps._BUFFER_SIZE", scratch)
    network, (x, y) = Network(net().double()), table()
    p, decay = 0.3 * points(5, network.size), 0.05
    step = dataclasses.replace(STEP, clip_norm=clip, weight_decay=decay, bias_lr_factor=factor)
    control = ControlPoints(network, 5, fixed, kind, step)
    for i, row in enumerate(p):
        control.set_point(i, row)
    assert torch.equal(control.points(), p)
    run = curve_run(control, network, (x, y), step)
    run.epoch(0)

    leaf = p.clone().requires_grad_()
    t = torch.rand((), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    w = coefficients(t, 5, kind) @ leaf
    loss = -Gaussian(0.7).log_prob(network(w, x), y).mean()
    (point_gradient,) = torch.autograd.grad(loss, w, retain_graph=True)
    size = float(point_gradient.norm())
    share = 1.0 if clip is None else min(1.0, clip / (size + 1e-6))
    (share * loss + decay / 2 * w.square().sum()).backward()
    rates = torch.ones(network.size, dtype=torch.float64)
    for name, span in network.spans.items():
        rates[span] = factor if name.endswith("bias") else 1.0
    expected = p - rates * leaf.grad
    expected[list(fixed)] = p[list(fixed)]
    torch.testing.assert_close(control.points(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_training_equals_a_naive_loop(optimizer, traced, monkeypatch, steps):
    """Several epochs of minibatches, with the optimisers of torch on one (k + 1, D) tensor."""
    monkeypatch.setattr("subbayes.training.traced_steps._LEAST_STEPS", 0 if traced else 100)
    data, module = table(), net().double()
    result = train_curve(
        module,
        Gaussian(0.7),
        data,
        degree=3,
        seed=4,
        **training_options(
            epochs=3,
            batch_size=None,
            learning_rate=0.02,
            optimizer=optimizer,
            weight_decay=0.3 if optimizer == "adamw" else None,
            progress=False,
        ),
    )
    assert steps == (["eager", "traced", "traced"] if traced else [])
    network, start = Network(module), train_curve_start(module, 3, 4)
    leaf = nn.Parameter(start)
    plain = {
        "adam": lambda: torch.optim.Adam([leaf], lr=0.02),
        "adamw": lambda: torch.optim.AdamW([leaf], lr=0.02, weight_decay=0.3),
        "sgd": lambda: torch.optim.SGD([leaf], lr=0.02, momentum=0.9),
    }[optimizer]()
    from subbayes.utils.seeding import derive_seed

    generator = torch.Generator().manual_seed(derive_seed(4, 2))
    for _ in range(3):
        t = torch.rand((), generator=generator, dtype=torch.float64)
        loss = -Gaussian(0.7).log_prob(network(coefficients(t, 4) @ leaf, data[0]), data[1]).mean()
        plain.zero_grad()
        loss.backward()
        plain.step()
    torch.testing.assert_close(result.curve.points, leaf.detach(), rtol=1e-9, atol=1e-10)


def train_curve_start(module, degree, seed):
    """Control points before training: what an epoch at a rate of nearly nothing leaves."""
    result = train_curve(
        module,
        Gaussian(0.7),
        table(),
        degree=degree,
        seed=seed,
        **training_options(
            epochs=1, learning_rate=1e-140, optimizer="sgd", momentum=0.0, progress=False
        ),
    )
    return result.curve.points.clone()


def alive(size):
    """Bytes of all storages of tensors of at least this many entries."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.numel() >= size
    }
    return sum(storages.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "momentum", "copies"),
    [
        ("adam", 0.0, 3),
        pytest.param("sgd", 0.9, 2, marks=pytest.mark.slow),
        pytest.param("sgd", 0.0, 1, marks=pytest.mark.slow),
    ],
)
def test_memory_per_control_point(optimizer, momentum, copies, monkeypatch):
    """And the curve handed to the callback, which counts them, one more."""
    monkeypatch.setattr("subbayes.training.curve_steps._BUFFER_SIZE", 8000)
    data, seen = table(dtype=torch.float32), {}
    for degree in (3, 9):
        train_curve(
            MLP(3, (2000,), 1),
            Gaussian(1.0),
            data,
            degree=degree,
            callback=lambda _, curve, k=degree: seen.update({k: alive(1000)}),
            **training_options(
                epochs=2, optimizer=optimizer, momentum=momentum, learning_rate=1e-4, progress=False
            ),
        )
    size = 4 * (3 * 2000 + 2000 + 2000 + 1)
    assert (seen[9] - seen[3]) / size == pytest.approx(6 * (copies + 1), rel=0.02)


def test_initial_points_are_independent_initialisations():
    start = train_curve_start(MLP(3, (400,), 1).double(), 3, 0)
    corr = np.corrcoef(start.numpy())
    assert np.abs(corr - np.eye(4)).max() < 5 / start.shape[1] ** 0.5
    first = start[:, : 400 * 3]  # uniform on +-1/sqrt(3): variance 1/9
    np.testing.assert_allclose(first.var(1), 1 / 9, rtol=0.1)


@pytest.mark.parametrize("kind", ["bezier", "polygon"])
@pytest.mark.parametrize("degree", [2, 4])
def test_ends_are_fixed(kind, degree):
    data, network = table(dtype=torch.float32), Network(net())
    a, b = network.weights, Network(net(seed=1)).weights
    result = connect(
        net(),
        Gaussian(),
        data,
        solutions=(a, b),
        kind=kind,
        degree=degree,
        **training_options(**QUICK),
    )
    assert result.curve.degree == degree
    assert torch.equal(result.curve.points[0], a)
    assert torch.equal(result.curve.points[-1], b)
    moved = result.curve.points[1:-1] - torch.stack(
        [torch.lerp(a, b, i / degree) for i in range(1, degree)]
    )
    assert bool((moved.norm(dim=1) > 1e-3).all())


def test_polygon_passes_through_all_solutions():
    data, solutions = table(dtype=torch.float32), [Network(net(seed=s)).weights for s in range(4)]
    result = connect(
        net(), Gaussian(), data, solutions=solutions, kind="polygon", **training_options(**QUICK)
    )
    assert result.curve.degree == 6
    assert torch.equal(result.curve.points[::2], torch.stack(solutions))
    assert torch.equal(result.curve.point([i / 3 for i in range(4)]), torch.stack(solutions))


def test_curve_of_a_linear_model_is_optimal():
    """The loss is convex, so E_t l(phi(t)) is least where every place is at the minimum."""
    x, y = table(200)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    lowest = float(0.5 * (x @ best - y).square().mean())
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    result = train_curve(
        layer,
        Gaussian(1.0),
        (x, y),
        degree=2,
        **training_options(
            epochs=900,
            optimizer="sgd",
            learning_rate=0.4,
            momentum=0.5,
            batch_size=None,
            progress=False,
        ),
    )
    losses = mean_losses(result.curve.point(np.linspace(0, 1, 21)), result, (x, y))
    np.testing.assert_allclose(losses - 0.5 * math.log(2 * math.pi), lowest, rtol=1e-6)


def test_noise_is_learned_with_the_curve():
    x, y = table(400)
    best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    result = train_curve(
        layer,
        Gaussian(),
        (x, y),
        degree=2,
        **training_options(epochs=400, learning_rate=0.02, batch_size=None, progress=False),
    )
    assert result.likelihood.is_complete
    noise = float((x @ best - y).square().mean().sqrt())
    assert result.likelihood.to_config()["noise"][0] == pytest.approx(noise, rel=1e-3)


def test_prior_shrinks_the_curve_to_the_ridge_solution():
    x, y = table(50)
    s = 0.4
    best = torch.linalg.solve(x.T @ x + torch.eye(3) / s**2, x.T @ y)
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    result = train_curve(
        layer,
        Gaussian(1.0),
        (x, y),
        degree=2,
        **training_options(
            epochs=900,
            optimizer="sgd",
            learning_rate=0.4,
            momentum=0.5,
            batch_size=None,
            prior_scale=s,
            progress=False,
        ),
    )
    torch.testing.assert_close(
        result.curve.point([0.1, 0.6]), best.expand(2, 3), rtol=1e-5, atol=1e-6
    )


def test_extra_tensors_are_learned_with_the_curve():
    """y = f(u) + x theta with f and theta linear: theta is that of least squares on both."""
    u, x = table(200, seed=1)[0], table(200, seed=2)[0][:, :2]
    y = u @ torch.tensor([1.0, -1, 2]).double() + x @ torch.tensor([-0.5, 1.0]).double()
    y = y + 0.1 * table(200, seed=3)[0][:, 0]
    both = torch.linalg.lstsq(torch.cat([u, x], 1), y[:, None]).solution[3:, 0]

    class First(nn.Linear):
        def forward(self, u, x):
            return super().forward(u)

    result = train_curve(
        First(3, 1, bias=False, dtype=torch.float64),
        Gaussian(1.0),
        ((u, x), y),
        degree=2,
        extra=ExtraParameters(
            {"effects": torch.zeros(2, dtype=torch.float64)},
            lambda f, extra, inputs: f + (inputs[1] @ extra["effects"])[:, None],
        ),
        **training_options(
            epochs=800,
            optimizer="sgd",
            learning_rate=0.2,
            momentum=0.5,
            batch_size=None,
            progress=False,
        ),
    )
    torch.testing.assert_close(result.extra["effects"], both, rtol=1e-5, atol=1e-6)


def test_curve_avoids_the_barrier_of_the_straight_line():
    data, test = moons(), moons(seed=1)
    result = connect(
        MLP(2, (32,), 2),
        Categorical(),
        data,
        **training_options(
            epochs=60, learning_rate=2e-2, prior_scale=1.0, progress=False, swa_epochs=0
        ),
    )
    t = np.linspace(0, 1, 25)
    straight = WeightCurve(result.curve.points[[0, -1]])
    for rows in (data, test):
        around, through = (
            mean_losses(curve.point(t), result, rows) for curve in (result.curve, straight)
        )
        assert around.max() < 0.5 * through.max()
        ends = (1 - t) * around[0] + t * around[-1]
        assert (around - ends).max() < 0.2 * (through - ends).max()
        assert around[0] == through[0]


# --- modules ----------------------------------------------------------------------------------


def test_a_residual_network_with_batchnorm():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(48) % 2
    x = torch.randn(48, 1, 6, 6, generator=generator) + 2 * y[:, None, None, None]
    result = connect(
        Residual(),
        Categorical(),
        (x, y),
        **training_options(
            epochs=8, learning_rate=1e-2, batch_size=16, progress=False, swa_epochs=0
        ),
    )

    def loss(network):
        return -float(Categorical().log_prob(network(network.weights, x), y).mean())

    places = np.linspace(0, 1, 7).tolist()
    refreshed = [loss(result.at(t, (x, y))) for t in places]
    assert max(refreshed) < max(loss(result.at(t)) for t in places)
    assert max(refreshed) < 0.5
    # the network's statistics are those of t = 1/2
    assert refreshed[3] == pytest.approx(loss(result.network), rel=0.05)
    assert torch.equal(result.at(0.0, (x, y)).weights, result.curve.points[0])


@pytest.mark.parametrize("training", [True, False])
def test_module_and_global_generators_are_unchanged(training):
    module, data = net(dropout=0.3, norm=True).train(training), table(dtype=torch.float32)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    train_curve(module, Gaussian(), data, **training_options(**QUICK))
    connect(module, Gaussian(), data, **training_options(**QUICK, swa_epochs=2))
    assert module.training is training
    assert all(torch.equal(before[n], v) for n, v in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_is_active_only_in_training():
    data = table(dtype=torch.float32)
    dropped = train_curve(net(dropout=0.5), Gaussian(1.0), data, **training_options(**QUICK))
    kept = train_curve(net(dropout=0.0), Gaussian(1.0), data, **training_options(**QUICK))
    assert not torch.equal(dropped.curve.points, kept.curve.points)
    one, two = (mean_losses(dropped.curve.point([0.0, 0.5]), dropped, data) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_functions_of_the_caller_are_called_in_each_step(steps):
    calls = []

    def join(outputs, extra, inputs):
        calls.append(1)
        return outputs + extra["shift"]

    extra = ExtraParameters({"shift": torch.zeros(1)}, join)
    data = table(dtype=torch.float32)
    train_curve(net(), Gaussian(1.0), data, extra=extra, **training_options(**QUICK))
    assert not steps
    assert len(calls) >= 3


def test_hooks_are_called_in_each_step(steps):
    calls, module = [], net()
    module[0].register_forward_hook(lambda *_: calls.append(1))
    train_curve(module, Gaussian(1.0), table(dtype=torch.float32), **training_options(**QUICK))
    assert not steps
    assert len(calls) >= 3


def test_only_selected_weights_vary_on_the_curve():
    data, module = table(dtype=torch.float32), net()
    result = connect(
        Network(module, "last-layer"), Gaussian(), data, **training_options(**QUICK, swa_epochs=0)
    )
    assert result.curve.size == 9
    for name, value in result.network.frozen.items():
        assert torch.equal(value, dict(module.named_parameters())[name])
    masks = {"2.weight": torch.arange(8)[None] % 2 == 0}
    masked = train_curve(Network(module, masks), Gaussian(), data, **training_options(**QUICK))
    assert masked.curve.size == 4


def test_streamed_data_and_counts():
    from torch.utils.data import DataLoader, TensorDataset

    x, y = table(dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y.abs().round()), batch_size=20)
    result = train_curve(net(), Poisson(), loader, **training_options(epochs=2, progress=False))
    assert len(result.history["train_loss"]) == 2
    assert result.history["train_loss"][1] < result.history["train_loss"][0]


# --- the same seed, early stopping ------------------------------------------------------------


def test_the_same_seed_gives_the_same_curve():
    data = table(dtype=torch.float32)

    def run(seed):
        return connect(
            net(dropout=0.2), Gaussian(), data, seed=seed, **training_options(**QUICK, swa_epochs=0)
        )

    one, same, other = run(0), run(0), run(1)
    assert torch.equal(one.curve.points, same.curve.points)
    assert one.history == same.history
    assert not torch.equal(one.curve.points, other.curve.points)


def test_patience_returns_to_the_best_curve():
    data, seen = table(dtype=torch.float32), []
    result = train_curve(
        net(),
        Gaussian(),
        data,
        seed=2,
        callback=lambda _, curve: seen.append(curve.points.clone()),
        **training_options(
            epochs=60, learning_rate=0.2, validation=0.3, patience=4, batch_size=8, progress=False
        ),
    )
    scores = result.history["validation_log_likelihood"]
    assert result.best_epoch == int(np.argmax(scores)) + 1
    assert len(scores) in (60, result.best_epoch + 4)
    assert torch.equal(result.curve.points, seen[result.best_epoch - 1])


def test_a_callback_stops():
    result = train_curve(
        net(),
        Gaussian(),
        table(dtype=torch.float32),
        callback=lambda epoch, _: epoch == 2,
        **training_options(**QUICK),
    )
    assert len(result.history["train_loss"]) == 2


def test_solutions_may_be_networks_and_training_results():
    data = table(dtype=torch.float32)
    one = train(net(), Gaussian(), data, **training_options(**QUICK))
    two = swa(net(seed=1), Gaussian(), data, **training_options(swa_epochs=2, progress=False))
    three = Network(net(seed=2))
    result = connect(
        net(),
        Gaussian(),
        data,
        solutions=[one, two, three],
        kind="polygon",
        **training_options(**QUICK),
    )
    expected = torch.stack([e.weights for e in (one.network, two.network, three)])
    assert torch.equal(result.curve.points[::2], expected)


def test_noise_starts_at_that_of_the_solutions():
    data = table(dtype=torch.float32)
    ends = [train(net(seed=s), Gaussian(), data, **training_options(**QUICK)) for s in (0, 1)]
    still = QUICK | {"learning_rate": 1e-30}
    result = connect(net(), Gaussian(), data, solutions=ends, **training_options(**still))
    torch.testing.assert_close(
        result.likelihood_parameters,
        (ends[0].likelihood_parameters + ends[1].likelihood_parameters) / 2,
    )


# --- in fit, and beside other methods ---------------------------------------------------------

PLAN = Training(epochs=10, batch_size=20, swa_epochs=4, curve_epochs=5)
SHORT = dict(draws=20, chains=2, training=PLAN, progress=False)


@pytest.mark.parametrize("rank", [None, 3])
def test_fit_samples_in_the_subspace_of_a_trained_curve(rank):
    x, y = data = table(dtype=torch.float32)
    model = fit(net(), data, **fit_options(subspace="curve", rank=rank, **SHORT))
    trained = train_trajectory(net(), Gaussian(), Data.of(data), PLAN, progress=False)
    curve = trained.train_curve(rank or 2)
    assert model.subspace.rank == model.draws.rank == (rank or 2)
    assert torch.equal(curve.points[0], trained.network.weights)
    assert torch.equal(model.subspace.basis(), curve.subspace(unit=False).basis())
    assert model.predict(x).std.shape == (60,)


def test_compare_methods_equals_fit():
    data = table(dtype=torch.float32)
    found = compare(net(), Gaussian(), data, data, ("map", "curve"), **SHORT)
    alone = fit(net(), data, **fit_options(subspace="curve", **SHORT))
    assert isinstance(found.models["curve"], FittedModel)
    np.testing.assert_array_equal(found.models["curve"].draws.z, alone.draws.z)
    assert found.models["curve"].settings == alone.settings
    seconds = found.table.loc["curve"]
    assert seconds["training_seconds"] > found.table.loc["map", "training_seconds"]


def test_prior_of_extra_tensors():
    """With all rows in each step and no noise: the ridge solution of the extra tensor."""
    x = torch.linspace(-1, 1, 20)[:, None]
    result = train_curve(
        nn.Linear(1, 1),
        Gaussian(1.0),
        (x, 2.0 * torch.ones(20)),
        degree=1,
        extra=ExtraParameters(
            {"level": torch.zeros(1)}, lambda outputs, extra, _: outputs + extra["level"], 0.3
        ),
        **training_options(epochs=800, learning_rate=0.05, batch_size=None, prior_scale=1e-3),
    )
    ridge = 20 * 2.0 / (20 + 1 / 0.3**2)
    assert float(result.extra["level"]) == pytest.approx(ridge, abs=0.01)


def test_factory_creates_the_other_end():
    data = table(dtype=torch.float32)
    found = compare(Bare, Gaussian(), data, data, ["curve"], **SHORT)
    assert found.models["curve"].subspace.rank == 2
    result = connect(
        Bare(), Gaussian(), data, factory=Bare, **training_options(**QUICK, swa_epochs=0)
    )
    assert result.curve.size == 3


def test_estimators_with_a_curve():
    from subbayes import SubspaceRegressor

    x, y = table(dtype=torch.float32)
    model = SubspaceRegressor(
        **nested(subspace="curve", hidden=(5,), epochs=3, swa_epochs=3, draws=10, chains=2)
    ).fit(x.numpy(), y.numpy())
    assert model.model_.subspace.rank == 2


# --- bad input --------------------------------------------------------------------------------

A, B = Network(net()).weights, Network(net(seed=1)).weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(solutions=(A, Network(net(norm=True)))),
            r"solutions\[1\]: expected the architecture of the mod",
        ),
        (
            dict(solutions=(A, A.clone())),
            "solutions: expected solutions that differ, got the same weights twice",
        ),
        (dict(solutions=(A,)), "solutions: expected a whole number of at least 2, got 1"),
        (
            dict(solutions=(A, B, A), kind="bezier"),
            "kind: expected 'polygon' to connect more than 2 solutions",
        ),
        (
            dict(solutions=(A,), kind="polygon"),
            "solutions: expected a whole number of at least 2, got 1",
        ),
        (dict(solutions=(A, B), degree=1), "degree: expected a whole number of at least 2, got 1"),
        (dict(degree=-1), "degree: expected a whole number of at least 0, got -1"),
        (dict(kind="spline"), "kind: expected one of 'bezier', 'polygon', got 'spline'"),
        (dict(patience=2), "patience: expected validation data to watch"),
        (dict(learning_rate=1e6, optimizer="sgd", epochs=20), "learning_rate: expected a training"),
    ],
)
def test_invalid_curves_raise(options, message, unchecked):
    function = connect if "solutions" in options else train_curve
    with pytest.raises(InputError, match=message) as caught:
        function(
            net(), Gaussian(), table(dtype=torch.float32), **training_options(**QUICK | options)
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightCurve(points(3), "spline"), "kind: expected one of"),
        (lambda: WeightCurve(points(2)[[0, 0]]).subspace(), "curve: expected two ends that differ"),
        (lambda: WeightCurve(points(2) / 0), "points: expected finite numbers"),
        (lambda: WeightCurve(points(3)).point(1.2), r"t: expected numbers in \[0, 1\], got 1.2"),
        (
            lambda: WeightCurve(points(3)).subspace("pca"),
            "basis: expected one of 'ends', 'principal'",
        ),
        (
            lambda: connect(net(), Gaussian(), table(), solutions=3, kind="bezier"),
            "kind: expected 'po",
        ),
        (
            lambda: connect(net(), Gaussian(), table(), solutions=1),
            "solutions: expected a whole num",
        ),
        (
            lambda: connect(net(), Gaussian(), table(), factory=lambda: net(norm=True)),
            "factory: expected modules of the same architecture as the module, got another",
        ),
        (
            lambda: module_with_fresh_weights(
                Network(net(), {"2.weight": torch.eye(8)[:1] > 0}), 0
            ),
            "parameters: expected whole parameters",
        ),
        (
            lambda: fit(net().double(), table(), subspace=subspaces.Curve(rank=1)),
            "rank: expected a whole num",
        ),
        (
            lambda: fit(net().double(), table(), subspace="curve", training=Training(epochs=0)),
            "training: expected epochs above 0 to train the other end of the curve",
        ),
        (
            lambda: fit(Bare(), table(dtype=torch.float32), subspace="curve", training=PLAN),
            "module: expected a reset_parameters method",
        ),
    ],
)
def test_invalid_input_raises(make, message, unchecked):
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)

"""BatchNorm statistics of subspaces: those of a likely point."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from subbayes import InputError, Network, Posterior, fit, load
from subbayes.data.data import Data
from subbayes.data.division import Division
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Categorical
from subbayes.models.fit import build, fit_settings
from subbayes.priors import Normal
from subbayes.subspace import DenseSubspace, RandomSubspace
from subbayes.subspaces.registry import subspace_method
from subbayes.training.configuration import Training
from subbayes.training.pipeline import without_training
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.seeding import fork_rng

SAMPLING = Sampling(draws=4, chains=2, progress=False)
MESSAGE = "subspace: the module's own weights are not in it, so the BatchNorm statistics are re"


def loaded_with(module, weights):
    """A copy of the module with flat weights, and statistics of one pass in training mode."""
    other = copy.deepcopy(module)
    nn.utils.vector_to_parameters(weights, other.parameters())
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.reset_running_stats()
            norm.momentum = None  # the average over batches
    return other.train()


@pytest.fixture(scope="module")
def trained():
    """A module, its data and the recorder of its training."""
    with fork_rng(0):
        x = torch.randn(96, 3)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
        net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        recorder = TrajectoryRecorder()
        for _ in range(12):
            for rows in torch.randperm(96).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            recorder.update(net)
    return net, (x, y), recorder


def evaluated(module, weights, x):
    """A copy of the module with flat weights and their statistics, in evaluation mode."""
    other = loaded_with(module, weights)
    with torch.no_grad():
        other(x)
    return other.eval()


def check_statistics(network, module, x, weights=None):
    """Check the statistics of a network, by default those of its own weights."""
    expected = evaluated(module, network.weights if weights is None else weights, x)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(network.frozen[name], buffer, rtol=1e-5, atol=1e-6)
    if weights is None:
        torch.testing.assert_close(network(network.weights, x), expected(x))


def likely(module, space, data):
    """The centre and the point nearest to the module's weights, the likelier one first."""
    x, y = data
    basis, weights = space.basis().double(), flat(module)
    nearest = torch.linalg.lstsq(basis.T, (weights - space.shift).double()[:, None])[0][:, 0]
    points = []
    for z in (torch.zeros(space.rank).double(), nearest):
        point = (space.shift + z @ basis).float()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(evaluated(module, point, x)(x), y, reduction="sum")
        points.append((float(loss + z.square().sum() / 2), point))
    return [point for _, point in sorted(points, key=lambda pair: pair[0])]


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def moved(net, seed):
    """A copy with other weights."""
    other = copy.deepcopy(net)
    with fork_rng(seed), torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return other


def between(net):
    """A plane whose centre is between a solution and other weights, and a module beside it."""
    beside, far = copy.deepcopy(net), moved(net, 1)
    with torch.no_grad():
        beside[0].weight.add_(0.02)
    middle = (flat(net) + flat(far)) / 2
    return DenseSubspace(middle, (flat(net) - middle)[None]), beside


@pytest.mark.parametrize(
    ("made", "is_centre"),
    [
        (lambda net, recorder: (recorder.pca(2), net), None),
        (lambda net, recorder: (recorder.pca(2), moved(net, 2)), True),
        (lambda net, recorder: between(net), False),
    ],
)
@pytest.mark.parametrize("method", [False, True])
def test_statistics_are_those_of_the_likelier_point(trained, made, is_centre, method):
    net, (x, y), recorder = trained
    space, module = made(net, recorder)
    best, _ = likely(module, space, (x, y))
    assert is_centre is None or torch.equal(best, space.shift) == is_centre
    before, mode = copy.deepcopy(module.state_dict()), module.training
    if method:  # a function
        training = Training(epochs=0, swa_epochs=0)
        model = build_with(lambda _: space, module, (x, y), training)
    else:
        with pytest.warns(UserWarning, match=MESSAGE):
            model = fit(module, (x, y), likelihood="categorical", subspace=space, sampling=SAMPLING)
        assert model.posterior.network is model.network
    check_statistics(model.network, net, x, best)
    assert torch.equal(model.network.weights, space.shift)
    assert module.training == mode
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def build_with(subspace, module, data, training):
    likelihood, method = Categorical(), subspace_method(subspace)
    settings = fit_settings(likelihood, method, Normal(), training, 0)
    start = without_training(Network(module), likelihood, Data.of(data), training)
    return build(start, method, Normal(), settings)


def test_statistics_of_a_curve_are_those_of_its_first_end(trained):
    net, (x, y), _ = trained
    training = Training(epochs=30, swa_epochs=5, learning_rate=0.05, prior_scale=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = fit(
            net, (x, y), likelihood="categorical", subspace="curve", sampling=SAMPLING,
            training=training,
        )  # fmt: skip
    end = model.subspace.weights(torch.tensor([1.0, 0.0]))
    check_statistics(model.network, net, x, end)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(evaluated(net, point, x)(x), y)
            for point in (end, model.subspace.shift)
        ]
    assert losses[0] < losses[1] - 0.1  # the centre is no solution


def test_noise_is_that_of_a_likely_point():
    """Without BatchNorm, where the centre is between a solution and other weights."""
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0]]))
        module.bias.zero_()
    y = module(x)[:, 0].detach() + 0.1 * torch.sin(7 * x[:, 0])
    weights = flat(module)
    space = DenseSubspace(weights / 2, weights[None] / 2)
    model = fit_quietly(module, (x, y), space)
    residuals = y - module(x)[:, 0].detach()
    assert model.likelihood.noise[0] == pytest.approx(float(residuals.square().mean().sqrt()))


def fit_quietly(module, data, space, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(module, data, subspace=space, sampling=SAMPLING, **options)


def test_predictions_with_statistics_of_each_draw(trained, tmp_path):
    net, (x, y), recorder = trained
    model = fit_quietly(net, (x, y), recorder.pca(2), likelihood="categorical")
    new = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    z = torch.from_numpy(model.draws.flat()).float()
    with torch.no_grad():
        expected = torch.stack([evaluated(net, w, x)(new) for w in model.subspace.weights(z)])
    found = model.predict(new, refresh_batchnorm=True).outputs
    torch.testing.assert_close(found, expected.double(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.predict(new).outputs, found, atol=1e-3)
    other = load(model.save(tmp_path / "model"), net)
    torch.testing.assert_close(other.predict(new).outputs, model.predict(new).outputs)
    with pytest.raises(InputError) as caught:
        other.predict(new, refresh_batchnorm=True)
    assert caught.value.argument == "refresh_batchnorm"
    again = other.with_data((x, y)).predict(new, refresh_batchnorm=True).outputs
    torch.testing.assert_close(again, found)
    closed = fit_quietly(
        net, (x, y), "full", likelihood="categorical", inference="laplace-linearised",
        training=Training(epochs=0, swa_epochs=0),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        closed.predict(new, refresh_batchnorm=True)
    assert caught.value.argument == "refresh_batchnorm"


def test_statistics_of_the_rows_of_one_process_are_refused(trained):
    net, (x, y), _ = trained
    network = Network(net)
    some = replace(Data.of((x, y)), division=Division((96, 4)))
    with pytest.raises(InputError) as caught:
        network.refresh_batchnorm(network.weights, some)
    assert caught.value.argument == "data"


def test_statistics_of_the_modules_own_weights_are_kept(trained):
    net, (x, y), _ = trained
    space = RandomSubspace(Network(net).weights, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)  # few draws do not mix
        model = fit(net, (x, y), likelihood="categorical", subspace=space, sampling=SAMPLING)
    assert torch.equal(model.network.frozen["1.running_mean"], net[1].running_mean)


@pytest.mark.parametrize("basis", [1, 4])
def test_a_network_in_the_subspace_keeps_its_statistics(trained, basis):
    """As the end of a curve, whose centre is elsewhere."""
    net, (x, y), _ = trained
    middle = (flat(net) + flat(moved(net, 1))) / 2
    rows = torch.stack([flat(net) - middle, *(flat(moved(net, i)) for i in range(2, 1 + basis))])
    space = DenseSubspace(middle, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = fit(net, (x, y), likelihood="categorical", subspace=space, sampling=SAMPLING)
        Posterior(Network(net), Categorical(), (x, y), space)
    assert torch.equal(model.network.frozen["1.running_mean"], net[1].running_mean)
    assert torch.equal(model.network.weights, middle)


def test_a_posterior_warns(trained):
    net, (x, y), recorder = trained
    space, network = recorder.pca(2), Network(net)
    with pytest.warns(UserWarning, match="BatchNorm statistics are used; pass network.centred_on"):
        Posterior(network, Categorical(), (x, y), space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Posterior(network.centred_on(space.shift, (x, y)), Categorical(), (x, y), space)

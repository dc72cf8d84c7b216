"""Draws of weights that are used more than once, and training runs that end, resume or fail."""

import math
import warnings

import numpy as np
import pytest
import torch
from cases import sparse_options
from sklearn.exceptions import ConvergenceWarning
from torch import nn
from torch.nn import functional

import subbayes
from experiments import sparse_baselines
from subbayes import InputError, sparse
from subbayes.likelihoods import Gaussian, Standardized

DOUBLE = torch.float64


def data(n=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, x[:, 0] + 0.1 * torch.randn(n, generator=generator)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


# --- rows that use a weight more than once -------------------------------------------------------

SHARED = {
    "sequence": (lambda: nn.Linear(2, 2), (3, 2)),
    "conv": (lambda: nn.Conv1d(2, 2, 2, padding=1), (2, 2)),
    "groups": (lambda: nn.Conv1d(4, 2, 2, groups=2), (4, 3)),
}


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize(
    ("posterior", "structure"),
    [
        ("mean-field", "weights"),
        ("mean-field", "units"),
        ("all", "weights"),
        ("dropout", "weights"),
        ("horseshoe", "weights"),
    ],
)
def test_outputs_at_all_positions_share_weights(what, posterior, structure):
    """Compare covariances in training with those of draws of weight vectors."""
    torch.manual_seed(1)
    make, shape = SHARED[what]
    x, n = torch.randn(1, *shape, dtype=DOUBLE), 1500
    made = sparse_baselines.convert(
        nn.Sequential(make(), nn.Flatten()).double(),
        posterior,
        structure=structure,
        inclusion=0.7,
        sd=0.3,
        temperature=0.01,
    )
    made.eval()
    network = sparse.SparseNetwork(made, subbayes.likelihoods.Categorical(made(x).shape[1]))
    naive = network.predict(x, n_draws=n).outputs[:, 0].numpy()
    made.train()
    with torch.no_grad():  # rows of a batch share some random numbers
        drawn = torch.cat([made(x) for _ in range(n)]).numpy()
    expected = np.cov(naive.T)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    off = np.abs(expected / scale)[~np.eye(len(expected), dtype=bool)]
    assert off.max() > 0.2  # positions are correlated
    assert np.abs(np.cov(drawn.T) - expected).max() < 0.2 * scale.max()
    assert np.abs(drawn.mean(0) - naive.mean(0)).max() < 6 * np.sqrt(scale.max() / n)


@pytest.mark.usefixtures("unchecked")
def test_rows_have_independent_draws():
    torch.manual_seed(0)
    made = sparse.convert(nn.Conv1d(2, 3, 2).double(), "all", sd=0.5).train()
    x = torch.randn(1, 2, 4, dtype=DOUBLE).expand(4000, 2, 4)
    with torch.no_grad():
        drawn = made(x)[:, :, 0].numpy()
    together = np.corrcoef(drawn[::2, 0], drawn[1::2, 0])[0, 1]
    assert abs(together) < 5 / math.sqrt(2000)


class Pooled(nn.Module):
    """One weight, used at 25 positions, whose outputs are averaged."""

    def __init__(self, convolution):
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 1, bias=False) if convolution else nn.Linear(1, 1, bias=False)
        self.dims = (2,) if convolution else (1,)

    def forward(self, x):
        return self.layer(x).mean(self.dims)


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("convolution", [False, True])
def test_a_pooled_weight_has_its_exact_posterior(convolution):
    """y_i = w + noise, 50 of them, w standard normal: N(25 / 51, 1 / 51)."""
    x = torch.ones(50, 1, 25) if convolution else torch.ones(50, 25, 1)
    prior = sparse.SpikeSlab(sparse.NormalSlab(1.0), sparse.Bernoulli(0.5))
    result = sparse.fit(
        sparse.convert(Pooled(convolution), "all", prior=prior, sd=0.1),
        Gaussian(1.0),
        (x, torch.full((50,), 0.5)),
        sparse.SparseTraining(
            epochs=1500,
            early_epochs=0,
            kl_epochs=0,
            batch_size=None,
            learning_rates=sparse.LearningRates(weights=1e-2),
        ),
        progress=False,
    )
    layer = result.layers["layer"]
    assert float(layer.mean.detach()) == pytest.approx(25 / 51, abs=0.05)
    assert float(layer.sd.detach()) == pytest.approx(51**-0.5, rel=0.15)


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(3, 2, 2), nn.Conv2d(3, 2, 2)])
@pytest.mark.parametrize("posterior", ["mean-field", "dropout", "horseshoe"])
def test_single_rows_are_accepted(layer, posterior):
    made = sparse_baselines.convert(layer, posterior)
    x = torch.randn(3, *[4] * (layer.weight.ndim - 2))
    torch.testing.assert_close(made.eval()(x), made(x[None])[0])
    assert made.train()(x).shape == made(x[None])[0].shape


# --- the ELBO in custom training loops -----------------------------------------------------------


def test_elbo_does_not_depend_on_the_shape_of_outputs():
    x, y = data()

    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)[:, 0]

    found = [
        float(sparse.elbo(sparse.convert(module).train(), Gaussian(1.0), x, y, 600))
        for module in (net(), Squeezed())
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_elbo_requires_training_mode():
    x, y = data()
    made = sparse.convert(net())
    made[2].eval()
    with pytest.raises(InputError, match="module: .*in evaluation mode: '2'. Call module.train"):
        sparse.elbo(made, Gaussian(1.0), x, y, 60)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda x, y: (x * torch.nan, y), InputError, "inputs: expected finite numbers"),
        (lambda x, y: (x, y * torch.inf), InputError, "y: expected finite numbers"),
        (
            lambda x, y: (x, y[:-1]),
            InputError,
            "inputs: expected between 1 and n = 60 rows, as many",
        ),
    ],
)
def test_elbo_rejects_what_is_not_a_batch(change, error, said):
    x, y = data()
    made = sparse.convert(net()).train()
    with pytest.raises(error, match=said):
        sparse.elbo(made, Gaussian(1.0), *change(x, y), 60)


def test_divergence_uses_the_current_parameters():
    made = sparse.convert(nn.Linear(3, 2)).train()
    made(torch.zeros(1, 3))
    with torch.no_grad():
        made.mean.add_(5.0)
    now = float(sparse.kl(made))
    assert now == float(sparse.kl(made))


def test_layers_of_two_conversions_draw_different_numbers():
    once = sparse.convert(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "all", keep="1", sd=1.0)
    twice = sparse.convert(once, "all", sd=1.0).train()
    with torch.no_grad():
        first, second = (
            layer(torch.zeros(4, 3)) - layer.bias_mean
            for layer in sparse.sparse_layers(twice).values()
        )
    assert not torch.allclose(first, second)


class Named(nn.Module):
    """Inputs and outputs by name."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, a, b):
        return {"logits": self.net(torch.cat([a, b], 1))}


def logits(out):
    return out["logits"]


def test_inputs_and_outputs_may_be_dicts(tmp_path):
    x, y = data()
    named = {"a": x[:, :2], "b": x[:, 2:]}
    plain = sparse.elbo(sparse.convert(net()).train(), Gaussian(1.0), x, y, 600)
    made = sparse.convert(Named()).train()
    found = sparse.elbo(made, Gaussian(1.0), named, y, 600, output=logits)
    assert float(found.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    with pytest.raises(TypeError, match="module: expected one tensor as its output, got dict"):
        sparse.fit(made, Gaussian(1.0), (named, y), sparse.SparseTraining(epochs=2), progress=False)
    settings = {"epochs": 2, "progress": False, "mode": "eager"}
    result = sparse.fit(
        made, Gaussian(1.0), (named, y), output=logits, **sparse_options(**settings)
    )
    theirs = sparse.fit(sparse.convert(net()), Gaussian(1.0), (x, y), **sparse_options(**settings))
    expected = theirs.predict(x, n_draws=3).outputs
    torch.testing.assert_close(result.predict(named, n_draws=3).outputs, expected)
    loaded = subbayes.load(result.save(tmp_path / "saved"), Named(), output=logits)
    torch.testing.assert_close(loaded.predict(named, n_draws=3).outputs, expected)


def test_elbo_weight_multiplies_the_divergence():
    x, y = data()
    made = sparse.convert(net()).train()
    values = []
    for weight in (0.0, 0.5, 1.0):
        made[0].noise.generator.manual_seed(0)
        values.append(float(sparse.elbo(made, Gaussian(1.0), x, y, 60, weight=weight)))
    kl = float(sparse.kl(made))
    assert values[0] - values[1] == pytest.approx(0.5 * kl, rel=1e-5)
    assert values[0] - values[2] == pytest.approx(kl, rel=1e-5)


def test_parameter_groups_hold_every_parameter_once():
    rates = sparse.LearningRates(
        weights=0.1, early_inclusion=0.2, early_covariance=0.3, inclusion_prior=0.4, slab=0.5
    )
    made = sparse.convert(net(), "low-rank")
    rate = {id(p): group["lr"] for group in rates.parameter_groups(made) for p in group["params"]}
    expected = {
        "mean": 0.1,
        "raw_sd": 0.1,
        "bias_mean": 0.1,
        "bias_raw_sd": 0.1,
        "logits.mean": 0.2,
        "logits.factor": 0.3,
        "logits.log_sd": 0.3,
        "inclusion.log_a": 0.4,
        "inclusion.log_b": 0.4,
        "slab.log_shape": 0.5,
        "slab.log_rate": 0.5,
    }
    for name, parameter in made.named_parameters():
        assert rate.pop(id(parameter)) == expected[name.partition(".")[2]]
    assert not rate


# --- modules -------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.b(self.a(self.a(x).tanh()).tanh())


@pytest.mark.parametrize("epochs", [2, 60])  # eager steps, traced ones
def test_layers_called_twice_are_rejected(epochs):
    with pytest.raises(InputError, match="layers that are called once"):
        sparse.fit(
            sparse.convert(Twice()),
            Gaussian(),
            data(),
            sparse.SparseTraining(epochs=epochs, batch_size=30),
            progress=False,
        )


class Cosine(nn.Linear):
    def forward(self, x):
        return functional.linear(functional.normalize(x, dim=-1), self.weight, self.bias)


def test_layers_that_override_forward_are_rejected_unless_kept():
    module = nn.Sequential(Cosine(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"0 \(Cosine\), which override forward. Name them"):
        sparse.convert(module)
    assert list(sparse.sparse_layers(sparse.convert(module, keep="0"))) == ["2"]


def test_hooks_are_kept_on_sparse_layers_and_networks():
    module = net()
    module[2].register_forward_hook(lambda _, __, out: out + 100.0)
    made = sparse.convert(module).eval()
    x = data()[0]
    assert float(made(x).mean().detach()) > 90
    result = sparse.SparseNetwork(made, Gaussian(1.0))
    assert float(result.predict(x, n_draws=2).outputs.mean()) > 90


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sparse.convert(nn.Sequential(nn.LazyLinear(3))), "layers with known sizes, got "),
        (
            lambda: sparse.convert(net(), inclusion="a"),
            "inclusion: expected a number above 0, got 'a'",
        ),
        (lambda: sparse.Bernoulli("a"), "probability: expected a number above 0, got 'a'"),
        (lambda: sparse_baselines.prune(net(), "a"), "density: expected a share above 0 and at"),
        (
            lambda: sparse.fit(sparse.convert(net()), nn.MSELoss(), data()),
            "likelihood: expected a name or a Likelihood",
        ),
    ],
)
def test_wrong_types_are_rejected_in_one_line(make, said):
    with pytest.raises((InputError, TypeError), match=said):
        make()


def test_frozen_layers_stay_frozen():
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    module[:2].requires_grad_(False)
    module[1].eval()
    result = sparse.fit(
        sparse.convert(module), Gaussian(), data(), sparse.SparseTraining(epochs=2), progress=False
    )
    assert torch.equal(result.module[1].running_mean, module[1].running_mean)
    assert not any(p.requires_grad for p in result.module[:2].parameters())
    assert all(p.requires_grad for p in result.module[3].parameters())
    assert result.network.size == 7


# --- runs ----------------------------------------------------------------------------------------


def test_finished_runs_are_loaded_unchanged(tmp_path):
    settings = {
        "epochs": 3,
        "post": "median",
        "post_epochs": 2,
        "batch_size": None,
        "learning_rates": sparse.LearningRates(inclusion=0.5, early_inclusion=0.5),
        "progress": False,
        "checkpoint": tmp_path / "run.pt",
    }
    first, again = (
        sparse.fit(sparse.convert(net()), Gaussian(), data(), **sparse_options(**settings))
        for _ in range(2)
    )
    assert [layer.phase for layer in again.layers.values()] == ["median", "median"]
    assert again.density("sample") == first.density("sample")
    x = data()[0]
    assert torch.equal(again.predict(x, n_draws=3).outputs, first.predict(x, n_draws=3).outputs)


MEDIAN = {"epochs": 2, "early_epochs": 1, "post": "median", "post_epochs": 2, "mode": "eager"}


class Breaking(nn.Linear):
    """A layer whose outputs can become NaN in training."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * (self.factor if self.training else 1.0)


def same_network(one, other):
    """Whether all states, phases and probabilities are the same."""
    pairs = zip(one.layers.values(), other.layers.values(), strict=True)
    return all(
        a.phase == b.phase
        and torch.equal(a.probability(), b.probability())
        and all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))
        for a, b in pairs
    )


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_last_good_network_has_the_phase_of_its_epoch(tmp_path, interrupted):
    last = Breaking(6, 1)
    made = sparse.convert(nn.Sequential(nn.Linear(3, 6), last), inclusion=0.6, keep="1")
    seen = {}

    def fit(callback):
        return sparse.fit(
            made,
            Gaussian(1.0),
            data(),
            checkpoint=tmp_path / "run",
            callback=callback,
            progress=False,
            training=sparse.SparseTraining(**MEDIAN),
        )

    def note(epoch, network):
        seen[epoch] = network
        if epoch == 2:
            Breaking.factor = math.nan
            if interrupted:
                raise KeyboardInterrupt

    try:
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                fit(note)
        with pytest.warns(UserWarning, match="The ELBO became NaN .* in epoch 3"):
            result = fit(note)
    finally:
        Breaking.factor = 1.0
    assert seen[2].layers["0"].phase == "learned"
    assert same_network(result, seen[2])


def test_a_run_that_its_callback_has_stopped_is_the_same_when_repeated(tmp_path):
    settings = {"training": sparse.SparseTraining(**MEDIAN), "progress": False}

    def fit(callback, **options):
        gaussian = Gaussian(1.0)
        return sparse.fit(
            sparse.convert(net()), gaussian, data(), callback=callback, **settings, **options
        )

    found = [fit(lambda epoch, network: epoch >= 2, checkpoint=tmp_path / "run") for _ in range(3)]
    for again in found[1:]:
        assert again.history == found[0].history
        assert same_network(again, found[0])
    continued, whole = fit(None, checkpoint=tmp_path / "run"), fit(None)
    assert continued.history == whole.history
    assert same_network(continued, whole)


def of(**options):
    module = options.pop("module", None)
    return sparse.convert(net() if module is None else module, **options)


@pytest.mark.parametrize(
    "other",
    [
        {"made": lambda: of(temperature=0.3)},
        {"made": lambda: of(sd=0.1)},
        {"made": lambda: of(prior=sparse.SpikeSlab(inclusion=sparse.Bernoulli(0.3)))},
        {"made": lambda: of(module=nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)))},
        {"rows": (data()[0] + 1e-3, data()[1])},
        {"likelihood": Gaussian(0.3)},
    ],
)
def test_checkpoints_of_other_runs_are_rejected(tmp_path, other):
    settings = {"epochs": 2, "progress": False, "checkpoint": tmp_path / "run.pt"}

    def fit(made=of, likelihood=Gaussian(0.5), rows=None):
        return sparse.fit(
            made(), likelihood, data() if rows is None else rows, **sparse_options(**settings)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit()
        with pytest.raises(InputError, match="checkpoint: expected a checkpoint of a run with"):
            fit(**other)
        fit()


def test_checkpoints_of_other_code_are_rejected(tmp_path):
    def made(activation):
        class Coded(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(net()[::2])

            def forward(self, x):
                outputs = self.layers[1](activation(self.layers[0](x)))
                return outputs, -outputs

        return sparse.convert(Coded())

    def fit(activation=torch.tanh, part=0):
        settings = {"epochs": 2, "progress": False, "checkpoint": tmp_path / "run"}
        likelihood = Gaussian(0.5)
        options = sparse_options(**settings) | {"output": lambda pair: pair[part]}
        return sparse.fit(made(activation), likelihood, data(), **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit()
        for other in ({"activation": torch.relu}, {"part": 1}):
            with pytest.raises(InputError) as caught:
                fit(**other)
            assert caught.value.argument == "checkpoint"
        fit()


@pytest.mark.parametrize("likelihood", [Gaussian(), Standardized(Gaussian(), (0.0,), (10.0,))])
def test_noise_of_an_unfinished_training_is_warned_of(likelihood):
    """It is far from the one of least squares."""
    x, y = data(200)
    y = 10 * y
    right = float((y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).std())
    torch.manual_seed(0)
    module = sparse.convert(nn.Linear(3, 1))
    with pytest.warns(ConvergenceWarning, match="learned parameters, such as the noise"):
        found = sparse.fit(
            module, likelihood, (x, y), sparse.SparseTraining(epochs=30), progress=False
        )
    assert float(found.likelihood.variance(torch.zeros(1, 1)).sqrt()) > 1.5 * right


def test_noise_of_a_long_training_is_not_warned_of(recwarn):
    x, y = data(200)
    torch.manual_seed(0)
    module = sparse.convert(nn.Linear(3, 1))
    found = sparse.fit(
        module, Gaussian(), (x, y), sparse.SparseTraining(epochs=250), progress=False
    )
    right = float((y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).std())
    assert float(found.likelihood.variance(torch.zeros(1, 1)).sqrt()) == pytest.approx(
        right, rel=0.1
    )
    assert not [w for w in recwarn if issubclass(w.category, ConvergenceWarning)]

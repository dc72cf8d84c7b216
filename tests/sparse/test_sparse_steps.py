"""Traced and compiled steps of sparse training equal eager steps."""

import random
import warnings

import numpy as np
import pytest
import torch
from cases import sparse_options
from torch import nn

from subbayes import sparse
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.sparse import steps
from subbayes.sparse.layers import SparseLayer
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # tracing annotation checks is slow


@pytest.fixture
def traced_at_once(monkeypatch):
    monkeypatch.setattr(steps, "_MIN_STEPS", 1)
    monkeypatch.setattr(steps, "_COMPILE_SECONDS", 0.0)


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *more, nn.Linear(8, 3))


def rows(n: int = 50):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(n, 3, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def fitted(mode, module=None, likelihood=None, data=None, **options):
    settings = {"epochs": 4, "early_epochs": 2, "batch_size": 20, "progress": False} | options
    convert = {
        key: settings.pop(key) for key in ("posterior", "structure", "estimator") if key in settings
    }
    made = sparse.convert(network() if module is None else module, **convert)
    return sparse.fit(
        made,
        likelihood or Categorical(),
        rows() if data is None else data,
        **sparse_options(**settings, mode=mode),
    )


def check_same(one, other, tolerance=2e-4):
    for (name, a), (_, b) in zip(
        one.module.state_dict().items(), other.module.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)
    for name, values in one.history.items():
        np.testing.assert_allclose(values, other.history[name], rtol=tolerance)


@pytest.mark.few(1)
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize(
    ("posterior", "structure", "estimator"),
    [
        ("mean-field", "units", "relaxed"),
        ("mvn", "weights", "local"),
        ("low-rank", "weights", "relaxed"),
        ("mean-field", "weights", "local"),
        ("mean-field", "weights", "relaxed"),
        ("mean-field", "units", "local"),
        ("mvn", "weights", "relaxed"),
        ("low-rank", "weights", "local"),
    ],
)
def test_traced_steps_equal_eager_steps(posterior, structure, estimator):
    options = {"posterior": posterior, "structure": structure, "estimator": estimator}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of failed tracing
        warnings.filterwarnings("ignore", "The median model excludes")
        module, before = network(), torch.get_rng_state()
        traced = fitted("trace", module, **options)
    assert torch.equal(torch.get_rng_state(), before)
    check_same(traced, fitted("eager", **options))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("post", ["median", "fixed"])
def test_traced_steps_follow_the_phases(post):
    options = {"post": post, "post_epochs": 2}
    check_same(fitted("trace", **options), fitted("eager", **options))


@pytest.mark.usefixtures("traced_at_once")
def test_traced_steps_of_convolutions_and_of_learned_noise():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 1)
    )
    x = torch.randn(40, 1, 6, generator=torch.Generator().manual_seed(2))
    options = {"module": module, "likelihood": Gaussian(), "data": (x, x.sum((1, 2)))}
    check_same(fitted("trace", **options), fitted("eager", **options))


@pytest.mark.few(1)
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize(("posterior", "mode"), [("mean-field", "eager"), ("all", "trace")])
def test_channels_last_has_no_effect(posterior, mode):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(40, 2, 4, 4, generator=generator), torch.arange(40) % 3
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
        module.to(memory_format=memory_format)
        found.append(fitted(mode, module, data=(x, y), posterior=posterior))
    assert not next(found[1].module.parameters()).is_contiguous()
    check_same(*found)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("posterior", ["mean-field", "low-rank"])
def test_compiled_steps_equal_eager_steps(posterior):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of failed tracing; torch has other warnings
        warnings.filterwarnings("ignore", "The median model excludes")
        compiled = fitted("compile", posterior=posterior)
    check_same(compiled, fitted("eager", posterior=posterior))


def wide_at_optimum() -> nn.Module:
    """A wide network in which the gradients of the inclusion prior cancel but for rounding."""
    torch.manual_seed(0)
    made = sparse.convert(nn.Linear(800, 100))
    layer = next(own for own in made.modules() if isinstance(own, SparseLayer))
    with torch.no_grad():
        layer.logits.mean.uniform_(-14.0, -2.0)
        mean = torch.sigmoid(layer.logits.mean.double()).mean()
        layer.inclusion.log_b.copy_(layer.inclusion.log_a + torch.logit(mean).neg())
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("traced_at_once")
def test_compiled_steps_start_at_an_optimum_of_the_prior():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 800, generator=generator), torch.arange(200) % 100
    found = {}
    for mode in ("compile", "eager"):
        options = sparse_options(
            epochs=2, early_epochs=2, batch_size=100, progress=False, mode=mode, seed=0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of failed tracing
            warnings.filterwarnings("ignore", "The median model excludes")
            found[mode] = sparse.fit(wide_at_optimum(), Categorical(100), (x, y), **options)
    check_same(found["compile"], found["eager"])


def test_differences_far_below_the_largest_gradient_are_rounding():
    made = steps.Steps(nn.Linear(1, 1), {}, "trace", lambda rows: 100.0)
    loss, gradients = torch.tensor(7.0), (torch.tensor([0.5, 0.1]), torch.tensor(1e-9))
    made.verify(((loss,), gradients), ((loss,), (gradients[0], torch.tensor(2e-6))))
    for wrong in ((gradients[0], torch.tensor(1e-3)), (gradients[0] * 1.01, gradients[1])):
        with pytest.raises(ValueError, match="result differs"):
            made.verify(((loss,), gradients), ((loss,), wrong))


@pytest.mark.few(1)
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("own", [nn.Dropout(0.3), nn.BatchNorm1d(8)])
def test_modules_with_randomness_or_batch_statistics_are_evaluated_eagerly(own):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = fitted("trace", network(own))
    eager = fitted("eager", network(own))
    for a, b in zip(
        traced.module.state_dict().values(), eager.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("traced_at_once")
class Peeking(nn.Module):
    """A network that changes the rows or its own state in Python."""

    def __init__(self, what):
        super().__init__()
        self.net, self.what, self.held = network(), what, {"calls": 0}

    def forward(self, x):
        out = self.net(x)
        if self.what == "numpy":
            return out * torch.from_numpy(np.sin(3 * x[:, :1].numpy()))
        if self.what == "list":
            return out * torch.tensor([[1.0 + (v > 0)] for v in x[:, 0].tolist()])
        if self.what == "rows":
            found, above = out.clone(), torch.where(x[:, 0] > 0)[0]
            found[above] = 2 * found[above]
            return found
        if not self.training:
            return out
        if self.what == "random":
            return out * (2.0 if random.random() < 0.5 else 1.0)
        if self.what == "numpy random":
            return out * (1 + np.random.random())  # noqa: NPY002
        self.held["calls"] += 1
        return out * (1 + self.held["calls"] % 3)


@pytest.mark.few(1)
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("numpy", "its result differs on other data"),
        ("list", "its result differs on other data"),
        ("rows", "replaying the training step failed"),
        ("random", None),
        ("numpy random", None),
        ("held", "its result differs"),
    ],
)
def test_untraceable_modules_are_evaluated_eagerly(what, said):
    found = []
    for mode in ("eager", "trace"):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found.append(fitted(mode, Peeking(what), batch_size=17))
        heard = [str(w.message) for w in heard if "failed (" in str(w.message)]
        assert [mode == "trace"] * len(heard) == [True] * len(heard)
    assert all(said in line for line in heard) if said else not heard
    assert bool(heard) == (said is not None)
    if what != "held":  # counted as well
        check_same(*found)


@pytest.mark.usefixtures("traced_at_once")
def test_modules_with_hooks_are_evaluated_eagerly():
    calls, module = {"eager": 0, "trace": 0}, network()

    def count(*_):
        calls[mode] += 1

    module[0].register_forward_hook(count)
    for mode in calls:
        fitted(mode, module)
    assert calls["trace"] == calls["eager"] > 12


def test_a_traced_run_resumes_bit_for_bit(tmp_path):
    whole = fitted("trace")

    def stop(epoch, _):
        if epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted("trace", checkpoint=tmp_path / "run.pt", callback=stop)
    again = fitted("trace", checkpoint=tmp_path / "run.pt")
    assert whole.history == again.history
    for a, b in zip(
        whole.module.state_dict().values(), again.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_training_resumes_in_its_mode(tmp_path):
    """Other modes round differently, so that the result would differ from an uninterrupted run."""
    fitted("eager", checkpoint=tmp_path / "run.pt")
    with pytest.raises(InputError, match="a run with these settings"):
        fitted("trace", checkpoint=tmp_path / "run.pt")


def test_few_steps_are_not_worth_tracing(monkeypatch):
    monkeypatch.setattr(steps.Steps, "_trace", None)  # fails if called
    fitted("trace")


@pytest.mark.few(1)
@pytest.mark.usefixtures("traced_at_once")
@pytest.mark.parametrize("rate", [1e2, 1e10, 1e30])
def test_traced_steps_detect_nan(rate):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = fitted("trace", learning_rates=sparse.LearningRates(weights=rate), epochs=6)
    assert rate < 1e10 or any("The ELBO became NaN" in str(w.message) for w in heard)
    for name, parameter in result.module.named_parameters():
        assert bool(torch.isfinite(parameter).all()), name

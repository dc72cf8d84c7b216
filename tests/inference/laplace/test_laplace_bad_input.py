"""Error messages of linearised Laplace, optimal subspaces and subnetworks."""

import re
import warnings
from functools import partial

import pytest
import torch
from jacobians import problem
from torch import nn
from torch.utils.data import DataLoader

import subbayes
from experiments.subspace_errors import compare_subspaces
from subbayes import InputError, InputTypeError, Network, subspaces
from subbayes.cli import run
from subbayes.curvature.precision_factory import precision
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.subspace import DenseSubspace
from subbayes.subspaces.optimal import optimal
from subbayes.subspaces.subnetwork import from_mask, subnetwork

pytestmark = pytest.mark.usefixtures("unchecked")
HUGE = 2_000_000  # rows, or weights: no machine holds their square


class Normalised(nn.Module):
    """A layer that uses batch statistics in evaluation mode too."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False) if own else None

    def forward(self, x):
        h = self.first(x)
        h = (
            nn.functional.batch_norm(h, None, None, training=True)
            if self.norm is None
            else (self.norm(h))
        )
        return self.last(h)


def everywhere(network, likelihood, data, new):
    """The three entry points."""
    yield lambda: linearised_laplace(network, likelihood, data)
    yield lambda: optimal(network, likelihood, data, inputs=new, rank=2)
    yield lambda: subnetwork(network, likelihood, data, inputs=new, rank=2)


def refused(call, message, error=InputError):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("own", [True, False])
def test_normalisation_by_the_rows_of_a_batch(own):
    _, likelihood, data, new = problem(0)
    for call in everywhere(Network(Normalised(own).double()), likelihood, data, new):
        refused(call, "module: expected a forward that takes any number of rows .* one row")


def in_training_mode():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        .double()
        .train()
    )


MODE = "module: BatchNorm1d and Dropout in training mode, evaluated in evaluation mode"


def test_a_module_in_training_mode_is_read_in_evaluation_mode():
    _, likelihood, data, new = problem(0)
    module = in_training_mode()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = []
    for training in (True, False):
        network = Network(module.train(training))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            psi = precision(network, likelihood, data)
            assert len(said) == training
            space = optimal(network, likelihood, data, inputs=new, rank=2)
            assert len(said) == 2 * training
            predictive = linearised_laplace(network, likelihood, data, space).predict(new)
            assert len(said) == 3 * training
            chosen = subnetwork(network, likelihood, data, inputs=new, rank=2)
            judged = compare_subspaces(psi, {"optimal": space, "chosen": chosen}, new)
            assert len(said) == 4 * training
        assert all(str(one.message).startswith(MODE) for one in said)
        found.append(
            [
                space.basis(),
                chosen.indices,
                torch.from_numpy(predictive.std),
                torch.tensor([one.relative_error for one in judged]),
            ]
        )
        assert all(part.training == training for part in module.modules())
        assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(map(torch.equal, *found))


def test_no_warning_about_an_irrelevant_training_mode():
    _, likelihood, data, new = problem(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.0), nn.Linear(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in everywhere(Network(module.double().train()), likelihood, data, new):
            call()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*draws?|.*R-hat|rank: lowered|training: learned"
            )
            subbayes.fit(
                in_training_mode(),
                data,
                subspace=subspaces.Optimal(rank=2, inputs=new),
                inference="laplace-linearised",
                training=subbayes.Training(epochs=2, swa_epochs=2, prior_scale=1.0),
                sampling=Sampling(draws=10, chains=2, progress=False),
            )


def test_fit_accepts_a_module_in_training_mode():
    _, _, data, _ = problem(0)
    module = in_training_mode()
    space = from_mask(Network(module), torch.arange(3))
    with pytest.warns(UserWarning, match=MODE):
        subbayes.fit(
            module,
            data,
            subspace=space,
            inference="laplace-linearised",
            sampling=Sampling(draws=10, chains=2, progress=False),
        )
    assert module.training
    assert Network(module).to("cpu", torch.float32).in_training == ("BatchNorm1d", "Dropout")


def test_nan_weights_are_rejected():
    net, likelihood, data, new = problem(0)
    for call in everywhere(net.with_weights(net.weights * torch.nan), likelihood, data, new):
        refused(call, "module: expected finite outputs, got NaN. Train it again")


def test_a_module_for_a_network_and_a_name_for_a_likelihood_or_subspace():
    net, likelihood, data, new = problem(0)
    for call in everywhere(nn.Linear(3, 1), likelihood, data, new):
        refused(call, r"network: expected a Network, got Linear. Wrap the module", InputTypeError)
    refused(
        lambda: from_mask(nn.Linear(3, 1), torch.tensor([0])),
        "network: expected a Network",
        InputTypeError,
    )
    for call in everywhere(net, "gaussian", data, new):
        refused(call, "likelihood: expected all parameters learned or given, got Gaussian")
    for call in everywhere(net, "gausian", data, new):
        refused(call, "likelihood: expected one of .* Did you mean 'gaussian'")
    for call in everywhere(net, 0.1, data, new):
        refused(call, "likelihood: expected a name or a Likelihood, got float", InputTypeError)
    refused(
        lambda: linearised_laplace(net, likelihood, data, "optimal"),
        "subspace: expected a Subspace or None, got str",
        InputTypeError,
    )


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "large", None])
def test_prior_precisions(value):
    net, likelihood, data, new = problem(0)
    space, posterior = from_mask(net, torch.arange(3)), linearised_laplace(net, likelihood, data)
    for form in ("exact", "dual", "primal", "diagonal", "low-rank", "kfac"):
        options = {"rank": 3} if form == "low-rank" else {}
        refused(
            lambda f=form, o=options: linearised_laplace(
                net, likelihood, data, covariance=f, prior_precision=value, **o
            ),
            "prior_precision: expected a (finite )?number above 0, got",
        )
    for call in (
        lambda: linearised_laplace(net, likelihood, data, space, prior_precision=value),
        lambda: optimal(net, likelihood, data, inputs=new, rank=2, prior_precision=value),
        lambda: subnetwork(net, likelihood, data, rank=2, prior_precision=value),
        lambda: posterior.with_prior_precision(value),
        *[lambda: subbayes.fit(net.module_with(), data, subspace="optimal", prior=value)]
        * (value is not None),  # the default
    ):
        refused(
            call,
            r"prior(_precision)?: expected a (finite )?number above 0"
            r"(, a Normal or 'evidence')?, got",
        )


def test_options_that_a_form_does_not_have():
    net, likelihood, data, new = problem(0)
    space = from_mask(net, torch.arange(3))
    for form in ("exact", "diagonal"):
        refused(
            lambda f=form: linearised_laplace(net, likelihood, data, covariance=f, rank=3),
            f"rank: expected an option of '{form}', which has none, got one. Leave it out",
        )
    refused(
        lambda: linearised_laplace(net, likelihood, data, covariance="kfac", rank=3),
        "rank: expected an option of 'kfac': mc_samples, seed, got another",
    )
    refused(
        lambda: optimal(net, likelihood, data, covariance="low-rank", tol=1e-3),
        "tol: expected an option of 'low-rank': rank, tolerance, iterations, rounds, seed",
    )
    refused(
        lambda: linearised_laplace(net, likelihood, data, space, rank=3),
        "rank: expected an option of the posterior in a subspace, which has none",
    )
    refused(
        lambda: linearised_laplace(net, likelihood, data, space, covariance="full"),
        "covariance: expected one of 'exact', 'dual'",
    )


def test_oversized_matrices_are_rejected_before_computing():
    small, likelihood, data, _ = problem(0)
    x = torch.zeros(HUGE, 3).double()
    posterior = linearised_laplace(small, likelihood, data)
    for call in (
        lambda: posterior.covariance(x),
        lambda: posterior.predict(x, joint=True),
        lambda: posterior.function_samples(x),
        lambda: optimal(small, likelihood, data, inputs=x, rank=2),
    ):
        refused(call, f"inputs: expected the covariance of {HUGE} outputs to fit into .* free mem")
    wide = Network(nn.Linear(HUGE, 1))
    few = torch.zeros(2, HUGE), torch.zeros(2)
    refused(
        lambda: linearised_laplace(wide, likelihood, few, from_mask(wide, torch.arange(HUGE))),
        f"subspace: expected the {HUGE} x {HUGE} covariance of its coordinates to fit",
    )
    refused(
        lambda: linearised_laplace(wide, likelihood, few, covariance="primal"),
        r"covariance: expected one that fits into .*, got the primal form with 2000001 "
        r"weights, .* GiB. The dual form with 2 rows \(N C\) fits",
    )
    refused(
        lambda: linearised_laplace(small, likelihood, (x, x[:, 0]), covariance="dual"),
        rf"got the dual form with {HUGE} rows \(N C\), .* GiB. The primal form with 31 weights",
    )


@pytest.fixture
def free(monkeypatch, tmp_path):
    """A machine with little free memory, on which training fails the test."""

    def set_to(size):
        (tmp_path / "meminfo").write_text(f"MemAvailable: {size} kB")
        monkeypatch.setattr("subbayes.utils.memory._PAGES", tmp_path / "meminfo")
        monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)

    return set_to


def test_oversized_matrices_are_rejected_before_training(free):
    x, module = torch.zeros(200, 3), nn.Linear(3, 2)
    wide = nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 2))
    fit = partial(subbayes.fit, data=(x, torch.arange(200) % 2), likelihood="categorical")
    free(1000)
    refused(
        lambda: fit(wide, subspace="optimal"),
        r"covariance: expected one that fits into 0.8 MiB, got the dual form with 400 rows "
        r"\(N C\), 3.7 MiB. Use 'sampled', 'kfac', 'low-rank' or 'diagonal', .* or at most 92 obs",
    )
    refused(
        lambda: fit(module, subspace=subspaces.Optimal(covariance="dual")),
        r"covariance: .* got the dual form .* The primal form with 8 weights fits: 0.0 MiB",
    )
    refused(
        lambda: fit(module, subspace=subspaces.Optimal(inputs=x)),
        "inputs: expected the covariance of 400 outputs to fit into 1.0 MiB of free memory, "
        "got about 3.7 MiB. Pass fewer inputs",
    )
    refused(
        lambda: fit(wide, subspace=subspaces.Subnetwork(rank=300)),
        "rank: expected three matrices of 1200 candidates squared to fit into 1.0 MiB",
    )
    for space in ("full", DenseSubspace(torch.zeros(1202), torch.eye(1202))):
        refused(
            lambda s=space: fit(wide, subspace=s, inference="laplace-linearised"),
            "subspace: expected the 1202 x 1202 covariance of its coordinates for "
            "'laplace-linearised' to fit into 1.0 MiB of free memory, got about 44.1 MiB",
        )


def test_inapplicable_options_are_rejected_before_training(free):
    fit = partial(subbayes.fit, nn.Linear(3, 1), (torch.zeros(20, 3), torch.zeros(20)))
    free(10**9)
    refused(lambda: subspaces.Optimal(covariance="full"), "covariance: expected one of 'exa")
    for method in (subspaces.Optimal, subspaces.Subnetwork):
        refused(
            lambda m=method: fit(subspace=m(inputs=torch.zeros(4, 2))),
            "inputs: expected what the module takes, got",
        )


def test_the_command_line_names_its_own_options(free, tmp_path, capsys):
    rows = "\n".join(f"{i % 7},{i}.5" for i in range(200))
    (tmp_path / "table.csv").write_text(f"x,y\n{rows}\n")
    free(1000)
    assert (
        run(
            [
                "fit",
                str(tmp_path / "table.csv"),
                "--target",
                "y",
                "--out",
                str(tmp_path / "m"),
                "--subspace",
                "optimal",
                "--hidden",
                "300",
            ]
        )
        == 2
    )
    assert re.search(
        r"--covariance: expected one that fits into 0.8 MiB, got the dual form with "
        r"400 rows .* Use 'sampled', 'kfac'",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("covariance", ["kfac", "low-rank", "diagonal", "primal"])
def test_fit_chooses_the_subspace_by_the_given_covariance(covariance):
    net, _, data, new = problem(0)
    model = subbayes.fit(
        net.module_with(),
        data,
        subspace=subspaces.Optimal(rank=3, inputs=new, covariance=covariance),
        prior=0.5,
        inference="laplace-linearised",
        training=subbayes.Training(epochs=2, swa_epochs=2),
        sampling=Sampling(draws=10, chains=2, progress=False),
    )
    expected = optimal(
        model.network,
        model.likelihood,
        data,
        inputs=new,
        rank=3,
        covariance=covariance,
        prior_precision=4.0,
    )
    assert torch.equal(model.subspace.basis(), expected.basis())


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 2).double(),
        torch.zeros(4).double(),
        torch.zeros(4, 3),
        {"z": torch.zeros(4, 3).double()},
    ],
)
def test_inputs_of_another_shape(bad):
    net, likelihood, data, new = problem(0)
    posterior = linearised_laplace(net, likelihood, data)
    later = DataLoader([new, bad], batch_size=None)
    for inputs in (bad, later):
        for call in (
            posterior.predict,
            posterior.covariance,
            posterior.function_samples,
            lambda X: optimal(net, likelihood, data, inputs=X, rank=2),
            lambda X: subnetwork(net, likelihood, data, inputs=X, rank=2),
            lambda X: compare_subspaces(
                posterior.precision, {"masked": from_mask(net, torch.arange(3))}, X
            ),
        ):
            refused(
                lambda c=call, X=inputs: c(X),
                r"inputs: expected (what the module takes|the arguments of forward\(x\)), got",
            )
    pairs = DataLoader([(new, new[:, 0]), (bad, torch.zeros(4).double())], batch_size=None)
    for call in everywhere(net, likelihood, pairs, new):
        refused(
            call, r"inputs: expected (what the module takes|the arguments of forward\(x\)), got"
        )


@pytest.mark.parametrize(
    ("form", "seed"),
    [
        *((form, seed) for form in ("dual", "primal") for seed in range(8)),
        *((form, seed) for form in ("kfac", "diagonal", "low-rank") for seed in range(2)),
    ],
)
def test_duplicate_inputs_add_no_rank(seed, form):
    """Rounding errors of a difference of large covariances do not count as rank."""
    net, likelihood, data, new = problem(seed, n=60)
    distinct = 1 + seed % 4
    with pytest.warns(UserWarning, match=f"rank: lowered from 12 to {distinct}, the rank of the"):
        space = optimal(
            net,
            likelihood,
            data,
            inputs=new[:distinct].repeat(5, 1),
            rank=12,
            covariance=form,
            prior_precision=0.01,
        )
    assert space.rank == distinct
    assert bool(torch.isfinite(space.basis()).all())


@pytest.mark.parametrize("inference", ["laplace-linearised", "elliptical-slice"])
def test_fit_continues_with_a_lower_rank(inference):
    net, _, data, new = problem(0)
    with pytest.warns(
        UserWarning,
        match="rank: lowered from 20 to 3, the rank of the Jacobian at "
        "these 12 inputs; pass more or other inputs for more",
    ):
        model = subbayes.fit(
            net.module_with(),
            data,
            subspace=subspaces.Optimal(rank=20, inputs=new[:3].repeat(4, 1)),
            inference=inference,
            training=subbayes.Training(epochs=2, swa_epochs=2),
            sampling=Sampling(draws=10, chains=2, progress=False),
        )
    assert model.subspace.rank == model.draws.z.shape[-1] == 3
    assert bool((model.predict(new).std > 0).all())


def test_duplicate_training_rows_count_separately():
    net, likelihood, (x, y), new = problem(0)
    often = x.repeat(4, 1), y.repeat(4)
    wider = subbayes.likelihoods.Gaussian(
        0.3 / 2
    )  # four rows of one noise are one row of half of it
    for form in ("dual", "primal", "diagonal", "kfac"):
        one, other = (
            precision(net, noise, data, form).covariance(new)
            for noise, data in ((likelihood, often), (wider, (x, y)))
        )
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_outputs_that_depend_on_no_weight():
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    nn.init.constant_(module[0].bias, -100.0)
    _, likelihood, data, new = problem(0)
    refused(
        lambda: optimal(Network(module, "0.*"), likelihood, data, inputs=new, rank=2),
        "inputs: expected some at which the outputs depend on the weights, got 8 at which",
    )


def test_jitter_is_reported_and_limited():
    net, likelihood, data, new = problem(0)
    same = data[0][[0] * 6], data[1][[0] * 6]
    space = from_mask(net, torch.arange(5))
    twice = DenseSubspace(net.weights, torch.ones(3, net.size).double())
    jitter = "not positive definite; added jitter .* to the diagonal"
    for call in (
        lambda: linearised_laplace(net, likelihood, same, prior_precision=1e-30),
        lambda: linearised_laplace(
            net, likelihood, same, covariance="primal", prior_precision=1e-30
        ),
        lambda: linearised_laplace(net, likelihood, same, space, prior_precision=1e-30),
        lambda: linearised_laplace(net, likelihood, same, twice),
    ):
        with pytest.warns(UserWarning, match=jitter):
            call()
    for call in (
        lambda: compare_subspaces(
            linearised_laplace(net, likelihood, data).precision, {"twice": twice}, new
        ),
        lambda: subbayes.fit(
            net.module_with(),
            same,
            subspace=twice,
            likelihood=likelihood,
            prior=1e12,
            inference="laplace-linearised",
            sampling=Sampling(draws=10, chains=2, progress=False),
        ),
    ):
        with pytest.warns(UserWarning, match=f"subspace: {jitter}"):
            call()
    nothing = DenseSubspace(net.weights, torch.zeros(3, net.size).double())
    refused(
        lambda: linearised_laplace(net, likelihood, same, nothing),
        "subspace: expected a positive definite matrix, got smallest eigenvalue 0",
    )
    low = linearised_laplace(
        net, likelihood, same, covariance="low-rank", rank=3, prior_precision=1e-30
    )
    refused(lambda: low.predict(new), "prior_precision: expected one for which conjugate gradients")


@pytest.mark.filterwarnings("ignore:prior_precision. not positive definite")
def test_the_exact_distance_of_an_indefinite_precision():
    net, likelihood, (x, y), _ = problem(0)
    refused(
        lambda: subnetwork(
            net,
            likelihood,
            (x[[0] * 6], y[[0] * 6]),
            rank=3,
            by="wasserstein",
            prior_precision=1e-140,
        ),
        "prior_precision: expected a positive definite precision of each subnetwork",
    )

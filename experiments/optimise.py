"""Bayesian optimisation in batches: networks beside a GP and an ensemble, with qLogEI of BoTorch.

Each method starts from the same 2 d + 2 Sobol points (at least 10) of a seed and has a budget of
evaluations in batches of 4, maximises qLogEI with the same settings, and refits after each batch.
The regret is the gap between the optimum and the best value so far.

- *linearised*: `BoTorchModel` of linearised Laplace of all weights of a network, on the normal
  quantiles of the ranks of the values.
- *ensemble*: `BoTorchModel` of a deep ensemble of 5 networks of the same kind, on the same
  quantiles.
- *GP*: `SingleTaskGP` of BoTorch with its defaults.
- *random*: uniform points.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import subbayes
from experiments.markdown import add_recorded_option, add_write_option, markdown_table, publish
from experiments.store import Record, Store, key_of, versions
from subbayes import Sampling, Training
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.likelihoods import Gaussian

__all__ = ["METHODS", "add_options", "functions", "markdown", "run"]

Say = Callable[..., None]
BATCH, RESTARTS, RAW, DRAWS = 4, 4, 128, 128
HIDDEN, EPOCHS, RATE, NOISE, PRIOR, MEMBERS = (64,), 300, 0.02, 0.03, 1.0, 5
SETTINGS = {
    "batch": BATCH,
    "restarts": RESTARTS,
    "raw": RAW,
    "draws": DRAWS,
    "hidden": HIDDEN,
    "epochs": EPOCHS,
    "rate": RATE,
    "noise": NOISE,
    "prior": PRIOR,
    "members": MEMBERS,
    "values": "normal scores",
}


# --- functions ------------------------------------------------------------------------------------


def _steps(x: Tensor) -> Tensor:
    """Two bumps on plateaus, with jumps: the optimum is 0 at (0.7, 0.2), in the unit square."""
    bowl = (x[..., 0] - 0.7).square() + (x[..., 1] - 0.2).square()
    return -bowl - 0.5 * (x[..., 0] < 0.5).to(x) - 0.25 * (3 * x[..., 1]).floor()


def functions() -> dict[str, tuple[int, int, float, Callable[[Tensor], Tensor]]]:
    """Dimension, budget, optimum and function to maximise on the unit cube, by name."""
    from botorch.test_functions.synthetic import Ackley, Branin, Hartmann, Levy, Rosenbrock

    def of(problem: Any) -> Callable[[Tensor], Tensor]:
        low, high = problem.bounds.double()
        return lambda x: -problem(low + (high - low) * x)

    problems = {
        "Branin": (Branin(), 40),
        "Hartmann 3": (Hartmann(3), 40),
        "Hartmann 6": (Hartmann(6), 60),
        "Ackley 5": (Ackley(5), 60),
        "Ackley 10": (Ackley(10), 80),
        "Levy 5": (Levy(5), 60),
        "Rosenbrock 5": (Rosenbrock(5), 60),
    }
    found = {
        name: (problem.dim, budget, -problem.optimal_value, of(problem.double()))
        for name, (problem, budget) in problems.items()
    }
    return found | {"steps": (2, 40, 0.0, _steps)}


# --- methods --------------------------------------------------------------------------------------


class _Scaled(torch.nn.Module):
    """A network on the cube from -1 to 1."""

    def __init__(self, n_inputs: int, seed: int) -> None:
        super().__init__()
        self.inner = subbayes.MLP(n_inputs, HIDDEN, 1, "gelu", seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(2 * x - 1)


def linearised(x: Tensor, y: Tensor, seed: int) -> Any:
    """Linearised Laplace of all weights."""
    from subbayes.botorch import BoTorchModel

    model = subbayes.fit(
        _Scaled(x.shape[1], seed).double(),
        (x, y),
        likelihood=Gaussian(noise=NOISE),
        subspace="full",
        prior=PRIOR,
        inference=LinearisedLaplace(gauss_newton_step=True),
        training=_training(),
        sampling=Sampling(draws=DRAWS, chains=1, seed=seed, progress=False),
    )
    return BoTorchModel(model, n_draws=DRAWS)


def _training() -> Training:
    return Training(epochs=EPOCHS, learning_rate=RATE, prior_scale=0.5, swa_epochs=0)


def ensemble(x: Tensor, y: Tensor, seed: int) -> Any:
    """A deep ensemble."""
    from subbayes.baselines.deep_ensemble import deep_ensemble
    from subbayes.botorch import BoTorchModel

    model = deep_ensemble(
        _Scaled(x.shape[1], seed).double(),
        Gaussian(noise=NOISE),
        (x, y),
        _training(),
        members=MEMBERS,
        seed=seed,
        progress=False,
    )
    return BoTorchModel(model, x[:3])


def gp(x: Tensor, y: Tensor, seed: int) -> Any:
    """A Gaussian process with the defaults of BoTorch."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(x, y[:, None])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


METHODS: dict[str, Callable[[Tensor, Tensor, int], Any] | None] = {
    "linearised": linearised,
    "ensemble": ensemble,
    "GP": gp,
    "random": None,
}
"""What fits a model of BoTorch to points and values; None for random points."""


def _normal_scores(y: Tensor) -> Tensor:
    """Normal quantiles of the ranks, which are the same for any scale of the values."""
    ranks = y.argsort().argsort().double()
    return torch.special.ndtri((ranks + 0.5) / len(y))


def optimise(method: str, name: str, seed: int) -> Record:
    """Regrets after each batch of one run."""
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim.optimize import optimize_acqf

    d, budget, optimum, function = functions()[name]
    sobol = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed)
    x = sobol.draw(max(10, 2 * d + 2)).double()
    y, bounds = function(x), torch.stack([torch.zeros(d), torch.ones(d)]).double()
    regrets, started = [float(optimum - y.max())], time.process_time()
    torch.manual_seed(seed)
    while len(x) < budget:
        fit = METHODS[method]
        q = min(BATCH, budget - len(x))
        if fit is None:
            points = torch.rand(q, d, dtype=torch.float64)
        else:
            values = (y - y.mean()) / y.std() if method == "GP" else _normal_scores(y)
            acquisition = qLogExpectedImprovement(fit(x, values, seed), best_f=values.max())
            options = {"num_restarts": RESTARTS, "raw_samples": RAW}
            points, _ = optimize_acqf(acquisition, bounds, q=q, **options)
        x, y = torch.cat([x, points]), torch.cat([y, function(points)])
        regrets.append(float(optimum - y.max()))
    seconds = time.process_time() - started
    return {
        "function": name,
        "method": method,
        "seed": seed,
        "regrets": regrets,
        "seconds": seconds,
    }


# --- command --------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each function")
    parser.add_argument("--functions", nargs="+", default=None, help="some of the functions")
    add_recorded_option(parser)
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run or resume the experiment."""
    store, records = Store(options.results), []
    names = options.functions or list(functions())
    for seed in range(options.seeds):
        for name in names:
            for method in METHODS:
                key = key_of(f"{name}-{method}-{seed}", SETTINGS)
                if options.recorded and key not in store:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    record = store.get(
                        key,
                        lambda m=method, n=name, s=seed: (
                            optimise(m, n, s) | {"versions": versions()}
                        ),
                        lambda r: say(r["function"], r["method"], r["seed"], r["regrets"][-1]),
                    )
                records.append(record)
    publish(markdown(records), "optimise", options, say)
    return {"runs": len(records)}


def markdown(records: Sequence[Record]) -> str:
    """The table of the experiment: log10 of the regret at the end, paired with the GP."""
    final = {
        (r["function"], r["method"], r["seed"]): np.log10(max(r["regrets"][-1], 1e-6))
        for r in records
    }
    rows = []
    for name in dict.fromkeys(r["function"] for r in records):
        seeds = {
            s for f, _, s in final if f == name and all((name, m, s) in final for m in METHODS)
        }
        if not seeds:
            continue
        each = {m: np.array([final[name, m, s] for s in sorted(seeds)]) for m in METHODS}
        cells = [_figure(each[m]) for m in METHODS]
        gaps = [_figure(each["linearised"] - each[m]) for m in ("GP", "ensemble")]
        rows.append([name, functions()[name][1], len(seeds), *cells, *gaps])
    head = ["function", "budget", "seeds", *METHODS, "less GP", "less ensemble"]
    return markdown_table(head, rows)


def _figure(values: np.ndarray) -> str:
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{error}".replace("-", "−")

"""Training, subspaces, engines and baselines of the toy regression."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from experiments.store import Record, Store, key_of, versions
from experiments.toy_regression_data import GRID, PROCEDURE, Array, Plan, Points, features
from experiments.uci import Say, fields_of, finite_or_none
from subbayes import MLP, Draws, Network, Posterior, Predictive, Training
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.variational.variational import MeanFieldVI, RealNVP
from subbayes.likelihoods import Gaussian
from subbayes.predictions.averaging import average
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace, RandomSubspace, Subspace
from subbayes.training.curve import connect
from subbayes.training.trainer import swa, train
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.training.weight_curve import WeightCurve
from subbayes.utils.seeding import derive_seed

Arrays = dict[str, Array]


def record_key(name: str, settings: Record) -> str:
    """Return the key of a record, see `key_of`."""
    return key_of(name.replace(" ", "-"), settings | {"procedure": PROCEDURE})


class ArrayCache:
    """Arrays of each step in files beside the records.

    Args:
        folder: folder of the results.
        say: prints a line.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        self.store = Store(folder)

    def path(self, key: str) -> Path:
        """Return the file of the arrays of a step."""
        return self.folder / "arrays" / f"{key}.safetensors"

    def __call__(
        self, name: str, settings: Record, compute: Callable[[], tuple[Arrays, Record]]
    ) -> Arrays:
        """Return the saved arrays of a step; if there are none, compute and save them."""
        key = record_key(name, settings)
        path = self.path(key)
        if key in self.store and path.exists():
            try:
                return load_file(path)
            except SafetensorError:
                self.say(f"{path.name} is damaged and will be computed again")
        started = time.process_time()
        arrays, record = compute()
        seconds = round(time.process_time() - started, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)
        self.store.put(
            key, settings | {"kind": name, "seconds": seconds, "versions": versions()} | record
        )
        self.say(f"{name}: {seconds} s")
        return arrays


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The average of a first solution, its trajectory and a curve to a second solution."""

    network: Network
    noise: float
    recorder: TrajectoryRecorder
    curve: WeightCurve

    @property
    def likelihood(self) -> Gaussian:
        """Gaussian likelihood with the noise of the residuals."""
        return Gaussian(noise=self.noise)


def train_solutions(points: Points, plan: Plan, seed: int, cache: ArrayCache) -> Trained:
    """Train two solutions by SGD and averaging at a constant rate, and a curve between them."""
    module = MLP(2, plan.hidden, 1, seed=0)
    settings = fields_of(
        plan,
        "hidden",
        "epochs",
        "path_epochs",
        "learning_rate",
        "momentum",
        "batch_size",
        "snapshots",
        "curve_epochs",
    ) | {"data": points.name, "seed": seed}
    saved = cache(
        f"{points.name} training", settings, lambda: _train(points, plan, derive_seed(seed, 11))
    )
    recorder = TrajectoryRecorder(max_snapshots=plan.snapshots)
    for weights in torch.from_numpy(saved["snapshots"]):
        recorder.update(weights)
    network = Network(module).with_weights(recorder.mean)
    return Trained(
        network, float(saved["noise"][0]), recorder, WeightCurve(torch.from_numpy(saved["points"]))
    )


def _train(points: Points, plan: Plan, seed: int) -> tuple[Arrays, Record]:
    unit = Gaussian(noise=1.0)  # half the squared error, as the authors train
    training = Training(
        epochs=plan.epochs,
        learning_rate=plan.learning_rate,
        optimizer="sgd",
        momentum=plan.momentum,
        batch_size=plan.batch_size,
        clip_norm=None,
        swa_epochs=plan.path_epochs,
        swa_learning_rate=plan.learning_rate,
        max_snapshots=plan.snapshots,
        curve_epochs=plan.curve_epochs,
    )
    results = []
    for s in range(2):
        first = train(
            MLP(2, plan.hidden, 1, seed=derive_seed(seed, s)),
            unit,
            points.data,
            training,
            seed=derive_seed(seed, s),
            progress=False,
        )
        results.append(
            swa(
                first,
                unit,
                points.data,
                training,
                every=plan.path_epochs // plan.snapshots,
                seed=derive_seed(seed, s),
                progress=False,
            )
        )
    curve = connect(
        results[0].network,
        unit,
        points.data,
        training,
        solutions=[r.network for r in results],
        seed=seed,
        progress=False,
    )
    path, network = results[0].recorder, results[0].network
    inputs, y = points.data
    with torch.no_grad():
        residuals = y - network(network.weights, inputs)[:, 0]
    noise = float(residuals.double().std())
    line = curve.curve.point(torch.linspace(0, 1, 2001)).double()
    arrays = {
        "noise": np.array([noise]),
        "points": curve.curve.points.numpy(),
        "snapshots": (path.deviations.double() + path.mean.double()).float().numpy(),
    }
    return arrays, {
        "noise": noise,
        "length": float(line.diff(dim=0).norm(dim=1).sum()),
        "distance": float((curve.curve.points[0] - curve.curve.points[-1]).norm()),
    }


# --- methods ----------------------------------------------------------------------------------


def subspace_of(name: str, model: Trained, plan: Plan, seed: int) -> Subspace:
    """Return one of the three subspaces of the paper."""
    if name == "random":
        return RandomSubspace(model.network.weights, plan.rank, seed=seed)
    if name == "curve":  # with ends at z = (1, 0) and (-1, 0): N(0, I) is as wide as the curve
        return model.curve.subspace(unit=False)
    return model.recorder.pca(plan.rank)


def posterior_of(name: str, points: Points, model: Trained, plan: Plan, seed: int) -> Posterior:
    """Return the posterior in a subspace, with the paper's prior.

    It is N(0, I) along random directions of norm 1 and along those of the curve, which lead to its
    ends. Algorithm 2 scales principal directions by singular values of the deviations,
    `TrajectoryRecorder.pca` by singular values over the square root of M - 1; the prior of the PCA
    subspace compensates for it.
    """
    scale = (plan.snapshots - 1) ** 0.5 if name == "PCA" else 1.0
    return Posterior(
        model.network,
        model.likelihood,
        points.data,
        subspace_of(name, model, plan, seed),
        Normal(scale),
        plan.temperature,
    )


def sample_engine(engine: str, posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Sample with one engine."""
    options: dict[str, Any] = {"chains": plan.chains, "seed": seed, "progress": False}
    if engine == "ESS":
        return EllipticalSlice().sample(posterior, draws=plan.draws, warmup=plan.draws, **options)
    if engine == "NUTS":
        return NUTS().sample(posterior, draws=plan.draws // 4, warmup=plan.draws // 4, **options)
    family = {"VI": MeanFieldVI, "RealNVP": RealNVP}[engine]
    return family(steps=plan.vi_steps).sample(posterior, draws=plan.draws // 4, **options)


def _diagnostics(draws: Draws) -> Record:
    """Return the number of draws and the diagnostics of a run."""
    record: Record = {"draws": draws.n_chains * draws.n_draws}
    if draws.independent:
        return record | {
            "elbo": finite_or_none(draws.meta["elbo"]),
            "log_evidence": finite_or_none(draws.log_evidence),
            "pareto_k": finite_or_none(draws.pareto_k),
        }
    return record | {
        "rhat": finite_or_none(np.nanmax(draws.rhat())),
        "ess_bulk": finite_or_none(np.nanmin(draws.ess_bulk())),
    }


def run_method(
    method: str, points: Points, model: Trained, plan: Plan, seed: int
) -> tuple[Arrays, Record]:
    """Return curves of a method on the grid, shape (S, 201), and draws of coordinates if any."""
    if method == "GP":
        return _gp(points, derive_seed(seed, 7))
    if method == "SWAG":
        weights = model.recorder.swag(500, derive_seed(seed, 6), plan.swag_scale)
        return {"curves": _curves(model, weights)}, {"draws": 500}
    if method == "full-space VI":
        return _full_vi(points, model, plan, derive_seed(seed, 5))
    subspace, engine = method.split(" + ")
    posterior = posterior_of(subspace, points, model, plan, derive_seed(seed, 3))
    draws = sample_engine(engine, posterior, plan, derive_seed(seed, 4))
    outputs = posterior.predict(draws, features(GRID), n_draws=500).outputs
    arrays = {"curves": outputs[..., 0].numpy().astype(np.float32), "z": draws.z}
    return arrays, _diagnostics(draws)


def _curves(model: Trained, weights: Tensor) -> Array:
    out = average(model.network, model.likelihood, weights, features(GRID)).outputs
    return out[..., 0].numpy().astype(np.float32)


def _full_vi(points: Points, model: Trained, plan: Plan, seed: int) -> tuple[Arrays, Record]:
    """Mean-field variational inference over all weights, with prior N(0, s^2 I)."""
    center = model.network.weights
    prior = Normal(plan.full_prior, mean=-center.double().numpy())
    posterior = Posterior(
        model.network, model.likelihood, points.data, FullSubspace(center), prior, plan.temperature
    )
    draws = MeanFieldVI(steps=plan.full_steps, samples=plan.full_samples).sample(
        posterior, draws=125, chains=4, seed=seed, progress=False
    )
    weights = posterior.subspace.weights(torch.from_numpy(draws.flat()))
    return {"curves": _curves(model, weights)}, _diagnostics(draws)


def _gp(points: Points, seed: int) -> tuple[Arrays, Record]:
    """Gaussian process with RBF kernel; hyper-parameters maximise the marginal likelihood."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel(0.5) * RBF(1.0) + WhiteKernel(1e-2, (1e-5, 1.0))
    gp = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=2, random_state=seed % 2**32
    ).fit(points.x[:, None], points.y)
    scale = float(gp._y_train_std)
    noise = scale * gp.kernel_.k2.noise_level**0.5
    mean, covariance = gp.predict(GRID[:, None], return_cov=True)
    covariance -= np.eye(len(GRID)) * noise**2  # of the function, not of observations
    values, vectors = np.linalg.eigh(covariance)
    eps = np.random.default_rng(seed).standard_normal((500, len(GRID)))
    curves = mean + (eps * np.sqrt(values.clip(0))) @ vectors.T
    return {"curves": curves.astype(np.float32)}, {
        "draws": 500,
        "noise": noise,
        "length_scale": float(gp.kernel_.k1.k2.length_scale),
    }


@dataclass(frozen=True)
class Results:
    """Results of all methods on one data set; arrays only if figures need them."""

    points: Points
    plan: Plan
    seed: int
    records: dict[str, Record]
    arrays: dict[str, Arrays]
    load_model: Callable[[], Trained]

    @property
    def model(self) -> Trained:
        """The trained networks."""
        return self.load_model()

    @property
    def grid(self) -> Array:
        """Inputs of the curves."""
        return GRID

    def posterior(self, subspace: str) -> Posterior:
        """Return the posterior in a subspace."""
        return posterior_of(subspace, self.points, self.model, self.plan, self.seed)

    def predictive(self, method: str) -> Predictive:
        """Return the curves of a method as predictions on the grid."""
        curves = torch.from_numpy(self.arrays[method]["curves"]).double()[..., None]
        return Predictive(curves, Gaussian(noise=self.records[method]["noise"]))

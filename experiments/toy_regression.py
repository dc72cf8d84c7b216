"""Toy regression: figures 1, 3, 8 and 9 of Izmailov et al. (2019), on their 400 points.

Random, PCA and curve subspaces of a five-layer network, by elliptical slice sampling, NUTS,
mean-field variational inference and RealNVP, beside SWAG, mean-field variational inference over
all weights, and a Gaussian process. Twins of the data, drawn from networks with random weights,
tell how often intervals hold the true function.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from experiments.store import Record, Store, key_of, versions
from subbayes import MLP, Draws, Network, Posterior, Predictive, Training, curvature
from subbayes.data.datasets import find_file
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.variational.variational import MeanFieldVI, RealNVP
from subbayes.likelihoods import Gaussian
from subbayes.predictions.averaging import average
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace, RandomSubspace, Subspace
from subbayes.subspaces.curve import WeightCurve
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.curve import connect
from subbayes.training.trainer import swa, train
from subbayes.utils.checks import InputError, check_count
from subbayes.utils.seeding import derive_seed, fork_rng

FILE = "toy_regression/drbayes_data.npy"
CLUSTERS = ((-7.2, -4.8), (-1.2, 1.2), (4.8, 7.2))
GRID = np.linspace(-10, 10, 201)
SUBSPACES = ("random", "PCA", "curve")
ENGINES = ("ESS", "NUTS", "VI", "RealNVP")
BASELINES = ("SWAG", "full-space VI", "GP")
METHODS = (*(f"{s} + {e}" for s in SUBSPACES for e in ENGINES), *BASELINES)

PROCEDURE = 1
"""Raise it when the code below changes what the same settings give."""

Say = Callable[..., None]
Array = np.ndarray
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Plan:
    """Settings; those of training are the authors' (their notebook), the others ours.

    Attributes:
        hidden: widths of the hidden layers.
        epochs: passes of SGD to each of the two solutions,
        path_epochs: and of averaging after them, at the same constant rate.
        learning_rate: of SGD on half the squared error.
        momentum: of SGD.
        batch_size: rows of a step.
        snapshots: of the path, evenly spaced, which span the PCA subspace.
        curve_epochs: passes for the curve between the two solutions.
        rank: of the random and the PCA subspace.
        swag_scale: SWAG's covariance is widened by this, as in the authors' notebook.
        temperature: T of all posteriors; by default N / K, the default of the authors' scripts.
        chains: of the samplers.
        draws: draws a chain, after as many for warm-up (NUTS: a quarter of both).
        vi_steps: of the variational fits.
        full_prior: scale of the prior of all weights, for variational inference over them.
        full_steps: of that fit.
        full_samples: draws in each of its steps.
        noise: standard deviation of the noise of a twin.
    """

    hidden: tuple[int, ...] = (200, 50, 50, 50)
    epochs: int = 2000
    path_epochs: int = 1000
    learning_rate: float = 1e-2
    momentum: float = 0.95
    batch_size: int = 50
    snapshots: int = 20
    curve_epochs: int = 2000
    rank: int = 10
    swag_scale: float = 10.0
    temperature: float = 40.0
    chains: int = 4
    draws: int = 400
    vi_steps: int = 2000
    full_prior: float = 1.0
    full_steps: int = 3000
    full_samples: int = 2
    noise: float = 0.05


@dataclass(frozen=True)
class Points:
    """Observations, and the true function on the grid where it is known."""

    name: str
    x: Array
    y: Array
    truth: Array | None = None

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs as the network takes them, and targets."""
        return features(self.x), torch.tensor(self.y, dtype=torch.float32)


def features(x: Array) -> Tensor:
    """The two inputs of the network, (x / 2, (x / 2)^2)."""
    half = torch.tensor(x, dtype=torch.float32) / 2
    return torch.stack([half, half**2], 1)


def paper_points(data_dir: str | None) -> Points:
    """The authors' 400 points; the function they come from is not published."""
    table = np.load(find_file(FILE, data_dir), allow_pickle=False)
    return Points("paper", table[:, 0], table[:, 1])


def twin(seed: int, like: Points, plan: Plan) -> Points:
    """Points at the same places, from a network with random weights.

    Weights are N(0, 2 / fan-in), biases N(0, 0.1^2); the function is shifted and scaled to the
    mean and the spread of the paper's targets.
    """
    module = MLP(2, plan.hidden, 1, seed=derive_seed(seed, 0))
    with fork_rng(derive_seed(seed, 1)), torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * ((2 / p.shape[1]) ** 0.5 if p.ndim == 2 else 0.1))
        f, grid = (module(features(at))[:, 0].double().numpy() for at in (like.x, GRID))
    scale, shift = like.y.std() / f.std(), like.y.mean()
    noise = plan.noise * np.random.default_rng([seed, 2]).standard_normal(len(f))
    return Points(
        f"twin {seed}",
        like.x,
        shift + scale * (f - f.mean()) + noise,
        shift + scale * (grid - f.mean()),
    )


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Two solutions with what surrounds them, at one noise scale."""

    network: Network
    noise: float
    recorder: TrajectoryRecorder
    curve: WeightCurve

    @property
    def likelihood(self) -> Gaussian:
        """Gaussian noise of the size of the residuals."""
        return Gaussian(noise=self.noise)


def trained(points: Points, plan: Plan, seed: int, keep: Keep) -> Trained:
    """Two runs of SGD, each averaged along a constant rate, and a curve between them."""
    module = MLP(2, plan.hidden, 1, seed=0)
    fixed = asdict(plan)
    settings = {
        name: fixed[name]
        for name in (
            "hidden",
            "epochs",
            "path_epochs",
            "learning_rate",
            "momentum",
            "batch_size",
            "snapshots",
            "curve_epochs",
        )
    } | {"data": points.name, "seed": seed}
    kept = keep(
        f"{points.name} training", settings, lambda: _train(points, plan, derive_seed(seed, 11))
    )
    recorder = TrajectoryRecorder(max_snapshots=plan.snapshots)
    for weights in torch.from_numpy(kept["snapshots"]):
        recorder.update(weights)
    network = Network(module).with_weights(recorder.mean)
    return Trained(
        network, float(kept["noise"][0]), recorder, WeightCurve(torch.from_numpy(kept["points"]))
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
    arrays = {
        "noise": np.array([noise]),
        "points": curve.curve.points.numpy(),
        "snapshots": (path.deviations.double() + path.mean.double()).float().numpy(),
    }
    return arrays, {
        "noise": noise,
        "length": curve.curve.length(),
        "distance": float((curve.curve.points[0] - curve.curve.points[-1]).norm()),
    }


# --- the methods --------------------------------------------------------------------------------


def subspace_of(name: str, model: Trained, plan: Plan, seed: int) -> Subspace:
    """One of the three subspaces of the paper."""
    if name == "random":
        return RandomSubspace(model.network.weights, plan.rank, seed=seed)
    if name == "curve":  # ends at z = (1, 0) and (-1, 0), so that N(0, I) is as wide as the curve
        return model.curve.subspace(unit=False)
    return model.recorder.pca(plan.rank)


def posterior_of(name: str, points: Points, model: Trained, plan: Plan, seed: int) -> Posterior:
    """The posterior in a subspace, with the paper's prior.

    Along random directions of norm 1 it is N(0, I); along the curve's, which lead to its ends,
    N(0, I) too. Algorithm 2 scales principal directions by singular values of the deviations,
    `TrajectoryRecorder.pca` by those over the square root of M - 1: the prior makes up for it.
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


def sampled(engine: str, posterior: Posterior, plan: Plan, seed: int) -> Draws:
    """Draws of one engine."""
    options: dict[str, Any] = {"chains": plan.chains, "seed": seed, "progress": False}
    if engine == "ESS":
        return EllipticalSlice().sample(posterior, draws=plan.draws, warmup=plan.draws, **options)
    if engine == "NUTS":
        return NUTS().sample(posterior, draws=plan.draws // 4, warmup=plan.draws // 4, **options)
    family = {"VI": MeanFieldVI, "RealNVP": RealNVP}[engine]
    return family(steps=plan.vi_steps).sample(posterior, draws=plan.draws // 4, **options)


def _facts(draws: Draws) -> Record:
    """How a run went, in a few numbers."""
    facts: Record = {"draws": draws.n_chains * draws.n_draws}
    if draws.independent:
        return facts | {
            "elbo": _number(draws.meta["elbo"]),
            "log_evidence": _number(draws.log_evidence),
            "pareto_k": _number(draws.pareto_k),
        }
    return facts | {
        "rhat": _number(np.nanmax(draws.rhat())),
        "ess_bulk": _number(np.nanmin(draws.ess_bulk())),
    }


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def run_method(
    method: str, points: Points, model: Trained, plan: Plan, seed: int
) -> tuple[Arrays, Record]:
    """Curves of a method on the grid, (S, 201), with the coordinates drawn where it has any."""
    if method == "GP":
        return _gp(points, derive_seed(seed, 7))
    if method == "SWAG":
        weights = model.recorder.swag(500, derive_seed(seed, 6), plan.swag_scale)
        return {"curves": _curves(model, weights)}, {"draws": 500}
    if method == "full-space VI":
        return _full_vi(points, model, plan, derive_seed(seed, 5))
    subspace, engine = method.split(" + ")
    posterior = posterior_of(subspace, points, model, plan, derive_seed(seed, 3))
    draws = sampled(engine, posterior, plan, derive_seed(seed, 4))
    outputs = posterior.predict(draws, features(GRID), n_draws=500).outputs
    arrays = {"curves": outputs[..., 0].numpy().astype(np.float32), "z": draws.z}
    return arrays, _facts(draws)


def _curves(model: Trained, weights: Tensor) -> Array:
    out = average(model.network, model.likelihood, weights, features(GRID)).outputs
    return out[..., 0].numpy().astype(np.float32)


def _full_vi(points: Points, model: Trained, plan: Plan, seed: int) -> tuple[Arrays, Record]:
    """Mean-field variational inference over all weights, with prior N(0, s^2 I) around 0."""
    center = model.network.weights
    prior = Normal(plan.full_prior, mean=-center.double().numpy())
    posterior = Posterior(
        model.network, model.likelihood, points.data, FullSubspace(center), prior, plan.temperature
    )
    draws = MeanFieldVI(steps=plan.full_steps, samples=plan.full_samples).sample(
        posterior, draws=125, chains=4, seed=seed, progress=False
    )
    weights = posterior.subspace.weights(torch.from_numpy(draws.flat()))
    return {"curves": _curves(model, weights)}, _facts(draws)


def _gp(points: Points, seed: int) -> tuple[Arrays, Record]:
    """A Gaussian process with RBF kernel and noise, hyper-parameters by marginal likelihood."""
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


# --- what is said of them -----------------------------------------------------------------------


def regions() -> dict[str, Array]:
    """Masks of the grid: near the data, in the two gaps, and beyond them."""
    near = np.any([(low <= GRID) & (high >= GRID) for low, high in CLUSTERS], 0)
    beyond = np.abs(GRID) > CLUSTERS[-1][1]
    return {"near": near, "gaps": ~near & ~beyond, "beyond": beyond}


def summary(curves: Array, points: Points, noise: float) -> Record:
    """How uncertainty grows, how well the data are met, and whether the truth is inside."""
    mean, sd = curves.mean(0), curves.std(0)
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    fit = np.interp(points.x, GRID, mean)
    found: Record = {"rmse": float(np.sqrt(np.mean((points.y - fit) ** 2))), "noise": noise}
    found |= {f"sd {name}": float(sd[mask].mean()) for name, mask in regions().items()}
    for name in ("gaps", "beyond"):
        found[f"growth {name}"] = found[f"sd {name}"] / found["sd near"]
    if points.truth is not None:
        inside = (low <= points.truth) & (points.truth <= high)
        found |= {
            f"coverage {name}": float(inside[mask].mean()) for name, mask in regions().items()
        }
    return found


# --- running ------------------------------------------------------------------------------------


def _key(name: str, settings: Record) -> str:
    return key_of(name.replace(" ", "-"), settings | {"procedure": PROCEDURE})


class Keep:
    """Arrays by key, kept as files beside the records, so that nothing is computed twice."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        self.store = Store(folder / "records.json")

    def path(self, key: str) -> Path:
        """Where the arrays of a step are."""
        return self.folder / "arrays" / f"{key}.safetensors"

    def __call__(
        self, name: str, settings: Record, make: Callable[[], tuple[Arrays, Record]]
    ) -> Arrays:
        """Arrays of a step: as kept, or made and kept."""
        key = _key(name, settings)
        path = self.path(key)
        if key in self.store and path.exists():
            try:
                return load_file(path)
            except SafetensorError:
                self.say(f"{path.name} is damaged: computed anew")
        started = time.process_time()
        arrays, record = make()
        seconds = round(time.process_time() - started, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)
        self.store.put(
            key, settings | {"kind": name, "seconds": seconds, "versions": versions()} | record
        )
        self.say(f"{name}: {seconds} s")
        return arrays


@dataclass(frozen=True)
class Found:
    """Results of all methods on one data set; arrays only where pictures need them."""

    points: Points
    plan: Plan
    seed: int
    records: dict[str, Record]
    arrays: dict[str, Arrays]
    train: Callable[[], Trained]

    @property
    def model(self) -> Trained:
        """The trained networks."""
        return self.train()

    @property
    def grid(self) -> Array:
        """The inputs of the curves."""
        return GRID

    def posterior(self, subspace: str) -> Posterior:
        """The posterior in a subspace."""
        return posterior_of(subspace, self.points, self.model, self.plan, self.seed)

    def predictive(self, method: str) -> Predictive:
        """The curves of a method as predictions on the grid."""
        curves = torch.from_numpy(self.arrays[method]["curves"]).double()[..., None]
        return Predictive(curves, Gaussian(noise=self.records[method]["noise"]))


def run_points(
    points: Points, methods: tuple[str, ...], plan: Plan, seed: int, keep: Keep, pictures: bool
) -> Found:
    """Train and run every method; what is on record is run again only for pictures of it."""
    torch.set_num_threads(1)
    model = functools.cache(lambda: trained(points, plan, seed, keep))
    arrays, records = {}, {}
    for method in methods:
        name = f"{points.name} {method}"
        settings = asdict(plan) | {"data": points.name, "seed": seed, "method": method}
        key = _key(name, settings)
        if pictures or key not in keep.store:
            arrays[method] = keep(
                name, settings, functools.partial(_with_summary, method, points, model, plan, seed)
            )
        records[method] = keep.store[key]
    return Found(points, plan, seed, records, arrays, model)


def _with_summary(
    method: str, points: Points, model: Callable[[], Trained], plan: Plan, seed: int
) -> tuple[Arrays, Record]:
    arrays, facts = run_method(method, points, model(), plan, seed)
    return arrays, facts | summary(arrays["curves"], points, facts.get("noise", model().noise))


def spectra_of(found: Found, keep: Keep) -> dict[str, Any]:
    """Spectra of the Hessian and of the Fisher information at the first solution."""
    network, data = found.model.network.to("cpu", torch.float64), found.points.data
    inputs = data[0].double(), data[1].double()

    def make() -> tuple[Arrays, Record]:
        arrays, record = {}, {}
        for kind in ("hessian", "fisher"):
            product = curvature.Curvature(
                network, found.model.likelihood, inputs, kind, batch_size=400
            )
            pairs = curvature.eigenvalues(
                product,
                min(40, product.size),
                which="magnitude",
                basis=80,
                restarts=3,
                tolerance=1e-3,
                progress=False,
            )
            arrays[kind] = np.stack([pairs.values, pairs.residuals])
            record[kind] = {
                "products": pairs.products,
                "largest": float(pairs.values[0]),
                "residual": float(pairs.residuals.max()),
            }
        return arrays, record

    return keep(
        f"{found.points.name} spectra",
        {
            "data": found.points.name,
            "noise": found.model.noise,
            "weights": float(network.weights.sum()),
        },
        make,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas between")
    parser.add_argument("--twins", type=int, default=2, help="data sets with a known function")
    parser.add_argument("--temperature", type=float, default=Plan.temperature)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--page", default=None, metavar="FILE", help="write the gallery to this HTML file"
    )
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page of the docs, and the "
        "main pictures beside it",
    )


def run(options: argparse.Namespace, say: Say, plan: Plan | None = None) -> Record:
    """Run what is missing; returns the numbers of every method on every data set."""
    from experiments import toy_regression_page as page

    methods = tuple(options.methods.split(","))
    for method in methods:
        if method not in METHODS:
            raise InputError(f"methods: expected some of {', '.join(METHODS)}, got '{method}'.")
    plan = Plan(temperature=options.temperature) if plan is None else plan
    keep = Keep(Path(options.results), say)
    paper = paper_points(options.data_dir)
    sets = [
        paper,
        *(twin(s, paper, plan) for s in range(1, 1 + check_count("twins", options.twins, 0))),
    ]
    wanted = bool(options.page or options.write)
    found = [
        run_points(points, methods, plan, options.seed, keep, wanted and points is paper)
        for points in sets
    ]
    say(page.markdown(found))
    if wanted:
        rows = [[f"{subspace} + {engine}" for subspace in SUBSPACES] for engine in ENGINES]
        page.write(found, spectra_of(found[0], keep), rows, options.page, options.write)
    return {one.points.name: one.records for one in found}

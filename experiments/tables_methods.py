"""Methods of the benchmark of tables, each with candidates for its settings.

A method takes rows, a seed and settings, and returns its scores on the test part of the rows and
its seconds of training and prediction. Numbers are scored by the Gaussian with the mean and the
standard deviation of the predictive distribution, as bde's benchmark does; the score of a mixture
itself stands beside it. Methods that return a mean alone have the standard deviation of their
residuals at rows that they were not fitted to.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import norm
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.model_selection import train_test_split

import subbayes
from experiments.store import Record
from experiments.tables_data import Rows
from subbayes import MLP, Sampling, Training, distributed
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.diagnostics import metrics
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.engine import ENGINES
from subbayes.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from subbayes.models.fitted import FittedModel
from subbayes.predictions.predictive import Predictive
from subbayes.subspaces.pca import PCA
from subbayes.utils.seeding import derive_seed

__all__ = ["METHODS", "Method", "Plan", "gaussian_scores", "run_method"]

LEVEL = 0.9
_MOST_ROWS = 3000  # of methods that take minutes for each seed beyond
_LEAST_VARIANCE = 1e-6  # of noise beside that of the network, in standardised units


@dataclass(frozen=True)
class Plan:
    """Sizes of the methods with networks.

    Attributes:
        hidden: widths of the networks.
        activation: of the networks.
        members: number of networks of an ensemble, and of chains.
        training: of each member.
        engine: that samples all weights.
        engine_settings: of the engine.
        warmup: steps of each chain before the draws.
        draws: draws that each chain keeps.
        thin: steps for each draw.
        selection: warm-up and steps for each draw of chains with which candidates are compared;
            None for a quarter of both.
        mode: how the density is evaluated, as in `Sampling`.
        subspace_training: of the network with a subspace.
        rank: of the subspace.
        subspace_draws: draws of each of its chains.
        trees: number of trees of forests and boosters, at most.
        factor: processes among which chains are divided.
        lengthen: the steps of their chains, as a multiple.
        device: of the networks.
    """

    hidden: tuple[int, ...] = (16, 16, 16, 16)
    activation: str = "relu"
    members: int = 10
    training: Training = field(
        default_factory=lambda: Training(
            epochs=1000,
            learning_rate=5e-3,
            weight_decay=1e-4,
            batch_size=64,
            validation=0.1,
            patience=50,
            swa_epochs=0,
        )
    )
    engine: str = "mclmc"
    engine_settings: tuple[tuple[str, Any], ...] = (("target", (0.5, 0.1)), ("metric", "prior"))
    warmup: int = 12_000
    draws: int = 100
    thin: int = 80
    selection: tuple[int, int] | None = None
    mode: Literal["trace", "compile", "eager"] = "compile"
    subspace_training: Training = field(
        default_factory=lambda: Training(
            epochs=300, learning_rate=5e-3, prior_scale=1.0, swa_learning_rate=1e-2
        )
    )
    rank: int = 10
    subspace_draws: int = 200
    trees: int = 2000
    factor: int = 2
    lengthen: int = 2
    device: str = "cpu"

    def for_selection(self) -> Plan:
        """The plan with shorter chains, with which candidates are compared."""
        warmup, thin = self.selection or (self.warmup // 4, max(1, self.thin // 4))
        return replace(self, warmup=warmup, thin=thin)


@dataclass(frozen=True)
class Method:
    """A method of the benchmark.

    Attributes:
        label: its name in tables.
        run: takes rows, a seed, a plan and settings; returns scores and seconds.
        candidates: settings to select from, for numbers.
        fields: names of the fields of the plan that it uses.
        most_rows: training rows beyond which it is left out, for its time.
    """

    label: str
    run: Callable[[Rows, int, Plan, Record], Record]
    candidates: tuple[Record, ...]
    fields: tuple[str, ...] = ("trees",)
    most_rows: float = math.inf


def run_method(name: str, rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    """Return the scores of a method, with the seconds and the CPU seconds of the whole call.

    CPU seconds are those of all processes, of `torchrun` or of the method.
    """
    started, cpu = time.perf_counter(), _cpu_seconds()
    found = METHODS[name].run(rows, seed, plan, settings)
    processes, cpu = distributed.current(), _cpu_seconds() - cpu
    used = [cpu] if processes is None else processes.gather(cpu)
    spent = {"total": time.perf_counter() - started, "cpu": sum(used)}
    if processes is not None:
        found |= {"processes": len(used)}
    return found | {"seconds": found.get("seconds", {}) | spent}


def _cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    return float(sum(os.times()[:4]))


# --- scores ---------------------------------------------------------------------------------------


def gaussian_scores(mean: np.ndarray, sd: np.ndarray, y: np.ndarray) -> Record:
    """Return the scores of Gaussian predictions, shape (n,) each.

    Example:
        >>> found = gaussian_scores(np.zeros(2), np.ones(2), np.array([1.0, -1.0]))
        >>> round(found["nll"], 4), found["rmse"]
        (1.4189, 1.0)
    """
    z = (y - mean) / sd
    crps = sd * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    return {
        "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
        "nll": float(-norm.logpdf(y, mean, sd).mean()),
        "coverage": float((np.abs(z) <= norm.ppf(0.5 + LEVEL / 2)).mean()),
        "crps": float(crps.mean()),
    }


def _class_scores(probabilities: np.ndarray, y: np.ndarray) -> Record:
    chosen = np.clip(probabilities[np.arange(len(y)), y], 1e-12, None)
    truth = np.eye(probabilities.shape[1])[y]
    return {
        "nll": float(-np.log(chosen).mean()),
        "brier": float(((probabilities - truth) ** 2).sum(1).mean()),
        "accuracy": float((probabilities.argmax(1) == y).mean()),
    }


def _scores_of(model: Predictor, rows: Rows) -> Record:
    """Scores of a model of networks, batch by batch."""
    inputs = torch.tensor(rows.new, dtype=torch.float32)
    parts, start = [], 0
    for batch in model.predict_batches(inputs):
        y = rows.true[start : start + len(batch)]
        parts.append((len(y), _batch_scores(batch, y, rows.classes)))
        start += len(batch)
    counts = np.array([n for n, _ in parts])
    found = {
        key: float(np.average([scores[key] for _, scores in parts], weights=counts))
        for key in parts[0][1]
    }
    if "squared_error" in found:
        found["rmse"] = found.pop("squared_error") ** 0.5
    return found


def _batch_scores(batch: Predictive, y: np.ndarray, classes: int) -> Record:
    if classes:
        return _class_scores(batch.probabilities, y)
    below = batch.cdf(y)
    found = gaussian_scores(batch.mean, batch.std, y)
    return {
        "squared_error": found["rmse"] ** 2,
        "nll": found["nll"],
        "nll_mixture": -metrics.log_likelihood(batch, y),
        "coverage": float(((below >= 0.5 - LEVEL / 2) & (below <= 0.5 + LEVEL / 2)).mean()),
        "crps": metrics.crps(batch, y),
    }


# --- networks -------------------------------------------------------------------------------------


def _network(rows: Rows, seed: int, plan: Plan) -> tuple[MLP, Likelihood, Any]:
    likelihood: Likelihood = HeteroscedasticGaussian(_LEAST_VARIANCE)
    y = torch.tensor(rows.y, dtype=torch.int64 if rows.classes else torch.float32)
    if rows.classes:
        likelihood = Categorical(rows.classes)
    outputs = rows.classes or 2
    module = MLP(rows.x.shape[1], plan.hidden, outputs, plan.activation, seed=seed)
    module.to(plan.device)
    return module, likelihood, (torch.tensor(rows.x, dtype=torch.float32), y)


def _sampled(rows: Rows, seed: int, plan: Plan, settings: Record) -> tuple[FittedModel, Record]:
    """All weights, from an ensemble, and the seconds of its training and of the chains."""
    module, likelihood, data = _network(rows, seed, plan)
    engine = ENGINES[plan.engine](**dict(plan.engine_settings))
    started = time.perf_counter()
    model = subbayes.fit(
        module,
        data,
        likelihood=likelihood,
        subspace="full",
        inference=engine,
        prior=settings["prior"],
        training=plan.training,
        sampling=Sampling(
            draws=plan.draws,
            chains=plan.members,
            warmup=plan.warmup,
            thin=plan.thin,
            seed=seed,
            initial="ensemble",
            mode=plan.mode,
            progress=False,
        ),
    )
    sampling = model.sampled.meta["seconds"]
    return model, {"training": time.perf_counter() - started - sampling, "sampling": sampling}


def _posterior(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    """All weights, from an ensemble."""
    model, seconds = _sampled(rows, seed, plan, settings)
    fitted = time.perf_counter()
    found = _scores_of(model, rows)
    return found | {
        "seconds": seconds | {"prediction": time.perf_counter() - fitted},
        "evaluations": model.sampled.meta.get("batched_evaluations"),
        "best_epochs": model.history["ensemble"]["best_epoch"],
    }


def _posterior_in_processes(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    """The same in processes of their own with a part of the members each."""
    factor, times = plan.factor, plan.lengthen
    part = replace(
        plan, members=plan.members // factor, warmup=times * plan.warmup, thin=times * plan.thin
    )
    seeds = [derive_seed(seed, i) for i in range(factor)]
    with get_context("spawn").Pool(factor, _one_thread) as pool:
        parts = pool.starmap(_outputs, [(rows, one, part, settings) for one in seeds])
        pool.close()
        pool.join()
    outputs = torch.cat([torch.from_numpy(found) for found, _ in parts])
    predictive = Predictive(outputs, _network(rows, seed, plan)[1])
    found = _batch_scores(predictive, rows.true, rows.classes)
    if "squared_error" in found:
        found["rmse"] = found.pop("squared_error") ** 0.5
    return found | {
        "seconds": {name: max(s[name] for _, s in parts) for name in ("training", "sampling")},
        "processes": factor,
    }


def _outputs(rows: Rows, seed: int, plan: Plan, settings: Record) -> tuple[np.ndarray, Record]:
    """Network outputs at the test rows, and seconds."""
    model, seconds = _sampled(rows, seed, plan, settings)
    return model.predict(torch.tensor(rows.new, dtype=torch.float32)).outputs.numpy(), seconds


def _one_thread() -> None:
    torch.set_num_threads(1)


def _ensemble(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    module, likelihood, data = _network(rows, seed, plan)
    training = replace(plan.training, weight_decay=settings["weight_decay"])
    found = deep_ensemble(
        module, likelihood, data, training, members=plan.members, seed=seed, progress=False
    )
    return _scores_of(found, rows)


def _subspace(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    module, likelihood, data = _network(rows, seed, plan)
    if not rows.classes:
        likelihood = HeteroscedasticGaussian()
    model = subbayes.fit(
        module,
        data,
        likelihood=likelihood,
        subspace=PCA(rank=plan.rank),
        training=plan.subspace_training,
        sampling=Sampling(draws=plan.subspace_draws, seed=seed, progress=False),
        temperature=settings["temperature"],
    )
    return _scores_of(model, rows)


# --- trees ----------------------------------------------------------------------------------------


def _forest(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    """The standard deviation is that of the out-of-bag residuals."""
    options: dict[str, Any] = {"n_estimators": min(plan.trees, 500), "random_state": seed}
    options |= settings | {"n_jobs": torch.get_num_threads()}
    if rows.classes:
        model = RandomForestClassifier(**options).fit(rows.x, rows.y)
        return _class_scores(model.predict_proba(rows.new), rows.true)
    model = RandomForestRegressor(**options, oob_score=True).fit(rows.x, rows.y)
    return _homoscedastic(model.predict(rows.new), model.oob_prediction_, rows.y, rows.true)


def _homoscedastic(
    mean: np.ndarray, held_out: np.ndarray, known: np.ndarray, y: np.ndarray
) -> Record:
    sd = np.sqrt(np.mean((known - held_out) ** 2))
    return gaussian_scores(mean, np.full(len(mean), sd), y)


def _parts(rows: Rows, seed: int) -> list[np.ndarray]:
    """Rows to fit boosters to, and rows for the number of trees and the residuals.

    Boosters are fitted once more to all rows, with that number of trees.
    """
    return train_test_split(rows.x, rows.y, test_size=0.1, random_state=seed)


def _xgboost(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    import xgboost

    x, held, y, known = _parts(rows, seed)
    options: dict[str, Any] = {
        "n_estimators": plan.trees,
        "early_stopping_rounds": 50,
        "random_state": seed,
        "n_jobs": torch.get_num_threads(),
    }
    kind = xgboost.XGBClassifier if rows.classes else xgboost.XGBRegressor
    early = kind(**options | settings).fit(x, y, eval_set=[(held, known)], verbose=False)
    options |= {"n_estimators": early.best_iteration + 1, "early_stopping_rounds": None}
    model = kind(**options | settings).fit(rows.x, rows.y)
    if rows.classes:
        return _class_scores(model.predict_proba(rows.new), rows.true)
    return _homoscedastic(model.predict(rows.new), early.predict(held), known, rows.true)


def _lightgbm(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    import lightgbm

    x, held, y, known = _parts(rows, seed)
    kind = lightgbm.LGBMClassifier if rows.classes else lightgbm.LGBMRegressor
    options: dict[str, Any] = {
        "n_estimators": plan.trees,
        "random_state": seed,
        "verbose": -1,
        "n_jobs": torch.get_num_threads(),
    }
    early = kind(**options | settings)
    early.fit(
        x, y, eval_set=[(held, known)], callbacks=[lightgbm.early_stopping(50, verbose=False)]
    )
    options["n_estimators"] = early.best_iteration_
    model = kind(**options | settings).fit(rows.x, rows.y)
    if rows.classes:
        return _class_scores(model.predict_proba(rows.new), rows.true)
    return _homoscedastic(model.predict(rows.new), early.predict(held), known, rows.true)


def _catboost(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    """With its own uncertainty: a Gaussian with a variance that depends on the inputs."""
    import catboost

    x, held, y, known = _parts(rows, seed)
    options: dict[str, Any] = {
        "iterations": plan.trees,
        "early_stopping_rounds": 50,
        "random_seed": seed,
        "verbose": False,
        "allow_writing_files": False,
        "thread_count": torch.get_num_threads(),
    }
    kind = catboost.CatBoostClassifier if rows.classes else catboost.CatBoostRegressor
    if not rows.classes:
        options["loss_function"] = "RMSEWithUncertainty"
    early = kind(**options | settings)
    early.fit(x, y, eval_set=(held, known))
    options |= {"iterations": early.tree_count_, "early_stopping_rounds": None}
    model = kind(**options | settings)
    model.fit(rows.x, rows.y)
    if rows.classes:
        return _class_scores(model.predict_proba(rows.new), rows.true)
    mean, variance = model.predict(rows.new).T
    return gaussian_scores(mean, np.sqrt(np.maximum(variance, _LEAST_VARIANCE)), rows.true)


def _ngboost(rows: Rows, seed: int, plan: Plan, settings: Record) -> Record:
    import ngboost
    from ngboost.distns import k_categorical
    from sklearn.tree import DecisionTreeRegressor

    x, held, y, known = _parts(rows, seed)
    options: dict[str, Any] = {
        "n_estimators": plan.trees,
        "random_state": seed,
        "verbose": False,
        "learning_rate": settings["learning_rate"],
        "Base": DecisionTreeRegressor(
            criterion="friedman_mse", max_depth=settings["max_depth"], random_state=seed
        ),
    }
    stop = {"X_val": held, "Y_val": known, "early_stopping_rounds": 50}
    if rows.classes:
        model = ngboost.NGBClassifier(Dist=k_categorical(rows.classes), **options)
        return _class_scores(model.fit(x, y, **stop).predict_proba(rows.new), rows.true)
    found = ngboost.NGBRegressor(**options).fit(x, y, **stop).pred_dist(rows.new)
    return gaussian_scores(found.loc, found.scale, rows.true)


def _grid(**values: tuple[Any, ...]) -> tuple[Record, ...]:
    found: list[Record] = [{}]
    for name, options in values.items():
        found = [one | {name: option} for one in found for option in options]
    return tuple(found)


_NETWORKS = ("hidden", "activation", "members", "training")
_SAMPLED = ("engine", "engine_settings", "warmup", "draws", "thin", "mode")

METHODS = {
    "posterior": Method(
        "all weights, from an ensemble",
        _posterior,
        _grid(prior=(0.3, 0.5, 1.0)),
        fields=_NETWORKS + _SAMPLED,
    ),
    "processes": Method(
        "the same in two processes",
        _posterior_in_processes,
        _grid(prior=(0.5,)),  # as selected for airfoil and bike above
        fields=_NETWORKS + _SAMPLED + ("factor", "lengthen"),
        most_rows=15_000,
    ),
    "ensemble": Method(
        "deep ensemble", _ensemble, _grid(weight_decay=(1e-4, 1e-3)), fields=_NETWORKS
    ),
    "subspace": Method(
        "PCA subspace",
        _subspace,
        _grid(temperature=(1.0, 10.0)),
        fields=("hidden", "activation", "subspace_training", "rank", "subspace_draws"),
        most_rows=_MOST_ROWS,
    ),
    "xgboost": Method(
        "XGBoost", _xgboost, _grid(learning_rate=(0.03, 0.1, 0.3), max_depth=(4, 6, 8))
    ),
    "lightgbm": Method(
        "LightGBM", _lightgbm, _grid(learning_rate=(0.03, 0.1), num_leaves=(15, 31, 63))
    ),
    "catboost": Method("CatBoost", _catboost, _grid(learning_rate=(0.03, 0.1), depth=(6, 8))),
    "ngboost": Method(
        "NGBoost", _ngboost, _grid(learning_rate=(0.03,), max_depth=(3, 5)), most_rows=_MOST_ROWS
    ),
    "forest": Method("random forest", _forest, _grid(max_features=(0.5, 1.0))),
}
"""Methods by name."""

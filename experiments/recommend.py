"""What `subbayes.recommend` makes of a trained network, beside temperature scaling and ensembles.

Networks are trained with torch alone (`experiments.recommend_data`); the first of five members of
a data set and a seed is the user's network. The reference of the budgets "seconds" and "minutes" is
that network with a temperature fitted to the validation rows, the reference of "ensemble" the
averaged probabilities of the five members with one temperature; in regression both have Gaussian
noise of the standard deviation that is best on the validation rows. Differences are paired over
test rows, on which nothing is chosen. Full validation sets have a fifth to a third as many rows as
the training sets, the small ones are the first 300 of these rows. Trained networks are kept beside
the records, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.recommend_data import (
    DATASETS,
    NUMBERS,
    RECIPES,
    Part,
    Recipe,
    Sets,
    network_of,
    sets_of,
    shifted,
    trained,
)
from experiments.recommend_page import markdown
from experiments.store import Record, Store, key_of, versions
from experiments.uci import split_names
from subbayes import Predictive
from subbayes.baselines.deep_ensemble import ensemble_from_results
from subbayes.baselines.map import point_estimate
from subbayes.baselines.temperature_scaling import TemperatureScaled, temperature_scaling
from subbayes.likelihoods import Gaussian
from subbayes.utils.checks import check_count

__all__ = ["BUDGETS", "SHAPES", "add_options", "members_of", "network_of", "run", "sets_of"]

Say = Callable[..., None]
Predict = Callable[[Tensor], Predictive]

BUDGETS = ("seconds", "minutes", "ensemble")
SHAPES = ("full", "300")
"""Validation sets: all their rows, or the first 300."""

_MEMBERS, _SMALL, _LEVEL, _BATCH = 5, 300, 0.95, 500


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        rows: most rows of a part, or None for all.
        epochs: most epochs of training, or None for those of the recipe.
        members: number of trained networks.
    """

    rows: int | None = None
    epochs: int | None = None
    members: int = _MEMBERS

    def recipe(self, name: str) -> Recipe:
        """How the networks of a data set are trained."""
        recipe = RECIPES[name]
        if self.epochs is None:
            return recipe
        return dataclasses.replace(recipe, epochs=min(self.epochs, recipe.epochs))


_QUICK = Plan(rows=120, epochs=2, members=2)


# --- networks -------------------------------------------------------------------------------------


def members_of(name: str, seed: int, sets: Sets, folder: Path, plan: Plan) -> list[nn.Module]:
    """Return the trained networks of a data set and a seed, from their file if they are there."""
    recipe = plan.recipe(name)
    columns = sets.train[0].shape[-1]
    facts = {
        "network": repr(network_of(name, columns)),
        "recipe": dataclasses.asdict(recipe),
        "rows": len(sets.train[1]),
        "seed": seed,
    }
    path = folder / f"{key_of(f'{name}-{seed}', facts)}.pt"
    states = torch.load(path, weights_only=True) if path.exists() else []
    for member in range(len(states), plan.members):
        states.append(trained(name, sets.train, 1000 * seed + member, recipe).state_dict())
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(states, path)
    members: list[nn.Module] = []
    for state in states[: plan.members]:
        net = network_of(name, columns)
        net.load_state_dict(state)
        members.append(net.eval())
    return members


class AveragedProbabilities(nn.Module):
    """Logarithms of the averaged class probabilities of networks."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities."""
        each = torch.stack([log_softmax(net(x), -1) for net in self.members])
        return each.logsumexp(0) - np.log(len(each))


def reference_of(members: Sequence[nn.Module], validation: Part, regression: bool) -> Any:
    """Return one network, or the average of several, scaled by validation rows.

    The temperature of classes is that of the largest likelihood, without a prior.
    """
    if regression:
        noise = Gaussian(1.0)  # the temperature is the standard deviation
        base = ensemble_from_results(members, noise) if len(members) > 1 else None
        return temperature_scaling(base or point_estimate(members[0], noise), validation)
    net = AveragedProbabilities(members) if len(members) > 1 else members[0]
    with torch.no_grad():
        logits = torch.cat([net(x) for x in validation[0].split(_BATCH)]).double()
    found = minimize_scalar(
        lambda log_tau: float(cross_entropy(logits * np.exp(-log_tau), validation[1])),
        bounds=(-9, 9),
        method="bounded",
    )
    return TemperatureScaled(point_estimate(net, "categorical"), float(np.exp(found.x)))


# --- scores ---------------------------------------------------------------------------------------


def _log_scores(predict: Predict, rows: Part) -> np.ndarray:
    x, y = rows
    pairs = zip(x.split(_BATCH), y.split(_BATCH), strict=True)
    return np.concatenate([predict(some).log_prob(true) for some, true in pairs])


def _over(values: Callable[[Tensor], np.ndarray], x: Tensor) -> np.ndarray:
    return np.concatenate([np.asarray(values(some)) for some in x.split(_BATCH)])


def _difference(model: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Mean difference, paired over rows, and its standard error."""
    each = model - reference
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))


def _accuracy(predict: Predict, rows: Part) -> float:
    labels = _over(lambda x: predict(x).probabilities.argmax(-1), rows[0])
    return float((labels == rows[1].numpy()).mean())


def _inside(predict: Predict, rows: Part) -> dict[str, float]:
    x, y = rows
    true = y.numpy().ravel()
    mean = _over(lambda some: np.ravel(predict(some).mean), x)
    low, high = (
        _over(lambda some, side=side: np.ravel(predict(some).interval(_LEVEL)[side]), x)
        for side in (0, 1)
    )
    return {
        "coverage": float(((low <= true) & (true <= high)).mean()),
        "rmse": float(np.sqrt(np.mean((mean - true) ** 2))),
    }


class _Logits(ClassifierMixin, BaseEstimator):
    """A classifier of scikit-learn whose inputs are logits."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.classes_ = np.arange(count)

    def fit(self, x: np.ndarray, y: np.ndarray) -> _Logits:
        return self

    def decision_function(self, x: np.ndarray) -> np.ndarray:
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x.argmax(1)


def _calibrated(net: nn.Module, validation: Part, test: Part) -> dict[str, float]:
    """Log scores of scikit-learn's calibration on the same validation rows, where it applies."""
    with torch.no_grad():
        known, new = (_over(lambda x: net(x).numpy(), x) for x, _ in (validation, test))
    y, true = validation[1].numpy(), test[1].numpy()
    if len(np.unique(y)) < known.shape[1]:  # it takes no classes without rows
        return {}
    scores = {}
    for method in ("temperature", "sigmoid", "isotonic"):
        frozen = FrozenEstimator(_Logits(known.shape[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes with few rows
            model = CalibratedClassifierCV(frozen, method=method).fit(known, y)
        found = model.predict_proba(new)
        chosen = np.clip(found[np.arange(len(true)), true], 1e-12, None)
        scores[method] = float(np.log(chosen).mean())
    return scores


def _separation(score: Callable[[Tensor], np.ndarray], test: Tensor, outside: Tensor) -> float:
    """Area under the ROC curve of a score that is larger for rows outside."""
    some = test[: len(outside)]
    values = np.concatenate([_over(score, some), _over(score, outside)])
    kind = np.repeat([0, 1], [len(some), len(outside)])
    return float(roc_auc_score(kind, values)) if np.isfinite(values).all() else float("nan")


# --- one fit --------------------------------------------------------------------------------------


def _compare(name: str, seed: int, budget: str, sets: Sets, members: Sequence[nn.Module]) -> Record:
    """Scores of the recommended model and of its reference."""
    regression = name in NUMBERS
    net, test = members[0], sets.test
    used = members if budget == "ensemble" else members[:1]
    reference = reference_of(used, sets.validation, regression)
    model, facts = _recommended(name, seed, budget, sets, members)
    before = _log_scores(reference.predict, test)
    facts |= {"reference": float(before.mean()), "temperature": reference.temperature}
    plain = point_estimate(net, "gaussian" if regression else "categorical", sets.train)
    facts["plain"] = float(_log_scores(plain.predict, test).mean())
    if regression:
        facts |= {f"reference_{k}": v for k, v in _inside(reference.predict, test).items()}
    else:
        facts["reference_accuracy"] = _accuracy(reference.predict, test)
        facts["calibrated"] = _calibrated(net, sets.validation, test)
    if model is None:
        return facts
    after = _log_scores(model.predict, test)
    gain, error = _difference(after, before)
    facts |= {"score": float(after.mean()), "gain": gain, "error": error}
    if regression:
        facts |= _inside(model.predict, test)
    else:
        facts["accuracy"] = _accuracy(model.predict, test)
    facts["shifted"] = {}
    for kind, x in shifted(name, test[0], seed).items():
        rows = x, test[1]
        after, before = (_log_scores(one.predict, rows) for one in (model, reference))
        facts["shifted"][kind] = [float(before.mean()), *_difference(after, before)]
    return facts | _outside(model, reference, members, sets, regression)


def _recommended(
    name: str, seed: int, budget: str, sets: Sets, members: Sequence[nn.Module]
) -> tuple[Any, Record]:
    """Return what is recommended, or None if that fails; and how it went."""
    import subbayes

    net = members[0]
    states = [{k: v.clone() for k, v in one.state_dict().items()} for one in members]
    started, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = subbayes.recommend(
                net,
                sets.train,
                validation=sets.validation,
                likelihood="gaussian" if name in NUMBERS else "categorical",
                budget=budget,
                members=list(members[1:]) if budget == "ensemble" else [],
                seed=seed,
            )
        except Exception as error:  # a failure is a result too
            model, failure = None, f"{type(error).__name__}: {error}"
    facts: Record = {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "warnings": sorted({str(w.message)[:300] for w in caught}),
        "changed": any(
            not torch.equal(value, one.state_dict()[key])
            for one, state in zip(members, states, strict=True)
            for key, value in state.items()
        ),
    }
    if model is None:
        return None, facts | {"failure": failure}
    return model, facts | {"summary": model.summary(), **_reported(model)}


def _reported(model: Any) -> Record:
    """The gain that the model reports, with its standard error, and all candidates."""
    return {
        "reported": float(model.gain),
        "reported_error": float(model.error),
        "ships": bool(model.ships_stack),
        "candidates": model.rows,
    }


def _outside(
    model: Any, reference: Any, members: Sequence[nn.Module], sets: Sets, regression: bool
) -> Record:
    """How well scores tell inputs of another kind from test inputs."""
    test, outside = sets.test[0], sets.outside

    def separation(score: Callable[[Tensor], np.ndarray]) -> float | None:
        value = _separation(score, test, outside)
        return value if np.isfinite(value) else None

    facts = {"unlike": separation(model.unlike)}
    if regression:
        return facts | {"deviation": separation(lambda x: np.ravel(model.predict(x).std))}
    facts["entropy"] = separation(lambda x: model.predict(x).entropy)
    last = None if model.score is None else model.score.posterior
    if last is not None:
        facts["information"] = separation(
            lambda x: last.predict(x, method="monte-carlo", n_draws=100).mutual_information
        )
    facts["entropy_of_reference"] = separation(lambda x: reference.predict(x).entropy)
    if len(members) > 1:
        ensemble = ensemble_from_results(list(members), "categorical")
        facts["information_of_ensemble"] = separation(
            lambda x: ensemble.predict(x).mutual_information
        )
    return facts


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default=",".join(DATASETS), help="data sets (default: all)")
    parser.add_argument("--budgets", default=",".join(BUDGETS), help="budgets (default: all)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="validation sets: full, 300")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--quick", action="store_true", help="few rows, as a test of the code")
    add_recorded_option(parser)
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say) -> Record:
    """Compute the missing records and print the tables; return the number of records."""
    torch.set_num_threads(check_count("threads", options.threads))
    plan = _QUICK if options.quick else Plan()
    store = Store(options.results)
    seeds = range(options.first, options.first + check_count("seeds", options.seeds))
    names = split_names(options.only, DATASETS, "only")
    budgets = split_names(options.budgets, BUDGETS, "budgets")
    shapes = split_names(options.shapes, SHAPES, "shapes")
    cases = [(b, s, n, shape) for b in budgets for s in seeds for shape in shapes for n in names]
    for budget, seed, name, shape in () if options.recorded else cases:
        settings = {
            "dataset": name,
            "seed": seed,
            "validation": shape,
            "budget": budget,
            "plan": dataclasses.asdict(plan),
            "recipe": dataclasses.asdict(plan.recipe(name)),
        }

        def compute(settings: Record = settings) -> Record:
            return _computed(settings, plan, options)

        store.get(
            key_of(f"{name}-{seed}-{shape}-{budget}", settings),
            compute,
            lambda record: say(_line(record)),
        )
    records = list(store.records.values())
    publish(markdown(records), "recommend", options, say)
    return {"records": len(records)}


def _computed(settings: Record, plan: Plan, options: argparse.Namespace) -> Record:
    name, seed = settings["dataset"], settings["seed"]
    sets = sets_of(name, seed, options.data_dir, plan.rows)
    if settings["budget"] != "ensemble":
        plan = dataclasses.replace(plan, members=1)
    members = members_of(name, seed, sets, Path(options.results), plan)
    if settings["validation"] == str(_SMALL):
        x, y = sets.validation
        sets = dataclasses.replace(sets, validation=(x[:_SMALL], y[:_SMALL]))
    facts = {k: settings[k] for k in ("dataset", "seed", "validation", "budget")}
    sizes = [len(y) for _, y in (sets.train, sets.validation, sets.test)]
    found = _compare(name, seed, settings["budget"], sets, members)
    return facts | _rounded(found) | {"rows": sizes, "versions": versions()}


def _rounded(value: Any) -> Any:
    """Numbers with six digits, which keeps the file small."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _line(record: Record) -> str:
    label = " ".join(str(record[k]) for k in ("dataset", "seed", "validation", "budget"))
    if "failure" in record:
        return f"{label}: FAILED {record['failure']}"
    shown = ", ".join(
        f"{key} {record[key]:.4g}"
        for key in ("reference", "gain", "error", "reported", "reported_error", "unlike", "cpu")
        if record.get(key) is not None
    )
    return f"{label}: {shown} | {record['summary']}"

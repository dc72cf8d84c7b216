"""The benchmark of Wiese et al. (2023): tables 1 and 3 of Dold et al. (2024).

Nine regressions, with the training and test rows of Wiese et al., by a network without structured
effects other than the noise: semi-structured subspaces of 2, 5 and 12 directions, a deep
ensemble, the Laplace approximation of the last layer, and NUTS over all weights. Settings are those
of the authors' published script, where it has them. Cheap methods run first, over all data sets.
"""

from __future__ import annotations

import argparse
import io
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy import stats

from experiments import ssr_uci_tables
from experiments.datasets import find_file
from experiments.markdown import add_write_option, publish
from experiments.ssr_spaces import DeepEnsemble
from experiments.store import Record, Store, key_of, versions
from experiments.uci import add_datasets_option, split_names
from subbayes import MLP, Training
from subbayes.artifacts.files import atomic_write_bytes
from subbayes.diagnostics import rhat
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.subspace import SUBSPACES
from subbayes.utils.checks import check_count
from subbayes.utils.modes import Mode

DATASETS = ("DS", "DI", "DR", "airfoil", "concrete", "diabetes", "energy", "forest_fire", "yacht")
NETS = {"f1": (3,), "f2": (16, 16, 16)}
METHODS: dict[str, Record] = {
    "k = 2": {"subspace": "curve", "rank": 2, "spread": 1.0},
    "k = 5": {"subspace": "curve", "rank": 5, "spread": 1.0},
    "deep ensemble": {"inference": "deep-ensemble"},
    "Laplace": {"subspace": "last-layer", "inference": "laplace"},
    "MCMC": {"subspace": "full"},
    "k = 12": {"subspace": "curve", "rank": 12, "spread": 1.0},
}
VARIANTS: dict[str, Record] = {
    "k = 5, the curve's spread": {"subspace": "curve", "rank": 5, "spread": "curve"},
    "k = 5, longer": {"subspace": "curve", "rank": 5, "spread": 1.0, "longer": 4},
    "k = 5, all rows": {"subspace": "curve", "rank": 5, "spread": 1.0, "validation": None},
}
"""Variants of k = 5: scale of the prior, steps of training, validation rows."""

PROCEDURE = 1
"""Increase it when a change of the code changes the results of the same settings."""


@dataclass(frozen=True)
class Plan:
    """Settings; those of curves and of sampling in subspaces are from the authors' script.

    Attributes:
        steps: maximum steps of Adam of a curve; the epoch with the best validation score is kept.
        single_steps: maximum steps of a single network.
        patience: steps without a better score after which training stops.
        learning_rate: learning rate of Adam.
        validation: fraction of the training rows held out to select the epoch.
        batch_size: rows per step of a single network; curves use all rows in each step.
        draws: draws per chain in subspaces.
        warmup: draws of warm-up per chain in subspaces.
        chains: number of chains in subspaces.
        members: members of the deep ensemble, which are the starts of the chains of MCMC.
        mcmc_draws: draws per chain in the space of all weights.
        mcmc_warmup: draws of warm-up per chain in the space of all weights.
        mcmc_depth: maximum tree depth of NUTS there.
        mcmc_mode: evaluation mode of the density there; compilation halves the time.
    """

    steps: int = 4500
    single_steps: int = 1500
    patience: int = 400
    learning_rate: float = 5e-3
    validation: float = 0.3
    batch_size: int = 64
    draws: int = 250
    warmup: int = 200
    chains: int = 10
    members: int = 8
    mcmc_draws: int = 100
    mcmc_warmup: int = 200
    mcmc_depth: int = 7
    mcmc_mode: Mode = "compile"

    def training(self, n: int, curve: bool, longer: int, validation: float | None) -> Training:
        """Return the settings of the training; without validation the last epoch is kept."""
        steps = longer * (self.steps if curve else self.single_steps)
        kept = n - round(n * (validation or 0.0))
        each = 1 if curve else math.ceil(kept / self.batch_size)
        return Training(
            epochs=math.ceil(steps / each),
            learning_rate=self.learning_rate,
            batch_size=None if curve else self.batch_size,
            clip_norm=None,
            validation=validation,
            patience=None if validation is None else math.ceil(self.patience / each),
        )


def load_rows(name: str, data_dir: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return training and test rows, standardised by the training rows."""
    with np.load(find_file(f"wiese/{name}.npz", data_dir), allow_pickle=False) as found:
        values = np.column_stack([found["X"], found["y"]]).astype(float)
        train, test = found["train_02"], found["test_02"]
    center, scale = values[train].mean(0), values[train].std(0)
    columns = [*(f"x{i}" for i in range(values.shape[1] - 1)), "y"]
    frame = pd.DataFrame((values - center) / scale, columns=columns)
    return frame.iloc[train].reset_index(drop=True), frame.iloc[test].reset_index(drop=True)


def fit_method(
    method: str,
    net: str,
    train: pd.DataFrame,
    seed: int,
    plan: Plan,
    starts: np.ndarray | None = None,
) -> SemiStructuredRegression:
    """Fit a method to the training rows.

    Args:
        method: name in `METHODS` or `VARIANTS`.
        net: name in `NETS`.
        train: training rows.
        seed: seed of initialisation, training and sampling.
        plan: settings.
        starts: starts of the chains over all weights.
    """
    columns = [c for c in train if c != "y"]
    module = MLP(len(columns), NETS[net], 1, "tanh", seed=seed)
    weights = sum(p.numel() for p in module.parameters())
    model = SemiStructuredRegression(
        f"y ~ 0 + net({', '.join(map('`{}`'.format, columns))})",
        networks={"net": module},
        orthogonal=False,
        priors={"sigma.Intercept": stats.lognorm(1.0)},
    )
    settings = dict((METHODS | VARIANTS)[method])
    kind = settings.pop("subspace", None)
    curve = kind == "curve"
    training = plan.training(
        len(train), curve, settings.pop("longer", 1), settings.pop("validation", plan.validation)
    )
    sampling = Sampling(draws=1000, chains=4, seed=seed, progress=False)
    inference: Any = settings.pop("inference", None)
    ensemble = DeepEnsemble(plan.members)
    if method == "deep ensemble":
        inference = ensemble.members_as_draws
    elif method == "MCMC":
        assert starts is not None
        training = Training(epochs=1, weight_decay=1e-4, clip_norm=None)
        inference = NUTS(max_depth=plan.mcmc_depth)
        sampling = replace(
            sampling,
            draws=plan.mcmc_draws,
            chains=len(starts),
            warmup=plan.mcmc_warmup,
            initial=starts,
            mode=plan.mcmc_mode,
        )
    elif curve:
        settings["rank"] = min(settings["rank"], weights)
        sampling = replace(sampling, draws=plan.draws, chains=plan.chains, warmup=plan.warmup)
    return model.fit(
        train,
        subspace=SUBSPACES[kind](**settings) if kind else ensemble,
        inference=inference,
        training=training,
        sampling=sampling,
    )


def compute_record(
    name: str, net: str, method: str, seed: int, plan: Plan, data_dir: str | None, folder: Path
) -> Record:
    """Return the record of a method with a network on a data set.

    The members of the deep ensemble are saved in `folder`; chains over all weights start there. The
    seconds of these chains are those after the members were trained.
    """
    train, test = load_rows(name, data_dir)
    torch.set_num_threads(1)
    starts = None
    if method == "MCMC":
        starts = _starts(folder, name, net, seed, plan, train)
    clock = time.process_time()
    model = fit_method(method, net, train, seed, plan, starts)
    seconds = time.process_time() - clock
    if method == "deep ensemble":
        _save_starts(_file_of_starts(folder, name, net, seed, plan), model)
    predictive, y = model.predict(test), test["y"].to_numpy()
    density = predictive.log_prob(y)
    sigma = model.effects()["sigma"]
    validation = model.space.history.get("validation_log_likelihood", [])
    return {
        "seconds": round(seconds, 1),
        "versions": versions(),
        "lppd": float(density.mean()),
        "lppd_se": float(density.std(ddof=1) / len(density) ** 0.5),
        "lppd_train": float(model.score_samples(train).mean()),
        "rmse": float(np.sqrt(np.mean((predictive.mean - y) ** 2))),
        "worst": float(density.min()),
        "sigma": float(sigma.mean()),
        "rank": model.space.subspace.rank - 1,
        "trained": len(validation),
        "best": int(np.argmax(validation)) + 1 if validation else None,
        **_diagnostics(model, predictive.outputs[..., 0].numpy(), sigma),
    }


def _starts(
    folder: Path, name: str, net: str, seed: int, plan: Plan, train: pd.DataFrame
) -> Float[np.ndarray, "members d"]:
    """Return the members of the deep ensemble, which is trained if they are not saved."""
    file = _file_of_starts(folder, name, net, seed, plan)
    if not file.exists():
        _save_starts(file, fit_method("deep ensemble", net, train, seed, plan))
    return np.load(file)


def _file_of_starts(folder: Path, name: str, net: str, seed: int, plan: Plan) -> Path:
    """Return the file of the members, named by what determines the deep ensemble."""
    return folder / f"{_key_and_settings('deep ensemble', net, name, seed, plan)[0]}.npy"


def _save_starts(file: Path, ensemble: SemiStructuredRegression) -> None:
    content = io.BytesIO()
    np.save(content, ensemble.draws.z[0])
    atomic_write_bytes(file, content.getvalue())


def _diagnostics(model: SemiStructuredRegression, means: np.ndarray, sigma: np.ndarray) -> Record:
    """Return R-hat of sigma and of the mean of each test row, and statistics of the sampler."""
    draws = model.draws
    if "divergent" not in draws.stats:
        return {}
    spread = np.asarray(rhat(means.reshape(draws.n_chains, draws.n_draws, -1)))
    return {
        "rhat_sigma": float(rhat(sigma[..., None])[0]),
        "rhat_mean": float(np.nanmedian(spread)),
        "rhat_worst": float(np.nanmax(spread)),
        "divergent": float(np.mean(draws.stats["divergent"])),
        "evaluations": float(np.mean(draws.stats["evaluations"])),
        "acceptance": float(np.mean(draws.stats["acceptance"])),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    add_datasets_option(parser, DATASETS)
    parser.add_argument("--nets", default=",".join(NETS), help="names separated by commas")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=[*METHODS, *VARIANTS]
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of training seeds")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None], plan: Plan | None = None) -> Record:
    """Compute the missing records, method by method, and print the tables of all records."""
    plan, folder = Plan() if plan is None else plan, Path(options.results)
    store = Store(folder)
    names = split_names(options.datasets, DATASETS)
    nets = split_names(options.nets, NETS, "nets")
    cases = [
        (method, net, name, seed)
        for method in options.methods
        for net in nets
        for name in names
        for seed in range(check_count("seeds", options.seeds))
    ]
    for method, net, name, seed in cases:
        key, settings = _key_and_settings(method, net, name, seed, plan)

        def compute(
            case: tuple[str, str, str, int] = (name, net, method, seed), settings: Record = settings
        ) -> Record:
            return settings | compute_record(*case, plan, options.data_dir, folder / "arrays")

        store.get(
            key,
            compute,
            lambda r: say(
                f"{r['dataset']} {r['net']} {r['method']}: {r['lppd']:.2f} ± {r['lppd_se']:.2f}, "
                f"{r['seconds']:.0f} s"
            ),
        )
    found = [
        store[key]
        for m in (METHODS | VARIANTS)
        for n in NETS
        for d in DATASETS
        for s in range(options.seeds)
        if (key := _key_and_settings(m, n, d, s, plan)[0]) in store
    ]
    publish(ssr_uci_tables.markdown(found), "ssr_uci", options, say)
    keep = ("dataset", "net", "method", "seed", "lppd", "lppd_se", "seconds")
    return {"records": [{k: r[k] for k in keep} for r in found]}


def _key_and_settings(
    method: str, net: str, name: str, seed: int, plan: Plan
) -> tuple[str, Record]:
    """Return the key of a record and its settings."""
    mcmc = method == "MCMC"
    settings = {
        "dataset": name,
        "net": net,
        "method": method,
        "seed": seed,
        "options": (METHODS | VARIANTS)[method],
        "procedure": PROCEDURE,
        "plan": {k: v for k, v in asdict(plan).items() if mcmc or not k.startswith("mcmc")},
    }
    return key_of(f"{name}-{net}-{method.replace(' ', '')}-{seed}", settings), settings

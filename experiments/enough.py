"""How much of the network is enough: some of the weights sampled, from the same ensemble.

Members of an ensemble are trained once. For each choice of what is sampled (the last layer, a
subnetwork, random directions, all weights) one chain starts at each member, with the weights that
are not sampled at the values of the member, and the prior of all weights conditioned on them. The
chains of all choices take the same number of steps of MCLMC. The protocol of the data is that of
the experiment `tables`.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from experiments.markdown import add_write_option, markdown_table, number, publish
from experiments.store import Record, Store, key_of, versions
from experiments.tables_data import Rows, rows_of
from experiments.tables_methods import gaussian_scores
from subbayes import MLP, Network, Posterior, Training
from subbayes.baselines.deep_ensemble import train_members
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.likelihoods import HeteroscedasticGaussian
from subbayes.predictions.averaging import average
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.subspaces.subnetwork import subnetwork
from subbayes.utils.checks import check_count

__all__ = ["CHOICES", "MemberDensity", "Plan", "add_options", "markdown", "run"]

Say = Callable[..., None]
_LEAST_VARIANCE = 1e-6


@dataclass(frozen=True)
class Plan:
    """Sizes of the experiment.

    Attributes:
        hidden: widths of the network.
        members: number of members, and of chains.
        prior: scale of the prior of the weights.
        training: of each member.
        warmup: steps of each chain before the draws.
        draws: draws that each chain keeps.
        thin: steps for each draw.
        rank: number of weights of the subnetwork, and of random directions.
    """

    hidden: tuple[int, ...] = (16, 16, 16, 16)
    members: int = 10
    prior: float = 0.5
    training: Training = field(
        default_factory=lambda: Training(
            epochs=1000,
            learning_rate=5e-3,
            weight_decay=1e-4,
            validation=0.1,
            patience=50,
            swa_epochs=0,
        )
    )
    warmup: int = 2000
    draws: int = 100
    thin: int = 20
    rank: int = 100


@dataclass(frozen=True)
class MemberDensity:
    r"""The posterior of some weights of each member, $w_c = w_{c0} + P_c z_c$ for chain c.

    Its density is that of all weights, with their prior, at $w_c$, up to a constant.

    Attributes:
        posterior: of all weights.
        starts: weights of the members, shape (chains, D).
        indices: positions of the weights that are sampled, shape (chains, k), or None.
        basis: orthonormal directions, shape (k, D), or None; without either all are sampled.
        scale: of the prior.
    """

    posterior: Posterior
    starts: Float[np.ndarray, "chains D"]
    indices: Int[np.ndarray, "chains k"] | None = None
    basis: Float[np.ndarray, "k D"] | None = None
    scale: float = 1.0

    temperature = 1.0

    @property
    def rank(self) -> int:
        """Number of coordinates of each chain."""
        if self.indices is not None:
            return self.indices.shape[1]
        return self.starts.shape[1] if self.basis is None else len(self.basis)

    @property
    def prior(self) -> Normal:
        """The scale of the coordinates, for the mass matrix."""
        return Normal(np.full(self.rank, self.scale))

    def weights(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, "chains D"]:
        """Weights of each chain."""
        if self.basis is not None:
            return self.starts + z @ self.basis
        if self.indices is None:
            return self.starts + z
        found = self.starts.copy()
        np.put_along_axis(found, self.indices, np.take_along_axis(found, self.indices, 1) + z, 1)
        return found

    def pull(self, gradient: Float[np.ndarray, "chains D"]) -> Float[np.ndarray, "chains k"]:
        """Gradients in the coordinates, the adjoint of the linear part of `weights`."""
        if self.basis is not None:
            return gradient @ self.basis.T
        return gradient if self.indices is None else np.take_along_axis(gradient, self.indices, 1)

    def log_likelihood(self, z: Float[np.ndarray, "chains k"]) -> Float[np.ndarray, " chains"]:
        """Log density over the prior of the coordinates."""
        return self.posterior.value(self.weights(z)) - self.prior.log_prob(z)

    def value_and_grad(
        self, z: Float[np.ndarray, "chains k"]
    ) -> tuple[Float[np.ndarray, " chains"], Float[np.ndarray, "chains k"]]:
        """Log density and its gradient."""
        value, gradient = self.posterior.value_and_grad(self.weights(z))
        return value, self.pull(gradient)

    def fingerprint(self) -> str:
        """Not used, since the experiment keeps records and no checkpoints."""
        return ""


@dataclass(frozen=True)
class Ensemble:
    """The members that all choices share, with the rows."""

    rows: Rows
    plan: Plan
    seed: int
    networks: tuple[Network, ...]
    seconds: float

    @classmethod
    def train(cls, rows: Rows, plan: Plan, seed: int) -> Ensemble:
        """Train the members."""
        started = time.perf_counter()
        module = MLP(rows.x.shape[1], plan.hidden, 2, "relu", seed=seed)
        data = torch.tensor(rows.x, dtype=torch.float32), torch.tensor(rows.y, dtype=torch.float32)
        found = train_members(
            module,
            HeteroscedasticGaussian(_LEAST_VARIANCE),
            data,
            plan.training,
            members=plan.members,
            seed=seed,
            progress=False,
        )
        networks = tuple(one.network for one in found)
        return cls(rows, plan, seed, networks, time.perf_counter() - started)

    @property
    def weights(self) -> Float[np.ndarray, "chains D"]:
        """Weights of the members."""
        return torch.stack([network.weights for network in self.networks]).double().numpy()

    def posterior(self) -> Posterior:
        """The posterior of all weights."""
        data = (
            torch.tensor(self.rows.x, dtype=torch.float32),
            torch.tensor(self.rows.y, dtype=torch.float32),
        )
        space = FullSubspace(torch.zeros_like(self.networks[0].weights))
        likelihood = HeteroscedasticGaussian(_LEAST_VARIANCE)
        return Posterior(self.networks[0], likelihood, data, space, Normal(self.plan.prior))


Choice = Callable[[Ensemble, Posterior], dict[str, Any] | None]


def _members(ensemble: Ensemble, posterior: Posterior) -> None:
    """Nothing is sampled."""


def _last_layer(ensemble: Ensemble, posterior: Posterior) -> dict[str, Any]:
    network = ensemble.networks[0]
    last = list(network.spans.values())[-2:]  # weight and bias
    places = np.concatenate([np.arange(span.start, span.stop) for span in last])
    return {"indices": np.tile(places, (len(ensemble.networks), 1))}


def _subnetwork(ensemble: Ensemble, posterior: Posterior) -> dict[str, Any]:
    """The weights of each member that keep most of its predictive variance."""
    plan, found = ensemble.plan, []
    for network in ensemble.networks:
        space = subnetwork(
            network,
            posterior.likelihood,
            posterior.data,
            rank=plan.rank,
            prior_precision=plan.prior**-2,
            progress=False,
        )
        found.append(space.indices.numpy())
    return {"indices": np.stack(found)}


def _random(ensemble: Ensemble, posterior: Posterior) -> dict[str, Any]:
    rng = np.random.default_rng(ensemble.seed)
    directions = rng.standard_normal((ensemble.weights.shape[1], ensemble.plan.rank))
    return {"basis": np.linalg.qr(directions)[0].T}


def _all(ensemble: Ensemble, posterior: Posterior) -> dict[str, Any]:
    return {}


CHOICES: dict[str, tuple[str, Choice]] = {
    "members": ("none: the ensemble itself", _members),
    "last-layer": ("the last layer", _last_layer),
    "subnetwork": ("a subnetwork", _subnetwork),
    "random": ("random directions", _random),
    "all": ("all weights", _all),
}
"""Label and what is sampled, by name."""


def sample(ensemble: Ensemble, choice: str) -> Record:
    """Return scores on the test rows, the number of coordinates and the seconds of a choice."""
    plan, started = ensemble.plan, time.perf_counter()
    posterior = ensemble.posterior()
    settings = CHOICES[choice][1](ensemble, posterior)
    weights, rank, restarts = ensemble.weights, 0, 0
    if settings is not None:
        density = MemberDensity(posterior, weights, **settings, scale=plan.prior)
        rank = density.rank
        draws = MCLMC(target=(0.5, 0.1), metric="prior").sample(
            density,
            draws=plan.draws,
            chains=len(weights),
            warmup=plan.warmup,
            thin=plan.thin,
            seed=ensemble.seed,
            initial=np.zeros((len(weights), rank)),
            progress=False,
        )
        restarts = int(draws.stats["restarts"][:, -1].sum())
        weights = np.concatenate([density.weights(z) for z in draws.z.swapaxes(0, 1)])
    seconds = time.perf_counter() - started
    vectors = torch.tensor(weights, dtype=torch.float32)
    inputs = torch.tensor(ensemble.rows.new, dtype=torch.float32)
    predictive = average(
        ensemble.networks[0],
        posterior.likelihood,
        lambda rows: vectors[rows],
        inputs,
        count=len(vectors),
        progress=False,
    )
    scores = gaussian_scores(predictive.mean, predictive.std, ensemble.rows.true)
    scores["nll_mixture"] = -float(np.mean(predictive.log_prob(ensemble.rows.true)))
    return {"rank": rank, "restarts": restarts, "seconds": {"sampling": seconds}} | scores


def markdown(records: dict[str, Record]) -> str:
    """Return the table."""
    head = ("sampled", "coordinates", "RMSE", "NLL, mixture", "coverage of 90 %", "seconds")
    rows = [
        [
            CHOICES[name][0],
            record["rank"],
            *(number(record[key]) for key in ("rmse", "nll_mixture", "coverage")),
            f"{record['seconds']['sampling']:.0f}",
        ]
        for name, record in records.items()
    ]
    one = next(iter(records.values()))
    trained = f"sampling after {one['seconds']['training']:.0f} s of training"
    threads = f"{one['threads']} thread{'s' * (one['threads'] > 1)}"
    title = f"{one['dataset']}, seed {one['seed']}: {trained}, on {threads}"
    return markdown_table(head, rows, title)


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--only", default="airfoil", help="data set (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of members and chains")
    parser.add_argument("--threads", type=int, default=1, help="threads")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Say, plan: Plan | None = None) -> Record:
    """Compute the missing records and print the table; return the records."""
    torch.set_num_threads(check_count("threads", options.threads))
    plan, rows = plan or Plan(), rows_of(options.only, options.seed, options.data_dir)
    store, trained = Store(options.results, options.only), []

    def compute(name: str, facts: Record) -> Record:
        if not trained:
            trained.append(Ensemble.train(rows, plan, options.seed))
        found = sample(trained[0], name)
        found["seconds"]["training"] = trained[0].seconds
        threads = {"threads": torch.get_num_threads(), "versions": versions()}
        return facts | threads | found

    records = {}
    for name in CHOICES:
        facts = {"dataset": options.only, "choice": name, "seed": options.seed}
        facts |= {"plan": dataclasses.asdict(plan)}
        records[name] = store.get(
            key_of(f"{options.only}-{name}-{options.seed}", facts),
            lambda name=name, facts=facts: compute(name, facts),
            lambda record, name=name: say(f"{name}: NLL {record['nll_mixture']:.4f}"),
        )
    publish(markdown(records), "enough", options, say)
    keys = ("rank", "rmse", "nll", "nll_mixture", "coverage")
    return {name: {key: record[key] for key in keys} for name, record in records.items()}

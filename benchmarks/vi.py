"""Variational inference: milliseconds per ELBO step and the bound reached, beside a plain loop.

The posterior is that of the `nuts` benchmark, a heteroscedastic MLP of three hidden layers of 16
(float32) on 1000 rows, PCA subspace of rank 3, 5 and 20. A step takes 16 draws of q and 100 rows,
or all of them. The plain loop does the same work as one would write it down: q in torch, its
draws and log q at once, weights copied into the module for one draw after the other, autograd
through all of it, `torch.optim.Adam`. Both start at the same q. Times are of the processor: on
one thread the same as by the clock, but for what else the machine does.

The bounds are compared after as many steps as the library takes, the plain loop's at the best of
three learning rates; for RealNVP these are the steps of the flow, on the same Gaussian.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import nuts
from benchmarks.harness import bar, in_turns, peak_memory, summary, versions
from subbayes import Posterior
from subbayes.inference.importance_sampling import approximate_draws
from subbayes.inference.laplace.laplace import find_mode
from subbayes.inference.variational.elbo import Family, ascend
from subbayes.inference.variational.flows import Flow
from subbayes.inference.variational.gaussians import FullRank, MeanField
from subbayes.inference.variational.variational import _minibatches, _target

RANKS = (3, 5, 20)
BATCHES = (100, None)
SAMPLES = 16
STEPS = 2000
RATES = {
    "mean-field": (0.003, 0.01, 0.03),
    "full-rank": (0.003, 0.01, 0.03),
    "realnvp": (0.001, 0.005, 0.02),
}
"""Of the plain loop; the library has its defaults, 0.05 in its own scale and 0.005."""


# --- the plain loop -------------------------------------------------------------------------------


class Plain:
    """The ELBO of a density, as one would write it down.

    Args:
        posterior: where network, likelihood, data and temperature come from; prior N(0, I).
        start: the member of a family to start at.
    """

    def __init__(self, posterior: Posterior, start: Family) -> None:
        self.posterior = posterior
        gaussian = start.base if isinstance(start, Flow) else start
        assert isinstance(gaussian, (MeanField, FullRank))
        factor = torch.tensor(
            gaussian.factor if isinstance(gaussian, FullRank) else np.diag(gaussian.sd)
        )
        self.mean, self.log_diagonal = torch.tensor(gaussian.mean), factor.diagonal().log()
        self.below = factor.tril(-1)
        self.couplings = None
        if isinstance(start, Flow):
            self.couplings = copy.deepcopy(start.couplings)
            self.free = list(self.couplings.parameters())
        else:
            self.free = [self.mean, self.log_diagonal]
            self.free += [self.below] if isinstance(start, FullRank) else []
        for parameter in self.free:
            parameter.requires_grad_()
        self.module = posterior.network.module_with()
        self.weights = list(self.module.parameters())
        self.sizes = [weight.numel() for weight in self.weights]
        self.shift, self.basis = posterior.subspace.shift, posterior.subspace.basis()

    def draw(self, eps: Tensor) -> tuple[Tensor, Tensor]:
        """z at noise (S, k), and log q there."""
        log_q = -0.5 * eps.square().sum(1) - 0.5 * eps.shape[1] * math.log(2 * math.pi)
        if self.couplings is not None:
            eps, volume = self.couplings.transform().inv.call_and_ladj(eps)
            log_q = log_q - volume
        factor = self.log_diagonal.exp().diag() + self.below.tril(-1)
        return self.mean + eps @ factor.T, log_q - self.log_diagonal.sum()

    def log_joint(self, z: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Tempered log density of one z (k,) from a batch, and its gradient."""
        weights = self.shift + z.to(self.shift.dtype) @ self.basis
        with torch.no_grad():
            for parameter, part in zip(self.weights, weights.split(self.sizes), strict=True):
                parameter.copy_(part.view(parameter.shape))
        terms = self.posterior.likelihood.log_prob(self.module(x), y)
        likelihood = terms.double().sum() * (
            self.posterior.data.n / len(y) / self.posterior.temperature
        )
        pieces = torch.autograd.grad(likelihood, self.weights)
        slope = self.basis @ torch.cat([piece.reshape(-1) for piece in pieces])
        prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum()
        return likelihood.detach() + prior, slope.double() - z

    def elbo(self, eps: Tensor, rows: Tensor | None) -> Tensor:
        """Its estimate from draws and a batch, differentiable."""
        x, y = self.posterior.data.inputs, self.posterior.data.y
        if rows is not None:
            x, y = x[rows], y[rows]
        z, log_q = self.draw(eps)
        fixed = z.detach()
        value, slope = map(
            torch.stack, zip(*(self.log_joint(point, x, y) for point in fixed), strict=True)
        )
        return (value + ((z - fixed) * slope).sum(1) - log_q).mean()

    def find_mode(self, steps: int, rate: float, batch: int | None, seed: int) -> list[float]:
        """Steps of Adam; the seconds each took."""
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.Adam(self.free, lr=rate)
        rows = batches(self.posterior, batch, rng)
        spent = []
        for _ in range(steps):
            began = time.process_time()
            eps = torch.from_numpy(rng.standard_normal((SAMPLES, self.posterior.rank)))
            optimizer.zero_grad()
            (-self.elbo(eps, next(rows))).backward()
            optimizer.step()
            spent.append(time.process_time() - began)
        return spent

    @torch.no_grad()
    def sample(self, draws: int) -> tuple[np.ndarray, np.ndarray]:
        """z (draws, k), and log q there."""
        eps = np.random.default_rng(7).standard_normal((draws, self.posterior.rank))
        z, log_q = self.draw(torch.from_numpy(eps))
        return z.numpy(), log_q.numpy()


def batches(posterior: Posterior, size: int | None, rng: np.random.Generator) -> Any:
    """Rows of one step after another; None for all of them."""
    if size is None:
        return itertools.repeat(None)
    return map(torch.from_numpy, _minibatches(posterior.data.n, size, rng))


# --- ours -----------------------------------------------------------------------------------------


def start_of(posterior: Posterior) -> MeanField:
    """Around the mode, where the library starts too."""
    mode = find_mode(posterior.value_and_grad, np.zeros(posterior.rank), 200)[1]
    return MeanField(mode, np.full(posterior.rank, 0.1))


def ours(
    posterior: Posterior, start: Family, rate: float, steps: int, batch: int | None, seed: int
) -> tuple[Any, list[float]]:
    """The library's ascent; the seconds each step took."""
    ticks = [time.process_time()]
    rng = np.random.default_rng((seed, 0))
    done = ascend(
        start,
        _target(posterior, batch, rng),
        steps=steps,
        samples=SAMPLES,
        rate=rate,
        rng=np.random.default_rng((seed, 1)),
        callback=lambda: ticks.append(time.process_time()),
    )
    return done, np.diff(ticks).tolist()


def bound(posterior: Posterior, z: np.ndarray, log_q: np.ndarray) -> tuple[float, float]:
    """ELBO from draws and all data, and its standard error."""
    found = approximate_draws(posterior, z[None], log_q[None])
    ratios = found.stats["log_density"] - found.stats["log_q"]
    return float(ratios.mean()), float(ratios.std() / np.sqrt(ratios.size))


# --- the run --------------------------------------------------------------------------------------


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    results: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    for k in (3,) if quick else RANKS:
        posterior = nuts.build(k)
        starts = _starts(posterior)
        for name, figures in _times(posterior, starts, quick).items():
            results[f"k = {k}, {name}"] = figures
            say(
                f"k = {k:2d}, {name:28s} {figures['ours_ms']['median']:6.2f} ms, plain "
                f"{figures['plain_ms']['median']:6.2f} ms, ratio {figures['ratio']:.2f}"
            )
            if "100 rows" in name or "mean-field" in name:
                bars.append(
                    bar(
                        f"k = {k}, {name}: over the plain loop",
                        figures["ratio"],
                        2.0 if "100 rows" in name else 1.5,
                    )
                )
        for family, start in starts.items():
            figures = _reached(posterior, family, start, quick)
            results[f"k = {k}, {family}, bound reached"] = figures
            say(
                f"k = {k:2d}, {family:10s} after {figures['steps']} steps: ELBO "
                f"{figures['ours']:.3f} ± {figures['ours_error']:.3f}, plain "
                f"{figures['plain']:.3f} ± {figures['plain_error']:.3f}"
            )
            bars.append(
                bar(
                    f"k = {k}, {family}: ELBO above the plain loop's, nats",
                    figures["ours"] - figures["plain"],
                    -0.05,
                )
            )
    memory = {} if quick else {how: _memory(how) for how in ("neither", "ours", "plain")}
    say(*(f"{how} {value:.0f} MiB" for how, value in memory.items()))
    return {
        "cases": results,
        "samples": SAMPLES,
        "peak_memory_mib": memory,
        "peers": versions("zuko"),
    }, bars


def _starts(posterior: Posterior) -> dict[str, Family]:
    """Where the fit of each family starts: the flow on a full-rank fit."""
    start = start_of(posterior)
    frame, _ = ours(posterior, FullRank.of(start), 0.05, STEPS, 100, 0)
    return {
        "mean-field": start,
        "full-rank": FullRank.of(start),
        "realnvp": Flow.identity(frame.member, 0),
    }


def _times(
    posterior: Posterior, starts: dict[str, Family], quick: bool
) -> dict[str, dict[str, Any]]:
    """Median milliseconds of a step, round by round in turns, and the median of ratios."""
    steps, rounds = (15, 3) if quick else (50, 7)
    cases: dict[str, Callable[[], float]] = {}
    for (family, start), batch in itertools.product(starts.items(), BATCHES):
        name = f"{family}, {batch or 'all'} rows"
        cases[f"ours, {name}"] = partial(_ours_ms, posterior, start, steps, batch)
        cases[f"plain, {name}"] = partial(_plain_ms, posterior, start, steps, batch)
        _ours_ms(posterior, start, 220, batch)  # graphs are made on the way
        _plain_ms(posterior, start, 5, batch)
    found = in_turns(cases, rounds)
    figures: dict[str, dict[str, Any]] = {}
    for name in (case.removeprefix("ours, ") for case in cases if case.startswith("ours")):
        mine, theirs = found[f"ours, {name}"], found[f"plain, {name}"]
        figures[name] = {
            "ours_ms": summary(mine),
            "plain_ms": summary(theirs),
            "ratio": float(np.median(np.divide(theirs, mine))),
        }
    return figures


def _ours_ms(posterior: Posterior, start: Family, steps: int, batch: int | None) -> float:
    return 1e3 * float(np.median(ours(posterior, start, 0.005, steps, batch, 0)[1]))


def _plain_ms(posterior: Posterior, start: Family, steps: int, batch: int | None) -> float:
    return 1e3 * float(np.median(Plain(posterior, start).find_mode(steps, 0.005, batch, 0)))


def _reached(posterior: Posterior, family: str, start: Family, quick: bool) -> dict[str, Any]:
    """The bounds after as many steps, on minibatches of 100 rows."""
    draws = 1000 if quick else 4000
    done, _ = ours(
        posterior, start, 0.005 if family == "realnvp" else 0.05, 400 if quick else STEPS, 100, 1
    )
    eps = np.random.default_rng(7).standard_normal((draws, posterior.rank))
    mine, error = bound(posterior, *done.member.reparameterise(eps)[:2])
    tried = {}
    for rate in RATES[family][1:2] if quick else RATES[family]:
        loop = Plain(posterior, start)
        loop.find_mode(len(done.elbo), rate, 100, 1)
        tried[rate] = bound(posterior, *loop.sample(draws))
    best = max(tried, key=lambda rate: tried[rate][0])
    return {
        "steps": len(done.elbo),
        "ours": mine,
        "ours_error": error,
        "plain": tried[best][0],
        "plain_error": tried[best][1],
        "plain_rate": best,
        "plain_at_each_rate": {str(rate): value for rate, (value, _) in tried.items()},
    }


def _memory(how: str) -> float:
    """Peak MiB of a process that takes twenty steps on all rows, mean-field, k = 20."""
    work = f"vi._{how}_ms(posterior, vi.start_of(posterior), 20, None)"
    return peak_memory(
        "import torch; torch.set_num_threads(1)\nfrom benchmarks import nuts, vi\n"
        f"posterior = nuts.build(20)\n{'' if how == 'neither' else work}"
    )

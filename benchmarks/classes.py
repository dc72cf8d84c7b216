"""Class likelihoods: log density and its gradient beside torch's cross-entropy.

Outputs of 4 chains for 2000 rows, float32. The peer is `torch.nn.functional.cross_entropy` on the
same numbers, for every row and chain; both go through autograd. What a whole log density gains is
measured too: a network 20-50-K in a random subspace of rank 20, ours beside the same posterior
with cross-entropy as its likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import bar, in_turns, seconds, summary
from subbayes import MLP, Network, Posterior
from subbayes.likelihoods import Categorical
from subbayes.subspace import RandomSubspace

CLASSES = (2, 3, 5, 10, 15, 20)
CHAINS, ROWS = 4, 2000
REPEATS = 20


class CrossEntropy(Categorical):
    """The same likelihood as users of torch write it."""

    def log_prob(self, outputs: Tensor, y: Any) -> Tensor:
        """Log probability of each label, shape (..., N)."""
        labels = y.long().expand(outputs.shape[:-1])
        flat = functional.cross_entropy(
            outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1), reduction="none"
        )
        return -flat.reshape(outputs.shape[:-1])


PEERS = {"ours": Categorical, "cross-entropy": CrossEntropy}


def terms(likelihood: Categorical, outputs: Tensor, y: Tensor) -> Callable[[], float]:
    """Seconds of one log density and gradient of outputs."""

    def once() -> None:
        for _ in range(REPEATS):
            at = outputs.detach().requires_grad_()
            likelihood.log_prob(at, y).sum().backward()

    once()
    return lambda: seconds(once) / REPEATS


def whole(likelihood: Categorical, x: Tensor, y: Tensor) -> Callable[[], float]:
    """Seconds of one log density and gradient of a network's posterior in a subspace."""
    network = Network(MLP(x.shape[1], (50,), likelihood.n_classes, seed=0))
    posterior = Posterior(network, likelihood, (x, y), RandomSubspace(network.weights, 20, seed=0))
    z = 0.1 * torch.randn(CHAINS, 20, generator=torch.Generator().manual_seed(1))

    def once() -> None:
        for _ in range(REPEATS):
            posterior.value_and_grad(z)

    once()
    return lambda: seconds(once) / REPEATS


def run(quick: bool = False, say: Callable[..., Any] = print, **_: Any) -> tuple[Any, Any]:
    """Measure; returns the figures and the bars."""
    generator = torch.Generator().manual_seed(0)
    rounds = 5 if quick else 25
    results: dict[str, Any] = {}
    bars = []
    for k in CLASSES:
        outputs = torch.randn(CHAINS, ROWS, k, generator=generator)
        x = torch.randn(ROWS, 20, generator=generator)
        y = torch.randint(k, (ROWS,), generator=generator)
        y[:k] = torch.arange(k)
        made = {name: make(k) for name, make in PEERS.items()}
        cases = {f"{name}, terms": terms(one, outputs, y) for name, one in made.items()}
        cases |= {f"{name}, whole": whole(one, x, y) for name, one in made.items()}
        found = {name: summary(values) for name, values in in_turns(cases, rounds).items()}
        ratios = {
            part: found[f"cross-entropy, {part}"]["median"] / found[f"ours, {part}"]["median"]
            for part in ("terms", "whole")
        }
        results[f"{k} classes"] = {"seconds": found, "times faster": ratios}
        say(
            f"{k} classes: terms {ratios['terms']:.2f}, whole {ratios['whole']:.2f} times faster "
            f"({1e3 * found['ours, whole']['median']:.2f} ms)"
        )
        if k < 16:
            bars.append(bar(f"{k} classes: whole density, times faster", ratios["whole"], 1.0))
    return results, bars

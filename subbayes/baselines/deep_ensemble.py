"""Deep ensembles (Lakshminarayanan et al. 2017): one network trained from S initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.likelihoods import Likelihood
from subbayes.networks.initialisation import fresh_module
from subbayes.networks.selection import Selection
from subbayes.training.configuration import Training
from subbayes.training.many import train_many
from subbayes.training.trainer import TrainingResult
from subbayes.utils.checks import check_count, fail
from subbayes.utils.seeding import derive_seed

__all__ = ["ensemble_from_results", "deep_ensemble"]


def deep_ensemble(
    module: nn.Module,
    likelihood: Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    members: int = 5,
    factory: Callable[[], nn.Module] | None = None,
    seed: int = 0,
    validation: Any = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> WeightSamples:
    r"""Train members from different initial weights, with the data in different orders.

    $$ p(y \mid x) \approx \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w_s), \sigma_s) $$

    Member s is seeded by the seed and s, whatever the number of members; all are trained at once
    if possible (see `train_many`). Each member learns its own parameters of the likelihood. The
    adversarial examples of the paper are left out.

    Args:
        module: the architecture, not changed; each member is a copy with fresh initial weights, in
            which frozen parameters keep their values.
        likelihood: p(y | f).
        data: as for `train`.
        training: how each member is trained, as for `train`.
        members: number of members S.
        factory: makes a module with fresh weights from torch's global generator, which is
            seeded for it; needed if a layer has no `reset_parameters`.
        seed: of initial weights, shuffling and dropout.
        validation: held-out data, as for `train`.
        parameters: which parameters are weights, as for `Network`.
        output: picks the tensor out of what the module returns, as for `Network`.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: a layer that cannot be given fresh weights, or what `train_many` raises.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> ensemble = deep_ensemble(net, Gaussian(), data, Training(epochs=2), members=3)
        >>> ensemble.predict(data[0]).n_draws
        3
    """
    seeds = [derive_seed(seed, s) for s in range(check_count("members", members))]
    starts = [fresh_module(module, factory, own) for own in seeds]
    return ensemble_from_results(
        train_many(
            starts,
            likelihood,
            data,
            training,
            seeds=seeds,
            validation=validation,
            parameters=parameters,
            output=output,
            progress=progress,
        )
    )


def ensemble_from_results(
    results: Sequence[TrainingResult], name: str = "deep ensemble"
) -> WeightSamples:
    """An ensemble of trained networks.

    Args:
        results: what `train` returned for each member; one architecture.
        name: what tables call it.

    Raises:
        InputError: no members, or different architectures.
    """
    if not results:
        fail("results", "at least one member", "none")
    first = results[0].network
    weights = torch.stack([first.flatten(one.module) for one in results])
    own = [one.network.frozen for one in results]
    return WeightSamples(
        first,
        weights,
        stack_likelihoods([one.likelihood for one in results]),
        name,
        own if own[0] else None,
    )

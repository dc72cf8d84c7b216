"""Deep ensembles (Lakshminarayanan et al. 2017): one network trained from S initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.baselines.trained_network import network_and_likelihood
from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.initialisation import fresh_module
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.training.configuration import Training
from subbayes.training.many import train_many
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.training.unfinished import unfinished_unsaid, warn_of_unfinished
from subbayes.utils.checks import check_count, fail
from subbayes.utils.seeding import derive_seed
from subbayes.utils.trees import is_same_view
from subbayes.utils.types import ModuleFactory, OutputFunction


def deep_ensemble(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    members: int = 5,
    factory: ModuleFactory | None = None,
    seed: int = 0,
    validation: Any = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
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
        likelihood: p(y | f), or its name as for `fit`.
        data: as for `train`.
        training: how each member is trained, as for `train`.
        members: number of members S.
        factory: makes a module with fresh weights from torch's global generator, which is
            seeded for it; needed if a layer has no `reset_parameters`. Frozen parameters of
            `module` keep their values, and stay frozen, beside these weights.
        seed: of initial weights, shuffling and dropout.
        validation: held-out data, as for `train`.
        parameters: which parameters are weights, as for `Network`.
        output: picks the tensor out of what the module returns, as for `Network`.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: a layer that cannot be given fresh weights, or what `train_many` raises.
        Diverged: a member that diverges.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> ensemble = deep_ensemble(net, Gaussian(), data, Training(epochs=2), members=3)
        >>> ensemble.predict(data[0]).n_draws
        3
    """
    trained = train_members(
        module,
        likelihood,
        data,
        training,
        members=members,
        factory=factory,
        seed=seed,
        validation=validation,
        parameters=parameters,
        output=output,
        progress=progress,
    )
    warn_of_unfinished([one.converged for one in trained])
    return ensemble_from_results(trained)


def train_members(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    members: int = 5,
    factory: ModuleFactory | None = None,
    seed: int = 0,
    validation: Any = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    progress: bool | None = None,
) -> list[TrainingResult]:
    """Train the members of an ensemble; see `deep_ensemble` for the arguments and the errors.

    It does not warn of a likelihood that has not converged; `warn_of_unfinished` does.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> found = train_members(nn.Linear(2, 1), Gaussian(), data, Training(epochs=2), members=3)
        >>> len(found)
        3
    """
    # a list is data of all members, as for `train`, not one of data for each
    data = Data.of(data) if isinstance(data, list) else data
    validation = Data.of(validation, "validation") if isinstance(validation, list) else validation

    seeds = [derive_seed(seed, s) for s in range(check_count("members", members))]
    with unfinished_unsaid():
        return train_many(
            [fresh_module(module, factory, one) for one in seeds],
            likelihood,
            data,
            training,
            seeds=seeds,
            validation=validation,
            parameters=parameters,
            output=output,
            progress=progress,
        )


def ensemble_from_results(
    results: Sequence[TrainingResult | SwaResult | nn.Module | Network],
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    *,
    name: str = "deep ensemble",
    output: OutputFunction | None = None,
) -> WeightSamples:
    """An ensemble of trained networks, or of your own trained modules.

    Args:
        results: what `train` or `swa` returned for each member, or trained modules, which are not
            changed, or a `Network` of each (with adapters: `Network(model, "adapters")`); of one
            architecture.
        likelihood: p(y | f), or its name as for `fit`; needed for modules.
        data: training data, from which parameters of the likelihood that are "learned" are
            estimated for each member; needed for modules with such a likelihood.
        name: what tables call it.
        output: picks the tensor out of what modules return, as for `Network`.

    Raises:
        InputError: different architectures, or modules without a likelihood or the data
            that it needs.

    Example:
        >>> modules = [nn.Linear(2, 3) for _ in range(5)]
        >>> ensemble_from_results(modules, "categorical").predict(torch.zeros(1, 2)).n_draws
        5
    """
    members = [network_and_likelihood(one, likelihood, data, output) for one in results]
    first = members[0][0]
    for network, _ in members:
        if network.architecture != first.architecture:
            fail("results", "members of one architecture", "several")
    weights = torch.stack([network.weights for network, _ in members])
    tensors_of_members = _own_tensors([network for network, _ in members])
    return WeightSamples(
        first,
        weights,
        stack_likelihoods([likelihood.unweighted for _, likelihood in members]),
        name,
        tensors_of_members if tensors_of_members[0] else None,
    )


def _own_tensors(networks: Sequence[Network]) -> list[dict[str, Tensor]]:
    """The frozen parameters and buffers of each network, without those that all share."""
    first = networks[0].used_frozen
    shared = {
        name
        for name, tensor in first.items()
        if all(_is_same(network.frozen[name], tensor, name in network.base_names)
               for network in networks)
    }  # fmt: skip
    own = first.keys() - shared
    return [{n: t for n, t in network.frozen.items() if n in own} for network in networks]


def _is_same(a: Tensor, b: Tensor, compares_values: bool) -> bool:
    return is_same_view(a, b) or (compares_values and torch.equal(a, b))

"""Compare what can be done with a trained network, and ship what surely gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from subbayes.baselines.deep_ensemble import train_members
from subbayes.baselines.trained_network import network_and_likelihood
from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.validation import check_fit
from subbayes.recommendation.classes import Networks, classes
from subbayes.recommendation.guard import Verdict
from subbayes.recommendation.recommended import Recommendation
from subbayes.recommendation.regression import regression
from subbayes.recommendation.unlike import Unlike, posterior_of
from subbayes.training.configuration import Training
from subbayes.training.trainer import swa
from subbayes.utils.checks import check_choice, check_seed, fail
from subbayes.utils.trees import leaves
from subbayes.utils.types import ModuleFactory, OutputFunction
from subbayes.utils.warning import warn_user

_RATES, _EPOCHS = (1e-3, 1e-2), 15  # of SGD from the network, whose weights are averaged
Budget = Literal["seconds", "minutes", "ensemble"]
_MEMBERS = 5  # of an ensemble with the module
_FEW = 300  # held-out rows, below which a gain is hard to tell from chance
_SHARED = 0.1  # of the held-out rows that may also be training rows, as in tables with repetitions


def recommend(
    module: nn.Module,
    data: Any,
    *,
    validation: Any,
    likelihood: str | Likelihood,
    budget: str = "seconds",
    members: Sequence[nn.Module] = (),
    factory: ModuleFactory | None = None,
    training: Training = Training(),
    output: OutputFunction | None = None,
    seed: int = 0,
    progress: bool | None = False,
) -> Recommendation:
    """The best predictions that a trained network can give, never surely worse than its own.

    Candidates are compared on held-out rows, and stacked; they replace the reference, the network
    with a temperature, only if their cross-fitted gain exceeds two standard errors.

    Args:
        module: a trained module, which is not changed.
        data: the training data, as for `fit`.
        validation: held-out data, at least 300 rows.
        likelihood: p(y | f) that the module was trained with, or its name as for `fit`.
        budget: "seconds" keeps the network, and solves its last layer again under priors of
            several scales; of a regression with Gaussian noise it takes a Gauss-Newton step of all
            weights. "minutes" also trains on from the network at two small rates, and averages the
            weights. "ensemble" averages several networks, and solves their last layers again.
        members: further trained modules of the same architecture, for "ensemble".
        factory: makes a module with fresh weights, of which four are trained as members.
        training: how they are trained.
        output: picks the tensor out of what the module returns, as for `Network`.
        seed: of the random divisions of the held-out rows, and of training on.
        progress: show a progress bar of training on; None shows it on a terminal.

    Raises:
        InputError: held-out rows that are training rows, or that the likelihood does not take;
            "ensemble" without members or a factory.

    Warns:
        UserWarning: fewer than 300 held-out rows.

    Example:
        >>> import subbayes
        >>> x = torch.randn(900, 4, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] * x[:, 1] > 0).long()
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> model = recommend(net, (x[:500], y[:500]), validation=(x[500:], y[500:]),
        ...                   likelihood="categorical")
        >>> model.predict(x[:3]).probabilities.shape
        (3, 2)
    """
    check_choice("budget", budget, get_args(Budget))
    rows, held_out = (
        Data.of(part, name).to(torch.device("cpu"))
        for part, name in ((data, "data"), (validation, "validation"))
    )
    network, family = network_and_likelihood(module, likelihood, rows, output)
    check_fit(network, family, held_out)
    _check_held_out(rows, held_out)
    parts = split_targets(held_out.targets(), held_out_has_weights(family, rows, held_out))
    gaussian = family.is_linear_gaussian and family.has_noise_scale
    networks, groups = [network], {"network": [0]}
    if budget == "ensemble":
        if factory is not None:
            trained = train_members(
                module,
                family,
                rows,
                training,
                members=_MEMBERS - 1,
                factory=factory,
                seed=check_seed(seed),
                output=output,
                progress=progress,
            )
            members = [result.network.module_with() for result in trained]
        if not members:
            fail("members", "further trained modules for budget='ensemble'", "none")
        networks += [network_and_likelihood(one, likelihood, rows, output)[0] for one in members]
        if any(torch.equal(one.weights, network.weights) for one in networks[1:]):
            fail("members", "networks beside the module", "the module itself")
        groups = {"ensemble": list(range(len(networks)))}
    elif budget == "minutes" and not gaussian:
        for rate in _RATES:
            training = Training(swa_epochs=_EPOCHS, swa_learning_rate=rate)
            averaged = swa(
                network, family, rows, training, seed=check_seed(seed), progress=progress
            )
            groups[f"weight average at rate {rate:g}"] = [len(networks)]
            networks.append(averaged.network)
    known = Networks.of(networks, rows, held_out)
    if gaussian:
        model, names, verdict = regression(known, family, parts, check_seed(seed))
    else:
        model, names, verdict = classes(known, groups, family, parts, check_seed(seed))
    score = None
    if known.lasts is not None:
        features, _ = known.features(0, known.data)
        posterior = posterior_of(known.lasts[0], family, known.data, features)
        score = Unlike.of(model, posterior, held_out)
    return Recommendation(
        model=model,
        rows=_table(names, verdict),
        reference=names[0],
        gain=verdict.gain,
        error=verdict.error,
        held_out=held_out.n,
        score=score,
    )


def _table(names: Sequence[str], verdict: Verdict) -> list[dict[str, Any]]:
    """A dict for each candidate."""
    found = []
    for k, (name, weight) in enumerate(zip(names, verdict.weights, strict=True)):
        setting = verdict.settings[k]
        if weight:
            reason = "in the stack" if verdict.ships else "the others did not surely gain"
        elif verdict.ships:
            reason = "adds nothing to the stack"
        else:
            reason = "no sure gain over the reference"
        found.append(
            {
                "candidate": name,
                "score": verdict.scores[k],
                "setting": setting if isinstance(setting, float) else list(setting),
                "weight": weight,
                "reason": reason,
            }
        )
    return found


def _check_held_out(data: Data, held_out: Data) -> None:
    """Check that held-out rows are not training rows, and that there are enough."""
    known, shared = set(_keys(data)), 0
    for key in _keys(held_out):
        shared += key in known
    if shared > _SHARED * held_out.n:
        fail(
            "validation",
            "rows that the network was not trained on",
            f"{shared} of {held_out.n} that are training rows",
            "Hold rows out before training",
        )
    if held_out.n < _FEW:
        warn_user(
            f"validation: {held_out.n} rows, with which gains below about "
            f"{1 / math.sqrt(held_out.n):.1g} nats cannot be told from chance; pass {_FEW} or more"
        )


def _keys(data: Data) -> Iterator[int]:
    """A hash of each row."""
    for inputs, y in data.batches(512):
        columns = [
            t.detach().cpu().reshape(len(t), -1).double() for t in (*leaves(inputs), *leaves(y))
        ]
        yield from (hash(row.tobytes()) for row in torch.cat(columns, 1).numpy())

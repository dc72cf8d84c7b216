"""The subspaces that `fit` knows by name: what they need, and how they are built.

What can be refused is refused here before anything is trained: ranks, inputs, and matrices that
would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from subbayes.data.data import Data, to_device
from subbayes.inference.engine import Engine
from subbayes.likelihoods import Gaussian, Likelihood
from subbayes.networks.network import Network
from subbayes.predictions.averaging import count_rows
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace, FullSubspace, RandomSubspace, Subspace
from subbayes.training.configuration import Training
from subbayes.training.curve import restarted
from subbayes.training.pipeline import Trained, train_second_end
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.types import FORMS, Form

__all__ = [
    "AT_INPUTS",
    "RANK",
    "SUBSPACES",
    "build_subspace",
    "check_sizes",
    "check_subspace",
    "prior_within",
    "widened",
]

SUBSPACES = ("pca", "random", "curve", "optimal", "subnetwork", "full")
AT_INPUTS = ("optimal", "subnetwork")
"""Those that are chosen for inputs."""
RANK = 5


def check_subspace(
    subspace: str | Subspace | Callable[[Trained], Subspace],
    rank: int | None,
    network: Network,
    training: Training,
    factory: Callable[[], nn.Module] | None = None,
) -> None:
    """Check, before the training, a rank that the weights or the trajectory could not span.

    Args:
        subspace: as for `fit`, and so on.
        rank: number of coordinates.
        network: the network.
        training: how it will be trained.
        factory: makes a module with fresh weights, where a layer cannot be reset.

    Raises:
        InputError: a rank that is too high, or another network's subspace.
    """
    if isinstance(subspace, Subspace) and subspace.size != network.size:
        fail(
            "subspace",
            f"{network.size} weights, as the network has",
            subspace.size,
            "Build it from this network's weights",
        )
    if not isinstance(subspace, str):
        return
    check_choice("subspace", subspace, SUBSPACES)
    if subspace == "curve" and not training.epochs:
        fail(
            "training",
            "epochs above 0 to train a curve's other end",
            0,
            "Raise epochs, or choose another subspace",
        )
    if subspace == "curve":
        restarted(network, 0, factory)
    if subspace == "pca":
        check_count("swa_epochs", training.swa_epochs)
    if subspace == "full" or rank is None:
        return
    if check_count("rank", rank, 2 if subspace == "curve" else 1) > network.size:
        fail("rank", f"at most {network.size}, the number of weights", rank, "Lower it")
    if subspace != "pca":
        return
    seen = training.swa_epochs
    kept = min(seen, training.max_snapshots if training.sketch is None else training.sketch + 1)
    limit = kept - (training.sketch is not None or kept == seen)
    if rank > limit:
        fail(
            "rank",
            f"at most {limit}, what the {seen} snapshots of swa_epochs span",
            rank,
            "Lower it, or raise swa_epochs (and max_snapshots)",
        )


def check_sizes(
    network: Network,
    data: Data,
    subspace: str | Subspace | Callable[[Trained], Subspace],
    rank: int | None,
    engine: Engine,
    inputs: Any = None,
    covariance: Form = "exact",
    tunes: bool = False,
) -> None:
    """Check, before the training, that what comes after it fits into memory.

    Args:
        network: the network.
        data: training data.
        subspace: as for `fit`, and so on.
        rank: number of coordinates.
        engine: of the inference.
        inputs: X of the subspace.
        covariance: form of the covariance.
        tunes: whether the prior is found by the evidence, which takes a covariance too.

    Raises:
        InputError: a matrix that does not fit, with its size and what would.
    """
    check_choice("covariance", covariance, FORMS)
    if covariance != "exact" and subspace != "optimal" and not tunes:
        fail(
            "covariance",
            "subspace='optimal', which is chosen by it",
            repr(subspace),
            "Leave it out",
        )
    size, rows = network.size, 0 if inputs is None else count_rows(network, inputs)
    if subspace == "optimal":
        from subbayes.subspaces import optimal

        outputs = network.check(to_device(data.first()[0], network.device))
        optimal.check_size(size, data.n, outputs, covariance, rows)
    if subspace == "subnetwork":
        from subbayes.subspaces import subnetwork

        subnetwork.check_size(size, min(100, size) if rank is None else rank)
    known = subspace.rank if isinstance(subspace, Subspace) else rank
    engine.check(size if subspace == "full" else known)


def check_evidence(
    subspace: str | Subspace | Callable[[Trained], Subspace],
    network: Network,
    data: Data,
    covariance: Form,
) -> None:
    """Check that prior="evidence" has a meaning, and that its matrix fits into memory.

    Args:
        subspace: as for `fit`, and so on.
        network: the network.
        data: training data.
        covariance: form of the covariance of all weights.

    Raises:
        InputError: a subspace whose coordinates are no weights, or a matrix that does not fit.
    """
    if subspace not in ("optimal", "subnetwork", "full"):
        fail(
            "prior",
            "subspace='optimal', 'subnetwork' or 'full' with 'evidence', the evidence "
            "of a prior of the weights",
            repr(subspace),
            "Pass the scale as a number",
        )
    from subbayes.subspaces import optimal

    outputs = network.check(to_device(data.first()[0], network.device))
    optimal.check_size(network.size, data.n, outputs, covariance, 0)


def by_evidence(
    network: Network, likelihood: Likelihood, data: Any, covariance: Form
) -> tuple[Likelihood, float]:
    """The likelihood, its Gaussian noise tuned, and the scale of the prior of largest evidence.

    Args:
        network: trained.
        likelihood: with its parameters learned.
        data: training data.
        covariance: form of the covariance of all weights.
    """
    from subbayes.inference.laplace.linearised import linearised_laplace

    found = linearised_laplace(network, likelihood, data, covariance=covariance)
    tuned = found.tuned(noise=isinstance(likelihood, Gaussian))
    return tuned.likelihood, float(tuned.prior_precision) ** -0.5


def widened(
    scale: float | None,
    subspace: str | Subspace | Callable[[Trained], Subspace],
    rank: int | None,
    size: int,
) -> float:
    r"""The scale of a prior precision $\lambda |S| / D$, see `scaled_prior_precision`.

    Args:
        scale: of the prior of all weights; None for a prior that is not given as one.
        subspace: "subnetwork", or a `CoordinateSubspace`.
        rank: number of weights |S|; None as in `fit`.
        size: number of all weights D.

    Raises:
        InputError: another subspace or prior.

    Example:
        >>> widened(0.5, "subnetwork", 25, 400)
        2.0
    """
    if scale is None:
        fail(
            "scale_prior",
            "a prior given as a scale",
            "a Normal",
            "Scale it yourself, or pass a number",
        )
    if isinstance(subspace, CoordinateSubspace):
        return scale * (size / subspace.rank) ** 0.5
    if subspace != "subnetwork":
        fail(
            "scale_prior",
            "subspace='subnetwork', by whose share of the weights it scales",
            repr(subspace),
            "Leave it out",
        )
    return scale * (size / (min(100, size) if rank is None else rank)) ** 0.5


def build_subspace(
    subspace: str | Callable[[Trained], Subspace],
    trained: Trained,
    rank: int | None,
    seed: int = 0,
    *,
    data: Any = None,
    training: Training | None = None,
    factory: Callable[[], nn.Module] | None = None,
    progress: bool | None = None,
    inputs: Any = None,
    prior_scale: float = 1.0,
    covariance: Form = "exact",
) -> Subspace:
    """The named subspace around a trained network.

    Args:
        subspace: "pca", "random", "curve", "optimal", "subnetwork", "full", or a function of
            `trained`.
        trained: what `train_trajectory` returned.
        rank: number of coordinates; None as in `fit`.
        seed: of the random directions, or of the curve's training.
        data: the training data, for "curve", "optimal" and "subnetwork".
        training: how to train the curve and its other end.
        factory: makes a module with fresh weights for the other end, as for `connect`.
        progress: show progress bars.
        inputs: for "optimal" and "subnetwork", as for `fit`.
        prior_scale: of the weights, for the same.
        covariance: for "optimal", as for `fit`.
    """
    weights, recorder = trained.network.weights, trained.swa.recorder
    if callable(subspace):
        return subspace(trained)
    if subspace == "pca":
        return recorder.pca(max(1, min(RANK, recorder.spanned)) if rank is None else rank)
    if subspace == "random":
        return RandomSubspace(weights, min(RANK, len(weights)) if rank is None else rank, seed)
    if subspace == "curve":
        if data is None:
            fail("data", "the training data, since a curve is trained", None)
        result = train_second_end(
            trained, data, training or Training(), rank, seed, factory=factory, progress=progress
        )
        return result.curve.subspace(unit=False)
    if subspace == "optimal":
        if data is None:
            fail("data", "the training data, which give the covariance of the weights", None)
        from subbayes.subspaces.optimal import optimal

        return optimal(
            trained.network,
            trained.likelihood,
            data,
            inputs=inputs,
            seed=seed,
            rank=min(20, len(weights)) if rank is None else rank,
            covariance=covariance,
            prior_precision=prior_scale**-2,
        )
    if subspace == "subnetwork":
        if data is None:
            fail("data", "the training data, which give the variances of the weights", None)
        from subbayes.subspaces.subnetwork import subnetwork

        return subnetwork(
            trained.network,
            trained.likelihood,
            data,
            inputs=inputs,
            rank=min(100, len(weights)) if rank is None else rank,
            prior_precision=prior_scale**-2,
        )
    return FullSubspace(weights)


def prior_within(space: Subspace, scale: float) -> Normal:
    r"""The prior of z where the weights have $w \sim N(\hat w, s^2 I)$ within a subspace.

    Args:
        space: w = centre + P z.
        scale: s; the prior is $z \sim N(0, s^2 (P^\top P)^{-1})$.

    Example:
        >>> space = RandomSubspace(torch.zeros(9), 2, seed=0)
        >>> prior_within(space, 0.5).scale.shape
        (2,)
    """
    gram = space.pull(space.basis()).double().cpu()
    covariance = scale**2 * torch.linalg.inv(gram)
    return Normal(covariance=((covariance + covariance.T) / 2).numpy())

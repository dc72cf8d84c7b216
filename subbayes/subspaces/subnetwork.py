r"""Subnetworks (Daxberger et al. 2021): some weights are random, the others are frozen.

$$ q(w) = N(w_S;\, \hat w_S, H_S^{-1}) \prod_{r \notin S} \delta(w_r - \hat w_r) $$

S is selected by a score of each weight, by the distance of q to the posterior of all weights, or
by the predictive variance of q:

- *variance*: the squared 2-Wasserstein distance of diagonal Gaussians is $\sum_{d \notin S}
  \sigma_d^2$, so the largest marginal variances are selected, of the diagonal Laplace approximation
  or of the SGD trajectory. In ReLU networks these are the weights of dead units: the outputs do
  not depend on them, and so their variance is the prior's.
- *predictive*: weights are added one at a time to maximise $\mathrm{tr}\, \Sigma_{S,X} =
  \mathrm{tr}\, J_{X,S} H_S^{-1} J_{X,S}^\top$ at inputs X. Weight d adds
  $\lVert r_d \rVert^2 / s_d$, where $r_d$ and $s_d$ are its column of $J_X$ and its precision, both
  conditional on S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from subbayes.curvature.diagonal import Diagonal, squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.partial_jacobian import PartialJacobian
from subbayes.curvature.precision_factory import root
from subbayes.curvature.row_sums import check_in_all, sum_over_rows
from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network, check_network
from subbayes.networks.selection import select
from subbayes.predictions.averaging import count_rows
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace, Subspace
from subbayes.subspaces.base import RankedMethod, check_rank
from subbayes.subspaces.weight_selection import greedy_by_distance, greedy_by_variance
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.checks import check_choice, check_count, check_positive, fail, fail_type
from subbayes.utils.memory import check_memory
from subbayes.utils.types import Weights

_BY = ("predictive", "variance", "swag", "magnitude", "last-layer", "wasserstein")
_MAX_WEIGHTS = 1000


@dataclass(frozen=True)
class Subnetwork(RankedMethod):
    r"""The weights that keep most of the predictive variance; see `subnetwork`.

    Attributes:
        rank: number of weights |S|; None takes 100, or all if there are fewer; for "last-layer",
            the whole layer.
        inputs: inputs without labels for which the weights are selected, or a loader of them; None
            takes the training inputs.
        scale_prior: multiply the scale of the prior by $\sqrt{D / |S|}$, so that the outputs have
            about the variance of a prior on all D weights; the weights are selected under it.
        by: the selection, as for `subnetwork`.
        candidates: for "predictive": number of candidates, as for `subnetwork`.

    Example:
        >>> import torch
        >>> network = Network(torch.nn.Linear(399, 1))
        >>> Subnetwork(rank=25, scale_prior=True).prior_scale(0.5, network)
        2.0
    """

    inputs: Any = field(default=None, repr=False, compare=False)
    scale_prior: bool = False
    by: str = "predictive"
    candidates: int | None = None
    name: ClassVar[str] = "subnetwork"
    description: ClassVar[str] = (
        "the {k} weights that keep most of the predictive variance, {centre}"
    )
    needs_inputs: ClassVar[bool] = True
    default_rank: ClassVar[int] = 100
    spans_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("by", self.by, _BY)
        super().__post_init__()

    @property
    def takes_sharded_rows(self) -> bool:  # type: ignore[override]
        """Whether the selection does not need all training inputs at once."""
        return self.by != "predictive" or self.inputs is not None

    @override
    def expected_rank(self, network: Network) -> int:
        if self.by == "last-layer":
            return _last_layer(network, self.rank).rank
        return super().expected_rank(network)

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check the rank, the inputs, and that the matrices of the selection fit into memory."""
        check_rank(self.rank, network)
        if self.inputs is not None:
            count_rows(network, self.inputs)
        if self.by == "swag" and training.swa_epochs < 2:
            fail(
                "swa_epochs",
                "at least 2 for by='swag', variances along a trajectory",
                training.swa_epochs,
                "Set Training(swa_epochs=20), or choose by='predictive'",
            )
        if self.by == "predictive":
            check_candidates(network.size, self.expected_rank(network), self.candidates)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> CoordinateSubspace:
        """Select the weights under a prior of all weights."""
        return subnetwork(
            trained.network,
            trained.likelihood,
            trained.data,
            rank=self.expected_rank(trained.network),
            by=self.by,
            inputs=self.inputs,
            prior_precision=prior_scale**-2,
            trajectory=trained.recorder,
            candidates=self.candidates,
            progress=trained.progress,
        )

    def prior_scale(self, prior: Normal | float, network: Network) -> float:
        r"""The scale, multiplied by $\sqrt{D / |S|}$ with `scale_prior`."""
        if not self.scale_prior:
            return super().prior_scale(prior, network)
        if isinstance(prior, Normal):
            fail(
                "scale_prior",
                "a prior given as a scale",
                "a Normal",
                "Scale it yourself, or pass a number",
            )
        return prior * (network.size / self.expected_rank(network)) ** 0.5


def subnetwork(
    network: Network,
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    *,
    rank: int | None = None,
    by: str = "predictive",
    inputs: Any = None,
    prior_precision: float = 1.0,
    trajectory: Any = None,
    candidates: int | None = None,
    progress: bool | None = None,
) -> CoordinateSubspace:
    r"""Select the weights of a subnetwork.

    Args:
        network: f(x; w), at the maximum a posteriori, the centre.
        likelihood: p(y | f), with all its own parameters learned; for "predictive", "variance"
            and "wasserstein".
        data: (inputs, y), a DataLoader, a Dataset or `Data`; for the same selections.
        rank: number of weights |S|; for "last-layer" None or the size of the layer.
        by: "predictive", the largest predictive variance at `inputs`; "variance", the largest
            variances of the diagonal Laplace approximation; "swag", the largest variances along a
            `trajectory`; "magnitude", the largest absolute values; "last-layer"; or "wasserstein",
            the smallest exact distance, greedily, for at most 1000 weights.
        inputs: X of "predictive", without labels, ideally the inputs to be predicted; None takes
            those of the data.
        prior_precision: $\lambda$ of the prior $w \sim N(\hat w, \lambda^{-1} I)$.
        trajectory: for "swag": a `TrajectoryRecorder` or what `swa` returns.
        candidates: for "predictive": select among this many weights with the largest
            $\lVert J_{X,d} \rVert$; by default 4 |S|, and at least 1000. Costs a matrix of
            candidates squared.
        progress: show progress bars, with an estimate where they take minutes; None shows them on
            a terminal.

    Returns:
        A subspace around the network's weights, with indices in the order of selection, best first
        (increasing for "last-layer"): the first s of them are the subnetwork of s weights (for
        "predictive", among the same candidates). Its prior is z ~ N(0, 1 / prior_precision), or
        that of `scaled_prior_precision`.

    Raises:
        InputError: a rank above the number of weights, or a missing argument of the selection.

    Source: Daxberger et al. (2021), "Bayesian deep learning via subnetwork inference"; the
    predictive selection is new.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(subbayes.MLP(3, (20,), 1, seed=0).double())
        >>> x = torch.randn(50, 3).double()
        >>> subnetwork(net, Gaussian(0.1), (x, x[:, 0]), rank=10, inputs=x[:5])
        CoordinateSubspace(rank=10, size=101)
        >>> linear = Network(torch.nn.Linear(3, 1, bias=False))
        >>> linear = linear.with_weights(torch.tensor([1.0, -3.0, 2.0]))
        >>> subnetwork(linear, rank=2, by="magnitude").indices
        tensor([1, 2])
    """
    check_network(network)
    check_choice("by", by, _BY)
    if by == "last-layer":
        return _last_layer(network, rank)
    check_positive("prior_precision", prior_precision)
    if rank is None:
        fail("rank", "the number of weights to choose", None)
    if check_count("rank", rank) > network.size:
        fail("rank", f"at most {network.size}, the number of weights", rank, "Lower it")
    if by == "magnitude":
        chosen = _largest(network.weights.abs(), rank)
    elif by == "swag":
        chosen = _largest(_trajectory_variance(trajectory, network), rank)
    elif likelihood is None or data is None:
        fail(
            "likelihood and data",
            f"both, for by={by!r}",
            "None",
            "Pass them, or use by='magnitude'",
        )
    else:
        V = root(network, likelihood, data, progress=progress)
        if by == "variance":
            chosen = _largest(Diagonal(V, prior_precision).variances(), rank)
        elif by == "wasserstein":
            chosen = _by_distance(V, rank, prior_precision)
        else:
            X = V.output_jacobian() if inputs is None else Jacobian.of_inputs(V.plan, inputs)
            X.progress = progress
            chosen = _by_predictive_variance(V, X, rank, candidates, prior_precision)
    return CoordinateSubspace(network.weights, chosen)


def from_mask(
    network: Network, mask: Tensor | np.ndarray | Mapping[str, Tensor | np.ndarray]
) -> CoordinateSubspace:
    """The subnetwork of given weights.

    Args:
        network: the network, whose weights are the centre.
        mask: booleans over the flat weight vector, positions in it, or a dict from names of
            parameters to booleans of their shapes.

    Raises:
        InputError: a mask of another size, an empty mask, or positions that are repeated or out
            of range.

    Example:
        >>> network = Network(torch.nn.Linear(3, 1))
        >>> from_mask(network, torch.tensor([True, False, True, False])).indices
        tensor([0, 2])
        >>> from_mask(network, {"bias": torch.tensor([True])}).indices
        tensor([3])
    """
    check_network(network)
    if isinstance(mask, Mapping):
        return _sorted_subspace(network, _flat_mask(network, mask).nonzero().flatten())
    chosen = torch.as_tensor(mask).to(network.device)
    if chosen.dtype == torch.bool:
        if chosen.shape != (network.size,):
            fail(
                "mask",
                f"{network.size} entries, one for each weight",
                tuple(chosen.shape),
                "Make it for this network's selected parameters",
            )
        chosen = chosen.nonzero().flatten()
    if chosen.numel() == 0:
        fail("mask", "at least one weight", "none")
    return _sorted_subspace(network, chosen)


def scaled_prior_precision(prior_precision: float, subspace: Subspace) -> float:
    r"""The prior precision of a subnetwork scaled by its share of the weights, $\lambda |S| / D$.

    The prior of the outputs then has about the variance of a prior on all weights (Daxberger et
    al. 2021, appendix).

    Args:
        prior_precision: $\lambda$ for all weights.
        subspace: the subnetwork.

    Example:
        >>> network = Network(torch.nn.Linear(3, 1))
        >>> scaled_prior_precision(2.0, from_mask(network, torch.tensor([0])))
        0.5
    """
    return check_positive("prior_precision", prior_precision) * subspace.rank / subspace.size


def _sorted_subspace(network: Network, indices: Int[Tensor, "k"]) -> CoordinateSubspace:
    return CoordinateSubspace(network.weights, indices.sort().values)


def _largest(score: Weights, rank: int) -> Int[Tensor, "k"]:
    """Indices of the largest scores; the first of equal ones."""
    return score.sort(descending=True, stable=True).indices[:rank]


def _last_layer(network: Network, rank: int | None) -> CoordinateSubspace:
    module = network.module_with()
    names = [name for name in select(module, "last-layer") if name in network.spans]
    if not names:
        fail(
            "by",
            "a last layer among the selected parameters",
            ", ".join(network.names),
            "Select it, or use another selection",
        )
    places = [torch.arange(network.spans[name].start, network.spans[name].stop) for name in names]
    subspace = _sorted_subspace(network, torch.cat(places).to(network.device))
    if rank not in (None, subspace.rank):
        fail(
            "rank",
            f"None or {subspace.rank}, the weights of the last layer",
            rank,
            "Leave it out, or use another selection",
        )
    return subspace


def _trajectory_variance(trajectory: Any, network: Network) -> Weights:
    recorder = getattr(trajectory, "recorder", trajectory)
    if not isinstance(recorder, TrajectoryRecorder):
        fail_type("trajectory", "a TrajectoryRecorder or the result of swa", trajectory)
    if recorder.size != network.size:
        fail(
            "trajectory",
            f"{network.size} weights, as the network has",
            recorder.size,
            "Record the parameters that the network selects",
        )
    return recorder.variance.to(network.device)


def _flat_mask(network: Network, masks: Mapping[str, Any]) -> Tensor:
    """A mask of the flat vector from masks of parameters."""
    whole = torch.zeros(network.size, dtype=torch.bool, device=network.device)
    values = network.unflatten(network.weights)
    for name, mask in masks.items():
        chosen = torch.as_tensor(mask)
        if name not in values or chosen.shape != values[name].shape:
            expected = "names of selected parameters, with booleans of their shapes"
            fail("mask", expected, f"{name} of shape {tuple(chosen.shape)}")
        kept = network.masks.get(name, torch.ones(values[name].shape, dtype=torch.bool))
        whole[network.spans[name]] = chosen.to(whole.device)[kept.to(whole.device)]
    if not bool(whole.any()):
        fail("mask", "at least one weight", "none")
    return whole


def check_candidates(size: int, rank: int, candidates: int | None = None) -> int:
    """The number of candidates of the predictive selection, whose matrices must fit into memory.

    Args:
        size: number of weights D.
        rank: number of weights to select.
        candidates: as for `subnetwork`.

    Raises:
        InputError: the matrices do not fit.

    Example:
        >>> [check_candidates(*sizes) for sizes in ((20_000, 100), (20_000, 500), (300, 100))]
        [1000, 2000, 300]
    """
    wanted = min(max(4 * rank, 1000) if candidates is None else candidates, size)
    check_memory(
        "rank" if candidates is None else "candidates",
        f"three matrices of {wanted} candidates squared",
        24 * wanted**2,
        "Lower it",
    )
    return wanted


def _by_predictive_variance(
    V: Jacobian, X: Jacobian, rank: int, candidates: int | None, prior_precision: float
) -> Int[Tensor, "k"]:
    if candidates is not None and check_count("candidates", candidates) < rank:
        fail("candidates", f"at least {rank}, the rank", candidates, "Raise it")
    squares = squared_column_norms(X)
    check_in_all(V, lambda: check_candidates(len(squares), rank, candidates))
    pool = _largest(squares, check_candidates(len(squares), rank, candidates)).sort().values
    precision = _precision_of(V, pool, prior_precision)
    return pool[greedy_by_variance(precision, PartialJacobian(V.plan, pool).gram(X), rank)]


def _precision_of(
    V: Jacobian, indices: Int[Tensor, "k"], prior_precision: float
) -> Float[Tensor, "k k"]:
    columns = PartialJacobian(V.plan, indices)
    (precision,) = sum_over_rows(V, lambda rows: (columns.gram(rows),))
    precision.diagonal().add_(prior_precision)
    return precision


def _by_distance(V: Jacobian, rank: int, prior_precision: float) -> Int[Tensor, "k"]:
    if V.size > _MAX_WEIGHTS:
        fail(
            "by",
            f"at most {_MAX_WEIGHTS} weights for 'wasserstein'",
            V.size,
            "Use 'predictive' or 'variance'",
        )
    return greedy_by_distance(_precision_of(V, torch.arange(V.size), prior_precision), rank)

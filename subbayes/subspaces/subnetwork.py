r"""Subnetworks (Daxberger et al. 2021): some weights are random, the others are fixed.

$$ q(w) = N(w_S;\, \hat w_S, H_S^{-1}) \prod_{r \notin S} \delta(w_r - \hat w_r) $$

S is chosen by a score of each weight, by the distance of q to the posterior of all weights, or by
what q keeps of the predictive variance:

- *variance*: the squared 2-Wasserstein distance of diagonal Gaussians is $\sum_{d \notin S}
  \sigma_d^2$, so keep the largest marginal variances, of the diagonal Laplace approximation or of
  the trajectory of SGD. In networks with ReLU these are the weights of *dead* units, whose
  variance is the prior's because the outputs do not depend on them: they predict nothing.
- *predictive*: keep what makes $\mathrm{tr}\, \Sigma_{S,X} = \mathrm{tr}\, J_{X,S} H_S^{-1}
  J_{X,S}^\top$ large at given inputs X. One weight after another is added, the one that adds most
  given those before it: with $r_d$ and $s_d$ the column of $J_X$ and the precision of weight d,
  both conditional on S, it adds $\lVert r_d \rVert^2 / s_d$.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.curvature.ggn_diagonal import squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.partial_jacobian import PartialJacobian
from subbayes.curvature.precision_factory import root
from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network, check_network
from subbayes.networks.selection import select
from subbayes.predictions.averaging import count_rows
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace, Subspace
from subbayes.subspaces.base import SubspaceMethod, TrainedNetwork, check_rank
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.subspaces.weight_selection import greedy_by_distance, greedy_by_variance
from subbayes.utils.checks import check_choice, check_count, check_positive, fail, fail_type
from subbayes.utils.memory import check_memory

if TYPE_CHECKING:
    from subbayes.training.configuration import Training

__all__ = [
    "Subnetwork",
    "check_size",
    "from_mask",
    "rank_weights",
    "scaled_prior_precision",
    "subnetwork",
]

_BY = ("predictive", "variance", "swag", "magnitude", "last-layer", "wasserstein")
_MOST_WEIGHTS = 1000


@dataclass(frozen=True)
class Subnetwork(SubspaceMethod):
    r"""The weights that together keep most of the predictive variance; see `subnetwork`.

    Attributes:
        rank: number of weights |S|; None takes 100, or all where there are fewer; of "last-layer",
            all of it.
        inputs: inputs without labels for which the weights are chosen, or a loader of them; None
            takes the training inputs.
        scale_prior: make the scale of the prior $\sqrt{D / |S|}$ times larger, so that the outputs
            keep about the variance that they have under a prior of all D weights; the weights are
            chosen under it too.
        by: how the weights are chosen, as for `subnetwork`.
        candidates: of "predictive": how many weights to choose among, as for `subnetwork`.

    Example:
        >>> import torch
        >>> network = Network(torch.nn.Linear(399, 1))
        >>> Subnetwork(rank=25, scale_prior=True).prior_scale(0.5, network)
        2.0
    """

    rank: int | None = None
    inputs: Any = field(default=None, repr=False, compare=False)
    scale_prior: bool = False
    by: str = "predictive"
    candidates: int | None = None
    name: ClassVar[str] = "subnetwork"
    spans_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("by", self.by, _BY)
        if self.rank is not None:
            check_count("rank", self.rank)

    def expected_rank(self, network: Network) -> int:
        """The rank, or its default."""
        if self.by == "last-layer":
            return _last_layer(network, self.rank).rank
        return min(100, network.size) if self.rank is None else self.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check the rank, the inputs, and that the matrices of the choice fit into memory."""
        check_rank(self.rank, network)
        if self.inputs is not None:
            count_rows(network, self.inputs)
        if self.by == "swag":
            check_count("swa_epochs", training.swa_epochs, 2)
        if self.by == "predictive":
            check_size(network.size, self.expected_rank(network), self.candidates)

    def build(self, trained: TrainedNetwork, prior_scale: float = 1.0) -> CoordinateSubspace:
        """The weights chosen under a prior of the weights."""
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
        )

    def prior_scale(self, prior: Normal | float, network: Network) -> float:
        r"""The scale, times $\sqrt{D / |S|}$ with `scale_prior`; see `scaled_prior_precision`."""
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
    likelihood: Likelihood | None = None,
    data: Any = None,
    *,
    rank: int | None = None,
    by: str = "predictive",
    inputs: Any = None,
    prior_precision: float = 1.0,
    trajectory: Any = None,
    candidates: int | None = None,
) -> CoordinateSubspace:
    r"""Choose the weights of a subnetwork.

    Args:
        network: f(x; w), at the maximum a posteriori, the centre.
        likelihood: p(y | f), with all its own parameters learned; for "predictive", "variance"
            and "wasserstein".
        data: (inputs, y), a DataLoader, a Dataset or `Data`; for the same.
        rank: number of weights |S|; not needed for "last-layer", which takes all of it.
        by: "predictive", what the weights together add to the predictive variance at `inputs`;
            "variance", the largest variances of the diagonal Laplace approximation;
            "swag", the largest variances along a `trajectory`; "magnitude", the largest weights;
            "last-layer"; or "wasserstein", the exact distance, for at most 1000 weights, greedily.
        inputs: X of "predictive", without labels: best the inputs to be predicted; None takes
            those of the data.
        prior_precision: $\lambda$ of the prior $w \sim N(\hat w, \lambda^{-1} I)$.
        trajectory: for "swag": a `TrajectoryRecorder` or what `swa` returns.
        candidates: for "predictive": how many weights to choose among, those with the largest
            $\lVert J_{X,d} \rVert$; by default 4 |S|, and at least 1000. Costs a matrix of
            candidates squared.

    Returns:
        A subspace around the network's weights, its indices in the order they are chosen in, best
        first (of "last-layer" in increasing order); read it with the prior
        z ~ N(0, 1 / prior_precision), or with `scaled_prior_precision`.

    Raises:
        InputError: more weights than there are, or what the selection needs is missing.

    Source: Daxberger et al. (2021), "Bayesian deep learning via subnetwork inference"; the
    predictive selection is ours.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(subbayes.MLP(3, (20,), 1, seed=0).double())
        >>> x = torch.randn(50, 3).double()
        >>> subnetwork(net, Gaussian(0.1), (x, x[:, 0]), rank=10, inputs=x[:5])
        CoordinateSubspace(rank=10, size=101)
    """
    check_network(network)
    check_choice("by", by, _BY)
    if by == "last-layer":
        return _last_layer(network, rank)
    if rank is None:
        fail("rank", "the number of weights to choose", None)
    return CoordinateSubspace(
        network.weights,
        rank_weights(
            network,
            likelihood,
            data,
            rank=rank,
            by=by,
            inputs=inputs,
            trajectory=trajectory,
            prior_precision=prior_precision,
            candidates=candidates,
        ),
    )


def rank_weights(
    network: Network,
    likelihood: Likelihood | None = None,
    data: Any = None,
    *,
    rank: int,
    by: str = "predictive",
    inputs: Any = None,
    prior_precision: float = 1.0,
    trajectory: Any = None,
    candidates: int | None = None,
) -> Int[Tensor, "k"]:
    """The positions of a subnetwork's weights in the order they are chosen in.

    The first s of them are the subnetwork of s weights (by "predictive": among the same
    candidates). Arguments are those of `subnetwork`, without "last-layer".

    Example:
        >>> network = Network(torch.nn.Linear(3, 1, bias=False))
        >>> network = network.with_weights(torch.tensor([1.0, -3.0, 2.0]))
        >>> rank_weights(network, rank=2, by="magnitude")
        tensor([1, 2])
    """
    check_network(network)
    check_choice("by", by, tuple(name for name in _BY if name != "last-layer"))
    check_positive("prior_precision", prior_precision)
    if check_count("rank", rank) > network.size:
        fail("rank", f"at most {network.size}, the number of weights", rank, "Lower it")
    if by in ("magnitude", "swag"):
        score = network.weights.abs() if by == "magnitude" else _variance(trajectory, network)
        return _largest(score, rank)
    if likelihood is None or data is None:
        fail(
            "likelihood and data",
            f"both, for by={by!r}",
            "None",
            "Pass them, or use by='magnitude'",
        )
    V = root(network, likelihood, data)
    if by == "variance":
        return _largest(1 / (squared_column_norms(V) + prior_precision), rank)
    if by == "wasserstein":
        return greedy_by_distance(_dense(V, prior_precision), rank)
    X = _jacobian_of(V, inputs)
    pool = _pool(squared_column_norms(X), rank, candidates)
    return pool[greedy_by_variance(*_matrices(V, X, pool, prior_precision), rank)]


def from_mask(
    network: Network, mask: Tensor | np.ndarray | Mapping[str, Tensor | np.ndarray]
) -> CoordinateSubspace:
    """The subnetwork of chosen weights.

    Args:
        network: whose weights are the centre.
        mask: booleans or whole numbers, positions in the flat weight vector; or booleans by name
            of the parameter, in its shape.

    Raises:
        InputError: a mask of another size, one that selects nothing, or positions that are not
            distinct or not there.

    Example:
        >>> network = Network(torch.nn.Linear(3, 1))
        >>> from_mask(network, torch.tensor([True, False, True, False])).indices
        tensor([0, 2])
        >>> from_mask(network, {"bias": torch.tensor([True])}).indices
        tensor([3])
    """
    check_network(network)
    if isinstance(mask, Mapping):
        return _of(network, _named(network, mask).nonzero().flatten())
    if not isinstance(mask, (Tensor, np.ndarray)):
        fail_type("mask", "a tensor, an array or a dict of them", mask)
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
    return _of(network, chosen)


def scaled_prior_precision(prior_precision: float, subspace: Subspace) -> float:
    r"""The prior precision of a subnetwork scaled by its share of the weights, $\lambda |S| / D$.

    With fewer random weights each may vary more, so that the prior of the outputs keeps about the
    variance it has under all weights (Daxberger et al. 2021, appendix).

    Args:
        prior_precision: $\lambda$ for all weights.
        subspace: the subnetwork.

    Example:
        >>> network = Network(torch.nn.Linear(3, 1))
        >>> scaled_prior_precision(2.0, from_mask(network, torch.tensor([0])))
        0.5
    """
    return check_positive("prior_precision", prior_precision) * subspace.rank / subspace.size


# --- by score -------------------------------------------------------------------------------------


def _of(network: Network, indices: Int[Tensor, "k"]) -> CoordinateSubspace:
    return CoordinateSubspace(network.weights, indices.sort().values)


def _largest(score: Float[Tensor, "D"], rank: int) -> Int[Tensor, "k"]:
    """Indices of the largest scores; ties go to the first."""
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
    found = _of(network, torch.cat(places).to(network.device))
    if rank not in (None, found.rank):
        fail(
            "rank",
            f"None or {found.rank}, the weights of the last layer",
            rank,
            "Leave it out, or use another selection",
        )
    return found


def _variance(trajectory: Any, network: Network) -> Float[Tensor, "D"]:
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


def _named(network: Network, masks: Mapping[str, Any]) -> Tensor:
    """A mask of the flat vector from masks by parameter."""
    whole = torch.zeros(network.size, dtype=torch.bool, device=network.device)
    values = network.unflatten(network.weights)
    for name, mask in masks.items():
        if name not in network.spans:
            fail(
                "mask",
                "names of selected parameters",
                name,
                "Selected are: " + ", ".join(network.names[:8]),
            )
        chosen, shape = torch.as_tensor(mask), values[name].shape
        if chosen.dtype != torch.bool or chosen.shape != shape:
            fail(
                f"mask[{name!r}]",
                f"booleans of shape {tuple(shape)}",
                f"{chosen.dtype} of shape {tuple(chosen.shape)}",
            )
        kept = network.masks.get(name, torch.ones(shape, dtype=torch.bool))
        whole[network.spans[name]] = chosen.to(whole.device)[kept.to(whole.device)]
    if not bool(whole.any()):
        fail("mask", "at least one weight", "none")
    return whole


# --- by contribution to the predictive variance ---------------------------------------------------


def _jacobian_of(V: Jacobian, inputs: Any) -> Jacobian:
    if inputs is None:
        return Jacobian(V.plan, V._pairs, V.n, None, V.memory_limit)
    return Jacobian.of_inputs(V.plan, inputs)


def _pool(squares: Float[Tensor, "D"], rank: int, candidates: int | None) -> Int[Tensor, "M"]:
    """Candidates: the weights with the largest effect on the outputs."""
    if candidates is not None and check_count("candidates", candidates) < rank:
        fail("candidates", f"at least {rank}, the rank", candidates, "Raise it")
    return _largest(squares, check_size(len(squares), rank, candidates)).sort().values


def check_size(size: int, rank: int, candidates: int | None = None) -> int:
    """Check that the matrices of the predictive selection fit into memory.

    Args:
        size: number of weights D.
        rank: number of weights to choose.
        candidates: number of candidates; None as for `subnetwork`.

    Returns:
        The number of candidates.

    Raises:
        InputError: they do not fit, with the number.

    Example:
        >>> check_size(20_000, rank=100), check_size(20_000, rank=500), check_size(300, rank=100)
        (1000, 2000, 300)
    """
    wanted = min(max(4 * rank, 1000) if candidates is None else candidates, size)
    check_memory(
        "rank" if candidates is None else "candidates",
        f"three matrices of {wanted} candidates squared",
        24 * wanted**2,
        "Lower it",
    )
    return wanted


def _matrices(
    V: Jacobian, X: Jacobian, pool: Int[Tensor, "M"], prior_precision: float
) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M M"]]:
    """Precision of the candidates, and products of their columns of J_X."""
    entries = PartialJacobian(V.plan, pool)
    precision = entries.gram(V)
    precision.diagonal().add_(prior_precision)
    return precision, entries.gram(X)


# --- by the exact distance ------------------------------------------------------------------------


def _dense(V: Jacobian, prior_precision: float) -> Float[Tensor, "D D"]:
    if V.size > _MOST_WEIGHTS:
        fail(
            "by",
            f"at most {_MOST_WEIGHTS} weights for 'wasserstein'",
            V.size,
            "Use 'predictive' or 'variance'",
        )
    H = PartialJacobian(V.plan, torch.arange(V.size)).gram(V)
    H.diagonal().add_(prior_precision)
    return H

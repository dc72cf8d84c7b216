"""Random subspace (Izmailov et al. 2019, section 4.1): the control for every other subspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from subbayes.networks.network import Network
from subbayes.networks.selection import selects_adapters
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.subspace import RandomSubspace, SparseRandomSubspace, Subspace
from subbayes.subspaces.base import RankedMethod
from subbayes.subspaces.sharded_random import ShardedRandomSubspace
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import check_choice, fail

_KINDS: dict[str, type[RandomSubspace] | type[SparseRandomSubspace]] = {
    "gaussian": RandomSubspace,
    "sparse": SparseRandomSubspace,
}


@dataclass(frozen=True)
class Random(RankedMethod):
    r"""Random directions of norm 1 around the SWA mean.

    Gaussian directions are those of Izmailov et al. (2019). Sparse ones share no weights (Li et al.
    2025, "Uni-LoRA", with random signs), and take memory of 3 numbers for each weight instead of k:

    $$ v_i = \tilde v_i / \lVert \tilde v_i \rVert, \quad \tilde v_i \sim N(0, I_D)
       \qquad \text{or} \qquad
       v_{ij} = \pm 1 / \sqrt{n_i} \text{ for the } n_i \text{ weights } j \text{ of group } i,
       \text{ else } 0 $$

    The prior is z ~ N(0, I), under which a weight has variance k / D in both. Only the seed is
    saved; see `RandomSubspace` and `SparseRandomSubspace`. Weights that are sharded among processes
    get Gaussian directions, of which each process holds a part.

    Attributes:
        rank: number of directions k; None takes 5, or all weights if there are fewer.
        kind: "gaussian" or "sparse"; None takes "sparse" for a network whose weights are adapters,
            and "gaussian" for others.

    Raises:
        InputError: another kind.

    Example:
        >>> import torch
        >>> from subbayes import Network
        >>> network = Network(torch.nn.Linear(2, 1))
        >>> Random().expected_rank(network), Random(kind="sparse").subspace_class(network).__name__
        (3, 'SparseRandomSubspace')
    """

    name: ClassVar[str] = "random"
    description: ClassVar[str] = "{k} random directions, {centre}"
    takes_sharded_weights: ClassVar[bool] = True
    takes_sharded_rows: ClassVar[bool] = True
    default_rank: ClassVar[int] = 5
    kind: Literal["gaussian", "sparse"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is not None:
            check_choice("kind", self.kind, _KINDS)

    def kind_for(self, network: Network) -> str:
        """The kind of directions of a network."""
        return self.kind or ("sparse" if selects_adapters(network.selection) else "gaussian")

    def subspace_class(self, network: Network) -> type[RandomSubspace] | type[SparseRandomSubspace]:
        """The class of the subspace of a network whose weights are in one process."""
        return _KINDS[self.kind_for(network)]

    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """Draw directions with the seed of the training."""
        network, rank = trained.network, self.expected_rank(trained.network)
        if not isinstance(network, ShardedNetwork):
            return self.subspace_class(network)(network.weights, rank, trained.seed)
        if self.kind == "sparse":
            fail("kind", "'gaussian' for sharded weights", "'sparse'", "Leave it out")
        return ShardedRandomSubspace(network, rank, trained.seed)

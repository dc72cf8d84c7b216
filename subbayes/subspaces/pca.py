"""The subspace of the leading principal directions of the SGD trajectory.

Source: Izmailov et al. (2019), algorithm 2; `subbayes.training.trajectory` records them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.subspace import Subspace
from subbayes.subspaces.base import RankedMethod, check_rank
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import fail


@dataclass(frozen=True)
class PCA(RankedMethod):
    """The leading principal directions of the SGD trajectory; see `TrajectoryRecorder.pca`.

    Attributes:
        rank: number of directions k; None takes 5, or fewer if the trajectory spans fewer.

    Example:
        >>> PCA(rank=3).config()
        {'rank': 3}
    """

    name: ClassVar[str] = "pca"
    takes_sharded_rows: ClassVar[bool] = True
    label: ClassVar[str] = "PCA"
    description: ClassVar[str] = (
        "the {k} leading principal components of the SGD trajectory, centred at its mean"
    )
    default_rank: ClassVar[int] = 5

    @property
    def least_snapshots(self) -> int:
        """One more than the number of directions."""
        return 0 if self.rank is None else self.rank + 1

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that the trajectory will span enough directions."""
        seen = training.swa_epochs
        if seen < 2:
            fail(
                "swa_epochs",
                "at least 2 for the subspace 'pca', the directions between points of a trajectory",
                seen,
                "Set Training(epochs=0, swa_epochs=20) for a trained module, or choose a subspace "
                "around its weights, such as 'random' or 'subnetwork'",
            )
        check_rank(self.rank, network)
        kept = min(seen, training.max_snapshots)
        limit = kept - (kept == seen)
        if self.rank is not None and self.rank > limit:
            fail(
                "rank",
                f"at most {limit}, what the {seen} snapshots of swa_epochs span",
                self.rank,
                "Lower it, or raise swa_epochs (and max_snapshots)",
            )

    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """The subspace of the recorded trajectory."""
        trained.swa.warn_of_descent()
        recorder = trained.recorder
        rank = max(1, min(self.default_rank, recorder.spanned)) if self.rank is None else self.rank
        return recorder.pca(rank)

r"""Features of numeric columns for smooth networks: ranks, and harmonics of ranks.

The rank u in [0, 1] of a value among the training rows, interpolated between them, spreads skewed
columns evenly; $\sin(\pi k u)$ and $\cos(\pi k u)$ for k = 1, ..., K let a small network bend
quickly (Tancik et al. 2020, *Fourier features*). All features are standardised by the training
rows; ranks are then divided by 2 and harmonics by 2 k, so that functions are smooth a priori.
Columns of one or two values, such as indicators of categories, have no ranks.

The outputs of a `FoldEnsemble` may be further columns, with features like the others, which are
returned as well: a hierarchical network adds them to its mean.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from msgspec import Meta, structs
from torch import Tensor, nn

from subbayes.artifacts.facts import Count, Facts
from subbayes.networks.hierarchical.fold_ensemble import COLUMN_SIZE, FoldEnsemble
from subbayes.utils.seeding import fork_rng

_KNOTS = 256  # at most, of the ranks of a column
_CLIP = 8.0  # standard deviations beyond which features are cut
_CONSTANT = 1e-6  # standard deviation of a feature that is left out

Harmonics = Annotated[int, Meta(ge=0, le=100)]


class RankFeatures(nn.Module):
    """Standardised columns, their ranks and harmonics of these.

    Args:
        columns: number of columns d, with the outputs of the ensemble.
        ranked: positions of columns with ranks.
        knots: at most this many values of a column have known ranks.
        harmonics: K.
        features: number of features; those that are constant in training are left out.
        ensemble: of the other columns, whose outputs are the last ones.

    Example:
        >>> x = torch.arange(8.0)[:, None]
        >>> features = RankFeatures.fit(x, harmonics=1)
        >>> features(x).shape
        torch.Size([8, 4])
    """

    values: Tensor
    ranks: Tensor
    kept: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        columns: int,
        ranked: list[int],
        knots: int,
        harmonics: int,
        features: int,
        ensemble: FoldEnsemble | None = None,
    ) -> None:
        super().__init__()
        self.settings = {
            "columns": columns,
            "ranked": list(ranked),
            "knots": knots,
            "harmonics": harmonics,
            "features": features,
            "ensemble": None if ensemble is None else ensemble.numbers,
        }
        self.columns = columns
        self.ensemble = ensemble
        self.ranked, self.harmonics = list(ranked), harmonics
        self.register_buffer("values", torch.zeros(len(ranked), knots))
        self.register_buffer("ranks", torch.zeros(len(ranked), knots))
        self.register_buffer("kept", torch.zeros(features, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    @classmethod
    def fit(
        cls,
        x: Float[Tensor, "n d"],
        harmonics: int | None = 4,
        ensemble: FoldEnsemble | None = None,
    ) -> RankFeatures:
        """Learn ranks and scales from training rows.

        Args:
            x: columns, float32, with outputs of the ensemble.
            harmonics: K; 0 for ranks alone, None for the columns alone.
            ensemble: of the other columns.
        """
        knots = [] if harmonics is None else [_knots(column) for column in x.T.numpy()]
        ranked = [k for k, (values, _) in enumerate(knots) if len(values) > 2]
        most = max((len(knots[k][0]) for k in ranked), default=0)
        found = cls(x.shape[1], ranked, most, harmonics or 0, 0, ensemble)
        for row, k in enumerate(ranked):  # padded by the last knot
            for buffer, own in zip((found.values, found.ranks), knots[k], strict=True):
                buffer[row] = torch.from_numpy(np.append(own, np.full(most - len(own), own[-1])))
        features = found._features(x).double()
        scale = features.std(0, correction=0)
        order = [torch.ones(x.shape[1]), 2.0 * torch.ones(len(ranked))]
        useful = [torch.ones(x.shape[1] + len(ranked), dtype=torch.bool)]
        for k in range(1, (harmonics or 0) + 1):  # functions of m values span m - 1 dimensions
            useful += [torch.tensor([len(knots[c][0]) > 2 * k + 1 for c in ranked])] * 2
            order += [2.0 * k * torch.ones(len(ranked))] * 2
        kept = ((scale > _CONSTANT) & torch.cat(useful).bool()).nonzero()[:, 0]
        found.settings["features"] = len(kept)
        found.kept, found.mean = kept, features.mean(0)[kept].float()
        found.scale = scale[kept].float() * torch.cat(order)[kept]
        return found

    def forward(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n f"]:
        """Features of rows, and the outputs of the ensemble, which x may have as last columns."""
        x = self.extended(x)
        found = (self._features(x)[:, self.kept] - self.mean) / self.scale
        found = found.clamp(-_CLIP, _CLIP)
        return found if self.ensemble is None else torch.cat([found, x[:, -1:]], 1)

    def extended(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        """The columns with the outputs of the ensemble, unless they are there."""
        if self.ensemble is None or x.shape[1] >= self.columns:
            return x
        return torch.cat([x, self.ensemble(x)], 1)

    def _features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n f"]:
        """The columns, ranks, and sines and cosines of these, before they are standardised."""
        if not self.ranked:
            return x
        column = x[:, self.ranked].mT.contiguous()
        after = torch.searchsorted(self.values, column).clamp(1, max(self.values.shape[1] - 1, 1))
        (low, high), (below, above) = (
            (table.gather(1, after - 1), table.gather(1, after))
            for table in (self.values, self.ranks)
        )
        share = ((column - low) / (high - low).clamp_min(1e-30)).clamp(0.0, 1.0)
        rank = (below + share * (above - below)).mT
        angles = [torch.pi * k * rank for k in range(1, self.harmonics + 1)]
        waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        return torch.cat([x, rank, *waves], 1)


class RankFeaturesSettings(Facts):
    """The arguments of `RankFeatures` in an artifact, whose buffers are tensors of the network."""

    columns: Count
    ranked: list[Annotated[int, Meta(ge=0)]]
    knots: Annotated[int, Meta(ge=0, le=_KNOTS)]
    harmonics: Harmonics
    features: Count
    ensemble: list[Annotated[int, Meta(ge=0)]] | None

    def __post_init__(self) -> None:
        if len(self.ranked) > self.columns or max(self.ranked, default=0) >= self.columns:
            raise ValueError(f"expected positions of {self.columns} columns")

    @property
    def numbers(self) -> int:
        """Numbers of the largest buffers."""
        plain = 0 if self.ensemble is None else self.columns - 1 + len(self.ensemble)
        return max(2 * len(self.ranked) * self.knots, COLUMN_SIZE * plain)

    def build(self) -> RankFeatures:
        """The features, with any buffers."""
        arguments = structs.asdict(self)
        if self.ensemble is not None:
            with fork_rng(0):
                arguments["ensemble"] = FoldEnsemble(self.columns - 1, self.ensemble)
        return RankFeatures(**arguments)


def _knots(column: Float[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
    """Increasing values and their mean ranks in [0, 1], evenly spaced in rank if there are many."""
    values, counts = np.unique(column, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2) / len(column)
    if len(values) > _KNOTS:
        kept = np.unique(np.searchsorted(ranks, np.linspace(ranks[0], ranks[-1], _KNOTS)))
        values, ranks = values[kept], ranks[kept]
    return values, ranks

r"""PCA of the SGD trajectory (Izmailov et al. 2019, algorithm 2), and the moments of SWAG.

A recorder takes snapshots of the weights during training, and stores the last M of them.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.module_copy import check_in_one_process
from subbayes.networks.selection import Selection, select
from subbayes.subspace import DenseSubspace
from subbayes.utils.checks import check_count, check_positive, check_seed, fail
from subbayes.utils.types import Weights

_CHUNK = 2**20  # columns converted to float64 at a time


class TrajectoryRecorder:
    r"""Records weights along training: their mean, variance and principal directions.

    Deviations are from the final mean of all snapshots (the running mean of the paper's algorithm
    makes the first one zero and shortens the early ones). With A the matrix of the last M
    deviations, the low-rank covariance is $A^\top A / (M - 1)$.

    The memory is M D numbers for M snapshots.

    Args:
        max_snapshots: number M of the last snapshots to keep.
        parameters: selection of the parameters of a module, as for `Network`.

    Attributes:
        n: number of snapshots seen.

    Raises:
        InputError: fewer than two snapshots would be kept.

    Example:
        >>> recorder = TrajectoryRecorder(max_snapshots=5)
        >>> for step in range(8):
        ...     recorder.update(torch.tensor([float(step), 0.0, 1.0]))
        >>> recorder.n, recorder.mean
        (8, tensor([3.5000, 0.0000, 1.0000]))
        >>> recorder.pca(rank=1).basis().norm()
        tensor(2.3049)
    """

    def __init__(self, max_snapshots: int = 20, parameters: Selection = "all") -> None:
        self.max_snapshots = check_count("max_snapshots", max_snapshots, 2)
        self.parameters = parameters
        self.n = 0
        self._mean = self._scatter = torch.zeros(0, dtype=torch.float64)
        self._recent: list[Tensor] = []

    # --- recording --------------------------------------------------------------------------

    def update(self, source: Any) -> None:
        """Record the selected parameters of a module, or a flat weight vector (D,).

        Raises:
            InputError: NaN or infinite weights; a sharded module.
        """
        weights = self._flat(source)
        if not bool(torch.isfinite(weights).all()):
            fail(
                "snapshot",
                "finite weights",
                "NaN or infinite ones",
                "The training diverged: lower its learning rate",
            )
        if self.n == 0:
            self._mean = torch.zeros_like(weights, dtype=torch.float64)
            self._scatter = torch.zeros_like(self._mean)
        self.n += 1
        deviation = weights.double() - self._mean
        self._mean += deviation / self.n
        self._scatter += deviation * (weights.double() - self._mean)
        self._recent.append(weights)
        del self._recent[: -self.max_snapshots]

    def _flat(self, source: Any) -> Weights:
        """A copy on the CPU, in float32 unless the weights are float64."""
        if isinstance(source, nn.Module):
            check_in_one_process(source)
            named = dict(source.named_parameters())
            parts = [
                named[name].detach() if mask is None else named[name].detach()[mask]
                for name, mask in select(source, self.parameters).items()
            ]
            source = torch.cat([part.reshape(-1) for part in parts])
        dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        return source.detach().to("cpu", dtype, copy=True)

    # --- moments ----------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of weights D (0 before the first snapshot)."""
        return len(self._mean)

    @property
    def _dtype(self) -> torch.dtype:
        return self._recent[0].dtype if self._recent else torch.float32

    @property
    def mean(self) -> Weights:
        """Mean of all snapshots, accumulated in float64: the SWA solution, shape (D,)."""
        self._require(1)
        return self._mean.to(self._dtype)

    @property
    def variance(self) -> Weights:
        r"""Variance of each weight, $\overline{w^2} - \bar w^2$ over all snapshots, shape (D,)."""
        self._require(1)
        return (self._scatter / self.n).clamp_min(0).to(self._dtype)

    @property
    def deviations(self) -> Float[Tensor, "M D"]:
        """The last M snapshots minus the mean of all."""
        self._require(2)
        return (torch.stack(self._recent).double() - self._mean).to(self._dtype)

    def _factor(self) -> Float[Tensor, "M D"]:
        """A factor F of the low-rank covariance F'F."""
        return self.deviations / (len(self._recent) - 1) ** 0.5

    def _require(self, n: int) -> None:
        if self.n < n:
            fail(
                "recorder",
                f"at least {n} snapshot{'s' * (n > 1)}",
                self.n,
                "Call recorder.update(model) in the training loop",
            )

    # --- results ---------------------------------------------------------------------

    @property
    def singular_values(self) -> Float[Tensor, "M"]:
        r"""The spectrum $s_1 \ge s_2 \ge \dots$ of the deviations over $\sqrt{M - 1}$."""
        return principal_directions(self._factor())[1]

    @property
    def spanned(self) -> int:
        """Number of directions that the snapshots span: the largest rank of `pca`."""
        return min(self._limit, _count_above_rounding(self.singular_values))

    @property
    def _limit(self) -> int:
        """Largest possible rank: the number of snapshots, minus one if they define the mean."""
        self._require(2)
        return len(self._recent) - (len(self._recent) == self.n)

    def pca(self, rank: int) -> DenseSubspace:
        r"""The subspace of the leading principal directions of the trajectory.

        $$ A / \sqrt{M - 1} = U S V^\top, \qquad w = \bar w + \sum_{i \le k} z_i\, s_i v_i $$

        The prior is z ~ N(0, I), which is as wide as the trajectory in each direction. The
        decomposition is exact, by the M x M matrix A A'; the entry of largest absolute value of
        each direction is positive.

        Args:
            rank: number of directions k.

        Raises:
            InputError: a rank above the number of directions that the snapshots span.

        Example:
            >>> recorder = TrajectoryRecorder()
            >>> for seed in range(6):
            ...     recorder.update(torch.randn(50, generator=torch.Generator().manual_seed(seed)))
            >>> recorder.pca(rank=3)
            DenseSubspace(rank=3, size=50)
        """
        limit = self._limit
        if check_count("rank", rank) > limit:
            why = f"what {len(self._recent)} snapshots span"
            fail("rank", f"at most {limit}, {why}", rank, "Record more snapshots")
        rows, s = principal_directions(self._factor())
        spanned = _count_above_rounding(s)
        if rank > spanned:
            fail(
                "rank",
                f"at most {spanned}, the directions in which the snapshots differ",
                rank,
                "Raise the learning rate or record snapshots further apart"
                if spanned < 1
                else "Lower the rank or record more snapshots",
            )
        return DenseSubspace(self.mean, rows[:rank])

    def swag(self, n: int, seed: int = 0, scale: float = 1.0) -> Float[Tensor, "n D"]:
        r"""Draw weights from the SWAG Gaussian (Maddox et al. 2019, equation 1).

        $$ w = \bar w + \sqrt{\alpha / 2}\, \Sigma_{\mathrm{diag}}^{1/2} \epsilon_1
             + \sqrt{\alpha / (2 (M - 1))}\, A^\top \epsilon_2 $$

        Args:
            n: number of draws.
            seed: seed of the draws.
            scale: $\alpha$, which multiplies the covariance.
        """
        check_count("n", n)
        check_positive("scale", scale)
        factor, mean, std = self._factor(), self.mean, self.variance.sqrt()
        generator = torch.Generator().manual_seed(check_seed(seed))
        draws = []
        for _ in range(n):
            z1 = torch.randn(self.size, generator=generator, dtype=mean.dtype)
            z2 = torch.randn(len(factor), generator=generator, dtype=mean.dtype)
            draws.append(mean + (scale / 2) ** 0.5 * (std * z1 + z2 @ factor))
        return torch.stack(draws)

    # --- saving -------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state to save: tensors, and values that JSON can hold."""
        tensors = {"mean": self._mean.clone(), "scatter": self._scatter.clone()}
        if self._recent:
            tensors["recent"] = torch.stack(self._recent)
        return tensors, {"max_snapshots": self.max_snapshots, "n": self.n}

    @classmethod
    def from_state(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], parameters: Selection = "all"
    ) -> TrajectoryRecorder:
        """Rebuild a recorder from `state`; `parameters` are not part of it."""
        recorder = cls(config["max_snapshots"], parameters)
        recorder.n = config["n"]
        recorder._mean, recorder._scatter = tensors["mean"].clone(), tensors["scatter"].clone()
        recorder._recent = [row.clone() for row in tensors.get("recent", ())]
        return recorder

    def __repr__(self) -> str:
        kept = f"max_snapshots={self.max_snapshots}"
        return f"TrajectoryRecorder(n={self.n}, size={self.size}, {kept})"


def _count_above_rounding(sizes: Float[Tensor, "M"]) -> int:
    """Number of singular values above rounding."""
    tolerance = 1e-7 if sizes.dtype == torch.float64 else 1e-5
    return int((sizes > sizes[0] * tolerance).sum()) if float(sizes[0]) > 0 else 0


def gram_matrix(rows: Float[Tensor, "M D"]) -> Float[Tensor, "M M"]:
    """Inner products of rows in float64, on the CPU; few columns are converted at a time."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for block in rows.split(_CHUNK, 1):
        gram += (block.double() @ block.double().T).cpu()
    return gram


def principal_directions(
    rows: Float[Tensor, "M D"],
) -> tuple[Float[Tensor, "M D"], Float[Tensor, "M"]]:
    r"""Rows $s_i v_i$ of the singular value decomposition, largest first, and all $s_i$.

    With eigenvectors u of the Gram matrix, $s_i v_i = u_i^\top A$ needs no division by s. The entry
    of largest absolute value of each row is positive.

    Args:
        rows: the matrix A.
    """
    values, vectors = torch.linalg.eigh(gram_matrix(rows))
    s = values.flip(0).clamp_min(0).sqrt()
    u = vectors.flip(1).T
    directions = torch.cat(
        [(u @ block.double()).to(rows.dtype) for block in rows.split(_CHUNK, 1)], 1
    )
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return directions * torch.where(largest < 0, -1.0, 1.0).to(rows.dtype), s.to(rows.dtype)

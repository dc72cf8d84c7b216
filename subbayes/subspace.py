r"""Affine subspaces of weight space: w = shift + z @ basis.

A subspace maps coordinates to weights, pushes tangents forward and pulls cotangents back. A
coordinate subspace stores indices and a random one a seed instead of a basis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Count, Facts, Line, Size
from subbayes.artifacts.tensors import strip_prefix
from subbayes.utils.checks import check_count, check_seed, fail, fail_type
from subbayes.utils.memory import index_dtype
from subbayes.utils.registry import Registry
from subbayes.utils.types import Weights

__all__ = [
    "SUBSPACE_KINDS",
    "CoordinateSubspace",
    "DenseSubspace",
    "FullSubspace",
    "JointSubspace",
    "RandomSubspace",
    "SparseRandomSubspace",
    "Subspace",
]

_CACHE_BYTES = 256 * 2**20


class Subspace(ABC):
    r"""An affine subspace $w = \hat w + \sum_i z_i v_i$ of the weight space.

    `push`, `pull` and `project` take every floating dtype; `push` returns that of the shift.

    Attributes:
        shift: the centre $\hat w$, shape (D,).
        rank: number of coordinates k.
        traceable: whether `push` and `pull` may be traced; a traced graph stores the tensors that
            they read.
    """

    shift: Weights
    rank: int
    traceable: bool = True

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.shift.numel()

    @abstractmethod
    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """Push tangents of coordinates to tangents of weights: z @ basis."""

    @abstractmethod
    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Pull cotangents of weights back to coordinates, the adjoint of `push`."""

    @abstractmethod
    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Coordinates of the point of the subspace closest to `weights`."""

    @abstractmethod
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Subspace:
        """The same subspace on another device or in another dtype."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""

    def weights(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """Weights at coordinates z."""
        return self.shift + self.push(z)

    def basis(self) -> Float[Tensor, "k D"]:
        """The basis as a dense matrix (k, D)."""
        return self.push(torch.eye(self.rank, dtype=self.shift.dtype, device=self.shift.device))

    def config(self) -> dict[str, Any]:
        """A description that JSON can hold, with what else `from_config` needs in "settings"."""
        return {"name": type(self).__name__, "rank": self.rank}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Subspace:
        """The subspace that `config` and `tensors` describe, of a kind of another package.

        Args:
            config: its name, rank and settings.
            tensors: by name.
        """
        fail("subspace", "a kind with a class method from_config", cls.__name__)

    def check_size(self, size: int) -> None:
        """Raise `InputError` unless the subspace has the `size` weights of a network."""
        if self.size != size:
            fail(
                "subspace",
                f"{size} weights, as the network has",
                self.size,
                "Build it from this network's weights",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"


class DenseSubspace(Subspace):
    """A subspace given by its basis vectors.

    Args:
        shift: centre, shape (D,).
        basis: basis vectors of any norm as rows, shape (k, D). If they are linearly dependent,
            `project` returns the coordinates of least norm.

    Raises:
        InputError: incompatible shapes, NaN or infinite entries.

    Example:
        >>> space = DenseSubspace(torch.zeros(3), torch.tensor([[1.0, 1.0, 0.0]]))
        >>> space.weights(torch.tensor([2.0]))
        tensor([2., 2., 0.])
        >>> space.project(torch.tensor([2.0, 2.0, 5.0]))
        tensor([2.])
    """

    def __init__(self, shift: Tensor, basis: Tensor) -> None:
        if shift.ndim != 1 or basis.ndim != 2 or basis.shape[1] != shift.shape[0]:
            fail(
                "basis",
                f"shape (k, {shift.numel()}) for a shift of {shift.numel()} weights",
                tuple(basis.shape),
            )
        if not 1 <= basis.shape[0] <= basis.shape[1]:
            fail(
                "basis",
                f"at least 1 and at most {basis.shape[1]} rows, the number of weights",
                basis.shape[0],
            )
        check_finite_weights("basis", (shift, *basis))
        self.shift = _stored(shift)
        self.rank = basis.shape[0]
        self._basis = _stored(basis.to(shift))

    @override
    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        return z.to(self.shift.dtype) @ self._basis

    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Cotangent @ basis.T."""
        return cotangent.to(self.shift.dtype) @ self._basis.T

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Least-squares coordinates."""
        basis = self._basis.double()
        right = (weights - self.shift).double() @ basis.T
        return _solve(basis @ basis.T, right).to(weights.dtype)

    @override
    def basis(self) -> Float[Tensor, "k D"]:
        return self._basis

    @override
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> DenseSubspace:
        return DenseSubspace(self.shift.to(device, dtype), self._basis.to(device, dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Shift and basis."""
        return {"shift": self.shift, "basis": self._basis}


class CoordinateSubspace(Subspace):
    """A subnetwork: the selected weights vary, the others are fixed at the shift.

    Args:
        shift: centre, shape (D,).
        indices: distinct positions of the selected weights, shape (k,).

    Raises:
        InputError: repeated indices, or indices out of range.

    Example:
        >>> space = CoordinateSubspace(torch.zeros(4), torch.tensor([1, 3]))
        >>> space.weights(torch.tensor([5.0, 6.0]))
        tensor([0., 5., 0., 6.])
    """

    def __init__(self, shift: Tensor, indices: Tensor) -> None:
        indices = torch.as_tensor(indices)
        if indices.is_floating_point() or indices.dtype == torch.bool:
            fail(
                "indices",
                "whole numbers",
                indices.dtype,
                "Convert a mask to positions with mask.nonzero().flatten()",
            )
        in_range = indices.numel() > 0 and 0 <= int(indices.min()) <= int(indices.max()) < len(
            shift
        )
        if indices.ndim != 1 or not in_range or len(indices.unique()) < len(indices):
            fail(
                "indices",
                f"distinct positions in 0..{len(shift) - 1}",
                f"{indices.numel()} of shape {tuple(indices.shape)}",
            )
        self.shift = _stored(shift)
        self.indices: Int[Tensor, "k"] = indices.long().to(shift.device)
        self.rank = len(indices)

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """Scatter z into zeros."""
        index = self.indices.expand(z.shape)
        zeros = self.shift.new_zeros(self.size).expand(*z.shape[:-1], self.size)
        return zeros.scatter(-1, index, z.to(self.shift.dtype))

    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Gather the selected entries."""
        return cotangent.index_select(-1, self.indices)

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """The selected entries, relative to the shift."""
        return self.pull(weights - self.shift)

    @override
    def to(
        self, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> CoordinateSubspace:
        return CoordinateSubspace(self.shift.to(device, dtype), self.indices.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Shift and indices."""
        return {"shift": self.shift, "indices": self.indices}


class FullSubspace(Subspace):
    """The full weight space around a centre: k = D, the basis is the identity.

    Args:
        shift: centre, shape (D,).
    """

    def __init__(self, shift: Tensor) -> None:
        self.shift = _stored(shift)
        self.rank = shift.numel()

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """Z itself."""
        return z.to(self.shift.dtype)

    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """The cotangent itself."""
        return cotangent

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Weights relative to the shift."""
        return weights - self.shift

    @override
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FullSubspace:
        return FullSubspace(self.shift.to(device, dtype))

    def tensors(self) -> dict[str, Tensor]:
        """The shift."""
        return {"shift": self.shift}


class SeededSubspace(Subspace):
    """Base class of subspaces whose directions follow from a seed, which is saved in their place.

    Args:
        shift: centre, shape (D,).
        rank: number of directions k.
        seed: seed of the directions; the same on every device and for every dtype.

    Raises:
        InputError: a rank above the number of weights.
    """

    def __init__(self, shift: Tensor, rank: int, seed: int = 0) -> None:
        if (rank := check_count("rank", rank)) > shift.numel():
            fail("rank", f"at most {shift.numel()}, the number of weights", rank)
        self.shift, self.rank, self.seed = _stored(shift), rank, check_seed(seed)

    @override
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Subspace:
        return type(self)(self.shift.to(device, dtype), self.rank, self.seed)

    def tensors(self) -> dict[str, Tensor]:
        """The shift; the directions follow from the seed."""
        return {"shift": self.shift}

    def config(self) -> dict[str, Any]:
        """Name, rank and seed."""
        return super().config() | {"seed": self.seed}


class RandomSubspace(SeededSubspace):
    """Gaussian directions of norm 1 around a centre (Izmailov 2019, section 4.1).

    Only the seed is saved. A basis of up to 256 MiB is stored; a larger one is generated row by row
    for each product.

    Args:
        shift: centre, usually the SWA mean, shape (D,).
        rank: number of directions k.
        seed: seed of the directions; the same on every device and for every dtype.

    Raises:
        InputError: a rank above the number of weights.

    Example:
        >>> space = RandomSubspace(torch.zeros(100), rank=3, seed=0)
        >>> space.basis().norm(dim=1)
        tensor([1.0000, 1.0000, 1.0000])
    """

    def __init__(self, shift: Tensor, rank: int, seed: int = 0) -> None:
        super().__init__(shift, rank, seed)
        small = rank * shift.numel() * shift.element_size() <= _CACHE_BYTES
        self._cached = self._basis() if small else None
        self.traceable = small

    def _basis(self) -> Float[Tensor, "k D"]:
        found = self.shift.new_empty(self.rank, self.size)  # a list of rows would double the peak
        for i in range(self.rank):
            found[i] = self._row(i)
        return found

    def _row(self, i: int) -> Weights:
        # NumPy's generator, because torch's cannot be called under vmap
        generator = np.random.Generator(np.random.PCG64([self.seed, i]))
        row = generator.standard_normal(self.size, dtype=np.float32).astype(np.float64)
        return torch.from_numpy(row / np.linalg.norm(row)).to(self.shift)

    @override
    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        z = z.to(self.shift.dtype)
        if self._cached is not None:
            return z @ self._cached
        total = z[..., :1] * self._row(0)
        for i in range(1, self.rank):
            total = total + z[..., i : i + 1] * self._row(i)
        return total

    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Cotangent @ basis.T."""
        cotangent = cotangent.to(self.shift.dtype)
        if self._cached is not None:
            return cotangent @ self._cached.T
        return torch.stack([cotangent @ self._row(i) for i in range(self.rank)], -1)

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Least-squares coordinates."""
        gram = torch.stack([self.pull(self._row(i)) for i in range(self.rank)]).double()
        return _solve(gram, self.pull(weights - self.shift).double()).to(weights.dtype)


class SparseRandomSubspace(SeededSubspace):
    r"""Random directions that share no weights (Li et al. 2025, Uni-LoRA; here with random signs).

    Weights are divided at random into k groups, whose sizes $n_j$ differ by at most one. Weight i
    follows the coordinate of its group j(i), with a random sign, so that $P^\top P = I$:

    $$ w_i = \hat w_i \pm z_{j(i)} / \sqrt{n_{j(i)}} $$

    `push` looks z up and `pull` sums each group. That takes 12 D bytes in float32, where the basis
    of a `RandomSubspace` takes 4 k D. Weights have the same variances; only the seed is saved.

    Args:
        shift: centre, shape (D,).
        rank: number of directions k.
        seed: seed of the groups and signs; the same on every device and for every dtype.

    Attributes:
        groups, entries: the group, and the sign times scale, of each weight, shape (D,).

    Raises:
        InputError: a rank above the number of weights.

    Example:
        >>> space = SparseRandomSubspace(torch.zeros(8), rank=2, seed=0)
        >>> space.weights(torch.tensor([2.0, 4.0]))
        tensor([-1.,  2.,  2., -1., -1., -2., -2., -1.])
    """

    def __init__(self, shift: Tensor, rank: int, seed: int = 0) -> None:
        super().__init__(shift, rank, seed)
        words = np.random.PCG64([self.seed, self.size]).random_raw(self.size)
        order, signs = np.argsort(words, kind="stable"), 1.0 - 2.0 * (words & np.uint64(1))
        group = np.empty(self.size, dtype=np.int64)
        group[order] = np.arange(self.size) % rank
        entries = signs / np.sqrt(np.bincount(group, minlength=rank))[group]
        padding, kind = np.full(-self.size % rank, self.size), index_dtype(self.size)  # of a zero
        self.groups = torch.from_numpy(group).to(self.shift.device, kind)
        self._members = torch.from_numpy(np.append(order, padding)).to(self.shift.device, kind)
        self.entries = torch.from_numpy(entries).to(self.shift)

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """The coordinate of each weight, times its sign and scale."""
        return z.to(self.shift.dtype).index_select(-1, self.groups) * self.entries

    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Sums over the groups."""
        scaled = F.pad(cotangent * self.entries, (0, 1))
        return scaled.index_select(-1, self._members).unflatten(-1, (-1, self.rank)).sum(-2)

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """`pull`, since the directions are orthonormal."""
        return self.pull(weights - self.shift)


class JointSubspace(Subspace):
    r"""A subspace of some weights and all directions of others: $(\theta,\, \hat w + P\varphi)$.

    The coordinates are $z = (\varphi, \theta)$. The effects $\theta$ are not projected and so can
    be interpreted (Dold et al. 2024, section 3.2); they are in float64, whatever the others are in.

    Args:
        inner: the subspace of the other weights, of rank k.
        effects: number of effects P, the first entries of the weight vector.

    Example:
        >>> inner = DenseSubspace(torch.zeros(2), torch.tensor([[1.0, 1.0]]))
        >>> JointSubspace(inner, effects=2).weights(torch.tensor([3.0, 7.0, 8.0]))
        tensor([7., 8., 3., 3.], dtype=torch.float64)
    """

    def __init__(self, inner: Subspace, effects: int) -> None:
        self.inner = inner
        self.effects = check_count("effects", effects)
        self.shift = torch.cat([inner.shift.new_zeros(effects, dtype=torch.float64), inner.shift])
        self.rank = inner.rank + effects
        self.traceable = inner.traceable

    def push(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S D"]:
        """Copy the effects; push the others through the inner subspace."""
        inner = self.inner.push(z[..., : self.inner.rank])
        return torch.cat([z[..., self.inner.rank :].to(self.shift.dtype), inner], -1)

    @override
    def pull(self, cotangent: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        inner = self.inner.pull(cotangent[..., self.effects :].to(self.inner.shift.dtype))
        return torch.cat([inner, cotangent[..., : self.effects]], -1)

    def project(self, weights: Float[Tensor, "*S D"]) -> Float[Tensor, "*S k"]:
        """Copy the effects; project the others on the inner subspace."""
        inner = self.inner.project(weights[..., self.effects :])
        return torch.cat([inner, weights[..., : self.effects]], -1)

    @override
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> JointSubspace:
        return JointSubspace(self.inner.to(device, dtype), self.effects)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the inner subspace."""
        return {f"inner.{name}": tensor for name, tensor in self.inner.tensors().items()}

    def config(self) -> dict[str, Any]:
        """The inner subspace and the number of effects."""
        return super().config() | {"effects": self.effects, "inner": self.inner.config()}


def check_subspace(subspace: Any) -> Subspace:
    """Raise `InputTypeError` unless the argument is a subspace of weights."""
    if not isinstance(subspace, Subspace):
        remedy = "subbayes.fit takes names and builds the subspace"
        fail_type("subspace", "a Subspace, such as RandomSubspace(weights, 5)", subspace, remedy)
    return subspace


def _stored(tensor: Tensor) -> Tensor:
    """A tensor in the layout of files, by which products have the same bits after loading."""
    return tensor.detach().contiguous()


def check_finite_weights(argument: str, rows: Iterable[Tensor]) -> None:
    """Raise `InputError` for NaN or infinite entries of weight vectors."""
    if not all(bool(torch.isfinite(row).all()) for row in rows):  # row by row saves memory
        fail(
            argument,
            "finite numbers",
            "NaN or infinite entries",
            "The training of these weights diverged: lower its learning rate",
        )


def _solve(gram: Float[Tensor, "k k"], right: Float[Tensor, "*S k"]) -> Float[Tensor, "*S k"]:
    """The solution z of z @ gram = right with the least norm."""
    return right @ torch.linalg.pinv(gram, hermitian=True)


SUBSPACE_KINDS: Registry[type[Subspace]] = Registry(
    "subspace_kind",
    {
        name: f"subbayes.subspace:{name}"
        for name in (
            "DenseSubspace",
            "CoordinateSubspace",
            "FullSubspace",
            "RandomSubspace",
            "SparseRandomSubspace",
            "JointSubspace",
        )
    },
)
"""Classes of subspaces by the name of the class; others by `register` or an entry point."""


class SubspaceFacts(Facts):
    """A subspace but for its tensors, as `Subspace.config` has it."""

    name: Line
    rank: Count
    seed: Size = 0
    effects: Size = 0
    inner: SubspaceFacts | None = None
    settings: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.name not in SUBSPACE_KINDS:
            raise ValueError(
                f"expected one of {', '.join(SUBSPACE_KINDS)}, got {self.name[:60]!r}, whose class "
                "registers itself by SUBSPACE_KINDS.register"
            )
        is_joint = self.name == "JointSubspace"
        if is_joint and (self.inner is None or self.rank != self.inner.rank + self.effects):
            raise ValueError("expected a joint subspace with the rank of its parts")

    def arrays(self, prefix: str = "subspace") -> Arrays:
        """Its tensors, which have to agree with its rank."""
        if self.inner is not None:
            return self.inner.arrays(f"{prefix}.inner")
        if SUBSPACE_KINDS.is_of_others(self.name):
            return {f"{prefix}.*": ANY}
        D = f"{prefix} size"
        full = self.name == "FullSubspace"
        arrays = {f"{prefix}.shift": Array(self.rank if full else D, alike=D)}
        if self.name == "DenseSubspace":
            arrays[f"{prefix}.basis"] = Array(self.rank, D, alike=D)
        if self.name == "CoordinateSubspace":
            arrays[f"{prefix}.indices"] = Array(self.rank, dtype="whole", low=0)
        return arrays

    def build(self, tensors: Mapping[str, Tensor]) -> Subspace:
        """Rebuild the subspace from `Subspace.tensors`."""
        if SUBSPACE_KINDS.is_of_others(self.name):
            config = {"name": self.name, "rank": self.rank, "settings": self.settings}
            return SUBSPACE_KINDS[self.name].from_config(config, tensors)
        if self.inner is not None:
            return JointSubspace(self.inner.build(strip_prefix("inner", tensors)), self.effects)
        kind: Any = SUBSPACE_KINDS[self.name]
        if issubclass(kind, SeededSubspace):
            return kind(tensors["shift"], self.rank, self.seed)
        return kind(**tensors)  # by the names of `Subspace.tensors`

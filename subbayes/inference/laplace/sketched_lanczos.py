r"""Sketched Lanczos: a score of how little the data determine a prediction, in bounded memory.

The k steps of the Lanczos method on the Gauss-Newton matrix G span a space K in which its leading
eigenvectors lie. What is left of the gradients of a row's outputs,

$$ s(x) = \lVert (I - P_K) J_x^\top \rVert_F^2 , $$

is large where the outputs depend on weights that the data do not determine: $s(x) / \lambda$ is the
predictive variance in these directions. Neither the basis (k D numbers) nor its
orthogonalisation is stored: a random map S from D to p numbers, a subsampled Fourier transform with
random signs, keeps of each Lanczos vector its sketch, and

$$ s(x) \approx \lVert (I - Q Q^\top) S J_x^\top \rVert_F^2 , $$

with an orthonormal basis Q of the sketches. If S preserves squared norms in the span of K and
$J_x$ up to a factor in $[1 - \epsilon, 1 + \epsilon]$, then so it does the score, which is the
distance from K; $\epsilon$ is of the order $\sqrt{(k + C) / p}$. Directions that occur twice,
since no vector is orthogonalised, do not change Q. Once the space holds all that G determines,
further vectors are rounding: Q is spanned by the Ritz vectors alone whose values exceed it, and
ends with a product of which nothing is left. (The paper subtracts the projection from
$\lVert J_x \rVert^2$ without the sketch, with an error relative to $\lVert J_x \rVert^2$.)

Source: Miani, Beretta and Hauberg (2024), "Sketched Lanczos uncertainty score: a low-memory summary
of the Fisher information".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.precision_factory import root
from subbayes.likelihoods import Likelihood
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.network import Network
from subbayes.utils.checks import check_count, check_seed, fail
from subbayes.utils.progress import estimated_progress
from subbayes.utils.types import Weights

_LOST = 1e-10  # of the largest product's norm: a direction that is rounding
_ROUNDING = 10  # units of it, of the largest Ritz value: those below are rounding


@dataclass(frozen=True)
class FourierSketch:
    """A subsampled Fourier transform with random signs, an approximate isometry.

    Args:
        inputs: numbers D of a vector.
        outputs: numbers p of its sketch, made even; from D on the vector is kept as it is.
        seed: seed of the signs and frequencies.

    Example:
        >>> sketch = FourierSketch(1000, 200)
        >>> v = torch.ones(1, 1000).double()
        >>> bool(abs(sketch(v).square().sum() / 1000 - 1) < 0.3)
        True
    """

    inputs: int
    outputs: int
    seed: int = 0
    signs: Weights = field(init=False, repr=False, compare=False)
    frequencies: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rng, half = np.random.default_rng(self.seed), (self.inputs - 1) // 2
        signs = torch.from_numpy(2.0 * rng.integers(2, size=self.inputs) - 1)
        count = min(half, max(1, self.outputs // 2))
        chosen = np.sort(rng.permutation(half)[:count]) + 1  # without the constant
        object.__setattr__(self, "signs", signs)
        object.__setattr__(self, "frequencies", torch.from_numpy(chosen))

    @property
    def is_identity(self) -> bool:
        """Whether vectors are kept as they are."""
        return self.outputs >= self.inputs or self.inputs < 3

    def __call__(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s p"]:
        """Sketches of vectors as rows, in float64."""
        v = vectors.double()
        if self.is_identity:
            return v
        half, count = (self.inputs - 1) // 2, len(self.frequencies)
        signs, where = self.signs.to(v.device), self.frequencies.to(v.device)
        kept = torch.fft.rfft(v * signs)[:, where]
        parts = torch.cat([kept.real, kept.imag], 1)
        return parts * (2 * half / (self.inputs * count)) ** 0.5


@dataclass(frozen=True)
class SketchedLanczos:
    """Scores of rows from a sketched Krylov space; see `sketched_lanczos`.

    Attributes:
        V: root of the Gauss-Newton matrix.
        sketch: the random map S.
        basis: orthonormal rows in which the sketches of the Lanczos vectors lie, shape (r, p).
        values: Ritz values, largest first, shape (k,); the basis has those above rounding.
    """

    V: Jacobian
    sketch: FourierSketch
    basis: Float[Tensor, "r p"]
    values: Float[Tensor, "k"]

    def __repr__(self) -> str:
        return (
            f"SketchedLanczos(rank={len(self.basis)}, sketch={self.basis.shape[1]}, "
            f"size={self.V.size})"
        )

    @property
    def bytes(self) -> int:
        """Memory of the score itself: the sketched basis, signs and frequencies."""
        kept = (self.basis, self.sketch.signs, self.sketch.frequencies)
        return sum(part.nbytes for part in kept)

    @outside_inference_mode
    def scores(self, inputs: Any) -> Float[np.ndarray, "n"]:
        """The scores of rows, higher for rows that are less like the training data.

        Args:
            inputs: in the form the module takes, or a loader of them.

        Raises:
            InputError: inputs that the module does not take.
        """
        X = Jacobian.of_inputs(self.V.plan, inputs, self.V.memory_limit)
        parts = [self._left(rows) for _, rows in X.dense()]
        return torch.cat(parts).reshape(X.n, X.roots).sum(1).cpu().numpy()

    def _left(self, rows: Float[Tensor, "m D"]) -> Float[Tensor, "m"]:
        sketched = self.sketch(rows)
        inside = sketched @ self.basis.T
        return (sketched - inside @ self.basis).square().sum(1)


@outside_inference_mode
def sketched_lanczos(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    *,
    rank: int = 50,
    sketch: int = 5000,
    seed: int = 0,
    memory_limit: int | None = None,
    progress: bool | None = None,
) -> SketchedLanczos:
    """Run the Lanczos method on the Gauss-Newton matrix, and keep sketches of its vectors.

    It costs `rank` passes over the data, 3 D numbers while it runs, and `rank * sketch` numbers
    afterwards. A score costs one backward pass for each output.

    Args:
        network: f(x; w), at its trained weights.
        likelihood: p(y | f), with all its own parameters learned, or its name as for `fit`.
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        rank: number of Lanczos steps k, at most the number of weights.
        sketch: numbers p that are kept of each vector, a few times the rank; as many as there are
            weights, or more, keep the vectors themselves.
        seed: seed of the first vector and of the sketch.
        memory_limit: bytes of a block of gradients, times four; by default 1 GiB.
        progress: show a progress bar; None shows it on a terminal.

    Returns:
        An object with `.scores(inputs)`.

    Raises:
        InputError: parts that do not fit together, or a sketch that is not larger than the rank.

    Source: Miani, Beretta and Hauberg (2024), algorithm 2.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(subbayes.MLP(2, (8,), 1, "tanh", seed=0).double())
        >>> x = torch.linspace(-1, 1, 100).double().reshape(50, 2)
        >>> found = sketched_lanczos(net, Gaussian(0.1), (x, x[:, 0]), rank=10, progress=False)
        >>> near, far = found.scores(torch.tensor([[0.0, 0.0], [5.0, -5.0]]).double())
        >>> bool(near < far)
        True
    """
    V = root(network, likelihood, data, memory_limit, False)
    products, size = ManyProducts(V), V.size
    rank = min(check_count("rank", rank), size)
    if check_count("sketch", sketch, 2) <= rank and sketch < size:
        remedy = f"Use 10 numbers for each direction, sketch={10 * rank}, or more"
        fail("sketch", f"more numbers than the {rank} directions", sketch, remedy)
    made = FourierSketch(size, sketch, check_seed(seed))
    first = np.random.default_rng([seed, 1]).standard_normal(size)
    v = torch.from_numpy(first).to(network.device)
    v, before, beta, scale = v / v.norm(), torch.zeros_like(v), 0.0, 1e-300
    kept, diagonal, beside = [], [], []
    with estimated_progress(rank, "Lanczos", progress, "passes") as report:
        for _ in range(rank):
            kept.append(made(v[None])[0])
            product = products.squared(v[None].to(products.dtype))[0].double()
            scale = max(scale, float(product.norm()))
            diagonal.append(float(v @ product))
            product = product - diagonal[-1] * v - beta * before
            beta = float(product.norm())
            beside.append(beta)
            report(1)
            if beta <= _LOST * scale:  # an invariant subspace
                break
            before, v = v, product / beta
    T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, value in enumerate(beside[: len(diagonal) - 1]):
        T[i, i + 1] = T[i + 1, i] = value
    values, mix = torch.linalg.eigh(T)
    eps = torch.finfo(products.dtype).eps
    clear = values > _ROUNDING * eps * values[-1]
    sketches = mix[:, clear].T.to(device=network.device) @ torch.stack(kept)
    _, norms, rows = torch.linalg.svd(sketches, full_matrices=False)
    distinct = norms > eps**0.25 * norms[:1]  # copies of a Ritz vector differ by rounding
    return SketchedLanczos(V, made, rows[distinct], values.flip(0))

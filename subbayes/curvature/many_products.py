r"""Products of a Jacobian with many vectors at once, without rows of it.

`Jacobian` computes its rows, one backward pass for each output of an input. Here J v is a
forward-mode derivative and $J^\top u$ a backward pass, for s vectors in one vectorised call, so
that the cost does not depend on the number of outputs C:

$$ V v = R_n^\top (J_n v), \qquad V^\top u = \sum_n J_n^\top (R_n u_n), \qquad
   V^\top V v = \sum_n J_n^\top \Lambda_n J_n v . $$

Products that are sums over rows, $V^\top V v$ and $V^\top u$ for coefficients that are made when
they are needed, are computed for sharded rows too, by all processes together: each has the same
vectors of D numbers, and none has one of a number for each row.

The curvature of the likelihood is used in its blocks, never as a C x C matrix where it is diagonal
or independent over places, and without matrices for softmaxes. Rows and vectors are processed in
parts within a limit of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp, vmap

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.row_sums import sum_over_rows
from subbayes.likelihoods.curvature_blocks import CurvatureRoot, DenseRoot
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.utils.trees import n_rows
from subbayes.utils.types import Inputs, Outputs, Targets, WeightsBatch

MANY_OUTPUTS = 256  # of an input, beyond which there are products and draws, and no rows or blocks

Pull = Callable[[Tensor], tuple[Tensor, ...]]
Source = Callable[[slice, slice], Tensor]
_KEPT_ROOTS = 2**26  # bytes of roots that are kept between passes
_WEIGHTS_AT_ONCE = 2**22  # of the gradients of one vectorised backward pass
_MOST_ROWS = 1024  # more at once bring no speed


class ManyProducts:
    """Products of J or V with many vectors, in forward and reverse mode.

    Args:
        rows: J of inputs, or V of data, which gives the network, the rows and the likelihood.

    Attributes:
        passes: number of passes over the rows so far.

    Example:
        >>> import subbayes
        >>> from subbayes.curvature.layers import Layers
        >>> network, x = subbayes.Network(torch.nn.Linear(2, 1)), torch.tensor([[3.0, 4.0]])
        >>> J = ManyProducts(Jacobian.of_inputs(Layers(network, x), x))
        >>> J.push(torch.eye(3)).T
        tensor([[3., 4., 1.]], dtype=torch.float64)
        >>> J.pull(torch.ones(1, 1)), J.squared(torch.ones(1, 3))
        (tensor([[3., 4., 1.]]), tensor([[24., 32.,  8.]]))
    """

    def __init__(self, rows: Jacobian) -> None:
        self.rows, self.network = rows, rows.network
        self.passes = 0
        self._roots: Tensor | None = None
        known = rows.n if rows.unavailable is None else 0  # a file does not decide how many
        self._has_root = torch.zeros(known, dtype=torch.bool)
        self._vectorised, self._forward_mode = True, True
        self._outputs: Tensor | None = None

    def __repr__(self) -> str:
        return f"ManyProducts(rows={self.rows.rows}, size={self.rows.size})"

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.rows.size

    @property
    def length(self) -> int:
        """Number of rows N C."""
        return self.rows.rows

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.network.device

    def push(self, vectors: WeightsBatch) -> Float[Tensor, "s m"]:
        """Products of all rows with s weight vectors, in float64."""
        total = vectors.new_zeros(len(vectors), self.rows.rows, dtype=torch.float64)
        for some, rows, part in self._pushed(vectors):
            total[some, rows] = part
        return total

    def push_blocks(self, vectors: WeightsBatch) -> Iterator[Float[Tensor, "s m"]]:
        """The columns of `push`, for one block of inputs after another."""
        found: list[Tensor] = []
        for some, _, part in self._pushed(vectors):
            found.append(part)
            if some.stop >= len(vectors):
                yield torch.cat(found) if len(found) > 1 else part
                found = []

    def _pushed(self, vectors: WeightsBatch) -> Iterator[tuple[slice, slice, Float[Tensor, "p r"]]]:
        """Products of some vectors with some rows; all vectors for a block of inputs first."""
        for place, some, inputs, y in self._parts(len(vectors)):
            f, tangents = self._tangents(vectors[some], inputs)
            if self.rows.likelihood is None:  # those of data are not asked for
                self._keep_outputs(place, f)
            pushed = _transposed(self._root(place, y, f), tangents.double())
            rows = slice(place.start * f.shape[1], place.stop * f.shape[1])
            yield some, rows, pushed.flatten(1)

    def pull(self, cotangents: Float[Tensor, "s m"]) -> WeightsBatch:
        """Combinations of all rows with s vectors of coefficients."""
        first = self._first
        return self.pull_from(
            lambda some, rows: cotangents[some, rows.start - first : rows.stop - first],
            len(cotangents),
        )

    @property
    def _first(self) -> int:
        """Position of the first row among all."""
        return self.rows.offset * self.rows.roots

    def pull_from(self, source: Source, count: int) -> WeightsBatch:
        """Combinations of all rows with coefficients that are made when they are needed.

        Args:
            source: the coefficients, shape (vectors, rows), of some vectors and some rows, by their
                positions among all.
            count: number of vectors.
        """
        if self.rows.is_divided:
            return self._summed(lambda products: products.pull_from(source, count))
        total = self.network.weights.new_zeros(count, self.rows.size)
        outputs = self.rows.roots
        for place, some, inputs, y in self._parts(count):
            first = self._first + place.start * outputs
            u = source(some, slice(first, first + n_rows(inputs) * outputs))
            f, pull = self._reverse(inputs)
            u = _times(self._root(place, y, f), u.reshape(len(u), -1, outputs))
            total[some] += self._pulled(pull, u.to(f))
        return total

    def squared(self, vectors: WeightsBatch) -> WeightsBatch:
        """V'V v, in one pass."""
        if self.rows.is_divided:
            return self._summed(lambda products: products.squared(vectors))
        total = self.network.weights.new_zeros(len(vectors), self.rows.size)
        for place, some, inputs, y in self._parts(len(vectors)):
            f, tangents = self._tangents(vectors[some], inputs)
            root = self._root(place, y, f)
            u = _times(root, _transposed(root, tangents.double()))
            total[some] += self._pulled(self._reverse(inputs)[1], u.to(f))
        return total

    def _summed(self, of: Callable[[ManyProducts], Tensor]) -> WeightsBatch:
        """A sum over sharded rows, which all processes have to compute."""
        return sum_over_rows(self.rows, lambda rows: (of(ManyProducts(rows)),))[0].to(
            self.network.dtype
        )

    def outputs(self) -> Outputs:
        """The network's outputs at all rows, known after a product with vectors."""
        if self._outputs is None:
            with torch.no_grad():
                for place, _, inputs, _ in self._parts(1):
                    self._keep_outputs(place, self.network(self.network.weights, inputs))
        assert self._outputs is not None
        return self._outputs

    # --- parts -----------------------------------------------------------------------------------

    def _parts(self, vectors: int) -> Iterator[tuple[slice, slice, Inputs, Targets | None]]:
        """Blocks of rows, each with blocks of vectors."""
        row = self.network.bytes_per_row(self.rows.first()[0]) + 32 * self.rows.roots
        limit = max(self.rows.memory_limit, self.network.weights.nbytes)
        step = min(vectors, max(1, limit // (2 * row)))
        rows = min(_MOST_ROWS, max(1, limit // (row * (1 + step))))
        self.passes += 1
        for place, inputs, y in self.rows.batches(rows):
            for start in range(0, vectors, step):
                yield place, slice(start, start + step), inputs, y

    def _root(
        self, place: slice, y: Targets | None, outputs: Float[Tensor, "n C"]
    ) -> CurvatureRoot | None:
        """A root of the curvature at some rows; None for identity matrices."""
        likelihood = self.rows.likelihood
        if likelihood is None:
            return None
        if self._roots is not None and bool(self._has_root[place].all()):
            return DenseRoot(self._roots[place])
        root = likelihood.for_targets(y).curvature_blocks(outputs.double()).root()
        if isinstance(root, DenseRoot):
            matrices = root.matrices
            if matrices[0].nbytes * self.rows.n <= _KEPT_ROOTS:
                if self._roots is None:
                    self._roots = matrices.new_empty(self.rows.n, *matrices.shape[1:])
                self._roots[place], self._has_root[place] = matrices, True
        return root

    def _keep_outputs(self, place: slice, outputs: Float[Tensor, "n C"]) -> None:
        if self._outputs is None:  # in one piece, since small ones between batches split the heap
            self._outputs = outputs.new_full((self.rows.n, outputs.shape[1]), math.nan)
        self._outputs[place] = outputs

    # --- derivatives -----------------------------------------------------------------------------

    def _tangents(
        self, vectors: WeightsBatch, inputs: Inputs
    ) -> tuple[Float[Tensor, "n C"], Float[Tensor, "s n C"]]:
        """Outputs, and their derivatives along s weight vectors."""
        w, v = self.network.weights, vectors.to(self.network.weights)

        def outputs(weights: Tensor) -> Tensor:
            return self.network(weights, inputs)

        with torch.no_grad(), attention_without_fused_kernels():
            if self._forward_mode:
                try:
                    return self._each(lambda one: jvp(outputs, (w,), (one,))[:2], v)
                except (RuntimeError, NotImplementedError) as error:
                    self._forward_mode = False
                    warn_of_fallback("a forward-mode derivative", error, "using reverse mode alone")
            value, pull = vjp(outputs, w)[:2]
            push = vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1]
            return value, torch.stack([push(one)[0] for one in v])

    def _each(
        self, function: Callable[[Tensor], tuple[Tensor, Tensor]], vectors: WeightsBatch
    ) -> tuple[Tensor, Tensor]:
        """A function of each vector, vectorised if possible; its first result is common."""
        if self._vectorised and len(vectors) > 1:
            try:
                return vmap(function, out_dims=(None, 0))(vectors)  # type: ignore[arg-type]
            except (RuntimeError, ValueError) as error:
                found = [function(one) for one in vectors]
                self._vectorised = False
                warn_of_fallback("vectorising over vectors", error, "evaluating them one by one")
        else:
            found = [function(one) for one in vectors]
        return found[0][0], torch.stack([tangent for _, tangent in found])

    def _reverse(self, inputs: Inputs) -> tuple[Float[Tensor, "n C"], Pull]:
        """Outputs, and the function from cotangents u to the sum over rows of u J."""
        with attention_without_fused_kernels():
            outputs, pull = vjp(
                lambda weights: self.network(weights, inputs), self.network.weights
            )[:2]
        return outputs.detach(), pull

    def _pulled(self, pull: Pull, u: Float[Tensor, "s n C"]) -> WeightsBatch:
        """The sum over rows of u J for s cotangents."""
        at_once = _WEIGHTS_AT_ONCE // self.rows.size  # more are slower than one by one
        if self._vectorised and len(u) > 1 and at_once > 1:
            try:
                return torch.cat([vmap(pull)(some)[0].detach() for some in u.split(at_once)])
            except RuntimeError as error:
                self._vectorised = False
                warn_of_fallback("vectorising over vectors", error, "evaluating them one by one")
        return torch.stack([pull(one)[0].detach() for one in u])


def _times(root: CurvatureRoot | None, u: Float[Tensor, "s n C"]) -> Float[Tensor, "s n C"]:
    return u if root is None else root.times(u)


def _transposed(root: CurvatureRoot | None, u: Float[Tensor, "s n C"]) -> Float[Tensor, "s n C"]:
    return u if root is None else root.transposed(u)

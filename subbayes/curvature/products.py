r"""Products of the Hessian and of the Fisher information with weight vectors.

With $L(w) = -\sum_n \log p(y_n \mid f(x_n; w))$ over all observations, $J_n = \partial f_n /
\partial w$, $\Lambda_n$ the expected curvature of the likelihood in the outputs, and $g_n =
\partial \log p(y_n \mid f_n) / \partial w$,

$$ H = \nabla^2 L, \qquad F = \sum_n J_n^\top \Lambda_n J_n, \qquad
   \hat F = \sum_n g_n g_n^\top . $$

No matrix is formed. A product with a vector v costs a few passes over the data:

$$ H v = \partial_\epsilon \nabla L(w + \epsilon v), \qquad
   F v = \sum_n J_n^\top (\Lambda_n (J_n v)), \qquad
   \hat F v = \sum_n g_n (g_n^\top v) , $$

a forward-mode derivative of the gradient for H (Pearlmutter 1994), and a forward-mode followed by
a reverse-mode product for the others (Schraudolph 2002).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vjp

from subbayes.data.data import Data, split_batches
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import one_copy_log_prob
from subbayes.networks.global_state import attention_without_fused_kernels
from subbayes.networks.network import Network
from subbayes.networks.tracing.memory import activation_bytes
from subbayes.networks.tracing.reverse_mode import check_transforms
from subbayes.networks.tracing.vectorised import warn_of_fallback
from subbayes.networks.validation import check_fit, check_gradients
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.trees import take, to_device
from subbayes.utils.types import Inputs, Targets, Weights

Kind = Literal["hessian", "fisher", "empirical-fisher"]
_KINDS = ("hessian", "fisher", "empirical-fisher")
_ROWS, _PRODUCT = 256, 8  # rows at once; memory of a product, in that of the outputs
_CURVATURE = 8  # copies of the curvature of a row in its outputs


class Curvature:
    r"""The Hessian or a Fisher information of the negative log-likelihood, as a linear operator.

    It is a sum over all observations, in nats: divide by `n` for the curvature of a mean loss, add
    $I / s^2$ for that of a posterior with prior $w \sim N(0, s^2 I)$. BatchNorm uses its stored
    statistics and dropout is off, as in every `Network`.

    Args:
        network: the network f(x; w).
        likelihood: p(y | f), with all its own parameters learned, or the name of one without, such
            as "categorical".
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        kind: "hessian", the second derivatives; "fisher", the Fisher information with the
            expectation over y, which is the generalised Gauss-Newton matrix; or
            "empirical-fisher", the outer products of the gradients at the observed targets.
        weights: where to evaluate it, shape (D,); by default at the network's weights.
        batch_size: rows evaluated at once; by default 256, on CUDA as many as a quarter of the
            device's memory holds.

    Attributes:
        size: number of weights D.
        n: number of observations N.
        products: number of products computed so far.

    Raises:
        InputError: parts that do not fit together, or an unknown kind.

    Source: Pearlmutter (1994), "Fast exact multiplication by the Hessian"; Schraudolph (2002),
    "Fast curvature matrix-vector products"; Kunstner, Balles and Hennig (2019) on how the two
    Fisher matrices differ.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> fisher = Curvature(net, Gaussian(0.5), (x, torch.zeros(2)), "fisher")
        >>> fisher(torch.tensor([1.0, 0.0]))  # 4 (1 + 4), 4 (1 + 2)
        tensor([20., 12.])
    """

    def __init__(
        self,
        network: Network,
        likelihood: str | Likelihood,
        data: Any,
        kind: Kind = "hessian",
        *,
        weights: Weights | None = None,
        batch_size: int | None = None,
    ) -> None:
        check_choice("kind", kind, _KINDS)
        likelihood = as_likelihood(likelihood)
        likelihood.check_complete()
        self.network = network if weights is None else network.with_weights(weights)
        self.data = Data.of(data).to(network.device)
        outputs = check_fit(network, likelihood, self.data)
        few, y = to_device(self.data.first(), network.device)
        self.likelihood = likelihood.for_outputs(outputs, y)
        check_gradients(network, few)
        check_transforms(lambda w: network(w, few), network.weights)
        self.kind: Kind = kind
        self.batch_size = (
            self._default_batch_size(outputs)
            if batch_size is None
            else check_count("batch_size", batch_size)
        )
        self.products = 0
        self._reverse_only = False

    def _default_batch_size(self, outputs: int) -> int:
        if self.device.type != "cuda":
            return _ROWS
        first, y = to_device(self.data.first(), self.device)
        row = _PRODUCT * self.network.bytes_per_row(first)
        if self.kind == "fisher":
            zeros = torch.zeros(1, outputs, dtype=self.dtype, device=self.device)
            one = take(y, slice(1))
            blocks = self.likelihood.for_targets(one).curvature_blocks(zeros)
            row += _CURVATURE * outputs * blocks.width * self.dtype.itemsize
        return min(self.n, max(_ROWS, activation_bytes(self.device) // row))

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.network.size

    @property
    def n(self) -> int:
        """Number of observations N."""
        return self.data.n

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network."""
        return self.network.dtype

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.network.device

    def __repr__(self) -> str:
        return f"Curvature({self.kind}, size={self.size}, n={self.n})"

    def __call__(self, vector: Weights) -> Weights:
        """The product with a vector, summed in float64 over batches.

        Raises:
            InputError: a vector of another length, or a product that is not finite.
        """
        v = vector.to(self.network.weights)
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        with attention_without_fused_kernels():
            batches = self.data.batches(self.batch_size)
            for inputs, y in split_batches(batches, self.batch_size, self.device):
                total += self._batch_product(v, inputs, y).double()
        if not bool(torch.isfinite(total).all()):
            fail(
                "weights",
                "finite curvature",
                "NaN or infinite entries",
                "Lower the learning rate of the training, or compute in float64",
            )
        self.products += 1
        return total.to(vector.dtype)

    def dense(self) -> Float[Tensor, "D D"]:
        """The matrix, from D products: for small networks."""
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return torch.stack([self(row) for row in eye])

    def _batch_product(self, v: Tensor, inputs: Inputs, y: Targets) -> Tensor:
        w = self.network.weights

        def outputs(weights: Tensor) -> Tensor:
            return self.network(weights, inputs)

        def terms(weights: Tensor) -> Tensor:
            return self.likelihood.log_prob(outputs(weights), y)

        if self.kind == "hessian":
            gradient = grad(lambda weights: -terms(weights).sum())
            return self._jvp(gradient, w, v, symmetric=True)[1]
        if self.kind == "empirical-fisher":
            tangent = self._jvp(terms, w, v)[1]
            copy = functools.partial(one_copy_log_prob, self.likelihood)  # weights occur once
            return vjp(lambda weights: copy(outputs(weights), y), w)[1](tangent)[0]
        f, tangent = self._jvp(outputs, w, v)
        blocks = self.likelihood.for_targets(y).curvature_blocks(f)
        return vjp(outputs, w)[1](blocks.times(tangent[None])[0].to(f))[0]

    def _jvp(
        self, function: Callable[[Tensor], Tensor], w: Tensor, v: Tensor, symmetric: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Value and derivative along v; in reverse mode if a layer has no forward-mode rule."""
        if not self._reverse_only:
            try:
                value, tangent = jvp(function, (w,), (v,))[:2]
                return value, tangent
            except (RuntimeError, NotImplementedError) as error:
                found = _reverse_jvp(function, w, v, symmetric)
                if symmetric:
                    _check_symmetric(function, w, v, found[1])
                self._reverse_only = True
                warn_of_fallback("a forward-mode derivative", error, "using reverse mode alone")
                return found
        return _reverse_jvp(function, w, v, symmetric)


def _reverse_jvp(
    function: Callable[[Tensor], Tensor], w: Tensor, v: Tensor, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Value and J v, as the derivative of the linear map u -> J^T u; J is J^T of a gradient."""
    value, pull = vjp(function, w)[:2]
    if symmetric:
        return value, pull(v)[0]
    push = vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1]
    return value, push(v)[0]


def _check_symmetric(
    gradient: Callable[[Tensor], Tensor], w: Tensor, v: Tensor, product: Tensor
) -> None:
    """Check a product, since torch's second derivatives of some fused layers are wrong."""
    u = product + torch.linspace(-1, 1, len(v)).to(v) * product.norm() / len(v) ** 0.5
    other = _reverse_jvp(gradient, w, u, symmetric=True)[1]
    gap = float((u @ product - v @ other).abs() / (u.norm() * product.norm()).clamp_min(1e-30))
    if gap > 1e-3:
        fail(
            "module",
            "layers that torch can differentiate twice",
            f"a Hessian that is not symmetric (by {gap:.2g}), in the reverse mode that a layer "
            "without a forward-mode rule needs",
            "Use kind='fisher', or write the layer (weight norm, say) in plain operations",
        )

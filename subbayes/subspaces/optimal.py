r"""The optimal subspace of the linearised Laplace approximation (Theorem 1).

Let $\Sigma_X = J_X \Psi J_X^\top = U \,\mathrm{diag}(\lambda)\, U^\top$ be the epistemic covariance
of the outputs at inputs X, with eigenvalues in decreasing order. Among all subspaces of rank s,

$$ P^* = \Psi J_X^\top U_s Q \qquad (Q \text{ any invertible matrix}) $$

is closest to it: $\Sigma_{P^*,X} = U_s \,\mathrm{diag}(\lambda_s)\, U_s^\top$ attains the bound of
Eckart and Young. Here $Q = \mathrm{diag}(\lambda_s)^{-1/2}$, so that
$P^{*\top} \Psi^{-1} P^* = I$: in the posterior the coordinates are independent with variance 1. The
first vectors of a basis span the optimal subspace of lower rank.

X needs no labels: the subspace for the inputs to be predicted is exactly optimal for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian, check_covariance_memory
from subbayes.curvature.precision import Precision
from subbayes.curvature.precision_factory import EXACT, check_exact, form_for, precision
from subbayes.data.data import Data
from subbayes.distributed.divided_rows import every_row
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.predictions.averaging import count_rows
from subbayes.priors import Normal
from subbayes.subspace import DenseSubspace, Subspace
from subbayes.subspaces.base import RankedMethod, check_rank
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import check_choice, check_count, check_seed, fail
from subbayes.utils.trees import leaves, n_rows, take, to_device
from subbayes.utils.types import FORMS, Form, Inputs
from subbayes.utils.warning import warn_user

_MAX_INPUTS, _MAX_OUTPUTS = 400, 2000


@dataclass(frozen=True)
class Optimal(RankedMethod):
    r"""The directions that keep most of the predictive covariance; see `optimal`.

    The scale s of the prior is that of the weights, $w \sim N(\hat w, s^2 I)$ within the subspace.

    Attributes:
        rank: number of directions s; None takes 20, or all weights if there are fewer.
        inputs: inputs without labels for which the subspace is chosen, or a loader of them; None
            takes training inputs, see `recombine_inputs`.
        covariance: form of the covariance of the weights: "exact", or "sampled", "kfac",
            "low-rank" or "diagonal" if neither (N C)² nor D² numbers fit into memory.

    Example:
        >>> Optimal(rank=10, covariance="kfac")
        Optimal(rank=10, covariance='kfac')
    """

    inputs: Any = field(default=None, repr=False, compare=False)
    covariance: Form = "exact"
    name: ClassVar[str] = "optimal"
    description: ClassVar[str] = (
        "the {k} directions that keep most of the predictive covariance, {centre}"
    )
    needs_inputs: ClassVar[bool] = True
    default_rank: ClassVar[int] = 20
    spans_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("covariance", self.covariance, FORMS)

    @property
    def covariance_form(self) -> Form:
        """The form of the covariance by which the subspace is chosen."""
        return self.covariance

    @property
    def takes_sharded_rows(self) -> bool:  # type: ignore[override]
        """Whether the inputs to be predicted are given."""
        return self.inputs is not None

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check the rank, the inputs, and that the covariance fits into memory."""
        check_rank(self.rank, network)
        rows = 0 if self.inputs is None else count_rows(network, self.inputs)
        outputs = network.check(to_device(data.first()[0], network.device))
        form = form_for(self.covariance, data)
        check_size(network.size, every_row(data), outputs, form, rows)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> DenseSubspace:
        """The subspace for the inputs, under a prior of the weights."""
        return optimal(
            trained.network,
            trained.likelihood,
            trained.data,
            inputs=self.inputs,
            rank=self.expected_rank(trained.network),
            covariance=self.covariance,
            prior_precision=prior_scale**-2,
            seed=trained.seed,
            progress=trained.progress,
        )

    def prior(self, subspace: Subspace, scale: float) -> Normal:
        r"""The prior $N(0, s^2 (P^\top P)^{-1})$ that $w \sim N(\hat w, s^2 I)$ induces on z."""
        gram = subspace.pull(subspace.basis()).double().cpu()
        covariance = scale**2 * torch.linalg.inv(gram)
        return Normal(covariance=((covariance + covariance.T) / 2).numpy())


def optimal(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    *,
    inputs: Any = None,
    rank: int = 20,
    covariance: Form = "exact",
    prior_precision: float = 1.0,
    memory_limit: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> DenseSubspace:
    r"""The subspace that keeps most of the predictive covariance at given inputs.

    Args:
        network: f(x; w), at the maximum a posteriori $\hat w$, the centre of the subspace.
        likelihood: p(y | f), with all its own parameters learned, or its name as for `fit`.
        data: (inputs, y), a DataLoader, a Dataset or `Data`; determines $\Psi$.
        inputs: X, without labels: the inputs to be predicted, similar ones, or training inputs
            (the choice of the paper, which keeps little of the covariance at other inputs). None
            takes training inputs, see `recombine_inputs`.
        rank: s.
        covariance: the form of $\Psi$: "exact" (dual or primal, whichever is faster), "kfac",
            "diagonal", "low-rank" or "sampled".
        prior_precision: $\lambda$.
        memory_limit: bytes for matrices; by default 80 % of the free memory.
        seed: seed of `recombine_inputs`.
        progress: show progress bars, with an estimate where they take minutes; None shows them on
            a terminal.
        options: options of the form of the covariance.

    Returns:
        A subspace around the network's weights. The linearised posterior of its coordinates is
        N(0, I) if the covariance is exact.

    Raises:
        InputError: incompatible arguments.

    Warns:
        UserWarning: the rank exceeds that of the Jacobian at the inputs, and is lowered to it.

    Source: Theorem 1 of "Optimal subspace inference for the Laplace approximation of Bayesian
    neural networks".

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = Network(subbayes.MLP(2, (8,), 1, seed=0).double())
        >>> x, new = torch.randn(50, 2).double(), torch.randn(9, 2).double()
        >>> optimal(net, Gaussian(0.1), (x, x[:, 0]), inputs=new, rank=3)
        DenseSubspace(rank=3, size=33)
    """
    check_count("rank", rank)
    if inputs is None and isinstance(data, Data) and data.division is not None:
        fail("inputs", "those to be predicted, for sharded rows", None)
    psi = precision(
        network,
        likelihood,
        data,
        covariance,
        prior_precision=prior_precision,
        memory_limit=memory_limit,
        progress=progress,
        **options,
    )
    if inputs is None:
        inputs = recombine_inputs(
            Data.of(data), max(1, min(_MAX_INPUTS, _MAX_OUTPUTS // psi.V.roots)), seed
        )
    return optimal_for(psi, inputs, rank)[0]


def check_size(
    size: int, n: int, outputs: int, covariance: Form = "exact", inputs: int = 0
) -> None:
    """Check before training that the matrices of `optimal` fit into memory.

    Args:
        size: number of weights D.
        n: number of observations N.
        outputs: number of outputs C.
        covariance: as for `optimal`.
        inputs: number of rows of X, if they are given.

    Raises:
        InputError: a matrix that does not fit, with its size.

    Example:
        >>> check_size(20_000, n=1000, outputs=2, inputs=300)
    """
    if covariance in EXACT:
        check_exact(covariance, n, outputs, size)
    check_covariance_memory(inputs * outputs)


def recombine_inputs(data: Data, count: int, seed: int = 0) -> Inputs:
    """Draw inputs near the training inputs, for use when the test inputs are unknown.

    For tables each column is drawn independently from the training inputs: the draws cover regions
    without training rows and keep the values of discrete columns. Otherwise (images, tokens,
    several tensors) they are training inputs. The errors of the alternatives are in the
    documentation of the optimal subspace; the inputs to be predicted are always better.

    Args:
        data: training data.
        count: largest number of rows.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(check_seed(seed))
    inputs = data.inputs if data.in_memory else next(iter(data.batches()))[0]
    assert inputs is not None
    n = n_rows(inputs)
    if isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point():
        rows = torch.from_numpy(rng.integers(n, size=(count, inputs.shape[1])))
        return inputs.gather(0, rows.to(inputs.device))
    some = np.sort(rng.permutation(n)[:count])
    return take(inputs, torch.from_numpy(some).to(leaves(inputs)[0].device))


def optimal_for(
    psi: Precision, inputs: Any, rank: int, covariance: Float[Tensor, "m m"] | None = None
) -> tuple[DenseSubspace, Float[Tensor, "s"]]:
    """The optimal subspace for a given precision, and the eigenvalues it keeps.

    Args:
        psi: the precision.
        inputs: X, or their `Jacobian`.
        rank: s.
        covariance: covariance of the outputs at X, if it is known.
    """
    X = psi.jacobian(inputs)
    check_covariance_memory(X.rows)
    sigma = psi.covariance(X) if covariance is None else covariance
    values, vectors = _leading(sigma, check_count("rank", rank), X, psi.prior_precision)
    basis = psi.pull(X, vectors.T / values.sqrt().unsqueeze(1))
    return DenseSubspace(psi.network.weights, basis), values


def _leading(
    sigma: Float[Tensor, "m m"], rank: int, X: Jacobian, prior_precision: float
) -> tuple[Float[Tensor, "s"], Float[Tensor, "m s"]]:
    """The largest eigenvalues above rounding, and their eigenvectors."""
    values, vectors = torch.linalg.eigh(sigma)
    prior = float(X.pull(vectors[:, -1:].T).double().square().sum()) / prior_precision
    rounding = max(
        len(values) * torch.finfo(sigma.dtype).eps * max(prior, float(values[-1])),
        -2 * float(values[0]),
    )  # the covariance may be the prior's minus another matrix
    available = min(int((values > rounding).sum()), X.size)
    if available == 0:
        fail(
            "inputs",
            "some at which the outputs depend on the weights",
            f"{X.n} at which all gradients are 0",
            "Pass others, or train the network again",
        )
    if rank > available:
        warn_user(
            f"rank: lowered from {rank} to {available}, the rank of the Jacobian at these "
            f"{X.n} inputs; pass more or other inputs for more"
        )
    kept = min(rank, available)
    return values[-kept:].flip(0), vectors[:, -kept:].flip(1)

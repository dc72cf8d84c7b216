"""Build a form of the precision: the exact one that fits into memory, or an approximation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from subbayes.curvature.diagonal import Diagonal
from subbayes.curvature.exact import Dual, Primal
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import SUM_BYTES, share_rows
from subbayes.data.data import Data
from subbayes.distributed.blocks import BlockSize
from subbayes.distributed.divided_rows import exchanged
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import has_weights
from subbayes.networks.network import Network, check_network
from subbayes.networks.validation import check_divided_fit, check_gradients
from subbayes.utils.checks import check_choice, closest, fail
from subbayes.utils.memory import available_memory, format_bytes
from subbayes.utils.trees import to_device
from subbayes.utils.types import FORMS, Form

EXACT = ("exact", "dual", "primal")
_BYTES = 24  # of each number of a matrix, with its factor and what it is computed from
_MOST_BYTES = 2**60
_ARGUMENTS = ("covariance", "memory_limit", "prior_precision", "progress", "subspace")
_OPTIONS = {
    "kfac": ("mc_samples", "seed"),
    "low-rank": ("rank", "tolerance", "iterations", "rounds", "seed"),
    "sampled": ("samples", "tolerance", "iterations", "solver", "seed"),
}


def precision(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    covariance: Form = "exact",
    *,
    prior_precision: float = 1.0,
    memory_limit: int | None = None,
    progress: bool | None = False,
    **options: Any,
) -> Precision:
    r"""The precision $\sum_n J_n^\top \Lambda_n J_n + \lambda I$ of the Laplace approximation.

    Args:
        network: f(x; w), at the maximum a posteriori.
        likelihood: p(y | f), with all its own parameters learned.
        data: (inputs, y), a DataLoader, a Dataset or `Data`.
        covariance: the form: "exact" (dual or primal, whichever has the smaller matrix, which
            has to fit into memory; `describe()` says which), "dual", "primal",
            "diagonal", "low-rank" (matrix-free), "sampled" (draws, without a limit of size) or
            "kfac" (Kronecker factors).
        prior_precision: $\lambda$.
        memory_limit: bytes for matrices, by default 80 % of the free memory; a quarter of it is
            for the gradients of a block, by default 256 MiB.
        progress: show progress bars, here and in predictions; None shows them on a terminal.
        options: options of the low-rank, the sampled or the Kronecker-factored form.

    Raises:
        InputError: incompatible arguments, a prior precision that is not above 0, or a form that
            does not fit into memory.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(2, 1).double())
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
        >>> found = precision(net, Gaussian(0.5), (x, torch.zeros(2)))
        >>> found.form, found.covariance(x).diagonal()
        ('dual', tensor([0.2197, 0.2370], dtype=torch.float64))
    """
    check_choice("covariance", covariance, FORMS)
    check_options(covariance, options)
    likelihood, data = as_likelihood(likelihood), exchanged(data)
    facts = {"covariance": [covariance, prior_precision, memory_limit, options]}
    V = root(network, likelihood, data, memory_limit, progress, facts=facts)
    covariance = form_for(covariance, data)
    if covariance in EXACT:
        return exact(V, prior_precision, covariance, memory_limit)
    if covariance == "diagonal":
        return Diagonal(V, prior_precision)
    if covariance == "low-rank":
        from subbayes.curvature.low_rank import LowRank

        return LowRank(V.silent(), prior_precision, **options)
    if covariance == "sampled":
        from subbayes.curvature.sample_then_optimise import SampleThenOptimise
        from subbayes.curvature.sampled import Sampled

        return Sampled(V, prior_precision, SampleThenOptimise(**options))
    if has_weights(likelihood, data.first()[1]):
        remedy = "Use covariance='exact', 'sampled', 'low-rank' or 'diagonal'"
        fail("covariance", "one that takes weights of observations", "'kfac'", remedy)
    from subbayes.curvature.kfac import Kfac

    return Kfac(V, prior_precision, **options)


def form_for(covariance: Form, data: Data) -> Form:
    """The form that "exact" stands for if rows are sharded, or the form itself.

    The dual form is a Gram matrix of all rows, which no process has.
    """
    return "primal" if covariance == "exact" and data.division is not None else covariance


def check_options(form: str, options: Mapping[str, Any]) -> None:
    """Check that a form accepts the given options.

    Args:
        form: its name, or a description of what takes the options.
        options: the options.
    """
    known, what = _OPTIONS.get(form, ()), repr(form) if form in FORMS else form
    for name in options:
        if name not in known:
            fail(
                name,
                f"an option of {what}" + (": " + ", ".join(known) if known else ", which has none"),
                "another" if known else "one",
                closest(name, _ARGUMENTS) or "Leave it out, or use the form it belongs to",
            )


def root(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    memory_limit: int | None = None,
    progress: bool | None = False,
    size: BlockSize | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Jacobian:
    """Check the arguments and return the root V of the Gauss-Newton matrix V'V.

    Processes that work together share the sums over rows; all of them have to call this.

    Args:
        network: f(x; w).
        likelihood: p(y | f).
        data: as for `precision`.
        memory_limit: bytes; a quarter of it goes to the gradients of a block, by default 256 MiB.
        progress: show progress bars of passes over the data.
        size: of the blocks of rows that processes share; by default chosen by memory.
        facts: what is the same in these processes, by name; see `share_rows`.
    """
    check_network(network)
    likelihood = as_likelihood(likelihood)
    likelihood.check_complete()
    network.warn_if_training()
    data = exchanged(data).to(network.device)
    outputs = check_divided_fit(network, likelihood, data)
    first, y = to_device(data.first(), network.device)
    likelihood = likelihood.for_outputs(outputs, y)
    check_gradients(network, first)
    plan = Layers(network, first)
    limit = 2**28 if memory_limit is None else memory_limit // 4
    V = Jacobian.of_data(plan, likelihood, data, limit)
    V.progress = progress
    share_rows(V, data, size, facts)
    return V


def exact(
    V: Jacobian, prior_precision: float, covariance: str = "exact", memory_limit: int | None = None
) -> Dual | Primal:
    """The exact precision, by default in the form with the smaller matrix."""
    limit = _limit(memory_limit)
    if V.share is not None and memory_limit is None:
        # the smallest of all processes, so that they take the same form, beside an exact sum
        limit = -V.share.processes.highest(-int(min(limit, _MOST_BYTES)))[0]
        limit *= _BYTES / (_BYTES + SUM_BYTES)
    chosen = check_exact(covariance, V.n, V.roots, V.size, limit)
    return (Dual if chosen == "dual" else Primal)(V, prior_precision)


def check_exact(
    covariance: str, n: int, outputs: int, size: int, memory_limit: float | None = None
) -> str:
    """Check, from the sizes alone, that an exact form fits into memory, and return its name.

    Args:
        covariance: "exact", "dual" or "primal".
        n: number of observations N.
        outputs: outputs C of each.
        size: number of weights D.
        memory_limit: bytes; by default 80 % of what is free.

    Example:
        >>> check_exact("exact", n=1000, outputs=2, size=20_000)
        'dual'
    """
    sizes = {"primal": size, "dual": n * outputs}
    names = {"dual": f"{n * outputs} rows (N C)", "primal": f"{size} weights"}
    chosen = min(sizes, key=lambda name: sizes[name]) if covariance == "exact" else covariance
    limit, needed = _limit(memory_limit), {name: _BYTES * m**2 for name, m in sizes.items()}
    if needed[chosen] > limit:
        fits = [name for name in needed if needed[name] <= limit]
        fail(
            "covariance",
            f"one that fits into {format_bytes(limit)}",
            f"the {chosen} form with {names[chosen]}, {format_bytes(needed[chosen])}",
            f"The {fits[0]} form with {names[fits[0]]} fits: {format_bytes(needed[fits[0]])}"
            if fits
            else "Use 'sampled', 'kfac', 'low-rank' or 'diagonal', which hold no such matrix, "
            f"or at most {int((limit / _BYTES) ** 0.5) // outputs} observations",
        )
    return chosen


def _limit(memory_limit: float | None) -> float:
    free = available_memory()
    if memory_limit is not None:
        return memory_limit
    return math.inf if free is None else 0.8 * free

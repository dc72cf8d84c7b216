"""Save and rebuild the precision of linearised Laplace.

The training data are not saved. The dual and low-rank forms need them to predict; the other forms
need them only for the evidence and for draws of the weights. The number of rows that are given, and
the first of them, have to be those of the fit. The dual and low-rank forms check the others too, by
their product with what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Count, Facts, Positive, Size, check_known
from subbayes.artifacts.files import fail_artifact, fail_damaged
from subbayes.artifacts.tensors import fingerprint
from subbayes.curvature.diagonal import Diagonal
from subbayes.curvature.exact import Dual, Primal
from subbayes.curvature.jacobian import MEMORY_LIMIT, Jacobian, UnavailableRows
from subbayes.curvature.kfac import FACTORS, Factors, Kfac, factor_shape
from subbayes.curvature.layers import Layers
from subbayes.curvature.low_rank import LowRank, squared_together
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import share_rows
from subbayes.curvature.sample_then_optimise import LinearDraws, SampleThenOptimise
from subbayes.curvature.sampled import Sampled
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.distributed.divided_rows import exchanged
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.subspace import Subspace
from subbayes.utils.checks import fail
from subbayes.utils.trees import leaves, take, to_device, tree_map
from subbayes.utils.types import Inputs

_PRODUCTS = 1e-3  # relative error of products in the dtype of the network
_matrix = partial(Array, dtype="float64", below=1e150)  # as its prior precision
_Many = Annotated[int, Meta(ge=1, le=10**6)]
_ROWS = 3  # of the random inputs that replace the data


def precision_tensors(precision: Precision) -> dict[str, Tensor]:
    """The fitted matrices of a precision, and random inputs of the shape of the data."""
    examples = leaves(_example_of(precision.V))
    return {f"example.{i}": leaf for i, leaf in enumerate(examples)} | precision.tensors()


class _Options(TypedDict, total=False):
    """Settings of the low-rank and of the sampled form."""

    tolerance: Annotated[float, Meta(ge=1e-15, lt=1)] | None
    iterations: Annotated[int, Meta(ge=1, le=10**5)]
    rounds: _Many
    samples: _Many
    solver: Literal["auto", "dual", "primal"]
    seed: Size
    residual: float
    error: float


class PrecisionFacts(Facts):
    """What an artifact holds of a precision beside its matrices, and a description of its data."""

    form: Literal["dual", "primal", "diagonal", "low-rank", "kfac", "sampled", "subspace"]
    prior_precision: Positive
    rows: Count
    memory_limit: Count
    data: str
    structure: Literal["tensor", "tuple", "dict"]
    inputs: list[str | None]
    options: dict[str, Any]
    layers: list[str]

    def __post_init__(self) -> None:
        check_known(self.options, _Options)

    def arrays(self, rank: int) -> Arrays:
        """The matrices, and examples of inputs."""
        forms = {
            "dual": {"matrix": _matrix("m", "m")},
            "primal": {"matrix": _matrix("D", "D")},
            "diagonal": {"squares": _matrix("D", low=0)},
            "low-rank": {"values": _matrix("r", low=0), "vectors": _matrix("r", "D")},
            "kfac": {"diagonal": _matrix("D", low=0)},
            "sampled": {"draws": Array("S", "D"), "fitted": _matrix("S", low=0)},
            "subspace": {"matrix": _matrix(rank, rank), "metric": _matrix(rank, rank)},
        }
        arrays = {**forms[self.form], **{f"example.{i}": ANY for i in range(len(self.inputs))}}
        for i in range(len(self.layers)):
            groups, out, inputs = f"groups {i}", f"out {i}", f"in {i}"
            arrays[f"outer.{i}"] = _matrix(groups, out, out)
            arrays[f"inner.{i}"] = _matrix(groups, inputs, inputs)
            arrays[f"values.{i}"] = _matrix(groups, out, inputs, low=0)
        return arrays


def precision_facts(precision: Precision) -> PrecisionFacts:
    """The form of a precision, and a description of its data."""
    inputs = _example_of(precision.V)
    structure: Any = "tensor" if isinstance(inputs, Tensor) else type(inputs).__name__
    form: Any = precision.form
    return PrecisionFacts(
        form=form,
        prior_precision=precision.prior_precision,
        rows=precision.V.n,
        memory_limit=precision.V.memory_limit,
        data=_digest(precision.V),
        structure=structure,
        inputs=list(inputs) if isinstance(inputs, dict) else [None] * len(leaves(inputs)),
        options=precision.settings_to_save(),
        layers=[one.layer.name for one in precision.factors] if isinstance(precision, Kfac) else [],
    )


def jacobian_from(
    tensors: Mapping[str, Tensor],
    facts: PrecisionFacts,
    network: Network,
    likelihood: Likelihood,
    data: Any,
) -> Jacobian:
    """The root of the Gauss-Newton matrix, over the data if they are given.

    Raises:
        InputError: data of another number of rows or with another first row than those of the
            fit, or no data for a form that needs them.
    """
    limit = min(facts.memory_limit, MEMORY_LIMIT)  # a file does not decide how much is taken
    if data is None:
        if facts.form in ("dual", "low-rank"):
            fail("data", f"the training data, from which the {facts.form} form predicts", "none",
                 "Pass load(path, data=...)")  # fmt: skip
        example = to_device(_example(tensors, facts), network.device)
        rows = UnavailableRows(example, facts.data)
        return Jacobian.without_data(Layers(network, example), rows, likelihood, facts.rows, limit)
    given = exchanged(data).to(network.device)
    first = to_device(given.first()[0], network.device)
    network.check(first)
    plan = Layers(network, first)
    V = Jacobian.of_data(plan, likelihood, given, limit)
    if given.division is not None:
        share_rows(V, given)
    if (V.n, _digest(V)) != (facts.rows, facts.data):
        fail("data", f"the {facts.rows} rows of the fit, in their order", f"{V.n} other rows",
             "Pass the training data")  # fmt: skip
    return V


def precision_from(
    tensors: Mapping[str, Tensor], facts: PrecisionFacts, V: Jacobian, subspace: Subspace | None
) -> Precision:
    """Rebuild a precision from its fitted matrices."""
    lam, options = facts.prior_precision, dict(facts.options)
    match facts.form:
        case "dual":
            _check_gram(tensors["matrix"], V)
            return Dual(V, lam, tensors["matrix"])
        case "primal":
            return Primal(V, lam, tensors["matrix"])
        case "diagonal":
            return Diagonal(V, lam, tensors["squares"])
        case "low-rank":
            pairs = tensors["values"], tensors["vectors"], options.pop("residual", 0.0)
            _check_pairs(*pairs, V)
            return LowRank(V, lam, len(pairs[0]), pairs=pairs, **options)
        case "sampled":
            error = options.pop("error")
            known = LinearDraws(tensors["draws"], None, tensors["fitted"], error, 0)
            return Sampled(V, lam, SampleThenOptimise(**options), known=known)
        case "kfac":
            return Kfac(V, lam, (_factors(tensors, facts, V), tensors["diagonal"]))
    assert subspace is not None
    return SubspacePrecision(V, subspace, lam, (tensors["matrix"], tensors["metric"]))


def _check_gram(matrix: Tensor, V: Jacobian) -> None:
    """Check that a matrix is VV', by its product with random numbers (Freivalds 1979)."""
    u = _random_numbers(V.rows, matrix).to(V.network.device)
    _check_product("Gram matrix", V.push(V.pull(u)), u @ matrix.to(u))


def _check_pairs(values: Tensor, vectors: Tensor, residual: float, V: Jacobian) -> None:
    """Check that V'V q = e q for a random combination of eigenpairs, within their residual."""
    u = _random_numbers(len(values), values, vectors).to(vectors)
    squares = squared_together(V, u @ vectors).to(vectors)
    _check_product("eigenpairs", squares, u * values @ vectors, residual * float(u.abs().sum()))


def _random_numbers(count: int, *tensors: Tensor) -> Tensor:
    """They follow from the tensors to be checked, so that none can be made for them."""
    seed = int(fingerprint({str(i): part for i, part in enumerate(tensors)}, {})[:15], 16)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, generator=generator, dtype=torch.float64)


def _check_product(what: str, found: Tensor, expected: Tensor, slack: float = 0.0) -> None:
    """Check that a product with the training data is the one that stored tensors give."""
    error = torch.linalg.vector_norm(found.to(expected) - expected)
    if not bool(error <= slack + _PRODUCTS * torch.linalg.vector_norm(expected)):
        fail_artifact(
            "path",
            f"the {what} of the training data",
            "those of other rows",
            "Pass the rows of the fit, in their order; with them the artifact is damaged",
        )


def _factors(
    tensors: Mapping[str, Tensor], facts: PrecisionFacts, V: Jacobian
) -> tuple[Factors, ...]:
    layers = {layer.name: layer for layer in V.plan.layers if layer.is_matrix}
    factors = tuple(
        Factors(layers[name], **{part: tensors[f"{part}.{i}"] for part in FACTORS})
        for i, name in enumerate(facts.layers)
    )
    for one in factors:
        if (shape := tuple(one.values.shape)) != (expected := factor_shape(one.layer)):
            fail_damaged(f"factors of shape {expected} of layer {one.layer.name!r}", shape)
    return factors


def _digest(V: Jacobian) -> str:
    """A digest of the first row, which does not depend on the batch size."""
    if V.unavailable is not None:
        return V.unavailable.digest
    inputs, y = (take(part, slice(1)) for part in V.first())
    parts = [*leaves(inputs), *leaves(y)]
    dense = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return fingerprint({str(i): part for i, part in enumerate(dense)}, {})


def _example_of(V: Jacobian) -> Inputs:
    """Random inputs of the shape of the data; those of its file for a posterior without data."""
    if V.unavailable is not None:
        return V.unavailable.example
    return tree_map(_example_rows, V.first()[0])


def _example_rows(leaf: Tensor) -> Tensor:
    """Random rows of the shape of a batch; integers are 0, which every embedding has."""
    shape = (_ROWS, *leaf.shape[1:])
    if not leaf.is_floating_point():
        return torch.zeros(shape, dtype=leaf.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(leaf.dtype)


def _example(tensors: Mapping[str, Tensor], facts: PrecisionFacts) -> Inputs:
    parts = [tensors[f"example.{i}"] for i in range(len(facts.inputs))]
    if facts.structure == "tensor":
        return parts[0]
    if facts.structure == "tuple":
        return tuple(parts)
    return dict(zip(map(str, facts.inputs), parts, strict=True))

r"""Networks with a hierarchical prior, all of whose parameters are sampled: the default for tables.

Each candidate is a `HierarchicalMLP` on standardised columns, their ranks and harmonics of these.
Its chains start at points that Adam climbs to from the prior, are drawn by MCLMC, and have the same
noise for all rows at first. Candidates are compared on rows held out, and stacked; see `Stack`. All
sizes are fixed numbers, so that a seed determines the model.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import nn

from subbayes.data.arrays import to_tensor
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.stacking import maximise_log_score
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Likelihood,
    SeveralTargets,
    Standardized,
    Weighted,
    families,
)
from subbayes.likelihoods.target_parts import split_targets
from subbayes.models.fitted import FittedModel
from subbayes.models.table_networks import in_units, log_mean
from subbayes.networks.hierarchical.fold_ensemble import FoldEnsemble
from subbayes.networks.hierarchical.fourier_process import (
    FourierProcess,
    basis,
    draw_weights,
    maximise_evidence,
    orthogonal_frequencies,
)
from subbayes.networks.hierarchical.mlp import HierarchicalMLP, Shape
from subbayes.networks.hierarchical.rank_features import RankFeatures
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.predictive import Predictive
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace, FullSubspace
from subbayes.tables.stacked import LEVEL, Stack
from subbayes.utils.checks import check_choice
from subbayes.utils.seeding import derive_seed
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

ENCODING: dict[str, Any] = {
    "unknown": "ignore",
    "missing": "impute",
    "missing_indicator": True,
    "many": "group",
    "max_categories": 50,
}
"""Options of the `TabularEncoder` of these networks."""

_RATE, _DECAY, _SQUARE_DECAY = 0.02, 0.9, 0.999  # of Adam
_HELD_OUT = 0.2  # share of the rows by which candidates are compared
_MOST_COMPARED = 4000  # of them
_MIXED = 400  # draws that predictions average
_BEHIND = 3.0  # standard errors of its log score, from which a chain misses rows
_LEAST_WEIGHT, _FEWEST_CHAINS = 0.05, 2  # of a candidate in the stack
_FEW_ROWS, _LONGER, _MOST_STEPS = 1000, 4.0, 12_000  # fewer rows have longer chains, up to these
_START = 0.3  # standard deviation of the points from which chains climb
_FEW_OUTLIERS = 1.0  # constant of log(nu - 1) of noise that is held constant
_MOST_FEATURES = 1000  # with more, columns have no ranks
_SIGMA, _NU = (-1.5, 1.5), (2.0, 1.5)  # prior of the log of a noise scale, and of log(nu - 1)
_LEAST_NU = 1.5  # nu - 1, so that variances are finite
_FEW_STEPS, _SHORTER = 300, 0.8  # of chains around plain networks, whose mean fits from the start
_FREQUENCIES = 512  # of a Gaussian process
_PROCESS_ROWS, _EVIDENCE_ROWS = 2000, 500  # at most, of a process and of those for its evidence
_NORMAL_OR_T = (None, "student-t", "gaussian", "heteroscedastic")  # likelihoods
_NORMAL = 10.0  # log(nu - 1) of t noise that is normal


Prepared = tuple[Float[np.ndarray, "n c"], RankFeatures]
"""The columns of a network, and their features."""


@dataclass(frozen=True)
class Candidate:
    """A network of the stack.

    Attributes:
        hidden: widths of its layers; none for a Gaussian process, of numbers with normal or t noise
            and at most 2000 rows.
        harmonics: of the ranks of its columns; None for columns without ranks.
        ensemble: whether its mean is that of plain networks, a `FoldEnsemble`, and a change of it:
            of numbers with normal or t noise and more than 2000 rows, where candidates without are
            left out; with fewer rows a network learns more alone.
    """

    hidden: tuple[int, ...] = (16, 16)
    harmonics: int | None = 4
    ensemble: bool = False


@dataclass(frozen=True)
class Effort:
    """Sizes of a fit.

    Attributes:
        candidates: networks to compare.
        climb: steps of Adam before the chains.
        constant: steps of the chains after these, with the same noise for all rows: noise that
            varies at first grows wherever the mean does not fit yet, and stays there.
        chains: of each network.
        steps: of each chain, of which the first third is the warm-up.
        compared: steps with which candidates are compared.
        most_rows: rows that chains take at most; of more, they are drawn at random.
    """

    candidates: tuple[Candidate, ...]
    climb: int = 100
    constant: int = 300
    chains: int = 8
    steps: int = 3000
    compared: int = 1000
    most_rows: int = 20_000

    def for_rows(self, n: int) -> Effort:
        """Up to four times the steps for fewer than 1000 rows, where a step costs no less.

        Chains need them: their first thousands of steps predict too widely.

        Example:
            >>> [EFFORTS["standard"].for_rows(n).steps for n in (100, 500, 2000)]
            [12000, 6000, 3000]
        """
        factor = min(_LONGER, max(1.0, _FEW_ROWS / n), max(1.0, _MOST_STEPS / self.steps))
        return replace(
            self, steps=round(factor * self.steps), compared=round(factor * self.compared)
        )


_SMOOTH, _WIDE = Candidate(ensemble=True), Candidate((32, 32), ensemble=True)
_PLAIN, _PROCESS = Candidate(harmonics=None), Candidate((), None)
EFFORTS = {
    "quick": Effort((Candidate(),), chains=4, steps=1000, most_rows=5000),
    "standard": Effort((_SMOOTH, _PLAIN, _PROCESS), constant=1000),
    "long": Effort(
        (_SMOOTH, _PLAIN, _PROCESS, _WIDE),
        constant=1000,
        steps=12_000,
        compared=3000,
        most_rows=100_000,
    ),
}
"""Sizes by name."""


@dataclass(frozen=True)
class Head:
    """The likelihood of a table, and the outputs that it needs.

    Attributes:
        likelihood: in the units of the target.
        outputs: number of outputs.
        shapes: those that are no means or logits.
        offset: of the first output.
    """

    likelihood: Likelihood
    outputs: int
    shapes: tuple[Shape, ...] = ()
    offset: float = 0.0


def head_of(
    name: str | None,
    task: str,
    y: Shaped[np.ndarray, "n *T"],
    n_classes: int | None = None,
    weights: RowNumbers | None = None,
) -> Head:
    """The likelihood of a task with outputs of a hierarchical network.

    Args:
        name: one of `LIKELIHOODS[task]`; None for "student-t", "negative-binomial" or
            "categorical".
        task: "regression", "count" or "classification".
        y: targets (n,), or several, (n, T); see `make_likelihood`.
        n_classes: K; by default as many as y has.
        weights: of the rows.
    """
    several = y.ndim == 2
    T = y.shape[1] if several else 1
    if task == "classification":
        if several:
            return Head(SeveralTargets(Bernoulli(), T), T)
        count = int(y.max()) + 1 if n_classes is None else n_classes
        return Head(Categorical(count), count)
    name = name or {"regression": "student-t", "count": "negative-binomial"}[task]
    family = families.FAMILIES[
        {"gaussian": "normal", "heteroscedastic": "normal"}.get(name, name)
    ]()
    shapes = tuple(_shape(family, one, name) for one in family.parameters[1:] for _ in range(T))
    outputs = T * len(family.parameters)
    likelihood = SeveralTargets(family, T) if several else family
    if task == "count":
        return Head(likelihood, outputs, shapes, log_mean(y, weights))
    return Head(in_units(likelihood, y, weights), outputs, shapes)


def _shape(family: Any, parameter: str, name: str) -> Shape:
    if parameter == "nu":
        return Shape(_NU[0], _NU[1], False, math.log(_LEAST_NU))
    prior = _SIGMA if parameter == "sigma" else family.predictor_prior(parameter, np.zeros(0))
    return Shape(prior[0], prior[1], name != "gaussian")


def fit_network(
    candidate: Candidate,
    head: Head,
    data: Data,
    sampling: Sampling,
    effort: Effort,
    features: RankFeatures,
    start: Float[np.ndarray, "chains k"] | None = None,
) -> FittedModel:
    """Sample all parameters of a hierarchical network.

    Args:
        candidate: the network.
        head: its likelihood and outputs.
        data: columns (n, d), float32, and targets, with weights of the rows if there are any.
        sampling: of the chains; its seed is that of the start points too.
        effort: numbers of steps before them.
        features: of the columns.
        start: where chains start, instead of what these steps find.
    """
    matrix = features(data.inputs)
    if not candidate.hidden:
        return _fit_process(head, data, matrix, sampling, features)
    arguments = (len(features.kept), candidate.hidden, head.outputs, head.shapes, head.offset)
    whole = HierarchicalMLP(*arguments, features=features, seed=sampling.seed)
    standardised = HierarchicalMLP(*arguments, seed=sampling.seed)
    inner = Network(standardised)
    space = FullSubspace(torch.zeros(inner.size))
    likelihood = head.likelihood
    sampled = Weighted(likelihood) if data.has_weights else likelihood
    prior, rows = Normal(1.0), replace(data, inputs=matrix)
    posterior = Posterior(inner, sampled, rows, space, prior, mode=sampling.mode)
    engine: Engine = MCLMC(metric="diagonal")
    if start is None:
        held = _constant_noise(standardised)
        free = CoordinateSubspace(held.nan_to_num(), held.isnan().nonzero()[:, 0])
        early = Posterior(inner, sampled, rows, free, prior, mode=sampling.mode)
        rng = np.random.default_rng(derive_seed(sampling.seed, 1))
        start = _START * rng.standard_normal((sampling.chains, early.rank))
        start = _climb(early, start, effort.climb)
        if early.rank < inner.size:
            folder = sampling.checkpoint and Path(f"{sampling.checkpoint}-constant")
            run = replace(sampling, draws=1, warmup=effort.constant, thin=1, checkpoint=folder)
            start = engine.run(early, replace(run, initial=start)).z[:, -1]
        start = free.weights(torch.from_numpy(start)).double().numpy()
    draws = engine.run(posterior, replace(sampling, initial=start))
    network = Network(whole).with_weights(space.shift)
    model = FittedModel(
        network,
        likelihood,
        space,
        prior,
        draws=draws,
        settings={"subspace": "full", "inference": "mclmc"},
        starts=start,
    )
    return model.with_data(data)


def _fit_process(
    head: Head, data: Data, matrix: torch.Tensor, sampling: Sampling, features: RankFeatures
) -> FittedModel:
    """Draw the weights of a Gaussian process, with hyper-parameters of the largest evidence."""
    rng = np.random.default_rng(derive_seed(sampling.seed, 4))
    likelihood, inputs_of_process = head.likelihood, matrix.double()
    assert isinstance(likelihood, Standardized)
    assert data.y is not None
    parts = split_targets(data.y, data.has_weights)
    target = (parts.values.double() - likelihood.shift[0]) / likelihood.scale[0]
    own = torch.from_numpy(parts.counts)
    known = np.flatnonzero(own.numpy() > 0)  # a row of weight 0 says nothing
    rows = np.sort(rng.permutation(known)[:_EVIDENCE_ROWS])
    hyper = maximise_evidence(inputs_of_process[rows], target[rows], own[rows], rng)
    *relevance, amplitude, noise = hyper.exp().tolist()
    frequencies = orthogonal_frequencies(_FREQUENCIES, len(relevance), rng) * hyper[:-2].exp()
    design = amplitude * basis(inputs_of_process, frequencies)
    z = draw_weights(design, target, own / noise**2, sampling.draws * sampling.chains, rng)
    constants = [math.log(noise), _NORMAL][: len(head.shapes)]
    module = FourierProcess(len(relevance), _FREQUENCIES, amplitude, constants, features)
    module.frequencies.copy_(frequencies)
    network = Network(module)
    draws = Draws(
        z.reshape(sampling.chains, sampling.draws, -1),
        meta={"seed": sampling.seed},
        engine="laplace",
        independent=True,
    )
    space = FullSubspace(torch.zeros(network.size))
    settings = {"subspace": "full", "inference": "laplace"}
    model = FittedModel(network, likelihood, space, Normal(1.0), draws=draws, settings=settings)
    return model.with_data(data)


def _rows(
    x: Float[np.ndarray, "n d"], y: Shaped[np.ndarray, "n *T"], weights: RowNumbers | None
) -> Data:
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    data = Data.of((inputs, to_tensor("y", y, keep_double=True)))
    return data if weights is None else data.weighted(weights)


def _constant_noise(module: HierarchicalMLP) -> Float[torch.Tensor, "k"]:
    """Weights with which the noise is the same for all rows, and nearly normal; NaN for others."""
    held = deepcopy(module)
    means = len(module.constant)
    with torch.no_grad():
        for parameter in held.parameters():
            parameter.fill_(math.nan)
        held.output[means:] = held.skip[means:] = 0.0
        if held.shape_constant is not None:
            bounded = torch.tensor([shape.least is not None for shape in module.shapes])
            held.shape_constant[bounded] = _FEW_OUTLIERS
    return nn.utils.parameters_to_vector(held.parameters()).detach()


def _climb(
    posterior: Posterior, z: Float[np.ndarray, "chains k"], steps: int
) -> Float[np.ndarray, "chains k"]:
    """Points of higher density, by steps of Adam."""
    mean, square = np.zeros_like(z), np.zeros_like(z)
    for step in range(1, steps + 1):
        gradient = np.nan_to_num(posterior.value_and_grad(z)[1])
        mean = _DECAY * mean + (1 - _DECAY) * gradient
        square = _SQUARE_DECAY * square + (1 - _SQUARE_DECAY) * gradient**2
        root = np.sqrt(square / (1 - _SQUARE_DECAY**step))
        z = z + _RATE * mean / (1 - _DECAY**step) / (root + 1e-8)
    return z


def fit_hierarchical(
    x: Float[np.ndarray, "n d"],
    y: Shaped[np.ndarray, "n *T"],
    task: str,
    effort: str | Effort = "standard",
    *,
    likelihood: str | None = None,
    n_classes: int | None = None,
    weights: RowNumbers | None = None,
    sampling: Sampling | None = None,
) -> Stack:
    """Fit and stack networks with a hierarchical prior.

    Args:
        x: columns (n, d), best standardised; those of two values are indicators.
        y: targets (n,): numbers in their own units, counts, or classes 0..K-1.
        task: "regression", "count" or "classification".
        effort: a name of `EFFORTS`, or sizes.
        likelihood: as for `head_of`.
        n_classes: K, where not all classes occur in y.
        weights: of the rows, see `Data.weighted`.
        sampling: seed, mode, checkpoint and progress; the sizes are those of `effort`.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
        >>> small = Effort((Candidate((4,), 1),), climb=20, chains=2, steps=40)
        >>> model = fit_hierarchical(
        ...     x, 100 + x[:, 0], "regression", small, sampling=Sampling(progress=False))
        >>> bool(abs(model.predict(x).mean - 100).max() < 4)
        True
    """
    if isinstance(effort, str):
        check_choice("effort", effort, EFFORTS)
        effort = EFFORTS[effort].for_rows(len(y))
    sampling = sampling or Sampling()
    if len(y) > effort.most_rows:
        rng = np.random.default_rng(derive_seed(sampling.seed, 3))
        rows = np.sort(rng.choice(len(y), effort.most_rows, replace=False))
        warn_user(
            f"effort: {len(y)} rows, of which {effort.most_rows} are drawn at random and used; "
            "an effort with larger most_rows uses more ('long' has 100000)"
        )
        x, y = x[rows], y[rows]
        weights = None if weights is None else weights[rows]
    normal = task == "regression" and y.ndim == 1 and likelihood in _NORMAL_OR_T
    few = len(y) <= _PROCESS_ROWS
    candidates = tuple(
        replace(candidate, ensemble=candidate.ensemble and normal and not few)
        for candidate in effort.candidates
        if candidate.hidden or (normal and few)
    )
    around = tuple(candidate for candidate in candidates if candidate.ensemble)
    effort = replace(effort, candidates=around or candidates)
    if around:
        steps = round(_SHORTER * effort.steps)
        effort = replace(effort, constant=min(_FEW_STEPS, effort.constant), steps=steps)
    head = head_of(likelihood, task, y, n_classes, weights)
    columns = torch.from_numpy(np.array(x, dtype=np.float32))
    plain = None
    if around:
        assert isinstance(head.likelihood, Standardized)
        target = torch.from_numpy((y - head.likelihood.shift[0]) / head.likelihood.scale[0])
        plain = FoldEnsemble.fit(columns, target, weights, seed=derive_seed(sampling.seed, 5))
    prepared = [_prepare(candidate, columns, plain) for candidate in effort.candidates]
    starts: list[Any] = [None]
    shares, record = np.ones(1), dict[str, Any]()
    if len(effort.candidates) > 1 or around:
        shares, starts, record = _compare(
            effort, prepared, y, task, likelihood, n_classes, weights, sampling
        )
    members, counts = [], []
    for m, share in enumerate(shares):
        if share > 0:
            # predictions average few draws of a member with a small share
            chains = min(effort.chains, max(_FEWEST_CHAINS, round(share * effort.chains)))
            start = None if starts[m] is None else starts[m][:chains]
            run = _sized(sampling, chains, effort.steps, f"member-{m}")
            inputs, features = prepared[m]
            data = _rows(inputs, y, weights)
            one = fit_network(effort.candidates[m], head, data, run, effort, features, start)
            members.append(one)
            counts.append(max(1, round(share * min(_MIXED, one.default_draws))))
    return Stack(tuple(members), tuple(counts), record)


def _compare(
    effort: Effort,
    prepared: list[Prepared],
    y: Shaped[np.ndarray, "n *T"],
    task: str,
    likelihood: str | None,
    n_classes: int | None,
    weights: RowNumbers | None,
    sampling: Sampling,
) -> tuple[Float[np.ndarray, "m"], list[Any], dict[str, Any]]:
    """Stacking weights of the candidates, the ends of their chains, and a record.

    The record has log scores of rows held out, and of numbers how many the 90 % intervals of the
    stack hold. Chains of all rows start at the ends.
    """
    order = np.random.default_rng(derive_seed(sampling.seed, 2)).permutation(len(y))
    held = min(_MOST_COMPARED, max(1, round(_HELD_OUT * len(y))))
    kept, out = np.sort(order[held:]), np.sort(order[:held])
    own = None if weights is None else weights[kept]
    if task == "classification" and y.ndim == 1 and n_classes is None:
        n_classes = int(y.max()) + 1
    head = head_of(likelihood, task, y[kept], n_classes, own)
    rows = None if weights is None else weights[out]
    found, ends = [], []
    for m, candidate in enumerate(effort.candidates):
        run = _sized(sampling, effort.chains, effort.compared, f"candidate-{m}")
        inputs, features = prepared[m]
        data = _rows(inputs[kept], y[kept], own)
        one = fit_network(candidate, head, data, run, effort, features)
        found.append(one.predict(inputs[out]))
        likely = _likely_chains(found[-1], y[out], one.sampled.n_chains, rows)
        ends.append(one.sampled.z[likely, -1])
    terms = np.stack([predictive.log_prob(y[out]) for predictive in found], 1)
    shares = maximise_log_score(terms, rows)
    shares = np.where(shares < _LEAST_WEIGHT, 0.0, shares)
    shares /= shares.sum()
    scores = np.average(terms, 0, rows)
    record: dict[str, Any] = {
        "candidates": [
            {**asdict(candidate), "score": float(score), "weight": float(share)}
            for candidate, score, share in zip(effort.candidates, scores, shares, strict=True)
        ],
        "held_out": held,
    }
    if task == "regression":
        below = np.stack([predictive.cdf(y[out]) for predictive in found], -1) @ shares
        inside = np.where(np.isnan(below), np.nan, np.abs(below - 0.5) <= LEVEL / 2)
        record["coverage"] = metrics.mean(inside, rows)
    return shares, ends, record


def _likely_chains(
    predictive: Predictive,
    y: Shaped[np.ndarray, "n *T"],
    chains: int,
    weights: RowNumbers | None = None,
) -> Int[np.ndarray, "chains"]:
    """Chains to go on with: those that miss rows held out are replaced by others.

    A chain may need many thousand steps to leave a mode in which the network ignores its inputs.
    """
    terms = predictive.component_log_prob(y).reshape(chains, -1, len(y))
    each = torch.logsumexp(terms, 1).numpy()
    counts = np.ones(len(y)) if weights is None else weights
    behind = each[(each @ counts).argmax()] - each
    gap = np.average(behind, 1, counts)
    variance = np.average((behind - gap[:, None]) ** 2, 1, counts)
    effective_rows = counts.sum() ** 2 / (counts @ counts)
    kept = np.flatnonzero(gap <= _BEHIND * np.sqrt(variance / effective_rows))
    return np.resize(kept, chains)


def _prepare(
    candidate: Candidate,
    x: Float[torch.Tensor, "n d"],
    plain: tuple[FoldEnsemble, Float[torch.Tensor, "n 1"]] | None,
) -> Prepared:
    """The columns of a candidate and their features, without ranks where there are too many.

    The last column of training rows has the outputs of the plain networks that were trained without
    them, also where candidates are compared: a row held out is new to its own network.
    """
    harmonics = candidate.harmonics
    ensemble = None
    if harmonics is not None and x.shape[1] * (2 + 2 * harmonics) > _MOST_FEATURES:
        harmonics = None
    if candidate.ensemble and plain is not None:
        ensemble, outputs = plain
        x = torch.cat([x, outputs], 1)
    return x.numpy(), RankFeatures.fit(x, harmonics, ensemble)


def _sized(sampling: Sampling, chains: int, steps: int, name: str) -> Sampling:
    """The sampling of one network."""
    warmup = steps // 3
    thin = max(1, (steps - warmup) * chains // _MIXED)
    draws = (steps - warmup) // thin
    folder = None if sampling.checkpoint is None else Path(sampling.checkpoint) / name
    return replace(
        sampling, draws=draws, chains=chains, warmup=warmup, thin=thin, checkpoint=folder
    )

"""What the space of a semi-structured model that is read from a file has to fulfil."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from subbayes.draws import Draws
from subbayes.inference.engine import ENGINES
from subbayes.semistructured.empirical_bayes import smoothing_coordinates
from subbayes.semistructured.specification import PreparedModel
from subbayes.semistructured.subspace import JointSpace
from subbayes.subspace import CoordinateSubspace, FullSubspace, JointSubspace
from subbayes.utils.checks import InputError
from subbayes.utils.files import fail_damaged

__all__ = ["check_size", "check_space"]

_ENSEMBLE = "deep ensemble"
_OFF_SPAN = 1e-3  # of the points of a curve, relative to their distance from its centre


def _damaged(where: str, expected: str, got: Any) -> NoReturn:
    fail_damaged(f"{where} to be {expected}", got)


def check_size(space: JointSpace, rows: PreparedModel) -> None:
    """Raise for a space that is not one of the model's effects and weights."""
    where, effects, weights = "facts['space']", rows.structured.size, rows.n_weights
    total = effects + weights
    if space.subspace.size != total:
        got = f"of {space.subspace.size}"
        _damaged(where, f"a subspace of {effects} effects and {weights} weights", got)
    rank = space.subspace.rank if space.projected else space.subspace.rank - effects
    if space.rank != rank or (rank > 0) != (weights > 0):
        _damaged(f"{where}['rank']", str(rank), space.rank)
    if not space.projected and weights and not isinstance(space.subspace, JointSubspace):
        _damaged(f"{where}['subspace']", "a JointSubspace", type(space.subspace).__name__)
    if isinstance(space.subspace, JointSubspace) and space.subspace.effects != effects:
        _damaged(f"{where}['subspace']['effects']", str(effects), space.subspace.effects)
    try:
        space.prior.check_rank(space.subspace.rank)
    except InputError as error:
        _damaged(f"{where}['prior']", error.expected, error.got)
    curve = space.curve
    if curve is not None and curve.points.shape[1] != (total if space.projected else weights):
        _damaged("tensor 'curve'", f"points of {weights} weights", tuple(curve.points.shape))
    if not len(space.start_points):
        _damaged("tensor 'starts'", "at least one point", "none")


def check_space(space: JointSpace, rows: PreparedModel, draws: Draws, seed: int) -> None:
    """Raise for a space of another kind than its parts, its draws or their seed say.

    Args:
        space: the space, of the right size (`check_size`).
        rows: the model.
        draws: draws in the space.
        seed: of the model.

    Raises:
        InputError: parts that no fit gives together.
    """
    _check_parts(space, rows)
    _check_draws(space, draws)
    _check_smoothing(rows, draws)
    known = draws.engine == _ENSEMBLE or draws.engine in ENGINES
    if known and draws.meta.get("seed", seed) != seed:
        _damaged("facts['seed']", "the seed of the draws", f"{seed}")


def _check_smoothing(rows: PreparedModel, draws: Draws) -> None:
    """Raise for draws that vary, or do not, against how smoothing is said to have been chosen."""
    if rows.n_weights:
        if rows.specification.smooth == "reml":
            _damaged("facts['smooth']", "'bayes' for a model with networks", "'reml'")
        return
    try:
        places = smoothing_coordinates(rows.structured)
    except InputError:
        places = []
    still = bool(places) and bool((np.ptp(draws.flat()[:, places], axis=0) == 0).all())
    if rows.specification.smooth == "reml" and not still:
        _damaged("facts['smooth']", "'bayes', since standard deviations vary", "'reml'")
    if rows.specification.smooth == "bayes" and still and len(draws.flat()) > 1:
        _damaged("facts['smooth']", "'reml', since standard deviations do not vary", "'bayes'")


def _check_parts(space: JointSpace, rows: PreparedModel) -> None:
    """Raise for a kind that its subspace, curve or prior contradicts."""
    where, kind = "facts['space']['kind']", space.kind
    if not rows.n_weights:
        if kind not in ("curve", "own") or space.curve is not None or space.projected:
            _damaged(where, "'curve', without a curve, for effects alone", repr(kind))
        return
    if kind == "own":
        return
    inner = space.subspace.inner if isinstance(space.subspace, JointSubspace) else space.subspace
    all_weights, some = isinstance(inner, FullSubspace), isinstance(inner, CoordinateSubspace)
    fits = {
        "curve": space.curve is not None and not space.projected,
        "naive": space.curve is not None and space.projected,
        "last-layer": space.curve is None and not space.projected and some,
    }.get(kind, space.curve is None and not space.projected and all_weights)
    if not fits:
        _damaged(where, "that of its curve and its subspace", repr(kind))
    dtype = next(rows.deep.parameters()).dtype if rows.deep is not None else inner.shift.dtype
    if isinstance(space.subspace, JointSubspace) and inner.shift.dtype != dtype:
        _damaged("tensor 'space.shift'", f"of the networks' {dtype}", inner.shift.dtype)
    if not space.projected:
        mean, scale = (
            np.broadcast_to(part, space.subspace.rank)[space.rank :]
            for part in (space.prior.mean, space.prior.scale)
        )
        if space.prior.covariance is not None or (mean != 0).any() or (scale != 1).any():
            _damaged("facts['space']['prior']", "standard normal for effects", "another")
    if space.curve is not None:
        points = space.curve.points.to(inner.shift)
        distance = torch.linalg.vector_norm(points - inner.shift)
        off = torch.linalg.vector_norm(points - inner.weights(inner.project(points)))
        if not bool(off <= _OFF_SPAN * (distance + torch.linalg.vector_norm(points))):
            _damaged("tensor 'curve'", "points in the subspace", "others")
        places = inner.project(points).double().cpu().numpy()
        t = np.linspace(0, 1, len(space.start_points))
        along = space.curve.coefficients(t).cpu().numpy() @ places
        off_curve = np.abs(space.start_points[:, : inner.rank] - along).max()
        if not off_curve <= _OFF_SPAN * np.abs(places).max():
            expected = f"that of the start points along it, which are not on a {space.curve.kind}"
            _damaged("facts['space']['curve']", expected, repr(space.curve.kind))


def _check_draws(space: JointSpace, draws: Draws) -> None:
    """Raise for draws of an ensemble in another space, or the other way round."""
    where = "facts['draws']['engine']"
    if (space.kind == "ensemble") != (draws.engine == _ENSEMBLE):
        _damaged(where, f"{_ENSEMBLE!r} for a space of kind 'ensemble' alone", repr(draws.engine))
    if space.projected and draws.temperature != 1:
        _damaged("the temperature", "1 where effects are projected", draws.temperature)
    if draws.engine != _ENSEMBLE:
        return
    if (draws.validity, draws.independent, draws.temperature) != ("ensemble", False, 1.0):
        _damaged(f"draws of a {_ENSEMBLE}", "an 'ensemble' at temperature 1", repr(draws.validity))
    if draws.moments is not None:
        _damaged(f"draws of a {_ENSEMBLE}", "members alone", "moments")
    members = draws.flat()
    if "thinned_from" not in draws.meta and len(members) != len(space.start_points):
        _damaged("tensor 'z'", f"{len(space.start_points)} members", len(members))

"""Predictions with sampled effects of unseen groups, and without the effects of groups."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from subbayes.predictions.predictive import Predictive
from subbayes.semistructured.formula import Design
from subbayes.semistructured.joint_posterior import FittedState
from subbayes.semistructured.orthogonal_columns import OrthogonalNetworks
from subbayes.utils.checks import fail
from subbayes.utils.seeding import derive_seed

__all__ = ["with_new_groups", "without_groups"]


def with_new_groups(
    state: FittedState, predictive: Predictive, data: pd.DataFrame, n_draws: int | None
) -> Predictive:
    """Add sampled effects of unseen groups, once for each group and draw.

    Args:
        state: the fitted model.
        predictive: predictions in which unseen groups have the effects of the average one.
        data: the rows.
        n_draws: number of draws of the predictions, as for `Results.predict`.
    """
    joint, structured = state.joint, state.model.structured
    design, outputs = structured.design, predictive.outputs.clone()
    zeta = torch.from_numpy(joint.effects_of(state.draws, n_draws))
    for i, (name, (codes, loadings)) in enumerate(design.new_groups(data).items()):
        generator = torch.Generator().manual_seed(derive_seed(joint.seed, 5, i))
        place = design.parameters.index(design.term(name).parameter)
        factor, new = structured.group_factor(name, zeta).to(outputs), codes >= 0
        noise = torch.randn(len(zeta), codes.max() + 1, loadings.shape[1], generator=generator)
        effects = noise.to(outputs) @ factor.mT
        columns = torch.from_numpy(loadings[new]).to(outputs)
        own = (effects[:, torch.from_numpy(codes[new])] * columns).sum(-1)
        outputs[:, torch.from_numpy(new), place] += own
    return Predictive(outputs, predictive.likelihood)


def without_groups(
    inputs: dict[str, Tensor], design: Design, orthogonal: Sequence[OrthogonalNetworks]
) -> dict[str, Tensor]:
    """Encoded rows in which all effects of groups are 0, those of the average group.

    Args:
        inputs: encoded rows.
        design: columns of the formula.
        orthogonal: the networks that are orthogonal to columns.

    Raises:
        InputError: a network that is orthogonal to the groups, whose contribution depends on them.
    """
    columns = [i for term in design.terms if term.kind == "random" for i in term.columns]
    if any(set(columns) & set(part.columns.columns) for part in orthogonal):
        remedy = "Leave groups= out"
        fail("groups", "True with a network that reads the groups", "False", remedy)
    rows = inputs["design"].clone()
    rows[:, columns] = 0
    return {**inputs, "design": rows}

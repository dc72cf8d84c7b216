r"""A stack of posteriors: a mixture of the predictions of several models of one table.

$$ p(y \mid x) = \sum_m w_m \frac{1}{S_m} \sum_s p(y \mid f_m(x; z_{ms})), \qquad
   w = \arg\max_w \sum_{n} \log \sum_m w_m\, p_m(y_n \mid x_n) $$

over rows n that were held out (Yao, Vehtari, Simpson and Gelman 2018, *Using stacking to average
Bayesian predictive distributions*). The weights are the numbers of draws that predictions average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.facts import Count
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import MembersFacts, Nested, artifact
from subbayes.diagnostics.predictor import Members
from subbayes.diagnostics.surprise import Update
from subbayes.distributed.divided_rows import exchanged
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.models.fitted import FittedModel
from subbayes.predictions.modules import Component
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_count

LEVEL = 0.9
"""Probability of the intervals whose coverage of rows held out is recorded."""

_ROWS_AT_ONCE = 1000  # whose outputs of plain networks are computed
_ERRORS = 3.0  # standard errors, from which the coverage is warned of


class StackFacts(MembersFacts):
    """A stack but for its tensors."""

    kind_of_members = "fitted-model"

    counts: list[Count]
    record: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.counts) != len(self.members):
            raise ValueError("expected a number of draws of each member")


@dataclass(frozen=True)
class Stack(Members):
    """A mixture of fitted models with one likelihood.

    Attributes:
        members: the models.
        counts: number of draws of each that predictions average.
        record: what was compared, as values that JSON can represent.
        name: what tables call it.
    """

    kind: ClassVar[str] = "stack"
    name: ClassVar[str] = "hierarchical"
    label: ClassVar[str] = "hierarchical networks"

    members: tuple[FittedModel, ...]
    counts: tuple[int, ...]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    @override
    def default_draws(self) -> int:
        return sum(self.counts)

    @override
    def predict(
        self, inputs: Any, *, n_draws: int | None = None, progress: bool | None = False
    ) -> Predictive:
        outputs = [
            model.predict(_extended(model, inputs), n_draws=count, progress=progress).outputs
            for model, count in self._counted(n_draws)
        ]
        return Predictive(torch.cat(outputs), self.likelihood)

    def _counted(self, n_draws: int | None) -> list[tuple[FittedModel, int]]:
        """Each member, and the number of its draws among this many."""
        every = self.default_draws
        share = 1.0 if n_draws is None else min(1.0, check_count("n_draws", n_draws) / every)
        return [
            (model, max(1, round(share * count)))
            for model, count in zip(self.members, self.counts, strict=True)
        ]

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        each = [model.components(inputs, count) for model, count in self._counted(n_draws)]
        return [part for parts in each for part in parts]

    @override
    def update(self, new_rows: Any, *, forgetting: float = 1.0, seed: int = 0) -> Stack:
        """Update each member; the weights of the members remain those of the fit."""
        data = exchanged(new_rows)
        options: dict[str, Any] = {"forgetting": forgetting, "seed": seed}
        members = tuple(member.update(data, **options) for member in self.members)
        return replace(self, members=members)

    @property
    @override
    def updates(self) -> list[Update]:
        """Those of the first member."""
        return self.members[0].updates

    @override
    def warnings(self) -> list[str]:
        """Steps that failed, and predictions of rows held out that were too narrow or too wide.

        Chains that settle in places of their own are not reported: what they predict is averaged.
        """
        found = [text for member in self.members for text in MCLMC.warnings(member.sampled)]
        if "coverage" in self.record:
            coverage, n = self.record["coverage"], self.record["held_out"]
            error = math.sqrt(LEVEL * (1 - LEVEL) / n)
            if abs(coverage - LEVEL) > _ERRORS * error:
                how = "narrow" if coverage < LEVEL else "wide"
                found.append(
                    f"predictions were too {how}: intervals of {LEVEL:.0%} held {coverage:.1%} of "
                    f"{n} rows held out; use a longer effort or another likelihood"
                )
        return list(dict.fromkeys(found))

    @override
    def describe(self) -> dict[str, str]:
        return self.members[0].describe()

    def facts(self) -> StackFacts:
        """The members, their numbers of draws, and what was compared."""
        return StackFacts(
            members=[Nested.of(member) for member in self.members],
            counts=list(self.counts),
            record=self.record,
        )


def _extended(model: FittedModel, inputs: Any) -> Any:
    """The columns with what is the same for all draws of a network around plain ones."""
    features = getattr(model.network.template, "features", None)
    matrix = isinstance(inputs, np.ndarray | Tensor) and inputs.ndim == 2
    if getattr(features, "ensemble", None) is None or not matrix:
        return inputs
    module: Any = model.network.module_with()  # with the numbers of the network
    rows = torch.as_tensor(inputs, dtype=torch.float32)
    return torch.cat([module.features.extended(part) for part in rows.split(_ROWS_AT_ONCE)])


@artifact("stack", StackFacts)
def rebuild(tensors: dict[str, Tensor], facts: StackFacts) -> Stack:
    """Rebuild a stack from its artifact; see `subbayes.load`."""
    members = facts.rebuild_members(tensors)
    for member, count in zip(members, facts.counts, strict=True):
        if count > member.default_draws:
            fail_damaged(f"at most {member.default_draws} draws of a member", f"{count}")
        if member.likelihood != members[0].likelihood:
            fail_damaged("members with one likelihood", "others")
    return Stack(members, tuple(facts.counts), facts.record)

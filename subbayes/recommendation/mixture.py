r"""A mixture of the linearised posteriors of several networks, with Gaussian noise.

$$ p(y \mid x) = \frac1M \sum_m N(y \mid f(x; \hat w_m),\; J_m \Psi_m J_m^\top + \sigma^2) $$
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.saving import MembersFacts, Nested, artifact
from subbayes.diagnostics.predictor import Members
from subbayes.inference.laplace.linearised import LinearisedPosterior
from subbayes.likelihoods import Likelihood
from subbayes.predictions.gaussian import MoreVariance
from subbayes.predictions.modules import Component
from subbayes.predictions.predictive import Predictive
from subbayes.utils.types import OutputFunction, Outputs


class MixtureFacts(MembersFacts):
    """A mixture but for its tensors."""

    kind_of_members = "linearised-laplace"


class MixturePredictive(Predictive):
    """A mixture of Gaussian predictives, each with an epistemic variance of its own.

    Args:
        outputs: means of the outputs of each member.
        likelihood: Gaussian noise.
        variances: epistemic, of the targets of each member.
    """

    def __init__(
        self, outputs: Outputs, likelihood: Likelihood, variances: Float[Tensor, "S N T"]
    ) -> None:
        super().__init__(outputs, MoreVariance(likelihood, variances))
        self._noise, self.variances = likelihood, variances

    @classmethod
    def joined(cls, parts: Sequence[Any], likelihood: Likelihood) -> Predictive:
        """Predictions of the rows of all parts."""
        outputs = torch.cat([part.outputs for part in parts], 1)
        return cls(outputs, likelihood, torch.cat([part.variances for part in parts], 1))

    @property
    @override
    def epistemic(self) -> np.ndarray:
        between = self._noise.mean(self.outputs).var(0, correction=0)
        return self._finite("epistemic variance", between + self.variances.mean(0), 1)

    @property
    @override
    def aleatoric(self) -> np.ndarray:
        return self._finite("variance", self._noise.variance(self.outputs).mean(0), 2)


@dataclass(frozen=True)
class Mixture(Members):
    """Linearised posteriors of several networks, with equal weights.

    Attributes:
        members: the posteriors, with one likelihood.
    """

    kind: ClassVar[str] = "posterior-mixture"
    name: ClassVar[str] = "ensemble of linearised posteriors"
    label: ClassVar[str] = "ensemble of linearised posteriors"

    members: tuple[LinearisedPosterior, ...]

    @property
    @override
    def default_draws(self) -> int:
        return len(self.members)

    @override
    def predict(
        self, inputs: Any, *, n_draws: int | None = None, **options: Any
    ) -> MixturePredictive:
        each = [member.predict(inputs, **options) for member in self.members[:n_draws]]
        outputs = torch.cat([one.outputs for one in each])
        variances = [torch.from_numpy(one.epistemic).reshape(len(one), -1) for one in each]
        return MixturePredictive(outputs, self.likelihood, torch.stack(variances))

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        return [part for one in self.members[:n_draws] for part in one.components(inputs)]

    def facts(self) -> MixtureFacts:
        """The members."""
        return MixtureFacts(members=[Nested.of(member) for member in self.members])


@artifact("posterior-mixture", MixtureFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: MixtureFacts,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> Mixture:
    """Rebuild a mixture from its artifact; see `subbayes.load`."""
    return Mixture(
        facts.rebuild_members(tensors, module=module, likelihood=likelihood, output=output)
    )

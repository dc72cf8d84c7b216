r"""A mixture of the linearised posteriors of several networks, with Gaussian noise.

$$ p(y \mid x) = \frac1M \sum_m N(y \mid f(x; \hat w_m),\; J_m \Psi_m J_m^\top + \sigma^2) $$
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import Array, Arrays, under
from subbayes.artifacts.saving import KindFacts, Nested, artifact
from subbayes.artifacts.saving import rebuild as rebuild_model
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.diagnostics.predictor import Predictor
from subbayes.inference.laplace.linearised import LinearisedPosterior
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import Moments, WrappedLikelihood
from subbayes.likelihoods.gaussian import GaussianLike
from subbayes.predictions.predictive import Predictive
from subbayes.utils.types import Outputs


class MixtureFacts(KindFacts):
    """A mixture but for its tensors, which are those of its members."""

    members: Annotated[list[Nested], Meta(min_length=1, max_length=100)]

    def __post_init__(self) -> None:
        for member in self.members:
            member.check_kind("linearised-laplace")

    def arrays(self) -> Arrays:
        """Those of each member, under its number."""
        found: dict[str, Array] = {}
        for m, member in enumerate(self.members):
            found |= under(str(m), member.arrays())
        return found


@dataclass(frozen=True)
class _MoreVariance(GaussianLike, WrappedLikelihood):
    """Gaussian noise with the epistemic variances of each draw and row added."""

    epistemic: Tensor

    def variance(self, outputs: Outputs) -> Moments:
        """The sum of both variances."""
        return self.likelihood.variance(outputs) + self.epistemic

    @override
    def select_draws(self, index: Tensor) -> Likelihood:
        return _MoreVariance(self.likelihood.select_draws(index), self.epistemic[index])


class MixturePredictive(Predictive):
    """A mixture of Gaussian predictives, each with an epistemic variance of its own.

    Args:
        outputs: means of the outputs of each member.
        likelihood: Gaussian noise.
        variances: epistemic, of the targets of each member.
    """

    def __init__(
        self,
        outputs: Float[Tensor, "S N C"],
        likelihood: Likelihood,
        variances: Float[Tensor, "S N T"],
    ) -> None:
        super().__init__(outputs, _MoreVariance(likelihood, variances))
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
class Mixture(Predictor):
    """Linearised posteriors of several networks, with equal weights.

    Attributes:
        members: the posteriors, with one likelihood.
    """

    kind: ClassVar[str] = "posterior-mixture"
    name: ClassVar[str] = "ensemble of linearised posteriors"
    label: ClassVar[str] = "ensemble of linearised posteriors"

    members: tuple[LinearisedPosterior, ...]

    @property
    def network(self) -> Any:
        """The network of the first member."""
        return self.members[0].network

    @property
    def likelihood(self) -> Any:
        """p(y | f), of all members."""
        return self.members[0].likelihood

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

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Those of each member, under its number."""
        found: dict[str, Tensor | np.ndarray] = {}
        for m, member in enumerate(self.members):
            found |= add_prefix(str(m), member.tensors())
        return found

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
    output: Callable[[Any], Tensor] | None = None,
) -> Mixture:
    """Rebuild a mixture from its artifact; see `subbayes.load`."""
    given = {"module": module, "likelihood": likelihood, "output": output}
    options = {name: value for name, value in given.items() if value is not None}
    members = [
        rebuild_model(one.kind, strip_prefix(str(m), tensors), one.facts, options)
        for m, one in enumerate(facts.members)
    ]
    return Mixture(tuple(members))

"""What `recommend` returns: the model it chose, the comparison, and a score for unlike inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.arrays import Array, Arrays, under
from subbayes.artifacts.facts import Finite, Line
from subbayes.artifacts.saving import KindFacts, Nested, artifact
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import Likelihood
from subbayes.predictions.modules import Component
from subbayes.predictions.predictive import Predictive
from subbayes.recommendation.mirrored import Mirrored
from subbayes.recommendation.unlike import Unlike
from subbayes.utils.checks import fail
from subbayes.utils.types import OutputFunction, RowNumbers

if TYPE_CHECKING:
    import pandas as pd

_MODEL, _POSTERIOR = "model", "posterior"
_KINDS = "weight-samples", "temperature-scaled", "linearised-laplace", "posterior-mixture"


class RecommendationFacts(KindFacts):
    """A `Recommendation` but for its tensors."""

    model: Nested
    posterior: Nested | None
    rows: list[dict[str, Any]]
    reference: Line
    gain: Finite
    error: Finite
    held_out: int
    mirrored: bool = False

    def __post_init__(self) -> None:
        self.model.check_kind(*_KINDS)
        if self.posterior is not None:
            self.posterior.check_kind("linearised-laplace")

    def arrays(self) -> Arrays:
        """Those of the model, of the posterior of the last layer, and the marks."""
        found = dict(under(_MODEL, self.model.arrays()))
        if self.posterior is not None:
            found |= under(_POSTERIOR, self.posterior.arrays())
            found["marks"] = Array("q", "marks", dtype="float64")
        return found


@dataclass(frozen=True)
class Recommendation(Predictor):
    """The model that `recommend` chose.

    Attributes:
        model: what predicts.
        rows: a dict for each candidate: its name, mean log density of held-out rows, weight in the
            model, and the reason.
        reference: name of the reference.
        gain: cross-fitted gain over the reference of the stack of all candidates, in nats a row.
        error: standard error of the gain.
        held_out: number of held-out rows.
        score: for inputs that are unlike the training data; None without a last layer.
    """

    kind: ClassVar[str] = "recommendation"
    name: ClassVar[str] = "recommended"

    model: Any
    rows: list[dict[str, Any]] = field(repr=False)
    reference: str
    gain: float
    error: float
    held_out: int
    score: Unlike | None = field(default=None, repr=False)

    @property
    def network(self) -> Any:
        """The network of the model."""
        return self.model._parts()[0]

    @property
    def likelihood(self) -> Any:
        """p(y | f) of the model."""
        return self.model._parts()[1]

    @property
    @override
    def default_draws(self) -> int:
        return self.model.default_draws

    @property
    @override
    def label(self) -> str:
        return f"recommended: {self.model.label}"

    @override
    def predict(self, inputs: Any, **options: Any) -> Predictive:
        return self.model.predict(inputs, **options)

    @override
    def components(self, inputs: Any, n_draws: int | None = None) -> list[Component]:
        return self.model.components(inputs, n_draws)

    @property
    def table(self) -> pd.DataFrame:
        """The candidates: score on held-out rows, weight in the model, and the reason."""
        import pandas as pd

        return pd.DataFrame(self.rows).set_index("candidate")

    @property
    def ships_stack(self) -> bool:
        """Whether the candidates gained enough to replace the reference."""
        return self.rows[0]["weight"] < 1

    def summary(self) -> str:
        """What was chosen, and by how much it beats the reference, in a sentence."""
        gain = f"{self.gain:+.3f} ± {self.error:.3f} nats a row on {self.held_out} held-out rows"
        if len(self.rows) == 1:
            return f"{self.reference}: there was no other candidate."
        if not self.ships_stack:
            return (
                f"{self.reference}: the other candidates did not surely improve on it "
                f"({gain}, cross-fitted)."
            )
        parts = [f"{row['weight']:.0%} {row['candidate']}" for row in self.rows if row["weight"]]
        return f"{', '.join(parts)}: {gain} (cross-fitted) over {self.reference}."

    def unlike(self, inputs: Any) -> RowNumbers:
        """How unlike the training data inputs are, in [0, 1]; see `recommendation.unlike`.

        The share of held-out rows that are less unlike: of rows like the training data one in
        twenty has a score above 0.95.

        Args:
            inputs: in the form the module takes.

        Raises:
            InputError: a network whose outputs are not those of a linear last layer.
        """
        if self.score is None:
            fail("model", "a network whose outputs are those of a linear layer", "another one")
        return self.score(self.model, inputs)

    @override
    def describe(self) -> dict[str, str]:
        return self.model.describe() | {"method": self.label, "comparison": self.summary()}

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Those of the model, of the posterior of the last layer, and the marks."""
        found: dict[str, Tensor | np.ndarray] = {**add_prefix(_MODEL, self.model.tensors())}
        if self.score is not None:
            found |= add_prefix(_POSTERIOR, self.score.posterior.tensors())
            found["marks"] = self.score.marks
        return found

    def facts(self) -> RecommendationFacts:
        """Everything but the tensors."""
        return RecommendationFacts(
            model=Nested.of(self.model),
            posterior=None if self.score is None else Nested.of(self.score.posterior),
            rows=self.rows,
            reference=self.reference,
            gain=self.gain,
            error=self.error,
            held_out=self.held_out,
            mirrored=isinstance(self.network.template, Mirrored),
        )


@artifact("recommendation", RecommendationFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: RecommendationFacts,
    module: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    output: OutputFunction | None = None,
) -> Recommendation:
    """Rebuild a recommendation from its artifact; see `subbayes.load`."""
    given: Any = {"module": module, "likelihood": likelihood, "output": output}
    score = None
    if facts.posterior is not None:
        posterior = facts.posterior.rebuild(strip_prefix(_POSTERIOR, tensors), **given)
        score = Unlike(posterior, tensors["marks"])
    if facts.mirrored and module is not None:
        given |= {"module": Mirrored(module, output), "output": None}
    return Recommendation(
        model=facts.model.rebuild(strip_prefix(_MODEL, tensors), **given),
        rows=facts.rows,
        reference=facts.reference,
        gain=facts.gain,
        error=facts.error,
        held_out=facts.held_out,
        score=score,
    )

"""What people read of a fitted semi-structured model: effects, pictures, comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure

from subbayes import diagnostics
from subbayes.diagnostics import LooResult
from subbayes.diagnostics.arviz import arviz_data
from subbayes.draws import Draws
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.semistructured.dependence import partial_dependence
from subbayes.semistructured.formula import NewLevels
from subbayes.semistructured.module import Deep, Predictors
from subbayes.semistructured.partial import Partial, contribution_table, partial_effect
from subbayes.semistructured.sampling import Sampler
from subbayes.semistructured.specification import Fittable
from subbayes.semistructured.subspace import Space
from subbayes.semistructured.summary import check_level, summary_table, unmixed
from subbayes.utils.checks import check_choice, fail

__all__ = ["Reading"]


class Reading:
    """What a fitted `SemiStructuredRegression` says about itself.

    Attributes:
        deep: the networks by name.
        seed: of training and sampling.
        draws: of networks and effects.
        fittable: the model on its rows.
        sampler: what made the draws.
    """

    deep: dict[str, Deep]
    seed: int
    draws: Draws
    fittable: Fittable
    sampler: Sampler

    @property
    def is_posterior(self) -> bool:
        """Whether draws are draws of a posterior: those of a deep ensemble are not."""
        self._require_fitted()
        return self.space.kind != "ensemble"

    @property
    def posterior(self) -> Posterior:
        """The posterior of networks and effects, at temperature 1; any sampler runs on it."""
        self._require_fitted()
        return self.sampler.posterior

    @property
    def space(self) -> Space:
        """Where the posterior lives."""
        self._require_fitted()
        return self.sampler.space

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """Classes of the response in the order of probabilities, where it has any."""
        self._require_fitted()
        return self.fittable.response.labels

    def warnings(self) -> list[str]:
        """What is wrong with the draws of the effects, each with a remedy; empty if nothing is.

        Draws of an approximation, or of a deep ensemble, are not chains that could mix.
        """
        self._require_fitted()
        if not self.is_posterior or self.draws.independent:
            return []
        return unmixed(self.effects(), self.draws.engine)

    # --- what people read -------------------------------------------------------------------

    def effects(self) -> dict[str, Float[np.ndarray, "chains draws"]]:
        """Draws of each effect by name, in the units of the data, shape (chains, draws)."""
        self._require_fitted()
        shape = self.draws.n_chains, self.draws.n_draws
        zeta = self.sampler.effects_of(self.draws)
        return {
            name: values.reshape(shape)
            for name, values in self.fittable.structure.reported(zeta).items()
        }

    def summary(self, level: float = 0.95) -> pd.DataFrame:
        """A table of the effects.

        Args:
            level: of the highest-density intervals.

        Returns:
            Mean, standard deviation, highest-density interval, probability of direction (the
            larger of P(effect > 0) and P(effect < 0)), R-hat and effective sample sizes.
        """
        return summary_table(self.effects(), check_level(level))

    def _predicted(
        self, inputs: Any, n_draws: int | None = None, progress: bool | None = False
    ) -> Predictive:
        model = self.fittable
        module = Predictors(model.structure, model.deep, model.dtype, corrected=True)
        weights, count = self.sampler.weights_of(self.draws, n_draws)
        return average(
            Network(module), model.family, weights, inputs, count=count, progress=progress
        )

    def effect(
        self,
        term: str,
        values: Any = None,
        level: float = 0.95,
        *,
        variable: str | None = None,
        n_draws: int = 400,
    ) -> Partial:
        """The partial effect of a term, or the partial dependence of a network on a column.

        Args:
            term: its name, or its variable where only one term reads it; or the name of a
                network that reads columns.
            values: values of the variable; by default the observed range, or all levels.
            level: of the interval.
            variable: of a network of several columns, the one that varies.
            n_draws: of a network, use at most so many evenly spaced draws.

        Returns:
            Draws of the effect on the scale of the predictor. Of a network: its contribution as
            the model counts it, beside the effects, averaged over the rows with the column set
            to each value, less its mean over the rows (Friedman 2001, section 8.2).

        Raises:
            InputError: no such term, one of several variables, or a network of tensors.
        """
        self._require_fitted()
        if term in self.deep and term not in [t.name for t in self.fittable.design.terms]:
            return partial_dependence(
                self.sampler, self.draws, term, variable, values, check_level(level), n_draws
            )
        if variable is not None:
            fail("variable", "None for a term of the formula", repr(variable))
        return partial_effect(
            self.fittable.structure,
            self.sampler.effects_of(self.draws),
            self.fittable.frame,
            term,
            values,
            check_level(level),
        )

    def partials(self, level: float = 0.95) -> list[Partial]:
        """All that `effect` can show: terms of one variable, then networks by column.

        Args:
            level: of the intervals.
        """
        self._require_fitted()
        terms = [
            t for t in self.fittable.design.terms if t.kind != "intercept" and len(t.variables) == 1
        ]
        return [
            *(self.effect(t.name, level=level) for t in terms),
            *(
                self.effect(name, level=level, variable=column)
                for name, part in self.deep.items()
                for column in part.columns or ()
            ),
        ]

    def plot(self, level: float = 0.95, *, columns: int = 3) -> Figure:
        """One figure of all terms and of the networks that read columns.

        Args:
            level: of the intervals.
            columns: panels side by side.

        Returns:
            The figure; `figure.savefig(...)` or `subbayes.plots.save` writes it.

        Raises:
            InputError: a model with nothing but intercepts and networks of tensors.
        """
        from subbayes.plots.effects import effects

        return effects(self.partials(level), columns=columns)

    def contributions(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        *,
        parameter: str | None = None,
        level: float = 0.95,
        new_levels: NewLevels = "error",
        n_draws: int = 1000,
    ) -> pd.DataFrame:
        """What the effects and the networks add to a predictor, row by row.

        Args:
            data: the rows.
            inputs: what networks without columns read, by name, as for `fit`.
            parameter: whose predictor; by default the location's.
            level: of the intervals.
            new_levels: as for `predict`.
            n_draws: use at most so many evenly spaced draws.

        Returns:
            A table with mean, standard deviation and interval of "structured", "deep" and
            "predictor".
        """
        self._require_fitted()
        parameters = self.fittable.design.parameters
        check_choice("parameter", parameter or parameters[0], parameters)
        found = self.fittable.rows.inputs(data, inputs, new_levels)
        weights, count = self.sampler.weights_of(self.draws, n_draws)
        return contribution_table(
            self.fittable.structure,
            self.fittable.deep,
            found,
            weights(slice(count)),
            parameters.index(parameter or parameters[0]),
            check_level(level),
        )

    def to_arviz(self) -> Any:
        """The draws as ArviZ data, with the names of effects as coordinates.

        Groups: posterior (`effects`, and `networks`, the coordinates of the networks),
        sample_stats, posterior_predictive, observed_data, and log_likelihood (for leave-one-out;
        only at temperature 1).

        Raises:
            ImportError: if arviz is not installed (`pip install subbayes[arviz]`).
        """
        self._require_fitted()
        effects = self.effects()
        variables: dict[str, Any] = {"effects": np.stack(list(effects.values()), -1)}
        coords: dict[str, Any] = {"effect": list(effects)}
        dims = {"effects": ["effect"]}
        if self.space.rank:
            variables["networks"] = self.draws.z[..., : self.space.rank]
            coords["coordinate"] = np.arange(self.space.rank)
            dims["networks"] = ["coordinate"]
        found = self._predicted(self.fittable.inputs)
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.draws.n_chains, self.draws.n_draws
        again = found.likelihood.sample(found.outputs, generator).numpy()
        y = self.fittable.response.numbers(self.fittable.frame)
        groups = {
            "posterior_predictive": {"y": again.reshape(*shape, -1)},
            "observed_data": {"y": y},
        }
        if self.is_posterior and self.draws.temperature == 1.0:
            groups["log_likelihood"] = {
                "y": self.posterior.pointwise(self.draws.flat()).reshape(*shape, -1)
            }
        return arviz_data(self.draws, variables, coords, dims, groups)

    def loo(self, quiet: bool = False) -> LooResult:
        """Leave-one-out log predictive density (PSIS) of the training rows.

        Args:
            quiet: give no warning where it is unreliable.

        Raises:
            InputError: draws at a temperature other than 1, whose weights are not known, or
                members of an ensemble, which have none.
        """
        self._require_fitted()
        if not self.is_posterior:
            fail(
                "inference",
                "draws of a posterior for leave-one-out",
                "a deep ensemble",
                "Score held-out rows with predict(...).log_prob(y)",
            )
        if self.draws.temperature != 1.0:
            fail(
                "temperature",
                "1 for leave-one-out",
                self.draws.temperature,
                "Score held-out rows with predict(...).log_prob(y)",
            )
        terms = self.posterior.pointwise(self.draws.flat())
        return diagnostics.loo(
            terms.reshape(self.draws.n_chains, self.draws.n_draws, -1), quiet=quiet
        )

    @property
    def is_orthogonal(self) -> bool:
        """Whether networks were made orthogonal to effects, and not just centred."""
        return self.orthogonal_to == "effects"

    @property
    def orthogonal_to(self) -> str:
        """What networks were made orthogonal to: "effects", "intercept" (centred) or "nothing"."""
        self._require_fitted()
        terms = self.fittable.design.terms
        level = {i for t in terms if t.kind == "intercept" for i in t.columns}
        parts = [set(part.columns) for part in self.sampler.orthogonal.values()]
        if any(part - level for part in parts):
            return "effects"
        return "intercept" if parts else "nothing"

    def _require_fitted(self) -> None:
        if not hasattr(self, "draws"):
            fail("model", "a fitted model", "one that is not", "Call fit first")

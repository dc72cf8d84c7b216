"""Tools after the fit, as methods of fitted models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from subbayes.data.frames import read_frame
from subbayes.data.levels import kind_of_level, levels_of, same_level
from subbayes.diagnostics import LooResult
from subbayes.predictions.predictive import Predictive
from subbayes.regression.design.design import NewLevels
from subbayes.regression.design.flat_effects import improper_effects
from subbayes.regression.questions.averages import (
    Averages,
    RowAverage,
    contrasts,
    marginal_means,
    marginal_slopes,
)
from subbayes.regression.questions.comparison import compare_fits
from subbayes.regression.questions.conditional import Conditional, conditional_effect
from subbayes.regression.questions.hypothesis import Hypothesis, evaluate_hypothesis
from subbayes.regression.questions.survival import survival_curves, times_of
from subbayes.semistructured.estimand import ESTIMANDS
from subbayes.semistructured.joint_posterior import FittedState
from subbayes.semistructured.predictive_checks import Replicates, replicate
from subbayes.utils.checks import (
    check_choice,
    check_count,
    check_fraction,
    check_seed,
    closest,
    fail,
)

_PRIOR_DRAWS = 4000


class AfterFit:
    """Questions to a fitted model; the model defines its state, effects and predictions."""

    @property
    @abstractmethod
    def state(self) -> FittedState:
        """What `fit` determined."""

    @abstractmethod
    def effects(self) -> dict[str, Float[np.ndarray, "chains draws"]]:
        """Draws of each effect."""

    @abstractmethod
    def predict(self, data: Any, *args: Any, **options: Any) -> Predictive:
        """The predictive distribution of rows."""

    @abstractmethod
    def loo(self, quiet: bool = False) -> LooResult:
        """Leave-one-out log predictive density."""

    def hypothesis(self, expression: str, level: float = 0.95) -> Hypothesis:
        r"""The posterior probability of a hypothesis about effects.

        Args:
            expression: a comparison by ">", "<" or "=" of numbers and effects, with + - * / ** ^,
                abs, exp, log and sqrt, such as "x > 0", "x - 2 * z < 1" or "C(sex)[T.m] = 0".
            level: level of the interval of the difference of both sides.

        Returns:
            The result, with `probability`, `interval`, `evidence_ratio` (the posterior odds; of an
            equality the Savage-Dickey ratio), its Monte Carlo standard error and `table()`.

        Raises:
            InputError: an expression that cannot be used, or an unknown effect.
        """
        effects = self.effects()
        chains = max((len(draws) for draws in effects.values()), default=1)
        flat = {name: draws.reshape(-1) for name, draws in effects.items()}
        return evaluate_hypothesis(expression, flat, self._prior_effects, level, chains)

    def _prior_effects(self) -> dict[str, Float[np.ndarray, "S"]]:
        structured = self.state.model.structured
        rng = np.random.default_rng([self.state.joint.seed, 7])
        drawn = structured.reported(rng.standard_normal((_PRIOR_DRAWS, structured.size)))
        flat = improper_effects(structured)
        return {name: draws for name, draws in drawn.items() if name not in flat}

    def _quantity(
        self,
        scale: str,
        n_draws: int,
        category: Any,
        new_levels: NewLevels = "error",
        groups: bool = True,
    ) -> Callable[[pd.DataFrame], Float[np.ndarray, "S n"]]:
        """Draws of the mean, or of the location's predictor, as a function of rows.

        Of quantile regression the quantile takes the place of the mean.
        """
        check_choice("scale", scale, ("response", "link"))
        check_count("n_draws", n_draws)
        place = self._position_of(category, scale)

        def quantity(rows: pd.DataFrame) -> np.ndarray:
            most = min(n_draws, self.state.draws.flat().shape[0])
            found = self.predict(rows, n_draws=most, new_levels=new_levels, groups=groups)
            if scale == "link":
                return found.outputs[..., place].numpy()
            mean = self.state.model.family.averaged(found.outputs).numpy()
            if mean.shape[-1] == 1 and category is not None:  # the probability of the second class
                return mean[..., 0] if place else 1 - mean[..., 0]
            return mean[..., place if mean.shape[-1] > 1 else 0]

        return quantity

    def _quantity_name(self, scale: str, category: Any) -> str:
        """What `_quantity` is, for figures."""
        model, place = self.state.model, self._position_of(category, scale)
        if scale == "link":
            return model.family.predictor_scale(model.family.parameters[place])
        name, labels = model.response.name, model.response.labels
        if labels:
            return f"probability of {name} = {labels[place]}"
        return f"{model.family.average_name} of {name}"

    def _position_of(self, category: Any, scale: str) -> int:
        """Position of the class that is asked for, and of its predictor; 0 without classes."""
        labels = self.state.model.response.labels or ()
        of_location = scale == "link" and not self.state.model.family.has_predictor_per_class
        if category is None and (of_location or len(labels) <= 2):
            return 0 if of_location else max(len(labels) - 1, 0)
        places = [i for i, label in enumerate(labels) if same_level(label, category)]
        if of_location or not places:
            expected = "None for a response of numbers"
            if labels:
                expected = f"one of the classes {_listed(labels)}"
            if labels and of_location:
                expected = "None with scale='link', as all classes have the same predictor"
            fail("category", expected, repr(category), "Pass the class to average over" if labels
                 and not of_location else "")  # fmt: skip
        return places[0]

    def marginal_means(
        self,
        variable: str,
        values: Iterable[Any] | None = None,
        *,
        data: Any = None,
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        category: Any = None,
        effects: str | None = None,
    ) -> Averages:
        """The mean response with a column set to each value in all rows, averaged over them.

        It uses 1000 evenly spaced draws by default, where `summary` and `hypothesis` use all of
        them. Its intervals are central, and those of `summary` have the highest density.

        Args:
            variable: the column.
            values: its values; by default all levels.
            data: the rows; by default those of training, at most 2000 evenly spaced ones.
            scale: "response" for E[y], or the quantile of the "asymmetric-laplace" family; "link"
                for the predictor of the location.
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            weights: column that says how many times a row counts; by default that of the fit for
                its rows, and 1 for those of `data`.
            category: the class whose probability is averaged, of a response of classes (or its
                predictor, of a categorical family); by default the second one of two.
            effects: averages over the rows as they are ("sample"), or over the population that they
                were drawn from, with random weights of the rows (the Bayesian bootstrap) in each
                draw ("population"); by default that of the fit for its rows beside networks, else
                "sample". Without networks, intervals of other packages are those of "sample".

        Returns:
            The averages, with `draws` and `table()`.

        Raises:
            InputError: an unknown column, a column of many numbers that are not levels without
                `values`, or a response of several classes without `category`.
        """
        check_fraction("level", level)
        self._check_column(variable)
        frame, average, effects = self._average(data, weights, effects)
        values = None if values is None else list(values)
        self._check_levels("values", variable, values or ())
        predict, by_level = self._quantity(scale, n_draws, category), self._has_levels(variable)
        found = marginal_means(predict, frame, variable, values, level, average, by_level)
        return replace(found, quantity=self._quantity_name(scale, category), effects=effects)

    def contrast(
        self,
        variable: str,
        levels: Iterable[Any] | None = None,
        *,
        data: Any = None,
        comparison: str = "difference",
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        category: Any = None,
        effects: str | None = None,
    ) -> Averages:
        """Differences or ratios of marginal means between levels of a column.

        Draws and intervals are those of `marginal_means`.

        Args:
            variable: the column.
            levels: pairs (a, b), a compared with b; by default each level with the first one.
            data: as for `marginal_means`, as are the other arguments.
            comparison: "difference", "ratio", such as a relative risk or a ratio of rates, or
                "odds ratio", of probabilities; ratios are those of the means over rows.
            scale: "response" or "link".
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            weights: as for `marginal_means`.
            category: as for `marginal_means`.
            effects: as for `marginal_means`.

        Raises:
            InputError: levels that do not exist, or ratios of means that are not positive.
        """
        check_fraction("level", level)
        if scale == "link" and comparison != "difference":
            remedy = "Ratios are those of means: leave scale at 'response'"
            fail("comparison", "'difference' for scale='link'", repr(comparison), remedy)
        self._check_column(variable)
        frame, average, effects = self._average(data, weights, effects)
        levels = None if levels is None else list(levels)
        pairs = [pair for pair in levels or () if isinstance(pair, tuple)]
        self._check_levels("levels", variable, [value for pair in pairs for value in pair])
        predict, by_level = self._quantity(scale, n_draws, category), self._has_levels(variable)
        found = contrasts(predict, frame, variable, levels, level, average, by_level, comparison)
        quantity = f"{comparison}, {self._quantity_name(scale, category)}"
        return replace(found, quantity=quantity, effects=effects)

    def marginal_slopes(
        self,
        variable: str,
        *,
        by: str | None = None,
        data: Any = None,
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        category: Any = None,
        effects: str | None = None,
    ) -> Averages:
        """The slope of the mean response in a column of numbers, averaged over rows.

        Draws and intervals are those of `marginal_means`.

        Args:
            variable: the column.
            by: column whose groups of rows have averages of their own.
            data: as for `marginal_means`, as are the other arguments.
            scale: "response" or "link".
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            weights: as for `marginal_means`.
            category: as for `marginal_means`.
            effects: as for `marginal_means`.
        """
        check_fraction("level", level)
        self._check_column(variable)
        frame, average, effects = self._average(data, weights, effects)
        if (known := self._levels(variable)) is not None:
            got = f"{variable!r}, whose values are levels: {_listed(known)}"
            remedy = "Use contrast or marginal_means: levels have no slope"
            fail("variable", "a column whose effect is one of numbers", got, remedy)
        predict = self._quantity(scale, n_draws, category)
        found = marginal_slopes(predict, frame, variable, by, level, average)
        quantity = f"slope, {self._quantity_name(scale, category)}"
        return replace(found, quantity=quantity, effects=effects)

    def _check_column(self, variable: str) -> None:
        """Refuse what no prediction depends on, such as the response or weights."""
        check_choice("variable", variable, tuple(self.state.model.encoder.columns))

    def _groups_count(self, *names: str | None) -> bool:
        """Whether one of the columns is read by effects of groups, or networks depend on these."""
        state = self.state
        effects = {i for t in state.model.design.terms if t.kind == "random" for i in t.columns}
        read = any(effects & set(part.columns.columns) for part in state.joint.orthogonal)
        return read or bool(set(state.model.encoder.columns_of_groups) & set(names))

    def _levels(self, variable: str) -> list[Any] | None:
        """The values of a column whose effects are by level or group; None for other columns."""
        model = self.state.model
        for term in model.design.terms:
            if variable in (term.variables if term.kind == "monotonic" else term.groups):
                return levels_of(model.frame[variable])
        return model.design.levels().get(variable)

    def _has_levels(self, variable: str) -> bool:
        """Whether the values of a column are levels, also if they are numbers."""
        return self._levels(variable) is not None

    def _check_levels(self, argument: str, variable: str, values: Iterable[Any]) -> None:
        """Refuse values of a column that are not among its levels."""
        known = self._levels(variable)
        if known is None:
            return
        for value in values:
            if any(same_level(level, value) for level in known):
                continue
            expected = f"levels of {variable!r} in the training rows: {_listed(known)}"
            alike = [v for v in known if str(v) == str(value) or v == value]
            if not alike:
                fail(argument, expected, repr(value), closest(value, known))
            got = f"{value!r}, where levels are {kind_of_level(alike[0])}"
            fail(argument, expected, got, f"Pass {alike[0]!r}")

    def _rows(self, data: Any, weights: str | None) -> tuple[pd.DataFrame, str | None]:
        """The rows to average over, and the column of their weights."""
        if data is not None:
            return read_frame("data", data), weights
        model = self.state.model
        return model.frame, weights or model.specification.auxiliary.weights

    def _average(
        self, data: Any, weights: str | None, effects: str | None
    ) -> tuple[pd.DataFrame, RowAverage, str]:
        """The rows, their average, and what it is an average of."""
        if effects is None:
            own = data is None and self.state.model.deep is not None
            effects = self.state.estimand if own else "sample"
        check_choice("effects", effects, ESTIMANDS)
        frame, weights = self._rows(data, weights)
        seed = self.state.joint.seed if effects == "population" else None
        return frame, RowAverage(frame, weights, seed), effects

    def conditional_effect(
        self,
        variable: str,
        by: str | None = None,
        *,
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        category: Any = None,
        groups: bool | None = None,
    ) -> Conditional:
        """Predictions along a column, the others at their means or most frequent values.

        Numbers that are levels, of factors, groups or `mo(...)`, are not averaged. Rows of a
        weighted fit count for these as often as their weights say. The others' values are in
        `typical`.

        It uses 1000 evenly spaced draws by default, where `summary` and `hypothesis` use all of
        them. Its intervals are central, and those of `summary` have the highest density.

        `subbayes.plots.conditional.conditional` draws the result.

        Args:
            variable: the column.
            by: a second column, with a line for each level, or for three quantiles.
            scale: "response" or "link".
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            category: as for `marginal_means`.
            groups: False leaves all effects of groups out, as of the average group (`re_formula =
                NA` of brms); True has those of the most frequent group, or of the average one for a
                combination that no training row has. By default False, unless the column or `by` is
                one that effects of groups alone read, or a network is orthogonal to them.
        """
        check_fraction("level", level)
        model = self.state.model
        if groups is None:
            groups = self._groups_count(variable, by)
        predict = self._quantity(scale, n_draws, category, "reference", groups)
        left_out = () if groups else model.encoder.columns_of_groups
        columns = [name for name in model.encoder.columns if name not in left_out]
        weights = model.specification.auxiliary.weights
        by_level = [name for name in columns if self._has_levels(name)]
        found = conditional_effect(
            predict, model.frame, columns, variable, by, level, weights, by_level
        )
        named = [*model.family.known.values(), model.specification.auxiliary.exposure]
        at = "".join(f", {n} = {found.typical[n]:.4g}" for n in named if n in found.typical)
        return replace(found, quantity=self._quantity_name(scale, category) + at)

    def survival(
        self,
        times: Sequence[float] | np.ndarray | None = None,
        variable: str | None = None,
        values: Iterable[Any] | None = None,
        *,
        data: Any = None,
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        new_levels: NewLevels = "error",
    ) -> Conditional:
        """The probability of a longer time than t, averaged over rows: survival curves.

        With `variable` there is a curve for each of its values, set in all rows, which is adjusted
        for the other columns. The curve of one patient is that of `data=frame.iloc[[0]]`. Curves
        are those of times without censoring, and from the start where rows are truncated. Of any
        response with tail probabilities they are P(y > t).

        `subbayes.plots.conditional.conditional` draws the result.

        Args:
            times: increasing times; by default 50 from 0 to the longest of the training rows.
            variable: column of the curves.
            values: its values; by default all levels.
            data: the rows; by default those of training, at most 2000 evenly spaced ones.
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            weights: as for `marginal_means`.
            new_levels: as for `predict`.

        Returns:
            Curves by value, with `draws` (values, S, times) and `table()`.

        Raises:
            InputError: a family without tail probabilities, times that do not increase, or an
                unknown column.
        """
        check_fraction("level", level)
        most = min(check_count("n_draws", n_draws), self.state.draws.flat().shape[0])
        model, (frame, weights) = self.state.model, self._rows(data, weights)
        own = times_of(times, model.response.numbers(model.frame))
        values = None if values is None else list(values)
        by_level = False
        if variable is not None:
            self._check_column(variable)
            self._check_levels("values", variable, values or ())
            by_level = self._has_levels(variable)
        groups, draws = survival_curves(
            lambda rows: self.predict(rows, n_draws=most, new_levels=new_levels).outputs,
            model.family, frame, own, variable, values, weights, by_level,
        )  # fmt: skip
        name = model.response.name
        return Conditional(name, own, variable, groups, draws, {}, level, f"P({name} > t)")

    def posterior_predictive(self, n: int = 100, seed: int = 0) -> Replicates:
        """Replicates of the training responses, drawn by `plots.checks.predictive_check`.

        Args:
            n: number of replicates, each from another draw.
            seed: seed.

        Returns:
            A response of each row, whatever its weight, and without censoring. `statistics` counts
            rows alike, in the data and in the replicates.
        """
        model = self.state.model
        if model.deep is not None and any(
            part.columns is None for part in model.specification.deep.values()
        ):
            fail("deep", "networks of columns", "a network of tensors", "Use predict(...).sample()")
        outputs = self.predict(model.frame).outputs
        generator = torch.Generator().manual_seed(check_seed(seed))
        which = torch.randint(len(outputs), (check_count("n", n),), generator=generator)
        return replicate(model, outputs[which], generator, "posterior")

    def compare(self, *others: AfterFit, names: Sequence[str] | None = None) -> pd.DataFrame:
        """Compare models of the same rows by leave-one-out, the best first.

        Args:
            others: other fitted models.
            names: name of each model, this one first; by default their formulas.

        Returns:
            A table of elpd, of differences to the best with their standard errors, and of stacking
            weights for an average of the models' predictions.

        Raises:
            InputError: models of other rows or responses.
        """
        return compare_fits([self, *others], AfterFit, names)


def _listed(values: Sequence[Any]) -> str:
    """The first of some values."""
    return ", ".join(map(repr, values[:8])) + (", ..." if len(values) > 8 else "")

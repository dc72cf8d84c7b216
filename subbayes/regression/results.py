"""Results of a fitted regression: effects, predictions, figures, comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from typing_extensions import override

from subbayes import diagnostics
from subbayes.comparison.arviz import arviz_data, row_weight_group
from subbayes.data.frames import read_frame
from subbayes.data.levels import levels_of, same_level
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics import LooResult, metrics
from subbayes.diagnostics.conformal import Calibratable
from subbayes.diagnostics.loo_comparison import compare
from subbayes.draws import Draws
from subbayes.likelihoods.target_parts import split_targets
from subbayes.predictions.predictive import OUTPUTS_AT_ONCE, Predictive, check_outputs
from subbayes.regression.design.design import NewLevels
from subbayes.regression.design.rows import column_numbers, given_values
from subbayes.regression.formula.checks import check_columns
from subbayes.regression.integrals.weight_quality import weight_warnings
from subbayes.regression.mixing import examined_names, mixing_warnings
from subbayes.regression.posterior import FittedState, Space
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.questions.averages import (
    ESTIMANDS,
    Averages,
    RowAverage,
    RowQuestion,
    chosen_values,
    listed_first,
    set_to,
)
from subbayes.regression.questions.conditional import Conditional, conditional_effect
from subbayes.regression.questions.hypothesis import Hypothesis, evaluate_hypothesis
from subbayes.regression.questions.new_groups import rows_without_groups, with_new_groups
from subbayes.regression.questions.partial_effects import Partial, effects_to_draw, partial_effect
from subbayes.regression.questions.predictive_checks import Replicates, replicate
from subbayes.regression.questions.summary import describe_draws, in_order, scales_of, summary_table
from subbayes.regression.questions.survival import survival_curve, times_of
from subbayes.regression.shapes import ChainDraws
from subbayes.utils.checks import (
    check_choice,
    check_count,
    check_fraction,
    check_seed,
    fail,
    fail_type,
)
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from subbayes.posterior import Posterior


class Results(Calibratable):
    """The results of a fitted model; `state` is None before fitting."""

    def __init__(self, state: FittedState | None = None) -> None:
        self._state = state

    @property
    def state(self) -> FittedState:
        """What `fit` determined; raises `InputError` before."""
        if self._state is None:
            fail("model", "a fitted model", "one that is not fitted", "Call fit first")
        return self._state

    @property
    def draws(self) -> Draws:
        """Draws of the coordinates of effects."""
        return self.state.draws

    @property
    def space(self) -> Space:
        """The space of the posterior."""
        return self.state.space

    @property
    def posterior(self) -> Posterior:
        """The posterior of the effects, for any sampler."""
        return self.state.joint.density

    @property
    def priors(self) -> dict[str, EffectPrior]:
        """The priors that were used, by term."""
        return self.state.model.structured.priors

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """Classes of the response in the order of probabilities; None for other families."""
        return self.state.model.response.labels

    @property
    def is_posterior(self) -> bool:
        """Whether the draws are draws of a posterior; those of an ensemble are not."""
        return self.draws.validity != "ensemble"

    @property
    def estimand(self) -> str:
        """What the effects are effects of: parameters of the "model"."""
        return self.state.estimand

    def warnings(self) -> list[str]:
        """Problems of the draws of the effects, each with a remedy; empty if there are none.

        Draws of an approximation or of an ensemble are not chains, which may not have mixed.
        Of the effects of many groups those 200 are examined whose half chains differ most.
        """
        if not self.is_posterior or self.draws.independent:
            return weight_warnings(self.draws)
        zeta = self.state.joint.effects_of(self.draws)
        names, among = examined_names(self.state.model.structured, zeta, self.draws.n_draws)
        mixing = mixing_warnings(self._effects(names=names), self.draws.engine, among)
        return weight_warnings(self.draws) + mixing

    # --- effects ----------------------------------------------------------------------------
    def effects(self) -> dict[str, ChainDraws]:
        """Draws of each effect by name, in the units of the data, shape (chains, draws).

        They are effects of the `estimand`.
        """
        return self._effects(self.state.coefficient_shift())

    def _effects(
        self, shift: Float[np.ndarray, "S p"] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, ChainDraws]:
        """Draws of effects by name; without a shift those that the chains have sampled."""
        shape = self.draws.n_chains, self.draws.n_draws
        zeta = self.state.joint.effects_of(self.draws)
        reported = self.state.model.structured.reported(zeta, shift, names)
        return {name: values.reshape(shape) for name, values in reported.items()}

    def _effect_names(self) -> list[str]:
        """Names of all effects."""
        zeta = self.state.joint.effects_of(self.draws, 1)
        return list(self.state.model.structured.reported(zeta))

    def summary(self, level: float = 0.95, *, groups: bool = True) -> pd.DataFrame:
        """A table of the effects, those of groups last.

        Args:
            level: level of the highest-density intervals.
            groups: include the effects of each group; False leaves their standard deviations and
                correlations alone, as `summary` of brms does.

        Returns:
            Mean, standard deviation, highest-density interval, probability of direction (the
            larger of P(effect > 0) and P(effect < 0)), R-hat and effective sample sizes. The last
            two are those of the effects over the training rows, which the chains have sampled.
            `attrs["effects"]` is the `estimand`, and `attrs["smooth"]` says how the standard
            deviations of smooths and random effects were found: "bayes", or "empirical Bayes
            (REML)", which leaves their uncertainty out. `attrs["inference"]` names the sampler, and
            `attrs["scales"]` has the scale of each row: "log(sigma)" for `sigma.x`, and "sigma" for
            `sigma` itself.
        """
        check_fraction("level", level)
        names = in_order(self._effect_names(), self.state.model.design, groups)
        return self._summary(names, level)

    def _summary(self, names: Sequence[str], level: float = 0.95) -> pd.DataFrame:
        """The table of some effects."""
        model, shift = self.state.model, self.state.coefficient_shift()
        effects = self._effects(shift, names)
        sampled = effects if shift is None else self._effects(names=names)
        table = summary_table(effects, level, sampled)
        table.attrs["scales"] = scales_of(names, model.family)
        table.attrs["effects"] = self.estimand
        reml = self.state.model.specification.smooth == "reml"
        table.attrs["inference"] = describe_draws(self.draws)
        table.attrs["smooth"] = "empirical Bayes (REML)" if reml else "bayes"
        return table

    def _summary_of_few(self, names: Sequence[str], most: int) -> pd.DataFrame:
        """The first and last rows of the table, with one between them that stands for the others.

        `summary_text` shows that there are others, without their numbers.
        """
        if len(names) <= most:
            return self._summary(names)
        first = most - most // 2
        table = self._summary([*names[:first], *names[-(most // 2) :]])
        hidden = pd.DataFrame(0.0, index=[""], columns=table.columns)
        return pd.concat([table.iloc[:first], hidden, table.iloc[first:]]).rename_axis("effect")

    def effect(self, term: str, values: Any = None, level: float = 0.95) -> Partial:
        """The partial effect of a term.

        Args:
            term: name of the term, or its variable if only one term reads it.
            values: of the variable, or a data frame with it; by default its range or all levels.
                Of effects of groups, labels of groups.
            level: level of the interval.

        Returns:
            Draws of the effect on the scale of the predictor.

        Raises:
            InputError: no such term, or one of several variables.
        """
        check_fraction("level", level)
        return partial_effect(self.state, term, to_pandas("values", values), level)

    def partials(self, level: float = 0.95, most: int | None = None) -> list[Partial]:
        """The effects of all terms that `plots.effects.effect` draws.

        These are terms of one variable, and smooths of two; `undrawn` names the others.

        Args:
            level: level of the intervals.
            most: the largest number of effects; by default all.
        """
        names = effects_to_draw(self.state.model.design)[0]
        return [self.effect(name, level=level) for name in names[:most]]

    @property
    def undrawn(self) -> tuple[str, ...]:
        """Names of the terms that no effect shows alone: interactions, smooths of three columns.

        `conditional_effect("x", by="z")` shows them together with other effects of their columns.
        """
        return effects_to_draw(self.state.model.design)[1]

    def plot(self, level: float = 0.95, *, columns: int = 3) -> Figure:
        """One figure of all terms.

        A smooth of two columns is a map with its standard deviation. A warning names the terms that
        are left out, see `undrawn`.

        Args:
            level: level of the intervals.
            columns: number of panels per row.

        Returns:
            The figure; `figure.savefig(...)` or `subbayes.plots.save` writes it.

        Raises:
            InputError: a model that has only intercepts and terms of `undrawn`.
        """
        from subbayes.plots.effects import effects  # matplotlib is imported for figures alone

        if self.undrawn:
            warn_user(
                f"left out of the figure: {', '.join(self.undrawn)}, whose effect depends on "
                "several columns; draw plots.conditional(model.conditional_effect(column, "
                "by=other))"
            )
        return effects(self.partials(level), columns=columns)

    # --- predictions and scores -------------------------------------------------------------

    def predict(
        self,
        data: Any,
        *,
        new_levels: NewLevels = "error",
        groups: bool = True,
        n_draws: int | None = None,
        progress: bool | None = False,
    ) -> Predictive:
        """The predictive distribution of new rows.

        For classes, `labels` of the result and the y of its `log_prob` are positions 0..K-1 in
        `classes`, whose names its `to_frame` has; `evaluate` takes the response itself.

        Args:
            data: the rows, as for `fit`; the response is not needed. `to_frame` of the result is a
                data frame of pandas, with the index of these rows if they have one.
            new_levels: "error"; "reference", which gives unseen levels of a factor the effect of
                the reference level, and unseen groups that of the average group; or "sample", which
                draws effects of unseen groups, for each draw and label the same in every call.
            groups: False leaves all effects of groups out, those of known groups too, as
                `re_formula = NA` of brms and `re.form = NA` of lme4 do; groups may then be new, and
                columns that only these effects read absent.
            n_draws: use this many evenly spaced draws instead of all.
            progress: show a progress bar.

        Raises:
            InputError: missing values, or an absent column or level, by name.
        """
        return self._predict(data, None, new_levels, groups, n_draws, progress)

    def _predict(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None,
        new_levels: NewLevels,
        groups: bool,
        n_draws: int | None,
        progress: bool | None,
    ) -> Predictive:
        """The predictive distribution of rows, with the inputs of networks."""
        frame = read_frame("data", data)
        model = self.state.model
        if groups:
            encoded = model.encoder.inputs(frame, inputs, new_levels)
        else:
            encoded = rows_without_groups(model, frame, inputs, new_levels)
        predictive = self._predictive(encoded, n_draws, progress)
        if groups and new_levels == "sample":
            predictive = with_new_groups(self.state, predictive, frame, n_draws)
        return predictive.with_classes(self.classes).with_index(frame.index)

    def predict_batches(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        n_draws: int | None = None,
        **options: Any,
    ) -> Iterator[Predictive]:
        """Predict batches of rows in order, so that memory does not grow with their number.

        Args:
            data: the rows.
            batch_size: number of rows at most; by default as many as give 2**22 outputs, 32 MiB.
            n_draws: as for `predict`.
            options: further arguments of `predict`.

        Raises:
            InputError: as `predict`, for rows of the batch.
        """
        draws = self.draws.flat().shape[0] if n_draws is None else check_count("n_draws", n_draws)
        outputs = draws * len(self.state.model.family.parameters)
        size = max(1, OUTPUTS_AT_ONCE // outputs)
        size = size if batch_size is None else check_count("batch_size", batch_size)
        frame = read_frame("data", data)
        for rows, given in self._batches(frame, size, options):
            yield self.predict(frame.iloc[rows], n_draws=n_draws, **given)

    def _batches(
        self, frame: pd.DataFrame, size: int, options: dict[str, Any]
    ) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Batches of rows, each with the arguments of `predict`."""
        for start in range(0, len(frame), size):
            yield slice(start, start + size), options

    def _predictive(
        self, inputs: Any, n_draws: int | None = None, progress: bool | None = False
    ) -> Predictive:
        """The predictive distribution at encoded inputs."""
        if n_draws is not None:
            check_count("n_draws", n_draws)
        outputs, family = self.state.predictors(inputs, n_draws, progress), self.state.model.family
        check_outputs(outputs, family)
        return Predictive(outputs, family.unweighted)

    def score_samples(self, data: Any, **options: Any) -> RowNumbers:
        """Log predictive density of one copy of each new row with its response, shape (n,).

        Args:
            data: the rows.
            options: further arguments of `predict`.
        """
        return self.predict(data, **options).log_prob(self._targets(data))

    def _targets(self, data: Any) -> Any:
        """Responses of new rows, with their status if they are censored."""
        data = read_frame("data", data)
        model, y = self.state.model, self.state.model.response.numbers(data)
        family = model.specification.family
        check_columns(family.response_columns, data)
        family.check_known(y, given_values(family, data))
        columns = {name: data[name].to_numpy() for name in family.response_columns}
        return family.responses(y, columns)

    def evaluate(
        self, data: Any, *, level: float = 0.95, ordered: bool = False, **options: Any
    ) -> dict[str, float]:
        """Scores of the predictions on rows with their response; see `metrics.score`.

        Args:
            data: the rows, which count as often as the column of weights of the fit says; once if
                they do not have it.
            level: probability of the interval whose coverage is reported.
            ordered: rows are in the order of time, see `metrics.score`.
            options: further arguments of `predict`.
        """
        predictive, counts = self.predict(data, **options), self._row_weights(data)
        return metrics.score(predictive, self._targets(data), level, counts, ordered)

    def _row_weights(self, data: Any) -> RowNumbers | None:
        """How often rows count; None if each counts once."""
        data = read_frame("data", data)
        weights = self.state.model.specification.auxiliary.weights
        return column_numbers(weights, data) if weights is not None and weights in data else None

    @override
    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        if y is not None:
            fail("y", "None, because the rows hold the response", type(y).__name__, "Leave it out")
        return rows, self._targets(rows)

    def describe(self) -> dict[str, str]:
        """Formula, family and inference, as text."""
        specification = self.state.model.specification
        return {
            **specification.facts(),
            **self._censoring(),
            "family": repr(self.state.model.family),
            **self.state.model.response.facts(specification.family),
            **self._network_facts(),
            **self.assumptions(),
            "inference": describe_draws(self.draws),
        }

    def _censoring(self) -> dict[str, str]:
        """What `describe` says about censored rows."""
        if not self.state.model.specification.family.response_columns:
            return {}
        data = self.state.model.data
        status = split_targets(data.targets(), data.has_weights).values[:, 1]
        return {"censored": f"{int((status != 0).sum())} of {len(status)} rows"}

    def _network_facts(self) -> dict[str, str]:
        """What `describe` says about networks."""
        return {}

    @property
    def networks(self) -> tuple[str, ...]:
        """Names of the networks beside the formula."""
        return ()

    def assumptions(self) -> dict[str, str]:
        """What the effects assume, where empirical Bayes makes a difference."""
        if self.state.model.specification.smooth != "reml":
            return {}
        return {
            "smoothing": "empirical Bayes: standard deviations of smooths and random effects at "
            "the maximum of the marginal likelihood (REML); intervals leave out their uncertainty"
        }

    def to_arviz(self) -> Any:
        """The draws as ArviZ data, with the names of effects as coordinates.

        Groups: posterior (`effects`, and `networks`, the coordinates of networks), sample_stats,
        posterior_predictive, observed_data, log_likelihood (for leave-one-out, of one copy of each
        row; only at temperature 1), and constant_data with weights of rows, if any.

        Raises:
            ImportError: if arviz is not installed (`pip install subbayes[arviz]`).
        """
        effects, model = self.effects(), self.state.model
        variables: dict[str, Any] = {"effects": np.stack(list(effects.values()), -1)}
        coords: dict[str, Any] = {"effect": list(effects)}
        dims = {"effects": ["effect"]}
        if self.space.rank:
            variables["networks"] = self.draws.z[..., : self.space.rank]
            coords["coordinate"] = np.arange(self.space.rank)
            dims["networks"] = ["coordinate"]
        fitted = self._predictive(model.inputs)
        generator = torch.Generator().manual_seed(self.state.joint.seed)
        shape = self.draws.n_chains, self.draws.n_draws
        replicates = fitted.likelihood.sample(fitted.outputs, generator).numpy()
        groups = {
            "posterior_predictive": {"y": replicates.reshape(*shape, -1)},
            "observed_data": {"y": model.response.numbers(model.frame)},
        }
        if self.is_posterior and self.draws.temperature == 1.0:
            groups["log_likelihood"] = {"y": self._pointwise()}
        groups |= row_weight_group(self.posterior)
        return arviz_data(self.draws, variables, coords, dims, groups)

    def _pointwise(self) -> Float[np.ndarray, "chains draws n"]:
        """Log density of one copy of each training row at each draw."""
        terms = self.posterior.pointwise(self.draws.flat())
        return terms.reshape(self.draws.n_chains, self.draws.n_draws, -1)

    def loo(self, quiet: bool = False) -> LooResult:
        """Leave-one-out log predictive density (PSIS) of the training rows; weights count copies.

        Args:
            quiet: do not warn if the estimate is unreliable.
        """
        weights = self.posterior.row_weights
        return diagnostics.loo(self._pointwise(), row_weights=weights, quiet=quiet)

    # --- questions ---------------------------------------------------------------------------

    def hypothesis(self, expression: str, level: float = 0.95) -> Hypothesis:
        r"""The posterior probability of a hypothesis about effects.

        Args:
            expression: a comparison by ">" or "<" of numbers and effects, with + - * / ** ^,
                abs, exp, log and sqrt, such as "x > 0", "x - 2 * z < 1" or "C(sex)[T.m] < 0".
            level: level of the interval of the difference of both sides.

        Returns:
            The result, with `probability`, `interval`, `evidence_ratio` (the posterior odds), its
            Monte Carlo standard error and `table()`.

        Raises:
            InputError: an expression that cannot be used, or an unknown effect.
        """
        effects = self.effects()
        chains = max((len(draws) for draws in effects.values()), default=1)
        flat = {name: draws.reshape(-1) for name, draws in effects.items()}
        return evaluate_hypothesis(expression, flat, level, chains)

    def _quantity(
        self,
        scale: str,
        n_draws: int,
        category: Any,
        new_levels: NewLevels = "error",
        groups: bool = True,
        dpar: str | None = None,
    ) -> Callable[[pd.DataFrame], Float[np.ndarray, "S n"]]:
        """Draws of the mean or a parameter, or of a predictor, as a function of rows.

        Of quantile regression the quantile takes the place of the mean.
        """
        check_choice("scale", scale, ("response", "link"))
        check_count("n_draws", n_draws)
        family = self.state.model.family
        if dpar is None:
            place = self._position_of(category, scale)
        else:
            check_choice("dpar", dpar, family.parameters)
            place = family.parameters.index(dpar)

        def quantity(rows: pd.DataFrame) -> np.ndarray:
            most = min(n_draws, self.state.draws.flat().shape[0])
            found = self.predict(rows, n_draws=most, new_levels=new_levels, groups=groups)
            if scale == "link":
                return found.outputs[..., place].numpy()
            if dpar is not None:
                return family.values(found.outputs)[dpar].numpy()
            mean = family.averaged(found.outputs).numpy()
            if mean.shape[-1] == 1 and category is not None:  # the probability of the second class
                return mean[..., 0] if place else 1 - mean[..., 0]
            return mean[..., place if mean.shape[-1] > 1 else 0]

        return quantity

    def _quantity_name(self, scale: str, category: Any, dpar: str | None = None) -> str:
        """What `_quantity` is, for figures."""
        if dpar is not None:
            return dpar if scale == "response" else self.state.model.family.predictor_scale(dpar)
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
        if labels and of_location:
            expected = "None with scale='link', as all classes have the same predictor"
            fail("category", expected, repr(category))
        if not places:
            if not labels:
                fail("category", "None for a response of numbers", repr(category))
            remedy = "Pass the class to average over"
            fail("category", f"one of the classes {listed_first(labels)}", repr(category), remedy)
        return places[0]

    def marginal_means(
        self,
        variable: str,
        values: Iterable[Any] | None = None,
        *,
        by: str | None = None,
        data: Any = None,
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        category: Any = None,
        effects: str | None = None,
        dpar: str | None = None,
    ) -> Averages:
        """The mean response with a column set to each value in all rows, averaged over them.

        It uses 1000 evenly spaced draws by default, where `summary` and `hypothesis` use all of
        them. Its intervals are central, and those of `summary` have the highest density.

        Args:
            variable: the column.
            values: its values; by default all levels.
            by: column whose groups of rows have averages of their own.
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
            dpar: the parameter of the family that takes the place of the mean, such as "sigma".

        Returns:
            The averages, with `draws` and `table()`.

        Raises:
            InputError: an unknown column, a column of many numbers that are not levels without
                `values`, or a response of several classes without `category`.
        """
        question = self._question(
            variable, data, scale, level, n_draws, weights, category, effects, dpar
        )
        return question.by_group(by, lambda own: own.means(values))

    def contrast(
        self,
        variable: str,
        levels: Iterable[Any] | str | None = None,
        *,
        by: str | None = None,
        data: Any = None,
        comparison: str = "difference",
        scale: str = "response",
        level: float = 0.95,
        n_draws: int = 1000,
        weights: str | None = None,
        category: Any = None,
        effects: str | None = None,
        dpar: str | None = None,
    ) -> Averages:
        """Differences or ratios of marginal means between levels of a column.

        Draws and intervals are those of `marginal_means`.

        Args:
            variable: the column.
            levels: pairs (a, b), a compared with b; "pairwise" for all pairs, of which the printed
                table says that intervals hold for one each; by default each level with the first.
            by: as for `marginal_means`.
            data: as for `marginal_means`, as are the other arguments.
            comparison: "difference", "ratio", such as a relative risk or a ratio of rates, or
                "odds ratio", of probabilities; ratios are those of the means over rows.
            scale: "response" or "link".
            level: level of the central intervals.
            n_draws: use at most this many evenly spaced draws.
            weights: as for `marginal_means`.
            category: as for `marginal_means`.
            effects: as for `marginal_means`.
            dpar: as for `marginal_means`.

        Raises:
            InputError: levels that do not exist, or ratios of means that are not positive.
        """
        if scale == "link" and comparison != "difference":
            remedy = "Ratios are those of means: leave scale at 'response'"
            fail("comparison", "'difference' for scale='link'", repr(comparison), remedy)
        question = self._question(
            variable, data, scale, level, n_draws, weights, category, effects, dpar
        )
        return question.by_group(by, lambda own: own.contrasts(levels, comparison))

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
        dpar: str | None = None,
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
            dpar: as for `marginal_means`.
        """
        question = self._question(
            variable, data, scale, level, n_draws, weights, category, effects, dpar
        )
        return question.slopes(by)

    def _question(
        self,
        variable: str,
        data: Any,
        scale: str,
        level: float,
        n_draws: int,
        weights: str | None,
        category: Any,
        effects: str | None,
        dpar: str | None,
    ) -> RowQuestion:
        """The column and the quantity of averages over rows."""
        check_fraction("level", level)
        self._check_column(variable)
        effects = self._estimand_of_rows(data) if effects is None else effects
        check_choice("effects", effects, ESTIMANDS)
        frame, weights = self._rows(data, weights)
        seed = self.state.joint.seed if effects == "population" else None
        return RowQuestion(
            variable,
            self._levels(variable),
            self._quantity(scale, n_draws, category, dpar=dpar),
            self._quantity_name(scale, category, dpar),
            frame,
            RowAverage(frame, weights, seed),
            level,
            effects,
        )

    def _check_column(self, variable: str) -> None:
        """Refuse what no prediction depends on, such as the response or weights."""
        check_choice("variable", variable, tuple(self.state.model.encoder.columns))

    def _groups_count(self, *names: str | None) -> bool:
        """Whether one of the columns is read by effects of groups."""
        return bool(set(self.state.model.encoder.columns_of_groups) & set(names))

    def _estimand_of_rows(self, data: Any) -> str:
        """What averages over rows are averages of by default."""
        del data
        return "sample"

    def _levels(self, variable: str) -> list[Any] | None:
        """The values of a column whose effects are by level or group; None for other columns."""
        model = self.state.model
        for term in model.design.terms:
            if variable in (term.variables if term.kind == "monotonic" else term.groups):
                return levels_of(model.frame[variable])
        return model.design.levels().get(variable)

    def _rows(self, data: Any, weights: str | None) -> tuple[pd.DataFrame, str | None]:
        """The rows to average over, and the column of their weights."""
        if data is not None:
            return read_frame("data", data), weights
        model = self.state.model
        return model.frame, weights or model.specification.auxiliary.weights

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
        by_level = [name for name in columns if self._levels(name) is not None]
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
        by: str | None = None,
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
            by: column whose groups of rows have averages of their own.
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
        model, average = self.state.model, RowAverage(*self._rows(data, weights))
        own = times_of(times, model.response.numbers(model.frame))
        chosen: list[Any] = [None]
        rows = [average.rows]
        if variable is not None:
            self._check_column(variable)
            chosen = chosen_values(variable, average.rows, self._levels(variable), values)
            rows = [set_to(average.rows, variable, value) for value in chosen]
        outputs = (self.predict(at, n_draws=most, new_levels=new_levels).outputs for at in rows)
        curves = [survival_curve(model.family, part, own, average) for part in outputs]
        name, draws = model.response.name, np.stack(curves)
        return Conditional(name, own, variable, tuple(chosen), draws, {}, level, f"P({name} > t)")

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
        outputs = self.predict(model.frame, n_draws=check_count("n", n)).outputs
        generator = torch.Generator().manual_seed(check_seed(seed))
        return replicate(model, outputs[torch.arange(n) % len(outputs)], generator, "posterior")

    def compare(self, *others: Results, names: Sequence[str] | None = None) -> pd.DataFrame:
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
        models = [self, *others]
        first = self.state.model.response.numbers(self.state.model.frame)
        for other in others:
            if not isinstance(other, Results):
                fail_type("others", "fitted models", other)
            y = other.state.model.response.numbers(other.state.model.frame)
            if not np.array_equal(y, first):
                got = "others" if len(y) == len(first) else f"{len(y):,} rows"
                remedy = "Fit to the same rows, with the response on the same scale"
                fail("others", f"models of the same {len(first):,} responses", got, remedy)
        if names is None:
            names = [str(m.state.model.specification.formula) for m in models]
            if len(set(names)) < len(names):
                families = [m.state.model.family.label for m in models]
                pairs = zip(names, families, strict=True)
                names = [f"{i}: {name}, {family}" for i, (name, family) in enumerate(pairs, 1)]
        if len(names) != len(models) or len(set(names)) < len(names):
            fail("names", f"{len(models)} different names", repr(list(names)))
        results = {name: model.loo() for name, model in zip(names, models, strict=True)}
        return pd.DataFrame([asdict(row) for row in compare(results)]).set_index("name")

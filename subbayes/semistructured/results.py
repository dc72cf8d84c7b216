"""Results of a fitted semi-structured model: effects, predictions, figures, comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure

from subbayes import diagnostics
from subbayes.comparison.arviz import arviz_data, row_weight_group
from subbayes.data.frames import read_frame
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics import LooResult, metrics
from subbayes.diagnostics.predictor import OUTPUTS_AT_ONCE
from subbayes.draws import Draws
from subbayes.networks.description import describe_network
from subbayes.networks.network import Network
from subbayes.plots.effects import effects as plot_effects
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import average
from subbayes.predictions.predictive import Predictive
from subbayes.regression.design.design import NewLevels
from subbayes.regression.formula.checks import check_columns
from subbayes.regression.integrals.weight_quality import weight_warnings
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.questions.summary import (
    describe_draws,
    examined_names,
    in_order,
    mixing_warnings,
    scales_of,
    summary_table,
)
from subbayes.semistructured.after_fit import AfterFit
from subbayes.semistructured.design_data import column_numbers, network_input
from subbayes.semistructured.estimand import NOTES
from subbayes.semistructured.group_predictions import encoded_rows, with_new_groups
from subbayes.semistructured.joint_posterior import FittedState
from subbayes.semistructured.orthogonal_columns import what_networks_are_orthogonal_to
from subbayes.semistructured.partial_effects import (
    Partial,
    contribution_table,
    effects_to_draw,
    partial_dependence,
    partial_effect,
)
from subbayes.semistructured.predictors import Predictors
from subbayes.semistructured.subspace import JointSpace
from subbayes.utils.checks import check_choice, check_count, check_fraction, fail
from subbayes.utils.warning import warn_user


class Results(AfterFit):
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
        """Draws of the coordinates of networks and effects."""
        return self.state.draws

    @property
    def space(self) -> JointSpace:
        """The space of the posterior."""
        return self.state.space

    @property
    def posterior(self) -> Posterior:
        """The posterior of networks and effects, at temperature 1, for any sampler."""
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
    def temperature(self) -> float:
        """Temperature of the networks' posterior."""
        return self.draws.temperature

    @property
    def is_orthogonal(self) -> bool:
        """Whether a network was made orthogonal to effects, and not only centred."""
        return "effects" in self.orthogonal_to.values()

    @property
    def orthogonal_to(self) -> dict[str, str]:
        """By network "effects", "intercept" (it is centred) or "nothing"."""
        return what_networks_are_orthogonal_to(self.state.model, self.state.joint.orthogonal)

    @property
    def estimand(self) -> str:
        """What the effects are effects of: "population", "sample" (the training rows) or "model".

        The first two are those of networks that are orthogonal to effects, or centred, whose
        projection depends on the rows; see `subbayes.semistructured.estimand`. Without them,
        effects are parameters of the model. `print(model)` states which and what it assumes.
        """
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
    def effects(self) -> dict[str, Float[np.ndarray, "chains draws"]]:
        """Draws of each effect by name, in the units of the data, shape (chains, draws).

        They are effects of the `estimand`.
        """
        return self._effects(self.state.coefficient_shift())

    def _effects(
        self, shift: Float[np.ndarray, "S p"] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Float[np.ndarray, "chains draws"]]:
        """The same, without a shift those of the training rows, which the chains have sampled."""
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
            term: name of the term, or its variable if only one term reads it; or the name of a
                network that reads columns.
            values: of the variable, or a data frame with it; by default its range or all levels.
            level: level of the interval.
            variable: the column that varies, for networks of several columns.
            n_draws: for networks, use at most this many evenly spaced draws.

        Returns:
            Draws of the effect on the scale of the predictor. For a network, its contribution
            (orthogonal to the effects if the model's networks are), averaged over the rows with
            the column set to each value, minus its mean over the rows (Friedman 2001, section
            8.2).

        Raises:
            InputError: no such term, one of several variables, or a network of tensors.
        """
        model, values = self.state.model, to_pandas("values", values)
        check_fraction("level", level)
        is_term = variable is None and term in [t.name for t in model.design.terms]
        if term in model.specification.deep and not is_term:
            return partial_dependence(self.state, term, variable, values, level, n_draws)
        if variable is not None:
            fail("variable", "None for a term of the formula", repr(variable))
        return partial_effect(self.state, term, values, level)

    def partials(self, level: float = 0.95, most: int | None = None) -> list[Partial]:
        """The effects of all terms that `plots.effects.effect` draws, then of networks by column.

        These are terms of one variable, and smooths of two; `undrawn` names the others.

        Args:
            level: level of the intervals.
            most: the largest number of effects; by default all.
        """
        chosen: list[tuple[str, str | None]] = [
            (name, None) for name in effects_to_draw(self.state.model.design)[0]
        ]
        for name, part in self.state.model.specification.deep.items():
            chosen += [(name, column) for column in part.columns or ()]
        return [self.effect(name, level=level, variable=v) for name, v in chosen[:most]]

    @property
    def undrawn(self) -> tuple[str, ...]:
        """Names of the terms that no effect shows alone: interactions, smooths of three columns.

        `conditional_effect("x", by="z")` shows them together with other effects of their columns.
        """
        return effects_to_draw(self.state.model.design)[1]

    def plot(self, level: float = 0.95, *, columns: int = 3) -> Figure:
        """One figure of all terms and of the networks that read columns.

        A smooth of two columns is a map with its standard deviation. A warning names the terms that
        are left out, see `undrawn`.

        Args:
            level: level of the intervals.
            columns: number of panels per row.

        Returns:
            The figure; `figure.savefig(...)` or `subbayes.plots.save` writes it.

        Raises:
            InputError: a model that has only intercepts, terms of `undrawn` and networks of
                tensors.
        """
        if self.undrawn:
            warn_user(
                f"left out of the figure: {', '.join(self.undrawn)}, whose effect depends on "
                "several columns; draw plots.conditional(model.conditional_effect(column, "
                "by=other))"
            )
        return plot_effects(self.partials(level), columns=columns)

    def contributions(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
        *,
        parameter: str | None = None,
        level: float = 0.95,
        new_levels: NewLevels = "error",
        n_draws: int = 1000,
    ) -> pd.DataFrame:
        """The contributions of effects and networks to a predictor, row by row.

        Args:
            data: the rows.
            inputs: as for `predict`.
            new_levels: "error" or "reference", as for `predict`.
            parameter: parameter of the predictor; by default the location.
            level: level of the intervals.
            n_draws: use at most this many evenly spaced draws.

        Returns:
            A pandas table with mean, standard deviation and interval of "structured", "deep" and
            "predictor", and the index of the rows.
        """
        check_choice("new_levels", new_levels, ("error", "reference"))
        model = self.state.model
        parameters = model.design.parameters
        parameter = parameters[0] if parameter is None else parameter
        check_choice("parameter", parameter, parameters)
        check_fraction("level", level)
        frame = read_frame("data", data)
        encoded = model.encoder.inputs(frame, inputs, new_levels)
        place = parameters.index(parameter)
        found = contribution_table(self.state, encoded, place, level, n_draws)
        return found.set_axis(frame.index)

    # --- predictions and scores -------------------------------------------------------------

    def predict(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
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
            inputs: inputs of the networks without columns, by name, as for `fit`.
            new_levels: "error"; "reference", which gives unseen levels of a factor the effect of
                the reference level, and unseen groups that of the average group; or "sample", which
                draws effects of unseen groups, for each draw and label the same in every call.
            groups: False leaves all effects of groups out, those of known groups too, as
                `re_formula = NA` of brms and `re.form = NA` of lme4 do; groups may then be new, and
                columns that only these effects read absent.
            n_draws: use this many evenly spaced draws instead of all.
            progress: show a progress bar.

        Raises:
            InputError: missing values, or an absent column, network's input or level, by name; or
                `groups=False` beside a network that reads the groups.
        """
        frame = read_frame("data", data)
        encoded = encoded_rows(self.state, frame, inputs, new_levels, groups)
        predictive = self._predictive(encoded, n_draws, progress)
        if groups and new_levels == "sample":
            predictive = with_new_groups(self.state, predictive, frame, n_draws)
        return predictive.with_classes(self.classes).with_index(frame.index)

    def predict_batches(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
        *,
        batch_size: int | None = None,
        n_draws: int | None = None,
        **options: Any,
    ) -> Iterator[Predictive]:
        """Predict batches of rows in order, so that memory does not grow with their number.

        Args:
            data: the rows.
            inputs: as for `predict`.
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
        given = {name: network_input(name, x, len(frame)) for name, x in (inputs or {}).items()}
        for start in range(0, len(frame), size):
            rows = slice(start, start + size)
            part = {name: x[rows] for name, x in given.items()} or None
            yield self.predict(frame.iloc[rows], part, n_draws=n_draws, **options)

    def _predictive(
        self, inputs: Any, n_draws: int | None = None, progress: bool | None = False
    ) -> Predictive:
        """The predictive distribution at encoded inputs."""
        model = self.state.model
        module = Predictors(model.structured, model.deep, corrected=True)
        weights, count = self.state.corrected_weights(n_draws)
        return average(
            Network(module), model.family, weights, inputs, count=count, progress=progress
        )

    def score_samples(
        self, data: Any, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> Float[np.ndarray, "n"]:
        """Log predictive density of one copy of each new row with its response, shape (n,).

        Args:
            data: the rows.
            inputs: as for `predict`.
            options: further arguments of `predict`.
        """
        return self.predict(data, inputs, **options).log_prob(self._targets(data))

    def _targets(self, data: Any) -> Any:
        """Responses of new rows, with their status if they are censored."""
        data = read_frame("data", data)
        model, y = self.state.model, self.state.model.response.numbers(data)
        family = model.specification.family
        check_columns(family.response_columns, data)
        columns = {name: data[name].to_numpy() for name in family.response_columns}
        return family.responses(y, columns)

    def evaluate(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
        *,
        level: float = 0.95,
        **options: Any,
    ) -> dict[str, float]:
        """Scores of the predictions on rows with their response; see `metrics.score`.

        Args:
            data: the rows, which count as often as the column of weights of the fit says; once if
                they do not have it.
            inputs: as for `predict`.
            level: probability of the interval whose coverage is reported.
            options: further arguments of `predict`.
        """
        data = read_frame("data", data)
        y, weights = self._targets(data), self.state.model.specification.auxiliary.weights
        counts = None
        if weights is not None and weights in data:
            counts = column_numbers(weights, data)
        return metrics.score(self.predict(data, inputs, **options), y, level, counts)

    def describe(self) -> dict[str, str]:
        """Formula, family, networks and inference, as text."""
        specification = self.state.model.specification
        networks = {
            f"network {name}": describe_network(Network(network.module))
            for name, network in specification.deep.items()
        }
        return {
            **specification.facts(),
            "family": repr(self.state.model.family),
            **self.state.model.response.facts(specification.family),
            **networks,
            **self.assumptions(),
            "inference": describe_draws(self.draws),
        }

    def assumptions(self) -> dict[str, str]:
        """What the effects are, where networks or empirical Bayes make a difference."""
        found = {}
        if note := NOTES.get(self.estimand):
            found["effects are those of"] = note
        if self.state.model.specification.smooth == "reml":
            found["smoothing"] = (
                "empirical Bayes: standard deviations of smooths and random effects at the maximum "
                "of the marginal likelihood (REML); intervals leave out their uncertainty"
            )
        return found

    def to_arviz(self) -> Any:
        """The draws as ArviZ data, with the names of effects as coordinates.

        Groups: posterior (`effects`, and `networks`, the coordinates of the networks),
        sample_stats, posterior_predictive, observed_data, log_likelihood (for leave-one-out, of one
        copy of each row; only at temperature 1), and constant_data with weights of rows, if any.

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
        if self.is_posterior and self.temperature == 1.0:
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

        Raises:
            InputError: draws at a temperature other than 1, or members of an ensemble, whose
                importance weights are unknown.
        """
        held_out = "Score held-out rows with predict(...).log_prob(y)"
        if not self.is_posterior:
            fail("inference", "draws of a posterior for leave-one-out", "an ensemble", held_out)
        if self.temperature != 1.0:
            fail("temperature", "1 for leave-one-out", self.temperature, held_out)
        weights = self.posterior.row_weights
        return diagnostics.loo(self._pointwise(), row_weights=weights, quiet=quiet)

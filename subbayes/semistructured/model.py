"""Semi-structured regression: interpretable effects beside neural networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.saving import artifact
from subbayes.data.frames import read_frame
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics import LooResult
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.likelihoods.families import Family
from subbayes.networks.description import describe_network
from subbayes.networks.network import Network
from subbayes.predictions.predictive import Predictive
from subbayes.regression.design.design import NewLevels
from subbayes.regression.formula.checks import Missing
from subbayes.regression.model import SAMPLING, Regression, checked_engine
from subbayes.regression.questions.averages import ESTIMANDS
from subbayes.regression.questions.partial_effects import Partial
from subbayes.regression.questions.predictive_checks import Replicates
from subbayes.semistructured.estimand import NOTES
from subbayes.semistructured.joint_posterior import JointPosterior, JointState
from subbayes.semistructured.network_effects import contribution_table, partial_dependence
from subbayes.semistructured.network_inputs import network_input
from subbayes.semistructured.network_terms import network_terms
from subbayes.semistructured.orthogonal_columns import what_networks_are_orthogonal_to
from subbayes.semistructured.saving import SemiStructuredFacts, facts_of, state_from, tensors_of
from subbayes.semistructured.specification import JointSpecification
from subbayes.semistructured.subspace import TRAINING, NetworkSubspace, build_space, subspace_of
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_choice, check_fraction, check_positive, fail
from subbayes.utils.warning import warnings_once

_ORTHOGONAL_TO = {
    "effects": "the columns of the formula",
    "nothing": "nothing",
    "intercept": "the level of the predictor alone: centred. A network of columns that are "
    "correlated with an effect's column can take a part of the effect",
}


class SemiStructuredRegression(Regression):
    r"""Regression with interpretable effects beside neural networks, and one posterior of both.

    $$ g(\mathrm{E}[y]) = x^\top\beta + \sum_m \mathrm{DNN}_m(u_m) $$

    The effects $\beta$ come from a formula and are sampled without restriction; the networks move
    in the span of a curve of trained networks (Dold et al. 2024). `Regression` is the model without
    networks.

    Args:
        formula: as for `Regression`, with networks as terms: "y ~ x + s(z) + deep(u, v)". A network
            reads columns of the data frame, where numbers are standardised and factors become
            indicators, or one entry of `inputs`: `cnn(image)`. In a formula of another parameter,
            `{"mu": "y ~ x", "sigma": "~ deep(u)"}`, it adds to the predictor of that one, and in
            one of a class beside the reference, `{"mu": "y ~ x", "mu[b]": "~ deep(u)"}`, to that
            class of a categorical response.
        networks: the modules by name, each one term of the formula, from its inputs to one number
            per row, shape (N, 1) or (N,). They are not changed.
        family, link, priors, weights, offset, exposure, missing: as for `Regression`.
        orthogonal: make the networks orthogonal to the columns of the formula over the training
            rows, so that effects have the same meaning as without a network; "auto" does so for
            networks that read columns of the formula, or copies of them (a warning names the
            pair), and centres networks that read other columns, so that the intercept, the means
            of cells or the thresholds hold the level; networks of tensors remain unchanged. Random
            effects are among the columns where networks read their groups.
        effects: what effects beside such networks are effects of. "population": their intervals
            hold for the population that the rows are a sample of; "sample": for these rows alone.
            See `subbayes.semistructured.estimand`.

    `print(model)` shows what was fitted, what its effects assume, and their table.

    Raises:
        InputError: see `fit`.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from torch import nn
        >>> from subbayes import Sampling, SemiStructuredRegression, Training
        >>> from subbayes.semistructured import SemiStructuredSubspace
        >>> rng = np.random.default_rng(0)
        >>> frame = pd.DataFrame(rng.normal(size=(60, 2)), columns=["x", "u"])
        >>> frame["y"] = 1 + 2 * frame["x"] + np.sin(frame["u"]) + 0.1 * rng.normal(size=60)
        >>> deep = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> model = SemiStructuredRegression("y ~ x + deep(u)", networks={"deep": deep}).fit(
        ...     frame,
        ...     subspace=SemiStructuredSubspace(rank=2),
        ...     training=Training(epochs=50, batch_size=None),
        ...     sampling=Sampling(draws=50, warmup=50, chains=2, progress=False),
        ... )
        >>> model.summary().loc["x", ["mean"]].round(0).tolist()
        [2.0]
    """

    kind: ClassVar[str] = "semi-structured-model"
    specification: JointSpecification
    _state: JointState | None

    def __init__(
        self,
        formula: str | Mapping[str, str],
        *,
        networks: Mapping[str, Any],
        family: str | Family = "normal",
        link: str | None = None,
        priors: Mapping[str, Any] | None = None,
        weights: str | None = None,
        offset: str | None = None,
        exposure: str | None = None,
        orthogonal: bool | str = "auto",
        effects: str = "population",
        missing: Missing = "drop",
    ) -> None:
        super().__init__(
            formula,
            family=family,
            link=link,
            priors=priors,
            weights=weights,
            offset=offset,
            exposure=exposure,
            missing=missing,
        )
        check_choice("orthogonal", orthogonal, (True, False, "auto"))
        check_choice("effects", effects, ESTIMANDS)
        plain = self.specification
        terms = network_terms(plain.formula, networks, plain.family)
        self.specification = JointSpecification(
            **vars(plain), deep=terms, orthogonal=orthogonal, effects=effects
        )

    @property
    @override
    def state(self) -> JointState:
        super().state  # noqa: B018  raises before a fit
        assert self._state is not None
        return self._state

    # --- saving -----------------------------------------------------------------------------

    @override
    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        return tensors_of(self.state)

    @override
    def facts(self) -> SemiStructuredFacts:
        return facts_of(self.state)

    @classmethod
    @override
    def load(
        cls,
        path: str | Path,
        networks: Mapping[str, nn.Module] | None = None,
        *,
        family: Family | None = None,
        priors: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a model that `save` wrote, with the same predictions.

        Args:
            path: the folder.
            networks: a module of the same architecture, by name, for each network that is not a
                `subbayes.MLP`; their weights do not matter and they are not changed.
            family: a family of your own, which the files cannot contain.
            priors: priors of your own classes, likewise.

        Returns:
            The fitted model.

        Raises:
            InputError: not such a folder, a damaged one, one of a newer version, or one that needs
                a module, a family or a prior.
        """
        return cls._load(path, networks=networks, family=family, priors=priors)

    # --- fitting ----------------------------------------------------------------------------

    @warnings_once()
    @override
    def fit(  # type: ignore[override]  # smoothing by REML is that of models without networks
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
        *,
        subspace: str | NetworkSubspace = "curve",
        inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
        temperature: float = 1.0,
        training: Training = TRAINING,
        sampling: Sampling = SAMPLING,
    ) -> Self:
        """Fit the model to rows.

        Args:
            data: the rows: a data frame of pandas, polars, pyarrow or another library, or a dict of
                columns.
            inputs: what networks read beside columns, by its name in the formula: a tensor, an
                array or a map-style Dataset, with one entry per row. Of a Dataset's (input, label)
                only the input is read. Rows that are dropped for missing values drop their entries.
            subspace: where the networks move: "curve", the span of a curve beside free effects;
                "full", all weights; "last-layer"; or an object such as
                `SemiStructuredSubspace(rank=5)`.
            inference: "nuts" (the default), "hmc", "mclmc", "mams", "elliptical-slice" (the
                default with a temperature other than 1), "laplace" or another engine of
                `subbayes.fit`, or an object such as `NUTS(target_acceptance=0.9)`.
            temperature: T of the networks' posterior. The posterior of the effects given the
                networks keeps T = 1; temperatures at which they are not integrated out are refused.
                See `subbayes.semistructured.integrals.marginalisation`.
            training: how the networks are trained, by default `Training(epochs=500,
                weight_decay=1e-4, clip_norm=None, validation=0.2, patience=100)`. With `validation`
                the best epoch is used.
            sampling: draws, chains, warm-up, seed, mode and progress, by default
                `Sampling(draws=1000, chains=4)`. Its seed is also that of the training. Unless
                `initial` is an array, chains start at trained networks with the most probable
                effects. `mode="compile"` pays for many draws.

        Returns:
            The model itself, fitted. A warning names effects that have not mixed; `warnings`
            repeats it.

        Raises:
            InputError: see `Regression.fit`; a network without its input or with more than one
                output, or what training and sampling raise.
        """
        check_positive("temperature", temperature)
        if inference is None:
            inference = "nuts" if temperature == 1 else "elliptical-slice"
        builder, engine = subspace_of(subspace), checked_engine(inference, sampling)
        model: Any = self.specification.prepare(data, inputs)
        space = build_space(builder, model, training, sampling.seed, sampling.progress)
        joint = JointPosterior(model, space, sampling.seed, sampling.mode)
        draws = joint.sample(engine, sampling, temperature)
        return self._fitted(JointState(joint, draws))

    @override
    def prior_predictive(self, data: Any, n: int = 100, seed: int = 0) -> Replicates:
        expected = "a model without networks, whose prior depends on their training"
        fail("networks", expected, ", ".join(self.specification.deep))

    # --- results ------------------------------------------------------------------------------

    @property
    def temperature(self) -> float:
        """Temperature of the networks' posterior."""
        return self.draws.temperature

    @property
    def orthogonal_to(self) -> dict[str, str]:
        """By network "effects", "intercept" (it is centred) or "nothing"."""
        return what_networks_are_orthogonal_to(self.state.model, self.state.joint.orthogonal)

    @property
    @override
    def estimand(self) -> str:
        """What the effects are effects of: "population", "sample" (the training rows) or "model".

        The first two are those of networks that are orthogonal to effects, or centred, whose
        projection depends on the rows; see `subbayes.semistructured.estimand`. Without them,
        effects are parameters of the model. `print(model)` states which and what it assumes.
        """
        return self.state.estimand

    @override
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
        model = self.state.model
        is_term = variable is None and term in [t.name for t in model.design.terms]
        if term in model.specification.deep and not is_term:
            check_fraction("level", level)
            values = to_pandas("values", values)
            return partial_dependence(self.state, term, variable, values, level, n_draws)
        if variable is not None:
            fail("variable", "None for a term of the formula", repr(variable))
        return super().effect(term, values, level)

    @override
    def partials(self, level: float = 0.95, most: int | None = None) -> list[Partial]:
        """The effects of all terms that `plots.effects.effect` draws, then of networks by column.

        Args:
            level: level of the intervals.
            most: the largest number of effects; by default all.
        """
        partials = super().partials(level, most)
        columns = [
            (name, column)
            for name, part in self.state.model.specification.deep.items()
            for column in part.columns or ()
        ]
        left = None if most is None else max(most - len(partials), 0)
        return partials + [self.effect(n, level=level, variable=c) for n, c in columns[:left]]

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

    @override
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

        Args:
            data: the rows, as for `fit`; the response is not needed.
            inputs: what networks read beside columns, as for `fit`. `evaluate`,
                `score_samples`, `predict_batches` and `report` take them as `inputs=...` too.
            new_levels: as for `Regression.predict`.
            groups: as for `Regression.predict`.
            n_draws: as for `Regression.predict`.
            progress: as for `Regression.predict`.

        Raises:
            InputError: missing values, or an absent column, network's input or level, by name; or
                `groups=False` beside a network that reads the groups.
        """
        return self._predict(data, inputs, new_levels, groups, n_draws, progress)

    @override
    def _predict(self, data: Any, inputs: Any, *options: Any) -> Predictive:
        groups = options[1]
        if not groups and self._networks_read_groups():
            remedy = "Leave groups= out"
            fail("groups", "True with a network that reads the groups", "False", remedy)
        return super()._predict(data, inputs, *options)

    def _networks_read_groups(self) -> bool:
        """Whether a network is orthogonal to effects of groups, so that it depends on these."""
        columns = set(self.state.model.design.columns_of_groups)
        return any(columns & set(part.columns.columns) for part in self.state.joint.orthogonal)

    @override
    def _batches(
        self, frame: pd.DataFrame, size: int, options: dict[str, Any]
    ) -> Iterator[tuple[slice, dict[str, Any]]]:
        inputs = options.pop("inputs", None) or {}
        tensors = {name: network_input(name, x, len(frame)) for name, x in inputs.items()}
        for rows, given in super()._batches(frame, size, options):
            yield rows, given | {"inputs": {name: x[rows] for name, x in tensors.items()} or None}

    @property
    @override
    def networks(self) -> tuple[str, ...]:
        return tuple(self.specification.deep)

    @override
    def _network_facts(self) -> dict[str, str]:
        facts = {}
        for name, part in self.state.model.specification.deep.items():
            reads = f"columns {', '.join(part.columns)}" if part.columns else "a tensor"
            described = describe_network(Network(part.module))
            facts[f"network {name}"] = f"{described}, reads {reads}"
        space = self.state.space
        if space.rank:
            facts["networks' space"] = f"{space.rank} directions of {space.kind}"
            for name, kind in self.orthogonal_to.items():
                facts[f"network {name} orthogonal to"] = _ORTHOGONAL_TO[kind]
        if self.temperature != 1:
            facts["temperature"] = (
                f"{self.temperature:g} for the networks; 1 for the effects given the networks"
            )
        return facts

    @override
    def assumptions(self) -> dict[str, str]:
        """What the effects are effects of."""
        note = NOTES.get(self.estimand)
        return {} if note is None else {"effects are those of": note}

    @override
    def _groups_count(self, *names: str | None) -> bool:
        return self._networks_read_groups() or super()._groups_count(*names)

    @override
    def _estimand_of_rows(self, data: Any) -> str:
        return self.estimand if data is None and self.estimand in ESTIMANDS else "sample"

    @override
    def posterior_predictive(self, n: int = 100, seed: int = 0) -> Replicates:
        if any(part.columns is None for part in self.specification.deep.values()):
            remedy = "Use predict(...).sample()"
            fail("networks", "those of columns", "a network of tensors", remedy)
        return super().posterior_predictive(n, seed)

    @override
    def loo(self, quiet: bool = False) -> LooResult:
        """Leave-one-out by importance weights; see `Results.loo`.

        Raises:
            InputError: draws at a temperature other than 1, or members of an ensemble, whose
                importance weights are unknown.
        """
        held_out = "Score held-out rows with predict(...).log_prob(y)"
        if not self.is_posterior:
            fail("inference", "draws of a posterior for leave-one-out", "an ensemble", held_out)
        if self.temperature != 1.0:
            fail("temperature", "1 for leave-one-out", self.temperature, held_out)
        return super().loo(quiet)


@artifact("semi-structured-model", SemiStructuredFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: SemiStructuredFacts,
    *,
    networks: Mapping[str, nn.Module] | None = None,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> SemiStructuredRegression:
    """Rebuild a fitted model from its artifact; see `SemiStructuredRegression.load`."""
    state = state_from(tensors, facts, networks, family, priors)
    model = SemiStructuredRegression.__new__(SemiStructuredRegression)
    model.specification, model._state = state.model.specification, state
    return model

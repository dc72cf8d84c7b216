"""Bayesian regression by a formula."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from subbayes.artifacts.saving import artifact, read, save
from subbayes.artifacts.saving import rebuild as rebuild_model
from subbayes.data.arrays import evenly_spaced
from subbayes.diagnostics.surprise import MOST_DRAWS, MOST_ROWS, Update, surprise
from subbayes.distributed.processes import current
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, engine_of
from subbayes.inference.samplers.chains import Sampler, check_folder
from subbayes.likelihoods.families import Family, family_from_name
from subbayes.regression.design.rows import AuxiliaryColumns
from subbayes.regression.formula.checks import Missing
from subbayes.regression.formula.response_terms import read_response_terms
from subbayes.regression.integrals.empirical_bayes import singular_warnings
from subbayes.regression.posterior import (
    FittedState,
    RegressionPosterior,
    Space,
    most_probable_effects,
)
from subbayes.regression.questions.predictive_checks import Replicates, draw_prior
from subbayes.regression.questions.summary import in_order, summary_text
from subbayes.regression.results import Results
from subbayes.regression.saving import RegressionFacts, facts_of, state_from, tensors_of
from subbayes.regression.specification import Specification
from subbayes.utils.checks import check_choice, check_fraction, check_seed, fail, fail_type
from subbayes.utils.text_table import aligned
from subbayes.utils.warning import unsaid_warnings, warn_user, warnings_once

_MOST_PRINTED = 60  # effects
SAMPLING = Sampling(draws=1000, chains=4)
"""The default settings of sampling."""
_FEW = Sampling(draws=250, chains=4, progress=False)


class Regression(Results):
    r"""Bayesian regression by a formula: generalised additive and multilevel models.

    $$ g(\mathrm{E}[y]) = x^\top\beta $$

    The effects $\beta$ come from a formula, and their posterior is sampled.

    Args:
        formula: "y ~ age + C(sex) + s(bmi)": columns, factors `C(...)`, smooths `s(...)` and
            `te(...)`, splines `bs(...)`, random effects `(1 + age | school)`, monotonic effects
            `mo(...)`, Gaussian processes `gp(...)`, interactions, `offset(...)`, `np.log(...)`; or
            a formula for each parameter, `{"mu": "y ~ age", "sigma": "~ age"}`. The response may
            have the terms of brms `y | cens(status)`, `y | trunc(lb=0)`, `y | trials(n)` and
            `y | weights(w)`, which stand for a family or `weights`.
        family: the name of a family of `subbayes.likelihoods.families`, such as "normal",
            "student-t", "poisson", "bernoulli", "ordinal" or "weibull", or a `Family`.
        link: link of the location, for families with more than one.
        priors: prior by term, or by coefficient as the summary names it: a number (the scale of a
            normal), a prior of `subbayes.regression`, such as `StudentT(3, 1.0)`, or a frozen
            distribution of `scipy.stats`; "sd(term)" for the standard deviation of a smooth or of
            random effects, "cor(group)" for correlations (`LKJ`), "sd" and "cor" for all of them,
            "simplex(term)" for the steps of `mo(...)` (`Dirichlet`). A number for a
            parameter such as "sigma", "shape" or "precision" is the scale of a half-normal prior of
            that parameter itself; priors are truncated to its range. See `default_priors`.
        weights: column of observation weights: how many times each row counts.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
        missing: "drop" drops rows with missing values and warns with their number; "error" raises.

    `print(model)` shows what was fitted, what its effects assume, and their table.

    Raises:
        InputError: see `fit`.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from subbayes import Regression
        >>> from subbayes.inference import Sampling
        >>> rng = np.random.default_rng(0)
        >>> frame = pd.DataFrame({"x": rng.normal(size=60)})
        >>> frame["y"] = 1 + 2 * frame["x"] + 0.1 * rng.normal(size=60)
        >>> sampling = Sampling(draws=200, chains=4, progress=False)
        >>> model = Regression("y ~ x").fit(frame, sampling=sampling)
        >>> model.summary().loc["x", ["mean", "sd"]].round(1).tolist()
        [2.0, 0.0]
    """

    kind: ClassVar[str] = "regression"
    specification: Specification

    def __init__(
        self,
        formula: str | Mapping[str, str],
        *,
        family: str | Family = "normal",
        link: str | None = None,
        priors: Mapping[str, Any] | None = None,
        weights: str | None = None,
        offset: str | None = None,
        exposure: str | None = None,
        missing: Missing = "drop",
    ) -> None:
        super().__init__()
        check_choice("missing", missing, ("drop", "error"))
        read = read_response_terms(formula, family_from_name(family, link), weights)
        self.specification = Specification(
            read.formula,
            read.family,
            _as_priors(priors),
            AuxiliaryColumns(read.weights, offset, exposure),
            missing,
        )

    def __repr__(self) -> str:
        family = self.specification.family if self._state is None else self._state.model.family
        return f"{type(self).__name__}({self.specification.formula!r}, {family!r})"

    def __str__(self) -> str:
        """What was fitted, what the effects are and assume, their table, and warnings."""
        if self._state is None:
            return repr(self)
        names = in_order(self._effect_names(), self.state.model.design)
        table = summary_text(self._summary_of_few(names, _MOST_PRINTED), _MOST_PRINTED)
        return "\n".join([aligned(self.describe()), "", table, *self.warnings()])

    # --- saving -----------------------------------------------------------------------------

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save the fitted model as a folder of safetensors and JSON, without pickle; see `load`.

        The folder contains the training rows of the columns that the model reads, and the inputs
        of networks: it discloses these data.

        Args:
            path: the folder.
            overwrite: replace a model that exists there.

        Returns:
            The path.

        Raises:
            InputError: the path exists (pass `overwrite=True`), or cannot be written.
        """
        return save(self, path, overwrite=overwrite)

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """The tensors to save, see `save`."""
        return tensors_of(self.state)

    def facts(self) -> RegressionFacts:
        """The facts to save, see `save`."""
        return facts_of(self.state)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        family: Family | None = None,
        priors: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a model that `save` wrote, with the same predictions.

        Args:
            path: the folder.
            family: a family of your own, which the files cannot contain.
            priors: priors of your own classes, likewise.

        Returns:
            The fitted model.

        Raises:
            InputError: not such a folder, a damaged one, one of a newer version, or one that needs
                a family or a prior.
        """
        return cls._load(path, family=family, priors=priors)

    @classmethod
    def _load(cls, path: str | Path, **given: Any) -> Self:
        tensors, facts, _ = read(path, cls.kind)
        options = {name: value for name, value in given.items() if value is not None}
        model: Self = rebuild_model(cls.kind, tensors, facts, options, path)
        return model

    # --- fitting ----------------------------------------------------------------------------

    @warnings_once()
    def fit(
        self,
        data: Any,
        *,
        inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
        smooth: str = "bayes",
        sampling: Sampling = SAMPLING,
    ) -> Self:
        """Fit the model to rows.

        Args:
            data: the rows: a data frame of pandas, polars, pyarrow or another library, or a dict of
                columns.
            inference: by default independent proposals around the mode, which are exact, or "nuts"
                where few of them would be accepted; or "nuts", "hmc", "mclmc", "mams",
                "elliptical-slice", "laplace" or another engine of `subbayes.fit`, or an object
                such as `NUTS(target_acceptance=0.9)`.
            smooth: "bayes" draws the standard deviations of smooths and random effects like all
                other parameters; "reml" sets them to the maximum of the marginal likelihood. See
                `subbayes.regression.integrals.empirical_bayes`.
            sampling: draws, chains, warm-up, seed, mode and progress, by default
                `Sampling(draws=1000, chains=4)`. Unless `initial` is an array, chains start at the
                most probable effects.

        Returns:
            The model itself, fitted. A warning names effects that have not mixed; `warnings`
            repeats it.

        Raises:
            InputError: unknown columns, responses outside the family's support, collinear columns
                or as many columns as rows without priors of the user, or what sampling raises.
        """
        check_choice("smooth", smooth, ("bayes", "reml"))
        settings = {"inference": inference, "sampling": sampling}
        if smooth == "reml" and inference is not None:
            fail("inference", "None with smooth='reml'", inference, "Leave inference out")
        engine = checked_engine("nuts" if inference is None else inference, sampling)
        model = replace(self.specification, smooth=smooth).prepare(data)
        space = Space.of_effects(most_probable_effects(model))
        joint = RegressionPosterior(model, space, sampling.seed, sampling.mode)
        draws = joint.sample(engine, sampling, automatic=inference is None)
        singular = []
        if smooth == "reml":
            singular = singular_warnings(model.structured, joint.effects_of(draws)[0])
        return self._fitted(FittedState(joint, draws, settings), singular)

    def _fitted(self, state: FittedState, warnings: Sequence[str] = ()) -> Self:
        """The model with what `fit` determined, after its warnings."""
        self._state = state
        for line in [*state.interval_warnings(), *warnings, *self.warnings()]:
            warn_user(line)
        return self

    @warnings_once()
    def update(self, new_rows: Any, *, forgetting: float = 1.0, seed: int = 0) -> Self:
        """Learn from new rows; this model is not changed.

        The result has draws from the posterior of the rows of the fit, which the model keeps, and
        the new ones. Terms, their columns and default priors remain those of the fit, so that
        today's posterior is exactly the prior of the new rows. `updates` says how probable they
        were.

        Args:
            new_rows: rows with their response.
            forgetting: 1; networks can forget rows, see `FittedModel.update`.
            seed: of the new draws.

        Returns:
            The fitted model.

        Raises:
            InputError: rows with other levels or classes, or a model with networks.
        """
        if self.networks or current() is not None:
            got = "one with networks, or many processes"
            fail("model", "a regression in one process, without networks", got, "Refit on all rows")
        if forgetting != 1:
            fail("forgetting", "1 for a regression, whose rows all count", forgetting)
        state, before = self.state, len(self.state.model.frame)
        prepared = state.model.with_rows(new_rows)
        rows = prepared.frame[before:]
        few = rows.iloc[evenly_spaced(np.arange(len(rows)), MOST_ROWS)]
        found = surprise(self.predict(few, n_draws=MOST_DRAWS), self._targets(few))
        settings = dict(state.settings or {})
        sampling = settings.get("sampling", SAMPLING)
        start = sampling.initial if isinstance(sampling.initial, str) else "prior"
        seed = check_seed(seed)
        sampling = replace(sampling, seed=seed, checkpoint=None, initial=start)
        inference = settings.get("inference")
        engine = checked_engine(inference or "nuts", sampling)
        space = Space.of_effects(most_probable_effects(prepared))
        joint = RegressionPosterior(prepared, space, sampling.seed, sampling.mode)
        draws = joint.sample(engine, sampling, automatic=inference is None)
        update = Update(len(rows), "exact", *found)
        model = copy.copy(self)
        return model._fitted(FittedState(joint, draws, state.settings, (*state.updates, update)))

    @property
    def updates(self) -> list[Update]:
        """What each update by new rows was, the last one at the end."""
        return list(self.state.updates)

    def prior_predictive(self, data: Any, n: int = 100, seed: int = 0) -> Replicates:
        """Responses drawn from the prior, before fitting: are they possible?

        `subbayes.plots.checks.predictive_check` draws them.

        Args:
            data: rows with the response, which default priors are scaled by.
            n: number of replicates, each of another draw of the effects.
            seed: seed.
        """
        return draw_prior(self.specification, data, n, seed)

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        test: Any = None,
        level: float = 0.95,
        notes: Sequence[str] = (),
        **options: Any,
    ) -> Path:
        """Write one self-contained HTML page about the fitted model.

        Args:
            path: the file.
            title: heading of the page.
            test: rows to score, with their response, as for `fit`.
            level: level of the intervals.
            notes: remarks, one paragraph each.
            options: further arguments of `predict`, for the test rows.

        Returns:
            The path.
        """
        from subbayes.regression.report import write_report  # imports all figures

        check_fraction("level", level)
        return write_report(
            self,
            path,
            title=title,
            baseline=self._with_intercept_alone(),
            test=test,
            level=level,
            notes=notes,
            options=options,
        )

    def _with_intercept_alone(self) -> Regression:
        """The same family on the same rows, with an intercept in the place of all terms."""
        specification = self.state.model.specification
        response, _ = specification.split_formula()
        auxiliary = specification.auxiliary
        model = Regression(
            f"{response} ~ 1",
            family=specification.family,
            weights=auxiliary.weights,
            offset=auxiliary.offset,
            exposure=auxiliary.exposure,
        )
        with unsaid_warnings():
            return model.fit(self.state.model.frame, sampling=_FEW)


@artifact("regression", RegressionFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: RegressionFacts,
    *,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> Regression:
    """Rebuild a fitted model from its artifact; see `Regression.load`."""
    state = state_from(tensors, facts, family, priors)
    model = Regression.__new__(Regression)
    model.specification, model._state = state.model.specification, state
    return model


def checked_engine(inference: Any, sampling: Sampling) -> Engine:
    """The engine that a name or an object stands for, which effects and its settings suit."""
    engine = engine_of(inference)
    if engine.linearises:  # whose Gaussian is around effects of 0
        expected = "an engine that looks for the mode of the effects"
        fail("inference", expected, repr(engine.name), "Use inference='laplace' or 'nuts'")
    if isinstance(engine, Sampler):
        check_folder(sampling.checkpoint)
    return engine


def _as_priors(priors: Any) -> dict[str, Any]:
    if priors is not None and not isinstance(priors, Mapping):
        fail_type("priors", "a dict of priors by term, such as {'x': 1.0}", priors)
    return dict(priors or {})

"""Semi-structured regression: interpretable effects beside neural networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from subbayes.artifacts.saving import artifact, read, save
from subbayes.artifacts.saving import rebuild as rebuild_model
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine, engine_of
from subbayes.inference.samplers.chains import Sampler, check_folder
from subbayes.likelihoods.families import Family, family_from_name
from subbayes.regression.design.flat_effects import check_determined
from subbayes.regression.formula.checks import Missing
from subbayes.regression.formula.response_terms import (
    ResponseTerms,
    changed_response_terms,
    read_response_terms,
)
from subbayes.regression.integrals.empirical_bayes import singular_warnings
from subbayes.regression.questions.summary import in_order, summary_text
from subbayes.regression.terms.updating import updated_formula
from subbayes.reports.semistructured import write_report
from subbayes.semistructured.design_data import AuxiliaryColumns, networks_from
from subbayes.semistructured.estimand import ESTIMANDS
from subbayes.semistructured.joint_posterior import FittedState, JointPosterior
from subbayes.semistructured.overlap import overlap_warnings
from subbayes.semistructured.predictive_checks import Replicates, draw_prior
from subbayes.semistructured.results import Results
from subbayes.semistructured.saving import SemiStructuredFacts, facts_of, state_from, tensors_of
from subbayes.semistructured.specification import Specification
from subbayes.semistructured.subspace import TRAINING, NetworkSubspace, build_space, subspace_of
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_choice, check_fraction, check_positive, fail, fail_type
from subbayes.utils.text_table import aligned
from subbayes.utils.warning import warn_user, warnings_once

_MOST_PRINTED = 60  # effects
SAMPLING = Sampling(draws=1000, chains=4)
"""The default settings of sampling."""


class SemiStructuredRegression(Results):
    r"""Regression with interpretable effects beside neural networks, and one posterior of both.

    $$ g(\mathrm{E}[y]) = x^\top\beta + \sum_m \mathrm{DNN}_m(u_m) $$

    The effects $\beta$ come from a formula and are sampled without restriction; the networks move
    in the span of a curve of trained networks (Dold et al. 2024). Without networks, the model is a
    Bayesian generalised additive model.

    Args:
        formula: "y ~ age + C(sex) + s(bmi)": columns, factors `C(...)`, smooths `s(...)` and
            `te(...)`, splines `bs(...)`, random effects `(1 + age | school)`, monotonic effects
            `mo(...)`, Gaussian processes `gp(...)`, interactions, `offset(...)`, `np.log(...)`; or
            a formula for each parameter, `{"mu": "y ~ age", "sigma": "~ age"}`. The response may
            have the terms of brms `y | cens(status)`, `y | trunc(lb=0)`, `y | trials(n)` and
            `y | weights(w)`, which stand for a family or `weights`.
        deep: networks by name: a module, which reads the tensor of that name; a pair
            (module, columns), which reads columns of the data frame; or a `Deep`. The modules are
            not changed.
        family: the name of a family of `subbayes.likelihoods.families`, such as "normal",
            "student-t", "poisson", "bernoulli", "ordinal" or "weibull", or a `Family`.
        link: link of the location, for families with more than one.
        priors: prior by term, or by coefficient as the summary names it: a number (the scale of a
            normal), a prior of `subbayes.semistructured`, such as `Flat()`, or a frozen
            distribution of `scipy.stats`; "sd(term)" for the standard deviation of a smooth or of
            random effects, "cor(group)" for correlations (`LKJ`), "sd" and "cor" for all of them,
            "simplex(term)" for the steps of `mo(...)` (`Dirichlet`). A number for a
            parameter such as "sigma", "shape" or "precision" is the scale of a half-normal prior of
            that parameter itself; priors are truncated to its range. See `default_priors`.
        weights: column of observation weights: how many times each row counts.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
        orthogonal: make the networks orthogonal to the columns of the formula over the training
            rows, so that effects have the same meaning as without a network; "auto" does so for
            networks that read columns of the formula, or copies of them (a warning names the
            pair), and centres networks that read other columns, so that the intercept, the means
            of cells or the thresholds hold the level; networks of tensors remain unchanged. Random
            effects are among the columns where networks read their groups.
        effects: what effects beside such networks are effects of. "population": their intervals
            hold for the population that the rows are a sample of; "sample": for these rows alone.
            See `subbayes.semistructured.estimand`.
        missing: "drop" drops rows with missing values and warns with their number; "error" raises.

    `print(model)` shows what was fitted, what its effects assume, and their table.

    Raises:
        InputError: see `fit`.

    Example:
        >>> import numpy as np
        >>> import pandas as pd
        >>> from subbayes import SemiStructuredRegression
        >>> from subbayes.inference import Sampling
        >>> rng = np.random.default_rng(0)
        >>> frame = pd.DataFrame({"x": rng.normal(size=60)})
        >>> frame["y"] = 1 + 2 * frame["x"] + 0.1 * rng.normal(size=60)
        >>> sampling = Sampling(draws=200, chains=4, progress=False)
        >>> model = SemiStructuredRegression("y ~ x").fit(frame, sampling=sampling)
        >>> model.summary().loc["x", ["mean", "sd"]].round(1).tolist()
        [2.0, 0.0]
    """

    kind: ClassVar[str] = "semi-structured-model"

    def __init__(
        self,
        formula: str | Mapping[str, str],
        *,
        deep: Mapping[str, Any] | None = None,
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
        super().__init__()
        check_choice("orthogonal", orthogonal, (True, False, "auto"))
        check_choice("effects", effects, ESTIMANDS)
        check_choice("missing", missing, ("drop", "error"))
        read = read_response_terms(formula, family_from_name(family, link), weights)
        self.specification = Specification(
            read.formula,
            read.family,
            networks_from(deep, read.family),
            _as_priors(priors),
            AuxiliaryColumns(read.weights, offset, exposure),
            orthogonal,
            effects,
            missing,
            response_terms=read.names,
        )

    def __repr__(self) -> str:
        model = self.specification
        family = model.family if self._state is None else self._state.model.family
        networks = f", deep={list(model.deep)}" if model.deep else ""
        return f"SemiStructuredRegression({model.formula!r}, {family!r}{networks})"

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
        of networks without columns: it discloses these data.

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

    def facts(self) -> SemiStructuredFacts:
        """The facts to save, see `save`."""
        return facts_of(self.state)

    @classmethod
    def load(
        cls,
        path: str | Path,
        deep: Mapping[str, nn.Module] | None = None,
        *,
        family: Family | None = None,
        priors: Mapping[str, Any] | None = None,
    ) -> SemiStructuredRegression:
        """Load a model that `save` wrote, with the same predictions.

        Args:
            path: the folder.
            deep: a module of the same architecture, by name, for each network that is not a
                `subbayes.MLP`; their weights do not matter and they are not changed.
            family: a family of your own, which the files cannot contain.
            priors: priors of your own classes, likewise.

        Returns:
            The fitted model.

        Raises:
            InputError: not such a folder, a damaged one, one of a newer version, or one that needs
                a module, a family or a prior.
        """
        tensors, facts, _ = read(path, cls.kind)
        given = {"deep": deep, "family": family, "priors": priors}
        options = {name: value for name, value in given.items() if value is not None}
        model: SemiStructuredRegression = rebuild_model(cls.kind, tensors, facts, options, path)
        return model

    # --- fitting ----------------------------------------------------------------------------

    @warnings_once()
    def fit(
        self,
        data: Any,
        inputs: Mapping[str, Any] | None = None,
        *,
        subspace: str | NetworkSubspace = "curve",
        inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
        temperature: float = 1.0,
        smooth: str = "bayes",
        training: Training = TRAINING,
        sampling: Sampling = SAMPLING,
    ) -> SemiStructuredRegression:
        """Fit the model to rows.

        Args:
            data: the rows: a data frame of pandas, polars, pyarrow or another library, or a dict of
                columns.
            inputs: inputs of the networks without columns, by name: a tensor, an array or a
                map-style Dataset, with one entry per row. Of a Dataset's (input, label) only the
                input is read. Rows that are dropped for missing values drop their entries.
            subspace: where the networks move: "curve", the span of a curve beside free effects;
                "full", all weights; "last-layer"; or an object such as
                `SemiStructuredSubspace(rank=5)`.
            inference: "nuts" (the default with networks), "hmc", "mclmc", "mams",
                "elliptical-slice" (the default with a temperature other than 1), "laplace" or
                another engine of `subbayes.fit`, or an object such as
                `NUTS(target_acceptance=0.9)`. Without networks the default is
                independent proposals around the mode, which are exact too, or "nuts" where few of
                them would be accepted.
            temperature: T of the networks' posterior. The posterior of the effects given the
                networks keeps T = 1; temperatures at which they are not integrated out are refused.
                See `subbayes.semistructured.marginalisation`.
            smooth: "bayes" draws the standard deviations of smooths and random effects like all
                other parameters; "reml" sets them to the maximum of the marginal likelihood, for
                models without networks. See `subbayes.regression.integrals.empirical_bayes`.
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
            InputError: unknown columns, responses outside the family's support, collinear columns
                or as many columns as rows without priors of the user, an improper posterior with
                flat priors, a network without its input or with more than one output, or what
                training and sampling raise.
        """
        check_positive("temperature", temperature)
        check_choice("smooth", smooth, ("bayes", "reml"))
        settings = {
            "subspace": subspace,
            "inference": inference,
            "temperature": temperature,
            "training": training,
            "sampling": sampling,
        }
        automatic = inference is None
        if smooth == "reml" and self.specification.deep:
            fail("smooth", "'bayes' for a model with networks", "'reml'")
        if smooth == "reml" and not automatic:
            fail("inference", "None with smooth='reml'", inference, "Leave inference out")
        if inference is None:
            tempered = temperature != 1 and self.specification.deep
            inference = "elliptical-slice" if tempered else "nuts"
        builder, engine = subspace_of(subspace), engine_of(inference)
        if engine.linearises:  # whose Gaussian is around effects of 0
            expected = "an engine that looks for the mode of the effects"
            fail("inference", expected, repr(engine.name), "Use inference='laplace' or 'nuts'")
        model = replace(self.specification, smooth=smooth).prepare(data, inputs)
        for line in overlap_warnings(model):
            warn_user(line)
        if isinstance(engine, Sampler):
            check_folder(sampling.checkpoint)
        space = build_space(builder, model, training, sampling.seed, sampling.progress)
        joint = JointPosterior(model, space, sampling.seed, sampling.mode)
        draws = joint.sample(engine, sampling, temperature, automatic=automatic)
        check_determined(model.structured, joint.effects_of(draws))
        self._state = FittedState(joint, draws, settings)
        fixed = joint.effects_of(draws)[0] if smooth == "reml" else None
        singular = [] if fixed is None else singular_warnings(model.structured, fixed)
        for line in [*self._state.interval_warnings(), *singular, *self.warnings()]:
            warn_user(line)
        return self

    def update(
        self,
        formula: str | Mapping[str, str] | None = None,
        data: Any = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        priors: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SemiStructuredRegression:
        """Fit a model with another formula, or to other rows; this one is not changed.

        Args:
            formula: the new formula, in which a point stands for the old side: "~ . + z"; or one
                for each parameter to change. A response that is written replaces the old one with
                its terms, such as cens(status), which otherwise stay.
            data: the rows; by default those of this fit.
            inputs: as for `fit`, needed for networks without columns.
            priors: those of the new model; by default those of this one, without those of terms
                that the new formula does not have, which a warning names.
            options: other arguments of `fit`, by default those of this fit, without a checkpoint
                and start points that were passed as an array. A loaded model knows only its
                `smooth` and `temperature`; with networks, a warning says so.

        Returns:
            The fitted model.

        Raises:
            InputError: see `fit` and `updated_formula`, such as interactions with smooths.
        """
        old = self.specification
        model = copy.copy(self)
        read = ResponseTerms(old.formula, old.family, old.auxiliary.weights, old.response_terms)
        if formula is not None:
            changed = updated_formula(old.formula, formula, old.family.formula_names[0])
            read = changed_response_terms(formula, changed, read)
        model.specification = replace(
            old,
            formula=read.formula,
            family=read.family,
            auxiliary=replace(old.auxiliary, weights=read.weights),
            response_terms=read.names,
            priors=old.priors if priors is None else _as_priors(priors),
            inherited=priors is None,
        )
        frame = self.state.model.frame if data is None else data
        fitted = model.fit(frame, inputs, **(self._settings(options) | options))
        kept = model.state.model.specification.priors
        model.specification = replace(model.specification, priors=kept, inherited=False)
        return fitted

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of this fit for another one that passes some options."""
        known = self.state.settings
        own = {"temperature": self.temperature, **(known or {})}
        own["smooth"] = options.get("smooth", self.state.model.specification.smooth)
        if own["smooth"] == "reml":  # has a sampler of its own
            own.pop("inference", None)
        if "sampling" in own:
            sampling = replace(own["sampling"], checkpoint=None)
            as_array = not isinstance(sampling.initial, str)
            own["sampling"] = replace(sampling, initial="prior") if as_array else sampling
        missing = [name for name in ("subspace", "inference", "training") if name not in options]
        if known is None and self.specification.deep and missing:
            warn_user(
                f"a loaded model does not contain {', '.join(missing)} of its fit, and update uses "
                "the default: pass them to update(...)"
            )
        return own

    def prior_predictive(self, data: Any, n: int = 100, seed: int = 0) -> Replicates:
        """Responses drawn from the prior, before fitting: are they possible?

        `subbayes.plots.checks.predictive_check` draws them.

        Args:
            data: rows with the response, which default priors are scaled by.
            n: number of replicates, each of another draw of the effects.
            seed: seed.

        Raises:
            InputError: a model with networks, whose prior depends on their training.
        """
        return draw_prior(self.specification, data, n, seed)

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        test: Any = None,
        test_inputs: Mapping[str, Any] | None = None,
        level: float = 0.95,
        notes: Sequence[str] = (),
    ) -> Path:
        """Write one self-contained HTML page about the fitted model.

        Args:
            path: the file.
            title: heading of the page.
            test: rows to score, with their response, as for `fit`.
            test_inputs: inputs of networks without columns for these rows, as for `fit`.
            level: level of the intervals.
            notes: remarks, one paragraph each.

        Returns:
            The path.
        """
        check_fraction("level", level)
        return write_report(
            self, path, title=title, test=test, test_inputs=test_inputs, level=level, notes=notes
        )


@artifact("semi-structured-model", SemiStructuredFacts)
def rebuild(
    tensors: dict[str, Tensor],
    facts: SemiStructuredFacts,
    *,
    deep: Mapping[str, nn.Module] | None = None,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
) -> SemiStructuredRegression:
    """Rebuild a fitted model from its artifact; see `SemiStructuredRegression.load`."""
    state = state_from(tensors, facts, deep, family, priors)
    model = SemiStructuredRegression.__new__(SemiStructuredRegression)
    model.specification, model._state = state.model.specification, state
    return model


def _as_priors(priors: Any) -> dict[str, Any]:
    if priors is not None and not isinstance(priors, Mapping):
        fail_type("priors", "a dict of priors by term, such as {'x': 1.0}", priors)
    return dict(priors or {})

"""Semi-structured regression: interpretable effects beside neural networks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.engines import engine_of
from subbayes.networks.tracing.tracer import Mode
from subbayes.reports.semistructured import write_report
from subbayes.semistructured import saving
from subbayes.semistructured.design_data import AuxiliaryColumns, networks_from
from subbayes.semistructured.families import Family, family_from_name
from subbayes.semistructured.formula_checks import Missing
from subbayes.semistructured.joint_posterior import FittedState, JointPosterior
from subbayes.semistructured.results import Results
from subbayes.semistructured.specification import Specification
from subbayes.semistructured.subspace import (
    Fitting,
    NetworkSubspace,
    build_space,
    deep_ensemble,
    subspace_of,
)
from subbayes.semistructured.summary import check_level
from subbayes.utils.checks import check_choice, check_count, check_positive, fail

__all__ = ["SemiStructuredRegression"]


class SemiStructuredRegression(Results):
    r"""Regression with interpretable effects beside neural networks, and one posterior of both.

    $$ g(\mathrm{E}[y]) = x^\top\beta + \sum_m \mathrm{DNN}_m(u_m) $$

    The effects $\beta$ come from a formula and are sampled without restriction; the networks move
    in the span of a curve of trained networks (Dold et al. 2024). Without networks, the model is a
    Bayesian generalised additive model.

    Args:
        formula: "y ~ age + C(sex) + s(bmi)": columns, factors `C(...)`, smooths `s(...)`, splines
            `bs(...)`, random effects `re(...)`, interactions, `offset(...)`, `np.log(...)`; or a
            formula for each parameter, `{"mu": "y ~ age", "sigma": "~ age"}`.
        deep: networks by name: a module, which reads the tensor of that name; a pair
            (module, columns), which reads columns of the data frame; or a `Deep`. The modules are
            not changed.
        family: "normal", "poisson", "bernoulli", "negative-binomial", "gamma", "beta", "ordinal",
            or a `Family`.
        link: link of the location, for families with more than one.
        priors: prior by term: a number (the scale of a normal), a prior of
            `subbayes.semistructured`, or a frozen distribution of `scipy.stats`; "sd(term)" for
            the standard deviation of a smooth or of random effects. See `default_priors`.
        weights: column of observation weights: how many times each row counts.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
        orthogonal: make the networks orthogonal to the columns of the formula over the training
            rows, so that effects have the same meaning as without a network; "auto" does so for
            networks that read columns of the formula, and centres networks that read other columns;
            networks of tensors remain unchanged.
        missing: "drop" drops rows with missing values and warns with their number; "error" raises.
        seed: seed of training and sampling.

    Raises:
        InputError: see `fit`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> frame = pd.DataFrame({"x": rng.normal(size=60)})
        >>> frame["y"] = 1 + 2 * frame["x"] + 0.1 * rng.normal(size=60)
        >>> model = SemiStructuredRegression("y ~ x").fit(frame, draws=200, progress=False)
        >>> model.summary().loc["x", ["mean", "sd"]].round(1).tolist()
        [2.0, 0.0]
    """

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
        missing: Missing = "drop",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("orthogonal", orthogonal, (True, False, "auto"))
        check_choice("missing", missing, ("drop", "error"))
        chosen = family_from_name(family, link)
        self.specification = Specification(
            formula,
            chosen,
            networks_from(deep, chosen),
            dict(priors or {}),
            AuxiliaryColumns(weights, offset, exposure),
            orthogonal,
            missing,
        )
        self.seed = check_count("seed", seed, 0)

    def __repr__(self) -> str:
        model = self.specification
        networks = f", deep={list(model.deep)}" if model.deep else ""
        return f"SemiStructuredRegression({model.formula!r}, {model.family!r}{networks})"

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
        return saving.save(self.state, path, overwrite)

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
            InputError: not such a folder, damaged, of a newer version, or one that needs a
                module, a family or a prior.
        """
        state = saving.load(path, deep, family, priors)
        model = cls.__new__(cls)
        model.specification, model.seed = state.model.specification, state.joint.seed
        model._state = state
        return model

    # --- fitting ----------------------------------------------------------------------------

    def fit(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        *,
        subspace: str | NetworkSubspace = "curve",
        inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
        temperature: float = 1.0,
        effects: str | None = None,
        draws: int = 1000,
        chains: int = 4,
        warmup: int | None = None,
        fitting: Fitting | None = None,
        mode: Mode = "trace",
        progress: bool | None = None,
        **options: Any,
    ) -> SemiStructuredRegression:
        """Fit to rows."""
        check_positive("temperature", temperature)
        fields = ("rank", "spread", "weight_scale")
        changes = {name: options.pop(name) for name in fields if name in options}
        subspace = subspace_of(subspace)
        changes = {k: v for k, v in changes.items() if hasattr(subspace, k)}
        subspace = replace(subspace, **changes)
        if inference is None:
            inference = (
                "nuts" if temperature == 1 or not self.specification.deep else "elliptical-slice"
            )
        if inference == "deep-ensemble":
            members = check_count("members", options.get("members", 5))
            model = self.specification.prepare(data, inputs)
            if not model.n_weights:
                fail(
                    "inference",
                    "networks to train for 'deep-ensemble'",
                    "none",
                    "Pass deep=, or another engine",
                )
            space = deep_ensemble(model, members, fitting or Fitting(), self.seed, progress)
            joint = JointPosterior(model, space, self.seed)
            points = joint.with_best_effects(space.start_points)[None]
            found = Draws(
                points, meta={"seed": self.seed}, engine="deep ensemble", validity="ensemble"
            )
            self._state = FittedState(joint, found)
            return self
        engine = engine_of(inference)
        known = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := [name for name in options if name not in known]:
            fail(
                "options",
                "fields of Sampling: " + ", ".join(known),
                ", ".join(unknown),
                "Pass settings of an engine with it, as in inference=NUTS(max_depth=8)",
            )
        model = self.specification.prepare(data, inputs)
        space = build_space(subspace, model, fitting or Fitting(), self.seed, progress)
        joint = JointPosterior(model, space, self.seed, mode)
        given = {
            "draws": draws,
            "chains": chains,
            "warmup": warmup,
            "seed": self.seed,
            "progress": progress,
            **options,
        }
        given = {k: v for k, v in given.items() if v is not None}
        found = joint.sample(
            lambda density, initial: engine.run(density, Sampling(**{"initial": initial, **given})),
            chains,
            temperature,
            effects,
        )
        self._state = FittedState(joint, found)
        for line in self.warnings():
            warnings.warn(line, stacklevel=2)
        return self

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        test: pd.DataFrame | None = None,
        test_inputs: Mapping[str, Any] | None = None,
        level: float = 0.95,
        notes: Sequence[str] = (),
    ) -> Path:
        """Write one self-contained HTML page about the fitted model.

        Args:
            path: the file.
            title: heading of the page.
            test: rows to score, with their response.
            test_inputs: inputs of networks without columns for these rows, as for `fit`.
            level: level of the intervals.
            notes: remarks, one paragraph each.

        Returns:
            The path.
        """
        return write_report(
            self,
            path,
            title=title,
            test=test,
            test_inputs=test_inputs,
            level=check_level(level),
            notes=notes,
        )

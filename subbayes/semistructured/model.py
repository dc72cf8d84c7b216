"""Semi-structured regression: effects that people read beside networks, with one posterior."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import nn

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.networks.tracing.batched import Mode
from subbayes.predictions.predictive import Predictive
from subbayes.semistructured import saving
from subbayes.semistructured.design_data import Extras, deep_of
from subbayes.semistructured.families import Family, family_of
from subbayes.semistructured.formula import Missing, NewLevels, check_columns
from subbayes.semistructured.results import Reading
from subbayes.semistructured.sampling import Sampler, check_options
from subbayes.semistructured.specification import Specification
from subbayes.semistructured.subspace import SPACES, Fitting, build_ensemble, build_space
from subbayes.semistructured.summary import check_level
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.seeding import derive

__all__ = ["SemiStructuredRegression"]


class SemiStructuredRegression(Reading):
    r"""Regression with interpretable effects beside neural networks, and a posterior of both.

    $$ g(\mathrm{E}[y]) = x^\top\beta + \sum_m \mathrm{DNN}_m(u_m) $$

    The effects $\beta$ come from a formula and are sampled whole; the networks move in the span of
    a curve of good weights (Dold et al. 2024). Without networks it is a Bayesian generalised
    additive model.

    Args:
        formula: "y ~ age + C(sex) + s(bmi)": columns, factors `C(...)`, smooths `s(...)`, splines
            `bs(...)`, random effects `re(...)`, interactions, `offset(...)`, `np.log(...)`; or a
            formula for each parameter, `{"mu": "y ~ age", "sigma": "~ age"}`.
        deep: networks by name: a module, which reads the tensor of that name; a pair
            (module, columns), which reads columns of the data frame; or a `Deep`. Modules are
            read, never changed.
        family: "normal", "poisson", "bernoulli", "negative-binomial", "gamma", "beta", "ordinal",
            or a `Family`.
        link: of the location, where the family has more than one.
        priors: prior by term: a number (the scale of a normal), a prior of
            `subbayes.semistructured`, or a frozen distribution of `scipy.stats`; "sd(term)" for
            the standard deviation of a smooth or of random effects. See `default_priors`.
        weights: column of weights: a row counts so many times.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
        orthogonal: make the networks orthogonal to the columns of the formula over the training
            rows, so that effects mean what they mean without a network; "auto" does so for
            networks that read columns the formula reads too, and centres those that read others;
            networks that read tensors are left as they are.
        missing: "drop" leaves rows with missing values out and says how many; "error" refuses.
        seed: of training and sampling.

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
        check_choice("orthogonal", orthogonal, (True, False, "auto"))
        check_choice("missing", missing, ("drop", "error"))
        chosen = family_of(family, link)
        self.deep = deep_of(deep, chosen)
        self.specification = Specification(
            formula,
            chosen,
            self.deep,
            dict(priors or {}),
            Extras(weights, offset, exposure),
            missing,
        )
        self.formula = formula
        self.orthogonal = orthogonal
        self.seed = check_count("seed", seed, 0)

    def __repr__(self) -> str:
        networks = f", deep={list(self.deep)}" if self.deep else ""
        family = self.specification.family
        return f"SemiStructuredRegression({self.formula!r}, {family!r}{networks})"

    # --- keeping ----------------------------------------------------------------------------

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save the fitted model as a folder of safetensors and JSON, no pickle; see `load`.

        The folder holds the columns of the training rows that the model reads, and what networks
        without columns read: whoever has it has these data.

        Args:
            path: the folder.
            overwrite: replace a model that is already there.

        Returns:
            The path.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        self._require_fitted()
        return saving.save(self, path, overwrite)

    @classmethod
    def load(
        cls,
        path: str | Path,
        deep: Mapping[str, nn.Module] | None = None,
        *,
        family: Family | None = None,
        priors: Mapping[str, Any] | None = None,
    ) -> SemiStructuredRegression:
        """Load what `save` wrote, with the same predictions.

        Args:
            path: the folder.
            deep: a module of the same architecture for each network that is no `subbayes.MLP`,
                by name; their weights do not matter and they are not changed.
            family: a family of your own, which the file cannot hold.
            priors: priors of classes of your own, likewise.

        Returns:
            The fitted model.

        Raises:
            InputError: not such a folder, damaged, of a newer version, or one that needs a
                module, a family or a prior.
        """
        given, tensors, meta = saving.asked(path, deep, family, priors)
        model = cls(given.pop("formula"), **given)
        model.fittable, space, model.draws = saving.restored(model, tensors, meta)
        model.sampler = Sampler(
            model.fittable, space, model.deep, model.orthogonal, model.seed, meta["mode"]
        )
        return model

    # --- fitting ----------------------------------------------------------------------------

    def fit(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        *,
        subspace: str = "curve",
        rank: int | None = None,
        inference: str | Engine | Callable[[Any, Sampling], Draws] | None = None,
        temperature: float = 1.0,
        effects: str | None = None,
        draws: int = 1000,
        chains: int = 4,
        warmup: int | None = None,
        fitting: Fitting | None = None,
        spread: float | str = "curve",
        weight_scale: float = 1.0,
        mode: Mode = "trace",
        progress: bool | None = None,
        **options: Any,
    ) -> SemiStructuredRegression:
        """Fit to rows.

        Args:
            data: the rows.
            inputs: what networks without columns read, by the network's name: a tensor, an array
                or a map-style Dataset, one entry a row. Of a Dataset's (input, label) only the
                input is read; entries of rows that are dropped for missing values are too.
            subspace: "curve" (of the networks; effects whole), "naive" (effects projected too),
                "full" (all weights) or "last-layer".
            rank: directions of the networks; by default 12, or fewer where they have fewer weights.
            inference: "nuts" (the default), "hmc", "elliptical-slice" (the default with a
                temperature other than 1), "laplace" or another engine of `subbayes.fit`; or
                "deep-ensemble", which trains networks and effects anew from other initial weights
                (`members=5`): for comparison, since the members are no posterior of the effects.
            temperature: T of the networks' posterior; that of the effects given the networks is
                left alone, see `subbayes.semistructured.tempering`.
            effects: how the effects are integrated out then: "closed-form", "importance" or
                "quadrature"; None takes the closed form where there is one.
            draws: draws per chain.
            chains: number of chains.
            warmup: draws per chain to adapt in and drop.
            fitting: how networks are trained.
            spread: standard deviation of the prior of the networks' coordinates on the curve;
                "curve" takes that of its control points.
            weight_scale: standard deviation of the prior of weights that move freely ("full",
                "last-layer").
            mode: "trace", "compile" (10 to 30 s once, then several times faster: it pays for
                many draws), or "eager".
            progress: show progress bars; None shows them on a terminal.
            options: further fields of `Sampling`.

        Returns:
            The model itself, fitted. A warning says which effects have not mixed; `warnings`
            gives it again.

        Raises:
            InputError: unknown columns, responses outside the family's support, collinear columns
                or as many columns as rows without priors of your own, a network without its
                input or with more than one output, or what training and sampling raise.
        """
        check_choice("subspace", subspace, SPACES)
        check_positive("temperature", temperature)
        if inference is None:
            inference = "nuts" if temperature == 1 or not self.deep else "elliptical-slice"
        if inference == "deep-ensemble":
            return self._fit_ensemble(
                data, inputs, fitting or Fitting(), weight_scale, progress, **options
            )
        check_options(inference, options)
        fittable = self.specification.on(data, inputs)
        chosen = min(12, fittable.n_weights) if rank is None else check_count("rank", rank)
        space = build_space(
            subspace,
            fittable.structure,
            fittable.deep,
            fittable.family,
            fittable.data,
            rank=chosen,
            fitting=fitting or Fitting(),
            spread=spread,
            weight_scale=check_positive("weight_scale", weight_scale),
            seed=self.seed,
            progress=progress,
        )
        sampler = Sampler(fittable, space, self.deep, self.orthogonal, self.seed, mode)
        asked = {
            "draws": draws,
            "chains": check_count("chains", chains),
            "warmup": warmup,
            "seed": self.seed,
            "progress": progress,
            **options,
        }
        self.draws = sampler.draws(inference, temperature, effects, asked)
        self.fittable, self.sampler = fittable, sampler
        for line in self.warnings():
            warnings.warn(line, stacklevel=2)
        return self

    def _fit_ensemble(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None,
        fitting: Fitting,
        weight_scale: float,
        progress: bool | None,
        members: int = 5,
        **unknown: Any,
    ) -> SemiStructuredRegression:
        if unknown:
            fail("options", "arguments of a deep ensemble: members", ", ".join(unknown))
        fittable = self.specification.on(data, inputs)
        if fittable.deep is None or not fittable.n_weights:
            fail(
                "inference",
                "networks to train for 'deep-ensemble'",
                "none",
                "Pass deep=, or another engine",
            )
        space = build_ensemble(
            fittable.structure,
            fittable.deep,
            fittable.family,
            fittable.data,
            members=check_count("members", members),
            fitting=fitting,
            weight_scale=check_positive("weight_scale", weight_scale),
            seed=self.seed,
            progress=progress,
        )
        self.sampler = Sampler(fittable, space, self.deep, self.orthogonal, self.seed)
        self.draws = Draws(
            self.sampler.settled(space.starts)[None],
            meta={"seed": self.seed},
            engine="deep ensemble",
            validity="ensemble",
        )
        self.fittable = fittable
        return self

    def predict(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        *,
        new_levels: NewLevels = "error",
        n_draws: int | None = None,
        progress: bool | None = False,
    ) -> Predictive:
        """The predictive distribution of new rows.

        Args:
            data: the rows; the response need not be there.
            inputs: what networks without columns read, by name, as for `fit`.
            new_levels: "error"; "reference" to give unseen levels of a factor the effect of its
                reference level, and unseen groups of `re(...)` that of the average group; or
                "sample" to draw the effects of unseen groups from their distribution, one for
                each group and draw.
            n_draws: use this many evenly spaced draws instead of all.
            progress: show a progress bar.

        Raises:
            InputError: a column, a network's input or a level that is not there, by name, or
                missing values.
        """
        self._require_fitted()
        found = self.fittable.rows.inputs(data, inputs, new_levels)
        predictive = self._predicted(found, n_draws, progress)
        return (
            self._with_new_groups(predictive, data, n_draws)
            if (new_levels == "sample")
            else predictive
        )

    def _with_new_groups(
        self, predictive: Predictive, data: pd.DataFrame, n_draws: int | None
    ) -> Predictive:
        """The same with effects of unseen groups of random effects, drawn."""
        structure, outputs = self.fittable.structure, predictive.outputs.clone()
        zeta = torch.from_numpy(self.sampler.effects_of(self.draws, n_draws))
        for i, (name, codes) in enumerate(structure.design.new_groups(data).items()):
            generator = torch.Generator().manual_seed(derive(self.seed, 5, i))
            place = structure.design.parameters.index(structure.design.term(name).parameter)
            spread = structure.spread(name, zeta).to(outputs).unsqueeze(1)
            noise = torch.randn(len(zeta), codes.max() + 1, generator=generator)
            drawn = spread * noise.to(outputs)
            new = torch.from_numpy(codes >= 0)
            outputs[:, new, place] += drawn[:, torch.from_numpy(codes[codes >= 0])]
        return Predictive(outputs, predictive.likelihood)

    def score_samples(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        new_levels: NewLevels = "error",
    ) -> Float[np.ndarray, "n"]:
        """Log predictive density of each of new rows with their response, shape (n,)."""
        self._require_fitted()
        response = self.fittable.response
        check_columns(response.variables(data), data)
        y = response.numbers(data)
        return self.predict(data, inputs, new_levels=new_levels).log_prob(y)

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
        """Write one HTML page with everything in it: no network, no script.

        Args:
            path: the file.
            title: heading.
            test: rows to score, with their response.
            test_inputs: what networks without columns read for these, as for `fit`.
            level: of the intervals.
            notes: remarks, each a paragraph.

        Returns:
            The path.
        """
        from subbayes.reports.semistructured import write_report

        self._require_fitted()
        return write_report(
            self,
            path,
            title=title,
            test=test,
            test_inputs=test_inputs,
            level=check_level(level),
            notes=notes,
        )

    @property
    def response(self) -> str:
        """The left-hand side of the formula."""
        return self.specification.response

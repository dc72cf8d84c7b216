"""Semi-structured regression: effects that people read beside networks, with one posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes import diagnostics
from subbayes.checks import check_choice, check_count, check_positive, fail
from subbayes.data import Data
from subbayes.diagnostics import LooResult
from subbayes.draws import Draws
from subbayes.export import converted
from subbayes.inference.engines import arguments_of, engine_of
from subbayes.network import Network
from subbayes.posterior import Posterior
from subbayes.prediction import average
from subbayes.predictive import Predictive
from subbayes.priors import Normal
from subbayes.semistructured.construction import SPACES, Fitting, Space, build_space
from subbayes.semistructured.contributions import Contributions, Orthogonal, orthogonal_to
from subbayes.semistructured.effects import Effects, chosen_priors, default_priors
from subbayes.semistructured.families import Family, OrdinalFamily, family_of
from subbayes.semistructured.formula import Design, Missing, NewLevels, check_columns, split_formula
from subbayes.semistructured.module import DeepPart, Predictors
from subbayes.semistructured.partial import Partial, contribution_table, partial_effect
from subbayes.semistructured.rows import Extras, Response, Rows, complete, deep_of
from subbayes.semistructured.summary import check_level, summary_table
from subbayes.semistructured.tempering import Observed, TemperedNetworks, conditional_of
from subbayes.subspace import JointSubspace

__all__ = ["SemiStructuredRegression"]


class SemiStructuredRegression:
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
            networks that read columns the formula reads too.
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
        self.formula = formula
        self.family = family_of(family, link)
        self.deep = deep_of(deep, self.family)
        self.priors = dict(priors or {})
        self.extras = Extras(weights, offset, exposure)
        check_choice("orthogonal", orthogonal, (True, False, "auto"))
        self.orthogonal = orthogonal
        check_choice("missing", missing, ("drop", "error"))
        self.missing = missing
        self.seed = check_count("seed", seed, 0)

    def __repr__(self) -> str:
        networks = f", deep={list(self.deep)}" if self.deep else ""
        return f"SemiStructuredRegression({self.formula!r}, {self.family!r}{networks})"

    # --- fitting ----------------------------------------------------------------------------

    def fit(
        self,
        data: pd.DataFrame,
        inputs: Mapping[str, Any] | None = None,
        *,
        subspace: str = "curve",
        rank: int | None = None,
        inference: str | Callable[..., Draws] | None = None,
        temperature: float = 1.0,
        effects: str | None = None,
        draws: int = 1000,
        chains: int = 4,
        warmup: int | None = None,
        fitting: Fitting | None = None,
        spread: float | str = "curve",
        weight_scale: float = 1.0,
        progress: bool | None = None,
        **options: Any,
    ) -> SemiStructuredRegression:
        """Fit to rows.

        Args:
            data: the rows.
            inputs: tensors that networks read, by the network's name, one entry a row.
            subspace: "curve" (of the networks; effects whole), "naive" (effects projected too),
                "full" (all weights) or "last-layer".
            rank: directions of the networks; by default 12, or fewer where they have fewer weights.
            inference: "nuts" (the default), "hmc", "elliptical-slice" (the default with a
                temperature other than 1), "laplace" or another engine of `subbayes.fit`.
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
            progress: show progress bars; None shows them on a terminal.
            options: further arguments of the engine.

        Returns:
            The model itself, fitted.

        Raises:
            InputError: unknown columns, responses outside the family's support, collinear columns
                or as many columns as rows without priors of your own, a network without its
                input or with more than one output, or what training and sampling raise.
        """
        check_choice("subspace", subspace, SPACES)
        check_positive("temperature", temperature)
        if inference is not None:
            engine_of(inference)
        response, right = split_formula(self.formula, self.family.parameters[0])
        frame, tensors = self._complete(data, inputs, response, right)
        self._frame = frame
        self._response = Response.of(response, frame, self.family)
        y = self._response.numbers(frame)
        self._design_of(right, frame, y)
        space = self._built(frame, tensors, y, subspace, rank, fitting or Fitting(), spread,
                            weight_scale, progress)
        self.space = space
        self.posterior = self._posterior_in(space)
        asked = {"draws": draws, "chains": chains, "warmup": warmup, "seed": self.seed,
                 "progress": progress, **options}
        self.draws = self._sampled(space, inference, temperature, effects, asked)
        self._settle()
        return self

    def _complete(
        self, data: pd.DataFrame, inputs: Mapping[str, Any] | None, response: str,
        right: dict[str, str],
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        if not isinstance(data, pd.DataFrame):
            data = pd.DataFrame(data)
        whole = data.dropna() if len(data.dropna()) else data
        known = Design(self._right(right), whole, self._thresholds()).variables
        deep = [c for part in self.deep.values() for c in part.columns or ()]
        columns = tuple(dict.fromkeys([
            *Response(response).variables(data), *known, *deep, *self.extras.columns]))
        frame, tensors, lacking = complete(data, inputs, columns, self.missing)
        self.dropped = len(data) - len(frame)
        self.lacking = lacking
        if self.dropped:
            import warnings

            shown = ", ".join(f"{n} in {name}" for name, n in lacking.items())
            warnings.warn(f"{self.dropped} of {len(data)} rows have missing values ({shown}) and "
                          "are left out", stacklevel=3)
        return frame, tensors

    def _right(self, right: dict[str, str]) -> dict[str, str]:
        """Effects of every parameter; those without a formula have an intercept."""
        parameters = ("mu",) if isinstance(self.family, OrdinalFamily) else self.family.parameters
        unknown = [name for name in right if name not in parameters]
        if unknown:
            fail("formula", "formulas for " + ", ".join(parameters), ", ".join(unknown))
        return {name: right.get(name, "1") for name in parameters}

    def _thresholds(self) -> tuple[str, ...]:
        return ("mu",) if isinstance(self.family, OrdinalFamily) else ()

    def _design_of(
        self, right: dict[str, str], frame: pd.DataFrame, y: Float[np.ndarray, "n"]
    ) -> None:
        if isinstance(self.family, OrdinalFamily):
            assert self._response.labels is not None
            self.family = OrdinalFamily(n_classes=len(self._response.labels))
        self.design = Design(self._right(right), frame, self._thresholds())
        self.family.check_targets(torch.from_numpy(y))
        defaults = default_priors(self.design, self.family, y)
        priors = chosen_priors(self.design, defaults, self.priors)
        self._check_separable(frame)
        self.structure = Effects(self.design, self.family, priors)

    def _check_separable(self, frame: pd.DataFrame) -> None:
        """Effects that the data cannot tell apart need priors of the user's own."""
        if self.priors:
            return
        free = [i for t in self.design.terms for i in t.columns if i not in t.penalised]
        if len(free) >= len(frame):
            fail("priors", "priors of your own for as many effects as rows",
                 f"{len(free)} effects for {len(frame)} rows", "Pass priors={term: scale}")
        centred = self.design.matrix(frame)[0]
        same = self.design.collinear(centred)
        if same:
            fail("formula", "columns that are not sums of others", "; ".join(same),
                 "Leave one out, or pass priors={term: scale}")

    def _built(
        self, frame: pd.DataFrame, tensors: dict[str, Any], y: Float[np.ndarray, "n"],
        subspace: str, rank: int | None, fitting: Fitting, spread: float | str,
        weight_scale: float, progress: bool | None,
    ) -> Space:
        dtypes = [p.dtype for part in self.deep.values() for p in part.module.parameters()]
        self._dtype = dtypes[0] if dtypes else torch.float64
        self.rows = Rows(self.design, self.family, self.extras, self.deep, frame, self._dtype)
        found = self.rows.inputs(frame, tensors)
        targets: Any = torch.from_numpy(y)
        if self.extras.weights is not None:
            weight = torch.from_numpy(frame[self.extras.weights].to_numpy(dtype=np.float64))
            targets = (targets, weight)
        self.family.check_targets(targets)
        self.data = Data.of((found, targets))
        self._deep_part = self._networks(found, y)
        learned = [] if self._deep_part is None else [
            p for p in self._deep_part.parameters() if p.requires_grad]
        size = sum(p.numel() for p in learned)
        chosen = min(12, size) if rank is None else check_count("rank", rank)
        return build_space(
            subspace, self.structure, self._deep_part, self.family, self.data, rank=chosen,
            fitting=fitting, spread=spread, weight_scale=check_positive(
                "weight_scale", weight_scale), seed=self.seed, progress=progress)

    def _networks(
        self, found: dict[str, Tensor], y: Float[np.ndarray, "n"]
    ) -> DeepPart | None:
        if not self.deep:
            return None
        names = self.design.parameters
        places = {name: names.index(part.parameter or names[0])
                  for name, part in self.deep.items()}
        scales = torch.ones(len(names), dtype=torch.float64)
        if self.family.links[0] == "identity" and not isinstance(self.family, OrdinalFamily):
            scales[0] = float(np.std(y))
        modules = {name: part.module for name, part in self.deep.items()}
        deep = DeepPart(modules, places, scales, len(names))
        whole = Predictors(self.structure, deep, self._dtype)
        Network(whole).check({name: tensor[:2] for name, tensor in found.items()})
        return deep

    def _posterior_in(self, space: Space) -> Posterior:
        self._orthogonal: dict[int, Orthogonal] = {}
        if self.space.rank and self.data.in_memory:
            assert self._deep_part is not None
            assert isinstance(self.data.inputs, dict)
            inputs = self.data.inputs
            self._orthogonal = orthogonal_to(self.design, inputs["design"], self.deep,
                                             self.orthogonal)
            self._contributions = Contributions(self._deep_part, inputs, self._orthogonal,
                                                len(self.design.names))
        bases = {place: part.basis for place, part in self._orthogonal.items()}
        module = Predictors(self.structure, self._deep_part, self._dtype, bases)
        return Posterior(Network(module), self.family, self.data, space.subspace, space.prior,
                         batch_size=self.data.n if self._orthogonal else None)

    def _initial(self, space: Space, chains: int) -> Float[np.ndarray, "chains k"]:
        """Good points for the chains, scattered a little."""
        rng = np.random.default_rng([self.seed, 1])
        places = np.linspace(0, len(space.starts) - 1, chains).round().astype(int)
        scatter = 0.05 * rng.standard_normal((chains, space.subspace.rank))
        return space.starts[places] + scatter * space.prior.scale

    def _sampled(
        self, space: Space, inference: str | Callable[..., Draws] | None, temperature: float,
        effects: str | None, options: dict[str, Any],
    ) -> Draws:
        """Draws of networks and effects together."""
        tempered = temperature != 1 and space.rank > 0
        if inference is None:
            inference = "elliptical-slice" if tempered else "nuts"
        engine = engine_of(inference)
        chains = options["chains"]
        initial = self._initial(space, chains)
        if not tempered:
            offered = arguments_of(engine, initial=initial, **options)
            return engine(self.posterior, **{k: v for k, v in offered.items() if v is not None})
        if space.projected:
            fail("subspace", "'curve', 'full' or 'last-layer' with a temperature other than 1",
                 "'naive', which has no effects of their own")
        density = self._tempered(space, temperature, effects)
        offered = arguments_of(engine, initial=initial[:, : space.rank], **options)
        networks = engine(density, **{k: v for k, v in offered.items() if v is not None})
        return self._with_effects(density, networks)

    def _tempered(
        self, space: Space, temperature: float, effects: str | None
    ) -> TemperedNetworks:
        assert isinstance(self.data.inputs, dict)
        assert self.data.y is not None
        observed = Observed(self.structure, self.family, self.data.inputs["design"].double(),
                            self.data.inputs["offset"].double(), self.data.y)
        assert isinstance(space.subspace, JointSubspace)
        inner = space.subspace.inner
        prior = Normal(np.broadcast_to(space.prior.scale, space.subspace.rank)[: space.rank])
        return TemperedNetworks(
            lambda z: self._contributions(inner.weights(z.to(self._dtype))),
            conditional_of(effects, observed), prior, space.rank, temperature,
            self.posterior.fingerprint())

    def _with_effects(self, density: TemperedNetworks, networks: Draws) -> Draws:
        """A draw of the effects for each draw of the networks."""
        rng = np.random.default_rng([self.seed, 2])
        flat, parts = networks.flat(), []
        for start in range(0, len(flat), 64):
            deep = density.contributions(torch.from_numpy(flat[start : start + 64].copy()))
            parts.append(density.conditional.sample(deep, rng))
        zeta = np.concatenate(parts).reshape(*networks.z.shape[:2], -1)
        return Draws(np.concatenate([networks.z, zeta], 2), networks.stats,
                     networks.meta | {"temperature": density.temperature})

    def _some_weights(self, n_draws: int | None) -> tuple[Callable[[slice], Tensor], int]:
        """Weights of all draws, or of evenly spaced ones, and how many."""
        total = self.draws.n_chains * self.draws.n_draws
        if n_draws is None or check_count("n_draws", n_draws) >= total:
            return self._weights, total
        order = np.linspace(0, total - 1, n_draws).round().astype(int)
        return lambda rows: torch.cat([self._weights(slice(i, i + 1)) for i in order[rows]]), (
            n_draws)

    def _settle(self) -> None:
        """What every draw needs: its effects, and what its networks say of their columns."""
        flat = torch.from_numpy(self.draws.flat())
        size, columns = self.structure.size, len(self.design.names)
        space = self.posterior.subspace
        corrections = torch.zeros(len(flat), columns, dtype=self._dtype)
        if self._orthogonal:
            for start in range(0, len(flat), 256):
                rows = slice(start, start + 256)
                weights = space.weights(flat[rows].to(self._dtype))[:, size:]
                corrections[rows] = self._contributions.projections(weights).to(self._dtype)

        def weights_of(rows: slice) -> Tensor:
            found = space.weights(flat[rows].to(self._dtype))
            return torch.cat([found[:, :size], corrections[rows], found[:, size:]], 1)

        self._weights = weights_of

    # --- what people read -------------------------------------------------------------------

    def effects(self) -> dict[str, Float[np.ndarray, "chains draws"]]:
        """Draws of each effect by name, in the units of the data, shape (chains, draws)."""
        self._require_fitted()
        shape = self.draws.n_chains, self.draws.n_draws
        return {name: values.reshape(shape)
                for name, values in self.structure.reported(self._zeta()).items()}

    def _zeta(self) -> Float[np.ndarray, "S P"]:
        """Coordinates of the effects of all draws."""
        flat = torch.from_numpy(self.draws.flat())
        space = self.space
        if not space.projected:
            return self.draws.flat()[:, space.rank:]
        weights = space.subspace.weights(flat.to(self._dtype))
        return weights[:, : self.structure.size].double().numpy()

    def summary(self, level: float = 0.95) -> pd.DataFrame:
        """A table of the effects.

        Args:
            level: of the highest-density intervals.

        Returns:
            Mean, standard deviation, highest-density interval, probability of direction (the
            larger of P(effect > 0) and P(effect < 0)), R-hat and effective sample sizes.
        """
        return summary_table(self.effects(), check_level(level))

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
            inputs: tensors that networks read, by name.
            new_levels: "error", or "reference" to give unseen levels of a factor the effect of
                its reference level.
            n_draws: use this many evenly spaced draws instead of all.
            progress: show a progress bar.

        Raises:
            InputError: a column, a network's input or a level that is not there, by name, or
                missing values.
        """
        self._require_fitted()
        found = self.rows.inputs(data, inputs, new_levels)
        module = Predictors(self.structure, self._deep_part, self._dtype, corrected=True)
        weights, count = self._some_weights(n_draws)
        return average(Network(module), self.family, weights, found, count=count,
                       progress=progress)

    def effect(self, term: str, values: Any = None, level: float = 0.95) -> Partial:
        """The partial effect of a term, on the scale of the predictor.

        Args:
            term: its name, or its variable where only one term reads it.
            values: values of the variable; by default the observed range, or all levels.
            level: of the interval.

        Raises:
            InputError: no such term, or one of several variables.
        """
        self._require_fitted()
        return partial_effect(self.structure, self._zeta(), self._frame, term, values,
                              check_level(level))

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
            inputs: tensors that networks read, by name.
            parameter: whose predictor; by default the location's.
            level: of the intervals.
            new_levels: as for `predict`.
            n_draws: use at most so many evenly spaced draws.

        Returns:
            A table with mean, standard deviation and interval of "structured", "deep" and
            "predictor".
        """
        self._require_fitted()
        parameters = self.design.parameters
        check_choice("parameter", parameter or parameters[0], parameters)
        found = self.rows.inputs(data, inputs, new_levels)
        weights, count = self._some_weights(n_draws)
        return contribution_table(self.structure, self._deep_part, found, weights(slice(count)),
                                  parameters.index(parameter or parameters[0]),
                                  check_level(level))

    def to_arviz(self) -> Any:
        """The draws as ArviZ data, with the names of effects as coordinates.

        Groups: posterior (`effects`, and `networks`, the coordinates of the networks),
        sample_stats, log_likelihood, posterior_predictive and observed_data.

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
        found = self._predicted_again()
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.draws.n_chains, self.draws.n_draws
        again = found.likelihood.sample(found.outputs, generator).numpy()
        y = self._response.numbers(self._frame)
        return converted(self.draws, variables, coords, dims, {
            "log_likelihood": {"y": self.posterior.pointwise(self.draws.flat()).reshape(
                *shape, -1)},
            "posterior_predictive": {"y": again.reshape(*shape, -1)},
            "observed_data": {"y": y}})

    def _predicted_again(self) -> Predictive:
        """The predictive distribution of the training rows, of all draws."""
        module = Predictors(self.structure, self._deep_part, self._dtype, corrected=True)
        assert self.data.inputs is not None
        return average(Network(module), self.family, self._weights, self.data.inputs,
                       count=self.draws.n_chains * self.draws.n_draws)

    def loo(self, quiet: bool = False) -> LooResult:
        """Leave-one-out log predictive density (PSIS) of the training rows.

        Args:
            quiet: give no warning where it is unreliable.

        Raises:
            InputError: draws at a temperature other than 1, whose weights are not known.
        """
        self._require_fitted()
        if self.draws.meta.get("temperature", 1.0) != 1.0:
            fail("temperature", "1 for leave-one-out", self.draws.meta["temperature"],
                 "Score held-out rows with predict(...).log_prob(y)")
        terms = self.posterior.pointwise(self.draws.flat())
        return diagnostics.loo(
            terms.reshape(self.draws.n_chains, self.draws.n_draws, -1), quiet=quiet)

    def score_samples(
        self, data: pd.DataFrame, inputs: Mapping[str, Any] | None = None
    ) -> Float[np.ndarray, "n"]:
        """Log predictive density of each of new rows with their response, shape (n,)."""
        self._require_fitted()
        check_columns(self._response.variables(data), data)
        y = self._response.numbers(data)
        return self.predict(data, inputs).log_prob(y)

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
            test_inputs: tensors that networks read for these.
            level: of the intervals.
            notes: remarks, each a paragraph.

        Returns:
            The path.
        """
        from subbayes.semistructured.report import write_report

        self._require_fitted()
        return write_report(self, path, title=title, test=test, test_inputs=test_inputs,
                            level=check_level(level), notes=notes)

    @property
    def response(self) -> str:
        """The left-hand side of the formula."""
        return split_formula(self.formula, self.family.parameters[0])[0]

    @property
    def is_orthogonal(self) -> bool:
        """Whether networks were made orthogonal to columns of the formula."""
        return bool(self._orthogonal)

    def _require_fitted(self) -> None:
        if not hasattr(self, "draws"):
            fail("model", "a fitted model", "one that is not", "Call fit first")

r"""The structured predictor: from standard normal coordinates to coefficients and predictors.

The structured part of every predictor is $X\beta$ plus an offset. Each of its coordinates $\zeta$
has a standard normal prior (see `subbayes.regression.priors.prior`):

- an unpenalised coefficient is $\beta_j = g_j(\zeta_j)$;
- the coefficients of a smooth or of random effects are $\beta_j = \tau \zeta_j$ with their standard
  deviation $\tau = g_\tau(\zeta_\tau)$: the non-centred form, which remains easy to sample when
  $\tau$ is near 0;
- the coefficients of other terms, such as random slopes, follow a `Law` of their own;
- the thresholds of an ordinal response are $c_0 = g(\zeta)$ with gaps
  $c_{j+1} - c_j = g(\zeta) > 0$, or of a sequential one $c_j = g(\zeta_j)$.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subbayes.likelihoods.families import LINKS, Family
from subbayes.regression.design.design import Design
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.priors.normal import is_normal
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.priors.truncated import within_range
from subbayes.regression.shapes import ColumnValues, EffectDraws, EffectPoints
from subbayes.regression.terms.group_effects import GroupLaw
from subbayes.regression.terms.law import Law
from subbayes.regression.terms.layout import Layout
from subbayes.utils.checks import fail

_ELEMENTS = 2**20  # coordinates of draws at once


class StructuredPredictor(nn.Module):
    """The structured part of a model as a function of its coordinates.

    Args:
        design: the design matrix.
        family: distribution of the response.
        priors: prior by term or by column, and by the names of hyperparameters of laws, such as
            "sd(term)".

    Attributes:
        names: name of each coordinate.
        size: number of coordinates P.
        placement: which predictor each column belongs to, shape (p, K).
        thresholds: coordinates of the thresholds of an ordinal response; empty for others.
    """

    _mean: Tensor
    _scale: Tensor
    _transform_columns: Tensor
    _shrunk_columns: Tensor
    _column_sds: Tensor
    placement: Tensor
    _dense_columns: Tensor

    def __init__(self, design: Design, family: Family, priors: Mapping[str, EffectPrior]) -> None:
        super().__init__()
        self.design, self.family, self.priors = design, family, dict(priors)
        columns = len(design.names)
        mean, scale = torch.zeros(columns).double(), torch.ones(columns).double()
        # coordinates with another prior than a normal one: places, prior, link to apply
        self._transforms: list[tuple[slice, EffectPrior, Callable[..., Tensor] | None]] = []
        transformed: list[int] = []
        shrunk: list[int] = []  # columns with a horseshoe prior
        for term in design.terms:
            for own, prior in priors_of_columns(term, design.names, priors):
                if is_normal(prior):
                    mean[own], scale[own] = prior.mean, prior.scale
                    continue
                if prior.of == "effects":
                    shrunk += own
                    continue
                log = (  # of a positive parameter itself; effects of the location are on its link
                    term.kind == "intercept"
                    and term.parameter not in family.locations
                    and prior.positive
                    and family.link(term.parameter) != "identity"
                )
                link = None
                if log:
                    name = family.link(term.parameter)
                    prior, link = (
                        within_range(f"priors[{term.name!r}]", prior, name),
                        LINKS[name][0],
                    )
                self._transforms.append((slice(own[0], own[-1] + 1), prior, link))
                mean[own], scale[own] = 0.0, 0.0
                transformed += own
        # terms with a law: the places of its columns and of its hyperparameters
        self._laws: dict[str, tuple[Law, slice, slice]] = {}
        self.names = [*design.names]
        for term in design.terms:
            if term.law is None:
                continue
            law, places, start = term.law, term.penalised, len(self.names)
            extra = slice(start, start + law.size)
            self._laws[term.name] = law, slice(places[0], places[-1] + 1), extra
            for part in law.hyperparameters:
                self.names += (
                    [part.name]
                    if part.size == 1
                    else [f"{part.name}[{i}]" for i in range(part.size)]
                )
        placement = [
            [float(p == own) for p in design.parameters] for own in design.column_parameters
        ]
        for name, value in {
            "_mean": mean,
            "_scale": scale,
            "_transform_columns": torch.tensor(transformed, dtype=torch.long),
            "_shrunk_columns": torch.tensor(shrunk, dtype=torch.long),
            "_column_sds": torch.from_numpy(design.scale[shrunk]).double().clamp_min(1e-12),
            "placement": torch.tensor(placement).double().reshape(columns, len(design.parameters)),
            "_dense_columns": design.layout.dense,
        }.items():
            self.register_buffer(name, value, persistent=False)
        self._horseshoe = self._shared_horseshoe()
        self._shrunk_coordinates = range(len(self.names), len(self.names) + len(shrunk))
        if shrunk:
            self.names += [f"horseshoe[{design.names[i]}]" for i in shrunk]
            self.names += ["horseshoe scale", "horseshoe slab"]
        self.thresholds = range(len(self.names), len(self.names) + family.n_thresholds)
        self.names += [f"threshold[{j}]" for j in range(family.n_thresholds)]
        self.size = len(self.names)

    @property
    def layout(self) -> Layout:
        """How rows of the design matrix are stored."""
        return self.design.layout

    @property
    def linear_columns(self) -> list[int]:
        """Columns whose coefficients are affine in their coordinates, given the hyperparameters."""
        linear = torch.ones(len(self.design.names), dtype=torch.bool)
        linear[self._transform_columns] = False
        for law, at, _ in self._laws.values():
            linear[at] = law.is_linear
        return torch.nonzero(linear)[:, 0].tolist()

    @property
    def n_corrected(self) -> int:
        """Number of coefficients that networks share: of columns, then of the thresholds' constant.

        The level of the predictor of an ordinal response is in the thresholds: what is added to it
        is the coefficient of a constant, after those of the columns.
        """
        return len(self.design.names) + bool(self.thresholds)

    def columns_at(self, rows: Float[Tensor, "N w"], places: Sequence[int]) -> Float[Tensor, "N m"]:
        """The columns of some of the `n_corrected` coefficients; that of the constant is 1."""
        chosen = torch.tensor([*places], dtype=torch.long)
        of_constant = chosen >= self.layout.size
        found = self.layout.columns(rows, chosen[~of_constant])
        if not bool(of_constant.any()):
            return found
        whole = rows.new_ones(len(rows), len(chosen))
        whole[:, ~of_constant] = found
        return whole

    def _shared_horseshoe(self) -> Any:
        """The horseshoe prior of all terms that have one."""
        found = [prior for prior in self.priors.values() if prior.of == "effects"]
        if any(prior != found[0] for prior in found):
            fail("priors", "one Horseshoe for all terms that have it", "different ones")
        return found[0] if found else None

    def _shrunk_parts(self, zeta: Float[Tensor, "*S P"]) -> tuple[Tensor, Tensor]:
        """Coordinates of the local scales of the horseshoe, and of its common ones."""
        first, end = self._shrunk_coordinates.start, self._shrunk_coordinates.stop
        return zeta[..., first:end], zeta[..., end : end + 2]

    def coefficients(self, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S p"]:
        """Coefficients of the (centred) columns."""
        own = zeta[..., : len(self.design.names)]
        beta = torch.addcmul(self._mean.to(zeta), self._scale.to(zeta), own)
        if self._transforms:
            values = []
            for at, prior, link in self._transforms:
                value = prior.from_standard(own[..., at])
                values.append(value if link is None else link(value))
            beta = beta.index_add(
                -1, self._transform_columns.to(beta.device), torch.cat(values, -1)
            )
        if self._horseshoe is not None:
            scales = self._horseshoe.scales(*self._shrunk_parts(zeta)) / self._column_sds.to(zeta)
            shrunk = self._shrunk_columns.to(beta.device)
            beta = beta * torch.ones_like(beta).index_copy(-1, shrunk, scales)
        if not self._laws:
            return beta
        parts, start = [], 0
        for law, at, extra in self._laws.values():
            own = law.coefficients(zeta[..., at], zeta[..., extra], self.priors)
            parts += [beta[..., start : at.start], own]
            start = at.stop
        return torch.cat([*parts, beta[..., start:]], -1)

    def scaled(self, slope: Float[Tensor, "S q C"]) -> EffectPoints:
        """The slope in coordinates of which coefficients are affine, from that by predictor."""
        return (slope[:, :-1] * self.placement).sum(-1) * self._scale

    def scales(self, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S p"]:
        """Standard deviations of penalised coefficients given the hyperparameters, 1 for others."""
        found = zeta.new_ones(*zeta.shape[:-1], len(self.design.names))
        parts, start = [], 0
        for law, at, extra in self._laws.values():
            count = at.stop - at.start
            if law.blocks(count):  # other coefficients keep the scale 1
                own = law.scales(count, zeta[..., extra], self.priors)
                parts += [found[..., start : at.start], own]
                start = at.stop
        return torch.cat([*parts, found[..., start:]], -1)

    def scaled_blocks(self) -> list[list[int]]:
        """Columns of normal penalised coefficients, by the hyperparameter that scales them."""
        return [
            [at.start + i for i in block]
            for law, at, _ in self._laws.values()
            for block in law.blocks(at.stop - at.start)
        ]

    def group_factor(self, name: str, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S q q"]:
        """A factor of the covariance of a group's effects, those of centred columns."""
        law, _, extra = self._laws[name]
        assert isinstance(law, GroupLaw)
        return law.factor(zeta[..., extra], self.priors)

    def factor_of_groups(self, first: int, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S q q"]:
        """The `group_factor` of the term of effects that begins at a column."""
        name = next(name for name, (_, at, _) in self._laws.items() if at.start == first)
        return self.group_factor(name, zeta)

    def with_one_group(self, first: int) -> tuple[StructuredPredictor, Int[Tensor, "m"]]:
        """The predictor with the first group alone of the effects of groups from a column on.

        Returns:
            The structured predictor, and the positions of its coordinates in those of this one.
        """
        design, columns = self.design.with_one_group(first)
        left = [*columns, *range(len(self.design.names), self.size)]
        return StructuredPredictor(design, self.family, self.priors), torch.tensor(left)

    def group_columns(self, everywhere: bool = False) -> list[Int[Tensor, "J q"]]:
        """Columns of each term of random effects, by group and effect.

        Args:
            everywhere: of all parameters, not of the location alone.
        """
        return [
            torch.tensor(term.penalised).reshape(-1, len(term.group_law.names))
            for term in self.design.terms
            if term.group_law is not None
            and (everywhere or term.parameter == self.design.parameters[0])
        ]

    def at_zero(self, beta: Float[Tensor, "*S p"]) -> Float[Tensor, "*S p"]:
        """Coefficients with the effects of groups where the columns of their terms are 0."""
        found = beta
        for law, at, _ in self._laws.values():
            if isinstance(law, GroupLaw) and any(law.means):
                found = beta.clone() if found is beta else found
                found[..., at] = law.at_zero(beta[..., at])
        return found

    def threshold_values(self, zeta: Float[Tensor, "*S P"]) -> ColumnValues:
        """Thresholds of an ordinal response, increasing unless the family has them in any order."""
        own = zeta[..., self.thresholds[0] : self.thresholds[-1] + 1]
        if not self.family.has_ordered_thresholds:
            return self.priors["threshold"].from_standard(own)
        first = self.priors["threshold"].from_standard(own[..., :1])
        gaps = self.priors["gap"].from_standard(own[..., 1:])
        return torch.cat([first, gaps], -1).cumsum(-1)

    def forward(
        self,
        zeta: Float[Tensor, "*S P"],
        design: Float[Tensor, "N w"],
        offset: Float[Tensor, "*_ N K"],
        correction: Float[Tensor, "*S q"] | None = None,
    ) -> Float[Tensor, "*_ N C"]:
        """Predictors of all parameters, shape (..., N, C).

        Args:
            zeta: coordinates.
            design: rows as `Design.rows` has them.
            offset: added to the predictors.
            correction: subtracted from the coefficients; see `n_corrected`.
        """
        zeta = zeta.to(design.dtype)
        beta, p = self.coefficients(zeta), len(self.design.names)
        if correction is not None:
            beta = beta - correction[..., :p]
        eta = (self.predictors(beta, design) + offset.mT).mT  # rows along the last axis in memory
        if not self.thresholds:
            return eta
        if correction is not None:
            eta = eta - correction[..., None, p:]
        cuts = self.threshold_values(zeta).unsqueeze(-2)
        return torch.cat([eta, cuts.expand(*eta.shape[:-1], cuts.shape[-1])], -1)

    def predictors(
        self, beta: Float[Tensor, "*S p"], rows: Float[Tensor, "N w"]
    ) -> Float[Tensor, "*S K N"]:
        """The predictors of coefficients at stored rows, without offsets."""
        placement, layout = self.placement.to(beta), self.layout
        if not layout.terms:
            return (beta.unsqueeze(-2) * placement.T) @ rows.mT
        dense = self._dense_columns
        placed = beta.index_select(-1, dense).unsqueeze(-2) * placement[dense].T
        found = placed @ rows[:, : len(dense)].mT
        for term in layout.terms:
            effects = beta[..., term.span].unflatten(-1, (term.groups, term.effects))
            own = effects.index_select(-2, term.codes(rows)) * term.loadings(rows)
            found = found + own.sum(-1).unsqueeze(-2) * placement[term.first].unsqueeze(-1)
        return found

    # --- in the units of the data -----------------------------------------------------------

    def reported(
        self,
        zeta: EffectDraws,
        shift: Float[np.ndarray, "S q"] | None = None,
        names: Collection[str] | None = None,
    ) -> dict[str, Float[np.ndarray, "S"]]:
        """Draws of the reported effects by name, in the units of the data.

        Intercepts are those of the uncentred columns. An intercept that is the whole predictor of
        a scale parameter is reported as that parameter.

        Args:
            zeta: coordinates.
            shift: added to the coefficients of the centred columns; see `n_corrected`.
            names: those of the effects; by default all.
        """
        step = max(1, _ELEMENTS // self.size)  # draws at once, so that few of many effects fit
        parts = []
        chosen = set(self.design.names if names is None else names)
        for start in range(0, len(zeta), step):
            rows = slice(start, start + step)
            part = self._reported(zeta[rows], None if shift is None else shift[rows], chosen)
            parts.append(part if names is None else {name: part[name] for name in names})
            if names is not None and len(zeta) > step:
                parts[-1] = {name: values.copy() for name, values in parts[-1].items()}
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _reported(
        self, zeta: EffectDraws, shift: Float[np.ndarray, "S q"] | None, columns: Collection[str]
    ) -> dict[str, Float[np.ndarray, "S"]]:
        """Reported effects by name, of the coefficients only those of `columns`."""
        at = torch.from_numpy(np.ascontiguousarray(zeta, dtype=np.float64))
        with torch.no_grad():
            beta = self.coefficients(at).numpy()
            hyper = {
                name: law.reported(at[:, own], at[:, extra], self.priors)
                for name, (law, own, extra) in self._laws.items()
            }
            cuts = self.threshold_values(at).numpy() if self.thresholds else beta[:, :0]
        if shift is not None:
            p = beta.shape[1]
            beta, cuts = beta + shift[:, :p], cuts - shift[:, p:]
        effects = self.at_zero(torch.from_numpy(beta)).numpy()
        design = self.design
        found: dict[str, np.ndarray] = {}
        for term in design.terms:
            if term.kind == "intercept":
                others = [
                    t
                    for t in design.terms
                    if t.parameter == term.parameter and t.kind != "intercept"
                ]
                centred = [i for t in others if t.kind != "random" for i in t.columns]
                value = beta[:, term.columns[0]] - beta[:, centred] @ design.center[centred]
                link = self.family.link(term.parameter)
                is_scale = term.parameter not in self.family.locations
                if is_scale and not others and link != "identity":
                    found[term.parameter] = LINKS[link][1](torch.from_numpy(value)).numpy()
                else:
                    found[term.name] = value
                continue
            for i in term.columns if term.kind == "random" else term.unpenalised:
                if design.names[i] in columns:
                    found[design.names[i]] = effects[:, i]
            if term.law is not None:
                found |= {name: draws.numpy() for name, draws in hyper[term.name].items()}
        if self._horseshoe is not None:
            common = self._shrunk_parts(at)[1]
            found["horseshoe scale"] = self._horseshoe.global_values(common).numpy()
        shift = beta @ design.center
        return found | {f"threshold[{j}]": cuts[:, j] + shift for j in range(cuts.shape[1])}

r"""Effects: from standard normal coordinates to coefficients and predictors.

The structured part of every predictor is $X\beta$ plus an offset. Its coordinates $\zeta$ have a
standard normal prior each (see `subbayes.semistructured.priors`):

- a coefficient of its own is $\beta_j = g_j(\zeta_j)$;
- the coefficients of a smooth or of random effects are $\beta_j = \tau \zeta_j$ with their standard
  deviation $\tau = g_\tau(\zeta_\tau)$, the non-centred form, which stays easy to sample where
  $\tau$ is near 0;
- thresholds of an ordinal response are $c_0 = g(\zeta)$ and gaps $c_{j+1} - c_j = g(\zeta) > 0$.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.semistructured.families import Family, OrdinalFamily
from subbayes.semistructured.formula import Design, Term
from subbayes.semistructured.priors import EffectPrior, Exponential, NormalPrior, prior_of
from subbayes.utils.checks import fail

__all__ = ["Effects", "chosen_priors", "default_priors"]

_WEAK = 2.5  # scale of the default priors, in standard deviations of predictor over column


class Effects(nn.Module):
    """The structured part of a model as a function of its coordinates.

    Args:
        design: the columns.
        family: the response's distribution.
        priors: prior by term, and by "sd(term)" for the standard deviations of penalised terms.

    Attributes:
        names: name of each coordinate.
        size: number of coordinates P.
    """

    _mean: Tensor
    _scale: Tensor
    _placed: Tensor
    _shares: Tensor
    _loose: Tensor
    _mask: Tensor

    def __init__(self, design: Design, family: Family, priors: Mapping[str, EffectPrior]) -> None:
        super().__init__()
        self.design, self.family, self.priors = design, family, dict(priors)
        columns = len(design.names)
        mean, scale = torch.zeros(columns).double(), torch.ones(columns).double()
        self._blocks: list[tuple[slice, EffectPrior, bool]] = []
        placed = []
        for term in design.terms:
            own = [i for i in term.columns if i not in term.penalised]
            prior = priors.get(term.name)
            if not own or prior is None:
                continue
            if isinstance(prior, NormalPrior):
                mean[own], scale[own] = prior.mean, prior.scale
                continue
            logged = (
                term.kind == "intercept" and prior.positive and family.link(term.parameter) == "log"
            )
            self._blocks.append((slice(own[0], own[-1] + 1), prior, logged))
            mean[own], scale[own] = 0.0, 0.0
            placed += own
        self._constant("_mean", mean)
        self._constant("_scale", scale)
        self._constant("_placed", torch.eye(columns).double()[placed])
        spread = [t for t in design.terms if t.penalised]
        self.spreads = {t.name: columns + i for i, t in enumerate(spread)}
        shares = torch.zeros(len(spread), columns).double()
        for row, term in zip(shares, spread, strict=True):
            row[list(term.penalised)] = 1.0
        self._constant("_shares", shares)
        self._constant("_loose", 1 - shares.sum(0))
        self.names = [*design.names, *(f"sd({name})" for name in self.spreads)]
        self.thresholds = (
            range(len(self.names), len(self.names) + family.n_classes - 1)
            if isinstance(family, OrdinalFamily)
            else range(0)
        )
        self.names += [f"threshold[{j}]" for j in range(len(self.thresholds))]
        self.size = len(self.names)
        belongs = [[float(p == owner) for p in design.parameters] for owner in design.owner]
        self._constant("_mask", torch.tensor(belongs).double().reshape(columns, -1))

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def coefficients(self, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S p"]:
        """Coefficients of the (centred) columns."""
        own = zeta[..., : len(self.design.names)]
        beta = self._mean.to(zeta) + self._scale.to(zeta) * own
        if self._blocks:
            values = [prior.from_standard(own[..., at]) for at, prior, _ in self._blocks]
            values = [
                v.log() if logged else v
                for v, (_, _, logged) in zip(values, self._blocks, strict=True)
            ]
            beta = beta + torch.cat(values, -1) @ self._placed.to(zeta)
        if self.spreads:
            tau = torch.stack([self.spread(name, zeta) for name in self.spreads], -1)
            beta = beta * (self._loose.to(zeta) + tau @ self._shares.to(zeta))
        return beta

    def spread(self, name: str, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S"]:
        """The standard deviation of a penalised term's coefficients."""
        return self.priors[f"sd({name})"].from_standard(zeta[..., self.spreads[name]])

    @property
    def placement(self) -> Float[Tensor, "p K"]:
        """Which predictor each column belongs to."""
        return self._mask

    def linear(self, zeta: Float[Tensor, "P"]) -> Float[Tensor, "rows C"]:
        """Coefficients by predictor, shape (p + 1, C): of the columns, then of a constant."""
        placed = self.coefficients(zeta).unsqueeze(-1) * self._mask.to(zeta)
        constant = zeta.new_zeros(1, placed.shape[1])
        if self.thresholds:
            cuts = self.cuts(zeta).unsqueeze(0)
            placed = nn.functional.pad(placed, (0, cuts.shape[1]))
            constant = torch.cat([constant, cuts], 1)
        return torch.cat([placed, constant])

    def cuts(self, zeta: Float[Tensor, "*S P"]) -> Float[Tensor, "*S c"]:
        """Thresholds of an ordinal response, increasing."""
        own = zeta[..., self.thresholds[0] : self.thresholds[-1] + 1]
        first = self.priors["threshold"].from_standard(own[..., :1])
        gaps = self.priors["gap"].from_standard(own[..., 1:])
        return torch.cat([first, gaps], -1).cumsum(-1)

    def forward(
        self,
        zeta: Float[Tensor, "P"],
        design: Float[Tensor, "N p"],
        offset: Float[Tensor, "N K"],
        correction: Float[Tensor, "p"] | None = None,
    ) -> Float[Tensor, "N C"]:
        """Predictors of all parameters, shape (N, C)."""
        beta = self.coefficients(zeta)
        if correction is not None:
            beta = beta - correction
        eta = design @ (beta.unsqueeze(-1) * self._mask.to(beta)) + offset
        if not self.thresholds:
            return eta
        return torch.cat([eta, self.cuts(zeta).expand(len(design), -1)], -1)

    # --- in the units of the data -----------------------------------------------------------

    def reported(self, zeta: Float[np.ndarray, "S P"]) -> dict[str, Float[np.ndarray, "S"]]:
        """Draws of what people read, by name: coefficients of uncentred columns, scales.

        Intercepts are those of the columns as they are. An intercept that is all of a scale
        parameter's predictor is given as that parameter.
        """
        at = torch.from_numpy(np.ascontiguousarray(zeta, dtype=np.float64))
        with torch.no_grad():
            beta = self.coefficients(at).numpy()
        found: dict[str, np.ndarray] = {}
        for term in self.design.terms:
            if term.kind == "intercept":
                others = [
                    i
                    for t in self.design.terms
                    if t.parameter == term.parameter and t.kind != "intercept"
                    for i in t.columns
                ]
                value = beta[:, term.columns[0]] - beta[:, others] @ self.design.center[others]
                if (
                    not others
                    and term.parameter != self.design.parameters[0]
                    and (self.family.link(term.parameter) == "log")
                ):
                    found[term.parameter] = np.exp(value)
                else:
                    found[term.name] = value
                continue
            for i in term.columns:
                if i not in term.penalised or term.kind == "random":
                    found[self.design.names[i]] = beta[:, i]
            if term.penalised:
                with torch.no_grad():
                    found[f"sd({term.name})"] = self.spread(term.name, at).numpy()
        if self.thresholds:
            with torch.no_grad():
                cuts = self.cuts(at).numpy()
            shift = beta @ self.design.center
            found |= {f"threshold[{j}]": cuts[:, j] + shift for j in range(cuts.shape[1])}
        return found


def default_priors(
    design: Design, family: Family, y: Float[np.ndarray, "n"]
) -> dict[str, EffectPrior]:
    r"""Weakly informative priors, scaled by the data as in rstanarm (Goodrich et al. 2024).

    With $s_y$ the standard deviation of y for an identity link and 1 for others: coefficients
    $N(0, (2.5\, s_y / s_x)^2)$; the intercept, at the means of the columns, $N(m, (2.5\, s_y)^2)$
    around the overall mean on the scale of the link; a normal response's sigma exponential with
    mean $s_y$; shapes $\log r \sim N(1, 2^2)$; precisions $\log \phi \sim N(2, 2^2)$; the standard
    deviations of smooths and random effects exponential with mean $s_y$.
    """
    location = design.parameters[0]
    priors: dict[str, EffectPrior] = {}
    unit = _unit(family, y)
    for term in design.terms:
        here = unit if term.parameter == location else 1.0
        if term.penalised:
            priors[f"sd({term.name})"] = Exponential(here)
        if term.kind == "intercept":
            priors[term.name] = _intercept(term, family, y, unit)
        elif term.kind != "random":
            loose = [i for i in term.columns if i not in term.penalised]
            scales = design.scale[loose]
            scale = float(np.sqrt(np.mean(scales[scales > 0] ** 2))) if (scales > 0).any() else 1.0
            weak = _WEAK if term.parameter == location else 1.0
            priors[term.name] = NormalPrior(0.0, weak * here / scale)
    if isinstance(family, OrdinalFamily):
        priors |= {"threshold": NormalPrior(-1.0, 3.0), "gap": Exponential(1.5)}
    return priors


def _unit(family: Family, y: Float[np.ndarray, "n"]) -> float:
    """The standard deviation of the predictor that the data suggest."""
    if family.links[0] != "identity" or isinstance(family, OrdinalFamily):
        return 1.0
    spread = float(np.std(y))
    if not spread > 0:
        fail("y", "responses that vary", "a constant column")
    return spread


def _intercept(term: Term, family: Family, y: Float[np.ndarray, "n"], unit: float) -> EffectPrior:
    if term.parameter == family.parameters[0]:
        link = family.links[0]
        level = float(np.mean(y))
        if link == "log":
            level = float(np.log(max(level, 1e-3)))
        elif link == "logit":
            share = np.clip(level, 0.01, 0.99)
            level = float(np.log(share / (1 - share)))
        return NormalPrior(level, _WEAK * unit)
    if term.parameter == "sigma":
        return Exponential(float(np.std(y)))
    return NormalPrior(1.0 if term.parameter == "shape" else 2.0, 2.0)


def chosen_priors(
    design: Design, defaults: Mapping[str, EffectPrior], given: Mapping[str, Any] | None
) -> dict[str, EffectPrior]:
    """The default priors with a user's own in their places.

    Raises:
        InputError: a name that is no term, or a positive prior of something that is not positive.
    """
    priors = dict(defaults)
    for name, value in (given or {}).items():
        if name.startswith("sd(") and isinstance(value, (int, float)):
            value = Exponential(float(value))
        elif name in design.parameters and f"{name}.Intercept" in priors:
            name = f"{name}.Intercept"  # as the summary calls a parameter without effects
        prior = prior_of(f"priors[{name!r}]", value)
        if name not in priors:
            own = [t.name for t in design.terms if name in (*t.variables, t.name)]
            own = [n for n in own if n in priors]
            if len(own) != 1:
                fail("priors", "names of terms: " + ", ".join(priors), repr(name))
            name = own[0]
        if name.startswith("sd(") and not prior.positive:
            fail(
                f"priors[{name!r}]",
                "a prior of a positive number, such as Exponential(1)",
                repr(prior),
            )
        priors[name] = prior
    return priors

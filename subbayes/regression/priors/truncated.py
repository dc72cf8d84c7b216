r"""Priors of parameters whose range is smaller than that of the prior, such as $\nu > 1$."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.families import LINKS
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import fail

_END = 37.0  # standard normal coordinate with a probability beyond it that float64 can hold
_FAR = 8.0  # with a negligible probability beyond it, where tables end
_ROUNDING = 1e-9  # of a quantile beyond the range, relative to 1


@dataclass(frozen=True, eq=False)
class TruncatedPrior(EffectPrior):
    r"""A prior truncated to an interval: $\theta = F^{-1}(F(l) + (F(h) - F(l))\,\Phi(\zeta))$.

    Args:
        prior: the prior with distribution function F.
        low: l, which may be infinite.
        high: h, which may be infinite.
        argument: name of the prior, for errors.

    Raises:
        InputError: a prior without values between both.

    Example:
        >>> from subbayes.regression.priors.normal import NormalPrior
        >>> TruncatedPrior(NormalPrior(), low=0.0).from_standard(torch.tensor([0.0]))
        tensor([0.6745])
    """

    prior: EffectPrior
    low: float = -math.inf
    high: float = math.inf
    argument: InitVar[str] = "prior"
    _below: float = field(init=False, repr=False)  # probabilities before truncation
    _above: float = field(init=False, repr=False)
    _between: float = field(init=False, repr=False)

    def __post_init__(self, argument: str) -> None:
        if not _value(self.prior, _END) > self.low or not _value(self.prior, -_END) < self.high:
            expected = f"a prior with values between {self.low:g} and {self.high:g}"
            fail(argument, expected, repr(self.prior))
        left, right = _place(self.prior, self.low), _place(self.prior, self.high)
        below, above = _tail(left), _tail(-right)
        between = _tail(-left) - above if left > 0 else _tail(right) - below
        for name, value in (("_below", below), ("_above", above), ("_between", between)):
            object.__setattr__(self, name, value)

    @property
    @override
    def positive(self) -> bool:
        return self.prior.positive or self.low >= 0

    def from_standard(self, zeta: Tensor) -> Tensor:
        """The quantile of the truncated prior, from the nearer tail of the prior."""
        root = 2.0**-0.5
        left = self._below + self._between * 0.5 * torch.special.erfc(-root * zeta)
        right = self._above + self._between * 0.5 * torch.special.erfc(root * zeta)
        from_left = torch.special.ndtri(left.clamp_max(0.5))
        from_right = -torch.special.ndtri(right.clamp_max(0.5))
        value = self.prior.from_standard(torch.where(left < right, from_left, from_right))
        eps = torch.finfo(zeta.dtype).eps  # a rounded value may be an end, whose link is infinite
        if self._below:
            value = value.clamp_min(self.low + eps * max(abs(self.low), eps))
        if self._above:
            value = value.clamp_max(self.high - eps * max(abs(self.high), eps))
        return value


def within_range(argument: str, prior: EffectPrior, link: str) -> EffectPrior:
    """A prior of a parameter, truncated to the values that the link accepts if it allows others.

    Args:
        argument: name of the prior, for errors.
        prior: the prior.
        link: the name of the link.

    Raises:
        InputError: a prior without values that the link accepts.

    Example:
        >>> from subbayes.regression.priors.half_normal import HalfNormal
        >>> within_range("priors['nu']", HalfNormal(5.0), "logm1").low  # log(nu - 1)
        1.0
        >>> within_range("priors['sigma']", HalfNormal(5.0), "log")
        HalfNormal(scale=5)
    """
    ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
    low, high = LINKS[link][1](ends).tolist()
    if _value(prior, -_FAR) >= low - _ROUNDING and _value(prior, _FAR) <= high + _ROUNDING:
        return prior
    return TruncatedPrior(prior, low, high, argument)


def _value(prior: EffectPrior, zeta: float) -> float:
    """The quantile of a prior at a standard normal coordinate."""
    with torch.no_grad():
        return float(prior.from_standard(torch.tensor([zeta], dtype=torch.float64))[0])


def _place(prior: EffectPrior, value: float) -> float:
    """The standard normal coordinate of a value, by bisection; infinite beyond all values."""
    left, right = -_END, _END
    if value <= _value(prior, left):
        return -math.inf
    if value >= _value(prior, right):
        return math.inf
    while left < (middle := (left + right) / 2) < right:
        if _value(prior, middle) < value:
            left = middle
        else:
            right = middle
    return right


def _tail(zeta: float) -> float:
    r"""$\Phi(\zeta)$."""
    return 0.5 * math.erfc(-zeta * 2.0**-0.5)

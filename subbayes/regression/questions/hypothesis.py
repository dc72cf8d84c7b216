r"""Hypotheses about effects: `hypothesis("x > 0")`.

The expression is parsed and walked, and only numbers, names of effects, arithmetic and a few
functions are evaluated: it cannot run code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Num

from subbayes.diagnostics.convergence import mcse_mean
from subbayes.regression.formula.names import pattern_of, written_as
from subbayes.regression.questions.summary import central
from subbayes.regression.shapes import EffectPoint
from subbayes.utils.checks import check_fraction, closest, fail, fail_type
from subbayes.utils.warning import warn_user

_MOST_CHARACTERS = 1000
_LEAST_DRAWS = 5.0  # near 0, for a kernel estimate
_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
}
_OPERATORS: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
_SIGNS = {ast.Gt: ">", ast.GtE: ">", ast.Lt: "<", ast.LtE: "<", ast.Eq: "="}


@dataclass(frozen=True)
class Hypothesis:
    """What the posterior says about a hypothesis.

    Attributes:
        expression: the hypothesis.
        sign: ">", "<" or "=".
        draws: left-hand side minus right-hand side, for each draw.
        prior: the same for draws of the prior, for hypotheses of equality.
        level: level of the interval.
        chains: number of chains, which follow each other in the draws.
    """

    expression: str
    sign: str
    draws: Float[np.ndarray, "S"]
    prior: EffectPoint | None
    level: float
    chains: int = 1

    @property
    def probability(self) -> float:
        """Posterior probability; of an equality that of equal prior probabilities of both."""
        if self.sign != "=":
            return float(np.mean(self.draws > 0 if self.sign == ">" else self.draws < 0))
        ratio = self.evidence_ratio
        return 1.0 if np.isinf(ratio) else ratio / (1 + ratio)

    @property
    def evidence_ratio(self) -> float:
        r"""Posterior odds, infinite if all draws agree; of an equality the Savage-Dickey ratio.

        The latter is the density of the posterior at 0 over that of the prior (Wagenmakers et al.
        2010), both estimated from draws by kernels, or beyond the draws by a normal distribution.
        """
        if self.sign != "=":
            p = self.probability
            return p / (1 - p) if p < 1 else np.inf
        assert self.prior is not None
        before = density_at_zero(self.prior)
        return density_at_zero(self.draws) / before if before else np.inf

    @property
    def evidence_ratio_mcse(self) -> float:
        r"""Monte Carlo standard error of the evidence ratio; NaN where it is not known.

        By the delta method from those of the shares of draws, or of the kernel densities without
        their bias, which may be several percent. It is not known if all draws agree, or if the
        density is that of a normal distribution beyond the draws.
        """
        if self.sign != "=":
            p = self.probability
            agree = self.draws > 0 if self.sign == ">" else self.draws < 0
            return self._mcse(agree) / (1 - p) ** 2 if 0 < p < 1 else np.nan
        assert self.prior is not None
        after, before = (_kernel_weights(values)[0] for values in (self.draws, self.prior))
        if min(after.sum(), before.sum()) < _LEAST_DRAWS:
            return np.nan
        errors = (
            self._mcse(after) / after.mean(),
            before.std(ddof=1) / (before.mean() * np.sqrt(len(before))),
        )
        return float(self.evidence_ratio * np.hypot(*errors))

    def _mcse(self, values: Num[np.ndarray, "S"] | Bool[np.ndarray, "S"]) -> float:
        """Monte Carlo standard error of the mean over the draws of the posterior."""
        return float(mcse_mean(values.astype(float).reshape(self.chains, -1)))

    @property
    def interval(self) -> tuple[float, float]:
        """Central interval of the difference of both sides."""
        low, high = list(central(self.draws[:, None], self.level).values())[2:]
        return float(low[0]), float(high[0])

    def table(self) -> pd.DataFrame:
        """One row: mean, deviation, interval, probability, evidence ratio and its error."""
        statistics = central(self.draws[:, None], self.level)
        row = {name: values[0] for name, values in statistics.items()} | {
            "probability": self.probability,
            "evidence_ratio": self.evidence_ratio,
            "evidence_ratio_mcse": self.evidence_ratio_mcse,
        }
        return pd.DataFrame([row], index=[self.expression]).rename_axis("hypothesis")

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Hypothesis({self.expression!r}: probability {self.probability:.3g}, difference "
            f"{self.draws.mean():.3g} [{low:.3g}, {high:.3g}])"
        )


def evaluate_hypothesis(
    expression: str,
    effects: Mapping[str, Float[np.ndarray, "S"]],
    prior: Callable[[], Mapping[str, Float[np.ndarray, "S"]]],
    level: float = 0.95,
    chains: int = 1,
) -> Hypothesis:
    """Evaluate a hypothesis about effects; see `Results.hypothesis`.

    Args:
        expression: such as "x > 0" or "2 * x = z".
        effects: posterior draws of each effect.
        prior: a function that returns prior draws of each that has a proper prior.
        level: level of the interval.
        chains: number of chains, which follow each other in the posterior draws.

    Raises:
        InputError: an expression that is not a comparison of effects, or an unknown effect; or
            sides with the same difference in all draws, such as "x - x = 0".

    Example:
        >>> draws = {"x": np.array([1.0, 2.0, -1.0, 3.0]), "C(g)[T.b]": np.zeros(4)}
        >>> evaluate_hypothesis("x > C(g)[T.b]", draws, dict).probability
        0.75
    """
    if not isinstance(expression, str):
        fail_type("hypothesis", "text such as 'x > 0'", expression)
    check_fraction("level", level)
    tree = _parse(expression, list(effects))
    sign = _SIGNS[type(tree.ops[0])]

    def difference(values: Mapping[str, np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):
            left, right = (_evaluate(part, values) for part in (tree.left, tree.comparators[0]))
        size = len(next(iter(values.values())))
        return np.broadcast_to(np.asarray(left - right, dtype=float), (size,))

    draws = difference(effects)
    if not np.isfinite(draws).all():
        got = f"{int((~np.isfinite(draws)).sum())} draws without one"
        fail("hypothesis", f"finite numbers of {expression!r}", got)
    if draws.min() == draws.max():
        got = f"a difference of {draws[0]:g} in all draws of {expression!r}"
        fail("hypothesis", "sides whose difference varies", got, "Compare different effects")
    before = None
    if sign == "=":
        known = prior()
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        flat = [name for name in effects if name in used and name not in known]
        if flat:
            expected, remedy = "effects with proper priors in an equality", "Pass a scale"
            fail("hypothesis", expected, f"{', '.join(flat)} with flat priors", remedy)
        before = difference(known)
        before = before[np.isfinite(before)]
        for which, values in (("posterior", draws), ("prior", before)):
            weights, width = _kernel_weights(values)
            if width and weights.sum() < _LEAST_DRAWS:
                warn_user(
                    f"hypothesis: {expression!r} lies where there are hardly any draws of the "
                    f"{which}; its density there is that of a normal distribution with their "
                    "mean and standard deviation, and the evidence ratio is rough. Take more draws"
                )
    return Hypothesis(expression, sign, draws, before, level, chains)


def density_at_zero(draws: Float[np.ndarray, "S"]) -> float:
    r"""Density at 0 of a variable from its draws, which may have heavy tails or be skewed.

    A kernel estimate of $v = \operatorname{asinh}(d / s)$, where s is the median of |d|: on this
    scale tails are light, and d has the density of v over s at 0. The bandwidth is two thirds of
    that of Silverman (1986, eq. 3.31), since v may have two modes. Where fewer than five draws
    are within about a bandwidth of 0, it is the density of the normal distribution with the mean
    and standard deviation of the draws. It is infinite if half of the draws are 0.

    Example:
        >>> draws = np.random.default_rng(0).standard_cauchy(10_000)
        >>> bool(abs(density_at_zero(draws) * np.pi - 1) < 0.1)
        True
    """
    weights, width = _kernel_weights(draws)
    if not width:
        return np.inf if (draws == 0).mean() >= 0.5 else 0.0
    if weights.sum() >= _LEAST_DRAWS:
        return float(weights.mean() / (np.sqrt(2 * np.pi) * width))
    mean, sd = draws.mean(), draws.std()
    return float(np.exp(-0.5 * (mean / sd) ** 2) / (np.sqrt(2 * np.pi) * sd))


def _kernel_weights(draws: Float[np.ndarray, "S"]) -> tuple[Float[np.ndarray, "S"], float]:
    """The kernel of each draw at 0, 1 at most, and its width; 0 for a point mass."""
    scale = float(np.median(np.abs(draws))) if len(draws) else 0.0
    if not scale:
        return np.zeros(len(draws)), 0.0
    v = np.arcsinh(draws / scale)
    low, high = np.quantile(v, [0.25, 0.75])
    spreads = [part for part in (float(v.std()), float(high - low) / 1.34) if part > 0]
    width = 0.6 * min(spreads) * len(v) ** -0.2 if spreads else 0.0
    return (np.exp(-0.5 * (v / width) ** 2) if width else np.zeros(len(v))), width * scale


def _parse(expression: str, effects: list[str]) -> ast.Compare:
    """The comparison, in which the names are those of effects and functions."""
    expected = "a comparison of effects, such as 'x > 0' or 'x - z = 0'"
    if len(expression) > _MOST_CHARACTERS:
        fail("hypothesis", f"at most {_MOST_CHARACTERS} characters", len(expression))
    prefix = "effect"
    while prefix in expression:  # an effect may be named as a placeholder
        prefix += "_"
    names, order = dict[str, str](), sorted(effects, key=len, reverse=True)

    def replaced(found: re.Match[str]) -> str:
        name = written_as(found[0], order)
        if name not in order:  # it may be one of several
            return found[0]
        placeholder = f"{prefix}{order.index(name)}"
        names[placeholder] = name
        return f" {placeholder} "

    # all at once, longest first, so that no replacement is taken for a name
    every = "|".join(
        rf"`{pattern}`|(?<![\w.`\[\]]){pattern}(?![\w`\[(.])" for pattern in map(pattern_of, order)
    )
    text = re.sub(every, replaced, expression) if order else expression
    text = re.sub(r"(?<![<>=!])=(?!=)", "==", text).replace("^", "**")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if not isinstance(tree, ast.Compare) or any(type(op) not in _SIGNS for op in tree.ops):
        shown = "The effects are " + ", ".join(effects[:20]) + ", ..." * (len(effects) > 20)
        fail("hypothesis", expected, repr(expression), shown)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if node.id not in (*names, *_FUNCTIONS):
                shown = "effects: " + ", ".join(effects[:20])
                fail("hypothesis", shown, repr(node.id), closest(node.id, effects))
            node.id = names.get(node.id, node.id)
    if len(tree.ops) > 1:
        fail(
            "hypothesis",
            "a single comparison",
            repr(expression),
            "Ask for one comparison after the other",
        )
    return tree


def _evaluate(node: ast.AST, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The value of an expression of allowed nodes."""
    match node:
        case ast.Constant(value=int() | float() as number):
            try:
                return np.asarray(float(number))
            except OverflowError:
                fail("hypothesis", "numbers within the range of float64", "a larger one")
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return np.asarray(-_evaluate(operand, values))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id=name), args=[arg], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_evaluate(arg, values))
    allowed = "numbers, effects, + - * / ** ^, abs, exp, log and sqrt"
    fail("hypothesis", allowed, ast.unparse(node) if isinstance(node, ast.expr) else repr(node))

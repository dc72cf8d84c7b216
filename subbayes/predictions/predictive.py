r"""The predictive distribution: a mixture over draws.

$$ p(y \mid x) = \frac{1}{S} \sum_{s=1}^S p(y \mid f(x; w_s)) $$

It is the same type for every method; for a point estimate (MAP, SWA) it has one component.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.arrays import check_finite_targets, to_targets
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import column
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.predictions.quantiles import gaussian_mixture_quantile, mixture_quantile
from subbayes.predictions.sampled import sampled_cdf, sampled_quantile
from subbayes.utils.checks import (
    UndefinedError,
    check_count,
    check_fraction,
    check_seed,
    fail,
    is_finite,
)
from subbayes.utils.trees import leaves, tree_map
from subbayes.utils.types import Outputs, RowNumbers, Targets

if TYPE_CHECKING:
    import pandas as pd


Array = np.ndarray
_SMALL = 1e-10  # level beyond which probabilities of counts have few digits
_ROUNDING = 1e-13  # of entropies in float64, in nats: less is no information

OUTPUTS_AT_ONCE = 2**22
"""Numbers of a batch; its predictive distribution takes a few times their memory."""


class Predictive:
    """A predictive distribution for N inputs, represented by the network outputs of S draws.

    Arrays are float64 NumPy arrays, of shape (N,) for one target and (N, T) for several; for a
    classifier the moments are those of the class indicators, shape (N, K).

    Args:
        outputs: network outputs, shape (S, N, C).
        likelihood: distribution of the target given the outputs.

    Attributes:
        kind: "mixture": densities, quantiles and scores are those of the mixture over draws.
        classes: names of the K classes in data frames, or None; see `with_classes`.
        index: labels of the rows in data frames, or None for positions; see `with_index`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> outputs = torch.tensor([[[0.0]], [[2.0]]])
        >>> predictive = Predictive(outputs, Gaussian(noise=1.0))
        >>> predictive.mean, predictive.epistemic, predictive.aleatoric
        (array([1.]), array([1.]), array([1.]))
    """

    kind = "mixture"
    classes: tuple[Any, ...] | None = None
    index: pd.Index | None = None

    def __init__(self, outputs: Outputs, likelihood: Likelihood) -> None:
        if outputs.ndim != 3 or 0 in outputs.shape:
            fail("outputs", "shape (draws, N, C)", tuple(outputs.shape))
        likelihood.check_parameters(outputs.shape[-1])
        self.outputs = outputs.detach().cpu().double()
        self.likelihood = likelihood

    def __len__(self) -> int:
        return self.outputs.shape[1]

    @property
    def n_draws(self) -> int:
        """Number of mixture components S."""
        return self.outputs.shape[0]

    def __repr__(self) -> str:
        return f"Predictive(n={len(self)}, draws={self.n_draws}, {self.likelihood!r})"

    @classmethod
    def joined(cls, parts: Sequence[Any], likelihood: Likelihood) -> Predictive:
        """Predictions of the rows of parts of this class, under the likelihood of all rows."""
        return Predictive(torch.cat([part.outputs for part in parts], 1), likelihood)

    def _array(self, values: Tensor) -> Array:
        """Convert (..., T) to NumPy, dropping the last axis for one target."""
        array = values.numpy()
        return array[..., 0] if array.shape[-1] == 1 else array

    def _finite(self, name: str, values: Float[Tensor, "N T"], order: int | None = None) -> Array:
        """Values as an array, which have to be finite.

        Moments of an order may be infinite where the family says so, not where they overflow.
        """
        bad = ~values.isfinite()
        if bool(bad.any()):
            if order is not None:
                bad &= self.likelihood.has_moment(self.outputs, order).all(0)
            if bool(bad.any()):
                row, target = (int(index) for index in bad.nonzero()[0])
                fail(
                    "predictions",
                    f"a finite {name}",
                    values[row, target].item(),
                    "Check the inputs, which may be far from those of training, and the priors",
                    row=row,
                )
        return self._array(values)

    @property
    def mean(self) -> Array:
        """E[y], (N,) or (N, T).

        Raises:
            InputError: means that overflow, as those of the other moments and of quantiles do.
        """
        return self._finite("mean", self.likelihood.mean(self.outputs).mean(0), 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `mean`, from one draw."""
        return self._array(self._first_draw.mean(self.outputs[:1])[0]).shape

    @property
    def _first_draw(self) -> Likelihood:
        """The likelihood of the first draw, which may have parameters of its own."""
        return self.likelihood.select_draws(torch.zeros(1, dtype=torch.long))

    @property
    def epistemic(self) -> Array:
        """Variance of E[y | draw] over draws, which more data would reduce."""
        means = self.likelihood.mean(self.outputs)
        return self._finite("epistemic variance", means.var(0, correction=0), 1)

    @property
    def aleatoric(self) -> Array:
        """Mean over draws of Var[y | draw], which more data would not reduce."""
        return self._finite("variance", self.likelihood.variance(self.outputs).mean(0), 2)

    @property
    def variance(self) -> Array:
        """Var[y] = epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Array:
        """Standard deviation of y."""
        return np.sqrt(self.variance)

    def components(self) -> tuple[Array, Array] | None:
        """Means and standard deviations of the mixture, each (S, N) or (S, N, T), if Gaussian."""
        parts = self.likelihood.components(self.outputs)
        return None if parts is None else (self._array(parts[0]), self._array(parts[1]))

    def _targets(self, y: object) -> Targets:
        targets = tree_map(Tensor.cpu, to_targets(y, "y"))  # as the outputs
        for tensor in leaves(targets):
            if tensor.ndim == 0 or len(tensor) != len(self):
                got = len(tensor) if tensor.ndim else "a scalar"
                fail("y", f"{len(self)} rows, as predicted", got)
            check_finite_targets("y", tensor)
        return targets

    def _checked_targets(self, y: object) -> Targets:
        """Targets without weights of rows, checked against the likelihood and the outputs."""
        targets = self._targets(y)
        self.likelihood.check_targets(targets)
        self.likelihood.check_outputs(self.outputs.shape[-1], targets)
        return split_targets(targets, has_weights(self.likelihood, targets)).unweighted

    def _columns(self, targets: Targets) -> Float[Tensor, "N T"]:
        """Targets without noise scales as (N, T) in float64, checked against the outputs.

        They may lie outside the support.
        """
        self.likelihood.check_outputs(self.outputs.shape[-1], targets)
        value = column(leaves(targets)[0], self.outputs)
        if self._array(value).shape != self.shape:
            fail("y", f"shape {self.shape}, as predicted", f"shape {tuple(value.shape)}")
        return value

    def log_prob(self, y: object, moment_matched: bool = False) -> RowNumbers:
        r"""Log density of each observation, shape (N,).

        Args:
            y: targets, (N,) or (N, T); weights of rows that come with them have no effect.
            moment_matched: use the Gaussian with the mixture's mean and variance (Izmailov et
                al. 2019, E.1.1) instead of the mixture itself; regression only.
        """
        if not moment_matched:
            terms = self.component_log_prob(y)
            return (terms.logsumexp(0) - math.log(self.n_draws)).numpy()
        targets = self._checked_targets(y)
        self._require("regression", "log_prob(moment_matched=True)")
        value = self._columns(targets).numpy()
        mean, sd = (a.reshape(value.shape) for a in (self.mean, self.std))
        return normal_log_prob((value - mean) / sd, sd)

    def component_log_prob(self, y: object) -> Float[Tensor, "S n"]:
        """Log density of each observation under each draw, whose mean density is that of y."""
        return self.likelihood.unweighted.log_prob(self.outputs, self._checked_targets(y))

    def cdf(self, y: object) -> Array:
        """P(Y <= y) per target; the PIT value of an observation."""
        self._require_ordered("cdf")
        return self._array(self._cdf(self._columns(self._targets(y))))

    def _cdf(self, value: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        if not self.likelihood.has_cdf:
            return sampled_cdf(self.likelihood, self.outputs, value)
        return self.likelihood.cdf(self.outputs, value).mean(0)

    def quantile(self, q: float) -> Array:
        """Quantile, for mixtures exact to 1e-8 of their standard deviation; an integer for counts.

        The probability below it is q to 1e-7 of q and of 1 - q, unless it lies within 1e-12
        standard deviations of an end of the support, or within 1e-9 of a bound of truncated
        responses, where the probability itself has fewer digits. Where the distribution function
        is flat, between components far apart, it is one of the points at which the function is q.
        Of likelihoods of the user without `cdf` it is estimated from about 20,000 draws of each
        row: the probability below it has the standard error sqrt(q (1 - q) / 20000), 0.001 at
        q = 0.975.

        Args:
            q: a level strictly between 0 and 1.
        """
        check_fraction("q", q)
        self._require_ordered("quantile")
        return self._finite(f"quantile of level {q:g}", self._quantile(q))

    def _quantile(self, q: float) -> Float[Tensor, "N T"]:
        if not self.likelihood.has_cdf:
            return sampled_quantile(q, self.likelihood, self.outputs)
        if self.likelihood.kind == "count":
            return self._count_quantile(q)
        parts = self.likelihood.components(self.outputs)
        if parts is None:
            return mixture_quantile(q, self.likelihood, self.outputs, self._moments)
        return gaussian_mixture_quantile(q, *parts)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each component, which the quantiles of an interval share."""
        return self.likelihood.moments(self.outputs)

    def _count_quantile(self, q: float) -> Float[Tensor, "N T"]:
        """Bisection over integers on the distribution function, for all rows at once.

        Or from the probabilities of all counts, for likelihoods that have them faster.
        """
        if self.count_probabilities is not None and _SMALL < q < 1 - _SMALL:
            first, probabilities = self.count_probabilities
            counts = first + (probabilities.cumsum(0) < q).sum(0)
            return counts.unsqueeze(-1).to(self.outputs)
        means = self.likelihood.mean(self.outputs)
        stds = self.likelihood.variance(self.outputs).sqrt()
        # Cantelli's inequality bounds the distance of a quantile from the mean.
        reach = 1 + math.sqrt(max(q / (1 - q), (1 - q) / q))
        low = (means - reach * stds).amin(0).floor().clamp_min(-1) - 1
        high = (means + reach * stds).amax(0).ceil()
        while True:
            middle = ((low + high) / 2).floor()
            # beyond 2**53 neighbouring numbers differ by more than 1
            if not bool(((high - low > 1) & (middle > low) & (middle < high)).any()):
                break
            above = self._cdf(middle) >= q
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return high

    @cached_property
    def count_probabilities(self) -> tuple[Float[Tensor, "N"], Float[Tensor, "counts N"]] | None:
        """The first counts and their probabilities, of likelihoods that have them."""
        return self.likelihood.unweighted.count_probabilities(self.outputs)

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Central interval of probability `level`: (lower, upper)."""
        check_fraction("level", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def _class_probabilities(self) -> Float[Tensor, "S N *L K"]:
        self._require("classification", "probabilities")
        return self.likelihood.classes(self.outputs)

    @cached_property
    def _averaged(self) -> Float[Tensor, "N *L K"]:
        return self._class_probabilities().mean(0)

    @property
    def probabilities(self) -> Float[np.ndarray, "n *L K"]:
        """Averaged class probabilities, shape (N, K); (N, L, K) for tokens."""
        return self._averaged.numpy().copy()

    @property
    def labels(self) -> np.ndarray:
        """Most probable class of each row, 0..K-1, shape (N,); of each token (N, L)."""
        return self.probabilities.argmax(-1)

    @property
    def entropy(self) -> Float[np.ndarray, "n *L"]:
        """Entropy of the averaged class probabilities in nats: total uncertainty, shape (N,)."""
        return torch.special.entr(self._averaged).sum(-1).numpy()

    @property
    def mutual_information(self) -> Float[np.ndarray, "n *L"]:
        """Entropy minus mean entropy over draws, in nats: epistemic uncertainty, shape (N,)."""
        each = self._class_probabilities()  # of both terms, whatever `entropy` averages
        gap = torch.special.entr(each.mean(0)).sum(-1) - torch.special.entr(each).sum(-1).mean(0)
        return gap.masked_fill(gap < _ROUNDING, 0.0).numpy()

    def decide(
        self, threshold: float = 0.95, *, costs: Any = None, abstain: float | None = None
    ) -> np.ndarray:
        r"""Class labels, with -1 where no class has a probability above `threshold`.

        With costs, or a cost of abstaining, it is the decision of the least expected cost,
        $\arg\min_a \sum_k p_k C_{ka}$, or -1 where abstaining costs less (Chow 1970).

        Args:
            threshold: a probability; not used with costs.
            costs: of each decision, in columns, where the class is that of the row, shape (K, A):
                usually A = K with zeros on the diagonal. By default a wrong class costs 1.
            abstain: cost of no decision.

        Source: Hubin and Storvik (2024), section 4.1, after Posch et al.

        Example:
            >>> from subbayes.likelihoods import Bernoulli
            >>> predictive = Predictive(torch.tensor([[[-3.0], [-1.0], [1.0]]]), Bernoulli())
            >>> predictive.decide(costs=[[0, 1], [5, 0]]), predictive.decide(abstain=0.1)
            (array([0, 1, 1]), array([ 0, -1, -1]))
        """
        p = self.probabilities
        if costs is None and abstain is None:
            number = isinstance(threshold, (int, float, np.floating, Tensor))
            if not number or not 0 <= float(threshold) < 1:
                fail("threshold", "a probability in [0, 1)", repr(threshold))
            return np.where(p.max(-1) > threshold, p.argmax(-1), -1)
        k = p.shape[-1]
        table = 1.0 - np.eye(k) if costs is None else np.asarray(costs, dtype=float)
        if table.ndim != 2 or len(table) != k or not np.isfinite(table).all():
            fail("costs", f"{k} rows of finite numbers, one for each class", f"shape {table.shape}")
        expected = p @ table
        decision = expected.argmin(-1)
        return decision if abstain is None else np.where(expected.min(-1) > abstain, -1, decision)

    def scaled(self, factor: float, likelihood: Likelihood | None = None) -> Predictive:
        """The same predictions, with network outputs times a factor.

        Args:
            factor: of the outputs.
            likelihood: another distribution of the target given the outputs.

        Example:
            >>> from subbayes.likelihoods import Bernoulli
            >>> Predictive(torch.tensor([[[2.0]]]), Bernoulli()).scaled(0.5).outputs
            tensor([[[1.]]], dtype=torch.float64)
        """
        predictive = self._scaled(factor, likelihood or self.likelihood)
        predictive.classes, predictive.index = self.classes, self.index
        return predictive

    def _scaled(self, factor: float, likelihood: Likelihood) -> Predictive:
        return Predictive(factor * self.outputs, likelihood)

    def with_classes(self, classes: Sequence[Any] | np.ndarray | None) -> Predictive:
        """The same predictions, with names of the classes in data frames.

        `labels`, `decide`, and the y of `log_prob` stay positions 0..K-1.

        Args:
            classes: K different names in the order of the probabilities: text or numbers; None for
                positions.

        Example:
            >>> from subbayes.likelihoods import Bernoulli
            >>> predictive = Predictive(torch.tensor([[[0.0], [3.0]]]), Bernoulli())
            >>> frame = predictive.with_classes(["ham", "spam"]).to_frame(threshold=0.9)
            >>> frame[["label", "doubt", "p[spam]"]].round(2).values.tolist()
            [['ham', True, 0.5], ['spam', False, 0.95]]

        Raises:
            InputError: another number of names than of classes, or one twice.
            UndefinedError: predictions that are not of classes.
        """
        named = copy.copy(self)
        named.classes = None if classes is None else tuple(classes)
        if named.classes is not None:
            self._require("classification", "with_classes")
            k = self._first_draw.classes(self.outputs[:1]).shape[-1]
            if len(named.classes) != k or len(set(map(str, named.classes))) != k:
                fail("classes", f"{k} different names", ", ".join(map(repr, named.classes)))
        return named

    def sample(self, n: int = 1, seed: int = 0) -> Array:
        """Draw n targets per row from the mixture, shape (n, N) or (n, N, T)."""
        check_count("n", n)
        generator = torch.Generator().manual_seed(check_seed(seed))
        which = torch.randint(self.n_draws, (n,), generator=generator)
        values = self.likelihood.select_draws(which).sample(self.outputs[which], generator)
        if self.likelihood.kind == "classification":
            return values.numpy()
        if bool((bad := values.isnan()).any()):
            row = int(bad.nonzero()[0, 1])
            expected, remedy = "draws that are numbers", "Check the inputs, and the priors"
            fail("predictions", expected, "nan", remedy, row=row)
        return self._array(values)

    def with_index(self, index: pd.Index) -> Predictive:
        """The same predictions, with labels of the rows in data frames.

        Args:
            index: labels of the N rows, such as those of the frame that they were predicted from.

        Example:
            >>> import pandas as pd
            >>> from subbayes.likelihoods import Gaussian
            >>> predictive = Predictive(torch.tensor([[[0.0], [2.0]]]), Gaussian(noise=1.0))
            >>> predictive.with_index(pd.Index(["a", "b"])).to_frame()["mean"].to_dict()
            {'a': 0.0, 'b': 2.0}

        Raises:
            InputError: another number of labels than of rows.
        """
        named = copy.copy(self)
        named.index = index
        return named

    def to_frame(self, level: float = 0.95, threshold: float | None = None) -> pd.DataFrame:
        """A pandas data frame with one row per input: moments and interval, or probabilities.

        Rows have the index of the data frame that estimators, models of data frames and regressions
        predicted from; rows of polars and pyarrow, and of arrays, are numbered.

        For classes: the most probable one, by its name or position, its probability and that of
        each other, entropy and mutual information. For labels of `SeveralTargets`: the probability
        of each. Of tokens there is a row for each, with the
        positions of row and token as index.

        Args:
            level: probability of the interval; not used for classes.
            threshold: also say by "doubt" whether no class is more probable than this; of classes.
        """
        import pandas as pd

        if self.likelihood.kind == "classification":
            return self._class_frame(threshold)
        if getattr(self.likelihood.unweighted, "of_labels", False):
            return pd.DataFrame(columns_of_targets({"p": self.mean}), index=self.index)
        lower, upper = self.interval(level)
        mean, epistemic, aleatoric = self.mean, self.epistemic, self.aleatoric
        columns = {
            "mean": mean,
            "std": np.sqrt(epistemic + aleatoric),
            "epistemic_std": np.sqrt(epistemic),
            "aleatoric_std": np.sqrt(aleatoric),
            "lower": lower,
            "upper": upper,
        }
        return pd.DataFrame(columns_of_targets(columns), index=self.index)

    def _class_frame(self, threshold: float | None) -> pd.DataFrame:
        import pandas as pd

        p = self.probabilities
        names = range(p.shape[-1]) if self.classes is None else self.classes
        label = np.array(names, dtype=object)[self.labels]
        columns: dict[str, Array] = {"label": label}
        if threshold is not None:
            columns["doubt"] = self.decide(threshold) == -1
        columns |= {f"p[{name}]": p[..., k] for k, name in enumerate(names)}
        columns |= {"entropy": self.entropy, "mutual_information": self.mutual_information}
        index = self.index
        if label.ndim == 2:
            index = pd.MultiIndex.from_product(map(range, label.shape), names=["row", "token"])
        flat = {name: values.reshape(-1) for name, values in columns.items()}
        return pd.DataFrame(flat, index=index).infer_objects()

    def _require(self, kind: str, what: str) -> None:
        if self.likelihood.kind != kind:
            raise UndefinedError(what, f"a {kind} likelihood", repr(self.likelihood))

    def _require_ordered(self, what: str) -> None:
        if self.likelihood.kind == "classification":
            wanted, remedy = "a likelihood with an ordered target", "Use probabilities instead"
            raise UndefinedError(what, wanted, repr(self.likelihood), remedy)


def columns_of_targets(columns: dict[str, Array]) -> dict[str, Array]:
    """Columns of a table, of several targets "name[0]", "name[1]" and so on."""
    if all(values.ndim == 1 for values in columns.values()):
        return columns
    each = {name: enumerate(values.T) for name, values in columns.items()}
    return {f"{name}[{t}]": values for name, pairs in each.items() for t, values in pairs}


def normal_log_prob(z: Array, sd: Array) -> RowNumbers:
    """Log density of normal residuals z standard deviations, summed over known targets."""
    return -np.nansum(0.5 * (math.log(2 * math.pi) + z**2) + np.log(sd), -1)


def check_outputs(outputs: Outputs, likelihood: Likelihood) -> None:
    """Check outputs of a network, of which no distribution can be made if they are not finite.

    Minus infinity is allowed of logits: those classes have no probability.

    Raises:
        InputError: outputs that are NaN or infinite, or minus infinity for all classes of a row.
    """
    if is_finite(outputs):
        return
    masked = likelihood.kind == "classification"
    bad = ~(torch.isfinite(outputs) | (outputs == -math.inf) & masked)
    if bool(bad.any()):
        row = int(bad.any(2).any(0).nonzero()[0])
        fail(
            "model",
            "finite outputs of the network",
            f"{int(bad.sum())} NaN or infinite ones",
            "Check the inputs, fit with a lower learning rate, or load another file",
            row=row,
        )
    if not likelihood.per_position and bool((p := likelihood.classes(outputs)).isnan().any()):
        row = int(p.isnan().any(2).any(0).nonzero()[0])
        remedy = "Let the network mask fewer classes"
        fail("model", "an allowed class in each row", "outputs of -inf alone", remedy, row=row)

"""scikit-learn estimators of sparse Bayesian networks: which columns matter, and how surely."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Shaped
from sklearn.utils.validation import check_is_fitted

from subbayes.models.array_model import fit_sparse
from subbayes.models.estimator_base import Classifier, Estimator, Regressor
from subbayes.models.settings import TABLE_TRAINING, Perceptron, SparseSettings, TableSettings
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.table_units import export_in_table_units
from subbayes.sparse.result import SparseNetwork
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_count

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SparseClassifier", "SparseRegressor"]


class _Sparse(Estimator):
    """Fits a sparse network."""

    model_: SparseNetwork
    _defaults: ClassVar[dict[str, Any]] = {
        "network": Perceptron(),
        "sparse": SparseSettings(),
        "training": dataclasses.replace(TABLE_TRAINING, epochs=200),
    }

    def _settings(self) -> TableSettings:
        return TableSettings(likelihood=getattr(self, "likelihood", None), **self._configurations())

    def _train(
        self,
        x: Float[np.ndarray, "n d"],
        y: Shaped[np.ndarray, "n"],
        task: str,
        n_classes: int | None,
    ) -> SparseNetwork:
        check_count("draws", self.draws)
        return fit_sparse(
            x, y, task, self._settings(), n_classes=n_classes, progress=bool(self.verbose)
        )

    @property
    def _networks(self) -> int:
        return int(self.draws)

    @property
    def feature_inclusion_(self) -> pd.Series:
        """By column, the probability that the network uses it, shape (d,).

        See `SparseNetwork.feature_inclusion`.

        Raises:
            InputError: with `structure="units"`, whose columns have no indicators.
        """
        import pandas as pd

        check_is_fitted(self)
        return pd.Series(
            self.model_.feature_inclusion(), index=self._columns, name="inclusion probability"
        )

    @property
    def density_(self) -> float:
        """Share of the weights with an inclusion probability above one half."""
        check_is_fitted(self)
        return self.model_.density()

    def export(self, X: Any = None, layout: str = "auto") -> SmallNetwork:
        """The median model with the means of its weights, as a small plain module.

        Scales are folded into its layers: it takes columns in the units of X, as a float32 tensor
        (n, d). Of a regression its first output is the mean in the units of y, of counts the
        logarithm of the mean, of classes the logits.

        Args:
            X: rows to choose layouts with, as many as will be predicted at once; without them all
                layers are dense.
            layout: "dense", "csr" (compressed sparse rows), or "auto", whichever is faster.

        Returns:
            The module, the names of its inputs and outputs, and what was removed.
        """
        check_is_fitted(self)
        rows = (
            None
            if X is None
            else torch.from_numpy(self._check_X(X, fitting=False).astype(np.float32))
        )
        return export_in_table_units(
            self.model_,
            self.mean_,
            self.scale_,
            rows,
            layout,
            inputs=self._columns,
            classes=getattr(self, "classes_", ()),
        )

    @property
    def _columns(self) -> list[str]:
        names = getattr(self, "feature_names_in_", None)
        return [f"x{k}" for k in range(self.n_features_in_)] if names is None else list(names)


class SparseRegressor(_Sparse, Regressor):
    r"""A sparse Bayesian network for numbers or counts: every weight is included or excluded.

    $$ w = \gamma \odot \beta, \qquad p(y \mid x) \approx \frac{1}{S} \sum_s p(y \mid f(x;\, w_s)),
       \quad w_s \sim q $$

    Args:
        network: a `Perceptron` (hidden, activation, dropout), or a dict of what differs.
        likelihood: "gaussian" (one noise scale), "heteroscedastic" (noise that depends on x, plus a
            global variance), or "poisson" for counts.
        sparse: a `SparseSettings` (structure, posterior, slab, prior_inclusion, early_epochs), or a
            dict of what differs from the defaults.
        training: a `Training` (epochs, learning_rate, batch_size), or a dict of what differs; by
            default 200 epochs, those that learn the priors included. Inclusion probabilities have
            a larger learning rate where steps are few.
        draws: networks drawn from the posterior that predictions average.
        standardize: centre the columns of X and divide them by their standard deviation. (The
            target is always standardised inside; predictions are in its own units.)
        random_state: an integer gives the same model each time.
        verbose: show a progress bar.

    Attributes:
        model_: the `SparseNetwork`: its history, inclusion by layer, predictions in every mode.
        feature_inclusion_: by column, the probability that the network uses it: that a path of
            included weights leads from it to the output.
        density_: share of the weights with an inclusion probability above one half.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: subtracted from the columns, shape (d,).
        scale_: the columns are divided by, shape (d,).
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used, in one line.

    Source:
        Hubin and Storvik (2024), Sparse Bayesian neural networks.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 3))
        >>> model = SparseRegressor(
        ...     network={"hidden": ()}, training={"epochs": 40}, random_state=0)
        >>> model = model.fit(X, 5 * X[:, 1])
        >>> (model.feature_inclusion_ > 0.5).to_dict()
        {'x0': False, 'x1': True, 'x2': False}
    """

    def __init__(
        self,
        *,
        network: Perceptron | Mapping[str, Any] | None = None,
        likelihood: str = "gaussian",
        sparse: SparseSettings | Mapping[str, Any] | None = None,
        training: Training | Mapping[str, Any] | None = None,
        draws: int = 100,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.likelihood = likelihood
        self.sparse = sparse
        self.training = training
        self.draws = draws
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose


class SparseClassifier(_Sparse, Classifier):
    r"""A sparse Bayesian network for classes: every weight is included or excluded.

    Probabilities are averages over networks drawn from the posterior; see `SparseRegressor`.

    Args:
        network: a `Perceptron` (hidden, activation, dropout), or a dict of what differs.
        sparse: a `SparseSettings` (structure, posterior, slab, prior_inclusion, early_epochs), or a
            dict of what differs from the defaults.
        training: a `Training` (epochs, learning_rate, batch_size), or a dict of what differs; by
            default 200 epochs, those that learn the priors included. Inclusion probabilities have
            a larger learning rate where steps are few.
        draws: networks drawn from the posterior that predictions average.
        standardize: centre the columns of X and divide them by their standard deviation.
        random_state: an integer gives the same model each time.
        verbose: show a progress bar.

    Attributes:
        classes_: the labels, sorted, shape (K,).
        model_: the `SparseNetwork`: its history, inclusion by layer, predictions in every mode.
        feature_inclusion_: by column, the probability that the network uses it: that a path of
            included weights leads from it to the output.
        density_: share of the weights with an inclusion probability above one half.
        n_features_in_: number of columns of X.
        feature_names_in_: their names, if X was a DataFrame with names.
        mean_: subtracted from the columns, shape (d,).
        scale_: the columns are divided by, shape (d,).
        seed_: the seed in use.

    Raises:
        InputError: in `fit` and `predict`, data or parameters that cannot be used, in one line.

    Source:
        Hubin and Storvik (2024), Sparse Bayesian neural networks.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = SparseClassifier(
        ...     network={"hidden": ()}, training={"epochs": 150}, random_state=0)
        >>> model = model.fit(X[::2], y[::2])
        >>> model.predict_proba(X[1::2]).shape, model.score(X[1::2], y[1::2]) > 0.9
        ((75, 3), True)
    """

    def __init__(
        self,
        *,
        network: Perceptron | Mapping[str, Any] | None = None,
        sparse: SparseSettings | Mapping[str, Any] | None = None,
        training: Training | Mapping[str, Any] | None = None,
        draws: int = 100,
        standardize: bool = True,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.sparse = sparse
        self.training = training
        self.draws = draws
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose

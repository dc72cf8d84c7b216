"""Methods beside regressions of `ssr_coverage`: double machine learning, and a known network."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.model_selection import KFold

__all__ = ["known_network", "partialling_out"]


def partialling_out(
    y: Float[np.ndarray, " n"],
    treatments: Float[np.ndarray, "n d"],
    controls: Float[np.ndarray, "n c"],
    seed: int,
    folds: int = 5,
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    r"""Double machine learning of a partially linear model (Chernozhukov et al. 2018, eq. 4.4).

    $$ \hat\theta = \Bigl(\sum_i \tilde D_i \tilde D_i^\top\Bigr)^{-1} \sum_i \tilde D_i \tilde y_i
       $$

    with residuals of response and treatments from forests of extremely randomised trees of the
    other folds.

    Args:
        y: responses.
        treatments: the columns whose effects are estimated, jointly.
        controls: the columns that the forests read.
        seed: of folds and forests.
        folds: number of folds.

    Returns:
        Effects and their heteroscedasticity-robust standard errors.
    """
    both = np.column_stack([y, treatments])
    residuals = np.empty_like(both)
    for train, test in KFold(folds, shuffle=True, random_state=seed).split(controls):
        forest = ExtraTreesRegressor(100, min_samples_leaf=5, random_state=seed)
        scale = both[train].std(0)
        forest.fit(controls[train], both[train] / scale)
        residuals[test] = both[test] - forest.predict(controls[test]) * scale
    response, own = residuals[:, 0], residuals[:, 1:]
    inverse = np.linalg.inv(own.T @ own)
    effects = inverse @ own.T @ response
    scores = own * (response - own @ effects)[:, None]
    covariance = inverse @ (scores.T @ scores) @ inverse
    return effects, np.sqrt(np.diag(covariance))


def known_network(
    x: Float[np.ndarray, "n p"],
    y: Float[np.ndarray, " n"],
    f: Float[np.ndarray, " n"],
    sigma: float,
) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    r"""Effects in the population beside a network that is known, with their standard errors.

    With $f_\perp$ the part of the network that is orthogonal to the columns x, the variance is
    $(x^\top x)^{-1} x^\top (\sigma^2 I + \operatorname{diag} f_\perp^2) x (x^\top x)^{-1}$: that of
    the Bayesian bootstrap in large samples.
    """
    inverse = np.linalg.inv(x.T @ x)
    rest = f - x @ (inverse @ (x.T @ f))
    meat = x.T @ (x * (sigma**2 + rest**2)[:, None])
    return inverse @ (x.T @ y), np.sqrt(np.diag(inverse @ meat @ inverse))

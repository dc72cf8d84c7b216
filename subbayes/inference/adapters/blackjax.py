"""blackjax's NUTS (Cabezas et al. 2024), on a density with gradients, batched over chains.

The density stays where it is: JAX calls back for value and gradient of all chains at once. Chains
are vectorised by `jax.vmap`, so that each draw takes as long as the longest trajectory; in this
library's own `nuts` no chain waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from subbayes.draws import Draws
from subbayes.inference.adapters.common import Value, check_counts, check_gradient, finished, needed
from subbayes.inference.samplers.chains import start_points, streams
from subbayes.inference.samplers.hamiltonian import GradientDensity

__all__ = ["blackjax", "jax_density"]


def blackjax(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    warmup: int | None = None,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    target_acceptance: float = 0.8,
    dense: bool = False,
) -> Draws:
    """Sample a posterior by blackjax's NUTS with its window adaptation, in float64.

    Args:
        posterior: the density, with `value_and_grad`.
        draws: draws to keep per chain.
        chains: number of chains, evaluated together.
        warmup: draws per chain to adapt in and drop; by default as many as are kept, at least 200.
        seed: seed of the start points and of blackjax.
        initial: "prior", "shift" (z = 0), or start points of shape (chains, k).
        target_acceptance: mean acceptance that the step size aims at.
        dense: adapt a dense mass matrix instead of a diagonal one.

    Returns:
        Draws with stats "log_density", "energy", "divergent", "evaluations" and "acceptance".

    Raises:
        ImportError: blackjax is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density without gradients, or of minus infinity at the start points.

    Source: Cabezas, Corenflos, Lao and Louf (2024), "BlackJAX: composable Bayesian inference in
    JAX".

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> blackjax(posterior, draws=50, chains=2).z.shape  # doctest: +SKIP
        (2, 50, 2)
    """
    library, jax = needed("blackjax"), needed("jax")
    warmup = max(draws, 200) if warmup is None else warmup
    check_counts(draws=(draws, 1), chains=(chains, 1), warmup=(warmup, 1), seed=(seed, 0))
    check_gradient(posterior)
    started, value = time.perf_counter(), Value(posterior)
    start = start_points(posterior, initial, streams(seed, chains))
    value.gradient(start)
    with jax.enable_x64(True):
        density = jax_density(value.gradient)
        adaptation = library.window_adaptation(
            library.nuts,
            density,
            is_mass_matrix_diagonal=not dense,
            target_acceptance_rate=target_acceptance,
        )

        def chain(key: Any, z: Any) -> Any:
            first, second = jax.random.split(key)
            (state, settings), _ = adaptation.run(first, z, num_steps=warmup)
            kernel = library.nuts(density, **settings)

            def step(state: Any, key: Any) -> Any:
                state, info = kernel.step(key, state)
                return state, (
                    state.position,
                    state.logdensity,
                    info.energy,
                    info.is_divergent,
                    info.num_integration_steps,
                    info.acceptance_rate,
                )

            return jax.lax.scan(step, state, jax.random.split(second, draws))[1]

        keys = jax.random.split(jax.random.key(seed), chains)
        z, *noted = map(np.asarray, jax.jit(jax.vmap(chain))(keys, start))
    names = ("log_density", "energy", "divergent", "evaluations", "acceptance")
    return finished(
        "blackjax",
        z,
        dict(zip(names, noted, strict=True)),
        value,
        started,
        seed=seed,
        warmup=warmup,
    )


def jax_density(value_and_grad: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Any:
    """A function of z (k,) for JAX, differentiable, that calls back for value and gradient.

    Under `jax.vmap` the points of all chains go through one call. Needs `jax.enable_x64`.

    Args:
        value_and_grad: from points (S, k) to values (S,) and gradients (S, k).

    Raises:
        ImportError: jax is not installed.
    """
    jax = needed("jax")
    # JAX calls back from a thread of its own, in which doubles would be rounded to floats: they
    # travel as pairs of whole numbers.
    bits = jax.lax.bitcast_convert_type

    def host(pairs: Any) -> np.ndarray:
        z = _doubles(pairs)
        value, gradient = value_and_grad(z.reshape(-1, z.shape[-1]))
        both = np.concatenate([gradient, value[:, None]], 1)
        return both.view(np.uint32).reshape(*z.shape[:-1], z.shape[-1] + 1, 2)

    def both(z: Any) -> Any:
        pairs = bits(z.astype(jax.numpy.float64), jax.numpy.uint32)
        out = jax.ShapeDtypeStruct((*z.shape[:-1], z.shape[-1] + 1, 2), jax.numpy.uint32)
        found = jax.pure_callback(host, out, pairs, vmap_method="broadcast_all")
        found = bits(found, jax.numpy.float64)
        return found[..., -1], found[..., :-1]

    density = jax.custom_vjp(lambda z: both(z)[0])
    density.defvjp(both, lambda gradient, cotangent: (cotangent[..., None] * gradient,))
    return density


def _doubles(pairs: Any) -> Float[np.ndarray, "*S k"]:
    return np.array(pairs, dtype=np.uint32).view(np.float64)[..., 0]

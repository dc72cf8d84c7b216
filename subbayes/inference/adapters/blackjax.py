"""blackjax's NUTS (Cabezas et al. 2024), on a density with gradients, batched over chains.

JAX calls back for value and gradient of all chains at once. Chains are vectorised by `jax.vmap`, so
that each draw takes as long as the longest trajectory; in `subbayes.inference.NUTS` no chain waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from subbayes.diagnostics.thinning import thinned
from subbayes.draws import Draws
from subbayes.inference.adapters.common import (
    ExternalSampler,
    Value,
    adapted_draws,
    default_warmup,
    import_package,
)
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.chains import chain_generators, start_points
from subbayes.inference.samplers.hamiltonian import GradientDensity, check_gradient

__all__ = ["BlackJAX", "jax_density"]


@dataclass(frozen=True)
class BlackJAX(ExternalSampler):
    """blackjax's NUTS with its window adaptation, in float64.

    The default warm-up is as long as the draws kept, at least 200. The draws have the stats
    "log_density", "energy", "divergent", "evaluations" and "acceptance". There are no checkpoints
    and no progress bar.

    Source: Cabezas, Corenflos, Lao and Louf (2024), "BlackJAX: composable Bayesian inference in
    JAX".

    Attributes:
        target_acceptance: mean acceptance that the step size aims at.
        dense: adapt a dense mass matrix instead of a diagonal one.

    Raises:
        ImportError: blackjax is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density without gradients, or of minus infinity at the start points.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> BlackJAX().sample(posterior, draws=50, chains=2).z.shape  # doctest: +SKIP
        (2, 50, 2)
    """

    name = "blackjax"
    uses_initial: ClassVar[bool] = True
    target_acceptance: float = 0.8
    dense: bool = False

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        library, jax = import_package("blackjax"), import_package("jax")
        warmup = default_warmup(sampling, 200)
        count = sampling.draws * sampling.thin
        check_gradient(posterior)
        value = Value(posterior)
        start = start_points(
            posterior, sampling.initial, chain_generators(sampling.seed, sampling.chains)
        )
        value.gradient(start)
        with jax.enable_x64(True):
            density = jax_density(value.gradient)
            adaptation = library.window_adaptation(
                library.nuts,
                density,
                is_mass_matrix_diagonal=not self.dense,
                target_acceptance_rate=self.target_acceptance,
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

                return jax.lax.scan(step, state, jax.random.split(second, count))[1]

            keys = jax.random.split(jax.random.key(sampling.seed), sampling.chains)
            found = map(np.asarray, jax.jit(jax.vmap(chain))(keys, start))
        z, *stats = found
        names = ("log_density", "energy", "divergent", "evaluations", "acceptance")
        return adapted_draws(
            self.name,
            z[:, sampling.thin - 1 :: sampling.thin],
            thinned(dict(zip(names, stats, strict=True)), sampling.thin),
            value,
            {"seed": sampling.seed, "warmup": warmup, "thin": sampling.thin},
        )


def jax_density(value_and_grad: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Any:
    """A differentiable JAX function of z (k,) that calls back for value and gradient.

    Under `jax.vmap` all chains share one call. Needs `jax.enable_x64`.

    Args:
        value_and_grad: from points (S, k) to values (S,) and gradients (S, k).

    Raises:
        ImportError: jax is not installed.
    """
    jax = import_package("jax")
    # JAX calls back from a thread without enable_x64, which would round doubles to floats: they are
    # passed as pairs of integers.
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

"""Bambi with nutpie, and numpyro, on one case: run by an interpreter that has them installed.

`python -P regress_peers.py FRAME.csv CASE DRAWS` (-P, since modules of this folder have names of
packages); the last line is a JSON object by peer.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import numpy as np
import pandas as pd

FORMULAS = {"normal": "y ~ x0 + x1 + x2", "mixed": "y ~ x0 + x1 + (1|g)"}
FORMULAS |= {"poisson": "y ~ x0 + x1 + x2 + x3", "counts": "y ~ x0 + x1 + (1|g)"}
COUNTS = ("poisson", "counts")


def smallest_ess(draws: dict[str, np.ndarray]) -> float:
    """The smallest bulk effective sample size of (chains, draws) arrays."""
    import arviz

    return float(min(np.asarray(arviz.ess(values)).min() for values in draws.values()))


def bambi_with_nutpie(frame: pd.DataFrame, case: str, draws: int) -> dict[str, float]:
    """The whole of build, compilation and sampling, and the sampling alone."""
    import bambi
    import nutpie

    begun = time.perf_counter()
    family = "poisson" if case in COUNTS else "gaussian"
    model = bambi.Model(FORMULAS[case], frame, family=family)
    model.build()
    compiled = nutpie.compile_pymc_model(model.backend.model)
    ready = time.perf_counter()
    trace = nutpie.sample(
        compiled, draws=draws, tune=draws, chains=4, cores=1, seed=1, progress_bar=False
    )
    done = time.perf_counter()
    names = [name for name in trace.posterior if name in ("x0", "x1", "x2", "x3")]
    ess = smallest_ess({name: trace.posterior[name].values for name in names})
    return {"whole": done - begun, "sampling": done - ready, "ess": ess}


def numpyro_nuts(frame: pd.DataFrame, case: str, draws: int) -> dict[str, float]:
    """The same model in numpyro: the second run of a compiled sampler is the sampling."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    x = frame[[c for c in frame if c.startswith("x")]].to_numpy()
    x = jnp.asarray(x - x.mean(0))
    y = jnp.asarray(frame.y.to_numpy())
    groups = None if "g" not in frame else jnp.asarray(frame.g.to_numpy())
    count = 0 if groups is None else int(frame.g.max()) + 1
    scale = 1.0 if case in COUNTS else float(frame.y.std())

    start = 0.0 if case in COUNTS else float(frame.y.mean())

    def model() -> None:
        level = numpyro.sample("level", dist.Normal(start, 2.5 * scale))
        wide = 2.5 * scale / x.std(0)
        beta = numpyro.sample("beta", dist.Normal(0, wide).to_event(1))
        eta = level + x @ beta
        if groups is not None:
            tau = numpyro.sample("tau", dist.Exponential(1 / scale))
            z = numpyro.sample("z", dist.Normal(0, 1).expand([count]).to_event(1))
            eta = eta + tau * z[groups]
        if case in COUNTS:
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)
        else:
            sigma = numpyro.sample("sigma", dist.Exponential(1 / scale))
            numpyro.sample("y", dist.Normal(eta, sigma), obs=y)

    run = MCMC(
        NUTS(model), num_warmup=draws, num_samples=draws, num_chains=4,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    begun = time.perf_counter()
    run.run(jax.random.key(0))
    whole = time.perf_counter() - begun
    begun = time.perf_counter()
    run.run(jax.random.key(1))
    beta = np.asarray(run.get_samples(group_by_chain=True)["beta"])
    sampling = time.perf_counter() - begun
    ess = smallest_ess({str(j): beta[..., j] for j in range(beta.shape[-1])})
    return {"whole": whole, "sampling": sampling, "ess": ess}


def main() -> None:
    """Run both peers on a case."""
    warnings.simplefilter("ignore")
    frame, case, draws = pd.read_csv(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    found = {}
    for name, peer in (("bambi and nutpie", bambi_with_nutpie), ("numpyro", numpyro_nuts)):
        try:
            found[name] = peer(frame, case, draws)
        except ImportError as error:
            found[name] = {"missing": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""How to infer: one method per file, each returning `Draws` from a posterior."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Approximation": "variational.variational",
    "EllipticalSlice": "samplers.elliptical_slice",
    "Engine": "engine",
    "FullRankVI": "variational.variational",
    "FunctionDensity": "function_density",
    "FunctionEngine": "engine",
    "HMC": "samplers.hmc",
    "Laplace": "laplace.laplace",
    "LinearisedLaplace": "laplace.linearised_engine",
    "LinearisedPosterior": "laplace.linearised",
    "MAMS": "samplers.mams",
    "MCLMC": "samplers.mclmc",
    "MeanFieldVI": "variational.variational",
    "NUTS": "samplers.nuts",
    "ParallelTempering": "samplers.parallel_tempering",
    "RealNVP": "variational.variational",
    "SMC": "samplers.smc",
    "Sampling": "configuration",
    "SliceSampling": "samplers.slice",
    "choose_prior": "laplace.prior_choice",
    "choose_temperature": "tempering",
    "from_log_prob": "function_density",
    "linearised_laplace": "laplace.linearised",
    "sketched_lanczos": "laplace.sketched_lanczos",
    "tune_prior": "laplace.linearised",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)

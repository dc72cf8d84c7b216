"""How to infer: one method per file, each returning `Draws` from a posterior."""

from subbayes.utils.namespace import lazy

_NAMES = {
    "Approximation": "variational.variational",
    "Engine": "engine",
    "FunctionEngine": "engine",
    "LinearisedLaplace": "laplace.linearised",
    "RefreshedPosterior": "refreshed_posterior",
    "Sampling": "configuration",
    "choose_temperature": "tempering",
    "elliptical_slice": "samplers.elliptical_slice",
    "hmc": "samplers.hmc",
    "judge": "laplace.subspace_error",
    "linearised_laplace": "laplace.linearised",
    "nuts": "samplers.nuts",
    "parallel_tempering": "samplers.parallel_tempering",
    "slice_sampling": "samplers.slice",
    "smc": "samplers.smc",
    "variational_fit": "variational.variational",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)

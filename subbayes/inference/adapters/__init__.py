"""Samplers of other libraries on a `Posterior`, or on any density, with `Draws` as the result.

None of them is needed: `pip install 'subbayes[samplers]'` brings all four. A sampler of your own
needs no adapter, only `posterior.value` or `posterior.value_and_grad`.
"""

from subbayes.inference.adapters.blackjax import blackjax
from subbayes.inference.adapters.dynesty import dynesty
from subbayes.inference.adapters.emcee import emcee
from subbayes.inference.adapters.nutpie import nutpie

__all__ = ["blackjax", "dynesty", "emcee", "nutpie"]

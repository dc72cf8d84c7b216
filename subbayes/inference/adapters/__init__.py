"""Samplers of other packages as engines; `pip install 'subbayes[samplers]'` installs them.

Your own sampler needs no adapter, only `posterior.value` or `posterior.value_and_grad`.
"""

from subbayes.inference.adapters.blackjax import BlackJAX
from subbayes.inference.adapters.dynesty import Dynesty
from subbayes.inference.adapters.emcee import Emcee
from subbayes.inference.adapters.nutpie import Nutpie

__all__ = ["BlackJAX", "Dynesty", "Emcee", "Nutpie"]

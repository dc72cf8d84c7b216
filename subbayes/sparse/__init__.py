"""Sparse Bayesian networks, with inclusion probabilities and distributions of the weights."""

from subbayes.sparse.configuration import LearningRates, SparseTraining
from subbayes.sparse.convert import convert, elbo, kl, sparse_layers
from subbayes.sparse.export.csr_linear import CsrLinear
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.priors import Bernoulli, BetaBinomial, NormalSlab, SpikeSlab, StudentTSlab
from subbayes.sparse.result import SparseNetwork, revert
from subbayes.sparse.training import fit
from subbayes.sparse.variational_families import POSTERIORS

__all__ = [
    "POSTERIORS",
    "Bernoulli",
    "BetaBinomial",
    "CsrLinear",
    "SmallNetwork",
    "LearningRates",
    "NormalSlab",
    "SparseLayer",
    "SparseNetwork",
    "SparseTraining",
    "SpikeSlab",
    "StudentTSlab",
    "convert",
    "elbo",
    "export_network",
    "fit",
    "kl",
    "revert",
    "sparse_layers",
]

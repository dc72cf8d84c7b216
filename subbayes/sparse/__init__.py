"""Sparse Bayesian networks: which weights are in, with what probability, and how large they are."""

from subbayes.sparse.convert import convert, elbo, kl, sparse_layers
from subbayes.sparse.export import CsrLinear, Exported
from subbayes.sparse.factors import FACTORS
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.priors import (
    Bernoulli,
    BetaBinomial,
    NormalSlab,
    SpikeSlab,
    StudentTSlab,
)
from subbayes.sparse.result import SparseNetwork, decided, plain
from subbayes.sparse.training import Rates, fit

__all__ = [
    "FACTORS",
    "Bernoulli",
    "BetaBinomial",
    "CsrLinear",
    "Exported",
    "NormalSlab",
    "Rates",
    "SparseLayer",
    "SparseNetwork",
    "SpikeSlab",
    "StudentTSlab",
    "convert",
    "decided",
    "elbo",
    "fit",
    "kl",
    "plain",
    "sparse_layers",
]

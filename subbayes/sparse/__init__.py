"""Sparse Bayesian networks: which weights are in, with what probability, and how large they are."""

from subbayes.sparse.convert import convert, elbo, kl, sparse_layers
from subbayes.sparse.factors import FACTORS
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.priors import (
    Bernoulli,
    BetaBinomial,
    NormalSlab,
    SpikeSlab,
    StudentTSlab,
)

__all__ = [
    "FACTORS",
    "Bernoulli",
    "BetaBinomial",
    "NormalSlab",
    "SparseLayer",
    "SpikeSlab",
    "StudentTSlab",
    "convert",
    "elbo",
    "kl",
    "sparse_layers",
]

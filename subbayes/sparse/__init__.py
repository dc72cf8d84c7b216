"""Sparse Bayesian networks: which weights are in, with what probability, and how large they are."""

from subbayes.sparse.baselines import prune
from subbayes.sparse.convert import convert, elbo, kl, sparse_layers
from subbayes.sparse.export import exported
from subbayes.sparse.factors import BASELINES, FACTORS
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.priors import (
    Bernoulli,
    BetaBinomial,
    Horseshoe,
    MixtureSlab,
    NormalSlab,
    SpikeSlab,
    StudentTSlab,
)
from subbayes.sparse.rates import Rates
from subbayes.sparse.result import SparseNetwork, plain
from subbayes.sparse.saved import load, save
from subbayes.sparse.small import CsrLinear, Exported, load_exported
from subbayes.sparse.training import fit

__all__ = [
    "BASELINES",
    "FACTORS",
    "Bernoulli",
    "BetaBinomial",
    "CsrLinear",
    "Exported",
    "Horseshoe",
    "MixtureSlab",
    "NormalSlab",
    "Rates",
    "SparseLayer",
    "SparseNetwork",
    "SpikeSlab",
    "StudentTSlab",
    "convert",
    "elbo",
    "exported",
    "fit",
    "kl",
    "load",
    "load_exported",
    "plain",
    "prune",
    "save",
    "sparse_layers",
]

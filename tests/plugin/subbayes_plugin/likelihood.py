"""Errors with the double exponential distribution of Laplace."""

from __future__ import annotations

import math

import torch

from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import column


class Laplacian(Likelihood):
    """y = f + b e with e of density exp(-|e|) / 2.

    Args:
        scale: b.
    """

    kind = "regression"

    def __init__(self, scale=0.5):
        self.scale = scale

    def log_prob(self, outputs, y):
        """Log density of each row."""
        errors = (column(y, outputs) - outputs).abs().sum(-1)
        return -errors / self.scale - math.log(2 * self.scale)

    def mean(self, outputs):
        """E[y | f]."""
        return outputs

    def variance(self, outputs):
        """Var[y | f]."""
        return torch.full_like(outputs, 2 * self.scale**2)

    def sample(self, outputs, generator):
        """A target for each row."""
        u = torch.rand(outputs.shape, generator=generator, dtype=outputs.dtype) - 0.5
        return outputs - self.scale * u.sign() * torch.log1p(-2 * u.abs())

    def n_outputs(self, y):
        """One."""
        return 1

    def check_targets(self, y):
        """Any number is a target."""

    def to_config(self):
        """The name and the scale."""
        return {"name": "laplacian", "scale": self.scale}

    def __repr__(self):
        return f"Laplacian({self.scale})"

"""Largest values: the Gumbel distribution."""

from dataclasses import dataclass

from scipy import stats

from subbayes.likelihoods.families import Family, family


@family("gumbel", "extreme-value")
@dataclass(frozen=True, repr=False)
class Gumbel(Family):
    """y = mu + sigma e with P(e <= t) = exp(-exp(-t))."""

    allowed = {"mu": ("identity",), "sigma": ("log",)}

    def log_density(self, y, eta):
        """Log density of responses at the predictors."""
        z = (y - eta[0]) * (-eta[1]).exp()
        return -z - (-z).exp() - eta[1]

    def distribution(self, mu, sigma):
        """The distribution of SciPy."""
        return stats.gumbel_r(mu, sigma)

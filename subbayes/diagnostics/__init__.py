r"""Did the chains mix, how much are they worth, and what would leaving a point out have done.

See `convergence` for the former two and `leave_one_out` for the latter.
"""

from subbayes.diagnostics.convergence import (
    average_ranks,
    ebfmi,
    ess_bulk,
    ess_mean,
    ess_tail,
    mcse_mean,
    rhat,
    separate_groups,
)
from subbayes.diagnostics.leave_one_out import Comparison, LooResult, compare, loo, psis, sum_se

__all__ = [
    "Comparison",
    "LooResult",
    "average_ranks",
    "compare",
    "ebfmi",
    "ess_bulk",
    "ess_mean",
    "ess_tail",
    "loo",
    "mcse_mean",
    "psis",
    "rhat",
    "separate_groups",
    "sum_se",
]

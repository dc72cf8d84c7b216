"""Convergence of chains, and scores and calibration of predictions."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "AdaptiveConformal": "conformal",
    "CalibrationCurve": "calibration",
    "Conformal": "conformal",
    "CoverageTest": "coverage",
    "LooComparison": "loo_comparison",
    "LooResult": "leave_one_out",
    "MonteCarloError": "monte_carlo",
    "Update": "surprise",
    "ChainPredictions": "function_space",
    "calibration_curve": "calibration",
    "chain_predictions": "function_space",
    "compare": "loo_comparison",
    "ebfmi": "convergence",
    "ess_bulk": "convergence",
    "ess_mean": "convergence",
    "ess_tail": "convergence",
    "detection_scores": "detection",
    "loo": "leave_one_out",
    "mcse_mean": "convergence",
    "monte_carlo_error": "monte_carlo",
    "out_of_distribution": "detection",
    "psis": "leave_one_out",
    "rhat": "convergence",
    "score": "metrics",
    "separate_groups": "convergence",
    "stacking_weights": "loo_comparison",
    "sum_se": "leave_one_out",
    "uncertainties": "detection",
    "wilson_interval": "calibration",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES, ("metrics",))

"""Fitted models, estimators, models of arrays and data frames, and comparisons of methods."""

"""The design matrix of a formula, its predictors and the priors of its effects."""

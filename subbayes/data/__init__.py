"""Observations in batches, data sets, and tables encoded as numbers."""

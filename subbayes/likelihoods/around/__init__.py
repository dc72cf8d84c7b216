"""Families around other ones: censored, truncated, mixtures, and with more or fewer zeros."""

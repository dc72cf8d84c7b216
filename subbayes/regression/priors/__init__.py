"""Priors of effects, one kind per file."""

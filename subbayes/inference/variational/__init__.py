"""Variational inference in z."""

"""Laplace approximations: in z, and linearised over weights."""

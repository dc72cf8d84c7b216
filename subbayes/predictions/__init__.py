"""Predictive distributions: mixtures over draws, and Gaussians in closed form."""

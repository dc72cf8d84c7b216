"""Logarithms of tail probabilities, their inverse, and sums and integrals between bounds."""

"""Markov chain and sequential Monte Carlo samplers, one method per file."""

"""Posteriors of effects: likelihoods, modes, proposals and closed forms."""

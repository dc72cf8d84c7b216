"""Training of networks, of many networks at once, and of curves."""

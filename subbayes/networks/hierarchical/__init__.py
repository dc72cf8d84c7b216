"""Perceptrons whose prior has scales of its own, and features of their inputs."""

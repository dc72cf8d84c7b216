"""A small size of the experiment on image classifiers."""

from experiments.laplace_images import Plan

TINY = Plan(
    channels=2,
    train=24,
    epochs=2,
    curvature=12,
    held_out=4,
    inputs=5,
    ranks=(2, 20),
    large=(60,),
    corrupted=3,
    corrupted_ranks=(2,),
    path_epochs=2,
)
KINDS = ("fog", "shear")
"""Corruptions."""

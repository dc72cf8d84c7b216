"""The effects of the training rows from the draws of a fitted model, for tests of estimands."""

from dataclasses import replace

from subbayes import SemiStructuredRegression
from subbayes.semistructured.joint_posterior import JointState


def in_sample(model):
    """The same draws as effects of the training rows."""
    state = model.state
    specification = replace(state.model.specification, effects="sample")
    other = SemiStructuredRegression.__new__(SemiStructuredRegression)
    joint = replace(state.joint, model=replace(state.model, specification=specification))
    other.specification, other._state = specification, JointState(joint, state.draws)
    return other

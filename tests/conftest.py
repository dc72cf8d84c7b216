"""The same examples in every run: hypothesis draws from a fixed seed and has no clock."""

from hypothesis import settings

settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("fixed")

"""A package of another author, whose classes subbayes finds by its entry points."""

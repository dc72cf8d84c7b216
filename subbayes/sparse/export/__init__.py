"""The small network that a sparse one becomes, and its file formats."""

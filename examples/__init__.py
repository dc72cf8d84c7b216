"""Programs that use the library; none of them is part of it."""

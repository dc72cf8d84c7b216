"""How to infer: one method per file, each returning `Draws` from a posterior."""

"""Ways to choose a subspace, one file a method; each returns a `subbayes.Subspace`."""

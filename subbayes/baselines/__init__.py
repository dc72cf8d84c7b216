"""What subspace inference is compared with, one file a method; all return a `Predictive`."""

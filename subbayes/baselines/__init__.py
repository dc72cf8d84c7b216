"""Methods that subspace inference is compared with, one file each; all return a `Predictive`."""

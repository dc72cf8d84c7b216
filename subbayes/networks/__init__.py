"""Networks as functions of a weight vector."""

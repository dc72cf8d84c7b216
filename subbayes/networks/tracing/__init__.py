"""Functions of weights and batches: vectorised over chains, traced once and replayed."""

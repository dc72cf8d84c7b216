"""What is asked of a fitted model: hypotheses, averages over rows, checks, comparison."""

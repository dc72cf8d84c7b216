"""Terms of formulas that are evaluated here and not by formulaic, one kind per file."""

"""Terms of formulas, one kind per file, and the columns and priors that they have."""

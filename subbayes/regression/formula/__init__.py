"""The grammar of formulas: names, columns, factors, responses."""

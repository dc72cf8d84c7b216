"""Damaged and forged artifacts of every kind; `python -m fuzz --help` (`make fuzz`)."""

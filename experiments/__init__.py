"""The papers' tables, run again: `python -m experiments NAME [--json]`."""

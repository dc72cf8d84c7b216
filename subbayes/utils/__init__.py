"""Helpers that every room uses: checks, types, seeds, progress, files and artifacts."""

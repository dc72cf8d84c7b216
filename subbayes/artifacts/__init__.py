"""Saved models and checkpoints: a folder with a JSON manifest and a safetensors file."""

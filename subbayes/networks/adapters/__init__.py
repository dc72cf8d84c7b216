"""Adapters of a fine-tuned module (LoRA and others)."""

"""What a module is, beside its weights."""

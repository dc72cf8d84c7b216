"""Networks whose weights FSDP2 divides among processes."""

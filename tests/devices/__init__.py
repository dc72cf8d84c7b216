"""Every method on another device than the CPU."""

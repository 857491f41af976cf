"""Torch references: what each op means, on any device, and the fallback where nothing is built."""

"""Lint rules of our own, for what no other tool checks."""

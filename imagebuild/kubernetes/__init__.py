"""Manifests for a cluster of machines, from the same profiles that compose starts."""

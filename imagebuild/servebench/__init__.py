"""Measures a running OpenAI-compatible server from outside. Knows nothing of images and patches."""

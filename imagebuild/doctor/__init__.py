"""Looks at a host before an image is started on it, with the entry point's own preflight."""

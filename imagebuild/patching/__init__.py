"""The patch engine: claims about upstream files, checked and applied. Standard library only (3.11+).

It runs inside the base image, so nothing here imports a dependency or the patched packages.
"""

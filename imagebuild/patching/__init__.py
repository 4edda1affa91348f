"""The patch engine: claims about upstream files, checked and applied. Standard library only.

It runs inside the base image on Python 3.11 or newer, so nothing here imports a dependency or the
patched packages.
"""

"""What the Dockerfile's stages run, with the base's own Python and its standard library only.

A step changes the image that it runs in; it fetches nothing.
"""

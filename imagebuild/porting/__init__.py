"""Moves edits and whole files to another release: three-way merges, cut into anchors again.

Nothing here decides between two sides: what does not merge is shown with both of them.
"""

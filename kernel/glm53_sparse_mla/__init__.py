"""Sparse MLA for sm_120 and sm_121 inside vLLM: a C library, its binding, and the plug-in.

Importing the package loads nothing: no torch, no vLLM, no library. `register` holds what vLLM's
plug-in loader calls.
"""

from __future__ import annotations

__version__ = "0.1.0"

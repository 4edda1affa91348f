"""Checks a patched site-packages against recipe, series and lock. Standard library only.

It runs inside the base with the base's own Python, changes nothing, and takes nobody's word: every
hash, effect and version is computed or read again.
"""

from imagebuild.verify.core import verify
from imagebuild.verify.report import Group, VerifyReport

__all__ = ["Group", "VerifyReport", "verify"]

#!/usr/bin/env python3
"""Checks the kernel and FlashKDA on the GPU of this machine: `python3 kernel/check.py [--quick]`.

The same as `python -m glm53_sparse_mla.check` where the package is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from glm53_sparse_mla.check.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

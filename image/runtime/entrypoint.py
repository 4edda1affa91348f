#!/usr/bin/env python3
"""The container's entry point; `serving.cli` has what it does.

The package and what goes with it are beside this file in the repository and below /opt/glm53 in the
image, where this file alone stands at the root.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here if (here / "serving").is_dir() else Path("/opt/glm53")))
    from serving.cli import main

    sys.exit(main(sys.argv[1:]))

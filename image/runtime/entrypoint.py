#!/usr/bin/env python3
"""The container's entry point; `serving.cli` has what it does.

The package and what goes with it are beside this file in the repository and below /opt/glm53 in the
image, where this file alone stands at the root.
"""

import os
import signal
import sys
from pathlib import Path


def _end(_number: int, _frame: object) -> None:
    """Ends a start of which nothing has been started; as PID 1 it would not end by itself."""
    is_start = os.environ.get("GLM_DEPLOYMENT") and sys.argv[1:2] not in (
        ["plan"], ["health"], ["knobs"],
    )  # fmt: skip
    os._exit(0 if is_start else 130)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # until `serving.main` takes them
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here if (here / "serving").is_dir() else Path("/opt/glm53")))
    from serving.cli import main

    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Starts `vllm serve` with the container's arguments, in its own place, so that signals reach it.

It must not decide anything: no defaults, no checks.
"""

import os
import sys

if __name__ == "__main__":
    os.execvp("vllm", ["vllm", "serve", *sys.argv[1:]])  # noqa: S606

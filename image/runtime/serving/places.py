"""Where things are in the image. The package stands in this folder, beside what it imports."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL_PARSERS = {"glm47_failclosed": ROOT / "glm47_failclosed.py"}
# Our CUDA library, whose bytes are part of the fingerprint.
KERNEL = Path("/usr/local/lib/glm53/libglm53_kernel.so")
# What the build wrote about the patched tree, beside vLLM's package.
MANIFEST = Path(".imagebuild") / "manifest.json"
TEMPLATE = "chat_template.jinja"
RING_GRAPH = "nccl-ring.xml"
# Addresses that bind to all interfaces and cannot be asked.
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104

"""A manifest that agrees with the tree, but not with the series: verify must not take its word."""

from __future__ import annotations

import bz2
import importlib.util
import json
import marshal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imagebuild.patching.manifest import MANIFEST, original_path, sha256
from tests.support import verify_site as site
from tests.support.verify_site import problems, text


def forge(root: Path, path: str, data: bytes) -> None:
    """Writes a file, and lets manifest and originals say that it belongs there."""
    target = root / path
    content: dict[str, Any] = json.loads((root / MANIFEST).read_bytes())
    known = content["files"].get(path)
    before = known["before"] if known else None
    if known is None and target.exists():
        old = target.read_bytes()
        before = sha256(old)
        original_path(root, before).write_bytes(bz2.compress(old))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)
    entry = {"before": before, "after": sha256(data), "mode": 0o644, "patches": []}
    content["files"][path] = (known or entry) | {"after": sha256(data)}
    (root / MANIFEST).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("path", "data"),
    [
        pytest.param("vllm/envs.py", b"import os\n", id="a file of the wheel"),
        pytest.param("vllm/extra.py", b"import os\n", id="a file of nobody"),
        pytest.param("elsewhere.pth", b"import os\n", id="a file beside the packages"),
    ],
)
def test_a_file_that_only_the_manifest_vouches_for(
    make: Callable[..., site.Place], path: str, data: bytes
) -> None:
    place = make(lambda root: (root / "vllm/envs.py").touch())
    forge(place.root, path, data)
    report = place.verify()
    assert "file-not-of-series" in problems(report)
    assert f"{path}: the manifest lists it, but no patch of the series changes it" in text(report)


def test_a_record_that_the_series_does_not_make(make: Callable[..., site.Place]) -> None:
    place = make()
    record = next(place.root.glob("vllm-*.dist-info/RECORD"))
    path = record.relative_to(place.root).as_posix()
    forge(place.root, path, record.read_bytes() + b"vllm/extra.py,,\n")
    (place.root / "vllm/extra.py").write_text("import os\n")
    report = place.verify()
    assert problems(report) == {"not-from-series"}
    assert f"{path}: the manifest says another RECORD than what the series makes" in text(report)


def byte_code(place: site.Place, code: str) -> bytes:
    """Byte code of `code` under a head that names the patched source."""
    known = importlib.util.source_hash((place.root / "vllm/greeter.py").read_bytes())
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + known
    return head + marshal.dumps(compile(code, "greeter.py", "exec", dont_inherit=True))


def test_byte_code_of_something_else(make: Callable[..., site.Place]) -> None:
    place = make()
    path = importlib.util.cache_from_source("vllm/greeter.py")
    forge(place.root, path, byte_code(place, "import os"))
    assert problems(place.verify()) == {"stale-bytecode"}
    forge(place.root, path, byte_code(place, (place.root / "vllm/greeter.py").read_text()))
    assert problems(place.verify()) == set()

"""A key, a token or a template in what is none: a sentence at once, and not all of the memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from serving import preflight, smallfile, status
from serving.errors import CheckError
from serving.resolve import resolve
from serving.template import edited


def test_exactly_as_much_as_is_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert smallfile.read(tmp_path / "file", 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes"):
        smallfile.read(tmp_path / "file", 9)


@pytest.mark.parametrize("place", ["/dev/zero", "pipe"])
def test_what_has_no_end_or_no_writer(tmp_path, place):
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / place)
    plan = resolve({"GLM_DEPLOYMENT": "rtx6000-4x", "GLM_API_KEY_FILE": path,
                    "GLM_CHAT_TEMPLATE_FILE": path})  # fmt: skip
    with pytest.raises(CheckError, match=r"more than 4096 bytes|expected one key"):
        preflight.api_key(plan)
    with pytest.raises(CheckError, match=r"more than 4194304 bytes|template is empty"):
        edited(plan)
    with pytest.raises((OSError, ValueError), match=r"more than 4096 bytes|expected a token"):
        status.read_token(Path(path))

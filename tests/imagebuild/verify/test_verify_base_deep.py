"""verify-base.py --deep: probes in the base's own Python, without stubs, on its own packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.imagebuild.verify.test_verify_base import Base, make_base
from tests.support.site import picture

ENGINE = ("__init__.py", "base.py", "child.py", "record.py", "run.py")
HELD = """
import sys
from imagebuild.deep.base import About, tree
ABOUT = About(claim="it runs where it will serve", imports=("tiny_base",))
def probe():
    import tiny_base
    stubbed = [f for f in sys.meta_path if "imagebuild" in type(f).__module__]
    return f"{sys.executable} {tiny_base.WORD} {stubbed} {sys.pycache_prefix}"
"""


@pytest.fixture
def base(tmp_path: Path) -> Base:
    import sys

    made = make_base(tmp_path, sys.executable)
    folder = made.script.parent / "imagebuild" / "deep"
    for file in folder.iterdir():
        if file.is_file() and file.name not in ENGINE:
            file.unlink()
    (folder / "held.py").write_text(HELD)
    (made.root / "tiny_base.py").write_text("WORD = 'real'\n")
    return made


def test_a_probe_runs_in_the_bases_python_and_leaves_no_trace(base: Base) -> None:
    before = picture(base.root)
    done = base.run("--deep")
    assert f"  held: ok: {base.python} real [] None\n" in done.stdout
    assert "  deep probes, now: 1 of 1 hold ok\n" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture(base.root) == before


def test_nothing_is_run_unless_it_is_asked_for(base: Base) -> None:
    (base.script.parent / "imagebuild" / "deep" / "held.py").write_text("def probe():\n    0 / 0\n")
    assert base.run().returncode == 0
    done = base.run("--deep")
    assert done.returncode == 3
    assert "held (the base): failed: ZeroDivisionError" in done.stdout


def test_a_folder_of_another_python_is_refused(base: Base, tmp_path: Path) -> None:
    other = tmp_path / "other"
    base.root.rename(other)
    done = base.run("--deep", "--root", str(other))
    assert done.returncode == 2
    assert "--deep" in done.stderr
    assert "Traceback" not in done.stderr

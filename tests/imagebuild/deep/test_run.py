"""The runner on a small tree with probes that pass, fail, die, hang and make noise."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.deep import run as deep
from imagebuild.deep.base import About
from imagebuild.deep.run import Outcome, Probe, Where
from tests.support.site import picture

HERE = Where(Path(sys.executable), stubs=False)
MODULES = {
    "passes": "def probe():\n    import tiny\n    return f'tiny says\\n  {tiny.WORD}'\n",
    "fails": (
        "from imagebuild.deep.base import require\n"
        "def probe():\n    require(1 > 2, 'one is not over two')\n"
    ),
    "errs": "def probe():\n    return {}['absent']\n",
    "aborts": "import os\ndef probe():\n    print('so far so good', flush=True)\n    os.abort()\n",
    "leaves": "import os\ndef probe():\n    os._exit(0)\n",
    "exits": "import sys\ndef probe():\n    sys.exit('enough')\n",
    "hangs": (
        "import subprocess, sys, time\n"
        "from imagebuild.deep.base import About\n"
        "ABOUT = About(claim='never', seconds=2)\n"
        "def probe():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    open('/proc/self/cwd/../child', 'w').write(str(child.pid))\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(600)\n"
    ),
    "shouts": (
        "import os\n"
        "def probe():\n"
        "    for handle in (1, 2):\n"
        "        os.write(handle, bytes(range(256)) * 4000)\n"
        "    return 'heard'\n"
    ),
    "returns_nothing": "def probe():\n    pass\n",
    "imports_from_elsewhere": (
        "from imagebuild.deep.base import About\n"
        "ABOUT = About(claim='json is of the tree', imports=('json',))\n"
        "def probe():\n    return 'fine'\n"
    ),
    "imports_missing": (
        "from imagebuild.deep.base import About\n"
        "ABOUT = About(claim='it is there', imports=('tiny.absent',))\n"
        "def probe():\n    return 'fine'\n"
    ),
    "looks_around": (
        "import os, sys\n"
        "def probe():\n"
        "    kept = [n for n in os.environ if n.startswith(('VLLM_U', 'GLM_', 'PYTHON'))]\n"
        "    open('made-here', 'w').close()\n"
        "    return f'{sys.path[0]} {kept} {os.environ[\"HOME\"] == os.getcwd()} {os.getpid()}'\n"
    ),
    "no_probe": "VALUE = 3\n",
}
TREE = {"tiny/__init__.py": "WORD = 'here'\n", "tiny/other.py": ""}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with the package `toyprobes` in it, which the runner finds there too."""
    folder = tmp_path / "tree"
    files = TREE | {f"toyprobes/{name}.py": text for name, text in MODULES.items()}
    files["toyprobes/__init__.py"] = ""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in [name for name in sys.modules if name.startswith("toyprobes")]:
        del sys.modules[name]


def found(root: Path) -> dict[str, Probe]:
    return {probe.name: probe for probe in deep.probes(importlib.import_module("toyprobes"))}


@pytest.fixture
def outcome(root: Path) -> Callable[[str], Outcome]:
    """Runs one probe of the toy package."""

    def run(name: str) -> Outcome:
        (one,) = deep.run(root, [found(root)[name]], HERE)
        return one

    return run


def test_probes_are_the_modules_with_a_probe_by_name(root: Path) -> None:
    probes = found(root)
    assert list(probes) == sorted(set(MODULES) - {"no_probe"})
    assert probes["hangs"].about == About(claim="never", seconds=2)
    assert len({probe.digest for probe in probes.values()}) == len(probes)


@pytest.mark.parametrize(
    ("name", "result", "evidence"),
    [
        ("passes", "ok", "tiny says here"),
        ("fails", "failed", "one is not over two"),
        ("errs", "failed", "KeyError: 'absent' (errs.py:2"),
        ("aborts", "crashed", "the process ended with signal 6; it said: so far so good"),
        ("leaves", "crashed", "the process ended with exit code 0"),
        ("exits", "crashed", "the process ended with exit code 1; it said: enough"),
        ("shouts", "ok", "heard"),
        ("returns_nothing", "failed", "the probe returned None, expected a sentence"),
        ("imports_from_elsewhere", "failed", "json came from "),
        ("imports_missing", "failed", "tiny.absent does not import: ModuleNotFoundError: "),
    ],
)
def test_what_one_probe_does_is_its_result(
    outcome: Callable[[str], Outcome], name: str, result: str, evidence: str
) -> None:
    one = outcome(name)
    assert (one.result, one.evidence[: len(evidence)]) == (result, evidence)
    assert one.is_bad == (result != "ok")


def test_a_hanging_probe_is_ended_with_all_that_it_started(
    outcome: Callable[[str], Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(deep.tempfile, "TemporaryDirectory", lambda **_named: _Kept(kept))
    start = time.monotonic()
    one = outcome("hangs")
    assert time.monotonic() - start < 60
    assert one.result == "timeout"
    assert one.evidence == "no answer within 2 s; it said: waiting"
    assert _is_gone(int((kept / "child").read_text()))


class _Kept:
    """A temporary folder that a test can still look into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> str:
        return str(self.folder)

    def __exit__(self, *_exception: object) -> None:
        """Leaves it there."""


def _is_gone(pid: int) -> bool:
    for _attempt in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_one_bad_probe_costs_no_other_its_result_or_its_place(root: Path) -> None:
    probes = found(root)
    names = ["aborts", "passes", "fails", "hangs", "shouts", "passes"]
    outcomes = deep.run(root, [probes[name] for name in names[:5]], HERE)
    assert [one.probe.name for one in outcomes] == names[:5]
    assert [one.result for one in outcomes] == ["crashed", "ok", "failed", "timeout", "ok"]


def test_the_tree_is_first_on_the_path_and_the_callers_settings_are_not_taken(
    outcome: Callable[[str], Outcome], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_USE_IT", "GLM_MLA_ROUTE", "PYTHONPATH"):
        monkeypatch.setenv(name, "sm90")
    before = picture(root)
    text = outcome("looks_around").evidence
    assert text.startswith(f"{root} [] True ")
    assert picture(root) == before, "a probe's byte code or file landed in the tree"
    assert not Path("made-here").exists()
    assert int(text.split()[-1]) != os.getpid()


@pytest.mark.parametrize("cached_code", [True, False])
def test_no_byte_code_gets_into_the_tree(root: Path, *, cached_code: bool) -> None:
    before = picture(root)
    where = Where(HERE.python, stubs=False, cached_code=cached_code)
    (one,) = deep.run(root, [found(root)["passes"]], where)
    assert one.result == "ok"
    assert picture(root) == before


def test_a_python_that_is_not_there_is_an_error_of_the_run(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        deep.run(root, [found(root)["passes"]], Where(root / "absent"))


def test_a_probe_is_left_out_by_release_and_by_series(root: Path) -> None:
    about = About(claim="x", patches=("a", "b"), versions=">=0.31,<0.33")
    probe = Probe("x", "x", about)
    assert deep.why_skipped(probe, "0.32.0", ["b"]) == ""
    assert deep.why_skipped(probe, "0.33.0", ["b"]) == "it is for vLLM >=0.31,<0.33"
    assert deep.why_skipped(probe, "0.32.0", ["c"]) == "a, b is not in this series"
    assert deep.why_skipped(Probe("x", "x", About(claim="x")), "0.32.0", []) == ""
    (one,) = deep.run(root, [found(root)["aborts"]], HERE, lambda _probe: "not for this one")
    assert (one.result, one.evidence, one.is_bad) == ("skipped", "not for this one", False)

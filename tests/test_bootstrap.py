"""build.py's first, second, simultaneous, interrupted and hopeless calls, in a small copy of it.

The copy has a one-package requirements file; the package is a wheel made here, so no index is
asked. Where only the order of events matters, a stand-in for uv takes the place of the installer.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from imagebuild import bootstrap, uvconf

ROOT = bootstrap.ROOT
COPIED = [
    "build.py",
    "imagebuild/__init__.py",
    "imagebuild/bootstrap.py",
    "imagebuild/errors.py",
    "imagebuild/uvconf.py",
    "imagebuild/venvs.py",
]
CLI = """
import json, sys
def main(argv):
    import tiny
    print(json.dumps({"argv": argv, "prefix": sys.prefix, "tiny": tiny.VERSION}))
    return 7
"""
# Stands in for uv: makes a real venv without pip, and unpacks the wheel that is asked for.
FAKE_UV = """#!{python}
import os, pathlib, subprocess, sys, time, zipfile
log = pathlib.Path(__file__).with_name("uv.log")
with log.open("a") as file:
    file.write(" ".join(sys.argv[1:3]) + " " + os.environ.get("UV_DEFAULT_INDEX", "-") + "\\n")
if sys.argv[1] == "venv":
    base = sys.argv[sys.argv.index("--python") + 1]
    sys.exit(subprocess.call([base, "-m", "venv", "--without-pip", sys.argv[-1]]))
time.sleep(float(os.environ.get("FAKE_UV_SECONDS", "0")))
venv = pathlib.Path(sys.argv[sys.argv.index("--python") + 1]).parent.parent
version = pathlib.Path(sys.argv[-1]).read_text().split("==")[1].split()[0]
wheel = next(pathlib.Path({wheels!r}).glob(f"tiny-{{version}}-*"))
zipfile.ZipFile(wheel).extractall(next(venv.glob("lib/python3*/site-packages")))
"""


@dataclass
class Checkout:
    """A small copy of the project, and the environment to call it in."""

    root: Path
    wheels: Path
    env: dict[str, str]

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def require(self, version: str, sha256: str | None = None) -> None:
        wheel = _wheel(self.wheels, version)
        sha256 = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
        text = f"tiny=={version} --hash=sha256:{sha256}\n"
        (self.root / "requirements.txt").write_text(text)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(self.root / "build.py"), *arguments]

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd="/",
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("x"),
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def use_fake_uv(self, text: str = FAKE_UV) -> Path:
        """Puts the stand-in first on PATH; returns the log of its calls."""
        folder = self.root.parent / "fakebin"
        folder.mkdir()
        tool = folder / "uv"
        tool.write_text(text.format(python=sys.executable, wheels=str(self.wheels)))
        tool.chmod(0o755)
        self.env["PATH"] = f"{folder}{os.pathsep}{self.env['PATH']}"
        return folder / "uv.log"


def _wheel(folder: Path, version: str) -> Path:
    path = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root, wheels, home = (tmp_path / name for name in ("checkout", "wheels", "home"))
    for folder in (root / "imagebuild", wheels, home):
        folder.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(ROOT / name, root / name)
    (root / "imagebuild" / "cli.py").write_text(CLI)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV"))}
    env["HOME"] = str(home)
    env["PATH"] = _path_without_uv(tmp_path)
    # os.devnull: none of the machine's own pip files, which the tests could not foresee.
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
    made = Checkout(root, wheels, env)
    made.require("1.0")
    return made


@pytest.fixture
def quick(checkout: Checkout) -> Checkout:
    """A checkout whose installer is the stand-in."""
    checkout.use_fake_uv()
    del checkout.env["PIP_NO_INDEX"]
    return checkout


def _path_without_uv(tmp_path: Path) -> str:
    """PATH with the programs that matter and no uv of the machine's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "sh"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    (folder / "apt-get").write_text("#!/bin/sh\nexit 0\n")
    (folder / "apt-get").chmod(0o755)
    return str(folder)


def _log(checkout: Checkout) -> list[str]:
    path = checkout.root.parent / "fakebin" / "uv.log"
    return path.read_text().splitlines() if path.exists() else []


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)


def test_first_call_installs_by_hash_and_hands_over(checkout: Checkout) -> None:
    first = checkout.call("plan", "--format", "json")
    assert first.returncode == 7, first.stderr
    assert json.loads(first.stdout) == {
        "argv": ["plan", "--format", "json"],
        "prefix": str(checkout.venv),
        "tiny": "1.0",
    }
    assert first.stderr.startswith("preparing .venv (first call) ...\n")
    assert "--require-hashes" in first.stderr

    second = checkout.call("plan")
    assert (second.returncode, second.stderr) == (7, "")


def test_the_venvs_own_python_may_start_it_too(quick: Checkout) -> None:
    quick.call()
    command = [str(quick.venv / "bin" / "python"), str(quick.root / "build.py"), "a"]
    done = subprocess.run(command, env=quick.env, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["argv"] == ["a"]
    quick.require("2.0")
    done = subprocess.run(command, env=quick.env, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["tiny"] == "2.0"


@pytest.mark.parametrize("setting", ["PYTHONSAFEPATH", "PYTHONOPTIMIZE"])
def test_it_starts_whatever_python_is_told_to_leave_out(quick: Checkout, setting: str) -> None:
    done = quick.call("plan", **{setting: "2"})
    assert json.loads(done.stdout)["argv"] == ["plan"], done.stderr


def test_two_first_calls_at_once_make_one_venv(quick: Checkout) -> None:
    calls = [quick.start(FAKE_UV_SECONDS="1") for _ in range(3)]
    outputs = [call.communicate(timeout=60) for call in calls]
    assert [call.returncode for call in calls] == [7, 7, 7]
    assert [json.loads(out)["tiny"] for out, _ in outputs] == ["1.0"] * 3
    assert [line.split()[0] for line in _log(quick)] == ["venv", "pip"]
    assert sum("preparing" in err for _, err in outputs) == 1


@pytest.mark.parametrize("whole_group", [False, True], ids=["only-build.py", "installer-too"])
def test_killed_call_is_made_good_by_the_next(quick: Checkout, whole_group: bool) -> None:
    with quick.start(FAKE_UV_SECONDS="1.5") as call:
        _wait(lambda: len(_log(quick)) == 2, "the installer to run")
        if whole_group:
            os.killpg(call.pid, signal.SIGKILL)
        else:
            call.kill()
        assert call.wait() == -signal.SIGKILL
        assert quick.venv.exists()
        assert not (quick.venv / ".stamp").exists()
        again = quick.call("x")
    assert again.returncode == 7, again.stderr
    assert "preparing .venv (requirements.txt is not all installed)" in again.stderr
    # An installer that outlives its parent is waited for, not worked against.
    assert ("waiting for another call" in again.stderr) is not whole_group
    assert json.loads(again.stdout)["tiny"] == "1.0"


def test_interrupt_leaves_nothing_and_says_130(quick: Checkout) -> None:
    with quick.start(FAKE_UV_SECONDS="30") as call:
        _wait(lambda: len(_log(quick)) == 2, "the installer to run")
        os.killpg(call.pid, signal.SIGINT)
        assert call.wait(timeout=30) == 130
    assert not quick.venv.exists()


def test_stamp_goes_before_what_it_vouches_for(quick: Checkout) -> None:
    # A kill while the old venv is removed, and then the old requirements again.
    quick.call()
    quick.require("2.0")
    (quick.root.parent / "fakebin" / "uv").write_text("#!/bin/sh\nkill -9 $PPID\nsleep 1\n")
    assert quick.call().returncode == -signal.SIGKILL
    assert not (quick.venv / ".stamp").exists()


def _damage_dangling(checkout: Checkout) -> None:
    python = checkout.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")


def _damage_other_python(checkout: Checkout) -> None:
    # What an upgraded distribution does: the link stays, what it leads to has another name.
    python = checkout.venv / "bin" / "python"
    copy = checkout.root.parent / "python9.9"
    copy.write_text("#!/bin/sh\nexit 0\n")
    copy.chmod(0o755)
    python.unlink()
    python.symlink_to(copy)


def _damage_config(checkout: Checkout) -> None:
    (checkout.venv / "pyvenv.cfg").unlink()


def _damage_stamp(checkout: Checkout) -> None:
    (checkout.venv / ".stamp").write_text("")


def _damage_all(checkout: Checkout) -> None:
    shutil.rmtree(checkout.venv)
    checkout.venv.symlink_to("/nonexistent/venv")


def _damage_file(checkout: Checkout) -> None:
    shutil.rmtree(checkout.venv)
    checkout.venv.write_text("no folder")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_damage_dangling, "its Python is gone"),
        (_damage_config, "its Python is gone"),
        (_damage_other_python, "its Python changed"),
        (_damage_stamp, "its stamp is damaged"),
        (_damage_all, "first call"),
        (_damage_file, "its Python is gone"),
        (lambda checkout: checkout.require("2.0"), "requirements.txt changed"),
    ],
)
def test_broken_or_old_venv_is_made_anew(
    quick: Checkout, damage: Callable[[Checkout], None], why: str
) -> None:
    quick.call()
    damage(quick)
    done = quick.call()
    assert done.returncode == 7, done.stderr
    assert f"preparing .venv ({why}) ...\n" in done.stderr
    wanted = (quick.root / "requirements.txt").read_text().split("==")[1].split()[0]
    assert json.loads(done.stdout)["tiny"] == wanted
    assert quick.call().stderr == ""


def test_moved_checkout_is_made_anew(quick: Checkout) -> None:
    quick.call()
    quick.root = quick.root.rename(quick.root.parent / "elsewhere")
    done = quick.call()
    assert "preparing .venv (the folder moved)" in done.stderr
    assert json.loads(done.stdout)["prefix"] == str(quick.venv)


def _hide_modules(checkout: Checkout, *names: str) -> None:
    folder = checkout.root.parent / "hidden"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    checkout.env["PYTHONPATH"] = str(folder)


def test_bare_debian_gets_the_exact_command(checkout: Checkout) -> None:
    _hide_modules(checkout, "ensurepip", "pip")
    done = checkout.call()
    assert done.returncode == 5
    assert "expected ensurepip, pip or uv, to make .venv with, found none of them" in done.stderr
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert done.stderr.endswith(f"hint: {sudo}apt-get install -y python{version}-venv\n")
    assert done.stdout == ""
    assert not checkout.venv.exists()


def test_without_ensurepip_uv_is_enough(quick: Checkout) -> None:
    _hide_modules(quick, "ensurepip", "pip")
    assert quick.call().returncode == 7


def test_failing_uv_gives_way_to_pip(checkout: Checkout) -> None:
    checkout.use_fake_uv("#!/bin/sh\necho 'error: unexpected argument' >&2\nexit 2\n")
    del checkout.env["PIP_NO_INDEX"]
    done = checkout.call()
    assert done.returncode == 7, done.stderr
    assert "unexpected argument; trying another way" in done.stderr


def test_no_index_is_one_sentence_that_names_pips_setting(checkout: Checkout) -> None:
    del checkout.env["PIP_NO_INDEX"], checkout.env["PIP_FIND_LINKS"]
    # Port 9 of this machine: nothing listens there.
    address = "http://someone:secret@127.0.0.1:9/simple"
    done = checkout.call(PIP_INDEX_URL=address, PIP_RETRIES="1", PIP_TIMEOUT="2")
    assert done.returncode == 5
    assert "Connection refused" in done.stderr
    assert "PIP_INDEX_URL" in done.stderr.splitlines()[-1]
    assert "secret" not in done.stderr
    assert done.stdout == ""
    assert not checkout.venv.exists()


def test_wrong_hash_is_an_integrity_error(checkout: Checkout) -> None:
    checkout.require("1.0", sha256="0" * 64)
    done = checkout.call()
    assert done.returncode == 4
    assert "0" * 64 in done.stderr
    assert not checkout.venv.exists()


def test_folder_that_cannot_be_written(quick: Checkout) -> None:
    (quick.root / ".venv.lock").mkdir()
    done = quick.call()
    assert done.returncode == 5
    assert "expected to be able to write it" in done.stderr
    assert "Traceback" not in done.stderr


def test_test_tools_are_added_and_follow_their_own_file(quick: Checkout) -> None:
    quick.call()
    tools = quick.root / "requirements-test.txt"
    shutil.copy(quick.root / "requirements.txt", tools)
    command = [sys.executable, "-m", "imagebuild.bootstrap"]

    def prepare() -> str:
        done = subprocess.run(
            command, cwd=quick.root, env=quick.env, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert "requirements-test.txt is not all installed" in prepare()
    assert prepare() == ""
    tools.write_text(tools.read_text() + "# edited\n")
    assert "requirements-test.txt changed" in prepare()
    assert quick.call().stderr == ""


def test_old_python_gets_a_sentence() -> None:
    code = (
        "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0); sys.version = '3.9.2 (x)';"
        f"runpy.run_path({str(ROOT / 'build.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "expected 3.11 or newer, found 3.9.2" in done.stderr
    assert "Traceback" not in done.stderr


def test_build_py_has_no_syntax_that_an_old_python_refuses() -> None:
    tree = ast.parse((ROOT / "build.py").read_text())
    modern = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Match, ast.arg)
    assert [node for node in ast.walk(tree) if isinstance(node, modern)] == []
    check = next(at for at, node in enumerate(tree.body) if isinstance(node, ast.If))
    before = [node for node in tree.body[:check] if not isinstance(node, ast.Expr)]
    assert [ast.unparse(node) for node in before] == ["import sys"]


def test_build_py_can_be_executed() -> None:
    assert (ROOT / "build.py").stat().st_mode & stat.S_IXUSR
    assert (ROOT / "build.py").read_text().startswith("#!/usr/bin/env python3\n")


def test_complete_venv_imports_nothing_slow() -> None:
    code = "import imagebuild.bootstrap, sys; print(*sys.modules)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    slow = {"argparse", "dataclasses", "inspect", "subprocess", "shutil", "imagebuild.venvs"}
    assert slow & set(done.stdout.split()) == set()


# --- what is handed to uv ---


def _pip_conf(home: Path, text: str) -> None:
    folder = home / ".config" / "pip"
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(text)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which pip has no system-wide file."""
    monkeypatch.setattr(uvconf, "SYSTEM_FILE", tmp_path / "none")
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}


def test_uv_gets_pips_indexes_and_certificates(nowhere: dict[str, str], tmp_path: Path) -> None:
    _pip_conf(
        tmp_path,
        "[global]\nindex-url = https://a.invalid/simple\ntimeout = 60\ncert = /ca.pem\n"
        "[install]\nfind-links =\n  /one\n  /two\nextra_index_url = https://b.invalid/simple\n"
        "[download]\nno-deps = true\n",
    )
    found = uvconf.uv_environment(nowhere)
    assert found is not None
    assert found["UV_DEFAULT_INDEX"] == "https://a.invalid/simple"
    assert found["UV_INDEX"] == "https://b.invalid/simple"
    assert found["UV_FIND_LINKS"] == "/one,/two"
    assert (found["SSL_CERT_FILE"], found["UV_HTTP_TIMEOUT"]) == ("/ca.pem", "60")

    stronger = nowhere | {"PIP_INDEX_URL": "https://c.invalid", "UV_INDEX": "https://mine.invalid"}
    found = uvconf.uv_environment(stronger)
    assert found is not None
    assert found["UV_DEFAULT_INDEX"] == "https://c.invalid"
    assert "UV_INDEX" not in found


@pytest.mark.parametrize("text", ["[global]\nclient-cert = /x\n", "no section = 1\n", "\xff"])
def test_uv_is_left_out_where_it_cannot_follow_pip(
    nowhere: dict[str, str], tmp_path: Path, text: str
) -> None:
    _pip_conf(tmp_path, "")
    (tmp_path / ".config" / "pip" / "pip.conf").write_bytes(text.encode("latin-1"))
    assert uvconf.uv_environment(nowhere) is None


def test_no_password_on_an_echoed_command(quick: Checkout) -> None:
    done = quick.call(PIP_INDEX_URL="https://someone:secret@host.invalid/simple")
    assert done.returncode == 7
    assert "secret" not in done.stderr
    assert any("secret" in line for line in _log(quick))


# --- the requirement files ---


def _asked(name: str) -> Iterator[Requirement]:
    for line in (ROOT / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text and not text.startswith("-"):
            yield Requirement(text)


def _pinned(name: str) -> dict[str, list[str]]:
    """Name -> pins of a requirements file; every entry must be one pin and hashes."""
    pins: dict[str, list[str]] = {}
    text = re.sub(r"#.*", "", (ROOT / name).read_text()).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        requirement, *hashes = re.split(r"\s+--hash=", line)
        parsed = Requirement(requirement)
        assert re.fullmatch(r"==[^,*]+", str(parsed.specifier)), line
        assert hashes, f"{name}: {requirement} has no hash"
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", found) for found in hashes), line
        pins.setdefault(canonicalize_name(parsed.name), []).append(str(parsed.specifier))
    return pins


@pytest.mark.parametrize("name", ["requirements", "requirements-test"])
def test_requirements_are_pinned_by_hash(name: str) -> None:
    pins = _pinned(f"{name}.txt")
    for asked in _asked(f"{name}.in"):
        found = pins.get(canonicalize_name(asked.name))
        assert found, f"{name}.txt lacks {asked.name}: run the command in its head"
        for pin in found:
            assert asked.specifier.contains(pin.removeprefix("=="), prereleases=True)


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-test.txt"])
def test_requirements_name_no_index_and_no_machine(name: str) -> None:
    assert re.findall(r"://|--index|--find-links|(?<![\w.-])/\w+", (ROOT / name).read_text()) == []


def test_both_requirement_files_agree() -> None:
    runtime, tests = _pinned("requirements.txt"), _pinned("requirements-test.txt")
    both = runtime.keys() & tests.keys()
    assert {name: runtime[name] for name in both} == {name: tests[name] for name in both}


def test_an_interrupt_before_the_command_line_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "ensure", lambda *_: False)
    monkeypatch.setattr(bootstrap, "VENV", Path(sys.prefix))
    monkeypatch.setattr("imagebuild.cli.main", interrupted)
    assert bootstrap.main(["plan"]) == 130

"""The README's commands run as they stand, in a fresh clone with an empty HOME.

A command's comment may name another exit code than 0 ("# exits 1 when ..."). Left out is only the
test command, which would call itself. Needs the package index; the session's cache serves wheels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagebuild.sources.cache import default_root

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/design.md", "CHANGELOG.md"]
TEST_COMMAND = "./build.py test"
# Made by the commands, or by the first call.
MADE = ("dist/", ".venv", ".imagebuild/", "~")


def commands(text: str) -> list[tuple[str, int]]:
    """Every command of the ```sh blocks with its expected exit code, in order."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command, _, comment = (part.strip() for part in line.partition(" #"))
            if command and not command.startswith("#"):
                code = re.search(r"\bexits (\d+)\b", comment)
                found.append((command, int(code[1]) if code else 0))
    return found


def _git(*arguments: str) -> str:
    # safe.directory: CI may run as another user than the one who cloned.
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("readme") / "clone"
    _git("clone", "--quiet", "--no-local", str(ROOT), str(folder))
    yield folder
    shutil.rmtree(folder)  # some gigabytes, which pytest would keep for three sessions


def _environment(home: Path) -> dict[str, str]:
    """The session's, with an empty HOME and what pip is told handed on."""
    environment = dict(os.environ)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VIRTUAL_ENV", "PYTHONPATH"):
        environment.pop(name, None)
    environment["HOME"] = str(home)
    # pip asks rustc for its version, and a rustup shim of that name makes a folder of its own.
    environment.setdefault("RUSTUP_HOME", str(Path.home() / ".rustup"))
    environment["IMAGEBUILD_CACHE"] = str(default_root())
    pip = [sys.executable, "-m", "pip", "cache", "dir"]
    cache = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    if cache:
        environment.setdefault("PIP_CACHE_DIR", cache)
        environment.setdefault("UV_CACHE_DIR", str(Path(cache).with_name("uv")))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pip" / "pip.conf"
    for path in (config, Path.home() / ".pip" / "pip.conf"):
        if path.is_file():
            environment.setdefault("PIP_CONFIG_FILE", str(path))
    netrc = Path.home() / ".netrc"
    if netrc.is_file():
        environment.setdefault("NETRC", str(netrc))
    return environment


@pytest.mark.network
def test_every_command_of_the_readme_runs_in_a_fresh_clone(clone: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    wanted = commands((clone / "README.md").read_text())
    assert TEST_COMMAND in [command for command, _ in wanted]
    for command, code in wanted:
        if command == TEST_COMMAND:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"$ {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == code, f"expected exit {code}, found {done.returncode}\n{said}"
        assert "Traceback" not in done.stderr, said
    assert _git("-C", str(clone), "status", "--porcelain") == "", "a command changed the checkout"
    assert [path.name for path in tmp_path.iterdir()] == [], "a command wrote to HOME"


@pytest.mark.parametrize("page", PAGES)
def test_paths_named_by_the_documents_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    tops = {path.name for path in ROOT.iterdir()}
    named = set(re.findall(r"`([\w.][\w./-]*)`", text)) | set(re.findall(r"\]\(([^)#:]+)\)", text))
    for name in sorted(named):
        looks_like_path = "/" in name or name in tops or re.search(r"\.(py|md|toml)$", name)
        if not looks_like_path or name.startswith(MADE):
            continue
        places = [ROOT / name, (ROOT / page).parent / name, ROOT / "image" / "glm53-flash" / name]
        assert any(place.exists() for place in places), f"{page} names {name}, which does not exist"


def test_links_inside_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_readme_and_errors_have_the_same_exit_codes() -> None:
    from imagebuild import errors

    section = (ROOT / "README.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    ours = {kind.exit_code for kind in kinds if issubclass(kind, errors.BuildError)}
    assert told == ours | {0, 130}


def test_every_shell_command_stands_in_a_sh_block() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^```(?!sh$|$).*$", text, flags=re.MULTILINE) == []
    assert text.count("```sh\n") * 2 == len(re.findall(r"^```", text, flags=re.MULTILINE))


def test_commands_are_read_with_their_exit_codes() -> None:
    text = "```sh\na --b \\\n  c\n# only a comment\nd  # exits 1 when a person must look\n```\n"
    assert commands(text) == [("a --b    c", 0), ("d", 1)]

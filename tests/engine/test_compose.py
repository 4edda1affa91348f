"""`docker compose config` of every deployment with every set of overrides; it needs no engine."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.images import ROOT

COMPOSE = ROOT / "compose"
FILES = sorted(COMPOSE.glob("*.yaml"))
OVERRIDES = sorted((COMPOSE / "overrides").glob("*.yaml"))
REQUIRED = re.compile(r"\$\{(\w+):\?([^}]+)\}")


def required(files: tuple[Path, ...]) -> dict[str, str]:
    """Each variable that must be set, and the sentence that asks for it."""
    return dict(REQUIRED.findall("".join(file.read_text() for file in files)))


def config(
    folder: Path, files: tuple[Path, ...], environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--project-directory", str(folder)]
    for file in files:
        command += ["--file", str(file)]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ}
    return subprocess.run([*command, "config"], capture_output=True, text=True, env=env,
                          check=False)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def client() -> None:
    """The compose client."""
    if (
        shutil.which("docker")
        and not subprocess.run(
            ["docker", "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        return
    if os.environ.get("REQUIRE_ENGINE") == "1":
        pytest.fail("REQUIRE_ENGINE=1: no docker compose; as root on Debian: .ci/engine")
    pytest.skip("not run: no docker compose; as root on Debian: .ci/engine")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_combination_is_clean(file: Path, tmp_path: Path) -> None:
    """No error, no warning, and nothing of one file lost under another."""
    chosen = [(file, *some) for count in range(len(OVERRIDES) + 1)
              for some in itertools.combinations(OVERRIDES, count)]  # fmt: skip
    assert len(chosen) == 2 ** len(OVERRIDES) >= 32

    def one(files: tuple[Path, ...]) -> None:
        names = [each.stem for each in files]
        environ = {name: f"/srv/{name.lower()}" for name in required(files)}
        done = config(tmp_path, files, environ)
        assert (done.returncode, done.stderr) == (0, ""), names
        service: dict[str, Any] = yaml.safe_load(done.stdout)["services"]["glm53"]
        said = done.stdout
        assert all(value in said for value in environ.values()), names
        assert service["environment"]["GLM_DEPLOYMENT"] == file.stem
        assert service["environment"].get("GLM_TP") == ("RING4" if "ring" in names else None)
        assert service["network_mode"] == service["ipc"] == "host"
        targets = [volume["target"] for volume in service["volumes"]]
        assert len(targets) == len(set(targets)), names
        # A knob that nobody has set must not arrive as an empty one with a meaning.
        assert all(service["environment"][name] is None
                   for name in ("GLM_MAX_MODEL_LEN", "GLM_EXTRA_ARGS"))  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, chosen))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_missing_variable_says_its_sentence(file: Path, tmp_path: Path) -> None:
    files = (file, *OVERRIDES)
    needed = required(files)
    assert {"IMAGE", "MODEL_HOST_DIR", "DRAFTER_HOST_DIR"} < set(needed)
    for missing, sentence in needed.items():
        environ = {name: f"/srv/{name.lower()}" for name in needed if name != missing}
        done = config(tmp_path, files, environ)
        assert done.returncode != 0
        assert missing in done.stderr and sentence in done.stderr, done.stderr


def test_values_come_through_as_they_were_written(tmp_path: Path) -> None:
    """From .env: JSON keeps its quotes, `$` stays a dollar, and unknown names arrive, too."""
    (tmp_path / ".env").write_text(
        "IMAGE=glm:1\nMODEL_HOST_DIR=/srv/m\n"
        'GLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 2}\'\n'
        "GLM_EXTRA_ARGS='--a $b'\nGLM_TOOL_PARSR=x\n"
    )
    done = config(tmp_path, (COMPOSE / "gb10-2x.yaml",), {})
    assert (done.returncode, done.stderr) == (0, "")
    environment = yaml.safe_load(done.stdout)["services"]["glm53"]["environment"]
    assert environment["GLM_SPECULATIVE_CONFIG"] == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert environment["GLM_TOOL_PARSR"] == "x"
    # `config` writes $$ for a dollar that is meant.
    assert environment["GLM_EXTRA_ARGS"].replace("$$", "$") == "--a $b"

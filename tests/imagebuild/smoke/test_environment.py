"""The environment in small: made once, found again, by two at once, after a kill, and removed.

It is made for real, by pip from a loopback index; torch and the one package are a few lines long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.bootstrap import ROOT
from imagebuild.console import Console
from imagebuild.errors import EngineError, IntegrityError
from imagebuild.smoke import environment
from imagebuild.smoke.environment import Environment
from imagebuild.smoke.torchbuild import Interpreter
from imagebuild.sources.cache import Cache
from tests.support.smokes import CUDA, Place

OWN = Interpreter(
    (sys.version_info[0], sys.version_info[1]), getattr(sys, "_base_executable", sys.executable)
)
# What `provide` does in another process; the requirements follow as its argument.
PROVIDE = """
import sys
from pathlib import Path
from imagebuild.console import Console
from imagebuild.smoke import environment
from imagebuild.smoke.torchbuild import Interpreter
from tests.support.smokes import Place
environment.interpreters = lambda: [Interpreter({version}, {path!r})]
place = Place(Path(sys.argv[1]), None, Path(sys.argv[2]))
with place.session() as upstream:
    made = environment.provide(place.requirements, "2.13.0", [], upstream, Console())
print(made.folder, flush=True)
"""


@pytest.fixture(autouse=True)
def _own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "interpreters", lambda: [OWN])


def provide(place: Place, wanted: str = "2.13.0", *, offline: bool = False) -> Environment:
    with place.session(offline=offline) as upstream:
        return environment.provide(place.requirements, wanted, [wanted], upstream, Console())


def start(place: Place) -> subprocess.Popen[str]:
    code = PROVIDE.format(version=OWN.version, path=OWN.path)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(place.folder), str(place.requirements)],
        cwd=ROOT, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def imported(made: Environment) -> str:
    code = "import tiny, torch; print(tiny.WORD, torch.__version__)"
    done = subprocess.run([made.python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_is_made_once_found_again_without_the_index_and_removed(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.torch("2.13.0", CUDA)
    wheel = place.torch("2.13.0+cpu")
    made = provide(place)
    told = capsys.readouterr().err
    assert told.index("torch 2.13.0+cpu (0 MB, to download)") < told.index("preparing ")
    assert f"GB in {made.folder}" in told
    assert "vLLM pins torch" not in told
    assert imported(made) == "here 2.13.0"
    assert (made.torch, made.torch_file) == ("2.13.0+cpu", wheel.name)
    assert made.python_version == OWN.text
    names = {path.name for path in environment.root().iterdir()}
    beside = {made.folder.name + end for end in ("", ".json", ".lock", ".torch.txt")}
    assert names == beside, "the fetched wheel is kept twice"

    asked = len(place.server.asked)
    assert provide(place, offline=True) == made
    assert len(place.server.asked) == asked
    assert capsys.readouterr().err == ""

    Cache(limit_bytes=0).prune()
    assert imported(made) == "here 2.13.0", "pruning the cache took a part of the environment"

    with made.held():
        assert environment.remove() == environment.Removed(0, 0, 1)
    assert environment.usage()[0] == 1
    removed = environment.remove()
    assert (removed.environments, removed.in_use) == (1, 0)
    assert removed.bytes > 1_000_000
    assert not made.folder.exists()
    assert environment.environments(place.requirements) == []


def test_offline_without_one_says_what_to_do_and_makes_nothing(place: Place) -> None:
    place.torch("2.13.0+cpu")
    with pytest.raises(EngineError) as caught:
        provide(place, offline=True)
    assert caught.value.exit_code == 5
    assert "--offline" in str(caught.value.hint)
    assert environment.usage() == (0, 0)


def test_offline_with_the_index_known_but_no_environment_is_the_same(place: Place) -> None:
    place.torch("2.13.0+cpu")
    with place.session() as upstream:
        environment.choose(upstream, "2.13.0", [], [OWN])
    with pytest.raises(EngineError, match="expected a smoke environment for torch"):
        provide(place, offline=True)


def test_an_index_that_cannot_be_reached_is_not_taken_for_one_without_torch(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(EngineError) as caught:
        provide(place)
    assert caught.value.exit_code == 5
    assert "extra-index-url" not in str(caught.value.hint)


def test_another_version_is_announced(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.torch("2.13.1+cpu")
    made = provide(place)
    told = capsys.readouterr().err
    assert "vLLM pins torch 2.13.0, of which pip offers no build without CUDA; 2.13.1+cpu" in told
    assert provide(place) == made, "it is made anew for the same wheel"
    assert "preparing" not in capsys.readouterr().err


def test_two_first_calls_make_one(place: Place) -> None:
    place.torch("2.13.0+cpu")
    both = [start(place), start(place)]
    said = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] != ""
    assert sum(" -m venv " in err for _out, err in said) == 1, said
    (made,) = environment.environments(place.requirements)
    assert imported(made) == "here 2.13.0"


@pytest.mark.parametrize("moment", ["bin/python", ".stamp"])
def test_a_kill_leaves_nothing_that_looks_whole(place: Place, moment: str) -> None:
    place.torch("2.13.0+cpu")
    process = start(place)
    _wait_for(lambda: any(environment.root().glob(f"py*/{moment}")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert environment.environments(place.requirements) == []
    assert environment.usage()[0] == 1, "it was killed too late to show anything"
    made = provide(place)
    assert imported(made) == "here 2.13.0"


def _wait_for(is_there: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _attempt in range(2400):
        if is_there():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_changed_requirements_another_build_and_a_damaged_note_are_another_environment(
    place: Place,
) -> None:
    place.torch("2.13.0+cpu")
    made = provide(place)
    about = made.folder.with_name(made.folder.name + ".json")
    text = about.read_text()
    for broken in ("", text[:40], json.dumps({"torch": "2.13.0+cpu"})):
        about.write_text(broken)
        assert environment.environments(place.requirements) == []
    about.write_text(text)
    assert environment.environments(place.requirements) == [made]
    other = place.folder / "other.txt"
    other.write_text(place.requirements.read_text() + "# another\n")
    assert environment.environments(other) == []
    made.python.unlink()
    assert environment.environments(place.requirements) == []


def test_a_package_that_is_not_the_locked_one_is_an_integrity_error(place: Place) -> None:
    place.torch("2.13.0+cpu")
    place.requirements.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(IntegrityError) as caught:
        provide(place)
    assert caught.value.exit_code == 4
    assert environment.environments(place.requirements) == []


def test_a_full_disk_is_said_before_anything_is_fetched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.torch("2.13.0+cpu")
    monkeypatch.setattr(environment, "free_bytes", lambda _folder: 10_000_000)
    with pytest.raises(EngineError, match=r"found 0\.0 GB free"):
        provide(place)
    assert environment.usage() == (0, 0)


def test_the_pythons_that_are_offered_are_those_of_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(environment, "version_of", lambda _path: "3.14")
    monkeypatch.setattr(environment, "find_interpreter",
                        lambda version: None if version == "3.12" else f"/py{version}")  # fmt: skip
    assert environment.interpreters() == [
        Interpreter((3, 11), "/py3.11"), Interpreter((3, 13), "/py3.13")
    ]  # fmt: skip
    monkeypatch.setattr(environment, "version_of", lambda _path: "3.13")
    assert [one.text for one in environment.interpreters()] == ["3.13", "3.11"]


def test_a_folder_of_another_kind_is_not_counted_and_not_removed(place: Place) -> None:
    for name in ("py3.11-torch2.13.0", "notes", "py3.11-torch2.13.0-0123456789ab.wheel"):
        (environment.root() / name).mkdir(parents=True)
    assert environment.usage() == (0, 0)
    assert environment.remove() == environment.Removed(0, 0, 0)
    assert len(list(Path(environment.root()).iterdir())) == 3

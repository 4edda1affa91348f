"""Shipping between doubles of docker and ssh, which keep each engine's images in a folder.

The doubles stand for engines on other machines; tests/engine ships between two real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.engines import ship as shipping
from imagebuild.engines.ship import Image, address
from imagebuild.errors import UsageError

# An engine is a folder with NAME (what `save` gives), NAME.json (what `inspect` gives), and knobs.
DOCKER = """#!{python}
import json, os, pathlib, shutil, sys, time
words = sys.argv[1:]
host = "here"
if words[:1] == ["--host"]:
    host, words = words[1].partition("://")[2].replace("/", "_"), words[2:]
engine = pathlib.Path(os.environ["ENGINES"], host)
with open(os.environ["ENGINES"] + "/calls", "a") as calls:
    calls.write(json.dumps([host, *words]) + "\\n")
if not engine.is_dir():
    sys.exit("error during connect: no route to " + host)
if (engine / "fails").exists():
    sys.exit((engine / "fails").read_text())
if words[:2] == ["image", "inspect"]:
    found = engine / (words[-1].replace("/", "_") + ".json")
    if not found.exists():
        sys.exit("Error response from daemon: No such image: " + words[-1])
    print(found.read_text())
elif words[0] == "info":
    print("/var/lib/docker")
elif words[0] == "save":
    data = (engine / words[1]).read_bytes()
    if (engine / "save-breaks").exists():
        sys.stdout.buffer.write(data[:1000])
        sys.exit("Error response from daemon: unexpected EOF")
    sys.stdout.buffer.write(data)
elif words[0] == "load":
    if (engine / "load-hangs").exists():
        (engine / "pid.tmp").write_text(str(os.getpid()))
        (engine / "pid.tmp").rename(engine / "pid")
        time.sleep(60)
    if (engine / "load-breaks").exists():
        sys.exit("Error response from daemon: no space left on device")
    data = sys.stdin.buffer.read()
    (engine / "raw").write_bytes(data)
    if data[:4] == b"\\x28\\xb5\\x2f\\xfd":
        sys.path[:0] = {path!r}
        from backports import zstd
        data = zstd.decompress(data)
    document = (engine / "other").read_text() if (engine / "other").exists() else data.decode()
    (engine / "image:1.json").write_text(document.splitlines()[0])
"""
SSH = """#!{python}
import os, pathlib, sys
host = next(word for word in sys.argv[1:] if word.startswith("box"))
free = pathlib.Path(os.environ["ENGINES"], host, "free")
print("Avail\\n" + (free.read_text() if free.exists() else "99999999999999"))
"""


class Engines:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def image(self, host: str, identity: str, layers: tuple[str, ...] = ("l1",)) -> None:
        engine = self.folder / host
        engine.mkdir(exist_ok=True)
        document = {"Id": identity, "RootFS": {"Layers": list(layers)}, "Size": 3_000_000}
        (engine / "image:1.json").write_text(json.dumps(document))
        (engine / "image:1").write_text(json.dumps(document) + "\n" + "x" * 3_000_000)

    def add(self, host: str, **files: str) -> None:
        (self.folder / host).mkdir()
        for name, text in files.items():
            (self.folder / host / name.replace("_", "-")).write_text(text)

    def calls(self, host: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [call[1] for call in map(json.loads, lines) if call[0] == host]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"docker": DOCKER, "ssh": SSH}.items():
        script = programs / name
        paths = text.replace("{python}", sys.executable).replace("{path!r}", repr(sys.path))
        script.write_text(paths)
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ENGINES", str(tmp_path / "engines"))
    (tmp_path / "engines").mkdir()
    made = Engines(tmp_path / "engines")
    made.image("here", "sha256:aaa")
    return made


def ship(*words: str) -> int:
    return main(["ship", *words, "--image", "image:1", "--format", "json"])


def test_two_hosts_and_one_that_has_it(engines: Engines, capfd) -> None:
    engines.add("box2")
    engines.image("box3", "sha256:aaa")
    assert ship("box2", "box3") == 0
    out, err = capfd.readouterr()
    two, three = sorted(json.loads(out)["hosts"], key=lambda each: each["host"])
    assert (two["was_there"], two["id"]) == (False, "sha256:aaa") and two["sent"] > 3_000_000
    assert (three["was_there"], three["sent"]) == (True, 0)
    assert "load" not in engines.calls("box3")
    assert "docker save image:1 '|'" in err


def test_compressed(engines: Engines, capfd) -> None:
    engines.add("box2")
    assert ship("box2", "--compress") == 0
    assert json.loads(capfd.readouterr().out)["hosts"][0]["sent"] < 30_000
    assert (engines.folder / "box2/raw").read_bytes()[:4] == b"\x28\xb5\x2f\xfd"


def test_another_kind_of_store_is_no_other_image(engines: Engines) -> None:
    document = {"Id": "sha256:config", "RootFS": {"Layers": ["l1"]}, "Size": 1}
    engines.add("box2", other=json.dumps(document))
    assert ship("box2") == 0


def test_what_arrives_is_compared(engines: Engines, capfd) -> None:
    document = {"Id": "sha256:old", "RootFS": {"Layers": ["l0"]}, "Size": 1}
    engines.add("box2", other=json.dumps(document))
    assert ship("box2") == 3
    [host] = json.loads(capfd.readouterr().out)["hosts"]
    assert "expected image:1 with the id sha256:aaa, found sha256:old" in host["error"]


def test_space_is_asked_before_a_byte_is_sent(engines: Engines, capfd) -> None:
    engines.add("box2", free="6000000")
    engines.add("box3", free="7000000")
    assert ship("box2", "box3") == 5
    told = {each["host"]: each.get("error") for each in json.loads(capfd.readouterr().out)["hosts"]}
    assert "box2:/var/lib/docker: expected 0.0 GB" in told["box2"] and told["box3"] is None
    assert "load" not in engines.calls("box2")


@pytest.mark.parametrize(("host", "fault", "found"), [
    ("box2", "load-breaks", "no space left on device"), ("here", "save-breaks", "unexpected EOF"),
])  # fmt: skip
def test_a_stream_that_breaks(engines: Engines, capfd, host: str, fault: str, found: str) -> None:
    engines.add("box2")
    (engines.folder / host / fault).touch()
    assert ship("box2") == 5
    assert found in json.loads(capfd.readouterr().out)["hosts"][0]["error"]


def test_a_host_that_is_not_there_keeps_nobody_from_it(engines: Engines, capfd) -> None:
    engines.add("box3")
    assert ship("box2", "box3") == 5
    told = {each["host"]: each for each in json.loads(capfd.readouterr().out)["hosts"]}
    assert "no route to box2" in told["box2"]["error"]
    assert "ssh box2 docker version" in told["box2"]["hint"]
    assert told["box3"]["id"] == "sha256:aaa"


def test_no_such_image_here(engines: Engines, capfd) -> None:
    (engines.folder / "here/image:1.json").unlink()
    engines.add("box2")
    assert ship("box2") == 2
    assert "expected an image of this machine's engine" in capfd.readouterr().out


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "", "box2;rm"])
def test_malformed_hosts(engines: Engines, host: str) -> None:
    with pytest.raises(UsageError, match="expected a host"):
        address(host)


@pytest.mark.parametrize("host", [
    "ssh://-oProxyCommand=x", "ssh://", "ssh://box2:x", "ssh://[::1", "file:///etc/passwd", "x://y",
])  # fmt: skip
def test_malformed_addresses(host: str) -> None:
    with pytest.raises(UsageError, match="expected an engine's address"):
        address(host)


@pytest.mark.parametrize("image", ["--output=/tmp/x", "-", "a b", "a\nb"])
def test_malformed_images(engines: Engines, capfd, image: str) -> None:
    engines.add("box2")
    assert main(["ship", "box2", f"--image={image}", "--format", "json"]) == 2
    assert not (engines.folder / "calls").exists()


@pytest.mark.parametrize("said", ["dial unix /run/x.sock: connect: no such file or directory",
                                  "lookup here: no such host"])  # fmt: skip
def test_no_engine_is_not_no_image(engines: Engines, capfd, said: str) -> None:
    engines.add("box2")
    (engines.folder / "here" / "fails").write_text(said)
    assert ship("box2") == 5
    assert said in json.loads(capfd.readouterr().out)["hosts"][0]["error"]


def test_an_engine_that_says_nothing_of_use(engines: Engines, capfd) -> None:
    engines.add("box2")
    (engines.folder / "here/image:1.json").write_text("Welcome to box1!")
    assert ship("box2") == 5
    assert "found 'Welcome to box1!" in json.loads(capfd.readouterr().out)["hosts"][0]["error"]


@pytest.mark.parametrize(("where", "name", "port"), [
    ("ssh://[fd00::2]:22", "fd00::2", "22"), ("ssh://me@box2", "me@box2", ""),
])  # fmt: skip
def test_space_is_asked_of_the_right_machine(monkeypatch, where: str, name: str, port: str) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "Avail\n7\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert shipping._free(where, "/var/lib/my docker") == 7
    [command] = asked
    assert command[command.index("--") + 1] == name and command[-1] == "'/var/lib/my docker'"
    assert (command[command.index("-p") + 1] if port else "") == port


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_both_sides_at_once(engines: Engines, number: int) -> None:
    """The signal goes to us alone, as `kill` sends it; no second host is begun."""
    for host in ("box2", "box3"):
        engines.add(host, load_hangs="")
    program = "import sys; from imagebuild.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["ship", "box2", "box3", "--image", "image:1", "--jobs", "1"]
    pid = engines.folder / "box2" / "pid"
    with subprocess.Popen([sys.executable, "-c", program, *words], stderr=subprocess.PIPE,
                          stdout=subprocess.DEVNULL, text=True) as ours:  # fmt: skip
        while not pid.exists():
            assert ours.poll() is None
            time.sleep(0.02)
        ours.send_signal(number)
        _, err = ours.communicate(timeout=30)
    assert ours.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert not Path("/proc", pid.read_text()).exists()
    assert not (engines.folder / "box3" / "pid").exists()


def test_addresses() -> None:
    assert address("me@box2:2222") == "ssh://me@box2:2222"
    assert address("unix:///run/other.sock") == "unix:///run/other.sock"
    assert not Image("a", (), 1).is_same(Image("b", (), 1))

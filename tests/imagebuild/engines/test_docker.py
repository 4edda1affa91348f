"""The Docker client, with a docker that answers as told: what is missing gets a sentence."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from imagebuild.engines import docker as module
from imagebuild.engines.docker import GIB, BaseImage, Builder, Call, Docker
from imagebuild.errors import EngineError, UsageError

DIGEST = "sha256:" + "a" * 64
GOOD = {
    "version": [0, '{"Version": "26.1.5"}', ""],
    "buildx version": [0, "buildx 0.13.1", ""],
    "buildx inspect": [0, "Name:   default\nDriver: docker\n\nNodes:\nName: default\n"
                       "Platforms:        linux/amd64*, linux/amd64/v2\n", ""],
    "info --format {{json .DriverStatus}}": [0, '[["t","io.containerd.snapshotter.v1"]]', ""],
    "info --format {{.DockerRootDir}}": [0, "/", ""],
    "image inspect": [1, "[]", "No such image"],
    "buildx imagetools": [1, "", "ERROR: registry.invalid: no such host"],
}  # fmt: skip
SCRIPT = """\
#!{python}
import json, sys
words = " ".join(sys.argv[1:])
for start, (code, out, err) in json.load(open({answers!r})).items():
    if words.startswith(start):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
sys.exit("not expected: " + words)
"""

Answers = dict[str, list[Any]]


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Docker]:
    """A client whose docker answers what is given, and as a good one otherwise."""

    def make(changed: Answers | None = None, **more: Any) -> Docker:
        answers = tmp_path / "answers.json"
        answers.write_text(json.dumps({**(changed or {}), **GOOD, **(changed or {})}))
        program = tmp_path / "docker"
        program.write_text(SCRIPT.format(python=sys.executable, answers=str(answers)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return Docker(more.pop("echo", lambda _command: None), **more)

    return make


def test_good_engine_is_accepted(answering: Callable[..., Docker]) -> None:
    docker = answering()
    assert docker.engine_version() == "26.1.5"
    assert docker.builder() == Builder("default", "docker", ("linux/amd64", "linux/amd64/v2"))
    docker.require_platforms(docker.builder(), ["linux/amd64"])


def test_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="client on PATH") as caught:
        Docker(lambda _command: None).engine_version()
    assert "--engine tree" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changed", "expected", "hint"),
    [
        ({"version": [1, "null", "Cannot connect to the Docker daemon"]},
         "Cannot connect", "systemctl start docker"),
        ({"version": [0, '{"Version": "24.0.9"}', ""]}, "24.0.9", "update Docker"),
        ({"version": [0, '{"Version": "unknown"}', ""]}, "unknown", "update Docker"),
        ({"buildx version": [1, "", "unknown command"]}, "plugin", "apt-get install docker-buildx"),
        ({"buildx inspect": [1, "", "ERROR: no builder found"]}, "no builder", "buildx ls"),
        ({"info --format {{json .DriverStatus}}": [0, '[["Backing Filesystem","extfs"]]', ""]},
         "containerd image store", "containerd-snapshotter"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(
    answering: Callable[..., Docker], changed: Answers, expected: str, hint: str
) -> None:
    docker = answering(changed)
    with pytest.raises(EngineError, match=expected) as caught:
        docker.engine_version()
        docker.builder()
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 5


def test_other_drivers_need_no_containerd_store(answering: Callable[..., Docker]) -> None:
    remote = "Name: far\nDriver: kubernetes\nPlatforms: linux/arm64\n"
    docker = answering(
        {"buildx inspect far": [0, remote, ""], "info": [1, "", "no engine here"]}, builder="far"
    )
    assert docker.builder() == Builder("far", "kubernetes", ("linux/arm64",), is_beside=True)


def test_a_builder_of_two_nodes_runs_what_either_does(answering: Callable[..., Docker]) -> None:
    told = ("Name:   pair\nDriver: remote\n\nNodes:\nName:  pair0\nPlatforms: linux/amd64\n"
            "Name:  pair1\nPlatforms: linux/arm64*, linux/arm/v7\n")  # fmt: skip
    builder = answering({"buildx inspect pair": [0, told, ""]}, builder="pair").builder()
    assert builder.name == "pair"
    assert builder.platforms == ("linux/amd64", "linux/arm64", "linux/arm/v7")


def test_a_builder_beside_the_engine_sees_none_of_its_images(
    answering: Callable[..., Docker],
) -> None:
    """`docker load` and `image inspect` speak to the engine, the build does not."""
    child = json.dumps({"layers": [{"size": 7}]})
    for driver, expected in (("remote", (False, 7)), ("docker", (True, 40))):
        docker = answering({
            "buildx inspect one": [0, f"Name: one\nDriver: {driver}\nPlatforms: linux/amd64\n", ""],
            "context show": [0, "one\n", ""],
            "image inspect": [0, json.dumps([{"Id": DIGEST, "Size": 40}]), ""],
            "buildx imagetools": [0, child, ""],
        }, builder="one")  # fmt: skip
        builder = docker.builder()
        assert builder.is_beside is (driver == "remote")
        base = docker.base(f"a/b@{DIGEST}", (), builder)
        assert (base.is_local, base.size) == expected


def test_a_container_s_output_and_its_failure(answering: Callable[..., Docker]) -> None:
    words = "run --rm --platform linux/arm64 --entrypoint sh a:b -c"
    docker = answering({words: [0, "printed\n", "told\n"]})
    assert docker.run("a:b", "linux/arm64", "apt-get update") == "printed\n"
    said = "docker: image does not provide the platform.\nSee 'docker run --help'.\n"
    with pytest.raises(EngineError, match="does not provide the platform"):
        answering({words: [125, "", said]}).run("a:b", "linux/arm64", "apt-get update")


def test_platform_without_emulation(answering: Callable[..., Docker]) -> None:
    docker = answering()
    with pytest.raises(EngineError, match="linux/arm64") as caught:
        docker.require_platforms(docker.builder(), ["linux/amd64", "linux/arm64"])
    assert "qemu" in str(caught.value.hint)


def test_base_that_nobody_has(answering: Callable[..., Docker]) -> None:
    docker = answering()
    with pytest.raises(EngineError, match=r"base x@sha256.*no such host") as caught:
        docker.base(f"x@{DIGEST}", ["linux/amd64"])
    assert "--base" in str(caught.value.hint)


def test_local_base(answering: Callable[..., Docker]) -> None:
    record = json.dumps([{"Id": DIGEST, "Size": 40}])
    docker = answering({"image inspect": [0, record, ""]})
    found = docker.base("standin:x", ["linux/amd64"])
    assert found == BaseImage("standin:x", DIGEST, (), 40, is_local=True)


def remote_base(platforms: Sequence[str]) -> Answers:
    children = [
        {"digest": f"sha256:{index}", "platform": dict(zip(("os", "architecture"),
                                                          name.split("/"), strict=True))}
        for index, name in enumerate(platforms)
    ]  # fmt: skip
    answers: Answers = {
        f"buildx imagetools inspect --raw r/x@sha256:{index}": [
            0, json.dumps({"layers": [{"size": 10}, {"size": index}]}), ""]
        for index in range(len(platforms))
    }  # fmt: skip
    answers[f"buildx imagetools inspect --raw r/x@{DIGEST}"] = [
        0, json.dumps({"manifests": children}), ""]  # fmt: skip
    return answers


def test_remote_base_is_measured_by_its_largest_platform(
    answering: Callable[..., Docker],
) -> None:
    docker = answering(remote_base(["linux/amd64", "linux/arm64", "unknown/unknown"]))
    found = docker.base(f"r/x@{DIGEST}", ["linux/arm64"])
    assert found == BaseImage(f"r/x@{DIGEST}", DIGEST, ("linux/amd64", "linux/arm64"), 11,
                              is_local=False)  # fmt: skip


def test_base_without_the_platform(answering: Callable[..., Docker]) -> None:
    docker = answering(remote_base(["linux/amd64"]))
    with pytest.raises(UsageError, match="linux/arm64") as caught:
        docker.base(f"r/x@{DIGEST}", ["linux/amd64", "linux/arm64"])
    assert "index" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("is_local", "size", "free", "is_enough"),
    [
        (False, 10 * GIB, 43 * GIB, True),
        (False, 10 * GIB, 41 * GIB, False),
        (True, 40 * GIB, 13 * GIB, True),
        (True, 40 * GIB, 11 * GIB, False),
    ],
)
def test_space_is_asked_before_the_build(
    answering: Callable[..., Docker],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    is_local: bool,
    size: int,
    free: int,
    is_enough: bool,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _path: usage(0, 0, free))
    docker = answering()
    base = BaseImage("x", DIGEST, (), size, is_local=is_local)
    if is_enough:
        docker.require_space(base, tmp_path)
        return
    with pytest.raises(EngineError, match=r"GiB free for this build, found [\d.]+ GiB") as caught:
        docker.require_space(base, tmp_path)
    assert "prune" in str(caught.value.hint)


def call(tmp_path: Path) -> Call:
    return Call(
        context=tmp_path, output=tmp_path / "o.tar", name="n:t", platforms=("linux/amd64",),
        epoch=7, arguments={"BASE": "b"}, labels={"org.opencontainers.image.x": "y", "z": "1"},
        contexts={"debs": "/d"}, secrets=("id=ca,src=/ca",), use_cache=False,
    )  # fmt: skip


def test_build_asks_for_rewritten_times_and_echoes(
    answering: Callable[..., Docker], tmp_path: Path
) -> None:
    echoed: list[Sequence[str]] = []
    docker = answering({"buildx build": [0, "#1 [a 1/1] RUN x\n#1 DONE 1.0s\n", ""]},
                       echo=echoed.append)  # fmt: skip
    said: list[str] = []
    docker.build(call(tmp_path), said.append)
    (command,) = echoed
    text = " ".join(command)
    assert said == ["[a 1/1] RUN x: 1.0 s"]
    assert f"--output type=oci,dest={tmp_path}/o.tar,name=n:t,rewrite-timestamp=true" in text
    for part in ("--provenance=false", "--no-cache", "--build-arg BASE=b", "--secret id=ca,src=/ca",
                 "--build-context debs=/d", "--label z=1", "--platform linux/amd64",
                 "--annotation manifest:org.opencontainers.image.x=y"):  # fmt: skip
        assert part in text
    assert "manifest:z" not in text


def test_failed_build_is_an_error(answering: Callable[..., Docker], tmp_path: Path) -> None:
    docker = answering({"buildx build": [1, "ERROR: failed to solve: no space left on device", ""]})
    with pytest.raises(EngineError, match="no space left") as caught:
        docker.build(call(tmp_path), lambda _line: None)
    assert "prune" in str(caught.value.hint)


def test_push_gives_the_registry_s_digest(answering: Callable[..., Docker]) -> None:
    assert answering({"push": [0, f"x: digest: {DIGEST} size: 9", ""]}).push("r/x:y") == DIGEST
    with pytest.raises(EngineError, match="digest"):
        answering({"push": [0, "done", ""]}).push("r/x:y")
    with pytest.raises(EngineError, match="connection refused") as caught:
        answering({"push": [1, "", "dial tcp: connection refused"]}).push("r/x:y")
    assert "registry" in str(caught.value.hint)

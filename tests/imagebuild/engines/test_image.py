"""What an image is called, labelled and recorded; what the command line takes and refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild import render
from imagebuild.cli import main
from imagebuild.config import ROOT, load_recipe
from imagebuild.engines import image as module
from imagebuild.engines.docker import BaseImage, Builder, Call
from imagebuild.engines.image import ImageRequest, history, parse_contexts
from imagebuild.engines.ocitar import Archive, PlatformImage
from imagebuild.errors import EngineError, UsageError
from imagebuild.lock import BaseLock, read_lock
from imagebuild.pins import DebPin, DebsPin

RECIPE = load_recipe("glm53-flash")
BASE = read_lock(RECIPE.lock_file).base("0.31.0")
SERIES = RECIPE.series()
DIGEST, OTHER, BASE_DIGEST = (f"sha256:{letter * 64}" for letter in "abc")


def request(dist: Path, **changed: Any) -> ImageRequest:
    known: dict[str, Any] = {
        "recipe": RECIPE, "series": SERIES, "base": BASE, "gpu_arches": ("sm_120",),
        "reference": render.reference(BASE), "tag": "x:y", "dist": dist, "flashkda": "base",
        "cluster": "none", "contexts": {}, "arguments": {},
    }  # fmt: skip
    return ImageRequest(**{**known, **changed})


class FakeDocker:
    """Writes an archive and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: str = "", pushed: str = DIGEST):
        self.done: list[str] = []
        self.known, self.pushed = known, pushed
        self.call: Call | None = None
        labels = {"a": "b"}
        image = PlatformImage("linux/amd64", DIGEST, ("sha256:1",), (9,), labels, {})
        monkeypatch.setattr(
            module, "read_archive", lambda _p: Archive(DIGEST, {"linux/amd64": image})
        )

    def engine_version(self) -> str:
        return "26.1.5"

    def builder(self) -> Builder:
        return Builder("default", "docker", ("linux/amd64",))

    def require_platforms(self, _builder: Builder, platforms: Sequence[str]) -> None:
        self.done.append(f"platforms {','.join(platforms)}")

    def base(self, reference: str, _platforms: Sequence[str], builder: Builder) -> BaseImage:
        assert builder == self.builder()
        return BaseImage(reference, BASE_DIGEST, (), 10, is_local=True)

    def require_space(self, _base: BaseImage, _output: Path) -> None:
        self.done.append("space")

    def build(self, call: Call, _step: object) -> None:
        self.done.append("build")
        self.call = call
        call.output.write_bytes(b"archive")

    def inspect(self, _name: str) -> dict[str, Any] | None:
        return {"Id": self.known} if self.known else None

    def tag(self, image: str, name: str) -> None:
        self.done.append(f"tag {image} {name}")

    def load(self, _archive: Path) -> None:
        self.done.append("load")

    def push(self, name: str) -> str:
        self.done.append(f"push {name}")
        return self.pushed


def build(docker: FakeDocker, asked: ImageRequest, **how: Any) -> module.BuiltImage:
    options = {"is_loaded": True, "is_pushed": False, "fetch": fetch, **how}
    return module.build(asked, docker, lambda _line: None, **options)  # type: ignore[arg-type]


def fetch(_pin: DebPin) -> Path:
    raise AssertionError("no package is locked")


def test_everything_is_asked_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = FakeDocker(monkeypatch)
    built = build(docker, request(tmp_path))
    assert docker.done == ["platforms linux/amd64", "space", "build", "load"]
    assert docker.call is not None
    assert docker.call.arguments == render.arguments(RECIPE, BASE)
    assert docker.call.epoch == BASE.epoch
    assert built.previous == ""
    assert not list(tmp_path.glob("*.partial"))


def test_archive_is_kept_only_where_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path)
    build(FakeDocker(monkeypatch), asked, is_loaded=False)
    assert (asked.folder / "image.tar").read_bytes() == b"archive"
    build(FakeDocker(monkeypatch), asked)
    assert not (asked.folder / "image.tar").exists()


def test_image_that_loses_its_tag_keeps_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = FakeDocker(monkeypatch, known=OTHER)
    built = build(docker, request(tmp_path))
    assert built.previous == OTHER
    assert docker.done[-2:] == ["tag x:y x:y-previous", "load"]
    assert history(tmp_path)[-1]["previous"] == OTHER
    again = FakeDocker(monkeypatch, known=DIGEST)
    build(again, request(tmp_path))
    assert "tag" not in " ".join(again.done)


AMD64 = DebPin("a_1%3a2_amd64.deb", "http://a.example/a", "aa" * 32, 3)
ARM64 = DebPin("a_1%3a2_arm64.deb", "http://a.example/b", "bb" * 32, 3)


def with_debs(tmp_path: Path, base: str = BASE_DIGEST) -> BaseLock:
    debs = DebsPin(("a",), "resolved", base, "2026-11-29",
                   {"linux/amd64": (AMD64,), "linux/arm64": (ARM64,)})  # fmt: skip
    for pin in (AMD64, ARM64):
        (tmp_path / pin.sha256).write_text(pin.filename)
    return replace(BASE, debs=debs)


def test_locked_packages_are_a_context_with_a_folder_for_each_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker, seen = FakeDocker(monkeypatch), {}

    def build_step(call: Call, _step: object) -> None:
        folder = Path(call.contexts["debs"])
        seen.update({path.relative_to(folder).as_posix(): path.read_text()
                     for path in folder.rglob("*") if path.is_file()})  # fmt: skip
        call.output.write_bytes(b"archive")

    docker.build = build_step  # type: ignore[method-assign]
    asked = request(tmp_path, base=with_debs(tmp_path), gpu_arches=("sm_120", "sm_121"))
    built = build(docker, asked, fetch=lambda pin: tmp_path / pin.sha256)
    assert seen == {
        "amd64/a_1%3a2_amd64.deb": AMD64.filename,
        "amd64/SHA256SUMS": f"{AMD64.sha256}  {AMD64.filename}\n",
        "arm64/a_1%3a2_arm64.deb": ARM64.filename,
        "arm64/SHA256SUMS": f"{ARM64.sha256}  {ARM64.filename}\n",
    }
    assert built.without_debs == ""
    record = json.loads((asked.folder / "image.json").read_text())
    assert record["debs"]["linux/arm64"] == {ARM64.filename: ARM64.sha256}
    made = json.loads((asked.folder / "provenance.json").read_text())
    found = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"name": AMD64.filename, "uri": AMD64.url, "digest": {"sha256": AMD64.sha256}} in found
    parts = json.loads((asked.folder / "sbom.cdx.json").read_text())["components"]
    mine = [one for one in parts if one["bom-ref"] == f"deb:{ARM64.sha256}"]
    assert [(one["name"], one["version"]) for one in mine] == [("a", "1:2")]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, f"those in the lock are for another base, {OTHER}"),
        ({"base": replace(BASE, debs=None)}, "the lock has none for this base"),
        ({"contexts": {"debs": "here"}}, ""),
    ],
)
def test_packages_for_another_base_are_left_out_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    docker = FakeDocker(monkeypatch)
    asked = request(tmp_path, **{"base": with_debs(tmp_path, OTHER), **changed})
    built = build(docker, asked)
    assert built.without_debs.startswith(said)
    assert docker.call is not None
    assert docker.call.contexts == asked.contexts
    sentences = " ".join(module.missing_parts(asked, built.without_debs))
    assert ("--build-context debs=DIR" in sentences) == bool(said)


def test_packages_for_one_platform_are_not_for_the_other(tmp_path: Path) -> None:
    base = with_debs(tmp_path)
    assert base.debs is not None
    half = replace(base, debs=replace(base.debs, files={"linux/amd64": (AMD64,)}))
    asked = request(tmp_path, base=half, gpu_arches=("sm_120", "sm_121"))
    assert module.debs_of(asked, "") == ({}, "the lock has none for linux/arm64")
    assert module.debs_of(request(tmp_path, base=half), "")[0] == {"linux/amd64": (AMD64,)}


def test_pushed_digest_must_be_the_built_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(FakeDocker(monkeypatch), request(tmp_path), is_pushed=True).pushed == DIGEST
    with pytest.raises(EngineError, match=OTHER):
        build(FakeDocker(monkeypatch, pushed=OTHER), request(tmp_path), is_pushed=True)


def test_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = FakeDocker(monkeypatch)

    def fail(call: Call, _step: object) -> None:
        call.output.write_bytes(b"half")
        raise EngineError("no")

    monkeypatch.setattr(docker, "build", fail)
    with pytest.raises(EngineError):
        build(docker, request(tmp_path))
    assert docker.done == ["platforms linux/amd64", "space"]
    assert [path.name for path in tmp_path.iterdir()] == [".glm53-flash-image-sm_120.lock"]


def test_record_names_base_series_and_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path)
    build(FakeDocker(monkeypatch), asked)
    record = json.loads((asked.folder / "image.json").read_text())
    assert record["digest"] == DIGEST
    assert record["base"] == {"reference": asked.reference, "digest": BASE_DIGEST,
                              "version": "0.31.0"}  # fmt: skip
    assert record["series"] == SERIES.digest
    assert record["platforms"]["linux/amd64"]["diff_ids"] == ["sha256:1"]


def test_labels_do_not_depend_on_place_or_time(tmp_path: Path) -> None:
    base = BaseImage("r", BASE_DIGEST, (), 1, is_local=False)
    labels = request(tmp_path).labels(base)
    assert labels == request(tmp_path / "other").labels(base)
    assert labels["org.opencontainers.image.base.digest"] == BASE_DIGEST
    assert labels["org.opencontainers.image.base.name"] == "vllm/vllm-openai:v0.31.0"
    assert labels["org.opencontainers.image.created"] == "2026-10-05T07:41:02Z"
    assert labels["imagebuild.series"] == SERIES.digest
    assert str(tmp_path) not in json.dumps(labels)


def test_folder_without_git_has_no_revision(tmp_path: Path) -> None:
    assert module.revision_of(tmp_path) == ""


def test_contexts() -> None:
    found = parse_contexts(["a=/x", "b=docker-image://y=z"])
    assert found == {"a": "/x", "b": "docker-image://y=z"}
    for wrong in ("a", "=x", "a="):
        with pytest.raises(UsageError, match="NAME=DIR"):
            parse_contexts([wrong])
    with pytest.raises(UsageError, match="base") as caught:
        parse_contexts(["base=/x"])
    assert "--base" in str(caught.value.hint)


def test_plan_asks_no_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main(["plan", "--engine", "docker", "--arch", "all", "--cluster", "ray",
                 "--format", "json"], root=ROOT)  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["platforms"] == ["linux/amd64", "linux/arm64"]
    assert document["arguments"]["CLUSTER"] == "ray"
    assert document["arguments"]["FLASHKDA"] == "base"
    assert any("debs" in sentence for sentence in document["warnings"])


@pytest.mark.parametrize(
    "options",
    [["--push"], ["--base", "x"], ["--arch", "all"], ["--build-context", "a=b"], ["--no-load"]],
)
def test_tree_engine_refuses_what_only_an_image_has(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options], root=ROOT) == 2
    assert "--engine docker" in capsys.readouterr().err


def test_push_needs_a_loaded_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--engine", "docker", "--push", "--no-load"], root=ROOT) == 2
    assert "--no-load" in capsys.readouterr().err


def test_render_says_that_nothing_changed(capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "Dockerfile").read_bytes()
    assert main(["render"], root=ROOT) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert (ROOT / "Dockerfile").read_bytes() == before


def test_documents_stand_beside_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, flashkda="build", contexts={"cuda": "somewhere"})
    build(FakeDocker(monkeypatch), asked)
    statement = json.loads((asked.folder / "provenance.json").read_bytes())
    assert [one["name"] for one in statement["subject"]] == ["x:y", "linux/amd64"]
    known = {one["name"] for one in
             statement["predicate"]["buildDefinition"]["resolvedDependencies"]}  # fmt: skip
    assert {"flashkda", "cutlass", "vllm/vllm-openai:v0.31.0"} <= known
    assert DIGEST.removeprefix("sha256:") in (asked.folder / "sbom.cdx.json").read_text()

    # Sources that a context gave are not the commits of the recipe.
    asked = request(tmp_path, flashkda="build", contexts={"flashkda-src": "somewhere"})
    build(FakeDocker(monkeypatch), asked)
    assert "FlashKDA" not in (asked.folder / "provenance.json").read_text()

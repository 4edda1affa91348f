"""Which build of torch is chosen, and what is said where there is none."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from imagebuild.errors import EngineError
from imagebuild.smoke.torchbuild import TorchBuild, choose
from tests.support.smokes import CUDA, ELSEWHERE, Place, interpreter

PINS = ("2.13.0", "2.14.0")


def chosen(place: Place, wanted: str = "2.13.0", *minors: int) -> TorchBuild:
    with place.session() as upstream:
        return choose(upstream, wanted, PINS, [interpreter(minor) for minor in minors or (12,)])


def refused(place: Place, wanted: str = "2.13.0") -> EngineError:
    with pytest.raises(EngineError) as caught:
        chosen(place, wanted)
    assert caught.value.exit_code == 5
    assert "extra-index-url" in str(caught.value.hint)
    return caught.value


@pytest.mark.parametrize("requires", [("filelock",), (), ELSEWHERE])
def test_a_build_whose_metadata_names_no_accelerator_is_taken(
    place: Place, requires: tuple[str, ...]
) -> None:
    wheel = place.torch("2.13.0", requires)
    build = chosen(place)
    assert build.file.filename == wheel.name
    assert build.file.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert build.is_wanted_version


@pytest.mark.parametrize(
    "need",
    ["nvidia-cudnn-cu13==9", "cuda-toolkit[cudart]==13.0.3", "triton~=3.8", "Triton",
     "pytorch-triton-rocm==3", "intel-cmplr-lib-rt"],
)  # fmt: skip
def test_a_cpu_in_the_name_does_not_make_one(place: Place, need: str) -> None:
    place.torch("2.13.0+cpu", (need,))
    assert need.partition("=")[0].partition("[")[0].rstrip("~").lower() in str(refused(place))


def test_cuda_builds_alone_are_refused_with_their_size_and_never_fetched(place: Place) -> None:
    wheel = place.torch("2.13.0", CUDA)
    error = refused(place)
    assert str(error) == (
        "torch 2.13.0: expected a build without CUDA through pip's configuration, found "
        f"{wheel.name} of 0 MB cannot be loaded without nvidia-cudnn-cu13 and 1 more projects"
    )
    whole = [one for one in place.server.files_asked() if not one.range]
    assert whole == [], "the wheel itself was downloaded"


def test_the_cpu_build_is_found_behind_the_cuda_build_of_the_same_version(place: Place) -> None:
    place.torch("2.13.0", CUDA)
    place.torch("2.13.0+cu130", CUDA)
    wheel = place.torch("2.13.0+cpu")
    assert chosen(place).file.filename == wheel.name


def test_the_pinned_version_wins_over_a_newer_one(place: Place) -> None:
    place.torch("2.14.0+cpu")
    place.torch("2.13.0+cpu")
    assert chosen(place, "2.13.0").file.version == "2.13.0+cpu"
    assert chosen(place, "2.14.0").file.version == "2.14.0+cpu"


def test_another_version_that_some_base_pins_serves_where_the_pinned_one_is_missing(
    place: Place,
) -> None:
    place.torch("2.14.0", CUDA)
    place.torch("2.13.0+cpu")
    place.torch("2.13.1+cpu")
    place.torch("2.12.0+cpu")
    build = chosen(place, "2.14.0")
    assert (build.file.version, build.is_wanted_version) == ("2.13.1+cpu", False)


def test_a_version_that_no_base_pins_does_not_serve(place: Place) -> None:
    place.torch("2.12.0+cpu")
    assert "no wheel for this machine's Pythons" in str(refused(place))


def test_the_interpreter_that_has_the_pinned_build_is_taken_before_the_first(place: Place) -> None:
    place.torch("2.13.0+cpu", tag="cp313-cp313-linux_x86_64")
    place.torch("2.13.0+cpu", tag="cp313-cp313-linux_aarch64")
    place.torch("2.14.0+cpu")
    build = chosen(place, "2.13.0", 12, 11, 13)
    assert (build.file.version, build.interpreter.version) == ("2.13.0+cpu", (3, 13))


def test_among_equals_the_first_interpreter_is_taken(place: Place) -> None:
    place.torch("2.13.0+cpu")
    assert chosen(place, "2.13.0", 13, 11).interpreter.version == (3, 13)


def test_a_withdrawn_build_is_left_alone(place: Place) -> None:
    wheel = place.torch("2.13.0+cpu")
    place.server.faults.yanked[wheel.name] = "broken"
    refused(place)


def test_a_folder_of_find_links_serves_and_its_file_is_hashed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    wheel = place.torch("2.13.0+cpu", folder=folder)
    place.torch("2.13.0", CUDA)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    build = chosen(place)
    assert build.file.url == wheel.as_uri()
    assert build.file.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_build_on_a_server_that_gives_no_hash_is_not_taken(place: Place) -> None:
    place.torch("2.13.0+cpu")
    place.server.faults.hashes = False
    assert "comes without a sha256 from its index" in str(refused(place))


def test_an_index_without_torch_is_the_same_answer(place: Place) -> None:
    assert "expected the project torch" in str(refused(place))

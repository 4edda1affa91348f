"""What two ranks hold: equal digests for equal things, and words for what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import caches, fingerprint, places
from serving.errors import EnvironmentFault
from serving.fingerprint import Fingerprint
from serving.resolve import resolve

from tests.image.serving.machines import checkpoint, environ, site


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path / "model")
    site(tmp_path / "site")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "one.py").write_text("x = 1\n")
    (tmp_path / "kernel.so").write_bytes(b"\x7fELF")
    return tmp_path


def take(folder, template=b"t", backend="flashinfer_cutlass", arguments=(), **knobs):
    plan = resolve(environ("gb10-2x", folder, **knobs), arguments)
    return fingerprint.take(plan, backend, template, site=folder / "site", root=folder / "root",
                            kernel=folder / "kernel.so")  # fmt: skip


def differing(one: Fingerprint, two: Fingerprint) -> list[str]:
    assert one.digest != two.digest
    return [line.partition(":")[0] for line in one.differences(two, "rank 0", "rank 1")]


def test_equal_things_are_equal(folder):
    one, two = take(folder), take(folder, GLM_MAX_NUM_SEQS="2")
    assert one == two
    assert one.differences(two, "a", "b") == []
    assert fingerprint.parse(one.document()) == one


def test_what_may_differ_between_ranks_does_not_count(folder):
    one = take(folder)
    assert take(folder, GLM_HOST_ADDRESS="10.0.0.2", GLM_API_HOST="127.0.0.1",
                GLM_NCCL_DEBUG="WARN", GLM_CACHE_DIR="/elsewhere") == one  # fmt: skip


def test_each_part_is_told_by_name(folder):
    one = take(folder)
    assert differing(one, take(folder, template=b"u")) == ["template"]
    assert differing(one, take(folder, backend="marlin")) == ["moe_backend"]
    assert differing(one, take(folder, arguments=["--seed=1"])) == ["arguments"]
    assert differing(one, take(folder, GLM_MAX_NUM_SEQS="4")) == ["GLM_MAX_NUM_SEQS"]
    assert differing(one, take(folder, GLM_MLA_ROUTE="stock")) == ["GLM_MLA_ROUTE", "route"]
    assert differing(one, take(folder, GLM_IMAGE_ID="sha256:1")) == ["image"]
    (folder / "kernel.so").write_bytes(b"\x7fELF other")
    assert differing(one, take(folder)) == ["kernel"]
    (folder / "root" / "one.py").write_text("x = 2\n")
    assert differing(one, take(folder)) == ["kernel", "runtime"]
    (folder / "model" / "tokenizer.json").write_text("{}")
    assert differing(one, take(folder)) == ["checkpoint/tokenizer.json", "kernel", "runtime"]


def test_words(folder):
    one = take(folder)
    (folder / "kernel.so").unlink()
    (sentence,) = one.differences(take(folder), "rank 0 (10.0.0.1)", "rank 1 (10.0.0.2)")
    assert sentence.startswith("kernel: rank 0 (10.0.0.1) has sha256:")
    assert sentence.endswith(
        "rank 1 (10.0.0.2) has absent; send the head's image with `build.py ship`"
    )


@pytest.mark.parametrize(
    "document",
    [None, [], {"schema": 2}, {"schema": 1, "parts": []}, {"schema": 1, "parts": {"a": 1}},
     {"schema": 1, "parts": {"a": "1"}, "digest": "0" * 64}],
)  # fmt: skip
def test_what_is_no_fingerprint(document):
    with pytest.raises(ValueError, match="fingerprint"):
        fingerprint.parse(document)


def test_broken_manifest_is_a_sentence(folder):
    (folder / "site" / ".imagebuild" / "manifest.json").write_text("{")
    with pytest.raises(EnvironmentFault, match="manifest cannot be read"):
        take(folder)


class TestCaches:
    def prepare(self, folder, mine=None, **knobs):
        plan = resolve(environ("gb10-2x", folder, **knobs))
        return caches.prepare(plan, mine or Fingerprint({"a": "1"}))

    def test_folders_are_made_below_the_cache(self, folder):
        made = self.prepare(folder)
        places = [Path(place) for place in made.values()]
        assert all(place.is_dir() and folder / "cache" in place.parents for place in places)
        assert len(set(made.values())) == 5

    def test_other_knobs_get_other_graphs_and_the_same_kernels(self, folder):
        one, two = self.prepare(folder), self.prepare(folder, Fingerprint({"a": "2"}))
        assert one["VLLM_CACHE_ROOT"] != two["VLLM_CACHE_ROOT"]
        assert one["TRITON_CACHE_DIR"] == two["TRITON_CACHE_DIR"]

    @pytest.mark.parametrize(("knob", "stays"), [("fresh", False), ("persist", True)])
    def test_autotune_rule(self, folder, knob, stays):
        made = self.prepare(folder, GLM_AUTOTUNE=knob)
        path = folder / made["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] / "autotune_configs.json"
        path.write_text("{}")
        self.prepare(folder, GLM_AUTOTUNE=knob)
        assert path.exists() == stays

    def test_old_graphs_are_pruned(self, folder):
        for number in range(8):
            made = self.prepare(folder, Fingerprint({"a": str(number)}))
        left = list((folder / "cache").glob("vllm-sm_121-*"))
        assert len(left) == 4
        assert folder / made["VLLM_CACHE_ROOT"] in left

    def test_no_way_to_write(self, folder):
        (folder / "cache").write_text("a file")
        with pytest.raises(EnvironmentFault, match="GLM_CACHE_DIR="):
            self.prepare(folder)


@pytest.mark.parametrize("manifest", ['{"base": "0.31.0"}', '{"base": [], "series": {}}', "[1]"])
def test_a_manifest_of_another_form(folder, manifest):
    """As with GLM_PREFLIGHT=warn, where preflight's word on it is a notice."""
    (folder / "site" / places.MANIFEST).write_text(manifest)
    assert take(folder).parts["base"] == "unknown"


def test_a_manifest_of_any_depth(folder):
    (folder / "site" / places.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(EnvironmentFault, match="the build's manifest cannot be read"):
        take(folder)

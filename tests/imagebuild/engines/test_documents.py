"""Bill of materials and provenance: valid by their libraries, complete, and the same twice."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from imagebuild.config import ROOT, load_recipe
from imagebuild.engines.made import Made
from imagebuild.engines.provenance import provenance
from imagebuild.engines.sbom import sbom
from imagebuild.lock import read_lock
from tests.support.product import COUNTER, GREETER, PLAN, Product

RECIPE = load_recipe("glm53-flash")
BASE = read_lock(RECIPE.lock_file).base("0.31.0")
COMMIT = "17a037d98da546deb4591e967cf961a43c034d8b"
TREE = Made(recipe=RECIPE, base=BASE, series=RECIPE.series(), engine="tree",
            gpu_arches=("sm_120",), subjects={"layer.tar": "a" * 64},
            base_image=("some/name:tag@sha256:" + "b" * 64, "sha256:" + "b" * 64))  # fmt: skip
IMAGE = dataclasses.replace(
    TREE,
    engine="docker",
    gpu_arches=("sm_120", "sm_121"),
    subjects={"x:y": "c" * 64, "linux/amd64": "d" * 64, "linux/arm64": "e" * 64},
    inputs={"kernel": "f" * 64, "cluster": "none"},
    sources={"flashkda": f"https://github.com/vllm-project/FlashKDA.git#{COMMIT}"},
    revision=f"{COMMIT}-dirty",
)


def problems(document: bytes) -> object:
    """What CycloneDX's schema has against a document; None when nothing."""
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(document.decode())


def attested(document: bytes) -> None:
    """Reads a statement as in-toto defines it; an unknown field raises."""
    statement = Statement.copy_from_pb(json_format.Parse(document, statement_pb2.Statement()))
    statement.validate()
    content = json.loads(document)
    assert content["predicateType"] == "https://slsa.dev/provenance/v1"
    json_format.ParseDict(content["predicate"], provenance_pb2.Provenance())


def by_name(document: bytes) -> dict[str, Any]:
    components = json.loads(document)["components"]
    assert len({one["name"] for one in components}) == len(components)
    return {one["name"]: one for one in components}


def patches_of(component: dict[str, Any]) -> dict[str, Any]:
    found = component.get("pedigree", {}).get("patches", [])
    return {patch["resolves"][0]["id"]: patch for patch in found}


@pytest.mark.parametrize("made", [TREE, IMAGE], ids=["tree", "image"])
def test_documents_are_valid(made: Made) -> None:
    assert problems(sbom(made)) is None
    attested(provenance(made))


def test_the_validators_refuse_what_is_not_valid() -> None:
    assert problems(sbom(TREE).replace(b'"unofficial"', b'"inofficial"')) is not None
    with pytest.raises(json_format.ParseError, match="buildKind"):
        attested(provenance(TREE).replace(b'"buildType"', b'"buildKind"'))
    with pytest.raises(ValueError, match="digest"):
        attested(provenance(TREE).replace(b'"sha256": "' + b"a" * 64 + b'"', b""))


def test_every_patch_is_pedigree_with_its_diff_and_upstream() -> None:
    components = by_name(sbom(TREE))
    found = patches_of(components["vllm"]) | patches_of(components["flashinfer-python"])
    assert set(found) == {patch.name for patch, _variant in TREE.applied()}
    assert len(found) > 10
    for patch, variant in TREE.applied():
        entry = found[patch.name]
        assert entry["type"] == ("backport" if patch.status == "backport" else "unofficial")
        (issue,) = entry["resolves"]
        assert issue.get("source", {}).get("url", "") == patch.upstream
        text = entry["diff"]["text"]["content"]
        for edit in variant.edits:
            assert f"+++ b/{edit.path}\n" in text
            assert all(f"+{line}" in text.splitlines() for line in edit.result.splitlines()
                       if line not in edit.anchor.splitlines())  # fmt: skip
        for file in variant.files:
            assert f"--- /dev/null\n+++ b/{file.path}\n" in text


def test_components_are_named_by_hash_and_version() -> None:
    components = by_name(sbom(TREE))
    for project in RECIPE.site:
        pin = BASE.wheel(project, "linux/amd64")
        (ancestor,) = components[project]["pedigree"]["ancestors"]
        assert ancestor["hashes"] == [{"alg": "SHA-256", "content": pin.sha256}]
        assert ancestor["purl"] == f"pkg:pypi/{project}@{BASE.versions[project]}"
    assert set(RECIPE.pins) <= set(components)
    assert components["torch"]["version"] == BASE.pins["torch"]
    # A range is no version; what the image ships instead of the wheel's pin is one.
    assert "version" not in components["transformers"]
    assert components["nvidia-nccl-cu13"]["version"] == "2.30.7"
    assert components["some/name"]["hashes"][0]["content"] == "b" * 64
    assert components["some/name"]["purl"].startswith("pkg:oci/name@sha256:" + "b" * 64)


def test_an_image_has_its_sources_and_both_platforms() -> None:
    components = by_name(sbom(IMAGE))
    assert components["flashkda"]["purl"] == f"pkg:github/vllm-project/flashkda@{COMMIT}"
    assert "libglm53_kernel" in components
    (ancestor,) = components["vllm"]["pedigree"]["ancestors"]
    assert {one["content"] for one in ancestor["hashes"]} == {
        BASE.wheel("vllm", platform).sha256 for platform in ("linux/amd64", "linux/arm64")
    }
    statement = json.loads(provenance(IMAGE))
    assert [one["name"] for one in statement["subject"]] == ["x:y", "linux/amd64", "linux/arm64"]
    build = statement["predicate"]["buildDefinition"]
    known = {one["name"]: one for one in build["resolvedDependencies"]}
    assert known["this project"] == {
        "name": "this project", "digest": {"gitCommit": COMMIT}, "annotations": {"edited": True},
    }  # fmt: skip
    assert known["some/name:tag"]["digest"] == {"sha256": "b" * 64}
    assert build["internalParameters"]["cluster"] == "none"


def test_serial_and_time_come_from_the_result() -> None:
    one, again = (json.loads(sbom(made)) for made in (TREE, TREE))
    other = json.loads(sbom(dataclasses.replace(TREE, subjects={"layer.tar": "1" * 64})))
    assert one["serialNumber"] == again["serialNumber"] != other["serialNumber"]
    assert one["metadata"]["timestamp"] == "2026-10-05T07:41:02+00:00"


_PRINT = """
import sys
from tests.imagebuild.engines import test_documents as t
sys.stdout.buffer.write(b"".join(f(m) for f in (t.sbom, t.provenance) for m in (t.TREE, t.IMAGE)))
"""


def test_another_process_writes_the_same_bytes() -> None:
    expected = sbom(TREE) + sbom(IMAGE) + provenance(TREE) + provenance(IMAGE)
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo"}
        done = subprocess.run([sys.executable, "-c", _PRINT], cwd=ROOT, env=environment,
                              capture_output=True, check=True)  # fmt: skip
        assert done.stdout == expected


def test_a_build_of_the_tree_writes_both(product: Product) -> None:
    assert product.run("build", "--arch", "sm_121").code == 0
    folder = product.root / "dist" / "tiny-sm_121"
    digest = (folder / "layer.tar.sha256").read_text().split()[0]
    document = (folder / "sbom.cdx.json").read_bytes()
    assert problems(document) is None
    attested((folder / "provenance.json").read_bytes())
    subject = json.loads((folder / "provenance.json").read_bytes())["subject"]
    assert subject == [{"name": "layer.tar", "digest": {"sha256": digest}}]
    components = by_name(document)
    found = patches_of(components["vllm"])
    assert set(found) == {GREETER, COUNTER}
    assert PLAN not in document.decode()  # it is for sm_120
    assert '+        return "good day"\n' in found[GREETER]["diff"]["text"]["content"]
    assert "+EXTRA = 1\n" in found[COUNTER]["diff"]["text"]["content"]
    assert found[COUNTER]["type"] == "backport"
    assert found[COUNTER]["resolves"][0]["source"]["url"] == "https://example.org/1"
    # An unpatched package is the wheel itself.
    assert "pedigree" not in components["flashinfer-python"]
    assert components["flashinfer-python"]["hashes"]

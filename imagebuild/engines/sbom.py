"""The bill of materials beside a result: CycloneDX, with every patch as pedigree.

The same result gives the same bytes: the time is the lock's epoch, the serial number comes from the
digest.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Iterator
from urllib.parse import unquote

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Component,
    ComponentType,
    Diff,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.component import Patch as PedigreePatch
from cyclonedx.model.issue import IssueClassification, IssueType, IssueTypeSource
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from imagebuild.catalogue import paragraphs
from imagebuild.engines.made import Made, commit_of, diff, packages_of
from imagebuild.patching.patch import Patch, Variant


def sbom(made: Made) -> bytes:
    """The document, as CycloneDX 1.6 JSON with a final newline."""
    whole = _whole(made)
    parts = [*_wheels(made), *_pins(made), *_base(made), *_sources(made), *_debs(made),
             *_runtime(made)]  # fmt: skip
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, f"{made.recipe.name} sha256:{made.digest}"),
        metadata=BomMetaData(
            component=whole,
            timestamp=datetime.datetime.fromtimestamp(made.base.epoch, datetime.UTC),
        ),
        components=parts,
    )
    bom.register_dependency(whole, parts)
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _whole(made: Made) -> Component:
    is_image = made.engine == "docker"
    return Component(
        name=made.recipe.name,
        version=made.base.version,
        type=ComponentType.CONTAINER if is_image else ComponentType.APPLICATION,
        bom_ref=f"{made.recipe.name}@sha256:{made.digest}",
        description=made.recipe.description,
        hashes=[_hash(made.digest)],
        properties=[
            *(Property(name="imagebuild:gpu_arch", value=arch) for arch in made.gpu_arches),
            Property(name="imagebuild:engine", value=made.engine),
            Property(name="imagebuild:series", value=made.series.digest),
            *(Property(name=f"imagebuild:{name}", value=f"sha256:{digest}")
              for name, digest in made.subjects.items()),
        ],
    )  # fmt: skip


def _wheels(made: Made) -> Iterator[Component]:
    """The packages in the result; a patched one has the wheel's own as its ancestor."""
    applied = list(made.applied())
    for project, package in made.recipe.site.items():
        version = made.base.versions[project]
        wheels = [(name, sha256) for owner, name, sha256 in made.wheels() if owner == project]
        # What belongs to no package in the site, such as a new module, goes with the first one.
        others = set(made.recipe.site.values()) - {package}
        mine = [
            (patch, variant)
            for patch, variant in applied
            if package in packages_of(variant)
            or (package == next(iter(made.recipe.site.values()))
                and not packages_of(variant) & others)
        ]  # fmt: skip
        pristine = _package(project, version, wheels, f"pristine:{project}@{version}")
        if not mine:
            yield _package(project, version, wheels, f"pkg:pypi/{project}@{version}")
            continue
        yield Component(
            name=project,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"pkg:pypi/{project}@{version}",
            purl=_pypi(project, version),
            pedigree=Pedigree(
                ancestors=[pristine],
                patches=[_patch(made, patch, variant) for patch, variant in mine],
                notes="patched: " + ", ".join(patch.name for patch, _variant in mine),
            ),
            properties=[Property(name="imagebuild:where", value="result")],
        )


def _package(project: str, version: str, wheels: list[tuple[str, str]], ref: str) -> Component:
    return Component(
        name=project,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=ref,
        purl=_pypi(project, version),
        hashes=[_hash(sha256) for _name, sha256 in wheels],
        properties=[Property(name="imagebuild:wheel", value=name) for name, _sha256 in wheels],
    )


def _patch(made: Made, patch: Patch, variant: Variant) -> PedigreePatch:
    doc = made.series.docs[patch.name]
    said = paragraphs(doc)
    found = re.search(r"[\w.-]+/(?:pull|issues)/\d+$", patch.upstream)
    issue = IssueType(
        type=IssueClassification.DEFECT,
        id=patch.name,
        name=doc.strip().split("\n", 1)[0],
        description=f"{said.get('Symptom', '')} Status: {patch.status}; {patch.origin}.".strip(),
        source=IssueTypeSource(name=found[0] if found else None, url=XsUri(patch.upstream))
        if patch.upstream
        else None,
    )
    kind = (
        PatchClassification.BACKPORT
        if patch.status == "backport"
        else PatchClassification.UNOFFICIAL
    )
    text = AttachedText(content=diff(made.series, variant), content_type="text/x-diff")
    return PedigreePatch(type=kind, diff=Diff(text=text), resolves=[issue])


def _pins(made: Made) -> Iterator[Component]:
    """What the base image has to have beside the packages: exact versions, or ranges."""
    shipped = made.recipe.image_pins.get(made.base.version, {})
    for project, pin in made.base.pins.items():
        if project in made.recipe.site:
            continue
        wanted = shipped.get(project, pin)
        is_exact = wanted[:1].isdigit()
        yield Component(
            name=project,
            version=wanted if is_exact else None,
            type=ComponentType.LIBRARY,
            bom_ref=f"pkg:pypi/{project}",
            purl=_pypi(project, wanted if is_exact else None),
            properties=[
                Property(name="imagebuild:where", value="base image"),
                Property(name="imagebuild:required", value=pin),
            ],
        )


def _base(made: Made) -> Iterator[Component]:
    reference, digest = made.base_image
    if not reference:
        return
    name, _, tag = reference.partition("@")[0].rpartition(":")
    if "/" in tag or not name:  # a registry's port, or no tag at all
        name, tag = reference.partition("@")[0], ""
    purl = PackageURL(
        type="oci",
        name=name.rpartition("/")[2].lower(),
        version=digest,
        qualifiers={"repository_url": name.lower(), **({"tag": tag} if tag else {})},
    )
    yield Component(
        name=name,
        version=tag or digest,
        type=ComponentType.CONTAINER,
        bom_ref=f"base:{digest}",
        purl=purl,
        hashes=[_hash(digest.removeprefix("sha256:"))],
        properties=[Property(name="imagebuild:where", value="base image")],
    )


def _sources(made: Made) -> Iterator[Component]:
    """What was compiled from a commit."""
    for name, source in made.sources.items():
        url, commit = commit_of(source)
        found = re.search(r"github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?$", url)
        yield Component(
            name=name,
            version=commit,
            type=ComponentType.LIBRARY,
            bom_ref=f"source:{name}@{commit}",
            purl=PackageURL("github", found[1].lower(), found[2].lower(), commit)
            if found
            else None,
            external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))],
        )


def _debs(made: Made) -> Iterator[Component]:
    """The packages of the lock; which distribution they are of is the base's to say."""
    for pin in made.debs:
        name, _, rest = unquote(pin.filename).removesuffix(".deb").partition("_")
        version, _, arch = rest.rpartition("_")
        yield Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"deb:{pin.sha256}",
            hashes=[_hash(pin.sha256)],
            properties=[Property(name="imagebuild:architecture", value=arch)],
            external_references=[ExternalReference(type=ExternalReferenceType.DISTRIBUTION,
                                                   url=XsUri(pin.url))],
        )  # fmt: skip


def _runtime(made: Made) -> Iterator[Component]:
    """Our own compiled library, in an image."""
    kernel = made.inputs.get("kernel")
    if made.engine == "docker" and kernel:
        yield Component(
            name="libglm53_kernel",
            version=kernel[:12],
            type=ComponentType.LIBRARY,
            bom_ref=f"kernel:{kernel}",
            properties=[Property(name="imagebuild:source", value=f"sha256:{kernel}")],
        )


def _hash(sha256: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=sha256)


def _pypi(project: str, version: str | None) -> PackageURL:
    return PackageURL(type="pypi", name=project, version=version)

"""Which variant of a patch a tree gets, and why. Ranges only; no text is read."""

from __future__ import annotations

from dataclasses import dataclass

from imagebuild.patching.patch import Drop, GpuArch, Patch, Variant
from imagebuild.patching.tree import Identity
from imagebuild.patching.versions import VersionRange, is_release_known


@dataclass(frozen=True)
class Selection:
    """The outcome of choosing.

    Attributes:
        variant: the shape to try; None when there is none to try.
        drop: the declared drop that covers the tree's version, if any.
        why: a sentence for reports.
        is_beyond: the tree is past every range, so the newest variant is tried and the best
            verdict is `review`.
    """

    variant: Variant | None
    drop: Drop | None
    why: str
    is_beyond: bool = False


def select(patch: Patch, identity: Identity, gpu_arch: GpuArch | None) -> Selection:
    """Chooses the variant of `patch` for a tree.

    A version that leads to no release (an untagged build) counts as past every range: whoever
    knows the commit gives an identity with the release it stands for.
    """
    version = identity.version
    if gpu_arch is not None and gpu_arch not in patch.gpu_arches:
        arches = ", ".join(patch.gpu_arches)
        return Selection(None, None, f"it matters for {arches}, not for {gpu_arch}")
    newest = patch.variants[-1] if patch.variants else None
    tried = "the newest variant was tried" if newest else "it has no variant to try"
    if not is_release_known(version):
        why = f"{version} names no release: {tried}"
        return Selection(newest, None, why, is_beyond=True)
    for drop in patch.drops:
        if version in VersionRange.parse(drop.versions):
            return Selection(None, drop, f"dropped for {drop.versions}")
    for variant in patch.variants:
        if version in VersionRange.parse(variant.versions):
            return Selection(variant, None, f"{version} is in {variant.versions}")
    ranges = [v.versions for v in patch.variants] + [d.versions for d in patch.drops]
    ranges.sort(key=lambda text: VersionRange.parse(text).low)
    if VersionRange.parse(ranges[0]).is_after(version):
        return Selection(None, None, f"{version} is before its first range, {ranges[0]}")
    why = f"{version} is past its last range, {ranges[-1]}: {tried}"
    return Selection(newest, None, why, is_beyond=True)

"""Which variant a version gets; the samples are those of docs/design.md."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.patching.patch import Drop, Patch, Variant
from imagebuild.patching.selection import Selection, select
from imagebuild.patching.tree import Identity
from tests.support import toy
from tests.support.toy import CEILING, holds


def shaped(*ranges: str, drops: tuple[str, ...] = ()) -> Patch:
    return toy.patch(
        "vllm_engine_ceiling",
        variants=tuple(Variant(versions=one, edits=(CEILING,)) for one in ranges),
        drops=tuple(Drop(versions=one, proof=holds(), sentence="Upstream.") for one in drops),
    )


THREE = shaped(">=0.26,<0.29", ">=0.29,<0.32", ">=0.32,<0.34")


@pytest.mark.parametrize(
    ("version", "variant", "why", "is_beyond"),
    [
        ("0.26.0+empty", 0, "0.26.0+empty is in >=0.26,<0.29", False),
        ("0.28.1rc1.dev580+g385dce36b", 0,
         "0.28.1rc1.dev580+g385dce36b is in >=0.26,<0.29", False),
        ("0.29.0rc1.dev3", 1, "0.29.0rc1.dev3 is in >=0.29,<0.32", False),
        ("0.31.0", 1, "0.31.0 is in >=0.29,<0.32", False),
        ("0.33.0.post1", 2, "0.33.0.post1 is in >=0.32,<0.34", False),
        ("0.33.1", 2, "0.33.1 is in >=0.32,<0.34", False),
        ("0.34.0", 2,
         "0.34.0 is past its last range, >=0.32,<0.34: the newest variant was tried", True),
        ("0.1.dev20051+g487ecf187", 2,
         "0.1.dev20051+g487ecf187 names no release: the newest variant was tried", True),
        ("dev", 2, "dev names no release: the newest variant was tried", True),
        ("0.25.9", None, "0.25.9 is before its first range, >=0.26,<0.29", False),
    ],
)  # fmt: skip
def test_samples(version: str, variant: int | None, why: str, is_beyond: bool) -> None:
    chosen = None if variant is None else THREE.variants[variant]
    assert select(THREE, Identity(version), "sm_120") == Selection(chosen, None, why, is_beyond)


def test_another_gpu_arch() -> None:
    import dataclasses

    only = dataclasses.replace(THREE, gpu_arches=("sm_121",))
    why = "it matters for sm_121, not for sm_120"
    assert select(only, Identity("0.31.0"), "sm_120") == Selection(None, None, why)
    assert select(only, Identity("0.31.0"), "sm_121").variant is THREE.variants[1]
    assert select(only, Identity("0.31.0"), None).variant is THREE.variants[1]


def test_a_declared_drop() -> None:
    dropped = shaped(">=0.31,<0.32", drops=(">=0.32,<0.34",))
    drop = dropped.drops[0]
    assert select(dropped, Identity("0.33.0"), None) == Selection(
        None, drop, "dropped for >=0.32,<0.34"
    )
    assert select(dropped, Identity("0.31.0"), None).variant is dropped.variants[0]
    past = select(dropped, Identity("0.34.0"), None)
    assert (past.variant, past.drop, past.is_beyond) == (dropped.variants[0], None, True)
    assert past.why.startswith("0.34.0 is past its last range, >=0.32,<0.34")


def test_a_drop_before_the_first_variant() -> None:
    dropped = shaped(">=0.32,<0.33", drops=(">=0.31,<0.32",))
    assert select(dropped, Identity("0.30.0"), None).why == (
        "0.30.0 is before its first range, >=0.31,<0.32"
    )


def test_drops_alone_have_nothing_to_try() -> None:
    past = select(shaped(drops=(">=0.31,<0.32",)), Identity("0.32.0"), None)
    assert past == Selection(
        None,
        None,
        "0.32.0 is past its last range, >=0.31,<0.32: it has no variant to try",
        is_beyond=True,
    )


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from(["", "rc1", ".post1", "+empty"]),
    st.sets(st.integers(0, 40), min_size=2, max_size=6),
    st.integers(0, 6),
)
def test_exactly_one_for_every_version(
    numbers: list[int], tail: str, cuts: set[int], dropped: int
) -> None:
    version = "0." + ".".join(map(str, numbers)) + tail
    ordered = sorted(cuts)
    texts = [f">=0.{a},<0.{b}" for a, b in itertools.pairwise(ordered)]
    split = min(dropped, len(texts))
    patch = shaped(*texts[:split], drops=tuple(texts[split:]))
    found = select(patch, Identity(version), None)
    inside = [i for i, (a, b) in enumerate(itertools.pairwise(ordered))
              if a <= numbers[0] < b]  # fmt: skip
    if not inside:
        assert found.drop is None
        assert found.is_beyond is (numbers[0] >= ordered[-1])
        newest = patch.variants[-1] if patch.variants else None
        assert found.variant is (newest if found.is_beyond else None)
    else:
        chosen = found.variant or found.drop
        assert chosen is not None
        assert (chosen.versions, found.is_beyond) == (texts[inside[0]], False)

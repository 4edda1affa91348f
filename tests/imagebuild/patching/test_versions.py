"""Version ranges: releases and nothing else, without gap or overlap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.patching.versions import VersionRange, is_release_known, release


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.29.0rc1.dev3", (0, 29)),
        ("0.1.dev20051+g487ecf187", (0, 1)),
        ("0.26.0+empty", (0, 26)),
        ("0.28.1rc1.dev580+g385dce36b", (0, 28, 1)),
        ("0.31.0", (0, 31)),
        ("0.33.0.post1", (0, 33)),
        ("0.33.1", (0, 33, 1)),
        ("v0.34.0", (0, 34)),
        ("1!2.0", (2,)),
        ("0.0", (0,)),
        (" 0.31 ", (0, 31)),
    ],
)
def test_release(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize("version", ["", "dev", "unknown", ".1"])
def test_no_version(version: str) -> None:
    assert not is_release_known(version)
    with pytest.raises(ValueError, match="is not a version"):
        release(version)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.1.dev20051+g487ecf187", False),
        ("0.0.dev1", False),
        ("0.1.0.dev3", False),
        ("0.31.0", True),
        ("0.29.0rc1.dev3", True),
        ("0.26.0+empty", True),
        ("0.1.1.dev3", True),
    ],
)
def test_is_release_known(version: str, known: bool) -> None:
    assert is_release_known(version) is known


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        (">=0.31,<0.34", (0, 31), (0, 34)),
        (" >= 0.31.0 , < 0.32.0 ", (0, 31), (0, 32)),
        ("<0.34,>=0.31", (0, 31), (0, 34)),
        (">=0.32", (0, 32), None),
    ],
)
def test_parse(text: str, low: tuple[int, ...], high: tuple[int, ...] | None) -> None:
    assert VersionRange.parse(text) == VersionRange(low, high)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a range such as '>=0.31,<0.34'"),
        (">0.31", "'>0.31' is not a range such as '>=0.31,<0.34'"),
        (">=0.31,<=0.34", "'>=0.31,<=0.34' is not a range such as '>=0.31,<0.34'"),
        (">=0.31,>=0.32", "'>=0.31,>=0.32' is not a range such as '>=0.31,<0.34'"),
        (">=0.31rc1", "'>=0.31rc1' is not a range such as '>=0.31,<0.34'"),
        ("<0.31", "'<0.31' has no lower bound, such as '>=0.31'"),
        (">=0.34,<0.34.0", "'>=0.34,<0.34.0' holds no version"),
        (">=0.35,<0.34", "'>=0.35,<0.34' holds no version"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"range|bound|holds") as caught:
        VersionRange.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("version", "inside", "before", "after"),
    [
        ("0.30.9", False, False, True),
        ("0.31.0rc1", True, False, False),
        ("0.31.0", True, False, False),
        ("0.33.9.post2+cu130", True, False, False),
        ("0.34.0rc1", False, True, False),
        ("0.34", False, True, False),
    ],
)
def test_membership(version: str, inside: bool, before: bool, after: bool) -> None:
    known = VersionRange.parse(">=0.31,<0.34")
    assert (version in known, known.is_before(version), known.is_after(version)) == (
        inside,
        before,
        after,
    )
    assert version in VersionRange.parse(">=0.0")
    assert not VersionRange.parse(">=0.31").is_before("9")


PARTS = st.integers(0, 40)
VERSIONS = st.builds(
    lambda numbers, tail: "0." + ".".join(map(str, numbers)) + tail,
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from(["", "rc1", ".post1", "rc1.dev3+g0a1b2c", "+empty", ".dev580"]),
)


@given(VERSIONS, st.sets(PARTS, min_size=2, max_size=6))
def test_adjacent_ranges_hold_each_version_once(version: str, cuts: set[int]) -> None:
    ordered = sorted(cuts)
    ranges = [
        VersionRange.parse(f">=0.{low},<0.{high}") for low, high in itertools.pairwise(ordered)
    ]
    ranges.append(VersionRange.parse(f">=0.{ordered[-1]}"))
    holders = [one for one in ranges if version in one]
    assert len(holders) == (0 if ranges[0].is_after(version) else 1)
    for one, two in itertools.pairwise(ranges):
        assert not one.overlaps(two)
        assert not two.overlaps(one)


def test_overlaps() -> None:
    parse = VersionRange.parse
    assert parse(">=0.31,<0.33").overlaps(parse(">=0.32,<0.34"))
    assert parse(">=0.32").overlaps(parse(">=0.33,<0.34"))
    assert parse(">=0.33,<0.34").overlaps(parse(">=0.32"))
    assert not parse(">=0.32").overlaps(parse(">=0.31,<0.32"))

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.errors import IntegrityError
from imagebuild.sources.http import Http, account
from imagebuild.sources.ranges import (
    RangeFile,
    RangeReader,
    RangesUnsupportedError,
    Span,
    coalesce,
)
from tests.support.index_server import IndexServer
from tests.support.wheels import noise

CONTENT = noise(300_000)
SPANS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=12).map(
    lambda pairs: [Span(start, start + length) for start, length in pairs]
)


@given(SPANS, st.integers(0, 50))
def test_coalesced_spans_cover_all_and_little_more(spans: list[Span], gap: int) -> None:
    joined = coalesce(spans, gap)
    wanted = {at for span in spans for at in range(*span)}
    covered = [at for span in joined for at in range(*span)]
    assert covered == sorted(set(covered)) and wanted <= set(covered)
    for before, after in pairwise(joined):
        assert after.start - before.end > gap
    for span in joined:
        assert {span.start, span.end - 1} <= wanted
        holes = [at for at in range(*span) if at not in wanted]
        assert not any(set(range(at, at + gap + 1)) <= set(holes) for at in holes)


@given(SPANS)
def test_coalescing_is_idempotent_and_ignores_order(spans: list[Span]) -> None:
    joined = coalesce(spans, 7)
    assert coalesce(joined, 7) == joined == coalesce(spans[::-1] + joined, 7)


@given(
    SPANS,
    st.lists(st.tuples(st.integers(0, 520), st.integers(-1, 200)), max_size=12),
    st.integers(0, 30),
)
def test_a_range_file_reads_like_a_file(
    filled: list[Span], reads: list[tuple[int, int]], gap: int
) -> None:
    content = CONTENT[:500]
    asked: list[Span] = []

    def fetch(span: Span) -> bytes:
        asked.append(span)
        return content[span.start : span.end]

    file, real = RangeFile(500, fetch), io.BytesIO(content)
    file.fill(filled, gap)
    before = len(asked)
    for place, size in reads:
        assert file.seek(place) == real.seek(place)
        assert file.read(size) == real.read(size)
        assert file.tell() == real.tell()
    seen: set[int] = set()
    for span in asked[before:]:
        assert not seen & set(range(*span))  # nothing is fetched twice
        seen |= set(range(*span))


def test_whence() -> None:
    file = RangeFile(10, lambda span: b"0123456789"[span.start : span.end])
    assert (file.seek(-3, io.SEEK_END), file.read(2), file.seek(-1, io.SEEK_CUR)) == (7, b"78", 8)
    assert file.readable() and file.seekable()
    with pytest.raises(ValueError, match="before the start"):
        file.seek(-11, io.SEEK_END)


def test_a_short_range_is_noticed() -> None:
    file = RangeFile(10, lambda _span: b"")
    with pytest.raises(OSError, match="short range"):
        file.read(4)


def test_what_is_forgotten_is_fetched_again() -> None:
    asked: list[Span] = []

    def fetch(span: Span) -> bytes:
        asked.append(span)
        return bytes(span.end - span.start)

    file = RangeFile(10, fetch)
    file.read(10)
    file.forget()
    file.seek(0)
    file.read(10)
    assert asked == [Span(0, 10)] * 2


@pytest.fixture
def reader(server: IndexServer, http: Http) -> Callable[..., RangeReader]:
    (server.folder / "x.whl").write_bytes(CONTENT)
    return lambda size=None: RangeReader(http, server.file_url("x.whl"), "x.whl", size)


Reader = Callable[..., RangeReader]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_tail_and_parts(reader: Reader, server: IndexServer, size: int | None) -> None:
    one = reader(size)
    assert one.tail(1000) == (299_000, CONTENT[-1000:])
    assert one.size == len(CONTENT)
    assert one.fetch(Span(5, 9)) == CONTENT[5:9]
    assert one.fetch(Span(5, 5)) == b""
    assert len(server.asked) == 2
    assert reader(size).tail(999_999) == (0, CONTENT)


def test_parts_that_come_together_are_on_the_account_of_who_asks(reader: Reader) -> None:
    file = RangeFile(len(CONTENT), reader(len(CONTENT)).fetch)
    with account() as mine:
        file.fill([Span(0, 10), Span(100_000, 100_020), Span(290_000, 290_030)])
    assert (mine.requests, mine.bytes_fetched) == (3, 60)
    file.seek(100_000)
    assert file.read(20) == CONTENT[100_000:100_020]


def test_no_ranges_is_told_apart_without_reading_the_file(
    reader: Reader, server: IndexServer, http: Http
) -> None:
    server.faults.ranges = False
    with pytest.raises(RangesUnsupportedError, match="expected status 206 for a range, found 200"):
        reader().tail(1000)
    assert http.bytes_fetched == 0


def test_no_suffix_ranges(reader: Reader, server: IndexServer) -> None:
    server.faults.suffix_ranges = False
    with pytest.raises(RangesUnsupportedError, match="found 416"):
        reader().tail(1000)
    assert reader(len(CONTENT)).tail(1000)[1] == CONTENT[-1000:]


@pytest.mark.parametrize(("etag", "grow"), [(True, 0), (True, 5), (False, 5)])
def test_changes_between_requests(
    reader: Reader, server: IndexServer, etag: bool, grow: int
) -> None:
    server.faults.etag, server.faults.grow, server.faults.change_after = etag, grow, 1
    one = reader()
    one.tail(1000)
    with pytest.raises(IntegrityError, match="found that it changed while reading") as caught:
        one.fetch(Span(0, 10))
    assert caught.value.exit_code == 4


def test_a_file_that_shrank(reader: Reader, server: IndexServer) -> None:
    server.faults.etag = False
    one = reader()
    one.tail(1000)
    server.faults.cut = 200_000
    with pytest.raises(IntegrityError, match="changed while reading"):
        one.fetch(Span(250_000, 250_010))


def test_another_size_than_the_index_says(reader: Reader) -> None:
    with pytest.raises(IntegrityError, match="300000 bytes instead of 300001"):
        reader(300_001).fetch(Span(0, 10))


def test_other_bytes_than_asked_for(reader: Reader, server: IndexServer) -> None:
    server.faults.wrong_range = True
    with pytest.raises(IntegrityError, match="expected bytes 5 to 10, found 6 to 10"):
        reader().fetch(Span(5, 10))
    with pytest.raises(IntegrityError, match="expected 99 bytes at 299901, found 100"):
        reader().tail(100)


def test_a_range_that_breaks_off_is_asked_for_again(reader: Reader, server: IndexServer) -> None:
    server.faults.drop_after = [3]
    assert reader().fetch(Span(0, 10)) == CONTENT[:10]
    assert [one.range for one in server.asked] == ["bytes=0-9"] * 2

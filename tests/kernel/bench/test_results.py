"""The committed results: their form, the README's tables made from them, and the targets' sums."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from imagebuild.errors import BrokenError, UsageError
from kernel.bench import cases, results, tables, targets
from kernel.bench.cases import KERNELS, Case
from kernel.bench.results import Results, Row

OWN = "glm53_sparse_mla"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(results.FILE.read_text())
    return content


@pytest.fixture
def content(committed: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(committed)


class TestCommitted:
    def test_form(self, committed: dict[str, Any]) -> None:
        assert results.check(committed) == []
        assert list(committed) == ["schema", "machine", "date", "command", "rows"]
        assert committed["schema"] == 1

    def test_every_case_has_ours(self) -> None:
        found = results.read()
        missing = [case.name for case in cases.cases() if found.find(case.name, OWN) is None]
        assert missing == []

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_every_kernel_is_there(self, kernel: str) -> None:
        assert any(row.kernel == kernel for row in results.read().rows)

    def test_readme_has_the_same_numbers(self) -> None:
        assert tables.README.read_text() == tables.update(results.read()), (
            "run: python3 -m kernel.bench --tables"
        )

    def test_picture_is_a_png(self) -> None:
        picture = tables.README.parent / "roofline.png"
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert "roofline.png" in tables.README.read_text()

    def test_bytes_are_the_models(self) -> None:
        found = results.read()
        for case in cases.cases():
            row = found.find(case.name, OWN)
            assert row is not None
            assert row.bytes == case.bytes

    def test_no_row_is_faster_than_memory(self) -> None:
        """Rows that are cold cannot come faster than they can be read."""
        found = results.read()
        limit = targets.read_bandwidth(found) * 1.02
        cold = [row for row in found.rows if row.case.startswith("decode bs256 h16")]
        assert all(row.bytes / row.microseconds < limit for row in cold)


WRONG: dict[str, Any] = {
    "expected the fields schema": lambda c: c.pop("date"),
    "schema: expected 1, found 2": lambda c: c.update(schema=2),
    "machine: expected text, found ''": lambda c: c.update(machine=""),
    "rows: expected a list": lambda c: c.update(rows=[]),
    "row 0: expected the fields case": lambda c: c["rows"][0].pop("cosine"),
    "case: expected one like": lambda c: c["rows"][0].update(case="decode 64 h16 bf16"),
    "kernel: expected one of": lambda c: c["rows"][0].update(kernel="mine"),
    "microseconds: expected more than 0": lambda c: c["rows"][0].update(microseconds=0.0),
    "norm_rel: expected a finite number": lambda c: c["rows"][0].update(norm_rel=float("nan")),
    "bytes: expected a finite number, found True": lambda c: c["rows"][0].update(bytes=True),
    "expected one row, found two": lambda c: c["rows"].append(c["rows"][0]),
    "expected rows of the plain case before it": lambda c: c["rows"].insert(
        0, {**c["rows"][0], "case": c["rows"][0]["case"] + " later"}
    ),
}


class TestForm:
    @pytest.mark.parametrize("words", WRONG)
    def test_each_fault_is_named(self, content: dict[str, Any], words: str) -> None:
        WRONG[words](content)
        assert any(words in problem for problem in results.check(content))

    def test_not_json(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        path.write_text("{")
        with pytest.raises(UsageError, match="expected JSON"):
            results.read(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            results.read(tmp_path / "results.json")

    def test_written_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        results.write(path, results.read())
        assert results.read(path) == results.read()
        assert [one.name for one in tmp_path.iterdir()] == ["results.json"]


def test_names_of_cases() -> None:
    assert Case("decode", 64, 16, "bf16").name == "decode bs64 h16 bf16"
    assert Case("prefill", 4096, 16, "bf16").name == "prefill 4096 h16 bf16"
    names = [case.name for case in cases.cases()]
    assert len(set(names)) == len(names)
    assert all(results.CASE.fullmatch(name) for name in names)


def made(times: dict[tuple[str, str], float], norm_rel: float = 1.9e-3) -> Results:
    rows = [Row(case, kernel, time, 1, 3e-3, norm_rel, 0.9999985)
            for (case, kernel), time in times.items()]  # fmt: skip
    return Results("a machine", "2026-01-01", "a command", tuple(rows))


class TestTargets:
    def test_speedup(self) -> None:
        (target,) = [
            one for one in targets.targets() if one.what == "decode bs64 h16 bf16: over fa3"
        ]
        case = "decode bs64 h16 bf16"
        good, bad = made({(case, OWN): 10.0, (case, "fa3"): 9.5}), made(
            {(case, OWN): 10.0, (case, "fa3"): 9.4}
        )  # fmt: skip
        assert target.is_met(good) and not target.is_met(bad)
        assert target.value(good) == pytest.approx(0.95)

    def test_time_is_an_upper_limit(self) -> None:
        (target,) = [one for one in targets.targets()
                     if one.kind == "stretch" and one.what == "decode bs1 h16 bf16"]  # fmt: skip
        assert target.is_met(made({("decode bs1 h16 bf16", OWN): 10.0}))
        assert not target.is_met(made({("decode bs1 h16 bf16", OWN): 10.1}))

    def test_share_of_bandwidth_counts_rows_alone(self) -> None:
        (target,) = [one for one in targets.targets()
                     if one.what == "decode bs64 h16 bf16: of read bandwidth"]  # fmt: skip
        time = 64 * 2048 * 512 * 2 / 4e6  # microseconds at 4 TB/s
        run = made({("decode bs64 h16 bf16", OWN): time})
        read = Row("decode bs256 h16 bf16 read", "torch", 1.0, 5_000_000, 0.0, 0.0, 1.0)
        both = Results(run.machine, run.date, run.command, (*run.rows, read))
        assert target.value(both) == pytest.approx(0.8)

    def test_one_inaccurate_row_misses(self) -> None:
        (target,) = [one for one in targets.targets() if one.what == "every case: norm-relative"]
        assert target.is_met(made({("decode bs1 h16 bf16", OWN): 1.0}))
        assert not target.is_met(made({("decode bs1 h16 bf16", OWN): 1.0}, norm_rel=2.1e-3))

    def test_a_missing_row_is_an_error(self) -> None:
        target = next(targets.targets())
        with pytest.raises(BrokenError, match="expected a row of"):
            target.value(made({("decode bs1 h16 bf16", OWN): 1.0}))

    def test_both_kinds(self) -> None:
        kinds = [one.kind for one in targets.targets()]
        assert kinds.count("stretch") == 4 and kinds.count("hard") > 40


def test_what_was_not_timed_is_no_miss() -> None:
    """FA3 and FlashMLA do not run on sm_12x; the rest of a run there still counts."""
    case = "decode bs64 h16 bf16"
    run = made({(case, OWN): 10.0, (case, "triton"): 15.0})
    assert tables.missed(run) == [f"{case}: over triton: expected at least 2.00 x, found 1.50 x"]
    text = tables.markdown(run)
    assert f"| hard | {case}: over fa3 | >= 0.95 x |  | not measured |" in text
    assert "Read bandwidth was not measured in the run." in text


def test_readme_without_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no marks\n")
    with pytest.raises(BrokenError, match="expected the marks"):
        tables.update(results.read(), readme)

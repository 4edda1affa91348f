"""Apply and revert on a small tree: bytes, modes, byte code, RECORD, refusals."""

from __future__ import annotations

import bz2
import fcntl
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebuild.errors import (
    BrokenError,
    BuildError,
    EngineError,
    IntegrityError,
    ReviewError,
    UsageError,
)
from imagebuild.patching import apply as engine
from imagebuild.patching.manifest import original_path, sha256
from imagebuild.patching.patch import Edit, NewFile, Outcome, Variant
from imagebuild.patching.series import Series
from tests.support import site, toy
from tests.support.site import RECORD, make_site, picture, record_hash, upstream
from tests.support.toy import CEILING, CONFIG, DEFAULT, ENGINE

PATCHED = site.ENGINE.replace("= 12", "= 90")
TAG = sys.implementation.cache_tag
ENGINE_PYC = f"vllm/core/__pycache__/engine.{TAG}.pyc"
CONFIG_PYC = f"vllm/core/__pycache__/config.{TAG}.pyc"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_site(tmp_path / "site")


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir()
    (folder / "trace.py").write_text("LIMIT = 3\n")
    return folder


def with_file(runtime: Path, *paths: str) -> Series:
    """The toy series and a patch that only adds files."""
    files = tuple(NewFile(source="trace.py", path=path) for path in paths)
    added = toy.patch("vllm_trace_module", variants=(Variant(versions=toy.RANGE, files=files),))
    return toy.series(*toy.toy_series().patches, added, runtime=runtime)


def refusal(kind: type[BuildError], root: Path, series: Series | None = None) -> BuildError:
    """The error of an apply that must leave every byte as it was."""
    before = picture(root)
    with pytest.raises(kind) as caught:
        toy.apply(root, series or toy.toy_series())
    assert type(caught.value) is kind
    assert picture(root) == before
    return caught.value


class TestApplyAndRevert:
    def test_writes_what_the_series_asks_for(self, root: Path) -> None:
        before = upstream(root)
        result = toy.apply(root, toy.toy_series())
        assert result.written == (RECORD, CONFIG, ENGINE)
        assert result.evaluation is not None
        assert result.evaluation.exit_code == 0
        after = upstream(root)
        assert {path for path in after if after[path] != before.get(path)} == set(result.written)
        assert (root / ENGINE).read_text() == PATCHED
        assert (root / CONFIG).read_text() == site.CONFIG.replace("return 7", "return 8")

    def test_the_manifest(self, root: Path, runtime: Path) -> None:
        before = {path: one[2] for path, one in upstream(root).items()}
        series = with_file(runtime, "vllm/extra/deep/trace.py")
        toy.apply(root, series)
        manifest = json.loads((root / ".imagebuild/manifest.json").read_bytes())
        new = sha256(b"LIMIT = 3\n")

        def entry(path: str, *patches: str) -> dict[str, object]:
            after = sha256((root / path).read_bytes())
            return {"before": sha256(before[path]), "after": after, "mode": 0o644,
                    "patches": list(patches)}  # fmt: skip

        patch = {"verdict": "ok", "variant": toy.RANGE}
        assert manifest == {
            "schema": 1,
            "base": {"version": "0.31.0", "commit": "abc123def"},
            "recipe": "toy",
            "gpu_arch": "sm_120",
            "series": series.digest,
            "patches": [
                {"name": "vllm_engine_ceiling", "files": [ENGINE], **patch},
                {"name": "vllm_config_default", "files": [CONFIG], **patch},
                {"name": "vllm_trace_module", "files": ["vllm/extra/deep/trace.py"], **patch},
            ],
            "files": {
                ENGINE: entry(ENGINE, "vllm_engine_ceiling"),
                CONFIG: entry(CONFIG, "vllm_config_default"),
                RECORD: entry(RECORD),
                "vllm/extra/deep/trace.py": {
                    "before": None, "after": new, "mode": 0o644, "patches": ["vllm_trace_module"],
                },
            },
            "folders": ["vllm/extra/deep", "vllm/extra"],
        }  # fmt: skip
        kept = sorted(path.name for path in (root / ".imagebuild/originals").iterdir())
        assert kept == sorted(f"{sha256(before[p])}.bz2" for p in (ENGINE, CONFIG, RECORD))

    @pytest.mark.parametrize("pycs", [None, "timestamp", "checked", "unchecked"])
    @pytest.mark.parametrize("bytecode", ["remove", "rebuild"])
    def test_twice_is_once_and_revert_is_the_identity(
        self, tmp_path: Path, runtime: Path, pycs: site.Pyc | None, bytecode: engine.ByteCode
    ) -> None:
        root = make_site(tmp_path / "site", pycs=pycs)
        (root / ENGINE).chmod(0o600)
        (root / CONFIG).chmod(0o755)
        if pycs:
            (root / ENGINE_PYC).chmod(0o600)
        before = picture(root)
        series = with_file(runtime, "vllm/extra/deep/trace.py", "vllm/core/trace.py")
        first = toy.apply(root, series, bytecode=bytecode)
        once = picture(root)
        assert (once[ENGINE][1], once[CONFIG][1]) == (0o600, 0o755)
        assert once["vllm/core/trace.py"][1] == 0o644
        assert toy.apply(root, series, bytecode=bytecode).written == ()
        assert picture(root) == once
        assert engine.revert(root).written == first.written
        assert picture(root) == before

    def test_bytecode_modes_change_into_each_other(self, tmp_path: Path) -> None:
        root = make_site(tmp_path / "site", pycs="timestamp")
        (root / ENGINE_PYC).chmod(0o600)
        before = picture(root)
        series = toy.toy_series()
        toy.apply(root, series, bytecode="remove")
        removed = picture(root)
        toy.apply(root, series, bytecode="rebuild")
        rebuilt = picture(root)
        assert rebuilt[ENGINE_PYC][1] == 0o600
        assert toy.apply(root, series, bytecode="remove").written == (CONFIG_PYC, ENGINE_PYC)
        assert picture(root) == removed
        toy.apply(root, series, bytecode="rebuild")
        assert picture(root) == rebuilt
        engine.revert(root)
        assert picture(root) == before

    def test_a_changed_series_replaces_the_old_one(self, tmp_path: Path, runtime: Path) -> None:
        trees = {}
        old = with_file(runtime, "vllm/extra/deep/trace.py")
        new = toy.series(
            toy.patch("vllm_engine_ceiling", replace(CEILING, text="        ceiling = 91\n"))
        )
        for name, steps in (("fresh", [new]), ("upgraded", [old, new]), ("back", [old, new, old])):
            trees[name] = make_site(tmp_path / name, pycs="unchecked")
            for step in steps:
                toy.apply(trees[name], step, bytecode="remove")
        assert picture(trees["upgraded"]) == picture(trees["fresh"])
        assert (trees["upgraded"] / CONFIG).read_text() == site.CONFIG
        fresh_old = make_site(tmp_path / "old", pycs="unchecked")
        pristine = picture(fresh_old)
        toy.apply(fresh_old, old, bytecode="remove")
        assert picture(trees["back"]) == picture(fresh_old)
        for tree in trees.values():
            engine.revert(tree)
            assert picture(tree) == pristine

    def test_an_empty_series_takes_everything_back(self, root: Path) -> None:
        before = upstream(root)
        toy.apply(root, toy.toy_series())
        toy.apply(root, toy.series())
        assert upstream(root) == before

    def test_an_empty_folder_of_the_base_stays(self, root: Path, runtime: Path) -> None:
        (root / "vllm/extra").mkdir()
        before = picture(root)
        series = with_file(runtime, "vllm/extra/trace.py")
        toy.apply(root, series)
        toy.apply(root, series)
        engine.revert(root)
        assert picture(root) == before

    def test_a_hard_link_keeps_its_other_end(self, root: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache.py"
        os.link(root / ENGINE, cache)
        os.link(root / RECORD, tmp_path / "RECORD")
        record = (root / RECORD).read_bytes()
        toy.apply(root, toy.toy_series())
        assert cache.read_text() == site.ENGINE
        assert (tmp_path / "RECORD").read_bytes() == record
        assert (root / ENGINE).read_text() == PATCHED

    @pytest.mark.parametrize(
        "data",
        [
            b"\xef\xbb\xbfclass Engine:\n    def limit(self, tokens):\n        ceiling = 12\n",
            b"class Engine:\r\n    def limit(self, tokens):\r\n        ceiling = 12\r\n",
            b"class Engine:\n\tdef limit(self, tokens):\n\n        ceiling = 12\n\n\t\tpass",
            b"class Engine:\n    def limit(self):\n        ceiling = 12\n        pass # \xc3\xa9",
        ],
    )
    def test_the_file_keeps_its_conventions(self, tmp_path: Path, data: bytes) -> None:
        edit = replace(CEILING, anchor="ceiling = 12\n", text="ceiling = 90\n")
        if b"\t" in data:
            edit = replace(edit, scope="")
            data = data.replace(b"        ceiling", b"\t\tceiling")
        root = make_site(tmp_path / "site", {ENGINE: data})
        toy.apply(root, toy.series(toy.patch("vllm_a_b", edit)))
        assert (root / ENGINE).read_bytes() == data.replace(b"= 12", b"= 90")
        engine.revert(root)
        assert (root / ENGINE).read_bytes() == data

    def test_the_arch_and_recipe_are_part_of_the_state(self, root: Path) -> None:
        series = toy.toy_series()
        toy.apply(root, series)
        locked = toy.fingerprints(series, root)
        again = engine.apply(root, series, "sm_121", locked, recipe="toy", bytecode="remove")
        assert again.written == ()
        manifest = json.loads((root / ".imagebuild/manifest.json").read_bytes())
        assert manifest["gpu_arch"] == "sm_121"


class TestRecord:
    def rows(self, root: Path) -> list[str]:
        return (root / RECORD).read_bytes().decode().split("\n")

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    @pytest.mark.parametrize("ends", [True, False])
    def test_rows(self, tmp_path: Path, runtime: Path, newline: str, ends: bool) -> None:
        root = make_site(tmp_path / "site", newline=newline)
        if not ends:
            data = (root / RECORD).read_bytes()
            (root / RECORD).write_bytes(data.removesuffix(newline.encode()))
        expected = (root / RECORD).read_bytes().decode().split(newline)
        toy.apply(root, with_file(runtime, "vllm/z.py", "vllm/a.py"))

        def row(path: str) -> str:
            data = (root / path).read_bytes()
            return f"{path},{record_hash(data)},{len(data)}"

        for path in (ENGINE, CONFIG):
            [index] = [i for i, one in enumerate(expected) if one.startswith(path + ",")]
            assert expected[index] != row(path)
            expected[index] = row(path)
        at = expected.index(f"{RECORD},,")
        expected[at:at] = [row("vllm/a.py"), row("vllm/z.py")]
        assert (root / RECORD).read_bytes() == newline.join(expected).encode()

    def test_a_quoted_path_and_a_blank_line(self, root: Path) -> None:
        odd = "vllm/a, b.py"
        (root / odd).write_text("x = 1\n")
        site.write_record(root)
        (root / RECORD).write_bytes((root / RECORD).read_bytes() + b"\n")
        edit = Edit(label="odd", path=odd, anchor="x = 1\n", text="x = 22\n")
        toy.apply(root, toy.series(toy.patch("vllm_a_b", edit)))
        assert f'"{odd}",{record_hash(b"x = 22" + bytes([10]))},7' in self.rows(root)
        assert self.rows(root)[-2:] == ["", ""]

    def test_each_wheel_has_its_own(self, root: Path, runtime: Path) -> None:
        """A new file is listed once, by the wheel that has the files around it."""
        other = "flashinfer_python-0.7.dist-info/RECORD"
        (root / "flashinfer").mkdir()
        (root / "flashinfer/jit.py").write_text("x = 1\n")
        data = (root / "flashinfer/jit.py").read_bytes()
        (root / other).parent.mkdir()
        (root / other).write_text(f"flashinfer/jit.py,{record_hash(data)},6\n{other},,\n")
        before = picture(root)
        edits = (CEILING, Edit(label="jit", path="flashinfer/jit.py", anchor="x = 1", text="x = 2"))
        files = tuple(
            NewFile(source="trace.py", path=f"{top}/trace.py") for top in ("vllm", "flashinfer")
        )
        series = toy.series(toy.patch("vllm_a_b", *edits, files=files), runtime=runtime)
        toy.apply(root, series)
        listed = {
            record: [row.split(",")[0] for row in (root / record).read_text().split("\n")]
            for record in (RECORD, other)
        }
        assert listed[other] == ["flashinfer/jit.py", "flashinfer/trace.py", other, ""]
        assert "vllm/trace.py" in listed[RECORD]
        assert "flashinfer/trace.py" not in listed[RECORD]
        engine.revert(root)
        assert picture(root) == before

    def test_not_utf8(self, root: Path) -> None:
        (root / RECORD).write_bytes(b"caf\xe9,,\n")
        assert str(refusal(BrokenError, root)) == f"{RECORD}: expected UTF-8, found byte 0xe9"

    def test_none_at_all(self, root: Path) -> None:
        shutil.rmtree(root / "vllm-0.31.0.dist-info")
        assert toy.apply(root, toy.toy_series()).written == (CONFIG, ENGINE)


class TestRefusals:
    def test_drift(self, root: Path) -> None:
        make_site(root, {ENGINE: site.ENGINE.replace("= 12", "= 13")})
        error = refusal(BrokenError, root)
        assert error.exit_code == 3
        assert str(error) == (
            f"{root} (vLLM 0.31.0): nothing was written:\n"
            "  - vllm_engine_ceiling: drifted: 'ceiling': expected the anchor once, found it 0 "
            f"times in Engine.limit; closest text is at line 3 ({ENGINE}:3)\n"
            "  - vllm_engine_ceiling: drifted: no longer true that vllm/core/engine.py has "
            "'ceiling = 12': 'ceiling = 12' in vllm/core/engine.py"
        )
        assert error.hint == (
            "the evidence: build.py patches check vllm_engine_ceiling --against 0.31.0"
        )

    def test_a_partial_patch_stops_the_others(self, root: Path) -> None:
        make_site(root, {ENGINE: PATCHED})
        series = toy.series(
            toy.patch("vllm_both_edits", CEILING, DEFAULT),
            toy.patch("vllm_other_edit", Edit(label="h", path=ENGINE, scope="helper",
                                             anchor="x + 1", text="x + 2")),
        )  # fmt: skip
        assert str(refusal(BrokenError, root, series)) == (
            f"{root} (vLLM 0.31.0): nothing was written:\n"
            "  - vllm_both_edits: partial: only a part is already in this tree: 'ceiling'"
        )

    def test_patched_by_somebody_else(self, root: Path) -> None:
        make_site(root, {ENGINE: PATCHED})
        error = refusal(ReviewError, root)
        assert error.exit_code == 1
        assert (
            "vllm_engine_ceiling: absorbed: every edit's new text is already in this tree"
            in str(error)
        )

    def test_a_review(self, root: Path) -> None:
        patch = toy.patch("vllm_a_b", CEILING, reason=toy.says(Outcome.UNKNOWN))
        assert refusal(ReviewError, root, toy.series(patch)).exit_code == 1

    def test_a_foreign_edit_elsewhere_in_a_target(self, root: Path) -> None:
        changed = site.ENGINE.replace("x + 1", "x + 9")
        (root / ENGINE).write_text(changed)
        error = refusal(BrokenError, root)
        assert error.exit_code == 3
        said, found = record_hash(site.ENGINE.encode()), record_hash(changed.encode())
        assert str(error) == (
            f"{root}: somebody else changed files that we patch:\n"
            f"  - {ENGINE}: {RECORD} says {said}, found {found}"
        )

    def test_a_foreign_edit_of_another_file_is_not_ours_to_judge(self, root: Path) -> None:
        (root / "vllm/__init__.py").write_text("x = 1\n")
        assert toy.apply(root, toy.toy_series()).written == (RECORD, CONFIG, ENGINE)

    @pytest.mark.parametrize(
        ("data", "clause"),
        [
            (b"caf\xe9\n", "is not UTF-8 (byte 3 is 0xe9)"),
            (site.ENGINE.encode().replace(b"\n", b"\r\n", 1), "mixes line ends (1 of 11 are CRLF)"),
        ],
    )
    def test_no_text(self, root: Path, data: bytes, clause: str) -> None:
        make_site(root, {ENGINE: data})
        assert f"drifted: 'ceiling': {ENGINE} {clause}" in str(refusal(BrokenError, root))

    def test_a_symbolic_link(self, root: Path, tmp_path: Path) -> None:
        (root / ENGINE).rename(tmp_path / "engine.py")
        (root / ENGINE).symlink_to(tmp_path / "engine.py")
        assert str(refusal(BrokenError, root)) == (
            f"{root}: {ENGINE} is a symbolic link to {tmp_path}/engine.py"
        )

    def test_a_linked_folder(self, root: Path, tmp_path: Path) -> None:
        (root / "vllm/core").rename(tmp_path / "core")
        (root / "vllm/core").symlink_to(tmp_path / "core")
        error = refusal(BrokenError, root)
        assert f"vllm/core is a symbolic link to {tmp_path}/core" in str(error)
        assert (tmp_path / "core/engine.py").read_text() == site.ENGINE

    def test_our_folder_is_a_link(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "away").mkdir()
        (root / ".imagebuild").symlink_to(tmp_path / "away")
        assert ".imagebuild is a symbolic link" in str(refusal(BrokenError, root))
        assert list((tmp_path / "away").iterdir()) == []

    @pytest.mark.parametrize(
        ("path", "clause"),
        [
            ("vllm/core", "vllm/core is no regular file"),
            (f"{ENGINE}/trace.py", f"{ENGINE} is no folder"),
        ],
    )
    def test_a_new_file_that_cannot_be_there(
        self, root: Path, runtime: Path, path: str, clause: str
    ) -> None:
        error = refusal(BrokenError, root, with_file(runtime, path))
        assert str(error) == f"{root}: {clause}"

    def test_a_new_file_that_upstream_has(self, root: Path, runtime: Path) -> None:
        error = refusal(BrokenError, root, with_file(runtime, "vllm/__init__.py"))
        assert "vllm/__init__.py exists upstream with other content" in str(error)

    def test_no_vllm(self, tmp_path: Path) -> None:
        (tmp_path / "x.py").write_text("x = 1\n")
        error = refusal(UsageError, tmp_path)
        assert error.exit_code == 2
        assert "expected a site-packages with vLLM in it" in str(error)

    @pytest.mark.parametrize("name", ["nowhere", "file"])
    def test_no_folder(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(UsageError, match=r": expected a folder, found: ") as caught:
            toy.apply(tmp_path / name, toy.toy_series())
        assert caught.value.exit_code == 2
        with pytest.raises(UsageError):
            engine.revert(tmp_path / name)

    def test_a_second_writer(self, root: Path) -> None:
        handle = os.open(root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            error = refusal(EngineError, root)
            assert (error.exit_code, error.hint) == (5, "wait for it, then try again")
            assert str(error) == f"{root}: another process is changing this tree"
            with pytest.raises(EngineError):
                engine.revert(root)
        finally:
            os.close(handle)
        assert toy.apply(root, toy.toy_series()).written

    def test_a_forged_manifest_is_not_obeyed(self, root: Path) -> None:
        """What it calls the base's must be what the wheel's RECORD says; none of it is written."""
        toy.apply(root, toy.toy_series())
        path = root / ".imagebuild" / "manifest.json"
        good = path.read_bytes()
        evil = b"import os\n"
        original_path(root, sha256(evil)).write_bytes(bz2.compress(evil))
        config = (root / CONFIG).read_bytes()
        for change, said in [
            ({ENGINE: {"before": sha256(evil)}}, f"{ENGINE}: {RECORD} says"),
            ({ENGINE: {"before": None}}, f"{ENGINE}: {RECORD} lists it"),
            ({"vllm/evil.py": {"before": sha256(evil), "after": None}}, "no RECORD lists it"),
        ]:
            forged = json.loads(good)
            for name, entry in change.items():
                known = forged["files"].get(name, {"mode": 0o644, "patches": []})
                forged["files"][name] = {**known, **entry}
            path.write_text(json.dumps(forged))
            before = picture(root)
            with pytest.raises(IntegrityError, match=re.escape(said)) as caught:
                engine.revert(root)
            assert caught.value.hint == "reinstall the packages from their wheels"
            assert picture(root) == before
        path.write_bytes(good)
        engine.revert(root)
        assert not (root / ".imagebuild").exists()
        assert (root / CONFIG).read_bytes() != config

    def test_nothing_to_revert(self, root: Path) -> None:
        before = picture(root)
        with pytest.raises(UsageError) as caught:
            engine.revert(root)
        assert caught.value.exit_code == 2
        assert str(caught.value) == (
            f"{root}: expected a tree that we patched, found no .imagebuild/manifest.json"
        )
        assert picture(root) == before


class TestAPatchedTreeThatSomebodyChanged:
    @pytest.mark.parametrize("how", ["changed", "removed", "record"])
    def test_is_refused(self, root: Path, how: str) -> None:
        toy.apply(root, toy.toy_series())
        path = RECORD if how == "record" else ENGINE
        expected = sha256((root / path).read_bytes())[:12]
        if how == "removed":
            (root / path).unlink()
            found = "no file"
        else:
            (root / path).write_bytes((root / path).read_bytes() + b"\n")
            found = f"sha256 {sha256((root / path).read_bytes())[:12]}"
        before = picture(root)
        message = (
            f"{root}: files differ from the manifest:\n"
            f"  - {path}: expected sha256 {expected}, found {found}"
        )
        manifest = engine.read_manifest(root)
        assert manifest is not None
        assert engine.changed_files(root, manifest) == [message.split("  - ")[1]]
        for act in (lambda: toy.apply(root, toy.toy_series()), lambda: engine.revert(root),
                    lambda: engine.pristine(root)):  # fmt: skip
            with pytest.raises(BrokenError) as caught:
                act()
            assert (str(caught.value), caught.value.exit_code) == (message, 3)
            assert picture(root) == before

    def test_a_rebuilt_pyc_counts(self, root: Path) -> None:
        toy.apply(root, toy.toy_series(), bytecode="rebuild")
        (root / ENGINE_PYC).write_bytes(b"stale")
        with pytest.raises(BrokenError, match=r"engine\.cpython-\d+\.pyc: expected sha256"):
            engine.revert(root)

    def test_old_byte_code_put_back_counts(self, tmp_path: Path) -> None:
        """With a clamped mtime and the same length Python would run it."""
        root = make_site(tmp_path / "site")
        os.utime(root / ENGINE, (1_700_000_000, 1_700_000_000))
        py_compile.compile(str(root / ENGINE), doraise=True)
        old = (root / ENGINE_PYC).read_bytes()
        toy.apply(root, toy.toy_series(), bytecode="remove")
        os.utime(root / ENGINE, (1_700_000_000, 1_700_000_000))
        (root / ENGINE_PYC).write_bytes(old)
        with pytest.raises(BrokenError, match=r"engine\.cpython-\d+\.pyc: expected no file"):
            engine.pristine(root)

    def test_byte_code_that_python_made_since_does_not(self, tmp_path: Path) -> None:
        root = make_site(tmp_path / "site", pycs="timestamp")
        before = picture(root)
        toy.apply(root, toy.toy_series(), bytecode="remove")
        py_compile.compile(str(root / ENGINE), doraise=True)
        manifest = engine.read_manifest(root)
        assert manifest is not None
        assert engine.changed_files(root, manifest) == []
        engine.revert(root)
        assert picture(root) == before


class TestDamagedState:
    @pytest.mark.parametrize("what", ["manifest", "original", "lost original", "journal"])
    def test_is_exit_code_4(self, root: Path, what: str) -> None:
        toy.apply(root, toy.toy_series())
        original = root / f".imagebuild/originals/{sha256(site.ENGINE.encode())}.bz2"
        manifest = root / ".imagebuild/manifest.json"
        if what == "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-20])
        elif what == "original":
            original.write_bytes(original.read_bytes()[:-4])
        elif what == "lost original":
            original.unlink()
        else:
            (root / ".imagebuild/journal.json").write_text('{"changes": [')
        before = picture(root)
        for act in (lambda: toy.apply(root, toy.toy_series()), lambda: engine.revert(root)):
            with pytest.raises(IntegrityError) as caught:
                act()
            assert (caught.value.exit_code, caught.value.hint) == (
                4, "start from a pristine tree",
            )  # fmt: skip
            assert picture(root) == before

    def test_reading_an_interrupted_tree(self, root: Path) -> None:
        toy.apply(root, toy.toy_series())
        (root / ".imagebuild/journal.json").write_text("{}")
        with pytest.raises(BrokenError) as caught:
            engine.pristine(root)
        assert str(caught.value) == f"{root}: a change of this tree was interrupted"
        assert caught.value.hint == "build.py patches apply or revert completes it"


CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from vllm.core.engine import Engine
from vllm.core.config import default
print(Engine().limit(1000), default("spin"))
"""


def execute(root: Path, *options: str) -> str:
    """What the tree's functions return in a fresh interpreter, which may write byte code."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sys.executable, "-s", "-P", *options, "-c", CALL, str(root)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=clean).stdout


def clamp(root: Path) -> None:
    """What SOURCE_DATE_EPOCH does to an image."""
    for path in root.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))


class TestTheCodeThatRuns:
    """A same-length edit with a clamped mtime: CPython trusts size and whole seconds."""

    @pytest.mark.parametrize("pycs", [None, "timestamp", "checked", "unchecked"])
    @pytest.mark.parametrize("bytecode", ["remove", "rebuild"])
    def test_is_the_new_one_and_after_revert_the_old_one(
        self, tmp_path: Path, pycs: site.Pyc | None, bytecode: engine.ByteCode
    ) -> None:
        root = make_site(tmp_path / "site")
        clamp(root)
        make_site(root, pycs=pycs)
        clamp(root)
        if pycs in (None, "timestamp"):
            for path in (root / "vllm").rglob("*.py"):
                if pycs:
                    py_compile.compile(str(path), doraise=True)
        size = (root / ENGINE).stat().st_size
        assert execute(root) == "12 7\n"
        toy.apply(root, toy.toy_series(), bytecode=bytecode)
        assert (root / ENGINE).stat().st_size == size
        clamp(root)
        assert execute(root) == "90 8\n"
        assert execute(root, "-O") == "90 8\n"
        clamp(root)
        assert execute(root) == "90 8\n"
        engine.revert(root)
        clamp(root)
        assert execute(root) == "12 7\n"
        assert execute(root, "-O") == "12 7\n"

    def test_the_trap_is_real(self, tmp_path: Path) -> None:
        """Without the engine the old code runs: the test above tests something."""
        root = make_site(tmp_path / "site")
        clamp(root)
        assert execute(root) == "12 7\n"
        (root / ENGINE).write_text(PATCHED)
        clamp(root)
        assert execute(root) == "12 7\n"

    def test_after_an_upgrade(self, tmp_path: Path) -> None:
        root = make_site(tmp_path / "site", pycs="timestamp")
        toy.apply(root, toy.toy_series(), bytecode="remove")
        clamp(root)
        assert execute(root) == "90 8\n"
        text = "        ceiling = 91\n"
        upgraded = toy.series(toy.patch("vllm_a_b", replace(CEILING, text=text)))
        toy.apply(root, upgraded, bytecode="remove")
        clamp(root)
        assert execute(root) == "91 7\n"

    def test_byte_code_of_the_patched_source_is_no_original(self, tmp_path: Path) -> None:
        root = make_site(tmp_path / "site")
        toy.apply(root, toy.toy_series(), bytecode="remove")
        clamp(root)
        assert execute(root) == "90 8\n"
        assert (root / ENGINE_PYC).exists()
        toy.apply(root, toy.toy_series(), bytecode="rebuild")
        engine.revert(root)
        clamp(root)
        assert not (root / ENGINE_PYC).exists()
        assert execute(root) == "12 7\n"

    def test_rebuilt_byte_code_is_unchecked_and_the_same_every_time(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built = []
        for seed in ("1", "2", "random"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(root.parent / "prefix"))
            monkeypatch.setenv("PYTHONOPTIMIZE", "1")
            toy.apply(root, toy.toy_series(), bytecode="rebuild")
            built.append([(root / path).read_bytes() for path in (ENGINE_PYC, CONFIG_PYC)])
            engine.revert(root)
        assert built[0] == built[1] == built[2]
        assert [data[4:8] for data in built[0]] == [b"\1\0\0\0"] * 2  # hash-based, unchecked

    def test_a_cache_prefix_leads_nothing_out_of_the_tree(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
        result = toy.apply(root, toy.toy_series(), bytecode="rebuild")
        assert result.written == (RECORD, CONFIG_PYC, ENGINE_PYC, CONFIG, ENGINE)
        assert not (tmp_path / "prefix").exists()

    def test_a_top_level_module(self, root: Path) -> None:
        (root / "six.py").write_text("x = 1\n")
        edit = Edit(label="x", path="six.py", anchor="x = 1", text="x = 2")
        series = toy.series(toy.patch("six_a_b", edit))
        before = picture(root)
        toy.apply(root, series, bytecode="rebuild")
        assert (root / f"__pycache__/six.{TAG}.pyc").is_file()
        engine.revert(root)
        assert picture(root) == before

    def test_only_the_interpreters_own_site_is_rebuilt(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toy.apply(root, toy.toy_series(), bytecode=None)
        assert not (root / ENGINE_PYC).exists()
        engine.revert(root)
        monkeypatch.syspath_prepend(str(root))
        toy.apply(root, toy.toy_series(), bytecode=None)
        assert (root / ENGINE_PYC).exists()

    def test_pycs_of_other_interpreters_and_levels_go(self, root: Path) -> None:
        cache = root / "vllm/core/__pycache__"
        cache.mkdir()
        mine = ["engine.cpython-39.pyc", "engine.cpython-313t.pyc", "engine.pypy310.pyc",
                "engine.cpython-312.opt-2.pyc"]  # fmt: skip
        others = ["engine2.cpython-312.pyc", "engine.txt", "my.engine.cpython-312.pyc"]
        for name in mine + others:
            (cache / name).write_bytes(b"x")
        toy.apply(root, toy.toy_series(), bytecode="remove")
        assert sorted(path.name for path in cache.iterdir()) == sorted(others)
        engine.revert(root)
        assert sorted(path.name for path in cache.iterdir()) == sorted(mine + others)


WORDS = st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"])


@st.composite
def modules(draw: st.DrawFn) -> tuple[dict[str, bytes], list[Edit]]:
    """Generated modules in varied conventions, and edits that all match once."""
    files, edits = {}, []
    for index in range(draw(st.integers(1, 3))):
        path = f"vllm/gen{index}.py"
        lines = []
        for function in range(draw(st.integers(1, 3))):
            lines.append(f"def {draw(WORDS)}_{function}(x):")
            for line in range(draw(st.integers(1, 4))):
                text = (
                    f"    {draw(WORDS)}_{index}_{function}_{line} = x + {draw(st.integers(0, 99))}"
                )
                lines.append(text)
                if draw(st.booleans()):
                    kind = draw(st.sampled_from(["replace", "insert_before", "insert_after"]))
                    new = f"    {draw(WORDS)}_new = x * {draw(st.integers(100, 999))}"
                    scope = lines[-line - 2].split()[1].split("(")[0] if draw(st.booleans()) else ""
                    where = {"anchor": text + "\n", "text": f"{new}_{len(edits)}\n"}
                    edits.append(Edit(label=f"e{len(edits)}", path=path, kind=kind,
                                      scope=scope, **where))  # fmt: skip
            lines.append("    return x")
        text = "\n".join(lines) + "\n"
        if draw(st.booleans()):
            text = "\ufeff" + text
        if draw(st.booleans()):
            text = text.replace("\n", "\r\n")
        if draw(st.booleans()):
            text = text.removesuffix("\n").removesuffix("\r")
        files[path] = text.encode()
    return files, edits


class TestProperties:
    @given(
        modules(), st.sampled_from(["remove", "rebuild"]), st.sampled_from([0o644, 0o600, 0o755])
    )
    def test_revert_is_the_identity_and_twice_is_once(
        self, made: tuple[dict[str, bytes], list[Edit]], bytecode: engine.ByteCode, mode: int
    ) -> None:
        files, edits = made
        series = toy.series(*(toy.patch(f"vllm_gen_{e.label}", e) for e in edits))
        with tempfile.TemporaryDirectory() as folder:
            root = make_site(Path(folder), files)
            (root / "vllm/gen0.py").chmod(mode)
            before = picture(root)
            chosen: engine.ByteCode = "remove" if len(edits) % 4 else bytecode
            toy.apply(root, series, bytecode=chosen)
            once = picture(root)
            touched = {edit.path for edit in edits}
            assert all((once[path] != before[path]) is (path in touched) for path in files)
            assert toy.apply(root, series, bytecode=chosen).written == ()
            assert picture(root) == once
            engine.revert(root)
            assert picture(root) == before

    @given(modules(), st.randoms(use_true_random=False))
    def test_the_order_of_unrelated_patches_does_not_matter(
        self, made: tuple[dict[str, bytes], list[Edit]], random: object
    ) -> None:
        files, edits = made
        patches = [toy.patch(f"vllm_gen_{edit.label}", edit) for edit in edits]
        shuffled = list(patches)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as folder:
            one = make_site(Path(folder) / "one", files)
            two = make_site(Path(folder) / "two", files)
            toy.apply(one, toy.series(*patches))
            toy.apply(two, toy.series(*shuffled))
            assert upstream(one) == upstream(two)

    ANCHOR = (
        "        workspace = self.allocate(tokens, heads)\n"
        "        if workspace is None:\n"
        "            raise MemoryError(heads)\n"
    )
    FILLER = "".join(f"        step_{i} = self.{w}({i})\n" for i, w in enumerate(
        ["load", "store", "reduce", "gather", "scatter", "fold"]))  # fmt: skip

    @given(st.data())
    def test_any_damage_inside_an_anchor_is_drift(self, data: st.DataObject) -> None:
        start = "class Worker:\n    def run(self, tokens, heads):\n" + self.FILLER
        text = start + self.ANCHOR + self.FILLER + "        return workspace\n"
        line = text[: text.index(self.ANCHOR)].count("\n") + 1
        kind = data.draw(st.sampled_from(["delete", "insert", "substitute"]))
        at = data.draw(st.integers(1, len(self.ANCHOR) - 1))
        char = data.draw(st.sampled_from("aZ0_ (]'\"\\#:é\n\t").filter(
            lambda c: c != self.ANCHOR[at] and c != self.ANCHOR[at - 1]))  # fmt: skip
        changed = {
            "delete": self.ANCHOR[:at] + self.ANCHOR[at + 1 :],
            "insert": self.ANCHOR[:at] + char + self.ANCHOR[at:],
            "substitute": self.ANCHOR[:at] + char + self.ANCHOR[at + 1 :],
        }[kind]
        damaged = text.replace(self.ANCHOR, changed)
        if self.ANCHOR in damaged:
            return
        edit = Edit(label="workspace", path="vllm/w.py", scope="Worker.run", anchor=self.ANCHOR,
                    text="        workspace = self.reserve(tokens)\n")  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            root = make_site(Path(folder), {"vllm/w.py": damaged})
            before = picture(root)
            with pytest.raises(BrokenError) as caught:
                toy.apply(root, toy.series(toy.patch("vllm_a_b", edit)))
            assert picture(root) == before
            [report] = toy.judge(root, toy.patch("vllm_a_b", edit)).reports
        assert report.verdict.value == "drifted"
        [found] = report.edits
        assert (found.state.value, found.label, found.path) == ("drifted", "workspace", "vllm/w.py")
        assert abs(found.line - line) <= 1
        assert "drifted: 'workspace': " in str(caught.value)
        assert str(caught.value).endswith(f"(vllm/w.py:{found.line})")

    @given(st.data())
    def test_damage_to_the_scopes_own_name(self, data: st.DataObject) -> None:
        anchor = "    def limit(self, tokens):\n"
        edit = replace(CEILING, anchor=anchor, text="    def limit(self, tokens, floor=0):\n")
        at = data.draw(st.integers(anchor.index("limit"), anchor.index("(") - 1))
        changed = anchor[:at] + data.draw(st.sampled_from(["", "x", "_"])) + anchor[at + 1 :]
        with tempfile.TemporaryDirectory() as folder:
            text = site.ENGINE.replace(anchor, changed)
            root = make_site(Path(folder), {ENGINE: text})
            before = picture(root)
            with pytest.raises(BrokenError):
                toy.apply(root, toy.series(toy.patch("vllm_a_b", edit)))
            assert picture(root) == before
            [report] = toy.judge(root, toy.patch("vllm_a_b", edit)).reports
        [found] = report.edits
        assert (found.state.value, found.label, found.path, found.line) == (
            "missing", "ceiling", ENGINE, 2,
        )  # fmt: skip
        assert found.message == (f"{ENGINE} has no Engine.limit; closest text is at {ENGINE}:2")

"""Unified diffs as patches: exact or not at all, with offsets reported."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from imagebuild.errors import UsageError
from imagebuild.patching.evaluate import Evaluation, Verdict, evaluate
from imagebuild.patching.series import Series, load_series
from imagebuild.patching.tree import DirTree, Identity, OverlayTree
from imagebuild.patching.unified import read_diff
from tests.support import site, toy

HEAD = """\
Subject: Raise the ceiling.
Symptom: requests are cut
 at twelve.
Forwarded: https://example.org/7
Upstream-Status: submitted
Versions: >=0.31,<0.32
Drop-When: the ceiling is an argument.
"""
RAISED = site.ENGINE.replace("ceiling = 12", "ceiling = 90")
ABOVE = "".join(f"# line {n}\n" for n in range(9))


def diff(old: str, new: str, path: str = toy.ENGINE, head: str = HEAD, prefix: str = "") -> str:
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True),
                                 f"a/{prefix}{path}", f"b/{prefix}{path}")  # fmt: skip
    return head + "---\n" + "".join(lines)


def write(folder: Path, files: dict[str, str], order: list[str] | None = None) -> Path:
    patches = folder / "patches"
    patches.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (patches / name).write_text(text)
    listed = order or [name for name in files if name.endswith(".patch")]
    (folder / "series.toml").write_text(f"patches = {listed!r}\n")
    return patches


def load(folder: Path) -> Series:
    return load_series(folder / "series.toml", folder / "patches", folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "site"
    site.make_site(found)
    return found


def judged(series: Series, root: Path, **files: str) -> Evaluation:
    data: dict[str, bytes | None] = {toy.ENGINE: files["engine"].encode()} if files else {}
    tree = OverlayTree(DirTree(root), data, Identity("0.31.0"))
    return evaluate(series, tree, "sm_120", toy.locked_for(series, tree))


def test_its_fields_say_what_a_docstring_would(tmp_path: Path) -> None:
    write(tmp_path, {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED)})
    series = load(tmp_path)
    (patch,) = series.patches
    assert (patch.name, patch.status) == ("vllm-7-ceiling", "submitted")
    assert patch.upstream == "https://example.org/7"
    assert [variant.versions for variant in patch.variants] == [">=0.31,<0.32"]
    doc = series.docs[patch.name]
    assert doc.startswith("Raise the ceiling.\n")
    assert "Symptom: requests are cut at twelve.\n" in doc
    assert "Drop when: the ceiling is an argument.\n" in doc
    (edit,) = patch.variants[0].edits
    assert (edit.path, edit.line) == (toy.ENGINE, 1)


def test_it_is_applied_reverted_and_its_offset_reported(tmp_path: Path, root: Path) -> None:
    write(tmp_path, {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED)})
    series = load(tmp_path)
    evaluation = judged(series, root)
    (report,) = evaluation.reports
    assert report.verdict is Verdict.OK
    assert [finding.code for finding in report.findings] == ["note"]
    assert "nothing shows whether upstream still needs it" in report.findings[0].message
    before = site.picture(root)
    toy.apply(root, series)
    assert (root / toy.ENGINE).read_text() == RAISED
    assert toy.apply(root, series).written == ()
    toy.engine.revert(root)
    assert site.picture(root) == before
    moved = judged(series, root, engine=ABOVE + site.ENGINE)
    assert moved.files[toy.ENGINE].decode() == ABOVE + RAISED
    offset = next(one for one in moved.reports[0].findings if one.code == "offset")
    assert "fits 9 lines below where the diff has it" in offset.message
    assert (offset.file, offset.line) == (toy.ENGINE, 10)


@pytest.mark.parametrize(
    "engine",
    [
        site.ENGINE.replace("ceiling = 12", "ceiling = 13"),
        site.ENGINE.replace("def limit", "def  limit"),  # only a context line: fuzz would take it
        site.ENGINE + "\n\n" + site.ENGINE,  # twice
    ],
)
def test_fuzz_is_zero(tmp_path: Path, root: Path, engine: str) -> None:
    write(tmp_path, {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED)})
    assert judged(load(tmp_path), root, engine=engine).reports[0].verdict is Verdict.DRIFTED


def test_one_that_upstream_took_is_absorbed(tmp_path: Path, root: Path) -> None:
    write(tmp_path, {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED)})
    assert judged(load(tmp_path), root, engine=RAISED).reports[0].verdict is Verdict.ABSORBED


def test_a_later_one_is_made_on_top_of_an_earlier_one(tmp_path: Path, root: Path) -> None:
    higher = RAISED.replace("ceiling = 90", "ceiling = 99")
    files = {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED),
             "vllm-8-higher.patch": diff(RAISED, higher)}  # fmt: skip
    write(tmp_path, files)
    series = load(tmp_path)
    assert [patch.needs for patch in series.patches] == [(), ("vllm-7-ceiling",)]
    evaluation = judged(series, root)
    assert evaluation.exit_code == 0
    assert evaluation.files[toy.ENGINE].decode() == higher
    write(tmp_path, files, ["vllm-8-higher.patch", "vllm-7-ceiling.patch"])
    assert judged(load(tmp_path), root).exit_code == 3


PROBES = """\
from imagebuild.patching.patch import Answer, Probe
REASON = Probe("limited to twelve", lambda t: Answer.of(b"12" in t.read(%r), "seen"), (%r,))
EFFECT = Probe("not limited", lambda t: Answer.of(b"%s" in t.read(%r), "seen"), (%r,))
"""


@pytest.mark.parametrize(("word", "verdict"), [("90", Verdict.OK), ("91", Verdict.DEFEATED)])
def test_beside_modules_and_with_probes(
    tmp_path: Path, root: Path, word: str, verdict: Verdict
) -> None:
    head = f"{HEAD}Probes: ceiling_probes\nKnob: CEILING\n"
    path = toy.ENGINE
    write(tmp_path, {"vllm-7-ceiling.patch": diff(site.ENGINE, RAISED, head=head),
                     "ceiling_probes.py": PROBES % (path, path, word, path, path)})  # fmt: skip
    series = load(tmp_path)
    assert series.patches[0].knob == "CEILING"
    (report,) = judged(series, root).reports
    assert report.verdict is verdict
    assert [one.code for one in report.findings] == ([] if word == "90" else ["no-effect"])


def test_strip_takes_folders_of_the_repository_away(tmp_path: Path) -> None:
    head = f"{HEAD}Strip: 2\n"
    write(tmp_path, {"vllm-7-a.patch": diff(site.ENGINE, RAISED, head=head, prefix="src/")})
    assert load(tmp_path).patches[0].variants[0].edits[0].path == toy.ENGINE


GIT = "diff --git a/vllm/x.py b/vllm/x.py\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (diff(site.ENGINE, RAISED, head="Subject: x\n"), "found no Symptom, Versions, Drop-When"),
        (HEAD, "expected a unified diff, found no hunk"),
        (HEAD + GIT + "new file mode 100644\n--- /dev/null\n+++ b/x\n", "adds a file: name it in"),
        (HEAD + "--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n", "adds or deletes a file"),
        (HEAD + GIT + "deleted file mode 100644\n", "deletes a file"),
        (HEAD + GIT + "rename from a\nrename to b\n", "renames a file"),
        (HEAD + GIT + "GIT binary patch\n", "is binary"),
        (HEAD + GIT + "old mode 100644\nnew mode 100755\n", "changes permissions"),
        (HEAD + "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n", "expected 2 old and 2 new lines"),
        (HEAD + "--- a/x\n+++ b/x\n@@ -1,1 +1,1 @@\n-a\n?b\n", "expected 1 old and 1 new lines"),
        (HEAD + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n",
         "a final line break"),
        (HEAD + "--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "expected context around the change"),
        (HEAD + GIT + "@@ -1 +1 @@\n-a\n+b\n", "expected ---/+++ lines before a hunk"),
        (HEAD + "Strip: 9\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "nothing is left of 'b/x'"),
        (HEAD + "Strip: x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "Strip: expected how many"),
        (HEAD.replace("submitted", "great") + "--- a/x\n", "Upstream-Status: expected one of"),
        (HEAD + "--- a/x\r\n+++ b/x\n", "lines that end with"),
    ],
)  # fmt: skip
def test_what_is_no_plain_diff_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a-b.patch"
    path.write_bytes(text.encode())
    with pytest.raises(UsageError) as caught:
        read_diff(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_malformed_one_names_itself_and_the_rest_is_judged(tmp_path: Path) -> None:
    files = {"vllm-7-a.patch": "nothing", "Bad.patch": HEAD, "vllm-8-b.patch": HEAD}
    write(tmp_path, files)
    with pytest.raises(UsageError) as caught:
        load(tmp_path)
    for said in ("vllm-7-a.patch: expected the fields", "Bad: expected a name <project>-<what>",
                 "vllm-8-b.patch: expected a unified diff"):  # fmt: skip
        assert said in str(caught.value)


def test_an_empty_context_line_may_have_lost_its_space(tmp_path: Path, root: Path) -> None:
    text = diff(site.ENGINE, site.ENGINE.replace("return x + 1", "return x + 2"))
    write(tmp_path, {"vllm-7-a.patch": text.replace("\n \n", "\n\n")})
    assert judged(load(tmp_path), root).exit_code == 0

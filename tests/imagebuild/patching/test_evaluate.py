"""Every verdict, reached on purpose, with its finding, level and exit code."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.errors import EngineError
from imagebuild.patching.evaluate import (
    Finding,
    PatchReport,
    Verdict,
    ask,
    contexts_of,
    evaluate,
    fingerprint_of,
    wanted_files,
)
from imagebuild.patching.patch import Answer, Drop, NewFile, Outcome, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import NotThere
from imagebuild.patching.tree import DirTree, Tree
from tests.support import site, toy
from tests.support.toy import CEILING, CONFIG, DEFAULT, ENGINE, contains, holds, says

NAME = "vllm_engine_ceiling"


def judge(root: Path, patch: Patch, *, locked: bool = True) -> PatchReport:
    [report] = toy.judge(root, patch, locked=locked).reports
    return report


def outcome(report: PatchReport) -> tuple[Verdict, int, bool, list[Finding]]:
    return report.verdict, report.exit_code, report.is_applied, report.findings


class TestVerdicts:
    def test_ok(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        evaluation = toy.judge(root, toy.patch(NAME, CEILING))
        [report] = evaluation.reports
        assert outcome(report) == (Verdict.OK, 0, True, [])
        assert evaluation.exit_code == 0
        assert evaluation.files == {ENGINE: site.ENGINE.replace("= 12", "= 90").encode()}

    def test_not_applicable_before_the_first_range(self, tmp_path: Path) -> None:
        report = judge(site.make_site(tmp_path, version="0.30.0"), toy.patch(NAME, CEILING))
        why = "0.30.0 is before its first range, >=0.31,<0.32"
        assert outcome(report) == (
            Verdict.NOT_APPLICABLE, 0, False, [Finding("info", "not-applicable", why)],
        )  # fmt: skip

    def test_not_applicable_on_another_gpu_arch(self, tmp_path: Path) -> None:
        patch = replace(toy.patch(NAME, CEILING), gpu_arches=("sm_121",))
        report = judge(site.make_site(tmp_path), patch)
        assert report.verdict is Verdict.NOT_APPLICABLE
        assert report.findings[0].message == "it matters for sm_121, not for sm_120"

    def test_absorbed_by_its_probe(self, tmp_path: Path) -> None:
        absorbed = says(Outcome.HOLDS, "upstream caps", "it caps")
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, absorbed=absorbed))
        assert outcome(report) == (
            Verdict.ABSORBED, 1, False,
            [Finding("warning", "absorbed", "upstream caps: it caps",
                     fix="declare a drop for this range, or drop the patch")],
        )  # fmt: skip
        assert report.edits == []

    @pytest.mark.parametrize("outcome", [Outcome.FAILS, Outcome.UNKNOWN])
    def test_not_absorbed_unless_proven(self, tmp_path: Path, outcome: Outcome) -> None:
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, absorbed=says(outcome)))
        assert report.verdict is Verdict.OK

    def test_absorbed_by_its_text(self, tmp_path: Path) -> None:
        there = {ENGINE: site.ENGINE.replace("= 12", "= 90")}
        report = judge(site.make_site(tmp_path, there), toy.patch(NAME, CEILING))
        assert (report.verdict, report.exit_code, report.is_applied) == (Verdict.ABSORBED, 1, False)
        assert [(f.level, f.code) for f in report.findings] == [("warning", "already-there")]

    def test_declared_drop_with_proof(self, tmp_path: Path) -> None:
        drop = Drop(versions=">=0.32,<0.34", proof=says(Outcome.HOLDS, "x", "seen there"),
                    sentence="Upstream has it (vllm#1).")  # fmt: skip
        root = site.make_site(tmp_path, version="0.33.0")
        report = judge(root, toy.patch(NAME, CEILING, drops=(drop,)))
        message = "Upstream has it (vllm#1). Proof: seen there."
        assert outcome(report) == (
            Verdict.ABSORBED, 0, False, [Finding("info", "dropped", message)],
        )  # fmt: skip
        assert report.declared

    @pytest.mark.parametrize("found", [Outcome.FAILS, Outcome.UNKNOWN])
    def test_declared_drop_without_proof(self, tmp_path: Path, found: Outcome) -> None:
        drop = Drop(versions=">=0.32,<0.34", proof=says(found), sentence="Upstream has it.")
        root = site.make_site(tmp_path, version="0.33.0")
        report = judge(root, toy.patch(NAME, CEILING, drops=(drop,)))
        assert (report.verdict, report.exit_code, report.declared) == (Verdict.DEFEATED, 3, True)
        assert report.findings == [
            Finding("error", "drop-not-proven",
                    f"declared as dropped for >=0.32,<0.34, but the proof {found.value}: seen",
                    fix="add a variant for this release, or correct the proof")
        ]  # fmt: skip

    def test_reason_gone(self, tmp_path: Path) -> None:
        reason = says(Outcome.FAILS, "it dies", "it lives")
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, reason=reason))
        assert outcome(report) == (
            Verdict.REASON_GONE, 1, True,
            [Finding("warning", "reason-gone", "no longer true that it dies: it lives",
                     fix="declare a drop for this range, or drop the patch")],
        )  # fmt: skip

    def test_reason_unknown(self, tmp_path: Path) -> None:
        reason = says(Outcome.UNKNOWN, "it dies", "no such file")
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, reason=reason))
        message = "cannot tell whether it dies: no such file"
        assert outcome(report) == (
            Verdict.REVIEW, 1, True, [Finding("warning", "reason-unknown", message)],
        )  # fmt: skip

    @pytest.mark.parametrize("found", [Outcome.FAILS, Outcome.UNKNOWN])
    def test_defeated_without_effect(self, tmp_path: Path, found: Outcome) -> None:
        effect = says(found, "it caps", "it does not")
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, effect=effect))
        message = f"after the edits it {found.value} that it caps: it does not"
        assert outcome(report) == (
            Verdict.DEFEATED, 3, True, [Finding("error", "no-effect", message)],
        )  # fmt: skip

    def test_the_effect_is_asked_of_the_patched_tree(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path)
        new, old = contains(ENGINE, "= 90"), contains(ENGINE, "= 12")
        assert judge(root, toy.patch(NAME, CEILING, effect=new, reason=old)).verdict is Verdict.OK
        assert judge(root, toy.patch(NAME, CEILING, effect=old)).verdict is Verdict.DEFEATED
        gone = judge(root, toy.patch(NAME, CEILING, reason=new))
        assert gone.verdict is Verdict.REASON_GONE

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("        ceiling = (90\n", "'(' was never closed"),
            ("        ceiling = 90\n        break\n", "'break' outside loop"),
            ("        nonlocal ceiling\n", "no binding for nonlocal 'ceiling' found"),
        ],
    )
    def test_defeated_by_syntax(self, tmp_path: Path, text: str, why: str) -> None:
        report = judge(site.make_site(tmp_path), toy.patch(NAME, replace(CEILING, text=text)))
        assert (report.verdict, report.exit_code) == (Verdict.DEFEATED, 3)
        [finding] = report.findings
        assert (finding.level, finding.code, finding.file) == ("error", "syntax", ENGINE)
        assert finding.message.startswith(f"the patched file does not compile: {why}")

    def test_upstream_warnings_are_no_finding(self, tmp_path: Path) -> None:
        edit = replace(CEILING, text="        ceiling = len('\\d') is 2\n")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert judge(site.make_site(tmp_path), toy.patch(NAME, edit)).verdict is Verdict.OK

    @pytest.mark.parametrize(
        ("text", "verdict", "line"),
        [
            (site.ENGINE.replace("= 12", "= 13"), Verdict.DRIFTED, 3),
            (site.ENGINE.replace("def limit", "def capped"), Verdict.MOVED, 3),
            ("x = 1\n", Verdict.MISSING, 1),
        ],
    )
    def test_text_that_does_not_match(
        self, tmp_path: Path, text: str, verdict: Verdict, line: int
    ) -> None:
        evaluation = toy.judge(site.make_site(tmp_path, {ENGINE: text}), toy.patch(NAME, CEILING))
        [report] = evaluation.reports
        assert (report.verdict, report.exit_code, report.is_applied) == (verdict, 3, False)
        [finding] = report.findings
        assert (finding.level, finding.code, finding.line) == ("error", verdict.value, line)
        assert (finding.file, finding.message[:11]) == (ENGINE, "'ceiling': ")
        assert evaluation.files == {}

    def test_partial(self, tmp_path: Path) -> None:
        root = site.make_site(tmp_path, {ENGINE: site.ENGINE.replace("= 12", "= 90")})
        report = judge(root, toy.patch(NAME, CEILING, DEFAULT))
        assert outcome(report) == (
            Verdict.PARTIAL, 3, False,
            [Finding("error", "partial", "only a part is already in this tree: 'ceiling'",
                     fix="start from a pristine tree, or write a variant for this one")],
        )  # fmt: skip

    def test_collision(self, tmp_path: Path) -> None:
        first, second = toy.patch("vllm_first_edit", CEILING), toy.patch(NAME, CEILING)
        evaluation = toy.judge(site.make_site(tmp_path), first, second)
        assert [r.verdict for r in evaluation.reports] == [Verdict.OK, Verdict.COLLISION]
        assert [r.is_applied for r in evaluation.reports] == [True, False]
        assert evaluation.exit_code == 3


class TestContext:
    def locked(self, root: Path, values: dict[str, str] | None, patch: Patch) -> PatchReport:
        [report] = evaluate(
            toy.series(patch), DirTree(root), None, lambda _name, _versions: values
        ).reports
        return report

    def test_not_locked(self, tmp_path: Path) -> None:
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING), locked=False)
        assert outcome(report) == (
            Verdict.REVIEW, 1, True,
            [Finding("warning", "not-locked", "the lock holds no fingerprints for this patch",
                     fix="read it, then build.py lock update --base-version 0.31.0")],
        )  # fmt: skip

    def test_changed_missing_and_unlocked_symbols(self, tmp_path: Path) -> None:
        relies_on = (Symbol(CONFIG, "default"), Symbol(ENGINE, "nothing"), Symbol(ENGINE, "helper"))
        patch = toy.patch(NAME, CEILING, relies_on=relies_on)
        root = site.make_site(tmp_path)
        tree = DirTree(root)
        good = {
            str(s): fingerprint_of(tree, s) or "t1:gone" for s in contexts_of(patch.variants[0])
        }
        del good[f"{ENGINE}::helper"]
        site.make_site(root, {CONFIG: site.CONFIG.replace("return 0", "return 1")})
        report = self.locked(root, good, patch)
        assert (report.verdict, report.exit_code) == (Verdict.REVIEW, 1)
        assert [(f.code, f.message) for f in report.findings] == [
            ("context-changed", f"{CONFIG}::default changed"),
            ("context-changed", f"{ENGINE}::helper is not in the lock"),
            ("context-changed", f"{ENGINE}::nothing is not in the tree"),
        ]
        assert [(str(c.symbol), c.locked, c.found) for c in report.contexts][1:2] == [
            (f"{ENGINE}::Engine.limit", good[f"{ENGINE}::Engine.limit"],
             good[f"{ENGINE}::Engine.limit"])
        ]  # fmt: skip

    def test_the_edited_scope_changed_around_the_anchor(self, tmp_path: Path) -> None:
        patch, root = toy.patch(NAME, CEILING), site.make_site(tmp_path)
        good = dict(toy.locked_for(toy.series(patch), DirTree(root))(NAME, toy.RANGE))
        comment = site.ENGINE.replace("ceiling = 12\n", "ceiling = 12\n        # note\n")
        site.make_site(root, {ENGINE: comment})
        assert self.locked(root, good, patch).verdict is Verdict.OK
        site.make_site(root, {ENGINE: site.ENGINE.replace("min(", "max(")})
        report = self.locked(root, good, patch)
        assert report.verdict is Verdict.REVIEW
        assert [f.message for f in report.findings] == [f"{ENGINE}::Engine.limit changed"]

    def test_a_gone_reason_stays_the_verdict(self, tmp_path: Path) -> None:
        patch = toy.patch(NAME, CEILING, reason=says(Outcome.FAILS))
        report = self.locked(site.make_site(tmp_path), {}, patch)
        assert report.verdict is Verdict.REASON_GONE
        assert [f.code for f in report.findings] == ["reason-gone", "context-changed"]


class TestBeyondTheRange:
    @pytest.mark.parametrize("version", ["0.34.0", "0.1.dev20051+g487ecf187", "dev"])
    def test_the_best_verdict_is_review(self, tmp_path: Path, version: str) -> None:
        report = judge(site.make_site(tmp_path, version=version), toy.patch(NAME, CEILING))
        assert (report.verdict, report.exit_code, report.is_applied) == (Verdict.REVIEW, 1, True)
        assert [f.code for f in report.findings] == ["beyond-range"]

    def test_a_worse_verdict_holds(self, tmp_path: Path) -> None:
        changed = {ENGINE: site.ENGINE.replace("= 12", "= 13")}
        root = site.make_site(tmp_path, changed, version="0.34.0")
        assert judge(root, toy.patch(NAME, CEILING)).verdict is Verdict.DRIFTED

    def test_drops_alone_are_never_green(self, tmp_path: Path) -> None:
        drop = Drop(versions=">=0.31,<0.32", proof=holds(), sentence="Upstream.")
        root = site.make_site(tmp_path, version="0.34.0")
        report = judge(root, toy.patch(NAME, variants=(), drops=(drop,)))
        assert (report.verdict, report.exit_code) == (Verdict.REVIEW, 1)
        assert [f.code for f in report.findings] == ["beyond-range"]


class TestProbes:
    @pytest.mark.parametrize(
        ("error", "evidence"),
        [
            (FileNotFoundError("vllm/x.py"), "vllm/x.py is not in the tree"),
            (NotThere("no Engine in it"), "no Engine in it"),
            (IndexError("list index"), "the probe itself failed: IndexError('list index')"),
        ],
    )
    def test_what_keeps_it_from_an_answer(self, error: Exception, evidence: str) -> None:
        def check(_tree: Tree) -> Answer:
            raise error

        assert ask(Probe("x", check), DirTree(Path())) == Answer(Outcome.UNKNOWN, evidence)

    def test_a_lost_network_is_no_answer(self) -> None:
        def check(_tree: Tree) -> Answer:
            raise EngineError("no network")

        with pytest.raises(EngineError, match=r"^no network$"):
            ask(Probe("x", check), DirTree(Path()))

    def test_notes_are_reported_and_change_nothing(self, tmp_path: Path) -> None:
        notes = (says(Outcome.HOLDS, "a stock route exists", "see b"), says(Outcome.FAILS))
        report = judge(site.make_site(tmp_path), toy.patch(NAME, CEILING, notes=notes))
        message = "a stock route exists: see b"
        assert outcome(report) == (Verdict.OK, 0, True, [Finding("info", "note", message)])


def test_wanted_files_are_what_judging_reads(tmp_path: Path) -> None:
    patch = toy.patch(
        NAME, CEILING, relies_on=(Symbol("vllm/__init__.py"), Symbol("vllm/gone.py")),
        reason=contains(CONFIG, "x"),
    )  # fmt: skip
    drop = Drop(versions=">=0.31,<0.32", proof=contains("vllm/data/kernel.cuh", "x"), sentence="")
    dropped = toy.patch("vllm_b_c", variants=(), drops=(drop,))
    tree = DirTree(site.make_site(tmp_path))
    assert wanted_files(toy.series(patch, dropped), tree, None) == [
        "vllm/__init__.py", CONFIG, ENGINE, "vllm/data/kernel.cuh",
    ]  # fmt: skip


def test_a_cpp_scope(tmp_path: Path) -> None:
    root = site.make_site(tmp_path / "site")
    edit = replace(CEILING, path="vllm/data/kernel.cuh", scope="scale", anchor="n > 12",
                   text="n > 90")  # fmt: skip
    evaluation = toy.judge(root, toy.patch(NAME, edit))
    assert evaluation.exit_code == 0
    assert evaluation.files == {edit.path: site.KERNEL.replace("n > 12", "n > 90").encode()}


def test_new_files_are_part_of_the_result(tmp_path: Path) -> None:
    (tmp_path / "trace.py").write_text("x = 1\n")
    root = site.make_site(tmp_path / "site")
    variant = Variant(versions=toy.RANGE, files=(NewFile(source="trace.py", path="vllm/t.py"),))
    effect = contains("vllm/t.py", "x = 1")
    series = toy.series(toy.patch(NAME, variants=(variant,), effect=effect), runtime=tmp_path)
    evaluation = evaluate(series, DirTree(root), None, lambda _n, _v: {})
    assert (evaluation.exit_code, evaluation.files) == (0, {"vllm/t.py": b"x = 1\n"})

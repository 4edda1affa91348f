"""The daily job: `.ci/drift` with the real audit, a loopback index and a double of `gh`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.imagebuild.audit.test_grid import drifted, newer
from tests.support import gh_double
from tests.support.product import REPOSITORY, Product, QuickIndex, template

WORKFLOW = REPOSITORY / ".github" / "workflows" / "drift-audit.yml"
TITLE = "vLLM 0.34.0: drift audit"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    template(folder)
    return folder


class Job:
    """A product whose repository has the script, and a `gh` in front of PATH."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.out = product.folder / "reports"
        self.summary = product.folder / "summary"
        self.store = product.folder / "issues.json"
        self.store.write_text(json.dumps({"issues": [], "calls": [], "labels": []}))
        tools = product.folder / "bin"
        tools.mkdir()
        shutil.copy(gh_double.__file__, tools / "gh")
        (product.root / ".ci").mkdir()
        shutil.copy(REPOSITORY / ".ci" / "drift", product.root / ".ci" / "drift")
        code = "\n".join([
            f"#!{sys.executable}", "import sys", "from pathlib import Path",
            f"sys.path.insert(0, {str(REPOSITORY)!r})", "from imagebuild.cli import main",
            f"sys.exit(main(sys.argv[1:], root=Path({str(product.root)!r})))",
        ])  # fmt: skip
        (product.root / "build.py").write_text(code)
        for script in (tools / "gh", product.root / "build.py"):
            script.chmod(0o755)

    def run(self, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **self.product.environment, "GH_DOUBLE": str(self.store),
            "PATH": f"{self.product.folder / 'bin'}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.summary), **more,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(self.product.root / ".ci" / "drift"), str(self.out)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def change(self, **what: Any) -> None:
        self.store.write_text(json.dumps({**json.loads(self.store.read_text()), **what}))

    @property
    def issues(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.store.read_text())["issues"]
        return found

    @property
    def calls(self) -> list[str]:
        found: list[str] = json.loads(self.store.read_text())["calls"]
        return found


@pytest.fixture
def job(prepared: Path, tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "product"
    shutil.copytree(prepared, folder)
    with QuickIndex(folder / "served") as server:
        yield Job(Product(folder, server))


def test_without_news_nobody_is_asked(job: Job) -> None:
    done = job.run()
    assert done.returncode == 0, done
    assert job.calls == []
    assert "0 newer releases" in done.stdout
    assert {path.name for path in job.out.iterdir()} >= {"audit.json", "audit.html", "audit.sarif"}
    assert "none newer than the lock" in job.summary.read_text()


def test_one_issue_a_release_is_opened_kept_and_updated(job: Job) -> None:
    newer(job.product.wheels, "0.34.0")
    assert job.run().returncode == 0
    (issue,) = job.issues
    assert (issue["title"], issue["labels"]) == (TITLE, ["drift-audit"])
    assert "0.34.0" in issue["body"]
    assert re.search(r"\n<!-- drift-audit [0-9a-f]{64} -->\n$", issue["body"])
    assert job.calls == ["label create", "issue list", "issue create"]

    again = job.run()  # another time, another traffic, the same findings
    assert "nothing changed: #1" in again.stdout
    assert job.issues == [issue]
    assert job.calls[3:] == ["label create", "issue list"]

    newer(job.product.wheels, "0.34.0", drifted())
    assert f"update: #1 {TITLE}" in job.run().stdout
    assert job.issues[0]["number"] == 1
    assert "drifted" in job.issues[0]["body"]
    assert job.issues[0]["body"] != issue["body"]

    job.change(issues=[{**job.issues[0], "state": "CLOSED", "body": "no"}])
    assert "closed by a person, left as it is: #1" in job.run().stdout
    assert job.issues[0]["body"] == "no"


def test_a_lock_that_does_not_hold_is_an_issue_too(job: Job) -> None:
    (job.product.wheels / "flashinfer_python-0.7.2-py3-none-any.whl").unlink()
    done = job.run()
    assert done.returncode == 0, done
    (issue,) = job.issues
    assert issue["title"] == "The lock needs a look"
    assert "the index no longer offers it" in issue["body"]


def test_what_the_job_cannot_do_is_a_sentence(job: Job) -> None:
    newer(job.product.wheels, "0.34.0")
    job.change(fail="issue create")
    refused = job.run()
    assert refused.returncode == 5
    assert refused.stderr.endswith("error: gh issue create: HTTP 403: Resource not accessible by "
                                   "integration\n")  # fmt: skip
    assert job.issues == []
    job.product.server.faults.page = b"nonsense"
    before = len(job.calls)
    down = job.run()
    assert down.returncode == 5
    assert "ended with 5 and no report" in down.stderr
    assert len(job.calls) == before


class TestWorkflow:
    def test_it_runs_the_script_that_is_tested(self) -> None:
        workflow = yaml.safe_load(WORKFLOW.read_text())
        (audit,) = workflow["jobs"].values()
        # YAML takes the key `on` for a truth value.
        assert set(workflow[True]) == {"schedule", "workflow_dispatch"}
        assert [step["run"] for step in audit["steps"] if "run" in step] == [
            ".ci/drift audit-reports"
        ]
        assert workflow["permissions"] == {}
        assert audit["permissions"] == {
            "contents": "read", "issues": "write", "security-events": "write",
        }  # fmt: skip
        kept = [step["with"] for step in audit["steps"] if "artifact" in step.get("uses", "")]
        assert {path.removeprefix("audit-reports/") for path in kept[0]["path"].split()} == {
            "audit.html", "audit.sarif", "audit.json", "summary.md",
        }  # fmt: skip

    def test_each_action_is_pinned_by_commit_with_its_release(self) -> None:
        lines = [line for line in WORKFLOW.read_text().split("\n") if "uses:" in line]
        assert len(lines) == 4
        for line in lines:
            assert re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line

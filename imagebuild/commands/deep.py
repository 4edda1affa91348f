"""What `verify --deep` and `lock update --deep` share: environment, run, record."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from imagebuild.commands.context import Context
from imagebuild.deep.record import DeepRecord, recorded
from imagebuild.deep.run import Outcome, Where
from imagebuild.errors import IntegrityError, UsageError
from imagebuild.smoke import environment
from imagebuild.smoke.environment import Environment
from imagebuild.upstream import is_exact
from imagebuild.verify import deep, verify
from imagebuild.verify.report import VerifyReport

REQUIREMENTS = "smoke.txt"


@dataclass(frozen=True)
class DeepRun:
    """One run on one tree.

    Attributes:
        report: of verify, with what the probes found.
        outcomes: by probe.
        environment: what they ran in.
        is_pinned: the lock records results with this very torch wheel.
    """

    report: VerifyReport
    outcomes: list[Outcome]
    environment: Environment
    is_pinned: bool

    @property
    def torch(self) -> str:
        """Its version and whether its bytes are known."""
        known = "the wheel of the recorded results" if self.is_pinned else (
            "unverified: no recorded result names this wheel's sha256"
        )  # fmt: skip
        return f"torch {self.environment.torch} ({known})"

    def to_json(self) -> dict[str, object]:
        """For the document of a verb."""
        return {
            "python": self.environment.python_version,
            "torch": self.environment.torch,
            "torch_sha256": self.environment.torch_sha256,
            "torch_verified": self.is_pinned,
            "environment": str(self.environment.folder),
            "probes": deep.to_json(self.outcomes),
        }


def tree_of(context: Context, given: str | None) -> Path:
    """`--tree`, by default the site that `build` wrote for this arch. Raises UsageError."""
    if given:
        root = Path(given)
    else:
        root = context.dist / f"{context.recipe.name}-{context.gpu_arch}" / "site"
    if not root.is_dir():
        raise UsageError(f"{root}: expected a site-packages folder, found none",
                         hint="build.py build, or --tree DIR")  # fmt: skip
    return root


def run(context: Context, root: Path) -> DeepRun:
    """Verifies a tree, makes the environment where there is none, and runs the probes.

    Raises:
        EngineError: the environment cannot be had.
        IntegrityError: the tree's release is not locked, or a package has another hash.
    """
    report = verify(root, context.recipe, context.lock, gpu_arch=context.arguments.arch,
                    in_base=False)  # fmt: skip
    wanted = _torch(context, report.version)
    pins = [base.pins.get("torch", "") for base in context.lock.bases.values()]
    requirements = context.recipe.folder / REQUIREMENTS
    if not requirements.is_file():
        raise UsageError(f"{requirements}: expected the smoke environment's locked packages, "
                         "found no such file")  # fmt: skip
    with context.upstream() as upstream:
        found = environment.provide(requirements, wanted, [p for p in pins if is_exact(p)],
                                    upstream, context.console)  # fmt: skip
    with found.held():
        where = Where(found.python)
        outcomes = deep.check_now(report, context.recipe, context.lock, where,
                                  context.console.step)  # fmt: skip
    known = {base.deep.torch_sha256 for base in context.lock.bases.values() if base.deep}
    return DeepRun(report, outcomes, found, found.torch_sha256 in known)


def _torch(context: Context, version: str) -> str:
    """The torch that the tree's release pins."""
    base = context.lock.base(version.partition("+")[0])
    pin = base.pins.get("torch", "")
    if not is_exact(pin):
        raise IntegrityError(f"lock: vLLM {base.version} pins torch {pin or 'not at all'}, "
                             "expected one version",
                             hint=f"build.py lock update --base-version {version}")  # fmt: skip
    return pin


def show(context: Context, done: DeepRun) -> None:
    """The table, with what it was made with."""
    title = f"deep probes, Python {done.environment.python_version}, {done.torch}"
    context.console.table(title, ("probe", "result", "evidence"), deep.rows(done.outcomes))


def record_of(done: DeepRun, series: str) -> DeepRecord:
    """What the lock keeps of a run."""
    return DeepRecord(
        series=series,
        gpu_arch=done.report.gpu_arch,
        python=done.environment.python_version,
        torch=done.environment.torch,
        torch_sha256=done.environment.torch_sha256,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        results=recorded(done.outcomes),
    )

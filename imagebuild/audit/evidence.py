"""What a person needs to judge a patch that is not green: changed scopes, candidates, pins.

It reads the release and the locked base that it is compared with, and changes no verdict.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from imagebuild.audit.candidates import candidates
from imagebuild.audit.results import Evidence, PinChange, ScopeDiff
from imagebuild.audit.tokens import NOTHING, ScopeText, scope_text, token_changes
from imagebuild.config import Recipe
from imagebuild.errors import BuildError
from imagebuild.patching import text as source
from imagebuild.patching.evaluate import Evaluation, PatchReport
from imagebuild.patching.patch import Patch, Symbol
from imagebuild.patching.series import Series
from imagebuild.patching.tree import Tree
from imagebuild.patching.workspace import State

# The locked base that a report is compared with, by version; None when there is none at hand.
Reference = Callable[[PatchReport], tuple[str, Tree] | None]
_NOT_FOUND = (State.DRIFTED, State.MOVED, State.MISSING)


@dataclass(frozen=True)
class Collector:
    """Collects evidence on one release.

    Attributes:
        tree: the release.
        reference: finds the base to compare with; it may fetch.
        notice: is told what could not be had; the verdict stands without.
    """

    tree: Tree
    reference: Reference
    notice: Callable[[str], None]

    def collect(self, evaluation: Evaluation) -> dict[str, Evidence]:
        """Evidence by patch, for every patch of which there is some."""
        found = {report.patch.name: self._one(report) for report in evaluation.reports}
        return {name: one for name, one in found.items() if one.scopes or one.candidates}

    def _one(self, report: PatchReport) -> Evidence:
        changed = [c.symbol for c in report.contexts if c.found != c.locked]
        lost = [edit for edit in report.edits if edit.state in _NOT_FOUND]
        changed += [Symbol(edit.path, edit.scope) for edit in lost if edit.scope]
        if not changed and not lost:
            return Evidence()
        try:
            reference = self.reference(report)
            scopes = self._scopes(changed, reference) if reference else ()
            variant = report.selection.variant
            wanted = {(edit.label, edit.path, edit.scope) for edit in lost}
            near = tuple(
                candidates(self.tree, reference[1] if reference else None, edit)
                for edit in (variant.edits if variant else ())
                if (edit.label, edit.path, edit.scope) in wanted
            )
        except BuildError as error:
            self.notice(f"{report.patch.name}: no evidence: {error}")
            return Evidence()
        return Evidence(scopes, tuple(one for one in near if one.candidates))

    def _scopes(
        self, symbols: Iterable[Symbol], reference: tuple[str, Tree]
    ) -> tuple[ScopeDiff, ...]:
        version, old = reference
        wanted = sorted(set(symbols))
        old.prefetch({symbol.path for symbol in wanted})
        found = (
            scope_diff(symbol, (version, old), (self.tree.identity.version, self.tree))
            for symbol in wanted
        )
        return tuple(diff for diff in found if diff.unified or diff.tokens)


def scope_diff(symbol: Symbol, old: tuple[str, Tree], new: tuple[str, Tree]) -> ScopeDiff:
    """One scope in two trees, each given with its version."""
    before, after = _cut(old[1], symbol), _cut(new[1], symbol)
    unified = difflib.unified_diff(
        _lines(before),
        _lines(after),
        f"{old[0]}/{symbol}",
        f"{new[0]}/{symbol}",
        lineterm="",
    )
    return ScopeDiff(
        symbol=str(symbol),
        path=symbol.path,
        scope=symbol.scope,
        reference=old[0],
        line=after.line,
        unified="\n".join(unified),
        tokens=token_changes(before, after),
    )


def _lines(side: ScopeText) -> list[str]:
    """The text, then what the scope stands on."""
    clauses = [" ".join(line) for line, number in zip(side.lines, side.numbers, strict=True)
               if not number]  # fmt: skip
    return [*side.text, *clauses]


def _cut(tree: Tree, symbol: Symbol) -> ScopeText:
    try:
        text = source.decode(tree.read(symbol.path)).text
        return scope_text(text, symbol.path, symbol.scope)
    except (FileNotFoundError, source.TextError, source.ScopeMissingError):
        return NOTHING


def pin_changes(
    recipe: Recipe, series: Series, changed: Mapping[str, tuple[str, str]]
) -> tuple[PinChange, ...]:
    """Changed pins with the patches that edit the project behind each."""
    return tuple(
        PinChange(project, locked, found, tuple(_editors(recipe, series, project)))
        for project, (locked, found) in changed.items()
    )


def _editors(recipe: Recipe, series: Series, project: str) -> Iterable[str]:
    package = recipe.site.get(project)
    if package is None:
        return
    for patch in series.patches:
        if any(path.startswith(f"{package}/") for path in _edited(patch)):
            yield patch.name


def _edited(patch: Patch) -> set[str]:
    """Files that any variant of a patch edits or adds."""
    edited = {edit.path for variant in patch.variants for edit in variant.edits}
    return edited | {file.path for variant in patch.variants for file in variant.files}

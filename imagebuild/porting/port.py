"""Ports patches of a series to another release, and asks their probes about the result.

It reads and computes. What is written into a patch's module is the part of `module`.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from imagebuild.patching import text as text_of
from imagebuild.patching import unified
from imagebuild.patching.evaluate import (
    Fingerprints,
    PatchReport,
    Verdict,
    ask,
    contexts_of,
    evaluate,
    fingerprint_of,
)
from imagebuild.patching.patch import Outcome, Patch, Symbol, Variant
from imagebuild.patching.selection import select
from imagebuild.patching.series import Series
from imagebuild.patching.tree import OverlayTree, Tree
from imagebuild.patching.versions import VersionRange, release
from imagebuild.patching.workspace import State, Workspace, overall
from imagebuild.porting.edits import How, PortedEdit, PortedSymbol, Sides, port_edit, port_symbol
from imagebuild.porting.merge import Labels
from imagebuild.porting.recut import applied


class Result(enum.Enum):
    """What porting a patch came to."""

    FITS = "fits"  # a variant covers the release, and holds there
    DROPPED = "dropped"  # it is declared as dropped there, with proof
    ABSORBED = "absorbed"  # upstream has the fix
    CLEAN = "clean"  # every edit was carried over, and the probes hold
    REVIEW = "review"  # carried over, and a probe says that it is not needed or cannot tell
    BROKEN = "broken"  # carried over, and a probe says that it does not work
    CONFLICT = "conflict"  # some edit was not carried over


_CODES = {Result.BROKEN: 3, Result.CONFLICT: 3, Result.ABSORBED: 1, Result.REVIEW: 1}


@dataclass
class Ported:
    """The porting of one patch.

    Attributes:
        patch: as it is in the series.
        result: see `Result`.
        base: the release that it was carried over from; "" when nothing was.
        source: the variant that was carried over.
        variant: the new variant; None unless every edit was carried over.
        left: the range that is left for `source` beside it; None when it takes its place.
        edits: what became of each edit.
        symbols: what became of each symbol that it relies on.
        judged: the verdict on the release with the new variant, its contexts taken as read.
        contexts: scopes whose code differs between the two releases: what a person has to read.
        fingerprints: of the new variant's contexts, as a lock of the release will hold them.
        texts: of each file that the new variant edits, before it and after it.
        notes: sentences.
    """

    patch: Patch
    result: Result
    base: str = ""
    source: Variant | None = None
    variant: Variant | None = None
    left: str | None = None
    edits: list[PortedEdit] = field(default_factory=list)
    symbols: list[PortedSymbol] = field(default_factory=list)
    judged: PatchReport | None = None
    contexts: list[Symbol] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    texts: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all well, 1 a person must look, 3 broken or in conflict."""
        return _CODES.get(self.result, 0)

    @property
    def is_as_it_was(self) -> bool:
        """Whether the old variant's edits and symbols hold unchanged, so that its range grows."""
        same = all(one.how is How.SAME and not one.note for one in self.edits)
        return same and all(one.new == one.symbol for one in self.symbols)

    def new_patch(self) -> Patch:
        """The patch with the new variant, behind what is left of the one it was made from."""
        variants: list[Variant] = []
        for variant in self.patch.variants:
            if variant != self.source or self.variant is None:
                variants.append(variant)
                continue
            kept = [dataclasses.replace(variant, versions=self.left)] if self.left else []
            variants += [*kept, self.variant]
        patch = dataclasses.replace(self.patch, variants=tuple(variants))
        if self.variant and unified.is_written_alone(patch):  # of other hunks than before
            patch = dataclasses.replace(patch, effect=unified.written(self.variant.edits))
        return patch


@dataclass(frozen=True)
class Releases:
    """What is ported between.

    Attributes:
        version: the release to port to.
        tree: that release.
        base: for the range of a variant, the locked release that it is carried over from.
    """

    version: str
    tree: Tree
    base: Callable[[str], tuple[str, Tree]]


def port(series: Series, names: Iterable[str], releases: Releases) -> list[Ported]:
    """Ports the named patches, in series order, and all that they need before them.

    Raises:
        IntegrityError: no release in the range of a patch's variant is locked.
        EngineError: git cannot be run.
    """
    wanted = _closure(series, names)
    done: dict[str, Ported] = {}
    for patch in series.patches:
        if patch.name in wanted:
            done[patch.name] = _Porting(series, patch, releases, done).run()
    return list(done.values())


def _closure(series: Series, names: Iterable[str]) -> set[str]:
    wanted: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += series.patch(name).needs
    return wanted


def ranges(source: Variant, version: str, *, as_it_was: bool) -> tuple[str, str | None]:
    """The range for the new variant, and what is left of the old one's; None when nothing is.

    A variant whose edits all hold as they are takes the release into its own range.
    """
    old = VersionRange.parse(source.versions)
    numbers = release(version)
    above = f"{numbers[0]}.{(numbers[1] if len(numbers) > 1 else 0) + 1}"
    if version in old:
        low, high = _text(numbers), _text(old.high) if old.high else above
        left = f">={_text(old.low)},<{low}" if numbers > old.low else None
        return f">={low},<{high}", left
    if as_it_was:
        return f">={_text(old.low)},<{above}", None
    return f">={_text(old.high or numbers)},<{above}", source.versions


def _text(numbers: tuple[int, ...]) -> str:
    shown = numbers if len(numbers) > 1 else (*numbers, 0)
    return ".".join(map(str, shown))


class _Porting:
    """One patch on its way; `done` has those before it."""

    def __init__(
        self, series: Series, patch: Patch, releases: Releases, done: dict[str, Ported]
    ) -> None:
        self.series, self.patch, self.releases, self.done = series, patch, releases, done
        order = [one.name for one in series.patches]
        self.needs = sorted(_closure(series, patch.needs), key=order.index)

    def run(self) -> Ported:
        patch, tree = self.patch, self.releases.tree
        selection = select(patch, tree.identity, None)
        if selection.drop:
            return self._dropped()
        if patch.absorbed and ask(patch.absorbed, tree).outcome is Outcome.HOLDS:
            evidence = f"{patch.absorbed.claim}: {ask(patch.absorbed, tree).evidence}"
            return Ported(patch, Result.ABSORBED, notes=[evidence])
        old = selection.variant
        if old is None:
            return Ported(patch, Result.CONFLICT, notes=[str(selection.why)])
        ported = Ported(patch, Result.FITS, source=old)
        if not selection.is_beyond and self._holds(ported, old):
            return ported
        return self._carried(old)

    def _dropped(self) -> Ported:
        judged = self._judge(self.patch)
        result = Result.BROKEN if judged.exit_code else Result.DROPPED
        return Ported(self.patch, result, judged=judged, notes=[f.message for f in judged.findings])

    def _holds(self, ported: Ported, variant: Variant) -> bool:
        """Whether a variant that covers the release already is good there."""
        ported.judged = self._judge(self.patch)
        self._fill_contexts(ported, variant, None)
        return ported.judged.verdict is Verdict.OK

    def _carried(self, old: Variant) -> Ported:
        version, base_tree = self.releases.base(old.versions)
        ported = Ported(self.patch, Result.CONFLICT, base=version, source=old)
        prepared = [self._prepared(base_tree, new=False), self._prepared(self.releases.tree)]
        lacking = [name for side in prepared for name in side[1]]
        if lacking:
            where = f"{version} or {self.releases.version}"
            ported.notes.append(
                f"needs {', '.join(dict.fromkeys(lacking))}, which is not in {where}"
            )
            return ported
        labels = Labels(version, self.patch.name, self.releases.version)
        sides = Sides(prepared[0][0], prepared[1][0], labels)
        paths = {edit.path for edit in old.edits} | {one.path for one in old.relies_on}
        for tree in (base_tree, self.releases.tree):
            tree.prefetch(path for path in sorted(paths) if tree.exists(path))
        ported.edits = [port_edit(edit, sides) for edit in old.edits]
        ported.symbols = [port_symbol(symbol, sides) for symbol in old.relies_on]
        ported.notes += self._said(ported)
        if any(one.how in (How.CONFLICT, How.LOST) for one in ported.edits):
            return ported
        if old.files and any(file.replaces for file in old.files):
            ported.notes.append("a fork is brought along by `patches rebase-overlay`")
            return ported
        for path in {edit.path for one in ported.edits for edit in one.new}:
            text = text_of.decode(sides.theirs.read(path)).text
            mine = [edit for one in ported.edits for edit in one.new if edit.path == path]
            ported.texts[path] = (text, applied(text, tuple(mine)))
        self._conclude(ported, old, base_tree)
        return ported

    def _said(self, ported: Ported) -> Iterator[str]:
        for edit in ported.edits:
            if edit.how is How.THERE:
                yield f"{edit.edit.label!r} is left out: {self.releases.version} has its text"
        for symbol in ported.symbols:
            if symbol.new is None:
                yield f"{symbol.note}; it is left out of relies_on"
            elif symbol.note:
                yield f"relies_on: {symbol.note}"

    def _conclude(self, ported: Ported, old: Variant, base_tree: Tree) -> None:
        """Makes the variant, and asks the probes."""
        edits = tuple(edit for one in ported.edits for edit in one.new)
        if not edits and not old.files:
            ported.result = Result.REVIEW
            ported.notes.append("every edit's text is there, but no absorbed probe says so")
            return
        versions, left = ranges(old, self.releases.version, as_it_was=ported.is_as_it_was)
        relies_on = tuple(one.new for one in ported.symbols if one.new)
        variant = dataclasses.replace(old, versions=versions, edits=edits, relies_on=relies_on)
        ported.variant = variant
        ported.left = left
        judged = ported.judged = self._judge(ported.new_patch())
        gone = any(one.new is None for one in ported.symbols)
        there = any(one.how is How.THERE for one in ported.edits)
        if judged.exit_code == 3:
            ported.result = Result.BROKEN
        elif judged.verdict is not Verdict.OK or gone or there:
            ported.result = Result.REVIEW
        else:
            ported.result = Result.CLEAN
        self._fill_contexts(ported, variant, (base_tree, ported))

    def _fill_contexts(
        self, ported: Ported, variant: Variant, base: tuple[Tree, Ported] | None
    ) -> None:
        origin: dict[Symbol, Symbol] = {}
        for one in ported.edits:
            was = Symbol(one.edit.path, one.edit.scope)
            origin |= {Symbol(edit.path, edit.scope): was for edit in one.new}
        origin |= {one.new: one.symbol for one in ported.symbols if one.new}
        for symbol in contexts_of(variant):
            found = fingerprint_of(self.releases.tree, symbol)
            if found is not None:
                ported.fingerprints[str(symbol)] = found
            if base and fingerprint_of(base[0], origin.get(symbol, symbol)) != found:
                ported.contexts.append(symbol)

    def _prepared(self, tree: Tree, *, new: bool = True) -> tuple[Tree, list[str]]:
        """The tree with the needed patches in, and those that cannot be put in."""
        workspace, lacking = Workspace(tree), []
        for name in self.needs:
            patch = self.series.patch(name)
            carried = self.done[name].variant if new else None
            selection = select(patch, tree.identity, None)
            if selection.drop:
                continue
            variant = carried or (None if selection.is_beyond else selection.variant)
            reports = (
                workspace.run(patch, variant, self.series.new_files(variant)) if variant else []
            )
            if not variant or overall(reports) is not State.PENDING:
                lacking.append(name)
        return OverlayTree(tree, workspace.changed()), lacking

    def _judge(self, patch: Patch) -> PatchReport:
        """The verdict on the release, behind what the patch needs, its contexts taken as read."""
        tree = self.releases.tree
        others = [self.done[name].new_patch() for name in self.needs]
        series = dataclasses.replace(self.series, patches=(*others, patch))

        def as_read(name: str, versions: str) -> Fingerprints | None:
            known = series.patch(name).variants
            variant = next(one for one in known if one.versions == versions)
            found = {str(one): fingerprint_of(tree, one) for one in contexts_of(variant)}
            return {symbol: value for symbol, value in found.items() if value is not None}

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's own
            return evaluate(series, tree, None, as_read).reports[-1]

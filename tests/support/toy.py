"""Toy patches and series over the tree of `tests.support.site`, and one call to apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from imagebuild.patching import apply as engine
from imagebuild.patching.evaluate import Evaluation, contexts_of, evaluate, fingerprint_of
from imagebuild.patching.patch import (
    Answer,
    Drop,
    Edit,
    NewFile,
    Outcome,
    Patch,
    Probe,
    Symbol,
    Variant,
)
from imagebuild.patching.series import Series
from imagebuild.patching.tree import DirTree, Identity, Tree

ENGINE, CONFIG = "vllm/core/engine.py", "vllm/core/config.py"
RANGE = ">=0.31,<0.32"
CEILING = Edit(
    label="ceiling",
    path=ENGINE,
    scope="Engine.limit",
    anchor="        ceiling = 12\n",
    text="        ceiling = 90\n",
)
DEFAULT = Edit(
    label="default", path=CONFIG, scope="default", anchor="return 7\n", text="return 8\n"
)


def says(outcome: Outcome, claim: str = "it is so", evidence: str = "seen") -> Probe:
    """A probe with a fixed answer."""
    return Probe(claim, lambda _tree: Answer(outcome, evidence))


def holds(claim: str = "it is so") -> Probe:
    """A probe that holds on every tree."""
    return says(Outcome.HOLDS, claim)


def contains(path: str, needle: str) -> Probe:
    """A probe that looks for text, for tests only."""

    def check(tree: Tree) -> Answer:
        return Answer.of(needle.encode() in tree.read(path), f"{needle!r} in {path}")

    return Probe(f"{path} has {needle!r}", check, (path,))


def patch(
    name: str,
    *edits: Edit,
    versions: str = RANGE,
    files: tuple[NewFile, ...] = (),
    relies_on: tuple[Symbol, ...] = (),
    variants: tuple[Variant, ...] | None = None,
    reason: Probe | None = None,
    effect: Probe | None = None,
    absorbed: Probe | None = None,
    drops: tuple[Drop, ...] = (),
    needs: tuple[str, ...] = (),
    notes: tuple[Probe, ...] = (),
) -> Patch:
    """A patch with one variant of these edits; its probes hold unless given."""
    one = Variant(versions=versions, edits=edits, files=files, relies_on=relies_on)
    return Patch(
        name=name,
        status="pending",
        upstream="",
        origin="",
        variants=(one,) if variants is None else variants,
        reason=reason or holds("upstream has the fault"),
        effect=effect or holds("the fault is gone"),
        absorbed=absorbed,
        drops=drops,
        needs=needs,
        notes=notes,
    )


def series(*patches: Patch, runtime: Path = Path("/nonexistent")) -> Series:
    """A series of these patches, as `load_series` would give it."""
    return Series(patches, {one.name: "" for one in patches}, (), runtime)


def toy_series(runtime: Path = Path("/nonexistent")) -> Series:
    """Two unrelated patches, one of them with the effect that tests execute."""
    return series(
        patch(
            "vllm_engine_ceiling",
            CEILING,
            reason=contains(ENGINE, "ceiling = 12"),
            effect=contains(ENGINE, "ceiling = 90"),
        ),
        patch("vllm_config_default", DEFAULT),
        runtime=runtime,
    )


def locked_for(wanted: Series, tree: Tree) -> Callable[[str, str], Mapping[str, str]]:
    """Fingerprints as a lock would hold them, computed on `tree`."""

    def lookup(name: str, versions: str) -> Mapping[str, str]:
        found = {}
        for variant in wanted.patch(name).variants:
            if variant.versions == versions:
                symbols = {str(s): fingerprint_of(tree, s) for s in contexts_of(variant)}
                found = {symbol: value for symbol, value in symbols.items() if value}
        return found

    return lookup


def fingerprints(
    wanted: Series, root: Path
) -> Callable[[Identity], Callable[[str, str], Mapping[str, str]]]:
    """For `apply`: the lock of the tree's own pristine state."""

    def of(_identity: Identity) -> Callable[[str, str], Mapping[str, str]]:
        return locked_for(wanted, engine.pristine(root)[0])

    return of


def apply(
    root: Path, wanted: Series, *, bytecode: engine.ByteCode | None = "remove"
) -> engine.Result:
    """Applies a series whose contexts are all as locked."""
    locked = fingerprints(wanted, root)
    return engine.apply(root, wanted, "sm_120", locked, recipe="toy", bytecode=bytecode)


def judge(root: Path, *patches: Patch, locked: bool = True) -> Evaluation:
    """Evaluates patches on a tree on disk."""
    wanted, tree = series(*patches), DirTree(root)
    lookup = locked_for(wanted, tree) if locked else lambda _name, _versions: None
    return evaluate(wanted, tree, "sm_120", lookup)

"""Compares two builds down to the file, names what made them differ, and grades the pair.

The grades are honest: what is not equal to the bit is never called so. Nothing here builds.
"""

from __future__ import annotations

import enum
import itertools
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imagebuild.dockerfile import Step
from imagebuild.engines.layers import Entry, Image, Layout, contents, entries

# More files than a person reads are not "named" any more.
NAMED_AT_MOST = 50
# Files up to this size, in bytes, are read to say where they differ.
READ_AT_MOST = 4 << 20
_TIME = re.compile(r"\d\d:\d\d:\d\d|\b1[6-9]\d{8}\b|\b20\d\d-[01]\d-[0-3]\d\b")
_SHOWN = 80
_PYC_HEADER = 16  # bytes: magic, flags, and time and size or a hash of the source

Opener = Callable[[], AbstractContextManager[tarfile.TarFile]]


class Grade(enum.Enum):
    """How equal two builds are, with the exit code of a verb that finds it."""

    IDENTICAL = ("bit-identical", 0)
    NAMED = ("identical but for named files", 1)
    DIFFERENT = ("different", 3)

    def __init__(self, words: str, exit_code: int) -> None:
        self.words = words
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in which two builds differ.

    Attributes:
        path: of the file; "" for what is no file.
        causes: words such as "content", "timestamps", "byte code".
        detail: the evidence, as a sentence.
        platform: of the image; "" for a tree.
        layer: index, from the base up; None for what is in no layer.
        stage: Dockerfile stage that made it, where a COPY took it from another stage, that one.
        step: the instruction.
        is_structural: the builds are not the same thing, whatever their files are.
    """

    path: str = ""
    causes: tuple[str, ...]
    detail: str
    platform: str = ""
    layer: int | None = None
    stage: str = ""
    step: str = ""
    is_structural: bool = False

    def line(self) -> str:
        """For people."""
        where = ": ".join(part for part in (self.platform, self.place(), self.path) if part)
        return f"{where}: {', '.join(self.causes)}: {self.detail}"

    def place(self) -> str:
        """Stage and layer in words."""
        if self.layer is None:
            return ""
        return f"stage {self.stage}, layer {self.layer}" if self.stage else f"layer {self.layer}"

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "causes": list(self.causes)}


@dataclass(frozen=True)
class Comparison:
    """Two builds side by side. `digests` are what names each of them."""

    digests: tuple[str, str]
    differences: tuple[Difference, ...]

    @property
    def grade(self) -> Grade:
        """What may be said of the pair."""
        if self.digests[0] == self.digests[1] and not self.differences:
            return Grade.IDENTICAL
        is_other = any(one.is_structural for one in self.differences) or not self.differences
        return Grade.DIFFERENT if is_other or len(self.files) > NAMED_AT_MOST else Grade.NAMED

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that differ."""
        return tuple(dict.fromkeys(one.path for one in self.differences if one.path))


def images(one: Layout, other: Layout, steps: Sequence[Step] = ()) -> Comparison:
    """Compares two images.

    Args:
        one: the first build.
        other: the second one.
        steps: what made the layers over the base, to name stages by.
    """
    digests = (one.digest, other.digest)
    if one.digest == other.digest:
        return Comparison(digests, ())
    found: list[Difference] = []
    if set(one.images) != set(other.images):
        said = f"{', '.join(one.images)} against {', '.join(other.images)}"
        found.append(Difference(causes=("platforms",), detail=said, is_structural=True))
    for platform in one.images:
        if platform in other.images:
            pair = (one.images[platform], other.images[platform])
            if pair[0].digest != pair[1].digest:
                found += _images((one, other), pair, steps)
    if not found:
        found.append(Difference(causes=("index",), detail="the indexes over equal images differ"))
    return Comparison(digests, tuple(found))


def _images(
    layouts: tuple[Layout, Layout], pair: tuple[Image, Image], steps: Sequence[Step]
) -> Iterator[Difference]:
    platform = pair[0].platform
    yield from _config(*pair)
    counts = tuple(len(image.diff_ids) for image in pair)
    if counts[0] != counts[1]:
        yield Difference(causes=("layers",), detail=f"{counts[0]} against {counts[1]}",
                         platform=platform, is_structural=True)  # fmt: skip
    before = max(counts) - len(steps)
    for index, (first, second) in enumerate(zip(*(im.diff_ids for im in pair), strict=False)):
        stored = [image.manifest["layers"][index] for image in pair]
        stage, step = _made_by(pair[0], index, before, steps)
        place: dict[str, Any] = {
            "platform": platform, "layer": index, "stage": stage, "step": step,
        }  # fmt: skip
        if first != second:
            opens = [_opener(*each, index) for each in zip(layouts, pair, strict=True)]
            is_base = bool(steps) and index < before
            for each in layers(*opens):
                yield Difference(
                    path=each.path, causes=each.causes, detail=each.detail, is_structural=is_base,
                    **place,
                )  # fmt: skip
        elif stored[0]["digest"] != stored[1]["digest"]:
            kinds = " against ".join(dict.fromkeys(str(layer["mediaType"]) for layer in stored))
            yield Difference(causes=("packing",), detail="the same bytes unpacked, packed "
                             f"another way ({kinds})", **place)  # fmt: skip


def _opener(layout: Layout, image: Image, index: int) -> Opener:
    return lambda: layout.layer(image, index)


def _made_by(image: Image, index: int, before: int, steps: Sequence[Step]) -> tuple[str, str]:
    """Stage and instruction of a layer; the history's words where the Dockerfile's do not fit."""
    said = image.history[index] if image.history else ""
    if 0 <= index - before < len(steps):
        step = steps[index - before]
        if not said or step.text.split(" ", 1)[0] in said.split(" ", 1)[0]:
            return step.origin or step.stage, step.text
    if steps and index < before:
        return "base", _without_arguments(said)
    return "", _without_arguments(said)


def _without_arguments(said: str) -> str:
    text = re.sub(r"^RUN (\|\d+ .*?)?/bin/sh -c ", "RUN ", said).removesuffix("# buildkit")
    return " ".join(text.split())


def _config(one: Image, other: Image) -> Iterator[Difference]:
    for label, first, second in (
        ("", one.config, other.config),
        ("annotations", {"": one.manifest.get("annotations")},
         {"": other.manifest.get("annotations")}),
    ):  # fmt: skip
        for key in sorted({*first, *second} - {"rootfs", "config", "history", "created"}):
            yield from _value(one, " ".join(filter(None, (label, key))), first.get(key),
                              second.get(key))  # fmt: skip
    inner = [image.config.get("config") or {} for image in (one, other)]
    for key in sorted({*inner[0], *inner[1]}):
        yield from _value(one, f"config.{key}", inner[0].get(key), inner[1].get(key))
    times = [[image.config.get("created"), *_times(image)] for image in (one, other)]
    if times[0] != times[1]:
        first, second = next(p for p in itertools.zip_longest(*times) if p[0] != p[1])
        yield Difference(causes=("configuration", "timestamps"), platform=one.platform,
                         detail=f"created {first} against {second}")  # fmt: skip
    steps = [[_untimed(entry) for entry in image.config.get("history", ())]
             for image in (one, other)]  # fmt: skip
    for first, second in itertools.zip_longest(*steps, fillvalue={}):
        if first != second:
            yield from _value(one, "history", first.get("created_by"), second.get("created_by"))


def _times(image: Image) -> list[Any]:
    return [entry.get("created") for entry in image.config.get("history", ())]


def _untimed(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "created"}


def _value(image: Image, key: str, first: object, second: object) -> Iterator[Difference]:
    if first != second:
        yield Difference(causes=("configuration",), platform=image.platform, is_structural=True,
                         detail=f"{key}: {first!r} against {second!r}")  # fmt: skip


def layers(one: Opener, other: Opener) -> list[Difference]:
    """Compares two layers whose bytes differ, entry by entry.

    Args:
        one: opens the first one, as often as it is called.
        other: opens the second one.
    """
    sides = []
    for opened in (one, other):
        with opened() as tar:
            sides.append(list(entries(tar)))
    first, second = ({entry.name: entry for entry in side} for side in sides)
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    wanted = frozenset(name for name, pair in changed.items() if _is_to_be_read(*pair))
    texts: list[dict[str, bytes]] = [{}, {}]
    if wanted:
        texts = []
        for opened in (one, other):
            with opened() as tar:
                texts.append(contents(tar, wanted))
    found = [
        _entry(name, *changed[name], texts[0].get(name), texts[1].get(name))
        for name in sorted(changed)
    ]
    names = [[entry.name for entry in side if entry.name in first and entry.name in second]
             for side in sides]  # fmt: skip
    if names[0] != names[1]:
        at = next(p for p in itertools.zip_longest(*names) if p[0] != p[1])
        found.append(Difference(causes=("order",), detail="the entries stand in another order, "
                                f"first {at[0]} against {at[1]}"))  # fmt: skip
    if not found:
        found.append(Difference(causes=("framing",), detail="equal entries in equal order, "
                                "written by another archiver"))  # fmt: skip
    return found


def _is_to_be_read(one: Entry | None, other: Entry | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.sha256 != other.sha256
        and max(one.size, other.size) <= READ_AT_MOST
    )


def _entry(
    name: str, one: Entry | None, other: Entry | None, text: bytes | None, second: bytes | None
) -> Difference:
    if one is None or other is None:
        word, entry = ("extra", other) if one is None else ("missing", one)
        kind = entry.kind if entry else ""
        side = "second" if word == "extra" else "first"
        return Difference(path=name, causes=(word,), detail=f"a {kind} in the {side} build alone")
    causes, said = [], []
    if one.sha256 != other.sha256:
        cause, detail = content(name, text, second)
        causes.append(cause)
        said.append(detail or f"{one.size} bytes against {other.size}, sha256 {one.sha256[:12]} "
                    f"against {other.sha256[:12]}")  # fmt: skip
    for cause, first, last in (
        ("timestamps", one.time, other.time),
        ("kind", one.kind, other.kind),
        ("mode", f"{one.mode:o}", f"{other.mode:o}"),
        ("owner", one.owner, other.owner),
        ("link", one.link, other.link),
        ("attributes", dict(one.attributes), dict(other.attributes)),
    ):
        if first != last:
            causes.append(cause)
            said.append(f"{cause} {first} against {last}")
    return Difference(path=name, causes=tuple(causes or ["content"]), detail="; ".join(said))


def content(name: str, one: bytes | None, other: bytes | None) -> tuple[str, str]:
    """Cause and evidence of two contents; no evidence where they were too large to read."""
    if one is None or other is None:
        return "content", ""
    if name.endswith(".pyc") and one[_PYC_HEADER:] == other[_PYC_HEADER:]:
        return "byte code", "only the header differs: it holds time or hash of the source"
    if name.endswith(".pyc"):
        return "byte code", f"{len(one)} bytes against {len(other)}"
    if one[:2] == other[:2] == b"\x1f\x8b" and one[8:] == other[8:]:
        return "timestamps", "a gzip header holds another time"
    if b"\0" in one + other:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                  min(len(one), len(other)))  # fmt: skip
        return "content", f"from byte {at} on ({len(one)} bytes against {len(other)})"
    lines = [text.decode("utf-8", "backslashreplace").splitlines() for text in (one, other)]
    if sorted(lines[0]) == sorted(lines[1]):
        return "order", "the same lines in another order"
    numbered = enumerate(itertools.zip_longest(*lines, fillvalue=""), 1)
    number, (first, second) = next((n, p) for n, p in numbered if p[0] != p[1])
    hint = ", which looks like a time" if _TIME.search(first) and _TIME.search(second) else ""
    return "content", f"line {number}: {_short(first)} against {_short(second)}{hint}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")


def folders(one: Path, other: Path, layer: str) -> Comparison:
    """Compares two results of the tree engine.

    Contents, links and permission bits count; times do only inside `layer`, which is what is
    shipped. Permission bits of what lies beside the layer follow the umask, so both builds have to
    have the same one.

    Args:
        one: the first result.
        other: the second one.
        layer: name of the layer in both; differences inside are named by entry.
    """
    found: list[Difference] = []
    sides = [{path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
             for root in (one, other)]  # fmt: skip
    for name in sorted({*sides[0], *sides[1]}):
        first, second = sides[0].get(name), sides[1].get(name)
        if first is None or second is None:
            word = "extra" if first is None else "missing"
            side = "second" if first is None else "first"
            found.append(Difference(path=name, causes=(word,),
                                    detail=f"in the {side} build alone"))  # fmt: skip
        elif name == layer and not _is_equal(first, second):
            inside = layers(*(_tar(path) for path in (first, second)))
            found += [
                Difference(path=f"{name}/{each.path}" if each.path else name,
                           causes=each.causes, detail=each.detail)
                for each in inside
            ]  # fmt: skip
        else:
            found += _files(name, first, second)
    return Comparison(("", ""), tuple(found))


def _tar(path: Path) -> Opener:
    return lambda: tarfile.open(path, mode="r:")


def _files(name: str, one: Path, other: Path) -> Iterator[Difference]:
    kinds = [_kind(path) for path in (one, other)]
    if kinds[0] != kinds[1]:
        yield Difference(path=name, causes=("kind",), detail=" against ".join(kinds))
        return
    modes = [f"{path.lstat().st_mode & 0o7777:o}" for path in (one, other)]
    if modes[0] != modes[1]:
        yield Difference(path=name, causes=("mode",), detail=f"mode {' against '.join(modes)}")
    if kinds[0] == "file" and not _is_equal(one, other):
        size = max(path.stat().st_size for path in (one, other))
        texts = [path.read_bytes() for path in (one, other)] if size <= READ_AT_MOST else [None] * 2
        cause, detail = content(name, *texts)
        yield Difference(path=name, causes=(cause,), detail=detail or "the contents differ")


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"symbolic link to {path.readlink()}"
    return "folder" if path.is_dir() else "file"


def _is_equal(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while chunk := first.read(1 << 20):
            if chunk != second.read(1 << 20):
                return False
    return True

"""FlashKDA in the image: builds it from a pinned commit, or keeps the base's; checks either.

A library with other arguments imports cleanly and fails at the first prefill, and one that was
built against torch's C++ classes fails with another torch, so both are asked here.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from imagebuild import nvcc
from imagebuild.config import Recipe, load_recipe
from imagebuild.errors import BrokenError, UsageError, raise_collected
from imagebuild.steps.elf import undefined_symbols
from imagebuild.steps.run import finish, say
from imagebuild.steps.series import arch_of
from imagebuild.verify import flashkda as checks
from imagebuild.verify.report import Group
from imagebuild.verify.script import own_root

MARKER = "usr/local/share/glm53/flashkda.json"
LICENCES = "usr/local/share/licenses/flashkda"
# The first is vLLM's, of the commit of the base; the other two are FlashKDA's.
SOURCES = ("vllm/csrc/flashkda_registration.cpp", "csrc/flash_kda.cpp", "csrc/smxx/fwd_launch.cu")
# As vLLM itself compiles it, but for our cards alone: a family cubin runs on both of them.
_FLAGS = (
    "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda",
    "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__",
    "-DUSE_CUDA", "-DTORCH_EXTENSION_NAME=_flashkda_C",
    "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
)  # fmt: skip
_NEEDED = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so")
# Names of torch's C++ classes, which change between releases; its C interface does not.
_UNSTABLE = ("3c10", "2at", "5torch")


def main(arguments: Sequence[str]) -> int:
    """`flashkda build` in its own stage, `flashkda install` in the patched one."""
    parser = argparse.ArgumentParser(prog="flashkda")
    verbs = parser.add_subparsers(required=True)
    build_verb, install_verb = verbs.add_parser("build"), verbs.add_parser("install")
    build_verb.add_argument("--source", type=Path, required=True)
    build_verb.add_argument("--cuda", type=Path)
    build_verb.add_argument("--out", type=Path, required=True)
    build_verb.set_defaults(run=_build)
    install_verb.add_argument("--built", type=Path, required=True, help="empty: the base's stays")
    install_verb.set_defaults(run=_install)
    for verb in (build_verb, install_verb):
        verb.add_argument("--recipe", required=True)
        verb.add_argument("--platform", required=True)
    asked = parser.parse_args(arguments)
    return finish("flashkda", lambda: asked.run(asked))


def _build(asked: argparse.Namespace) -> None:
    recipe, source = load_recipe(asked.recipe), asked.source
    licences = {"FlashKDA": source / "LICENSE", "CUTLASS": _cutlass_licence(source)}
    wanted = [source / path for path in SOURCES] + list(licences.values())
    missing = [str(path.relative_to(source)) for path in wanted if not path.is_file()]
    raise_collected(UsageError, "FlashKDA's sources lack files",
                    [f"{path}: expected a file, found none" for path in missing],
                    hint="--build-context vllm-src=DIR gives vLLM's csrc/, from its sdist; "
                    "flashkda-src=DIR gives the rest")  # fmt: skip
    torch = own_root() / "torch" / "include"
    folders = [
        torch, torch / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")),
        source / "csrc", source / "vllm" / "csrc",
        *(source / "cutlass" / part for part in ("include", "examples/common",
                                                 "tools/util/include")),
    ]  # fmt: skip
    flags = (*_FLAGS, *(f"-I{folder}" for folder in folders))
    options = nvcc.Options(cubins=("sm_120f",), ptx=None, flags=flags, needed=_NEEDED,
                           limits=None)  # fmt: skip
    library = asked.out / "site" / checks.LIBRARY
    built = nvcc.build(source, library, asked.platform, cuda=asked.cuda,
                       sources=[Path(path) for path in SOURCES], options=options)  # fmt: skip
    for name, text in licences.items():
        place = asked.out / LICENCES / f"{name}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(text, place)
    pinned = {name: one.commit for name, one in recipe.image.sources.items()}
    marker = {"built": True, "commits": pinned, "sources": _digest(source), "code": built.targets}
    (asked.out / "marker.json").write_text(json.dumps(marker))


def _cutlass_licence(source: Path) -> Path:
    names = ("LICENSE.txt", "LICENSE")
    found = [source / "cutlass" / name for name in names if (source / "cutlass" / name).is_file()]
    return next(iter(found), source / "cutlass" / names[0])


def _digest(source: Path) -> str:
    """SHA-256 over names and contents of every source file; git's own folders left out."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.is_file() and ".git" not in path.relative_to(source).parts:
            digest.update(path.relative_to(source).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _install(asked: argparse.Namespace) -> None:
    recipe, site = load_recipe(asked.recipe), own_root()
    marker: dict[str, object] = {"built": False, "commits": {}}
    library = asked.built / "site" / checks.LIBRARY
    if library.is_file():
        marker = json.loads((asked.built / "marker.json").read_text())
        replace_library(site, library.read_bytes())
        shutil.copytree(asked.built / LICENCES, Path("/") / LICENCES, dirs_exist_ok=True)
    for line in problems_and_notes(site, recipe, asked.platform):
        say(line)
    data = (site / checks.LIBRARY).read_bytes()
    marker["sha256"] = hashlib.sha256(data).hexdigest()
    place = Path("/") / MARKER
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(marker, indent=1, sort_keys=True) + "\n")
    say(
        f"FlashKDA: {'built here' if marker['built'] else 'of the base'}, sha256 {marker['sha256']}"
    )


def replace_library(site: Path, data: bytes) -> None:
    """Puts a library in the place of the base's, in the wheel's RECORD too.

    Raises:
        BrokenError: no RECORD lists the base's library.
    """
    target = site / checks.LIBRARY
    # Python prefers a library with a longer ending, and would go on with the old one.
    for twin in target.parent.glob("_flashkda_C.*so"):
        if twin != target:
            twin.unlink()
    for record in sorted(site.glob("vllm-*.dist-info/RECORD")):
        rows = list(csv.reader(io.StringIO(record.read_text("utf-8"))))
        kept = [row for row in rows if row and not _is_twin(row[0])]
        mine = next((row for row in kept if row[0] == checks.LIBRARY), None)
        if mine is None:
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        mine[1:] = [f"sha256={digest}", str(len(data))]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(kept)
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(data)
        new.chmod(target.stat().st_mode & 0o777)
        os.replace(new, target)  # noqa: PTH105
        record.write_text(out.getvalue(), "utf-8")
        return
    raise BrokenError(f"{site}: expected a RECORD of vLLM that lists {checks.LIBRARY}, found none")


def _is_twin(path: str) -> bool:
    return path.startswith("vllm/_flashkda_C.") and path != checks.LIBRARY


def problems_and_notes(site: Path, recipe: Recipe, platform: str) -> Iterator[str]:
    """Checks the library in a tree; gives what a person should know.

    Raises:
        BrokenError: its operators, processor, GPU code or undefined symbols are not as needed.
    """
    group = Group("FlashKDA")
    checks.check(group, site, arch_of(recipe, platform), recipe.platforms)
    faults = [f.message for f in group.findings if f.level == "error"]
    # What is no library at all has no symbols; that was said above.
    symbols = [] if faults else undefined_symbols((site / checks.LIBRARY).read_bytes())
    unstable = [name for name in symbols if is_unstable(name)]
    if unstable:
        faults.append(f"expected torch's stable interface only, found {', '.join(unstable[:3])}")
    raise_collected(BrokenError, f"{checks.LIBRARY} cannot serve", faults,
                    hint="use a base of vLLM 0.31.0 or newer with flashkda = \"auto\"")  # fmt: skip
    yield from (f"{f.level}: {f.message}" for f in group.findings if f.level != "info")


def is_unstable(symbol: str) -> bool:
    """Whether a mangled name is one of torch's C++ classes or functions."""
    body = symbol.removeprefix("_ZN").lstrip("KRO") if symbol.startswith("_ZN") else ""
    return body.startswith(_UNSTABLE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Links the headers and libraries of the pip-installed CUDA into the toolkit folder of the image.

The base trims /usr/local/cuda: FlashInfer's JIT then stops at `nvrtc.h: No such file`, and once
that is there at `cannot find -lnvrtc`, since libraries are shipped with a version in their name
only. A worker that dies so looks like a hang, because the head waits for it. This runs once, while
the image is built. Standard library only. It adds symbolic links and nothing else; a second run
changes nothing, and a file that is there is never replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOOLKIT = Path("usr/local/cuda")
_WHEEL = Path("nvidia/cu13")
_COMPILERS = ("gcc", "cc")
# Where an interpreter of the image keeps its packages, whatever its version.
_SITES = (
    "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages",
    "usr/lib/python3*/dist-packages",
    "usr/lib/python3*/site-packages",
    "opt/*/lib/python3*/site-packages",
)
_VERSIONED = re.compile(r"(?P<stem>lib.+\.so)\.(?P<version>\d+(?:\.\d+)*)")
_MAX_LINKS = 40  # as the kernel's limit for one path
_PROGRAM = """\
#include <nvrtc.h>
int main(void) { int major, minor; return (int)nvrtcVersion(&major, &minor); }
"""


class LinkError(Exception):
    """The image cannot be made to compile; the message is a sentence."""


@dataclass
class Report:
    """What one run did; paths are those inside the image.

    Attributes:
        linked: links that were made.
        repaired: links that led nowhere and were made anew.
        probes: one sentence each.
    """

    linked: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether anything was written."""
        return bool(self.linked or self.repaired)

    def lines(self) -> list[str]:
        """The report, one line each."""
        made = f"{len(self.linked)} links made, {len(self.repaired)} repaired"
        return [made if self.is_changed else "nothing to link", *self.probes]


class _Image:
    """A root folder whose absolute links mean places inside it, as they will in the container."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def real(self, path: Path) -> Path:
        """Where a path under the root leads, which need not exist.

        Raises:
            LinkError: links lead in a circle.
        """
        done = self.root
        todo = list(path.relative_to(self.root).parts)
        for _ in range(_MAX_LINKS):
            while todo:
                part = todo.pop(0)
                if part == "..":
                    done = done if done == self.root else done.parent
                    continue
                done /= part
                if done.is_symlink():
                    break
            else:
                return done
            target = done.readlink()
            done = self.root if target.is_absolute() else done.parent
            todo = [part for part in target.parts if part != "/"] + todo
        raise LinkError(f"{self.name(path)}: its links lead in a circle")

    def name(self, path: Path) -> str:
        """The path as it is inside the image."""
        return "/" + path.relative_to(self.root).as_posix()


def link(root: Path, compiler: str | None = None) -> Report:
    """Links what is absent, then compiles and links a program that uses NVRTC.

    Args:
        root: "/" or the root folder of an unpacked image.
        compiler: name or path; gcc or cc where not given.

    Raises:
        LinkError: the wheel's folder or the toolkit is missing, a probe fails.
        OSError: a link cannot be made.
    """
    image = _Image(root)
    report = Report()
    wheel = _wheel(image)
    toolkit = image.real(image.root / TOOLKIT)
    if not toolkit.is_dir():
        raise LinkError(f"/{TOOLKIT}: expected the CUDA toolkit's folder, found none")
    include = _folder(image, toolkit / "include")
    libraries = _folder(image, toolkit / "lib64")
    _link_tree(image, wheel / "include", include, report)
    for name, source in _unversioned(wheel / "lib"):
        _link_one(image, source, libraries / name, report)
    for needed in (include / "nvrtc.h", libraries / "libnvrtc.so"):
        if not image.real(needed).is_file():
            raise LinkError(
                f"{image.name(needed)}: expected a file, found none; "
                f"{image.name(wheel)} does not provide it"
            )
    if report.is_changed:
        _refresh_cache(image, report)
    _probe(include, libraries, compiler, report)
    return report


def _wheel(image: _Image) -> Path:
    """The folder of the CUDA wheels in the one site-packages that has it."""
    places = [path for pattern in _SITES for path in sorted(image.root.glob(pattern))]
    if image.root == Path("/"):
        places.insert(0, Path(sysconfig.get_path("purelib")))
    found = list(
        dict.fromkeys(
            image.real(place / _WHEEL)
            for place in places
            if image.real(place / _WHEEL / "include").is_dir()
        )
    )
    if not found:
        looked = ", ".join(dict.fromkeys(image.name(place) for place in places)) or "no folder"
        raise LinkError(f"{_WHEEL}/include: expected it in a site-packages, looked in {looked}")
    if len(found) > 1 and image.root != Path("/"):
        names = ", ".join(image.name(path) for path in found)
        raise LinkError(f"{_WHEEL}: expected it in one site-packages, found {names}")
    # This interpreter's own comes first.
    if not (found[0] / "lib").is_dir():
        raise LinkError(f"{image.name(found[0])}/lib: expected a folder, found none")
    return found[0]


def _folder(image: _Image, path: Path) -> Path:
    real = image.real(path)
    real.mkdir(parents=True, exist_ok=True)
    return real


def _link_tree(image: _Image, source: Path, target: Path, report: Report) -> None:
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        # A folder that is there was trimmed, too, so that what it lacks is linked one by one.
        if entry.is_dir() and place.is_dir() and not place.is_symlink():
            _link_tree(image, entry, place, report)
        else:
            _link_one(image, entry, place, report)


def _link_one(image: _Image, source: Path, place: Path, report: Report) -> None:
    """Makes a relative link, so that it holds in the image and in its unpacked root."""
    leads_nowhere = place.is_symlink() and not _exists(image, place)
    if not leads_nowhere and (place.is_symlink() or place.exists()):
        return
    text = os.path.relpath(source, place.parent)
    if leads_nowhere:
        new = place.with_name(f".{place.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(text)
        new.replace(place)
        report.repaired.append(image.name(place))
    else:
        place.symlink_to(text)
        report.linked.append(image.name(place))


def _exists(image: _Image, place: Path) -> bool:
    try:
        return image.real(place).exists()
    except LinkError:
        return False


def _unversioned(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each library's name without its version, and the newest file for it."""
    newest: dict[str, tuple[tuple[int, ...], Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _VERSIONED.fullmatch(path.name)
        if match:
            version = tuple(int(part) for part in match["version"].split("."))
            newest[match["stem"]] = max(newest.get(match["stem"], ((), path)), (version, path))
    for stem, (_version, path) in newest.items():
        yield stem, path


def _refresh_cache(image: _Image, report: Report) -> None:
    if image.root != Path("/"):
        report.probes.append("ldconfig: not run, since the root is not /")
        return
    tool = shutil.which("ldconfig") or shutil.which("ldconfig", path="/usr/sbin:/sbin")
    if tool is None:
        raise LinkError("ldconfig: expected it on the path, found none; the base must have glibc's")
    _run([tool], "", "ldconfig")
    report.probes.append("ldconfig: run")


def _probe(include: Path, libraries: Path, compiler: str | None, report: Report) -> None:
    names = (compiler,) if compiler else _COMPILERS
    tool = next((found for name in names if (found := shutil.which(name))), None)
    if tool is None:
        if compiler:
            raise LinkError(f"{compiler}: expected a C compiler, found none of that name")
        report.probes.append(
            f"compile and link probes: not run, since there is no {' or '.join(names)}; "
            "the JIT of FlashInfer needs one as well"
        )
        return
    headers = [tool, "-x", "c", "-I", str(include)]
    _run([*headers, "-fsyntax-only", "-"], "#include <nvrtc.h>\n", "the compile probe")
    with tempfile.TemporaryDirectory() as scratch:
        output = str(Path(scratch) / "probe")
        # NVRTC's own needs are met when it is loaded, not here.
        rest = ["-", "-L", str(libraries), "-lnvrtc", "-Wl,--allow-shlib-undefined", "-o", output]
        _run([*headers, *rest], _PROGRAM, "the link probe")
    report.probes.append(f"compile and link probes: ok with {tool}")


def _run(command: Sequence[str], program: str, what: str) -> None:
    sys.stdout.write(f"$ {' '.join(command)}\n")
    done = subprocess.run(command, input=program, text=True, capture_output=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LinkError(f"{what}: expected {command[0]} to succeed, it said: {said}")


def main(argv: Sequence[str]) -> int:
    """Runs the step; exit code 3 when the image cannot be made to compile."""
    parser = argparse.ArgumentParser(prog="link_cuda_headers.py", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/"), help="root of an unpacked image")
    parser.add_argument("--cc", metavar="COMPILER", help="default: gcc, else cc")
    options = parser.parse_args(argv)
    try:
        report = link(options.root, options.cc)
    except (LinkError, OSError) as error:
        sys.stderr.write(f"link_cuda_headers.py: error: {error}\n")
        return 3
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

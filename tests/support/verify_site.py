"""A small repository and a site-packages that fits it, for the tests of verify.

The site holds a vLLM and a FlashInfer of a few lines each, with METADATA and RECORD as an installer
writes them, and a FlashKDA library that has the real layout and no real code.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import struct
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagebuild.config import Recipe, load_recipe
from imagebuild.lock import Lock, read_lock
from imagebuild.patching.apply import apply
from imagebuild.patching.evaluate import contexts_of, fingerprint_of
from imagebuild.patching.manifest import MANIFEST
from imagebuild.patching.patch import GpuArch
from imagebuild.patching.tree import DirTree
from imagebuild.verify import VerifyReport, flashkda, verify
from imagebuild.verify.flashkda import SCHEMAS

NAME = "tiny"
VERSION = "0.31.0"
COMMIT = "0a1b2c3d4"
PINS = {"torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7", "transformers": "<5.18.0,>=5.10.4"}
IMAGE_NCCL = "2.30.7"
LIBRARY = "vllm/_flashkda_C.abi3.so"

_RECIPE = f"""
schema = 1
name = "{NAME}"
description = "for tests"
series = "series.toml"
patches = "patches/{NAME}"
[base]
version = "{VERSION}"
site_packages = "usr/lib/python3/dist-packages"
python = "3.12"
[wheels]
pins = ["torch", "nvidia-nccl-cu13", "transformers"]
[wheels.site]
vllm = "vllm"
flashinfer-python = "flashinfer"
[image_pins."{VERSION}"]
nvidia-nccl-cu13 = "{IMAGE_NCCL}"
[gpu_arch]
sm_120 = "linux/amd64"
sm_121 = "linux/arm64"
"""
_SERIES = """
patches = ["vllm_greeter_polite_words", "vllm_core_counts_once", "vllm_math_sums_right"]
upstream_fixes = "fixes"
"""
_DOC = '''"""{title}

Symptom: for tests.
Cause: for tests.
Change: for tests.
Upstream: none.
Drop when: never.
Cost: none.
"""
'''
_IMPORTS = """
import ast

from imagebuild.patching.expect import Fix
from imagebuild.patching.patch import Answer, Drop, Edit, NewFile, Patch, Probe, Variant
from imagebuild.patching.structure import function, parse, returned


def value_of(tree, path, name):
    return ast.literal_eval(returned(function(tree, path, name)))


def gives(path, name, wanted):
    def check(tree):
        value = value_of(tree, path, name)
        return Answer.of(value == wanted, f"{name} gives {value!r}")
    return Probe(f"{name} gives {wanted!r}", check, (path,))
"""
_PATCHES = {
    "vllm_greeter_polite_words": """
PATCH = Patch(
    name="vllm_greeter_polite_words", status="pending", upstream="", origin="tests",
    reason=gives("vllm/greeter.py", "greet", "hello"),
    effect=gives("vllm/greeter.py", "greet", "good day"),
    absorbed=None,
    variants=(Variant(versions=">=0.31,<0.32", edits=(Edit(
        label="words", path="vllm/greeter.py", scope="greet",
        anchor='    return "hello"\\n', text='    return "good day"\\n'),)),),
)
""",
    "vllm_core_counts_once": """
PATCH = Patch(
    name="vllm_core_counts_once", status="pending", upstream="", origin="tests",
    reason=gives("vllm/core.py", "count", 2), effect=gives("vllm/core.py", "count", 1),
    absorbed=None,
    variants=(Variant(versions=">=0.31,<0.32", edits=(Edit(
        label="count", path="vllm/core.py", scope="count",
        anchor="    return 2\\n", text="    return 1\\n"),),
        files=(NewFile(source="tiny_extra.py", path="tiny_extra.py"),)),),
)
""",
    "vllm_math_sums_right": """
PATCH = Patch(
    name="vllm_math_sums_right", status="backport", upstream="", origin="tests",
    reason=gives("vllm/math.py", "total", 5), effect=gives("vllm/math.py", "total", 4),
    absorbed=None, variants=(),
    drops=(Drop(versions=">=0.31", sentence="vLLM 0.31 sums right itself.",
                proof=gives("vllm/math.py", "total", 4)),),
)
""",
    "fixes": """
FIXES = (
    Fix(name="vllm_fixed_long_ago", upstream="vllm#1", since="0.30",
        probe=gives("vllm/fixed.py", "is_fixed", True)),
    Fix(name="vllm_fixed_later", upstream="vllm#2", since="0.40",
        probe=gives("vllm/fixed.py", "is_not_there", True)),
)
""",
}
_VLLM = {
    "vllm/__init__.py": "raise ImportError('verify must not import vllm')\n",
    "vllm/_version.py": f'__version__ = "{VERSION}"\n__commit_id__ = "g{COMMIT}"\n',
    "vllm/greeter.py": 'def greet():\n    return "hello"\n',
    "vllm/core.py": "def count():\n    return 2\n",
    "vllm/math.py": "def total():\n    return 4\n",
    "vllm/fixed.py": "def is_fixed():\n    return True\n",
    "vllm/configs/table.json": "{}\n",
    # As the real wheel's deep_gemm: one library a Python version, and no interpreter sees two.
    "vllm/deep/_C.cpython-311-x86_64-linux-gnu.so": "eleven",
    "vllm/deep/_C.cpython-312-x86_64-linux-gnu.so": "twelve",
}


def write_repository(root: Path) -> Recipe:
    """Writes recipe, series, patches and runtime files; the lock is `write_lock`'s."""
    image = root / "image"
    _write(image / NAME / "recipe.toml", _RECIPE)
    _write(image / NAME / "series.toml", _SERIES)
    _write(image / "runtime" / "tiny_extra.py", "EXTRA = 1\n")
    for name, text in _PATCHES.items():
        content = _DOC.format(title=f"For tests: {name}") + _IMPORTS + text
        _write(root / "patches" / NAME / f"{name}.py", content)
    return load_recipe(NAME, root)


def write_site(
    root: Path,
    *,
    requires: Mapping[str, str] | None = None,
    flashinfer: str = "0.7.0.post1",
    library: bytes | None = None,
) -> None:
    """Installs the small vLLM and FlashInfer, pristine."""
    files = {path: text.encode() for path, text in _VLLM.items()}
    files[LIBRARY] = flashkda_library() if library is None else library
    wanted = {"torch": PINS["torch"], "transformers": PINS["transformers"], **(requires or {})}
    lines = [
        f"Requires-Dist: {name}{'' if value[0] in '<>=~' else '=='}{value}"
        for name, value in wanted.items()
    ]
    lines.append("Requires-Dist: torch==1.0; extra == 'old'")
    install(root, "vllm", VERSION, files, lines)
    if flashinfer:
        install(root, "flashinfer_python", flashinfer, {"flashinfer/__init__.py": b""})


def install(
    root: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    headers: Iterable[str] = (),
) -> Path:
    """Installs a project with METADATA and RECORD; returns its dist-info."""
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *headers, ""]
    content = {**files, f"{info}/METADATA": "\n".join([*metadata, "Text: no header\n"]).encode()}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in content.items():
        _write(root / path, data)
        rows.writerow([path, record_hash(data), len(data)])
    rows.writerow(["../../bin/tool", "", ""])
    rows.writerow([f"{info}/RECORD", "", ""])
    _write(root / info / "RECORD", record.getvalue())
    return root / info


def write_lock(recipe: Recipe, root: Path) -> Lock:
    """Locks the site's release, with the fingerprints of its pristine files."""
    tree = DirTree(root)
    lock = [
        "schema = 1", f'[base."{VERSION}"]', f'commit = "{COMMIT}"', "epoch = 1700000000",
        f'[base."{VERSION}".pins]', *(f'{k} = "{v}"' for k, v in PINS.items()),
    ]  # fmt: skip
    for project, version in (("vllm", VERSION), ("flashinfer-python", "0.7.0.post1")):
        lock += [f'[base."{VERSION}".wheels.{project}]', f'version = "{version}"',
                 f'[base."{VERSION}".wheels.{project}.files.any]', 'filename = "x.whl"',
                 f'sha256 = "{"0" * 64}"', "size = 1"]  # fmt: skip
    for patch in recipe.series().patches:
        for variant in patch.variants:
            lock.append(f'[base."{VERSION}".fingerprints.{patch.name}]')
            lock += [f'"{one}" = "{fingerprint_of(tree, one)}"' for one in contexts_of(variant)]
    _write(recipe.lock_file, "\n".join(lock) + "\n")
    return read_lock(recipe.lock_file)


def patch_site(root: Path, recipe: Recipe, lock: Lock, gpu_arch: GpuArch = "sm_120") -> None:
    """Applies the series."""
    apply(root, recipe.series(), gpu_arch, lock.fingerprints_for, recipe=recipe.name,
          bytecode="remove", known_as=lock.identify)  # fmt: skip


def edit_manifest(root: Path, **changes: object) -> dict[str, object]:
    """Replaces top-level values of the manifest; returns it as it was."""
    path = root / MANIFEST
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps({**content, **changes}), "utf-8")
    return dict(content)


def forge(root: Path, path: str, data: bytes) -> None:
    """Changes a patched file and makes manifest and RECORD agree with it."""
    _write(root / path, data)
    record = next(root.glob("vllm-*.dist-info/RECORD"))
    lines = [
        f"{path},{record_hash(data)},{len(data)}" if line.startswith(f"{path},") else line
        for line in record.read_text("utf-8").splitlines()
    ]
    _write(record, "\n".join(lines) + "\n")
    files = json.loads((root / MANIFEST).read_bytes())["files"]
    for changed in (path, record.relative_to(root).as_posix()):
        files[changed]["after"] = hashlib.sha256((root / changed).read_bytes()).hexdigest()
    edit_manifest(root, files=files)


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def record_hash(data: bytes) -> str:
    """A digest as RECORD writes it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


# GPU code. The layout is that of the real libraries; see imagebuild/verify/fatbin.py.


def flashkda_library(
    *,
    host: bytes = b"host code",
    machine: int = 62,
    targets: Iterable[tuple[int, str, bytes]] = ((90, "a", b"hopper"), (120, "f", b"blackwell")),
    schemas: Iterable[str] = SCHEMAS,
) -> bytes:
    """A library with the operators' schemas and code for some cards."""
    text = b"\0".join([b"", *(schema.encode() for schema in schemas), b""])
    entries = [entry(number, letter, payload) for number, letter, payload in targets]
    return elf({".text": host, ".rodata": text, ".nv_fatbin": container(entries)}, machine)


def entry(number: int, letter: str, payload: bytes, *, kind: int = 2, stored: bool = True) -> bytes:
    """One entry of a fatbin container."""
    flags = 0x1000011 | {"": 0, "a": 0x100000, "f": 0x200000}[letter]
    padded = payload + b"\0" * (-len(payload) % 8)
    size = len(payload) if stored else 0
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(padded), size, 0, 8, 1, number,
                       0, 0, flags, 0, 4096)  # fmt: skip
    return head + padded


def container(entries: Iterable[bytes]) -> bytes:
    """A fatbin container."""
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def elf(sections: Mapping[str, bytes], machine: int = 62) -> bytes:
    """A 64-bit little-endian ELF file with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    content = {**sections, ".shstrtab": names}
    body, headers = b"", [bytes(64)]
    for name, data in content.items():
        at = 64 + len(body)
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, at, len(data), 0, 0, 1, 0))
        body += data + b"\0" * (-len(data) % 8)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
                        len(headers), len(headers) - 1)  # fmt: skip
    return head + body + b"".join(headers)


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(textwrap.dedent(content).encode() if isinstance(content, str) else content)


FIXED = flashkda.Known(
    wheels=VERSION,
    machine="x86_64",
    file=hashlib.sha256(flashkda_library()).hexdigest(),
    code=hashlib.sha256(b"blackwell").hexdigest(),
    is_fixed=True,
)


@dataclass(frozen=True)
class Place:
    """A repository and a tree."""

    root: Path
    recipe: Recipe
    lock: Lock

    def verify(self, **options: object) -> VerifyReport:
        wanted = {"gpu_arch": "sm_120", "in_base": False, **options}
        return verify(self.root, self.recipe, self.lock, **wanted)  # type: ignore[arg-type]


def problems(report: VerifyReport) -> set[str]:
    return {finding.code for finding in report.findings if finding.level != "info"}


def text(report: VerifyReport) -> str:
    return "\n".join(report.lines())


def damaged(path: str, data: bytes = b"x = 1\n") -> Callable[[Path], None]:
    """A damage that writes a file into a tree."""
    return lambda root: _write(root / path, data)


def break_manifest(root: Path) -> None:
    """Makes the manifest unreadable."""
    (root / MANIFEST).write_bytes(b"\xff{")

"""Each fault planted once and found with code, sentence and exit code; then together."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagebuild.patching.apply import revert
from imagebuild.patching.manifest import JOURNAL, MANIFEST, ORIGINALS
from tests.support import verify_site as site
from tests.support.verify_site import damaged, problems, text

# One fault each.


def _journal(root: Path) -> None:
    (root / JOURNAL).write_text("{}", "utf-8")


def _unowned(root: Path) -> None:
    files = json.loads((root / MANIFEST).read_bytes())["files"]
    files["vllm/greeter.py"]["patches"] = []
    site.edit_manifest(root, files=files)


def _escaping(root: Path) -> None:
    files = json.loads((root / MANIFEST).read_bytes())["files"]
    files["../outside.py"] = {"before": None, "after": None, "mode": 420, "patches": []}
    site.edit_manifest(root, files=files)


def _lose_original(root: Path) -> None:
    next((root / ORIGINALS).iterdir()).unlink()


def _damage_original(root: Path) -> None:
    next((root / ORIGINALS).iterdir()).write_bytes(b"BZh9 no")


def _drop_patch(root: Path) -> None:
    content = json.loads((root / MANIFEST).read_bytes())
    site.edit_manifest(root, patches=[p for p in content["patches"] if p["verdict"] != "absorbed"])


def _foreign_patch(root: Path) -> None:
    patches = json.loads((root / MANIFEST).read_bytes())["patches"]
    extra = {"name": "vllm_extra_from_elsewhere", "verdict": "ok", "variant": "", "files": []}
    site.edit_manifest(root, patches=[*patches, extra])


def _append(path: str, data: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        with (root / path).open("ab") as file:
            file.write(data)

    return damage


def _unlink(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def _forge(path: str, data: bytes) -> Callable[[Path], None]:
    return lambda root: site.forge(root, path, data)


def _duplicate(root: Path) -> None:
    site.install(root, "flashinfer_python", "0.6.0", {})


def _unchecked_byte_code(root: Path) -> None:
    """What an installer may leave: byte code that is never compared with its source."""
    source = root / "vllm/fixed.py"
    old = root / "old.py"
    old.write_text("def is_fixed():\n    return False\n", "utf-8")
    py_compile.compile(str(old), importlib.util.cache_from_source(str(source)), doraise=True,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)  # fmt: skip
    old.unlink()


def _clamped_byte_code(root: Path) -> None:
    """A build with clamped times: byte code of the old text, with the new text's time and size."""
    source = root / "vllm/core.py"
    new, times = source.read_bytes(), source.stat()
    source.write_bytes(new.replace(b"return 1", b"return 2"))
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    cached = Path(py_compile.compile(str(source), doraise=True) or "")
    os.utime(cached, ns=(0, times.st_mtime_ns - 10**9))
    source.write_bytes(new)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))


MANY = [f"vllm/extra/m{number:02}.py" for number in range(12)]


def _many(root: Path) -> None:
    for path in MANY:
        damaged(path)(root)


@dataclass(frozen=True)
class Fault:
    """A damage, and what must be said about it.

    Attributes:
        damage: what is done to the patched tree.
        codes: every code that is reported, no more and no fewer.
        words: part of the report.
        exit_code: of the whole.
    """

    damage: Callable[[Path], object]
    codes: set[str]
    words: str
    exit_code: int = 3


FAULTS = {
    "interrupted": Fault(_journal, {"interrupted"}, "a change of this tree was interrupted"),
    "not patched": Fault(revert, {"not-patched"}, "hint: build.py patches apply --tree "),
    "manifest garbage": Fault(
        site.break_manifest, {"manifest-unreadable"}, "expected a manifest of this tool", 4
    ),
    "manifest of another schema": Fault(
        lambda root: site.edit_manifest(root, schema=9), {"manifest-unreadable"}, "schema 9", 4
    ),
    "manifest without owner": Fault(
        _unowned,
        {"manifest-inconsistent"},
        "says that vllm_greeter_polite_words changed vllm/greeter.py, but that file does not",
        4,
    ),
    "manifest that leaves the tree": Fault(
        _escaping, {"manifest-unreadable"}, "'../outside.py' that leaves the tree", 4
    ),
    "manifest of an unknown arch": Fault(
        lambda root: site.edit_manifest(root, gpu_arch="sm_99"),
        {"manifest-inconsistent", "other-arch"},
        "expected gpu_arch of sm_120, sm_121, found 'sm_99'",
        4,
    ),
    "original lost": Fault(_lose_original, {"original-lost"}, "the original cannot be read", 4),
    "original damaged": Fault(_damage_original, {"original-lost"}, "the original cannot be", 4),
    "another base": Fault(
        lambda root: site.edit_manifest(root, base={"version": "0.30.0", "commit": "fffffff"}),
        {"other-base"},
        "vLLM 0.30.0 (fffffff), found 0.31.0 (0a1b2c3d4)",
    ),
    "another recipe": Fault(
        lambda root: site.edit_manifest(root, recipe="huge"),
        {"other-recipe"},
        "expected recipe 'tiny', found 'huge'",
    ),
    "another series": Fault(
        lambda root: site.edit_manifest(root, series="0" * 64),
        {"other-series"},
        "built from another series",
    ),
    "another arch": Fault(
        lambda root: site.edit_manifest(root, gpu_arch="sm_121"),
        {"other-arch"},
        "expected a tree for sm_120, found sm_121",
    ),
    "a patch is missing": Fault(
        _drop_patch, {"patch-missing"}, "vllm_math_sums_right: expected it in the manifest"
    ),
    "a patch is not ours": Fault(
        _foreign_patch, {"patch-unknown"}, "vllm_extra_from_elsewhere: in the manifest, but not"
    ),
    "a patched file changed": Fault(
        _append("vllm/greeter.py", b"# more\n"), {"file-changed"}, "vllm/greeter.py: expected"
    ),
    "a new file is gone": Fault(_unlink("tiny_extra.py"), {"file-changed"}, "found no file"),
    "an effect is gone": Fault(
        damaged("vllm/greeter.py", b'def greet():\n    return "hello"\n'),
        {"file-changed", "no-effect"},
        "vllm_greeter_polite_words: it fails that greet gives 'good day': greet gives 'hello'",
    ),
    "a forged manifest": Fault(
        _forge("vllm/core.py", b"def count():\n    return 1  # quick\n"),
        {"not-from-series"},
        "vllm/core.py: the manifest says other content than what the series makes",
    ),
    "a patched file does not compile": Fault(
        _forge("vllm/core.py", b"def count():\n    return 1\n\n\nreturn (\n"),
        {"not-from-series", "no-effect", "syntax"},
        "vllm/core.py:5: does not compile: ",
    ),
    "an upstream fix is gone": Fault(
        damaged("vllm/fixed.py", b"def is_fixed():\n    return 0\n"),
        {"fix-missing", "record-differs"},
        "vllm_fixed_long_ago (vllm#1): it fails that is_fixed gives True: is_fixed gives 0",
    ),
    "a file of the wheel is gone": Fault(
        _unlink("vllm/configs/table.json"),
        {"record-missing"},
        "vllm/configs/table.json: its wheel's RECORD lists it, found none",
    ),
    "a file of the wheel has another length": Fault(
        _append("vllm/configs/table.json", b" "), {"record-differs"}, "expected 3 bytes"
    ),
    "a file of the wheel has other bytes": Fault(
        damaged("vllm/configs/table.json", b"[]\n"), {"record-differs"}, "found sha256="
    ),
    "foreign code": Fault(
        damaged("vllm/overlay.py"),
        {"foreign-code"},
        "vllm/overlay.py: neither its wheel nor our manifest lists this file",
    ),
    "foreign byte code without a source": Fault(
        damaged("flashinfer/ghost.pyc"), {"foreign-code"}, "flashinfer/ghost.pyc"
    ),
    "foreign data": Fault(
        damaged("vllm/configs/tuned.json"), {"foreign-file"}, "vllm/configs/tuned.json", 0
    ),
    "many foreign files": Fault(_many, {"foreign-code"}, "and 2 more files like these"),
    "a linked folder": Fault(
        lambda root: (root / "vllm/linked").symlink_to(root / "flashinfer"),
        {"foreign-file"},
        "vllm/linked",
        0,
    ),
    "a stale library": Fault(
        damaged("vllm/_flashkda_C.cpython-312-x86_64-linux-gnu.so"),
        {"two-libraries"},
        "hides _flashkda_C.abi3.so when _flashkda_C is imported",
    ),
    "a library for a third Python": Fault(
        damaged("vllm/deep/_C.cpython-313-x86_64-linux-gnu.so"),
        {"two-libraries", "foreign-code"},
        "_C.cpython-313",
    ),
    "a plain library beside": Fault(
        damaged("vllm/_flashkda_C.so"), {"two-libraries", "foreign-code"}, "hides _flashkda_C.so"
    ),
    "a project twice": Fault(
        _duplicate,
        {"two-versions", "version-differs"},
        "flashinfer_python-0.6.0.dist-info and flashinfer_python-0.7.0.post1.dist-info",
    ),
    "a path file that runs code": Fault(
        damaged("zz.pth", b"import zz\n"), {"startup-path"}, "runs code at every start", 0
    ),
    "a path file that adds a path": Fault(
        damaged("zz.pth", b"# why\n/opt/x\n"), {"startup-path"}, "adds '/opt/x' to the path", 0
    ),
    "an empty path file": Fault(damaged("zz.pth", b"# nothing\n\n"), set(), "verify ok", 0),
    "start-up code": Fault(
        damaged("sitecustomize.py"), {"startup-code"}, "runs at every start of Python", 0
    ),
    "byte code that is never checked": Fault(
        _unchecked_byte_code, {"stale-bytecode"}, "is not the byte code of vllm/fixed.py"
    ),
    "byte code with a clamped time": Fault(
        _clamped_byte_code, {"stale-bytecode"}, "is not the byte code of vllm/core.py"
    ),
    "no FlashKDA": Fault(
        _unlink(site.LIBRARY),
        {"flashkda-missing", "record-missing"},
        f"expected {site.LIBRARY}, found:",
    ),
    "FlashKDA is no library": Fault(
        damaged(site.LIBRARY, b"not an ELF"),
        {"flashkda-unreadable", "record-differs"},
        "expected a shared library, found no 64-bit little-endian ELF file",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_code_sentence_and_exit_code(
    name: str, make: Callable[..., site.Place]
) -> None:
    fault = FAULTS[name]
    place = make()
    fault.damage(place.root)
    report = place.verify()
    assert fault.words in text(report)
    assert problems(report) == fault.codes
    assert report.exit_code == fault.exit_code


def test_faults_are_reported_together(make: Callable[..., site.Place]) -> None:
    place = make()
    names = ["a patched file changed", "an upstream fix is gone", "foreign code", "a project twice",
             "a stale library", "no FlashKDA", "start-up code"]  # fmt: skip
    for name in names:
        FAULTS[name].damage(place.root)
    report = place.verify()
    # Without the .abi3.so the stale library hides nothing, and is a foreign file like others.
    expected = set().union(*(FAULTS[name].codes for name in names)) - {"two-libraries"}
    assert problems(report) == expected
    assert report.exit_code == 3
    assert (
        text(report).splitlines()[-1]
        == f"verify failed: {sum(g.count('error') for g in report.groups)} errors"
    )


def test_an_untrusted_manifest_outweighs_other_errors(make: Callable[..., site.Place]) -> None:
    place = make()
    site.break_manifest(place.root)
    _unlink(site.LIBRARY)(place.root)
    report = place.verify()
    assert {"manifest-unreadable", "flashkda-missing"} <= problems(report)
    assert report.exit_code == 4


def test_ten_files_are_named_and_the_rest_is_counted(make: Callable[..., site.Place]) -> None:
    place = make()
    _many(place.root)
    found = [f for f in place.verify().findings if f.code == "foreign-code"]
    assert [f.file for f in found] == [*MANY[:10], ""]


def test_only_code_is_hashed_when_not_asked_for_all(make: Callable[..., site.Place]) -> None:
    place = make()
    damaged("vllm/configs/table.json", b"[]\n")(place.root)
    assert problems(place.verify(full=False)) == set()
    damaged("vllm/fixed.py", b"def is_fixed():\n    return  True\n")(place.root)
    _append("vllm/configs/table.json", b" ")(place.root)
    found = place.verify(full=False).findings
    assert [f.file for f in found if f.code == "record-differs"] == [
        "vllm/configs/table.json",
        "vllm/fixed.py",
    ]

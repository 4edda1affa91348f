"""The stubs, in a process of their own: what they answer for, and that they answer for no more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild.config import ROOT
from imagebuild.patching.tree import Tree
from imagebuild.smoke.stubs import NATIVE

_HEAD = f"import sys, json; sys.path.append({str(ROOT)!r})\nfrom imagebuild.smoke import stubs\n"


def said(code: str, folder: Path | None = None) -> object:
    path = f"sys.path.insert(0, {str(folder)!r})\n" if folder else ""
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", _HEAD + path + "stubs.install()\n" + code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stubbed_project_answers_to_every_import_and_attribute() -> None:
    code = """
import torchvision
import torchvision.transforms.v2.functional as deep
from torchvision.io import ImageReadMode, decode_image
class Mine(torchvision.transforms.Compose):
    pass
made = Mine([1], key=2)
print(json.dumps([type(made).__name__, bool(made.anything(1).more), callable(decode_image),
                  ImageReadMode.RGB is not None, deep.__name__]))
"""
    assert said(code) == ["Mine", True, True, True, "torchvision.transforms.v2.functional"]


def test_its_metadata_names_a_version() -> None:
    code = """
import importlib.metadata as m, importlib.util as u
print(json.dumps([m.version("torchvision"), m.packages_distributions()["torchvision"],
                  u.find_spec("torchvision") is not None,
                  "torchvision" in [d.name for d in m.distributions()]]))
"""
    assert said(code) == ["0.28.0", ["torchvision"], True, True]


def test_dunder_names_are_not_answered() -> None:
    code = """
import torchvision
print(json.dumps([hasattr(torchvision, "__wrapped__"), hasattr(torchvision.ops, "__len__"),
                  hasattr(torchvision.ops(), "__iter__"), hasattr(torchvision.ops(), "x")]))
"""
    assert said(code) == [False, False, False, True]


def test_native_modules_are_stubbed_by_exact_name_alone(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("REAL = True\n")
    (tmp_path / "vllm" / "real.py").write_text("WORD = 'real'\n")
    code = """
import importlib
import vllm, vllm.real
found = {}
for name in (*stubs.NATIVE, "vllm._C", "vllm._flashkda_C.more", "vllm.absent", "torchvision2"):
    try:
        importlib.import_module(name)
        found[name] = True
    except ModuleNotFoundError:
        found[name] = False
print(json.dumps([vllm.REAL, vllm.real.WORD, found]))
"""
    real, word, found = said(code, tmp_path)  # type: ignore[misc]
    assert (real, word) == (True, "real")
    absent = ["vllm._C", "vllm._flashkda_C.more", "vllm.absent", "torchvision2"]
    assert found == dict.fromkeys(NATIVE, True) | dict.fromkeys(absent, False)


def test_a_second_call_changes_nothing() -> None:
    assert said("n = len(sys.meta_path); stubs.install(); print(len(sys.meta_path) - n)") == 0


@pytest.mark.network
def test_every_native_name_is_an_extension_module_of_the_wheel(
    real_tree: Callable[[str], Tree],
) -> None:
    files = set(real_tree("0.31.0").iter("vllm/_"))
    missing = [name for name in NATIVE if f"{name.replace('.', '/')}.abi3.so" not in files]
    assert missing == []

"""The step that makes the JIT's headers and libraries findable, on made-up root folders."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "link_cuda_headers.py"
_spec = importlib.util.spec_from_file_location("link_cuda_headers", SOURCE)
step = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = step
_spec.loader.exec_module(step)

COMPILER = shutil.which("gcc") or shutil.which("cc")
# Stands in for a C compiler where there is none: it checks no more than that its inputs are there.
DOUBLE = """\
#!{python}
import pathlib, sys
args = sys.argv[1:]
header = pathlib.Path(args[args.index("-I") + 1], "nvrtc.h")
if not header.exists() or "#error" in header.read_text():
    sys.exit("compiler double: nvrtc.h")
if "-L" in args:
    library = pathlib.Path(args[args.index("-L") + 1], "libnvrtc.so")
    if not library.exists() or b"nvrtcVersion" not in library.read_bytes():
        sys.exit("compiler double: -lnvrtc")
"""
HEADER = "int nvrtcVersion(int *major, int *minor);\n"
SITE = "usr/local/lib/python3.12/dist-packages"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    if COMPILER:
        return COMPILER
    path = tmp_path_factory.mktemp("double") / "compiler-double"
    path.write_text(DOUBLE.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A shared library with the one function that the link probe calls."""
    path = tmp_path_factory.mktemp("library") / "libnvrtc.so.13"
    if not COMPILER:
        path.write_bytes(b"nvrtcVersion")
        return path
    program = "int nvrtcVersion(int *major, int *minor) { return !(major && minor); }"
    command = [COMPILER, "-x", "c", "-shared", "-fPIC", "-", "-o", str(path)]
    subprocess.run(command, input=program, text=True, check=True)
    return path


def write(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def root(tmp_path, library):
    """A base image's CUDA: the wheel complete, the toolkit trimmed."""
    root = tmp_path / "root"
    make_wheel(root, SITE, library)
    write(root, "usr/local/cuda/include/cuda.h", "the toolkit's own\n")
    write(root, "usr/local/cuda/lib64/libcudart.so.13", "the toolkit's own\n")
    return root


def make_wheel(root, site, library):
    wheel = f"{site}/nvidia/cu13"
    write(root, f"{wheel}/include/nvrtc.h", HEADER)
    write(root, f"{wheel}/include/cuda.h", "the wheel's\n")
    write(root, f"{wheel}/include/crt/host_defines.h")
    write(root, f"{wheel}/lib/libcublas.so.13", "the wheel's\n")
    write(root, f"{wheel}/lib/libnvrtc.alt.so.13", "the wheel's\n")
    write(root, f"{wheel}/lib/libnvrtc.txt")
    shutil.copy(library, root / wheel / "lib" / "libnvrtc.so.13")


def snapshot(root):
    """Every path with its kind, its time and what it holds or leads to."""
    seen = {}
    for path in sorted(root.rglob("*")):
        held = path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        seen[str(path.relative_to(root))] = (path.lstat().st_mtime_ns, held)
    return seen


def test_headers_and_libraries_are_found(root, compiler):
    report = step.link(root, compiler)
    cuda = root / "usr/local/cuda"
    assert (cuda / "include/nvrtc.h").read_text() == HEADER
    assert (cuda / "include/crt/host_defines.h").exists()
    wheel = root / SITE / "nvidia/cu13/lib"
    assert (cuda / "lib64/libnvrtc.so").resolve() == wheel / "libnvrtc.so.13"
    assert (cuda / "lib64/libnvrtc.alt.so").resolve() == wheel / "libnvrtc.alt.so.13"
    assert not (cuda / "lib64/libnvrtc.txt").exists()
    assert report.probes == [
        "ldconfig: not run, since the root is not /",
        f"compile and link probes: ok with {compiler}",
    ]
    # Relative, so that they hold wherever the root is unpacked.
    moved = root.rename(root.with_name("moved"))
    assert (moved / "usr/local/cuda/lib64/libcublas.so").read_text() == "the wheel's\n"


def test_a_second_run_changes_nothing(root, compiler):
    assert step.link(root, compiler).is_changed
    before = snapshot(root)
    second = step.link(root, compiler)
    assert not second.is_changed
    assert second.lines()[0] == "nothing to link"
    assert snapshot(root) == before


def test_what_is_there_stays(root, compiler):
    cuda = root / "usr/local/cuda"
    own = write(root, "usr/local/cuda/lib64/libcublas.so", "the toolkit's own\n")
    (cuda / "include/crt").symlink_to("../elsewhere")
    write(root, "usr/local/cuda/elsewhere/host_defines.h")
    step.link(root, compiler)
    assert (cuda / "include/cuda.h").read_text() == "the toolkit's own\n"
    assert own.read_text() == "the toolkit's own\n"
    assert not own.is_symlink()
    assert (cuda / "include/crt").readlink() == Path("../elsewhere")


def test_a_trimmed_folder_is_filled(root, compiler):
    own = write(root, "usr/local/cuda/include/crt/own.h")
    step.link(root, compiler)
    assert (own.parent / "host_defines.h").is_symlink()
    assert own.exists()


@pytest.mark.parametrize("target", ["gone.h", "/gone/nvrtc.h", "nvrtc.h"])
def test_a_link_that_leads_nowhere_is_repaired(root, compiler, target):
    place = root / "usr/local/cuda/include/nvrtc.h"
    place.symlink_to(target)
    report = step.link(root, compiler)
    assert report.repaired == ["/usr/local/cuda/include/nvrtc.h"]
    assert place.read_text() == HEADER
    assert sorted(path.name for path in place.parent.iterdir()) == ["crt", "cuda.h", "nvrtc.h"]


def test_an_absolute_link_means_a_place_in_the_image(root, compiler):
    """/usr/local/cuda is one in the base: it must not lead to the machine that builds."""
    (root / "usr/local/cuda").rename(root / "usr/local/cuda-13.0")
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.0")
    (root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
    report = step.link(root, compiler)
    assert "/usr/local/cuda-13.0/lib64/libnvrtc.so" in report.linked
    assert (root / "usr/local/cuda-13.0/lib64/libnvrtc.so").exists()
    assert not step.link(root, compiler).is_changed


def test_the_newest_version_is_linked(root, compiler):
    lib = root / SITE / "nvidia/cu13/lib"
    for version in ("9", "13.1", "13.0.88"):
        write(lib, f"libcublas.so.{version}", version)
    step.link(root, compiler)
    assert (root / "usr/local/cuda/lib64/libcublas.so").read_text() == "13.1"


@pytest.mark.parametrize(
    "site",
    ["usr/lib/python3.14/site-packages", "opt/venv/lib/python3.13/site-packages"],
)
def test_any_python_will_do(tmp_path, library, compiler, site):
    make_wheel(tmp_path, site, library)
    (tmp_path / "usr/local/cuda").mkdir(parents=True)
    step.link(tmp_path, compiler)
    assert (tmp_path / "usr/local/cuda/include/nvrtc.h").exists()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (f"{SITE}/nvidia", "nvidia/cu13/include: expected it in a site-packages, looked in /usr"),
        (f"{SITE}/nvidia/cu13/lib", "nvidia/cu13/lib: expected a folder, found none"),
        ("usr/local/cuda", "/usr/local/cuda: expected the CUDA toolkit's folder, found none"),
        (f"{SITE}/nvidia/cu13/include/nvrtc.h", "include/nvrtc.h: expected a file, found none"),
        (f"{SITE}/nvidia/cu13/lib/libnvrtc.so.13", "lib64/libnvrtc.so: expected a file"),
    ],
)
def test_what_is_missing_is_named(root, capsys, broken, sentence):
    path = root / broken
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert step.main(["--root", str(root)]) == 3
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_two_wheels_are_not_guessed_between(root, library):
    make_wheel(root, "usr/lib/python3.13/dist-packages", library)
    with pytest.raises(step.LinkError, match=r"one site-packages, found /usr/local.*, /usr/lib/"):
        step.link(root)


def test_a_circle_is_a_sentence(root):
    shutil.rmtree(root / "usr/local/cuda")
    (root / "usr/local/cuda").symlink_to("cuda")
    with pytest.raises(step.LinkError, match=r"/usr/local/cuda: its links lead in a circle"):
        step.link(root)


def test_a_header_that_does_not_compile_fails_the_step(root, compiler):
    write(root, f"{SITE}/nvidia/cu13/include/nvrtc.h", "#error trimmed\n")
    with pytest.raises(step.LinkError, match=r"the compile probe: expected .* to succeed"):
        step.link(root, compiler)


def test_a_library_without_nvrtc_fails_the_step(root, compiler):
    write(root, f"{SITE}/nvidia/cu13/lib/libnvrtc.so.13", "no library\n")
    with pytest.raises(step.LinkError, match=r"the link probe: expected .* to succeed"):
        step.link(root, compiler)


def test_without_a_compiler_the_report_says_so(root, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(root))
    assert step.main(["--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "compile and link probes: not run, since there is no gcc or cc" in out
    assert (root / "usr/local/cuda/lib64/libnvrtc.so").exists()


def test_a_named_compiler_must_be_there(root, capsys):
    assert step.main(["--root", str(root), "--cc", "no-such-cc"]) == 3
    assert "no-such-cc: expected a C compiler, found none of that name" in capsys.readouterr().err


def test_it_runs_as_a_script_of_any_interpreter(root, compiler):
    """In the image nothing of the project is on the path."""
    command = [sys.executable, "-I", "-S", str(SOURCE), "--root", str(root), "--cc", compiler]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("compile and link probes: ok")
    assert done.stderr == ""

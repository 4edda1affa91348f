"""A small product: a repository with one recipe, and an index with the releases that it is for.

`Product.run` calls the command line as build.py does. Three releases of a vLLM of a few lines
exist, each for both platforms; what changes between them is in `release_files`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from imagebuild.cli import main
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer
from tests.support.verify_site import flashkda_library
from tests.support.wheels import build_wheel

NOW = 1_795_910_400  # 2026-11-29
REPOSITORY = Path(__file__).resolve().parents[2]
NAME = "tiny"
VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
COMMITS = {"0.31.0": "aaaaaaa31", "0.32.0": "bbbbbbb32", "0.33.0": "ccccccc33"}
FLASHINFER = {"0.31.0": "0.7.0", "0.32.0": "0.7.0", "0.33.0": "0.7.2"}
GREETER, COUNTER, PLAN = (
    "vllm_greeter_polite_words",
    "vllm_counter_starts_zero",
    "flashinfer_plan_admits_twelve",
)
PATCHES = (GREETER, COUNTER, PLAN)
TAGS = {
    "linux/amd64": "cp38-abi3-manylinux_2_28_x86_64",
    "linux/arm64": "cp38-abi3-manylinux_2_28_aarch64",
}
MACHINES = {"linux/amd64": 62, "linux/arm64": 183}

RECIPE = f"""\
schema = 1
name = "{NAME}"
description = "for tests"
series = "series.toml"
patches = "patches/{NAME}"
[base]
version = "0.31.0"
site_packages = "usr/lib/python3.12/dist-packages"
python = "3.12"
[wheels]
pins = ["torch", "triton", "flashinfer-python", "transformers"]
[wheels.site]
vllm = "vllm"
flashinfer-python = "flashinfer"
[image_pins]
[gpu_arch]
sm_120 = "linux/amd64"
sm_121 = "linux/arm64"
"""
SERIES = f"patches = {json.dumps(PATCHES)}\n"
_HEAD = '''"""{title}

Symptom: for tests.
Cause: for tests.
Change: for tests.
Upstream: none.
Drop when: never.
Cost: none.
"""

import ast

from imagebuild.patching.patch import (
    Answer, Drop, Edit, NewFile, Patch, Probe, Symbol, Variant,
)
from imagebuild.patching.structure import function, parse, returned


def gives(path, name, *wanted):
    def check(tree):
        value = ast.literal_eval(returned(function(tree, path, name)))
        return Answer.of(value in wanted, f"{{name}} gives {{value!r}}")
    return Probe(f"{{name}} gives {{wanted[0]!r}}", check, (path,))


'''
_MODULES = {
    GREETER: """\
_EDITS = (Edit(label="words", path="vllm/greeter.py", scope="Greeter.greet",
               anchor='        return "hello"\\n', text='        return "good day"\\n'),)
_RELIES = (Symbol("vllm/util.py", "helper"),)
PATCH = Patch(
    name="vllm_greeter_polite_words", status="pending", upstream="", origin="tests",
    reason=gives("vllm/greeter.py", "Greeter.greet", "hello"),
    effect=gives("vllm/greeter.py", "Greeter.greet", "good day"),
    absorbed=gives("vllm/greeter.py", "Greeter.greet", "good day"),
    variants=(Variant(versions=">=0.31,<0.32", edits=_EDITS, relies_on=_RELIES),
              Variant(versions=">=0.32,<0.34", edits=_EDITS, relies_on=_RELIES)),
)
""",
    COUNTER: """\
PATCH = Patch(
    name="vllm_counter_starts_zero", status="backport", upstream="https://example.org/1",
    origin="tests", knob="TINY_COUNTER",
    reason=gives("vllm/counter.py", "start", 1), effect=gives("vllm/counter.py", "start", 0),
    absorbed=gives("vllm/counter.py", "start", 0),
    variants=(Variant(versions=">=0.31,<0.32", edits=(Edit(
        label="zero", path="vllm/counter.py", scope="start",
        anchor="    return 1\\n", text="    return 0\\n"),),
        files=(NewFile(source="tiny_extra.py", path="tiny_extra.py"),)),),
    drops=(Drop(versions=">=0.32", sentence="vLLM 0.32 starts at zero itself.",
                proof=gives("vllm/counter.py", "start", 0)),),
)
""",
    PLAN: """\
PATCH = Patch(
    name="flashinfer_plan_admits_twelve", status="pending", upstream="", origin="tests",
    gpu_arches=("sm_120",),
    reason=gives("flashinfer/plan.py", "majors", (9,)),
    effect=gives("flashinfer/plan.py", "majors", (9, 12)),
    absorbed=gives("flashinfer/plan.py", "majors", (9, 12)),
    variants=(Variant(versions=">=0.31,<0.34", edits=(Edit(
        label="twelve", path="flashinfer/plan.py", scope="majors",
        anchor="    return (9,)\\n", text="    return (9, 12)\\n"),)),),
)
""",
}


def release_files(version: str, platform: str) -> dict[str, bytes]:
    """What is in a vLLM wheel: in 0.32 one scope changes, and the counter is fixed upstream."""
    is_old = version == "0.31.0"
    greet = ["class Greeter:", "    def greet(self):", '        return "hello"', ""]
    if not is_old:
        greet.insert(2, "        self.greeted = True")
    files = {
        "vllm/__init__.py": "raise ImportError('nothing of the target may be executed')\n",
        "vllm/_version.py": f"__version__ = '{version}'\n__commit_id__ = 'g{COMMITS[version]}'\n",
        "vllm/greeter.py": "\n".join(greet),
        "vllm/counter.py": f"def start():\n    return {int(is_old)}\n",
        "vllm/util.py": "def helper():\n    return 3\n",
        "vllm/configs/table.json": "{}\n",
    }
    library = flashkda_library(machine=MACHINES[platform], host=version.encode())
    return {path: text.encode() for path, text in files.items()} | {
        "vllm/_flashkda_C.abi3.so": library,
        "vllm/_C.abi3.so": b"library for " + platform.encode() * 400,
    }


def write_release(
    folder: Path, version: str, files: Mapping[str, bytes] | None = None
) -> dict[str, Path]:
    """Both platforms' wheels of one release; `files` replaces or adds some."""
    requires = ["torch==2.13.0", f"flashinfer-python=={FLASHINFER[version]}", "transformers<6,>=5"]
    return {
        platform: build_wheel(
            folder,
            version=version,
            tag=tag,
            files={**release_files(version, platform), **(files or {})},
            requires=requires,
        )
        for platform, tag in TAGS.items()
    }


def write_index(folder: Path) -> None:
    """Every wheel that the recipe needs."""
    for version in VERSIONS:
        write_release(folder, version)
    for version in sorted(set(FLASHINFER.values())):
        plan = f"# {version}\ndef majors():\n    return (9,)\n".encode()
        files = {"flashinfer/__init__.py": b"", "flashinfer/plan.py": plan}
        build_wheel(folder, name="flashinfer_python", version=version, tag="py3-none-any",
                    files=files)  # fmt: skip
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64"):
        build_wheel(folder, name="torch", version="2.13.0", tag=f"cp312-cp312-{tag}",
                    files={"torch/__init__.py": b""}, requires=["triton==3.7.1"])  # fmt: skip


def write_repository(root: Path) -> None:
    """Recipe, series and patches; no lock."""
    folder = root / "image" / NAME
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "series.toml").write_text(SERIES)
    (root / "image" / "runtime").mkdir()
    (root / "image" / "runtime" / "tiny_extra.py").write_text("EXTRA = 1\n")
    (root / "patches" / NAME).mkdir(parents=True)
    for name, text in _MODULES.items():
        content = _HEAD.format(title=f"Make {name} true.") + text
        (root / "patches" / NAME / f"{name}.py").write_text(content)


class QuickIndex(IndexServer):
    """Answers at once: with Nagle's algorithm the client's delayed ACK costs 40 ms an answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        slow = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type(
            "_Quick", (slow,), {"disable_nagle_algorithm": True}
        )


@dataclass
class Ran:
    """One call of the command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout, which must be one document and nothing else."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        assert document["schema"] == 1
        return document


class Product:
    """A repository at `root`, an index over `wheels`, and a cache.

    Attributes:
        index_url: what pip is configured with.
        extra: more environment variables.
        asks_pip: `run` reads the settings from pip, which takes half a second; other processes
            always do.
        now: seconds since 1970 by which `run` judges ages.
        timeout, retries: pip's, for `run`.
    """

    def __init__(self, folder: Path, server: IndexServer) -> None:
        self.folder = folder
        self.root = folder / "repository"
        self.cache = folder / "cache"
        self.server = server
        self.wheels = server.folder
        self.index_url = server.url
        self.extra: dict[str, str] = {}
        self.asks_pip = False
        self.now = NOW
        self.timeout = 20.0
        self.retries = 0

    @property
    def lock_file(self) -> Path:
        return self.root / "image" / NAME / "lock.toml"

    @property
    def environment(self) -> dict[str, str]:
        """Of a user whose pip knows the loopback index and nothing else."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "FORCE_COLOR", "NO_COLOR", "COLUMNS"):
            kept.pop(name, None)
        return kept | {
            "HOME": str(self.folder),
            "IMAGEBUILD_CACHE": str(self.cache),
            "PIP_INDEX_URL": self.index_url,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
            "PIP_DEFAULT_TIMEOUT": "20",
            "NO_PROXY": "127.0.0.1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.extra,
        }

    def run(self, *arguments: str) -> Ran:
        """Calls `main` in this process."""
        out, err = io.StringIO(), io.StringIO()
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(self.environment)
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                contextlib.nullcontext() if self.asks_pip else self._pip(),
                mock.patch("imagebuild.lock_check.now", lambda: self.now),
            ):
                code = main(arguments, root=self.root)
        finally:
            os.environ.clear()
            os.environ.update(before)
        ran = Ran(code, out.getvalue(), err.getvalue())
        assert "Traceback" not in ran.out + ran.err, ran
        assert "internal error" not in ran.out + ran.err, ran
        return ran

    def _pip(self) -> Any:
        settings = PipSettings(self.index_url, timeout=self.timeout, retries=self.retries)
        return mock.patch("imagebuild.upstream.read_settings", lambda: settings)

    def command(self, *arguments: str) -> list[str]:
        """The command of another process that does the same."""
        code = (
            "import sys; from pathlib import Path; from imagebuild.cli import main; "
            f"sys.exit(main(sys.argv[1:], root=Path({str(self.root)!r})))"
        )
        return [sys.executable, "-c", code, *arguments]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts another process; its working directory is this project, whose code it runs."""
        return subprocess.Popen(
            self.command(*arguments), cwd=REPOSITORY, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip

    def spawn(self, *arguments: str, **options: Any) -> Ran:
        """Runs another process to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in out + err, err
        return Ran(process.returncode, out, err)

    def replace(self, path: str, old: str, new: str) -> None:
        """Changes one file of the repository."""
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{path} does not hold {old!r}"
        file.write_text(text.replace(old, new))

    def only_locked(self, *versions: str) -> None:
        """Takes the other bases out of the lock."""
        import tomllib

        import tomli_w

        from imagebuild.lock_update import HEAD

        content = tomllib.loads(self.lock_file.read_text())
        content["base"] = {v: table for v, table in content["base"].items() if v in versions}
        self.lock_file.write_text(HEAD + tomli_w.dumps(content))


def template(folder: Path) -> None:
    """Writes repository, index and lock once; tests get copies."""
    write_repository(folder / "repository")
    write_index(folder / "served")
    with QuickIndex(folder / "served") as server:
        product = Product(folder, server)
        wanted = [word for version in VERSIONS for word in ("--base-version", version)]
        ran = product.run("lock", "update", *wanted, "--accept", "all")
        assert ran.code == 0, ran
    shutil.rmtree(product.cache)


def files_of(root: Path) -> dict[str, bytes]:
    """Content of every file below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }

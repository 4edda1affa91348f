"""A recipe of one's own: a small project on a loopback index, and transformers with two diffs.

The second one is docs/bring-your-own.md, step by step, on the real wheels of transformers.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from imagebuild.cli import main
from imagebuild.config import ROOT, load_recipe
from tests.support.index_server import IndexServer
from tests.support.product import Product, files_of
from tests.support.wheels import build_wheel

PAGE = (ROOT / "docs" / "bring-your-own.md").read_text("utf-8")
HEAD = """\
Subject: {0}
Symptom: for a test.
Upstream-Status: inappropriate
Versions: {1}
Drop-When: never.
"""


def diff(path: str, old: str, new: str, *, shift: int = 0) -> str:
    """A diff from a repository with `src/`, whose lines stand `shift` further down there."""
    lines = difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True),
                                 f"a/src/{path}", f"b/src/{path}")  # fmt: skip
    text = "".join(lines)
    moved = re.sub(r"^@@ -(\d+)(,\d+)? \+(\d+)", lambda m: f"@@ -{int(m[1]) + shift}{m[2] or ''} "
                   f"+{int(m[3]) + shift}", text, flags=re.MULTILINE)  # fmt: skip
    return f"Strip: 2\n---\n{moved}"


TOY = "import os\n\n# {}\ndef limit():\n    return 12\n"


class TestSmall:
    """A project that is not vLLM, with a wheel for any platform or for one."""

    @pytest.fixture
    def index(self, product: Product) -> IndexServer:
        for version in ("1.2.0", "1.3.0"):
            text = TOY.format(version)
            files = {"toylib/__init__.py": b"", "toylib/core.py": text.encode()}
            build_wheel(product.wheels, name="Toy_Lib", version=version, tag="py3-none-any",
                        files=files)  # fmt: skip
        build_wheel(product.wheels, name="two_tops", version="1.0", tag="py3-none-any",
                    files={"one/__init__.py": b"", "two/__init__.py": b""})  # fmt: skip
        return product.server

    def test_makes_recipe_series_and_lock(self, product: Product, index: IndexServer) -> None:
        before = files_of(product.root)
        ran = product.run("init-recipe", "toy-lib==1.2.0")
        assert ran.code == 0, ran
        assert "recipe toy-lib: toy-lib 1.2.0, package toylib" in ran.out
        assert "patches check --recipe toy-lib" in ran.out
        made = set(files_of(product.root)) - set(before)
        assert made == {f"image/toy-lib/{name}.toml" for name in ("recipe", "series", "lock")}
        assert (product.root / "patches" / "toy_lib").is_dir()
        recipe = load_recipe("toy-lib", product.root)
        assert (recipe.project, recipe.site) == ("toy-lib", {"toy-lib": "toylib"})
        again = product.run("init-recipe", "toy-lib==1.2.0")
        assert again.code == 2
        assert "expected no such folder yet" in again.err
        assert product.run("plan", "--arch", "sm_120").code == 2  # two recipes: name one
        assert product.run("plan", "--recipe", "toy-lib", "--arch", "sm_121").code == 0
        ran = product.run("build", "--recipe", "toy-lib", "--engine", "docker", "--arch", "sm_120")
        assert (ran.code, "expected a recipe of vLLM" in ran.err) == (2, True), ran

    def test_a_diff_is_built_verified_audited_and_ported(
        self, product: Product, index: IndexServer
    ) -> None:
        assert product.run("init-recipe", "toy-lib==1.2.0").code == 0
        old = TOY.format("1.2.0")
        head = HEAD.format("Raise the limit.", ">=1.2,<1.3")
        patch = product.root / "patches" / "toy_lib" / "toy-lib-limit.patch"
        patch.write_text(head + diff("toylib/core.py", old, old.replace("12", "90"), shift=3))
        series = product.root / "image" / "toy-lib" / "series.toml"
        series.write_text('patches = ["toy-lib-limit.patch"]\n')
        named = ("--recipe", "toy-lib")
        ran = product.run("patches", "check", *named)
        assert ran.code == 1  # nobody has locked it
        assert "fits 3 lines above where the diff has it [toylib/core.py:2]" in ran.out
        assert product.run("lock", "update", "wheels", *named).code == 0
        shown = product.run("lock", "show", *named).out
        assert "  1.2.0: commit unknown, 1 fingerprints\n" in shown
        assert "origin:   -\n" in product.run("patches", "show", "toy-lib-limit", *named).out
        ran = product.run("build", "--arch", "sm_120", *named)
        assert ran.code == 0, ran
        assert "fits 3 lines above" in ran.out
        site = product.root / "dist" / "toy-lib-sm_120" / "site"
        assert "return 90" in (site / "toylib" / "core.py").read_text()
        ran = product.run("verify", "--tree", str(site), *named)
        assert (ran.code, "toy-lib 1.2.0, recipe toy-lib, sm_120" in ran.out) == (0, True), ran
        assert product.run("patches", "revert", "--tree", str(site), *named).code == 0
        assert "return 12" in (site / "toylib" / "core.py").read_text()
        ran = product.run("audit", "--tree", str(site), "--against", "1.3.0", *named)
        assert ran.code == 3
        assert "audited toy-lib 1.3.0" in ran.err
        ran = product.run("patches", "port", "--all", "--to", "1.3.0", "--write", *named)
        assert ran.code == 0, ran
        renewed = patch.read_text()
        assert "Versions: >=1.3,<1.4\n" in renewed
        assert "Strip: 1\n" in renewed
        assert "\n # 1.3.0\n" in renewed
        assert product.run("lock", "update", "wheels", "--base-version", "1.3.0", *named).code == 0
        ran = product.run("patches", "check", "--against", "1.3.0", *named)
        assert ran.code == 0, ran

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["toy-lib"], "expected PROJECT==VERSION, found 'toy-lib'"),
            (["toy-lib>=1"], "expected PROJECT==VERSION"),
            (["toy-lib==1.2.0", "--name", "../x"], "--name: expected small letters"),
            (["two-tops==1.0"], "expected one package in the wheel, found one, two"),
            (["toy-lib==9.9"], "9.9"),
        ],
    )
    def test_refuses_and_leaves_nothing(
        self, product: Product, index: IndexServer, words: list[str], said: str
    ) -> None:
        before = files_of(product.root)
        ran = product.run("init-recipe", *words)
        assert ran.code == 2, ran
        assert said in ran.err
        assert files_of(product.root) == before
        assert not (product.root / "patches" / "two_tops").exists()

    def test_a_package_may_be_named(self, product: Product, index: IndexServer) -> None:
        assert product.run("init-recipe", "two-tops==1.0", "--package", "two").code == 0
        assert load_recipe("two-tops", product.root).site == {"two-tops": "two"}


class Said(NamedTuple):
    code: int
    out: str


SEED, CONFIG = "transformers-seed-cublas", "transformers-config-compact"
VERSION, LATER = "5.17.0", "5.24.0"
CHANGES = {
    SEED: (
        "transformers/trainer_utils.py",
        "            torch.use_deterministic_algorithms(True)\n    if is_torch_mlu",
        '            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")\n'
        "            torch.use_deterministic_algorithms(True)\n    if is_torch_mlu",
    ),
    CONFIG: (
        "transformers/configuration_utils.py",
        'return json.dumps(config_dict, indent=2, sort_keys=True) + "\\n"\n',
        'return json.dumps(config_dict, indent=1, sort_keys=True) + "\\n"\n',
    ),
}


@pytest.mark.network
class TestTransformers:
    """Two diffs on a package of 2,700 files that has nothing to do with vLLM."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        (tmp_path / "image" / "runtime").mkdir(parents=True)
        return tmp_path

    @staticmethod
    def run(root: Path, *words: str) -> Said:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(words, root=root)
        return Said(code, out.getvalue())

    def test_the_whole_way(self, root: Path) -> None:
        from imagebuild.lock import read_lock
        from imagebuild.upstream import Upstream

        ran = self.run(root, "init-recipe", f"transformers=={VERSION}")
        assert ran.code == 0, ran.out
        recipe = load_recipe("transformers", root)
        with Upstream(recipe, read_lock(recipe.lock_file)) as upstream:
            tree = upstream.open(VERSION, "linux/amd64").tree
            for number, (name, (path, old, new)) in enumerate(CHANGES.items()):
                text = tree.read(path).decode()
                assert text.count(old) == 1
                changed = diff(path, text, text.replace(old, new), shift=4 * (number == 0))
                head = HEAD.format(f"Change {path}.", ">=5.17,<5.18")
                (recipe.patches_dir / f"{name}.patch").write_text(head + changed)
        listed = json.dumps([f"{name}.patch" for name in CHANGES])
        recipe.series_file.write_text(f"patches = {listed}\n")

        ran = self.run(root, "patches", "check")
        assert ran.code == 1
        assert f"{SEED}: '{CHANGES[SEED][0]} hunk 1' fits 4 lines above" in ran.out
        assert self.run(root, "lock", "update", "wheels").code == 0
        assert self.run(root, "patches", "check").code == 0
        ran = self.run(root, "audit", "--against", LATER)
        assert ran.code == 1
        assert f"transformers {LATER} (commit unknown)" in ran.out
        ran = self.run(root, "build", "--arch", "sm_120")
        assert ran.code == 0, ran.out
        site = root / "dist" / "transformers-sm_120" / "site"
        assert 'CUBLAS_WORKSPACE_CONFIG", ":4096:8' in (site / CHANGES[SEED][0]).read_text()
        ran = self.run(root, "verify", "--tree", str(site))
        assert ran.code == 0, ran.out
        assert self.run(root, "patches", "revert", "--tree", str(site)).code == 0
        assert 'CUBLAS_WORKSPACE_CONFIG", ":4096:8' not in (site / CHANGES[SEED][0]).read_text()
        ran = self.run(root, "patches", "port", "--all", "--to", LATER)
        assert ran.code == 0, ran.out
        assert f"to {LATER}: 2 clean" in ran.out


def test_the_page_names_the_recipe_in_each_call() -> None:
    """In a clone of this repository there are two, and a call without a name ends with 2."""
    way = PAGE.partition("## The way of a change")[2].partition("```sh\n")[2].partition("```")[0]
    assert len(way.splitlines()) > 5
    assert all("--recipe transformers" in line for line in way.splitlines())


def test_the_page_names_what_there_is() -> None:
    assert f"transformers=={VERSION}" in PAGE
    for name in CHANGES:
        assert name in PAGE
    fields = re.findall(r"^\| `([A-Z][A-Za-z-]+)` \|", PAGE, re.MULTILINE)
    from imagebuild.patching import unified

    code = Path(unified.__file__).read_text()
    assert set(unified._NEEDED) <= set(fields)
    for name in fields:
        assert f'"{name}"' in code, name

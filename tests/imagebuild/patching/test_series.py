"""Malformed series: each fault is one sentence, all of them at once, with exit code 2."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.errors import UsageError
from imagebuild.patching.expect import Fix
from imagebuild.patching.patch import Drop, Edit, NewFile, Patch, Symbol, Variant
from imagebuild.patching.series import Series, load_series
from tests.support import toy
from tests.support.toy import CEILING, holds

NAME = "vllm_engine_ceiling"
DOC = '''"""Raise the ceiling.

Symptom. It stops at 12.
Cause. vllm/core/engine.py, Engine.limit.
Change. 90.
Upstream. None.
Drop when. Upstream raises it.
Cost. None.
"""
'''
BODY = """
from imagebuild.patching.patch import *

YES = Probe("yes", lambda tree: Answer(Outcome.HOLDS, "seen"))
PATCH = Patch(
    name={name!r}, status="pending", upstream="", origin="", needs={needs!r},
    variants=({variants}),
    drops=({drops}),
    reason=YES, effect=YES,
)
"""
EDIT = 'Edit(label="e", path="vllm/a.py", anchor="a = 1\\n", text="a = 2\\n")'


def variant(edits: str = EDIT, versions: str = ">=0.31,<0.32", files: str = "") -> str:
    return f"Variant(versions={versions!r}, edits=({edits},), files=({files})),"


class Folder:
    """A recipe's series file, patch modules and runtime folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "patches").mkdir()
        (root / "runtime").mkdir()

    def order(self, text: str) -> None:
        (self.root / "series.toml").write_text(text)

    def module(
        self,
        name: str = NAME,
        *,
        doc: str = DOC,
        variants: str | None = None,
        needs: tuple[str, ...] = (),
        drops: str = "",
        given: str | None = None,
    ) -> None:
        body = BODY.format(
            name=given or name, needs=needs, drops=drops,
            variants=variant() if variants is None else variants,
        )  # fmt: skip
        (self.root / "patches" / f"{name}.py").write_text(doc + body)

    def load(self) -> Series:
        return load_series(self.root / "series.toml", self.root / "patches", self.root / "runtime")

    def faults(self) -> list[str]:
        """The listed problems, without their bullets."""
        with pytest.raises(UsageError) as caught:
            self.load()
        assert caught.value.exit_code == 2
        title, *lines = str(caught.value).split("\n")
        if not lines:
            return [title.replace(str(self.root), "ROOT")]
        assert title == f"{self.root}/series.toml: the series is malformed:"
        assert all(line.startswith("  - ") for line in lines)
        return [line[4:].replace(str(self.root), "ROOT") for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.order(f'patches = ["{NAME}"]\n')
    made.module()
    return made


def test_a_good_series(folder: Folder) -> None:
    series = folder.load()
    assert [patch.name for patch in series.patches] == [NAME]
    assert series.docs[NAME].startswith("Raise the ceiling.\n\nSymptom. ")
    assert series.fixes == ()
    assert series.patch(NAME) is series.patches[0]
    assert not (folder.root / "patches" / "__pycache__").exists()


def test_an_unknown_name_suggests(folder: Folder) -> None:
    with pytest.raises(UsageError) as caught:
        folder.load().patch("vllm_engine_cieling")
    assert str(caught.value) == "'vllm_engine_cieling' is not a patch of this series"
    assert caught.value.hint == "did you mean vllm_engine_ceiling?"
    with pytest.raises(UsageError) as caught:
        folder.load().patch("zzz")
    assert caught.value.hint == "build.py patches list"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("patches = [", "ROOT/series.toml: expected TOML, found: "),
        ("patchs = []\npatches = []\n", "ROOT/series.toml: unknown key 'patchs'"),
        ("", 'ROOT/series.toml: expected `patches = ["NAME", ...]`, found None'),
        (
            'patches = ["a", 1]',
            "ROOT/series.toml: expected `patches = [\"NAME\", ...]`, found ['a',",
        ),
        (f'patches = ["{NAME}", "{NAME}"]', f"ROOT/series.toml: {NAME} is listed twice"),
        (
            "patches = []\nupstream_fixes = 1",
            'ROOT/series.toml: expected `upstream_fixes = "NAME"`, found 1',
        ),
    ],
)
def test_a_malformed_series_file(folder: Folder, text: str, fault: str) -> None:
    folder.order(text)
    [found] = folder.faults()
    assert found.startswith(fault)


def test_a_series_file_that_cannot_be_read(folder: Folder) -> None:
    (folder.root / "series.toml").unlink()
    assert folder.faults() == [
        "ROOT/series.toml: expected a series, found: No such file or directory"
    ]
    (folder.root / "series.toml").mkdir()
    assert folder.faults() == ["ROOT/series.toml: expected a series, found: Is a directory"]
    (folder.root / "series.toml").rmdir()
    (folder.root / "series.toml").write_bytes(b"\xff")
    assert folder.faults()[0].startswith("ROOT/series.toml: expected TOML, found: 'utf-8'")


@pytest.mark.parametrize("name", ["../evil_a_b", "vllm", "Vllm_a_b", "vllm_a_b.py", ""])
def test_a_listed_name_is_no_path(folder: Folder, name: str) -> None:
    folder.order(f'patches = ["{name}"]\n')
    (folder.root / "evil_a_b.py").write_text("raise SystemExit('ran')")
    assert folder.faults() == [f"{name}: expected a name <project>_<area>_<effect>"]


def test_modules_that_do_not_load(folder: Folder) -> None:
    names = [
        "vllm_is_missing",
        "vllm_it_raises",
        "vllm_no_syntax",
        "vllm_no_patch",
        "vllm_odd_patch",
    ]
    listed = ", ".join(f'"{name}"' for name in names)
    folder.order(f"patches = [{listed}]\n")
    patches = folder.root / "patches"
    (patches / "vllm_it_raises.py").write_text("raise KeyError('x')\n")
    (patches / "vllm_no_syntax.py").write_text("def (:\n")
    (patches / "vllm_no_patch.py").write_text("x = 1\n")
    (patches / "vllm_odd_patch.py").write_text("PATCH = {'name': 1}\n")
    found = folder.faults()
    assert found[:2] == [
        "vllm_is_missing: expected ROOT/patches/vllm_is_missing.py, found no such file",
        "vllm_it_raises: ROOT/patches/vllm_it_raises.py fails to load: KeyError('x')",
    ]
    assert found[2] == (
        "vllm_no_syntax: ROOT/patches/vllm_no_syntax.py fails to load: "
        "SyntaxError: invalid syntax (vllm_no_syntax.py, line 1)"
    )
    assert found[3:] == [
        "vllm_no_patch: expected a constant PATCH of type Patch, found None",
        "vllm_odd_patch: expected a constant PATCH of type Patch, found {'name': 1}",
    ]


def test_all_problems_at_once(folder: Folder) -> None:
    folder.order(
        f'upstream_fixes = "fixes"\npatches = ["{NAME}", "vllm_it_raises", "vllm_other_name"]\n'
    )
    folder.module(needs=("vllm_other_name",), doc='"""' + "x" * 73 + '\n"""\n')
    (folder.root / "patches" / "vllm_it_raises.py").write_text("1 / 0\n")
    folder.module("vllm_other_name", given="vllm_wrong_name")
    assert folder.faults() == [
        f"{NAME}: the docstring's first line must have 1 to 72 characters",
        f"{NAME}: the docstring needs Symptom, Cause, Change, Upstream, Drop when, Cost in this "
        "order, found ()",
        "vllm_it_raises: ROOT/patches/vllm_it_raises.py fails to load: "
        "ZeroDivisionError('division by zero')",
        "vllm_other_name: PATCH.name is 'vllm_wrong_name'; it must equal the module's name",
        f"{NAME}: needs vllm_other_name, which must stand before it in the series",
        "fixes: expected ROOT/patches/fixes.py, found no such file",
    ]


@pytest.mark.parametrize("content", ["", "FIXES = [1]\n", "FIXES = (1,)\n"])
def test_fixes_that_are_none(folder: Folder, content: str) -> None:
    folder.order(f'upstream_fixes = "fixes"\npatches = ["{NAME}"]\n')
    (folder.root / "patches" / "fixes.py").write_text(content)
    [found] = folder.faults()
    assert found.startswith("fixes: expected a constant FIXES, a tuple of Fix, found ")


def test_fixes_are_loaded(folder: Folder) -> None:
    folder.order(f'upstream_fixes = "fixes"\npatches = ["{NAME}"]\n')
    (folder.root / "patches" / "fixes.py").write_text(
        "from imagebuild.patching.expect import Fix\n"
        "from imagebuild.patching.patch import *\n"
        "FIXES = (Fix(name='vllm_a_b', upstream='vllm#1', since='0.31', probe=Probe('p', None)),)\n"
    )
    [fix] = folder.load().fixes
    assert isinstance(fix, Fix)
    assert (fix.name, fix.upstream, fix.since) == ("vllm_a_b", "vllm#1", "0.31")


@pytest.mark.parametrize(
    ("doc", "found"),
    [
        (DOC.replace("Cost. None.\n", ""),
         "('Symptom', 'Cause', 'Change', 'Upstream', 'Drop when')"),
        (DOC.replace("Cause.", "Reason."),
         "('Symptom', 'Change', 'Upstream', 'Drop when', 'Cost')"),
        (DOC.replace("Symptom.", "Cost."),
         "('Cost', 'Cause', 'Change', 'Upstream', 'Drop when', 'Cost')"),
    ],
)  # fmt: skip
def test_a_docstring_without_its_labels(folder: Folder, doc: str, found: str) -> None:
    folder.module(doc=doc)
    assert folder.faults() == [
        f"{NAME}: the docstring needs Symptom, Cause, Change, Upstream, Drop when, Cost in this "
        f"order, found {found}"
    ]


DROP = 'Drop(versions="{}", proof=YES, sentence="Upstream."),'


@pytest.mark.parametrize(
    ("variants", "drops", "faults"),
    [
        (variant(versions=">=0.31"), "", ["the variant >=0.31 must be closed above"]),
        (variant(versions="0.31"), "", ["'0.31' is not a range such as '>=0.31,<0.34'"]),
        (
            variant(versions=">=0.31,<0.33") + variant(versions=">=0.32,<0.34"),
            "",
            [">=0.31,<0.33 and >=0.32,<0.34 overlap"],
        ),
        (
            variant(versions=">=0.31,<0.32") + variant(versions=">=0.33,<0.34"),
            "",
            ["no release between >=0.31,<0.32 and >=0.33,<0.34 may be left out"],
        ),
        (
            variant(versions=">=0.32,<0.33") + variant(versions=">=0.31,<0.32"),
            "",
            ["the variants must stand in the order of their versions"],
        ),
        (
            variant(),
            DROP.format(">=0.31.5"),
            [">=0.31,<0.32 and >=0.31.5 overlap"],
        ),
        (
            variant(),
            DROP.format(">=0.33"),
            ["no release between >=0.31,<0.32 and >=0.33 may be left out"],
        ),
        ("", "", ["has neither a variant nor a drop"]),
    ],
)
def test_ranges(folder: Folder, variants: str, drops: str, faults: list[str]) -> None:
    folder.module(variants=variants, drops=drops)
    assert folder.faults() == [f"{NAME}: {fault}" for fault in faults]


def test_a_drop_may_be_open_above(folder: Folder) -> None:
    folder.module(drops=DROP.format(">=0.32"))
    assert folder.load().patches[0].drops[0].versions == ">=0.32"


def edit(**fields: object) -> str:
    given = {"label": "e", "path": "vllm/a.py", "anchor": "a = 1\n", "text": "a = 2\n"} | fields
    return "Edit(" + ", ".join(f"{key}={value!r}" for key, value in given.items()) + ")"


ESCAPES = [
    "/etc/passwd",
    "../x.py",
    "vllm/../../x.py",
    "vllm\\a.py",
    "./vllm/a.py",
    "vllm//a.py",
    "",
]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (edit(anchor=" \n"), "the anchor is empty"),
        (edit(anchor=""), "the anchor is empty"),
        (edit(count=0), "count must be at least 1, found 0"),
        (edit(text=""), "the new text is empty, so nothing could tell that it was applied"),
        (edit(text="a = 1\n"), "the new text equals the anchor"),
        (edit(text="a"), "the anchor contains the new text, so pending and applied look alike"),
        (
            edit(text="a = 1\n", kind="insert_after"),
            "the new text repeats its own anchor, so a second run could not tell",
        ),
        (
            edit(text="a = 1\nb\na = 1\n"),
            "the new text repeats its own anchor, so a second run could not tell",
        ),
        (edit(text="a = 2\r\n"), "write line ends as \\n; a file's own are kept"),
        (edit(kind="delete"), "expected a kind of ('replace', 'insert_before', 'insert_after'), "
         "found 'delete'"),
        (edit(path=".imagebuild/manifest.json"), ".imagebuild/ is ours"),
        (edit(path=".imagebuild"), ".imagebuild/ is ours"),
        *((edit(path=p), f"expected a path below site-packages, found {p!r}") for p in ESCAPES),
    ],
)  # fmt: skip
def test_edits(folder: Folder, text: str, fault: str) -> None:
    folder.module(variants=variant(text))
    assert fault in [one.removeprefix(f"{NAME} >=0.31,<0.32 / 'e': ") for one in folder.faults()]


def test_two_edits_share_a_label(folder: Folder) -> None:
    folder.module(variants=variant(f"{EDIT}, {EDIT}"))
    assert folder.faults() == [f"{NAME} >=0.31,<0.32: two edits share a label"]


def test_a_variant_that_changes_nothing(folder: Folder) -> None:
    folder.module(variants="Variant(versions='>=0.31,<0.32'),")
    assert folder.faults() == [f"{NAME} >=0.31,<0.32: the variant changes nothing"]


def test_new_files(folder: Folder) -> None:
    (folder.root / "secret.py").write_text("x")
    files = (
        "NewFile(source='gone.py', path='vllm/g.py'), NewFile(source='../secret.py', path='v.py'), "
        "NewFile(source='gone.py', path='../g.py'),"
    )
    folder.module(variants=variant(files=files))
    where = f"{NAME} >=0.31,<0.32"
    assert folder.faults() == [
        f"{where}: expected ROOT/runtime/gone.py, found no such file",
        f"{where}: expected a source below ROOT/runtime, found '../secret.py'",
        f"{where} / ../g.py: expected a path below site-packages, found '../g.py'",
        f"{where}: expected ROOT/runtime/gone.py, found no such file",
    ]


def test_an_unknown_status(folder: Folder) -> None:
    path = folder.root / "patches" / f"{NAME}.py"
    path.write_text(path.read_text().replace('status="pending"', 'status="done"'))
    assert folder.faults() == [
        f"{NAME}: expected a status of ('pending', 'submitted', 'backport', 'denied', 'inactive', "
        "'inappropriate'), found 'done'"
    ]


@pytest.mark.parametrize("needs", ["vllm_engine_ceiling", "vllm_later_one", "vllm_no_one"])
def test_needs_must_stand_before(folder: Folder, needs: str) -> None:
    folder.order(f'patches = ["{NAME}", "vllm_later_one"]\n')
    folder.module(needs=(needs,))
    folder.module("vllm_later_one", needs=(NAME,))
    assert folder.faults() == [f"{NAME}: needs {needs}, which must stand before it in the series"]


class TestDigest:
    def digest(self, tmp_path: Path, *patches: Patch) -> str:
        return toy.series(*patches, runtime=tmp_path).digest

    def test_is_pinned(self, tmp_path: Path) -> None:
        assert self.digest(tmp_path, toy.patch(NAME, CEILING)) == PIN

    def test_changes_with_what_is_applied(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("x = 1\n")
        new = NewFile(source="a.py", path="vllm/a.py")
        one = toy.patch(NAME, CEILING)
        shapes = [
            (one,),
            (),
            (one, toy.patch("vllm_b_c", CEILING)),
            (toy.patch("vllm_b_c", CEILING), one),
            (dataclasses.replace(one, name="vllm_b_c"),),
            (dataclasses.replace(one, gpu_arches=("sm_120",)),),
            (toy.patch(NAME, CEILING, versions=">=0.31,<0.33"),),
            (toy.patch(NAME, CEILING, files=(new,)),),
            (toy.patch(NAME, CEILING, drops=(
                Drop(versions=">=0.32", proof=holds(), sentence=""),)),),
            *((toy.patch(NAME, dataclasses.replace(CEILING, **{field: value})),)
              for field, value in [("path", "vllm/b.py"), ("scope", ""), ("anchor", "b"),
                                   ("text", "c"), ("kind", "insert_after"), ("count", 2)]),
        ]  # fmt: skip
        digests = [self.digest(tmp_path, *shape) for shape in shapes]
        (tmp_path / "a.py").write_text("x = 2\n")
        digests.append(self.digest(tmp_path, *shapes[7]))
        assert len(set(digests)) == len(shapes) + 1

    def test_does_not_change_with_words(self, tmp_path: Path) -> None:
        one = toy.patch(NAME, CEILING)
        same = [
            dataclasses.replace(one, origin="somebody", upstream="vllm#1", status="submitted"),
            dataclasses.replace(one, reason=holds("other words"), notes=(holds(),)),
            toy.patch(NAME, dataclasses.replace(CEILING, label="other")),
            toy.patch(NAME, variants=(
                Variant(versions=toy.RANGE, edits=(CEILING,), relies_on=(Symbol("a"),)),)),
        ]  # fmt: skip
        assert {self.digest(tmp_path, patch) for patch in [one, *same]} == {PIN}


PIN = "6dfdcd1c95cf954ada6ed1096a0c51db021ec69f2b00afa18b63a8fc1d3e4224"


def test_the_result_of_each_kind() -> None:
    pair = {"label": "e", "path": "p", "anchor": "A", "text": "T"}
    assert Edit(**pair).result == "T"
    assert Edit(**pair, kind="insert_before").result == "TA"
    assert Edit(**pair, kind="insert_after").result == "AT"


def test_an_optimising_python_reads_the_same_docstrings() -> None:
    code = (
        "from imagebuild.config import load_recipe; s = load_recipe('glm53-flash').series();"
        "print(s.digest, sum(map(len, s.docs.values())))"
    )
    found = {
        subprocess.run(
            [sys.executable, *flags, "-c", code],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flags in ((), ("-O",), ("-OO",))
    }
    assert len(found) == 1

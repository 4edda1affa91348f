"""What outside of a scope changes its fingerprint, because it changes what the scope does."""

from __future__ import annotations

import pytest

from imagebuild.patching import text as source

BASE = """\
import os
from helpers import helper

LIMIT = 4
OTHER = 5


class Base:
    pass


class Owner(Base):
    other = 1

    def method(self):
        return helper(LIMIT)


def plain():
    return os.sep


def unrelated():
    return OTHER
"""
METHOD = "    def method(self):\n        return helper(LIMIT)\n"
PLAIN = "def plain():\n    return os.sep\n"


def fingerprint(text: str, scope: str) -> str:
    return source.fingerprint(text, "module.py", scope)


def replaced(old: str, new: str) -> str:
    assert BASE.count(old) == 1, f"{old!r} has to stand in the base once"
    return BASE.replace(old, new)


@pytest.mark.parametrize(
    ("scope", "changed"),
    [
        pytest.param("plain", BASE + "plain = other\n", id="bound again"),
        pytest.param("plain", BASE + "from other import plain\n", id="imported over it"),
        pytest.param("plain", BASE + "from other import *\n", id="a star that may hold it"),
        pytest.param("plain", BASE + "del plain\n", id="deleted"),
        pytest.param(
            "plain", BASE + "if LIMIT:\n    plain = other\n", id="bound again, on a condition"
        ),
        pytest.param(
            "plain",
            replaced(PLAIN, "if os.name == 'nt':\n    def plain():\n        return os.sep\n"),
            id="under a condition",
        ),
        pytest.param(
            "plain",
            replaced(
                PLAIN, "try:\n    import x\nexcept E:\n    def plain():\n        return os.sep\n"
            ),
            id="as a fallback",
        ),
        pytest.param("plain", replaced("import os\n", "import ntos as os\n"), id="a name it uses"),
        pytest.param("Owner.method", BASE + "Owner.method = other\n", id="method set from outside"),
        pytest.param(
            "Owner.method", BASE + "setattr(Owner, 'method', other)\n", id="method set by setattr"
        ),
        pytest.param("Owner.method", BASE + "Owner = wrap(Owner)\n", id="class bound again"),
        pytest.param(
            "Owner.method", replaced(METHOD, METHOD + "\n    method = other\n"), id="in the class"
        ),
        pytest.param(
            "Owner.method",
            BASE + "class Child(Owner):\n    def method(self):\n        return 0\n",
            id="a subclass overrides it",
        ),
        pytest.param(
            "Owner.method",
            BASE + "class A(Owner):\n    pass\n\n\nclass B(A):\n    method = None\n",
            id="a subclass of a subclass overrides it",
        ),
        pytest.param(
            "Owner.method", replaced("class Owner(Base)", "class Owner(Mixin, Base)"), id="a base"
        ),
        pytest.param(
            "Owner.method", replaced("class Owner", "@wrap\nclass Owner"), id="class decorated"
        ),
        pytest.param("Owner.method", replaced("LIMIT = 4", "LIMIT = 8"), id="a constant it uses"),
        pytest.param(
            "Owner.method", replaced("from helpers", "from others"), id="a helper from elsewhere"
        ),
    ],
)
def test_what_a_scope_stands_on_is_in_its_fingerprint(scope: str, changed: str) -> None:
    assert fingerprint(changed, scope) != fingerprint(BASE, scope)


@pytest.mark.parametrize("scope", ["plain", "Owner.method", "Owner"])
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(replaced("OTHER = 5", "OTHER = 6"), id="a constant it does not use"),
        pytest.param(BASE + "class Child(Base):\n    method = None\n", id="another family"),
        pytest.param(BASE + "def last():\n    plain = Owner = 1\n", id="locals of another scope"),
        pytest.param(BASE + "other.method = 1\n", id="another object's attribute"),
        pytest.param("# a comment\n\n" + BASE, id="moved down"),
        pytest.param(replaced("class Owner(Base):", "class Owner( Base ):  # so"), id="layout"),
    ],
)
def test_what_it_does_not_stand_on_is_not(scope: str, changed: str) -> None:
    assert fingerprint(changed, scope) == fingerprint(BASE, scope)


def test_a_byte_order_mark_changes_nothing() -> None:
    assert fingerprint("\ufeff" + BASE, "Owner.method") == fingerprint(BASE, "Owner.method")


def test_a_character_of_several_bytes_before_the_scope() -> None:
    one = "X = 'é'; Y = 1\n@deco('é')\nclass Owner('é'):\n    def method(self):\n        pass\n"

    assert source.standing(one, "module.py", "Owner.method") == [
        ["<in>", "@", "deco", "(", "'é'", ")", "<newline>", "class", "Owner", "(", "'é'", ")", ":",
         "<newline>"],
    ]  # fmt: skip


KERNEL = "#ifdef NEW\nint f() {\n  return 1;\n}\n#else\nint g() { return 2; }\n#endif\nint h() {}\n"


@pytest.mark.parametrize(
    ("scope", "found"),
    [
        ("f", [["<under>", "ifdef", "NEW"]]),
        ("g", [["<under>", "ifdef", "NEW", "else"]]),
        ("h", []),
    ],
)
def test_preprocessor_conditions_of_a_kernel(scope: str, found: list[list[str]]) -> None:
    assert source.standing(KERNEL, "kernel.cuh", scope) == found


def test_values_that_every_interpreter_must_give() -> None:
    assert [fingerprint(BASE, scope) for scope in ("plain", "Owner.method")] == [
        "t1:1192757d79a52ed89dd58ae0",
        "t1:a31848762c838135379dc535",
    ]


OWNER = """\
class Owner:
    LIMIT = 4
    OTHER = 5
    if os.name == "nt":
        LIMIT = 6

    def method(self):
        return self.LIMIT

    @classmethod
    def made(kind):
        return Owner.OTHER
"""


@pytest.mark.parametrize(
    ("scope", "old", "new", "differs"),
    [
        ("Owner.method", "LIMIT = 4", "LIMIT = 12", True),
        ("Owner.method", "LIMIT = 6", "LIMIT = 12", True),
        ("Owner.method", '"nt"', '"posix"', True),
        ("Owner.method", "OTHER = 5", "OTHER = 12", False),
        ("Owner.made", "OTHER = 5", "OTHER = 12", True),
        ("Owner.made", "LIMIT = 4", "LIMIT = 12", False),
    ],
)
def test_what_the_class_gives_to_attributes_that_a_method_reads(
    scope: str, old: str, new: str, differs: bool
) -> None:
    assert OWNER.count(old) == 1
    assert (fingerprint(OWNER, scope) != fingerprint(OWNER.replace(old, new), scope)) is differs

"""The views of a tree agree on read, exists and iter, and know which vLLM it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.errors import UsageError
from imagebuild.patching.tree import DirTree, Identity, OverlayTree, Tree, UnionTree, identify
from tests.support import site

FILES = {"vllm/a.py": "a", "vllm/sub/b.py": "b", "vllm/sub.py": "s", "other/c.py": "c"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def trees(root: Path) -> list[Tree]:
    hidden: dict[str, bytes | None] = {path: text.encode() for path, text in FILES.items()}
    noise = {"vllm/gone.py": None}
    (root / "vllm/gone.py").write_text("gone")
    return [
        OverlayTree(DirTree(root), noise),
        OverlayTree(DirTree(root / "nowhere"), hidden),
        UnionTree([OverlayTree(DirTree(root), noise), DirTree(root / "other")]),
    ]


def test_all_views_agree(root: Path) -> None:
    assert [DirTree(root).read(path).decode() for path in FILES] == list(FILES.values())
    expected = sorted(FILES)
    assert list(DirTree(root).iter()) == expected
    for index, tree in enumerate(trees(root)):
        assert list(tree.iter("vllm/sub")) == ["vllm/sub.py", "vllm/sub/b.py"]
        assert list(tree.iter("vllm/sub/")) == ["vllm/sub/b.py"]
        assert list(tree.iter("nothing")) == []
        assert list(tree.iter()) == (expected if index < 2 else ["c.py", *expected])
        for path, text in FILES.items():
            assert tree.exists(path)
            assert tree.read(path) == text.encode()
        for path in ("vllm/gone.py", "vllm/sub", "vllm", "vllm/a.py/x", "vllm/none.py"):
            assert not tree.exists(path)
            with pytest.raises(FileNotFoundError):
                tree.read(path)


def test_the_first_of_a_union_wins(root: Path) -> None:
    union = UnionTree([OverlayTree(DirTree(root), {"vllm/a.py": b"first"}), DirTree(root)])
    assert union.read("vllm/a.py") == b"first"


class TestIdentity:
    def test_of_a_wheel(self, tmp_path: Path) -> None:
        tree = DirTree(site.make_site(tmp_path))
        assert tree.identity == Identity("0.31.0", "abc123def", str(tmp_path))
        assert OverlayTree(tree, {}).identity == UnionTree([tree]).identity == tree.identity

    @pytest.mark.parametrize(
        ("text", "commit"),
        [
            ("__version__ = '0.31.0'\n", ""),
            ("__version__ = '0.31.0'\n__commit_id__ = None\n", ""),
            ("__version__ = '0.31.0'\n__commit_id__ = 'abc'\n", "abc"),
        ],
    )
    def test_without_a_commit(self, tmp_path: Path, text: str, commit: str) -> None:
        tree = DirTree(site.make_site(tmp_path, {"vllm/_version.py": text}))
        assert (tree.identity.version, tree.identity.commit) == ("0.31.0", commit)

    @pytest.mark.parametrize(
        "text", ["", "__version__ = 1\n", "def (\n", b"\xff\n", b"x = '\0'\n", "version = '0.31'\n"]
    )
    def test_no_vllm(self, tmp_path: Path, text: str | bytes) -> None:
        site.make_site(tmp_path, {"vllm/_version.py": text})
        with pytest.raises(UsageError) as caught:
            identify(DirTree(tmp_path), source="tree")
        assert caught.value.exit_code == 2
        assert str(caught.value) == (
            "tree: expected a site-packages with vLLM in it, found no usable vllm/_version.py"
        )

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            _ = DirTree(tmp_path).identity

"""Recipes: what is read, and the sentence for each way to get one wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagebuild.config import DefaultRegistry, ImageName, load_recipe, recipes
from imagebuild.errors import UsageError
from tests.support.product import NAME, PATCHES, RECIPE, REPOSITORY, write_repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_repository(tmp_path)
    return tmp_path


def spoil(root: Path, old: str, new: str) -> None:
    assert old in RECIPE
    (root / "image" / NAME / "recipe.toml").write_text(RECIPE.replace(old, new))


def test_a_recipe_is_read_from_the_given_root(root: Path) -> None:
    recipe = load_recipe(NAME, root)
    assert (recipe.base_version, recipe.python) == ("0.31.0", "3.12")
    assert recipe.lock_file == root / "image" / NAME / "lock.toml"
    assert list(recipe.site) == ["vllm", "flashinfer-python"]
    assert tuple(patch.name for patch in recipe.series().patches) == PATCHES
    assert recipes(root) == [NAME]


def test_the_projects_own_recipe_is_well_formed() -> None:
    (name,) = recipes(REPOSITORY)
    recipe = load_recipe(name, REPOSITORY)
    assert recipe.series().patches
    assert set(recipe.platforms) == {"sm_120", "sm_121"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", "expected schema = 1, found 2"),
        ("schema = 1", "schema = ", "expected TOML"),
        ("schema = 1", "schema = 1\ncolour = 3", "unknown key 'colour'"),
        ('name = "tiny"', 'name = "other"', "expected name = 'tiny', found 'other'"),
        ('name = "tiny"\n', "", "expected the key name, found none"),
        ('description = "for tests"', "description = 3", "description: expected str, found 3"),
        ('"series.toml"', '"../series.toml"', "series: expected the name of a file beside it"),
        ('"series.toml"', '"sub/series.toml"', "series: expected the name of a file beside it"),
        ('"patches/tiny"', '"/etc"', "patches: expected a path that leads down, found '/etc'"),
        ('"patches/tiny"', '""', "patches: expected a path that leads down, found ''"),
        ('site_packages = "usr', 'site_packages = "../usr', "base.site_packages: expected a path"),
        ('python = "3.12"', 'python = "312"', "base.python: expected a minor version"),
        ('python = "3.12"\n', "", "expected the key base.python, found none"),
        (
            'vllm = "vllm"\nflashinfer-python = "flashinfer"\n',
            'flashinfer-python = "flashinfer"\nvllm = "vllm"\n',
            "wheels.site: expected vllm first, found ['flashinfer-python', 'vllm']",
        ),
        (
            'vllm = "vllm"\nflashinfer-python = "flashinfer"\n',
            "",
            "wheels.site: expected the project that is patched, found []",
        ),
        ('vllm = "vllm"', "vllm = 3", "wheels.site: expected names with strings"),
        ('["torch", "triton", "flashinfer-python", "transformers"]', "[3]", "expected names"),
        ("[image_pins]", '[image_pins]\n"0.31.0" = "x"', "image_pins.0.31.0: expected names"),
        ('sm_120 = "linux/amd64"', 'sm_90 = "linux/amd64"', "gpu_arch.sm_90: expected one of"),
        ('sm_120 = "linux/amd64"', 'sm_120 = "amd64"', "gpu_arch.sm_120: expected one of"),
        ('sm_120 = "linux/amd64"\nsm_121 = "linux/arm64"\n', "", "gpu_arch: expected sm_120 or"),
    ],
)
def test_a_malformed_recipe_is_one_sentence(root: Path, old: str, new: str, said: str) -> None:
    spoil(root, old, new)
    with pytest.raises(UsageError) as caught:
        load_recipe(NAME, root)
    assert said in str(caught.value)
    assert str(root / "image" / NAME / "recipe.toml") in str(caught.value)


def test_bytes_that_are_no_text(root: Path) -> None:
    (root / "image" / NAME / "recipe.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(UsageError, match="expected TOML"):
        load_recipe(NAME, root)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "expected a recipe, found no such file"),
        ("nobody", "expected a recipe, found no such file"),
        ("tiny/recipe.toml", "expected a recipe, found no such file"),
        ("../image/tiny", "expected name = '../image/tiny', found 'tiny'"),
    ],
)
def test_an_unknown_recipe_names_the_known_ones(root: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(name, root)
    assert said in str(caught.value)
    assert caught.value.hint in ("recipes: tiny", None)


def test_an_arch_that_the_recipe_does_not_serve(root: Path) -> None:
    spoil(root, 'sm_121 = "linux/arm64"\n', "")
    recipe = load_recipe(NAME, root)
    assert recipe.platform("sm_120") == "linux/amd64"
    with pytest.raises(UsageError, match="expected one that recipe tiny serves, found 'sm_121'"):
        recipe.platform("sm_121")


IMAGE = """
[image]
cluster = "ray"
debs = ["ripgrep", "libstdc++6"]
[image.registry]
host = "hub.example"
url = "https://hub.example"
login = "hub.example"
[image.base]
repository = "team/vllm"
tag = "v{version}"
[image.artifacts.mentat]
repository = "team/mentat"
tag = "0.17.1"
[image.sources.flashkda]
url = "https://git.example/a.git"
commit = "0123456789012345678901234567890123456789"
ref = "main"
"""


def with_image(root: Path, text: str) -> Path:
    path = root / "image" / NAME / "recipe.toml"
    path.write_text(RECIPE + text)
    return path


def test_what_is_decided_of_an_image(root: Path) -> None:
    with_image(root, IMAGE)
    image = load_recipe(NAME, root).image
    assert (image.flashkda, image.cluster, image.debs) == (
        "auto", "ray", ("ripgrep", "libstdc++6"))  # fmt: skip
    assert image.registry == DefaultRegistry("hub.example", "https://hub.example", "hub.example")
    assert image.base == ImageName("team/vllm", "v{version}")
    assert image.artifacts == {"mentat": ImageName("team/mentat", "0.17.1")}
    source = image.sources["flashkda"]
    assert (source.url, source.source, source.ref) == ("https://git.example/a.git", "", "main")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('cluster = "ray"', 'cluster = "slurm"', "image.cluster: expected none or ray or mentat"),
        ('cluster = "ray"', "colour = 3", "image: unknown key 'colour'"),
        ('["ripgrep", "libstdc++6"]', '"ripgrep"', "image.debs: expected names of packages"),
        ('["ripgrep", "libstdc++6"]', '["-y"]', "image.debs: expected names of packages"),
        ('host = "hub.example"\n', "", "expected the key image.registry.host, found none"),
        ('url = "https://hub.example"', 'url = "hub.example"', "image.registry.url: expected http"),
        ("[image.registry]\n", "registry = {}\n[image.other]\n", "image: unknown key 'other'"),
        ('tag = "v{version}"', 'tag = ""', "image.base: expected a repository and a tag"),
        ('tag = "v{version}"', 'tag = "a@b"', "image.base: expected a repository and a tag"),
        ('tag = "0.17.1"', "tag = 0.17", "image.artifacts.mentat.tag: expected str, found 0.17"),
        ('tag = "0.17.1"', 'tag = "1"\nhost = "x"', "image.artifacts.mentat: unknown key 'host'"),
        ("0123456789012", "x", "image.sources.flashkda.commit: expected 40 hex digits"),
        ('"https://git.example/a.git"', '"--upload-pack=x"', "expected url = https://..."),
        ('"https://git.example/a.git"', '"ext::sh -c x"', "expected url = https://..."),
        ('ref = "main"', 'ref = "--exec=x"', "expected url = https://... and a ref"),
        ('url = "https://git.example/a.git"\n', "", "expected the key image.sources.flashkda.url"),
        ("[image.sources.flashkda]", "[image.cited]\na = 3\n[image.sources.flashkda]",
         "image.cited: expected tables by name"),
    ],
)  # fmt: skip
def test_a_malformed_image_is_one_sentence(root: Path, old: str, new: str, said: str) -> None:
    assert old in IMAGE
    with_image(root, IMAGE.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_recipe(NAME, root)
    assert said in str(caught.value)


def test_an_empty_registry_is_malformed(root: Path) -> None:
    with_image(root, "[image]\nregistry = {}\n")
    with pytest.raises(UsageError, match=r"expected the key image\.registry\.host"):
        load_recipe(NAME, root)

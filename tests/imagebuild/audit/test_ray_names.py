"""Names of `ray` that an executor asks for, against a list; and the list on real executors."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.audit.ray_names import FILE, Shim, ray_findings, read_shim, used_names
from imagebuild.config import Recipe, load_recipe
from imagebuild.errors import UsageError
from imagebuild.patching.tree import DirTree, Tree
from tests.support.product import REPOSITORY, Product

SOURCE = """\
import ray
from ray.util import placement_group_table as table
from ray.dag import InputNode
from vllm.v1.executor.ray_utils import ray as again


def f(x):
    ray.init("auto")
    host = ray.util.get_node_ip_address()
    again.get_runtime_context().get_node_id()
    x.ray.nothing
    table(x)
    return ray.nodes()[0].copy(), x.shutdown()
"""
SHIM = Shim(
    "mentat",
    frozenset({
        "ray.init", "ray.nodes", "ray.util.placement_group", "ray.util.placement_group_table",
        "ray.util.placement_group.PlacementGroup", "ray.get_runtime_context().get_node_id",
    }),
    tolerated={"ray._private.state.state": "a fallback"},
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = load_recipe("glm53-flash", REPOSITORY)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / FILE).write_text((recipe.series_file.parent / FILE).read_text())
    return replace(recipe, series_file=folder / "series.toml")


def tree(folder: Path, **files: str) -> DirTree:
    place = folder / "vllm" / "v1" / "executor"
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / f"{name}.py").write_text(text)
    return DirTree(folder)


def test_what_is_used() -> None:
    assert {name for name, _ in used_names(ast.parse(SOURCE))} == {
        "ray", "ray.dag.InputNode", "ray.get_runtime_context", "ray.init", "ray.nodes",
        "ray.get_runtime_context().get_node_id", "ray.util", "ray.util.get_node_ip_address",
        "ray.util.placement_group_table",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gives"),
    [
        ("ray", True),
        ("ray.util", True),
        ("ray.init", True),
        ("ray.nodes().sort", True),  # of a value that is listed
        ("ray.get_runtime_context", True),
        ("ray.get_runtime_context().get_node_id", True),
        ("ray.get_runtime_context().get_job_id", False),
        ("ray.util.placement_group.PlacementGroup", True),
        ("ray.util.placement_group.New", False),  # it is a module as well as a function
        ("ray.util.get_node_ip_address", False),
        ("ray.dag.InputNode", False),
        ("ray._private.state.state._rows", True),
        ("ray._private.state.other", False),
    ],
)
def test_what_a_shim_gives(name: str, gives: bool) -> None:
    assert SHIM.gives(name) is gives


def test_a_name_that_is_not_given_is_told_with_its_place(recipe: Recipe, tmp_path: Path) -> None:
    files = tree(tmp_path / "site", ray_utils=SOURCE, ray_executor="import ray.serve\n",
                 abstract="import ray.tune\n", ray_odd="def (:\n")  # fmt: skip
    (finding,) = ray_findings(recipe, files)
    assert (finding.level, finding.code) == ("info", "ray-name")
    assert finding.message.startswith("vLLM asks for ray.dag.InputNode, which mentat is not known")
    assert (finding.file, finding.line) == ("vllm/v1/executor/ray_utils.py", 3)
    built = replace(recipe, image=replace(recipe.image, cluster="mentat"))
    assert [one.level for one in ray_findings(built, files)] == ["warning"]


def test_a_recipe_without_a_list_and_one_that_is_malformed(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe.series_file.parent / FILE
    path.write_text("names = 1\n")
    with pytest.raises(UsageError, match="expected a list of names that a shim gives"):
        ray_findings(recipe, tree(tmp_path / "site"))
    path.unlink()
    assert ray_findings(recipe, DirTree(tmp_path)) == ()


def test_the_committed_list_says_where_it_is_from() -> None:
    content = tomllib.loads((REPOSITORY / "image" / "glm53-flash" / FILE).read_text())
    assert content["names"] == sorted(content["names"])
    assert all(len(source.rpartition(" @ ")[2]) == 40 for source in content["sources"])
    assert all(path.startswith("vllm/") and why for path, why in content["skipped"].items())


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
def test_the_supported_releases_ask_for_nothing_else(
    version: str, real_tree: Callable[[str], Tree]
) -> None:
    recipe = load_recipe("glm53-flash", REPOSITORY)
    shim = read_shim(recipe.series_file.parent / FILE)
    assert shim is not None
    found = real_tree(version)
    assert ray_findings(recipe, found) == ()
    # The check would see one: without a name that they do ask for it speaks.
    text = found.read("vllm/v1/executor/ray_utils.py").decode()
    assert "ray.cluster_resources" in {name for name, _ in used_names(ast.parse(text))}
    assert not replace(shim, names=shim.names - {"ray.cluster_resources"}).gives(
        "ray.cluster_resources"
    )


def test_it_is_part_of_an_audit(product: Product, tmp_path: Path) -> None:
    folder = product.root / "image" / "tiny"
    (folder / FILE).write_text('shim = "mentat"\nnames = ["ray.init"]\n')
    site = tmp_path / "site"
    files = tree(site, ray_utils="import ray\nray.shutdown()\n")
    (site / "vllm" / "_version.py").write_text("__version__ = '0.30.0'\n")
    assert files.identity.version == "0.30.0"
    ran = product.run("audit", "--tree", str(site), "--format", "json")
    (finding,) = ran.json["releases"][0]["findings"]
    assert (finding["code"], finding["line"]) == ("ray-name", 2)
    assert ran.code == 0
    assert "  i vLLM asks for ray.shutdown, which" in product.run("audit", "--tree", str(site)).out

"""Every flag, choice and variable of the entry point is known to each release that we build for.

Read from the wheels' sources. `imagebuild/deep/serving_flags.py` asks the real parser of a tree.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest
from serving import command
from serving.extra import RESERVED
from serving.knobs import DEPLOYMENTS
from serving.resolve import resolve
from serving.table import KNOBS

from imagebuild.deep.serving_flags import command_lines
from imagebuild.patching.tree import Tree

VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
# Where the frontend's flags are; the second is 0.33's.
FRONTEND = ("vllm/entrypoints/launchers/cli_args.py", "vllm/entrypoints/common/cli_args.py")
OURS = {"VLLM_GLM53_CUDA_SPARSE_MLA"}
# Given up upstream or not there yet in some release; refused all the same.
NOT_EVERYWHERE = {"--grpc", "--model"}
LITERALS = {
    "GLM_MOE_BACKEND": ("vllm/config/kernel.py", "MoEBackend"),
    "GLM_TOPK_BACKEND": ("vllm/config/kernel.py", "SparseIndexerTopkBackend"),
    "GLM_KV_CACHE_DTYPE": ("vllm/config/cache.py", "CacheDType"),
}


def parsed(tree: Tree, path: str) -> ast.Module:
    return ast.parse(tree.read(path))


def declared(tree: Tree) -> set[str]:
    """Flags that the sources add to the parser of `vllm serve`."""
    frontend = next(path for path in FRONTEND if tree.exists(path))
    found = set()
    for path in ("vllm/engine/arg_utils.py", frontend):
        for node in ast.walk(parsed(tree, path)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
            elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
                found |= set(fields(node))
    return found


def fields(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield f"--{item.target.id.replace('_', '-')}"


def literal(tree: Tree, path: str, name: str) -> set[str]:
    for node in parsed(tree, path).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    raise AssertionError(f"{path} has no {name}")


def test_command_lines_cover_what_they_should() -> None:
    lines = list(command_lines())
    texts = {" ".join(line) for line in lines}
    assert len(texts) == len(lines) > 50
    for word in ("--headless", "--no-enable-flashinfer-autotune", "--no-enable-prefix-caching",
                 "ray", '"method":"dflash"', '"method":"mtp"', "glm47_failclosed", "marlin",
                 "--trust-remote-code", "--enforce-eager"):  # fmt: skip
        assert [text for text in texts if word in text], word


@pytest.mark.parametrize("version", VERSIONS)
def test_every_flag_is_declared(real_tree: Callable[[str], Tree], version: str) -> None:
    known = declared(real_tree(version))
    assert len(known) > 200
    used = {word for line in command_lines() for word in line if word.startswith("--")}
    plain = {word.replace("--no-enable-", "--enable-") for word in used}
    assert plain - known == set()
    assert set(RESERVED) - known - NOT_EVERYWHERE == set()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LITERALS)
def test_every_choice_is_a_value_of_vllm(
    real_tree: Callable[[str], Tree], version: str, name: str
) -> None:
    known = literal(real_tree(version), *LITERALS[name])
    assert set(KNOBS[name].kind.name.split()) - known == set()


@pytest.mark.parametrize("version", VERSIONS)
def test_every_variable_is_one_of_vllm(real_tree: Callable[[str], Tree], version: str) -> None:
    text = real_tree(version).read("vllm/envs.py").decode()
    names = {knob.env for knob in KNOBS.values()}
    for deployment in DEPLOYMENTS:
        names |= set(command.environment(resolve({"GLM_DEPLOYMENT": deployment})))
    names |= {"VLLM_CACHE_ROOT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "VLLM_API_KEY"}
    missing = [name for name in names if name.startswith("VLLM_") and f'"{name}"' not in text]
    assert set(missing) - OURS == set()

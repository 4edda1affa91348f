"""The SM90 route on capability 12, and stock behaviour wherever it is not asked for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import ask
from imagebuild.patching.patch import Outcome
from tests.patches.harness import RUNTIME, VERSIONS, PatchContract, changed, extract, patched

CUDA = "vllm/platforms/cuda.py"
SM90 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py"
SM120 = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py"
NAME = "vllm_mla_sm90_on_sm12x"


class TestSm90Route(PatchContract):
    name = NAME
    upstream_fix = (
        (
            CUDA,
            r"^( +)(AttentionBackendEnum\.FLASHINFER_MLA_SPARSE_SM120,)$",
            r"\1AttentionBackendEnum.FLASHINFER_MLA_SPARSE_SM90,\n\1\2",
        ),
        (SM90, r"return capability\.major == 9$", "return capability.major in (9, 12)"),
        (SM90, r'backend="fa3",$', 'backend="auto",'),
    )


class Capability(NamedTuple):
    major: int
    minor: int


class Names:
    """Stands for the enum: each member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture(autouse=True)
def route_table(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNTIME))
    monkeypatch.delenv("GLM_MLA_ROUTE", raising=False)
    monkeypatch.delitem(sys.modules, "glm_mla_route", raising=False)
    quantized = SimpleNamespace(is_quantized_kv_cache=lambda dtype: dtype.startswith("fp8"))
    for name in ("vllm.utils.torch_utils", "vllm.v1.kv_cache_interface"):
        monkeypatch.setitem(sys.modules, name, quantized)
    for name in ("vllm", "vllm.utils", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def backends(tree, capability, **words):
    function = extract(tree, CUDA, "_get_backend_priorities", {"AttentionBackendEnum": Names()})
    return function(True, Capability(*capability), 16, "fp8", **words)


def admits(tree, major):
    scope = "FlashInferMLASparseSM90Backend.supports_compute_capability"
    owner = extract(tree, SM90, scope, {})
    return owner.supports_compute_capability(owner, Capability(major, 0))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize(
    ("route", "sparse"),
    [
        (None, "FLASHINFER_MLA_SPARSE_SM120"),
        ("", "FLASHINFER_MLA_SPARSE_SM120"),
        ("stock", "FLASHINFER_MLA_SPARSE_SM120"),
        ("cuda", "FLASHINFER_MLA_SPARSE_SM120"),
        ("sm90", "FLASHINFER_MLA_SPARSE_SM90"),
    ],
)
def test_list_on_12(real_tree, monkeypatch, *, version, minor, route, sparse):
    if route is not None:
        monkeypatch.setenv("GLM_MLA_ROUTE", route)
    tree = patched(NAME, real_tree(version))
    assert backends(tree, (12, minor)) == ["TRITON_MLA", sparse]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("route", ["stock", "sm90"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0)])
@pytest.mark.parametrize("head_size", [512, 576])
def test_lists_elsewhere_are_stock(
    real_tree, monkeypatch, *, version, route, capability, head_size
):
    stock = backends(real_tree(version), capability, head_size=head_size)
    monkeypatch.setenv("GLM_MLA_ROUTE", route)
    assert backends(patched(NAME, real_tree(version)), capability, head_size=head_size) == stock


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_route_stops(real_tree, version, monkeypatch):
    monkeypatch.setenv("GLM_MLA_ROUTE", "SM90")
    with pytest.raises(ValueError, match="GLM_MLA_ROUTE='SM90' names no route"):
        backends(patched(NAME, real_tree(version)), (12, 0))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("route", "majors"), [("stock", [9]), ("triton", [9]), ("sm90", [9, 12])])
def test_capability_gate(real_tree, version, route, majors, monkeypatch):
    monkeypatch.setenv("GLM_MLA_ROUTE", route)
    tree = patched(NAME, real_tree(version))
    assert [major for major in (8, 9, 10, 11, 12, 13) if admits(tree, major)] == majors


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("major", "kernels"), [(9, "fa3"), (12, "fa2")])
def test_kernels_that_the_state_asks_for(real_tree, version, major, kernels, monkeypatch):
    wrapper = MagicMock()
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.setitem(
            sys.modules, name, SimpleNamespace(BatchMLAPagedAttentionWrapper=wrapper)
        )
    torch = MagicMock()
    torch.cuda.get_device_capability.side_effect = lambda device: {"cuda:1": (major, 1)}[device]
    names = {"torch": torch, "_WORKSPACE_BYTES": 1}
    state = extract(patched(NAME, real_tree(version)), SM90, "_SM90State.__init__", names)
    state("cuda:1", 16, "bf16", 8, 2176, 512, 0, 1.0, 2048, 4)
    assert wrapper.call_args.kwargs["backend"] == kernels


@pytest.mark.parametrize("version", VERSIONS)
def test_note_says_that_a_stock_route_exists(real_tree, version):
    (note,) = TestSm90Route().patch.notes
    assert ask(note, real_tree(version)).outcome is Outcome.HOLDS


def test_note_is_silent_where_the_scale_format_is_not_passed(real_tree):
    change = (SM120, r"^ +kv_scale_format=self\.kv_scale_format,\n", "")
    (note,) = TestSm90Route().patch.notes
    assert ask(note, changed(real_tree("0.31.0"), [change])).outcome is Outcome.FAILS


def test_reason_reads_the_branch_of_12_only(real_tree):
    # The branch of Hopper names the SM90 backend a few lines further on in every release.
    text = real_tree("0.31.0").read(CUDA).decode()
    at = text.index("device_capability.major == 12")
    assert "FLASHINFER_MLA_SPARSE_SM90" in text[at : at + 600]
    assert ask(TestSm90Route().patch.effect, real_tree("0.31.0")).outcome is Outcome.FAILS

"""PDL stays on for capability 9 and 10 and goes off on 12."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.patches.harness import VERSIONS, PatchContract, extract, patched

PATH = "vllm/platforms/cuda.py"
SCOPE = "CudaPlatformBase.is_arch_support_pdl"


class TestPdlOff(PatchContract):
    name = "vllm_pdl_off_sm12x"
    upstream_fix = ((PATH, r"^        return major >= 9$", "        return major in (9, 10)"),)


def ask_method(tree, capability):
    def get_device_capability(device):
        assert device == 3
        return capability

    cuda = SimpleNamespace(current_device=lambda: 3, get_device_capability=get_device_capability)
    owner = extract(tree, PATH, SCOPE, {"torch": SimpleNamespace(cuda=cuda)})
    return owner.is_arch_support_pdl(owner)


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_by_capability(real_tree, version):
    wanted = {(8, 9): False, (9, 0): True, (10, 0): True, (10, 3): True, (11, 0): True}
    wanted |= {(12, 0): False, (12, 1): False}
    tree = patched(TestPdlOff.name, real_tree(version))
    assert {capability: ask_method(tree, capability) for capability in wanted} == wanted


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_answers_yes_on_12(real_tree, version):
    assert ask_method(real_tree(version), (12, 1)) is True


def test_no_device_means_no(real_tree):
    def broken():
        raise RuntimeError("no device")

    torch = SimpleNamespace(cuda=SimpleNamespace(current_device=broken))
    owner = extract(patched(TestPdlOff.name, real_tree("0.33.0")), PATH, SCOPE, {"torch": torch})
    assert owner.is_arch_support_pdl(owner) is False


def test_the_memoised_method_of_0_33_is_covered(real_tree):
    text = real_tree("0.33.0").read(PATH).decode()
    assert "    @classmethod\n    @cache\n    def is_arch_support_pdl" in text

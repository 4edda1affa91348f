"""The route that is asked for is the one that serves: vLLM's own choice and rows, or a stop."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest

from imagebuild.patching.evaluate import Verdict, ask, evaluate, fingerprint_of
from imagebuild.patching.patch import Answer, Outcome, Probe
from imagebuild.patching.series import Series
from imagebuild.patching.workspace import State
from tests.patches.harness import (
    RUNTIME,
    VERSIONS,
    PatchContract,
    changed,
    contexts,
    extract,
    patched,
    series_of,
    variant_of,
)

NAME = "vllm_mla_route_switch"
CUDA = "vllm/platforms/cuda.py"
MLA = "vllm/model_executor/layers/attention/mla_attention.py"
RAY = "vllm/ray/ray_env.py"
RAY_V2 = "vllm/v1/executor/ray_env_utils.py"
PLUGINS = "vllm/plugins/__init__.py"
REGISTRY = "vllm/v1/attention/backends/registry.py"
SM120, SM90 = "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90"
RAISES = (
    PLUGINS,
    r'^( +)logger\.exception\("Failed to load plugin %s", plugin\.name\)$',
    r"\g<0>\n\1raise",
)


class TestRouteSwitch(PatchContract):
    name = NAME
    upstream_fix = (
        RAISES,
        (MLA, r'^        "auto",\n        "fp8",\n        "fp8_e4m3",$', '        "auto",'),
        (RAY, r'^    "HUGGING_FACE_",$', '    "HUGGING_FACE_",\n    "GLM_",'),
    )


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNTIME))
    monkeypatch.delitem(sys.modules, "glm_mla_route", raising=False)
    for name in ("GLM_MLA_ROUTE", "VLLM_GLM53_CUDA_SPARSE_MLA", "VLLM_GLM53_NOPE_PE_PAD"):
        monkeypatch.delenv(name, raising=False)


def loaded(monkeypatch, tree, path, **modules):
    """Runs a whole upstream module that needs only a few others, which are stand-ins."""
    vllm = ModuleType("vllm")
    for name, module in modules.items():
        full = "vllm." + name.replace("__", ".")
        monkeypatch.setitem(sys.modules, full, module)
        setattr(vllm, name, module)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.utils", ModuleType("vllm.utils"))
    found = ModuleType("under_test")
    monkeypatch.setitem(sys.modules, "under_test", found)
    exec(compile(tree.read(path), path, "exec", dont_inherit=True), found.__dict__)
    return found


@pytest.fixture
def registry(monkeypatch):
    """The real enum and register_backend of a release."""

    def load(tree):
        logger = SimpleNamespace(init_logger=logging.getLogger)
        imports = SimpleNamespace(resolve_obj_by_qualname=None)
        return loaded(monkeypatch, tree, REGISTRY, logger=logger, utils__import_utils=imports)

    return load


class Capability(NamedTuple):
    major: int
    minor: int


class Config(NamedTuple):
    use_mla: bool = True
    use_sparse: bool = True
    block_size: int | None = None


class Chooser:
    """The real get_attn_backend_cls of a tree over one candidate."""

    def __init__(self, tree, member, major=12, declared=""):
        attributes = {"glm_mla_route": declared} if declared else {}
        attributes["validate_configuration"] = staticmethod(lambda **_words: [])
        self.cls = type("Served", (), attributes)
        self.member = member
        self.logger = MagicMock()
        names = {
            "logger": self.logger,
            "_get_attn_backend_class": lambda _member: self.cls,
            "_backend_cls_path": lambda cls: cls,
        }
        scope = "CudaPlatformBase.get_attn_backend_cls"
        self.choose = extract(tree, CUDA, scope, names).get_attn_backend_cls
        self.platform = SimpleNamespace(
            device_name="GPU",
            get_device_capability=lambda: Capability(major, 1),
            get_valid_backends=lambda **_words: (
                [SimpleNamespace(backend_class=self.cls, backend=member, priority=1)],
                {},
            ),
        )

    def __call__(self, *, by_name, config=None):
        selected = self.member if by_name else None
        found = self.choose(self.platform, selected, config or Config(), 16)
        assert found is self.cls

    @property
    def said(self):
        return [str(call.args[0]) for call in self.logger.info_once.call_args_list]


ROUTES = {"stock": (SM120, ""), "sm90": (SM90, ""), "cuda": (SM120, "cuda"),
          "triton": (SM120, "triton")}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("asked", ROUTES)
@pytest.mark.parametrize("chosen", ROUTES)
def test_each_route_serves_by_its_own_class_alone(
    real_tree, monkeypatch, registry, *, version, by_name, asked, chosen
):
    tree = patched(NAME, real_tree(version))
    backends = registry(tree)
    slot, declared = ROUTES[chosen]
    member = backends.AttentionBackendEnum[slot]
    if declared:
        backends.register_backend(member, f"glm53_sparse_mla.{declared}.Backend")
    choose = Chooser(tree, member, declared=declared)
    monkeypatch.setenv("GLM_MLA_ROUTE", asked)
    if asked == chosen:
        choose(by_name=by_name)
        assert sum(text.startswith(f"GLM_MLA_ROUTE={asked}: ") for text in choose.said) == 1
    else:
        with pytest.raises(ValueError, match=f"^GLM_MLA_ROUTE={asked} "):
            choose(by_name=by_name)
    # Asked for nothing, every one of them is taken without a word, as stock vLLM does.
    monkeypatch.delenv("GLM_MLA_ROUTE")
    quiet = Chooser(tree, member, declared=declared)
    quiet(by_name=by_name)
    assert not any("GLM_MLA_ROUTE" in text for text in quiet.said)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("major", [8, 9, 10, 12])
@pytest.mark.parametrize("asked", [*ROUTES, "nonsense"])
def test_other_attention_and_other_devices_are_left_alone(
    real_tree, monkeypatch, registry, *, version, major, asked
):
    tree = patched(NAME, real_tree(version))
    member = registry(tree).AttentionBackendEnum["FLASH_ATTN"]
    monkeypatch.setenv("GLM_MLA_ROUTE", asked)
    sparse, dense = Config(), Config(use_mla=False, use_sparse=False)
    for config in (sparse, dense) if major != 12 else (dense, Config(use_sparse=False)):
        Chooser(tree, member, major)(by_name=False, config=config)
        Chooser(tree, member, major)(by_name=True, config=config)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"GLM_MLA_ROUTE": "SM90"}, "GLM_MLA_ROUTE='SM90' names no route"),
        ({"VLLM_GLM53_CUDA_SPARSE_MLA": "1"}, "GLM_MLA_ROUTE=cuda needs a plug-in"),
        ({"VLLM_GLM53_CUDA_SPARSE_MLA": "1", "GLM_MLA_ROUTE": "stock"}, "contradict each other"),
        ({"VLLM_GLM53_NOPE_PE_PAD": "1"}, "VLLM_GLM53_NOPE_PE_PAD='1' is not supported"),
    ],
)
def test_faults_of_the_environment_stop_the_start(
    real_tree, monkeypatch, registry, *, version, environ, sentence
):
    tree = patched(NAME, real_tree(version))
    member = registry(tree).AttentionBackendEnum[SM120]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        Chooser(tree, member)(by_name=False)


@pytest.mark.parametrize("version", VERSIONS)
def test_f8_a_plug_in_that_does_not_import_is_swallowed_and_then_found_missing(
    real_tree, monkeypatch, registry, version
):
    tree = patched(NAME, real_tree(version))
    plugin = SimpleNamespace(name="glm53_sparse_mla", value="gone:register")
    plugin.load = MagicMock(side_effect=ImportError("is_quantized_kv_cache"))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [plugin])
    log = MagicMock()
    names = {"envs": SimpleNamespace(VLLM_PLUGINS=None), "logger": log, "Any": Any,
             "Callable": Callable, "DEFAULT_PLUGINS_GROUP": "vllm.general_plugins"}  # fmt: skip
    load = extract(tree, PLUGINS, "load_plugins_by_group", names)
    assert load("vllm.general_plugins") == {}
    assert log.exception.call_args.args[0] == "Failed to load plugin %s"
    monkeypatch.setenv("GLM_MLA_ROUTE", "cuda")
    member = registry(tree).AttentionBackendEnum[SM120]
    Chooser(real_tree(version), member)(by_name=False)  # stock serves what nobody asked for
    expected = "has not registered its backend in this process: look for 'Failed to load plugin'"
    with pytest.raises(ValueError, match=expected):
        Chooser(tree, member)(by_name=False)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "declared", "given", "stock", "ours"),
    [
        (SM120, "", "auto", "fp8_ds_mla", "fp8_ds_mla"),
        (SM120, "", "fp8", "fp8_ds_mla", "fp8_ds_mla"),
        (SM120, "", "bfloat16", "bfloat16", "bfloat16"),
        (SM120, "cuda", "auto", "fp8_ds_mla", "auto"),
        (SM120, "cuda", "fp8", "fp8_ds_mla", "fp8"),
        (SM120, "triton", "fp8_e4m3", "fp8_ds_mla", "fp8_e4m3"),
        (SM120, "cuda", "bfloat16", "bfloat16", "bfloat16"),
        (SM90, "", "fp8", "fp8", "fp8"),
        ("FLASHMLA_SPARSE", "", "fp8", "fp8_ds_mla", "fp8_ds_mla"),
    ],
)
def test_rows(real_tree, *, version, name, declared, given, stock, ours):
    served = {"glm_mla_route": declared} if declared else {}
    cls = SimpleNamespace(get_name=lambda: name, **served)
    quantized = {"is_quantized_kv_cache": lambda kind: kind.startswith("fp8")}

    def rows(tree):
        scope = "_canonicalize_sparse_mla_kv_cache_dtype"
        return extract(tree, MLA, scope, quantized)(cls, given)

    tree = real_tree(version)
    assert (rows(tree), rows(patched(NAME, tree))) == (stock, ours)


@pytest.mark.parametrize("version", VERSIONS)
def test_ray_copies_the_route(real_tree, monkeypatch, version):
    monkeypatch.setenv("GLM_MLA_ROUTE", "sm90")
    monkeypatch.setenv("VLLM_GLM53_CUDA_SPARSE_MLA", "0")
    envs = SimpleNamespace(
        VLLM_CONFIG_ROOT="/nowhere", environment_variables={"VLLM_PORT": None},
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY="", VLLM_RAY_EXTRA_ENV_VARS_TO_COPY="",
    )  # fmt: skip
    logger = SimpleNamespace(init_logger=lambda _name: MagicMock())

    def copied(tree):
        return loaded(monkeypatch, tree, RAY, envs=envs, logger=logger).get_env_vars_to_copy()

    tree = real_tree(version)
    assert copied(patched(NAME, tree)) - copied(tree) == {"GLM_MLA_ROUTE"}
    assert "VLLM_GLM53_CUDA_SPARSE_MLA" in copied(tree)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_second_executor_of_ray_copies_everything_already(real_tree, monkeypatch, version):
    monkeypatch.setenv("GLM_MLA_ROUTE", "sm90")
    names = {"os": os, "RAY_NON_CARRY_OVER_ENV_VARS": set()}
    get = extract(real_tree(version), RAY_V2, "get_driver_env_vars", names)
    assert get(set())["GLM_MLA_ROUTE"] == "sm90"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_edit_is_needed(real_tree, version):
    tree = real_tree(version)
    patch = series_of(NAME).patch(NAME)
    variant = variant_of(patch, tree)
    for left_out in variant.edits:
        rest = tuple(edit for edit in variant.edits if edit is not left_out)
        partial = dataclasses.replace(patch, variants=(dataclasses.replace(variant, edits=rest),))
        series = Series((series_of(NAME).patches[0], partial), {}, (), RUNTIME)
        reports = evaluate(series, tree, None, lambda _name, _range: None).reports
        assert reports[-1].verdict is Verdict.DEFEATED, left_out.label


@pytest.mark.parametrize("version", VERSIONS)
def test_each_cause_alone_is_reason_enough(real_tree, version):
    patch = series_of(NAME).patch(NAME)
    for kept in TestRouteSwitch.upstream_fix:
        fixes = [fix for fix in TestRouteSwitch.upstream_fix if fix is not kept]
        tree = changed(real_tree(version), fixes)
        assert ask(patch.reason, tree).outcome is Outcome.HOLDS, kept[0]
        assert ask(patch.absorbed, tree).outcome is Outcome.FAILS, kept[0]


@pytest.mark.parametrize(
    "change",
    [
        (RAY, r"^DEFAULT_EXTRA_ENV_VARS: set\[str\] = \{$", "DEFAULT_EXTRA_ENV_VARS = set() | {"),
        (PLUGINS, r"func = plugin\.load\(\)", "func = load(plugin)"),
        (MLA, r"^    backend_name = attn_backend\.get_name\(\)$", "    backend_name = name()"),
    ],
)
def test_what_cannot_be_followed_is_unknown(real_tree, change):
    tree = changed(real_tree("0.33.0"), [change])
    assert ask(series_of(NAME).patch(NAME).reason, tree).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("version", VERSIONS)
def test_f2_the_reason_of_the_seed_is_gone(real_tree, version):
    """The seed puts SM90 on 12 because the engine dies on the stock route; it does not any more."""
    tree = real_tree(version)
    patch = series_of("vllm_mla_sm90_on_sm12x").patch("vllm_mla_sm90_on_sm12x")
    (stock,) = patch.notes

    def dies(one):
        answer = ask(stock, one)
        return Answer.of(answer.outcome is Outcome.FAILS, answer.evidence)

    reason = Probe("the stock route of capability 12 cannot take this model", dies, stock.paths)
    seeds = dataclasses.replace(patch, reason=reason)
    variant = variant_of(patch, tree)
    found = {str(symbol): fingerprint_of(tree, symbol) for symbol in contexts(variant)}
    series = Series((seeds,), {}, (), RUNTIME)
    (report,) = evaluate(series, tree, None, lambda _name, _range: found).reports
    # Text and context are as they were: only the reason tells.
    assert {edit.state for edit in report.edits} == {State.PENDING}
    assert all(context.found == context.locked for context in report.contexts)
    assert (report.verdict, report.exit_code) == (Verdict.REASON_GONE, 1)
    assert any(finding.code == "reason-gone" for finding in report.findings)

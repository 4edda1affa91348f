"""Each thing that a machine can lack is one sentence before the start, and all come at once."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from serving import preflight
from serving.errors import CheckError
from serving.machine import Machine, MachineError
from serving.profiles import GIB
from serving.resolve import resolve

from tests.image.serving.machines import checkpoint, environ, gpus, machine, site


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path / "model")
    site(tmp_path / "site")
    return tmp_path


def check(folder, deployment="rtx6000-4x", knobs=None, **changed):
    plan = resolve(environ(deployment, folder, **(knobs or {})))
    return preflight.check(plan, machine(deployment, **changed), site=folder / "site")


def problems(folder, deployment="rtx6000-4x", knobs=None, **changed):
    with pytest.raises(CheckError) as caught:
        check(folder, deployment, knobs, **changed)
    return caught.value.problems


@pytest.mark.parametrize("deployment", ["rtx6000-4x", "gb10-2x"])
def test_all_is_well(folder, deployment):
    ready = check(folder, deployment)
    assert ready.moe_backend == "flashinfer_cutlass"
    assert b"<think>" in ready.template
    assert ready.notices == ()


GPU_CASES = [
    ({"error": "nvidia-smi cannot be run: No such file"}, "no GPU can be seen"),
    ({"cards": gpus("rtx6000-4x")[:3]}, "expected 4 GPUs for rtx6000-4x, found 3"),
    ({"busy": ("17", "23")}, "in use by 17, 23"),
    ({"cards": gpus("rtx6000-4x", driver="575.57")}, "CUDA 13 needs 580"),
    ({"cards": gpus("rtx6000-4x", driver="N/A")}, "CUDA 13 needs 580"),
    ({"cards": gpus("rtx6000-4x", memory=32 * GIB)}, "expected 94 GiB, found 32.0"),
    ({"cards": gpus("rtx6000-4x", capability="9.0")}, "expected compute capability 12.0"),
    ({"shm": 64 << 20}, "/dev/shm: expected 2 GiB, found 0.06"),
    ({"taken": frozenset({8002})}, "GLM_API_PORT=8002 is in use"),
    ({"space": 1 << 20}, "10 GiB of space"),
    ({"commands": frozenset()}, "there is no command vllm"),
]


@pytest.mark.parametrize(("changed", "part"), GPU_CASES)
def test_machine_that_lacks_something(folder, changed, part):
    found = problems(folder, **changed)
    assert part in found[0]


def test_gb10_is_asked_for_its_own(folder):
    limits = {resource.RLIMIT_MEMLOCK: 8 << 20}
    (sentence,) = problems(folder, "gb10-2x", limits=limits)
    assert "memlock=-1" in sentence
    (sentence,) = problems(folder, "gb10-2x", meminfo={"MemTotal": 96 * GIB, "MemFree": 96 * GIB})
    assert "expected 119 GiB of memory, found 96.0" in sentence
    (sentence,) = problems(folder, "gb10-2x", taken=frozenset({29501}))
    assert "GLM_MASTER_PORT" in sentence


def test_notices(folder):
    ready = check(folder, limits={resource.RLIMIT_CORE: -1}, filesystem_type="nfs4",
                  cards=gpus("rtx6000-4x", name="NVIDIA RTX 5090"))  # fmt: skip
    one, _two, _three, _four, core, disk = ready.notices
    assert "GPU 0 is a NVIDIA RTX 5090" in one
    assert "ulimit core=0" in core
    assert "is on nfs4" in disk


def test_warn_starts_with_a_faulty_machine_but_not_with_a_faulty_checkpoint(folder):
    warn = {"GLM_PREFLIGHT": "warn"}
    ready = check(folder, knobs=warn, shm=0, busy=("17",))
    assert len([notice for notice in ready.notices if "(GLM_PREFLIGHT=warn)" in notice]) == 2
    (folder / "model" / "config.json").unlink()
    (sentence,) = problems(folder, knobs=warn, shm=0)
    assert "config.json" in sentence


def test_everything_at_once(folder):
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model" / "config.json").write_text("{")
    knobs = {"GLM_API_KEY_FILE": "/nowhere"}
    found = problems(folder, knobs=knobs, shm=0, busy=("17",), taken=frozenset({8002}))
    texts = "\n".join(found)
    for part in ("in use by 17", "/dev/shm", "GLM_API_PORT", "config.json", "chat template",
                 "GLM_API_KEY_FILE=/nowhere"):  # fmt: skip
        assert part in texts


class TestTree:
    def test_changed_after_the_build(self, folder):
        (folder / "site" / "vllm" / "patched.py").write_text("answer = 41\n")
        (sentence,) = problems(folder)
        assert "patched.py is not as the build left it" in sentence

    def test_no_manifest_or_a_broken_one(self, folder):
        path = folder / "site" / ".imagebuild" / "manifest.json"
        for data in (b"{", b"[]", b'{"files": []}', b'{"files": {"a": 5}}'):
            path.write_bytes(data)
            (sentence,) = problems(folder)
            assert "manifest cannot be read" in sentence
        path.unlink()
        (sentence,) = problems(folder)
        assert "not a patched one" in sentence

    def test_route_without_its_package(self, folder):
        (folder / "site" / "glm53_sparse_mla").rmdir()
        (sentence,) = problems(folder)
        assert "route cuda needs the package glm53_sparse_mla" in sentence
        assert check(folder, knobs={"GLM_MLA_ROUTE": "stock"})


class TestTemplate:
    def test_in_the_tokenizer_configuration(self, folder):
        path = folder / "model" / "chat_template.jinja"
        text = path.read_text()
        expected = check(folder).template
        path.unlink()
        (folder / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
        assert check(folder).template == expected

    def test_none_or_one_that_cannot_be_edited(self, folder):
        path = folder / "model" / "chat_template.jinja"
        path.write_text("{{ bos_token }}")
        assert any("glm_chat_template.py" in sentence for sentence in problems(folder))
        path.unlink()
        (sentence,) = problems(folder)
        assert "expected a chat template in" in sentence

    def test_of_the_user(self, folder):
        own = folder / "own.jinja"
        (folder / "model" / "chat_template.jinja").rename(own)
        assert check(folder, knobs={"GLM_CHAT_TEMPLATE_FILE": str(own)}).template


class TestDrafter:
    DFLASH = {"GLM_SPECULATION": "dflash2"}  # noqa: RUF012

    def test_missing(self, folder):
        (sentence,) = problems(folder, knobs=self.DFLASH)
        assert "expected the DFlash2 drafter" in sentence

    def test_licence_is_shown(self, folder):
        checkpoint(folder / "drafter")
        ready = check(folder, knobs=self.DFLASH)
        assert "CC BY-NC-ND" in ready.notices[0]


class TestKey:
    @pytest.mark.parametrize("data", [b"", b"\n", b"a b\n", b"a\nb\n", b"\xff"])
    def test_file_that_holds_no_key(self, folder, data):
        (folder / "key").write_bytes(data)
        (sentence,) = problems(folder, knobs={"GLM_API_KEY_FILE": str(folder / "key")})
        assert "GLM_API_KEY_FILE=" in sentence

    def test_key(self, folder):
        (folder / "key").write_text("hunter2\n")
        knobs = {"GLM_API_KEY_FILE": str(folder / "key")}
        assert preflight.api_key(resolve(environ("rtx6000-4x", folder, **knobs))) == "hunter2"


def test_page_cache_is_dropped_on_unified_memory_only(folder):
    checkpoint(folder / "model", size=150 * GIB)
    low = {"MemTotal": int(121.69 * GIB), "MemFree": 10 * GIB}
    plan = resolve(environ("gb10-4x", folder, GLM_SPECULATION="mtp") | {"GLM_DRAFTER_DIR": ""})
    gb10 = machine("gb10-4x", meminfo=low)
    notices = preflight.check(plan, gb10, site=folder / "site").notices
    assert "10 GiB were free of 64" in notices[0]
    assert [path.name[:11] for path in gb10.forgotten] == ["model-00001", "model-00002"]
    rtx = machine("rtx6000-4x", meminfo=low)
    preflight.check(resolve(environ("rtx6000-4x", folder)), rtx, site=folder / "site")
    assert rtx.forgotten == []


class TestMachine:
    """The real one, as far as this machine has it."""

    def stand_in(self, tmp_path, monkeypatch, script):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")

    def test_gpus(self, tmp_path, monkeypatch):
        line = "0, NVIDIA GB10, 12.1, [N/A], 580.95.05"
        self.stand_in(tmp_path, monkeypatch, f"echo '{line}'")
        (gpu,) = Machine().gpus()
        assert (gpu.name, gpu.capability, gpu.memory) == ("NVIDIA GB10", "12.1", 0)

    def test_tool_that_fails_or_changed(self, tmp_path, monkeypatch):
        self.stand_in(tmp_path, monkeypatch, "echo 'driver mismatch' >&2; exit 18")
        with pytest.raises(MachineError, match="ended with 18: driver mismatch"):
            Machine().gpus()
        self.stand_in(tmp_path, monkeypatch, "echo '0, GB10'")
        with pytest.raises(MachineError, match="expected 5 fields"):
            Machine().gpus()
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(MachineError, match="cannot be run"):
            Machine().gpus()

    def test_files(self, tmp_path):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "meminfo").write_text("MemTotal:  10 kB\nHugePages_Total: 0\n")
        (tmp_path / "proc" / "mounts").write_text("a / ext4 rw\nb /models nfs4 ro\n")
        one = Machine(tmp_path)
        assert one.memory()["MemTotal"] == 10240
        assert one.filesystem(Path("/models/glm")) == "nfs4"
        assert one.filesystem(Path("/modelsx")) == "ext4"

    def test_ports_and_space(self, tmp_path):
        one = Machine()
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            port = busy.getsockname()[1]
            assert not one.is_free("127.0.0.1", port)
        assert one.is_free("127.0.0.1", port)
        assert one.free(tmp_path / "not" / "there") > 0
        assert one.is_writable(tmp_path / "not" / "there")
        file = tmp_path / "file"
        file.write_bytes(b"x")
        assert not one.is_writable(file / "below")
        one.forget([file, tmp_path / "gone"])
